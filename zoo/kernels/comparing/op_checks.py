"""Ops against their references: what the tests, `python -m zoo.kernels` and whoever adds an op check them with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.comparing.precision import products

Arguments = dict[str, Any]
Config = dict[str, Any]

BEFORE, AFTER = 3, 8
"""Channels beside a slice that a kernel writes: their odd sum leaves no alignment to rely on."""

SENTINEL = 80.0
"""In the channels beside the slice that a kernel writes: representable in every dtype, and no result of ours."""

TF32_TOLERANCE = 2e-3
"""Operands of 10 mantissa bits, rounded once or, as some units do, cut."""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        error: ||out - reference|| / ||reference||, infinite where an element was not written.
        tolerance: what is allowed.
        fault: anything else that was wrong, in words; "" if nothing.
    """

    error: float
    tolerance: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.fault and self.error <= self.tolerance


def draw(op: ModuleType, case: Arguments, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Arguments:
    """Return the arguments of a case, weights in PyTorch's layout, from a seeded generator on the device."""
    with torch.device(device):  # so that an op which names no device draws there too
        return op.make(case, dtype, device, torch.Generator(device).manual_seed(seed))


def packed(op: ModuleType, args: Arguments) -> Arguments:
    """Return the arguments as `launch` takes them: laid out by the op's `prepare`, or argument by argument by its `PACK`."""
    if hasattr(op, "prepare"):
        return op.prepare(**args)
    pack = getattr(op, "PACK", {})
    return {name: pack[name](value) if name in pack and value is not None else value for name, value in args.items()}


def tolerance(op: ModuleType, args: Arguments, dtype: torch.dtype) -> float:
    """Return the relative error allowed to an op in a dtype, or in another that it writes."""
    allowed = max(op.TOLERANCE[dtype], op.TOLERANCE.get(args.get("out_dtype"), 0.0))
    return max(allowed, TF32_TOLERANCE) if args.get("tf32") and dtype == torch.float32 else allowed


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Keep TF32 out of float32 convolutions and products on the GPU, for a reference; they may use it by default."""
    with products(tf32=False), torch.inference_mode():
        yield


def expected(op: ModuleType, args: Arguments) -> tuple[Tensor, ...]:
    """Return the reference's results in float32 from the same, already rounded, arguments."""
    with full_precision():
        return as_tuple(op.reference(**{name: _single(value) for name, value in args.items()}))


def as_tuple(result: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return an op's results as a tuple, one or several."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _single(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def outlines(op: ModuleType, args: Arguments) -> tuple[Tensor, ...]:
    """Return the results' shapes, dtypes and strides as tensors without data, as the reference has them on the meta device.

    A map is in channels_last memory, unless the op's `OUT` names another format; everything else is contiguous.
    """
    plain = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in args.items()}
    results, maps = as_tuple(op.reference(**plain)), getattr(op, "OUT", torch.channels_last)
    formats = (maps if r.dim() == 4 else torch.contiguous_format for r in results)
    return tuple(
        torch.empty(r.shape, dtype=r.dtype, device="meta", memory_format=format) for r, format in zip(results, formats, strict=True)
    )


def poison(dtype: torch.dtype) -> float:
    """Return what no result of a kernel may leave behind: NaN, or the largest number of a type that holds integers."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def poisoned(like: Tensor, device: torch.device | str, *, sliced: bool = False) -> tuple[Tensor, Tensor]:
    """Return an `out` full of NaN, or of the largest number where it holds integers, and the buffer that it lies in.

    Args:
        like: shape, strides and dtype.
        device: where.
        sliced: a channels_last map becomes a channel slice of a wider one, at an odd offset and of an odd pixel stride, the rest
            of which holds `SENTINEL`.

    Returns:
        `out` and the buffer, which is `out` itself where it is no slice.
    """
    out = torch.empty_like(like, device=device).fill_(poison(like.dtype))
    if not sliced or out.dim() != 4 or not out.numel() or not out.is_contiguous(memory_format=torch.channels_last):
        return out, out
    n, c, h, w = out.shape
    wide = (n, BEFORE + c + AFTER, h, w)
    buffer = torch.empty(wide, dtype=out.dtype, device=device, memory_format=torch.channels_last).fill_(SENTINEL)
    return buffer[:, BEFORE : BEFORE + c].fill_(poison(like.dtype)), buffer


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return ||out - reference|| / ||reference||; infinite where one of them is not finite and the other is not the same."""
    if not out.numel():
        return 0.0
    out, reference = out.float(), reference.float()
    if not bool(reference.isfinite().all()):
        same = torch.isclose(out, reference, rtol=0, atol=0, equal_nan=True) & ~reference.isfinite()
        out, reference = out.masked_fill(same, 0), reference.masked_fill(same, 0)
    off = torch.linalg.vector_norm(out - reference, dtype=torch.float64).item()
    size = torch.linalg.vector_norm(reference, dtype=torch.float64).item()
    error = off / size if size else off
    return error if error == error else torch.inf


def check(
    op: ModuleType,
    args: Arguments,
    dtype: torch.dtype,
    *,
    config: Config | None = None,
    sliced: bool = False,
    references: tuple[Tensor, ...] | None = None,
) -> Outcome:
    """Launch an op into a poisoned `out` and compare it with its reference in float32.

    Args:
        op: the op's module.
        args: its arguments, from `draw`.
        dtype: the dtype they were drawn in.
        config: launch parameters; the op's best guess if left out.
        sliced: write into a channel slice of a wider map, whose other channels must stay as they are.
        references: what `expected` gave, if it is there already.

    Returns:
        The largest error of the results, and what was wrong.
    """
    allowed = tolerance(op, args, dtype)
    references = expected(op, args) if references is None else references
    pairs = [poisoned(like, references[0].device, sliced=sliced) for like in outlines(op, args)]
    outs = [out for out, _ in pairs]
    with torch.inference_mode():
        results = as_tuple(op.launch(**packed(op, args), out=outs[0] if len(outs) == 1 else tuple(outs), config=config))
    if [r.shape for r in results] != [r.shape for r in references]:
        return Outcome(torch.inf, allowed, f"shapes {[tuple(r.shape) for r in results]}, not {[tuple(r.shape) for r in references]}")
    faults = {_fault(result, out, buffer) for result, (out, buffer) in zip(results, pairs, strict=True)} - {""}
    error = max(relative_error(out, reference) for out, reference in zip(outs, references, strict=True))
    return Outcome(error, allowed, "; ".join(sorted(faults)))


def _fault(result: Tensor, out: Tensor, buffer: Tensor) -> str:
    if result.dtype != out.dtype:
        return f"dtype {result.dtype}, not {out.dtype}"
    if out.numel() and result.data_ptr() != out.data_ptr():
        return "the result is not in `out`"
    if buffer is not out:
        beside = torch.cat([buffer[:, :BEFORE], buffer[:, BEFORE + out.shape[1] :]], dim=1)
        if not bool((beside == SENTINEL).all()):
            return "channels beside the slice were written"
    return ""


def compile_all(launches: Sequence[Callable[[], object]], device: torch.device, jobs: int) -> dict[int, Exception]:
    """Call every launch once, in threads, so that what they launch is compiled at the same time; results are thrown away.

    Args:
        launches: each launches a kernel on the current stream and touches nothing that another one writes.
        device: a CUDA device.
        jobs: threads; each call has a stream of its own.

    Returns:
        What was raised, by the launch's index.
    """

    def attempt(launch: Callable[[], object]) -> Exception | None:
        try:
            with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                launch()
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # whatever a config can't do on this device is told, and the config not used
            return error
        return None

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        raised = list(pool.map(attempt, launches))
    return {index: error for index, error in enumerate(raised) if error is not None}
