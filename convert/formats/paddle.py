"""PaddlePaddle's .pdparams (a pickle, read as data) and .pdiparams with the .pdmodel beside it, which says what the network computes.

Kernels are OIHW, dense weights (in, out). Of PaddlePaddle 3's programs, .json, the weights are read by their names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert import _guard
from convert.formats import _paddle_ops, _pickles
from convert.formats._mapped import Maps, stored
from convert.formats._paddle_ops import DTYPES, Program, Variable
from convert.formats._wire import Budget, message, one, schema
from convert.kinds import is_dict
from convert.source import Source, Stored
from convert.steps import from_layout
from weights.documents import json_file
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

SUFFIXES = (".pdparams", ".pdiparams", ".pdmodel", ".json")
WRITES = False

DESCRIPTION = schema("int dtype 1, ints dims 2")
PARAMETER = "p"
"""What a parameter is called among the operations of PaddlePaddle 3's programs."""
NORM = {"w_0": "weight", "b_0": "bias", "w_1": "running_mean", "w_2": "running_var"}
MOST_BYTES = 256 * 2**20
LEAVES = {"_mean": "running_mean", "_variance": "running_var"}


def sniff(path: Path, head: bytes) -> bool:
    """Tell a program by its first block, arrays by how the first one begins, a pickle by its ending, for pickles begin alike."""
    if path.suffix == ".pdparams" and head.startswith(b"\x80"):
        return True
    if _is_new(head):
        return True
    if head.startswith(bytes(16)) and head[20:21] == b"\x08":
        return 0 < int.from_bytes(head[16:20], "little") < 128
    block = b"\x08\x00\x10" + b"\xff" * 9 + b"\x01"  # number 0, without a parent
    return head[:1] == b"\n" and block in head[2 : 8 + len(block)]


def _is_new(head: bytes) -> bool:
    return head.lstrip()[:1] == b"{" and b'"magic"' in head[:200] and b'"pir"' in head[:200]


def read(path: Path) -> Source:
    """Open a file of parameters, or a program by either of its two files.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "Paddle file"):
        files = Maps()
        data = files.view(path)
        if bytes(data[:1]) == b"\x80":
            return _pickled(path, data)
        described = path.with_suffix(".json")
        if path.suffix == ".json" or (not path.with_suffix(".pdmodel").exists() and described.is_file()):
            return _of_names(path, described, files)
        program, params = (path.with_suffix(suffix) for suffix in (".pdmodel", ".pdiparams"))
        for other, holds in ((program, "the names and what is computed"), (params, "the weights")):
            if other.is_symlink() or not other.is_file():
                raise MalformedFile(f"{path.name} needs {other.name} beside it, which has {holds}. Fetch it too")
        described = _paddle_ops.parse(files.view(program))
        arrays = _arrays(files.view(params), described)
        said = _paddle_ops.said(described, arrays)
        return said.finished(
            path,
            "paddle",
            "PaddlePaddle",
            files.size_bytes,
            "Paddle file",
            facts={"program": program.name},
            notes=said.notes,
            close=files.close,
            beside=files.others(path),
        )


def _of_names(path: Path, described: Path, files: Maps) -> Source:
    """Describe the weights of a program of PaddlePaddle 3's, whose parameters tell their names and shapes; what it computes is not read."""
    params = path.with_suffix(".pdiparams")
    for other, holds in ((described, "the names"), (params, "the weights")):
        if other.is_symlink() or not other.is_file():
            raise MalformedFile(f"{path.name} needs {other.name} beside it, which has {holds}. Fetch it too")
    told = json_file(described, most_bytes=MOST_BYTES)
    files.view(described)
    variables: dict[str, Variable] = {}
    regions: list[Any] = list(told["program"]["regions"]) if is_dict(told) else []
    operations: list[Any] = [each for region in regions[:1] for block in region["blocks"][:1] for each in block["ops"]]
    for operation in operations:
        if operation.get("#") == PARAMETER:
            name, dims = operation["A"][3], operation["O"]["TT"]["D"][1]
            if not isinstance(name, str) or name in variables:
                raise MalformedFile(f"{described} names a parameter {name!r:.100} twice, or has one without a name")
            variables[name] = Variable(tuple(int(n) for n in dims), True)
    if not variables:
        raise MalformedFile(f"{described} names no parameters, so it is no program of PaddlePaddle 3's with weights")
    found: dict[str, Stored] = {}
    for name, held in _arrays(files.view(params), Program(variables, [])).items():
        module, _, leaf = name.rpartition(".")
        plain = (NORM if "norm" in module else {"w_0": "weight", "b_0": "bias"}).get(leaf, leaf)
        dense = plain == "weight" and len(held.shape) == 2 and "embedding" not in module
        kernel = plain == "weight" and len(held.shape) > 2
        steps = from_layout("linear", "IO", held.shape) if dense else ()
        found[f"{module}.{plain}" if module else plain] = replace(held, steps=steps, convention="correlation" if kernel else None)
    if len(found) < len(variables):
        raise MalformedFile(f"{described}: two of its parameters have one name")
    _guard.check(path, found.values(), files.size_bytes)
    notes = ["a program of PaddlePaddle 3's is not read, its weights are: a network of ours must say what they are for"]
    guarded = {name: _guard.guarded(held, path, "Paddle file") for name, held in found.items()}
    return Source(path, "paddle", "PaddlePaddle 3", guarded, notes=notes, beside=files.others(path), close=files.close)


