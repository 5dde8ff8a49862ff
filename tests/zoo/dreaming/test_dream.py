"""`dream`: what it changes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.zoo.dreaming.dreams import drawn, levels, picture
from weights.record import Preprocessing
from zoo import ResNet20, UnknownTap, ViT_Ti_16, fast
from zoo.dreaming import NothingToDream, dream, dream_frames, dreamer
from zoo.dreaming.cutting import cut
from zoo.networks.model import Model

QUICK: dict[str, Any] = {"steps": 2, "octaves": 2, "jitter": 4, "progress": False}


def objective(network: nn.Module, image: Any, at: str) -> float:
    from zoo import features

    x = torch.from_numpy(levels(image)).permute(2, 0, 1)[None].float() / 255
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (network.checkpoint.preprocessing.mean, network.checkpoint.preprocessing.std))
    return float(features(network, at)((x - mean) / std)[at].detach().square().mean())


def test_a_dream_has_more_of_what_the_layer_finds_and_the_pictures_size(network: Model) -> None:
    image = picture()
    dreamt = dream(network, image, at="layer2", progress=False)
    assert (dreamt.size, dreamt.mode) == (image.size, "RGB")
    assert objective(network, dreamt, "layer2") > 2 * objective(network, image, "layer2")


def test_the_same_seed_has_the_same_bytes_and_another_one_has_others(network: Model) -> None:
    one, same, other = (dream(network, picture(), seed=seed, **QUICK).tobytes() for seed in (3, 3, 4))
    assert one == same != other


def state(network: nn.Module) -> dict[str, Any]:
    """Everything of a network that a dream could change."""
    found: dict[str, Any] = {name: (id(t), t._version, t.clone(), t.requires_grad, t.grad) for name, t in network.named_parameters()}
    found |= {f"buffer {name}": (id(t), t._version, t.clone()) for name, t in network.named_buffers()}
    for name, layer in network.named_modules():
        hooks = {kind: list(value) for kind, value in vars(layer).items() if kind.endswith("_hooks")}
        own = {key: value for key, value in vars(layer).items() if isinstance(value, bool | int | float | str)}
        found[f"layer {name}"] = (id(layer), layer.training, hooks, own)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@contextmanager
def stopping(name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    def stop(steps: int) -> None:
        raise KeyboardInterrupt

    yield stop


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plainly": nullcontext,
    "without gradients": torch.no_grad,
    "under inference mode": torch.inference_mode,
    "under autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_the_network_is_as_it_was_whoever_calls_and_however_it_ends(caller: str, network: Model) -> None:
    model = copy.deepcopy(network).train()
    model.layer1.eval()
    model.layer2.requires_grad_(False)
    model.layer3.register_forward_hook(lambda *_: None)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state(model)
    with CALLERS[caller]():
        dreamt = dream(model, picture(), **QUICK)
        with pytest.raises(KeyboardInterrupt):
            dream(model, picture(), **QUICK | {"progress": stopping})
        with pytest.raises(UnknownTap):
            dream(model, picture(), at="layer9", **QUICK)
    after = state(model)
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    assert dreamt.tobytes() == dream(network, picture(), **QUICK).tobytes()


def test_frozen_networks_and_those_made_under_inference_mode_dream_the_same(network: Model) -> None:
    with torch.inference_mode():
        made = ResNet20().eval()
        made.load_state_dict(network.state_dict())
        made.checkpoint = network.checkpoint
    frozen = copy.deepcopy(network).requires_grad_(False)
    wanted = dream(network, picture(), **QUICK).tobytes()
    assert [dream(one, picture(), **QUICK).tobytes() for one in (made, frozen, fast(network, "cpu", tune="none"))] == [wanted] * 3


def test_half_precision_dreams_in_float32(network: Model) -> None:
    half = copy.deepcopy(network).to(torch.bfloat16)
    dreamt = dream(half, picture(), **QUICK)
    assert dreamt.tobytes() == dream(half.float(), picture(), **QUICK).tobytes()


@pytest.mark.parametrize("largest", [2.5e9, 1e6])
def test_several_pictures_have_each_the_dream_that_they_have_alone(largest: float, network: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dreamer.WHOLE, "cpu", largest)  # the latter: one at a time, in tiles
    images = [picture(seed=1), picture(64, 72, seed=2), picture(seed=3)]
    together = dream(network, images, **QUICK)
    assert [one.size for one in together] == [one.size for one in images]
    for image, dreamt in zip(images, together, strict=True):
        assert np.abs(levels(dreamt) - levels(dream(network, image, **QUICK))).max() <= 1


def test_several_layers_add_up_whatever_overwrites_them(network: Model) -> None:
    """A tapped BatchNorm is overwritten by the ReLU behind it, where layers are run as they are."""
    net = cut(network, ["bn1", "layer1"])
    one, other = (cut(network, at) for at in ("bn1", "layer1"))
    x = torch.randn(1, 3, 32, 32)
    first, second = net.run(x)
    assert first.min() < 0
    torch.testing.assert_close(first, one.run(x)[0])
    torch.testing.assert_close(second, other.run(x)[0])
    torch.testing.assert_close(one.run(x)[0], network.bn1(network.conv1(x)), rtol=1e-4, atol=1e-5)


class Foreign(nn.Module):
    """A network of somebody else: a flow that depends on values, layers in place, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True))
        self.second = nn.Conv2d(8, 8, 3, 2, 1)
        self.unused = nn.Linear(2, 2)
        self.label = nn.Identity()
        self.head = nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        x = self.second(x) if float(x.detach().mean()) > -1e9 else x
        self.label(x.flatten(1).argmax(1))
        return {"out": self.head(x.flatten(1))}


