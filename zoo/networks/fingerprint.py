"""Whether a network has the numbers that it had: one hash of its parameters and buffers."""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor, nn


def state_digest(network: nn.Module) -> str:
    """Return the BLAKE3 of a network's parameters and buffers, with their names, types and shapes.

    Example:
        >>> state_digest(trained(ResNet20)) == state_digest(trained(ResNet20))  # doctest: +SKIP
        True
    """
    return digest_of({**dict(network.named_parameters()), **dict(network.named_buffers())})


def digest_of(tensors: dict[str, Tensor], told: str = "") -> str:
    """Return the BLAKE3 of tensors, with their names, types and shapes, and of what else is `told`."""
    digest = blake3(told.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
