"""`trained(VGG19)`: the one bridge from a network to its weights and their names."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

import weights
from convert import names
from convert.formats import pytorch, safetensors
from weights import Checkpoint, NoPretrainedWeights, UnknownWeights, WeightsMismatch
from zoo.model import CATALOGUE, Model

log = logging.getLogger("zoo")

M = TypeVar("M", bound=Model)
SHOWN = 10
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".th", ".bin", ".tar", ".ckpt")


def trained(
    model: type[M],
    source: str | os.PathLike[str] | None = None,
    *,
    num_classes: int | None = None,
    in_channels: int | None = None,
    verify: Literal["load", "stamp"] = "load",
    progress: bool = True,
    **options: Any,
) -> M:
    """Build `model` with pretrained weights, in eval mode, on the CPU, as float32.

    Args:
        model: a class of the catalogue, `VGG19`.
        source: None for the default checkpoint, the tag of another, "hf://org/repo[@revision][/file]", "https://…", or a path.
        num_classes: another number of classes than the checkpoint's puts a new, untrained classifier on the trained body.
        in_channels: another number of channels than the checkpoint's adapts the first convolution: the mean over its channels for
            one, their cyclic repetition for more, scaled so that the response to a grey image stays what it was.
        verify: "load" hashes the very bytes that become tensors; "stamp" maps a file whose stamp (size, times, inode) was taken
            after a full check, for many short processes.
        progress: whether a download may show a bar; it never does where stderr is no terminal.
        **options: further constructor keywords; they win over those of the checkpoint's record.

    Returns:
        The network; `model.checkpoint` is the record of its weights.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known.
        UnknownWeights: no checkpoint has this tag, or no file is at this path.
        WeightsMismatch: the file's tensors are not this network's; the message lists them.
        WeightsError: the bytes could not be had, or are not what the record promises; every subclass says what to do.
    """
    if not (inspect.isclass(model) and issubclass(model, Model)):
        raise TypeError(f"trained() takes a network's class, trained(VGG19), not {model!r}")
    record, tensors = _read(model, source, verify, progress)
    network, state = _build(model, record, tensors, options)
    _assign(network, state, record)
    network.eval()
    network.checkpoint = replace(record, num_classes=network.num_classes)
    if in_channels is not None and in_channels != network.in_channels:
        _adapt_stem(network, in_channels)
    if num_classes is not None and num_classes != network.num_classes:
        _replace_head(network, num_classes)
    return network


def to_safetensors(source: Path, destination: Path) -> None:
    """Rewrite the pickled checkpoint `source` as safetensors, without running any of its code."""
    pytorch.to_safetensors(source, destination)


def add_file(
    model: type[Model],
    file: str | os.PathLike[str],
    tag: str,
    *,
    license: str = "unstated",
    labels: str | None = None,
    default: bool = False,
    replaces: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Register a checkpoint of the user's own, so that ``trained(model, tag)`` finds it; its tensors must be the network's.

    Args:
        model: a class of the catalogue.
        file: a .safetensors or .pth file; the cache keeps a copy.
        tag: the checkpoint's name among the variant's.
        license: SPDX identifier, or "unstated".
        labels: the name of its list of labels, "imagenet1k" or "cifar10".
        default: whether ``trained(model)`` takes it; only where the variant has no other default.
        replaces: whether an earlier checkpoint of the user's own with this tag may go.
        preprocessing: fields of `weights.Preprocessing`; those that are missing or None are the default checkpoint's.

    Returns:
        The new record.

    Raises:
        WeightsMismatch: the file's tensors are not the network's; nothing was registered.
        BadRecord: the tag is taken, or a fact is wrong.
    """
    network = trained(model, Path(file), progress=False)
    known = network.checkpoint
    if known is None:
        raise TypeError(f"trained() gave {model.__name__} no record")
    steps = replace(known.preprocessing, **{k: v for k, v in (preprocessing or {}).items() if v is not None})
    return weights.add(
        Path(file),
        model.variant().__name__,
        tag,
        to_safetensors=to_safetensors,
        replaces=replaces,
        license=license,
        labels=labels,
        num_classes=network.num_classes,
        preprocessing=steps,
        provenance="added by the user",
        **({"default": True} if default else {}),
    )


