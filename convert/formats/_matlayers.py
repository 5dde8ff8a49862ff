"""What the values of a MAT file say of a network: its layers, their tensors, and in which order they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.formats import _matgraph
from convert.formats._mat import Matrix, Value
from convert.kinds import is_dict, is_list
from convert.source import Convention, Source, Stored
from convert.steps import Moment, from_layout

EPS = 1e-4
"""What MatConvNet's vl_nnbnorm adds to a variance unless a layer says otherwise."""
ALIKE = 1e-6
"""Relative: a variance that a file of ours keeps beside the moments counts if it is what the moments say."""
KINDS = {"conv": "conv", "convt": "transposed", "dagnn.Conv": "conv", "dagnn.ConvTranspose": "transposed"}
NORMS = ("bnorm", "dagnn.BatchNorm")


def source(path: Path, values: Mapping[str, Value]) -> Source:
    """Describe a network by the variables of a file, or by the one struct among them that holds them all."""
    net = next((value for value in values.values() if is_dict(value) and ("layers" in value or "params" in value)), None)
    found: Mapping[str, Value] = values if "layers" in values or "params" in values or net is None else net
    layers = _listed(found.get("layers"))
    parameters = _listed(found.get("params"))
    maker = Maker(found)
    if parameters:
        maker.dag(layers, parameters)
        framework = "MatConvNet, DagNN"
    elif layers:
        maker.simple(layers)
        framework = "MatConvNet, simplenn"
    else:
        maker.plain(found)
        framework = "MatConvNet, a variable a layer"
    result = Source(path, "matconvnet", framework, maker.tensors, facts=maker.facts, notes=maker.notes)
    result.preprocessing = _preprocessing(found, maker)
    if layers:
        result.graph = _matgraph.of_dag(layers, maker) if parameters else _matgraph.chain(layers, maker)
    return result


