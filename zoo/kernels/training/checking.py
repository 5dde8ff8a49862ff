"""The proof before training: each chain, then the whole network, forward and backward, against float32 and beside plain autocast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zoo.kernels.errors import Untraceable
from zoo.kernels.parity import ALLOWED, FLOAT32_FLOOR, Parity, natural_images, products
from zoo.kernels.report import Row
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import Recording, Ref, name_of, record
from zoo.kernels.training.replay import Chain, Replay, bind

IMAGES = 16
"""Images that a check computes with, where a batch has more."""
DRAWS = 3
"""Sets of images that are tried before a network's rounding is believed to be worse: one set's errors scatter by more than a tenth."""

KINDS = ("outputs", "input gradient", "parameter gradients", "statistics")


@dataclass(slots=True)
class Checked:
    """A replay that has passed."""

    replay: Replay
    rows: list[Row]
    parity: Parity | None
    notes: list[str]


@dataclass(slots=True)
class Verdict:
    """What a check has found: chains that are left alone, by their last value's number, and the errors of the whole."""

    without: dict[int, str] = field(default_factory=dict)
    errors: dict[str, Parity] = field(default_factory=dict)


def checked(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[Any, Verdict]) -> Checked:
    """Record a network, and replace of its chains those that compute what they should.

    Args:
        network: in the mode to be recorded, under the autocast to be recorded.
        args: positional arguments.
        kwargs: keyword arguments.
        known: verdicts of earlier checks; another number of images needs no other one.

    Raises:
        Untraceable: it can't be recorded, or without any chain a replay still computes something else.
    """
    device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu"))
    recording = record(network, args, kwargs, device)
    key = _kind(recording, device)
    if (verdict := known.get(key)) is None:
        few_args, few_kwargs = _few(args, kwargs, device)
        few = record(network, few_args, few_kwargs, device)
        if _kind(few, device) != key:  # what doesn't go by images is checked as it is
            few, few_args, few_kwargs = recording, args, kwargs
        verdict = known[key] = _Check(network, few, few_args, few_kwargs, device).verdict()
    steps, found, counted = steps_of(recording, verdict.without)
    notes = [f"{kind}: {parity}" for kind, parity in verdict.errors.items()]
    worst = max(verdict.errors.values(), key=lambda p: p.fast / max(p.eager, 1e-12), default=None)
    rows = [Row(chain.layers, "aten" if chain.note else chain.op, recording.values[chain.makes].shape, note=chain.note) for chain in found]
    return Checked(Replay(recording, steps, counted), rows, worst, notes)


def _kind(recording: Recording, device: torch.device) -> Any:
    """Return what a verdict holds for: the calls and the shapes without the number of images."""
    casts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    shapes = tuple(value.shape[1:] if value.place is None else value.shape for value in recording.values)
    return tuple((call.name, call.layer) for call in recording.calls), shapes, casts


