"""Flax's parameter trees: which leaf is what, and how each kind of layer is stored; the same in every container that Flax uses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from convert._guard import MAX_TENSORS
from convert.core import COUNTER
from convert.source import Convention, Part, Stored, laid_out, reflattened
from convert.steps import Reshape, Step, Transpose, from_layout
from weights.errors import ConvertError, LimitExceeded

Path = tuple[str, ...]

TRANSPOSED = re.compile(r"conv_?transpose|transposed?_?conv|deconv", re.IGNORECASE)
"""A module's name that says it is a ConvTranspose; its kernel has the shape of a Conv's."""
ATTENTION = re.compile(r"attention|^(query|key|value|out)$", re.IGNORECASE)
"""Modules whose kernels are no convolutions though they have three axes."""
INTO_HEADS, OUT_OF_HEADS = ("query", "key", "value"), "out"
"""Dense layers of attention: kernels of (in, heads, channels), and of (heads, channels, out)."""
OPTIMISED = ("opt", "target")
"""Where an optimiser of Flax's first years keeps the parameters."""
STACKED = "encoderblock"
"""The module in which big_vision's `scan` keeps all blocks of a vision transformer."""
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
STATISTICS = ("mean", "var")
OWN = "_"
"""Ends the name of a tensor whose own name is one of Flax's leaves: of a module's `scale` that is no weight there."""
LAYOUTS = {2: "IO", 3: "WIO", 4: "HWIO", 5: "DHWIO"}
"""How kernels of so many axes are stored. A ConvTranspose's too, with the channels that go in before those that come out."""
SKIPPED = ("opt_state", "optimizer", "opt", "tx", "rngs", "rng", "step", "ema", "ema_params", "dropout_rng")
"""What a training state has beside the weights."""


def weights(flat: Mapping[Path, Stored]) -> tuple[dict[Path, Stored], list[str]]:
    """Find the parameters and the running statistics in whatever was saved: variables, a TrainState, or the bare parameters.

    Returns:
        The tensors by module and leaf, without the names of the collections; and notes of what was left out.
    """
    flat = {path[2:]: stored for path, stored in flat.items() if path[:2] == OPTIMISED and len(path) > 2} or flat
    left = {path: stored for path, stored in flat.items() if not any(part in SKIPPED for part in path[:-1]) and path[-1] not in SKIPPED}
    roots = [path[: path.index("params")] for path in left if "params" in path[:-1]]
    found = dict(left)
    if roots:
        root = min(roots, key=len)
        found = {path[len(root) + 1 :]: stored for path, stored in left.items() if path[: len(root) + 1] == (*root, "params")}
        statistics = [(path, path.index("batch_stats")) for path in left if "batch_stats" in path[:-1]]
        # a train state may keep them one level away from the parameters; two sets of them are two networks
        nearest = min((path[:at] for path, at in statistics), key=lambda prefix: (prefix != root, len(prefix)), default=())
        found |= {path[at + 1 :]: left[path] for path, at in statistics if path[:at] == nearest}
        while found and all(path[0] in ("params", "batch_stats") and len(path) > 1 for path in found):
            found = {path[1:]: stored for path, stored in found.items()}
    found = {path[:-1] if path[-1] in ("value", "raw_value") and len(path) > 1 else path: stored for path, stored in found.items()}
    kept = {id(stored) for stored in found.values()}
    gone = sorted({path[0] for path, stored in flat.items() if id(stored) not in kept})
    return found, [f"left out what is no weight: {', '.join(gone)}"] if gone else []


def canonical(found: Mapping[Path, Stored]) -> dict[str, Stored]:
    """Give the tensors PyTorch's leaf names and the steps to its form."""
    tensors: dict[str, Stored] = {}
    for path, stored in unstacked(found).items():
        name, described = _described(path, stored)
        if name in tensors:
            raise ConvertError(f"{tensors[name].origin} and {stored.origin} are the same tensor of one network: {name}")
        tensors[name] = described
    return tensors


def unstacked(found: Mapping[Path, Stored]) -> dict[Path, Stored]:
    """Take blocks apart that big_vision's `scan` keeps in one tensor, the first axis of which counts them.

    Raises:
        ConvertError: its tensors are of different numbers of blocks.
        LimitExceeded: there would be more tensors than any network has.
    """
    stacked = {path: stored for path, stored in found.items() if STACKED in path[:-1]}
    counts = {stored.stored_shape[0] if stored.stored_shape else 0 for stored in stacked.values()}
    if not stacked:
        return dict(found)
    if len(counts) > 1 or 0 in counts:
        counted = sorted(counts)
        raise ConvertError(f"the tensors of {STACKED} should have one axis for the blocks before the others, and have {counted} of them")
    (count,) = counts
    if count * len(stacked) > MAX_TENSORS:
        raise LimitExceeded(f"{count} blocks in {len(stacked)} tensors are more than {MAX_TENSORS} tensors")
    apart = {path: stored for path, stored in found.items() if path not in stacked}
    for path, stored in stacked.items():
        place = path.index(STACKED)
        for index in range(count):
            one = (*path[:place], f"{STACKED}_{index}", *path[place + 1 :])
            if one in apart:
                raise ConvertError(f"{apart[one].origin} is there beside {stored.origin}, which holds the same block")
            apart[one] = _block(stored, index)
    return apart


