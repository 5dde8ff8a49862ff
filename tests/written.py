"""A network's tensors by others' names: what `convert.writing.parts` hands to a writer, of networks that may be on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from convert.core import COUNTER, Row
from convert.network import Layer
from convert.source import Stored, in_memory
from convert.writing import parts


def written(rows: Sequence[Row], state: Mapping[str, Tensor | Stored], layers: Sequence[Layer] = ()) -> dict[str, Stored]:
    """List the tensors that a writer gets, by their names in the file; each `origin` is our name, or says that ours has none.

    A meta tensor counts as ones where it is a scale, else as zeros, since a BatchNorm without a scale there must have ones here.
    """
    tensors = {name: _stored(name, tensor) for name, tensor in state.items() if not name.endswith(COUNTER)}
    return {
        f"{part.name}.{leaf}".removeprefix("."): stored for part in parts(rows, layers, tensors) for leaf, stored in part.leaves.items()
    }


def _stored(name: str, tensor: Tensor | Stored) -> Stored:
    if isinstance(tensor, Stored):
        return tensor
    if not tensor.is_meta:
        return in_memory(name, tensor.numpy())
    scale = name.endswith(".weight") and tensor.dim() == 1
    return in_memory(name, np.broadcast_to(np.float32(scale), tuple(tensor.shape)))
