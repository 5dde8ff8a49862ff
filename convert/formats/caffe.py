"""Caffe's trained networks, .caffemodel: layers of all three generations with their tensors, in Protocol Buffers' wire format.

Kernels are OIHW and cross-correlation, dense weights (out, in) over CHW: PyTorch's form. What is not: a BatchNorm keeps sums and
the factor to divide them by, its gamma and beta are another layer's, and old files put ones before every short shape. A network
that MATLAB fed (MTCNN's) has width for height, and nothing in its file says so: `--spatial wh` does.

Source: https://github.com/BVLC/caffe, src/caffe/proto/caffe.proto and src/caffe/layers.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Any

from convert import _guard
from convert.formats import _caffe_prototxt as prototxt
from convert.formats import _caffe_schema as schema
from convert.formats import _caffe_wire as wire
from convert.formats._caffe_graph import graph
from convert.formats._caffe_layers import NORMS, Layer, lacking, layers, tensors
from convert.formats._mapped import beside, mapped
from convert.formats._wire import Budget, Message, message, one
from convert.graph import Graph
from convert.source import Source
from weights.errors import ConvertError, MalformedFile
from weights.wording import counted

SUFFIXES = (".caffemodel",)
WRITES = False
WEAK = True

MAX_MEAN_BYTES = 64 * 2**20
CONVENTION = "Nothing here says how images are prepared. Caffe's networks mostly want BGR on 0..255 less a mean of each channel."


def sniff(path: Path, head: bytes) -> bool:
    """Tell a NetParameter: it begins with its name, an input, or a layer whose first field is its name, type or bottom."""
    if not head or head[0] not in (0x0A, 0x12, 0x1A, 0xA2):
        return False
    if head.startswith(b"\xa2\x06"):  # field 100, layers of today
        body = _body(head, 2)
        return body in (0x0A, 0x12, 0x1A, 0x22)
    if head[0] == 0x12:  # field 2, layers of the second generation
        body = _body(head, 1)
        return body in (0x0A, 0x12, 0x1A, 0x22, 0x28) and path.name.endswith(".caffemodel")
    length = head[1] if len(head) > 1 else 0
    text = head[2 : 2 + length]
    behind = head[2 + length : 4 + length]
    printable = length < 0x80 and len(text) == length and all(32 <= byte < 127 for byte in text)
    fits = behind[:1] in (b"\x12", b"\x1a", b"\x20", b"\x2a", b"\x42") or behind == b"\xa2\x06"
    return printable and fits and (path.name.endswith(".caffemodel") or behind == b"\xa2\x06")


def read(path: Path) -> Source:
    """Open a network; a .prototxt of the same name, or the only one in the folder, says what its layers do.

    Raises:
        ConvertError: the file is damaged, or claims more than it can hold.
    """
    with _guard.reading(path, "Caffe network"):
        net = message(mapped(path), schema.NET, Budget(wire.MAX_FIELDS), wire.values)
        if not schema.layers(net):
            raise MalformedFile(f"{path} has no layers")
        description, said, notes = _description(path, net)
        running, others = layers(net, description)
        found = {f"{layer.name}.{leaf}": stored for layer in (*running, *others) for leaf, stored in tensors(layer).items()}
        _guard.check(path, found.values(), path.stat().st_size)
        if not found:
            raise MalformedFile(f"{path} has {len(running)} layers and no tensor: it describes a network and holds none")
        notes += _remarks(running, others)
        facts = {"network": one(net, "name", ""), "layers": _generation(net)} | ({"prototxt": said} if said else {})
        preparation = _preprocessing(path, [net, *([description] if description else [])])
        return Source(
            path,
            "caffe",
            f"Caffe, {_generation(net)}",
            found,
            graph=_graph(description or net, running, notes),
            facts={name: fact for name, fact in facts.items() if fact},
            preprocessing=preparation,
            notes=[*notes, *([] if preparation else [CONVENTION])],
            beside=(said,) if said else (),
        )


def _description(path: Path, net: Message) -> tuple[Message | None, str, list[str]]:
    """Read the .prototxt, if there is one that fits; a bad one costs the graph, not the tensors."""
    found = beside(path, ".prototxt")
    if found is None:
        return None, "", []
    try:
        with _guard.reading(found, "description of a network"):
            description = prototxt.read(found)
            missing = lacking(net, description)
    except ConvertError as error:
        return None, "", [f"{found.name} is left out: {error}"]
    if not schema.layers(description):
        return None, "", []
    if missing is not None:
        return (
            None,
            "",
            [f"{found.name} is left out: it describes another network, with a layer {missing!r} that {path.name} has no tensors for"],
        )
    return description, found.name, []


def _graph(net: Message, running: list[Layer], notes: list[str]) -> Graph | None:
    if not any(layer.bottoms for layer in running):
        notes.append("The file does not say which layer reads which, so there is no graph.")
        return None
    try:
        return graph(net, running)
    except (ValueError, TypeError, RecursionError, KeyError, OverflowError) as error:
        notes.append(f"What the layers say does not make a graph: {error}")
        return None


def _generation(net: Message) -> str:
    if net.get("layer"):
        return "layers of 2014 and later"
    return "layers of 2013" if any("layer" in layer for layer in net.get("layers", [])) else "layers of 2014"


def _remarks(running: list[Layer], others: list[Layer]) -> list[str]:
    notes: list[str] = []
    if others:
        names = ", ".join(layer.name for layer in others[:5])
        notes.append(f"not in the description, and in no graph: {counted(len(others), 'layer')} with tensors, {names}.")
    for layer in running:
        p = one(layer.message, "batch_norm_param", {})
        if layer.kind == "BatchNorm" and not one(p, "use_global_stats", True):
            notes.append(f"{layer.name} normalises by each batch's own statistics; the stored ones are used.")
        if layer.kind in NORMS and len(layer.blobs) > 3:
            notes.append(f"{layer.name} is a fork's {layer.kind} of {len(layer.blobs)} blobs, taken in that fork's order.")
    return notes[:50]


def _preprocessing(path: Path, nets: list[Message]) -> dict[str, Any]:
    """Tell how images are prepared, where a data layer or a mean image says it; means and deviations on 0..1, in BGR."""
    for layer in (layer for net in reversed(nets) for layer in schema.layers(net)):
        p = one(layer, "transform_param", {})
        if not any(name in p for name in ("mean_value", "mean_file", "scale")):
            continue
        means = [float(mean) for mean in p.get("mean_value", [])] or _mean(path, one(p, "mean_file", ""))
        return _prepared(means, one(p, "scale", 1.0))
    means = _mean(path, "")
    return _prepared(means, 1.0) if means else {}


def _prepared(means: list[float], scale: float) -> dict[str, Any]:
    width = max(3, len(means))
    made: dict[str, Any] = {"channel_order": "bgr", "range": 255}
    if means:
        made["mean"] = tuple(mean / 255 for mean in (means * width if len(means) == 1 else means))
    if scale > 0 and math.isfinite(scale):
        made["std"] = (1 / (255 * scale),) * len(made.get("mean", (0,) * width))
    return made


def _mean(path: Path, wanted: str) -> list[float]:
    """Read the mean image beside the file, the one that is named or the only one, as the mean of each channel."""
    named = path.parent / PurePosixPath(wanted.replace("\\", "/")).name if wanted else None
    found = named if named is not None and named.is_file() else beside(path, ".binaryproto")
    if found is None or found.stat().st_size > MAX_MEAN_BYTES:
        return []
    try:
        with _guard.reading(found, "mean image"):
            blob = wire.blob(mapped(found), Budget())
            if len(blob.shape) != 4 or not blob.count or blob.shape[1] > 16:
                return []
            return blob.load().reshape(blob.shape).mean((0, 2, 3), dtype="f8").tolist()
    except ConvertError:
        return []


def _body(head: bytes, at: int) -> int | None:
    """Tell the first byte of a message whose length begins at `at`."""
    while at < len(head) and head[at] >= 0x80:
        at += 1
    return head[at + 1] if at + 1 < len(head) else None