def _pickled(path: Path, data: memoryview) -> Source:
    """Describe a state dict: arrays by name, some with the name that they had in the program."""
    tree = _pickles.opened(_pickles.load(data, path))
    if not is_dict(tree):
        raise MalformedFile(f"{path} holds a {type(tree).__name__}, not a state dict")
    found: dict[str, Stored] = {}
    left = 0
    for place, held in _pickles.arrays(tree).items():
        if held.stored_dtype.kind not in "fV" and len(held.stored_shape) < 2:
            left += 1
            continue
        names = place[:-1] if len(place) > 1 and place[-1] == "1" else place  # (name, array), as programs are saved
        module, _, leaf = ".".join(names).rpartition(".")
        name = ".".join(filter(None, (module, LEAVES.get(leaf, leaf))))
        if name in found:
            raise MalformedFile(f"{path} has two arrays called {name!r:.100}")
        axes = len(held.stored_shape)
        steps = from_layout("linear", "IO", held.stored_shape) if leaf == "weight" and axes == 2 else ()
        kernel = leaf == "weight" and axes > 2
        found[name] = replace(held, origin=".".join(place), steps=steps, convention="correlation" if kernel else None)
    if not found:
        raise MalformedFile(f"{path} holds no arrays; its keys are {', '.join(str(key)[:40] for key in list(tree)[:10])}")
    _guard.check(path, found.values(), len(data))
    notes = [f"left out: {left} that are no weights"] if left else []
    return Source(path, "paddle", "PaddlePaddle", {n: _guard.guarded(s, path, "Paddle file") for n, s in found.items()}, notes=notes)


def _arrays(data: memoryview, program: Program) -> Mapping[str, Stored]:
    """Read the arrays of a program, which stand in the alphabetical order of their names."""
    names = sorted(name for name, variable in program.variables.items() if variable.kept)
    found: dict[str, Stored] = {}
    at = 0
    for name in names:
        version, levels = struct.unpack_from("<IQ", data, at)
        if version or levels:
            raise UnsupportedFormat(f"{name:.100} is written in version {version} with {levels} levels of detail; 0 and 0 are read")
        _, size = struct.unpack_from("<Ii", data, at + 12)
        if not 0 < size < 4096 or at + 20 + size > len(data):
            raise MalformedFile(f"{name:.100}: its description has {size} bytes")
        told = message(data[at + 20 : at + 20 + size], DESCRIPTION, Budget(10_000))
        shape, kind = tuple(told.get("dims", [])), DTYPES.get(one(told, "dtype", -1))
        if len(shape) > _guard.MAX_RANK or kind is None:
            raise LimitExceeded(f"{name:.100} has {len(shape)} axes, or numbers of a kind that is not read")
        dtype = _guard.dtype_of(kind)
        begin = at + 20 + size
        at = begin + math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or at > len(data) or shape != program.variables[name].dims:
            raise MalformedFile(
                f"{name:.100} has shape {shape} in the weights and {program.variables[name].dims} in the program: "
                "the two files don't belong together, or one is cut short"
            )
        found[name] = stored(name, data[begin:at], dtype, shape)
    if at != len(data):
        raise MalformedFile(f"{len(data) - at} bytes are left behind the last array: the two files don't belong together")
    return found
