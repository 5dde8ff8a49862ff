"""transformers itself is the oracle: files that it saves compute in our networks what they do in its own, and come back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import randomised, relative
from safetensors.torch import load_file
from torch import Tensor, nn
from written import written

import zoo
from convert import core, names
from zoo.networks.convnext import ConvNeXt, ConvNeXtV2
from zoo.networks.efficientnet import EfficientNet
from zoo.networks.mobilenet import MobileNetV1, MobileNetV2
from zoo.networks.model import Model
from zoo.networks.regnet import RegNet
from zoo.networks.resnet import ResNet
from zoo.networks.swin import Swin, SwinV2
from zoo.networks.vit import CLIP, DeiT, DINOv2, SigLIP, ViT
from zoo.pretrained.heads import remove_head

pytestmark = pytest.mark.reference


class Thin(ViT, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


class ThinDeiT(DeiT, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32, distilled=True): ...


class ThinDINO(DINOv2, patch=8, depth=2, attention_heads=2, width=16, mlp_width=64, input_size=32): ...


class ThinRegisters(
    DINOv2, patch=8, depth=2, attention_heads=2, width=16, mlp_width=64, input_size=32, registers=3, special_positions=False
): ...


class ThinGiant(DINOv2, patch=8, depth=2, attention_heads=2, width=16, mlp_width=96, input_size=32, activation="swiglu"): ...


class ThinCLIP(CLIP, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


class ThinQuickCLIP(CLIP, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32, activation="quick_gelu"): ...


class ThinSigLIP(SigLIP, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


THIN = (Thin, ThinDeiT, ThinDINO, ThinRegisters, ThinGiant, ThinCLIP, ThinQuickCLIP, ThinSigLIP)
SHOWN = (
    *("ResNet18", "ResNet26", "RegNetX_400MF", "RegNetY_400MF", "ConvNeXt_Atto", "ConvNeXtV2_Atto", "Swin_T", "Swin_V2_T"),
    *("MobileNetV1_025", "MobileNetV2_035", "EfficientNetB0"),
)
MOST = 330_000_000
"""Parameters of the largest network that is tried."""


def has(cls: type[Model]) -> bool:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in cls().state_dict().items()}
    return bool(names.rows("transformers", cls, shapes)) and cls.params < MOST and cls.__name__ not in ("ResNetAA50", "ConvNeXt_XXLarge")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask every network for its names only where the long tests are run: building 300 of them takes seconds of each collection."""
    if "subject" in metafunc.fixturenames:
        shown = [*THIN, *(zoo.CATALOGUE[name] for name in SHOWN)]
        asked = zoo.CATALOGUE.values() if "long" in metafunc.config.getoption("markexpr") else ()
        others = [pytest.param(cls, marks=pytest.mark.long) for cls in asked if cls not in shown and has(cls)]
        metafunc.parametrize("subject", [*shown, *others])


