"""The networks compute on a GPU what they compute on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zoo import CATALOGUE, Model, ResNet18, ResNet20, predict, trained
from zoo.kernels.comparing.precision import products

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    with products(tf32=False):
        yield


def smallest() -> list[type[Model]]:
    found: dict[type[Model], type[Model]] = {}
    for cls in sorted(CATALOGUE.values(), key=lambda c: c.params):
        found.setdefault(cls.family(), cls)
    return list(found.values())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("cls", smallest(), ids=lambda c: c.__name__)
def test_logits_equal_the_cpus(cls: type[Model], memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = cls().eval()
    side = cls.input_size if cls.fixed_size else -(-max(cls.min_size, 96) // cls.size_multiple) * cls.size_multiple
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = model(x)
        got = model.cuda().to(memory_format=memory_format)(x.cuda().to(memory_format=memory_format)).cpu()
    assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_a_network_is_built_where_the_device_context_says() -> None:
    with torch.device("cuda"):
        model = ResNet18()
    assert all(p.is_cuda for p in model.parameters())
    assert model(torch.randn(2, 3, 64, 64, device="cuda")).isfinite().all()


def test_prediction_runs_where_the_model_is() -> None:
    model = trained(ResNet20)
    picture = torch.randint(256, (40, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = predict(model, picture)
    got = predict(model.cuda(), picture)
    assert [p.index for p in got] == [p.index for p in expected]
    assert got[0].probability == pytest.approx(expected[0].probability, abs=1e-3)
    assert model.preprocess(picture).is_cuda


def test_mixed_precision_training_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    model = ResNet20().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.arange(64, device="cuda") % 10
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
