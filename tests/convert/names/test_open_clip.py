"""open_clip itself is the oracle, whose image towers have OpenAI's names: its files compute the same in our networks, and come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import randomised, relative
from safetensors.torch import save_file
from torch import Tensor
from written import written

import zoo
from convert import names
from zoo.networks.model import Model
from zoo.networks.vit import CLIP, SigLIP
from zoo.pretrained.heads import remove_head

pytestmark = pytest.mark.reference

TABLES: dict[str, Any] = {"patch": 16, "depth": 2, "attention_heads": 2, "width": 32, "mlp_width": 64, "input_size": 64}
TEXT = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 1}


class Thin(CLIP, **TABLES): ...


class ThinQuick(CLIP, **TABLES, activation="quick_gelu"): ...


def pair(cls: type[CLIP], embed_dim: int = 24) -> Any:
    """open_clip's pair of towers of the same tables."""
    from open_clip.model import CLIP as OpenCLIP  # noqa: N811

    vision = {"layers": cls.depth, "width": cls.width, "head_width": cls.width // cls.attention_heads, "patch_size": cls.patch}
    vision |= {"image_size": cls.input_size, "mlp_ratio": cls.mlp_width / cls.width}
    model = OpenCLIP(embed_dim, vision, TEXT, quick_gelu=cls.activation == "quick_gelu")
    model.load_state_dict(randomised(model))
    return model.eval()


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


SUBJECTS = [Thin, ThinQuick, *(pytest.param(cls, marks=pytest.mark.long) for name, cls in zoo.CATALOGUE.items() if name.startswith("CLIP"))]


@pytest.mark.parametrize("cls", SUBJECTS)
def test_files_of_open_clip_compute_the_same_and_come_back(cls: type[CLIP]) -> None:
    model = pair(cls)
    tensors = dict(model.state_dict())
    with torch.device("meta"):
        network = cls(num_classes=24)
    assert names.recognise(tensors, cls, network.state_dict()) == "open_clip"
    network.load_state_dict(names.to_ours(tensors, network.state_dict(), naming="auto", family=cls), assign=True)
    network.eval()
    with torch.inference_mode():
        expected = model.encode_image(images(cls.input_size))
        assert relative(expected[0], expected[1]) > 1e-3
        assert relative(network(images(cls.input_size)), expected) < 1e-4
    state = network.state_dict()
    back = written(names.rows("open_clip", cls, {name: tuple(tensor.shape) for name, tensor in state.items()}), state)
    tower = {name: tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    assert back.keys() == tower.keys()
    assert all(torch.equal(torch.from_numpy(back[name].array().copy()), tensor) for name, tensor in tower.items())


def test_a_projection_with_a_bias_has_no_place_there() -> None:
    from weights.errors import ConvertError

    network = Thin(num_classes=24)
    torch.nn.init.ones_(network.heads.head.bias)
    state = network.state_dict()
    with pytest.raises(ConvertError, match=r"visual\.proj has no bias there"):
        written(names.rows("open_clip", Thin, {name: tuple(tensor.shape) for name, tensor in state.items()}), state)


def test_siglips_tower_is_timms_behind_a_prefix() -> None:
    import timm

    class ThinSigLIP(SigLIP, **TABLES): ...

    sizes = {"patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "img_size": 64}
    model = timm.models.VisionTransformer(**sizes, class_token=False, global_pool="map", num_classes=0)
    model.load_state_dict(randomised(model))
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {"text.transformer.resblocks.0.ln_1.weight": torch.ones(3), "logit_scale": torch.ones(()), "logit_bias": torch.ones(())}
    network = ThinSigLIP()
    remove_head(network)
    assert names.recognise(tensors, ThinSigLIP, network.state_dict()) == "open_clip"
    network.load_state_dict(names.to_ours(tensors, network.state_dict(), naming="auto", family=ThinSigLIP))
    with torch.inference_mode():
        assert relative(network.eval()(images(64)), model.eval()(images(64))) < 1e-4


@pytest.mark.parametrize("quick", [True, False])
def test_its_config_says_activation_width_and_preprocessing(quick: bool, tmp_path: Path) -> None:
    model = pair(ThinQuick if quick else Thin)
    save_file(model.state_dict(), tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 64, "layers": 2, "width": 32, "patch_size": 16}
    config = {
        "model_cfg": {"embed_dim": 24, "quick_gelu": quick, "vision_cfg": vision},
        "preprocess_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    network = zoo.trained(Thin, tmp_path / "open_clip_model.safetensors")
    record = network.checkpoint
    assert record is not None
    assert (record.embedding, record.num_classes, record.preprocessing.mean) == (True, 24, (0.1, 0.1, 0.1))
    assert (record.preprocessing.resize, record.preprocessing.crop, record.preprocessing.interpolation) == (64, 64, "bicubic")
    with torch.inference_mode():
        assert relative(network(images(64)), model.encode_image(images(64))) < 1e-4


@pytest.mark.parametrize("cls", [zoo.ViT_Ti_16, zoo.ResNet18])
def test_other_networks_have_no_names_there(cls: type[Model]) -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in cls().state_dict().items()}
    assert names.rows("open_clip", cls, shapes) == []
