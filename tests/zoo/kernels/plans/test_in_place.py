"""A step is written over what nobody reads again, and over nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.mapped import Bottleneck, Gated, program
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.arena import Watched
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import guess
from zoo.kernels.tuning.steps import COMPUTED, Setting


def test_the_second_map_of_a_join_dies_with_its_reader() -> None:
    """The wide map that it was made with is read again at the end of the block; that one lived on beside it."""
    x = torch.randn(2, 3, 12, 10)
    with torch.inference_mode():
        network = Bottleneck().eval()
        graph, places = understand(network, (x,), {})
        apply(graph, merges(graph, places)[:1], places)
        made = Program(graph, places, {}, Setting(x.device, torch.float32), Weights())
        assert [step.op for step in made.steps] == ["conv", "join", "second", "conv", "conv"]
        with Watched(x.device) as watched:
            (y,) = made.run([[x.contiguous(memory_format=torch.channels_last)]])
        torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-5)
    dead = [p.dies for p in watched.pieces if p.form[0] == (2, 12, 12, 10)]
    assert max(dead) <= max(p.born for p in watched.pieces if p.form[0] == (2, 24, 12, 10))


@pytest.mark.parametrize("again", [False, True])
def test_an_element_wise_step_writes_over_what_nobody_reads_again(again: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Gated(again).eval().to(device)
        made = program(network, x)
        plan = Plan(made)
        seen: list[bool] = []
        plan.eager([x], lambda node, inputs, value: seen.append(node.op == "pointwise" and value.data_ptr() == inputs[0].data_ptr()))
        (y,) = plan.eager([x])
        torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-5)
    gated = [node for node in made.steps if node.op == "pointwise" and len(node.inputs) == 3]
    assert len(gated) == 1
    assert (gated[0] in made._in_place) != again
    assert seen
    assert not any(seen)  # who looks at a step sees what went in


class Shortened(Bottleneck):
    """A bottleneck whose shortcut is an output too, or is read as a map besides, or ends with its sum."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = torch.relu(self.wide(torch.relu(self.first(x))))
        inner = torch.relu(self.inner(torch.relu(self.narrow(wide))))
        y = torch.relu(self.back(inner) + wide)
        return (
            (self.narrow(y), self.narrow(wide))
            if self.use == "again"
            else (self.narrow(y), wide)
            if self.use == "output"
            else (self.narrow(y),)
        )


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("use", ["", "again", "output"])
def test_a_sum_is_written_over_its_shortcut_where_nobody_reads_that_again(use: str, merged: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Shortened(use).eval().to(device)
        graph, places = understand(network, (x,), {})
        if merged:
            apply(graph, [merge for merge in merges(graph, places) if merge.node.argument("residual") is not None][:1], places)
        setting = Setting(x.device, torch.float32)
        chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
        made = Program(graph, places, chosen, setting, Weights(), overlapping=True)
        (added,) = [node for node in made.steps if "residual" in node.roles]
        assert added.op == ("join" if merged else "conv")
        assert made._in_place == ({} if use else {added: added.roles.index("residual")})
        plan = Plan(made)
        with Watched(x.device) as watched:
            found = plan.eager([x])
        for got, wanted in zip(found, network(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert sum(p.form[0] == (2, 24, 12, 10) for p in watched.pieces) == (2 if use else 1)


class Seen(nn.Module):
    """A map of which an output is a view, and which a gate and a sum would be written over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        seen = y.flatten(2)
        return seen, self.last(torch.relu(y * torch.sigmoid(x.mean((2, 3), keepdim=True)) + x)[:, :3])


def test_what_an_output_is_a_view_of_stays(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Seen().eval().to(device)
        made = program(network, x)
        assert all(node.shape[2:] == (1, 1) for node in made._in_place)  # the gate
        for got, wanted in zip(Plan(made).eager([x]), network(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_pytorch_made_is_not_written_over(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        made = program(Gated(False).eval(), x)
        (node,) = made._in_place
        setting = Setting(x.device, torch.float32)
        chosen = {step: guess(step, made.places, setting) for step in made.steps if step.op in COMPUTED and step is not node.inputs[0]}
        assert not Program(made.graph, made.places, chosen, setting, Weights())._in_place


class Flat(nn.Module):
    """Its last sum is an output by way of a view, in the network's own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        return torch.relu(y * torch.sigmoid(y.mean((2, 3), keepdim=True)) + x).flatten(1)


def test_a_last_step_keeps_the_bits_of_the_networks_own_dtype(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    setting = Setting(x.device, torch.bfloat16)
    with torch.inference_mode():
        graph, places = understand(Flat().eval(), (x,), {})
        chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
        (y,) = Plan(Program(graph, places, chosen, setting, Weights())).eager([x.bfloat16()])
    assert y.dtype == torch.float32
    assert (y != y.bfloat16().float()).float().mean() > 0.2
