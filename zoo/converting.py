"""`zoo convert`: a file of one framework becomes a file of another, and says what proves that every number arrived."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convert import certificate, diagnose, evidence, formats, home, names
from convert.certificate import Certificate, Evidence
from convert.conversion import Spatial, Undecided, parts
from convert.core import COUNTER
from convert.diagnose import Diagnosis
from convert.evidence import Decision
from convert.formats import safetensors
from convert.source import Convention, Source, Stored
from convert.steps import Flip, SwapChannels
from weights import Preprocessing
from weights.errors import ConvertError
from zoo.folding import fold_input as fold
from zoo.foreign import NOTES, Foreign, adopted, file_sha256, load, open_foreign
from zoo.model import Model
from zoo.pictures import PROOF_IMAGES, Pictures, natural, prepared, steps

TOLERANCE = 1e-4

DEFAULT_NAMING = {"keras": "keras", "bson": "metalhead", "jld2": "metalhead", "flax": "flax", "theano": "lasagne"}
"""The naming that a framework's users expect; ours in every other format."""


@dataclass(slots=True)
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
        network: with the converted weights, as long as somebody needs it.
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
    network: Model | None = None

    @property
    def kernels(self) -> str:
        """Say in words what the source's kernels are, and what was done to them."""
        said = sorted({told["trained_as"] for told in self.transforms.values() if "trained_as" in told})
        flipped = sum(any(step.startswith("flip(") for step in told.get("steps", ())) for told in self.transforms.values())
        return f"{' and '.join(said) or 'none'} in the file; {flipped} flipped"

    def to_json(self) -> dict[str, Any]:
        """Describe everything but the tensors."""
        return {"destination": str(self.destination), **_told(self)}


class NotProven(ConvertError):
    """The network does not compute what the source computes; nothing was written.

    Attributes:
        conversion: all that is known of it.
    """

    conversion: Conversion | None = None


