"""`trained(VGG19)`: a network is built that a record's tensors fit, and takes all of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from convert import names
from convert.formats import safetensors
from convert.source import CONVENTIONS, SPATIALS, meant
from weights import BadRecord, Checkpoint, WeightsMismatch, recognise
from weights.arguments import forgiving, unknown_keyword, whole
from zoo.catalogue import any_class
from zoo.conversion.fitting import choices, said, shapes_with
from zoo.conversion.own import is_own
from zoo.extraction.dilation import dilate, whole_stride
from zoo.images.preprocess import at_size, with_channels
from zoo.labels import labels as labels_named
from zoo.networks.assignment import assign
from zoo.networks.model import Model
from zoo.networks.published import Published
from zoo.pretrained.classes import choose_classes, class_list
from zoo.pretrained.heads import adapt_stem, remove_head, replace_head
from zoo.pretrained.names import named, of_network
from zoo.pretrained.other_tasks import trained_other
from zoo.pretrained.own_weights import own_trained
from zoo.pretrained.resolve import find

M = TypeVar("M", bound=Published)
C = TypeVar("C", bound=Model)
N = TypeVar("N", bound=nn.Module)

WORDS = {
    "pretrained": "trained() always loads pretrained weights, and {0}() none; leave it out",
    "tag": "name it behind the network: trained({0}, TAG)",
    "checkpoint": "name it behind the network: trained({0}, PATH)",
    "device": 'trained({0}).to("cuda") moves it',
    "dtype": "trained({0}).to(torch.bfloat16) changes it",
    "features_only": "features(trained({0}), ...) and pyramid(trained({0})) give inner maps",
}
"""What to do instead of other libraries' words; {0} is the class."""


@overload
def trained(model: type[M] | str, weights: str | os.PathLike[str] | None = None, **options: Any) -> M: ...


@overload
def trained(model: type[N] | N, weights: str | os.PathLike[str] | None = None, **options: Any) -> N: ...


