"""Time what could compute a step at its shape, each candidate only after its result was right: the fastest wins.

One whose memory lies outside of a plan's arena has to be faster by more than a measurement scatters (`OUT_OF_PLACE`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from zoo.kernels import ops
from zoo.kernels.comparing.parity import FLOAT32_FLOOR
from zoo.kernels.comparing.precision import products
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.measuring.fresh_thread import Do, elsewhere
from zoo.kernels.measuring.stopwatch import phase
from zoo.kernels.measuring.timing import NotCapturable, graph_time_us
from zoo.kernels.ops._narrow import MOST, narrowed
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning.binding import Bound, bind, blanks, empty, home, packed_image
from zoo.kernels.tuning.candidates import OTHERS, candidates
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.expected import Expected
from zoo.kernels.tuning.steps import ATEN, FOREIGN, IMAGE_OPS, MAKES_ITS_MAP, MERGED, Candidate, Setting
from zoo.kernels.tuning.tasks import Task

Progress = Callable[[int, int, str], None]


QUICK = {"conv": 6, "depthwise": 6, "stem_pool": 3, "join": 5, OTHERS: 4}
"""Launch configurations that "quick" tries for each op and step: those that take long to compile have few."""

LIMITS: dict[str, dict[str, int] | None] = {"part": QUICK | {"depthwise": 2}, "quick": QUICK, "full": None}
"""The same by how much is to be tried. "part" is of steps that only count as parts of a merged one, which tries the best depthwise
configurations once more."""

QUICK_S = 38.0
"""Seconds that "quick" takes for the steps of a network and shape."""

COMPILING = 0.65
"""Share of them that compiling takes at most: the best guess of every step first, then the second best; what is not done by then is left
out. Of a step that is timed late only the best guess of each op is, and none that a library would have to compile."""

STEP_SLACK = 1.25
"""How many times ATen's own error a candidate's may be on random inputs; one rounding at the end is all that a fused kernel needs."""

OUT_OF_PLACE = 1.03
"""What its time counts for a candidate with memory outside of the plan's arena, its map or cuBLAS's workspace. Measuring it again would
differ by a hundredth or two."""

SMALL_OUT_OF_PLACE = (1 << 20, 1.08)
"""The same for its map of at most so many bytes, where a graph holds 2 MiB: as much as all maps of a small network."""

CUBLAS_BYTES = 32 << 20
"""A graph's workspace of cuBLAS on Hopper, which it keeps for good."""

WORKSPACE = ((CUBLAS_BYTES, 1.5), (4 * CUBLAS_BYTES, 1.1))
"""What its time counts where the step's map is smaller than so many bytes: some microseconds are not worth half of a network's memory."""

_NEIGHBOURS = {torch.int8: 5e-3, torch.float8_e4m3fn: 2.5e-2}
"""Error of a value that is stored narrow: a sum in another order, or rounded to bfloat16 before, goes to the neighbour now and then, which
is an eighth away in fp8. It may be no more than what rounding to the type loses itself."""

GROUP = 16
"""Steps whose kernels are compiled together."""

_log = logging.getLogger("zoo.kernels")

SEARCHES = "cudnn_conv"
"""The op whose first call searches, for this thread alone: it is made where the next ones are, or would be made twice."""


_threads = threading.local()
"""A thread's own `stream`; the one that times has none."""


def random_inputs(node: Node, places: dict[Node, Place], setting: Setting) -> list[Tensor]:
    """Make inputs of a step in the layout that the plan gives them, one for what is read twice; gates are between 0 and 1."""
    generator = torch.Generator(setting.device).manual_seed(0)
    made: dict[Node, Tensor] = {}
    for role, source in zip(node.roles, node.inputs, strict=True):
        if source in made:
            continue
        value = empty(source, places, setting)
        if value.dtype in MOST:
            drawn = torch.empty(value.shape, dtype=torch.bfloat16, device=value.device).normal_(generator=generator)
            made[source] = value.copy_(narrowed(drawn.float() * (MOST[value.dtype] / 3), value.dtype))
            continue
        made[source] = value.uniform_(generator=generator) if role == "gate" else value.normal_(generator=generator)
    return [made[source] for source in node.inputs]


