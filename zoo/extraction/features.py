"""Features of any network: a dict of its inner tensors, and nothing computed past the last of them."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor, fx, nn

from weights.arguments import forgiving
from zoo.extraction.dilation import changed, changes
from zoo.extraction.taps import BODY, STRIDE, Places, Tap, Trace, trace
from zoo.kernels import Fast, fast, plain
from zoo.networks.model import Model, check_images

if TYPE_CHECKING:
    from weights import Checkpoint

LEVELS = {"C2": 4, "C3": 8, "C4": 16, "C5": 32}


class Part(nn.Module):
    """Some of a network's layers, run as the network runs them.

    The layers are the network's very own modules, under their own names, inside containers of the same classes; what isn't needed is
    left out. So training one trains the other, and so it is with `train`, `eval` and `to`; hooks on layers run, those on containers
    don't.
    """

    _run: Any
    """The forward method of the graph, as torch.fx writes it: of this module and a tensor."""

    def __init__(self, network: Model, written: Trace, wanted: Any) -> None:
        """Build it of the layers that `wanted` needs: a node of the trace, or a dict of them."""
        super().__init__()
        self.in_channels, self.input_size, self.min_size = network.in_channels, network.input_size, network.min_size
        self.fixed_size, self.size_multiple = network.fixed_size, network.size_multiple
        self.checkpoint: Checkpoint | None = network.checkpoint
        self.network_name = type(network).__name__
        graph = _cut(written.graph, wanted)
        layers = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        tensors = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        shell = _copied(network, layers, {}, tensors)
        self._modules, self._parameters, self._buffers = shell._modules, shell._parameters, shell._buffers
        self.training = network.training
        code = graph.python_code("self")
        self._source = code.src
        self._globals = {name: _portable(value) for name, value in code.globals.items()}
        self._compile()

    def _compile(self) -> None:
        name = f"<features of {self.network_name}>"
        found = {key: importlib.import_module(value) if isinstance(value, _ModuleName) else value for key, value in self._globals.items()}
        exec(compile(self._source, name, "exec"), found)
        self._run = found["forward"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is compiled from the rest."""
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compile anew."""
        super().__setstate__(state)
        self._compile()

    def preprocess(self, images: Any) -> Tensor:
        """Turn images into the batch that the network's checkpoint was measured with; see `Model.preprocess`."""
        from zoo.images.preprocess import preprocess

        if self.checkpoint is None:
            raise ValueError(
                f"the {self.network_name} that these layers come from is untrained, so no preprocessing belongs to it; take them from "
                f"trained({self.network_name}), or use zoo.images.preprocess.preprocess(images, preprocessing) with one of your own"
            )
        return preprocess(images, self.checkpoint.preprocessing).to(next(self.parameters()).device)

    def forward(self, x: Tensor) -> Any:
        """Run it on `x`, the network's images or its last map."""
        return self._run(self, x)


