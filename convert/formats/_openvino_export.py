"""Write a network as OpenVINO's IR: as ONNX first, which OpenVINO itself reads and writes down, with every tensor under its own name."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.formats import _onnx_export
from weights.errors import ConvertError, MissingLibrary

if TYPE_CHECKING:
    from torch import nn

NUMBERED = re.compile(r"[A-Z][A-Za-z]*_\d+(\.\d+)?")
"""How OpenVINO names a node that nobody has named."""


def imported() -> Any:
    """Import OpenVINO without its telemetry, which reports to an analytics service on import.

    Raises:
        MissingLibrary: it is not installed.
    """
    if "openvino" in sys.modules:
        return sys.modules["openvino"]
    had = sys.modules.get("openvino_telemetry", ...)
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # to the import statement: not installed
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise MissingLibrary("openvino is needed to write an IR and is not installed: pip install 'kernelzoo[cpu,convert]'") from error
    finally:
        if had is ...:
            del sys.modules["openvino_telemetry"]
        else:
            sys.modules["openvino_telemetry"] = had


def write(
    network: nn.Module, path: Path, *, input_shape: Sequence[int], metadata: Mapping[str, str], preprocessing: Any
) -> tuple[nn.Module, Any]:
    """Write a network, as `convert.formats.openvino.export` says, and return the copy that was traced, and its images."""
    openvino = imported()
    with tempfile.TemporaryDirectory() as folder:
        between = Path(folder) / "network.onnx"
        twin, example = _onnx_export.write(
            network, between, input_shape=input_shape, metadata={}, preprocessing=preprocessing, opset=_onnx_export.OPSET
        )
        try:
            model = openvino.Core().read_model(between)
            given = model.input(0)
            sizes = list(given.get_partial_shape())
            model.reshape([1, *sizes[1:]])
            passes: Any = importlib.import_module("openvino.passes")
            manager = passes.Manager()
            manager.register_pass(passes.ConstantFolding())
            names = _named(model)
            _rename(model, {})
            manager.run_passes(model)
            _free_batch(model)
            model.reshape([-1, *sizes[1:]])
            _rename(model, names)
            for key in sorted(metadata):
                model.set_rt_info(metadata[key], ["kernelzoo", key])
            openvino.serialize(model, path, path.with_suffix(".bin"))
        except RuntimeError as error:
            raise ConvertError(f"{path}: OpenVINO does not write this network: {str(error).strip().splitlines()[-1][:300]}") from error
    return twin, example


def _free_batch(model: Any) -> None:
    """Let reshapes that were settled for one image take any number of them."""
    operators: Any = importlib.import_module("openvino.opset13")
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape" or node.input_value(0).get_node().get_type_name() == "Constant":
            continue
        shape = node.input_value(1).get_node()
        sizes = np.array(shape.data) if shape.get_type_name() == "Constant" else np.zeros(0)
        if sizes.size and sizes[0] == 1 and node.input_value(0).get_partial_shape()[0] == 1:
            sizes[0] = 0  # as many as come in
            node.input(1).replace_source_output(operators.constant(sizes).output(0))
            node.set_attribute("special_zero", True)
    model.validate_nodes_and_infer_types()


def _named(model: Any) -> dict[str, str]:
    """Say what the weights of grouped convolutions are called, which lie behind a reshape that is about to be folded into them."""
    found: dict[str, str] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "GroupConvolution":
            weight = node.input_value(1).get_node()
            while weight.get_type_name() != "Constant" and weight.get_input_size():
                weight = weight.input_value(0).get_node()
            found[node.get_friendly_name()] = weight.get_friendly_name()
    return found


def _rename(model: Any, names: Mapping[str, str]) -> None:
    """Give back the weights' names, and number what OpenVINO has named by how many nodes its process had made before."""
    for number, node in enumerate(model.get_ordered_ops()):
        name, notes = node.get_friendly_name(), node.get_rt_info()
        for key in [key for key in dict(notes.items()) if str(key).startswith("fused_names")]:
            del notes[key]  # of which nodes it was made, by those numbers
        if name in names:
            node.input_value(1).get_node().set_friendly_name(names[name])
        if NUMBERED.fullmatch(name):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
