"""What the values of a MAT file say of a network: its layers, their tensors, and in which order they compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.formats import _matgraph
from convert.formats._mat import Matrix, Value
from convert.kinds import is_dict, is_list
from convert.source import Source


def source(path: Path, values: Mapping[str, Value]) -> Source:
    """Describe a network by the variables of a file, or by the one struct among them that holds them all."""
    net = next((value for value in values.values() if is_dict(value) and ("layers" in value or "params" in value)), None)
    found: Mapping[str, Value] = values if "layers" in values or "params" in values or net is None else net
    layers = _listed(found.get("layers"))
    parameters = _listed(found.get("params"))
    maker = _matgraph.Maker(found)
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


def _listed(value: Any) -> list[dict[str, Any]]:
    """Read a cell or an array of structs; one struct is an array of one."""
    listed = value if is_list(value) else [value]
    return [item for item in listed if is_dict(item)]


def _preprocessing(values: Mapping[str, Value], maker: _matgraph.Maker) -> dict[str, Any]:
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
