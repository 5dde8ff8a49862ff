"""Run a network once on tensors without data and write down every function of PyTorch that it calls.

Functions as networks call them, `F.batch_norm` and not ATen's kernels of it: run again under autograd and autocast they are what
the network does, with its casts, its random numbers and its backward. What depends on values can't be recorded.
"""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import groups, tensors_of
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.training import shared

_STOPS = {
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad", "numpy", "tolist", "__set__", "set_",
    "resize_", "share_memory_", "requires_grad_", "to_sparse", "untyped_storage", "data_ptr",
}  # fmt: skip
"""Functions with an effect, or a view of memory, that a second call wouldn't repeat."""


class Ref(int):
    """Stands in a call's arguments for the value of this number."""


@dataclass(eq=False, slots=True)
class Value:
    """A tensor at one moment: an in-place call makes another value of the same memory."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int
    place: tuple[str, str] | None = None
    """(module, name) of a parameter or buffer."""
    constant: Tensor | None = None
    """A tensor that belongs to no module's parameters or buffers."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of a function: arguments with a `Ref` for each tensor, and what came of it."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    result: Any
    """The result with a `Ref` for each tensor."""
    makes: tuple[int, ...]
    writes: frozenset[int]
    """The memory that it changes."""
    layer: str
    grad: bool
    """False inside of the network's own `torch.no_grad`."""
    autocast: tuple[bool, torch.dtype] | None
    """The network's own autocast, where it differs from the caller's."""

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.func)


@dataclass(eq=False, slots=True)
class Recording:
    """The calls of a network at one input shape, in order."""

    values: list[Value]
    calls: list[Call]
    inputs: list[tuple[int, int]]
    """(place among the flat arguments, value)."""
    outputs: list[Any]
    """Flat leaves of what the network returns, a `Ref` for each tensor."""
    spec: Any
    device: torch.device
    tied: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)
    """Other places of the same parameter."""
    buffers: frozenset[tuple[str, str]] = frozenset()
    """Those of the places that are buffers'."""


def name_of(func: Any) -> str:
    """Return a function's name without its module."""
    return str(getattr(func, "__name__", func))


def record(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Recording:
    """Record what `network` computes in its present mode, under the caller's autocast.

    Args:
        network: any module; its copy is run, on tensors without data.
        args: positional arguments; of tensors only shape, dtype, memory format and device matter.
        kwargs: keyword arguments, likewise.
        device: of the network.

    Raises:
        Untraceable: the flow depends on values, or a call has an effect that a second one would not repeat.
        ValueError: the network itself refuses such input; its own message.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise Untraceable(f"{type(network).__name__} is TorchScript, whose calls can't be recorded; call fast on the Python module")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    places: dict[int, tuple[tuple[str, str], Tensor]] = {}
    tied: dict[tuple[str, str], list[tuple[str, str]]] = {}
    twin = _without_data(network, fake, places, tied)
    shared.stand_in(twin)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    stand_ins = [_stand_in(fake, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    recorder = _Recorder(places, device.type)
    inputs = [(index, recorder.define(leaf).number) for index, leaf in enumerate(stand_ins) if isinstance(leaf, Tensor)]
    fake_args, fake_kwargs = pytree.tree_unflatten(stand_ins, spec)
    before, drawn = _state(twin), random.getstate()
    for name, module in twin.named_modules():
        if name:
            module.register_forward_pre_hook(recorder.enter(name))
            module.register_forward_hook(recorder.leave, always_call=True)
    casts = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    try:
        autocast = torch.autocast(device.type, casts[1], casts[0], cache_enabled=False)
        with warnings.catch_warnings(), autocast, torch.enable_grad(), fake, recorder:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # PyTorch's own, of weights of recurrent layers
            result = twin(*fake_args, **fake_kwargs)
    except (Untraceable, ValueError):
        raise
    except Exception as error:
        where = f"{recorder.layers[-1] if recorder.layers else type(network).__name__}: "
        if type(error).__name__ in _ON_VALUES:
            raise Untraceable(f"{where}forward branches on values, or reads them, {_line_of(error)}") from error
        raise Untraceable(f"{where}{type(error).__name__}: {first_line(error)}") from error
    if changed := next((name for name, value in _state(twin).items() if before.get(name, ()) != value), None):
        raise Untraceable(f"forward changes {changed}, which a recording would not")
    if drawn != random.getstate():
        random.setstate(drawn)
        raise Untraceable("forward draws from Python's random, once for all calls of a recording")
    flat, out_spec = pytree.tree_flatten(result)
    outputs = [Ref(recorder.value_of(leaf).number) if isinstance(leaf, Tensor) else leaf for leaf in flat]
    if not any(isinstance(leaf, Ref) for leaf in outputs):
        raise Untraceable(f"{type(network).__name__} returns no tensor", anyway=True)
    buffers = frozenset((path, name) for path, module in network.named_modules() for name in module._buffers)
    return Recording(recorder.values, recorder.calls, inputs, outputs, out_spec, device, tied, buffers)


def _stand_in(fake: Any, leaf: Tensor) -> Tensor:
    """Return a tensor without data like an argument, no leaf that asks for a gradient: those may be written in place."""
    made = fake.from_tensor(leaf.detach())
    if not leaf.is_floating_point():
        return made
    with torch.enable_grad(), fake:
        return made.requires_grad_().clone()


_ON_VALUES = {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}
"""What PyTorch raises where a tensor without data is asked for its numbers."""


def _line_of(error: Exception) -> str:
    """Say which line of a network an error came from: the last one that is none of PyTorch's, Python's or the recorder's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_own(Path(frame.filename))]
    frame = next(reversed(theirs), None)
    if frame is None:
        return "somewhere"
    text = f": {frame.line}" if frame.line else ""  # of which there is none where code was typed or made
    return f"in line {frame.lineno} of {Path(frame.filename).name}{text}"


def _is_own(file: Path) -> bool:
    zoo = Path(__file__).parents[2]
    if zoo in file.parents:
        return file.relative_to(zoo).parts[0] == "kernels"
    inside = any(Path(module.__file__ or "").parent in file.parents for module in (torch, copy))
    return inside and ("torch" in file.parts or "site-packages" not in file.parts)


def _without_data(
    network: nn.Module, fake: Any, places: dict[int, tuple[tuple[str, str], Tensor]], tied: dict[tuple[str, str], list[tuple[str, str]]]
) -> nn.Module:
    """Copy the modules with every parameter and buffer replaced by one without data; other tensors stay those of the network."""
    memo = groups(network)
    for path, module in network.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) in memo:
                first = places[id(memo[id(tensor)])][0]
                if first != (path, name):
                    tied.setdefault(first, []).append((path, name))
                continue
            if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
                raise Untraceable(f"{path}.{name} is a {type(tensor).__name__}, no plain tensor")
            memo[id(tensor)] = fake.from_tensor(tensor)
            places[id(memo[id(tensor)])] = ((path, name), memo[id(tensor)])
        for attribute in module.__dict__.values():
            if isinstance(attribute, Tensor):
                memo.setdefault(id(attribute), attribute)
    try:
        return copy.deepcopy(network, memo)
    except Exception as error:
        raise Untraceable(f"{type(network).__name__} can't be copied: {type(error).__name__}: {error}") from error


