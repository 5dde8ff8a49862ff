"""Google's vision transformers and MLP-Mixers: timm's loader and Flax itself are the oracles, for files of random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import relative
from torch import Tensor

import zoo
from convert import conversion, names, network, writing
from convert.formats import flax, npz
from convert.source import Source, in_memory
from weights import ConvertError
from zoo.networks.mlp_mixer import MLPMixer
from zoo.networks.model import Model
from zoo.networks.vit import SigLIP, ViT
from zoo.pretrained.heads import remove_head

pytestmark = pytest.mark.reference

TABLES: dict[str, Any] = {"patch": 16, "depth": 2, "attention_heads": 2, "width": 128, "mlp_width": 160, "input_size": 64}
SIZES = {"patch_size": 16, "embed_dim": 128, "depth": 2, "num_heads": 2, "mlp_ratio": 160 / 128, "img_size": 64, "num_classes": 10}


class Thin(ViT, **TABLES): ...


class ThinSigLIP(SigLIP, **TABLES): ...


class ThinMixer(MLPMixer, depth=2, width=32, input_size=64): ...


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def tree(shapes: Any) -> dict[str, np.ndarray]:
    """Random numbers by their names in a file."""
    draw = np.random.default_rng(0)

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        spread = (2 / np.prod(shape[:-1])) ** 0.5 if name.endswith("kernel") else 0.1
        return (draw.standard_normal(shape) * spread + name.endswith("scale")).astype(np.float32)

    return {name: value(name, shape) for name, shape in shapes.items()}


def block(place: str, attention: str, dense: str, norm: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for word in ("query", "key", "value"):
        found |= {f"{place}{attention}/{word}/kernel": (128, 2, 64), f"{place}{attention}/{word}/bias": (2, 64)}
    found |= {f"{place}{attention}/out/kernel": (2, 64, 128), f"{place}{attention}/out/bias": (128,)}
    found |= {f"{place}{dense}/Dense_0/kernel": (128, 160), f"{place}{dense}/Dense_0/bias": (160,)}
    found |= {f"{place}{dense}/Dense_1/kernel": (160, 128), f"{place}{dense}/Dense_1/bias": (128,)}
    return found | {f"{place}{name}/{leaf}": (128,) for name in ("LayerNorm_0", norm) for leaf in ("scale", "bias")}


def vit(big_vision: bool) -> dict[str, np.ndarray]:
    """A file of vision_transformer's, or of big_vision's."""
    words = ("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1") if big_vision else VISION_TRANSFORMER
    shapes: dict[str, tuple[int, ...]] = {"embedding/kernel": (16, 16, 3, 128), "embedding/bias": (128,), "cls": (1, 1, 128)}
    shapes["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = (1, 17, 128)
    shapes |= {"head/kernel": (128, 10), "head/bias": (10,)}
    shapes |= {f"Transformer/encoder_norm/{leaf}": (128,) for leaf in ("scale", "bias")}
    for index in range(2):
        shapes |= block(f"Transformer/encoderblock_{index}/", *words)
    return tree(shapes)


VISION_TRANSFORMER = ("MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2")


def adopted(source: Source, cls: type[Model], headless: bool = False, **options: Any) -> Model:
    model = cls(num_classes=10, **options).eval()
    if headless:
        remove_head(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    result = conversion.adopt(source, network.layers(model, (3, 64, 64)), shapes, family=cls, naming="flax")
    assert result.report.ok, conversion.explain(result, shapes)
    model.load_state_dict({name: torch.from_numpy(stored.array().copy()) for name, stored in result.tensors.items()})
    return model


def parts(model: Model) -> Any:
    state = {name: in_memory(name, tensor.numpy()) for name, tensor in model.state_dict().items()}
    rows = names.rows("flax", type(model), {name: stored.shape for name, stored in state.items()})
    return writing.parts(rows, network.layers(model, (3, 64, 64)), state)


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/"])
@pytest.mark.parametrize("big_vision", [False, True])
def test_a_vision_transformers_file_computes_what_timm_makes_of_it(big_vision: bool, prefix: str, tmp_path: Path) -> None:
    import timm

    if prefix == "params/" and not big_vision:  # there timm takes big_vision's names alone
        return
    values = {f"{prefix}{name}": value for name, value in vit(big_vision).items()}
    np.savez(tmp_path / "vit.npz", **values)
    theirs = timm.models.VisionTransformer(**SIZES).eval()
    theirs.load_pretrained(str(tmp_path / "vit.npz"))
    model = adopted(npz.read(tmp_path / "vit.npz"), Thin)
    with torch.inference_mode():
        assert relative(model(images()), theirs(images())) < 1e-4
    npz.write(parts(model), tmp_path / "ours.npz", metadata={"naming": "flax"})
    expected = {f"params/{name}": value for name, value in vit(False).items()}
    with np.load(tmp_path / "ours.npz") as back:
        assert set(back.files) - {npz.NOTES} == expected.keys()
        if not big_vision:
            assert all(np.array_equal(back[name], value) for name, value in expected.items())


def stacked(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Lay the blocks of a file one behind the other, as big_vision's `scan` keeps them."""
    blocks = [{name: value for name, value in values.items() if f"encoderblock_{index}/" in name} for index in range(2)]
    second = [blocks[1][name.replace("encoderblock_0/", "encoderblock_1/")] for name in blocks[0]]
    pairs = zip(blocks[0].items(), second, strict=True)
    alone = {name: value for name, value in values.items() if "encoderblock_" not in name}
    return alone | {name.replace("encoderblock_0/", "encoderblock/"): np.stack([value, other]) for (name, value), other in pairs}