@dataclass(slots=True)
class _Trial:
    candidate: Candidate
    call: Callable[[], Any]
    failure: str = ""

    @property
    def op(self) -> str:
        return self.candidate.op


E = TypeVar("E", Candidate, _Trial)


@dataclass(slots=True)
class _Contest:
    """A step, inputs for it, and those that compete for it."""

    key: str
    node: Node
    inputs: list[Tensor]
    trials: list[_Trial]


def tune(
    nodes: dict[str, Node],
    places: dict[Node, Place],
    setting: Setting,
    levels: Mapping[str, str],
    compilers: Compilers,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Choice]]:
    """Time every candidate of some steps, each only after its result was right, and yield the fastest of each.

    Right means a relative error against the float32 reference of at most `STEP_SLACK` times ATen's own. All kernels are
    compiled first, for that takes longer than everything else; then one after the other is timed.

    Args: as of `choose.choose`, and

        nodes: the steps by their keys.
        levels: how much to try of each, by its key: one of `LIMITS`.
    """
    seconds = None if "full" in levels.values() else QUICK_S
    schedule = _Schedule(len(nodes), seconds)
    with phase("listing kernels"):
        found = contenders(nodes, places, setting, levels)
    found = _compiled(nodes, found, places, setting, None if seconds is None else COMPILING * seconds, compilers, progress)
    schedule.begin()
    done = 0
    count = min(32, 2 * (os.cpu_count() or 1))
    with elsewhere() as guessing, ThreadPoolExecutor(count, initializer=_own_stream, initargs=(setting.device,)) as pool:
        for group in _groups(nodes, setting):
            late = schedule.is_late(done)
            several = {key: _quickest(found[key]) if late else found[key] for key in group}
            contests = [_contest(key, nodes[key], several[key], places, setting) for key in group]
            end = done + len(group)
            torch.cuda.synchronize()  # the inputs are there before other streams read them
            with phase("first calls"):
                _first_calls(pool, contests, setting)
            while contests:
                contest = contests.pop(0)
                if progress is not None:
                    progress(done, len(nodes), contest.key)
                if schedule.is_late(end):
                    contest.trials = _first_of_each([trial for trial in contest.trials if not trial.failure])
                yield contest.key, _fastest(contest, setting, levels[contest.key], guessing)
                del contest  # and its maps, before the next group's are made
                done += 1
    torch.cuda.empty_cache()


def contenders(
    nodes: Mapping[str, Node], places: dict[Node, Place], setting: Setting, levels: Mapping[str, str], *, foreign: bool = True
) -> dict[str, list[Candidate]]:
    """Return what could compute each step, the most promising first, as much as its level asks for; libraries' kernels if `foreign`.

    Args: as of `tune`.
    """
    return {
        key: list(candidates(node, blanks(node, places, setting), setting, LIMITS[levels[key]], foreign=foreign))
        for key, node in nodes.items()
    }


def ranked(
    nodes: Mapping[str, Node], found: Mapping[str, list[Candidate]], places: dict[Node, Place], setting: Setting
) -> list[tuple[str, Task]]:
    """Return our kernels among the candidates and whose step each is, the first of every step before the second of any."""
    ours = [(key, [c for c in several if c.op not in FOREIGN]) for key, several in found.items()]
    order = sorted(((rank, key, one) for key, several in ours for rank, one in enumerate(several)), key=lambda entry: entry[0])
    return [(key, Task(nodes[key], places, setting, one)) for _, key, one in order]


class _Schedule:
    """Tells whether timing the steps takes longer than it may.

    Args:
        steps: how many there are.
        seconds: for all, compiling included, from now on; None for ever.
    """

    def __init__(self, steps: int, seconds: float | None) -> None:
        self._steps, self._until = max(1, steps), None if seconds is None else time.monotonic() + seconds
        self._from = 0.0

    def begin(self) -> None:
        """Say that everything is compiled."""
        self._from = time.monotonic()

    def is_late(self, done: int) -> bool:
        """Tell whether more time has gone than so many steps may take, a tenth of all more or less."""
        if self._until is None:
            return False
        return time.monotonic() - self._from > (self._until - self._from) * min(1.0, done / self._steps + 0.1)


def _first_of_each(several: list[E]) -> list[E]:
    """Return the best guess of each op: the first."""
    first: dict[str, E] = {}
    for one in several:
        first.setdefault(one.op, one)
    return list(first.values())


