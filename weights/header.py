"""The header of a safetensors file: what the file holds and where. It is the only thing in it to distrust, and every word is checked.

Whoever reads such a file asks here: the downloader whether it is whole, the installer for its values, locks for its fingerprint, and
`convert` for its tensors. So what one of them believes, all believe.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from weights.documents import read_json
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat
from weights.part import disk
from weights.wording import clause

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_DIM = 2**31 - 1
MAX_OFFSET = 2**63 - 1
SHOWN = 100
"""Characters of a name or a value that a message repeats: a header may hold millions."""

# name in the header: bytes of an element, name in torch
DTYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
    "C64": (8, "complex64"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file: `dtype` as the header writes it, its bytes from `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def is_safetensors(buffer: Buffer, size_bytes: int | None = None) -> bool:
    """Tell whether the bytes begin as a safetensors file does: a plausible length, then an object; takes what `entries` does."""
    view = memoryview(buffer).cast("B")
    size = len(view) if size_bytes is None else size_bytes
    return len(view) > 8 and view[8] == ord("{") and 2 <= int.from_bytes(view[:8], "little") <= size - 8


def beginning(file: IO[bytes], size_bytes: int) -> bytes:
    """Read the length and the header of an open file, no more of it than is believed."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    return first + file.read(length) if length <= min(MAX_HEADER_BYTES, size_bytes - 8) else first


def check_complete(path: Path, place: str) -> dict[str, Entry]:
    """See that the header describes the whole file: where no hash is known, nothing else tells one that was cut short.

    Args:
        path: the file.
        place: what to call it.

    Returns:
        As `entries`, which also raises the errors.
    """
    with disk(path.parent), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = beginning(file, size)
    try:
        return entries(head, size)
    except ConvertError as error:
        if is_safetensors(head, size):
            raise type(error)(f"{place}: {clause(error)}.") from error
        raise type(error)(f'{place} is no safetensors file: {clause(error)}; for a .pth, say format = "pytorch".') from error


def entries(buffer: Buffer, size_bytes: int | None = None) -> dict[str, Entry]:
    """Read what the file holds, in the order of the header, and check that the bytes are all there and used once.

    Args:
        buffer: the file, or its beginning with the whole header.
        size_bytes: of the file, where `buffer` is its beginning.

    Raises:
        MalformedFile: the header is cut, is no JSON object, names a thing twice, or the tensors overlap, leave a hole or
            don't end where the file ends.
        LimitExceeded: the header, a rank, a dimension or the number of tensors is beyond any network's.
        UnsupportedFormat: a tensor's dtype is not one of `DTYPES`.
    """
    header, data, size = parsed(buffer, size_bytes)
    found: dict[str, Entry] = {}
    for name, fields in header.items():
        if name != "__metadata__":
            found[name] = _entry(name, fields, data)
    if len(found) > MAX_TENSORS:
        raise LimitExceeded(f"{len(found)} tensors; at most {MAX_TENSORS} are read")
    end = data
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise MalformedFile(f"tensor {_shown(name)} begins at byte {entry.start} where {end} was due: it {what}")
        end = entry.stop
    if end != size:
        what = "is cut short" if size < end else "goes on after the last tensor"
        raise MalformedFile(f"the tensors end at byte {end}, the file at {size}: it {what}; fetch it again")
    return found


def metadata(buffer: Buffer, size_bytes: int | None = None) -> dict[str, str]:
    """Read the file's free-form notes, {} if it has none or they are null; takes and raises what `entries` does."""
    header, _, _ = parsed(buffer, size_bytes)
    return header.get("__metadata__") or {}


def parsed(buffer: Buffer, size_bytes: int | None = None) -> tuple[dict[str, Any], int, int]:
    """Parse the header: the object, the position of the first tensor, the size of the file; takes and raises what `entries` does."""
    view = memoryview(buffer).cast("B")
    size = len(view) if size_bytes is None else size_bytes
    if len(view) < 8:
        raise MalformedFile(f"{len(view)} bytes are no safetensors file")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read. Is it a safetensors file?")
    if length > size - 8:
        raise MalformedFile(f"a header of {length} bytes in a file of {size}: it is cut short; fetch it again")
    text = view[8 : 8 + length].tobytes()
    if text.count(b"{") + text.count(b"[") > 3 * MAX_TENSORS + 2:  # counted before parsing: brackets cost 30 times their bytes
        raise LimitExceeded(f"the header describes more than {MAX_TENSORS} tensors")
    hooks: dict[str, Any] = {"object_pairs_hook": _no_duplicates, "parse_constant": _no_constant, "parse_int": int}
    header = read_json(text, "the header", "Fetch the file again", most_bytes=MAX_HEADER_BYTES, **hooks)
    if not isinstance(header, dict):
        raise MalformedFile(f"the header is a JSON {type(header).__name__}, not an object")
    found = cast("dict[str, Any]", header)
    if not text.startswith(b"{"):  # as the format has it, and as `is_safetensors` tells such files
        raise MalformedFile("the header does not begin with {")
    notes: Any = {} if found.get("__metadata__") is None else found["__metadata__"]
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in cast("dict[str, Any]", notes).values()):
        raise MalformedFile("__metadata__ is not an object of strings")
    _see_text((*found, *(word for pair in cast("dict[str, str]", notes).items() for word in pair)))
    return found, 8 + length, size


def _entry(name: str, told: object, data: int) -> Entry:
    who, has = f"tensor {_shown(name)}", _shown(told)
    fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedFile(f"{who} needs dtype, shape and data_offsets, and has {has}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedFormat(f"{who} has dtype {str(dtype)[:20]!r}; there are {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise MalformedFile(f"{who}: shape {_shown(shape)} and data_offsets {_shown(offsets)} must be lists of naturals")
    if len(shape) > MAX_RANK or any(dim > MAX_DIM for dim in shape):
        raise LimitExceeded(f"{who} has shape {_shown(shape)}; at most {MAX_RANK} dimensions of at most {MAX_DIM} are read")
    if max(offsets) > MAX_OFFSET:
        raise MalformedFile(f"{who}: data_offsets {_shown(offsets)} lie beyond the end of any file")
    if math.prod(shape) * DTYPES[dtype][0] != offsets[1] - offsets[0]:
        raise MalformedFile(f"{who}: {dtype} of shape {shape} does not fill bytes {offsets[0]} to {offsets[1]}")
    return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _shown(value: object) -> str:
    """Return the beginning of what a stranger wrote, a name in quotes."""
    return repr(value[:SHOWN]) if isinstance(value, str) else str(value)[:SHOWN]


def _see_text(words: Iterable[str]) -> None:
    """See that all are text: JSON may spell halves of characters, which no file and no terminal takes."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise MalformedFile(f"the header names {word[:SHOWN]!a}, which is no text") from None


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in cast("list[Any]", values))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedFile(f"the header names {_shown(twice)} twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise MalformedFile(f"the header holds {name}")
