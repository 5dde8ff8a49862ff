"""The styles that there are by name, and style networks from files: of ours, of pytorch/examples, of Engstrom, with MobileNet's blocks."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weights
from convert import formats, sandbox
from convert.formats import safetensors
from convert.formats._torch import as_tensor
from weights import BadRecord, Checkpoint, UnknownWeights, WeightsMismatch
from weights.adding import to_toml
from weights.arguments import did_you_mean
from weights.documents import misread, toml_file
from weights.places import at_home
from weights.record import record
from weights.whole import whole, write_whole
from zoo.pretrained.records import to_safetensors
from zoo.pretrained.run_folder import ROW, WEIGHTS, save_tensors
from zoo.stylizing.named import UNSTATED, styles
from zoo.stylizing.networks import Engstrom, Johnson, MobileStyle, StyleNetwork

log = logging.getLogger("zoo")

NETWORKS: dict[str, type[StyleNetwork]] = {"Johnson": Johnson, "Engstrom": Engstrom, "MobileStyle": MobileStyle}
SETTINGS = "settings.json"
"""What a training writes down when it begins."""
RUNNING = re.compile(r"(.*\.)?in\d+\.running_(mean|var)|(.*\.)?in\d+\.num_batches_tracked")
"""What old versions of PyTorch wrote of instance norms, and nothing reads."""
RAW = {"mean": [0.0, 0.0, 0.0], "std": [1 / 255, 1 / 255, 1 / 255], "interpolation": "bilinear"}
"""The preprocessing of a record, where images go in as they are, 0..255."""


def style_network(named: str | os.PathLike[str], progress: bool = True) -> StyleNetwork:
    """Load a style network.

    Args:
        named: a style's name, a training's folder, or a file of any format that `convert` reads with tensors named as in pytorch/examples,
            Engstrom's repository or the MobileNet one.
        progress: whether a download shows a bar on a terminal.

    Returns:
        The network in eval mode, on the CPU, float32; `checkpoint` is its record.

    Raises:
        UnknownWeights: there is no style of that name, and no such file.
        WeightsMismatch: the file holds no style network that is known; the message says what it misses.
        WeightsError: the file can't be had, or its bytes are others than recorded.

    Example:
        >>> style_network("embers").checkpoint.license
        'MIT'
    """
    name = os.fspath(named)
    if isinstance(named, str) and name in styles():
        return _of_record(styles()[name], progress)
    path = at_home(named)
    if path.is_dir() and (path / ROW).is_file():
        return _of_run(path)
    if path.is_dir() and (path / SETTINGS).is_file():
        raise UnknownWeights(f"'{path}' is a training that is not finished, so it has no style yet: give the same command again")
    if not path.exists() and not path.with_name(f"{path.name}.index").is_file():  # TensorFlow names a checkpoint by what its files share
        known = did_you_mean(name, styles()) or f"; the styles are {', '.join(styles())}"
        raise UnknownWeights(f"there is no style {name!r}, and no such file{known}")
    format = formats.sniff(path)
    with sandbox.read(path, format) as opened:
        tensors = {key: as_tensor(stored.array()).contiguous() for key, stored in opened.tensors.items()}
    network = network_of(tensors, str(path))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    known = next((row for row in styles().values() if sha256 and row.sha256 == sha256), None)
    network.checkpoint = known or _unknown(network, path, sha256)
    return network


def network_of(tensors: Mapping[str, Tensor], place: str) -> StyleNetwork:
    """Tell from the names and shapes of tensors which network they are of, and build it.

    Raises:
        WeightsMismatch: they are of none.
    """
    tensors = {name: value for name, value in tensors.items() if not RUNNING.fullmatch(name)}
    if _is_engstrom(tensors):
        tensors = _engstrom(tensors)
    with torch.device("meta"):
        network = _built(tensors, place)
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != found:
        wrong = [f"it has no {name}" for name in wanted if name not in found]
        wrong += [f"it has {name}, which the network has not" for name in found if name not in wanted]
        wrong += [f"{n} is {found[n]}, not {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise WeightsMismatch(f"{place} is no {type(network).__name__} network: {'; '.join(wrong[:5])}{more}")
    network.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    bad = [name for name, value in network.state_dict().items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise weights.NonFinite(f"{place}: {bad[0]} has values that are not finite; get the file again")
    return network.requires_grad_(True).eval()


def _built(tensors: Mapping[str, Tensor], place: str) -> StyleNetwork:
    if "up1.weight" in tensors:
        return Engstrom()
    if "upconv1.conv1.conv1.weight" in tensors:
        return MobileStyle()
    if "conv1.conv2d.weight" in tensors:
        return Johnson(tensors["conv1.conv2d.weight"].shape[0])
    shown = ", ".join(list(tensors)[:3])
    raise WeightsMismatch(
        f"{place} holds no style network that is known: its tensors are {shown}, …; known are those of pytorch/examples "
        "(conv1.conv2d.weight), of lengstrom/fast-style-transfer (Variable) and of the MobileNet one (upconv1.conv1.conv1.weight)"
    )


def _is_engstrom(tensors: Mapping[str, Tensor]) -> bool:
    return "Variable" in tensors and "Variable_47" in tensors


def _engstrom(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the variables of a TensorFlow checkpoint, numbered in the order of the layers: kernel, shift and scale of each.

    Kernels are (height, width, in, out), of transposed convolutions (height, width, out, in); what Adam kept is left out.
    """
    convs = ["conv1", "conv2", "conv3"]
    norms = ["norm1", "norm2", "norm3"]
    for block in range(5):
        convs += [f"blocks.{block}.conv1", f"blocks.{block}.conv2"]
        norms += [f"blocks.{block}.norm1", f"blocks.{block}.norm2"]
    convs += ["up1", "up2", "conv4"]
    norms += ["norm4", "norm5", "norm6"]
    found: dict[str, Tensor] = {}
    for layer, (conv, norm) in enumerate(zip(convs, norms, strict=True)):
        names = ["Variable" if n == 0 else f"Variable_{n}" for n in range(3 * layer, 3 * layer + 3)]
        found[f"{conv}.weight"] = tensors[names[0]].permute(3, 2, 0, 1).contiguous()
        found[f"{norm}.bias"], found[f"{norm}.weight"] = tensors[names[1]], tensors[names[2]]
    return found


