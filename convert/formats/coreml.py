"""Core ML's .mlmodel, a neural network with its weights, and .mlpackage, an ML program with its own; read without Apple's libraries.

Kernels are OIHW, dense weights (out, in). Weights in half precision or in few bits are read as the reals that they stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert import _guard
from convert.formats import _coreml_ops, _coreml_program
from convert.formats._mapped import Maps
from convert.formats._onnx_pixels import preparation
from convert.formats._wire import Budget, message, one, schema, varint
from convert.graph import Graph
from convert.source import Source
from weights.errors import MalformedFile, UnsafeFormat, UnsupportedFormat

SUFFIXES = (".mlmodel", ".mlpackage")
WRITES = False

MOST_VERSION = 32
IMAGE = schema("int width 1, int height 2, int space 3")
FEATURE = schema("string name 1, kind types 3", kind=schema("image images 4, array arrays 5", image=IMAGE, array=schema("ints shape 1")))
MODEL = schema(
    """int version 1, description descriptions 2, bytes regressor 303, bytes classifier 403, bytes network 500, bytes program 502,
    bytes pipeline 200, bytes pipeline 201, bytes pipeline 202""",
    description=schema(
        "feature inputs 1, feature outputs 10, metadata metadata 100",
        feature=FEATURE,
        metadata=schema("string about 1, string version 2, string author 3, string licence 4"),
    ),
)
SPACES = {10: "gray", 20: "rgb", 30: "bgr"}


def sniff(path: Path, head: bytes) -> bool:
    """Tell a model by its version and the description behind it, a package by the folder that has a model in it."""
    if path.is_dir():
        return _inside(path) is not None
    try:
        version, at = varint(memoryview(head), 1) if head[:1] == b"\x08" else (0, 1)
        if not 0 < version <= MOST_VERSION or head[at : at + 1] != b"\x12":
            return False
        size, at = varint(memoryview(head), at + 1)
    except MalformedFile:
        return False
    inner = head[at : at + 3]  # ONNX has a text there, which begins with no line feed
    return size > 2 and (inner[:1] == b"\n" or inner[:2] == b"\xa2\x06")


def read(path: Path) -> Source:
    """Open a model, or a package.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "Core ML model"):
        inside = _inside(path) if path.is_dir() else path
        if inside is None:
            raise MalformedFile(f"{path} is a folder without a model in Data/com.apple.CoreML")
        files, budget = Maps(), Budget()
        told = message(files.view(inside), MODEL, budget)
        described = one(told, "descriptions", dict[str, Any]())
        about = one(described, "metadata", dict[str, Any]())
        facts = {key: one(about, key, "")[:1000] for key in ("about", "author", "licence") if one(about, key, "")}
        framework = f"Core ML, specification {one(told, 'version', 0)}"
        if "program" in told:
            return _coreml_program.read(path, inside, told["program"][-1], files, framework, facts)
        network = next((told[kind][-1] for kind in ("network", "classifier", "regressor") if kind in told), None)
        if network is None:
            what = "a pipeline of several models; read the network's own file" if "pipeline" in told else "no neural network"
            raise UnsupportedFormat(f"{path} is {what}")
        said = _coreml_ops.said(network, described, budget)
        return said.finished(
            path,
            "coreml",
            framework,
            files.size_bytes,
            "Core ML model",
            facts=facts,
            notes=said.notes,
            close=files.close,
            preprocessing=lambda graph: _preprocessing(graph, described),
        )


def _inside(folder: Path) -> Path | None:
    found = sorted((folder / "Data" / "com.apple.CoreML").glob("*.mlmodel"))
    if len(found) == 1 and found[0].is_symlink():
        raise UnsafeFormat(f"{found[0]} is a link; only plain files are read")
    return found[0] if len(found) == 1 else None


def _preprocessing(graph: Graph | None, described: dict[str, Any]) -> dict[str, Any]:
    """Say what is done to an image, in which order its channels are, and that their values go to 255."""
    kinds = [kind for feature in described.get("inputs", []) for kind in feature.get("types", [])]
    spaces = [SPACES.get(one(image, "space", 0)) for kind in kinds for image in kind.get("images", [])]
    told = preparation(graph)
    if graph is None or not spaces or spaces[0] in (None, "gray"):
        return told
    return {**told, "channel_order": spaces[0], "range": "0..255"}