def test_blocks_that_are_stacked_in_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    values = {name: (value + index).astype(np.float32) for index, (name, value) in enumerate(vit(True).items())}  # no two blocks are alike
    np.savez(tmp_path / "apart.npz", **values)
    np.savez(tmp_path / "stacked.npz", **stacked(values))
    (tmp_path / "stacked.msgpack").write_bytes(serialized(stacked(values)))
    apart = adopted(npz.read(tmp_path / "apart.npz"), Thin).state_dict()
    for source in (npz.read(tmp_path / "stacked.npz"), flax.read(tmp_path / "stacked.msgpack")):
        assert all(torch.equal(tensor, apart[name]) for name, tensor in adopted(source, Thin).state_dict().items())
    wrong = stacked(values) | {"Transformer/encoderblock/LayerNorm_0/bias": np.zeros((3, 128), np.float32)}
    np.savez(tmp_path / "wrong.npz", **wrong)
    with pytest.raises(ConvertError, match=r"one axis for the blocks before the others, and have \[2, 3\] of them"):
        npz.read(tmp_path / "wrong.npz")


def serialized(values: dict[str, np.ndarray]) -> bytes:
    """What Flax writes of a tree with these names."""
    from flax import serialization

    tree: dict[str, Any] = {}
    for name, value in values.items():
        *modules, leaf = name.split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[leaf] = value
    return serialization.to_bytes({"params": tree})


def test_siglips_file_of_big_vision_computes_what_timm_makes_of_it(tmp_path: Path) -> None:
    import timm

    shapes = {name: value.shape for name, value in vit(True).items() if not name.startswith(("head", "cls"))} | {
        "pos_embedding": (1, 16, 128)
    }
    shapes |= block("MAPHead_0/", "MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_0") | {"MAPHead_0/probe": (1, 1, 128)}
    values = {f"params/img/{name}": value for name, value in tree(shapes).items()}
    values |= {
        "params/t": np.ones(1, np.float32),
        "params/b": np.ones(1, np.float32),
        "params/txt/head/kernel": np.ones((3, 4), np.float32),
    }
    np.savez(tmp_path / "siglip.npz", **values)
    theirs = timm.models.VisionTransformer(**SIZES | {"num_classes": 0}, class_token=False, global_pool="map").eval()
    theirs.load_pretrained(str(tmp_path / "siglip.npz"))
    model = adopted(npz.read(tmp_path / "siglip.npz"), ThinSigLIP, headless=True)
    with torch.inference_mode():
        assert relative(model(images()), theirs(images())) < 1e-4


