"""What torch.save wrote, without torch: an archive or an older stream, whose pickle describes tensors and whose storages lie beside it.

The pickle is run by `convert.formats._picklemachine`, which calls nothing; a tensor is a dtype, a storage, an offset, a shape and strides,
and every one of them is checked against the bytes that are there.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from convert._guard import MAX_RANK
from convert.formats import _zipped
from convert.formats._picklearrays import Call, Name
from convert.formats._picklemachine import Machine
from convert.formats._torch import numpy_dtype
from convert.kinds import is_dict, is_list, is_row, is_tuple, is_view
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

MAGIC = 0x1950A86A20F9469CFC6C
STREAM = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
"""A pickled number with which files of before 1.6 begin."""
MAX_ENTRIES = 250_000
STORED = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip
"""Storages by the name of their class, without its ending."""
DTYPES = {*STORED.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"}

ALLOWED = re.compile(
    r"collections\.(OrderedDict|Counter)|_codecs\.encode|(builtins|__builtin__)\.(bytearray|set|complex)"
    r"|torch\.(Size|Tensor|device|nn\.parameter\.Parameter|serialization\._get_layout|_tensor\._rebuild_from_type_v2|_utils\._rebuild_\w+)"
    r"|torch\.(cuda\.)?[A-Z]\w*(Storage|Tensor)|torch\.storage\.(Typed|Untyped)Storage"
    r"|torch\.(b?float\d\w*|u?int\d+|bool|complex\d+|q?u?int\d\w*|bits\d\w*|per_\w+_affine\w*|per_tensor_symmetric|per_channel_symmetric)"
    r"|argparse\.Namespace|numpy\.(dtype|ndarray)|numpy\._?core\.multiarray\.(scalar|_reconstruct)"
    r"|numpy\.dtypes\.(Bool|Int32|Int64|Float32|Float64)DType"
)
"""What may be named, as torch's own restricted unpickler has it, and the scores and settings that training scripts keep. Nothing of it is
imported or called."""
RECONSTRUCTOR = re.compile(r"copy_?reg\._reconstructor")
"""With which old pickles make an object of a class, as newer ones do by an operation of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that tensors share: `count` elements from `start` of what the file keeps under `key`, which are `whole` in all."""

    key: str
    dtype: str
    count: int
    start: int
    whole: int


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor, as the pickle says it; nothing of it is checked yet."""

    dtype: str
    storage: Storage
    offset: Any
    shape: Any
    strides: Any


@dataclass(frozen=True, slots=True, eq=False)
class Odd:
    """A tensor that is no plain array: sparse, quantised, without numbers."""

    what: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A file: what its pickle holds, where a storage's bytes are, and whether it is a program of TorchScript's."""

    content: Any
    bytes_of: Callable[[Storage], memoryview]
    big_endian: bool = False
    strange: str = ""
    """The first thing that it names and no file of tensors needs: the class of a module that was saved whole, or something worse."""
    program: bool = False
    """Whether it is a program of TorchScript's."""


