"""ncnn's networks executed in float64 give what ncnn computes, and a .bin is taken apart to its last byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ncnn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from seeds_ncnn import HALF, Making, draw, small_network

from convert import execute, formats
from convert.source import Source
from weights.errors import MalformedFile, UnsupportedFormat

pytestmark = pytest.mark.reference
runtime: Any = ncnn


def compared(path: Path, output: str, shape: tuple[int, ...] = (3, 8, 8)) -> Source:
    source = formats.read(path)
    images = draw(2, *shape, seed=7)
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    net = runtime.Net()
    net.opt.use_vulkan_compute, net.opt.num_threads = False, 1
    for option in (
        "use_fp16_packed",
        "use_fp16_storage",
        "use_fp16_arithmetic",
        "use_bf16_storage",
        "use_winograd_convolution",
        "use_packing_layout",
    ):
        setattr(net.opt, option, False)
    assert net.load_param(str(path)) == 0
    assert net.load_model(str(path.with_suffix(".bin"))) == 0
    for image, made in zip(images, value, strict=True):
        with net.create_extractor() as extractor:
            extractor.input("images", runtime.Mat(image.copy()))
            code, found = extractor.extract(output)
            assert code == 0
            expected = np.array(found)
        assert np.abs(made.reshape(expected.shape) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert all(tuple(stored.array().shape) == stored.shape for stored in source.tensors.values())
    return source


@pytest.mark.parametrize("flag", [0, HALF, 1])
def test_a_network_however_its_weights_are_written(flag: int, tmp_path: Path) -> None:
    source = compared(small_network(flag).written(tmp_path / "net.param"), "probabilities")
    norm = [f"bn.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    assert list(source.tensors) == ["stem.weight", "stem.bias", *norm, "dw.weight", "dw.bias", "fc.weight", "fc.bias"]
    wide = np.round(draw(4, 3, 3, 3), 1)
    assert (source.tensors["stem.weight"].array() == (wide.astype(np.float16) if flag == HALF else wide)).all()
    with formats.read(tmp_path / "net.bin") as other:
        assert (other.format, list(other.tensors)) == ("ncnn", list(source.tensors))


def test_the_other_layers(tmp_path: Path) -> None:
    m = Making()
    m.layer("Deconvolution", "up", ["images"], "0=4 1=3 3=2 4=1 18=1 19=1 5=1 6=108")
    m.weight(draw(4, 3, 3, 3))
    m.plain(draw(4))
    m.layer("PReLU", "prelu", ["up"], "0=4")
    m.plain(draw(4, seed=1))
    m.layer("Scale", "scale", ["prelu"], "0=4 1=1")
    m.plain(draw(4, seed=2), draw(4, seed=3))
    m.layer("Slice", "parts", ["scale"], "-23300=2,1,-233", ["first", "second"])
    m.lines[-1] = m.lines[-1].replace("-23300=2,1,-233", "-23300=2,1,3")
    m.layer("Concat", "both", ["second", "first"])
    m.layer("Pooling", "ceil", ["both"], "0=0 1=3 2=2 5=0")
    m.layer("Pooling", "mean", ["ceil"], "0=1 1=3 2=1 3=1 5=1")
    m.layer("Interp", "large", ["mean"], "0=1 1=2.0 2=2.0")
    m.layer("HardSwish", "hs", ["large"], "0=0.166667 1=0.5")
    m.layer("BinaryOp", "more", ["hs"], "0=0 1=1 2=0.5")
    m.layer("Clip", "clip", ["more"], "0=-1 1=1")
    m.layer("Padding", "pad", ["clip"], "0=1 1=2 2=0 3=1 5=0.25")
    m.layer("LRN", "lrn", ["pad"], "1=3 2=0.1 3=0.75")
    m.layer("Pooling", "all", ["lrn"], "0=1 4=1")
    compared(m.written(tmp_path / "net.param"), "all")


def test_groups_of_a_transposed_convolution(tmp_path: Path) -> None:
    m = Making(channels=4)
    m.layer("DeconvolutionDepthWise", "up", ["images"], "0=6 1=3 3=2 6=108 7=2")
    m.weight(draw(2, 3, 2, 3, 3))
    source, images = formats.read(m.written(tmp_path / "net.param")), draw(2, 4, 8, 8, seed=7)
    taps = torch.from_numpy(draw(2, 3, 2, 3, 3).transpose(0, 2, 1, 3, 4).reshape(4, 3, 3, 3).copy()).double()
    expected = F.conv_transpose2d(torch.from_numpy(images).double(), taps, stride=2, groups=2).numpy()
    (value,) = execute.run(source, images).values()  # ncnn's own, 1.0.20261020, had up to 1e28 in it
    assert np.abs(value - expected).max() < 1e-12
    assert source.tensors["up.weight"].shape == (4, 3, 3, 3)


def test_same_padding(tmp_path: Path) -> None:
    m = Making()
    m.layer("Convolution", "c", ["images"], "0=4 1=3 3=2 4=-233 6=108")
    m.weight(draw(4, 3, 3, 3))
    compared(m.written(tmp_path / "net.param"), "c")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [("GRU", UnsupportedFormat, "may have weights of its own"), ("Convolution", MalformedFile, "0 numbers are no kernel|no kernel of 0")],
)
def test_layers_whose_weights_are_not_known_are_refused(kind: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    m = small_network()
    m.layer(kind, "odd", ["probabilities"])
    with pytest.raises(error, match=words):
        formats.read(m.written(tmp_path / "net.param"))


def test_what_has_no_weights_and_no_word_keeps_its_place(tmp_path: Path) -> None:
    m = small_network()
    m.layer("PixelShuffle", "odd", ["probabilities"], "0=2")
    graph = formats.read(m.written(tmp_path / "net.param")).graph
    assert graph is not None
    assert graph.unknown == ["PixelShuffle"]


@pytest.mark.parametrize("change", [b"1234", b""])
def test_files_that_do_not_belong_together_are_refused(change: bytes, tmp_path: Path) -> None:
    path = small_network().written(tmp_path / "net.param")
    content = path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").write_bytes(content + change if change else content[:-8])
    with pytest.raises(MalformedFile, match="don't belong together"):
        formats.read(path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(MalformedFile, match=r"needs net\.bin beside it"):
        formats.read(path)


@pytest.mark.parametrize("ending", [".param", ".bin"])
def test_what_pnnx_writes_beside_an_ncnn_network_is_named(ending: str, tmp_path: Path) -> None:
    (tmp_path / "net.pnnx.param").write_text("7767517\n2 1\npnnx.Input in 0 1 0\nnn.Conv2d a 1 1 0 1 @weight=(4,3,3,3)f32\n")
    (tmp_path / "net.pnnx.bin").write_bytes(b"PK\3\4" + bytes(40))
    with pytest.raises(UnsupportedFormat, match=r"net\.pnnx\.param is pnnx's own description.*name the \.ncnn\.param"):
        formats.read(tmp_path / f"net.pnnx{ending}")
