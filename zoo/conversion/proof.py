"""Which reading of a file is right where it doesn't say, and what proves that a converted network computes what it did at home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert import certificate, diagnose, evidence, home, names
from convert.certificate import Certificate
from convert.conversion import Undecided
from convert.diagnose import Diagnosis
from convert.evidence import Decision
from convert.source import Convention, Source, Spatial
from weights import ConvertError, Preprocessing
from zoo.conversion.foreign import Foreign, load
from zoo.conversion.namings import adopted
from zoo.conversion.notes import NOTES, notes
from zoo.conversion.own import OwnNetwork
from zoo.conversion.proof_images import PROOF_IMAGES, Pictures, steps
from zoo.conversion.result import Conversion
from zoo.networks.model import Model

TOLERANCE = 1e-4
"""Largest relative error of outputs in float32 that proves; right conversions are below 1e-5."""
CHANGED = "its own notes prove other tensors than it has now, so they prove nothing of these; convert the original file again"
"""Of a file whose tensors are not those that its notes were written about."""


def decided(
    source: Source,
    model: type[Model],
    convention: Convention | None,
    spatial: Spatial | None,
    pictures: Pictures,
    keywords: Mapping[str, Any],
    progress: Callable[[str], None],
) -> tuple[Foreign, Decision | None]:
    """Adopt the file's tensors; where it doesn't say how its kernels lie, let evidence decide, also on what the user says of them.

    Raises:
        Undecided: the file is silent, and so is the user, and the evidence is absent or too weak.
        ConvertError: the evidence contradicts the user.
    """
    laid = source.layout.convention if source.positional and source.layout else None
    silent = "unknown" in (source.conventions | {laid}) or source.spatial == "unknown"
    weigh = silent and pictures.files and pictures.reference is None  # a reference contradicts by itself, and tells the cause
    told = (convention, spatial) if weigh and (convention or spatial) else None
    if told is None:
        try:
            return adopted(source, model, convention=convention, spatial=spatial, **keywords), None
        except Undecided:
            if not pictures:
                raise
    else:
        given = adopted(source, model, convention=convention, spatial=spatial, **keywords)
        try:
            weighed, decision = decided(source, model, None, None, pictures, keywords, progress)
        except Undecided:
            return given, None
        if told != (weighed.convention if convention else None, weighed.spatial if spatial else None):
            words = " and ".join(word for word in (convention, spatial) if word)
            raise ConvertError(f"{source.path} is said to be {words}, and the evidence says otherwise: {decision}\nLeave that option out.")
        return given, decision
    open_convention = convention is None and "unknown" in (source.conventions | {laid})
    choices: list[Convention | None] = ["convolution", "correlation"] if open_convention else [convention]
    candidates: dict[str, Foreign] = {}
    for c in choices:
        for s in ("hw", "wh") if spatial is None and source.spatial == "unknown" else (spatial,):
            name = ", ".join(word for word in (c, {"hw": "height first", "wh": "width first"}.get(s or "")) if word)
            candidates[name] = adopted(source, model, convention=c, spatial=s, **keywords)
    progress(f"weighing evidence for {len(candidates)} readings")
    networks = {name: load(candidate) for name, candidate in candidates.items()}
    first = next(iter(networks.values()))
    foreign = next(iter(candidates.values()))
    trained_on = steps(foreign.network, foreign.preprocessing)
    decision = evidence.decide(networks, **pictures.evidence(first, trained_on, foreign.takes_pixels))
    return candidates[decision.winner], decision


def proven(
    foreign: Foreign, network: Model, pictures: Pictures, made: Conversion, trained_on: Preprocessing, *, isolated: bool = True
) -> tuple[Certificate, Diagnosis | None]:
    """Gather the evidence there is, strongest first, and look for the fault where some of it contradicts."""
    source, found, absent = foreign.settled(), [certificate.structure(foreign.adopted.report)], ""
    moved = _differ_inside(foreign, made)
    how = (network, trained_on, made.preprocessing, foreign.takes_pixels)
    theirs, ours = pictures.inputs(*how, side=foreign.image_size)
    noted = notes(source.facts, made.model)
    before = _proven_before(foreign, noted, made) if made.preprocessing == trained_on else ""
    outputs: np.ndarray | None = None
    if pictures.reference is not None:
        theirs, ours = pictures.referenced(*how)
        outputs = pictures.reference[1]
        try:
            found.append(certificate.against_outputs(network, ours.numpy(), outputs, TOLERANCE))
        except RuntimeError as error:
            given, said = tuple(pictures.reference[0].shape), (str(error).splitlines() or [""])[0]
            raise ConvertError(f"{made.model.__name__} can't compute on the reference's inputs, {given}: {said}") from error
    else:
        unlike = foreign.options or NOTES in source.facts or issubclass(made.model, OwnNetwork)  # torchvision's has no options of ours
        library = "" if unlike else made.naming
        there = home.outputs(source, theirs, naming=library, family=made.model, classes=network.num_classes, isolated=isolated)
        absent = there if isinstance(there, str) else ""
        if not isinstance(there, str):
            outputs = there.outputs
            compared = certificate.against_outputs(network, ours.numpy(), outputs, TOLERANCE)
            found.append(replace(compared, detail=f"{there.by}: {compared.detail}"))
    if source.graph is not None:
        few = slice(0, PROOF_IMAGES)
        found.append(
            certificate.against_graph(source, foreign.adopted.pairs, network, theirs[few], ours[few].numpy(), TOLERANCE, moved=moved)
        )
    labelled = pictures.labelled(network, made.preprocessing)
    if labelled is not None:
        batch, labels = labelled
        shown = certificate.on_labelled(network, [each.numpy() for each in batch.split(32)], labels.numpy())
        under = f", under {made.pixels.said}" if made.pixels is not None else ""
        found.append(replace(shown, detail=f"{shown.detail}{under}"))
    proof = Certificate(found, before)
    if absent:
        without = "the proof needs no outputs of its own framework" if proof.proven else "not compared with its own framework's outputs"
        made.notes.append(f"{without}: {absent}")
    if not any(each.contradicts for each in found):
        return proof, None
    if source.graph is not None and not source.graph.unknown:
        few = slice(0, PROOF_IMAGES)
        return proof, diagnose.diagnose(source, foreign.adopted.pairs, network, theirs[few], ours[few].numpy(), moved=moved)
    return proof, diagnose.diagnose_outputs(network, ours.numpy(), outputs) if outputs is not None else None


def _proven_before(foreign: Foreign, noted: Mapping[str, Any], made: Conversion) -> str:
    """Say who vouches for these very tensors: the notes of a conversion that was proven, or their publisher; "" where nobody does."""
    parity = noted.get("parity")
    told: Mapping[str, Any] = parity if isinstance(parity, Mapping) else {}
    if (told.get("proven") is True or told.get("chained")) and noted.get("digest") != made.digest:
        made.notes.append(CHANGED)
        if made.pixels is not None and made.pixels.status == "decided" and not made.pixels.table:
            made.pixels = replace(made.pixels, status="stated", by="its notes, which are of other tensors", decided=())
        return ""
    if noted:
        made.notes.append(f"its own notes say: {told.get('verdict', 'nothing of a proof')}")
    if foreign.convention is not None or foreign.spatial is not None or foreign.adopted.naming not in names.NAMINGS:
        return ""  # a caller's word changed what the tensors become
    if told and noted["options"] == foreign.options:
        if told.get("proven") is True:
            return f"its source's notes say {str(told.get('verdict', 'that it was proven'))[:300]}"
        if isinstance(chained := told.get("chained"), str) and chained:
            return chained[:400]  # bit for bit the network of a file that was proven, through any number of files
    if foreign.known is not None and foreign.known.model == foreign.model.variant().__name__ and foreign.known.options == foreign.options:
        return f"its source is the published file of {foreign.known.model}:{foreign.known.tag}"
    return ""


def _differ_inside(foreign: Foreign, made: Conversion) -> set[str]:
    """Name the layers whose own outputs differ by what was moved to the layer behind."""
    moved = set(foreign.adopted.moved)
    shifted = any(step.startswith("minus the mean") for told in made.transforms.values() for step in told.get("steps", ()))
    return moved | {foreign.network.first_layer} if shifted else moved
