"""What differs between two checkpoints, in whatever formats they are: tensor by tensor, with the step that makes them equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any, Literal

import numpy as np

from convert.core import COUNTER, by_module
from convert.pairing import Pairs, alike, folded, norms_behind, norms_by_scale, pair, ranks
from convert.sets import ALL, chosen_of_each
from convert.source import Source, Stored, in_memory
from convert.steps import FlattenOrder
from convert.topology import of_graph
from weights.wording import counted

Verdict = Literal["equal", "equal after a step", "equal to rounding", "different", "only in A", "only in B"]

ROUNDING = 1e-5
"""Of the largest value: as much as two computations of the same tensor in float32 may differ by."""
CHUNK = 1 << 22
"""Numbers that are widened at a time."""
EPSILONS = (1e-5, 1e-3, 1e-4, 1e-6, 1e-8, 2e-5, 0.0)
"""What frameworks add to a BatchNorm's variance, the commonest first."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, or a pair.

    Attributes:
        a, b: its names; "" where there is none.
        shape_a, shape_b: in PyTorch's form.
        verdict: what came out.
        step: what makes the two equal.
        max_abs: the largest difference, after the step.
        max_rel: the same, as a part of the largest value.
        paired_by: "name", "values", "shape" or "fold".
    """

    a: str
    b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    verdict: Verdict
    step: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    paired_by: str = ""


@dataclass(frozen=True, slots=True)
class Diff:
    """All tensors of two files, in A's order, those that only B has at the end; `counters` are the step counters, not compared."""

    a: str
    b: str
    entries: tuple[Entry, ...]
    counters: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors came out how."""
        return dict(Counter(entry.verdict for entry in self.entries))

    @property
    def identical(self) -> bool:
        """Whether every tensor of each file is in the other, equal as it is or but for rounding."""
        return all(entry.verdict in ("equal", "equal to rounding") for entry in self.entries)

    @property
    def same(self) -> bool:
        """Whether they differ by nothing but named steps and rounding."""
        return all(entry.verdict.startswith("equal") for entry in self.entries)

    def summary(self) -> str:
        steps = Counter("a fold of BatchNorms" if entry.step.startswith("a fold") else entry.step for entry in self.entries if entry.step)
        said = [f"{count} {verdict}" for verdict, count in sorted(self.counts.items())]
        said += [f"{step}: {counted(count, 'tensor')}" for step, count in steps.most_common()]
        said += [f"{counted(len(self.counters), 'step counter')} of BatchNorms not compared"] if self.counters else []
        return "; ".join(said) or "no tensors"

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "identical": self.identical,
            "counts": self.counts,
            "not_compared": list(self.counters),
            "tensors": [asdict(entry) for entry in self.entries],
        }

    def render(self, *, equal: bool = False) -> Any:
        """Show it as a rich table: what differs, and of what is equal only the number, unless `equal` ones are asked for."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "A", "B", "shape", "verdict", "largest difference", "relative", title=f"{self.a} and {self.b}", caption=self.summary()
        )
        for entry in self.entries:
            if equal or entry.verdict != "equal" or entry.step:
                shapes = dict.fromkeys(
                    "x".join(map(str, s)) or "scalar" for s, n in ((entry.shape_a, entry.a), (entry.shape_b, entry.b)) if n
                )
                verdict = f"equal after {entry.step}" if entry.verdict == "equal after a step" else entry.verdict
                verdict += f", {entry.step}" if entry.step and entry.verdict != "equal after a step" else ""
                numbers = (f"{entry.max_abs:.3g}", f"{entry.max_rel:.3g}") if entry.max_abs else ("", "")
                table.add_row(*(Text(_printable(cell)) for cell in (entry.a, entry.b, " / ".join(shapes), verdict, *numbers)))
        return table


