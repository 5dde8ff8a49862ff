"""A network whose calls depend on those before has no plan; one that only puts something away once has."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo.kernels import fast
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.trace import trace
from zoo.kernels.state import Draws, attributes, changed
from zoo.kernels.training.record import record

X = torch.randn(2, 3, 8, 8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.kept: Any = None


class Counts(Base):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x) * self.calls


class Logs(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return self.conv(x) * len(self.log)


class Remembers(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.kept = y if self.kept is None else self.kept + y
        return self.kept


class Draws3(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * random.random()


class DrawsNumPys(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * float(np.random.rand())


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Counts, "forward changes calls in every call"),
        (Logs, "forward changes log in every call"),
        (Remembers, "forward keeps something for the next call"),
        (Draws3, "forward draws from Python's random numbers"),
        (DrawsNumPys, "forward draws from NumPy's random numbers"),
    ],
)
def test_what_depends_on_calls_before_runs_unchanged(network: type[Base], reason: str) -> None:
    model = network().eval()
    with pytest.raises(Untraceable, match=reason):
        trace(model, (X,), {})
    with pytest.warns(UserWarning, match=f"runs unchanged: {reason}"):
        quick = fast(model, "cpu", example=X)
    plain = network().eval()
    plain.load_state_dict(model.state_dict())
    random.seed(1)
    np.random.seed(1)
    before = [quick(X) for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    with torch.no_grad():
        assert all(torch.allclose(a, plain(X), atol=1e-5) for a in before)


def test_drawing_leaves_the_numbers_that_others_draw() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    for network in (Draws3(), DrawsNumPys()):
        with pytest.raises(Untraceable):
            trace(network, (X,), {})
    assert (random.random(), np.random.rand()) == expected
    assert Draws().moved() == ""


class PutsAway(Base):
    """A grid that is made once, the last map and its size for whoever asks, and a NaN."""

    size: Any = None
    limit = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.shape[-1], device=x.device) * 0.5
        self.limit = float("nan")
        self.last = self.conv(x)
        self.size = x.shape
        return self.last + self.kept


def test_what_is_put_away_once_is_no_reason() -> None:
    model = PutsAway().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick = fast(model, "cpu", example=X)
    assert quick.unchanged == ""
    with torch.no_grad():
        assert torch.allclose(quick(X), model(X), atol=1e-5)


def test_a_recording_for_training_refuses_the_same() -> None:
    for network, reason in ((Counts(), "changes calls, which a recording"), (DrawsNumPys(), "draws from NumPy's random numbers")):
        with pytest.raises(Untraceable, match=reason):
            record(network, (X,), {}, torch.device("cpu"))


def test_attributes_are_told_by_value_or_by_length() -> None:
    model = Logs()
    before = attributes(model), attributes(model, whole=False)
    model.kept = object()
    assert changed(before[0], attributes(model)) == "kept"
    assert changed(before[1], attributes(model, whole=False)) == ""
    model.log.append(3)
    assert changed(before[1], attributes(model, whole=False)) == "log"
