"""Values that are no numbers: one NaN or infinity in a weight makes every output of its network one, so it is refused at install."""

from __future__ import annotations

import json
from pathlib import Path

from weights.errors import MalformedFile, NonFinite
from weights.part import disk
from weights.wording import clause

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
        MalformedFile: the header describes another file.
    """
    memory = memoryview(bytearray(4 * CHUNK))
    with disk(path.parent), path.open("rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            for name, facts in json.loads(file.read(length)).items():
                if name != "__metadata__" and facts["dtype"] in MASKS:
                    begin, end = facts["data_offsets"]
                    if begin < 0:
                        raise ValueError(f"{name!r} begins at {begin}")
                    file.seek(8 + length + begin)
                    while begin < end and (count := file.readinto(memory[: end - begin])):
                        check_values(memory[:count], facts["dtype"], name, place)
                        begin += count
        except NonFinite:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MalformedFile(f"{place} is no safetensors file: {clause(error)}.") from error
