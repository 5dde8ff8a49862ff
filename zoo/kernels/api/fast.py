"""What a user calls: `fast` makes a network fast, `plain` gives it back, `why` says what was done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch import nn

from weights.arguments import forgiving
from zoo.kernels.api.network import Fast, Tune
from zoo.kernels.errors import Untraceable

if TYPE_CHECKING:
    from zoo.kernels.reports.report import Report
    from zoo.kernels.training.network import FastTraining


@overload
def fast(
    model: nn.Module,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    train: Literal[False] = False,
    tune: Tune = "quick",
    example: Any = None,
    tf32: bool = False,
    progress: bool = True,
) -> Fast: ...


@overload
def fast(
    model: nn.Module,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    train: Literal[True],
    tune: Tune = "quick",
    example: Any = None,
    tf32: bool = False,
    progress: bool = True,
    recompute: bool | None = None,
) -> FastTraining: ...


@forgiving
def fast(
    model: nn.Module,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    train: bool = False,
    tune: Tune = "quick",
    example: Any = None,
    tf32: bool = False,
    progress: bool = True,
    recompute: bool | None = None,
) -> Fast | FastTraining:
    """Return the same network on faster kernels, for inference or to train, after it was compared with the plain one.

    BatchNorm is folded, chains of layers become one kernel each, each kernel is chosen by timing at the layer's own shape, and the
    whole is replayed as a CUDA graph. On a CPU the fastest of OpenVINO, onnxruntime and PyTorch runs it. A network that can't be
    traced runs unchanged in channels_last, and `why` says the reason; of torchvision's detection models the backbone is made fast.

    With `train`, its parameters are the model's own and autograd works; gradients and BatchNorm's statistics are compared too.

    Args:
        model: any module; it is neither moved nor changed. It is taken in eval mode, whatever mode it is in, but with `train`.
        device: where to run; None is the current CUDA device if there is one, else the CPU. With `train` it is the model's.
        dtype: bfloat16, float16 or float32; None is bfloat16 on GPUs that have it, else float16, and float32 on a CPU. With `train`
            it is that of the autocast to check under; the caller's autocast says what is computed in.
        train: whether it shall learn; see `zoo.kernels.training`.
        tune: "quick" tries a few launch configurations for each layer that was not timed before on this device, below a minute a
            network and shape; "full" tries all; "none" takes what was found before, and guesses for the rest.
        example: a tensor, or a tuple of the model's arguments, of the shape to plan first; None takes one image of the network's size.
        tf32: lets float32 products run in TF32, which keeps 10 bits of the inputs.
        progress: shows a bar while tuning, when stderr is a terminal.
        recompute: with `train`, whether a step keeps what BatchNorms read and makes their outputs again on the way back, and what 1x1
            convolutions widen, in less room and a tenth more time; None does the first where that frees a quarter of the maps, as in
            MobileNets.

    Returns:
        A `Fast` module: call it like `model`, with inputs on `device` in any floating dtype; outputs have the model's own dtype.
        With `train` a `FastTraining` module, which is called like `model` in every respect.

    Raises:
        ValueError: an unknown device, dtype or `tune`; the device is not there; the model refuses the example, or that is a shape;
            `recompute` without `train`, or `tf32` with it.
        TypeError: `model` is no module.

    Examples:
        >>> model = fast(trained(ResNet50))          # doctest: +SKIP
        >>> model(images.cuda())                     # doctest: +SKIP
        >>> print(why(model))                        # doctest: +SKIP
    """
    from zoo.kernels import arguments as asked

    model = plain(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fast takes a module such as ResNet50(), got {type(model).__name__}" + ("; build it first" if isinstance(model, type) else "")
        )
    if any(_is_fast(part) for part in asked.core(model).modules()):
        raise ValueError(f"a part of {type(model).__name__} is fast already; build the whole of plain(part) and call fast() on it")
    if tune not in get_args(Tune):
        raise ValueError(f'tune is "none", "quick" or "full", got {tune!r}')
    for name, value in (("train", train), ("tf32", tf32)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is True or False, got {value!r}")
    if recompute is not None and not isinstance(recompute, bool):
        raise ValueError(f"recompute is True, False or None, got {recompute!r}")
    if train and tf32:
        raise ValueError(
            "tf32 goes without train=True: what trains heeds torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32"
        )
    if train:
        from zoo.kernels.training.beginning import begin

        return begin(model, device, dtype, example, tune, recompute)
    if recompute is not None:
        raise ValueError("recompute goes with train=True: inference keeps nothing for a way back")
    where = asked.device_of(device)
    kind = asked.dtype_of(dtype, where)
    asked.check(asked.core(model))
    made = Fast(model, where, kind, tune, tf32, progress)
    if _detects(made.core):
        made.prepare_part("backbone", f"boxes depend on values: only the backbone of {type(model).__name__} runs fast")
        return made
    try:
        args = asked.example_of(made.core, example, where)
    except Untraceable as error:
        made.refuse(str(error))
        return made
    try:
        made.prepare(args)
    except Untraceable as error:
        if example is not None and error.__cause__ is not None:  # the network's own error
            made.try_plainly(args)
        made.refuse(str(error))
    return made


def plain(model: nn.Module) -> nn.Module:
    """Give back the network that `fast` was called with: the same object, with the same parameters; another module is returned as it is.

    Example:
        >>> model = trained(ResNet20)  # doctest: +SKIP
        >>> plain(fast(model)) is model  # doctest: +SKIP
        True
    """
    return model.network if _is_fast(model) else model  # pyright: ignore[reportReturnType]


def _detects(model: nn.Module) -> bool:
    """Tell whether this is a detection model, whose other half depends on values: boxes that are kept or dropped."""
    other = any(name in dict(model.named_children()) for name in ("roi_heads", "rpn", "anchor_generator", "head"))
    return other and isinstance(getattr(model, "backbone", None), nn.Module) and hasattr(model, "transform")


def _is_fast(model: object) -> bool:
    """Tell a fast network, without loading what trains it."""
    return isinstance(model, Fast) or getattr(type(model), "trains_fast", False)


def why(model: nn.Module) -> Report:
    """Tell what a fast network does and why: for each chain of layers its kernel, its time and the time that it replaced.

    Raises:
        TypeError: `model` is not fast.

    Example:
        >>> print(why(fast(trained(ResNet20))))  # doctest: +SKIP
    """
    if not _is_fast(model):
        raise TypeError(f"why takes what fast() returned, got a {type(model).__name__}")
    return model.report()  # pyright: ignore[reportCallIssue]
