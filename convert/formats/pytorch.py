"""PyTorch's own files, .pth .pt .th .tar .bin, and TorchScript's: zip archives or, before 1.6, streams; a pickle describes the tensors.

The pickle is read as data, see `convert.formats._torchpickle`; torch is not needed for it. Of a module that was saved whole and of a
TorchScript program, .pt or .ts, the tensors are read and nothing else; any other file that needs more than tensors could run code and is
refused.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert._guard import MAX_TENSORS
from convert.core import strip_wrappers
from convert.formats import _script, _sharded
from convert.formats._picklearrays import Call
from convert.formats._torch import numpy_dtype
from convert.formats._torchpickle import STREAM, Described, Odd, Opened, array, extent, opened, unsafe
from convert.kinds import is_mapping
from convert.sets import is_averaged, suffixes
from convert.source import Part, Source, Stored
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat
from weights.header import DTYPES

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("convert")

NESTED = ("state_dict", "model_state_dict", "model", "net", "network", "state_dict_ema", "model_ema", "ema")
"""Where training scripts put the state dict, the likelier first. Where averaged weights lie beside the plain ones, both are read."""

KNOWN = {name for _, name in DTYPES.values()} | {"complex128"}

HELD = ("_parameters", "_buffers", "_modules")
"""Where a module that was pickled whole keeps its tensors."""

SUFFIXES = (".pth", ".pt", ".th", ".pth.tar", ".bin", ".ckpt", ".tar")
WRITES = True


def sniff(path: Path, head: bytes) -> bool:
    """Tell a PyTorch file: an archive that holds data.pkl, a stream that begins with torch's magic number, or a bare pickle of it.

    A program of TorchScript's begins with the first of its tensors, its code, or what its code needs.
    """
    if head.startswith(STREAM) or _sharded.sniff(head, b".bin"):
        return True
    if not head.startswith(b"PK\3\4"):
        return head[257:262] == b"ustar" and path.name.endswith(SUFFIXES)
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    program = re.fullmatch(rb"[^/]+/(data/\d+|constants(\.pkl|/\d+)|code/.+)", name) is not None
    return (
        program
        or name.endswith((b"/data.pkl", b"/.format_version", b"/.storage_alignment", b"/byteorder", b"/version"))
        or path.name.endswith(SUFFIXES)
    )


def read(path: Path, data: Buffer | None = None) -> Source:
    """Open a PyTorch file, on the CPU, without running any code of it; tensors are read one by one.

    Looks for the state dict under the keys of `NESTED`, takes away the prefixes of DataParallel and torch.compile, and drops what is
    no tensor. Of a program of TorchScript's the tensors that its modules hold are read.

    Args:
        path: the file.
        data: its bytes, where they were read already, to be hashed for example; the file is then not opened.

    Raises:
        UnsafeFormat: the file needs a class or function that could do anything; the message names it.
        UnsupportedFormat: sparse, quantised or meta tensors.
        LimitExceeded: it asks for far more memory than the file has bytes.
        MalformedFile: it is cut short, damaged, or holds no tensors.
        OSError: it can't be opened.
    """
    path = Path(path)
    if data is None and path.name.endswith(".json"):
        return _sharded.read(path, read)
    view = _mapped(path) if data is None else memoryview(data).cast("B")
    found = opened(view, path)
    try:
        if found.program and found.strange:
            raise unsafe(path, found.strange)
        held = _script.tensors(found.content, path) if found.program else _state_dict(found, path)
        tensors = strip_wrappers(dict(_checked(held, found, len(view), path)))
    except RecursionError as error:
        raise LimitExceeded(f"{path} nests deeper than any network does") from error
    if found.program:
        notes = ["the code of the program was neither read nor run"]
        return Source(path, "pytorch", "TorchScript", tensors, facts={"program": _script.program(found.content)}, notes=notes)
    return Source(path, "pytorch", "PyTorch", tensors)


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write a state dict that ``torch.load(path, weights_only=True)`` reads; it has no place for `metadata`.

    Raises:
        ConvertError: kernels of true convolution were asked for, which PyTorch has no layer for.
    """
    import torch

    from convert._guard import correlation_only
    from convert.formats._outlet import outlet
    from convert.formats._torch import as_tensor

    del metadata
    correlation_only(convention, "PyTorch")
    tensors = {f"{part.name}.{leaf}": as_tensor(stored.array()) for part in parts for leaf, stored in part.leaves.items()}
    with outlet(path) as file:  # a path would be written into the archive as the name of its folder
        torch.save(tensors, file)  # pyright: ignore[reportArgumentType]  # it writes, and is asked for nothing else


