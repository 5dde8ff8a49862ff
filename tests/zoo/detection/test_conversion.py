"""Darknet files become safetensors, which give the same network, and OpenCV proves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from weights import ConvertError
from zoo import YoloFastest, trained
from zoo.commands.app import main
from zoo.detection import darknet
from zoo.detection.conversion import compared, convert_darknet

NETS = ("se_dw", "v2_region", "v2_reorg", "v3_yolo", "v4_mish_spp", "v4_newcoords", "v4_tiny")


@pytest.mark.real
@pytest.mark.reference
@pytest.mark.parametrize("name", NETS[:2])
def test_opencv_proves_a_file_in_a_process_of_its_own(name: str, real: Path) -> None:
    folder = real / "real" / "fixtures" / "seeing" / "darknet"
    found = compared(trained(darknet(folder / f"{name}.cfg"), folder / f"{name}.weights"), folder / f"{name}.weights")
    assert found.why == ""
    assert found.by.startswith("OpenCV")
    assert found.worst is not None
    assert found.worst < 1e-5


@pytest.mark.real
@pytest.mark.reference
def test_the_command_converts_and_proves(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = real / "real" / "darknet" / "yolo-fastest-1.1.weights"
    out = tmp_path / "fastest.safetensors"
    assert main(["convert", str(source), str(out), "--model", "YoloFastest", "--require-proof"]) == 0
    assert "PROVEN: OpenCV" in capsys.readouterr().out
    one, other = trained(YoloFastest, source), trained(YoloFastest, out)
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(one(x), other(x), strict=True))
    assert main(["convert", str(source), str(out), "--model", "YoloFastest"]) == 1
    assert "--replace" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "fastest.onnx"), "--model", "YoloFastest"]) == 2
    shutil.copy(source, tmp_path / "x.weights")
    shutil.copy(source.with_suffix(".cfg"), tmp_path / "x.cfg")
    assert main(["convert", str(tmp_path / "x.weights"), str(tmp_path / "x.safetensors")]) == 0
    assert trained(darknet(tmp_path / "x.cfg"), tmp_path / "x.safetensors").num_classes == 80


@pytest.mark.real
@pytest.mark.reference
def test_a_network_that_computes_something_else_is_not_written(real: Path, tmp_path: Path) -> None:
    source = real / "real" / "fixtures" / "seeing" / "darknet" / "v4_tiny.weights"
    model = trained(darknet(source.with_suffix(".cfg")), source)
    with torch.no_grad():
        model.layers["0"].conv.weight.add_(0.1)
    with pytest.raises(ConvertError, match="computes something else"):
        convert_darknet(model, source, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert convert_darknet(model, source, tmp_path / "out.safetensors", unproven=True).worst is not None


def test_without_opencv_nothing_is_called_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.cfg").write_text(
        "[net]\nwidth=8\nheight=8\nchannels=3\n[convolutional]\nbatch_normalize=1\nfilters=6\nsize=1\nactivation=linear\n"
        "[yolo]\nmask=0\nanchors=4,4\nclasses=1\nnum=1\n"
    )
    numbers = np.arange(1, 1 + 4 * 6 + 18, dtype="<f4")
    (tmp_path / "one.weights").write_bytes(np.array([0, 1, 0, 7], "<i4").tobytes() + numbers.tobytes())
    model = trained(darknet(tmp_path / "one.cfg"), tmp_path / "one.weights")
    assert model.batch_norm == "pjreddie"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = convert_darknet(model, tmp_path / "one.weights", tmp_path / "one.safetensors")
    assert (found.by, found.worst) == ("", None)
    assert "OpenCV is not installed" in found.why
    again = trained(darknet(tmp_path / "one.cfg"), tmp_path / "one.safetensors")
    assert again.batch_norm == "pjreddie"
    assert torch.equal(again.state_dict()["layers.0.norm.running_var"], model.state_dict()["layers.0.norm.running_var"])