def diff(a: Source, b: Source, weights_of: str | None = ALL) -> Diff:
    """Compare two checkpoints, tensor by tensor, in PyTorch's form and as cross-correlation as far as the files say.

    Tensors are paired by name, else by values.

    Args:
        a, b: open files of any format, with all their sets of weights.
        weights_of: of files with several sets, the one that is compared: "raw", "ema", its name in the file, or "all"; None takes the
            raw ones with a warning.

    Returns:
        An entry for each tensor but BatchNorms' step counters, which say only how long was trained. Equal means
        bit for bit, but for the sign of zero and a wider type of the same numbers.
    """
    if weights_of != ALL:
        a.tensors, b.tensors = chosen_of_each([(a.path, a.tensors), (b.path, b.tensors)], weights_of)
    ours, theirs = _kept(a), _kept(b)
    pairs = pair(ours, theirs)
    channels = sorted({s.shape[0] for s in (*ours.values(), *theirs.values()) if len(s.shape) > 2})
    found: dict[str, Entry] = {}
    for name, (other, how) in pairs.items():
        found[name] = replace(_compared(name, other, ours[name], theirs[other], channels), paired_by=how)
    _swapped_norms(found, pairs, ours, theirs)
    taken = {other for other, _ in pairs.values()}
    _refolded(found, ours, theirs)
    taken |= _fold(found, ours, theirs, a)
    taken |= _fold(found, theirs, ours, b, turned=True)
    entries = [found.get(name) or Entry(name, "", stored.shape, (), "only in A") for name, stored in ours.items()]
    extra = [entry for name, entry in found.items() if name not in ours]
    entries += extra
    entries += [Entry("", name, (), stored.shape, "only in B") for name, stored in theirs.items() if name not in taken]
    counters = dict.fromkeys(name for source in (a, b) for name in source.tensors if name.endswith(COUNTER))
    return Diff(str(a.path), str(b.path), tuple(entries), tuple(counters))


def _kept(source: Source) -> dict[str, Stored]:
    return {name: stored for name, stored in source.tensors.items() if not name.endswith(COUNTER)}


def _compared(name: str, other: str, a: Stored, b: Stored, channels: Sequence[int]) -> Entry:
    entry = Entry(name, other, a.shape, b.shape, "equal")
    x, y = a.as_correlation().array(), b.as_correlation().array()
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        same = x.shape == y.shape and bool((x == y).all())
        return replace(entry, verdict="equal" if same else "different")
    by_convention = "flip" if {a.convention, b.convention} == {"correlation", "convolution"} and max(x.shape[2:], default=1) > 1 else ""
    both = x.dtype.kind == y.dtype.kind == "f"
    if x.shape == y.shape and (np.array_equal(x, y) or (both and np.array_equal(x, y, equal_nan=True))):
        cast = f"cast from {x.dtype} to {y.dtype}" if x.dtype != y.dtype else ""
        said = ", ".join(filter(None, (f"{by_convention} as the files say" if by_convention else "", cast)))
        return replace(entry, verdict="equal", step=said)
    if x.size != y.size:
        return replace(entry, verdict="different", max_abs=float("inf"), max_rel=float("inf"))
    if x.shape == y.shape and x.dtype != y.dtype and np.array_equal(*_narrowed(x, y)):
        return replace(entry, verdict="equal after a step", step=f"a cast from {x.dtype} to {y.dtype}", **_errors(x, y))
    if x.shape == y.shape and _near(x, y):
        return replace(entry, verdict="equal to rounding", **_errors(x, y))
    if alike(ranks(x), ranks(y)):
        near: Entry | None = None
        for step, turned in _variants(x, y.shape, channels):
            if np.array_equal(turned, y):
                return replace(entry, verdict="equal after a step", step=step)
            if near is None and _near(turned, y):
                near = replace(entry, verdict="equal after a step", step=f"{step}, to rounding", **_errors(turned, y))
        if near is not None:
            return near
    return replace(entry, verdict="different", **_errors(x, y))


