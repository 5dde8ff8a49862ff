"""A network cut at the layers to dream of: nothing behind them runs, and what they need of a picture is known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from weights.arguments import did_you_mean
from weights.record import Preprocessing
from zoo.dreaming.layers import usual_layer
from zoo.dreaming.tiles import Reading
from zoo.dreaming.twin import fold, twin
from zoo.extraction.features import Part, no_network
from zoo.extraction.receptive_fields import window
from zoo.extraction.taps import Places, Trace, UnknownTap, trace
from zoo.kernels import Fast, plain
from zoo.networks.layers import AvgPoolSame, Conv2dSame, LayerNorm2d, LayerScale, MaxPoolSame, Permute, StochasticDepth
from zoo.networks.model import Model

IMAGENET = Preprocessing(256, 224, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
USUAL_WEIGHT = 2000.0
"""Bytes of maps for each pixel of a picture where nothing says how many; VGG19 has about as many."""
HALO = 64
"""Pixels around a tile where nothing says what its elements see."""
PIXELWISE_LAYERS = (
    *(nn.BatchNorm2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Mish, nn.ELU, nn.Tanh, LayerNorm2d, LayerScale, Permute, StochasticDepth),
)
PIXELWISE = {
    *(operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul, torch.cat, torch.relu, torch.sigmoid),
    *(
        F.relu,
        F.relu6,
        F.silu,
        F.gelu,
        F.hardswish,
        F.hardsigmoid,
        F.leaky_relu,
        F.dropout,
        torch.permute,
        "permute",
        "add",
        "mul",
        "relu",
        "sigmoid",
    ),
}
"""Layers and functions whose outputs at a place depend on their inputs at that place alone."""
SAME = (AvgPoolSame, Conv2dSame, MaxPoolSame)
"""Layers whose padding depends on the size of the map."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A network up to the layers to dream of.

    Attributes:
        run: preprocessed images (B, C, H, W) -> the maps.
        at: names of the layers.
        axes: of each map, which is the channels'.
        steps: of each map, the pixels between neighbours; None where that is not known.
        reading: what it needs of a picture.
        preprocessing: the numbers that its images are normalised by.
        channels: of its images, 1 or 3.
        device: where it runs.
        dtype: of its images.
        called: the network's name.
        weight: bytes that the maps take for each pixel of a picture.
        sizes_unknown: whether only trying tells which pictures it takes.
    """

    run: Callable[[Tensor], Sequence[Tensor]]
    at: tuple[str, ...]
    axes: tuple[int | None, ...]
    steps: tuple[int | None, ...]
    reading: Reading
    preprocessing: Preprocessing
    channels: int
    device: torch.device
    dtype: torch.dtype
    called: str
    weight: float = USUAL_WEIGHT
    sizes_unknown: bool = False

    def refuses(self, height: int, width: int) -> str | None:
        """Say why it takes no picture of this size, by trying; None where it does."""
        if min(height, width) < 1:
            return "nothing is left of it"
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.run(torch.zeros(1, self.channels, height, width, device=self.device, dtype=self.dtype))
        except UnknownTap:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            return str(error).partition("\n")[0] or type(error).__name__
        return None


def cut(model: nn.Module, at: str | Sequence[str] | None, preprocessing: Preprocessing | None = None) -> Cut:
    """Cut a network of the zoo, or any module, at one layer or several.

    Raises:
        UnknownTap: there is no such layer; the message names the nearest.
        TypeError: it is no network.
        ValueError: it is no network of pictures, has no numbers, or is no network of the zoo and no layer was named.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dream() takes a network, trained(GoogLeNet), not {no_network(model)}")
    network = plain(model)
    if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        network = network.module
    wanted = [at] if isinstance(at, str) else None if at is None else list(at)
    if wanted is not None and (not wanted or not all(isinstance(tap, str) for tap in wanted)):
        raise TypeError(f'at is a layer, "layer3", or several, ["layer2", "layer3"], not {at!r}')
    there = next((t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()), torch.empty(0))
    device = torch.device(model.device) if isinstance(model, Fast) else there.device
    dtype = torch.float64 if there.dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        made = twin(network, there.device if there.is_meta else device)
        if isinstance(made, Model):
            return _own(made, wanted, preprocessing, device, dtype)
        return _foreign(made, wanted, preprocessing or IMAGENET, device, dtype)


