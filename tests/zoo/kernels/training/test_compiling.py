"""What a check launches is compiled before it, and what the batch itself launches beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from zoo.kernels.training import compiling, planning
from zoo.kernels.training.checking import Check


class Noting:
    """Stands for processes that compile, and notes what they are asked for."""

    did: list[tuple[str, int]]

    def __init__(self, capability: tuple[int, int]) -> None: ...

    def compile(self, works: Sequence[Any], seconds: float) -> None:
        assert seconds == compiling.LONGEST_S
        self.did.append(("compile", works[0].reads[0][0][0]))

    def begin(self, works: Sequence[Any], seconds: float) -> None:
        assert seconds == compiling.LONGEST_S
        self.did.extend(("begin", work.reads[0][0][0]) for work in works[:1])

    def close(self) -> None:
        self.did.append(("close", 0))


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    Noting.did = []
    monkeypatch.setattr(compiling, "Compilers", Noting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiling.kernels, "on_kernels", lambda device: True)
    verdict = Check.verdict

    def noted(self: Check) -> Any:
        Noting.did.append(("check", self.recording.values[0].shape[0]))
        with monkeypatch.context() as plain:
            plain.setattr(compiling.kernels, "on_kernels", lambda device: False)
            return verdict(self)

    monkeypatch.setattr(Check, "verdict", noted)
    return Noting.did


@pytest.mark.parametrize(
    ("images", "expected"),
    [(20, ["compile 16", "begin 20", "check 16", "compile 20", "close 0"]), (4, ["compile 4", "check 4", "close 0"])],
)
def test_the_batch_is_compiled_beside_the_check(images: int, expected: list[str], did: list[tuple[str, int]]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)).train()
    planning.checked(network, (torch.randn(images, 3, 8, 8),), {}, planning.Known())
    assert [f"{what} {count}" for what, count in did] == expected
