"""What an object of Torch7's holds: the modules of a network with their tensors, and what a straight or branched one computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats._operators import Transcript
from convert.formats._torch7_objects import Object, Storage, Table, Tensor
from convert.source import Source, Stored
from convert.steps import Moment
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

LEAVES = ("weight", "bias", "running_mean", "running_var")
CONVOLUTIONS = ("SpatialConvolution", "SpatialConvolutionMM", "SpatialDilatedConvolution", "SpatialConvolutionLocal")
FULL = ("SpatialFullConvolution",)
NORMS = ("BatchNormalization", "SpatialBatchNormalization", "VolumetricBatchNormalization")
NOTHING = ("Identity", "Copy", "Contiguous")
REPLICAS = "DataParallelTable"
"""Holds one network several times, one for each GPU."""
PASSING = ("device", "gpu", "_type", "train", "output", "gradInput")
"""Fields in which copies of a module may differ."""
DEEPEST = 60
"""Modules in modules."""


def source(path: Path, found: Any, size: int) -> Source:
    """Describe what a file holds: the network of `nn` in it, or its tensors under their tables' keys."""
    held = _Held(path)
    network = _network(found)
    if network is not None:
        held.module(network, "", 0)
        drawn = _Drawn(held)
        try:
            drawn.whole(network)
            made = drawn.out.finished(path, "torch7", "Torch7", size, "file of Torch7's", notes=held.notes)
            made.tensors = {name: _guard.guarded(one, path, "file of Torch7's") for name, one in held.tensors.items()}
            return made
        except _Unsaid as why:
            held.notes.append(f"what the network computes is not understood: {why}")
    else:
        held.table(found, "", 0)
    if not held.tensors:
        raise MalformedFile(f"{path} holds no weights")
    _guard.check(path, held.tensors.values(), size)
    tensors = {name: _guard.guarded(one, path, "file of Torch7's") for name, one in held.tensors.items()}
    return Source(path, "torch7", "Torch7", tensors, notes=held.notes)


class _Unsaid(Exception):
    """A module has no word here."""


def _kind(module: Any) -> str:
    return module.kind.rpartition(".")[2] if isinstance(module, Object) else ""


def _network(found: Any, depth: int = 0) -> Object | None:
    """Find the network: the object itself, or the first module in a table of what was saved with it."""
    if isinstance(found, Object):
        return found if found.kind.partition(".")[0] in ("nn", "cudnn", "cunn", "fbnn", "nngraph", "inn") else None
    if isinstance(found, Table) and depth < 3:
        first = [name for name in ("model", "net", "network", "state_dict") if name in found.items]
        for name in [*first, *(name for name in found.items if name not in first)]:
            if (inner := _network(found.items[name], depth + 1)) is not None:
                return inner
    return None


