"""A network goes out to another framework: written in its words, read back bit for bit, and run there where it is installed."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convert import certificate, home, names, sandbox
from convert.certificate import Certificate, Evidence
from convert.core import COUNTER
from convert.network import Layer
from convert.source import Convention, Source, Stored
from convert.writing import parts
from weights import Preprocessing
from weights.cache import stamp_of
from weights.errors import ConvertError
from zoo.conversion.digest import digest
from zoo.conversion.foreign import Foreign, load
from zoo.conversion.namings import adopted
from zoo.conversion.notes import NOTES, accepted
from zoo.conversion.proof import TOLERANCE
from zoo.conversion.proof_images import Pictures, image_shape, natural, prepared
from zoo.conversion.result import Conversion, metadata, not_proven
from zoo.networks.model import Model

FOLDED_APART = 1e-6
"""Largest difference of a folded tensor, by its largest number: a few roundings to float32, of 6e-8 each."""
DEFAULT_NAMING = {"keras": "keras", "bson": "metalhead", "jld2": "metalhead", "flax": "flax", "theano": "lasagne"}
"""The naming that a framework's users expect; ours in every other format."""


def export(
    foreign: Foreign,
    network: Model,
    writer: Any,
    path: Path,
    to_naming: str,
    to_convention: Convention | None,
    made: Conversion,
    inside: Preprocessing | None,
    isolated: bool,
    unproven: bool = False,
) -> None:
    """Write the network for another framework, and prove it by reading it back bit for bit.

    Raises:
        NotProven: what was written computes something else, and `unproven` does not allow that.
    """
    name = writer.__name__.rpartition(".")[2]
    state = {n: t for n, t in network.state_dict().items() if not n.endswith(COUNTER)}
    difference, chosen = None, ""
    before = metadata(made, room=True)
    if getattr(writer, "EXPORTS", False):
        side = made.preprocessing.crop or network.input_size
        shape = image_shape(network, side)
        difference = writer.export(network, path, input_shape=shape, metadata=before, preprocessing=inside)
    else:
        chosen = naming_for(name, to_naming, foreign.model, network)
        if unlike := _unlike(chosen, foreign):
            made.notes.append(f"the networks that {chosen} names have {unlike}: in those these weights compute something else")
        write_network(network, path, writer, chosen, to_convention, before, foreign.layers)
    settled = stamp_of(path.stat())
    try:
        added = _read_back(foreign, network, path, name, state, to_convention, made, inside, isolated, difference)
    finally:
        check_same(path, settled)
    made.certificate = Certificate([*made.certificate.evidence, *added], made.certificate.before)
    if any(each.contradicts for each in added) and not unproven:
        raise not_proven(made)
    if _amend(path, before[NOTES], metadata(made)[NOTES]) or getattr(writer, "EXPORTS", False):
        return
    with sandbox.read(path, name, isolated=isolated) as written:
        noted = NOTES in written.facts
    if noted:  # an archive, which is written anew
        write_network(network, path, writer, chosen, to_convention, metadata(made), foreign.layers)
        again = _read_back(foreign, network, path, name, state, to_convention, made, inside, isolated, None)
        if any(each.contradicts for each in again) and not unproven:
            raise not_proven(made)


def _amend(path: Path, before: str, after: str) -> bool:
    """Put the certificate into the notes of a file that was proven after it was written, in place, where they stand there as they are.

    Returns:
        Whether that was possible: archives have checksums of their members.
    """
    for spelt in (str, xml):
        old, new = (spelt(text).encode() for text in (before, after))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as held:
            at = held.find(old)
            if held[:2] == b"PK" or at < 0 or held.find(old, at + 1) >= 0 or len(new) > len(old):
                continue
            held[at : at + len(old)] = new.ljust(len(old))
            return True
    return False


