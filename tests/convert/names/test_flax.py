"""Flax itself is the oracle: its example's ResNets, written here from their description, compute what ours do, both ways."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from convert import conversion, names, network, writing
from convert.formats import flax, npz, safetensors
from convert.source import Part, Source, in_memory
from zoo.networks.model import Model

pytestmark = pytest.mark.reference

SIDE = 64
"""Even: at odd sizes TensorFlow's padding and the symmetric one are the same."""


def resnet(bottleneck: bool, blocks: tuple[int, ...]) -> Any:
    """The example's network: modules without a name are numbered by class; padding is SAME but in the first convolution."""
    import jax.numpy as jnp
    from flax import linen as nn

    norm = partial(nn.BatchNorm, use_running_average=True, epsilon=1e-5)
    conv = partial(nn.Conv, use_bias=False)

    class ResNetBlock(nn.Module):
        filters: int
        strides: tuple[int, int]

        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(x)))
            y = norm()(conv(self.filters, (3, 3))(y))
            if x.shape != y.shape:
                x = norm(name="norm_proj")(conv(self.filters, (1, 1), self.strides, name="conv_proj")(x))
            return nn.relu(x + y)

    class BottleneckResNetBlock(nn.Module):
        filters: int
        strides: tuple[int, int]

        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
            y = norm()(conv(4 * self.filters, (1, 1))(y))
            if x.shape != y.shape:
                x = norm(name="norm_proj")(conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
            x = nn.relu(norm(name="bn_init")(x))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for stage, count in enumerate(blocks):
                for index in range(count):
                    strides = (2, 2) if stage > 0 and index == 0 else (1, 1)
                    x = (BottleneckResNetBlock if bottleneck else ResNetBlock)(64 * 2**stage, strides)(x)
            return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))

    return ResNet()


def variables(model: Any, images: np.ndarray) -> Any:
    """Random weights, and statistics as training leaves them."""
    import jax

    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    draw = np.random.default_rng(0)

    def value(path: Any, leaf: Any) -> np.ndarray:
        name = path[-1].key
        if name == "kernel":
            return (draw.standard_normal(leaf.shape) * (2 / np.prod(leaf.shape[:-1])) ** 0.5).astype(np.float32)
        low, high = {"scale": (0.3, 0.9), "var": (0.5, 1.5)}.get(name, (-0.2, 0.2))
        return draw.uniform(low, high, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, shapes)


def pictures() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 3, SIDE, SIDE)).astype(np.float32)


@cache
def case(bottleneck: bool) -> tuple[Any, np.ndarray, np.ndarray]:
    """Variables, images, and Flax's logits."""
    import jax

    theirs, images = resnet(bottleneck, (3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)), pictures()
    rows = images.transpose(0, 2, 3, 1)
    values = variables(theirs, rows)
    return values, images, np.asarray(jax.jit(theirs.apply)(values, rows))


def adopted(source: Source, cls: type[Model], **options: Any) -> Model:
    model = cls(num_classes=10, **options).eval()
    layers = network.layers(model, (3, SIDE, SIDE))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    result = conversion.adopt(source, layers, shapes, family=cls, naming="flax")
    assert result.report.ok, conversion.explain(result, shapes)
    model.load_state_dict({name: torch.from_numpy(stored.array().copy()) for name, stored in result.tensors.items()}, strict=False)
    return model


def parts(model: Model) -> list[Part]:
    state = {name: in_memory(name, tensor.numpy()) for name, tensor in model.state_dict().items()}
    rows = names.rows("flax", type(model), {name: stored.shape for name, stored in state.items()})
    return writing.parts(rows, network.layers(model, (3, SIDE, SIDE)), state)


@pytest.mark.parametrize(("cls", "bottleneck"), [(zoo.ResNet18, False), (zoo.ResNet50, True)], ids=["ResNet18", "ResNet50"])
def test_logits_are_flaxs_and_the_way_back_gives_flaxs_own_variables(cls: type[Model], bottleneck: bool, tmp_path: Path) -> None:
    import jax
    from flax import serialization

    values, images, expected = case(bottleneck)
    (tmp_path / "theirs.msgpack").write_bytes(serialization.to_bytes(values))
    model = adopted(flax.read(tmp_path / "theirs.msgpack"), cls, **names.fact("flax", "options", cls))
    with torch.inference_mode():
        found = model(torch.from_numpy(images)).numpy()
    assert abs(found - expected).max() < 1e-4 * abs(expected).max()
    flax.write(parts(model), tmp_path / "ours.msgpack", metadata={})
    back = serialization.from_bytes(values, (tmp_path / "ours.msgpack").read_bytes())
    assert jax.tree_util.tree_all(jax.tree_util.tree_map(np.array_equal, back, values))


def test_without_tensorflows_padding_the_logits_differ(tmp_path: Path) -> None:
    from flax import serialization

    values, images, expected = case(False)
    (tmp_path / "theirs.msgpack").write_bytes(serialization.to_bytes(values))
    with torch.inference_mode():
        found = adopted(flax.read(tmp_path / "theirs.msgpack"), zoo.ResNet18)(torch.from_numpy(images)).numpy()
    assert abs(found - expected).max() > 1e-2 * abs(expected).max()


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("with_collections", [True, False])
def test_safetensors_of_a_flax_tree_are_known_by_their_names(separator: str, with_collections: bool, tmp_path: Path) -> None:
    from flax.traverse_util import flatten_dict
    from safetensors.numpy import save_file

    values, images, expected = case(False)
    flat = flatten_dict(values)
    save_file(
        {separator.join(path if with_collections else path[1:]): value for path, value in flat.items()}, tmp_path / "flax.safetensors"
    )
    source = safetensors.read(tmp_path / "flax.safetensors")
    assert source.framework == "Flax"
    assert source.flatten == "hwc"
    with torch.inference_mode():
        found = adopted(source, zoo.ResNet18, padding="same")(torch.from_numpy(images)).numpy()
    assert abs(found - expected).max() < 1e-4 * abs(expected).max()


@pytest.mark.parametrize("format", [npz, safetensors])
def test_npz_and_safetensors_keep_a_flax_tree(format: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.ResNet18(num_classes=10, padding="same").eval()
    format.write(parts(model), tmp_path / "tree", metadata={"naming": "flax"})
    source = format.read(tmp_path / "tree")
    assert source.tensors["conv_init.weight"].stored_shape == (7, 7, 3, 64)
    assert source.tensors["conv_init.weight"].origin == "params/conv_init/kernel"
    again = adopted(source, zoo.ResNet18, padding="same")
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_networks_with_gates_have_no_names_there() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in zoo.SEResNet18().state_dict().items()}
    assert names.rows("flax", zoo.SEResNet18, shapes) == []


def test_blocks_are_counted_straight_through_the_stages() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in zoo.ResNet50().state_dict().items()}
    found = {row.ours: row.theirs for row in names.rows("flax", zoo.ResNet50, shapes)}
    assert found["layer2.0.conv3"] == "BottleneckResNetBlock_3.Conv_2"
    assert found["layer4.2.bn1"] == "BottleneckResNetBlock_15.BatchNorm_0"
    assert found["layer3.0.downsample.1"] == "BottleneckResNetBlock_7.norm_proj"
