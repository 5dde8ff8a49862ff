"""PyTorch's own files, .pth .pt .th .tar .bin: zip archives or, before 1.6, streams; both describe tensors by a pickle.

The pickle is read by torch's restricted unpickler only. A file that needs anything else could run code and is refused.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import threading
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from convert.core import strip_wrappers
from convert.formats import safetensors
from convert.source import Part, Source
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

if TYPE_CHECKING:
    from torch import Tensor

    from convert.formats.safetensors import Buffer

log = logging.getLogger("convert")

NESTED = ("state_dict", "model_state_dict", "model", "net", "network", "state_dict_ema", "model_ema", "ema")
"""Where training scripts put the state dict, the likelier first; averaged weights only where there are no plain ones."""

# Training scripts store scores as NumPy scalars and settings as a Namespace. We want neither, so their names lead to a
# stand-in that holds nothing and does nothing: no code of NumPy ever sees what the file says.
INERT = (
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(f"numpy.dtypes.{kind}DType" for kind in ("Bool", "Int32", "Int64", "Float32", "Float64")),
)
# torch keeps what it allows in one global set, and the context that extends it is not made for threads
_allowing = threading.Lock()


class _Inert:
    """What an allowed name that we have no use for becomes."""

    def __init__(self, *args: object) -> None: ...

    def __new__(cls, *args: object) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...


SUFFIXES = (".pth", ".pt", ".th", ".pth.tar", ".bin", ".ckpt", ".tar")
WRITES = True


def sniff(path: Path, head: bytes) -> bool:
    """Tell a PyTorch file: an archive that holds data.pkl, a stream that begins with torch's magic number, or a bare pickle of it."""
    if head.startswith(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."):
        return True
    if not head.startswith(b"PK\3\4"):
        return head[257:262] == b"ustar" and path.name.endswith(SUFFIXES)
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return name.endswith((b"/data.pkl", b"/.format_version", b"/.storage_alignment", b"/byteorder", b"/version")) or path.name.endswith(
        SUFFIXES
    )


def read(path: Path) -> Source:
    """Open a PyTorch file: archives are mapped and read tensor by tensor, older streams at once.

    Raises:
        ConvertError: as `state_dict` does.
    """
    from convert.formats._torch import stored

    tensors = state_dict(path)
    return Source(path, "pytorch", "PyTorch", {name: stored(name, tensor) for name, tensor in tensors.items()})


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write a state dict that ``torch.load(path, weights_only=True)`` reads; it has no place for `metadata`.

    Raises:
        ConvertError: kernels of true convolution were asked for, which PyTorch has no layer for.
    """
    import torch

    from convert.formats._guard import correlation_only
    from convert.formats._torch import as_tensor

    del metadata
    correlation_only(convention, "PyTorch")
    tensors = {f"{part.name}.{leaf}": as_tensor(stored.array()) for part in parts for leaf, stored in part.leaves.items()}
    with path.open("wb") as file:  # a path would be written into the archive as the name of its folder
        torch.save(tensors, file)


def state_dict(path: Path, data: Buffer | None = None) -> dict[str, Tensor]:
    """Read the state dict of a PyTorch file, on the CPU, without running any code of the file.

    Looks for it under the keys of `NESTED`, takes away the prefixes of DataParallel and torch.compile, and drops what is
    no tensor. Every tensor is contiguous and has memory of its own.

    Args:
        path: the file.
        data: its bytes, where they were read already, to be hashed for example; the file is then not opened again.

    Raises:
        UnsafeFormat: the file needs a class or function that could do anything; the message names it.
        UnsupportedFormat: TorchScript, or sparse, quantised or meta tensors.
        LimitExceeded: it asks for far more memory than the file has bytes.
        MalformedFile: it is cut short, damaged, or holds no tensors.
        OSError: it can't be opened.
    """
    path = Path(path)
    size = path.stat().st_size if data is None else memoryview(data).nbytes
    found = _state_dict(_load(path, size, data), path)
    return strip_wrappers(_checked(found, size, path))


def to_safetensors(source: Path, destination: Path) -> None:
    """Rewrite a PyTorch file as safetensors; raises as `state_dict` does."""
    safetensors.save(state_dict(source), destination)


def _load(path: Path, size: int, data: Buffer | None) -> Any:
    import torch

    with path.open("rb") if data is None else io.BytesIO(data) as file:
        head = file.read(262)
        if head.startswith(b"PK\3\4"):
            _check_archive(file, path, size)
        elif not head.startswith(b"\x80") and head[257:] != b"ustar":  # a tar is explained below
            raise MalformedFile(f"{path} is no PyTorch file: it {f'starts with {head[:16]!r}…' if head else 'is empty'}")
        file.seek(0)
        mapped = data is None and head.startswith(b"PK\3\4")  # what isn't used, isn't read
        with _allowing, torch.serialization.safe_globals([(_Inert, name) for name in INERT]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's are about sparse and quantised tensors, which are refused afterwards
            try:
                return torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
            except MemoryError as error:
                raise LimitExceeded(f"{path} asks for more memory than there is") from error
            except Exception as error:  # a damaged pickle can fail in any way whatever
                raise _explained(error, path) from error


def _explained(error: Exception, path: Path) -> Exception:
    said = str(error).rpartition("WeightsUnpickler error: ")[2]  # before it, advice to load the file without safety
    if isinstance(error, pickle.UnpicklingError):
        if name := re.search(r"GLOBAL ([A-Za-z_][\w.]*)", said):
            return UnsafeFormat(
                f"{path} holds more than tensors: reading it would call {name[1]}, which could run any code, so it is not opened. "
                "Ask its author for the state dict alone, best as safetensors."
            )
        if "Can only" in said or "whose module" in said:
            return UnsafeFormat(f"{path} holds more than tensors and is not opened: {said.splitlines()[0]}")
    if ".tar format" in said:
        return UnsupportedFormat(f"{path} is a tar archive from before PyTorch 0.1.10; save it again with a newer torch")
    if "TorchScript" in said:
        return UnsupportedFormat(f"{path} is a TorchScript program, not weights; save the state_dict of the module that it holds")
    if "can't allocate memory" in said:
        return LimitExceeded(f"{path} asks for more memory than there is")
    first = next((line.strip(" .")[:200] for line in said.splitlines() if line.strip()), "")
    if " " not in first or "operand" in first or not isinstance(error, (pickle.UnpicklingError, RuntimeError, OSError)):
        first = "its pickle is damaged"  # what the unpickler stumbled over says nothing to who has the file
    return MalformedFile(f"{path} is no readable PyTorch file: {first}. Is it cut short? Fetch it again.")


def _check_archive(file: BinaryIO, path: Path, size: int) -> None:
    """Refuse an archive that unpacks to more than it is: torch stores tensors uncompressed."""
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
        raise MalformedFile(f"{path} is no readable PyTorch file: {error}. Is it cut short? Fetch it again.") from error
    if unpacked > size:
        raise LimitExceeded(f"{path} has {size} bytes and would unpack to {unpacked}: PyTorch does not compress tensors")


def _state_dict(loaded: Any, path: Path) -> Mapping[Any, Any]:
    """Find the mapping that holds tensors."""
    for _ in range(3):  # {"model": {"state_dict": …}} is as deep as they go
        if not isinstance(loaded, Mapping):
            break
        inner = next((loaded[key] for key in NESTED if isinstance(loaded.get(key), Mapping) and loaded[key]), None)
        if inner is None:
            return loaded
        log.debug("%s: leaving out %s beside the weights", path, ", ".join(str(key) for key in loaded if loaded[key] is not inner))
        loaded = inner
    raise MalformedFile(f"{path} holds a {type(loaded).__name__}, not a state dict")


def _checked(found: Mapping[Any, Any], size: int, path: Path) -> dict[str, Tensor]:
    """Keep the tensors, each within its storage, contiguous and alone in it."""
    import torch

    kept: dict[str, Tensor] = {}
    dropped: list[str] = []
    owners: set[int] = set()
    total = 0
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            dropped.append(str(name))
            continue
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            raise UnsupportedFormat(f"{path}: {name} is not a dense tensor on the CPU but {value.dtype}, {value.layout}, {value.device}")
        tensor = value.detach()
        held = tensor.untyped_storage().nbytes()
        strides, shape, offset = tensor.stride(), tensor.shape, tensor.storage_offset()
        last = offset + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
        if min(strides, default=0) < 0 or offset < 0 or (tensor.numel() and (last + 1) * tensor.itemsize > held):
            raise MalformedFile(f"{path}: {name}, shape {tuple(shape)}, reaches outside its {held} bytes")
        total += tensor.nbytes
        if tensor.nbytes > held or total > 2 * size + 2**20:
            raise LimitExceeded(f"{path}: {name}, shape {tuple(shape)}, would unfold to {total} bytes; the file has {size}")
        # a tensor tied to another, or a slice of one, would be written with the whole of the other's memory, or not at all
        alone = tensor.is_contiguous() and tensor.nbytes == held and tensor.data_ptr() not in owners
        owners.add(tensor.data_ptr())
        kept[name] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
    if dropped:
        log.info("%s: left out what is no tensor: %s", path, ", ".join(dropped[:10]))
    if not kept:
        keys = ", ".join(str(key)[:40] for key in list(found)[:10])
        raise MalformedFile(f"{path} holds no tensors; its keys are: {keys or 'none'}")
    return kept
