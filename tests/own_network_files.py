"""What the page "Your own network, somebody's weights" opens: a user's code, and files that SciPy, Keras, PyMongo and ONNX write of it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import bson as pymongo
import numpy as np
import scipy.io
import torch
from seeds_bson import array
from seeds_matconvnet import cell
from torch import nn

CODE = '''\
import torch
from torch import nn


class DnCNN(nn.Module):
    """Zhang et al. 2017: gives the noise of an image; `image - network(image)` is without it."""

    def __init__(self, depth=17, width=64, eps=1e-5):
        super().__init__()
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, eps), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x):
        return self.layers(x)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.dense = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.dense(torch.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1))
'''
DEPTH, WIDTH = 5, 8


def code(folder: Path) -> dict[str, Any]:
    """Write the user's module, and return what it defines."""
    (folder / "mynets.py").write_text(CODE, encoding="utf-8")
    known: dict[str, Any] = {"__name__": "mynets"}
    exec(CODE, known)
    return known


def drawn(network: nn.Module) -> nn.Module:
    """Draw every tensor, statistics too, so that no two orders and no two places give the same network."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                low, high = (0.5, 1.5) if name.endswith("running_var") or (tensor.dim() == 1 and name.endswith("weight")) else (-0.3, 0.3)
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)
    return network.eval()


def pairs(network: nn.Module) -> list[tuple[nn.Module, nn.Module | None]]:
    """List the denoiser's convolutions, each with the BatchNorm behind it."""
    layers = list(network.layers)
    return [
        (layer, following if isinstance(following, nn.BatchNorm2d) else None)
        for layer, following in zip(layers, [*layers[1:], None], strict=True)
        if isinstance(layer, nn.Conv2d)
    ]


def matconvnet(network: nn.Module, path: Path) -> None:
    """Write simplenn's layers: kernels HWIO, a bias everywhere, and moments of mean and deviation, whose epsilon is 1e-4."""
    layers: list[dict[str, Any]] = []
    for number, (conv, norm) in enumerate(pairs(network), 1):
        kernel = conv.weight.detach().numpy().transpose(2, 3, 1, 0)
        bias = conv.bias.detach().numpy() if conv.bias is not None else np.zeros(conv.out_channels, "f4")
        weights = cell(kernel, bias[:, None])
        layers.append({"type": "conv", "name": f"conv{number}", "weights": weights, "stride": 1.0, "pad": np.ones((1, 4))})
        if norm is not None:
            deviation = np.sqrt(norm.running_var.numpy() + np.float32(norm.eps))
            gamma, beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
            moments = np.stack([norm.running_mean.numpy(), deviation], 1)
            layers.append({"type": "bnorm", "name": f"bn{number}", "weights": cell(gamma[:, None], beta[:, None], moments)})
        if number < len(pairs(network)):
            layers.append({"type": "relu", "name": f"relu{number}"})
    scipy.io.savemat(path, {"net": {"layers": cell(*layers)}})


def keras_model(network: nn.Module, path: Path) -> None:
    """Let Keras build and save the same denoiser, under the names that it draws itself."""
    import keras

    layers: list[Any] = [keras.layers.Input((40, 40, 1))]
    for number, (conv, norm) in enumerate(pairs(network), 1):
        layers.append(keras.layers.Conv2D(conv.out_channels, 3, padding="same", use_bias=conv.bias is not None))
        if norm is not None:
            layers.append(keras.layers.BatchNormalization(epsilon=norm.eps))
        if number < len(pairs(network)):
            layers.append(keras.layers.ReLU())
    model = keras.Sequential(layers)
    values: list[Any] = []
    for conv, norm in pairs(network):
        values.append(conv.weight.detach().numpy().transpose(2, 3, 1, 0))
        values += [conv.bias.detach().numpy()] if conv.bias is not None else []
        values += [t.detach().numpy() for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)] if norm is not None else []
    model.set_weights(values)
    with warnings.catch_warnings():  # of what Keras does to NumPy
        warnings.simplefilter("ignore", DeprecationWarning)
        model.save(path)


def flux_list(network: nn.Module, path: Path) -> None:
    """Write what `BSON.@save path weights` leaves of `collect(Flux.params(model))`: no names, true convolutions, fed height first.

    Julia's kernel is (H, W, I, O), which NumPy shows reversed; its flattened map has the height nearest together.
    """
    arrays = []
    for layer in (network.conv1, network.conv2):
        kernel = layer.weight.detach().numpy()[:, :, ::-1, ::-1].transpose(0, 1, 3, 2)
        arrays += [np.ascontiguousarray(kernel), layer.bias.detach().numpy()]
    dense = network.dense.weight.detach().numpy().reshape(10, 16, 7, 7).transpose(0, 1, 3, 2).reshape(10, -1)
    arrays += [np.ascontiguousarray(dense.T), network.dense.bias.detach().numpy()]
    path.write_bytes(pymongo.encode({"weights": [array(one) for one in arrays]}))


def reference(network: nn.Module, path: Path) -> None:
    """Keep outputs of the network, as somebody with the original framework would."""
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        np.savez(path, inputs=images.numpy(), outputs=network(images).numpy())


def onnx_file(network: nn.Module, path: Path) -> None:
    """Let PyTorch export the network, without the names that its state dict has."""
    import onnx

    with warnings.catch_warnings():  # that this exporter is the old one, which traces and needs no other package
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(network, (torch.zeros(1, 1, 28, 28),), str(path), dynamo=False)
    model = onnx.load(path)
    renamed = {one.name: f"val_{number}" for number, one in enumerate(model.graph.initializer)}
    for one in model.graph.initializer:
        one.name = renamed[one.name]
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    onnx.save(model, path)


def write(folder: Path) -> dict[str, nn.Module]:
    """Write every file, and return the networks that they are of."""
    known = code(folder)
    sys.modules.pop("mynets", None)
    denoiser = drawn(known["DnCNN"](DEPTH, WIDTH, eps=1e-3))
    digits = drawn(known["Digits"]())
    matconvnet(drawn(known["DnCNN"](DEPTH, WIDTH, eps=1e-4)), folder / "denoiser.mat")
    keras_model(denoiser, folder / "denoiser.keras")
    flux_list(digits, folder / "digits.bson")
    reference(digits, folder / "outputs.npz")
    onnx_file(digits, folder / "digits.onnx")
    pickled(folder)
    return {"denoiser": denoiser, "digits": digits}


def pickled(folder: Path) -> None:
    """Save a denoiser whole, as `torch.save(model, path)` does: a pickle that names the author's class."""
    sys.path.insert(0, str(folder))
    try:
        import mynets

        torch.save(drawn(mynets.DnCNN(DEPTH, WIDTH)), folder / "denoiser.pth")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("mynets", None)
