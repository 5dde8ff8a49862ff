"""A Darknet file written as safetensors, proven against OpenCV's dnn where that is installed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from convert import sandbox
from convert.formats import safetensors
from weights.errors import ConvertError
from weights.places import at_home
from weights.whole import whole
from zoo.detection.darknet_networks import Darknet

CVS_EPS = 1e-6
"""What OpenCV adds to a variance, whoever's Darknet trained the network: the comparison is made with it on both sides."""
MOST = 1e-4
"""Largest difference of a number of a map that is taken for rounding, as a share of the map's largest number."""
IMAGES = 2


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared.

    Attributes:
        by: who computed the reference, "OpenCV 4.14.0"; "" where nothing was compared.
        worst: the largest difference between maps before the heads, as a share of the largest number; None where nothing was compared.
        why: there was no comparison; "" where there was one.
        tensors: how many were written.
    """

    by: str
    worst: float | None
    why: str
    tensors: int


def convert_darknet(
    model: Darknet,
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    replace: bool = False,
    unproven: bool = False,
    require_proof: bool = False,
) -> Proof:
    """Write a .weights as safetensors, which `trained` loads for the same class.

    The .weights is given to OpenCV in a process that may do nothing else, beside the class's own .cfg. Its maps before the heads are
    compared with ours, on two random images, with OpenCV's epsilon on both sides.

    Args:
        model: the network with the weights of the source, in eval mode, as `trained(cls, source)` builds it.
        source: the .weights.
        destination: the file to write; it appears whole, or not at all.
        replace: whether `destination` may be there already.
        unproven: write the file although OpenCV computes something else.
        require_proof: write nothing where OpenCV can't be asked.

    Raises:
        FileExistsError: `destination` is there already.
        ConvertError: what OpenCV computes is something else, or a proof was required and there is none.
    """
    path, place = at_home(source), at_home(destination)
    if place.exists() and not replace:
        raise FileExistsError(f"{place} is there already; replace=True puts the new one in its place")
    found = compared(model, path)
    if require_proof and found.why:
        raise ConvertError(f"nothing proves that {path} was converted rightly: {found.why}; or leave require_proof=True out")
    if found.worst is not None and found.worst > MOST and not unproven:
        raise ConvertError(f"{path}: {found.by} computes something else: its maps differ by {found.worst:.1e} of their largest number")
    with whole(place, sync=True) as unfinished:
        safetensors.save(model.state_dict(), unfinished, {"kernelzoo.batch_norm": model.batch_norm})
    return found


def compared(model: Darknet, path: Path) -> Proof:
    """Compare a network with what OpenCV computes of its file."""
    count = len(model.state_dict())
    if importlib.util.find_spec("cv2") is None:
        return Proof("", None, "OpenCV is not installed: pip install 'kernelzoo[video]'", count)
    height, width = model.image_size
    images = np.random.default_rng(0).random((IMAGES, model.in_channels, height, width), np.float32)
    with model.described(path, "darknet") as file:
        made = sandbox.run(file, "darknet", images, last=False)
    if isinstance(made, str):
        return Proof("", None, made, count)
    norms = [(layer, layer.eps) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    try:
        for layer, _ in norms:
            layer.eps = CVS_EPS
        with torch.no_grad():
            maps = model(torch.from_numpy(images))
    finally:
        for layer, eps in norms:
            layer.eps = eps
    ours = torch.cat([one.reshape(IMAGES, -1) for one in maps], 1).numpy()
    theirs, by = made
    if ours.shape != theirs.shape:
        return Proof(by, float("inf"), "", count)
    return Proof(by, float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-12)), "", count)
