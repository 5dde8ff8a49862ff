"""Maps that are computed again on the way back: the same numbers to the last bit, in less room, and only where it pays."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.kernels.alive import Alive
from zoo import MobileNetV2, MobileNetV3Large, ResNet50
from zoo.kernels import differentiable
from zoo.kernels.differentiable.stem import refused
from zoo.kernels.training import kernels, recompute
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.recompute import remade
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Replay
from zoo.networks.model import Model


@pytest.fixture(autouse=True)
def normalised_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let BatchNorm's kernels run where there is no GPU, in the interpreter."""
    monkeypatch.setattr(kernels, "batch_norm_act", differentiable.batch_norm_act)


class Inverted(nn.Module):
    """Two of MobileNetV2's blocks, the second with its shortcut."""

    def __init__(self, act: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.first, self.second = self.block(8, act), self.block(8, act)

    @staticmethod
    def block(width: int, act: type[nn.Module]) -> nn.Sequential:
        wide = 4 * width
        return nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), act(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), act(),
            nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x)


def plan(network: nn.Module, x: Tensor, recompute: bool | None) -> Replay:
    """Return what `fast` would run, without its check."""
    recording = record(network, (x,), {}, x.device)
    steps, _, counted = steps_of(recording, {})
    return Replay(recording, steps, counted, remade(recording, steps, recompute))


def step(network: nn.Module, x: Tensor, recompute: bool) -> tuple[list[Tensor], int]:
    """Return the output, all gradients and running statistics of a step, and the bytes of maps kept between its two ways."""
    twin = copy.deepcopy(network).to(x.device).train()
    replay, x = plan(twin, x, recompute), x.clone().requires_grad_()
    with Alive(x.device) as alive:
        out = replay(replay.at(twin), [x])
        gc.collect()  # Triton's interpreter leaves what it was given in a circle of its own
        kept = alive.bytes
    out.square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in twin.parameters()), *(b for b in twin.buffers() if b.is_floating_point())]
    return [tensor for tensor in found if tensor is not None], kept


@pytest.mark.parametrize("act", [nn.ReLU6, nn.SiLU])
def test_recomputed_maps_give_the_same_gradients_to_the_last_bit_in_less_room(act: type[nn.Module], device: torch.device) -> None:
    torch.manual_seed(0)
    network, x = Inverted(act), torch.randn(1, 8, 4, 4).to(device).contiguous(memory_format=torch.channels_last)
    kept, room = step(network, x, False)
    again, less = step(network, x, True)
    assert len(kept) == 2 + 18 + 12
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)
    assert less < 0.65 * room


def test_a_map_that_somebody_else_keeps_is_kept(device: torch.device) -> None:
    class Watched(Inverted):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.first[:3](x)
            return self.first[3:](wide) * wide.square().mean()

    network, x = Watched().to(device).train(), torch.randn(1, 8, 4, 4).to(device)
    assert len(plan(network, x, True).remade.maps) == 1  # the depthwise convolution's, not the first


@pytest.mark.parametrize(("network", "chosen"), [(MobileNetV2, True), (MobileNetV3Large, True), (ResNet50, False)])
def test_recomputing_is_chosen_where_it_frees_a_quarter(network: type[Model], chosen: bool) -> None:
    built = network().train()
    x = torch.empty(2, 3, 224, 224)
    assert bool(plan(built, x, None).remade) == chosen
    assert plan(built, x, True).remade
    assert not plan(built, x, False).remade


