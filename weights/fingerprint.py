"""What a safetensors file says, whatever wrote it: a hash over its tensors, not over its bytes."""

from __future__ import annotations

import hashlib
import json

from weights.errors import ConvertError
from weights.header import entries


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
        ConvertError: it is no safetensors file; as `entries`.
    """
    try:
        found = entries(data)
    except ConvertError as error:
        raise type(error)(f"{place} has no fingerprint: {error}") from error
    digest = hashlib.sha256()
    for name, entry in sorted(found.items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape, entry.stop - entry.start]).encode() + b"\n")
        digest.update(data[entry.start : entry.stop])
    return len(found), digest.hexdigest()
