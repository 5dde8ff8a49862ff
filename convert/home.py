"""What a checkpoint computes at home: the outputs of the framework that wrote it, where that is installed. The strongest proof there is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert import _framework, names, sandbox
from convert.source import Source
from weights.errors import ReaderUnavailable

NO_FRAMEWORK = "no framework that is run here takes files of the format {}"
"""Why there are no outputs of a format's files, whatever is installed."""
NO_GRAPH = "the file holds weights and no graph"
"""Why nothing can run a file."""


@dataclass(frozen=True, slots=True)
class AtHome:
    """What the source's own framework computed.

    Attributes:
        outputs: one row an image: (B, classes), or maps channels first, (B, C * H * W).
        by: the framework and its version, "onnxruntime 1.31.1".
    """

    outputs: np.ndarray
    by: str


def outputs(
    source: Source, inputs: np.ndarray, *, naming: str = "", family: type | str = "", classes: int | None = None, isolated: bool = True
) -> AtHome | str:
    """Let the framework that wrote a file run it, in a process of its own.

    No code of the file is run: a graph with an operation that nothing here knows (a Lambda layer) is not given to a framework.
    torchvision and timm build their networks here, of tensors that a reader has handed over: they are given no file.

    Args:
        source: the open file.
        inputs: float32 (B, C, H, W), as that network wants them.
        naming: the table of `convert.names` that explained the file.
        family: the network's class.
        classes: of the network.
        isolated: False runs the file in this process, see `convert.sandbox`.

    Returns:
        The outputs, or why there are none: "keras is not installed".

    Raises:
        ReaderCrashed: the file brought its framework down.
    """
    library = _framework.LIBRARIES.get(source.format)
    if library is None and naming in ("torchvision", "timm") and source.format in ("pytorch", "safetensors"):
        return _library(naming, source, inputs, family, classes)
    if source.graph is None:
        return NO_GRAPH
    if library is None:
        return NO_FRAMEWORK.format(source.format)
    if source.graph.unknown:
        return f"the graph holds {', '.join(source.graph.unknown)}, which is not run"
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    if source.format == "keras" and source.path.suffix != ".keras":
        return "only .keras files are run, for older ones are not safe with every version of Keras"
    last = source.graph.nodes[0].attrs.get("layout", "nhwc") == "nhwc"
    try:
        made = sandbox.run(source.path, source.format, np.ascontiguousarray(inputs, np.float32), last=last, isolated=isolated)
    except ReaderUnavailable as error:  # a library that is installed and doesn't start is no word against the file
        return str(error)
    return made if isinstance(made, str) else AtHome(*made)


def _library(naming: str, source: Source, inputs: np.ndarray, family: type | str, classes: int | None) -> AtHome | str:
    """Let torchvision or timm, whose file it is, build the network and run it."""
    if importlib.util.find_spec(naming) is None:
        return f"{naming} is not installed"
    import torch

    library: Any = importlib.import_module("timm" if naming == "timm" else "torchvision.models")
    make: Callable[..., Any] = library.create_model if naming == "timm" else library.get_model
    keywords: Mapping[str, Any] = {} if classes is None else {"num_classes": classes}
    from convert.formats._torch import as_tensor

    for architecture in architectures(naming, names.lineage(family)):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                network = make(architecture, **keywords).eval()
                tensors = network.state_dict()  # emptied, it still says versions, without which torchvision's MNASNet takes nothing
                computed = {name: tensor for name, tensor in tensors.items() if name.endswith(names.COMPUTED)}
                tensors.clear()
                tensors.update(computed)
                tensors.update({name: as_tensor(stored.array()) for name, stored in source.tensors.items()})
                network.load_state_dict(tensors)
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
    plain = re.sub(r"^inceptionresnet", "inception_resnet", plain)
    plain = re.sub(r"(v3)(large|small)$", r"\1_\2", plain)
    plain = re.sub(r"^regnet(?=[xy])", "regnet_", plain)
    if naming == "torchvision":
        return [plain]
    close = family[0].lower()
    if regnet := re.fullmatch(r"regnet([xy])_(\d+)(?:_(\d))?([mg])f", close):
        kind, whole, tenth, unit = regnet.groups()  # timm counts hundreds of MF, and some have a twin of torchvision's widths
        size = int(whole) // 100 if unit == "m" else 10 * int(whole) + int(tenth or 0)
        return [f"regnet{kind}_{size:03}_tv", f"regnet{kind}_{size:03}"]
    if swin := re.fullmatch(r"swin_(v2_)?([tsbl])", close):
        size = {"t": "tiny", "s": "small", "b": "base", "l": "large"}[swin[2]]
        return [f"swinv2_{size}_window8_256" if swin[1] else f"swin_{size}_patch4_window7_224"]
    hundred = {"mobilenet_v1": "mobilenetv1_100", "mobilenet_v2": "mobilenetv2_100", "mobilenet_v3_large": "mobilenetv3_large_100"}
    hundred["mobilenet_v3_small"] = "mobilenetv3_small_100"
    return list(dict.fromkeys((hundred.get(plain, plain), close, f"legacy_{plain}", f"tf_{plain}")))
