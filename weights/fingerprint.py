"""What a safetensors file says, whatever wrote it: a hash over its tensors, not over its bytes."""

from __future__ import annotations

import hashlib
import json

from weights.errors import MalformedFile


def fingerprint(data: memoryview, place: str) -> tuple[int, str]:
    """Hash names, dtypes, shapes and bytes of all tensors, in the order of their names.

    Two files with the same tensors have the same fingerprint, however their headers are laid out and whatever metadata they carry; so a
    file that was made of a pickle can be compared with one that another converter made.

    Args:
        data: a whole safetensors file.
        place: where it lies, for the messages.

    Returns:
        The number of tensors, and 64 hex digits.

    Raises:
        MalformedFile: it is no safetensors file, or a tensor lies outside it.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if length > len(data) - 8:
            raise ValueError(f"a header of {length:,} bytes in a file of {len(data):,}")
        header = {name: facts for name, facts in json.loads(bytes(data[8 : 8 + length])).items() if name != "__metadata__"}
        digest = hashlib.sha256()
        for name in sorted(header):
            facts = header[name]
            begin, end = (8 + length + offset for offset in facts["data_offsets"])
            if not 8 + length <= begin <= end <= len(data):
                raise ValueError(f"{name!r} lies outside the file")
            digest.update(json.dumps([name, facts["dtype"], facts["shape"], end - begin]).encode() + b"\n")
            digest.update(data[begin:end])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedFile(f"{place} has no fingerprint: {error}") from error
    return len(header), digest.hexdigest()
