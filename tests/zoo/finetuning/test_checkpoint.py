"""A run's state goes back into a run as a whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import Tiny
from torch import Tensor, nn

from zoo.finetuning import checkpoint
from zoo.finetuning.average import Average

Run = tuple[nn.Module, torch.optim.Optimizer, Average]


def run(seed: int, steps: int = 2) -> Run:
    """Train a little, so that everything has a state of its own."""
    torch.manual_seed(seed)
    model = Tiny(num_classes=3)
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.1), Average(model, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()
        average.update(model, step)
    return model, optimizer, average


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


class Spent(Tensor):
    """A tensor at which the memory runs out, or somebody presses Ctrl-C."""

    error: BaseException = MemoryError()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.copy_, Tensor.clone):
            raise cls.error
        return super().__torch_function__(function, types, args, kwargs or {})


NAMES = list(checkpoint.collect(*run(1)))


def test_a_state_goes_back_as_it_was() -> None:
    written, target = checkpoint.collect(*run(1)), run(2, steps=0)
    assert not same(checkpoint.collect(*target), written)
    checkpoint.restore(written, *target)
    assert same(checkpoint.collect(*target), written)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", NAMES)
def test_an_error_at_any_tensor_leaves_the_run_as_it_was(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    written, target = checkpoint.collect(*run(1)), run(2)
    before = checkpoint.collect(*target)
    places = [value.data_ptr() for value in target[0].state_dict().values()]
    monkeypatch.setattr(Spent, "error", error)
    written[name] = written[name].as_subclass(Spent)
    with pytest.raises(type(error)):
        checkpoint.restore(written, *target)
    assert same(checkpoint.collect(*target), before)
    assert [value.data_ptr() for value in target[0].state_dict().values()] == places  # the optimiser knows them


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("optimizer.")])
def test_a_missing_tensor_leaves_the_run_as_it_was(name: str) -> None:
    written, target = checkpoint.collect(*run(1)), run(2)
    before = checkpoint.collect(*target)
    del written[name]
    with pytest.raises(checkpoint.Damaged, match=name):
        checkpoint.restore(written, *target)
    assert same(checkpoint.collect(*target), before)
