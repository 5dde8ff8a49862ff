"""`trained(VGG19)`: a network is built that a record's tensors fit, and takes all of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from convert import names
from convert.formats import safetensors
from convert.source import CONVENTIONS, SPATIALS, meant
from weights import BadRecord, Checkpoint, WeightsMismatch, recognise
from zoo.extraction.dilation import dilate
from zoo.images.preprocess import with_channels
from zoo.labels import labels as labels_named
from zoo.networks.assignment import assign
from zoo.networks.model import Model
from zoo.pretrained.classes import choose_classes
from zoo.pretrained.heads import adapt_stem, replace_head
from zoo.pretrained.resolve import find

M = TypeVar("M", bound=Model)


def trained(
    model: type[M],
    weights: str | os.PathLike[str] | None = None,
    *,
    num_classes: int | None = None,
    in_channels: int | None = None,
    classes: Sequence[str] | None = None,
    output_stride: int | None = None,
    verify: Literal["load", "stamp"] = "load",
    progress: bool = True,
    frozen: bool | None = None,
    kernel_convention: Literal["auto", "correlation", "convolution"] = "auto",
    spatial: Literal["auto", "hw", "wh"] = "auto",
    **options: Any,
) -> M:
    """Build `model` with pretrained weights, in eval mode, on the CPU, in torch's default dtype.

    Args:
        model: a class of the catalogue, `VGG19`, or one that derives from it.
        weights: None for the default checkpoint, the tag of another, "hf://org/repo[@revision][/file]", "https://…", or a path. A
            known tag is a tag, whatever files lie around: "./mine" is a path. A path may lead to a file of any framework that
            `convert.formats` reads; its options and preprocessing come from the file and from its naming. Or to the folder of a
            run of `zoo finetune`, "runs/x".
        num_classes: another number of classes than the checkpoint's puts a new, untrained classifier on the trained body.
        classes: WordNet ids and names, ["n02123045", "tabby", "dog"], instead of `num_classes`: rows of the checkpoint's classifier
            are reused, averaged for what stands above them ("dog"), and drawn anew for the rest; see `pretrained.classes`.
        output_stride: of the last map, 8 or 16: behind it, layers are dilated instead; see `zoo.extraction.dilation.dilate`.
        in_channels: another number of channels than the checkpoint's adapts the first convolution, see `zoo.pretrained.heads.adapt_stem`.
        verify: "load" hashes the very bytes that become tensors; "stamp" maps a file whose stamp (size, times, inode) was taken
            after a full check, for many short processes.
        progress: whether a download may show a bar; it never does where stderr is no terminal.
        frozen: whether only weights are admitted of which a record or a lock has a full hash; None does as ZOO_FROZEN says.
        kernel_convention: of a foreign file's kernels, where it doesn't say: an .npz. "auto" believes the file.
        spatial: "wh" where the networks of a foreign file have width for height; "auto" believes the file.
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
    if not (inspect.isclass(model) and issubclass(model, Model)):
        shown = f"an instance of {type(model).__name__}" if isinstance(model, Model) else repr(model)
        raise TypeError(f"trained() takes a network's class, trained(VGG19), not {shown}")
    if not isinstance(weights, str | os.PathLike | None):
        raise TypeError(f"weights are named by a tag, a URL or a path, not by {weights!r}")
    for argument, value in (("num_classes", num_classes), ("in_channels", in_channels)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{argument} is a whole number of at least 1, got {value!r}")
    if classes is not None and num_classes is not None:
        raise ValueError(f"classes={list(classes)!r:.60} says how many there are; leave num_classes={num_classes} out")
    if verify not in ("load", "stamp"):
        raise ValueError(f'verify is "load" or "stamp", got {verify!r}')
    told = meant("kernel_convention", kernel_convention, CONVENTIONS), meant("spatial", spatial, SPATIALS)
    record, tensors = find(model, weights, verify, progress, frozen, told, num_classes is not None, options)
    network, state = _build(model, record, tensors, options)
    fresh = num_classes is not None and _without_head(network, state)
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
    if classes is not None:
        choose_classes(network, classes)
    if output_stride is not None:
        dilate(network, output_stride)
    return network


def assemble(model: type[M], record: Checkpoint, buffer: memoryview) -> M:
    """Build the network of a record from the bytes of its safetensors file, in eval mode; raises as `trained` does."""
    network, state = _build(model, record, safetensors.tensors(buffer), {})
    _assign(network, state, record)
    network.eval()
    network.checkpoint = settled(record, network, {})
    return network


def _build(model: type[M], record: Checkpoint, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[M, dict[str, Tensor]]:
    """Build the network that the tensors fit, on the meta device, and give the tensors its names."""
    accepted = inspect.signature(model).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    known = {"num_classes": record.num_classes} if record.num_classes and (takes_all or "num_classes" in accepted) else {}
    keywords = {**known, **record.options, **options}
    try:
        with torch.device("meta"):
            network = model(**keywords)
        state = names.to_ours(tensors, network.state_dict(), naming=record.names, family=model)
    except (TypeError, ValueError, LookupError) as error:
        if options:
            raise
        raise BadRecord(f"{record.model} {record.tag}: {error}") from error
    found = {"num_classes": _width(state, network.classifiers[0], 0), "in_channels": _width(state, network.first_layer, 1)}
    differ = {k: v for k, v in found.items() if v is not None and v != getattr(network, k) and (takes_all or k in accepted)}
    if record.num_classes and "num_classes" in differ:
        raise BadRecord(f"{record.model} {record.tag}: the record says {record.num_classes} classes, the file has {differ['num_classes']}")
    if differ:
        with torch.device("meta"):
            network = model(**{**keywords, **differ})
    return network, state


def settled(record: Checkpoint, network: Model, options: Mapping[str, Any]) -> Checkpoint:
    """Complete a record by what the file and the user said, and refuse one that contradicts the network."""
    place, steps = f"{record.model} {record.tag}", record.preprocessing
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
    used = {**record.options, **options}
    metrics = dict(record.metrics) if used == record.options else {}  # they hold for the network that was measured
    return replace(record, num_classes=network.num_classes, preprocessing=steps, options=used, metrics=metrics)


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
    for name in network.state_dict():
        if name.endswith("num_batches_tracked") and name not in state:  # files from before PyTorch 0.4.1 have none
            state[name] = torch.zeros((), dtype=torch.int64)

    def todo() -> str:
        other = recognise(record.sha256) if record.sha256 else None
        if other is not None and other.model != record.model:
            return f"Its sha256 is that of {other.model} {other.tag}: trained({other.model}, …)."
        return "Is it a file of another network? `zoo list` shows all; constructor keywords go into trained() too."

    assign(network, state, file=record.sources[0], todo=todo)
