"""Precisions beside each other on a CPU: int8 that is asked for, "auto" that takes the fastest proven one, and what each would save."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weights.callers import stacklevel
from zoo.kernels import arguments as asked
from zoo.kernels.api.network import Fast, Tune
from zoo.kernels.comparing.copies import on_device, tensors_of
from zoo.kernels.comparing.precision import products
from zoo.kernels.engines.openvino import precision as computes
from zoo.kernels.engines.race import turn, undisturbed
from zoo.kernels.errors import Untraceable, called, first_line
from zoo.kernels.quantizing import by_nncf, by_onnxruntime
from zoo.kernels.quantizing.bfloat16 import ENGINE, Bfloat16
from zoo.kernels.quantizing.certificate import Certificate, Reference, answers, compare, is_logits
from zoo.kernels.quantizing.images import Images, gather, made_up
from zoo.kernels.quantizing.quantize import NotCertified, classifies, quantized
from zoo.kernels.quantizing.quantized import WITNESSES, instructions, state_of, version_of
from zoo.kernels.quantizing.tolerance import Tolerance, tolerance_of
from zoo.kernels.reports.progress_bar import bar

CPU = torch.device("cpu")
PACKAGES = {"openvino": "openvino", "onnxruntime": "onnxruntime"}
"""Engines that are packages of their own; all others are PyTorch's."""
ROUNDS = 5
"""Turns of each precision, one after the other."""


@dataclass(slots=True)
class Wanted:
    """What a caller of `fast` gave for a precision that has to be proven.

    Attributes:
        dtype: "int8", "fp8" or "auto".
        calibration: images to calibrate on.
        check: images to compare on.
        labels: their right classes.
        tolerance: what the certificate has to show.
        example: as `fast` takes it.
        tune: as `fast` takes it.
        progress: as `fast` takes it.
    """

    dtype: str
    calibration: Any
    check: Any
    labels: Any
    tolerance: Any
    example: Any
    tune: Tune
    progress: bool


def proven(model: nn.Module, device: torch.device, wanted: Wanted) -> Fast:
    """Return a network in the precision that is asked for, with its certificate; `fast` says the rest.

    Raises:
        ValueError: the device has no such numbers, the network takes no single tensor of images, images or tolerance can't be used, or
            less than the tolerance is kept.
    """
    _able(device, wanted.dtype)
    network = asked.core(model)
    size, example = _size(network, wanted)
    if wanted.calibration is not None:
        images = gather(network, wanted.calibration, wanted.check, wanted.labels, size)
    else:
        images = made_up(size or tuple(example.shape[1:]))  # pyright: ignore[reportOptionalMemberAccess]  # one of them is there
    if example is None:
        example = images.check[:1]
    single = on_device(network, device, torch.float32)
    outputs = answers(single, images.check[:1].to(device))
    tolerance = tolerance_of(wanted.tolerance, classifies(network) and is_logits(outputs))
    if device.type == "cuda":
        return _on_gpu(model, network, single, images, tolerance, example.to(device), wanted)
    if wanted.dtype == "int8":
        return _int8(model, network, images, tolerance, example, wanted)
    return _auto(model, network, single, images, tolerance, example, wanted)


def _able(device: torch.device, dtype: str) -> None:
    """Refuse a precision that a device has not.

    Raises:
        ValueError: with what to use instead.
    """
    if device.type == "cpu":
        if dtype == "fp8":
            raise ValueError('dtype="fp8" is for GPUs of compute capability 8.9 and later (Ada, Hopper, Blackwell); on a CPU use "int8"')
        return
    from zoo.kernels.quantizing.certify import CAPABLE

    found = torch.cuda.get_device_capability(device)
    needed = CAPABLE.get(dtype, min(CAPABLE.values()))
    if found < needed:
        has = ".".join(map(str, found))
        raise ValueError(
            f'dtype="{dtype}" needs a GPU of compute capability {".".join(map(str, needed))} or later, and {device} has {has}: '
            f'use dtype=torch.float16, or fast(model, "cpu", "int8", ...)'
        )


