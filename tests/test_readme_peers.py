"""The README's table: what it says of other libraries is what they do here, and its figures are those of the records."""

from __future__ import annotations

import inspect
import io
import json
import re
from itertools import takewhile
from pathlib import Path

import documents
import pytest
import timm
import torch
import torchvision
from documents import DOCS, ROOT

from zoo import CATALOGUE
from zoo.bench.peers import NARROWER
from zoo.bench.record import Record

pytestmark = pytest.mark.reference
README = documents.read(ROOT / "README.md")


def row(start: str) -> list[str]:
    """The cells of the row that begins so: ours, torchvision's, timm's, keras.applications', Metalhead's, the proofs."""
    line = next(line for line in README.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_table_names_proofs_that_exist() -> None:
    lines = README.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| |") and "shown by" in line)
    rows = list(takewhile(lambda line: line.startswith("| "), lines[head + 2 :]))
    assert len(rows) >= 6
    for line in rows:
        proofs = line.strip("|").split("|")[-1]
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", proofs)
        pages = re.findall(r"\]\((docs/[\w.-]+)", proofs)
        assert tests or pages, line
        for file, name in tests:
            assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"
        assert all((ROOT / page).is_file() for page in pages)


def test_what_the_others_do_with_another_number_of_classes(tmp_path: Path) -> None:
    import keras

    with pytest.raises(ValueError, match="num_classes"):
        torchvision.models.resnet50(weights="IMAGENET1K_V1", num_classes=10)
    with pytest.raises(ValueError, match="classes"):
        keras.applications.ResNet50(weights="imagenet", classes=10)
    torch.save(timm.create_model("mobilenetv3_small_050").state_dict(), tmp_path / "small.pth")
    overlay = {"file": str(tmp_path / "small.pth")}
    assert timm.create_model("mobilenetv3_small_050", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=10).num_classes == 10
    assert row("another number of classes")[1:4] == ["a ValueError", "yes", "a ValueError"]


def test_torch_hub_does_not_look_at_a_cached_file_again(tmp_path: Path) -> None:
    """torchvision's weights, and timm's that come by URL, are loaded by this function."""
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(1)}, file)
    (tmp_path / "resnet50-11ad3fa6.pth").write_bytes(file.getvalue())
    assert "load_state_dict_from_url" in inspect.getsource(torchvision.models._api.WeightsEnum.get_state_dict)
    url = "https://download.pytorch.org/models/resnet50-11ad3fa6.pth"
    loaded = torch.hub.load_state_dict_from_url(url, str(tmp_path), check_hash=True, progress=False)
    assert list(loaded) == ["weight"]
    assert timm.models._builder._CHECK_HASH is False
    assert row("a damaged file in the cache")[1:3] == ["loaded", "loaded, if it came by URL"]


def test_keras_has_no_hash_of_its_mobilenets() -> None:
    from keras.src.applications import mobilenet, resnet

    assert "file_hash" not in inspect.getsource(mobilenet)
    assert "file_hash" in inspect.getsource(resnet)
    assert row("a damaged file in the cache")[3] == "loaded, of MobileNets"


def test_who_has_mobilenet_v1() -> None:
    import keras

    assert not [name for name in torchvision.models.list_models() if re.search("mobilenet_?v1", name)]
    assert timm.list_pretrained("mobilenetv1*")
    assert callable(keras.applications.MobileNet)
    assert row("MobileNetV1 with weights")[1:4] == ["no", "yes", "yes"]


def test_whose_networks_keep_larger_maps() -> None:
    import keras

    with torch.device("meta"):
        torchvision.models.resnet50(replace_stride_with_dilation=[False, True, True])
        with pytest.raises(NotImplementedError, match="Dilation"):
            torchvision.models.resnet18(replace_stride_with_dilation=[False, False, True])
        assert "replace_stride_with_dilation" not in inspect.signature(torchvision.models.DenseNet).parameters
        timm.create_model("resnet50", features_only=True, output_stride=8)
        for name in ("densenet121", "vgg16", "inception_v3"):
            with pytest.raises((AssertionError, TypeError)):
                timm.create_model(name, features_only=True, output_stride=8)
    assert "dilat" not in str(inspect.signature(keras.applications.ResNet50))
    assert row("`output_stride=8`")[1:4] == ["ResNets of bottlenecks", "not VGG, DenseNet, Inception", "no"]


def test_how_many_classifiers_there_are() -> None:
    found = [len(CATALOGUE), len(torchvision.models.list_models(module=torchvision.models)), len(timm.list_models())]
    assert row("classifiers")[:3] == [f"{number:,}" for number in found]


@pytest.mark.parametrize(
    ("start", "record", "model", "batch", "column", "key", "form"),
    [
        ("ResNet50, batch 32", "h200", "ResNet50", 32, 1, "images_s", "{:,.0f} images/s"),
        ("the same, seconds", "h200", "ResNet50", 32, 1, "build_s", "{:.1f} s"),
        ("Xception, batch 1", "h200", "Xception", 1, 2, "images_s", "{:,.0f} images/s"),
        ("MobileNetV2, batch 8", "cpu", "MobileNetV2", 8, 1, "images_s", "{:,.0f} images/s"),
    ],
)
def test_figures_are_those_of_the_records(start: str, record: str, model: str, batch: int, column: int, key: str, form: str) -> None:
    """Ours beside the fastest stock way of PyTorch; engines of others are named below the table."""
    cell = Record.read(DOCS / f"benchmarks-{record}.json").cell(model, batch)
    assert cell is not None
    assert cell["twin"] == ("torchvision", "timm")[column - 1]
    others = ("fast", "onnxruntime", "openvino", *NARROWER)
    stock = {name: way for name, way in cell["ways"].items() if name not in others}
    peer = max(stock.values(), key=lambda way: way["images_s"])
    assert (row(start)[0], row(start)[column]) == (form.format(cell["ways"]["fast"][key]), form.format(peer[key]))
    if "onnxruntime" in cell["ways"]:
        assert f"onnxruntime alone reaches {cell['ways']['onnxruntime']['images_s']:,.0f} images/s" in README
        assert cell["fastest_peer"] == "onnxruntime"


def test_loading_is_as_measured() -> None:
    rows = json.loads((DOCS / "benchmarks-load.json").read_text(encoding="utf-8"))["rows"]
    measured = {one["way"]: f"{one['ms']:.1f} ms" for one in rows if one["model"] == "ResNet50"}
    shown = row("ResNet50 from its file")
    assert [words.partition(",")[0] for words in shown[:3]] == [measured[way] for way in ("`trained(ResNet50)`", "torchvision", "timm")]