@forgiving
def trained(
    model: type[Any] | str | nn.Module,
    weights: str | os.PathLike[str] | None = None,
    *,
    match: bool = False,
    example: Sequence[int] | Tensor | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    classes: Iterable[str] | None = None,
    output_stride: int | None = None,
    verify: Literal["load", "stamp"] = "load",
    progress: bool = True,
    frozen: bool | None = None,
    kernel_convention: Literal["auto", "correlation", "convolution"] = "auto",
    spatial: Literal["auto", "hw", "wh"] = "auto",
    weights_of: str | None = None,
    **options: Any,
) -> Any:
    """Build `model` with pretrained weights, in eval mode, on the CPU, in torch's default dtype.

    Everything that is asked for is checked before anything is fetched.

    Example:
        >>> trained(ResNet50)  # doctest: +SKIP
        >>> trained("resnet50:imagenet1k_v1")  # doctest: +SKIP

    Args:
        model: a class of a catalogue, `VGG19` or `YOLOv3Tiny`, or one that derives from it; or what is called NAME or NAME:TAG, in any
            case. Or a `torch.nn.Module` of your own, or its class: `weights` is then a path, and the module itself is filled and
            returned, see `zoo.pretrained.own_weights.own_trained`.
        weights: None for the default checkpoint, the tag of another in any case, "hf://org/repo[@revision][/file]", "https://…",
            or a path. A known tag is a tag, whatever files lie around: "./mine" is a path. A path may lead to a file of any framework that
            `convert.formats` reads; its options and preprocessing come from the file and from its naming. Or to the folder of a
            run of `zoo finetune`, "runs/x". Of weights that no registry knows the JSON files beside them are read, config.json and
            preprocessor_config.json for example: they give options, preprocessing and labels.
        num_classes: another number of classes than the checkpoint's puts a new, untrained classifier on the trained body. Where the
            checkpoint has no classifier, as DINOv2's, the network without this gives the embedding (B, C) instead of logits.
        classes: WordNet ids and names, ["n02123045", "tabby", "dog"], instead of `num_classes`: rows of the checkpoint's classifier
            are reused, averaged for what stands above them ("dog"), and drawn anew for the rest; see `pretrained.classes`.
        output_stride: of the last map, 8 or 16: behind it, layers are dilated instead; see `zoo.extraction.dilation.dilate`.
        in_channels: another number of channels than the checkpoint's adapts the first convolution, see `zoo.pretrained.heads.adapt_stem`.
        match: derive which of a foreign file's tensors is which from topology, shapes and names, without a table.
        example: of a network of your own, the shape of one input, (C, H, W); None tries usual ones.
        verify: "load" hashes the very bytes that become tensors; "stamp" maps a file whose stamp (size, times, inode) was taken
            after a full check, for many short processes.
        progress: whether a download may show a bar; it never does where stderr is no terminal.
        frozen: whether only weights are admitted of which a record or a lock has a full hash; None does as ZOO_FROZEN says.
        kernel_convention: of a foreign file's kernels, where it doesn't say: an .npz. "auto" believes the file.
        spatial: "wh" where the networks of a foreign file have width for height; "auto" believes the file.
        weights_of: "ema" takes the averaged weights of a file that has them beside the raw ones, "raw" the others, or a key of the
            file, "model_ema"; None takes the raw ones and says so in the log.
        **options: further constructor keywords; they win over those of the checkpoint's record.

    Returns:
        The network; `model.checkpoint` is the record of its weights.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known.
        UnknownWeights: no checkpoint has this tag, or no file is at this path.
        WeightsMismatch: the file's tensors are not this network's; the message lists the first ten of each kind, its attributes all.
        BadRecord: the record contradicts the file or the network.
        TypeError, ValueError: an argument is none of the above, or the network's constructor refuses an option.
        Undecided: a foreign file doesn't say its kernel convention; `zoo convert` can decide it by evidence.
        WeightsError: the bytes could not be had, or are not what the record promises; every subclass says what to do.
    """
    told = meant("kernel_convention", kernel_convention, CONVENTIONS), meant("spatial", spatial, SPATIALS)
    if is_own(model):
        asked = {"num_classes": num_classes, "in_channels": in_channels, "classes": classes, "output_stride": output_stride}
        if given := [name for name, value in asked.items() if value is not None]:
            raise TypeError(f"{', '.join(given)}: your own network is built by your own code, and trained() only fills it; leave it out")
        own: Any = model
        return own_trained(own, weights, match=match, example=example, told=told, weights_of=weights_of, arguments=options)
    if example is not None:
        raise TypeError("example is the shape of one input of a network of your own; the zoo's networks know theirs: leave it out")
    cls, weights = _meant(model, weights)
    _check_options(cls, options)
    num_classes = None if num_classes is None else whole("num_classes", num_classes)
    in_channels = None if in_channels is None else whole("in_channels", in_channels)
    output_stride = None if output_stride is None else whole_stride(output_stride)
    wanted = None if classes is None else class_list(classes)
    if wanted is not None and num_classes is not None:
        raise ValueError(f"classes={wanted!r:.60} says how many there are; leave num_classes={num_classes} out")
    if weights_of is not None and not (isinstance(weights_of, str) and weights_of):
        raise TypeError(f'weights_of is "raw", "ema" or a key of the file, not {weights_of!r}')
    if verify not in ("load", "stamp"):
        raise ValueError(f'verify is "load" or "stamp", got {verify!r}')
    if not issubclass(cls, Model):
        asked = {"classes": wanted, "output_stride": output_stride, "in_channels": in_channels}
        _only_classifiers(cls, asked | {"kernel_convention": told[0], "spatial": told[1], "match": match or None})
        how = {"verify": verify, "progress": progress, "frozen": frozen}
        return trained_other(cls, weights, num_classes=num_classes, weights_of=weights_of, options=options, **how)
    record, tensors = find(cls, weights, verify, progress, frozen, (*told, match), num_classes is not None, options, weights_of)
    network, state = _build(cls, record, tensors, options)
    fresh = num_classes is not None and _without_head(network, state)
    if _headless(record) and not fresh:
        remove_head(network)
    try:
        _assign(network, state, record)
    except WeightsMismatch as error:
        head = network.classifiers[0]
        if error.missing and not error.unexpected and all(name.startswith(f"{head}.") for name in error.missing):
            error.args = (f"{error.args[0]}\nOnly its classifier is missing: num_classes=… puts a new one on the trained body.",)
        raise
    network.eval()
    network.checkpoint = settled(record, network, options)
    if in_channels is not None and in_channels != network.in_channels:
        adapt_stem(network, in_channels)
    if num_classes is not None and (fresh or num_classes != network.num_classes):
        replace_head(network, num_classes)
    if wanted is not None:
        choose_classes(network, wanted)
    if output_stride is not None:
        dilate(network, output_stride)
    return network


