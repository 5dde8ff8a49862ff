"""What `recommend` returns: the candidates in order, why the first is recommended, and what these images can't tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo.recommendation.budget import Budget
from zoo.recommendation.drawing import Point, Words, draw
from zoo.recommendation.scoring import APART


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate, as it did on these images and this machine.

    Attributes:
        name: NETWORK:TAG.
        model: the network's name.
        tag: the checkpoint's.
        rank: 1 for the best; those that can't be told apart from the first of a rank share it.
        score: percent of images that the linear probe names rightly, each by a classifier that was not fitted to it; without labels the
            consistency of neighbourhoods, in percent.
        error: standard error of `score`, in points.
        knn: percent that the k-NN names rightly, leave one out; None without labels.
        behind: points behind the best score.
        behind_error: standard error of `behind`, over the same images.
        tied: whether it is within the budget, and at most two standard errors of the difference behind the best that is.
        ms: milliseconds of one image through `fast`, at `side`; None where it was not timed.
        ms_low: the fastest round.
        ms_high: the slowest round.
        on: what ran it.
        mb: megabytes of the checkpoint's file, 10^6 bytes.
        params: parameters.
        license: of the checkpoint.
        restriction: what the licence may forbid; "".
        side: pixels of the image that it reads.
        width: numbers in its vector.
        over: what exceeds the budget; () where it is within.
        recommended: whether it is the one to start from.
    """

    name: str
    model: str
    tag: str
    rank: int
    score: float
    error: float
    knn: float | None
    behind: float
    behind_error: float
    tied: bool
    ms: float | None
    ms_low: float | None
    ms_high: float | None
    on: str
    mb: float
    params: int
    license: str
    restriction: str
    side: int
    width: int
    over: tuple[str, ...] = ()
    recommended: bool = False

    @property
    def trained(self) -> str:
        """The line of Python that loads it."""
        return f'trained({self.model}, "{self.tag}")'


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The candidates in order, and what to make of them; `str` is the table with the reasons.

    Attributes:
        ranking: all that were compared, the best first, those over the budget among them.
        best: the one to start from; None where nothing is within the budget.
        nearest: where `best` is None, the one that exceeds the budget least; it may not be among the compared ones.
        reasons: why, in sentences.
        cannot_tell: what these images or this machine can't tell, in sentences.
        skipped: {NETWORK:TAG: why it was not compared}.
        left_out: {image: why it could not be used}; copies of other images among them.
        images: how many were compared on.
        asked: how many were given.
        classes: {class: its images}; {} without labels.
        chance: percent that the most frequent class alone has right; None without labels.
        folds: of the cross-validation; None without labels.
        device: that was timed.
        budget: what was asked for.
        resumed: results that an earlier call had kept.
        folder: where vectors, latencies and scores are kept.

    Example:
        >>> found = recommend("photos/", budget=Budget(max_ms=20))  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> found.picture("choice.png")  # doctest: +SKIP
    """

    ranking: tuple[Ranked, ...]
    best: Ranked | None
    nearest: str
    reasons: tuple[str, ...]
    cannot_tell: tuple[str, ...]
    skipped: dict[str, str]
    left_out: dict[str, str]
    images: int
    asked: int
    classes: dict[str, int]
    chance: float | None
    folds: int | None
    device: str
    budget: Budget
    resumed: int
    folder: Path

    @property
    def labelled(self) -> bool:
        """Whether the images had labels."""
        return self.folds is not None

    @property
    def trained(self) -> str:
        """The line of Python that loads the recommended checkpoint; "" where there is none."""
        return "" if self.best is None else self.best.trained

    @property
    def measure(self) -> str:
        """What the ranking is by, in words."""
        return "linear probe, % right" if self.labelled else "neighbourhood consistency, %"

    def table(self) -> str:
        """Return the ranking as text, a line a candidate."""
        heads = ["", "rank", "checkpoint", "probe %" if self.labelled else "consistency %", "behind"]
        heads += ["k-NN %"] if self.labelled else []
        heads += ["ms (rounds)", "MB", "px", "licence", ""]
        rows = [heads]
        for one in self.ranking:
            mark = "->" if one.recommended else " =" if one.tied else ""
            row = [mark, str(one.rank), one.name, f"{one.score:.1f} ± {one.error:.1f}"]
            row.append("" if one is self.ranking[0] else f"{one.behind:.1f} ± {one.behind_error:.1f}")
            row += [f"{one.knn:.1f}" if one.knn is not None else ""] if self.labelled else []
            row += [_time(one), f"{one.mb:.1f}", str(one.side), one.license, f"over: {'; '.join(one.over)}" if one.over else ""]
            rows.append(row)
        return _aligned(rows, left={0, 2, len(heads) - 2, len(heads) - 1})

    def picture(self, path: str | os.PathLike[str]) -> Path:
        """Draw accuracy against time as a PNG: error bars, the Pareto front, the budget, and which is recommended.

        Args:
            path: of the PNG.

        Raises:
            ValueError: it has another ending, or nothing was timed.
            OSError: it can't be written.
        """
        shown = [Point(one.name, one.ms, one.score, one.error, _kind(one)) for one in self.ranking if one.ms is not None]
        what = "Linear probe, % of images named rightly" if self.labelled else "Neighbourhood consistency, %: weaker than labels"
        chance = f", guessing has {self.chance:.0f} %" if self.chance is not None else ""
        under = f"{self.images:,} images{chance}; milliseconds of one image on {self.device}, by fast()"
        result = f"recommended: {self.trained}" if self.best else f"nothing is within the budget; nearest: {self.nearest}"
        words = Words(f"{what}; bars: one standard error", under, result, self.best is not None, self.budget.max_ms)
        return draw(shown, [one.name for one in self.pareto()], words, Path(path))

    def pareto(self) -> list[Ranked]:
        """List those that no other candidate beats in both score and time, the fastest first."""
        timed = sorted((one for one in self.ranking if one.ms is not None), key=lambda one: (one.ms or 0.0, -one.score))
        front: list[Ranked] = []
        for one in timed:
            if not front or one.score > front[-1].score:
                front.append(one)
        return front

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            "best": None if self.best is None else self.best.name,
            "trained": self.trained or None,
            "nearest": self.nearest or None,
            "reasons": list(self.reasons),
            "cannot_tell": list(self.cannot_tell),
            "measure": self.measure,
            "ranking": [{**asdict(one), "trained": one.trained} for one in self.ranking],
            "pareto": [one.name for one in self.pareto()],
            "skipped": self.skipped,
            "left_out": self.left_out,
            "images": self.images,
            "asked": self.asked,
            "classes": self.classes,
            "chance": self.chance,
            "folds": self.folds,
            "device": self.device,
            "budget": asdict(self.budget),
            "resumed": self.resumed,
            "folder": str(self.folder),
        }

    def __str__(self) -> str:
        """Return the table and what there is to say."""
        return "\n".join([self.table(), "", *self.reasons, *self.cannot_tell])


def explained(ranking: Sequence[Ranked], best: Ranked | None, nearest: str, labelled: bool) -> list[str]:
    """Say why a candidate is recommended."""
    if best is None:
        return [f"No candidate is within the budget; nearest comes {nearest}."]
    what = "the linear probe" if labelled else "the consistency of neighbourhoods"
    within = [one for one in ranking if not one.over]
    first = within[0]
    among = " within the budget" if any(one.over for one in ranking) else ""
    if best is first:
        said = [f"Start from {best.name}: it has the highest score by {what}{among}, {best.score:.1f} ± {best.error:.1f} %."]
    else:
        less = f"at most one standard error less than the {first.score:.1f} % of {first.name}"
        said = [f"Start from {best.name}: it has {best.score:.1f} %, {less}, and is the fastest of those."]
    tied = [one.name for one in within if one is not best and one.tied]
    if tied:
        said.append(f"These images can't tell {'it' if best is first else 'the best'} apart from {_list(tied)}: a tie, not a victory.")
    elif len(within) > 1:
        said.append(f"Every other candidate{among} is more than {APART:g} standard errors behind.")
    over = [one for one in ranking if one.over and one.score > first.score]
    if over:
        said.append(f"Better, and over the budget: {'; '.join(f'{one.name} ({_list(one.over)})' for one in over)}.")
    if best.restriction:
        said.append(f"Its licence, {best.license}: {best.restriction}.")
    elif best.license == "unstated":
        said.append("Nobody states a licence for its weights.")
    return said


def _kind(one: Ranked) -> str:
    return "over" if one.over else "recommended" if one.recommended else "tied" if one.tied else "behind"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _time(one: Ranked) -> str:
    if one.ms is None or one.ms_low is None or one.ms_high is None:
        return ""
    places = 0 if one.ms >= 100 else 1 if one.ms >= 10 else 2
    return f"{one.ms:.{places}f} ({one.ms_low:.{places}f} to {one.ms_high:.{places}f})"


def _aligned(rows: list[list[str]], left: set[int]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