class Features(Part):
    """A dict of tensors of a network, {key: (B, C, H, W)}; `features` and `pyramid` make it.

    Attributes:
        taps: what is known of each tensor without running anything: channels, stride, receptive field, whose output it is.

    Example:
        >>> taken = features(ResNet20().eval(), at="layer2")
        >>> taken.taps["layer2"].stride
        2
        >>> taken(torch.randn(2, 3, 32, 32))["layer2"].shape
        torch.Size([2, 32, 16, 16])
    """

    def batch_of(self, images: Any) -> Tensor:
        """Return many images as a preprocessed batch on the CPU; see `Model.batch_of`."""
        from zoo.images.batch import batch

        if self.checkpoint is None:
            raise ValueError(f"the {self.network_name} that these layers come from is untrained; give preprocessed tensors")
        return batch(images, self.checkpoint.preprocessing, self.in_channels)

    def __init__(self, network: Model, written: Trace, places: Places, named: Mapping[str, str]) -> None:
        """Build it of the places that `named` gives keys to."""
        super().__init__(network, written, {key: places.names[place] for key, place in named.items()})
        self.taps: dict[str, Tap] = {key: places.tap(key, place) for key, place in named.items()}

    @property
    def channels(self) -> dict[str, int | None]:
        """Size of axis 1 by key."""
        return {key: tap.channels for key, tap in self.taps.items()}

    @property
    def strides(self) -> dict[str, int | None]:
        """Pixels of the image between neighbours of the map by key; None where it is no map.

        Raises:
            ValueError: of a map none is known; the message names the layer.
        """
        return {key: _known(tap).stride for key, tap in self.taps.items()}

    @property
    def receptive_fields(self) -> dict[str, int | None]:
        """Side in pixels of what one element sees, by key; None where that is the whole image. See `Tap`; raises as `strides`."""
        return {key: _known(tap).receptive_field for key, tap in self.taps.items()}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the tensors of preprocessed images (B, `in_channels`, H, W).

        Raises:
            ValueError: as in `Model.forward`.
        """
        check_images(x, self, self.network_name)
        return self._run(self, x)


class Body(Part):
    """A network up to its last map; `body` makes it.

    Attributes:
        out_channels: of the map, as torchvision's detectors ask for it.
        stride: pixels of the image between neighbours of the map.
    """

    out_channels: int | None
    tap: Tap

    @property
    def stride(self) -> int | None:
        """Pixels of the image between neighbours of the map, None for tokens; ValueError where it is not known."""
        return _known(self.tap).stride

    def forward(self, x: Tensor) -> Tensor:
        """Compute the last map (B, `out_channels`, H', W') of preprocessed images; ValueError as in `Model.forward`."""
        check_images(x, self, self.network_name)
        return self._run(self, x)


@overload
def features(model: Fast, at: str | Iterable[str] | Mapping[str, str], *, output_stride: int | None = None) -> Fast: ...
@overload
def features(model: Model, at: str | Iterable[str] | Mapping[str, str], *, output_stride: int | None = None) -> Features: ...
@forgiving
def features(model: Model | Fast, at: str | Iterable[str] | Mapping[str, str], *, output_stride: int | None = None) -> Features | Fast:
    """Return a module that computes inner tensors of a network, and nothing past the last of them.

    It is differentiable, works in train and eval mode, under torch.compile and torch.export, and in `fast`. The layers are the
    network's own, see `Part`; with an output stride, those that change are new ones around the same parameters.

    Args:
        model: any network of the zoo, or what `fast` made of one: then the features are fast too.
        at: taps, or {key: tap} to choose the keys of the result. A tap is a module's name ("layer3", "features.4.conv"); a glob over the
            parts of names ("layer3.*" is that level's children); "stride/8", the last map at that stride among the blocks;
            "embedding", the pooled vector (B, C) that the classifier reads, without dropout; "body", the last map; "logits"; or a name
            of the paper: "relu4_2" in VGG, "fire9" in SqueezeNet.
        output_stride: stride of the last map, 8 or 16; see `zoo.extraction.dilation.dilate`. The model itself keeps its own.

    Returns:
        `Features`; keys are the taps, and the matching names for a glob, in the order of `at`.

    Raises:
        UnknownTap: the network has no such place; the message names the nearest.
        ValueError: `at` is empty, or the output stride can't be had.
        TypeError: `model` is no network of the zoo, or `at` no taps.

    Examples:
        >>> from zoo import ResNet20, features
        >>> taken = features(ResNet20().eval(), at=["layer2", "stride/4", "embedding"])
        >>> taken.channels
        {'layer2': 32, 'stride/4': 64, 'embedding': 64}
    """
    network = _network(model, "features")
    wanted = _asked(at)
    network = _dilated(network, output_stride)
    written = trace(network)
    places = Places(network, written)
    named: dict[str, str] = {}
    for key, tap in wanted:
        found = places.find(tap)
        if key is not None and len(found) > 1:
            raise ValueError(f"{tap!r} means {len(found)} tensors, {', '.join(list(found)[:3])}, …; one key, {key!r}, can't hold them")
        named |= found if key is None else {key: next(iter(found.values()))}
    return _as_fast_as(model, Features(network, written, places, named))


@forgiving
def pyramid(model: Model | Fast, output_stride: int | None = None) -> Features | Fast:
    """Return a network's last maps at strides 4, 8, 16 and 32 under the names C2, C3, C4 and C5, as detection and segmentation take them.

    Args:
        model: any network of the zoo, or what `fast` made of one.
        output_stride: 8 or 16 dilates what lies behind; C5 is then the same layer's map at that stride. None changes nothing.

    Vision transformers have one map, of patches. It is resized to the four strides, as in section 2 of ViTDet, without layers of its own.

    Returns:
        `Features`; where a network ends before stride 32 (SqueezeNet), without the levels that it has none of. Feed
        ``list(pyramid(model).channels.values())`` to torchvision's FeaturePyramidNetwork.

    Raises:
        ValueError: the network has fewer than two of these maps (those for CIFAR, MLPs of patches), or can't have the output stride.
        TypeError: `model` is no network of the zoo.

    Source:
        Lin et al. 2016, section 3, for the names (https://arxiv.org/abs/1612.03144); ViTDet: Li et al. 2022, https://arxiv.org/abs/2203.16527.

    Example:
        >>> pyramid(ResNet18()).channels
        {'C2': 64, 'C3': 128, 'C4': 256, 'C5': 512}
    """
    network = _network(model, "pyramid")
    written = trace(network)
    places = Places(network, written)
    if network.first_patch is not None:
        _dilated(network, output_stride)  # says why it can't be
        return _as_fast_as(model, Features(network, written, places, {level: places.resized(stride) for level, stride in LEVELS.items()}))
    strides = places.strides
    if places.unknown:
        raise ValueError(f"{type(network).__name__} has no pyramid: no stride is known behind {places.unknown}")
    levels = {level: strides[stride] for level, stride in LEVELS.items() if stride in strides}
    if len(levels) < 2:
        has = ", ".join(f"{STRIDE}{stride}" for stride in sorted(strides)) or "tokens, by modules' names"
        small = " is for small images and" if network.input_size <= 32 else ""
        raise ValueError(f"{type(network).__name__}{small} has no pyramid of strides 4 to 32; features(model, at=…) has {has}")
    return features(model, levels, output_stride=output_stride)


@forgiving
def body(model: Model | Fast, output_stride: int | None = None) -> Body | Fast:
    """Return a network up to its last map as a module that shares its layers: ``head(model)(body(model)(x))`` is ``model(x)``.

    Args:
        model: any network of the zoo, or what `fast` made of one.
        output_stride: as in `features`.

    Raises:
        ValueError: the output stride can't be had.
        TypeError: `model` is no network of the zoo.

    Example:
        >>> body(ResNet20().eval())(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 64, 8, 8])
    """
    network = _dilated(_network(model, "body"), output_stride)
    written = trace(network)
    made = Body(network, written, written.outputs[BODY])
    made.tap = Places(network, written).tap(BODY, BODY)
    made.out_channels = made.tap.channels
    return _as_fast_as(model, made)


@forgiving
def head(model: Model | Fast) -> Part:
    """Return what a network does with its last map, as a module that shares its layers: pooling, dropout and classifier.

    Raises:
        TypeError: `model` is no network of the zoo.

    Example:
        >>> head(ResNet20().eval())(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 10])
    """
    network = _network(model, "head")
    written = trace(network, head_only=True)
    return Part(network, written, written.result)


def no_network(given: Any) -> str:
    """Say what was given where a network belongs, and what to do where that is plain."""
    if isinstance(given, type):
        return f"the class {given.__name__}: build it first"
    if isinstance(given, str):
        return f"{given!r}; trained({given!r}) builds a network" if given.isidentifier() else f"{given!r:.60}; the network comes first"
    return f"a {type(given).__name__}"


def _network(model: Any, function: str) -> Model:
    network = plain(model) if isinstance(model, nn.Module) else model
    if not isinstance(network, Model):
        shown = no_network(model)
        todo = "; of a module of your own, module.get_submodule(NAME).register_forward_hook(...) gives a layer's output"
        own = todo if isinstance(model, nn.Module) else ""
        raise TypeError(f"{function}() takes a network of the zoo, such as trained(ResNet50), not {shown}{own}")
    return network


def _asked(at: Any) -> list[tuple[str | None, str]]:
    """List keys and taps; a key of None is the tap's own."""
    if isinstance(at, str):
        wanted: list[tuple[str | None, str]] = [(None, at)]
    elif isinstance(at, Mapping):
        wanted = list(at.items())
    elif isinstance(at, Iterable):
        wanted = [(None, tap) for tap in at]
    else:
        raise TypeError(f'at is taps, ["layer2", "embedding"], or {{key: tap}}, not {at!r}')
    for key, tap in wanted:
        if not isinstance(tap, str) or not isinstance(key, str | None):
            raise TypeError(f"a tap and its key are strings, not {tap if not isinstance(tap, str) else key!r}")
    if not wanted:
        raise ValueError('at names no taps; "embedding" is one that every network has')
    return wanted


