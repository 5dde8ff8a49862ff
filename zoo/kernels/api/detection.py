"""Detection models: which boxes are kept depends on values, so one part of them runs fast, and the rest as it is."""

from __future__ import annotations

import copy
from collections import OrderedDict

from torch import nn

from zoo.kernels.reports.built_plan import Options
from zoo.kernels.comparing.copies import on_device
from zoo.kernels.comparing.sample_images import natural_images


def detects(model: nn.Module) -> bool:
    """Tell whether this is a detection model, whose other half depends on values: boxes that are kept or dropped."""
    other = any(name in dict(model.named_children()) for name in ("roi_heads", "rpn", "anchor_generator", "head"))
    return other and isinstance(getattr(model, "backbone", None), nn.Module) and hasattr(model, "transform")


def with_fast_part(model: nn.Module, part: str, options: Options) -> nn.Module:
    """Copy a detection model to the device in its own dtype, one part replaced by a fast one, checked at one size.

    Args:
        model: of those that `detects` tells.
        part: the name of the child that shall run fast.
        options: of the fast network that it will be a part of.
    """
    from zoo.kernels.api.fast import fast

    images = getattr(model.transform, "min_size", (800,))
    side = 32 * max(2, (images[0] if isinstance(images, tuple | list) else int(images)) // 64)
    example = natural_images((1, 3, side, side), options.device)
    inner = fast(
        getattr(model, part),
        options.device,
        options.dtype,
        tune=options.tune,
        tf32=options.tf32,
        progress=options.progress,
        example=example,
    )
    inner.tune = "none" if options.tune == "quick" else options.tune  # every photograph has another size
    whole = on_device(_without(model, part), options.device)
    whole.add_module(part, inner)
    return whole


def _without(model: nn.Module, name: str) -> nn.Module:
    """Return a shallow copy of a module that lacks one child."""
    twin = copy.copy(model)
    twin._modules = OrderedDict((key, child) for key, child in model._modules.items() if key != name)
    return twin
