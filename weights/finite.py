"""Values that are no numbers: one NaN or infinity in a weight makes every output of its network one, so it is refused at install."""

from __future__ import annotations

from pathlib import Path

from weights.errors import NonFinite
from weights.header import check_complete
from weights.part import disk

CHUNK = 1 << 20
MASKS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "C64": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
}
"""Of each kind of number, by its name in safetensors: the bits that are all set in NaN and infinity and in nothing else."""


def check_values(data: memoryview, dtype: str, name: str, place: str) -> None:
    """See that each value of a tensor, or of a part of one, is a finite number; whole numbers are.

    Raises:
        NonFinite: one is not.
    """
    import numpy as np

    if dtype not in MASKS:
        return
    kind, mask = MASKS[dtype]
    values = np.frombuffer(data, kind)
    for start in range(0, len(values), CHUNK):
        if (values[start : start + CHUNK] & mask).max() == mask:
            error = NonFinite(
                f"{place}: the tensor {name!r} holds NaN or an infinity, so its network would compute nothing else. Its training "
                "diverged, or the file was damaged before it was hashed: use another checkpoint, or mend the file."
            )
            error.tensor = name
            raise error


def check_file(path: Path, place: str) -> None:
    """See that a safetensors file holds finite numbers.

    Raises:
        NonFinite: as `check_values`.
        ConvertError: as `check_complete`.
    """
    found, memory = check_complete(path, place), memoryview(bytearray(4 * CHUNK))
    with disk(path.parent), path.open("rb") as file:
        for name, entry in found.items():
            if entry.dtype in MASKS:
                begin = file.seek(entry.start)
                while begin < entry.stop and (count := file.readinto(memory[: entry.stop - begin])):
                    check_values(memory[:count], entry.dtype, name, place)
                    begin += count
