"""Nodes of autograd, each two functions: the way there and the way back.

Some can make their map once more from what they keep anyway: such a node's `remake` takes it and what it has saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def node(back: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function one node of autograd.

    Args:
        back: takes what the function has kept in its first argument, and the gradients of its results. It returns the gradients of the
            function's other arguments, which are not differentiable again.

    Returns:
        A decorator. What it returns takes the other arguments.
    """

    def decorate(there: Callable[..., Any]) -> Callable[..., Any]:
        methods = {"forward": staticmethod(there), "backward": staticmethod(once_differentiable(back)), "__doc__": there.__doc__}
        return type("_" + there.__name__.title().replace("_", ""), (torch.autograd.Function,), methods).apply

    return decorate


def kept_of(y: Tensor) -> Any:
    """Return what a map is made again from, for `made_again`; None where that isn't kept."""
    return y.grad_fn if getattr(y.grad_fn, "remake", None) is not None else None


def made_again(node: Any) -> Tensor:
    """Return the map that `kept_of` was asked about once more, as it was; raises where its way back is done and all is let go."""
    return node.remake(node, *node.saved_tensors)