class _Torchs(Machine):
    """The machine of pickles, for those of torch.save."""

    allowed: ClassVar[re.Pattern[str]] = ALLOWED
    operations = 5_000_000
    more: ClassVar[dict[int, Callable[[Any], Any]]] = {ord("Q"): lambda machine: machine.push(machine.storage(machine.pop()))}

    def name(self, module: Any, attribute: Any) -> Name:
        whole = f"{module if isinstance(module, str) else bytes(module).decode('latin-1')}."
        whole += attribute if isinstance(attribute, str) else bytes(attribute).decode("latin-1")
        found = Name(*whole.rpartition(".")[::2])
        if not self.allowed.fullmatch(whole):
            self.strange[whole] = None
        return found

    def __init__(self, data: memoryview, path: Path) -> None:
        super().__init__(data, path)
        self.storages: dict[str, Storage] = {}
        self.strange: dict[str, None] = {}
        """Names of what no file of tensors needs, in their order: a module that was saved whole names its classes."""

    def run(self) -> Any:
        self.stack, self.memo = [], {}
        return super().run()

    def storage(self, told: Any) -> Storage | Name:
        match told:
            case ("module", Name() as kind, *_):  # before 1.6 a module's class came with its source
                return kind
            case _:
                pass
        found = self._storage(told)
        if found.key in self.storages and (self.storages[found.key].dtype, self.storages[found.key].whole) != (found.dtype, found.whole):
            raise MalformedFile(f"{self.path} describes the storage {found.key[:40]!r} in two ways")
        self.storages.setdefault(found.key, found)
        return found

    def _storage(self, told: Any) -> Storage:
        match told:
            case ("storage", Name() as kind, str() as key, str(), int() as count, *view):
                pass
            case _:
                raise MalformedFile(f"{self.path} refers to something that is no storage")
        dtype = STORED.get(kind.attribute.removesuffix("Storage"))
        if dtype is None:
            raise UnsupportedFormat(f"{self.path}: {kind} is not a dense tensor on the CPU")
        match view:
            case [] | [None]:
                return Storage(key, dtype, count, 0, count)
            case [(str(), int() as start, int() as size)]:  # before 0.4, a storage could be part of another
                return Storage(key, dtype, size, start, count)
            case _:
                raise MalformedFile(f"{self.path} refers to something that is no storage")

    def called(self, what: Any, arguments: Any) -> Any:
        if isinstance(what, Name) and str(what) in self.strange and not RECONSTRUCTOR.fullmatch(str(what)):
            raise unsafe(self.path, str(what))
        if not isinstance(what, Name) or not what.module.startswith("torch") or not is_tuple(arguments):
            return super().called(what, arguments)
        match what.attribute, arguments:
            case "_rebuild_from_type_v2", (Name() as function, _, inner, *_) if is_tuple(inner):
                return self.called(function, inner)
            case "_rebuild_parameter" | "_rebuild_parameter_with_state", ((Described() | Odd()) as tensor, *_):
                return tensor
            case "_rebuild_tensor", (Storage() as storage, offset, shape, strides):
                return Described(storage.dtype, storage, offset, shape, strides)
            case "_rebuild_tensor_v2", (Storage() as storage, offset, shape, strides, _, _, *metadata):
                return self._plain(Described(storage.dtype, storage, offset, shape, strides), metadata)
            case "_rebuild_tensor_v3", (Storage() as storage, offset, shape, strides, _, _, Name() as dtype, *metadata):
                if dtype.attribute not in DTYPES:
                    return Odd(str(dtype))
                return self._plain(Described(dtype.attribute, storage, offset, shape, strides), metadata)
            case "Size", (shape,) if is_row(shape):
                return tuple(shape)
            case _:
                return Odd(what.attribute.removeprefix("_rebuild_")) if "_rebuild" in what.attribute else Call(what, arguments)

    def _plain(self, tensor: Described, metadata: list[Any]) -> Described | Odd:
        """See that no bit says that the numbers are the conjugate or the negative of what is stored."""
        return Odd(f"with {metadata[0]!r:.60}") if metadata and metadata[0] else tensor

    def key(self, key: Any) -> Any:
        if is_view(key):  # what is too long for a word stays where it is
            raise LimitExceeded(f"{self.path} has a name of {len(key)} bytes")
        return key if isinstance(key, str | int | float | bool | None) else Odd("key")


def unsafe(path: Path, what: str) -> UnsafeFormat:
    """Say that a pickle would call what could run any code."""
    return UnsafeFormat(
        f"{path} holds more than tensors: reading it would call {what[:200]}, which could run any code, so it is not opened. "
        "Ask its author for the state dict alone, best as safetensors."
    )


class _Programs(_Torchs):
    """The same for those of torch.jit.save, which name the program's own classes: each is a record of what it holds, and nothing else."""

    allowed = re.compile(ALLOWED.pattern + r"|__torch__\.[\w.]+|torch\.jit\._pickle\.\w+")


