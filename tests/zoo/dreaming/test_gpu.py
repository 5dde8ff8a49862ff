"""On a GPU: steps that are captured in a CUDA graph are those that run one by one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.zoo.dreaming.dreams import levels, picture
from zoo.dreaming import dream, dream_frames, dreamer
from zoo.dreaming.cutting import cut
from zoo.dreaming.gradients import Pull
from zoo.dreaming.stepping import CapturedSteps, Steps, steps
from zoo.networks.model import Model

pytestmark = pytest.mark.gpu


@pytest.fixture
def there(network: Model) -> Model:
    """The network on the GPU in double precision, where no ReLU turns by the order of a sum."""
    return copy.deepcopy(network).double().to("cuda")


def pull(network: Model, guide: Any = None) -> Pull:
    made = cut(network, "layer2")
    ones = torch.ones(1, 3, 1, 1, dtype=made.dtype, device=made.device)
    return Pull(made, ones, torch.zeros_like(ones), guide)


@pytest.mark.parametrize("with_guide", [False, True])
def test_captured_steps_are_those_that_run_one_by_one(with_guide: bool, there: Model) -> None:
    x = torch.rand(2, 3, 80, 96, dtype=torch.float64, device="cuda") * 280 - 12  # beyond the limits, as after scaling up
    pulls = pull(there)
    if with_guide:
        pulls = pull(there, pulls.vectors(torch.rand(1, 3, 30, 20, dtype=torch.float64, device="cuda") * 255))
    captured, plain = steps(pulls, x.clone(), 1.5, 0.0, 255.0), Steps(pulls, x.clone(), 1.5, 0.0, 255.0)
    assert isinstance(captured, CapturedSteps)
    torch.testing.assert_close(captured.x, x, rtol=0, atol=0)  # warming up and capturing change nothing
    for offset in ((3, -5), (0, 0), (-8, 7)):
        captured.take(offset, lambda done: None)
        plain.take(offset, lambda done: None)
    assert float((plain.x - x).abs().mean()) > 1
    torch.testing.assert_close(captured.x, plain.x, rtol=0, atol=1e-6)


def test_a_dream_is_that_of_the_cpu(network: Model, there: Model) -> None:
    how: dict[str, Any] = {"at": "layer2", "steps": 3, "octaves": 3, "progress": False}
    one, other = dream(there, picture(), **how), dream(copy.deepcopy(network).double(), picture(), **how)
    assert np.abs(levels(one) - levels(other)).max() <= 1
    tiled = dream(there, picture(), tile=32, **how)
    assert np.abs(levels(one) - levels(tiled)).max() <= 1


def test_frames_run_the_graphs_of_the_first(there: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    whole = dreamer.steps
    monkeypatch.setattr(dreamer, "steps", lambda *how: made.append(how) or whole(*how))
    how: dict[str, Any] = {"at": "layer2", "steps": 2, "octaves": 2, "frames": 3, "progress": False}
    frames = [levels(frame) for frame in dream_frames(there, picture(), **how)]
    assert len(made) == 2
    monkeypatch.setattr(dreamer, "steps", Steps)
    plain = [levels(frame) for frame in dream_frames(there, picture(), **how)]
    assert max(np.abs(one - other).max() for one, other in zip(frames, plain, strict=True)) <= 1


def test_a_network_that_asks_the_gpu_for_a_number_runs_step_by_step_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x if x.detach().mean().item() > -1e9 else -x)

    dreamt = dream(Asks().to("cuda"), picture(), at="layer", steps=1, octaves=1, progress=False)
    assert np.abs(levels(dreamt) - levels(picture())).mean() > 0.5
    assert "Asks can't be captured in a CUDA graph, so its steps run one by one" in caplog.text
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator does not wait for that graph