def _mapped(path: Path) -> memoryview:
    """Map a file, copy-on-write: torch has no tensors that can't be written."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _mapping(value: Any) -> Mapping[Any, Any] | None:
    """See a dict in what the pickle holds: OrderedDict is a record with items."""
    if isinstance(value, Call):
        return value.items if str(value.what).startswith("collections.") and (value.items or not value.arguments) else None
    return value if is_mapping(value) else None


def _state_dict(file: Opened, path: Path) -> Mapping[Any, Any]:
    """Find the mapping that holds tensors: a state dict, or what a module that was saved whole has in it."""
    loaded = file.content
    for _ in range(3):  # {"model": {"state_dict": …}} is as deep as they go
        if (whole := _module_state(loaded)) is not None:
            log.info("%s is a module saved whole: its tensors are read, its class %s is not", path, _kind(loaded))
            return dict(_of_module(whole, "", [0]))
        outer = _mapping(loaded)
        if outer is None:
            break
        key = next((key for key in NESTED if _mapping(outer.get(key)) or _module_state(outer.get(key)) is not None), None)
        if key is None and not file.strange:
            return outer
        if key is None:
            break
        if _module_state(outer[key]) is None and file.strange:
            break
        if _module_state(outer[key]) is None and (twins := _twins(outer, key)):
            return {f"{name}.{own}": value for name in (key, *twins) for own, value in (_mapping(outer[name]) or {}).items()}
        log.debug("%s: leaving out %s beside the weights", path, ", ".join(str(other)[:40] for other in outer if other != key))
        loaded = outer[key]
    if file.strange:
        raise unsafe(path, file.strange)
    raise MalformedFile(f"{path} holds a {_kind(loaded)}, not a state dict")


def _module_state(value: Any) -> Mapping[Any, Any] | None:
    """Return what a module that was pickled whole keeps: its parameters, buffers and modules, by torch's names for these; else None."""
    state = value.state if isinstance(value, Call) else None
    known = is_mapping(state) and all(_mapping(state.get(key)) is not None or state.get(key) == {} for key in HELD)
    return state if known else None


def _of_module(state: Mapping[Any, Any], prefix: str, visits: list[int]) -> Iterator[tuple[str, Any]]:
    """List the tensors of a module's state and of those of its modules, as its state dict would."""
    visits[0] += 1
    if visits[0] > MAX_TENSORS:
        raise LimitExceeded(f"it nests more than {MAX_TENSORS} modules")
    parameters, buffers, modules = (_mapping(state.get(key)) or {} for key in HELD)
    passing = state.get("_non_persistent_buffers_set")
    fleeting = passing.elements or [one for row in passing.arguments[:1] for one in row] if isinstance(passing, Call) else ()
    for name, value in (*parameters.items(), *((name, value) for name, value in buffers.items() if name not in fleeting)):
        if value is not None:
            yield f"{prefix}{name}", value
    for name, module in modules.items():
        inner = _module_state(module)
        if inner is not None:
            yield from _of_module(inner, f"{prefix}{name}.", visits)


def _twins(outer: Mapping[Any, Any], key: str) -> list[str]:
    """Name the averaged weights beside the plain ones, which have tensors of the same names: both are read, see `convert.sets`."""
    wanted = suffixes(name for name in _mapping(outer[key]) or {} if isinstance(name, str))
    beside = (name for name in outer if isinstance(name, str) and name != key and is_averaged(name))
    return [
        name for name in beside if (own := _mapping(outer[name])) and suffixes(n for n in own if isinstance(n, str)).keys() == wanted.keys()
    ]


def _kind(value: Any) -> str:
    if isinstance(value, Described | Odd):
        return "Tensor"
    return str(value.what)[:100] if isinstance(value, Call) else type(value).__name__


def _checked(found: Mapping[Any, Any], file: Opened, size: int, path: Path) -> Iterator[tuple[str, Stored]]:
    """Keep the tensors, each within its storage."""
    dropped: list[str] = []
    total = kept = 0
    for name, value in found.items():
        if not isinstance(value, Described | Odd) or not isinstance(name, str):
            dropped.append(str(name)[:100])
            continue
        if isinstance(value, Odd) or value.dtype not in KNOWN:
            kind = value.what if isinstance(value, Odd) else value.dtype
            raise UnsupportedFormat(f"{path}: {name} is not a dense tensor on the CPU but {kind}")
        try:
            size_bytes, held = extent(value)
        except MalformedFile as error:
            raise type(error)(f"{path}: {name}, {error}") from error
        total, kept = total + size_bytes, kept + 1
        if size_bytes > held or total > 2 * size + 2**20:
            raise LimitExceeded(f"{path}: {name}, shape {value.shape}, would unfold to {total} bytes; the file has {size}")
        if kept > MAX_TENSORS:
            raise LimitExceeded(f"{path} has more than {MAX_TENSORS} tensors")
        file.bytes_of(value.storage)  # they must be there
        kernel = name.endswith("weight") and len(value.shape) > 2
        dtype = numpy_dtype(value.dtype).newbyteorder(">" if file.big_endian else "=")
        yield name, Stored(name, value.shape, dtype, partial(array, value, file), convention="correlation" if kernel else None)
    if dropped:
        log.info("%s: left out what is no tensor: %s", path, ", ".join(dropped[:10]))
    if not kept:
        keys = ", ".join(str(key)[:40] for key in list(found)[:10])
        raise MalformedFile(f"{path} holds no tensors; its keys are: {keys or 'none'}")