def _few(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Make arguments as these with images like photographs, `IMAGES` at most."""
    counts = {leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()}
    count = min(IMAGES, *counts) if len(counts) == 1 else None

    def few(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = leaf.shape if count is None or not leaf.dim() else (count, *leaf.shape[1:])
        if not leaf.is_floating_point():
            return leaf[: shape[0]] if leaf.dim() else leaf
        return natural_images(tuple(shape), device).to(leaf.dtype)

    return pytree.tree_map(few, (args, kwargs))


@dataclass(slots=True)
class _Results:
    """What a step makes, in the order of `KINDS`."""

    groups: tuple[list[Tensor], ...]


class _Check:
    """Compares a recording's chains with what they stand for, then the whole with the network; the network itself isn't touched."""

    def __init__(self, network: nn.Module, recording: Recording, args: Any, kwargs: Any, device: torch.device) -> None:
        self.network, self.recording, self.args, self.kwargs, self.device = network, recording, args, kwargs, device
        casts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self.dtype = casts[1] if casts[0] else next((p.dtype for p in network.parameters()), torch.float32)
        self.exact = torch.float64 if self.dtype == torch.float32 else torch.float32

    def verdict(self) -> Verdict:
        """Compare; Untraceable where even without chains the replay is wrong."""
        verdict = Verdict()
        with _Calm(), products(tf32=False), torch.enable_grad(), self._casts():
            verdict.without = self._chains()
            for _ in range(2):
                verdict.errors = self._whole(verdict.without)
                wrong = [f"{kind}: {parity}" for kind, parity in verdict.errors.items() if not parity.passes(FLOAT32_FLOOR)]
                if not wrong:
                    return verdict
                _, found, _ = steps_of(self.recording, {})
                if all(chain.makes in verdict.without for chain in found):
                    break
                verdict.without |= {chain.makes: f"the whole network was wrong with it; {wrong[0]}" for chain in found}
        raise Untraceable(f"what was recorded computes something else; {wrong[0]}")

    def _casts(self) -> torch.autocast:
        """Return the autocast as it is, but without its memory, which would keep copies of the copies."""
        kind = self.device.type
        return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)

    def _twin(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Copy the network, in its mode."""
        memo: dict[int, Any] = {}
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            moved = tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)
            memo[id(tensor)] = nn.Parameter(moved, tensor.is_floating_point()) if isinstance(tensor, nn.Parameter) else moved
        return copy.deepcopy(self.network, memo)

    def _leaves(self, dtype: torch.dtype | None, seed: int) -> list[Any]:
        """Return the flat arguments of a call, those of floating numbers asking for gradients."""
        leaves = []
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                made = natural_images(tuple(leaf.shape), self.device, seed).to(leaf.dtype).to(dtype or leaf.dtype)
                leaves.append(made.contiguous(memory_format=_format(leaf)).requires_grad_())
            else:
                leaves.append(leaf)
        return leaves

    def _results(self, twin: nn.Module, call: Callable[[list[Any]], Any], leaves: list[Any], seed: int) -> _Results:
        """Run a step with a fixed gradient of the outputs, which no loss rounds."""
        outputs = [out for out in pytree.tree_leaves(call(leaves)) if isinstance(out, Tensor) and out.requires_grad]
        generator = torch.Generator().manual_seed(100 + seed)
        gradients = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]
        learnt = list(twin.parameters())
        asked = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = torch.autograd.grad(outputs, [*asked, *learnt], gradients, allow_unused=True) if outputs else ()
        of_inputs, of_parameters = found[: len(asked)], found[len(asked) :]
        statistics = [buffer for buffer in twin.buffers() if buffer.is_floating_point()]
        groups = [[out.detach() for out in outputs], list(of_inputs), list(of_parameters), statistics]
        return _Results(tuple([t if t is not None else torch.zeros(()) for t in group] for group in groups))

    def _whole(self, without: dict[int, str]) -> dict[str, Parity]:
        """Return the errors of the replay and of the plain network by kind, over more and more sets of images until they pass."""
        steps, _, counted = steps_of(self.recording, without)
        replay = Replay(self.recording, steps, counted)
        ours, plain = [[0.0] * len(KINDS), [0.0] * len(KINDS)]
        parities: dict[str, Parity] = {}
        for draw in range(DRAWS):
            _, spec = pytree.tree_flatten((self.args, self.kwargs))
            exact = self._twin(self.exact)

            def run(leaves: list[Any], module: nn.Module, spec: Any = spec) -> Any:
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                return module(*args, **kwargs)

            with torch.autocast(self.device.type, enabled=False):
                right = self._results(exact, lambda leaves, m=exact: run(leaves, m), self._leaves(self.exact, draw), draw)
            eager = self._twin()
            usual = self._results(eager, lambda leaves, m=eager: run(leaves, m), self._leaves(None, draw), draw)
            fast = self._twin()
            got = self._results(fast, lambda leaves, m=fast: replay(replay.at(m), leaves), self._leaves(None, draw), draw)
            for index in range(len(KINDS)):
                ours[index] += _mean_square(got.groups[index], right.groups[index])
                plain[index] += _mean_square(usual.groups[index], right.groups[index])
            count = next((leaf.shape[0] for leaf in self._leaves(None, 0) if isinstance(leaf, Tensor) and leaf.dim()), 1) * (draw + 1)
            parities = {
                kind: Parity(math.sqrt(ours[i] / (draw + 1)), math.sqrt(plain[i] / (draw + 1)), count) for i, kind in enumerate(KINDS)
            }
            if all(parity.passes(FLOAT32_FLOOR) for parity in parities.values()):
                break
        return parities

    def _chains(self) -> dict[int, str]:
        """Compare every chain with the calls that it stands for, on the values that reach it; return those that are worse."""
        steps, found, counted = steps_of(self.recording, {})
        if not found:
            return {}
        twin = self._twin()
        replay = Replay(self.recording, [], counted)
        slots = replay.slots(replay.at(twin), self._leaves(None, 0))
        last: dict[int, int] = {number: index for index, step in enumerate(steps) for number in step.reads}
        wrong: dict[int, str] = {}
        with torch.no_grad():
            for index, step in enumerate(steps):
                if isinstance(step, Chain):
                    with torch.enable_grad():
                        if reason := self._wrong(step, [slots[number] for number in step.reads]):
                            wrong[step.makes] = reason
                    calls: Sequence[Any] = step.calls
                else:
                    calls = (step,)
                for bound in bind(calls, range(len(slots)), set()):
                    bound.run(slots)
                for number in step.reads:
                    if last[number] == index and number not in self.recording.outputs:
                        slots[number] = None
        return wrong

    def _wrong(self, chain: Chain, reads: list[Tensor]) -> str:
        """Say in what a chain is worse than its calls, "" where it isn't."""
        places = [self.recording.values[number].place is not None for number in chain.reads]

        def plain(tensors: list[Tensor]) -> Tensor:
            slots: dict[int, Any] = dict(zip(chain.reads, tensors, strict=True))
            for bound in bind(chain.calls, [chain.makes], set(chain.reads)):
                bound.run(slots)  # pyright: ignore[reportArgumentType]
            return slots[chain.makes]

        def ours(tensors: list[Tensor]) -> Tensor:
            return chain.run(*tensors)

        gradient: list[Tensor] = []

        def results(run: Callable[[list[Tensor]], Tensor], dtype: torch.dtype | None) -> list[list[Tensor]]:
            given = []
            for tensor, own in zip(reads, places, strict=True):
                twin = tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)
                learns = twin.is_floating_point() and (not own or tensor.requires_grad or isinstance(tensor, nn.Parameter))
                given.append(twin.requires_grad_(learns))
            asked = [tensor for tensor in given if tensor.requires_grad]
            out = run([tensor.clone() if tensor.requires_grad and not own else tensor for tensor, own in zip(given, places, strict=True)])
            if not gradient:
                drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device, self.dtype)
                gradient.append(drawn.contiguous(memory_format=_format(out)))
            found = torch.autograd.grad(out, asked, gradient[0].to(out.dtype))
            rest = [t for t, own in zip(given, places, strict=True) if own and not t.requires_grad and t.is_floating_point()]
            return [[out.detach()], *[[t] for t in found], *[[t] for t in rest]]

        try:
            with torch.autocast(self.device.type, enabled=False):
                right = results(plain, self.exact)
            usual = results(plain, None)
            got = results(ours, None)
        except Exception as error:  # a kernel that doesn't compile, say
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        for index, (a, b, c) in enumerate(zip(got, usual, right, strict=True)):
            own, eager = math.sqrt(_mean_square(a, c)), math.sqrt(_mean_square(b, c))
            floor = FLOAT32_FLOOR if a[0].dtype == torch.float32 else 0.05 * torch.finfo(a[0].dtype).eps
            if a[0].shape != c[0].shape or not own <= max(ALLOWED * eager, floor):
                what = "output" if index == 0 else f"gradient or statistic {index}"
                return f"{what}: relative error {own:.1e}, PyTorch's {eager:.1e}"
        return ""


def _format(like: Tensor) -> torch.memory_format:
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _mean_square(got: list[Tensor], right: list[Tensor]) -> float:
    """Return the mean over tensors of the squared relative error; infinite where a number is missing."""
    total = torch.zeros((), dtype=torch.float64)
    sizes = [float(b.double().norm()) for b in right]
    floor = 1e-6 * max(sizes, default=0.0) + 1e-30  # a gradient that is zero but for rounding says nothing
    for a, b, size in zip(got, right, sizes, strict=True):
        total += float((a.double() - b.double()).norm()) ** 2 / max(size, floor) ** 2
    value = float(total) / max(1, len(right))
    return value if math.isfinite(value) else math.inf


class _Calm(TorchFunctionMode):
    """Makes drawing functions give their mean: rounding is compared, not luck; and nobody's random numbers are used up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "bernoulli_":
            return args[0].fill_(1)
        if name in ("uniform_", "normal_", "random_", "exponential_"):
            return args[0].fill_(0.5)
        if name in ("rand", "randn", "rand_like", "randn_like", "bernoulli"):
            return torch.full_like(args[0], 0.5) if isinstance(args[0], Tensor) else torch.full(args if isinstance(args[0], int) else args[0], 0.5)
        return func(*args, **kwargs)
