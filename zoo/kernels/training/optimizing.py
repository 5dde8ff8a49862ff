"""An optimiser in the form that a CUDA graph needs: steps counted on the device, the rate a tensor, everything in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Prepared:
    """An optimiser whose step can be captured, if it can.

    SGD, Adam and AdamW become `fused`; others with an option `capturable` get it; of the rest the step stays outside of the graph.

    Args:
        optimizer: its groups are changed in place.

    Attributes:
        inside: whether a graph may contain its step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: list[Tensor] = []
        self._prepare()

    def _prepare(self) -> None:
        optimizer = self.optimizer
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(optimizer, "_optimizer_step_post_hooks", None)
        fusable = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        self.inside = not hooks and all((fusable and _may_fuse(group)) or "capturable" in group for group in optimizer.param_groups)
        self._groups, self._state = optimizer.param_groups, optimizer.state
        self._rates = []
        if not self.inside:
            return
        for group in optimizer.param_groups:
            device = group["params"][0].device
            if "capturable" in group:
                group["capturable"] = True
            if fusable and _may_fuse(group):
                group["fused"], group["foreach"] = True, False
                optimizer._step_supports_amp_scaling = True  # pyright: ignore[reportAttributeAccessIssue]
            group["lr"] = torch.as_tensor(float(group["lr"]), dtype=torch.float32, device=device)
            self._rates.append(group["lr"])
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and isinstance(count := state.get("step"), Tensor):
                    state["step"] = count.to(device, torch.float32)

    def renew(self) -> bool:
        """Take over rates that were set as numbers; tell whether the optimiser has other tensors than before, as when it was loaded."""
        if self.optimizer.param_groups is not self._groups or self.optimizer.state is not self._state:
            self._prepare()
            return True
        for group, rate in zip(self._groups, self._rates, strict=False):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        return False

    def numbers(self) -> Any:
        """Return what of the groups is part of a graph."""
        if not self.inside:
            return ()
        return tuple((name, value) for group in self._groups for name, value in group.items() if isinstance(value, _NUMBERS))


_NUMBERS = (bool, int, float, tuple)


def _may_fuse(group: dict[str, Any]) -> bool:
    return not group.get("differentiable") and all(p.is_cuda and p.is_floating_point() for p in group["params"])
