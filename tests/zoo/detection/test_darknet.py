"""Darknet's networks against independent programs: OpenCV's maps and rows, a decoder in NumPy, a Caffe file of the same network."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from convert import execute, sandbox
from convert.formats import _darknet_cfg as cfg
from convert.graph import Graph
from weights import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat, WeightsMismatch
from zoo import YoloFastest, YOLOv3Tiny, detect, fast, network, trained
from zoo.detection import DETECTORS, Darknet, darknet, darknet_plans
from zoo.detection.darknet_layers import ACTIVATIONS, Reorganise
from zoo.detection.decoding import decoded
from zoo.detection.fitting import fit, fitted, unfitted

NETS = ("se_dw", "v2_region", "v2_reorg", "v3_yolo", "v4_mish_spp", "v4_newcoords", "v4_tiny")
PHOTOGRAPHS = ("dog", "eagle", "giraffe", "horses", "person")


@pytest.fixture
def seeing(real: Path) -> Path:
    return real / "real" / "fixtures" / "seeing"


@pytest.fixture
def files(real: Path) -> Path:
    return real / "real" / "darknet"


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


@pytest.mark.real
@pytest.mark.parametrize("name", NETS)
def test_maps_and_rows_are_opencvs_with_its_epsilon(name: str, seeing: Path) -> None:
    folder = seeing / "darknet"
    model = trained(darknet(folder / f"{name}.cfg"), folder / f"{name}.weights")
    for norm in norms(model):
        norm.eps = 1e-6
    known = np.load(folder / "opencv.npz")
    with torch.no_grad():
        maps = model(torch.from_numpy(np.load(folder / "input.npy")))
    assert len(maps) == sum(key.startswith(f"{name}/before") for key in known)
    for number, (found, head) in enumerate(zip(maps, model.heads, strict=True)):
        assert np.abs(found.permute(0, 2, 3, 1).numpy() - known[f"{name}/before{number}"]).max() < 1e-4
        boxes, thing, classes = (part[0].numpy() for part in decoded(found, head, (64, 64)))
        rows = known[f"{name}/out{number}"]
        assert np.abs(boxes[:, :2] - rows[:, :2]).max() < 1e-4
        np.testing.assert_allclose(boxes[:, 2:], rows[:, 2:4], rtol=1e-4, atol=1e-4)  # of random weights, exponentials reach thousands
        assert np.abs(thing - rows[:, 4]).max() < 1e-4
        told = rows[:, 5:] > 0  # OpenCV writes 0 below its threshold
        assert told.any()
        assert np.abs((classes * thing[:, None])[told] - rows[:, 5:][told]).max() < 1e-4


@pytest.mark.real
@pytest.mark.parametrize("lineage", ["alexeyab", "pjreddie"])
@pytest.mark.parametrize("name", ["v3_yolo", "se_dw"])
def test_each_lineage_has_its_own_batchnorm(name: str, lineage: str, seeing: Path, tmp_path: Path) -> None:
    """Executed in float64 by `convert.execute`, which knows nothing of this network and adds each lineage's epsilon where it belongs."""
    data = bytearray((seeing / "darknet" / f"{name}.weights").read_bytes())
    data[8:12] = (5 if lineage == "alexeyab" else 0).to_bytes(4, "little")
    (tmp_path / f"{name}.weights").write_bytes(data)
    text = (seeing / "darknet" / f"{name}.cfg").read_text()
    (tmp_path / f"{name}.cfg").write_text(text)
    model = trained(darknet(tmp_path / f"{name}.cfg"), tmp_path / f"{name}.weights")
    assert model.batch_norm == lineage
    x = np.load(seeing / "darknet" / "input.npy")
    with sandbox.read(tmp_path / f"{name}.weights") as source:
        nodes = [replace(node, op="mul") if node.op == "unknown:scale_channels" else node for node in source.graph.nodes]  # pyright: ignore[reportOptionalMemberAccess]
        ends = [node.name for node in nodes if node.name in {f"{end}.conv" for end in model.ends}]
        values = execute.compute(
            replace(source, graph=Graph(tuple(nodes), tuple(ends))),
            nodes[: 1 + max(nodes.index(n) for n in nodes if n.name in ends)],
            {},
            ends,
            inputs=x,
        )
    with torch.no_grad():
        maps = model.double()(torch.from_numpy(x).double())
    for end, found in zip(model.ends, maps, strict=True):
        assert np.abs(found.numpy() - values[f"{end}.conv"]).max() < 1e-5