def _as_fast_as(model: nn.Module, made: Any) -> Any:
    if not isinstance(model, Fast):
        return made
    return fast(made, model.device, model.dtype, tune=model.tune, tf32=model.tf32, progress=model.progress)


def _dilated(network: Model, output_stride: int | None) -> Model:
    """Return the network with another output stride; its containers are copies, so that the one that was given keeps its layers."""
    if output_stride is None:
        return network
    return _copied(network, None, {change.name: changed(change) for change in changes(network, output_stride)})


def _known(tap: Tap) -> Tap:
    """Return a tap whose stride is what it says; None means that there is none, and never that none is known."""
    if tap.unknown:
        raise ValueError(f"of {tap.key!r} no stride and no receptive field are known, behind {tap.unknown}")
    return tap


def _copied(
    module: Any, used: set[str] | None, replaced: Mapping[str, nn.Module], tensors: set[str] | None = None, prefix: str = ""
) -> Any:
    """Copy containers, not layers: without the layers that are not `used` (None: with all), and with those in `replaced`.

    Of a container's own parameters and buffers the copy has those in `tensors` (None: all of them).
    """
    if prefix in replaced:
        return replaced[prefix]
    if not module._modules or (used is not None and prefix in used):
        return module
    shell = module.__class__.__new__(module.__class__)
    shell.__dict__ = {k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in module.__dict__.items()}
    if tensors is not None:
        for kind in ("_parameters", "_buffers"):
            own: dict[str, Any] = getattr(shell, kind)
            shell.__dict__[kind] = {name: own[name] for name in own if (f"{prefix}.{name}" if prefix else name) in tensors}
    inside: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        path = f"{prefix}.{name}" if prefix else name
        if child is None:
            inside[name] = None
        elif used is None or any(other == path or other.startswith(f"{path}.") for other in used | (tensors or set())):
            inside[name] = _copied(child, used, replaced, tensors, path)
    shell._modules = inside
    return shell


def _cut(graph: fx.Graph, wanted: Any) -> fx.Graph:
    """Copy what the `wanted` nodes need, and no more."""
    needed: set[fx.Node] = set()
    fx.map_arg(wanted, lambda node: needed.add(node))
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    cut, twins = fx.Graph(), {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            twins[node] = cut.node_copy(node, lambda n: twins[n])
    cut.output(fx.map_arg(wanted, lambda n: twins[n]))
    return cut


class _ModuleName(str):
    """Stands for an imported module, which can't be pickled."""


def _portable(value: Any) -> Any:
    return _ModuleName(value.__name__) if isinstance(value, types.ModuleType) else value
