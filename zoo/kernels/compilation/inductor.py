"""PyTorch's compiler, given a graph of operators or a function: what it makes looks at no state of the process in a later call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zoo.kernels.compilation.forking import compiling


def graph_compiled(graph: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of operators for inputs like these.

    Raises:
        Exception: whatever the compiler stumbles over.
    """
    from torch._inductor import compile as inductor

    with warnings.catch_warnings(), compiling():
        warnings.simplefilter("ignore")  # the compiler's, about itself
        made: Any = inductor(graph, list(given))
    return made


def function_compiled(call: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
    """Write down what a function of tensors computes, without gradients, compile that for inputs like these, and run it once.

    Raises:
        Exception: whatever the function, the compiler or what it made stumbles over; what fails here would fail in every call.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = graph_compiled(make_fx(call)(*given), given)
        made(*given)
    return made
