"""What became of a file: its tensors as those of a network."""

from __future__ import annotations

from dataclasses import dataclass, field

from convert.core import Report, Shape
from convert.source import Stored


@dataclass(slots=True)
class Adopted:
    """A file's tensors as those of a network.

    Attributes:
        naming: what explained the file's names; "position" and "match" where none did.
        tensors: by our names.
        pairs: their module to ours.
        report: what did not fit; complete when everything found its place.
        theirs: the shapes of all their tensors in PyTorch's form, by their names.
        moved: our convolutions whose bias went into the BatchNorm behind them, so that their own outputs differ by it.
        notes: what was filled in or folded.
        filled: our tensors of which the file has nothing, and whose layer there is understood to compute without them.
    """

    naming: str
    tensors: dict[str, Stored]
    pairs: dict[str, str]
    report: Report
    theirs: dict[str, Shape] = field(default_factory=dict[str, Shape])
    moved: set[str] = field(default_factory=set[str])
    notes: list[str] = field(default_factory=list[str])
    filled: list[str] = field(default_factory=list[str])
