"""`trained(my_module, "x.h5")`: a network of the user's own takes the tensors of a file of any framework."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from convert import sandbox
from convert.source import Convention, Spatial
from weights import UnknownWeights
from weights.places import at_home
from zoo.conversion.foreign import load
from zoo.conversion.namings import adopted
from zoo.conversion.own import built, by_own_names, own_network
from zoo.pretrained.resolve import all_finite

log = logging.getLogger("zoo")
N = TypeVar("N", bound=nn.Module)


def own_trained(
    model: N | type[N],
    path: str | os.PathLike[str] | None,
    *,
    match: bool = False,
    example: Sequence[int] | Tensor | None = None,
    told: tuple[Convention | None, Spatial | None] = (None, None),
    weights_of: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> N:
    """Fill a network of the user's own from a file of any framework; nothing is proven, as `zoo convert` would.

    Tensors are given their places by equal names; else by topology, shapes and names; a file that keeps only an order, by order and shape.
    A PyTorch or safetensors file with all of the module's names and shapes, and no others, goes in as it is: then nothing is computed, so
    that a network may take anything, tokens and sequences too.

    Args:
        model: a module, which is filled, or its class, which is built.
        path: of the file.
        match: derive the places from topology, shapes and names even where names are equal.
        example: the shape of one input, (C, H, W) or (N,); None tries usual ones.
        told: the convention of the file's kernels and the order of their sides, where it doesn't say.
        weights_of: of a file with raw and averaged weights, as `trained` takes it.
        arguments: of the class.

    Returns:
        The module itself, in eval mode, on its device and in its dtype.

    Raises:
        UnknownWeights: no path is given, or nothing is there.
        WeightsMismatch, NoUniqueMatch: the file's tensors are not the network's, or fit it in several ways.
        NonFinite: the file holds NaN or an infinity.
        Undecided: the file doesn't say its kernel convention; `zoo convert` can decide it by evidence.

    Example:
        >>> from torch import nn
        >>> own_trained(nn.Conv2d(1, 8, 3), "denoiser.mat")  # doctest: +SKIP
    """
    name = model.__name__ if inspect.isclass(model) else type(model).__name__
    if path is None:
        raise UnknownWeights(f"no weights of {name} are known, which is your own: trained({name}, PATH) takes a file of any framework")
    place = at_home(path)
    made: Any = built(model, arguments)
    with sandbox.read(place, weights_of=weights_of) as source:
        ready = None if match or told != (None, None) else by_own_names(made, source)
        if ready is None:
            cls = own_network(made, example)
            if cls.assumed_shape:
                log.info("%s is tried with one input of %s; example=(C, H, W) says another", name, "x".join(map(str, cls.image_shape)))
            found = adopted(source, cls, match=match, convention=told[0], spatial=told[1])
            ready = load(found).state_dict()
            for note in found.adopted.notes:
                log.warning("%s: %s", place, note)
        _check(ready, made, place)
    return _filled(made, ready)


def _check(tensors: Mapping[str, Tensor], network: nn.Module, place: Path) -> None:
    """Refuse NaN and infinity, but for buffers that are just so in the network itself, as masks of attention are."""
    own = dict(network.named_buffers())
    all_finite({name: one for name, one in tensors.items() if name not in own or not torch.equal(one, own[name].to(one))}, place)


def _filled(network: N, tensors: Mapping[str, Tensor]) -> N:
    with torch.no_grad():
        for key, tensor in network.state_dict().items():
            tensor.copy_(tensors[key])
    return network.eval()