def test_any_module_dreams_at_a_layer_that_is_named() -> None:
    torch.manual_seed(0)
    model = Foreign()
    image = picture(32, 32)
    dreamt = dream(model, image, at="second", steps=3, progress=False)
    assert np.abs(levels(dreamt) - levels(image)).mean() > 1
    assert model.training
    assert not any(layer._forward_hooks for layer in model.modules())
    with pytest.raises(ValueError, match="no network of the zoo, so no layer of it is known to dream well: name one, at='head'"):
        dream(model, image, progress=False)
    with pytest.raises(UnknownTap, match=r"Foreign has no layer 'secnd'; did you mean second"):
        dream(model, image, at="secnd", progress=False)
    with pytest.raises(UnknownTap, match="'unused' of Foreign is no part of the way from a picture to its output"):
        dream(model, image, at="unused", progress=False)
    with pytest.raises(NothingToDream, match="no gradient reaches the picture from 'label': its int64 output is cut off"):
        dream(model, image, at="label", progress=False)
    with pytest.raises(ValueError, match=r"Foreign can't take a picture of 96x80 pixels: .*shapes"):
        dream(model, picture(), at="head", progress=False)
    assert dream(model, picture(32, 32), at="head", octaves=1, progress=False).size == (32, 32)


def test_a_transformer_dreams_of_tokens_in_windows_of_its_own_size() -> None:
    torch.manual_seed(0)
    model = ViT_Ti_16(image_size=32, num_classes=3).eval()
    image = picture(50, 40)
    dreamt = dream(model, image, steps=2, jitter=3, progress=False)
    changed = np.abs(levels(dreamt) - levels(image)).sum(2) > 0
    assert dreamt.size == (50, 40)
    assert changed.mean() > 0.8
    with pytest.raises(
        ValueError, match=r"the image is 30x40 pixels, and 'encoder.layers.encoder_layer_6' of ViT_Ti_16 needs 32 on the shorter side"
    ):
        dream(model, picture(30, 40), progress=False)


def test_what_a_dream_can_not_be_made_of_is_said(network: Model) -> None:
    with pytest.raises(
        ValueError, match=r"the image is 96x80 pixels, which is too small for 12 octaves: 'layer2' of ResNet20 needs 4 pixels"
    ):
        dream(network, picture(), octaves=12, progress=False)
    with pytest.raises(UnknownTap, match="Nearest: layer2"):
        dream(network, picture(), at="layr2", progress=False)
    with pytest.raises(TypeError, match=r"dream\(\) takes a network, trained\(GoogLeNet\), not the class ResNet20: build it first"):
        dream(ResNet20, picture(), progress=False)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"at is a layer, \"layer3\", or several"):
        dream(network, picture(), at=[], progress=False)
    with pytest.raises(TypeError, match=r"dream\(\) takes no 'octave'; did you mean octaves\?"):
        dream(network, picture(), octave=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"dream_frames\(\) takes no 'octave'; did you mean octaves\?"):
        dream_frames(network, picture(), octave=3)
    with pytest.raises(ValueError, match=r"like is 'original' or 'deepdream.jl', got 'julia'"):
        dream(network, picture(), like="julia", progress=False)
    for name, value, said in (
        ("scale", 1.0, "more than 1, got 1.0"),
        ("rate", 0, "more than 0, got 0"),
        ("steps", 0, "steps is a whole number of at least 1, got 0"),
        ("jitter", -1, "jitter is a whole number of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=said):
            dream(network, picture(), progress=False, **{name: value})
    with pytest.raises(ValueError, match="the list is empty"):
        dream(network, [], progress=False)
    with pytest.raises(ValueError, match="this ResNet20 takes 5, of which no dream can be shown"):
        dream(ResNet20(in_channels=5), picture(), progress=False)
    with torch.device("meta"):
        empty = ResNet20()
    with pytest.raises(ValueError, match="the network has no numbers: it is on the meta device"):
        dream(empty, picture(), progress=False)
    with pytest.raises(TypeError, match="is TorchScript, whose layers can't be reached"):
        dream(torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3))), picture(), at="0", progress=False)


def test_a_layer_that_is_silent_or_not_finite_is_said(network: Model, tmp_path: Path) -> None:
    dead = copy.deepcopy(network)
    dead.layer2[-1].bn2.weight.data.zero_()
    dead.layer2[-1].bn2.bias.data.fill_(-1e9)
    with pytest.raises(NothingToDream, match="the gradient of 'layer2' of ResNet20 is zero everywhere"):
        dream(dead, picture(), keep=tmp_path / "part", **QUICK)
    assert list(tmp_path.iterdir()) == []
    broken = copy.deepcopy(network)
    broken.conv1.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the gradient of ResNet20 is NaN or infinite"):
        dream(broken, picture(), **QUICK)


def test_channels_and_their_order_are_the_checkpoints(network: Model) -> None:
    """A network that reads blue first, with the colours of its first layer turned, dreams the same; one of grey dreams in grey."""
    turned = copy.deepcopy(network)
    turned.conv1.weight.data = network.conv1.weight.data.flip(1)
    how = network.checkpoint.preprocessing  # pyright: ignore[reportOptionalMemberAccess]
    bgr = Preprocessing(how.resize, how.crop, how.interpolation, how.mean[::-1], how.std[::-1], "bgr")
    one, other = dream(network, picture(), **QUICK), dream(turned, picture(), preprocessing=bgr, **QUICK)
    assert np.abs(levels(one) - levels(other)).max() <= 1
    grey = drawn(ResNet20, in_channels=1)
    image = picture().convert("L").convert("RGB")
    dreamt = levels(dream(grey, image, **QUICK))
    assert np.abs(dreamt - levels(image)).mean() > 0.5
    assert (dreamt == dreamt[:, :, :1]).all()