def theirs(cls: type[Model], **more: Any) -> nn.Module:
    """transformers' network of the same tables, untrained."""
    import transformers as hf

    labels: dict[str, Any] = {"num_labels": 10, **more}
    if issubclass(cls, ResNet):
        expansion, kind = (4, "bottleneck") if cls.block.expansion == 4 else (1, "basic")
        widths = [64 * 2**stage * expansion for stage in range(4)]
        config = hf.ResNetConfig(embedding_size=64, hidden_sizes=widths, depths=list(cls.blocks), layer_type=kind, **labels)
        return hf.ResNetForImageClassification(config)
    if issubclass(cls, RegNet):
        widths, depths = (list(column) for column in zip(*cls.stages(), strict=True))
        kind = {"groups_width": cls.group_width, "layer_type": "y" if cls.squeeze_excite else "x"}
        return hf.RegNetForImageClassification(hf.RegNetConfig(embedding_size=32, hidden_sizes=widths, depths=depths, **kind, **labels))
    if issubclass(cls, ConvNeXt):
        tables = {"hidden_sizes": list(cls.widths), "depths": list(cls.blocks)}
        if issubclass(cls, ConvNeXtV2):
            return hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(**tables, **labels))
        return hf.ConvNextForImageClassification(hf.ConvNextConfig(**tables, **labels))
    if issubclass(cls, Swin):
        tables = {"embed_dim": cls.width, "depths": list(cls.blocks), "num_heads": list(cls.heads), "image_size": cls.input_size}
        if issubclass(cls, SwinV2):
            return hf.Swinv2ForImageClassification(hf.Swinv2Config(**tables, window_size=cls.window, **labels))
        return hf.SwinForImageClassification(hf.SwinConfig(**tables, window_size=cls.window, **labels))
    if issubclass(cls, MobileNetV1):
        return hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config(depth_multiplier=cls.width, **labels))
    if issubclass(cls, MobileNetV2):
        return hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(depth_multiplier=cls.width, **labels))
    if issubclass(cls, EfficientNet):
        scale = {"width_coefficient": cls.width, "depth_coefficient": cls.depth, "image_size": cls.input_size}
        with torch.device("meta"):
            hidden = cls().classifier[1].in_features
        return hf.EfficientNetForImageClassification(hf.EfficientNetConfig(**scale, hidden_dim=hidden, **labels))
    assert issubclass(cls, ViT)
    common: dict[str, Any] = {
        **{"hidden_size": cls.width, "num_hidden_layers": cls.depth, "num_attention_heads": cls.attention_heads},
        **{"patch_size": cls.patch, "image_size": cls.input_size, "hidden_act": cls.activation},
    }
    if issubclass(cls, DINOv2):
        common |= {"use_swiglu_ffn": cls.activation == "swiglu", "mlp_ratio": 4, "hidden_act": "gelu"}
        if cls.registers:
            return hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**common, num_register_tokens=cls.registers))
        return hf.Dinov2Model(hf.Dinov2Config(**common))
    common |= {"intermediate_size": cls.mlp_width}
    if issubclass(cls, SigLIP):
        return hf.SiglipVisionModel(hf.SiglipVisionConfig(**common | {"hidden_act": "gelu_pytorch_tanh"}))
    if issubclass(cls, CLIP):
        return hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**common, projection_dim=10))
    if issubclass(cls, DeiT) and cls.distilled:
        return hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**common, **labels))
    return hf.ViTForImageClassification(hf.ViTConfig(**common, **labels))


def drawn(cls: type[Model], **more: Any) -> nn.Module:
    """The same with random numbers, in eval mode."""
    with torch.device("meta"):
        model = theirs(cls, **more)
    model = model.to_empty(device="cpu")
    untouched = dict(theirs(cls, **more).named_buffers()) if any(True for _ in model.buffers()) else {}
    for name, buffer in model.named_buffers():
        buffer.copy_(untouched[name])
    model.load_state_dict(randomised(model))
    return model.eval()


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Logits, or else the embedding."""
    found = model(images)
    return next(found[key] for key in ("logits", "image_embeds", "pooler_output") if key in found)


def ours(cls: type[Model], tensors: dict[str, Tensor]) -> Model:
    """Our network with a file's tensors; without a classifier where the file has none."""
    options = names.fact("transformers", "options", cls)
    with torch.device("meta"):
        model = cls(num_classes=10, **options)
    if issubclass(cls, SigLIP | DINOv2):
        remove_head(model)
    assert names.recognise(tensors, cls, model.state_dict()) == "transformers"
    state = names.to_ours(tensors, model.state_dict(), naming="auto", family=cls)
    counters = {name: torch.tensor(0) for name in model.state_dict() if name.endswith(core.COUNTER)}
    model.load_state_dict(counters | state, assign=True)
    return model.eval()


