"""What BSON and JLD2 share beyond values: how modules nest in a state, what a file written here says of itself, who wrote it."""

# ruff: noqa: RUF001 - Flux names its fields in Greek

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from convert._guard import MAX_FACT
from convert.formats import _flux
from convert.formats._flux import NORM_LEAVES, layout_of
from convert.formats._julia import Array
from convert.kinds import is_dict, is_mapping, is_row
from convert.source import Convention, Part, Source, Stored, laid_out
from weights.errors import ConvertError, UnsupportedFormat

RECORD = "kernelzoo"
"""The entry in which a file written here keeps its convention and metadata."""
FIELDS = {leaf: name for name, leaf in NORM_LEAVES.items() if name != "σ"}
SKIPPED = ("num_batches_tracked",)

Leaf = Callable[[Stored], Any]


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Put the file's name before an error that lacks it."""
    try:
        yield
    except ConvertError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def tree(parts: Sequence[Part], convention: Convention, leaf: Leaf) -> dict[str, Any]:
    """Nest the modules by the dots of their names, with Flux's field names and arrays with reversed axes.

    Args:
        parts: the modules.
        convention: what the written kernels are to be used by; those of true convolution are flipped.
        leaf: makes what stands for an array, which has its name and axes reversed, and comes C-contiguous.

    Raises:
        UnsupportedFormat: a module's name is also a tensor's, or one name comes twice.
    """
    root: dict[str, Any] = {}
    for part in parts:
        here = root
        for step in part.name.split(".") if part.name else []:
            here = here.setdefault(step, {})
            if not is_dict(here) or "tag" in here:
                raise UnsupportedFormat(f"module {part.name!r} lies inside a tensor")
        for name, stored in part.leaves.items():
            if name in SKIPPED:
                continue
            field = FIELDS.get(name, name) if part.kind == "norm" else name
            if field in here:
                raise UnsupportedFormat(f"{part.name}.{name} is there twice")
            here[field] = leaf(_raw(part, name, stored, convention))
        if part.kind in ("conv", "depthwise", "transposed") and "weight" in part.leaves and convention == "convolution":
            here["groups"] = part.groups  # Conv has groups and CrossCor has not: it is what tells them apart
    return root


def document(parts: Sequence[Part], convention: Convention, metadata: Mapping[str, str] | None, leaf: Leaf) -> dict[str, Any]:
    """Make the top level of a file: the network's state, and the file's own record; arguments and errors as in `tree`."""
    record = {"convention": convention, "spatial": "hw", **dict(sorted((metadata or {}).items()))}
    return {"model_state": tree(parts, convention, leaf), RECORD: record}


def _raw(part: Part, leaf: str, stored: Stored, convention: Convention) -> Stored:
    axes, raw = len(stored.shape), stored
    kind = "conv" if part.kind == "depthwise" else part.kind
    if leaf == "weight" and kind in ("conv", "transposed", "linear") and 2 <= axes <= 5:
        raw = laid_out(stored, kind, layout_of(kind, axes), flipped=convention == "convolution")
    return Stored(f"{part.name}.{leaf}", raw.shape, raw.dtype, lambda: np.ascontiguousarray(raw.array()))


def fill(source: Source, top: Mapping[str, Any], types: set[str], *, state_only: bool) -> Any:
    """Put into `source` what the top level of a file holds, and return the value that the network is.

    Args:
        source: without tensors yet.
        top: names and values.
        types: that the file names.
        state_only: as `_flux.Walk` takes it.
    """
    chosen, notes = _flux.choose(top)
    source.notes += notes
    root = next(iter(chosen.values())) if len(chosen) == 1 else dict(chosen)
    if len(chosen) == 1:
        source.facts["entry"] = next(iter(chosen))
    if is_dict(root) and _flux.is_caffe2(root):
        source.tensors, source.framework, source.spatial = _flux.caffe2(root), "Metalhead.jl 2018 (from Caffe2)", "hw"
        source.notes.append("Caffe2's names: cross-correlation kernels, which Metalhead flipped while it loaded them; not to be flipped")
    elif is_row(root) and _flux.is_positional(root):
        source.tensors, source.positional, source.layout = _flux.positional(root), True, _flux.layout()
        source.framework = "Flux.jl, a list of parameters"
        source.notes.append(_flux.LIST_NOTE)
    elif chosen:
        walk = _flux.Walk(state_only=state_only, recorded=_foreign(top.get(RECORD), source))
        walk.run(root, next(iter(chosen)) if isinstance(root, Array) else "")
        source.tensors = walk.tensors
        source.notes += walk.notes
        source.framework, source.spatial = _framework(types, source, root)
    if not source.tensors:
        source.notes.append("no arrays of numbers in it")
    return root


def _foreign(record: Any, source: Source) -> Convention | None:
    """Take what a file written here says of itself into `source`; tell the convention if it says one."""
    if not is_mapping(record):
        return None
    source.facts |= {str(key): str(value)[:MAX_FACT] for key, value in record.items() if isinstance(value, str)}
    said = record.get("convention")
    return cast("Convention", said) if said in ("convolution", "correlation") else None


def _framework(types: set[str], source: Source, root: Any) -> tuple[str, Literal["hw", "unknown"]]:
    """Tell who wrote a tree of layers, and how its images lie: Metalhead's are (W, H, C, N), which reversed is ours."""
    metalhead = any("Metalhead" in name.split(".") for name in types) or _wrapped(root)
    if source.facts.get("spatial") == "hw" and "convention" in source.facts:
        return "Flux.jl (written by kernelzoo)", "hw"
    if metalhead:
        return "Metalhead.jl", "hw"
    if "Flux.Tracker.TrackedArray" in types:
        return "Flux.jl 0.4 to 0.7, a whole model", "unknown"
    if "Tracker.TrackedArray" in types:
        return "Flux.jl 0.8 or 0.9, a whole model", "unknown"
    flux = any(name.startswith(("Flux.", "NNlib.", "Zygote.", "Tracker.")) for name in types)
    state = is_dict(root) and "layers" in root
    return ("Flux.jl, a whole model" if flux else "Flux.jl, a state" if state else "Julia"), "unknown"


def _wrapped(root: Any) -> bool:
    """Tell a state of one of Metalhead's models: a struct with the one field `layers` around a Chain, which has the same."""
    for _ in range(2):
        if not is_dict(root) or list(root) != ["layers"]:
            return False
        root = root["layers"]
    return not is_dict(root) or "layers" not in root