def _on_gpu(
    model: nn.Module, network: nn.Module, single: nn.Module, images: Images, tolerance: Tolerance, example: Tensor, wanted: Wanted
) -> Fast:
    """Return a network in 8 bits on a GPU, or the fastest of these and bfloat16 whose certificate holds."""
    from zoo.kernels.quantizing.certify import CAPABLE, certified

    device = example.device
    half = asked.dtype_of(None, device)
    with products(tf32=False):
        reference = Reference.measure(single, images.check.to(device), images.labels, classifies(network))
    reference.outputs = [one.float().cpu() for one in reference.outputs]

    def build(made: Any) -> Fast:
        return _ready(Fast(model, device, half, wanted.tune, False, wanted.progress, made), example)

    def narrow(kind: str) -> Fast:
        with bar(f"proving {kind}", wanted.progress) as progress:
            shape, say = tuple(example.shape), _saying(progress)
            fast, made = certified(network, images, kind, half, tolerance, reference, device, shape, build, say)
        if made is None:
            fast.told = [f"{kind} is no faster than {fast.precision} here, at {'x'.join(map(str, example.shape))}: it was not taken"]
        else:
            fast.quantized, fast.proofs, fast._proven_of = made, [made.proof], made.state
        return fast

    if wanted.dtype != "auto":
        found = narrow(wanted.dtype)
        if not found.proofs:
            warnings.warn(f"{called(network)}: {found.told[0]}; why(model) shows what runs", stacklevel=stacklevel())
        else:
            _warn_unproven(found.proofs[0], network)
        return found
    wide = _ready(Fast(model, device, half, wanted.tune, False, wanted.progress), example)
    if images.made_up:
        wide.told = [f"{wide.precision}: {images.made_up}, and nothing narrower can be proven without calibration="]
        return wide
    batch = wide.report().plans[-1].shapes[0][0]
    index = torch.arange(-(-len(images.check) // batch) * batch) % len(images.check)
    given = [one[: len(images.check)].float().cpu() for one in answers(wide, images.check[index].to(device), batch)]
    by = f"kernelzoo's plan on {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    proofs = [compare(reference, given, wide.precision, by, tolerance, calibrated=0, digest=images.check_digest)]
    made, told = {wide.precision: wide}, []
    for kind, needed in CAPABLE.items():
        if torch.cuda.get_device_capability(device) < needed:
            continue
        try:
            fast = narrow(kind)
            if fast.proofs:
                made[kind] = fast
                proofs.append(fast.proofs[0])
            else:
                told += fast.told
        except NotCertified as error:
            proofs.append(error.nearest)
        except ValueError as error:
            told.append(f"{kind}: {error}")
    seconds = _timed({name: _waiting(call) for name, call in made.items()}, example)
    allowed = {proof.precision for proof in proofs if proof.proven}
    best = min((name for name in seconds if name in allowed), key=seconds.__getitem__, default="float32")
    chosen = made.get(best) or _ready(Fast(model, device, torch.float32, wanted.tune, False, wanted.progress), example)
    how = 'the fastest whose certificate holds, by dtype="auto"' if best in made else "nothing narrower keeps the tolerance"
    chosen.proofs, chosen._proven_of = proofs, state_of(network)
    chosen.told = [f"{best}: {how}", *table(seconds, proofs, wide.precision), *told]
    return chosen


def _waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that ends when the GPU has answered."""

    def run(*args: Tensor) -> Any:
        answer = call(*args)
        torch.cuda.synchronize(args[0].device)
        return answer

    return run


def _size(network: nn.Module, wanted: Wanted) -> tuple[tuple[int, ...] | None, Tensor | None]:
    """Return (C, H, W) that the network will be given, and an example of it; None of what the calibration images have to say."""
    if wanted.example is None and wanted.calibration is not None:
        return None, None
    try:
        args = asked.example_of(network, wanted.example, CPU)
    except Untraceable as error:
        raise ValueError(f'dtype="{wanted.dtype}" is for networks of images that can be traced: {error}') from error
    given = tensors_of(args)
    if len(args) != 1 or len(given) != 1 or given[0].dim() != 4 or not given[0].is_floating_point():
        raise ValueError(f'dtype="{wanted.dtype}" is for networks that take one float tensor of images (N, C, H, W) and nothing else')
    return tuple(given[0].shape[1:]), given[0]


def _int8(model: nn.Module, network: nn.Module, images: Images, tolerance: Tolerance, example: Tensor, wanted: Wanted) -> Fast:
    with bar("quantising", wanted.progress) as progress:
        made = quantized(network, images, tolerance, classifies(network), _saying(progress))
    _warn_unproven(made.proof, network)
    found = Fast(model, CPU, torch.float32, wanted.tune, False, wanted.progress, made)
    return _ready(found, example)


def _warn_unproven(certificate: Certificate, network: nn.Module) -> None:
    """Warn the caller of `fast` that no real images were compared."""
    if certificate.unproven:
        warnings.warn(
            f"{certificate.precision} is UNPROVEN for {called(network)}: {certificate.unproven}. Give fast(..., calibration=) "
            "photographs of the kind that the network will be shown",
            stacklevel=stacklevel(),
        )


def _ready(made: Fast, example: Tensor) -> Fast:
    try:
        made.prepare((example,))
    except Untraceable as error:
        raise ValueError(f"{type(made.core).__name__} can't be traced, which a narrower precision needs: {error}") from error
    return made


def _auto(
    model: nn.Module, network: nn.Module, single: nn.Module, images: Images, tolerance: Tolerance, example: Tensor, wanted: Wanted
) -> Fast:
    found = {"float32": _ready(Fast(model, CPU, torch.float32, wanted.tune, False, wanted.progress), example)}
    if images.made_up:
        found["float32"].told = [f"float32: {images.made_up}, and nothing narrower can be proven without calibration="]
        return found["float32"]
    proofs, told = [], []
    reference = Reference.measure(single, images.check, images.labels, classifies(network))
    if _has_bfloat16():
        try:
            half, certificate = _certified(model, network, reference, images, tolerance, example, wanted)
            proofs.append(certificate)
            found["bfloat16"] = half
        except ValueError as error:
            told.append(f"bfloat16: {error}")
    with bar("quantising", wanted.progress) as progress:
        try:
            made = quantized(network, images, tolerance, classifies(network), _saying(progress))
            proofs.append(made.proof)
            found["int8"] = _ready(Fast(model, CPU, torch.float32, wanted.tune, False, wanted.progress, made), example)
        except NotCertified as error:
            proofs.append(error.nearest)
        except ValueError as error:
            told.append(f"int8: {error}")
    seconds = _timed(dict(found), example)
    allowed = {"float32", *(proof.precision for proof in proofs if proof.proven)}
    best = min((name for name in seconds if name in allowed), key=seconds.__getitem__)
    chosen = found[best]
    chosen.proofs, chosen._proven_of = proofs, state_of(network)
    chosen.told = [f'{best}: the fastest whose certificate holds, by dtype="auto"', *table(seconds, proofs), *told]
    if best != "int8":  # whose plan shows its certificate
        chosen.told += [line for proof in proofs if proof.precision == best for line in proof.lines()]
    return chosen


def _has_bfloat16() -> bool:
    try:
        return computes(torch.bfloat16) is torch.bfloat16
    except ImportError:
        return False


def _certified(
    model: nn.Module, network: nn.Module, reference: Reference, images: Images, tolerance: Tolerance, example: Tensor, wanted: Wanted
) -> tuple[Fast, Certificate]:
    """Return a network in bfloat16 by the engine that computes in it, and what was compared of its plan for one image.

    Raises:
        ValueError: that engine can't compute this network.
    """
    some = slice(WITNESSES)
    right = tuple(one[some].clone() for one in reference.outputs)
    kept = Bfloat16(tuple(images.check.shape[1:]), images.check[some].clone(), right, math.inf, tolerance.error, state_of(network))
    half = Fast(model, CPU, torch.bfloat16, wanted.tune, False, wanted.progress)
    half._bfloat16 = kept
    half = _ready(half, images.check[:1])
    row = half.report().rows[0]
    if row.op != ENGINE:
        raise ValueError(f"{ENGINE}, which computes in it, can't run this network ({row.note or row.op})")
    certificate = _bfloat16(half, reference, images, tolerance)
    half._bfloat16 = replace(kept, error=kept.off(half, 1))
    return _ready(half, example), certificate


def _bfloat16(half: Fast, reference: Reference, images: Images, tolerance: Tolerance) -> Certificate:
    found = answers(half, images.check)
    engine = half.report().rows[0].op.partition("/")[0]
    by = f"{engine} {version_of(PACKAGES.get(engine, 'torch'))}"
    cpu = ", ".join(instructions())
    return compare(reference, found, "bfloat16", by, tolerance, calibrated=0, digest=images.check_digest, unproven=images.made_up, cpu=cpu)


def _timed(calls: dict[str, Callable[..., Any]], example: Tensor) -> dict[str, float]:
    """Return seconds of a call, each in its turn, so that what slows the machine down slows all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name] += turn(call, (example,))
    return {name: undisturbed(times) for name, times in taken.items()}


def table(seconds: dict[str, float], proofs: list[Certificate], base: str = "float32") -> list[str]:
    """Show precisions beside each other: time of a call, how many times as fast as one of them, and the error."""
    known = {proof.precision: proof for proof in proofs}
    lines = [f"precision   ms a call  of {base}'s speed  error"]
    for name in dict.fromkeys((*seconds, *known)):
        proof = known.get(name)
        said = "the reference" if name == "float32" else f"{proof.shares()}, {proof.state}" if proof else "not compared"
        times = f"{1e3 * seconds[name]:>9.2f}  {seconds[base] / seconds[name]:>17.2f}x" if name in seconds else f"{'-':>9}  {'-':>18}"
        lines.append(f"{name:<10} {times}  {said}")
    return lines


def measure(fast: Fast) -> None:
    """Time float32, bfloat16 and int8 at the shape that was planned last, and note what each takes and loses.

    int8 is calibrated on made-up images where the network is not in int8: its speed is right, and its error is UNPROVEN.

    Raises:
        ValueError: it has no plan on a CPU for one tensor of images.
    """
    plans = fast.report().plans
    shapes = plans[-1].shapes if plans else []
    if fast.device.type != "cpu" or len(shapes) != 1 or len(shapes[0]) != 4 or 0 in shapes[0]:
        raise ValueError("precisions are measured of a fast network on a CPU that has answered one tensor of images; call it once first")
    network, shape = fast.core, shapes[0]
    from zoo.kernels.comparing.sample_images import natural_images

    example, images = natural_images(shape, CPU), made_up(shape[1:])
    found = {
        "float32": fast
        if fast.precision == "float32"
        else _ready(Fast(fast._network, CPU, torch.float32, fast.tune, False, False), example)
    }
    single = on_device(network, CPU, torch.float32)
    reference = Reference.measure(single, images.check, None, classifies(network))
    anything = Tolerance(error=float("inf"))
    known, told = {proof.precision: proof for proof in fast.proofs}, []
    if _has_bfloat16():
        found["bfloat16"] = (
            fast if fast.precision == "bfloat16" else _ready(Fast(fast._network, CPU, torch.bfloat16, fast.tune, False, False), example)
        )
        known.setdefault("bfloat16", _bfloat16(found["bfloat16"], reference, images, anything))
    if fast.quantized is not None:
        found["int8"] = fast
    elif by_nncf.absent() and by_onnxruntime.absent():
        told.append(f"int8: {by_nncf.absent()}")
    else:
        try:
            with bar("quantising", fast.progress) as progress:
                made = quantized(network, images, anything, classifies(network), _saying(progress))
            found["int8"] = _ready(Fast(fast._network, CPU, torch.float32, fast.tune, False, False, made), example)
            known.setdefault("int8", made.proof)
        except ValueError as error:
            told.append(f"int8: {first_line(error)}")
    seconds = _timed(dict(found), example)
    lines = table(seconds, list(known.values()))
    usual = tolerance_of(None, reference.classifies)
    doubtful = {name for name, proof in known.items() if not replace(proof, tolerance=usual).holds()}
    for name in sorted(seconds, key=seconds.__getitem__):
        left = seconds[fast.precision] / seconds[name]
        if name == fast.precision or left <= 1.05:
            break
        how = "torch.bfloat16" if name == "bfloat16" else f'"{name}", calibration=images'
        if name not in doubtful:
            lines.append(f"left on the table: {name} is {left:.2f} times as fast here; fast(model, dtype={how})")
            break
        lines.append(
            f"left on the table, perhaps: {name} is {left:.2f} times as fast here, and keeps less on these images than the {usual} that "
            f"fast() asks for. On your images fast(model, dtype={how}) decides"
        )
    fast.told = [line for line in fast.told if not line.startswith(("precision ", *found, "left on"))] + lines + told


def _saying(progress: Callable[[int, int, str], None] | None) -> Callable[[str], None]:
    return (lambda text: None) if progress is None else (lambda text: progress(0, 1, text))
