"""Parts of a network that run fast where the network as a whole can't: boxes depend on values, what they are read from doesn't."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from zoo.kernels.reports.report import Report

FEWEST = 16
"""Rows that a part for crops is planned for at least."""


def parts_of(network: nn.Module) -> dict[str, str]:
    """Return the names of the parts to make fast, and what they compute; none of a network that is fast as a whole.

    A network says its own in `fast_parts`: methods, dotted where a child has them, that take and return tensors and depend on no value.
    The first takes images, all others any number of crops. Of torchvision's detection models it is the backbone.
    """
    own = getattr(network, "fast_parts", None)
    if isinstance(own, Mapping):
        return dict(own)
    children = dict(network.named_children())
    detects = any(name in children for name in ("roi_heads", "rpn", "anchor_generator", "head"))
    if detects and isinstance(children.get("backbone"), nn.Module) and hasattr(network, "transform"):
        return {"backbone": "the backbone"}
    return {}


class Method(nn.Module):
    """A method of a module as a module, which can be traced."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        """Take `name` of `owner`."""
        super().__init__()
        self.owner, self.name = owner, name

    def forward(self, *args: Any) -> Any:
        """Call the method."""
        return getattr(self.owner, self.name)(*args)


class Rows(nn.Module):
    """A part that computes each row by itself, for any number of rows: they are filled up to a power of two, so that few plans serve."""

    def __init__(self, part: nn.Module) -> None:
        """Take the part."""
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        """Compute (N, ...), N from 0 on."""
        count = len(x)
        size = max(FEWEST, 1 << max(0, count - 1).bit_length())
        filled = F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - count))
        return pytree.tree_map_only(Tensor, lambda leaf: leaf[:count], self.part(filled))


def with_parts(
    network: nn.Module, parts: Mapping[str, str], made: Callable[[nn.Module], nn.Module], device: torch.device
) -> tuple[nn.Module, list[nn.Module]]:
    """Copy a network to a device in its own dtype, its parts replaced by what is `made` of them; return these, too."""
    from zoo.kernels.comparing.copies import on_device

    twin, fast = copy.copy(network), []
    whole_children = [name for name in parts if isinstance(getattr(network, name, None), nn.Module)]
    twin._modules = OrderedDict((name, child) for name, child in network._modules.items() if name not in whole_children)
    whole = on_device(twin, device)
    for index, name in enumerate(parts):
        if name in whole_children:
            fast.append(made(getattr(network, name)))
            whole.add_module(name, fast[-1])
            continue
        owner, _, method = name.rpartition(".")
        fast.append(made(Method(network.get_submodule(owner), method)))
        whole.get_submodule(owner).__dict__[method] = Rows(fast[-1]) if index else fast[-1]  # no child: it has no names of its own
    return whole, fast


def together(reports: list[Report], unchanged: str) -> Report:
    """Return one report of all parts."""
    reasons = [one.unchanged for one in reports if one.unchanged]
    return replace(
        reports[0],
        plans=[plan for one in reports for plan in one.plans],
        unchanged="; ".join([unchanged, *reasons]),
        unplanned=[line for one in reports for line in one.unplanned],
        told=list(dict.fromkeys(line for one in reports for line in one.told)),
    )
