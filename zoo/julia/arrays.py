"""Julia's arrays and PyTorch's tensors: one memory, whose axes each of them counts from its own end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as pytorch
from torch import Tensor, nn

from zoo.kernels import fast

CPU = -1


def tensor(array: Any, dev: int = CPU) -> Tensor:
    """Turn an array as Julia sees it into a tensor as PyTorch does: width, height, channels, batch become batch, channels, height, width.

    The numbers stay where they are if the array lies as Julia's do, first axis nearest together, and can be written to. Then both share
    them: a change of one is a change of the other. Otherwise, and for a GPU, they are copied.

    Args:
        array: of any number of axes, (W, H, C, N) for images, (F, N) for rows: a NumPy array in Fortran's order, or what gives one, as
            juliacall's arrays do.
        dev: -1 for the CPU, 0 for the first GPU, as Torch.jl counts them.

    Returns:
        A contiguous tensor with the axes reversed, (N, C, H, W), of the array's own type.

    Raises:
        TypeError: these are no numbers, or of a type that PyTorch lacks.
        ValueError: there is no such device.

    Example:
        >>> tensor(np.zeros((4, 3, 2, 1), np.float32, order="F")).shape
        torch.Size([1, 2, 3, 4])

    Source: Torch.jl, `tensor(x; dev)`, https://github.com/FluxML/Torch.jl
    """
    if isinstance(dev, bool) or not isinstance(dev, int) or dev < CPU:
        raise ValueError(f"dev is -1 for the CPU or the number of a GPU, 0 for the first, not {dev!r}")
    if dev >= (count := pytorch.cuda.device_count()):
        raise ValueError(f"there is no GPU {dev} on this machine, which has {count}: dev=-1 is the CPU")
    if isinstance(array, Tensor):
        raise TypeError("this is a tensor already, whose axes are PyTorch's; tensor() takes an array as Julia has it, width first")
    there = np.asarray(array)
    if there.dtype.kind not in "fiubc":
        raise TypeError(f"tensor() takes an array of numbers, not {type(array).__name__} of {there.dtype}")
    seen = there.T
    if not (seen.flags.c_contiguous and seen.flags.writeable and seen.dtype.isnative):
        seen = np.array(seen, seen.dtype.newbyteorder("="), order="C")
    try:
        made = pytorch.from_numpy(seen)
    except TypeError as error:
        raise TypeError(f"PyTorch has no numbers of the type {there.dtype}: convert the array to Float32 first") from error
    return made if dev == CPU else made.to(f"cuda:{dev}")


def collect(tensor: Tensor) -> np.ndarray:
    """Turn a tensor into an array as Julia sees it: batch, channels, height, width become width, height, channels, batch.

    A contiguous tensor on the CPU and the array share their numbers; of any other they are copied.

    Args:
        tensor: of any number of axes, on any device.

    Returns:
        A NumPy array in Fortran's order with the axes reversed, (W, H, C, N); juliacall passes it on to Julia without a copy.

    Raises:
        TypeError: it is no tensor, a sparse one, or of a type that Julia's arrays lack, bfloat16 for example.

    Example:
        >>> collect(pytorch.zeros(1, 2, 3, 4)).shape
        (4, 3, 2, 1)

    Source: Torch.jl, `collect(t)`, https://github.com/FluxML/Torch.jl
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"collect() takes a tensor, not {type(tensor).__name__}; tensor() makes one of an array")
    if tensor.layout != pytorch.strided:
        raise TypeError(f"Julia's arrays hold every number, and this tensor is {tensor.layout}: collect(t.to_dense())")
    try:
        return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().numpy().T
    except TypeError as error:
        raise TypeError(f"Julia has no numbers of the type {tensor.dtype}: collect(t.float()) gives Float32") from error


def torch(model: nn.Module) -> Any:
    """Make a network fast, as `fast` does: Torch.jl's `model |> torch`, which runs the same network on PyTorch's kernels.

    Args:
        model: what `trained` returns, or any network of the catalogue; on a GPU or the CPU.

    Returns:
        What `fast(model)` returns, which is called like the model.

    Raises:
        ValueError, TypeError: as `fast`.

    Example:
        >>> torch(ResNet20())  # doctest: +SKIP

    Source: Torch.jl, `torch(model)`, https://github.com/FluxML/Torch.jl
    """
    return fast(model)