def images(cls: type[Model]) -> Tensor:
    side = cls.input_size if cls.fixed_size or issubclass(cls, Swin) else max(64, cls.min_size)
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_files_of_transformers_compute_the_same_and_come_back(subject: type[Model], tmp_path: Path) -> None:
    cls = subject
    model = drawn(cls)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    network = ours(cls, tensors)
    state = network.state_dict()
    model, network, given = model.double(), network.double(), images(cls).double()  # deep ones differ by float32's own rounding
    with torch.inference_mode():
        expected, found = outputs(model, given), network(given)
    assert expected.isfinite().all()
    assert relative(expected[0], expected[1]) > 1e-3  # the outputs depend on the image
    assert relative(found, expected) < 1e-6

    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    back = written(names.rows("transformers", cls, shapes), state)
    wanted = {name for name in tensors if not name.endswith((core.COUNTER, "mask_token"))}
    prefix = next(iter(back)).partition(".")[0] + "." if issubclass(cls, SigLIP | DINOv2) else ""  # of files without a classifier
    assert back.keys() == {prefix + name for name in wanted}
    moved = ("cls_token", "position_embeddings") if getattr(cls, "registers", 0) else ()  # its position was added to the token
    assert all(torch.equal(torch.from_numpy(back[prefix + n].array()), tensors[n]) for n in wanted if not n.endswith(moved))


@pytest.mark.parametrize("cls", [Thin, ThinDeiT, ThinDINO, zoo.Swin_T])
def test_the_newer_names_of_a_state_dict_are_read_too(cls: type[Model], tmp_path: Path) -> None:
    model = drawn(cls)
    model.save_pretrained(tmp_path)
    older, newer = ours(cls, load_file(tmp_path / "model.safetensors")).state_dict(), ours(cls, model.state_dict()).state_dict()
    assert all(torch.equal(newer[name], tensor) for name, tensor in older.items())


def test_a_network_without_classifier_is_read_without_its_prefix(tmp_path: Path) -> None:
    import transformers as hf

    model = drawn(Thin)
    bare = hf.ViTModel(model.config)
    bare.load_state_dict(model.vit.state_dict(), strict=False)
    bare.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"pooler.dense.weight", "embeddings.cls_token"} <= tensors.keys()
    network = Thin()
    remove_head(network)
    assert names.recognise(tensors, Thin, network.state_dict()) == "transformers"
    network.load_state_dict(names.to_ours(tensors, network.state_dict(), naming="auto", family=Thin))
    with torch.inference_mode():
        expected = bare.eval()(images(Thin)).last_hidden_state[:, 0]
        torch.testing.assert_close(network.eval()(images(Thin)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [ThinCLIP, ThinSigLIP])
def test_the_image_tower_of_a_pair_is_read(cls: type[Model], tmp_path: Path) -> None:
    import transformers as hf

    tower = drawn(cls)
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    kind, configured = (hf.CLIPModel, hf.CLIPConfig) if cls is ThinCLIP else (hf.SiglipModel, hf.SiglipConfig)
    more = {"projection_dim": 10} if cls is ThinCLIP else {}
    pair = kind(configured(text_config=text, vision_config=tower.config.to_dict(), **more))
    alone = tower.state_dict() if cls is ThinCLIP else {f"vision_model.{name}": tensor for name, tensor in tower.state_dict().items()}
    pair.load_state_dict(alone, strict=False)
    pair.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("text_model.") for name in tensors)
    with torch.inference_mode():
        assert relative(ours(cls, tensors)(images(cls)), outputs(tower, images(cls))) < 1e-4


def test_a_file_that_lacks_one_of_three_layers_is_not_complete(tmp_path: Path) -> None:
    model = drawn(Thin)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "vit.encoder.layer.1.attention.attention.key.weight"
    del tensors[gone]
    state = Thin(num_classes=10).state_dict()
    assert names.recognise(tensors, Thin, state) is None
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _, report = core.apply(names.rows("transformers", Thin, shapes), tensors, shapes)
    assert [ours for ours, _ in report.missing] == ["encoder.layers.encoder_layer_1.self_attention.in_proj_weight"]
    assert set(report.unmatched) == {gone.replace("key", word) for word in ("query", "value")}


@pytest.mark.parametrize("name", ["SEResNet18", "ResNet20", "ResNeXt50_32x4d", "WideResNet50_2", "ResNet26D", "DeiT3_S_16", "VGG11"])
def test_other_networks_have_no_names_there(name: str) -> None:
    cls = zoo.CATALOGUE[name]
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in cls().state_dict().items()}
    assert names.rows("transformers", cls, shapes) == []
