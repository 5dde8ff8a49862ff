"""Which tensors a verdict is about: a digest of a network's names, dtypes, shapes and numbers, which goes with the proof."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from convert.core import COUNTER


def digest(network: nn.Module) -> str:
    """Digest a network's tensors: SHA-256 over the name, dtype, shape and bytes of each, in the order of their names.

    Step counters of BatchNorm are left out: they change nothing that a network computes, and few formats keep them.

    Args:
        network: whose tensors are meant, in its own dtypes, on any device.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> other.load_state_dict(one.state_dict())
        <All keys matched successfully>
        >>> digest(one) == digest(other)
        True
    """
    whole = hashlib.sha256()
    state = network.state_dict()
    for name in sorted(name for name in state if not name.endswith(COUNTER)):
        held = state[name].detach().cpu().contiguous()
        whole.update(f"{name}\0{str(held.dtype).removeprefix('torch.')}\0{tuple(held.shape)}\n".encode())
        whole.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