class _Held:
    """The tensors of a file by their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self.notes: list[str] = []
        self.seen: set[int] = set()
        self.names: dict[int, str] = {}

    def module(self, module: Object, name: str, depth: int) -> None:
        """Take a module's tensors, and its children's, which are counted from 0."""
        if depth > DEEPEST:
            raise LimitExceeded("its modules nest deeper than any network's")
        if id(module) in self.names:
            return
        self.names[id(module)] = name
        kind = _kind(module)
        for leaf in LEAVES:
            if isinstance(tensor := module.fields.get(leaf), Tensor) and math.prod(tensor.shape):
                self.put(f"{name}.{leaf}" if name else leaf, _shaped(module, kind, leaf, _stored(name, leaf, tensor)))
        if isinstance(spread := module.fields.get("running_std"), Tensor) and f"{name}.running_var" not in self.tensors:
            self.put(f"{name}.running_var" if name else "running_var", _variance(module, name, spread))
        children = _children(module)
        if kind == REPLICAS:
            self.replicas(children, name)
            children = children[:1]
        for number, child in enumerate(children):
            if isinstance(child, Object):
                self.module(child, f"{name}.{number}" if name else str(number), depth + 1)

    def replicas(self, copies: list[Any], name: str) -> None:
        """See that a network's copies are equal, so that the first says all."""
        for number, copy in enumerate(copies[1:], start=1):
            if (where := _unlike(copies[0], copy, "", 0, set())) is not None:
                called = f"{REPLICAS} {name or 'at the top'}"
                raise UnsupportedFormat(
                    f"{self.path}: the replicas 0 and {number} of the {called} differ, in {where}, so nobody can say which one is the "
                    "network; save one of them (model:get(1)) by itself"
                )
        if len(copies) > 1:
            self.notes.append(f"of the {len(copies)} equal replicas of the {REPLICAS} {name or 'at the top'} the first was taken")

    def table(self, found: Any, name: str, depth: int) -> None:
        """Take the tensors of tables in tables, under their keys."""
        if depth > DEEPEST:
            raise LimitExceeded("its tables nest deeper than any network's")
        if isinstance(found, Tensor):
            if math.prod(found.shape):
                self.put(name or "tensor", _stored("", name or "tensor", found))
            return
        items = found.items if isinstance(found, Table) else found.fields.items if isinstance(found, Object) else {}
        if id(found) in self.seen:
            return
        self.seen.add(id(found))
        for key, value in items.items():
            if isinstance(value, Tensor | Table | Object):
                self.table(value, f"{name}.{key}" if name else str(key), depth + 1)

    def put(self, name: str, stored: Stored) -> None:
        if len(self.tensors) >= _guard.MAX_TENSORS:
            raise LimitExceeded(f"it has more than {_guard.MAX_TENSORS} tensors")
        if name in self.tensors:
            raise MalformedFile(f"there are two tensors called {name!r:.100}")
        self.tensors[name] = stored


def _children(module: Object) -> list[Any]:
    children = module.fields.get("modules")
    return children.listed() if isinstance(children, Table) else []


def _unlike(one: Any, other: Any, name: str, depth: int, seen: set[tuple[int, int]]) -> str | None:
    """Say where two modules differ in what they are or hold; None where they don't."""
    if depth > DEEPEST:
        raise LimitExceeded("its modules nest deeper than any network's")
    if one is other or (id(one), id(other)) in seen:
        return None
    seen.add((id(one), id(other)))
    if not isinstance(one, Object) or not isinstance(other, Object) or _kind(one) != _kind(other):
        return f"the module {name or 'at the top'}"
    for leaf in sorted({key for held in (one, other) for key in held.fields.items if isinstance(key, str)}):
        first, second = one.fields.get(leaf), other.fields.get(leaf)
        if not (_equal(first, second) if leaf in (*LEAVES, "running_std") else leaf in PASSING or _alike(first, second)):
            return f"{name}.{leaf}" if name else leaf
    inner, theirs = _children(one), _children(other)
    if len(inner) != len(theirs):
        return f"the number of modules {f'in {name}' if name else 'at the top'}"
    for number, (child, twin) in enumerate(zip(inner, theirs, strict=True)):
        if (where := _unlike(child, twin, f"{name}.{number}" if name else str(number), depth + 1, seen)) is not None:
            return where
    return None


def _alike(first: Any, second: Any) -> bool:
    """Compare a setting, or the sizes of a View; tables and buffers are no settings."""
    if isinstance(first, Storage) and isinstance(second, Storage):
        return np.array_equal(first.numbers(), second.numbers())
    plain = (bool, int, float, str)
    return first == second if isinstance(first, plain) or isinstance(second, plain) else True


