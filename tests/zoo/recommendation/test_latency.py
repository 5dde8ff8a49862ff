import pytest
import torch

from zoo import ResNet20, trained
from zoo.recommendation import latency
from zoo.recommendation.latency import Latency, measured


class Clock:
    """Time that passes where somebody sleeps, and nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Slow(torch.nn.Module):
    """Stands in for a fast network: it sleeps, the first time longer, as one that is being prepared."""

    def __init__(self, shapes: list[tuple[int, ...]], clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.shapes, self.device, self.unchanged = shapes, torch.device("cpu"), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.02 if self.shapes else 0.5)
        self.shapes.append(tuple(x.shape))
        return x


def test_one_image_of_the_checkpoints_size_is_timed_and_preparing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    monkeypatch.setattr(latency, "fast", lambda *_, **__: Slow(shapes, clock))
    monkeypatch.setattr(latency, "_engine", lambda _: "told")
    found = measured(trained(ResNet20), torch.device("cpu"), quick=True)
    assert set(shapes) == {(1, 3, 32, 32)}
    assert (found.low, found.ms, found.high) == pytest.approx((20, 20, 20))  # the first call took 500
    assert Latency.of(found.facts()) == found
    with pytest.raises((TypeError, KeyError)):
        Latency.of({"ms": "1"})


@pytest.mark.long
def test_the_engine_that_ran_is_named() -> None:
    found = measured(trained(ResNet20), torch.device("cpu"), quick=True)
    assert found.on in ("openvino", "onnxruntime", "pytorch", "eager", "PyTorch", "inductor")
    assert found.ms > 0