def _variants(x: np.ndarray, shape: tuple[int, ...], channels: Sequence[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Try what is commonly done to a tensor, the simplest first."""
    space = tuple(range(2, x.ndim))
    if x.ndim > 2 and x.shape == shape:
        yield "a flip of its kernels", np.flip(x, space)
        yield "an exchange of its input channels (BGR)", np.flip(x, 1)
    if x.ndim == 4:
        turned = x.transpose(0, 1, 3, 2)
        if turned.shape == shape:
            yield "a transposition of height and width", turned
            yield "a flip and a transposition of height and width", np.flip(turned, space)
        if x.shape == shape:
            yield "a flip and an exchange of its input channels (BGR)", np.flip(x, (1, *space))
            yield "a flip of its rows alone", np.flip(x, 2)
            yield "a flip of its columns alone", np.flip(x, 3)
    for axes in permutations(range(x.ndim)):
        if axes != tuple(range(x.ndim)) and tuple(x.shape[axis] for axis in axes) == shape and x.ndim <= 5:
            turned = x.transpose(axes)
            yield f"a transposition ({','.join(map(str, axes))})", turned
            if x.ndim > 2:
                yield (
                    f"a transposition ({','.join(map(str, axes))}) and a flip",
                    np.flip(turned, tuple(i for i, a in enumerate(axes) if a > 1)),
                )
    if x.ndim == 2:
        for y in (x, x.T) if x.shape != x.shape[::-1] else (x,):
            if y.shape == shape:
                yield from _reflattened(y, channels)
    if x.shape != shape:
        yield "a reshape", x.reshape(shape)


def _reflattened(x: np.ndarray, channels: Sequence[int]) -> Iterator[tuple[str, np.ndarray]]:
    for count in channels:
        pixels, rest = divmod(x.shape[1], count)
        sides = [h for h in range(1, int(pixels**0.5) + 1) if pixels % h == 0] if not rest and pixels > 1 else []
        grids = dict.fromkeys(grid for h in reversed(sides) for grid in ((h, pixels // h), (pixels // h, h)))
        for height, width in grids:
            for order in ("hwc", "cwh", "whc"):
                step = FlattenOrder(count, height, width, order)
                yield f"another flatten order ({order} to chw, {count}x{height}x{width})", step.do(x)
                yield f"another flatten order (chw to {order}, {count}x{height}x{width})", step.undo(x)


def _swapped_norms(found: dict[str, Entry], pairs: Pairs, a: Mapping[str, Stored], b: Mapping[str, Stored]) -> None:
    """Name the exchange of gamma and beta, which no tensor shows by itself."""
    for module in by_module(a):
        gamma, beta = f"{module}.weight", f"{module}.bias"
        if f"{module}.running_mean" not in a or not {gamma, beta} <= found.keys():
            continue
        to_gamma, to_beta = pairs[gamma][0], pairs[beta][0]
        by_name = to_gamma.endswith(".weight") and not found[gamma].verdict == found[beta].verdict == "equal"
        crossed = np.array_equal(a[gamma].array(), b[to_beta].array()) and np.array_equal(a[beta].array(), b[to_gamma].array())
        by_value = to_gamma.rpartition(".")[::2] == (to_beta.rpartition(".")[0], "bias") and to_beta.endswith(".weight")
        if (by_name and crossed) or by_value:
            for name in (gamma, beta):
                step = "an exchange of gamma and beta"
                found[name] = replace(found[name], verdict="equal after a step", step=step, max_abs=0.0, max_rel=0.0)


def _refolded(found: dict[str, Entry], a: Mapping[str, Stored], b: Mapping[str, Stored]) -> None:
    """Name what a round trip through a format without BatchNorms changes: they do less, and the layers before them the rest."""
    for one, other in ((a, b), (b, a)):
        for eps in EPSILONS if any(entry.verdict == "different" for entry in found.values()) else ():
            both = {conv: norm for conv, norm in norms_by_scale(one, other, eps).items() if f"{norm}.running_var" in other}
            for conv, norm in both.items():
                for name, entry in found.items():
                    if name == entry.b and name.rpartition(".")[0] in (conv, norm) and entry.verdict == "different":
                        found[name] = replace(entry, verdict="equal after a step", step=f"a fold of {norm} (eps {eps:g})", paired_by="fold")
            if both:
                return


def _fold(
    found: dict[str, Entry], full: Mapping[str, Stored], short: Mapping[str, Stored], source: Source, *, turned: bool = False
) -> set[str]:
    """Find BatchNorms that one file has folded into its convolutions; name their tensors, and return those of B that this explains."""
    if not any(name.endswith("running_mean") for name in full) or any(name.endswith("running_mean") for name in short):
        return set()
    web = of_graph(source.graph, set(by_module(full))) if source.graph else None
    by_scale = (norms_by_scale(full, short, eps) for eps in EPSILONS) if web is None else iter(())
    norms = norms_behind(full, web.inputs if web else None) if web else {}
    norms = norms or next((each for each in by_scale if each), None) or norms_behind(full, None)
    first = next(iter(norms), None)
    if first is None:
        return set()
    exact = {entry.b if not turned else entry.a for entry in found.values() if entry.verdict.startswith("equal")}
    left = {name: stored for name, stored in short.items() if name not in exact}
    explained: set[str] = set()
    for eps in EPSILONS:
        made = folded(full, eps, {first: norms[first]})
        if len(pair({n: in_memory(n, x) for n, x in made.items()}, left)) and _folds(made, left):
            arrays = folded(full, eps, norms)
            stand = {name: in_memory(name, array) for name, array in arrays.items()}
            for name, (there, _) in pair(stand, left).items():
                if not (arrays[name].shape == left[there].shape and _near(arrays[name], left[there].as_correlation().array())):
                    continue
                conv = name.rpartition(".")[0]
                if name.endswith(".weight"):
                    explained |= _say_folded(found, full, conv, norms[conv], there.rpartition(".")[0], short, eps, turned)
            break
    return explained


def _folds(made: Mapping[str, np.ndarray], left: Mapping[str, Stored]) -> bool:
    weight = next(array for name, array in made.items() if name.endswith(".weight"))
    return any(stored.shape == weight.shape and _near(weight, stored.as_correlation().array()) for stored in left.values())


def _say_folded(
    found: dict[str, Entry],
    full: Mapping[str, Stored],
    conv: str,
    norm: str,
    there: str,
    short: Mapping[str, Stored],
    eps: float,
    turned: bool,
) -> set[str]:
    """Enter a convolution, its bias and its BatchNorm as folded."""
    step = f"a fold of {norm} (eps {eps:g})"
    explained: set[str] = set()
    for leaf in ("weight", "bias"):
        mine, other = f"{conv}.{leaf}", f"{there}.{leaf}"
        if other in short:
            shapes = (full[mine].shape if mine in full else ()), short[other].shape
            entry = Entry(mine if mine in full else "", other, *shapes, "equal after a step", step, paired_by="fold")
            if turned:
                entry = replace(entry, a=entry.b, b=entry.a, shape_a=entry.shape_b, shape_b=entry.shape_a)
            found[entry.a or f"(folded) {other}"] = entry
            explained.add(entry.b)
    for name, stored in full.items():
        if name.rpartition(".")[0] == norm:
            entry = Entry(name, "", stored.shape, (), "equal after a step", f"a fold into {there}", paired_by="fold")
            if turned:
                entry = replace(entry, a="", b=name, shape_a=(), shape_b=stored.shape)
            found[entry.a or f"(folded) {name}"] = entry
            explained.add(entry.b)
    return explained - {""}


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)


def _narrowed(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bring the wider of two to the narrower's type."""
    wide_x = x.dtype.itemsize > y.dtype.itemsize
    with np.errstate(over="ignore"):
        return (x.astype(y.dtype), y) if wide_x else (x, y.astype(x.dtype))


def _near(x: np.ndarray, y: np.ndarray) -> bool:
    return _errors(x, y)["max_rel"] <= ROUNDING  # no number is never near


def _errors(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    if x.shape != y.shape:
        return {"max_abs": float("inf"), "max_rel": float("inf")}
    if not x.size:
        return {"max_abs": 0.0, "max_rel": 0.0}
    largest = difference = 0.0
    rows = max(1, CHUNK * max(1, len(y) if y.ndim else 1) // y.size)
    with np.errstate(invalid="ignore"):
        for start in range(0, len(y), rows) if y.ndim else (None,):
            part = slice(start, start + rows) if start is not None else ()
            wide = y[part].astype(np.float64)
            largest = max(largest, float(np.abs(wide).max()))
            difference = max(difference, float(np.nan_to_num(np.abs(x[part].astype(np.float64) - wide), nan=np.inf).max()))
    return {"max_abs": difference, "max_rel": difference / largest if largest else (0.0 if not difference else float("inf"))}