def nearest_with_weights(model: type[Model], count: int = 3) -> list[Checkpoint]:
    """List the default checkpoints of the variants most like `model`: of its family first, then by parameter count."""
    defaults = [c for c in weights.checkpoints() if c.default and c.model in CATALOGUE and c.num_classes == _classes(model)]

    def distance(checkpoint: Checkpoint) -> tuple[bool, float]:
        other = CATALOGUE[checkpoint.model]
        return other.family() is not model.family(), abs(other.params - model.params)

    return sorted(defaults, key=distance)[:count]


def _classes(model: type[Model]) -> int:
    return inspect.signature(model).parameters["num_classes"].default


def find_record(model: type[Model], source: str | None = None) -> Checkpoint:
    """Find what `source` names: None the default checkpoint, a tag another, a URL one that no registry knows.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known; the message names the nearest that have some.
        UnknownWeights: no checkpoint has this tag.
    """
    if source is not None and "://" in source:
        return _unknown(model, source)
    try:
        return weights.find(model.variant().__name__, source)
    except NoPretrainedWeights as error:
        raise NoPretrainedWeights(_no_weights(model)) from error


def _read(model: type[Model], source: str | os.PathLike[str] | None, verify: str, progress: bool) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Find the record that `source` means, and its tensors under the file's own names."""
    if source is not None and "://" not in os.fspath(source):
        path = Path(source).expanduser()
        if path.exists() or isinstance(source, os.PathLike) or path.suffix in FILE_SUFFIXES or os.sep in str(source):
            return _read_file(model, path)
    record = find_record(model, None if source is None else os.fspath(source))
    buffer = weights.open_weights(record, to_safetensors=to_safetensors, verify=verify, progress=progress)
    return record, safetensors.tensors(buffer)