def convert(
    source: Path,
    destination: Path,
    model: type[Model],
    *,
    framework: str = "auto",
    to: str = "auto",
    match: bool = False,
    convention: Convention | None = None,
    to_convention: Convention | None = None,
    spatial: Spatial | None = None,
    reference: Path | None = None,
    images: Path | None = None,
    fold_input: bool = False,
    headless: bool = False,
    prove: bool = True,
    unproven: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Conversion:
    """Convert a weight file and prove that every number arrived.

    Args:
        source: a file of any format that `convert.formats` reads.
        destination: the file to write, of any format that is written; it appears when all is proven, or not at all.
        model: the network that the weights are of.
        framework: the source's format, or the naming of its tensors; "auto" asks the content and finds the naming that explains it.
        to: the destination's format, or the naming of its tensors; "auto" asks the ending, and takes the framework's usual naming.
        match: derive the mapping from topology, shapes and names instead of a table.
        convention: of the source's kernels, where the file doesn't say or says it wrongly.
        to_convention: of the kernels to be written, where the format has layers of both kinds.
        spatial: "wh" where the source's networks have width for height.
        reference: an .npz with `inputs` and `outputs` of the source network, as it was at home.
        images: a folder of photographs, labelled by their folders' or files' names or not.
        fold_input: fold channel order, deviation and, where that is exact, mean of the images into the first convolution.
        headless: whether the source may lack the classifier; the destination then lacks it too.
        prove: False compares structure only, as for a file that is proven already.
        unproven: write the file although the network does not compute what the source's does.
        force: whether `destination` may exist already.
        progress: told what is being done.
        **options: constructor keywords.

    Raises:
        WeightsMismatch: the file's tensors are not the network's.
        Undecided: the file doesn't say the kernel convention, and the evidence is too weak.
        NotProven: the network does not compute what the source does.
        ConvertError: a file can't be read or written.
        FileExistsError: `destination` is there already.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() and not force:
        raise FileExistsError(f"{destination} is there already; --force replaces it")
    format, naming = _format_or_naming(framework)
    to_format, to_naming = _format_or_naming(to)
    writer = formats.for_writing(destination, to_format)
    pictures = Pictures.of(images, None if reference is None else _reference(reference))
    progress(f"opening {source.name}")
    with formats.read(source, format) as opened:
        keywords = {"naming": naming, "match": match, "headless": headless, **options}
        foreign, decision = _decided(opened, model, convention, spatial, pictures, keywords, progress)
        trained_on = steps(foreign.network, foreign.preprocessing)
        wanted, tensors = trained_on, _own(foreign)
        if fold_input:
            tensors, wanted = fold(foreign.network, foreign.layers, tensors, trained_on)
        made = _described(foreign, tensors, destination, decision, wanted)
        with _temporary(destination) as temporary, ThreadPoolExecutor(1) as beside:
            sha256 = beside.submit(file_sha256, source)  # the second core hashes what the first one writes
            progress(f"writing {destination.name}")
            ours = temporary if writer is safetensors and to_naming in ("auto", "torchvision") else temporary.with_name("ours")
            safetensors.save_stored(tensors, ours, _metadata(made, room=True))
            made.sha256 = sha256.result()
            network = made.network = _mapped(foreign, ours)
            if prove:
                progress("proving that it computes the same")
                made.certificate, made.diagnosis = _proven(foreign, network, pictures, made, trained_on)
            if made.diagnosis is not None and not unproven:
                raise _not_proven(made)
            if ours is temporary:
                safetensors.amend(temporary, _metadata(made))
            else:
                _write_foreign(foreign, network, writer, temporary, to_naming, to_convention, made)
                ours.unlink()
        return made


def _format_or_naming(word: str) -> tuple[str, str]:
    """Tell a format from a naming, which --from and --to both take: (format, naming), "auto" for the other."""
    if word == "auto" or word in formats.formats():
        return word, "auto"
    if word in names.NAMINGS:
        return "auto", word
    raise ConvertError(
        f"{word!r} is neither a format ({', '.join(formats.formats())}) nor a naming of tensors ({', '.join(names.NAMINGS)})"
    )


def _decided(
    source: Source,
    model: type[Model],
    convention: Convention | None,
    spatial: Spatial | None,
    pictures: Pictures,
    keywords: Mapping[str, Any],
    progress: Callable[[str], None],
) -> tuple[Foreign, Decision | None]:
    """Adopt the file's tensors; where it doesn't say how its kernels lie, let evidence decide."""
    try:
        return adopted(source, model, convention=convention, spatial=spatial, **keywords), None
    except Undecided:
        if not pictures:
            raise
    unknown = source.layout.convention if source.positional and source.layout else None
    open_convention = convention is None and "unknown" in (source.conventions | {unknown})
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


def _described(
    foreign: Foreign,
    tensors: Mapping[str, Stored],
    destination: Path,
    decision: Decision | None,
    wanted: Preprocessing,
) -> Conversion:
    notes = [*foreign.source.notes, *foreign.adopted.notes]
    if assumed := [name for name in ("mean", "std") if name not in foreign.preprocessing and not foreign.takes_pixels]:
        notes.append(
            f"neither the file nor its naming says the {' and '.join(assumed)} of its images: {foreign.model.__name__}'s usual are assumed"
        )
    return Conversion(
        destination=destination,
        model=foreign.model,
        source=foreign.source,
        sha256="0" * 64,
        certificate=Certificate([certificate.structure(foreign.adopted.report)]),
        naming=foreign.adopted.naming,
        options=foreign.options,
        preprocessing=wanted,
        transforms={name: _transform(stored) for name, stored in tensors.items()},
        notes=notes,
        decision=decision,
        labels=foreign.labels,
        filters=_filters(tensors.get(f"{foreign.network.stem}.weight")),
    )


def _filters(stem: Stored | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the first convolution's kernels before and after all turning, for the report's picture."""
    if stem is None or len(stem.shape) != 4:
        return None
    turning = (Flip, SwapChannels)
    as_stored = replace(stem, steps=tuple(step for step in stem.steps if not isinstance(step, turning)))
    before, after = as_stored.array(), stem.array()
    return (np.array(before, np.float32), np.array(after, np.float32)) if before.shape == after.shape else None


def _transform(stored: Stored) -> dict[str, Any]:
    told: dict[str, Any] = {
        "from": stored.origin,
        "shape": list(stored.stored_shape),
        "becomes": list(stored.shape),
        "dtype": str(stored.stored_dtype),
    }
    if stored.steps:
        told |= {"steps": [str(step) for step in stored.steps], "exact": all(step.exact for step in stored.steps)}
    if stored.convention is not None:
        told["trained_as"] = stored.convention
    return told


def _own(foreign: Foreign) -> dict[str, Stored]:
    """Take the network's own tensors, in its order; step counters only where the file has them."""
    wanted = foreign.network.state_dict()
    found = foreign.adopted.tensors
    return {name: found[name] for name in wanted if name in found}


def _mapped(foreign: Foreign, path: Path) -> Model:
    """Load the network from the file that was just written, without a copy: what is proven is what is on the disk."""
    with path.open("rb") as file:
        import mmap

        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    state = safetensors.tensors(buffer)
    for name, like in foreign.network.state_dict().items():
        if name.endswith(COUNTER) and name not in state:
            state[name] = torch.zeros((), dtype=torch.int64)
        state[name] = state[name].to(like.dtype)
    foreign.network.load_state_dict(state, assign=True)
    return foreign.network.eval()


def _proven(
    foreign: Foreign, network: Model, pictures: Pictures, made: Conversion, trained_on: Preprocessing
) -> tuple[Certificate, Diagnosis | None]:
    """Gather the evidence there is, strongest first, and look for the fault where some of it contradicts."""
    source, found = foreign.settled(), [certificate.structure(foreign.adopted.report)]
    moved = _differ_inside(foreign, made)
    how = (network, trained_on, made.preprocessing, foreign.takes_pixels)
    theirs, ours = pictures.inputs(*how)
    outputs: np.ndarray | None = None
    if pictures.reference is not None:
        theirs, ours = pictures.referenced(*how)
        outputs = pictures.reference[1]
        found.append(certificate.against_outputs(network, ours.numpy(), outputs, TOLERANCE))
    else:
        there = home.outputs(source, theirs, naming=made.naming, family=made.model, classes=network.num_classes)
        if isinstance(there, str):
            made.notes.append(f"not compared with its own framework's outputs: {there}")
        else:
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
        found.append(certificate.on_labelled(network, [each.numpy() for each in batch.split(32)], labels.numpy()))
    proof = Certificate(found)
    if not any(each.contradicts for each in found):
        return proof, None
    if source.graph is not None and not source.graph.unknown:
        few = slice(0, PROOF_IMAGES)
        return proof, diagnose.diagnose(source, foreign.adopted.pairs, network, theirs[few], ours[few].numpy(), moved=moved)
    return proof, diagnose.diagnose_outputs(network, ours.numpy(), outputs) if outputs is not None else None


def _differ_inside(foreign: Foreign, made: Conversion) -> set[str]:
    """Name the layers whose own outputs differ by what was moved to the layer behind."""
    moved = set(foreign.adopted.moved)
    shifted = any(step.startswith("minus the mean") for told in made.transforms.values() for step in told.get("steps", ()))
    return moved | {foreign.network.stem} if shifted else moved


def _write_foreign(
    foreign: Foreign,
    network: Model,
    writer: Any,
    path: Path,
    to_naming: str,
    to_convention: Convention | None,
    made: Conversion,
) -> None:
    """Write the network for another framework, and prove it by reading it back bit for bit."""
    name = writer.__name__.rpartition(".")[2]
    state = {n: t for n, t in network.state_dict().items() if not n.endswith(COUNTER)}
    if getattr(writer, "EXPORTS", False):
        shape = (network.in_channels, network.input_size, network.input_size)
        writer.export(network, path, input_shape=shape, metadata=_metadata(made))
    else:
        chosen = naming_for(name, to_naming, foreign.model, network)
        write_network(network, path, writer, chosen, to_convention, _metadata(made), foreign.layers)
    again = open_foreign(path, foreign.model, framework=name, convention=to_convention, spatial="hw", **_constructor(foreign, network))
    with again.source:
        differing = _differing(again.adopted.tensors, state)
        if not differing:
            detail = f"the {name} file read again gives every one of {len(state)} tensors bit for bit"
            proof = Evidence("read back", True, 0.0, detail, [])
        else:  # a BatchNorm's scale had to be folded: other numbers, the same network
            image = prepared(natural(1, network.in_channels, network.input_size).double() / 255, made.preprocessing).float()
            with torch.no_grad():
                wanted = network(image).numpy()
            proof = replace(certificate.against_outputs(load(again), image.numpy(), wanted, 1e-5), kind="read back")
            if not proof.proven:
                raise ConvertError(f"{path.name} does not read back as it was written: {differing}. Nothing was kept.")
    made.certificate = Certificate([*made.certificate.evidence, proof])


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
    writer.write(described, path, convention=convention, metadata={**metadata, "naming": naming})


def naming_for(format: str, to_naming: str, model: type[Model], network: Model) -> str:
    """Choose the naming to write: the asked one, the framework's usual one where it knows the network, else ours."""
    if to_naming != "auto":
        if to_naming not in names.NAMINGS:
            raise ConvertError(f"no naming {to_naming!r}; there are {', '.join(names.NAMINGS)}")
        return to_naming
    usual = DEFAULT_NAMING.get(format, "torchvision")
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return usual if usual in names.NAMINGS and names.rows(usual, model, shapes) else "torchvision"


def _constructor(foreign: Foreign, network: Model) -> dict[str, Any]:
    return {**foreign.options, "num_classes": network.num_classes, "in_channels": network.in_channels}


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


def _reference(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read an .npz of `inputs`, (B, C, H, W) or (B, H, W, C), and `outputs`, (B, classes)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise ConvertError(f"{path} is no .npz of arrays: {error}") from error
    lower = {key.lower(): value for key, value in found.items()}
    inputs = next((lower[key] for key in ("inputs", "input", "x") if key in lower), None)
    outputs = next((lower[key] for key in ("outputs", "output", "y", "logits") if key in lower), None)
    if inputs is None or outputs is None or inputs.ndim != 4 or len(inputs) != len(outputs):
        held = ", ".join(f"{key} {value.shape}" for key, value in found.items())
        raise ConvertError(f"{path} needs `inputs`, (B, C, H, W) or (B, H, W, C), and `outputs`, (B, classes); it has {held}")
    return inputs.astype(np.float32), outputs.reshape(len(outputs), -1)


def _metadata(made: Conversion, room: bool = False) -> dict[str, str]:
    """Write down where the tensors came from and what was done to them, for the file's header."""
    text = json.dumps(_told(made), separators=(",", ":"), default=str)
    if room:  # the certificate comes after the tensors, and must find its place
        text += " " * (4096 + 200 * len(made.transforms))
    return {"format": "pt", NOTES: text}


def _told(made: Conversion) -> dict[str, Any]:
    return {
        "model": made.model.variant().__name__,
        "options": made.options,
        "preprocessing": asdict(made.preprocessing),
        "labels": made.labels,
        "source": {
            "file": made.source.path.name,
            "sha256": made.sha256,
            "format": made.source.format,
            "framework": made.source.framework,
            "naming": made.naming,
            **({"facts": made.source.facts} if made.source.format != "safetensors" else {}),
        },
        "convention": "correlation",
        "transforms": made.transforms,
        "notes": made.notes,
        "decision": None if made.decision is None else asdict(made.decision),
        "parity": made.certificate.to_json(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    import zoo

    found = {"kernelzoo": zoo.__version__, "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    for package in ("h5py", "onnx", "scipy", "pymongo", "keras", "onnxruntime"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _not_proven(made: Conversion) -> NotProven:
    error = NotProven(
        f"{made.source.path} was not converted: the network does not compute what the file's does.\n{made.certificate}\n{made.diagnosis}"
    )
    error.conversion = made
    return error


@contextmanager
def _temporary(destination: Path) -> Iterator[Path]:
    """Lend a path beside the destination; what is there in the end takes its place, or nothing does."""
    if not destination.parent.is_dir():
        raise FileNotFoundError(f"{destination.parent} is no folder; make it first")
    folder = Path(tempfile.mkdtemp(prefix=".converting-", dir=destination.parent))
    temporary = folder / destination.name
    try:
        yield temporary
        temporary.replace(destination)
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
