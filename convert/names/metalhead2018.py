"""Names in the files that Metalhead.jl distributed from 2018 to 2021: Caffe's and Caffe2's, "conv1_1_w_0", "gpu_0/res2_0_branch2a_w_0".

The reader has taken the endings off: `_w_0` is weight, `_riv_0` running_var. Their kernels are cross-correlations, which
Metalhead flipped while it loaded them.

Source: https://github.com/FluxML/Metalhead.jl (2018), src/vgg19.jl, resnet.jl, densenet.jl, squeezenet.jl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules
from convert.names import caffe

FORMATS = ("bson", "jld2")

GPU = "gpu_0/"
RESNET = {"conv1": "conv1", "bn1": "res_conv1_bn", "fc": "pred"}
RESNET_LAYER = {"conv1": "branch2a", "conv2": "branch2b", "conv3": "branch2c", "downsample.0": "branch1"}
RESNET_NORM = {"bn1": "branch2a", "bn2": "branch2b", "bn3": "branch2c", "downsample.1": "branch1"}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; only VGG19's, ResNet50's, SqueezeNet's and DenseNet121's files have existed."""
    found = modules(ours)
    naming = next((NETWORKS[name] for name in family if name in NETWORKS), None)
    theirs = naming(family, found) if naming else {}
    if len(theirs) != len(found):
        return []
    kinds = {module: "linear_from_conv" if kind == "linear" and theirs[module] == "fc6" else kind for module, kind in found.items()}
    return [Row(theirs[module], module, kind) for module, kind in kinds.items()]


def mend(name: str) -> str:
    """Leave out the device that Caffe2 trained on: gpu_0/conv1 is conv1."""
    return name.removeprefix(GPU)


def _vgg(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    return {} if "norm" in found.values() else caffe.vgg(family, found)


def _resnet(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    del family
    named: dict[str, str] = {}
    for module in found:
        match = re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module)
        if module in RESNET:
            named[module] = RESNET[module]
        elif match and match[3] in RESNET_LAYER:
            named[module] = f"res{int(match[1]) + 1}_{match[2]}_{RESNET_LAYER[match[3]]}"
        elif match and match[3] in RESNET_NORM:
            named[module] = f"res{int(match[1]) + 1}_{match[2]}_{RESNET_NORM[match[3]]}_bn"
    return named


NETWORKS = {"VGG": _vgg, "ResNet": _resnet, "SqueezeNet": caffe.squeezenet, "DenseNet": caffe.densenet}
