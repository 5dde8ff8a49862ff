"""Maps of the image's pixels by gradients of the goal: how the answer changes with a pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from weights.arguments import number, whole
from zoo.explanation.table import Answer, Question, method

COMPLETE = 0.01
"""Integrated gradients add steps until their sum is within this share of what they explain."""
MOST_STEPS = 512


@method("saliency", "Saliency", "https://arxiv.org/abs/1312.6034", place="input", exact=True)
def saliency(q: Question) -> Answer:
    """Greatest absolute gradient over the channels (section 3.1), by pixels of 0..1: otherwise blue, whose std is small, counts more."""
    slope, _ = q.image_gradients(q.x, q.every)
    return Answer((slope * q.deviation()).abs().amax(1))


@method("gradient", "Gradient", "https://arxiv.org/abs/1312.6034", place="input", exact=True, signed=True, slope=True)
def gradient(q: Question) -> Answer:
    """Gradient with its sign, by pixels of 0..1, summed over the channels."""
    slope, _ = q.image_gradients(q.x, q.every)
    return Answer((slope * q.deviation()).sum(1))


@method("input-x-gradient", "Input x gradient", "https://arxiv.org/abs/1605.01713", place="input", exact=True, signed=True)
def input_x_gradient(q: Question) -> Answer:
    """The normalised pixel times its gradient, summed over the channels."""
    slope, _ = q.image_gradients(q.x, q.every)
    return Answer((slope * q.x).sum(1))


@method(
    "smoothgrad",
    "SmoothGrad",
    "https://arxiv.org/abs/1706.03825",
    place="input",
    exact=True,
    signed=True,
    slope=True,
    options="samples noise",
)
def smoothgrad(q: Question) -> Answer:
    """Mean gradient over `samples` (50) images with normal noise of `noise` (0.15) times the image's range, by pixels of 0..1."""
    slope = smoothed(q, noise_of(q))
    return Answer((slope * q.deviation()).sum(1))


def noise_of(q: Question) -> Tensor:
    """Draw the noise of SmoothGrad, (samples, B, C, H, W), on the CPU."""
    return torch.randn(whole("samples", q.options.get("samples", 50)), *q.x.shape, generator=q.generator())


def smoothed(q: Question, noise: Tensor) -> Tensor:
    """Return the mean gradient (B, C, H, W) over images with noise."""
    width = q.x.amax((1, 2, 3), keepdim=True) - q.x.amin((1, 2, 3), keepdim=True)
    scale = number("noise", q.options.get("noise", 0.15), 0) * width
    found: list[Tensor] = []
    for rows in q.every.split(q.gradients_at_once):
        total: Tensor | float = 0.0
        for part in noise[:, rows.cpu()].split(max(1, q.gradients_at_once // len(rows))):
            with torch.no_grad():
                noisy = q.program.front((q.x[rows] + part.to(q.x) * scale[rows]).flatten(0, 1))
            total = total + q.front_gradients(noisy, rows.repeat(len(part))).unflatten(0, (len(part), -1)).sum(0)
        assert isinstance(total, Tensor)
        found.append(q.through_front(q.x[rows], total) / len(noise))
    return torch.cat(found)


@method(
    "integrated-gradients",
    "Integrated gradients",
    "https://arxiv.org/abs/1703.01365",
    place="input",
    signed=True,
    error="the map's sum less the goal's difference between image and black photograph, over that difference",
    options="steps most fixed",
)
def integrated_gradients(q: Question) -> Answer:
    """(x - x') times the mean gradient on the line from x', a black photograph, to x (eq. 1), summed over the channels.

    By the trapezoid rule, whose steps are doubled from `steps` (32) until the map's sum is within 1 % of the difference that it explains,
    `most` (512) at most; the points of the last round are used again. With `fixed`, `steps` points of Gauss-Legendre's rule, once.
    BatchNorms are folded: a ReLU that rounding turns at one of the points changes the mean by less than the points leave out.
    """
    black = q.black().expand_as(q.x)
    steps, most = whole("steps", q.options.get("steps", 32)), whole("most", q.options.get("most", MOST_STEPS))
    way = q.x - black
    if q.options.get("fixed", False):
        difference = q.scores(q.x, q.every) - q.scores(black, q.every)
        found = way * _line(q, black, way, q.every, *legendre(steps))
        error = _short(found, difference)
        return Answer(found.sum(1), tuple(error.tolist()), f"black photograph as baseline, {steps} steps")
    ends = [q.image_gradients(x, q.every) for x in (black, q.x)]
    difference = ends[1][1] - ends[0][1]
    middle = torch.arange(1, steps) / steps
    total = (ends[0][0] + ends[1][0]) / 2 + _line(q, black, way, q.every, middle, torch.ones(steps - 1))
    mean, used, todo = total / steps, torch.full((len(q.x),), steps), q.every
    error = _short(way * mean, difference)
    while 2 * steps <= most and len(todo := todo[error[todo] > COMPLETE]):
        between = (torch.arange(steps) + 0.5) / steps
        total[todo] += _line(q, black, way, todo, between, torch.ones(steps))
        steps *= 2
        mean[todo], used[todo.cpu()] = total[todo] / steps, steps
        error[todo] = _short(way * mean, difference)[todo]
    return Answer((way * mean).sum(1), tuple(error.tolist()), f"black photograph as baseline, {int(used.max())} steps")


def _short(found: Tensor, difference: Tensor) -> Tensor:
    return (found.sum((1, 2, 3)) - difference).abs() / difference.abs().clamp(min=1e-12)


def _line(q: Question, black: Tensor, way: Tensor, rows: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the gradients at points 0..1 of the line from the baseline to the images of some rows.

    What begins a network as sums of weighted pixels turns a line into a line, and has one gradient everywhere: it is run at both ends only.
    """
    return torch.cat([_part_of_line(q, black, way, part, points, weights) for part in rows.split(q.gradients_at_once)])


def _part_of_line(q: Question, black: Tensor, way: Tensor, rows: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    image = black[rows] + way[rows]
    with torch.no_grad():
        start = q.program.front(black[rows[:1]])
        along = q.program.front(image) - start
    total, at_once = torch.zeros_like(along), max(1, q.gradients_at_once // len(rows))
    for first in range(0, len(points), at_once):
        place, share = (each[first : first + at_once].to(along).view(-1, 1, 1, 1, 1) for each in (points, weights))
        found = torch.addcmul(start, place, along).flatten(0, 1)
        total += (q.front_gradients(found, rows.repeat(len(place))).unflatten(0, (len(place), -1)) * share).sum(0)
    return q.through_front(image, total)


def legendre(steps: int) -> tuple[Tensor, Tensor]:
    """Return points and weights of Gauss-Legendre's rule on 0..1."""
    import numpy as np

    points, weights = np.polynomial.legendre.leggauss(steps)
    return torch.from_numpy((points + 1) / 2).float(), torch.from_numpy(weights / 2).float()