class Bottleneck(nn.Module):
    """Of ResNets, halving the map, its shortcut before or behind; `shows` what the last convolution makes."""

    def __init__(self, shows: bool = False) -> None:
        super().__init__()
        self.shows = shows
        self.one, self.first = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.two, self.second = nn.Conv2d(4, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.three, self.third = nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.beside, self.fourth = nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.second(self.two(torch.relu(self.first(self.one(x))))))
        wide = self.three(y)
        y = torch.relu(self.third(wide) + self.fourth(self.beside(x)))
        return y + wide.mean() if self.shows else y


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_narrow_map_is_widened_to_is_made_again_by_the_same_product(
    dtype: torch.dtype | None, kernel: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BatchNorm's kernels and with PyTorch's own, under autocast and without; not those that a GPU has for such layers."""
    if not kernel:
        monkeypatch.undo()
    for chain in ("conv_norm_act", "conv_stats", "norm_act_conv", "stem_conv"):
        monkeypatch.setattr(kernels, f"{chain}_refuses", lambda *args, **options: "another test's")
    torch.manual_seed(0)
    network, x = Bottleneck(), torch.randn(1, 8, 8, 8).to(device).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, dtype, dtype is not None):
        remade = plan(network.to(device), x, True).remade
        maps = 2 if dtype is None else 1  # the last one's, and the shortcut's where its images are not cast; three by three is no product
        assert len(remade.convs) == maps
        assert not plan(network, x, None).remade.convs  # which costs arithmetic: only who asks for room gets it
        kept, room = step(network, x, False)
        again, less = step(network, x, True)
    assert len(kept) == 2 + 12 + 8
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)
    wide = 16 * 4 * 4 * (4 if dtype is None else 2)
    assert room - less >= maps * wide


def test_a_widened_map_that_somebody_else_reads_is_kept(device: torch.device) -> None:
    network, x = Bottleneck(shows=True).to(device).train(), torch.randn(1, 8, 8, 8).to(device)
    assert len(plan(network, x, True).remade.convs) == 1  # the shortcut's


def test_what_a_widened_map_is_made_of_may_not_change_before_the_way_back(device: torch.device) -> None:
    network, x = Bottleneck().to(device).train(), torch.randn(1, 8, 8, 8).to(device)
    replay = plan(network, x, True)
    out = replay(replay.at(network), [x])
    x.mul_(2)  # the shortcut's convolution reads it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Widening(nn.Module):
    """A 1x1 convolution from 8 channels to 16; `looks` at its weight once more; what it read is `written` behind it."""

    def __init__(self, looks: bool = False, written: bool = False) -> None:
        super().__init__()
        self.looks, self.written = looks, written
        self.before = nn.Conv2d(8, 8, 3, padding=1)
        self.one, self.norm = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).float()
        y = self.one(x)
        if self.written:
            x.mul_(2)
        y = self.last(torch.relu(self.norm(y)))
        return y + self.one.weight.mean() if self.looks else y


def test_a_weight_that_learns_nothing_may_not_change_either(device: torch.device) -> None:
    """PyTorch keeps none of it, but from it the map is made."""
    network, x = Widening().to(device).train(), torch.randn(1, 8, 4, 4).to(device)
    network.one.weight.requires_grad_(False)
    replay = plan(network, x, True)
    assert len(replay.remade.convs) == 1
    out = replay(replay.at(network), [x])
    with torch.no_grad():
        network.one.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().sum().backward()


@pytest.mark.parametrize("network", [Widening(looks=True), Widening(), Widening(written=True)])
def test_what_autocast_casts_for_a_convolution_alone_is_kept_as_it_casts_it(network: nn.Module, device: torch.device) -> None:
    """Its map, in float32, and a weight that others read too: whoever writes into the originals meanwhile may."""
    with torch.autocast(device.type, torch.bfloat16):
        assert not plan(network.to(device).train(), torch.randn(1, 8, 4, 4).to(device), True).remade.convs


def test_in_inference_mode_nothing_is_noted(device: torch.device) -> None:
    network, x = Widening().to(device).train(), torch.randn(1, 8, 4, 4).to(device)
    replay = plan(network, x, True)
    assert replay.remade.convs
    with torch.backends.cudnn.flags(allow_tf32=False):
        with torch.inference_mode():
            out = replay(replay.at(network), [x])
        torch.testing.assert_close(out, network(x).detach())


def test_a_map_that_two_need_is_made_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its BatchNorm's gradient, and by that of the layer behind it, which makes what BatchNorm made."""
    network, x = Inverted().to(device).train(), torch.randn(1, 8, 4, 4).to(device).contiguous(memory_format=torch.channels_last)
    replay = plan(network, x, True)
    made, conv2d = [], recompute.F.conv2d
    out = replay(replay.at(network), [x])
    monkeypatch.setattr(recompute.F, "conv2d", lambda *given, **more: made.append(0) or conv2d(*given, **more))
    out.square().sum().backward()
    assert len(made) == len(replay.remade.convs) == 2


def test_a_frozen_convolution_keeps_the_smaller_one(device: torch.device) -> None:
    """Halving the map, it reads twice as much as it makes, and keeps none of it where its weight doesn't learn."""
    network = Bottleneck()
    for p in (network.one.weight, network.beside.weight, network.three.weight):
        p.requires_grad_(False)
    x = torch.randn(1, 8, 8, 8).to(device).contiguous(memory_format=torch.channels_last)
    kept, room = step(network, x, False)
    again, less = step(network, x, True)
    assert len(kept) == len(again)
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)
    assert less <= room