def _quickest(several: list[Candidate]) -> list[Candidate]:
    """Return the best guess of each op, and nothing that a library compiles where there is anything else."""
    return _first_of_each([one for one in several if not one.compiles] or several)


def _compiled(
    nodes: dict[str, Node],
    found: dict[str, list[Candidate]],
    places: dict[Node, Place],
    setting: Setting,
    seconds: float | None,
    compilers: Compilers,
    progress: Progress | None,
) -> dict[str, list[Candidate]]:
    """Compile our kernels among the candidates; leave out what is not done in time."""
    queue = ranked(nodes, found, places, setting)
    done = {(queue[i][0], str(queue[i][1].candidate)) for i in compilers.compile([task for _, task in queue], seconds, progress)}
    return {key: [c for c in several if c.op in FOREIGN or (key, str(c)) in done] for key, several in found.items()}


def _groups(nodes: dict[str, Node], setting: Setting) -> Iterator[list[str]]:
    """Split steps into groups whose inputs and outputs fit a part of the free memory together."""
    room = _room(setting)
    group: list[str] = []
    used = 0
    for key, node in nodes.items():
        elements = sum(torch.Size(n.shape).numel() for n in (*node.inputs, node, node))
        size = 4 * elements * setting.dtype.itemsize
        if group and (used + size > room or len(group) == GROUP):
            yield group
            group, used = [], 0
        group.append(key)
        used += size
    if group:
        yield group


def _room(setting: Setting) -> int:
    """Return the bytes that a group of steps may take: a part of what is free, for PyTorch or for all."""
    kept = torch.cuda.memory_reserved(setting.device) - torch.cuda.memory_allocated(setting.device)
    return (torch.cuda.mem_get_info(setting.device)[0] + kept) // 8


def _first_calls(pool: ThreadPoolExecutor, contests: list[_Contest], setting: Setting) -> None:
    """Make the first call of every trial, in threads; of one that had no room beside others once more, alone."""
    trials = [trial for contest in contests for trial in contest.trials]
    crowded = [trial for trial in trials if trial.op == SEARCHES and not _first_call(trial)]
    for some in _at_once([trial for trial in trials if trial.op != SEARCHES], [contest.node for contest in contests], setting):
        crowded += [trial for trial, fits in zip(some, pool.map(_first_call, some), strict=True) if not fits]
        torch.cuda.synchronize()
    for trial in crowded:
        torch.cuda.empty_cache()  # of all those threads' streams
        trial.failure = ""
        _ = _first_call(trial) if trial.op == SEARCHES else pool.submit(_first_call, trial).result()
        torch.cuda.synchronize()


