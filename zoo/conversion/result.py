"""What a conversion was: the record that the command prints, the report draws and the written file carries in its metadata."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.certificate import Certificate
from convert.diagnose import Diagnosis
from convert.evidence import Decision
from convert.source import Source
from weights import Preprocessing
from weights.errors import ConvertError
from zoo.conversion.notes import NOTES
from zoo.conversion.pixels import Pixels
from zoo.networks.model import Model


@dataclass(slots=True, repr=False)
class Conversion:
    """What was converted, and how well that is proven.

    Attributes:
        destination: the file that was written.
        model: the network's class.
        source: the file that was read.
        sha256: of the source.
        labels: the name of the list of its classes, where its naming is one of ImageNet's networks and it has as many; else None.
        certificate: the evidence, strongest first, and the verdict.
        naming: the table that explained the source's names.
        options: constructor keywords without which these weights compute something else.
        preprocessing: what the written weights want of their images; what neither file nor naming says is that of the network's
            default checkpoint, and a note says so.
        transforms: by our tensor: the source's name, the steps, and whether every step can be undone bit for bit.
        notes: what was folded, filled in, or left out.
        decision: how the kernel convention was decided, where the file doesn't say.
        diagnosis: the first layer that diverges and why, where the proof failed.
        filters: the first convolution's kernels (O, I, h, w), as the file orients them and as they are now.
        pixels: how the images are prepared, and how well that is known; None of a network of the user's own of which nobody said it.
        digest: of the tensors that the certificate is about, see `zoo.conversion.digest`; "" where nothing was to be proven.
        beside: SHA-256 of each further file that the source was read from, an IR's .bin or a .caffemodel's .prototxt, by its name.
        network: with the converted weights, as long as somebody needs it; None where safetensors was written and nothing was to be proven.
    """

    destination: Path
    model: type[Model]
    source: Source
    sha256: str
    certificate: Certificate
    naming: str
    options: dict[str, Any]
    preprocessing: Preprocessing
    transforms: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    decision: Decision | None = None
    diagnosis: Diagnosis | None = None
    labels: str | None = None
    filters: tuple[np.ndarray, np.ndarray] | None = None
    pixels: Pixels | None = None
    digest: str = ""
    beside: dict[str, str] = field(default_factory=dict[str, str])
    network: Model | None = None

    @property
    def verdict(self) -> str:
        """Say in a line what is proven of the arithmetic, and what is known of the pixels."""
        if self.pixels is None:
            return self.certificate.verdict
        arithmetic = "" if self.certificate.chained else "arithmetic "
        return f"{arithmetic}{self.certificate.verdict} · {self.pixels.said}"

    def __repr__(self) -> str:
        return f"<Conversion of {self.source.path.name} to {self.destination.name}, {self.model.__name__}: {self.verdict}>"

    @property
    def kernels(self) -> str:
        """Say in words what the source's kernels are, and what was done to them."""
        said = sorted({told["trained_as"] for told in self.transforms.values() if "trained_as" in told})
        flipped = sum(any(step.startswith("flip(") for step in told.get("steps", ())) for told in self.transforms.values())
        return f"{' and '.join(said) or 'none'} in the file; {flipped} flipped"

    def to_json(self) -> dict[str, Any]:
        """Describe everything but the tensors."""
        return {"destination": str(self.destination), "verdict": self.verdict, **told(self)}


class NotProven(ConvertError):
    """The network does not compute what the source computes, or a proof was asked for and there is none; nothing was written.

    Attributes:
        conversion: all that is known of it.
    """

    conversion: Conversion | None = None


def not_proven(made: Conversion) -> NotProven:
    """Say what was found."""
    cause = f"\n{made.diagnosis}" if made.diagnosis is not None else ""
    against = next((one for one in made.certificate.evidence if one.contradicts), None)
    why = "the network does not compute what the file's does."
    if against is not None and against.kind == "destination outputs":
        why = f"{made.destination.name} does not compute what the network does; write another format, or unproven=True writes this one."
    if made.diagnosis is None and against is None:
        why = (
            "nothing proved that the network computes what the file's does: give reference=FILE, what the network computed at home, for "
            "labelled images prove nothing alone; or leave require_proof=True out."
        )
    error = NotProven(f"{made.source.path} was not converted: {why}\n{made.certificate}{cause}")
    error.conversion = made
    return error


def metadata(made: Conversion, room: bool = False) -> dict[str, str]:
    """Write down where the tensors came from and what was done to them, for the file's header."""
    text = json.dumps(told(made), separators=(",", ":"), default=str)
    if room:  # the certificate comes after the tensors, and must find its place
        text += " " * (4096 + 200 * len(made.transforms))
    return {"format": "pt", NOTES: text}


def told(made: Conversion) -> dict[str, Any]:
    """Describe everything but tensors and places, in what JSON has."""
    return {
        "model": made.model.variant().__name__,
        "options": made.options,
        "preprocessing": asdict(made.preprocessing),
        "pixels": None if made.pixels is None else made.pixels.to_json(),
        "labels": made.labels,
        "source": origin(made) | ({"facts": _facts(made)} if made.source.format != "safetensors" else {}),
        "transforms": made.transforms,
        "notes": made.notes,
        "decision": None if made.decision is None else asdict(made.decision),
        "parity": made.certificate.to_json(),
        "digest": made.digest,
        "versions": versions(),
    }


def _facts(made: Conversion) -> dict[str, str]:
    """List what the source says, but for notes of an earlier conversion: notes in notes would grow with every file of a chain."""
    return {name: fact for name, fact in made.source.facts.items() if name != NOTES}


def origin(made: Conversion) -> dict[str, Any]:
    """Say which file was read, and as what."""
    source = made.source
    facts = {"file": source.path.name, "sha256": made.sha256, "format": source.format, "framework": source.framework}
    return facts | {"naming": made.naming} | ({"beside": made.beside} if made.beside else {})


def versions() -> dict[str, str]:
    """Name the versions of all that had a part in a conversion."""
    from zoo import __version__

    found = {"kernelzoo": __version__, "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    return found | _installed()


@cache
def _installed() -> dict[str, str]:
    """Name the versions of optional packages, whose descriptions take as long to read as a small network takes to be converted."""
    found: dict[str, str] = {}
    for package in ("h5py", "onnx", "scipy", "pymongo", "keras", "onnxruntime"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
