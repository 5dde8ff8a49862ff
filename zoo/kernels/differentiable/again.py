"""Maps that nodes of autograd can make once more from what they keep anyway: such a node's `remake` takes it and what it has saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kept_of(y: Tensor) -> Any:
    """Return what a map is made again from, for `made_again`; None where that isn't kept."""
    return y.grad_fn if getattr(y.grad_fn, "remake", None) is not None else None


def made_again(node: Any) -> Tensor:
    """Return the map that `kept_of` was asked about once more, as it was; raises where its way back is done and all is let go."""
    return node.remake(node, *node.saved_tensors)
