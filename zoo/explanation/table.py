"""The table of methods, and what each is asked: one batch, one goal per image, one program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weights.arguments import did_you_mean
from zoo.explanation.program import CannotExplain, Program, Rule

if TYPE_CHECKING:
    from weights.record import Preprocessing


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method gives for a batch.

    Attributes:
        raw: the maps, float32 (B, h, w): of the tap's cells, or of the images' pixels.
        error: for each image, how far the map is from what the method promises; None where it promises nothing.
        note: what the user should know, "12 steps" for example.
    """

    raw: Tensor
    error: tuple[float, ...] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to explain an answer.

    Attributes:
        name: by which it is asked for, "gradcam".
        title: as its authors write it, "Grad-CAM".
        source: the paper's link.
        function: computes it.
        place: "tap" for a map of a layer's cells, "input" for a map of the image's pixels.
        signed: whether negative values are evidence against the target.
        error: what `Explanation.error` is; "" where there is none.
    """

    name: str
    title: str
    source: str
    function: Callable[[Question], Answer]
    place: str
    signed: bool
    error: str = ""
    options: tuple[str, ...] = ()
    """Names of what can be set."""
    reads_layer: bool = False
    """Whether a map of pixels needs that of a layer, too."""
    slope: bool = False
    """Whether its values are slopes, of which the size says what matters, and not the sign."""
    long: bool = False
    """Whether it takes hundreds of passes through the network."""
    exact: bool = False
    """Whether BatchNorms stay: folding moves a ReLU's input by rounding, and what lies at its corner turns a whole gradient."""


KEPT = 4
"""A backward pass takes this part of the images that a forward pass takes: it keeps what every layer gave."""
METHODS: dict[str, Method] = {}
"""Every method by its name; `method` adds one."""


def method(
    name: str,
    title: str,
    source: str,
    *,
    place: str = "tap",
    signed: bool = False,
    error: str = "",
    options: str = "",
    reads_layer: bool = False,
    exact: bool = False,
    slope: bool = False,
    long: bool = False,
) -> Callable[[Callable[[Question], Answer]], Callable[[Question], Answer]]:
    """Put a function into the table of methods; see `Method`. `options` are names with spaces between."""

    def add(function: Callable[[Question], Answer]) -> Callable[[Question], Answer]:
        taken = tuple(options.split())
        METHODS[name] = Method(name, title, source, function, place, signed, error, taken, reads_layer, slope, long, exact)
        return function

    return add


def find_method(name: str) -> Method:
    """Return a method by its name, in any case and with or without hyphens.

    Raises:
        CannotExplain: there is none of that name; the message lists them.
    """
    found = {_plain(key): one for key, one in METHODS.items()}.get(_plain(name))
    if found is None:
        raise CannotExplain(f"there is no method {name!r}{did_you_mean(name, METHODS)}; there are {', '.join(METHODS)}", "method")
    return found


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace("+", "p")


