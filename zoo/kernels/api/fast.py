"""What a user calls: `fast` makes a network fast, `plain` gives it back, `why` says what was done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast, get_args, overload

import torch
from torch import nn

from weights.arguments import forgiving
from zoo.kernels.api.network import Fast, Tune
from zoo.kernels.errors import Untraceable

if TYPE_CHECKING:
    from zoo.kernels.reports.report import Report
    from zoo.kernels.training.network import FastTraining

Precision = Literal["int8", "fp8", "auto"]
AUTO = "auto"
"""The device that is faster."""


@overload
def fast(
    model: nn.Module,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | Precision | None = None,
    *,
    train: Literal[False] = False,
    tune: Tune = "quick",
    example: Any = None,
    tf32: bool = False,
    static: bool = False,
    progress: bool = True,
    calibration: Any = None,
    check: Any = None,
    labels: Any = None,
    tolerance: Any = None,
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
    dtype: torch.dtype | Precision | None = None,
    *,
    train: bool = False,
    tune: Tune = "quick",
    example: Any = None,
    tf32: bool = False,
    static: bool = False,
    progress: bool = True,
    recompute: bool | None = None,
    calibration: Any = None,
    check: Any = None,
    labels: Any = None,
    tolerance: Any = None,
) -> Fast | FastTraining:
    """Return the same network on faster kernels, for inference or to train, after it was compared with the plain one.

    BatchNorm is folded, chains of layers become one kernel each, each kernel is chosen by timing at the layer's own shape, and the
    whole is replayed as a CUDA graph. On a CPU the fastest of OpenVINO, onnxruntime and PyTorch runs it. A network that can't be
    traced runs unchanged in channels_last, and `why` says the reason; of detectors, whose boxes depend on values, body, pyramid and
    heads are made fast.

    With `train`, its parameters are the model's own and autograd works; gradients and BatchNorm's statistics are compared too.

    Args:
        model: any module; it is neither moved nor changed. It is taken in eval mode, whatever mode it is in, but with `train`.
        device: where to run; None is the current CUDA device if there is one, else the CPU. With `train` it is the model's. "auto" times
            a call, with `train` a step, on the CPU and on the current CUDA device once, takes the faster, and moves the model there with
            `train`, where the CPU's step by PyTorch's compiler competes too. `why` says the times. Each is computed in `dtype`, or in what
            None means there. Bring inputs to `model.device`.
        dtype: bfloat16, float16 or float32; None is bfloat16 on GPUs that have it, else float16, and float32 on a CPU. With `train`
            it is that of the autocast to check under; the caller's autocast says what is computed in. Also "int8", quantised after
            training, on a GPU "fp8" (e4m3), and "auto", the fastest precision whose certificate keeps `tolerance`: of float32,
            bfloat16 and int8 on a CPU, of bfloat16, int8 and fp8 on a GPU.
        train: whether it shall learn; see `zoo.kernels.training`.
        tune: "quick" tries a few launch configurations for each layer that was not timed before on this device, below a minute a
            network and shape; "full" tries all; "none" takes what was found before, and guesses for the rest. "background" is "quick" in
            a thread of its own: the network itself answers until a plan is made and compared, and the next call takes a second or two
            to put it in. PyTorch's compiler does not compete then, and `why` says how far it is. Calls are slower meanwhile: a GPU's
            kernels are timed behind their answers, a tenth of a second each time, and PyTorch's flags for cuDNN and TF32 are that
            thread's, so set your own before. Until the plan is there, capture no CUDA graph of your own, and let no thread that doesn't
            call the network wait for the whole GPU. For a detector it is "none". With `train` a CPU times nothing but with "full", which
            tries PyTorch's compiler.
        example: a tensor, or a tuple of the model's arguments, of the shape to plan first; None takes one image of the network's size.
            Of a detector, whose photographs all have other sizes, only an example's shapes are tuned by "quick": a list of photographs.
        tf32: lets float32 products run in TF32, which keeps 10 bits of the inputs.
        static: on a GPU, answers are handed out where they are computed, and not copied: the next call overwrites them. Copy what you
            keep or save. Only one thread may call then. On a CPU, and for a detector, it changes nothing.
        progress: shows a bar while tuning, when stderr is a terminal.
        recompute: with `train`, whether a step keeps what BatchNorms read and makes their outputs again on the way back, and what 1x1
            convolutions widen, in less room and a tenth more time; None does the first where that frees a quarter of the maps, as in
            MobileNets.
        calibration: with "int8", "fp8" and "auto", images to calibrate on, 64 at least and 200 better: a preprocessed tensor
            (N, C, H, W), a list of such tensors (C, H, W), a list of paths, or a folder or any other source that `zoo embed` reads. Half
            of them are set aside and calibrate nothing: the certificate compares answers on these. Without it 8 bits are UNPROVEN, and
            `why` says so.
        check: images to compare on, in the same forms; then all of `calibration` calibrates.
        labels: indices of the right classes, one for each image of `check`, or of `calibration` without `check`; then the certificate
            holds the accuracies and the interval of their paired difference.
        tolerance: the least share of equal top-1 classes, 0.98 if left out; or {"top1": 0.98, "error": 0.1}, whose second is the largest
            relative error. Of networks that return no logits only "error" can be asked, 0.1 if left out.

    Returns:
        A `Fast` module: call it like `model`, with inputs on `device` in any floating dtype; outputs have the model's own dtype.
        With `train` a `FastTraining` module, which is called like `model` in every respect.

    Raises:
        ValueError: an unknown device, dtype or `tune`; the device is not there; the model refuses the example, or that is a shape;
            `recompute` without `train`, or `tf32` with it; 8 bits on a device that doesn't multiply them, calibration images of another
            size, range or layout, too few of them, or all alike; 8 bits that keep less than the tolerance.
        TypeError: `model` is no module.

    Examples:
        >>> model = fast(trained(ResNet50))          # doctest: +SKIP
        >>> model(images.cuda())                     # doctest: +SKIP
        >>> print(why(model))                        # doctest: +SKIP
        >>> small = fast(trained(ResNet50), "cpu", "int8", calibration="photographs/")  # doctest: +SKIP
    """
    from zoo.kernels import arguments as asked
    from zoo.kernels.api.parts import parts_of

    model = plain(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fast takes a module such as ResNet50(), got {type(model).__name__}" + ("; build it first" if isinstance(model, type) else "")
        )
    if any(_is_fast(part) for part in asked.core(model).modules()):
        raise ValueError(f"a part of {type(model).__name__} is fast already; build the whole of plain(part) and call fast() on it")
    if tune not in get_args(Tune):
        raise ValueError(f'tune is "none", "quick", "full" or "background", got {tune!r}')
    for name, value in (("train", train), ("tf32", tf32), ("static", static)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is True or False, got {value!r}")
    if recompute is not None and not isinstance(recompute, bool):
        raise ValueError(f"recompute is True, False or None, got {recompute!r}")
    if train and tf32:
        raise ValueError(
            "tf32 goes without train=True: what trains heeds torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32"
        )
    if train and static:
        raise ValueError("static goes without train=True: autograd keeps what a call answers")
    narrow = asked.narrow_of(dtype)
    if tune == "background" and (train or narrow is not None):
        with_it = "train=True" if train else f"dtype={narrow!r}"
        raise ValueError(f'tune="background" goes without {with_it}, which has to be compared before the first call; take tune="quick"')
    given = {"calibration": calibration, "check": check, "labels": labels, "tolerance": tolerance}
    if narrow is None and (extra := [name for name, value in given.items() if value is not None]):
        raise ValueError(f'{extra[0]} goes with dtype="int8", "fp8" or "auto", got dtype={dtype!r}')
    if narrow is not None and calibration is None and (extra := [name for name in ("check", "labels") if given[name] is not None]):
        raise ValueError(f"{extra[0]} goes with calibration=, the images to calibrate on")
    if narrow is not None and (train or tf32):
        raise ValueError(f'dtype="{narrow}" goes without {"train" if train else "tf32"}=True: it is for inference')
    if train:
        from zoo.kernels.training.beginning import begin

        said, first = list[str](), tune
        kind = cast("torch.dtype | None", dtype)
        if device == AUTO:
            from zoo.kernels.api.placing import training

            device, first, line = training(asked.core(model), example, kind, tune, recompute)
            model.to(device)
            said.append(line)
        made = begin(model, device, kind, example, tune, recompute, first=first)
        made.told.extend(said)
        return made
    if recompute is not None:
        raise ValueError("recompute goes with train=True: inference keeps nothing for a way back")
    if device == AUTO:
        if narrow is not None or tune == "background":
            with_it = 'tune="background"' if narrow is None else f"dtype={narrow!r}"
            raise ValueError(f'device="auto" can\'t be combined with {with_it}: name a device')
        from zoo.kernels.api.placing import answering

        def build(where: torch.device) -> Fast:
            return cast("Fast", fast(model, where, dtype, tune=tune, example=example, tf32=tf32, static=static, progress=progress))

        return answering(build, lambda where: asked.example_of(asked.core(model), example, where))
    where = asked.device_of(device, auto=narrow is None)
    if narrow is not None:
        asked.check(asked.core(model))
        from zoo.kernels.api.precisions import Wanted, proven

        if parts_of(asked.core(model)):
            raise ValueError(
                f'dtype="{narrow}" is for networks of one image tensor; what {type(model).__name__} computes depends on values'
            )
        return proven(model, where, Wanted(narrow, calibration, check, labels, tolerance, example, tune, progress))
    kind = asked.dtype_of(cast("torch.dtype | None", dtype), where)
    asked.check(asked.core(model))
    made = Fast(model, where, kind, tune, tf32, progress, static=static)
    if parts := parts_of(made.core):
        made.prepare_parts(parts, example)
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


def _is_fast(model: object) -> bool:
    """Tell a fast network, without loading what trains it."""
    return isinstance(model, Fast) or getattr(type(model), "trains_fast", False)


def why(model: nn.Module, *, precisions: bool = False) -> Report:
    """Tell what a fast network does and why: for each chain of layers its kernel, its time and the time that it replaced.

    Args:
        model: what `fast` returned.
        precisions: on a CPU, time float32, bfloat16 and int8 beside each other first, at the shape that was planned last, where the CPU
            has them; takes seconds, and with int8 half a minute the first time. Without calibration images int8's error is UNPROVEN.

    Raises:
        TypeError: `model` is not fast.
        ValueError: precisions are asked for elsewhere than on a CPU, or before the network has answered images.

    Example:
        >>> print(why(fast(trained(ResNet20))))  # doctest: +SKIP
        >>> print(why(fast(trained(ResNet50), "cpu"), precisions=True))  # doctest: +SKIP
    """
    if not _is_fast(model):
        raise TypeError(f"why takes what fast() returned, got a {type(model).__name__}")
    if precisions:
        if not isinstance(model, Fast):
            raise ValueError("precisions are measured of a network for inference, not of one that learns")
        from zoo.kernels.api.precisions import measure

        measure(model)
    return model.report()  # pyright: ignore[reportCallIssue]
