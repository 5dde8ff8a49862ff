"""One LeNet in the formats of seven frameworks: the same bits in each, and the outputs that ONNX Runtime computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from convert import execute, formats
from zoo.conversion.convert import convert

pytestmark = pytest.mark.real

REVERSED = ("SampLeNet.xml", "SampLeNet.caffemodel")
"""Files that take blue first, as OpenCV gives it."""
FILES = ("samplenet.onnx", "samplenet-0000.params", "samplenet.pb", *REVERSED)
IMAGES = np.random.default_rng(0).normal(size=(4, 3, 32, 32)).astype(np.float32)


def authors(folder: Path) -> Any:
    known: dict[str, Any] = {"__name__": "samplenet"}
    exec((folder / "samplenet.py").read_text(), known)
    return known["SampLeNet"]


@pytest.fixture
def folder(real: Path) -> Path:
    return real / "real" / "samplenet"


@pytest.fixture
def expected(folder: Path) -> np.ndarray:
    session: Any = onnxruntime.InferenceSession(str(folder / "samplenet.onnx"), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {session.get_inputs()[0].name: image[None]})[0] for image in IMAGES])


@pytest.mark.parametrize("name", FILES)
def test_every_file_becomes_the_network_that_onnx_runtime_runs(name: str, folder: Path, expected: np.ndarray, tmp_path: Path) -> None:
    made = convert(folder / name, tmp_path / "a.safetensors", authors(folder), example=(3, 32, 32))
    assert made.certificate.proven
    assert made.network is not None
    images = IMAGES[:, ::-1].copy() if name in REVERSED else IMAGES
    with torch.no_grad():
        outputs = made.network(torch.from_numpy(images)).numpy()
    assert np.abs(outputs - expected).max() <= 1e-6 * np.abs(expected).max()
    ours = dict(made.network.state_dict())
    reference = convert(folder / "samplenet.onnx", tmp_path / "b.safetensors", authors(folder), example=(3, 32, 32)).network
    assert reference is not None
    for key, tensor in reference.state_dict().items():
        turned = ours[key].flip(1) if name in REVERSED and key.endswith("conv1.weight") else ours[key]
        assert torch.equal(turned, tensor), key


def test_the_other_training_is_read_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    made = convert(folder / "samplenet.pth", tmp_path / "a.safetensors", authors(folder), example=(3, 32, 32))
    theirs = torch.load(folder / "samplenet.pth", map_location="cpu", weights_only=True)
    assert made.network is not None
    network = authors(folder)()
    network.load_state_dict(theirs)
    with torch.no_grad():
        assert torch.equal(made.network(torch.from_numpy(IMAGES)), network.eval()(torch.from_numpy(IMAGES)))


@pytest.mark.parametrize("name", ["samplenet.pdmodel", "samplenet.pdiparams"])
def test_paddles_own_network_computes_what_openvino_does(name: str, folder: Path) -> None:
    """It is another network, of three convolutions; OpenVINO reads Paddle's programs by itself."""
    import openvino

    compiled = openvino.Core().compile_model(folder / "samplenet.pdmodel", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    expected = np.asarray(next(iter(compiled(IMAGES).values())))
    with formats.read(folder / name) as source:
        (value,) = execute.run(source, IMAGES).values()
    assert np.abs(value - expected).max() <= 1e-6 * np.abs(expected).max()


def test_every_file_of_the_folder_is_known(folder: Path) -> None:
    """A list that is checked whole: weights, what lies beside them, and what no reader takes."""
    beside = {"SampLeNet.bin", "SampLeNet.prototxt", "samplenet-symbol.json", "samplenet.py"}
    others = {"samplenet.pth", "samplenet.pdmodel", "samplenet.pdiparams", "samplenet_tf2", "SampLeNet.blob"}
    assert {path.name for path in folder.iterdir()} == {*FILES, *beside, *others}