@dataclass
class Question:
    """One batch of images, with a goal for each.

    Attributes:
        program: the network, cut at the method's tap.
        x: the images, float32 (B, C, H, W), on the network's device.
        goal: turns what the network answers, (N, classes), and rows of the batch into one number for each: what is explained.
        infer: the network's answer (N, classes) to images, without gradients: by fast kernels where the user's network is fast.
        body: the tap's tensor and what else the program's second half reads.
        rows: images that go through the network at once.
        preprocessing: of the checkpoint; None where the images are the user's tensors.
        seed: of random numbers.
        options: of the method.
    """

    program: Program
    x: Tensor
    goal: Callable[[Tensor, Tensor], Tensor]
    infer: Callable[[Tensor], Tensor]
    body: Callable[[Tensor], list[Tensor]]
    rows: int
    preprocessing: Preprocessing | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    layer: Program | None = None
    """For maps of pixels that need a layer's map, the network cut there."""

    @property
    def ratio(self) -> float:
        """Height of the images over their width."""
        return self.x.shape[-2] / self.x.shape[-1]

    @cached_property
    def kept(self) -> list[Tensor]:
        """The tap's tensor and what else is read behind it, without gradients."""
        return self.body(self.x)

    @cached_property
    def every(self) -> Tensor:
        """The batch's rows by number."""
        return torch.arange(len(self.x), device=self.x.device)

    def map_of(self, tensor: Tensor) -> Tensor:
        """Return a tap's tensor as a map (B, C, h, w)."""
        return self.program.layout.map_of(tensor, self.ratio)

    @cached_property
    def activation(self) -> Tensor:
        """The tap's map A, float32 (B, C, h, w)."""
        return self.map_of(self.kept[0])

    def slope(self, kept: list[Tensor], rule: Rule | None = None) -> Tensor:
        """Return the goal's gradient with respect to the first of `kept`, which is of the whole batch."""
        with torch.enable_grad():
            inner = [kept[0].detach().requires_grad_(), *kept[1:]]
            score = self.goal(self.program.head(inner, rule), self.every)
            (found,) = torch.autograd.grad(score.sum(), inner[:1], allow_unused=True)
        return torch.zeros_like(kept[0]) if found is None else found

    @cached_property
    def gradient(self) -> Tensor:
        """The goal's gradient with respect to the tap's map, float32 (B, C, h, w)."""
        return self.map_of(self.slope(self.kept))

    def image_gradients(self, x: Tensor, rows: Tensor, rule: Rule | None = None) -> tuple[Tensor, Tensor]:
        """Return gradients and goals of images (N, C, H, W), each for the goal of its row of the batch, a few at once."""
        slopes, scores, size = [], [], self.gradients_at_once
        for start in range(0, len(x), size):
            part = x[start : start + size].detach().requires_grad_()
            with torch.enable_grad():
                score = self.goal(self.program.head([part], rule), rows[start : start + size])
                slopes.append(torch.autograd.grad(score.sum(), part)[0])
            scores.append(score.detach())
        return torch.cat(slopes), torch.cat(scores)

    def front_gradients(self, found: Tensor, rows: Tensor) -> Tensor:
        """Return gradients by what `Program.front` gives, all at once, each for the goal of its row of the batch."""
        with torch.enable_grad():
            found = found.detach().requires_grad_()
            return torch.autograd.grad(self.goal(self.program.rest(found), rows).sum(), found)[0]

    def through_front(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Turn a gradient by what `Program.front` gives into one by the images: the same for all images, wherever it was taken."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.program.front(x), x, gradient)[0]

    @property
    def gradients_at_once(self) -> int:
        """How many images go through a backward pass at once."""
        return max(1, self.rows // KEPT)

    def scores(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the goals of images (N, C, H, W), each for its row of the batch, by inference in batches of one shape."""
        return torch.cat([self.goal(self.infer(part), rows[start : start + len(part)]) for start, part in self._parts(x)])

    def _parts(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(x), self.rows):
            yield start, x[start : start + self.rows]

    def generator(self) -> torch.Generator:
        """Return a source of random numbers on the CPU, which gives the same on every device."""
        return torch.Generator().manual_seed(self.seed)

    def black(self) -> Tensor:
        """Return a black photograph as the network would see it, (1, C, 1, 1); zero where no preprocessing is known."""
        if self.preprocessing is None:
            return torch.zeros(1, self.x.shape[1], 1, 1, device=self.x.device)
        mean, std = (torch.tensor(v, device=self.x.device).view(1, -1, 1, 1) for v in (self.preprocessing.mean, self.preprocessing.std))
        return -mean / std

    def deviation(self) -> Tensor:
        """Return what turns gradients by normalised values into gradients by pixels of 0..1: 1 / std, (1, C, 1, 1)."""
        if self.preprocessing is None:
            return torch.ones(1, self.x.shape[1], 1, 1, device=self.x.device)
        return 1 / torch.tensor(self.preprocessing.std, device=self.x.device).view(1, -1, 1, 1)


def refuse(method: str, program: Program, why: str, instead: str = "gradcam") -> CannotExplain:
    """Make the error of a method that has no definition for a network."""
    return CannotExplain(f"{method} is not defined for this {program.name}: {why}; take method={instead!r}")
