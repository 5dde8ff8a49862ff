"""What `fast(model, train=True)` does before it returns: look at the model, and check it on images like photographs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.kernels import arguments as asked
from zoo.kernels.training.network import FastTraining
from zoo.kernels.training.record import record

IMAGES = {"cpu": 2, "cuda": 16}
"""Images of the first check, where no example is given."""


@torch.inference_mode(False)
def begin(
    model: nn.Module,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
    example: Any,
    tune: str,
    recompute: bool | None = None,
    *,
    first: str | None = None,
) -> FastTraining:
    """Make a model train fast, checked under the autocast that it will run under; arguments as `fast` takes them.

    The `first` says what `tune` does, for the example's shape alone.

    Raises:
        ValueError: the model is on another device, or refuses the example.
    """
    network = asked.core(model)
    asked.check(network)
    there = next((p.device for p in (*network.parameters(), *network.buffers())), torch.device("cpu"))
    if device is not None and asked.device_of(device, auto=True) != there:
        raise ValueError(f"its parameters are the model's, on {there}; move the model itself first: model.to({str(device)!r})")
    kind = there.type
    if dtype is None and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    dtype = asked.dtype_of(dtype, there)
    made = FastTraining(network, dtype, first or tune, recompute)
    casts = None if dtype == torch.float32 else dtype

    def refuse(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        record(module, tuple(arg.to(there) for arg in args), kwargs, there)

    try:
        args = asked.example_of(network, example, there, IMAGES.get(kind, 2), refuse)
        made.prepare(args, casts)
    except asked.Untraceable as error:
        made.refuse(str(error))
    made.__dict__["tune"] = tune
    return made