def opened(data: memoryview, path: Path) -> Opened:
    """Read a file's pickle.

    Raises:
        ConvertError: it is damaged, could run code, or is of a kind that is not read; the message says which.
    """
    if bytes(data[:4]) == b"PK\3\4":
        return _archive(data, path)
    if bytes(data[257:262]) == b"ustar":
        raise UnsupportedFormat(f"{path} is a tar archive from before PyTorch 0.1.10; save it again with a newer torch")
    if bytes(data[:1]) != b"\x80":
        begins = f"it starts with {bytes(data[:16])!r}…" if data else "it is empty"
        raise MalformedFile(f"{path} is no PyTorch file: {begins}")
    return _stream(data, path)


def array(tensor: Described, source: Opened) -> np.ndarray:
    """Look at a tensor's numbers, which `extent` has found to be within its storage."""
    dtype = numpy_dtype(tensor.dtype)
    if source.big_endian:
        dtype = dtype.newbyteorder(">")
    flat: np.ndarray = (
        np.frombuffer(source.bytes_of(tensor.storage), dtype)[tensor.offset :] if math.prod(tensor.shape) else np.empty(0, dtype)
    )
    if dtype == np.bool_ and flat.size and flat.view(np.uint8).max() > 1:
        raise MalformedFile("a boolean tensor holds bytes other than 0 and 1")
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides) if flat.size else flat.reshape(tensor.shape)


def extent(tensor: Described) -> tuple[int, int]:
    """Tell a tensor's bytes and those of its storage.

    Raises:
        MalformedFile, LimitExceeded: its shape, strides and offset are none, or lead out of the storage.
    """
    shape, strides, offset, storage = tensor.shape, tensor.strides, tensor.offset, tensor.storage
    whole = (*shape, *strides, offset) if is_tuple(shape) and is_tuple(strides) else (None,)
    if not all(type(number) is int for number in whole) or len(shape) != len(strides) or min(shape, default=0) < 0:
        raise MalformedFile("has no shape")
    if len(shape) > MAX_RANK or max((*shape, *strides), default=0) > 2**62:
        raise LimitExceeded(f"has {len(shape)} axes; at most {MAX_RANK} are read")
    itemsize, held = numpy_dtype(tensor.dtype).itemsize, storage.count * numpy_dtype(storage.dtype).itemsize
    last = offset + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    within = 0 <= storage.start <= storage.start + storage.count <= storage.whole
    if not within or min(strides, default=0) < 0 or offset < 0 or (math.prod(shape) and (last + 1) * itemsize > held):
        raise MalformedFile(f"shape {shape}, reaches outside its {held} bytes")
    return math.prod(shape) * itemsize, held


def _run(machine: _Torchs) -> Any:
    """Run a pickle; what it stumbles over says nothing to who has the file."""
    try:
        return machine.run()
    except (UnsafeFormat, UnsupportedFormat, LimitExceeded):
        raise
    except (ConvertError, ValueError, TypeError, LookupError, OverflowError, struct.error, AttributeError) as error:
        raise _damaged(machine.path, "its pickle is damaged") from error


def _damaged(path: Path, what: str) -> MalformedFile:
    return MalformedFile(f"{path} is no readable PyTorch file: {what}. Is it cut short? Fetch it again.")


def _archive(data: memoryview, path: Path) -> Opened:
    members = _members(data, path)
    names = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise _damaged(path, f"the archive has {len(names) or 'no'} data.pkl")
    folder = names[0].removesuffix("data.pkl")
    order = bytes(members.get(f"{folder}byteorder", memoryview(b"little"))[:10])
    if order not in (b"little", b"big"):
        raise _damaged(path, f"its byte order is {order!r}")

    def bytes_of(storage: Storage) -> memoryview:
        found = members.get(f"{folder}data/{storage.key}")
        return _part(found if found is not None else memoryview(b""), storage, path)

    program = f"{folder}constants.pkl" in members
    machine = (_Programs if program else _Torchs)(members[names[0]], path)
    return Opened(_run(machine), bytes_of, order == b"big", next(iter(machine.strange), ""), program)