def xml(text: str) -> str:
    """Spell a text as OpenVINO does in an attribute."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _read_back(
    foreign: Foreign,
    network: Model,
    path: Path,
    name: str,
    state: Mapping[str, Tensor],
    to_convention: Convention | None,
    made: Conversion,
    inside: Preprocessing | None,
    isolated: bool,
    difference: float | None,
) -> list[Evidence]:
    """Compare what was written with what was to be written, and let its framework run it."""
    with sandbox.read(path, name, isolated=isolated) as written:
        said, headless = _convention_of(written, to_convention), _headless(network)
        built = {**foreign.options, "num_classes": network.num_classes, "in_channels": network.in_channels} if network.classifiers else {}
        again = adopted(written, foreign.model, convention=said, spatial="hw", headless=headless, **built)
        differing = _differing(again.adopted.tensors, state)
        if not differing:
            detail = f"the {name} file read again gives every one of {len(state)} tensors bit for bit"
            proof = Evidence("read back", True, 0.0, detail, [])
        elif (worst := _apart_but_folded(again.adopted.tensors, state, foreign.layers)) <= FOLDED_APART:
            detail = f"the {name} file read again gives every layer with its BatchNorm folded to the rounding of float32, {worst:.1g}"
            proof = Evidence("read back", True, worst, detail, [])
        else:  # a BatchNorm's scale had to be folded: other numbers, the same network
            image = prepared(natural(1, *image_shape(network)).double() / 255, made.preprocessing).float()
            with torch.no_grad():
                wanted = network(image).numpy()
            proof = replace(certificate.against_outputs(load(again, copy.deepcopy(network)), image.numpy(), wanted, 1e-5), kind="read back")
            if not proof.proven:
                raise ConvertError(f"{path.name} does not read back as it was written: {differing}. Nothing was kept.")
        if differing and made.digest:
            made.digest = digest(load(again, copy.deepcopy(network)))  # the notes are of what the file holds
        return [
            proof,
            *([] if inside else _there(again, network, made, isolated, difference)),
        ]  # export runs a file with its preprocessing inside itself


def _apart_but_folded(found: Mapping[str, Stored], state: Mapping[str, Tensor], layers: Sequence[Layer]) -> float:
    """Tell how far two networks are apart when each BatchNorm is folded into the layer before it, and is a scale and a shift elsewhere.

    Returns:
        The largest difference of a tensor, by its largest number; infinite where something else than a BatchNorm differs.
    """
    from convert.formats._torch import stored

    there, here = dict(found), {name: stored(name, tensor) for name, tensor in state.items()}
    known = {layer.name: layer for layer in layers}
    worst, done = 0.0, set[str]()
    for norm in (layer for layer in layers if layer.kind == "norm" and f"{layer.name}.running_var" in state):
        before = known.get(norm.inputs[0]) if len(norm.inputs) == 1 and norm.direct else None
        alone = before is not None and before.kind not in ("norm", "other") and sum(before.name in other.inputs for other in layers) == 1
        names = [norm.name, *([before.name] if before is not None and alone else [])]
        done.update(name for name in state if name.rpartition(".")[0] in names)
        if any(name not in there for name in done):
            return float("inf")
        both = [_folded(tensors, norm, before if alone else None) for tensors in (there, here)]
        worst = max([worst, *(_part(a, b) for a, b in zip(*both, strict=True))])
    rest = {name: tensor for name, tensor in state.items() if name not in done}
    return worst if not _differing(found, rest) else float("inf")


def _folded(tensors: Mapping[str, Stored], norm: Layer, before: Layer | None) -> tuple[np.ndarray, ...]:
    """Fold a BatchNorm into the layer before it, or say it as a scale and a shift, in float64."""

    def held(name: str, otherwise: float) -> Any:
        return np.asarray(tensors[name].array(), np.float64) if name in tensors else np.full((), otherwise)

    scale = held(f"{norm.name}.weight", 1) / np.sqrt(held(f"{norm.name}.running_var", 1) + (norm.eps or 0.0))
    shift = held(f"{norm.name}.bias", 0) - held(f"{norm.name}.running_mean", 0) * scale
    if before is None:
        return scale, shift
    weight, groups = held(f"{before.name}.weight", 1), before.groups
    if before.kind == "transposed":  # whose kernels lie (in, out / groups, H, W)
        weight = weight.reshape(groups, -1, *weight.shape[1:])
        wide = scale.reshape(groups, 1, -1, *(1,) * (weight.ndim - 3))
    else:
        wide = scale.reshape(-1, *(1,) * (weight.ndim - 1))
    return weight * wide, shift + held(f"{before.name}.bias", 0) * scale


def _part(a: np.ndarray, b: np.ndarray) -> float:
    """Tell the largest difference by the largest number; zero where both are zeros."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max(initial=0) / max(float(np.abs(b).max(initial=0)), 1e-300))


def _headless(network: Model) -> bool:
    return bool(network.classifiers) and isinstance(network.get_submodule(network.classifiers[0]), nn.Identity)


def _there(written: Foreign, network: Model, made: Conversion, isolated: bool, difference: float | None) -> list[Evidence]:
    """Let the destination's framework run what was written, where it is installed, and compare it with our network.

    `difference` is what the writer found that ran the file itself; it stands where a file of this graph is not run again.
    """
    how = (network, made.preprocessing, made.preprocessing, written.takes_pixels)
    theirs, ours = Pictures().inputs(*how, side=written.image_size)
    there = home.outputs(written.source, theirs, classes=network.num_classes, isolated=isolated)
    if isinstance(there, str) and (difference is None or not difference <= TOLERANCE):
        if there not in (home.NO_FRAMEWORK.format(written.source.format), home.NO_GRAPH):
            made.notes.append(f"what was written was not run by its own framework: {there}")
        return []
    if isinstance(there, str):
        detail = f"its own framework ran what was written: relative error {difference:.2g}, allowed {TOLERANCE:g}, 2 random images"
        found = Evidence("destination outputs", True, difference, detail)
    else:
        found = certificate.against_outputs(network, ours.numpy(), there.outputs, TOLERANCE)
        found = replace(found, kind="destination outputs", detail=f"{there.by} runs what was written: {found.detail}")
    plain = made.naming == "torchvision" and not made.options and not any("steps" in told for told in made.transforms.values())
    native = plain or NOTES in made.source.facts  # torchvision's files, and our own, are of the very network that is written
    if found.proven and not native and not made.certificate.proven:
        found = replace(
            found, proven=False, worst=None, detail=f"{found.detail}; that ours computes what the source did is not shown by it"
        )
    return [found]