def _of_record(row: Checkpoint, progress: bool) -> StyleNetwork:
    if row.license == "unstated" and not _is_here(row):
        log.warning("style %s: %s", row.tag, UNSTATED)
    buffer = weights.open_weights(row, to_safetensors=to_safetensors, progress=progress)
    network = network_of(safetensors.tensors(buffer), f"style {row.tag}")
    network.checkpoint = row
    return network


def _is_here(row: Checkpoint) -> bool:
    return weights.Cache().lookup(row) is not None


def _of_run(folder: Path) -> StyleNetwork:
    row = read_style(folder)
    sha256, buffer = weights.read_file(folder / WEIGHTS)
    if sha256 != row.sha256:
        raise weights.HashMismatch(f"{folder / WEIGHTS}: expected sha256 {row.sha256}, got {sha256}; train it again")
    network = network_of(safetensors.tensors(buffer), str(folder))
    network.checkpoint = row
    return network


def read_style(folder: Path) -> Checkpoint:
    """Read the record of a finished training; its place is where the folder lies now.

    Raises:
        BadRecord: it is damaged.
    """
    path = folder / ROW
    todo = "Train it again"
    with misread(f"{path} is no record of one style", todo, BadRecord):
        ((model, rows),) = toml_file(path, todo, refuse=BadRecord).items()
        ((tag, table),) = rows.items()
        table = dict(table) | {"sources": [(folder.absolute() / WEIGHTS).as_uri()]}
    return record(model, tag, table, str(path), classes_known=False)


def write_style(folder: Path, network: StyleNetwork, *, license: str, provenance: str, options: Mapping[str, Any]) -> Checkpoint:
    """Write a trained style and its record into a folder, each whole or not at all, the record last.

    Args:
        folder: of the training.
        network: that learnt.
        license: of the weights.
        provenance: of what, and how they were trained.
        options: the network's constructor keywords.
    """
    (folder / ROW).unlink(missing_ok=True)  # it must never stand beside other weights
    with whole(folder / WEIGHTS) as path:
        save_tensors({name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}, path, {"format": "pt"})
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    place = folder.absolute()
    tag = re.sub(r"[^A-Za-z0-9_.+-]", "-", place.name).lstrip("_.+-") or "style"
    known = {"sha256": sha256, "size_bytes": (folder / WEIGHTS).stat().st_size, "license": license, "options": dict(options)}
    row = replace(_unknown(network, folder / WEIGHTS, sha256), tag=tag, format="safetensors", provenance=provenance, recipe=SETTINGS)
    row = replace(row, **known)
    write_whole(folder / ROW, to_toml(row))
    return row


def _unknown(network: StyleNetwork, path: Path, sha256: str | None) -> Checkpoint:
    table: dict[str, Any] = {
        "sources": [path.absolute().as_uri()],
        "format": "safetensors" if path.suffix == ".safetensors" else "pytorch",
        "names": "torchvision",
        "num_classes": 0,
        "license": "unstated",
        "provenance": "named by the user",
        "preprocessing": RAW,
    }
    return record(type(network).__name__, "file", table | ({"sha256": sha256} if sha256 else {}), str(path), classes_known=False)
