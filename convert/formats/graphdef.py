"""TensorFlow's frozen graphs, .pb: operations and, as constants among them, the weights; read without TensorFlow.

Kernels are HWIO, depthwise ones HWCM, dense ones (in, out), all of cross-correlation. A SavedModel keeps its weights in a checkpoint, and
is read as one.
"""

from __future__ import annotations

import re
from pathlib import Path

from convert import _guard
from convert.formats import _tf_nodes, _tf_ops
from convert.formats._mapped import mapped
from convert.formats._wire import varint
from convert.source import Source
from weights.errors import MalformedFile
from weights.wording import counted

SUFFIXES = (".pb",)
WRITES = False

OPERATION = re.compile(rb"_?[A-Z]\w*\Z")


def sniff(path: Path, head: bytes) -> bool:
    """Tell it by its first node: a name, and an operation called as TensorFlow calls them."""
    del path
    try:
        if head[:1] != b"\n":
            return False
        view = memoryview(head)
        length, at = varint(view, 1)
        end = at + length
        if head[at : at + 1] != b"\n":
            return False
        size, at = varint(view, at + 1)
        at += size
        if size > 1000 or head[at : at + 1] != b"\x12":
            return False
        size, at = varint(view, at + 1)
    except MalformedFile:
        return False
    return 0 < size < 100 and at + size <= end and OPERATION.match(head[at : at + size]) is not None


def read(path: Path) -> Source:
    """Open a frozen graph.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "TensorFlow graph"):
        data = mapped(path)
        nodes, functions = _tf_nodes.parse(data)
        variables = sum(node.op in ("VariableV2", "VarHandleOp", "Variable") for node in nodes)
        if variables and not any(node.held is not None and len(node.held.shape) > 1 for node in nodes):
            raise MalformedFile(
                f"{path} is a graph whose {counted(variables, 'variable')} lie in a checkpoint; name that (its .index), or freeze the graph"
            )
        notes = [f"{counted(functions, 'function')} that the graph may call were left out"] if functions else []
        said = _tf_ops.said(nodes)
        return said.finished(path, "graphdef", "TensorFlow, frozen graph", len(data), "TensorFlow graph", notes=notes)