class Maker:
    """Collects tensors by module.

    Attributes:
        names: of the layers, each once.
        moments: of each norm, how the second moment is kept: "std" or "variance"; and its eps.
        layouts: of each kernel.
        widths: output and input channels of each kernel, in PyTorch's form.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.tensors: dict[str, Stored] = {}
        self.notes: list[str] = []
        self.facts: dict[str, str] = {}
        self.names: list[str] = []
        self.moments: dict[str, tuple[str, float]] = {}
        self.layouts: dict[str, str] = {}
        meta = values.get("meta")
        ours = meta.get("kernelzoo") if is_dict(meta) else None
        if is_dict(ours):
            self.facts |= {key: value for key, value in ours.items() if isinstance(value, str)}
        self.convention: Convention = "convolution" if self.facts.get("kernel_convention") == "convolution" else "correlation"

    def simple(self, layers: list[dict[str, Any]]) -> None:
        for number, layer in enumerate(layers, start=1):
            name = self.named(layer, number)
            weights = layer.get("weights")
            listed = weights if is_list(weights) else [layer.get("filters"), layer.get("biases")]
            kind = layer.get("type")
            if kind in NORMS:
                self.norm(name, listed, layer)
            elif kind in KINDS:
                self.kernel(name, KINDS[kind], listed, layer.get("kind") == "linear")
            elif kind == "custom" and is_dict(layer.get("leaves")):
                for leaf, value in layer["leaves"].items():
                    self.other(f"{name}.{leaf}", value)
            else:
                for place, value in enumerate(listed):
                    self.other(f"{name}.{place}", value)

    def dag(self, layers: list[dict[str, Any]], parameters: list[dict[str, Any]]) -> None:
        known = {str(parameter.get("name")): parameter.get("value") for parameter in parameters}
        used: set[str] = set()
        for number, layer in enumerate(layers, start=1):
            name = self.named(layer, number)
            wanted = _texts(layer.get("params"))
            used |= set(wanted)
            values = [known.get(each) for each in wanted]
            block = layer.get("block")
            kind = str(layer.get("type"))
            if kind in NORMS:
                self.norm(name, values, block if is_dict(block) else {})
            elif kind in KINDS:
                self.kernel(name, KINDS[kind], values)
            else:
                for place, value in enumerate(values):
                    self.other(f"{name}.{place}", value)
        for name, value in known.items():
            if name not in used:
                self.other(name, value)

    def plain(self, values: Mapping[str, Value]) -> None:
        """Take a variable a layer: a cell {kernel, bias}, a struct with fields of such names, or the numbers themselves."""
        for name, value in values.items():
            if is_list(value) and value and all(isinstance(item, Matrix | None) for item in value):
                self.listed(name, value)
            elif is_dict(value):
                lower = {str(key).lower(): item for key, item in value.items()}
                kernel = next((lower[key] for key in ("weights", "weight", "filters", "kernel", "w") if key in lower), None)
                bias = next((lower[key] for key in ("biases", "bias", "b") if key in lower), None)
                if is_list(kernel):
                    self.listed(name, kernel)
                elif isinstance(kernel, Matrix):
                    self.listed(name, [kernel, bias])
                else:
                    self.plain({f"{name}.{key}": item for key, item in value.items()})
            else:
                self.other(name, value)

    def listed(self, name: str, values: list[Any]) -> None:
        if len(values) == 3 and isinstance(values[2], Matrix) and values[2].dims[1:] == (2,):
            self.norm(name, values, {})
        else:
            self.kernel(name, "conv", values)

    def named(self, layer: Mapping[str, Any], number: int) -> str:
        name = layer.get("name")
        name = name if isinstance(name, str) and name else f"{layer.get('type') or 'layer'}{number}"
        self.names.append(name if name not in self.names else f"{name}_{number}")
        return self.names[-1]

    def kernel(self, name: str, kind: str, values: list[Any], dense: bool = False) -> None:
        weight, bias, *more = [*values, None, None]
        if isinstance(weight, Matrix) and weight.count:
            stored = weight.stored(max(4, len(weight.dims)))
            axes = len(stored.stored_shape)
            layout = "DHW"[5 - min(axes, 5) :] + ("OI" if kind == "transposed" else "IO")
            layout = layout[::-1] if weight.reverse else layout
            self.layouts[name] = layout
            stored = replace(stored, steps=from_layout(kind, layout, stored.stored_shape), convention=self.convention)
            if dense:
                stored = replace(stored.reshape(stored.shape[0], int(np.prod(stored.shape[1:]))), convention=None)
            self.tensors[f"{name}.weight"] = stored
        self.other(f"{name}.bias", bias)
        for place, value in enumerate(more):
            self.other(f"{name}.{place + 2}", value)

    def norm(self, name: str, values: list[Any], layer: Mapping[str, Any]) -> None:
        gamma, beta, moments, *_ = [*values, None, None, None]
        self.other(f"{name}.weight", gamma)
        self.other(f"{name}.bias", beta)
        given = layer.get("epsilon")
        eps = given.numbers()[0] if isinstance(given, Matrix) and given.count == 1 else EPS
        if not isinstance(moments, Matrix) or len(moments.dims) != 2 or moments.dims[1] != 2:
            self.notes.append(f"{name}: a BatchNorm without moments, as it is before it is trained")
            return
        deviation = moments.column(1)
        self.moments[name] = ("std", eps)
        self.tensors[f"{name}.running_mean"] = moments.column(0)
        variance = layer.get("variance")
        if isinstance(variance, Matrix) and _same(variance, deviation, eps):
            self.moments[name] = ("variance", eps)
            self.tensors[f"{name}.running_var"] = variance.stored()
        else:
            self.tensors[f"{name}.running_var"] = deviation.then(Moment("std", eps))

    def other(self, name: str, value: Any) -> None:
        """Take numbers as they are: a row or column as a vector."""
        if isinstance(value, Matrix) and value.count:
            if name in self.tensors:
                name = f"{name}_{len(self.tensors)}"
            wide = sum(dim > 1 for dim in value.dims) > 1
            self.tensors[name] = value.stored(len(value.dims)) if wide else value.stored()


def _same(variance: Matrix, deviation: Stored, eps: float) -> bool:
    """Tell whether a variance is what the moments say; whoever trained on in MATLAB has changed the moments alone."""
    if variance.count != deviation.stored_shape[0]:
        return False
    kept = variance.load().reshape(-1).astype(np.float64)
    return bool(np.allclose(np.sqrt(np.maximum(kept + eps, 0)), deviation.load().astype(np.float64), rtol=ALIKE, atol=0))


def _listed(value: Any) -> list[dict[str, Any]]:
    """Read a cell or an array of structs; one struct is an array of one."""
    listed = value if is_list(value) else [value]
    return [item for item in listed if is_dict(item)]


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) and value else [item for item in value if isinstance(item, str)] if is_list(value) else []


def _preprocessing(values: Mapping[str, Value], maker: Maker) -> dict[str, Any]:
    """Read meta.normalization: the size of the images, and the mean that is subtracted from pixels 0..255."""
    meta = values.get("meta")
    normalization = meta.get("normalization") if is_dict(meta) else values.get("normalization")
    if not is_dict(normalization):
        return {}
    found: dict[str, Any] = {}
    size = normalization.get("imageSize")
    if isinstance(size, Matrix) and size.count >= 2:
        maker.facts["image size"] = "x".join(f"{n:g}" for n in size.numbers())
    mean = normalization.get("averageImage")
    if isinstance(mean, Matrix) and mean.count:
        channels = mean.dims[2] if len(mean.dims) > 2 else mean.count
        if mean.count == channels <= 4:
            each = mean.numbers()
        else:
            array = mean.load()
            each = [float(n) for n in (array.mean((1, 2)) if mean.reverse else array.mean((0, 1))).reshape(-1)]
            maker.notes.append("the images' mean is a picture; what is said here is the mean of each colour")
        found = {"mean": tuple(value / 255 for value in each), "std": (1 / 255,) * len(each), "channel_order": "rgb"}
        if len(each) == 3 and each[0] < each[2]:
            # ImageNet's mean is 123, 117, 104 of red, green and blue
            found["channel_order"] = "bgr"
    return found
