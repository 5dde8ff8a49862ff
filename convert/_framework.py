"""Strangers' networks in their own frameworks: the work of a process that may do nothing else, see `convert.sandbox.run`.

No code of a file is run: one that names anything but the layers that our own reader knows, and what Keras builds them with, is not given to
Keras, which has layers that load other files.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from convert.formats import _darknet_cfg
from convert.formats._keras_ops import LAYERS, PLAIN
from convert.formats._openvino_export import imported
from convert.formats._tflite_export import outputs as tflite_outputs
from convert.kinds import is_dict
from weights.documents import read_json

log = logging.getLogger("convert")

LIBRARIES = {"onnx": "onnxruntime", "keras": "keras", "openvino": "openvino", "tflite": "ai_edge_litert"}
"""By format: what runs its files."""
DETECTORS = {"darknet": "cv2"}
"""By format: what runs its detectors, whose outputs are maps."""
MAX_WORDS = 160
"""Of what a framework says, and of what is said of a file."""
BACKEND = "torch"
"""Of Keras, where the user's environment names none: it is installed here anyway."""


_BUILT_WITH = re.compile(r"keras\.(initializers|regularizers|constraints|losses|metrics|optimizers(\.schedules)?|src\.ops\.(nn|numpy))")
"""Modules all classes of which do nothing but compute."""
_MODELS = {
    "keras": ("Sequential", "Functional", "Model", "DTypePolicy"),
    "keras.models": ("Sequential", "Functional", "Model"),
    "keras.src.models.sequential": ("Sequential",),
    "keras.src.models.functional": ("Functional",),
    "keras.src.models.model": ("Model",),
    "keras.dtype_policies": ("DTypePolicy", "DTypePolicyMap"),
}
_VALUES = ("__keras_tensor__", "__tensor__", "__numpy__", "__tuple__", "__slice__", "__ellipsis__", "__bytes__")
"""What Keras writes of values that JSON has no words for; `__lambda__` and `__typespec__` are not among them."""


def prepare(format: str) -> None:
    """Import what runs files of a format."""
    if format == "openvino":  # which loads what computes when the first network is made ready
        _openvino_core()
        return
    importlib.import_module({**LIBRARIES, **DETECTORS}[format])
    if format == "tflite":
        importlib.import_module("ai_edge_litert.interpreter")


@cache
def _openvino_core() -> Any:
    """Start OpenVINO in one thread and float32, with what reads an IR and what computes on this processor."""
    openvino = imported()
    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1})
    core.compile_model(core.read_model(_NOTHING.encode(), b""), "CPU")(np.zeros(1, np.float32))
    return core


_PORT = '<port id="0" precision="FP32"><dim>1</dim></port>'
_NOTHING = f"""<?xml version="1.0"?><net name="nothing" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="1" element_type="f32"/><output>{_PORT}</output></layer>
<layer id="1" name="y" type="ReLU" version="opset1"><input>{_PORT}</input><output>{_PORT.replace('id="0"', 'id="1"')}</output></layer>
<layer id="2" name="z" type="Result" version="opset1"><input>{_PORT}</input></layer></layers>
<edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/>
<edge from-layer="1" from-port="1" to-layer="2" to-port="0"/></edges></net>"""
"""A network that computes nothing much, so that OpenVINO loads its parts while it still may."""


