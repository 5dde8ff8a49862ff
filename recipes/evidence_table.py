"""Print what docs/notes/converting.md says of evidence: real networks, right and wrong, measured on real photographs.

    python recipes/evidence_table.py FOLDER

FOLDER holds `real/` (checkpoints and photographs) and `data/cifar10_test.npz` (CIFAR-10's test images as JPEG).
"""

from __future__ import annotations

import argparse
import copy
import io
import logging
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from convert import formats
from convert.conversion import Undecided
from convert.evidence import batchnorm_mismatch, decide
from convert.match import match
from convert.network import layers
from convert.steps import flip
from weights import Preprocessing
from zoo.images.preprocess import preprocess
from zoo.networks.model import Model

CIFAR_IMAGES = 256
REFERENCE_IMAGES = 16
ORIENTATIONS = ("as it is", "flipped", "height and width exchanged", "flipped and exchanged")
IMAGENET = Preprocessing(256, 224, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CAFFE = Preprocessing(256, 227, "bilinear", tuple(m / 255 for m in (104, 117, 123)), (1 / 255,) * 3, "bgr")


def turned(network: nn.Module, turn: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a network with every kernel turned."""
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 4:
                parameter.copy_(turn(parameter.clone()))
    return twin


def candidates(network: nn.Module) -> dict[str, nn.Module]:
    """Orient a network in the four ways that no shape tells apart."""
    turns: tuple[Callable[[Tensor], Tensor], ...] = (lambda k: k, flip, lambda k: k.transpose(2, 3), lambda k: flip(k).transpose(2, 3))
    return {name: turned(network, turn) for name, turn in zip(ORIENTATIONS, turns, strict=True)}


class Pooled(nn.Module):
    """A body without its classifier: the features are the outputs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Average the last map."""
        return self.body(x).mean((2, 3))


def keras_body(file: Path, padding: str) -> nn.Module:
    """Read MobileNetV1 x0.25 without a classifier, by matching its shapes: no table is needed."""
    body = zoo.MobileNetV1_025(padding=padding, norm_eps=1e-3, activation="relu6").features
    shapes = {name: tuple(tensor.shape) for name, tensor in body.state_dict().items()}
    with formats.read(file) as source:
        state = body.state_dict()
        for row in match(source, layers(body, (3, 224, 224)), shapes):
            for leaf in ("weight", "bias", "running_mean", "running_var"):
                stored = source.tensors.get(f"{row.theirs}.{leaf}")
                if stored is not None:
                    state[f"{row.ours}.{leaf}"] = torch.from_numpy(stored.as_correlation().array().copy())
    body.load_state_dict(state)
    return Pooled(body).eval()


def photographs(folder: Path) -> tuple[list[Path], Tensor]:
    """List the labelled photographs and their classes."""
    wnids = (folder / "images" / "timm_imagenet_synsets.txt").read_text().split()
    files = sorted((folder / "images" / "imagenet").glob("*.JPEG"))
    return files, torch.tensor([wnids.index(file.name.split("_")[0]) for file in files])


def cifar(file: Path, model: Model) -> tuple[Tensor, Tensor]:
    """Read the first test images, prepared for `model`."""
    packed = np.load(file)
    raw, offset = packed["jpeg"].tobytes(), packed["offset"][: CIFAR_IMAGES + 1]
    images = model.preprocess([Image.open(io.BytesIO(raw[a:b])) for a, b in pairwise(offset)])
    return images, torch.from_numpy(packed["label"][:CIFAR_IMAGES].astype(np.int64))


def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Tell the part of the images that the network gets right."""
    with torch.inference_mode():
        return float(torch.cat([network(part).argmax(1) for part in images.split(32)]).eq(labels).float().mean())


def confidence(network: nn.Module, images: Tensor) -> tuple[float, float]:
    """Tell how much surer the network is of upright images, and how many standard errors that is."""
    with torch.inference_mode():
        sure = [torch.cat([network(part).softmax(1).amax(1) for part in x.split(32)]) for x in (images, images.flip(2, 3))]
    gain = (sure[0] - sure[1]).double()
    return float(gain.mean()), float(gain.mean() / (gain.std() / math.sqrt(len(gain))))


def show(
    title: str, networks: Mapping[str, nn.Module], images: Tensor, labels: Tensor | None, others: Mapping[str, tuple[nn.Module, Tensor]]
) -> None:
    """Print a row for each orientation and each other mistake, and what `decide` says."""
    normed = any(isinstance(module, nn.BatchNorm2d) for module in networks[ORIENTATIONS[0]].modules())
    print(f"\n{title}, {len(images)} images")
    shown = {**{n: (net, images) for n, net in networks.items()}, **others}
    for name, (network, x) in shown.items():
        cells = [f"BatchNorm {batchnorm_mismatch(network, x):.4f}"] if normed else []
        if labels is not None:
            gain, sigmas = confidence(network, x)
            cells += [f"accuracy {accuracy(network, x, labels):.2f}", f"confidence gained {gain:+.3f} ({sigmas:+.1f} standard errors)"]
        print(f"  {name:32}{', '.join(cells)}", flush=True)
    right = networks[ORIENTATIONS[0]]
    few = slice(None, None, max(1, len(images) // REFERENCE_IMAGES))
    with torch.inference_mode():
        wanted = copy.deepcopy(right).double()(images[few].double())  # float64 stands for the source network
        errors = {name: relative(network(x[few]), wanted) for name, (network, x) in shown.items()}
    print("  reference outputs, relative error: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    if labels is not None:
        print(f"  labels: {decided(networks, labelled=(images, labels))}")
    print(f"  photographs: {decided(networks, images=images)}", flush=True)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Tell the largest difference, as a part of the largest output."""
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def decided(networks: Mapping[str, nn.Module], *, labelled: tuple[Tensor, Tensor] | None = None, images: Tensor | None = None) -> str:
    """Say what `decide` makes of the four orientations."""
    try:
        made = decide(networks, labelled=labelled, images=images)
    except Undecided as error:
        return str(error).splitlines()[0]
    return f"{made.winner}, by {made.measure}, margin {made.margin:.2f}"


def main() -> None:
    """Measure every network that the folder holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds real/ and data/")
    folder: Path = parser.parse_args().folder
    logging.disable(logging.WARNING)
    real = folder / "real"
    files, labels = photographs(real)

    model = zoo.trained(zoo.MobileNetV1_025, real / "pytorch" / "mobilenetV1X0.25_pretrain.tar")
    images = model.preprocess(files)
    same = zoo.trained(zoo.MobileNetV1_025, real / "pytorch" / "mobilenetV1X0.25_pretrain.tar", padding="same")
    eps = zoo.trained(zoo.MobileNetV1_025, real / "pytorch" / "mobilenetV1X0.25_pretrain.tar", norm_eps=1e-3)
    bgr = {"epsilon 1e-3 for 1e-5": (eps, images), "BGR": (model, images.flip(1)), "SAME for symmetric padding": (same, images)}
    show("MobileNetV1 x0.25 (PyTorch)", candidates(model), images, labels, bgr)

    file = real / "keras" / "mobilenet_2_5_224_tf_no_top.h5"
    body = keras_body(file, "same")
    images = preprocess(files, IMAGENET)
    wrong = {
        "BGR": (body, images.flip(1)),
        "symmetric for SAME padding": (keras_body(file, "symmetric"), images),
        "0..1 for -1..1": (body, images / 2 + 0.5),
    }
    show("MobileNetV1 x0.25 (Keras, no classifier)", candidates(body), images, None, wrong)

    squeezed = zoo.trained(zoo.SqueezeNet1_0, real / "caffe" / "squeezenet_v1.0_deepcompression_decoded.caffemodel")
    images = preprocess(files, CAFFE)
    show("SqueezeNet 1.0 (Caffe)", candidates(squeezed), images, labels, {"RGB": (squeezed, images.flip(1))})

    for cls, name in ((zoo.ResNet20, "cifar_resnet20-12fca82f.th"), (zoo.ResNet32, "cifar_resnet32-d509ac18.th")):
        model = zoo.trained(cls, real / "pytorch" / name)
        images, classes = cifar(folder / "data" / "cifar10_test.npz", model)
        show(f"{cls.__name__} (PyTorch, CIFAR-10 as JPEG)", candidates(model), images, classes, {"BGR": (model, images.flip(1))})


if __name__ == "__main__":
    main()
