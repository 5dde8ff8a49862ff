"""TF-slim's variables, listed from its own network definitions, all find their place in ours, and ours leave none of them out."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written import written

import zoo
from convert import conversion, core, names, network
from convert.formats import tensorflow
from convert.names import slim
from convert.steps import Shape

sys.path.append(str(Path(__file__).parents[1] / "formats"))
from seeds_tensorflow import second

# Sandler et al. 2018, Table 2, and Howard et al. 2019, Tables 1 and 2, as nets/mobilenet/*.py spell them
V2 = [(1, 16)] + [(6, n) for n in (24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)]
V3 = {
    "Large": (
        [
            *[(1, 16, 3, 0), (4, 24, 3, 0), (3, 24, 3, 0), (3, 40, 5, 1), (3, 40, 5, 1), (3, 40, 5, 1), (6, 80, 3, 0), (2.5, 80, 3, 0)],
            *[(184 / 80, 80, 3, 0), (184 / 80, 80, 3, 0), (6, 112, 3, 1), (6, 112, 3, 1), (6, 160, 5, 1), (6, 160, 5, 1), (6, 160, 5, 1)],
        ],
        960,
        1280,
    ),
    "Small": (
        [(1, 16, 3, 1), (72 / 16, 24, 3, 0), (88 / 24, 24, 3, 0), (4, 40, 5, 1), (6, 40, 5, 1), (6, 40, 5, 1), (3, 48, 5, 1), (3, 48, 5, 1)]
        + [(6, 96, 5, 1)] * 3,
        576,
        1024,
    ),
}


def divisible(number: float) -> int:
    rounded = max(8, int(number + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * number else rounded


class Scope:
    """Count variables as slim's scopes do."""

    def __init__(self, name: str) -> None:
        self.name, self.shapes = name, dict[str, Shape]()

    def conv(self, scope: str, size: int, ins: int, outs: int, *, norm: bool = True) -> int:
        self.shapes[f"{self.name}/{scope}/weights"] = (size, size, ins, outs)
        self._after(scope, outs, norm)
        return outs

    def depthwise(self, scope: str, size: int, ins: int) -> None:
        self.shapes[f"{self.name}/{scope}/depthwise_weights"] = (size, size, ins, 1)
        self._after(scope, ins, True)

    def _after(self, scope: str, width: int, norm: bool) -> None:
        leaves = [f"BatchNorm/{leaf}" for leaf in ("gamma", "beta", "moving_mean", "moving_variance")] if norm else ["biases"]
        self.shapes |= {f"{self.name}/{scope}/{leaf}": (width,) for leaf in leaves}


def listed(variant: str) -> dict[str, Shape]:
    """List the variables of one of slim's networks."""
    cls: Any = zoo.CATALOGUE[variant]
    if "MobileNetV1" in variant:
        scope, multiplier = Scope("MobilenetV1"), cls.width
        width = scope.conv("Conv2d_0", 3, 3, int(32 * multiplier))
        for index, outs in enumerate((64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024), start=1):
            scope.depthwise(f"Conv2d_{index}_depthwise", 3, width)
            width = scope.conv(f"Conv2d_{index}_pointwise", 1, width, int(outs * multiplier))
    elif "MobileNetV2" in variant:
        scope, multiplier = Scope("MobilenetV2"), cls.width
        width = scope.conv("Conv", 3, 3, divisible(32 * multiplier))
        for index, (expansion, outs) in enumerate(V2):
            width = block(scope, index, width, width * expansion, divisible(outs * multiplier), 3, gated=False)
        width = scope.conv("Conv_1", 1, width, max(1280, divisible(1280 * multiplier)))
    else:
        spec, last, hidden = V3[variant.removeprefix("MobileNetV3")]
        scope = Scope("MobilenetV3")
        width = scope.conv("Conv", 3, 3, 16)
        for index, (expansion, outs, size, gated) in enumerate(spec):
            width = block(scope, index, width, divisible(width * expansion), outs, size, gated=bool(gated))
        width = scope.conv("Conv_1", 1, width, last)
        width = scope.conv("Conv_2", 1, width, hidden, norm=False)
    scope.conv("Logits/Conv2d_1c_1x1", 1, width, 1001, norm=False)
    return scope.shapes