def corners(rows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Turn (class, score, cx, cy, w, h) in shares of a photograph into boxes in its pixels, within it."""
    sides = np.array([*size, *size])
    shares = np.concatenate([rows[:, 2:4] - rows[:, 4:] / 2, rows[:, 2:4] + rows[:, 4:] / 2], 1)
    return np.clip(shares * sides, 0, sides)


@pytest.mark.real
@pytest.mark.parametrize("photograph", PHOTOGRAPHS)
def test_yolo_fastest_finds_what_is_known(photograph: str, real: Path, seeing: Path, files: Path) -> None:
    model = trained(YoloFastest, files / "yolo-fastest-1.1.weights")
    found = detect(model, real / "real" / "images" / f"darknet_{photograph}.jpg")
    key = f"darknet_{photograph}/letterbox_darknet"
    known = np.load(seeing / "yolo_fastest.npz")[f"{key}/det"]
    names = [name for name, _, _ in json.loads((seeing / "yolo_fastest_detections.json").read_text())[key]]
    assert list(found.names) == names
    assert found.labels.tolist() == known[:, 0].astype(int).tolist()
    assert np.abs(found.scores.numpy() - known[:, 1]).max() < 1e-3
    assert np.abs(found.boxes.numpy() - corners(known, found.size)).max() < 1e-3 * max(found.size)


@pytest.mark.real
@pytest.mark.reference
@pytest.mark.parametrize("photograph", PHOTOGRAPHS)
def test_stretched_by_opencv_it_finds_what_is_known(photograph: str, real: Path, seeing: Path, files: Path) -> None:
    import cv2

    model = trained(YoloFastest, files / "yolo-fastest-1.1.weights")
    picture = cv2.imread(str(real / "real" / "images" / f"darknet_{photograph}.jpg"))
    size = picture.shape[1], picture.shape[0]
    blob = torch.from_numpy(cv2.dnn.blobFromImage(picture, 1 / 255, (320, 320), swapRB=True))
    with torch.no_grad():
        found = model.read(model(blob), [fit(size, (320, 320), letterbox=False)], 0.25, 0.45)[0]
    known = np.load(seeing / "yolo_fastest.npz")[f"darknet_{photograph}/stretch_cv/det"]
    assert found.labels.tolist() == known[:, 0].astype(int).tolist()
    assert np.abs(found.scores.numpy() - known[:, 1]).max() < 1e-3
    assert np.abs(found.boxes.numpy() - corners(known, size)).max() < 1e-3 * max(size)


@pytest.mark.real
@pytest.mark.reference
def test_the_larger_one_finds_dog_bicycle_and_car(real: Path, files: Path) -> None:
    """As OpenCV's dnn does, whose known scores are of a stretched photograph."""
    import cv2

    model = trained("yolo_fastest_xl", files / "yolo-fastest-1.1-xl.weights")
    picture = cv2.imread(str(real / "real" / "images" / "darknet_dog.jpg"))
    with torch.no_grad():
        maps = model(torch.from_numpy(cv2.dnn.blobFromImage(picture, 1 / 255, (320, 320), swapRB=True)))
    found = model.read(maps, [fit(picture.shape[1::-1], (320, 320), letterbox=False)], 0.25, 0.45)[0]
    best: dict[str, float] = {}
    for name, score in zip(found.names, found.scores.tolist(), strict=True):
        best.setdefault(name, score)
    for name, score in (("dog", 0.96), ("bicycle", 0.89), ("car", 0.84)):
        assert best[name] == pytest.approx(score, abs=0.01)


@pytest.mark.real
def test_a_network_of_two_formats_computes_the_same(files: Path) -> None:
    model = trained(darknet(files / "MobileNetV2-YOLOv3-Nano-voc.cfg"), files / "MobileNetV2-YOLOv3-Nano-voc.weights")
    x = np.random.default_rng(0).random((1, 3, 320, 320), np.float32)
    with sandbox.read(files / "MobileNetV2-YOLOv3-Nano-voc.caffemodel") as source:
        assert source.graph is not None
        known = {"unknown:Upsample": ("upsample", {"factor": (2, 2), "mode": "nearest"})}  # a layer of one fork of Caffe
        nodes = [replace(n, op=known[n.op][0], attrs=known[n.op][1]) if n.op in known else n for n in source.graph.nodes]
        values = execute.compute(source, nodes, {}, source.graph.outputs, inputs=x)
    with torch.no_grad():
        maps = model(torch.from_numpy(x))
    for found, end in zip(maps, source.graph.outputs, strict=True):
        assert np.abs(found.numpy() - values[end]).max() < 1e-4


@pytest.mark.real
def test_cut_and_surplus_weights_are_refused(files: Path, tmp_path: Path) -> None:
    data = (files / "yolo-fastest-1.1.weights").read_bytes()
    for name, changed in (("cut", data[:-400]), ("surplus", data + bytes(400)), ("half", data[: len(data) // 8 * 4])):
        path = tmp_path / f"{name}.weights"
        path.write_bytes(changed)
        with pytest.raises(ConvertError, match=r"YoloFastest describes 346062|cut short") as caught:
            trained(YoloFastest, path)
        assert str(path) in str(caught.value)
    path = tmp_path / "body.weights"
    path.write_bytes(data[: 20 + 4 * 100_000])
    with pytest.raises((ConvertError, WeightsMismatch)):
        trained(YoloFastest, path)
    shutil.copyfile(files / "yolo-fastest-1.1-xl.weights", tmp_path / "other.weights")
    with pytest.raises(ConvertError, match="YoloFastest"):
        trained(YoloFastest, tmp_path / "other.weights")


@pytest.mark.real
def test_the_fast_network_finds_the_same(real: Path, files: Path) -> None:
    model = trained(YoloFastest, files / "yolo-fastest-1.1.weights")
    photographs = [real / "real" / "images" / f"darknet_{name}.jpg" for name in ("dog", "eagle")]
    quick = fast(model, "cpu", example=torch.rand(2, 3, 320, 320), tune="none", progress=False)
    for one, other in zip(detect(model, photographs), detect(quick, photographs), strict=True):
        assert one.names == other.names
        assert torch.allclose(one.scores, other.scores, atol=1e-4)
        assert torch.allclose(one.boxes, other.boxes, atol=0.05)


@pytest.mark.real
def test_new_heads_keep_the_trained_body(files: Path) -> None:
    whole = trained(YoloFastest, files / "yolo-fastest-1.1.weights")
    model = trained(YoloFastest, files / "yolo-fastest-1.1.weights", num_classes=3)
    assert (model.num_classes, model.checkpoint.labels, not model.training) == (3, None, True)  # pyright: ignore[reportOptionalMemberAccess]
    assert [tuple(found.shape) for found in model(torch.zeros(2, 3, 64, 96))] == [(2, 24, 2, 3), (2, 24, 4, 6)]
    same = whole.state_dict()
    heads = tuple(f"{name}." for name in whole.classifiers)
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items() if not name.startswith(heads))


@pytest.mark.real
def test_the_structure_of_yolo_fastest_is_its_cfgs(files: Path) -> None:
    for name, plan in (("1.1", darknet_plans.yolo_fastest()), ("1.1-xl", darknet_plans.yolo_fastest(2, 0.2, 144))):
        theirs, ours = (cfg.parse(text)[1:] for text in ((files / f"yolo-fastest-{name}.cfg").read_text(), plan))
        for one, other in zip(theirs, ours, strict=True):
            assert (one.kind, one.feeds, one.makes, one.stride) == (other.kind, other.feeds, other.makes, other.stride)
            for setting, usual in (("activation", ""), ("groups", "1"), ("mask", ""), ("anchors", "")):
                first, second = (each.settings.get(setting, usual).replace(" ", "") for each in (one, other))
                assert first == second


def test_numbers_in_the_published_files() -> None:
    """Bytes of the authors' own .weights: the header is of 16 bytes before 0.2, and of 20 from then on."""
    published = {"YOLOv2": 203934260, "YOLOv2Tiny": 44948596, "YOLOv3": 248007048, "YOLOv3Tiny": 35434956}
    published |= {"YOLOv3SPP": 252209544, "YOLOv4": 257717640, "YOLOv4Tiny": 24251276, "YoloFastest": 1384268, "YoloFastestXL": 3693964}
    for name, size in published.items():
        sections = cfg.parse(DETECTORS[name].cfg)  # pyright: ignore[reportAttributeAccessIssue]
        runs = [run for one in sections[1:] for run in cfg.takes(one, transposed=False, alexey=True, bias_in_norm=True)]
        assert 4 * sum(math.prod(run.shape) for run in runs) + (16 if name.startswith("YOLOv2") else 20) == size, name


@pytest.mark.parametrize("name", [name for name, cls in DETECTORS.items() if issubclass(cls, Darknet)])
def test_parameters_are_as_many_as_the_catalogue_says(name: str) -> None:
    with torch.device("meta"):
        model = network(name)
    assert sum(one.numel() for one in model.parameters()) == type(model).params
    step = model.size_multiple
    shapes = [tuple(one.shape) for one in model(torch.zeros(2, 3, 2 * step, 3 * step, device="meta"))]
    assert all(shape[:2] == (2, head.channels) for shape, head in zip(shapes, model.heads, strict=True))
    assert (min(shape[2] for shape in shapes), min(shape[3] for shape in shapes)) == (2, 3)


def test_sizes_that_the_strides_do_not_allow_name_the_nearest() -> None:
    with torch.device("meta"):
        model = YOLOv3Tiny()
        with pytest.raises(ValueError, match=r"multiples of 32 pixels, 32 to 8192, got 100x65; the nearest are 96x64"):
            model(torch.zeros(1, 3, 100, 65))
        with pytest.raises(ValueError, match="the nearest are 8192x416"):
            YOLOv3Tiny(image_size=(9000, 416))
        with pytest.raises(ValueError, match="takes 3 channels"):
            model(torch.zeros(1, 1, 64, 64))
        assert YOLOv3Tiny(image_size=320).image_size == (320, 320)
        for options in ({"batch_norm": "mine"}, {"nms": "soft"}, {"image_size": (1, 2, 3)}):
            with pytest.raises(ValueError, match=next(iter(options))):
                YOLOv3Tiny(**options)  # pyright: ignore[reportArgumentType]


def test_reorg_is_in_darknets_order() -> None:
    """By the loops of its own source, number by number."""
    stride, (channels, height, width) = 2, (8, 4, 6)
    x = torch.arange(channels * height * width).float()
    wanted = torch.empty(channels * height * width)
    inner = channels // stride**2
    for k in range(channels):
        for j in range(height):
            for i in range(width):
                column, row = i * stride + (k // inner) % stride, j * stride + (k // inner) // stride
                wanted[i + width * (j + height * k)] = x[column + width * stride * (row + height * stride * (k % inner))]
    found = Reorganise(stride)(x.reshape(1, channels, height, width))
    assert torch.equal(found.flatten(), wanted)
    assert found.shape == (1, 32, 2, 3)
    assert not torch.equal(found, F.pixel_unshuffle(x.reshape(1, channels, height, width), 2))


HEAD = "[convolutional]\nfilters=6\nsize=1\nactivation=linear\n[yolo]\nmask=0\nanchors=4,5\nclasses=1\nnum=1\n"


def small(sections: str, folder: Path, side: int = 8) -> type[Darknet]:
    path = folder / "small.cfg"
    path.write_text(f"[net]\nwidth={side}\nheight={side}\nchannels=4\n{sections}{HEAD}")
    return darknet(path)


def before_head(sections: str, folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Compute what the sections give, by a head that passes its first channel on."""
    model = small(sections, folder, x.shape[-1])().eval()
    inner = model.layers[str(model.ends[0])].conv
    nn.init.zeros_(inner.weight)
    nn.init.zeros_(inner.bias)
    nn.init.dirac_(inner.weight)
    with torch.no_grad():
        return model(x)[0]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_pools_begin_before_the_map_and_nothing_outside_counts(size: int, stride: int, tmp_path: Path) -> None:
    x = torch.randn(1, 4, 8, 8) - 10
    pad = size - 1
    first = pad // 2
    out = (8 + pad - size) // stride + 1
    windows = [
        [
            x[..., max(0, r * stride - first) : r * stride - first + size, max(0, c * stride - first) : c * stride - first + size]
            for c in range(out)
        ]
        for r in range(out)
    ]
    for kind, how in (("maxpool", lambda w: w.amax((2, 3))), ("local_avgpool", lambda w: w.mean((2, 3)))):
        wanted = torch.stack([torch.stack([how(w) for w in row], -1) for row in windows], -2)
        found = before_head(f"[{kind}]\nsize={size}\nstride={stride}\n", tmp_path, x)
        assert torch.allclose(found[:, :4], wanted, atol=1e-5), kind


def test_sections_that_join_maps(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 8)
    route = "[activation]\nactivation=linear\n[activation]\nactivation=relu\n"
    found = before_head(f"{route}[route]\nlayers=-1,-2\ngroups=2\ngroup_id=1\n", tmp_path, x)
    assert torch.equal(found[:, :4], torch.cat([x.relu()[:, 2:], x[:, 2:]], 1)), "each map gives its own part"
    assert torch.equal(before_head(f"{route}[shortcut]\nfrom=-2\nactivation=relu\n", tmp_path, x)[:, :4], (x + x.relu()).relu())
    assert torch.equal(before_head(f"{route}[shortcut]\nfrom=-2,-2\n", tmp_path, x)[:, :4], x.relu() + x + x)
    assert torch.equal(before_head(f"{route}[sam]\nfrom=-2\n", tmp_path, x)[:, :4], x * x.relu())
    gate = "[activation]\nactivation=linear\n[avgpool]\n[scale_channels]\nfrom=-2\nactivation=logistic\n"
    assert torch.allclose(before_head(gate, tmp_path, x)[:, :4], (x * x.mean((2, 3), keepdim=True)).sigmoid())
    up = before_head("[upsample]\nstride=2\nscale=0.5\n[maxpool]\nsize=2\nstride=2\n[dropout]\n", tmp_path, x)
    assert torch.equal(up[:, :4], x / 2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_darknets(name: str) -> None:
    """By the formulas of its src/activations.h, in float64; two of them have constants of five digits."""
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    e, soft = torch.exp, torch.log1p(torch.exp(x))
    tanh = (e(2 * x) - 1) / (e(2 * x) + 1)
    inner = 0.797885 * x + 0.035677 * x**3
    formulas = {
        "leaky": torch.where(x > 0, x, 0.1 * x),
        "linear": x,
        "mish": x * ((e(2 * soft) - 1) / (e(2 * soft) + 1)),
        "swish": x / (1 + e(-x)),
        "relu": x * (x > 0),
        "relu6": x.clamp(0, 6),
        "relie": torch.where(x > 0, x, 0.01 * x),
        "logistic": 1 / (1 + e(-x)),
        "loggy": 2 / (1 + e(-x)) - 1,
        "ramp": x * (x > 0) + 0.1 * x,
        "tanh": tanh,
        "hardtan": x.clamp(-1, 1),
        "elu": torch.where(x >= 0, x, e(x) - 1),
        "selu": torch.where(x >= 0, 1.0507 * x, 1.0507 * 1.6732 * (e(x) - 1)),
        "gelu": 0.5 * x * (1 + torch.tanh(inner)),
        "hard_mish": torch.where(x > 0, x, torch.where(x > -2, x * x / 2 + x, 0 * x)),
    }
    assert torch.allclose(ACTIVATIONS[name]()(x), formulas[name], atol=2e-4 if name in ("selu", "gelu") else 1e-12)


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ("[convolutional]\nactivation=sine\n", UnsupportedFormat, "section 0, .convolutional., has the activation 'sine'"),
        ("[convolutional]\nantialiasing=1\n", UnsupportedFormat, "antialiasing"),
        ("[lstm]\noutput=4\n", UnsupportedFormat, r"section 0 is .lstm."),
        ("[activation]\n[convolutional]\nfilters=5\n[shortcut]\nfrom=-2\n", MalformedFile, "section 2, .shortcut., joins maps"),
        ("[maxpool]\nsize=2\nstride=2\n[upsample]\n[route]\nlayers=-1,0\n", MalformedFile, "section 2, .route., joins maps"),
        ("[reorg]\nstride=3\n", MalformedFile, "divides 4 channels by 3"),
        ("[shortcut]\nfrom=-9\n", MalformedFile, "no sections before it"),
        ("[activation]\n[route]\nlayers=-1\ngroups=3\n", MalformedFile, "part 0 of 3"),
        ("[convolutional]\nsize=abc\n", MalformedFile, "small.cfg"),
    ],
)  # fmt: skip
def test_what_nobody_computes_is_refused_and_named(sections: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        small(sections, tmp_path)


def test_a_description_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        darknet(tmp_path / "none.cfg")
    net = "[net]\nwidth=64\nheight=64\n"
    for text, said in (("", "not .net."), (f"{net}[convolutional]\n", "a detector has"), (f"{net}[yolo]\n", "wants 1 anchors of 0")):
        path = tmp_path / "odd.cfg"
        path.write_text(text)
        with pytest.raises(MalformedFile, match=said):
            darknet(path)
    path.write_bytes(b"#" * (cfg.MAX_BYTES + 1))
    with pytest.raises(LimitExceeded):
        darknet(path)
    os.mkfifo(tmp_path / "pipe.cfg")
    with pytest.raises(OSError, match="no regular file"):
        darknet(tmp_path / "pipe.cfg")


def test_photographs_are_fitted_by_whole_numbers_and_boxes_come_back() -> None:
    assert fit((640, 424), (320, 320), letterbox=True).inner == (320, 212)
    assert fit((773, 512), (416, 416), letterbox=True).inner == (416, 275), "275.5, truncated"
    assert fit((512, 773), (416, 416), letterbox=True).inner == (275, 416)
    assert fit((4000, 3), (320, 320), letterbox=True).inner == (320, 1)
    fits = [fit((773, 512), (416, 416), letterbox=True), fit((50, 100), (416, 416), letterbox=False)]
    photographs = [torch.full((3, 512, 773), 255, dtype=torch.uint8), torch.zeros(3, 100, 50, dtype=torch.uint8)]
    batch = fitted(photographs, fits, torch.zeros(1))
    assert torch.allclose(batch[0, 0, :, 7], torch.tensor([0.5] * 70 + [1.0] * 275 + [0.5] * 71))
    assert not batch[1].any()
    inside = torch.tensor([[0.0, 70.5 / 416, 1.0, 345.5 / 416], [0.5, 0.25, 2.0, 0.75]])
    found = unfitted(inside, torch.tensor([0, 1]), fits)
    assert torch.allclose(found, torch.tensor([[0.0, 0, 773, 512], [25, 25, 50, 75]]), atol=1e-3)


def test_a_photograph_without_things_has_an_empty_answer(tmp_path: Path) -> None:
    (tmp_path / "blind.cfg").write_text(f"[net]\nwidth=8\nheight=8\n{HEAD}")
    model = darknet(tmp_path / "blind.cfg", names=["moth"])().eval()
    black, sizes = [np.zeros((5, 9, 3), np.uint8), np.zeros((7, 3, 3), np.uint8)], [(9, 5), (3, 7)]
    nn.init.constant_(model.layers["0"].conv.bias, -20.0)
    found = detect(model, black)
    assert [(len(one), one.size, tuple(one.boxes.shape)) for one in found] == [(0, size, (0, 4)) for size in sizes]
    nn.init.constant_(model.layers["0"].conv.bias, 5.0)
    assert all(set(one.names) == {"moth"} for one in detect(model, black))
    for names in (["moth", "bee"], tmp_path / "none.names"):
        with pytest.raises((ValueError, FileNotFoundError), match=r"2 names are given|none.names"):
            darknet(tmp_path / "blind.cfg", names=names)


def test_the_graph_of_a_file_takes_a_part_of_each_map(tmp_path: Path) -> None:
    """As the network does: Darknet divides every map that a route with groups joins, and not what they make together."""
    twice = "[convolutional]\nfilters=4\nsize=1\nactivation=linear\n" * 2
    cls = small(f"{twice}[route]\nlayers=-1,-2\ngroups=2\ngroup_id=1\n", tmp_path)
    numbers = np.random.default_rng(0).normal(size=2 * (4 + 16) + 6 + 24).astype("<f4")
    (tmp_path / "small.weights").write_bytes(np.array([0, 2, 5, 0, 0], "<i4").tobytes() + numbers.tobytes())
    model, x = trained(cls, tmp_path / "small.weights"), np.random.default_rng(1).random((1, 4, 8, 8), np.float32)
    with sandbox.read(tmp_path / "small.weights") as source:
        assert source.graph is not None
        found = execute.compute(source, [node for node in source.graph.nodes if node.op != "yolo"], {}, ["3.conv"], inputs=x)
    with torch.no_grad():
        assert np.abs(model(torch.from_numpy(x))[0].numpy() - found["3.conv"]).max() < 1e-5
