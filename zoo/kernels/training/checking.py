"""The proof before training: each chain, then the whole network, forward and backward, against float32 and beside plain autocast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import compacted, groups
from zoo.kernels.comparing.parity import ALLOWED, FLOAT32_FLOOR, Parity
from zoo.kernels.comparing.precision import casts_of, products
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.training import shared
from zoo.kernels.training.chains import steps_of, without_any
from zoo.kernels.training.recompute import WORTH, Remade, remade
from zoo.kernels.training.record import Recording
from zoo.kernels.training.replay import Beside, Chain, Key, Replay, Step, Without, bind
from zoo.kernels.training.undrawn import Undrawn

DRAWS = 4
"""Sets of images that are tried before a network's rounding is believed to be worse: one set's errors scatter by more than a tenth."""
SCATTER = 2.0
"""Standard errors of the mean over these sets by which a ratio may be too high: deep networks of fresh weights amplify any rounding."""

OUTLIER = 4.0
"""How many times worse than PyTorch's a single tensor's error may be; what is wrong is worse by orders."""
SHARE = 0.05
"""In half precision, this share of its rounding is the order of a sum, whatever a gradient's own dtype."""
SMALL = 0.1
"""A tensor's error is measured by its own norm, but by no less than this share of the mean of all of its kind."""

KINDS = ("outputs", "input gradient", "parameter gradients", "statistics")


@dataclass(slots=True)
class Verdict:
    """What a check has found: chains that are left alone, by their `key`, and the errors of the whole."""

    without: Without = field(default_factory=dict)
    beside: bool = True
    """Whether maps are made again and weights rounded together, which no chain does."""
    errors: dict[str, Parity] = field(default_factory=dict)


_LADDER = ((0.0, True), (0.0, False), (0.25, True), (0.5, True), (1.0, False))
"""What is tried until the whole is right: the share of the chains that goes, the worst first, for it may be worse though no chain alone
is; and whether what is done beside chains stays."""


def replay_of(
    recording: Recording, steps: list[Step], counted: dict[int, list[int]], recompute: bool | None, beside: bool, worth: int = WORTH
) -> Replay:
    """Return the steps as they run: what is done beside chains, maps made again and weights rounded together, all or not at all."""
    return Replay(recording, steps, counted, remade(recording, steps, recompute, worth) if beside else Remade(), rounds=beside)


