"""What a checkpoint computes at home: the outputs of the framework that wrote it, where that is installed. The strongest proof there is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert import names
from convert.kinds import is_dict
from convert.source import Source

log = logging.getLogger("convert")


@dataclass(frozen=True, slots=True)
class AtHome:
    """What the source's own framework computed.

    Attributes:
        outputs: (B, classes).
        by: the framework and its version, "onnxruntime 1.31.1".
    """

    outputs: np.ndarray
    by: str


def outputs(source: Source, inputs: np.ndarray, *, naming: str = "", family: type | str = "", classes: int | None = None) -> AtHome | str:
    """Let the framework that wrote a file run it.

    No code of the file is run: a graph with an operation that nothing here knows (a Lambda layer) is not given to a framework.

    Args:
        source: the open file.
        inputs: float32 (B, C, H, W), as that network wants them.
        naming: the table of `convert.names` that explained the file.
        family: the network's class.
        classes: of the network.

    Returns:
        The outputs, or why there are none: "keras is not installed".
    """
    run = {"onnx": _onnx, "keras": _keras}.get(source.format)
    if run is None and naming in ("torchvision", "timm") and source.format in ("pytorch", "safetensors"):
        return _library(naming, source, inputs, family, classes)
    if run is None:
        return f"nothing here can run a {source.format} file"
    if source.graph is None:
        return "the file holds weights and no graph"
    if source.graph.unknown:
        return f"the graph holds {', '.join(source.graph.unknown)}, which is not run"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs are about their own future
            return run(source, np.ascontiguousarray(inputs, np.float32))
    except Exception as error:  # a framework refuses a file in any way whatever; that is no fault of the conversion
        log.debug("%s could not be run at home", source.path, exc_info=True)
        return f"its framework refuses it: {str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__}"


def _onnx(source: Source, inputs: np.ndarray) -> AtHome | str:
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    onnxruntime: Any = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(str(source.path), providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()[0]
    fits = isinstance(wanted.shape[1], str | None) or wanted.shape[1] == inputs.shape[1]
    one_by_one = isinstance(wanted.shape[0], int) and wanted.shape[0] == 1
    batches = [inputs[i : i + 1] for i in range(len(inputs))] if one_by_one else [inputs]
    made = [session.run(None, {wanted.name: batch if fits else batch.transpose(0, 2, 3, 1)})[0] for batch in batches]
    return AtHome(np.concatenate(made).reshape(len(inputs), -1), f"onnxruntime {onnxruntime.__version__}")


def _keras(source: Source, inputs: np.ndarray) -> AtHome | str:
    if importlib.util.find_spec("keras") is None:
        return "keras is not installed"
    import os

    os.environ.setdefault("KERAS_BACKEND", "torch")
    if source.path.suffix != ".keras":
        return "only .keras files are run, for older ones are not safe with every version of Keras"
    if strange := _strange(source):
        return f"its configuration names {strange}, which is not run"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras: Any = importlib.import_module("keras")
    model = keras.models.load_model(source.path, compile=False, safe_mode=True)
    last = source.graph is not None and source.graph.nodes[0].attrs.get("layout", "nhwc") == "nhwc"
    made = model(inputs.transpose(0, 2, 3, 1) if last else inputs, training=False)
    return AtHome(
        np.asarray(keras.ops.convert_to_numpy(made)).reshape(len(inputs), -1), f"keras {keras.__version__}, {keras.backend.backend()}"
    )


def _strange(source: Source) -> str:
    """Name the first thing in a .keras file's configuration that is not Keras's own, "" where all is."""
    with zipfile.ZipFile(source.path) as archive:
        left: list[Any] = [json.loads(archive.read("config.json"))]
    while left:
        item = left.pop()
        if is_dict(item):
            module, name = item.get("module"), item.get("class_name")
            elsewhere = isinstance(module, str) and module.split(".")[0] not in ("keras", "builtins")
            if elsewhere or name in (
                "Lambda",
                "__lambda__",
                "function",
            ):
                return f"{module}.{name}"
            left += item.values()
        elif isinstance(item, list):
            left += item
    return ""


def _library(naming: str, source: Source, inputs: np.ndarray, family: type | str, classes: int | None) -> AtHome | str:
    """Let torchvision or timm, whose file it is, build the network and run it."""
    if importlib.util.find_spec(naming) is None:
        return f"{naming} is not installed"
    import torch

    make: Callable[..., Any]
    if naming == "timm":
        import timm

        make = timm.create_model
    else:
        from torchvision import models  # pyright: ignore[reportMissingTypeStubs]  # torchvision has none

        make = models.get_model
    keywords: Mapping[str, Any] = {} if classes is None else {"num_classes": classes}
    from convert.formats._torch import as_tensor

    for architecture in architectures(naming, names.lineage(family)):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                network = make(architecture, **keywords).eval()
                network.load_state_dict({name: as_tensor(stored.array()) for name, stored in source.tensors.items()})
                images = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type
                made = network(images)
        except (RuntimeError, ValueError, KeyError, TypeError):  # not this one; a file with unusual options has no home to go to
            continue
        return AtHome(made.numpy(), f"{naming} {importlib.metadata.version(naming)}, {architecture}")
    return f"{naming} builds no such network from its defaults"


def architectures(naming: str, family: Sequence[str]) -> list[str]:
    """Guess what torchvision and timm call a variant, the likelier first."""
    if not family:
        return []
    snake = re.sub(r"(?<=[a-z])V(\d)", r"_v\1", family[0])
    plain = re.sub(r"^WideResNet", "wide_resnet", snake).lower()
    plain = re.sub(r"^efficientnetb", "efficientnet_b", plain)
    plain = re.sub(r"(v3)(large|small)$", r"\1_\2", plain)
    if naming == "torchvision":
        return [plain]
    close = family[0].lower()
    hundred = {"mobilenet_v1": "mobilenetv1_100", "mobilenet_v2": "mobilenetv2_100", "mobilenet_v3_large": "mobilenetv3_large_100"}
    hundred["mobilenet_v3_small"] = "mobilenetv3_small_100"
    return list(dict.fromkeys((hundred.get(plain, plain), close, f"legacy_{plain}", f"tf_{plain}")))
