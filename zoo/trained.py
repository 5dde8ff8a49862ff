"""`trained(VGG19)`: the one bridge from a network to its weights and their names."""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import weights
from convert import formats, names, sandbox
from convert.formats import safetensors
from convert.source import Stored
from weights import (
    BadRecord,
    Checkpoint,
    HashMismatch,
    NoPretrainedWeights,
    Preprocessing,
    UnknownWeights,
    UnsupportedFormat,
    WeightsMismatch,
)
from weights.finite import check_values
from zoo.classes import choose_classes
from zoo.dilation import dilate
from zoo.filling import assign
from zoo.labels import labels as labels_named
from zoo.model import CATALOGUE, Model
from zoo.runs import WEIGHTS, is_run, read_row, unfinished
from zoo.surgery import adapt_stem, replace_head, with_channels

log = logging.getLogger("zoo")

M = TypeVar("M", bound=Model)
CONVENTIONS = {"auto": None, "correlation": "correlation", "convolution": "convolution"}
SPATIALS = {"auto": None, "hw": "hw", "wh": "wh"}


def trained(
    model: type[M],
    source: str | os.PathLike[str] | None = None,
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
        source: None for the default checkpoint, the tag of another, "hf://org/repo[@revision][/file]", "https://…", or a path. A
            known tag is a tag, whatever files lie around: "./mine" is a path. A path may lead to a file of any framework that
            `convert.formats` reads; its options and preprocessing come from the file and from its naming. Or to the folder of a
            run of `zoo finetune`, "runs/x".
        num_classes: another number of classes than the checkpoint's puts a new, untrained classifier on the trained body.
        classes: WordNet ids and names, ["n02123045", "tabby", "dog"], instead of `num_classes`: rows of the checkpoint's classifier
            are reused, averaged for what stands above them ("dog"), and drawn anew for the rest; see `zoo.classes.choose_classes`.
        output_stride: of the last map, 8 or 16: behind it, layers are dilated instead; see `zoo.dilation.dilate`.
        in_channels: another number of channels than the checkpoint's adapts the first convolution, see `zoo.surgery.adapt_stem`.
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
    if not isinstance(source, str | os.PathLike | None):
        raise TypeError(f"a source is a tag, a URL or a path, not {source!r}")
    for argument, value in (("num_classes", num_classes), ("in_channels", in_channels)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{argument} is a whole number of at least 1, got {value!r}")
    if classes is not None and num_classes is not None:
        raise ValueError(f"classes={list(classes)!r:.60} says how many there are; leave num_classes={num_classes} out")
    if verify not in ("load", "stamp"):
        raise ValueError(f'verify is "load" or "stamp", got {verify!r}')
    for argument, value, allowed in (("kernel_convention", kernel_convention, CONVENTIONS), ("spatial", spatial, SPATIALS)):
        if value not in allowed:
            raise ValueError(f"{argument} is one of {', '.join(allowed)}, got {value!r}")
    record, tensors = _read(model, source, verify, progress, frozen, kernel_convention, spatial, num_classes is not None, options)
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
    network.checkpoint = _settled(record, network, options)
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
    network.checkpoint = _settled(record, network, {})
    return network


def to_safetensors(source: Path, destination: Path) -> str:
    """Rewrite the pickled checkpoint `source` as safetensors, without running any of its code; a file that is safetensors is copied.

    A process of its own reads the pickle, see `convert.sandbox`; this one writes what it is told, and checks what it wrote.

    Returns:
        The SHA-256 of the bytes that were converted: they were read once, and whoever writes to the file meanwhile comes too late.
    """
    sha256, data = weights.read_file(source)
    if safetensors.is_safetensors(data):
        destination.write_bytes(data)
        return sha256
    with sandbox.read(source, "pytorch", data=data) as opened:
        del data  # the reader has its own copy
        safetensors.save_stored(opened.tensors, destination)
    return sha256


def add_file(
    model: type[Model],
    file: str | os.PathLike[str],
    tag: str,
    *,
    license: str | None = None,
    labels: str | None = None,
    default: bool | None = None,
    replaces: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
    framework: str = "auto",
    match: bool = False,
    kernel_convention: Literal["auto", "correlation", "convolution"] = "auto",
    spatial: Literal["auto", "hw", "wh"] = "auto",
    **options: Any,
) -> Checkpoint:
    """Register a checkpoint of the user's own, so that ``trained(model, tag)`` finds it; its tensors must be the network's.

    What is left out is taken from the record of the same bytes, if the registry knows them. Another framework's file is converted as by
    `zoo convert`, and refused where the proof fails; what proves it stands in the record.

    Args:
        model: a class of the catalogue.
        file: a weight file of any framework; the cache keeps a copy, of another framework's what it was converted to.
        tag: the checkpoint's name among the variant's.
        license: SPDX identifier, or "unstated".
        labels: the name of its list of labels, "imagenet1k" or "cifar10".
        default: whether ``trained(model)`` takes it; None if the variant has no other.
        replaces: whether an earlier checkpoint of the user's own with this tag may go.
        preprocessing: fields of `weights.Preprocessing`; those that are missing or None are the default checkpoint's.
        framework, match, kernel_convention, spatial: how another framework's file is read, as `zoo.converting.convert` takes them.
        **options: constructor keywords without which these weights compute something else, `activation="leaky_relu_0.1"`.

    Returns:
        The new record.

    Raises:
        WeightsMismatch: the file's tensors are not the network's; nothing was registered.
        NotProven, Undecided: another framework's file does not compute what it should, or does not say how it is to be read.
        BadRecord: the tag is taken, or a fact is wrong.
    """
    facts: dict[str, Any] = {"license": license, "labels": labels, "default": default, "replaces": replaces, "preprocessing": preprocessing}
    path, told = Path(file).expanduser(), (framework, match, kernel_convention, spatial) != ("auto", False, "auto", "auto")
    if path.exists() and not is_run(path) and (told or formats.sniff(path) not in ("safetensors", "pytorch")):
        from zoo.converting import convert

        read: dict[str, Any] = {"convention": CONVENTIONS[kernel_convention], "spatial": SPATIALS[spatial], "match": match}
        with tempfile.TemporaryDirectory(prefix="zoo-add-") as folder:
            place = Path(folder) / f"{path.stem}.safetensors"
            made = convert(path, place, model, framework=framework, **read, **options)
            said = f"added by the user; converted from {path.name}, sha256 {made.sha256}: {made.certificate.verdict}"
            return _added(model, place, tag, said, path, **facts, **options)
    return _added(model, path, tag, "added by the user", None, **facts, **options)


def _added(
    model: type[Model],
    file: Path,
    tag: str,
    provenance: str,
    origin: Path | None,
    *,
    license: str | None,
    labels: str | None,
    default: bool | None,
    replaces: bool,
    preprocessing: Mapping[str, Any] | None,
    **options: Any,
) -> Checkpoint:
    network = trained(model, file, progress=False, **options)
    known = network.checkpoint
    if known is None:
        raise TypeError(f"trained() gave {model.__name__} no record")
    steps = replace(known.preprocessing, **{k: v for k, v in (preprocessing or {}).items() if v is not None})
    facts: dict[str, Any] = {
        "license": license or known.license,
        "labels": labels or known.labels,
        "names": known.names,
        "num_classes": network.num_classes,
        "preprocessing": steps,
        "options": {**known.options, **options},
        "provenance": provenance,
    }
    if steps == known.preprocessing and not options:  # metrics hold for what they were measured with
        facts |= {"metrics": known.metrics, "metrics_data": known.metrics_data}
    if default is not None:
        facts["default"] = default
    _settled(weights.adhoc(known.model, os.fspath(file), tag=tag, **facts), network, {})
    return weights.add(file, known.model, tag, to_safetensors=to_safetensors, replaces=replaces, origin=origin, **facts)


def nearest_with_weights(model: type[Model], count: int = 3) -> list[Checkpoint]:
    """List the default checkpoints of the variants most like `model`: of its family first, then by parameter count."""
    classes = inspect.signature(model.variant()).parameters["num_classes"].default
    defaults = [c for c in weights.checkpoints() if c.default and c.model in CATALOGUE and c.num_classes == classes]

    def distance(checkpoint: Checkpoint) -> tuple[bool, float]:
        other = CATALOGUE[checkpoint.model]
        return other.family() is not model.family(), abs(other.params - getattr(model, "params", 0))

    return sorted(defaults, key=distance)[:count]


def find_record(model: type[Model], source: str | None = None) -> Checkpoint:
    """Find what `source` names: None the default checkpoint, a tag another, a URL the row that has it or else an unknown one.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known; the message names the nearest that have some.
        UnknownWeights: no checkpoint has this tag.
    """
    name = model.variant().__name__
    if source is not None and "://" in source:
        registered = (c for c in weights.checkpoints(name) if source in c.sources)
        return next(registered, None) or _unknown(model, source)
    try:
        return weights.find(name, source)
    except NoPretrainedWeights as error:
        raise NoPretrainedWeights(_no_weights(model)) from error


def _read(
    model: type[Model],
    source: str | os.PathLike[str] | None,
    verify: str,
    progress: bool,
    frozen: bool | None,
    kernel_convention: str,
    spatial: str,
    new_head: bool,
    options: Mapping[str, Any],
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Find the record that `source` means, and its tensors under the file's own names; known bytes bring their record along."""
    name = model.variant().__name__
    if source is not None and "://" not in os.fspath(source) and _is_path(name, source):
        path = Path(source).expanduser()
        if not path.exists():
            tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
            raise UnknownWeights(f"{path} is no file. trained({name}, …) takes a tag ({tags}), a URL or a path.")
        if path.is_dir() and is_run(path):
            return _of_run(model, path)
        if why := unfinished(path):
            raise UnknownWeights(why)
        try:
            format = formats.sniff(path)
        except UnsupportedFormat:
            if path.is_dir():
                raise UnknownWeights(f"{path} is a folder, and no checkpoint of a kind that is one (TensorFlow's, Orbax)") from None
            raise
        told = kernel_convention != "auto" or spatial != "auto"
        if told or format not in ("safetensors", "pytorch"):
            return _foreign(model, path, format, kernel_convention, spatial, new_head, options)
        sha256, buffer = weights.read_file(path)
        record = _unknown(model, str(path), sha256=sha256)
        if format == "pytorch":
            with sandbox.read(path, format, data=buffer) as opened:
                return _recognised(record, sha256), _loaded(opened.tensors, path)
        noted = _noted(record, safetensors.metadata(buffer), model)
        return noted or _recognised(record, sha256), _finite(safetensors.tensors(buffer), path)
    record = find_record(model, None if source is None else os.fspath(source))
    buffer = weights.open_weights(record, to_safetensors=to_safetensors, verify=verify, progress=progress, frozen=frozen)
    if not record.num_classes:
        record = _recognised(record, weights.get(record, to_safetensors=to_safetensors, frozen=frozen).source_sha256)
    return record, safetensors.tensors(buffer)


def _of_run(model: type[Model], folder: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read the result of `zoo finetune`: its folder holds a row of the registry and the file that the row promises."""
    record = read_row(folder)
    if record.model != model.variant().__name__:
        raise WeightsMismatch(f"{folder} is a run of {record.model}: trained({record.model}, …), not of {model.variant().__name__}")
    file = folder / WEIGHTS
    sha256, buffer = weights.read_file(file)
    if sha256 != record.sha256:
        raise HashMismatch(f"{file}: expected sha256 {record.sha256}, got {sha256}; zoo finetune --resume {folder} writes it again")
    return record, _finite(safetensors.tensors(buffer), file)


def _foreign(
    model: type[Model], path: Path, format: str, kernel_convention: str, spatial: str, new_head: bool, options: Mapping[str, Any]
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read another framework's file: its tensors under our names, and a record with the options that it needs."""
    from zoo.foreign import file_sha256, open_foreign

    chosen: dict[str, Any] = {"convention": CONVENTIONS[kernel_convention], "spatial": SPATIALS[spatial]}
    try:
        foreign = open_foreign(path, model, framework=format, **chosen, **options)
    except WeightsMismatch:
        if not new_head:
            raise
        foreign = open_foreign(path, model, framework=format, headless=True, **chosen, **options)
    with foreign.source:
        tensors = _loaded(foreign.adopted.tensors, path)
    sha256 = file_sha256(path)
    known = {"options": {k: v for k, v in foreign.options.items() if k not in options}, "sha256": sha256, "labels": foreign.labels}
    record, told = _unknown(model, str(path), **known), _steps(foreign.preprocessing)
    if not {"mean", "std"} <= told.keys():
        record = _recognised(record, sha256)
    return replace(record, preprocessing=replace(record.preprocessing, **told)), tensors


def _loaded(tensors: Mapping[str, Stored], path: Path) -> dict[str, Tensor]:
    from convert.formats._torch import as_tensor

    return _finite({name: as_tensor(stored.array()).contiguous() for name, stored in tensors.items()}, path)


def _finite(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return tensors of a file that nothing was installed of, which is where NaN is refused otherwise."""
    called = {dtype: name for name, (_, dtype) in safetensors.DTYPES.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            check_values(flat.data, called[str(tensor.dtype).removeprefix("torch.")], name, str(path))
    return tensors


def _noted(record: Checkpoint, metadata: Mapping[str, str], model: type[Model]) -> Checkpoint | None:
    """Believe what `zoo convert` wrote into a file about the options and the preprocessing of its weights; None where it wrote nothing."""
    from zoo.foreign import notes

    told = notes(metadata, model)
    if not told:
        return None
    source = f"converted from {told['source'].get('file')}, sha256 {told['source'].get('sha256')}"
    steps = replace(record.preprocessing, **_steps(told["preprocessing"]))
    return replace(record, options=told["options"], provenance=source, preprocessing=steps, labels=told.get("labels"))


def _steps(told: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in told.items() if k in Preprocessing.__dataclass_fields__}


def _is_path(name: str, source: str | os.PathLike[str]) -> bool:
    """Tell a path from a tag: a registered tag is one, even where a file of that name lies around."""
    path = Path(source).expanduser()
    if isinstance(source, os.PathLike) or os.sep in source:
        return True
    if source in {c.tag for c in weights.checkpoints(name)}:
        return False
    return path.exists() or any(path.name.endswith(suffix) for module in formats.formats().values() for suffix in module.SUFFIXES)


def _recognised(unknown: Checkpoint, sha256: str) -> Checkpoint:
    """Return the registry's record of these bytes, or, with a word about what is assumed, the one of an unknown file."""
    known = weights.recognise(sha256)
    if known is not None and known.model == unknown.model:
        return known
    log.warning("%s is in no registry: %s", unknown.sources[0], unknown.provenance.partition("; ")[2])
    return replace(unknown, sha256=sha256)


def _unknown(model: type[Model], source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that no registry knows; its preprocessing is assumed to be that of the default checkpoint."""
    name = model.variant().__name__
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    if default is not None:
        facts["preprocessing"] = default.preprocessing
        assumed = f"its preprocessing is assumed to be that of {name} {default.tag}"
        needs = ", ".join(f"{k}={v!r}" for k, v in default.options.items())
        facts["provenance"] = f"named by the user; {assumed}" + (f", but not the options of that: {needs}" if needs else "")
    elif model.input_size < 64:  # no ImageNet network, so not ImageNet's usual preprocessing
        side = model.input_size
        facts["preprocessing"] = replace(weights.adhoc(name, source).preprocessing, resize=side, crop=side)
    return weights.adhoc(name, source, **facts)


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
    found = {"num_classes": _width(state, network.classifiers[0], 0), "in_channels": _width(state, network.stem, 1)}
    differ = {k: v for k, v in found.items() if v is not None and v != getattr(network, k) and (takes_all or k in accepted)}
    if record.num_classes and "num_classes" in differ:
        raise BadRecord(f"{record.model} {record.tag}: the record says {record.num_classes} classes, the file has {differ['num_classes']}")
    if differ:
        with torch.device("meta"):
            network = model(**{**keywords, **differ})
    return network, state


def _settled(record: Checkpoint, network: Model, options: Mapping[str, Any]) -> Checkpoint:
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
        other = weights.recognise(record.sha256) if record.sha256 else None
        if other is not None and other.model != record.model:
            return f"Its sha256 is that of {other.model} {other.tag}: trained({other.model}, …)."
        return "Is it a file of another network? `zoo list` shows all; constructor keywords go into trained() too."

    assign(network, state, file=record.sources[0], todo=todo)