def test_a_checkpoint_around_keeps_what_it_keeps_and_the_gradients_are_the_same(device: torch.device) -> None:
    torch.manual_seed(0)
    network, x = Inverted().to(device).train(), torch.randn(1, 8, 4, 4).to(device).requires_grad_()
    replay = plan(network, x.detach(), True)
    assert replay.remade
    found = []
    for call in (replay, lambda *parts: checkpoint(replay, *parts, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(call(replay.at(network), [x]).square().sum(), x)
        found.append(gradient)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("recompute_too", [False, True])
def test_a_checkpoint_around_a_stem_keeps_what_it_keeps(recompute_too: bool, with_stems: None, device: torch.device) -> None:
    torch.manual_seed(0)
    network, x = Wide().to(device).train(), torch.randn(2, 3, 10, 10).to(device)
    replay, found = plan(network, x, True), []
    assert replay.remade
    for call in (replay, lambda *parts: checkpoint(replay, *parts, use_reentrant=False)):
        loss = call(replay.at(network), [x]).square().sum()
        found.append(torch.autograd.grad(loss, [*network.parameters()], retain_graph=recompute_too))
        if recompute_too:
            found[-1] = torch.autograd.grad(loss, [*network.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_weight_that_is_changed_before_the_way_back_is_an_error_as_without(device: torch.device) -> None:
    network, x = Inverted().to(device).train(), torch.randn(1, 8, 4, 4).to(device).requires_grad_()
    out = plan(network, x.detach(), True)
    out = out(out.at(network), [x])
    with torch.no_grad():
        network.first[3].weight.mul_(3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(("side", "maps"), [(1, 1), (2, 0)])
def test_a_pool_to_one_pixel_keeps_nothing_and_one_to_more_keeps_its_map(side: int, maps: int, device: torch.device) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
            self.pool = nn.AdaptiveAvgPool2d(side)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norm(x))
            return self.last(y).sum() + self.pool(y).sum()

    assert len(plan(Pooled().to(device).train(), torch.randn(2, 8, 4, 4).to(device), True).remade) == maps


class Wide(nn.Module):
    """VGG's first block: what its first convolution makes is its widest map; `shown` to somebody else, or `pooled` where it is made."""

    def __init__(self, act: type[nn.Module] = nn.ReLU, shown: bool = False, pooled: bool = False) -> None:
        super().__init__()
        self.first, self.act, self.second, self.third = (
            nn.Conv2d(3, 8, 3, padding=1),
            act(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 4, 3),
        )
        self.shown, self.pooled = shown, pooled

    def forward(self, x: Tensor) -> Any:
        y = self.act(self.first(x))
        y = F.max_pool2d(y, 2) if self.pooled else y
        z = torch.relu(self.third(F.max_pool2d(torch.relu(self.second(y)), 2)))
        return z + y.square().mean() if self.shown else z


@pytest.fixture
def with_stems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let first convolutions be found as on a GPU; the kernels are interpreted."""
    monkeypatch.setattr(kernels, "stem_conv_refuses", lambda device, x, weight, bias, **options: refused(x, weight, bias, **options))


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_made_of_images_is_made_again_to_the_last_bit(
    act: type[nn.Module], frozen: bool, with_stems: None, device: torch.device
) -> None:
    """By the layer behind, for its weight's gradient, and by itself for its activation's slope; images that learn get theirs."""
    torch.manual_seed(0)
    network, x = Wide(act), torch.randn(2, 3, 10, 10).to(device)
    network.second.weight.requires_grad_(not frozen)
    assert sum(map(len, plan(network.to(device).train(), x, True).remade.maps.values())) == 1
    kept, room = step(network, x, False)
    again, less = step(network, x, True)
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)
    assert room - less == 2 * 8 * 10 * 10 * 4
    found = []
    for asked in (False, True):
        twin = copy.deepcopy(network).to(device).train()
        replay = plan(twin, x, asked)
        replay(replay.at(twin), [x]).square().sum().backward()  # the images learn nothing: another kernel
        found.append([p.grad for p in twin.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{"shown": True}, {"pooled": True}])
def test_what_is_made_of_images_is_kept_where_somebody_else_looks_or_a_pool_has_made_it_small(
    options: dict[str, Any], with_stems: None, device: torch.device
) -> None:
    assert not plan(Wide(**options).to(device).train(), torch.randn(2, 3, 16, 16).to(device), True).remade


def test_what_is_made_of_images_is_made_again_unasked_where_it_is_worth_it(with_stems: None) -> None:
    """However large its share of the maps is, as here: what counts are bytes."""
    network, x = Wide().train(), torch.randn(2, 3, 10, 10)
    recording = record(network, (x,), {}, x.device)
    steps = steps_of(recording, {})[0]
    size = 2 * 8 * 10 * 10 * 4
    assert [len(remade(recording, steps, None, worth)) for worth in (size, size + 1)] == [1, 0]