def _read_file(model: type[Model], path: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read a file where it is: nothing enters the cache; bytes that the registry knows bring their record along."""
    name = model.variant().__name__
    if not path.is_file():
        tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
        raise UnknownWeights(f"no file {path}. trained({name}, …) takes a tag ({tags}), a URL or a path.")
    sha256, buffer = weights.read_file(path)
    record = weights.recognise(sha256)
    if record is not None and record.model == name:
        log.info("%s is %s/%s by its sha256", path, record.model, record.tag)
    else:
        if record is not None:
            log.warning("%s is known as weights of %s, not of %s", path, record.model, name)
        record = _unknown(model, str(path), sha256=sha256)
    if safetensors.is_safetensors(buffer):
        return record, safetensors.tensors(buffer)
    return record, pytorch.read(path, buffer)


def _unknown(model: type[Model], source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that no registry knows; its preprocessing is assumed to be that of the default checkpoint."""
    name = model.variant().__name__
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    if default is not None:
        facts["preprocessing"] = default.preprocessing
        facts["provenance"] = f"named by the user; the preprocessing is assumed to be that of {name} {default.tag}"
    elif model.input_size < 64:  # no ImageNet network, so not ImageNet's usual preprocessing
        side = model.input_size
        facts["preprocessing"] = replace(weights.adhoc(name, source).preprocessing, resize=side, crop=side)
    record = weights.adhoc(name, source, **facts)
    log.warning("%s: %s", source, record.provenance)
    return record


def _no_weights(model: type[Model]) -> str:
    near = []
    for c in nearest_with_weights(model):
        accuracy = f", top-1 {c.metrics['top1']:.2f} %" if "top1" in c.metrics else ""
        near.append(f"{c.model} ({CATALOGUE[c.model].params / 1e6:.1f} M parameters{accuracy})")
    return (
        f"no pretrained weights of {model.__name__} are known. Nearest with weights: {', '.join(near) or 'none'}. "
        f"If you have a file: zoo add FILE --model {model.__name__} --tag mine, or trained({model.__name__}, FILE)."
    )


def _build(model: type[M], record: Checkpoint, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[M, dict[str, Tensor]]:
    """Build the network that the tensors fit, on the meta device, and give the tensors its names."""
    known = {"num_classes": record.num_classes} if record.num_classes else {}
    keywords = {**known, **record.options, **options}
    with torch.device("meta"):
        network = model(**keywords)
    state = names.to_ours(tensors, network.state_dict(), naming=record.names, family=model)
    found = {
        "num_classes": _width(state, network.classifiers[0], 0),
        "in_channels": _width(state, network.stem, 1),
    }
    differ = {k: v for k, v in found.items() if v is not None and v != getattr(network, k)}
    if differ:
        with torch.device("meta"):
            network = model(**{**keywords, **differ})
    return network, state


def _width(state: Mapping[str, Tensor], layer: str, axis: int) -> int | None:
    weight = state.get(f"{layer}.weight")
    return int(weight.shape[axis]) if weight is not None and weight.dim() > axis else None


def _assign(network: Model, state: dict[str, Tensor], record: Checkpoint) -> None:
    """Make the tensors the network's own, without a copy where the file's dtype is the network's; all of them, or an error."""
    wanted = network.state_dict()
    for name in wanted:
        if name.endswith("num_batches_tracked") and name not in state:  # files from before PyTorch 0.4.1 have none
            state[name] = torch.zeros((), dtype=torch.int64)
    missing = sorted(wanted.keys() - state.keys())
    unexpected = sorted(state.keys() - wanted.keys())
    shapes = [(n, tuple(state[n].shape), tuple(wanted[n].shape)) for n in wanted if n in state and state[n].shape != wanted[n].shape]
    if missing or unexpected or shapes:
        raise WeightsMismatch(
            f"{record.sources[0]} does not hold the weights of {type(network).__name__}:"
            + _listed("missing", missing)
            + _listed("unexpected", unexpected)
            + _listed("of another shape", [f"{n}: the file has {theirs}, the network {ours}" for n, theirs, ours in shapes])
            + "\nIs it a file of another network? `zoo list` shows all; constructor keywords go into trained() too."
        )
    network.load_state_dict({n: t.to(wanted[n].dtype) for n, t in state.items()}, assign=True)


def _listed(what: str, lines: list[str]) -> str:
    if not lines:
        return ""
    more = f"\n    … and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"\n  {len(lines)} {what}:" + "".join(f"\n    {line}" for line in lines[:SHOWN]) + more


def _adapt_stem(network: Model, in_channels: int) -> None:
    """Let the first convolution read `in_channels` channels; a grey image gives what it gave as RGB."""
    stem = network.get_submodule(network.stem)
    if not isinstance(stem, nn.Conv2d):
        raise TypeError(f"{network.stem} of {type(network).__name__} is a {type(stem).__name__}, not a convolution")
    old = stem.weight.data
    count = old.shape[1]
    new = old.mean(1, keepdim=True) if in_channels == 1 else old[:, [i % count for i in range(in_channels)]]
    stem.weight = nn.Parameter((new * (count / in_channels)).contiguous())
    stem.in_channels = network.in_channels = in_channels
    checkpoint = network.checkpoint
    if checkpoint is not None:
        old_mean, old_std = checkpoint.preprocessing.mean, checkpoint.preprocessing.std
        cycle = [i % count for i in range(in_channels)]
        mean, std = ((sum(values) / count,) if in_channels == 1 else tuple(values[i] for i in cycle) for values in (old_mean, old_std))
        network.checkpoint = replace(checkpoint, preprocessing=replace(checkpoint.preprocessing, mean=mean, std=std), metrics={})
    log.warning("%s: %s now reads %d channels instead of %d", type(network).__name__, network.stem, in_channels, count)


def _replace_head(network: Model, num_classes: int) -> None:
    """Put a new, untrained classifier of `num_classes` on the trained body."""
    for name in network.classifiers:
        try:
            old = network.get_submodule(name)
        except AttributeError:  # an auxiliary head that this network was built without
            continue
        if isinstance(old, nn.Conv2d):
            new: nn.Module = nn.Conv2d(old.in_channels, num_classes, (old.kernel_size[0], old.kernel_size[1]), bias=old.bias is not None)
        elif isinstance(old, nn.Linear):
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
        else:
            raise TypeError(f"{name} of {type(network).__name__} is a {type(old).__name__}, not a layer with one output per class")
        network.initialise_layer(name, new)
        network.set_submodule(name, new.to(next(network.parameters()).dtype).eval())
    had, network.num_classes = network.num_classes, num_classes
    if network.checkpoint is not None:
        network.checkpoint = replace(network.checkpoint, num_classes=num_classes, labels=None, metrics={})
    log.warning("%s: %s is new and untrained, %d classes instead of %d", type(network).__name__, network.classifiers[0], num_classes, had)