def _meant(model: Any, weights: Any) -> tuple[type[Any], str | os.PathLike[str] | None]:
    """Find the class and the weights that are named, and refuse what names none."""
    if not isinstance(model, str) and not (inspect.isclass(model) and issubclass(model, Published)):
        if isinstance(model, Published):
            name = type(model).__name__
            raise TypeError(f"trained() builds the network itself, of its class or name: trained({name}), not trained({name}())")
        shown = repr(model)
        raise TypeError(f'trained() takes a network\'s class or name, trained(VGG19) or trained("vgg19"), not {shown}')
    if not isinstance(weights, str | os.PathLike | None):
        tag = getattr(weights, "name", None)  # torchvision's ResNet50_Weights.IMAGENET1K_V2
        hint = f'; "{tag.lower()}" is the tag of that' if isinstance(tag, str) and hasattr(weights, "url") else ""
        raise TypeError(f"weights are named by a tag, a URL or a path, not by {weights!r}{hint}")
    if isinstance(model, str):
        name, weights = named(model, weights)
        return any_class(name), weights
    return model, of_network(model.variant().__name__, weights)


def _only_classifiers(cls: type[Published], asked: Mapping[str, Any]) -> None:
    """Refuse what holds for classifiers alone."""
    for name, value in asked.items():
        if value is not None:
            raise TypeError(f"{name}={value!r:.60} is for classifiers, and {cls.__name__} is a network for {cls.task}: leave it out")


def _check_options(model: type[Published], options: Mapping[str, Any]) -> None:
    """Refuse constructor keywords that the network does not take, before anything is fetched."""
    known = inspect.signature(model).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        own = [*known, *inspect.signature(trained).parameters]
        words = {key: todo.format(model.__name__) for key, todo in WORDS.items()}
        for word in options:
            if word not in known:
                raise unknown_keyword(f"trained({model.__name__})", word, own[: own.index("options")], words)
    if options:
        with torch.device("meta"):
            model(**options)


def assemble(model: type[C], record: Checkpoint, buffer: memoryview) -> C:
    """Build the network of a record from the bytes of its safetensors file, in eval mode; raises as `trained` does."""
    network, state = _build(model, record, safetensors.tensors(buffer), {})
    if _headless(record):
        remove_head(network)
    _assign(network, state, record)
    network.eval()
    network.checkpoint = settled(record, network, {})
    return network


