"""How images are prepared is stated, guessed or decided, and a guess is called one wherever it is shown."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import caffe_resnet20
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from convert import formats
from convert.formats import safetensors
from weights import BadRecord
from weights.reading import read_file
from zoo import MobileNetV1_025, ResNet20, SqueezeNet1_1, trained
from zoo.commands import app
from zoo.conversion.convert import convert
from zoo.conversion.namings import adopted
from zoo.conversion.notes import NOTES
from zoo.conversion.pixels import known_pixels, shown, told_by_user
from zoo.conversion.proof import CHANGED
from zoo.images.preprocess import preprocess
from zoo.labels import labels
from zoo.pretrained.add_file import add_file

COLOURS = np.array(
    [(220, 60, 90), (70, 180, 60), (40, 90, 210), (200, 190, 60), (130, 40, 160), (60, 170, 190), (150, 120, 90), (240, 130, 40)]
)
"""In RGB; none is another one's mirror in BGR."""


class Colours(nn.Module):
    """Names the nearest colour of the image's mean, which it reads in its own channel order and range."""

    def __init__(self) -> None:
        super().__init__()
        self.nearest = nn.Conv2d(3, len(COLOURS), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.nearest(x.mean((2, 3), keepdim=True)).flatten(1)


class Normed(nn.Module):
    """Has a BatchNorm over products of channels, whose order its statistics therefore know."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(x)).relu()


def taught(order: str, scale: float) -> Colours:
    """Solve for the weights: of two squared distances the smaller one is the larger product less half the colour's length."""
    network = Colours()
    centres = torch.from_numpy(COLOURS[:, :: -1 if order == "bgr" else 1].copy()).float() * scale
    with torch.no_grad():
        network.nearest.weight.copy_(centres[:, :, None, None])
        network.nearest.bias.copy_(-centres.square().sum(1) / 2)
    return network


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Photographs of one colour each with much noise, in folders that are called as their classes."""
    draw = np.random.default_rng(0)
    for which, colour in enumerate(COLOURS):
        for number in range(20):
            seen = draw.normal(colour + draw.normal(0, 22, 3), 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            (tmp_path / "pictures" / str(which)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(seen).save(tmp_path / "pictures" / str(which) / f"{which}_{number}.png")
    return tmp_path / "pictures"


def kept(network: nn.Module, path: Path) -> Path:
    safetensors.save(network.state_dict(), path)
    return path


@pytest.mark.parametrize(("order", "scale", "mean", "std"), [("bgr", 1.0, 0.0, 1 / 255), ("rgb", 1 / 255, 0.0, 1.0)])
def test_labelled_images_decide_order_and_range(order: str, scale: float, mean: float, std: float, pictures: Path, tmp_path: Path) -> None:
    source = kept(taught(order, scale), tmp_path / "a.safetensors")
    made = convert(source, tmp_path / "b.safetensors", Colours(), example=(3, 32, 32), images=pictures)
    assert made.pixels is not None
    assert made.pixels.status == "decided"
    assert "channel order" in made.pixels.decided
    assert made.preprocessing.channel_order == order
    assert "160 labelled images" in made.verdict
    assert made.verdict.startswith("arithmetic UNPROVEN")  # the two are apart
    assert json.loads(safetensors.metadata(read_file(tmp_path / "b.safetensors")[1])[NOTES])["pixels"]["status"] == "decided"
    accuracy = next(one for one in made.certificate.evidence if one.kind == "labelled images")
    assert "under pixels decided by" in accuracy.detail
    if "range and mean" in made.pixels.decided:
        assert (made.preprocessing.mean, made.preprocessing.std) == ((mean,) * 3, pytest.approx((std,) * 3))


def test_readings_that_are_too_close_leave_a_guess(pictures: Path, tmp_path: Path) -> None:
    grey = Colours()  # all channels count alike, so their order can't matter
    with torch.no_grad():
        centres = torch.from_numpy(COLOURS.mean(1)).float() / 255
        grey.nearest.weight.copy_((centres / 3)[:, None, None, None].expand_as(grey.nearest.weight))
        grey.nearest.bias.copy_(-centres.square() / 2)
    made = convert(kept(grey, tmp_path / "a.safetensors"), tmp_path / "b.safetensors", Colours(), example=(3, 32, 32), images=pictures)
    assert made.pixels is not None
    assert "channel order" not in made.pixels.decided
    assert made.preprocessing.channel_order == "rgb"
    assert "GUESSED" in made.verdict


def test_labels_of_other_classes_say_nothing(pictures: Path, tmp_path: Path) -> None:
    shuffled = taught("rgb", 1 / 255)
    with torch.no_grad():
        for tensor in (shuffled.nearest.weight, shuffled.nearest.bias):
            tensor.copy_(tensor.roll(1, 0).clone())
    made = convert(kept(shuffled, tmp_path / "a.safetensors"), tmp_path / "b.safetensors", Colours(), example=(3, 32, 32), images=pictures)
    assert made.pixels is not None
    assert made.pixels.status == "guessed"
    assert "hardly more than chance" in made.verdict


def test_what_is_said_is_not_searched(pictures: Path, tmp_path: Path) -> None:
    source = kept(taught("bgr", 1.0), tmp_path / "a.safetensors")
    said: dict[str, Any] = {"channel_order": "rgb", "mean": [0], "scale": 1}
    made = convert(source, tmp_path / "b.safetensors", Colours(), example=(3, 32, 32), images=pictures, **said)
    assert made.preprocessing.channel_order == "rgb"
    assert made.preprocessing.std == pytest.approx((1 / 255,) * 3)
    plain = convert(source, tmp_path / "c.safetensors", Colours(), example=(3, 32, 32), **said)
    assert plain.verdict.endswith("pixels stated by you")


def test_statistics_of_photographs_decide_without_labels(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(48):
        seen = draw.normal(draw.normal((150, 90, 40), 12), (60, 25, 9), (24, 24, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(seen).save(tmp_path / "photos" / f"{number}.png")
    network = Normed().train()
    with torch.no_grad():
        network.mix.weight.normal_(0, 0.3)
        network.norm.momentum = None
        for path in sorted((tmp_path / "photos").iterdir()):
            pixels = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1).flip(0).float() / 255
            network(pixels[None])
    source = kept(network, tmp_path / "a.safetensors")
    made = convert(source, tmp_path / "b.safetensors", Normed(), example=(3, 24, 24), images=tmp_path / "photos")
    assert made.pixels is not None
    assert made.pixels.status == "decided"
    assert made.preprocessing.channel_order == "bgr"
    assert "BatchNorm statistics of 48 photographs" in made.verdict


def test_a_guess_is_called_one_until_predict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = kept(SqueezeNet1_1().eval(), tmp_path / "a.safetensors")
    made = convert(source, tmp_path / "b.npz", SqueezeNet1_1)
    assert "pixels GUESSED" in made.verdict
    add_file(SqueezeNet1_1, tmp_path / "b.npz", "mine")
    network = trained(SqueezeNet1_1, "mine")
    assert network.checkpoint is not None
    assert (network.checkpoint.pixels or "").startswith("GUESSED")
    with caplog.at_level(logging.WARNING, "zoo"):
        zoo.predict(network, np.zeros((224, 224, 3), np.uint8))
    assert "is GUESSED" in caplog.text
    add_file(SqueezeNet1_1, tmp_path / "b.npz", "sure", channel_order="bgr", mean=[104, 117, 123], scale=1, size=227)
    record = trained(SqueezeNet1_1, "sure").checkpoint
    assert record is not None
    assert (record.pixels, record.preprocessing.channel_order, record.preprocessing.crop) == ("stated by you", "bgr", 227)
    assert record.preprocessing.mean == pytest.approx((104 / 255, 117 / 255, 123 / 255))


def test_a_published_or_proven_network_written_elsewhere_is_the_same_network(tmp_path: Path) -> None:
    convert(kept(trained(ResNet20), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    first = convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20)
    assert first.certificate.proven
    for ending in ("pth", "h5", "bson", "npz"):
        made = convert(tmp_path / "b.safetensors", tmp_path / f"c.{ending}", ResNet20)
        assert "the same network, read back bit for bit; its source's notes say PROVEN" in made.verdict
        assert "UNPROVEN" not in made.verdict


def test_a_proven_network_stays_the_same_network_through_a_chain_of_files(tmp_path: Path) -> None:
    convert(kept(trained(ResNet20), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    before = tmp_path / "first.safetensors"
    verdict = convert(tmp_path / "a.onnx", before, ResNet20).certificate.verdict
    for number, ending in enumerate(("h5", "npz", "weights.h5", "safetensors")):
        made = convert(before, tmp_path / f"{number}.{ending}", ResNet20)
        assert made.certificate.verdict == f"the same network, read back bit for bit; its source's notes say {verdict}"
        assert not made.certificate.proven
        before = tmp_path / f"{number}.{ending}"
    with formats.read(before) as source:
        assert "kernelzoo" not in json.loads(source.facts["kernelzoo"])["source"].get("facts", {})
    for told in ({"kernel_convention": "convolution"}, {"spatial": "wh"}):  # what the caller says turns kernels: another network
        made = convert(before, tmp_path / "turned.safetensors", ResNet20, replace=True, **told)
        assert "the same network" not in made.certificate.verdict


def test_a_proven_network_with_its_input_folded_is_not_the_same_network(tmp_path: Path) -> None:
    convert(kept(trained(ResNet20), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20)
    convert(tmp_path / "b.safetensors", tmp_path / "c.h5", ResNet20)
    made = convert(tmp_path / "c.h5", tmp_path / "d.safetensors", ResNet20, fold_input=True)
    assert made.certificate.verdict.startswith("UNPROVEN")


def test_what_was_compared_is_not_said_not_to_be(tmp_path: Path) -> None:
    convert(kept(ResNet20().eval(), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    made = convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20)
    assert made.certificate.proven
    assert "not compared" not in str(made.certificate)
    assert "not compared" not in " ".join(made.notes)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mean": [104.0, 117.0, 123.0]}, "divide by 255"),
        ({"mean": [0.5, 0.5]}, "2 numbers, and the network reads 3 channels"),
        ({"scale": 1.0, "std": [1.0]}, "leave one of them out"),
        ({"scale": -1.0}, "is positive"),
    ],
)
def test_what_can_not_be_said_of_pixels_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        told_by_user(ResNet20(), **said)


def test_the_command_takes_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = kept(ResNet20(), tmp_path / "a.safetensors")
    options = ["--channel-order", "bgr", "--mean", "104,117,123", "--scale", "0.017", "--size", "40"]
    assert app.main(["convert", str(source), str(tmp_path / "b.safetensors"), "--model", "ResNet20", *options]) == 0
    assert "pixels stated by you" in capsys.readouterr().out
    steps = trained(ResNet20, tmp_path / "b.safetensors").checkpoint
    assert steps is not None
    assert (steps.preprocessing.channel_order, steps.preprocessing.crop) == ("bgr", 40)
    assert steps.preprocessing.std == pytest.approx((1 / (255 * 0.017),) * 3)


@pytest.mark.real
def test_a_real_caffe_network_is_proven_and_its_pixels_are_decided(real: Path, tmp_path: Path) -> None:
    """Its framework's habit is BGR, its network's usual mean is another one, and it needs an option: all three are found out."""
    weights = trained(ResNet20, real / "real" / "pytorch" / "cifar_resnet20-12fca82f.th")
    source = caffe_resnet20.write({name: tensor.numpy() for name, tensor in weights.state_dict().items()}, tmp_path / "a.caffemodel")
    data, names = np.load(real / "data" / "cifar10_test.npz"), [label.name for label in labels("cifar10")]
    for index in range(0, 2000, 8):
        start, stop = data["offset"][index : index + 2]
        folder = tmp_path / "pictures" / names[data["label"][index]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.jpg").write_bytes(data["jpeg"][start:stop].tobytes())
    made = convert(source, tmp_path / "b.safetensors", ResNet20, match=True, images=tmp_path / "pictures")
    assert made.options["shortcut"] == "B"
    assert made.certificate.proven
    assert made.pixels is not None
    assert "channel order" in made.pixels.decided
    assert made.preprocessing.channel_order == "rgb"
    assert made.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406), abs=0.05)  # CIFAR-10's mean is too near to be told apart
    assert made.preprocessing.std == pytest.approx((1 / 255,) * 3)
    assert made.verdict.startswith("arithmetic PROVEN by float64 execution")
    assert "pixels decided by 250 labelled images" in made.verdict
    accuracy = made.pixels.table[shown(made.preprocessing)]
    told = replace(weights.checkpoint.preprocessing, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # pyright: ignore[reportOptionalMemberAccess]
    files = sorted((tmp_path / "pictures").rglob("*.jpg"))
    with torch.no_grad():
        right = weights(preprocess(files, told)).argmax(1) == torch.tensor([names.index(file.parent.name) for file in files])
    assert accuracy == pytest.approx(float(right.float().mean()), abs=0.02)


def held(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a file's notes and its tensors, to be changed by hand."""
    with formats.read(path) as source:
        return dict(source.facts), safetensors.tensors(read_file(path)[1])


def test_a_proof_is_of_its_tensors_and_ends_where_one_is_changed(tmp_path: Path) -> None:
    convert(kept(trained(ResNet20), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    assert convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20).certificate.proven
    notes, tensors = held(tmp_path / "b.safetensors")
    for name, change in (("changed", 1e-3), ("kept", 0.0)):
        tensors["fc.bias"] = tensors["fc.bias"] + change
        save_file(tensors, tmp_path / f"{name}.safetensors", notes)
        made = convert(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.npz", ResNet20)
        assert made.certificate.verdict.startswith("UNPROVEN" if change else "the same network")
        assert (CHANGED in made.notes) == bool(change)
        assert any(note.startswith("its own notes say: PROVEN") for note in made.notes) == (not change)
        tensors["fc.bias"] = tensors["fc.bias"] - change
    noted = json.loads(notes["kernelzoo"])
    del noted["digest"]  # an older file's, which says of no tensors that they are meant
    save_file(tensors, tmp_path / "old.safetensors", {**notes, "kernelzoo": json.dumps(noted)})
    assert "UNPROVEN" in convert(tmp_path / "old.safetensors", tmp_path / "old.npz", ResNet20).verdict


def test_pixels_that_were_decided_are_those_of_other_tensors_once_one_is_changed(tmp_path: Path) -> None:
    convert(kept(trained(ResNet20), tmp_path / "a.safetensors"), tmp_path / "a.onnx", ResNet20)
    convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20)
    notes, tensors = held(tmp_path / "b.safetensors")
    noted = json.loads(notes["kernelzoo"])
    noted["pixels"] |= {"status": "decided", "by": "1,000 labelled images", "decided": ["channel order"]}
    for name, change, said in (
        ("same", 0.0, "decided by 1,000 labelled"),
        ("other", 1.0, "stated by its notes, which are of other tensors"),
    ):
        save_file({**tensors, "fc.bias": tensors["fc.bias"] + change}, tmp_path / f"{name}.safetensors", {"kernelzoo": json.dumps(noted)})
        assert said in convert(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.npz", ResNet20).verdict


def test_a_file_that_was_paired_without_names_keeps_the_habits_of_its_framework(tmp_path: Path) -> None:
    convert(kept(MobileNetV1_025().eval(), tmp_path / "a.safetensors"), tmp_path / "a.h5", MobileNetV1_025)
    with formats.read(tmp_path / "a.h5") as source:
        source.facts.clear()  # the notes of this conversion, which say it better
        by_name, paired = (adopted(source, MobileNetV1_025, match=match) for match in (False, True))
        assert (by_name.adopted.naming, paired.adopted.naming) == ("keras", "match")
        assert by_name.preprocessing == paired.preprocessing
        assert by_name.preprocessing["mean"] == (0.5, 0.5, 0.5)
        assert by_name.options == paired.options
        assert "what keras's own networks want" in known_pixels(paired, {}).said
        assert "GUESSED" in known_pixels(paired, {}).said
