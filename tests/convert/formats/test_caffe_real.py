"""Real Caffe networks: what they are known to compute, beside what wrong conversions of them compute."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from convert import execute, names
from convert.formats import caffe, sniff
from convert.source import Stored

pytestmark = pytest.mark.real

MEAN = np.array([104, 117, 123], "f4").reshape(3, 1, 1)


@cache
def photographs(folder: Path) -> tuple[np.ndarray, list[int]]:
    """Crop 227 pixels out of photographs whose shorter side is 256: RGB on 0..255, with the place of each wnid among the thousand."""
    order = (folder / "timm_imagenet_synsets.txt").read_text().split()
    images, labels = [], []
    for path in sorted((folder / "imagenet").glob("*.JPEG")):
        image = Image.open(path).convert("RGB")
        scale = 256 / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = (image.width - 227) // 2, (image.height - 227) // 2
        images.append(np.asarray(image.crop((left, top, left + 227, top + 227)), "f4").transpose(2, 0, 1))
        labels.append(order.index(path.name.partition("_")[0]))
    return np.stack(images), labels


def tensor(stored: Stored, flipped: bool = False) -> torch.Tensor:
    array = stored.array()
    return torch.from_numpy((np.flip(array, (2, 3)) if flipped and array.ndim == 4 else array).copy())


@cache
def squeezenet(folder: Path) -> caffe.Source:
    return caffe.read(folder / "squeezenet_v1.0_deepcompression_decoded.caffemodel")


def right(source: caffe.Source, images: np.ndarray, labels: list[int], flipped: bool = False) -> int:
    """Count how many of the photographs our SqueezeNet1_0 knows."""
    network = zoo.SqueezeNet1_0().eval()
    carried, report, _ = names.carry(
        "caffe", source.tensors, names.rows("caffe", type(network), names_shapes(network)), network.state_dict()
    )
    assert report.ok
    network.load_state_dict({name: tensor(stored, flipped) for name, stored in carried.items()})
    with torch.inference_mode():
        return int((network(torch.from_numpy(np.ascontiguousarray(images))).argmax(1) == torch.tensor(labels)).sum())


def names_shapes(network: torch.nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def test_squeezenet_knows_photographs_and_every_mistake_costs_many(real: Path) -> None:
    images, labels = (every[::3] for every in photographs(real / "real" / "images"))
    source = squeezenet(real / "real" / "caffe")
    bgr = images[:, ::-1] - MEAN
    scores = {
        "right": right(source, bgr, labels),
        "kernels flipped": right(source, bgr, labels, flipped=True),
        "RGB": right(source, images - MEAN[::-1], labels),
        "torch's normalisation": right(source, (images / 255 - 0.449) / 0.226, labels),
    }
    # 62.5, 29.9, 44.5 and 2.4 % of a thousand photographs; 74, 34, 46 and 1 of the hundred that are here, of which a third is used
    assert scores["right"] >= 22
    assert scores["kernels flipped"] < scores["RGB"] < scores["right"] - 6
    assert scores["torch's normalisation"] < 4


def test_squeezenets_graph_computes_what_opencv_computed_on_the_same_photographs(real: Path) -> None:
    images, _ = photographs(real / "real" / "images")
    expected = np.load(real / "real" / "fixtures" / "opencv_squeezenet_first64.npy").reshape(64, 1000)[5::10]
    # every tenth of that list is here, and its sixth is our first
    got = execute.run(squeezenet(real / "real" / "caffe"), images[:2, ::-1] - MEAN)["pool_final"].reshape(2, 1000)
    np.testing.assert_allclose(got, expected[:2], atol=1e-4)


@pytest.mark.parametrize(("folder", "file", "count"), [("Slim-320", "slim-320", 42), ("RFB-320", "RFB-320", 52)])
def test_ultralight_is_the_pytorch_network_with_its_batchnorms_folded(real: Path, folder: str, file: str, count: int) -> None:
    base = real / "real" / "ultralight"
    source = caffe.read(base / "caffe" / "model" / folder / f"{file}.caffemodel")
    state = torch.load(base / "models" / "pretrained" / f"version-{file.split('-')[0]}-320.pth", map_location="cpu", weights_only=True)
    folded = fold({name: value.double().numpy() for name, value in state.items()})
    convolutions = [name.removesuffix(".weight") for name, stored in source.tensors.items() if len(stored.shape) == 4]
    assert len(convolutions) == len(folded) == count
    for name in convolutions:
        weight, bias = (source.tensors[f"{name}.{leaf}"].array() for leaf in ("weight", "bias"))
        distances = [max(abs(weight - w).max(), abs(bias - b).max()) for w, b in folded if w.shape == weight.shape]
        assert min(distances) < 5e-7


def fold(state: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fold the BatchNorm that follows each convolution in the state dict's order into it."""
    found = []
    order = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    for name, after in zip(order, [*order[1:], ""], strict=True):
        weight = state[f"{name}.weight"]
        if weight.ndim != 4:
            continue
        bias = state.get(f"{name}.bias", np.zeros(len(weight)))
        if f"{after}.running_var" in state:
            scale = state[f"{after}.weight"] / np.sqrt(state[f"{after}.running_var"] + 1e-5)
            weight, bias = weight * scale[:, None, None, None], (bias - state[f"{after}.running_mean"]) * scale + state[f"{after}.bias"]
        found.append((weight, bias))
    return found


@pytest.mark.parametrize(("file", "ours", "grid"), [("det1", "pnet", None), ("det2", "rnet", (64, 3, 3)), ("det3", "onet", (128, 3, 3))])
def test_mtcnn_is_the_pytorch_network_with_height_and_width_exchanged(
    real: Path, file: str, ours: str, grid: tuple[int, ...] | None
) -> None:
    source = caffe.read(real / "real" / "mtcnn" / "caffe" / f"{file}.caffemodel")
    state = torch.load(real / "real" / "mtcnn" / "pytorch" / f"{ours}.pt", map_location="cpu", weights_only=True)
    exact, unturned, compared = 0.0, 0.0, 0
    for name, value in state.items():
        theirs = name.replace("dense4", "conv4").replace("dense5", "conv5").replace("dense6", "conv6").replace("_", "-")
        stored = source.tensors.get(theirs) or source.tensors.get(theirs.replace("prelu", "PReLU"))
        if stored is None:
            continue
        array, expected = stored.array(), value.numpy()
        if array.shape != expected.shape:
            array = array.reshape(expected.shape)
        plain = array
        if array.ndim == 4:
            array = array.transpose(0, 1, 3, 2)
        elif array.ndim == 2 and grid is not None and array.shape[1] == np.prod(grid):  # channels last there
            array = array.reshape(-1, *grid).transpose(0, 2, 3, 1).reshape(len(array), -1)
            plain = stored.array()
        exact, unturned, compared = max(exact, abs(array - expected).max()), max(unturned, abs(plain - expected).max()), compared + 1
    assert compared >= 10
    assert exact < 1e-6
    assert unturned > 0.1


def test_every_caffe_file_opens_and_its_tensors_load(real: Path) -> None:
    files = sorted((real / "real").rglob("*.caffemodel"))
    assert len(files) >= 6
    for path in files:
        assert sniff(path) == "caffe"
        source = caffe.read(path)
        assert source.graph is not None
        assert source.conventions == {"correlation"}
        for stored in source.tensors.values():
            assert np.isfinite(stored.array()).all()
            assert stored.array().shape == stored.shape