def _at_once(trials: list[_Trial], nodes: list[Node], setting: Setting) -> Iterator[list[_Trial]]:
    """Split trials into as many as may run beside each other: each makes a result, and those of large maps would not fit."""
    largest = max(torch.Size(node.shape).numel() for node in nodes) * setting.dtype.itemsize
    count = max(2, _room(setting) // max(1, largest))
    for first in range(0, len(trials), count):
        yield trials[first : first + count]


def _contest(key: str, node: Node, found: list[Candidate], places: dict[Node, Place], setting: Setting) -> _Contest:
    inputs = random_inputs(node, places, setting)
    return _Contest(key, node, inputs, [_Trial(c, _call(node, c, inputs, places, setting)) for c in found])


def _fastest(contest: _Contest, setting: Setting, level: str, guessing: Do[Any]) -> Choice:
    node, inputs = contest.node, contest.inputs
    if not contest.trials and node.op in MERGED:
        return Choice(ATEN, {}, 0.0, 0.0, 0, level)  # so it stays its parts, and need not be run: in plain PyTorch it takes most memory
    with products(setting.tf32):
        with phase("right values"):
            expected = guessing(lambda: Expected(node, inputs, setting))
        with phase("PyTorch's operators"):
            off, aten_us = guessing(lambda: _plain(node, inputs, setting, expected))
        allowed = max(STEP_SLACK * off, _unseen(setting.dtype), _NEIGHBOURS.get(node.stored(setting.dtype), 0.0))
        best = Choice(ATEN, {}, aten_us, aten_us, 1 + len(contest.trials), level)
        for trial in contest.trials:
            if trial.failure:
                _log.debug("%s: %s failed: %s", contest.key, trial.candidate, trial.failure)
                continue
            try:
                with phase("checking kernels" if trial.op not in FOREIGN else "libraries' kernels"):
                    found = max(expected.errors(trial.call()))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # it ran once before, in another thread
                _log.debug("%s: %s failed: %s", contest.key, trial.candidate, error)
                continue
            if not found <= allowed:  # a library may add up in bfloat16; beyond the tolerance of the op something is wrong
                _log.debug("%s: %s is off by %.1e, %.1e is allowed", contest.key, trial.candidate, found, allowed)
                if not found <= ops.load(_module(trial.candidate)).TOLERANCE.get(setting.dtype, 0.0):
                    warnings.warn(f"{trial.candidate} is wrong for {contest.key} (error {found:.1e}); it is not used", stacklevel=2)
                continue
            with phase("timing kernels" if trial.op not in FOREIGN else "libraries' kernels"):
                us = _time(trial.call)
            if us * _beside(trial.candidate.op, node, setting) < best.us * _beside(best.op, node, setting):
                best = Choice(trial.candidate.op, trial.candidate.config, us, aten_us, best.tried, level)
    return best


def _plain(node: Node, inputs: list[Tensor], setting: Setting, expected: Expected) -> tuple[float, float]:
    """Return the error and the time, in microseconds, of a step in plain PyTorch.

    By cuDNN's first guess: to try all takes seconds of a depthwise convolution, and the others have `SEARCHES`. Whoever searches must not
    find that guess, so this is called in another thread. The plan does search for a step that stays so, and takes at most this time.
    """
    call = bind(node, Candidate(ATEN), setting)
    return max(expected.errors(call(inputs, None))), _time(lambda: call(inputs, None))


def _beside(op: str, node: Node, setting: Setting) -> float:
    """Return what its time counts for a candidate that may need memory beside the plan's arena."""
    nbytes = torch.Size(node.shape).numel() * setting.dtype.itemsize
    if op == "cublaslt":
        return next((counts for limit, counts in WORKSPACE if nbytes < limit), OUT_OF_PLACE)
    if op not in MAKES_ITS_MAP:
        return 1.0
    return SMALL_OUT_OF_PLACE[1] if nbytes <= SMALL_OUT_OF_PLACE[0] else OUT_OF_PLACE


def _unseen(dtype: torch.dtype) -> float:
    """Return an error that doesn't matter: of half precision a third of what rounding one output makes, which gates in float32 can have."""
    return FLOAT32_FLOOR if dtype == torch.float32 else torch.finfo(dtype).eps / 16


def _module(candidate: Candidate) -> str:
    return "depthwise" if candidate.op == "depthwise_squeeze" else candidate.op


def _time(call: Callable[[], Any]) -> float:
    try:
        return graph_time_us(call)
    except NotCapturable:
        return float("inf")


def _call(node: Node, candidate: Candidate, inputs: list[Tensor], places: dict[Node, Place], setting: Setting) -> Callable[[], Any]:
    bound: Bound | None = None
    given = list(inputs)
    if (out := home(node, places, setting)) is not None:
        out.fill_(float("nan"))

    def call() -> Any:
        nonlocal bound
        if bound is None:
            bound = bind(node, candidate, setting)
            if candidate.op in IMAGE_OPS:
                given[0] = packed_image(node, inputs[0])
        with followed_by_ours(candidate.op not in FOREIGN):
            return bound(given, out)

    from zoo.kernels.ops._overlap import followed_by_ours

    return call


def _own_stream(device: torch.device) -> None:
    torch.cuda.set_device(device)
    _threads.stream = torch.cuda.Stream()


def _first_call(trial: _Trial) -> bool:
    """Compile a trial's kernel by running it once; any failure, of the compiler's too, only means that it is no candidate.

    Returns:
        Whether there was room for it.
    """
    start, fits = time.perf_counter(), True
    try:
        with torch.no_grad(), torch.cuda.stream(getattr(_threads, "stream", None)):
            trial.call()
    except Exception as error:
        trial.failure, fits = f"{type(error).__name__}: {error}", not isinstance(error, torch.OutOfMemoryError)
    _log.debug("first call of %s: %.2f s", trial.candidate, time.perf_counter() - start)
    return fits
