"""Constructor options that change which tensors a network has, and the options with which a file fits it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from zoo.conversion.notes import accepted
from zoo.networks.model import Model

Shapes = dict[str, tuple[int, ...]]
MOST = 64
"""Sets of options that are tried."""


def shapes_with(model: type[Model], options: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor of the network that these options build."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in model(**options).state_dict().items()}


@cache
def choices(model: type[Model]) -> tuple[tuple[dict[str, Any], Shapes], ...]:
    """List the sets of options with which a network has other tensors than without, the smallest sets first, with their shapes.

    An option counts whose values are known: one that is true or false, or one of a few words. Pairs are listed too.

    Example:
        >>> from zoo import ResNet20
        >>> [options for options, _ in choices(ResNet20)]
        [{'shortcut': 'B'}]
    """
    usual, known = accepted(model), _values(model)
    plain = shapes_with(model, {})
    seen: list[Shapes] = [plain]
    found: list[tuple[dict[str, Any], Shapes]] = []
    others = [[(name, value) for value in values if value != usual[name]] for name, values in known.items()]
    for options in itertools.islice(_sets(others), MOST):
        try:
            shapes = shapes_with(model, options)
        except (ValueError, TypeError, LookupError):  # the network has no such option, or not both
            continue
        if shapes not in seen:
            seen.append(shapes)
            found.append((options, shapes))
    return tuple(found)


def said(options: Mapping[str, Any]) -> str:
    """Write options as their caller would: "shortcut='B'"."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _values(model: type[Model]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each option that has a few."""
    found: dict[str, tuple[Any, ...]] = {}
    for base in reversed(model.__mro__):
        if "__init__" not in vars(base) or not issubclass(base, Model):
            continue
        for name, hint in get_type_hints(base.__init__).items():
            if hint is bool:
                found[name] = (False, True)
            for one in (hint, *get_args(hint)):  # a word, or None for the network's own
                if get_origin(one) is Literal:
                    found[name] = get_args(one)
    return {name: values for name, values in found.items() if name in accepted(model)}


def _sets(others: list[list[tuple[str, Any]]]) -> Iterator[dict[str, Any]]:
    for count in (1, 2):
        for several in itertools.combinations(others, count):
            for picked in itertools.product(*several):
                yield dict(picked)
