"""What `why` shows: each chain of layers, its kernel, its time, the time it replaced, its share of the roofline, and the parity."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.parity import Parity
from zoo.kernels.measuring.stopwatch import told


@dataclass(slots=True)
class Row:
    """One chain of layers."""

    layers: str
    kernel: str
    shape: tuple[int, ...]
    us: float | None = None
    """Median time in a CUDA graph, microseconds; None where nothing was timed."""
    replaced_us: float | None = None
    """The same chain by PyTorch's own operators, channels_last, BatchNorm folded."""
    roofline: float | None = None
    """The device's floor for this work over the time: 1 is as fast as the device can be."""
    note: str = ""

    @property
    def op(self) -> str:
        """The kernel's op, without its launch configuration; "aten" is PyTorch's own, and on a CPU it is the engine."""
        return self.kernel.partition(" ")[0]


@dataclass(slots=True)
class PlanReport:
    """What runs at one input shape."""

    shapes: list[tuple[int, ...]]
    rows: list[Row] = field(default_factory=list)
    parity: Parity | None = None
    notes: list[str] = field(default_factory=list)
    given: str = ""
    """The arguments that it is for, by which a user tells it from others of the same shapes."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each phase of making it took."""

    @property
    def us(self) -> float:
        """The sum of the rows' times."""
        return sum(row.us or 0.0 for row in self.rows)

    @property
    def replaced_us(self) -> float:
        """The sum of the times that the rows replaced."""
        return sum(row.replaced_us or 0.0 for row in self.rows)

    def by_op(self) -> dict[str, dict[str, Any]]:
        """Sum the rows up by op, so that an op which saves nothing can be seen.

        Returns:
            By op `steps`, the number of rows that it won; `us`, its time in those of them that were timed; and `pytorch_us`, the time of
            PyTorch's own operators in the same rows. Both times are in microseconds, and None where no row of the op was timed. The op
            that saves most comes first.

        Example:
            >>> PlanReport([], [Row("conv1", "stem", (1, 8, 4, 4), 3.0, 5.0), Row("fc", "aten", (1, 10))]).by_op()
            {'stem': {'steps': 1, 'us': 3.0, 'pytorch_us': 5.0}, 'aten': {'steps': 1, 'us': None, 'pytorch_us': None}}
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            one = found.setdefault(row.op, {"steps": 0, "us": None, "pytorch_us": None})
            one["steps"] += 1
            if row.us is not None and row.replaced_us is not None:
                one["us"] = (one["us"] or 0.0) + row.us
                one["pytorch_us"] = (one["pytorch_us"] or 0.0) + row.replaced_us
        return dict(sorted(found.items(), key=lambda entry: (entry[1]["us"] or 0.0) - (entry[1]["pytorch_us"] or 0.0)))


@dataclass(slots=True)
class Report:
    """What a fast network does, for every input shape that it has a plan for; `str` is a table."""

    plans: list[PlanReport]
    unchanged: str
    device: str
    dtype: str
    unplanned: list[str] = field(default_factory=list)
    """Shapes that have no plan, and why."""
    told: list[str] = field(default_factory=list)
    """Which precision was taken, and what others would give."""

    @property
    def rows(self) -> list[Row]:
        """The rows of the plan that was made last."""
        return self.plans[-1].rows if self.plans else []

    @property
    def parity(self) -> Parity | None:
        """The comparison of the plan that was made last."""
        return self.plans[-1].parity if self.plans else None

    def __str__(self) -> str:
        """Draw the tables."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=150, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(self)
        file: Any = console.file
        return file.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """Yield the tables for rich."""
        from rich.markup import escape

        if self.unchanged and not any(note.endswith(self.unchanged) for plan in self.plans for note in plan.notes):  # which say it again
            yield escape(f"runs unchanged on {self.device} in {self.dtype}: {self.unchanged}")
        for plan in self.plans:
            title = escape(f"{plan.given}, {self.dtype} on {self.device}")
            yield _table(title, plan) if plan.rows else title
            if plan.parity is not None and not any(note.endswith(str(plan.parity)) for note in plan.notes):  # which say of what it is
                yield escape(str(plan.parity))
            yield from (escape(note) for note in plan.notes)
            if plan.seconds:
                yield told(plan.seconds)
        yield from map(escape, self.unplanned)
        yield from map(escape, self.told)


def _table(title: str, plan: PlanReport) -> Any:
    """Draw the rows of a plan."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("layers", overflow="ellipsis", no_wrap=True, max_width=44)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=52)
    for heading in ("out", "us", "was us", "roofline"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in plan.rows:
        times = [_number(row.us), _number(row.replaced_us), "" if row.roofline is None else f"{row.roofline:.0%}"]
        table.add_row(escape(row.layers), escape(row.kernel), "x".join(map(str, row.shape[1:])), *times, escape(row.note))
    if plan.us:
        table.add_section()
        table.add_row("sum", "", "", _number(plan.us), _number(plan.replaced_us or None), "")
    return table


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name the arguments of a call: tensors by shape, and by dtype unless they hold fractions; others by value."""
    by_name = [f"{name}=" + ", ".join(map(_leaf, pytree.tree_leaves(value))) for name, value in kwargs.items()]
    return ", ".join([*map(_leaf, pytree.tree_leaves(args)), *by_name])


def _leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return str(leaf) if isinstance(leaf, torch.dtype | torch.device) else repr(leaf)
    kind = "" if leaf.is_floating_point() else f" {str(leaf.dtype).removeprefix('torch.')}"
    return ("x".join(map(str, leaf.shape)) or "a number") + kind


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"