class Check:
    """Compares a recording's chains with what they stand for, then the whole with the network; the network itself isn't touched.

    With `learning` every parameter and every image asks for a gradient, else those that do now.
    """

    def __init__(
        self,
        network: nn.Module,
        recording: Recording,
        args: Any,
        kwargs: Any,
        device: torch.device,
        recompute: bool | None = None,
        learning: bool = True,
    ) -> None:
        self.network, self.recording, self.args, self.kwargs, self.device = network, recording, args, kwargs, device
        self.recompute, self.learning = recompute, learning
        casts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self.dtype = casts[1] if casts[0] else next((p.dtype for p in network.parameters()), torch.float32)
        self.exact = torch.float64 if self.dtype == torch.float32 else torch.float32

    def verdict(self) -> Verdict:
        """Compare; Untraceable where even without chains the replay is wrong."""
        verdict = Verdict()
        with Undrawn(), shared.alone(), products(tf32=False), torch.enable_grad(), casts_of(self.device):
            wrong = ""
            ratios, verdict.without = self._chains()
            suspects = sorted(ratios, key=lambda key: -ratios[key])
            for share, verdict.beside in _LADDER:
                blamed = suspects[: math.ceil(share * len(suspects))] if share < 1 else list(without_any(self.recording))
                without = dict.fromkeys(blamed, f"the whole network was wrong with it: {wrong}") | verdict.without
                verdict.errors, wrong = self._whole(without, verdict.beside)
                if not wrong:
                    verdict.without = without
                    return verdict
        raise Untraceable(f"what was recorded computes something else; {wrong}")

    def twin(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Copy the network, in its mode."""
        memo = groups(self.network)
        learning = {id(parameter) for parameter in self.network.parameters()}  # stand-ins of `fast_step` are no `nn.Parameter`
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            moved = tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)
            learns = tensor.is_floating_point() and (self.learning or tensor.requires_grad)
            memo[id(tensor)] = nn.Parameter(moved, learns) if id(tensor) in learning else moved
        return compacted(shared.lonely(copy.deepcopy(self.network, memo)))

    def leaves(self, dtype: torch.dtype | None, seed: int) -> list[Any]:
        """Return the flat arguments of a call, those of floating numbers asking for gradients."""
        leaves = []
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                made = natural_images(tuple(leaf.shape), self.device, seed).to(leaf.dtype).to(dtype or leaf.dtype)
                last = leaf.dim() == 4 and leaf.is_cuda  # as a fast network lays them out
                made = made.contiguous(memory_format=torch.channels_last) if last else made
                leaves.append(made.requires_grad_(self.learning or leaf.requires_grad))
            else:
                leaves.append(leaf)
        return leaves

    def _results(self, twin: nn.Module, call: Callable[[list[Any]], Any], leaves: list[Any], seed: int) -> list[list[Tensor]]:
        """Run a step with a fixed gradient of the outputs, which no loss rounds; return what it makes, in the order of `KINDS`."""
        every = [out for out in pytree.tree_leaves(call(leaves)) if isinstance(out, Tensor) and out.is_floating_point()]
        outputs = [out for out in every if out.requires_grad]
        generator = torch.Generator().manual_seed(100 + seed)
        gradients = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]
        learnt = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        asked = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = torch.autograd.grad(outputs, [*asked, *learnt], gradients, allow_unused=True) if outputs else ()
        wanted = [*asked, *learnt]
        found = [
            torch.zeros_like(of) if gradient is None else gradient
            for gradient, of in zip(found or [None] * len(wanted), wanted, strict=True)
        ]
        statistics = [buffer for buffer in twin.buffers() if buffer.is_floating_point()]
        return [[out.detach() for out in every], found[: len(asked)], found[len(asked) :], statistics]

    def _whole(self, without: Without, beside: bool = True) -> tuple[dict[str, Parity], str]:
        """Return the errors of the replay and of the plain network by kind, over more and more sets of images until they pass.

        Of several tensors it is the geometric mean of their errors that is compared, which one tensor's luck moves little; and no
        single tensor may be `OUTLIER` times worse.
        """
        steps, _, counted = steps_of(self.recording, without)
        replay = replay_of(self.recording, steps, counted, self.recompute, beside, worth=0)  # with more images it may be worth it
        return self._errors(replay, beside)

    def compared(self, replay: Replay) -> tuple[dict[str, Parity], str]:
        """Compare a replay as `verdict` compares the whole; return the errors by kind, and what is wrong, "" where nothing is."""
        with Undrawn(), shared.alone(), products(tf32=False), torch.enable_grad(), casts_of(self.device):
            return self._errors(replay, beside=True)

    def _errors(self, replay: Replay, beside: bool) -> tuple[dict[str, Parity], str]:
        """Return the errors of a replay and of the plain network by kind, and what is wrong; a failing call only where `beside` is."""
        _, spec = pytree.tree_flatten((self.args, self.kwargs))

        def plainly(module: nn.Module) -> Callable[[list[Any]], Any]:
            def call(leaves: list[Any]) -> Any:
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                return module(*args, **kwargs)

            return call

        logs: dict[str, list[tuple[list[float], list[float]]]] = {kind: [] for kind in KINDS}
        parities: dict[str, Parity] = {}
        wrong = ""
        for draw in range(DRAWS):
            exact, eager, fast = self.twin(self.exact), self.twin(), self.twin()
            with torch.autocast(self.device.type, enabled=False):
                right = self._results(exact, plainly(exact), self.leaves(self.exact, draw), draw)
            del exact
            usual = self._results(eager, plainly(eager), self.leaves(None, draw), draw)
            places = replay.at(fast)
            try:
                got = self._results(fast, lambda leaves, places=places: replay(places, leaves), self.leaves(None, draw), draw)
            except RuntimeError as error:
                if not beside or isinstance(error, torch.OutOfMemoryError):
                    raise
                return parities, str(error).splitlines()[0]  # what is done beside chains is left out next
            count = next((leaf.shape[0] for leaf in self.leaves(None, 0) if isinstance(leaf, Tensor) and leaf.dim()), 1) * (draw + 1)
            wrong = ""
            for index, kind in enumerate(KINDS):
                logs[kind].append((_logs(got[index], right[index]), _logs(usual[index], right[index])))
                ours, plain = ([sum(column) / (draw + 1) for column in zip(*rows, strict=True)] for rows in zip(*logs[kind], strict=True))
                if not ours:
                    continue
                parities[kind] = Parity(math.exp(sum(ours) / len(ours)), math.exp(sum(plain) / len(plain)), count, FLOAT32_FLOOR)
                over = [
                    math.exp(a) / max(OUTLIER * math.exp(max(b, sum(plain) / len(plain))), FLOAT32_FLOOR)
                    for a, b in zip(ours, plain, strict=True)
                ]
                worst = max(range(len(over)), key=lambda place: over[place] if over[place] == over[place] else math.inf)
                said = f"{_tensor(fast, kind, worst, len(over))} error is {over[worst] * OUTLIER:.1f} times PyTorch's"
                if not parities[kind].passes() and _surely_worse(logs[kind]):
                    wrong = wrong or f"{kind}: {parities[kind]}; {said}"
                elif not over[worst] <= 1:
                    wrong = wrong or f"{kind}: {said}"
            if not wrong:
                break
        return parities, wrong

    def _chains(self) -> tuple[dict[Key, float], Without]:
        """Compare every chain with the calls that it stands for, on the values that reach it.

        Returns:
            by a chain's `key`, how many times PyTorch's its error is, of those that may be used; of the others the reason.
        """
        ratios: dict[Key, float] = {}
        wrong: Without = {}
        seen: set[tuple[int, str]] = set()
        while True:  # a chain that falls back may leave smaller ones in its place
            steps, found, counted = steps_of(self.recording, wrong)
            fresh = {(chain.makes, chain.op) for chain in found if not chain.note} - seen
            if not fresh:
                return {chain.key: ratios[chain.key] for chain in found if not chain.note}, wrong
            seen |= fresh
            self._compare_chains(steps, counted, fresh, ratios, wrong)

    def _compare_chains(
        self, steps: list[Any], counted: dict[int, list[int]], fresh: set[tuple[int, str]], ratios: dict[Key, float], wrong: Without
    ) -> None:
        """Go through the network once, and note how each of the chains in `fresh` compares."""
        twin = self.twin()
        replay = Replay(self.recording, [], counted)
        slots = replay.slots(replay.at(twin), self.leaves(None, 0))
        last: dict[int, int] = {number: index for index, step in enumerate(steps) for number in step.reads}
        with torch.no_grad():
            for index, step in enumerate(steps):
                if isinstance(step, Chain):
                    if (step.makes, step.op) in fresh:
                        with torch.enable_grad():
                            ratio, reason = self._compared(step, [slots[number] for number in step.reads])
                        if reason:
                            wrong[step.key] = reason
                        else:
                            ratios[step.key] = ratio
                    calls: Sequence[Any] = step.calls
                else:
                    calls = (step.call if isinstance(step, Beside) else step,)
                for bound in bind(calls, range(len(slots)), set()):
                    bound.run(slots)
                for number in step.reads:
                    if last[number] == index and number not in self.recording.outputs:
                        slots[number] = None

    def _compared(self, chain: Chain, reads: list[Tensor]) -> tuple[float, str]:
        """Return how many times its calls' error a chain's is, and in what it is worse than they may be, "" where it isn't.

        A chain that reads what the network is given goes another way back where nobody asks a gradient of that, as in most steps. So
        both ways are compared.
        """
        images = {number for _, number in self.recording.inputs}.intersection(chain.reads)
        ratio, reason = self._compared_learning(chain, reads, chain.drawn)
        if images and not reason:
            other, reason = self._compared_learning(chain, reads, chain.drawn | images)
            ratio = max(ratio, other)
        return ratio, reason

    def _compared_learning(self, chain: Chain, reads: list[Tensor], still: frozenset[int]) -> tuple[float, str]:
        """Compare a chain where no gradient is asked of the values `still`."""
        places = [self.recording.values[number].place is not None for number in chain.reads]

        def plain(tensors: list[Tensor]) -> list[Tensor]:
            slots: dict[int, Any] = dict(zip(chain.reads, tensors, strict=True))
            for bound in bind(chain.calls, [chain.makes], set(chain.reads)):
                bound.run(slots)  # pyright: ignore[reportArgumentType]
            return [slots[chain.makes]] if chain.branch_out is None else [slots[chain.makes], tensors[0]]

        def ours(tensors: list[Tensor]) -> list[Tensor]:
            made = chain.run(*tensors)
            made = [made] if isinstance(made, Tensor) else list(made)
            return made[:1] if chain.branch_out is None else [made[0], made[-1]]

        gradients: list[Tensor] = []
        compared: list[str] = []
        values = [self.recording.values[number] for number in chain.reads]
        names = [value.place[1] if value.place is not None else f"map {index}" for index, value in enumerate(values)]

        def results(run: Callable[[list[Tensor]], list[Tensor]], dtype: torch.dtype | None) -> list[Tensor]:
            given = []
            for number, tensor, own in zip(chain.reads, reads, places, strict=True):
                twin = tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)
                learns = twin.is_floating_point() and (not own or tensor.requires_grad or isinstance(tensor, nn.Parameter))
                given.append(twin.requires_grad_(learns and number not in still))
            asked = [tensor for tensor in given if tensor.requires_grad]
            outs = run([tensor.clone() if tensor.requires_grad and not own else tensor for tensor, own in zip(given, places, strict=True)])
            if not gradients:
                generator = torch.Generator().manual_seed(7)
                drawn = [torch.randn(out.shape, generator=generator).to(out.device, self.dtype) for out in outs]
                gradients.extend(g.contiguous(memory_format=_format(out)) for g, out in zip(drawn, outs, strict=True))
            given_back = [g.to(out.dtype, copy=True) for g, out in zip(gradients, outs, strict=True)]  # a branch's is added to in place
            learning = [(out, g) for out, g in zip(outs, given_back, strict=True) if out.requires_grad]  # images that are handed on don't
            found = torch.autograd.grad([out for out, _ in learning], asked, [g for _, g in learning]) if asked else ()
            buffers = [i for i, (t, own) in enumerate(zip(given, places, strict=True)) if own and not t.requires_grad]
            buffers = [i for i in buffers if given[i].is_floating_point()]
            compared[:] = ["output", *(f"gradient of {names[i]}" for i, t in enumerate(given) if t.requires_grad)]
            compared.extend(f"statistic {names[i]}" for i in buffers)
            return [outs[0].detach(), *found, *(given[i] for i in buffers)]

        try:
            with torch.autocast(self.device.type, enabled=False):
                right = results(plain, self.exact)
            usual = results(plain, None)
            got = results(ours, None)
        except Exception as error:  # a kernel that doesn't compile, say
            return math.inf, f"{type(error).__name__}: {first_line(error)}"
        ratio = 0.0
        floor = FLOAT32_FLOOR if self.dtype == torch.float32 else SHARE * torch.finfo(self.dtype).eps
        spread = [c for what, c in zip(compared, right, strict=True) if what == "statistic running_var"]
        deviation = float(spread[0].double().sqrt().norm()) * 0.1 if spread else 0.0
        for what, a, b, c in zip(compared, got, usual, right, strict=True):
            if a.shape != c.shape or a.dtype != b.dtype:
                return math.inf, f"{what}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if chain.whole:
            return _together(compared, got, usual, right, floor)
        for what, a, b, c in zip(compared, got, usual, right, strict=True):
            least = deviation if what == "statistic running_mean" else 0.0  # a mean of nearly nothing is measured by what it is of
            own, eager = (math.exp(_logs([t], [c], least)[0]) for t in (a, b))
            allowed = max(ALLOWED * eager, floor)
            if not own <= allowed:
                return math.inf, f"{what}: relative error {own:.1e}, PyTorch's {eager:.1e}"
            ratio = max(ratio, own / allowed)
        return ratio, ""


def _together(compared: list[str], got: list[Tensor], usual: list[Tensor], right: list[Tensor], floor: float) -> tuple[float, str]:
    """Return how a chain of many layers compares, as `_whole` compares networks: its tensors by kind, none far worse than PyTorch's."""
    ratio = 0.0
    kinds = [what.split(" running")[0] for what in compared]
    kinds = ["gradients of parameters" if kind.startswith("gradient") and " map " not in kind else kind for kind in kinds]
    for kind in dict.fromkeys(kinds):
        mine = [index for index, other in enumerate(kinds) if other == kind]
        own, eager = (_logs([of[index] for index in mine], [right[index] for index in mine]) for of in (got, usual))
        means = [math.exp(sum(logs) / len(logs)) for logs in (own, eager)]
        allowed = max(ALLOWED * means[1], floor)
        if not means[0] <= allowed:
            return math.inf, f"{kind}: relative error {means[0]:.1e}, PyTorch's {means[1]:.1e}"
        for index, a, b in zip(mine, own, eager, strict=True):
            if not math.exp(a) <= max(OUTLIER * max(math.exp(b), means[1]), floor):
                return math.inf, f"{compared[index]}: relative error {math.exp(a):.1e}, PyTorch's {math.exp(b):.1e}"
        ratio = max(ratio, means[0] / allowed)
    return ratio, ""


def _tensor(network: nn.Module, kind: str, place: int, count: int) -> str:
    """Name a tensor of a kind, in the genitive; "one tensor's" where none of these has a name."""
    named = {
        "parameter gradients": [name for name, parameter in network.named_parameters() if parameter.requires_grad],
        "statistics": [name for name, buffer in network.named_buffers() if buffer.is_floating_point()],
    }.get(kind, [])
    return f"{named[place]}'s" if len(named) == count else "one tensor's"


def _format(like: Tensor) -> torch.memory_format:
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _surely_worse(logs: list[tuple[list[float], list[float]]]) -> bool:
    """Tell whether the ratio of errors is above the allowed one by more than its scatter over the sets of images."""
    ratios = [sum(ours) / len(ours) - sum(plain) / len(plain) for ours, plain in logs]
    mean = sum(ratios) / len(ratios)
    if len(ratios) < DRAWS or not math.isfinite(mean):
        return True
    deviation = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1))
    return mean - SCATTER * deviation / math.sqrt(len(ratios)) > math.log(ALLOWED)


def _logs(got: list[Tensor], right: list[Tensor], least: float = 0.0) -> list[float]:
    """Return the logarithm of each tensor's relative error; infinite where a number is missing, or the shape is another one.

    A tensor that is small beside the others, as the gradient of a shift that the next BatchNorm takes out again, is measured by them.
    """
    sizes = [float(torch.linalg.vector_norm(b, dtype=torch.float64)) for b in right]
    floor = least + SMALL * math.sqrt(sum(size * size for size in sizes) / max(1, len(sizes))) + 1e-30
    found = []
    for a, b, size in zip(got, right, sizes, strict=True):
        off = float(torch.linalg.vector_norm(a.to(b.dtype) - b, dtype=torch.float64)) if a.shape == b.shape else math.inf
        error = off / max(size, floor)
        found.append(math.log(max(error, 1e-12)) if math.isfinite(error) else math.inf)
    return found