def _equal(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return isinstance(first, Tensor) == isinstance(second, Tensor)
    return first.shape == second.shape and first.dtype == second.dtype and np.array_equal(first.array(), second.array(), equal_nan=True)


def _stored(module: str, leaf: str, tensor: Tensor) -> Stored:
    return Stored(f"{module}.{leaf}" if module else leaf, tensor.shape, tensor.dtype, tensor.array)


def _variance(module: Object, name: str, spread: Tensor) -> Stored:
    """Describe the variance that an old BatchNorm keeps as the inverse of its deviation."""
    moment = Moment("inv_std", float(_number(module, "eps", 1e-5)))

    def load() -> np.ndarray:
        with np.errstate(all="ignore"):
            return moment.do(spread.array())

    return Stored(f"{name}.running_std, as a variance", spread.shape, spread.dtype, load)


def _shaped(module: Object, kind: str, leaf: str, stored: Stored) -> Stored:
    """Give a kernel that is kept as a matrix its sides, and say that it is of cross-correlation."""
    if leaf != "weight" or kind not in (*CONVOLUTIONS, *FULL):
        return stored
    if len(stored.shape) == 2:
        height, width = _number(module, "kH"), _number(module, "kW")
        whole = stored.shape[1]
        if height < 1 or width < 1 or whole % (height * width):
            raise MalformedFile(f"{stored.origin} of shape {stored.shape} has sides of {height} x {width}")
        matrix, shape = stored, (stored.shape[0], whole // (height * width), int(height), int(width))
        stored = Stored(matrix.origin, shape, matrix.dtype, lambda: matrix.load().reshape(shape))
    return replace(stored, convention="correlation") if len(stored.shape) == 4 else stored


def _number(module: Object, name: str, default: Any = 0) -> Any:
    found = module.fields.get(name, default)
    good = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found) and abs(found) < 1e9
    return found if good else default


class _Drawn:
    """A network that is being said in ONNX's words."""

    def __init__(self, held: _Held) -> None:
        self.held, self.out = held, Transcript()
        self.rank = 4

    def whole(self, network: Object) -> None:
        channels = next((self.channels(module) for module in self.modules(network, 0) if self.channels(module)), None)
        first = self.out.input("images", (None, channels, None, None) if channels else (None, None))
        self.out.model.outputs = [self.said(network, first, 0)]

    def modules(self, module: Object, depth: int) -> list[Object]:
        if depth > DEEPEST:
            raise _Unsaid("it nests deeper than any network does")
        children = module.fields.get("modules")
        found = [module]
        for child in children.listed() if isinstance(children, Table) else []:
            if isinstance(child, Object) and len(found) < 10_000:
                found += self.modules(child, depth + 1)
        return found

    def channels(self, module: Object) -> int | None:
        weight = self.held.tensors.get(f"{self.held.names.get(id(module), '')}.weight")
        if _kind(module) in CONVOLUTIONS and weight is not None and len(weight.shape) == 4:
            return weight.shape[1] * max(int(_number(module, "groups", 1)), 1)
        return None

    def said(self, module: Any, x: str, depth: int) -> str:
        if not isinstance(module, Object) or depth > DEEPEST:
            raise _Unsaid("there is something else than a module")
        kind = _kind(module)
        children = module.fields.get("modules")
        inner = [child for child in children.listed() if isinstance(child, Object)] if isinstance(children, Table) else []
        if kind == "Sequential":
            return self.sequence(inner, x, depth)
        if kind == REPLICAS and inner:
            return self.sequence(inner[:1], x, depth)
        if kind == "Concat":
            if _number(module, "dimension") not in (1, 2):
                raise _Unsaid("a Concat is not over the channels")
            return self.out.add("Concat", [self.said(child, x, depth + 1) for child in inner], axis=1)
        if (handler := HANDLERS.get(kind)) is None:
            raise _Unsaid(f"it has a module {kind or 'without a class'}")
        return handler(self, module, x, self.held.names.get(id(module), ""))

    def sequence(self, modules: list[Object], x: str, depth: int) -> str:
        waiting: list[str] | None = None
        for module in modules:
            kind = _kind(module)
            if kind == "ConcatTable":
                inner = module.fields.get("modules")
                waiting = [self.said(child, x, depth + 1) for child in (inner.listed() if isinstance(inner, Table) else [])]
            elif waiting is not None:
                if kind == "CAddTable":
                    x, waiting = self.joined("Add", waiting), None
                elif kind == "CMulTable":
                    x, waiting = self.joined("Mul", waiting), None
                elif kind == "JoinTable" and _number(module, "dimension") in (1, 2):
                    x, waiting = self.out.add("Concat", waiting, axis=1), None
                else:
                    raise _Unsaid(f"a {kind} follows a ConcatTable")
            else:
                x = self.said(module, x, depth + 1)
        if waiting is not None:
            raise _Unsaid("it gives a table")
        return x

    def joined(self, op: str, values: list[str]) -> str:
        if len(values) < 2:
            raise _Unsaid("a table of one value is joined")
        made = values[0]
        for value in values[1:]:
            made = self.out.add(op, [made, value])
        return made

    def weights(self, name: str) -> list[str]:
        """Keep a module's weight and bias."""
        found = [f"{name}.{leaf}" if name else leaf for leaf in ("weight", "bias")]
        if found[0] not in self.held.tensors:
            raise _Unsaid(f"the module {name or 'at the top'} has no weight")
        return [self.kept(one) for one in found if one in self.held.tensors]

    def kept(self, name: str) -> str:
        if name not in self.out.model.tensors:
            self.out.constant(name, self.held.tensors[name])
        return name


def _sides(module: Object, first: str, second: str, default: int) -> tuple[int, int]:
    """Read a pair, height first; Torch7 keeps the width's first, and the height's may be missing."""
    width = int(_number(module, second, default))
    return int(_number(module, first, width)), width


def _conv(d: _Drawn, module: Object, x: str, name: str) -> str:
    kernel, stride = _sides(module, "kH", "kW", 0), _sides(module, "dH", "dW", 1)
    dilation, (top, left) = _sides(module, "dilationH", "dilationW", 1), _pads(module)
    weights = d.weights(name)
    shape = d.held.tensors[weights[0]].shape
    if len(shape) != 4 or shape[2:] != kernel or min(*stride, *dilation) < 1 or min(top, left) < 0:
        raise _Unsaid(f"the convolution {name} has sides of {kernel} and a kernel of {shape}")
    groups = max(int(_number(module, "groups", 1)), 1)
    pads = (top, left, top, left)
    return d.out.add("Conv", [x, *weights], module=name, strides=stride, pads=pads, dilations=dilation, group=groups, kernel_shape=kernel)


def _pads(module: Object) -> tuple[int, int]:
    return _sides(module, "padH", "padW", int(_number(module, "padding", 0)))


def _full(d: _Drawn, module: Object, x: str, name: str) -> str:
    stride, (top, left), more = _sides(module, "dH", "dW", 1), _pads(module), _sides(module, "adjH", "adjW", 0)
    weights = d.weights(name)
    if len(d.held.tensors[weights[0]].shape) != 4 or min(stride) < 1:
        raise _Unsaid(f"the convolution {name} has a kernel of no sides")
    pads = (top, left, top, left)
    return d.out.add("ConvTranspose", [x, *weights], module=name, strides=stride, pads=pads, dilations=(1, 1), output_padding=more)


def _norm(d: _Drawn, module: Object, x: str, name: str) -> str:
    names = [f"{name}.{leaf}" if name else leaf for leaf in LEAVES]
    if any(one not in d.held.tensors for one in names[2:]):
        raise _Unsaid(f"the BatchNorm {name} has no statistics")
    length = d.held.tensors[names[2]].shape
    given = [
        d.kept(one) if one in d.held.tensors else d.out.numbers(np.full(length, value), "float32")
        for one, value in zip(names, (1, 0, 0, 1), strict=True)
    ]
    return d.out.add("BatchNormalization", [x, *given], module=name, epsilon=float(_number(module, "eps", 1e-5)))


def _linear(d: _Drawn, module: Object, x: str, name: str) -> str:
    del module
    return d.out.add("Gemm", [x, *d.weights(name)], module=name, transB=1)


def _plain(op: str, *given: tuple[str, str, float]) -> Callable[[_Drawn, Object, str, str], str]:
    def said(d: _Drawn, module: Object, x: str, name: str) -> str:
        how: dict[str, Any] = {theirs: float(_number(module, own, default)) for theirs, own, default in given}
        return d.out.add(op, [x], name=name, **how)

    return said


def _threshold(d: _Drawn, module: Object, x: str, name: str) -> str:
    if _number(module, "threshold") or _number(module, "val"):
        raise _Unsaid("a Threshold is no ReLU")
    return d.out.add("Relu", [x], name=name)


def _prelu(d: _Drawn, module: Object, x: str, name: str) -> str:
    del module
    (weight, *_) = d.weights(name)
    return d.out.add("PRelu", [x, weight], module=name)


def _pool(op: str) -> Callable[[_Drawn, Object, str, str], str]:
    def said(d: _Drawn, module: Object, x: str, name: str) -> str:
        kernel, stride, (top, left) = _sides(module, "kH", "kW", 0), _sides(module, "dH", "dW", 1), _pads(module)
        if min(*kernel, *stride) < 1 or module.fields.get("divide", True) is False:
            raise _Unsaid(f"the pool {name} has no sides, or sums")
        how: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": (top, left, top, left)}
        if op == "AveragePool":
            how["count_include_pad"] = int(module.fields.get("count_include_pad", True) is not False)
        return d.out.add(op, [x], name=name, ceil_mode=int(module.fields.get("ceil_mode") is True), **how)

    return said


def _flat(d: _Drawn, module: Object, x: str, name: str) -> str:
    size = module.fields.get("size")
    sizes = [int(n) for n in _longs(size)]
    if len([n for n in sizes if n != 1]) > 1:
        raise _Unsaid(f"the {_kind(module)} {name} makes no vector")
    return d.out.add("Flatten", [x], name=name, axis=1)


def _longs(size: Any) -> list[int]:
    """Read a LongStorage, which a View keeps as its sizes."""
    numbers = getattr(size, "numbers", None)
    return [] if numbers is None else [int(n) for n in numbers()[:8]]


def _nothing(d: _Drawn, module: Object, x: str, name: str) -> str:
    del module
    return d.out.add("Identity", [x], name=name)


def _dropout(d: _Drawn, module: Object, x: str, name: str) -> str:
    """Pass on what version 2 gets; the first version, and SpatialDropout, scale by 1 - p in evaluation."""
    if module.fields.get("stochasticInference") or module.fields.get("stochastic_inference"):
        raise _Unsaid(f"the {_kind(module)} {name} drops in evaluation too")
    if _kind(module) == "Dropout" and module.fields.get("v2"):
        return d.out.add("Identity", [x], name=name)
    share = float(_number(module, "p", -1))
    if not 0 <= share < 1:
        raise _Unsaid(f"the {_kind(module)} {name} scales by 1 - p, and its p is no share")
    return d.out.add("Mul", [x, d.out.numbers(1 - share, "float32")], name=name)


def _margin(d: _Drawn, module: Object, x: str, name: str) -> str:
    left, right, top, bottom = (int(_number(module, f"pad_{side}")) for side in "lrtb")
    return d.out.add("Pad", [x, d.out.numbers([0, 0, top, left, 0, 0, bottom, right])], name=name)


def _softmax(d: _Drawn, module: Object, x: str, name: str) -> str:
    del module
    return d.out.add("Softmax", [x], name=name, axis=1)


def _lrn(d: _Drawn, module: Object, x: str, name: str) -> str:
    how: dict[str, Any] = {
        "alpha": float(_number(module, "alpha", 1e-4)),
        "beta": float(_number(module, "beta", 0.75)),
        "bias": float(_number(module, "k", 1)),
    }
    return d.out.add("LRN", [x], name=name, size=int(_number(module, "size", 5)), **how)


HANDLERS: dict[str, Callable[[_Drawn, Object, str, str], str]] = {
    "SpatialConvolution": _conv, "SpatialConvolutionMM": _conv, "SpatialDilatedConvolution": _conv, "SpatialFullConvolution": _full,
    **dict.fromkeys(NORMS[:2], _norm), "Linear": _linear, "ReLU": _plain("Relu"), "Threshold": _threshold, "PReLU": _prelu,
    "Tanh": _plain("Tanh"), "Sigmoid": _plain("Sigmoid"), "ELU": _plain("Elu", ("alpha", "alpha", 1.0)),
    "LeakyReLU": _plain("LeakyRelu", ("alpha", "negval", 0.01)), "SpatialMaxPooling": _pool("MaxPool"),
    "SpatialAveragePooling": _pool("AveragePool"), "View": _flat, "Reshape": _flat, "SpatialZeroPadding": _margin, "SoftMax": _softmax,
    "SpatialCrossMapLRN": _lrn, "Dropout": _dropout, "SpatialDropout": _dropout, **dict.fromkeys(NOTHING, _nothing),
}  # fmt: skip
"""By the class: how a module is said."""
