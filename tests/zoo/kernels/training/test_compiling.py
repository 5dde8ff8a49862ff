"""What a check launches is compiled before it, and what the batch itself launches beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from zoo.kernels.training import compiling, planning
from zoo.kernels.training.checking import Check
from zoo.kernels.training.record import record


class Noting:
    """Stands for processes that compile, and notes what they are asked for."""

    did: list[tuple[str, int]]

    def __init__(self, capability: tuple[int, int]) -> None: ...

    def compile(self, works: Sequence[Any], seconds: float | None = None) -> None:
        assert (seconds == compiling.LONGEST_S) == bool(works)
        self.did.append(("compile", works[0].reads[0][0][0]) if works else ("wait", 0))

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
    [(20, ["compile 16", "begin 20", "check 16", "wait 0", "close 0"]), (4, ["compile 4", "check 4", "close 0"])],
)
def test_the_batch_is_compiled_beside_the_check(images: int, expected: list[str], did: list[tuple[str, int]]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)).train()
    planning.checked(network, (torch.randn(images, 3, 8, 8),), {}, planning.Known())
    assert [f"{what} {count}" for what, count in did] == expected


def works_of(images: int) -> list[compiling.ChainWork]:
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
    network = nn.Sequential(*layers).train()
    return compiling._longest_first([record(network, (torch.randn(images, 3, 8, 8),), {}, torch.device("cpu"))])


def test_each_share_of_a_chain_is_a_work_of_its_own() -> None:
    works = works_of(4)
    assert len({work.key for work in works}) == len(works)
    assert sorted(work.share for work in works if "depthwise" in work.name) == [
        (share, compiling.SHARES) for share in range(compiling.SHARES)
    ]


def test_depthwise_convolutions_are_begun_first() -> None:
    found = ["depthwise" in work.name for work in works_of(4)]
    assert found == sorted(found, reverse=True)
    assert 0 < sum(found) < len(found)
