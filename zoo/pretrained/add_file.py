"""A checkpoint of the user's own gets a record, so that `trained` finds it by its tag; `zoo add` is its command."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import weights
from convert import formats
from weights import BadRecord, Checkpoint
from weights.adding import check_new
from weights.arguments import forgiving
from weights.places import at_home
from zoo.conversion.pixels import told_by_user
from zoo.images.preprocess import at_size
from zoo.labels import lists_of
from zoo.networks.model import Model
from zoo.pretrained.records import to_safetensors
from zoo.pretrained.run_folder import is_run
from zoo.pretrained.trained import settled, trained

log = logging.getLogger("zoo")


@forgiving
def add_file(
    model: type[Model],
    path: str | os.PathLike[str],
    tag: str,
    *,
    license: str | None = None,
    labels: str | None = None,
    default: bool | None = None,
    replace: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
    channel_order: Literal["rgb", "bgr"] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    size: int | None = None,
    framework: str = "auto",
    naming: str = "auto",
    match: bool = False,
    kernel_convention: Literal["auto", "correlation", "convolution"] = "auto",
    spatial: Literal["auto", "hw", "wh"] = "auto",
    weights_of: str | None = None,
    **options: Any,
) -> Checkpoint:
    """Register a checkpoint of the user's own, so that ``trained(model, tag)`` finds it; its tensors must be the network's.

    What is left out is taken from the record of the same bytes, if the registry knows them. Another framework's file is converted as by
    `zoo convert`, and refused where the proof fails; what proves it stands in the record.

    Args:
        model: a class of the catalogue.
        path: a weight file of any framework; the cache keeps a copy, of another framework's what it was converted to.
        tag: the checkpoint's name among the variant's.
        license: SPDX identifier, or "unstated".
        labels: the name of its list of labels, "imagenet1k" or "cifar10".
        default: whether ``trained(model)`` takes it; None if the variant has no other.
        replace: whether an earlier checkpoint of the user's own with this tag may go.
        preprocessing: fields of `weights.Preprocessing`; those that are missing or None are the default checkpoint's.
        channel_order, mean, std, scale, size: how its images are prepared, as `zoo.conversion.convert.convert` takes it.
        framework, naming, match, kernel_convention, spatial: how another framework's file is read, as
            `zoo.conversion.convert.convert` takes them.
        weights_of: of a file with raw and averaged weights, as `trained` takes it.
        **options: constructor keywords without which these weights compute something else, `activation="leaky_relu_0.1"`.

    Returns:
        The new record.

    Raises:
        WeightsMismatch: the file's tensors are not the network's; nothing was registered.
        NotProven, Undecided: another framework's file does not compute what it should, or does not say how it is to be read.
        BadRecord: the tag is taken, a fact is wrong, or the path is a run, which is a source as it is.
    """
    facts: dict[str, Any] = {"license": license, "labels": labels, "default": default, "replace": replace, "preprocessing": preprocessing}
    said = {"channel_order": channel_order, "mean": mean, "std": std, "scale": scale, "size": size}
    facts["said"] = {name: value for name, value in said.items() if value is not None}
    if not at_home(path).exists():
        raise FileNotFoundError(f"'{path}' is not there; name the file to add: zoo add weights.pth ResNet50:mine")
    path = at_home(path)
    check_new(model.variant().__name__, tag, replace=replace)
    told = (framework, naming, match, kernel_convention, spatial, weights_of) != ("auto", "auto", False, "auto", "auto", None)
    if is_run(path):
        raise BadRecord(
            f"{path} is a run of zoo finetune, which needs no adding: --model {path} and trained({model.__name__}, {str(path)!r}) take it "
            "as it is, with its classes and preprocessing, and so they do elsewhere, where the folder was copied to."
        )
    native = path.exists() and formats.sniff(path) in ("safetensors", "pytorch")
    if path.exists() and (told or not native):
        from zoo.conversion.convert import convert
        from zoo.conversion.notes import companions

        read: dict[str, Any] = {"kernel_convention": kernel_convention, "spatial": spatial, "match": match, "weights_of": weights_of}
        with tempfile.TemporaryDirectory(prefix="zoo-add-") as folder:
            place = Path(folder) / f"{path.stem}.safetensors"
            made = convert(path, place, model, framework=framework, naming=naming, **facts["said"], **read, **options)
            if native:
                said = f"added by the user; weights {weights_of!r} of {path.name}, sha256 {made.sha256}{companions(made.beside)}"
            else:
                said = f"added by the user; converted from {path.name}, sha256 {made.sha256}{companions(made.beside)}: {made.verdict}"
            return _added(model, place, tag, said, path, **facts, **options)
    return _added(model, path, tag, "added by the user", None, **facts, **options)


def _added(
    model: type[Model],
    path: Path,
    tag: str,
    provenance: str,
    origin: Path | None,
    *,
    license: str | None,
    labels: str | None,
    default: bool | None,
    replace: bool,
    preprocessing: Mapping[str, Any] | None,
    said: Mapping[str, Any],
    **options: Any,
) -> Checkpoint:
    network = trained(model, path, progress=False, **options)
    known = network.checkpoint
    if known is None:
        raise TypeError(f"trained() gave {model.__name__} no record")
    told = told_by_user(network, **said)
    steps = dataclasses.replace(known.preprocessing, **{k: v for k, v in told.items() if k != "size"})
    steps = at_size(steps, told["size"]) if "size" in told else steps
    steps = dataclasses.replace(steps, **{k: v for k, v in (preprocessing or {}).items() if v is not None})
    sure = {"channel_order", "mean", "std"} <= {*told, *(k for k, v in (preprocessing or {}).items() if v is not None)}
    facts: dict[str, Any] = {
        "license": license or known.license,
        "labels": labels or known.labels,
        "names": known.names,
        "num_classes": network.num_classes,
        "preprocessing": steps,
        "pixels": "stated by you" if sure else known.pixels,
        "options": {**known.options, **options},
        "provenance": provenance,
    }
    if steps == known.preprocessing and not options:  # metrics hold for what they were measured with
        facts |= {"metrics": known.metrics, "metrics_data": known.metrics_data}
    if default is not None:
        facts["default"] = default
    if not facts["labels"]:
        lists = " or ".join(f"labels={one!r}" for one in lists_of(network.num_classes))
        todo = f"if they are those of a list here, add it with {lists}" if lists else "trained(..., classes=[...]) gives them names"
        log.warning("the classes of %s:%s have no names, class 0, class 1 ...; %s", known.model, tag, todo)
    settled(weights.adhoc(known.model, os.fspath(path), tag=tag, **facts), network, {})
    return weights.add(path, known.model, tag, to_safetensors=to_safetensors, replace=replace, origin=origin, **facts)
