"""The arguments of an op are said once, by the signature of its `reference`; the op's other functions are bound to it.

A bound function takes what `reference` takes, by place or by name, with the same defaults. It names what it reads and ignores the rest:

    @of(reference)
    def cost(x, weight, stride, **_) -> tuple[int, int]: ...

What stands in its signature by name alone has the type and the default that `reference` says. Only arguments of its own say theirs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from zoo.kernels.ops._tuned import chosen

P = ParamSpec("P")
R = TypeVar("R")


def of(reference: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Bind a function to the arguments of `reference`.

    Returns:
        A decorator. The function that it returns raises TypeError for an argument that neither `reference` nor the function names.
    """

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        bind = _binder(reference, function)

        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            return function(**bind(args, given))

        return call

    return decorate


def partly(reference: Callable[..., object]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Bind a function as `of` does that has arguments of its own besides, or that some call with those alone which it reads."""
    return of(reference)


def launches(
    reference: Callable[..., object], configs: Callable[..., list[Any]], *, tuned: bool = False, by: tuple[str, ...] = ()
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Bind `launch`, or what it is made of, as `of` does, and give it a `config` where its caller gives none.

    Args:
        reference: whose arguments it takes.
        configs: lists launch parameters for these arguments, the best guess first, which is taken.
        tuned: take the one by which the op's `launch` is fastest, if `_tuned` knows. No config is given then where the first argument is
            empty.
        by: of a tuned op, the arguments of `reference` that a time depends on; all if empty.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        bind = _binder(reference, function, "config")
        names = tuple(inspect.signature(reference).parameters)
        op, key, names = function.__module__.rpartition(".")[2], by or names, (*names, *inspect.signature(configs).parameters)

        listing = inspect.unwrap(configs)  # what is given here is bound already
        ignores = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(listing).parameters.values())

        def best(given: dict[str, Any]) -> Any:
            if not tuned:
                return listing(**(given if ignores else _part(given, names)))[0]
            if not given[names[0]].numel():
                return None
            return chosen(
                op,
                tuple(given[name] for name in key),
                lambda: configs(**_part(given, names)),
                lambda config: function.__globals__["launch"](**_part(given, names), config=config),
            )

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> R:
            bound = bind(args, given)
            if bound.get("config") is None:
                bound["config"] = best(bound)
            return function(**bound)

        return call

    return decorate


def fastest(op: ModuleType, *args: Any, **options: Any) -> Any:
    """Return the launch parameters with which an op that is not tuned itself is the fastest at these arguments, if `_tuned` knows."""
    run = functools.partial(op.launch, *args, **options)
    name = op.__name__.rpartition(".")[2]
    return chosen(name, (*args, *options.values()), lambda: op.configs(*args, **options), lambda config: run(config=config))


def _part(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _binder(reference: Callable[..., object], function: Callable[..., object], *more: str) -> Callable[[Any, Any], dict[str, Any]]:
    """Return what makes of arguments a dict of all, defaults filled in; signatures are read here, for a launch has microseconds."""
    parameters = inspect.signature(reference).parameters.values()
    places = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    own = (p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD)
    known = {*(p.name for p in parameters), *own, *more}

    def bind(args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        placed = dict(zip(places, args, strict=False))
        if len(args) > len(places):
            raise TypeError(f"{function.__name__} takes {len(places)} arguments by place, not {len(args)}")
        if args and not placed.keys().isdisjoint(given):
            raise TypeError(f"{function.__name__} got {', '.join(placed.keys() & given)} by place and by name")
        if not known.issuperset(given):
            raise TypeError(f"{function.__name__} has no argument {', '.join(sorted(given.keys() - known))}")
        return {**defaults, **placed, **given}

    return bind


def named(names: str, entries: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return launch parameters as dictionaries, in this order, each one once.

    Args:
        names: of the parameters, with spaces between them.
        entries: the parameters.
    """
    return [dict(zip(names.split(), entry, strict=True)) for entry in dict.fromkeys(map(tuple, entries))]


def given(case: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return those arguments that a case has as they are; types are said by their names."""
    return {name: getattr(torch, case[name]) if name == "out_dtype" else case[name] for name in names if name in case}


def as_output(x: Tensor, act: str) -> Tensor:
    """Make a map of what such an activation gives, in place: ReLU no less than 0, ReLU6 no more than 6."""
    return x.clamp_(0) if act == "relu" else x.mul_(4).clamp_(0, 6) if act == "relu6" else x


@dataclass(frozen=True)
class Drawing:
    """What draws the arguments of a case.

    Attributes:
        dtype: of maps.
        device: where they lie.
        generator: of this device or of the CPU.
    """

    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator

    def normal(self, *size: int) -> Tensor:
        """Return float32 numbers around 0."""
        return torch.randn(size, generator=self.generator, device=self.generator.device).to(self.device)

    def between(self, shape: tuple[int, ...], before: int = 0, behind: int = 0) -> Tensor:
        """Return a channels_last map, or a slice of one with so many channels more before it and behind it."""
        n, c, h, w = shape
        return self.normal(n, h, w, before + c + behind).to(self.dtype).permute(0, 3, 1, 2)[:, before : before + c]

    def map(self, shape: tuple[int, ...], wide: int = 0) -> Tensor:
        """Return a channels_last map; where `wide` > 0, a slice from channel 8 on of a map with so many channels, NaN elsewhere."""
        n, c, h, w = shape
        whole = torch.full((n, h, w, wide or c), float("nan"), dtype=self.dtype, device=self.device).permute(0, 3, 1, 2)
        part = whole[:, 8 : 8 + c] if wide else whole
        return part.copy_(self.normal(*shape).to(self.dtype))