def _build(model: type[C], record: Checkpoint, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[C, dict[str, Tensor]]:
    """Build the network that the tensors fit, on the meta device, and give the tensors its names."""
    accepted = inspect.signature(model).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    known = {"num_classes": record.num_classes} if record.num_classes and (takes_all or "num_classes" in accepted) else {}
    keywords = {**known, **record.options, **options}
    try:
        with torch.device("meta"):
            network = model(**keywords)
        state = names.to_ours(tensors, network.state_dict(), naming=record.stored_names, family=model)
    except (TypeError, ValueError, LookupError) as error:
        if options:
            raise
        raise BadRecord(f"{record.model}:{record.tag}: {error}") from error
    found = {"num_classes": _width(state, network.classifiers[0], 0), "in_channels": _width(state, network.first_layer, 1)}
    differ = {k: v for k, v in found.items() if v is not None and v != getattr(network, k) and (takes_all or k in accepted)}
    if record.num_classes and "num_classes" in differ:
        raise BadRecord(f"{record.model}:{record.tag}: the record says {record.num_classes} classes, the file has {differ['num_classes']}")
    if differ:
        with torch.device("meta"):
            network = model(**{**keywords, **differ})
    return network, network.fit_size(state) if options.get("image_size") is not None else state


def settled(record: Checkpoint, network: Model, options: Mapping[str, Any]) -> Checkpoint:
    """Complete a record by what the file and the user said, and refuse one that contradicts the network."""
    place, steps = f"{record.model}:{record.tag}", record.preprocessing
    if len(steps.mean) != network.in_channels:
        if record.num_classes:
            raise BadRecord(f"{place}: the network reads {network.in_channels} channels, and mean and std are given for {len(steps.mean)}")
        steps = with_channels(steps, network.in_channels)
    if record.labels is not None:
        try:
            count = len(labels_named(record.labels))
        except ValueError as error:
            raise BadRecord(f"{place}: {error}") from None
        if count != network.num_classes:
            raise BadRecord(f"{place}: {record.labels} has {count} labels, and the network {network.num_classes} classes")
    if network.fixed_size and network.input_size != (steps.crop or network.input_size):
        steps = at_size(steps, network.input_size)
    used = {**record.options, **options}
    metrics = dict(record.metrics) if used == record.options else {}  # they hold for the network that was measured
    return replace(record, num_classes=network.num_classes, preprocessing=steps, options=used, metrics=metrics)


def _headless(record: Checkpoint) -> bool:
    """Tell whether a record says that its file has no classifier; 0 classes alone say that nobody told."""
    return record.embedding and not record.num_classes


def _without_head(network: Model, state: dict[str, Tensor]) -> bool:
    """Put zeros where a file without a classifier has nothing, for a caller who replaces it at once; False where it has one."""
    head = [f"{network.classifiers[0]}.{leaf}" for leaf in ("weight", "bias")]
    wanted = network.state_dict()
    if any(name in state for name in head):
        return False
    state |= {name: torch.zeros(wanted[name].shape) for name in head if name in wanted}
    return True


def _width(state: Mapping[str, Tensor], layer: str, axis: int) -> int | None:
    weight = state.get(f"{layer}.weight")
    return int(weight.shape[axis]) if weight is not None and weight.dim() > axis else None


def _assign(network: Model, state: dict[str, Tensor], record: Checkpoint) -> None:
    """Make the tensors the network's own; all of them, or an error that says whose they are, if anybody knows."""
    counters = 0
    for name in network.state_dict():
        if name.endswith("num_batches_tracked") and name not in state:  # files from before PyTorch 0.4.1 have none
            state[name] = torch.zeros((), dtype=torch.int64)
            counters += 1

    def todo() -> str:
        own = state.keys() - network.state_dict().keys()
        prefix = next(iter(own), "").partition(".")[0]
        if len(own) > 1 and all(name.startswith(f"{prefix}.") for name in own) and len(own) + counters == len(state):
            return f"Every name in it begins with '{prefix}.', and without that they are not this network's either. `zoo list` shows all."
        there = {name: tuple(tensor.shape) for name, tensor in state.items()}
        own = {"num_classes": network.num_classes, "in_channels": network.in_channels}
        known = inspect.signature(type(network)).parameters
        own = {key: value for key, value in own.items() if value is not None and key in known}
        fits = next((options for options, _ in choices(type(network)) if shapes_with(type(network), {**own, **options}) == there), None)
        if fits is not None:
            name = type(network).__name__
            return f"It fits {name} with {said(fits)}: trained({name}, …, {said(fits)})."
        other = recognise(record.sha256) if record.sha256 else None
        if other is not None and other.model != record.model:
            return f"Its sha256 is that of {other.model}:{other.tag}: trained({other.model}, …)."
        return "Is it a file of another network? `zoo list` shows all; constructor keywords go into trained() too."

    assign(network, state, file=record.sources[0], todo=todo)
