"""What an "aten" node says of its operator, and how that is run on real tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.trace import Ref

aten = torch.ops.aten


def bound(node: Node) -> tuple[Any, ...]:
    """Return the operator's arguments in the order of its schema, references resolved to nodes, defaults filled in."""
    schema = node.attrs["func"]._schema.arguments
    args, kwargs = pytree.tree_map(
        lambda leaf: node.inputs[leaf] if isinstance(leaf, Ref) else leaf, (node.attrs["args"], node.attrs["kwargs"])
    )
    values = list(args)
    rest = schema[len(values) :]
    return (*values, *(kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in rest))


def run_aten(node: Node, inputs: list[Tensor], device: torch.device) -> Any:
    """Run an "aten" node on real tensors; what it makes from nothing is made on `device`."""

    def real(leaf: Any) -> Any:
        return inputs[leaf] if isinstance(leaf, Ref) else leaf

    func, (args, kwargs) = node.attrs["func"], pytree.tree_map(real, (node.attrs["args"], node.attrs["kwargs"]))
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device=device)
    if func in (aten.view.default, aten._unsafe_view.default):  # the trace's memory was contiguous, here it may be channels_last
        return aten.reshape.default(*args)
    if func is aten.native_group_norm.default:  # of a GPU: the trace leaves out the copy that PyTorch makes before
        args = (args[0].contiguous(), *args[1:])
    if isinstance(out := kwargs.get("out"), Tensor):
        kwargs = dict(kwargs, out=torch.empty_like(out))
    alias = _alias(func)
    if alias is not None and alias.is_write:
        args = (args[0].clone(), *args[1:])
    return func(*args, **kwargs)


def is_view(func: Any) -> bool:
    """Tell whether an operator shows its first argument's memory and writes none."""
    alias = _alias(func)
    return alias is not None and not alias.is_write


def _alias(func: Any) -> Any:
    return func._schema.arguments[0].alias_info if func._schema.arguments else None