def flax_vit() -> Any:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm(name="LayerNorm_0")(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="MultiHeadDotProductAttention_1")(y, y)
            return x + Dense(160, 128, name="MlpBlock_3")(nn.LayerNorm(name="LayerNorm_2")(x))

    class Dense(nn.Module):
        hidden: int
        width: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(self.width, name="Dense_1")(nn.gelu(nn.Dense(self.hidden, name="Dense_0")(x)))

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = Positions(name="posembed_input")(x)
            for index in range(2):
                x = Block(name=f"encoderblock_{index}")(x)
            return nn.LayerNorm(name="encoder_norm")(x)

    class Positions(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + self.param("pos_embedding", nn.initializers.zeros, (1, 17, 128))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            import jax.numpy as jnp

            x = nn.Conv(128, (16, 16), (16, 16), padding="VALID", name="embedding")(x)
            x = x.reshape(x.shape[0], -1, 128)
            token = self.param("cls", nn.initializers.zeros, (1, 1, 128))
            x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], 1)
            return nn.Dense(10, name="head")(Encoder(name="Transformer")(x)[:, 0])

    return Network()


def flax_mixer() -> Any:
    from flax import linen as nn

    class MlpBlock(nn.Module):
        hidden: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.gelu(nn.Dense(self.hidden)(x))  # the first of both is Dense_0
            return nn.Dense(x.shape[-1])(y)

    class MixerBlock(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + MlpBlock(16, name="token_mixing")(y).swapaxes(1, 2)
            return x + MlpBlock(128, name="channel_mixing")(nn.LayerNorm()(x))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(32, (16, 16), (16, 16), name="stem")(x)
            x = x.reshape(x.shape[0], -1, 32)
            for _ in range(2):
                x = MixerBlock()(x)
            return nn.Dense(10, name="head")(nn.LayerNorm(name="pre_head_layer_norm")(x).mean(1))

    return Network()


@pytest.mark.parametrize("cls", [Thin, ThinMixer])
def test_logits_are_flaxs_and_the_way_back_gives_its_variables(cls: type[Model], tmp_path: Path) -> None:
    import jax
    from flax import serialization
    from flax.traverse_util import flatten_dict, unflatten_dict

    theirs, rows = flax_vit() if cls is Thin else flax_mixer(), images().permute(0, 2, 3, 1).numpy()
    shapes = {"/".join(path): leaf.shape for path, leaf in flatten_dict(jax.eval_shape(theirs.init, jax.random.key(0), rows)).items()}
    values = unflatten_dict({tuple(name.split("/")): value for name, value in tree(shapes).items()})
    (tmp_path / "theirs.msgpack").write_bytes(serialization.to_bytes(values))
    options = names.fact("flax", "options", cls)
    assert options == {"activation": "gelu_tanh"}
    model = adopted(flax.read(tmp_path / "theirs.msgpack"), cls, **options)
    expected = torch.from_numpy(np.array(jax.jit(theirs.apply)(values, rows)))
    with torch.inference_mode():
        assert relative(model(images()), expected) < 1e-4
        assert relative(adopted(flax.read(tmp_path / "theirs.msgpack"), cls)(images()), expected) > 1e-4  # the option is needed
    flax.write(parts(model), tmp_path / "ours.msgpack", metadata={})
    back = serialization.from_bytes(values, (tmp_path / "ours.msgpack").read_bytes())
    assert jax.tree_util.tree_all(jax.tree_util.tree_map(np.array_equal, back, values))


def test_trained_reads_such_a_file_with_its_options_and_pixels_from_minus_one_to_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **vit(False))
    record = zoo.trained(Thin, tmp_path / "vit.npz").checkpoint
    assert record is not None
    assert (record.options, record.preprocessing.mean, record.num_classes) == ({"activation": "gelu_tanh"}, (0.5, 0.5, 0.5), 10)


@pytest.mark.parametrize("cls", [zoo.DeiT_Ti_16, zoo.DINOv2_S_14, zoo.ResMLP_12_224, zoo.GMLP_S16_224])
def test_other_networks_have_no_names_there(cls: type[Model]) -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in cls().state_dict().items()}
    assert names.rows("flax", cls, shapes) == []


@pytest.mark.parametrize("cls", [Thin, ThinMixer])
def test_an_unknown_activation_is_refused(cls: type[Model]) -> None:
    with pytest.raises(ValueError, match="activation is one of gelu, gelu_tanh"):
        cls(activation="relu")