def run(path: Path, format: str, images: np.ndarray, *, last: bool) -> tuple[np.ndarray, str] | str:
    """Compute a file's outputs, one row each, of images (B, C, H, W); with whom did it, "onnxruntime 1.31.1", or why there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs are about their own future
            ran = {"onnx": _onnx, "keras": _keras, "openvino": _openvino, "tflite": _tflite, "darknet": _darknet}[format]
            return ran(path, np.ascontiguousarray(images, np.float32), last)
    except Exception as error:  # a framework refuses a file in any way whatever; that is no fault of the conversion
        log.debug("%s could not be run at home", path, exc_info=True)
        said = str(error).strip().splitlines()
        words = (
            (said[-1] if said[0].startswith("Exception from") else said[0]) if said else type(error).__name__
        )  # not where in its sources
        return f"its framework refuses it: {words[:MAX_WORDS]}"


def _onnx(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str]:
    del last  # the session says it
    onnxruntime: Any = importlib.import_module("onnxruntime")
    alone = onnxruntime.SessionOptions()
    alone.intra_op_num_threads = alone.inter_op_num_threads = 1  # a confined process may start no more
    session = onnxruntime.InferenceSession(str(path), alone, providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()[0]
    fits = isinstance(wanted.shape[1], str | None) or wanted.shape[1] == images.shape[1]
    one_by_one = isinstance(wanted.shape[0], int) and wanted.shape[0] == 1
    batches = [images[i : i + 1] for i in range(len(images))] if one_by_one else [images]
    made = [session.run(None, {wanted.name: batch if fits else batch.transpose(0, 2, 3, 1)})[0] for batch in batches]
    return _row_each(np.concatenate(made), last=not fits), f"onnxruntime {onnxruntime.__version__}"


def _darknet(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str]:
    """Compute the maps before the heads, one behind the other: what OpenCV makes of a head has boxes and rows of its own."""
    del last  # Darknet has the channels first
    cv2: Any = importlib.import_module("cv2")
    cv2.setNumThreads(1)  # a confined process may start no more
    description = path.with_suffix(".cfg")
    net = cv2.dnn.readNetFromDarknet(str(description), str(path))
    heads = [one.feeds[0] for one in _darknet_cfg.read(description)[1:] if one.kind in ("yolo", "region")]
    made: list[np.ndarray] = []
    for image in images:
        net.setInput(np.ascontiguousarray(image[None]))
        made.append(np.concatenate([net.forward(f"conv_{layer}").reshape(-1) for layer in heads]))
    return np.stack(made), f"OpenCV {cv2.__version__}"


def _openvino(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str]:
    openvino = imported()
    core, weights = _openvino_core(), path.with_suffix(".bin")
    net = core.read_model(path.with_suffix(".xml").read_bytes(), weights.read_bytes() if weights.is_file() else b"")
    model = core.compile_model(net, "CPU")
    shape = model.input(0).get_partial_shape()
    whole = shape[0].is_dynamic or shape[0].get_length() == len(images)
    batches = [images] if whole else [images[i : i + 1] for i in range(len(images))]
    made = [next(iter(model(batch.transpose(0, 2, 3, 1) if last else batch).values())) for batch in batches]
    return np.concatenate(made).reshape(len(images), -1), f"openvino {openvino.__version__.split('-')[0]}"


def _tflite(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str] | str:
    made = tflite_outputs(path, images, last)
    return made if isinstance(made, str) else (_row_each(made[0], last), made[1])


def _keras(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str] | str:
    if strange := _strange(path):
        return f"its configuration names {strange}, which is not run"
    keras: Any = importlib.import_module("keras")
    model = keras.models.load_model(path, compile=False, safe_mode=True)
    made = model(images.transpose(0, 2, 3, 1) if last else images, training=False)
    outputs = _row_each(np.asarray(keras.ops.convert_to_numpy(made)), last)
    return outputs, f"keras {keras.__version__}, {keras.backend.backend()}"


def _row_each(outputs: np.ndarray, last: bool) -> np.ndarray:
    """Lay a network's outputs out as one row an image; maps with the channels first, as ours has them."""
    maps = outputs.transpose(0, 3, 1, 2) if last and outputs.ndim == 4 else outputs
    return maps.reshape(len(outputs), -1)


def _strange(path: Path) -> str:
    """Name the first thing in a .keras file's configuration that is not known to do nothing but compute, "" where all is."""
    with zipfile.ZipFile(path) as archive:
        config = read_json(archive.read("config.json"), path, most_depth=1000)
    left: list[Any] = [{k: v for k, v in config.items() if k != "compile_config"} if is_dict(config) else config]  # that one is not built
    while left:
        item = left.pop()
        if is_dict(item):
            plain = item.get("class_name") == "function" and item.get("module") == "builtins" and item.get("config") in tuple(PLAIN)
            if "class_name" in item and not plain and not _known(item.get("module"), item["class_name"]):
                return f"{item.get('module')}.{item['class_name']}"[:MAX_WORDS]
            left += item.values()
        elif isinstance(item, list):
            left += item
    return ""


def _known(module: object, name: object) -> bool:
    if not isinstance(name, str) or not isinstance(module, str):
        return module is None and name in _VALUES
    if module == "keras.layers":
        return name == "InputLayer" or name in LAYERS
    return name in _MODELS.get(module, ()) or (_BUILT_WITH.fullmatch(module) is not None and name.isidentifier() and name[0].isupper())
