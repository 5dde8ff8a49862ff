from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from convert import conversion, names, network, writing
from convert.formats import matconvnet
from convert.source import in_memory


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
def test_dense_layers_are_convolutions_over_the_whole_map(convention: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = zoo.VGG11()
    layers = network.layers(model, (3, 224, 224))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rows = [row for row in names.rows("matconvnet", zoo.VGG11, shapes) if row.ours == "classifier.0"]
    dense = np.random.default_rng(0).standard_normal((2, 7 * 7 * 512)).astype("f4")
    state = {"classifier.0.weight": in_memory("w", dense), "classifier.0.bias": in_memory("b", np.zeros(2, "f4"))}
    matconvnet.write(writing.parts(rows, layers, state), tmp_path / "vgg.mat", convention=convention, metadata={})
    found = matconvnet.read(tmp_path / "vgg.mat").tensors["fc6.weight"]
    assert found.stored_shape == (7, 7, 512, 2)
    assert np.array_equal(found.as_correlation().array().reshape(2, -1), dense)


@pytest.mark.real
def test_the_real_files_layers_are_squeezenets(real: Path) -> None:
    with torch.device("meta"):
        model = zoo.SqueezeNet1_1()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    source = matconvnet.read(real / "real" / "matconvnet" / "avoroshilov_sqz_notop.mat")
    found = conversion.adopt(source, network.layers(model, (3, 224, 224)), shapes, family=zoo.SqueezeNet1_1, naming="matconvnet")
    assert {name for name, _ in found.report.missing} == {"classifier.1.weight", "classifier.1.bias"}  # it ends before the classifier
    assert not found.report.unmatched
    assert not found.report.misshaped
