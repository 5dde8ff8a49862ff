"""Which tensors a verdict is about: a digest of a network's names, dtypes, shapes and numbers, which goes with the proof."""

from __future__ import annotations

from torch import nn

from convert.core import COUNTER
from zoo.networks.fingerprint import digest_of


def digest(network: nn.Module) -> str:
    """Digest a network's tensors, see `fingerprint.digest_of`, in its own dtypes, on any device.

    Step counters of BatchNorm are left out: they change nothing that a network computes, and few formats keep them.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> other.load_state_dict(one.state_dict())
        <All keys matched successfully>
        >>> digest(one) == digest(other)
        True
    """
    return digest_of({name: value for name, value in network.state_dict().items() if not name.endswith(COUNTER)})
