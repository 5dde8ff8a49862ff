"""Repositories as transformers, timm and Keras write them, served by a Hub on this machine and asked by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hubserver import HubServer
from parity import randomised, relative
from PIL import Image
from torch import Tensor, nn

import zoo
from weights import MalformedFile, UnsupportedFormat, WeightsMismatch
from zoo import trained
from zoo.labels import Label, labels
from zoo.networks.vit import CLIP, DeiT, DINOv2, SigLIP, ViT

pytestmark = pytest.mark.reference

TABLES: dict[str, Any] = {"patch": 16, "depth": 2, "attention_heads": 2, "width": 32, "mlp_width": 64, "input_size": 64}
CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64, "patch_size": 16}
SIZE = {"height": 64, "width": 64}


class Thin(ViT, **TABLES): ...


class ThinDINO(DINOv2, **TABLES): ...


class ThinRegisters(DINOv2, **TABLES, registers=3, special_positions=False): ...


class ThinDeiT(DeiT, **TABLES, distilled=True): ...


class ThinCLIP(CLIP, **TABLES): ...


class ThinSigLIP(SigLIP, **TABLES): ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def served(hub: HubServer, name: str, folder: Path) -> None:
    hub.repo(name, {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})


def drawn(model: nn.Module) -> Any:
    model.load_state_dict(randomised(model))
    return model.eval()


def photograph() -> Image.Image:
    row, column = np.mgrid[0:90, 0:120]
    return Image.fromarray(np.stack([2 * row, 2 * column, row + column], -1).astype(np.uint8))


def images(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def transformers_vit(folder: Path, **processing: Any) -> nn.Module:
    import transformers as hf

    names = dict(enumerate(("blue\tjay", "oak", "granite")))
    model = drawn(hf.ViTForImageClassification(hf.ViTConfig(**CONFIG, id2label=names)))
    model.save_pretrained(folder)
    hf.ViTImageProcessor(size=SIZE, **processing).save_pretrained(folder)
    return model


def test_a_repository_of_transformers_brings_weights_preprocessing_and_labels(hub: HubServer, tmp_path: Path) -> None:
    import transformers as hf

    model = transformers_vit(tmp_path, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], resample=3)
    served(hub, "acme/vit", tmp_path)
    network = trained(Thin, "hf://acme/vit")
    record = network.checkpoint
    assert record is not None
    steps = record.preprocessing
    assert (steps.resize, steps.crop, steps.squash, steps.interpolation) == (64, 64, True, "bicubic")
    assert (steps.mean, steps.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert record.provenance == "named by the user; config.json and preprocessor_config.json beside it say how it is used"
    with torch.inference_mode():
        assert relative(network(images()), model(images()).logits) < 1e-4
        pixels = hf.ViTImageProcessor.from_pretrained(tmp_path)(photograph(), return_tensors="pt")["pixel_values"]
        ours = network.preprocess([photograph()])
        assert (ours - pixels).abs().max() < 4 / 255 / 0.2  # PIL and torchvision round differently
        expected = model(pixels).logits.softmax(-1)[0]
    (found,) = zoo.predict(network, photograph(), top=1)
    assert found.label == ["blue jay", "oak", "granite"][int(expected.argmax())]


def test_files_beside_weights_are_asked_for_once_and_at_the_commit_of_the_weights(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_vit(tmp_path, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])
    served(hub, "acme/vit", tmp_path)
    first = trained(Thin, "hf://acme/vit").checkpoint
    (tmp_path / "preprocessor_config.json").write_text("{}")
    served(hub, "acme/vit", tmp_path)
    hub.heal()
    assert trained(Thin, "hf://acme/vit").checkpoint == first
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert trained(Thin, "hf://acme/vit").checkpoint == first
    assert hub.log == []


def test_convert_and_embed_read_a_folder_of_transformers(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    from zoo.conversion.convert import convert

    there, here = tmp_path / "there", tmp_path / "here"
    model = transformers_vit(there)
    served(hub, "acme/vit", there)
    snapshot_download("acme/vit", local_dir=here, endpoint=hub.url)
    made = convert(here / "model.safetensors", tmp_path / "ours.safetensors", Thin)
    assert made.naming == "transformers"
    assert made.preprocessing.mean == (0.5, 0.5, 0.5)
    network = trained(Thin, tmp_path / "ours.safetensors")
    with torch.inference_mode():
        assert relative(network(images()), model(images()).logits) < 1e-4
    with torch.inference_mode():
        expected = model.vit(network.preprocess([photograph()])).last_hidden_state[:, 0]
    assert relative(embedded(trained(Thin, "hf://acme/vit"), tmp_path), expected) < 1e-3


def test_what_is_written_under_transformers_names_is_read_by_transformers(tmp_path: Path) -> None:
    import transformers as hf
    from safetensors.torch import load_file, save_file

    from zoo.conversion.convert import convert

    network = drawn(Thin(num_classes=3))
    save_file(network.state_dict(), tmp_path / "ours.safetensors")
    convert(tmp_path / "ours.safetensors", tmp_path / "model.safetensors", Thin, to="transformers")
    model = hf.ViTForImageClassification(hf.ViTConfig(**CONFIG, num_labels=3))
    model.save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    (tmp_path / "model.safetensors").replace(tmp_path / "theirs" / "model.safetensors")
    again = hf.ViTForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    with torch.inference_mode():
        assert relative(again(images()).logits, network(images())) < 1e-4


def embedded(network: zoo.Model, folder: Path) -> Tensor:
    """What `embed` writes of the photograph."""
    from zoo.embedding import embed, read

    photos = folder / "photos"
    photos.mkdir()
    photograph().save(photos / "one.png")
    embed(network, photos, folder / "vectors.safetensors", fast=False, progress=False)
    return torch.from_numpy(np.asarray(read(folder / "vectors.safetensors").vectors["embedding"], np.float32))


def test_timms_repositories_bring_weights_preprocessing_and_labels(hub: HubServer, tmp_path: Path) -> None:
    import timm
    from huggingface_hub import snapshot_download

    from zoo.conversion.convert import convert

    there, here = tmp_path / "there", tmp_path / "here"
    model = drawn(timm.create_model("mobilenetv2_035", num_classes=1000))
    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.8, "interpolation": "bicubic", "input_size": (3, 96, 96)}
    timm.models.save_for_hf(
        model, str(there), model_config={"pretrained_cfg": {**model.pretrained_cfg, **settings, "tag": "a1_in1k"}}, safe_serialization=True
    )
    served(hub, "acme/mobile", there)
    network = trained("MobileNetV2_035", "hf://acme/mobile")
    record = network.checkpoint
    assert record is not None
    steps = record.preprocessing
    assert (steps.resize, steps.crop, steps.interpolation, steps.mean, steps.std) == (120, 96, "bicubic", *list(settings.values())[:2])
    assert record.labels == "imagenet1k"
    snapshot_download("acme/mobile", local_dir=here, endpoint=hub.url)
    made = convert(here / "model.safetensors", tmp_path / "ours.safetensors", "MobileNetV2_035")
    assert made.preprocessing == steps
    with torch.inference_mode():
        expected = model(images())
        assert relative(network(images()), expected) < 1e-4
        assert relative(trained("MobileNetV2_035", tmp_path / "ours.safetensors")(images()), expected) < 1e-4
        pooled = model.forward_head(model.forward_features(network.preprocess([photograph()])), pre_logits=True)
    assert relative(embedded(network, tmp_path), pooled) < 1e-3


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, where it saves
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_kerass_files_are_read_by_their_address_and_where_the_client_put_them(
    name: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras
    from huggingface_hub import hf_hub_download

    from zoo.conversion.convert import convert

    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    model = keras.applications.MobileNetV2(alpha=0.35, weights=None, classes=10, input_shape=(96, 96, 3))
    random = np.random.default_rng(0)
    for variable in model.weights:
        if len(variable.shape) == 1:
            variable.assign(random.uniform(0.5, 1.5, tuple(variable.shape)).astype(np.float32))
    model.save(there / name) if name.endswith(".keras") else model.save_weights(there / name)
    served(hub, "acme/keras", there)
    network = trained("MobileNetV2_035", f"hf://acme/keras/{name}")
    hub.heal()
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert trained("MobileNetV2_035", f"hf://acme/keras/{name}").checkpoint == network.checkpoint
    assert hub.log == []
    monkeypatch.delenv("ZOO_OFFLINE")
    file = Path(hf_hub_download("acme/keras", name, local_dir=here, endpoint=hub.url))
    by_path = trained("MobileNetV2_035", file)
    record = network.checkpoint
    assert record is not None
    assert by_path.checkpoint is not None
    assert record.sources == (f"hf://acme/keras/{name}",)
    assert (record.options, record.preprocessing) == (by_path.checkpoint.options, by_path.checkpoint.preprocessing)
    assert all(torch.equal(tensor, by_path.state_dict()[key]) for key, tensor in network.state_dict().items())
    made = convert(file, tmp_path / "ours.safetensors", "MobileNetV2_035")
    assert made.naming == "keras"
    given = images(96)
    pooled = keras.Model(model.inputs, model.layers[-2].output)
    with torch.inference_mode():
        expected = model(given.permute(0, 2, 3, 1), training=False).cpu()
        assert relative(network(given).softmax(-1), expected) < 1e-4
        assert relative(trained("MobileNetV2_035", tmp_path / "ours.safetensors")(given).softmax(-1), expected) < 1e-4
    if name == "model.keras":  # the other does not say that its images have 96 pixels, and Keras's network takes no others
        with torch.inference_mode():
            theirs = pooled(network.preprocess([photograph()]).permute(0, 2, 3, 1), training=False).cpu()
        assert relative(embedded(network, tmp_path), theirs) < 1e-3


def test_a_file_of_another_framework_that_does_not_fit_is_named_by_its_address(hub: HubServer, tmp_path: Path) -> None:
    np.savez(tmp_path / "wheels.npz", kernel=np.ones((3, 3, 3, 8), np.float32))
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    served(hub, "acme/other", tmp_path)
    with pytest.raises(WeightsMismatch, match=r"hf://acme/other/wheels\.npz"):
        trained(Thin, "hf://acme/other/wheels.npz")
    with pytest.raises(UnsupportedFormat, match=r"^hf://acme/other/broken\.onnx is no weight file"):
        trained(Thin, "hf://acme/other/broken.onnx")


def test_towers_and_bare_networks_give_their_embeddings(hub: HubServer, tmp_path: Path) -> None:
    import transformers as hf

    common = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
    cases: list[tuple[Any, Any, str]] = [
        (ThinCLIP, hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**CONFIG, projection_dim=24)), "image_embeds"),
        (ThinSigLIP, hf.SiglipVisionModel(hf.SiglipVisionConfig(**CONFIG)), "pooler_output"),
        (ThinDINO, hf.Dinov2Model(hf.Dinov2Config(**common, mlp_ratio=2)), "pooler_output"),
    ]
    for cls, model, key in cases:
        drawn(model).save_pretrained(tmp_path / cls.__name__)
        served(hub, f"acme/{cls.__name__}", tmp_path / cls.__name__)
        network = trained(cls, f"hf://acme/{cls.__name__}")
        with torch.inference_mode():
            assert relative(network(images()), model(images())[key]) < 1e-4, cls
    record = trained(ThinCLIP, "hf://acme/ThinCLIP").checkpoint
    assert record is not None
    assert (record.embedding, record.num_classes, record.options["activation"]) == (True, 24, "quick_gelu")


def test_1001_classes_keep_their_background(hub: HubServer, tmp_path: Path) -> None:
    import transformers as hf

    classes = ["background", *(label.name for label in labels("imagenet1k"))]
    config = hf.MobileNetV1Config(depth_multiplier=0.25, id2label=dict(enumerate(classes)))
    model = drawn(hf.MobileNetV1ForImageClassification(config))
    model.save_pretrained(tmp_path)
    served(hub, "acme/mobile", tmp_path)
    network = trained("MobileNetV1_025", "hf://acme/mobile")
    record = network.checkpoint
    assert record is not None
    assert record.labels is not None
    assert network.num_classes == 1001
    assert labels(record.labels)[:2] == (Label("background"), labels("imagenet1k")[0])
    with torch.inference_mode():
        assert relative(network(images(224)), model(images(224)).logits) < 1e-4


COMMON = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
TEXTS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
TEXTS |= {"bos_token_id": 1, "eos_token_id": 2}
CLASSIFIERS: dict[str, tuple[type[ViT], str]] = {
    "Dinov2ForImageClassification": (ThinDINO, "class_and_mean"),
    "Dinov2WithRegistersForImageClassification": (ThinRegisters, "class_and_mean"),
    "SiglipForImageClassification": (ThinSigLIP, "mean"),
    "DeiTForImageClassification": (ThinDeiT, "class"),
}


def classifier(kind: str) -> Any:
    """One of transformers' classifiers with three classes and random numbers."""
    import transformers as hf

    labels = {"id2label": dict(enumerate(("jay", "oak", "granite")))}
    if kind in ("SiglipForImageClassification", "CLIPForImageClassification"):
        configured = getattr(hf, kind.replace("ForImageClassification", "Config"))
        return drawn(getattr(hf, kind)(configured(vision_config=CONFIG, text_config=TEXTS, **labels)))
    own = CONFIG if kind.startswith("DeiT") else {**COMMON, "mlp_ratio": 2}
    registers = {"num_register_tokens": 3} if "Registers" in kind else {}
    return drawn(getattr(hf, kind)(getattr(hf, kind.replace("ForImageClassification", "Config"))(**own, **registers, **labels)))


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_that_read_other_features_bring_the_option_that_reads_them(kind: str, hub: HubServer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from zoo.conversion.convert import convert

    cls, pool = CLASSIFIERS[kind]
    model = classifier(kind)
    model.save_pretrained(tmp_path / "there")
    served(hub, "acme/wheels", tmp_path / "there")
    network = trained(cls, "hf://acme/wheels")
    assert network.checkpoint is not None
    assert network.checkpoint.options["pool"] == pool
    made = convert(tmp_path / "there" / "model.safetensors", tmp_path / "ours.safetensors", cls)
    assert made.naming == "transformers"
    again = trained(cls, tmp_path / "ours.safetensors")
    with torch.inference_mode():
        expected = model(images()).logits
        assert relative(expected[0], expected[1]) > 1e-3
        assert relative(network(images()), expected) < 1e-4
        assert relative(again(images()), expected) < 1e-4
        read: list[Tensor] = []
        model.classifier.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        model(network.preprocess([photograph()]))
    assert relative(embedded(network, tmp_path), read[0]) < 1e-3
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", cls, to="transformers")
    back, first = load_file(tmp_path / "back.safetensors"), load_file(tmp_path / "there" / "model.safetensors")
    same = back.keys() & first.keys()
    assert "classifier.weight" in same
    unread = ("vision_model.head.", "dinov2.embeddings.mask_token", "dinov2_with_registers.embeddings.mask_token")
    assert all(name.startswith(unread) for name in first.keys() ^ back.keys())
    moved = ("cls_token", "position_embeddings") if cls is ThinRegisters else ()
    assert all(torch.equal(back[name], first[name]) for name in same if not name.endswith(moved))


def test_a_file_of_features_that_no_network_reads_is_refused(hub: HubServer, tmp_path: Path) -> None:
    classifier("CLIPForImageClassification").save_pretrained(tmp_path)
    served(hub, "acme/clip", tmp_path)
    with pytest.raises(WeightsMismatch, match="the mean of the patches before the last norm, which no network here does"):
        trained(ThinCLIP, "hf://acme/clip")


@pytest.mark.parametrize("text", ["{", '{"model_type": "vit", "id2label": 7}', '{"model_type": "vit", "image_size": "big"}'])
def test_damaged_files_beside_weights_are_an_error(text: str, tmp_path: Path) -> None:
    transformers_vit(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((MalformedFile, WeightsMismatch), match=r"config\.json"):
        trained(Thin, tmp_path / "model.safetensors")


def test_a_config_of_another_network_or_of_nobody_known_says_nothing(tmp_path: Path) -> None:
    transformers_vit(tmp_path)
    for text in ('{"model_type": "bert"}', '{"model_type": "swin", "window_size": 3}', "[]", '"vit"'):
        (tmp_path / "config.json").write_text(text)
        record = trained(Thin, tmp_path / "model.safetensors").checkpoint
        assert record is not None
        assert "assumed" in record.provenance