def _block(stored: Stored, index: int) -> Stored:
    """Return one of the blocks that a tensor holds one behind the other."""
    return Stored(f"{stored.origin}[{index}]", stored.stored_shape[1:], stored.stored_dtype, lambda: stored.load()[index])


def raw(parts: Sequence[Part], convention: str | None) -> Iterator[tuple[Path, Stored]]:
    """Give a network's tensors Flax's names and form, the statistics under batch_stats, everything else under params.

    Kernels are flipped for true convolution if `convention` says so; those of a ConvTranspose always are, as Flax computes them so.
    """
    for part in parts:
        for leaf, stored in part.leaves.items():
            if leaf != COUNTER:
                yield _raw_leaf(part, leaf, stored, convention)


def _described(path: Path, stored: Stored) -> tuple[str, Stored]:
    *modules, leaf = path
    module, shape = ".".join(modules), stored.stored_shape
    if heads := _with_heads(modules, leaf, shape):
        return f"{module}.{LEAVES[leaf]}", replace(stored, steps=heads)
    if leaf.removesuffix(OWN) in LEAVES and leaf.endswith(OWN):
        return ".".join((*modules, leaf.removesuffix(OWN))), stored
    special = any(ATTENTION.search(part) for part in modules[-1:]) and len(shape) != 4
    if leaf not in LEAVES or special or (leaf in STATISTICS and len(shape) != 1):
        return ".".join(path), stored
    if leaf == "kernel" and len(shape) in LAYOUTS:
        transposed = len(shape) > 2 and any(TRANSPOSED.search(part) for part in modules)
        kind = "linear" if len(shape) == 2 else "transposed" if transposed else "conv"
        convention: Convention | None = None if len(shape) == 2 else "convolution" if transposed else "correlation"
        stored = replace(stored, steps=from_layout(kind, LAYOUTS[len(shape)], shape), convention=convention)
    return ".".join(filter(None, (module, LEAVES[leaf]))), stored


def _with_heads(modules: Sequence[str], leaf: str, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """List the steps from a tensor with an axis for heads to that of a dense layer; none of any other tensor."""
    last = modules[-1] if modules else ""
    if last in INTO_HEADS and leaf == "bias" and len(shape) == 2:
        return (Reshape(shape, (math.prod(shape),)),)
    if leaf != "kernel" or len(shape) != 3 or last not in (*INTO_HEADS, OUT_OF_HEADS):
        return ()
    dense = (shape[0], shape[1] * shape[2]) if last in INTO_HEADS else (shape[0] * shape[1], shape[2])
    return (Reshape(shape, dense), Transpose((1, 0)))


def _to_heads(part: Part, raw: Stored) -> Stored:
    """Give a tensor in Flax's form the axis for heads that a layer of attention has there."""
    last = part.name.rpartition(".")[2]
    if part.heads and last in INTO_HEADS:
        return raw.reshape(*raw.shape[:-1], part.heads, raw.shape[-1] // part.heads)
    if part.heads and last == OUT_OF_HEADS and len(raw.shape) == 2:
        return raw.reshape(part.heads, raw.shape[0] // part.heads, raw.shape[1])
    return raw


def _raw_leaf(part: Part, leaf: str, stored: Stored, convention: str | None) -> tuple[Path, Stored]:
    shape = stored.shape
    back = {value: key for key, value in LEAVES.items()}
    name = back.get(leaf, f"{leaf}{OWN}" if leaf in LEAVES.keys() - LEAVES.values() else leaf)
    collection = "batch_stats" if name in STATISTICS else "params"
    raw = stored
    if leaf == "weight":
        name = "scale" if part.kind == "norm" or len(shape) not in LAYOUTS else "kernel"
        if name == "kernel":
            kind = "linear" if len(shape) == 2 else "transposed" if part.kind == "transposed" else "conv"
            if kind == "transposed" and part.groups > 1:
                raise ConvertError(f"Flax has no transposed convolution in groups: {part.name} has {part.groups}")
            if kind == "linear" and part.grid is not None:  # it reads a map that Flax flattens height first
                raw = reflattened(stored, part.grid)
            raw = laid_out(raw, kind, LAYOUTS[len(shape)], flipped=kind == "transposed" or convention == "convolution")
    path = (collection, *filter(None, part.name.split(".")), name)
    raw = _to_heads(part, raw)
    return path, Stored("/".join(path), raw.shape, raw.dtype, raw.array)
