"""Torch tensors as arrays and back, without a copy; for the formats whose files are PyTorch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from convert.source import Stored

if TYPE_CHECKING:
    from torch import Tensor

# torch's names of what NumPy itself has not
EXTENDED = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
WORDS = {1: "uint8", 2: "int16"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Find NumPy's dtype of torch's name."""
    return np.dtype(EXTENDED.get(name, name))


def as_array(tensor: Tensor) -> np.ndarray:
    """Look at a tensor's memory as an array; of one on another device, at a copy."""
    import torch

    name, tensor = str(tensor.dtype).removeprefix("torch."), tensor.detach().cpu()
    if name in EXTENDED:
        return tensor.view(getattr(torch, WORDS[tensor.itemsize])).numpy().view(EXTENDED[name])
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Make a tensor of an array: its memory where that can be written and has strides that torch knows, else a copy."""
    import torch

    name = array.dtype.name
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if name in EXTENDED:
        words = np.ascontiguousarray(array).view(WORDS[array.itemsize])
        made = torch.from_numpy(words if words.flags.writeable else words.copy())  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type
        return made.view(getattr(torch, name))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type


def stored(name: str, tensor: Tensor) -> Stored:
    """Describe a tensor of PyTorch's: it is in its form already, and a kernel is one of cross-correlation."""
    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    kernel = name.endswith("weight") and tensor.dim() > 2
    return Stored(name, tuple(tensor.shape), dtype, lambda: as_array(tensor), convention="correlation" if kernel else None)