def _state(twin: nn.Module) -> dict[str, Any]:
    """Note what of a network's attributes a forward could change and a recording would not."""
    plain = (type(None), bool, int, float, str)
    found: dict[str, Any] = {}
    for path, module in twin.named_modules():
        for name, value in module.__dict__.items():
            if name.startswith("_"):
                continue
            key = f"{path}.{name}" if path else name
            found[key] = value if isinstance(value, plain) else (id(value), len(value)) if isinstance(value, list | dict) else id(value)
    return found


class _Recorder(TorchFunctionMode):
    """Writes down a call for every function that reads or makes tensors."""

    def __init__(self, places: dict[int, tuple[tuple[str, str], Tensor]], device: str) -> None:
        super().__init__()
        self.places, self.device = places, device
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.layers: list[str] = []
        self._known: dict[int, Value] = {}
        self._makers: dict[int, type] = {}
        self._alive: list[Tensor] = []
        self._casts = self._autocast()
        self._saving = saved_tensor_hooks()

    def _autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self.layers.append(name)

    def leave(self, *_: object) -> None:
        self.layers.pop()

    def define(self, tensor: Tensor, place: tuple[str, str] | None = None, constant: Tensor | None = None) -> Value:
        memory = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
        value = Value(len(self.values), tuple(tensor.shape), tensor.dtype, memory, place, constant)
        self.values.append(value)
        self._known[id(tensor)] = value
        self._makers[id(tensor)] = type(tensor.grad_fn)
        self._alive.append(tensor)
        return value

    def value_of(self, tensor: Tensor) -> Value:
        if (value := self._known.get(id(tensor))) is not None:
            kind = type(tensor.grad_fn)
            if kind is not self._makers[id(tensor)] and issubclass(kind, torch.autograd.function.BackwardCFunction):
                raise Untraceable(f"{self._where()}an autograd function has a backward of its own, which a recording would not call")
            return value
        if (known := self.places.get(id(tensor))) is not None:
            return self.define(tensor, place=known[0])
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(tensor, FakeTensor):
            raise Untraceable(f"{self._where()}a tensor appeared that no recorded call made, perhaps of an autograd function")
        return self.define(tensor, constant=tensor)

    def _where(self) -> str:
        return f"{self.layers[-1]}: " if self.layers else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (name := name_of(func)) in _STOPS:
            raise Untraceable(f"{self._where()}{name} can't be recorded")
        given = tensors_of((args, kwargs))
        versions = [tensor._version for tensor in given]
        result = func(*args, **kwargs)
        made = tensors_of(result)
        written = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        if not made and not written:
            return result  # a size, a dtype
        if saved_tensor_hooks() != self._saving:
            raise Untraceable(f"{self._where()}tensors are saved by hooks, as torch.utils.checkpoint does")
        reads: list[int] = []

        def refer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            reads.append(self.value_of(leaf).number)
            return Ref(reads[-1])

        noted_args, noted_kwargs = pytree.tree_map(refer, (tuple(args), dict(kwargs)))
        memory = frozenset(self.value_of(tensor).memory for tensor in written)
        makes: list[int] = []

        def define(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            known = self._known.get(id(leaf))
            if known is not None and id(leaf) in self.places:
                return Ref(known.number)  # a buffer, which is looked up
            makes.append(self.define(leaf).number)
            return Ref(makes[-1])

        noted = pytree.tree_map(define, result)
        casts = self._autocast()
        layer = self.layers[-1] if self.layers else ""
        self.calls.append(
            Call(
                func, noted_args, noted_kwargs, tuple(reads), noted, tuple(makes), memory, layer, torch.is_grad_enabled(),
                None if casts == self._casts else casts,
            )
        )  # fmt: skip
        return result


def saved_tensor_hooks() -> Any:
    """Return the saved-tensor hooks that are in force, or None."""
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)