def _own(network: Model, wanted: list[str] | None, how: Preprocessing | None, device: torch.device, dtype: torch.dtype) -> Cut:
    name = type(network).__name__
    if network.in_channels not in (1, 3):
        raise ValueError(f"a picture has 3 channels, or 1 of grey; this {name} takes {network.in_channels}, of which no dream can be shown")
    written = trace(network)
    places = Places(network, written)
    found: dict[str, str] = {}
    for tap in wanted if wanted is not None else [usual_layer(places)]:
        found |= places.find(tap)
    nodes = {key: places.names[place] for key, place in found.items()}
    facts = [places.facts[node] for node in nodes.values()]
    fields = [fact.reach for fact in facts]
    needed = _needed(list(nodes.values()))
    same = any(isinstance(layer, SAME) for node in needed if (layer := _layer(node, network)) is not None)
    exact = all(fields) and all(_local(node, network, places.facts[node].axis) for node in needed)
    step = math.lcm(*(way.step for field in fields if field for way in field)) if all(fields) else 1
    before, after = HALO, HALO
    if all(fields):
        before, after = (
            max(edge(way) for field in fields if field for way in field) for edge in (lambda way: -way.first, lambda way: way.last)
        )
    multiple = math.lcm(network.size_multiple, step) if same else network.size_multiple
    least = network.input_size if network.fixed_size else max(2 * step, network.min_size)
    side = network.input_size if network.fixed_size else None
    reading = Reading(math.lcm(step, multiple), max(before, 0), max(after, 0), exact, multiple, side, least)
    part = _part(network, written, nodes)
    kept = [places.facts[node].shape for node in needed & set(written.graph.nodes)]  # without the BatchNorms that are folded
    weight = sum(math.prod(shape) for shape in kept if shape) * dtype.itemsize / network.input_size**2
    if how is None:
        how = network.checkpoint.preprocessing if network.checkpoint else _neutral(network.in_channels)
    steps = tuple(field[0].step if field else None for field in fields)
    axes = tuple(fact.axis for fact in facts)
    return Cut(part, tuple(nodes), axes, steps, reading, how, network.in_channels, device, dtype, name, weight)


def _part(network: Model, written: Trace, nodes: dict[str, fx.Node]) -> Callable[[Tensor], list[Tensor]]:
    """Build what computes the nodes of a twin's graph, in its order; what follows a node may overwrite it, so that each is copied."""
    folded = fold(written.graph, network, set(nodes.values()))
    nodes = {key: folded.get(node, node) for key, node in nodes.items()}
    if len(nodes) > 1:
        for key, node in nodes.items():
            with written.graph.inserting_after(node):
                nodes[key] = written.graph.call_method("clone", (node,))
    part = Part(network, written, nodes)
    return lambda x: list(part(x).values())


def _foreign(network: nn.Module, wanted: list[str] | None, how: Preprocessing, device: torch.device, dtype: torch.dtype) -> Cut:
    layers, name = dict(network.named_modules()), type(network).__name__
    if wanted is None:
        raise ValueError(f"{name} is no network of the zoo, so no layer of it is known to dream well: name one, at={list(layers)[-1]!r}")
    for tap in wanted:
        if tap not in layers or not tap:
            near = did_you_mean(tap, [known for known in layers if known], count=5) or f"; it has {', '.join(list(layers)[1:6])}, …"
            raise UnknownTap(f"{name} has no layer {tap!r}{near}")
    run = _Stopped(network, wanted)
    reading = Reading(1, HALO, HALO, exact=False)
    unknown = (None,) * len(wanted)
    return Cut(run, tuple(wanted), unknown, unknown, reading, how, 3, device, dtype, name, sizes_unknown=True)


class _Reached(Exception):
    """The last of the layers has run."""


class _Stopped:
    """Runs a module until all of some layers have run, by hooks on a twin that nobody else has."""

    def __init__(self, network: nn.Module, at: list[str]) -> None:
        self.network, self.at, self.maps = network, at, {}
        for name in at:
            network.get_submodule(name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def note(layer: nn.Module, given: Any, output: Any) -> None:
            del layer, given
            self.maps[name] = output[0] if isinstance(output, tuple | list) else output
            if len(self.maps) == len(self.at):
                raise _Reached

        return note

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.maps = {}
        try:
            self.network(x)
        except _Reached:
            found, self.maps = self.maps, {}
            return [found[name].clone() if len(self.at) > 1 else found[name] for name in self.at]
        missing = next(name for name in self.at if name not in self.maps)
        raise UnknownTap(f"{missing!r} of {type(self.network).__name__} is no part of the way from a picture to its output: name another")


def _needed(wanted: list[fx.Node]) -> set[fx.Node]:
    found, todo = set(wanted), list(wanted)
    while todo:
        new = [node for node in todo.pop().all_input_nodes if node not in found]
        found.update(new)
        todo += new
    return found


def _layer(node: fx.Node, network: nn.Module) -> nn.Module | None:
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def _local(node: fx.Node, network: nn.Module, axis: int) -> bool:
    """Tell whether what a node gives at a place depends on the places that its layer's window covers, and on no others."""
    if node.op == "call_module":
        layer = network.get_submodule(str(node.target))
        channels = axis == 3 and (type(layer) is nn.Linear or (type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1))
        return window(layer) is not None or type(layer) in PIXELWISE_LAYERS or channels
    return node.op in ("placeholder", "get_attr") or node.target in PIXELWISE


def _neutral(channels: int) -> Preprocessing:
    return IMAGENET if channels == 3 else Preprocessing(256, 224, "bilinear", (0.449,), (0.226,))
