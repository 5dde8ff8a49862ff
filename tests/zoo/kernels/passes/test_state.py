"""A network that computes something else in the next call has no plan; one that only keeps something has."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo.kernels import fast
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.state import Signs
from zoo.kernels.passes.trace import trace

X = torch.randn(2, 3, 8, 8)
NEXT, KEEPS = "forward computes something else in the next call", "forward keeps something for the next call"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.calls, self._hidden, self.log, self.table, self.ready = 0, 0, list[int](), dict[Any, Any](), False
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self.conv(x))

    def told(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Counts(Base):
    def told(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y * self.calls


class CountsInHiding(Base):
    def told(self, y: Tensor) -> Tensor:
        self._hidden += 1
        return y if self._hidden % 2 else -y


class Logs(Base):
    def told(self, y: Tensor) -> Tensor:
        self.log.append(1)
        return y * len(self.log)


class Writes(Base):
    def told(self, y: Tensor) -> Tensor:
        self.table["calls"] = self.table.get("calls", 0) + 1
        return y * self.table["calls"]


class WarmsUp(Base):
    def told(self, y: Tensor) -> Tensor:
        was, self.ready = self.ready, True
        return 2 * y if was else y


class Remembers(Base):
    def told(self, y: Tensor) -> Tensor:
        self.kept = y if self.kept is None else self.kept + y
        return self.kept


class RemembersAPart(Base):
    def told(self, y: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.zeros(y.shape, device=y.device)
        out = y + self.kept
        self.kept[:, :2] = y[:, :2]
        return out


class RemembersInATable(Base):
    def told(self, y: Tensor) -> Tensor:
        out = y + self.table.get(0, 0)
        self.table[0] = y
        return out


class Draws(Base):
    def told(self, y: Tensor) -> Tensor:
        return y * random.random()


class DrawsNumPys(Base):
    def told(self, y: Tensor) -> Tensor:
        return y * np.random.randn()


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Counts, NEXT), (CountsInHiding, NEXT), (Logs, NEXT), (Writes, NEXT), (WarmsUp, NEXT), (Draws, NEXT), (DrawsNumPys, NEXT),
        (Remembers, KEEPS), (RemembersAPart, KEEPS), (RemembersInATable, KEEPS),
    ],
)  # fmt: skip
def test_what_depends_on_calls_before_runs_unchanged(network: type[Base], reason: str) -> None:
    np.random.randn()  # and leaves the other of a pair for the next
    model = network().eval()
    with pytest.raises(Untraceable, match=reason):
        trace(model, (X,), {})
    with pytest.warns(UserWarning, match=f"runs unchanged: {reason}"):
        quick = fast(model, "cpu", example=X)
    plain = network().eval()
    plain.load_state_dict(model.state_dict())
    answers = []
    for each in (quick, plain):
        random.seed(1)
        np.random.seed(1)
        with torch.no_grad():
            answers.append([each(X) for _ in range(4)])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*answers, strict=True))


class PutsAway(Base):
    """A grid and ones that are made once, the last map and its size, a log and a counter for whoever asks, and a NaN."""

    size: Any = None
    limit = float("nan")
    ones: Any = None

    def told(self, y: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(y.shape[-1], device=y.device) * 0.5
            self.ones, self.table["zeros"] = torch.ones_like(y), y.new_zeros(4, 1, 1)
        self.limit, self.last, self.size = float("nan"), y, y.shape
        self.calls += 1
        self.log.append(1)
        random.random()
        return self.last * self.ones + self.kept + self.table["zeros"]


def test_what_is_only_kept_is_no_reason() -> None:
    model = PutsAway().eval()
    assert Signs(model) != Signs(PutsAway())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick = fast(model, "cpu", example=X)
    assert quick.unchanged == ""
    with torch.no_grad():
        assert torch.allclose(quick(X), model(X), atol=1e-5)


def test_numbers_that_another_thread_draws_are_no_reason_and_stay_its_own(small: nn.Module) -> None:
    done, drawn = threading.Event(), list[float]()

    def draw() -> None:
        while not done.is_set():
            drawn.append(random.random())

    random.seed(4)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            trace(small, (X,), {})
    finally:
        done.set()
        thread.join()
    random.seed(4)
    assert drawn == [random.random() for _ in drawn]


def test_signs_are_seen_in_whatever_a_network_keeps() -> None:
    model = Base()
    model.many, model.few, model.number = {1, 2}, (1, 2), np.float32(1)
    changes = (
        lambda: setattr(model, "kept", object()),
        lambda: setattr(model, "_hidden", 1),
        lambda: model.log.append(1),
        lambda: model.log.__setitem__(0, 2),
        lambda: model.table.update(a=torch.zeros(1)),
        lambda: model.table.update(a=torch.zeros(1)),
        lambda: model.many.add(3),
        lambda: setattr(model, "few", (1, 3)),
        lambda: setattr(model, "number", np.float32(2)),
        lambda: setattr(model.conv, "named", 1),
    )
    for change in changes:
        before = Signs(model)
        assert before == Signs(model)
        change()
        assert before != Signs(model)