def _unlike(naming: str, foreign: Foreign) -> str:
    """Say in which constructor keywords a naming's own network differs from the one at hand; "" where in none."""
    here = accepted(foreign.model) | foreign.options
    eps = {layer.eps for layer in foreign.layers if layer.kind == "norm"}
    here |= {"norm_eps": eps.pop()} if len(eps) == 1 else {}
    usual = names.fact(naming, "options", foreign.model)
    return ", ".join(f"{key} {value!r} and not {here[key]!r}" for key, value in usual.items() if key in here and value != here[key])


def _convention_of(written: Source, wanted: Convention | None) -> Convention | None:
    """Tell how a file that was just written is to be read: as it says itself, or as was asked for where it says nothing."""
    if written.positional or "unknown" in written.conventions:
        return wanted or "correlation"
    if wanted is not None and written.conventions and wanted not in written.conventions:
        raise ConvertError(
            f"every reader takes kernels in a {written.format} file for those of {written.conventions.pop()}: "
            f"leave to_convention={wanted!r} out"
        )
    return None


def kept_bits(tensors: Mapping[str, Stored], network: Model) -> Evidence | None:
    """Compare a network that was loaded from what was written with the source's tensors; None where they are not the same bits."""
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith(COUNTER)}
    if _differing(tensors, state):
        return None
    return Evidence("read back", True, 0.0, f"the safetensors file read again gives every one of {len(state)} tensors bit for bit", [])


def _differing(found: Mapping[str, Stored], state: Mapping[str, Tensor]) -> str:
    """Name the first tensor that is not the same bits; "" when all are."""
    from convert.formats._torch import as_array

    for name, tensor in state.items():
        if name not in found:
            return f"{name} is missing"
        there, here = found[name].array(), as_array(tensor)
        if there.shape != here.shape or np.ascontiguousarray(there, here.dtype).tobytes() != np.ascontiguousarray(here).tobytes():
            return f"{name} is not the same"
    return ""


def write_network(
    network: Model,
    path: Path,
    writer: Any,
    naming: str,
    convention: Convention | None,
    metadata: Mapping[str, str],
    structure: Sequence[Any],
) -> None:
    """Write a network's tensors in another format and naming: the rows are those that lead here, and `parts` goes them backwards."""
    from convert.formats._torch import stored

    tensors = {name: stored(name, tensor) for name, tensor in network.state_dict().items() if not name.endswith(COUNTER)}
    shapes = {name: one.shape for name, one in tensors.items()}
    rows = names.rows(naming, type(network), shapes)
    if hasattr(names.NAMINGS[naming], "order"):
        place = {module: i for i, module in enumerate(names.NAMINGS[naming].order(names.lineage(type(network)), shapes))}
        rows = sorted(rows, key=lambda row: place.get(row.ours, len(place)))
    described = parts(rows, structure, tensors)
    own = {} if convention is None else {"convention": convention}  # else the format's usual one
    writer.write(described, path, metadata={**metadata, "naming": naming}, **own)


def naming_for(format: str, to_naming: str, model: type[Model], network: Model) -> str:
    """Choose the naming to write: the asked one, the framework's usual one where it knows the network, else ours."""
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if to_naming != "auto":
        if to_naming not in names.NAMINGS:
            raise ConvertError(f"no naming {to_naming!r}; there are {', '.join(names.NAMINGS)}")
        if not names.rows(to_naming, model, shapes):
            raise ConvertError(f"the naming {to_naming} has no {model.__name__}; to=NAME names another, or a format")
        return to_naming
    usual = DEFAULT_NAMING.get(format, "torchvision")
    rows, state = names.rows(usual, model, shapes), network.state_dict()
    # Metalhead's VGG with BatchNorm has no biases in its convolutions, so a network that has some can't take its names
    lost = any("bias" in row.lacks and row.kind != "norm" and bool(state[f"{row.ours}.bias"].any()) for row in rows)
    return usual if rows and not lost else "torchvision"


def check_same(path: Path, settled: list[int]) -> None:
    """See that nobody wrote to a file since it had the stamp `settled`: what is proven must be what is kept."""
    if not path.exists() or stamp_of(path.stat()) != settled:
        raise ConvertError(
            f"{path.name} was changed in {path.parent} while it was being proven, by another program. Nothing was kept. Convert it into a "
            "folder of your own."
        )
