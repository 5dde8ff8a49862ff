"""Caffe's blobs as arrays of NumPy's, as scripts save them: conv1/0 and conv1/1, lists for a layer, or conv1_w and conv1_b.

A BatchNorm's three blobs are sums and the factor to divide them by; its gamma and beta are those of the Scale layer behind it.
Here they get a module and PyTorch's leaf, as Caffe's own reader gives them; in which order axes lie is asked later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from convert.source import Shape, Stored
from convert.steps import Scale

BLOB = re.compile(r"^(.+)[/._](\d)$")
"""A layer, and which of its blobs."""
WORD = re.compile(r"^(.+)_([A-Za-z]+(?:_(?:mean|var|variance))?)$")
"""A layer and what it holds, joined by an underscore as Caffe2 and many scripts do."""
WORDS = {
    **dict.fromkeys(("w", "W", "weight", "weights", "kernel", "gamma", "scale", "s"), "weight"),
    **dict.fromkeys(("b", "B", "bias", "biases", "beta", "offset", "shift"), "bias"),
    **dict.fromkeys(("mean", "running_mean", "moving_mean", "rm"), "running_mean"),
    **dict.fromkeys(("var", "variance", "running_var", "moving_var", "moving_variance", "riv"), "running_var"),
    **dict.fromkeys(("factor", "correction"), "factor"),
}
"""PyTorch's leaf for each word; s, rm and riv are Caffe2's, whose "riv" is a variance in spite of its name."""
KERNELS = ("weight", "bias")
MOMENTS = ("running_mean", "running_var", "factor")
FORKS = {
    4: ("weight", "bias", "running_mean", "running_var"),
    5: (*MOMENTS, "weight", "bias"),
}
"""BatchNorms that forks keep in one layer; of five blobs the factor may also be the last."""
Blobs = dict[str, Stored]


def spelt(tensors: Mapping[str, Stored], known: Mapping[str, tuple[str, str]]) -> tuple[dict[str, Stored], bool] | None:
    """Spell arrays by their layers and PyTorch's leaves.

    Args:
        tensors: by the file's names.
        known: the layer and leaf of those whose names say it already, "conv1.weight".

    Returns:
        The arrays, and whether they can only be Caffe's: names with numbers, or a BatchNorm's factor. Lists of a layer's arrays are
        Keras's and Lasagne's too, and words joined by an underscore are anybody's. None where they are not of this kind.
    """
    numbered = {name: match for name in tensors if name not in known and (match := BLOB.match(name))}
    worded = {} if numbered or known else {name: match for name in tensors if (match := WORD.match(name)) and match[2] in WORDS}
    if not (numbered or worded) or len(numbered) + len(known) + len(worded) != len(tensors):
        return None
    layers: dict[str, Blobs] = {}
    for name, stored in tensors.items():
        module, leaf = known.get(name) or (
            (numbered[name][1], numbered[name][2]) if numbered else (worded[name][1], WORDS[worded[name][2]])
        )
        if leaf in layers.setdefault(module, {}):
            return None
        layers[module][leaf] = stored
    named = {module: _leaves(blobs) for module, blobs in layers.items()}
    if not all(named.values()):
        return None
    certain = any("factor" in leaves for leaves in named.values()) or any(name[match.end(1)] == "/" for name, match in numbered.items())
    found = {module: _divided(leaves) for module, leaves in named.items()}
    for norm, scale in list(_scaled(found)):
        found[norm] |= found.pop(scale)
    return {f"{module}.{leaf}": stored for module, leaves in found.items() for leaf, stored in leaves.items()}, certain


def _leaves(blobs: Blobs) -> Blobs:
    """Name a layer's blobs by what they must be; {} where they are those of no layer of Caffe's."""
    if not any(key.isdigit() for key in blobs):
        return blobs
    if sorted(blobs) != [str(number) for number in range(len(blobs))]:
        return {}
    held = [_squeezed(blobs[str(number)]) for number in range(len(blobs))]
    shapes = [stored.shape for stored in held]
    vectors, first = [math.prod(shape) for shape in shapes if len(shape) <= 1], shapes[0]
    if len(first) > 1:
        bias = shapes[1] if len(shapes) == 2 else ()
        fits = len(shapes) == 1 or (len(bias) == 1 and (bias[0] in (first[0], first[-1]) or (len(first) > 2 and bias[0] in first)))
        return dict(zip(KERNELS, held, strict=False)) if fits else {}
    if len(vectors) != len(shapes) or len(shapes) > 5:
        return {}
    order: Sequence[str] = KERNELS
    if len(shapes) == 3:
        order = MOMENTS
    elif len(shapes) > 3:
        order = (*FORKS[4], "factor") if len(shapes) == 5 and vectors[-1] == 1 and vectors[2] != 1 else FORKS[len(shapes)]
    made = dict(zip(order, held, strict=False))
    sizes = {math.prod(stored.shape) for leaf, stored in made.items() if leaf != "factor"}
    return made if len(sizes) == 1 and ("factor" not in made or made["factor"].shape in ((), (1,))) else {}


def _squeezed(stored: Stored) -> Stored:
    """Drop the ones before vectors and matrices of files from before 2014, (1, 1, 1, C) and (1, 1, O, I)."""
    shape: Shape = stored.shape
    if len(shape) != 4 or shape[:2] != (1, 1) or shape[2:] == (1, 1):
        return stored
    return stored.reshape(*(shape[3:] if shape[2] == 1 else shape[2:])) if shape[3] > 1 else stored


def _divided(leaves: Blobs) -> Blobs:
    """Divide a BatchNorm's sums by their factor, 0 where nothing was gathered."""
    factor = leaves.get("factor")
    if factor is None:
        return leaves
    by = float(factor.array().reshape(-1)[0])
    correct = Scale(1 / by if by else 0.0)
    return {
        leaf: stored if by == 1 or not leaf.startswith("running") else stored.then(correct)
        for leaf, stored in leaves.items()
        if leaf != "factor"
    }


def _scaled(found: Mapping[str, Blobs]) -> Iterator[tuple[str, str]]:
    """Pair each BatchNorm that has no gamma with the Scale layer that does: by their names, else the one that the file has behind it."""
    order = list(found)
    left = {
        name
        for name, leaves in found.items()
        if leaves.keys() <= {"weight", "bias"} and len(leaves["weight" if "weight" in leaves else "bias"].shape) == 1
    }
    for place, norm in enumerate(order):
        leaves = found[norm]
        if "running_mean" not in leaves or "weight" in leaves:
            continue
        likely = [re.sub("batch_?norm|bn", "scale", norm, flags=re.IGNORECASE), f"{norm}/scale", f"{norm}_scale", f"scale_{norm}"]
        likely += [re.sub("(batch_?norm|bn)$", "", norm, flags=re.IGNORECASE).rstrip("/_.") + end for end in ("/scale", "_scale")]
        likely += order[place + 1 : place + 2]
        size = leaves["running_mean"].shape
        scale = next(
            (name for name in likely if name in left and name != norm and found[name].get("weight", leaves["running_mean"]).shape == size),
            None,
        )
        if scale is not None:
            left.discard(scale)
            yield norm, scale