def block(scope: Scope, index: int, ins: int, inner: int, outs: int, size: int, *, gated: bool) -> int:
    name = "expanded_conv" + (f"_{index}" if index else "")
    if inner > ins:
        scope.conv(f"{name}/expand", 1, ins, inner)
    scope.depthwise(f"{name}/depthwise", size, inner)
    if gated:
        squeezed = scope.conv(f"{name}/squeeze_excite/Conv", 1, inner, divisible(inner / 4), norm=False)
        scope.conv(f"{name}/squeeze_excite/Conv_1", 1, squeezed, inner, norm=False)
    return scope.conv(f"{name}/project", 1, inner, outs)


@pytest.mark.parametrize("variant", [name for name in zoo.CATALOGUE if re.match(r"MobileNetV[123]", name)])
def test_slims_variables_and_ours_are_the_same(variant: str) -> None:
    import torch

    cls: Any = zoo.CATALOGUE[variant]
    with torch.device("meta"):
        model = cls(num_classes=slim.CLASSES, **slim.options([c.__name__ for c in cls.__mro__]))
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = tensorflow._tensors({name: entry(name, shape) for name, shape in listed(variant).items()}, [])
    rows = names.rows("slim", cls, ours)
    carried, report = core.apply(rows, tensors, ours)
    assert report.ok, report
    assert carried.keys() == {name for name in ours if not name.endswith("num_batches_tracked")}
    back = written(rows, carried)
    assert {name: (stored.origin, stored.shape) for name, stored in back.items()} == {
        name: (stored.origin, stored.shape) for name, stored in tensors.items()
    }


def entry(name: str, shape: Shape) -> tensorflow.Entry:
    array = np.broadcast_to(np.float32(0), shape)
    return tensorflow.Entry(name, shape, np.dtype(np.float32), lambda: array)


def test_another_network_has_no_such_names() -> None:
    assert names.rows("slim", "VGG", {"features.0.weight": (64, 3, 3, 3)}) == []


def test_options_are_those_of_tensorflow() -> None:
    assert slim.options(["MobileNetV1_050", "MobileNetV1"]) == {"padding": "same", "norm_eps": 1e-3, "activation": "relu6"}
    assert slim.options(["MobileNetV3Large", "MobileNetV3"]) == {"padding": "same", "norm_eps": 1e-3}
    assert slim.preprocessing(["MobileNetV2"])["mean"] == (0.5, 0.5, 0.5)


def test_a_checkpoint_becomes_a_network(tmp_path: Path) -> None:
    import torch

    model = zoo.MobileNetV1_025(num_classes=slim.CLASSES, **slim.options(["MobileNetV1"]))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    places = {row.ours: row.theirs for row in names.rows("slim", zoo.MobileNetV1_025, shapes)}
    variables = {}
    for name, array in state.items():
        module, _, leaf = name.rpartition(".")
        norm, depthwise = f"{module}.running_mean" in state, array.ndim == 4 and array.shape[1] == 1
        spelling = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
        plain = {"weight": "depthwise_weights" if depthwise else "weights", "bias": "biases"}
        array = array[:, :, None, None] if array.ndim == 2 else array
        array = array.transpose(2, 3, 0, 1) if depthwise else array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
        variables[f"{places[module]}/{spelling[leaf] if norm else plain[leaf]}"] = array.copy()
    assert {name: array.shape for name, array in variables.items()} == listed("MobileNetV1_025")
    source = tensorflow.read(second(tmp_path / "model.ckpt", variables))
    adopted = conversion.adopt(source, network.layers(model, (3, 32, 32)), shapes, family=zoo.MobileNetV1_025, naming="slim")
    assert adopted.report.ok, adopted.report
    assert adopted.tensors.keys() == state.keys()
    assert all(
        torch.equal(torch.from_numpy(adopted.tensors[name].array().copy()), torch.from_numpy(array)) for name, array in state.items()
    )
