"""A network set apart: module objects of its own around the same numbers, so that nothing that happens to them reaches the user's."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def apart(module: M, device: torch.device | None = None, dtype: torch.dtype | None = None) -> M:
    """Return modules of the same classes in eval mode that share their tensors' memory with `module`, which stays as it is.

    The tensors ask for no gradient, no layer works in place, and there are no hooks. A crash, an interrupt or another thread therefore
    finds the user's network as it was.

    Args:
        module: any, frozen or not, in train or eval mode.
        device: another device copies the tensors there.
        dtype: another type copies the floating-point tensors.
    """
    return _apart(module, device, dtype, {})


def _apart(module: Any, device: torch.device | None, dtype: torch.dtype | None, made: dict[int, Any]) -> Any:
    if id(module) in made:
        return made[id(module)]
    twin = module.__class__.__new__(module.__class__)
    made[id(module)] = twin
    twin.__dict__ = {name: _tensor(value, device, dtype) if isinstance(value, Tensor) else value for name, value in module.__dict__.items()}
    for kind in ("_parameters", "_buffers"):
        own = module.__dict__[kind]
        twin.__dict__[kind] = {name: value if value is None else _tensor(value, device, dtype) for name, value in own.items()}
    children = module.__dict__["_modules"].items()
    twin.__dict__["_modules"] = {name: None if child is None else _apart(child, device, dtype, made) for name, child in children}
    for hooks in HOOKS:
        twin.__dict__[hooks] = {}
    twin.__dict__["training"] = False
    if getattr(twin, "inplace", False) is True:
        twin.__dict__["inplace"] = False
    return twin


def _tensor(value: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    own = value.clone() if value.is_inference() else value.detach()  # autograd refuses what inference mode made
    if device is not None or dtype is not None:
        own = own.to(device=device, dtype=dtype if own.is_floating_point() else None)
    return nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own
