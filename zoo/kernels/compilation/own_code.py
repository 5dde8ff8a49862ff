"""Functions that PyTorch's compiler counts each for itself."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function code of its own: the compiler counts how often it compiles the same, and stops at eight."""
    function = cast(FunctionType, call)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)
