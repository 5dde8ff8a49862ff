"""What every reader needs against untrusted files: optional libraries, one kind of error, and limits."""

from __future__ import annotations

import importlib
import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.source import Stored
from weights.errors import ConvertError, LimitExceeded, MalformedFile, MissingLibrary

MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_DEPTH = 64
"""Of nested structures; networks nest a dozen deep."""
SPARE_BYTES = 200 * 2**20
MAX_FACT = 2**20
"""Characters that are kept of a note in a file."""


def need(library: str, package: str = "") -> Any:
    """Import an optional library, or raise `MissingLibrary` that says which package to install."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingLibrary(
            f"{package or library} is needed for this format and is not installed: pip install 'kernelzoo[convert]'"
        ) from error


def dtype_of(name: str) -> np.dtype[Any]:
    """Find a dtype by its name, also one of those that NumPy learns from ml_dtypes."""
    return np.dtype(getattr(need("ml_dtypes"), name) if name.startswith(("bfloat16", "float8")) else name)


@contextmanager
def reading(path: Path, what: str) -> Generator[None]:
    """Turn whatever a library throws over a damaged file into `MalformedFile`; `what` is "Keras file", "MAT file"."""
    try:
        yield
    except MalformedFile as error:
        if path.name in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error  # from deep inside, where nobody knows the file
    except (ConvertError, KeyboardInterrupt, FileNotFoundError, PermissionError):
        raise
    except MemoryError as error:
        raise LimitExceeded(f"{path} asks for more memory than there is") from error
    except RecursionError as error:
        raise LimitExceeded(f"{path} nests deeper than any network does") from error
    except Exception as error:  # a damaged file can make its library fail in any way whatever
        said = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise MalformedFile(f"{path} is no readable {what}: {said}. Is it cut short? Fetch it again.") from error


def guarded(stored: Stored, path: Path, what: str) -> Stored:
    """Turn what a library throws while the tensor is read into `MalformedFile`, as `reading` does."""

    def load() -> np.ndarray:
        with reading(path, what):
            return stored.load()

    return replace(stored, load=load)


def check(path: Path, tensors: Iterable[Stored], size_bytes: int) -> None:
    """Refuse a file of `size_bytes` that claims more tensors, axes or bytes than it can honestly hold.

    Raises:
        LimitExceeded: says what is too much.
    """
    total = 0
    for number, stored in enumerate(tensors):
        if number >= MAX_TENSORS:
            raise LimitExceeded(f"{path} has more than {MAX_TENSORS} tensors")
        if len(stored.stored_shape) > MAX_RANK:
            raise LimitExceeded(f"{path}: {stored.origin} has {len(stored.stored_shape)} axes; at most {MAX_RANK} are read")
        total += math.prod(stored.stored_shape) * stored.stored_dtype.itemsize
        if total > 2 * size_bytes + SPARE_BYTES:
            raise LimitExceeded(f"{path} has {size_bytes} bytes and claims tensors of more than {total}: it is damaged or hostile")


def correlation_only(convention: str | None, what: str) -> None:
    """Refuse to write true convolution where no layer computes it."""
    if convention == "convolution":
        raise ConvertError(
            f"{what} computes cross-correlation in every layer, so kernels of true convolution are not written for it; ask for correlation"
        )
