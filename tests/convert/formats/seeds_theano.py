"""Small pickles of every dialect, for the fuzzer."""

from __future__ import annotations

import pickle
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules of Theano's with classes that pickle as theirs do: an object whose state is a dict."""
    made = {
        name: types.ModuleType(name) for name in ("theano", "theano.tensor", "theano.tensor.sharedvar", "theano.gof", "theano.gof.link")
    }
    for module, name in (("theano.tensor.sharedvar", "TensorSharedVariable"), ("theano.gof.link", "Container")):
        setattr(made[module], name, type(name, (), {"__module__": module, "__qualname__": name}))
    return made


def shared_variable(value: np.ndarray) -> bytes:
    """A pickle of one shared variable, as Theano's users left many."""
    modules = stand_ins()
    sys.modules.update(modules)
    try:
        container: Any = modules["theano.gof.link"].Container()
        container.storage, container.readonly = [value], False
        variable: Any = modules["theano.tensor.sharedvar"].TensorSharedVariable()
        variable.container, variable.name = container, "W"
        return pickle.dumps([variable], 2)
    finally:
        for name in modules:
            del sys.modules[name]


def seeds(folder: Path) -> list[Path]:
    draw = np.random.default_rng(0)
    values = [draw.uniform(0.5, 1.5, shape).astype(np.float32) for shape in ((4, 3, 3, 3), (4,), (64, 2), (2,))]
    zoo = {"param values": values, "synset words": ["cat", "dog"], "mean value": np.array([104.0, 117.0, 123.0])}
    layers = OrderedDict([("conv1", values[:2]), ("bn", [values[1]] * 4), ("dense", values[2:]), ("pool", [])])
    made: list[Path] = []
    for protocol in (0, 2, 4, 5):
        for name, tree in (("list", values), ("zoo", zoo), ("layers", layers)):
            made.append(folder / f"{name}{protocol}.pkl")
            made[-1].write_bytes(pickle.dumps(tree, protocol))
    made.append(folder / "shared.pkl")
    made[-1].write_bytes(shared_variable(values[0]))
    return made