def _part(whole: memoryview, storage: Storage, path: Path) -> memoryview:
    width = numpy_dtype(storage.dtype).itemsize
    if len(whole) != storage.whole * width:
        raise _damaged(path, f"storage {storage.key[:40]!r} has {len(whole)} bytes where {storage.whole * width} are due")
    return whole[storage.start * width : (storage.start + storage.count) * width]


def _members(data: memoryview, path: Path) -> dict[str, memoryview]:
    """List an archive's files as views: stored as they are, each named once, none over another, all where the directory says."""
    try:
        listed = _zipped.listed(data, MAX_ENTRIES)
    except LimitExceeded as error:
        raise LimitExceeded(f"{path}: {error}") from error
    except MalformedFile as error:
        raise _damaged(path, str(error)) from error
    if any(info.filename.endswith("/constants.pkl") for info in listed):  # TorchScript compresses its code, which nobody reads here
        listed = [info for info in listed if not re.match(r"[^/]*/(code|extra)/", info.filename)]
    unpacked = sum(info.file_size for info in listed)
    if unpacked > len(data):
        raise LimitExceeded(f"{path} has {len(data)} bytes and would unpack to {unpacked}: PyTorch does not compress tensors")
    found: dict[str, memoryview] = {}
    end = 0
    for info in sorted(listed, key=lambda info: info.header_offset):
        head = bytes(data[info.header_offset : info.header_offset + 30])
        if info.header_offset < end or len(head) < 30 or head[:4] != b"PK\3\4":
            raise _damaged(path, f"{info.filename[:60]!r} does not lie where the archive's directory says, or over another file")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise _damaged(path, f"{info.filename[:60]!r} is compressed or encrypted, which torch.save never does")
        name_length, extra_length = struct.unpack("<HH", head[26:30])
        name = bytes(data[info.header_offset + 30 : info.header_offset + 30 + name_length])
        start = info.header_offset + 30 + name_length + extra_length
        end = start + info.file_size
        if end > len(data) or name != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace"):
            raise _damaged(path, f"{info.filename[:60]!r} is cut short, or has two names")
        if info.filename in found:
            raise _damaged(path, f"{info.filename[:60]!r} is there twice")
        found[info.filename] = data[start:end]
    return found


def _stream(data: memoryview, path: Path) -> Opened:
    """Read a file from before PyTorch 1.6: five pickles, then the storages one after the other."""
    machine = _Torchs(data, path)
    if _run(machine) != MAGIC:
        raise _damaged(path, "it is a pickle, but not one of torch.save's")
    version, system = _run(machine), _run(machine)
    little = system.get("little_endian", True) if is_dict(system) else None
    if version != 1001 or little is not True:
        raise UnsupportedFormat(f"{path} was written on a machine of another kind, or by a torch that is not known; save it again")
    content, seen = _run(machine), machine.storages
    keys = _run(machine)
    if not is_list(keys) or not all(isinstance(key, str) for key in keys):
        raise _damaged(path, "its storages have no names")
    found: dict[str, memoryview] = {}
    for key in keys:
        count = int.from_bytes(machine.take(8), "little", signed=True) if len(data) - machine.at >= 8 else -1
        storage = seen.get(key)
        width = numpy_dtype(storage.dtype).itemsize if storage is not None else 0
        if storage is None or count != storage.whole or key in found or count * width > len(data) - machine.at:
            raise _damaged(path, f"storage {key[:40]!r} is cut short, or not the one that was described")
        found[key] = machine.take(count * width)
    bytes_of = partial(_from_stream, found, path)
    return Opened(content, bytes_of, strange=next(iter(machine.strange), ""))


def _from_stream(found: Mapping[str, memoryview], path: Path, storage: Storage) -> memoryview:
    return _part(found.get(storage.key, memoryview(b"")), storage, path)
