"""`zoo convert`: a file of one framework becomes a file of another, and says what proves that every number arrived."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from convert import certificate, formats, names, sandbox
from convert._guard import correlation_only
from convert.certificate import Certificate
from convert.evidence import Decision
from convert.formats import safetensors
from convert.source import CONVENTIONS, SPATIALS, Source, Stored, meant
from convert.steps import Flip, SwapChannels
from weights import Preprocessing
from weights.arguments import forgiving
from weights.cache import stamp_of
from weights.errors import ConvertError, MalformedFile, NonFinite
from weights.reading import read_unhashed
from weights.whole import beside, room, sync_file, sync_folder
from zoo.catalogue import model_class
from zoo.conversion.digest import digest
from zoo.conversion.export import check_same, export, kept_bits
from zoo.conversion.fold_input import fold_input as fold
from zoo.conversion.foreign import Foreign, filled, load
from zoo.conversion.identity import hashing
from zoo.conversion.notes import NOTES, notes
from zoo.conversion.own import OwnNetwork, own_network
from zoo.conversion.pixels import known_pixels, searched, told_by_user
from zoo.conversion.proof import decided, proven
from zoo.conversion.proof_images import Pictures
from zoo.conversion.result import Conversion, metadata, not_proven
from zoo.networks.model import Model

UNSAID = "how its images are prepared is not known and was not compared; give channel order, mean, std and size to note it"
"""Of a network of the user's own for images in colour, of which nobody said it."""


@forgiving
def convert(
    source: Path,
    destination: Path,
    model: type[Model] | str | nn.Module | Callable[..., nn.Module],
    *,
    example: Sequence[int] | Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
    framework: str = "auto",
    naming: str = "auto",
    to: str = "auto",
    match: bool = False,
    kernel_convention: Literal["auto", "correlation", "convolution"] = "auto",
    to_convention: Literal["auto", "correlation", "convolution"] = "auto",
    spatial: Literal["auto", "hw", "wh"] = "auto",
    reference: Path | None = None,
    images: Path | None = None,
    channel_order: Literal["rgb", "bgr"] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    size: int | None = None,
    fold_input: bool = False,
    headless: bool = False,
    preprocessing_inside: bool = False,
    prove: bool = True,
    unproven: bool = False,
    require_proof: bool = False,
    replace: bool = False,
    isolated: bool = True,
    weights_of: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Conversion:
    """Convert a weight file and prove that every number arrived.

    Args:
        source: a file of any format that `convert.formats` reads.
        destination: the file to write, of any format that is written; it appears when all is proven, or not at all.
        model: the network that the weights are of, or its name; or a network of your own: a module, which is not changed, or a class or
            function that makes one. Your own needs no classifier.
        example: of a network of your own the shape of one input, (C, H, W) or (N,), or a batch of one; None tries usual sides.
        arguments: with which a class or function of your own is called.
        framework: the source's format, or the naming of its tensors; "auto" asks the content and finds the naming that explains it. A
            word that is both, "keras", is the format where the content is of that format, else the naming.
        naming: of the source's tensors, "keras"; it may be given beside a format.
        to: the destination's format, or the naming of its tensors; "auto" asks the ending, and takes the framework's usual naming.
        match: derive the mapping from topology, shapes and names instead of a table.
        kernel_convention: of the source's kernels, where the file doesn't say or says it wrongly; "auto" believes it, or the evidence.
        to_convention: of the kernels to be written, where the format has layers of both kinds.
        spatial: "wh" where the source's networks have width for height; "auto" likewise.
        reference: an .npz with `inputs` and `outputs` of the source network, as it was at home.
        images: a folder of photographs, labelled by their folders' or files' names or not.
        channel_order: of the images that the source's network takes, "rgb" or "bgr"; what is said here is neither guessed nor searched.
        mean, std: a number for each channel in that order, on 0..1; with `scale`, mean is on 0..255.
        scale: what a pixel of 0..255 less the mean is multiplied with, instead of `std`.
        size: side of the square images in pixels.
        fold_input: fold channel order, deviation and, where that is exact, mean of the images into the first convolution.
        headless: whether the source may lack the classifier; the destination then lacks it too.
        preprocessing_inside: let an ONNX file take uint8 RGB pixels (B, H, W, C) and normalise them itself.
        prove: False compares structure only, as for a file that is proven already.
        unproven: write the file although the network does not compute what the source's does.
        require_proof: raise NotProven where nothing contradicts and nothing proves.
        replace: whether `destination` may exist already.
        isolated: False reads the source in this process, see `convert.sandbox`.
        weights_of: "ema" takes the averaged weights of a file that has them beside the raw ones; see `convert.sets.chosen`.
        progress: told what is being done.
        **options: constructor keywords.

    Raises:
        WeightsMismatch: the file's tensors are not the network's.
        Undecided: the file doesn't say the kernel convention, and the evidence is too weak.
        NotProven: the network does not compute what the source does.
        NonFinite: a weight is NaN or infinite, and the file was to be proven.
        ConvertError: a file can't be read or written.
        FileExistsError: `destination` is there already.
        ValueError: an argument is none of the above.
    """
    source, destination = Path(source), Path(destination)
    said = {"channel_order": channel_order, "mean": mean, "std": std, "scale": scale, "size": size}
    convention, spatial_order = meant("kernel_convention", kernel_convention, CONVENTIONS), meant("spatial", spatial, SPATIALS)
    written_as = meant("to_convention", to_convention, CONVENTIONS)
    if not replace:
        _refuse_existing([destination])
    format, naming = source_words(framework, naming, source)
    to_format, to_naming = destination_words(to, destination)
    writer = formats.for_writing(destination, to_format)
    if writer is safetensors:
        correlation_only(written_as, "PyTorch, which reads safetensors,")
    if preprocessing_inside and not getattr(writer, "TAKES_PIXELS", False):
        raise ConvertError(f"{destination.name} can't hold the preprocessing; only ONNX and OpenVINO's IR take it inside")
    sidecars = getattr(writer, "SIDECARS", ())
    if taken := [path for path in map(destination.with_suffix, sidecars) if path.exists() and not replace]:
        raise FileExistsError(
            f"{taken[0]} is there already, and {destination.name} needs one of its own; replace=True puts the new one in its place"
        )
    pictures = Pictures.of(images, None if reference is None else _reference(reference, isolated))
    progress(f"opening {source.name}")
    model = model_of(model, example, arguments)
    begun = stamp_of(source.stat()) if source.is_file() else None
    with (
        _opened(source, format, isolated, weights_of) as opened,
        hashing(source) as hashes,
    ):
        known = hashes.known(opened, model)  # first of all: a file that the registry knows brings its options and preprocessing along
        keywords = {"naming": naming, "match": match, "headless": headless, "known": known, **options}
        foreign, decision = decided(opened, model, convention, spatial_order, pictures, keywords, progress)
        told = told_by_user(foreign.network, **{name: value for name, value in said.items() if value is not None})
        pixels = known_pixels(foreign, told)
        if pictures.files and not foreign.takes_pixels:
            pixels = searched(load(foreign, copy.deepcopy(foreign.network)), pixels, pictures, told, progress)
        trained_on = pixels.steps
        wanted, tensors = trained_on, _own(foreign)
        if fold_input:
            tensors, wanted = fold(foreign.network, foreign.layers, tensors, trained_on)
        made = _described(foreign, tensors, destination, decision, wanted)
        stated = pixels.status == "stated" and (NOTES not in opened.facts or bool(notes(opened.facts, model).get("pixels")))
        unsaid = issubclass(model, OwnNetwork) and not (told or pixels.table or stated)
        made.pixels = None if unsaid else pixels
        if made.pixels is None and getattr(foreign.network, "in_channels", 0) == 3:
            made.notes.append(UNSAID)
        with _temporary(destination, sidecars, replace) as temporary:
            progress(f"writing {destination.name}")
            ours = (
                temporary
                if writer is safetensors and to_naming in ("auto", "torchvision")
                else temporary.with_name(f"{destination.name}.network")
            )
            safetensors.save_stored(
                tensors,
                ours,
                metadata(made, room=True),
                lambda done, total: progress(f"writing {destination.name}, {done >> 20} of {total >> 20} MB"),
            )
            settled = stamp_of(ours.stat())
            made.sha256, made.beside = hashes.sha256, hashes.beside(opened)
            if begun is not None and stamp_of(source.stat()) != begun:
                raise ConvertError(f"{source} was changed while it was read, by another program. Nothing was kept; convert it again.")
            network = made.network = _loaded(foreign, ours) if prove or ours is not temporary else None
            if prove and network is not None:
                if not unproven:
                    check_finite(network.state_dict(), source)
                progress("proving that it computes the same")
                made.digest = digest(network)
                made.certificate, made.diagnosis = proven(foreign, network, pictures, made, trained_on, isolated=isolated)
                if ours is temporary and made.certificate.before and (back := kept_bits(tensors, network)) is not None:
                    made.certificate = Certificate([*made.certificate.evidence, back], made.certificate.before)
            against = any(each.contradicts for each in made.certificate.evidence)
            if (against and not unproven) or (require_proof and not made.certificate.proven and ours is temporary):
                raise not_proven(made)
            check_same(ours, settled)
            if ours is temporary or network is None:
                safetensors.amend(temporary, metadata(made))
            else:
                inside = made.preprocessing if preprocessing_inside else None
                export(foreign, network, writer, temporary, to_naming, written_as, made, inside, isolated, unproven)
                if require_proof and not made.certificate.proven:
                    raise not_proven(made)
                ours.unlink()
        return made


def check_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Refuse weights that are NaN or infinite, which no network computes with; a sum tells of a tensor whether it is to be searched.

    Raises:
        NonFinite: there are some.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            error = NonFinite(
                f"{source}: {name!r} holds NaN or an infinity, so its network would compute nothing else. Its training diverged, or the "
                "file is damaged: use another checkpoint; unproven=True converts it all the same."
            )
            error.tensor = name
            raise error


def _opened(source: Path, format: str, isolated: bool, weights_of: str | None) -> Source:
    """Open the source; where it was said to be of a format and is of another, the error says which."""
    try:
        return sandbox.read(source, format, isolated=isolated, weights_of=weights_of)
    except MalformedFile as error:
        if format != "auto" and (found := _sniffed(source)) not in ("", format):
            raise MalformedFile(
                f"{source} is no file of the format {format}; its content is of {found}. Leave framework={format!r} out"
            ) from error
        raise


def model_of(
    model: type[Model] | str | nn.Module | Callable[..., nn.Module],
    example: Sequence[int] | Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> type[Model]:
    """Find the class that a network's name means, or describe a network of the user's own.

    Raises:
        LookupError: no network of this name.
        TypeError: it is a network of the zoo that is built already, or no network.
        ConvertError: a network of the user's own does not compute.
    """
    if isinstance(model, str):
        return model_class(model)
    if inspect.isclass(model) and issubclass(model, Model):
        return model
    if isinstance(model, Model):
        name = type(model).__name__
        raise TypeError(f"conversions build the zoo's networks themselves, of their class or name: {name}, not {name}()")
    if not callable(model):
        raise TypeError(f"the network is a class, a name or a torch.nn.Module, not {model!r:.60}")
    return own_network(model, example, arguments)


def source_words(framework: str, naming: str, source: Path) -> tuple[str, str]:
    """Tell what --from and --naming say of a source: (format, naming).

    A word that is both is a format where the content is of that format, else a naming.
    """
    format, found = format_or_naming(framework)
    if naming == "auto" and format in names.NAMINGS and source.exists() and _sniffed(source) not in (format, ""):
        format, found = "auto", format
    if naming != "auto":
        if naming not in names.NAMINGS:
            raise ConvertError(f"{naming!r} is no naming of tensors; there are {', '.join(names.NAMINGS)}")
        if found not in ("auto", naming):
            raise ConvertError(f"the tensors can't be named as {found} and as {naming}: leave one out")
        found = naming
    return format, found


def destination_words(to: str, destination: Path) -> tuple[str, str]:
    """Tell what --to says of a destination: (format, naming). A word that is both is a naming where the ending is another format's."""
    format, naming = format_or_naming(to)
    if format in names.NAMINGS:
        with suppress(ConvertError):
            if formats.for_writing(destination).__name__.rpartition(".")[2] != format:
                return "auto", format
    return format, naming


def _sniffed(path: Path) -> str:
    try:
        return formats.sniff(path)
    except ConvertError:
        return ""


def format_or_naming(word: str) -> tuple[str, str]:
    """Tell a format from a naming, which --from and --to both take: (format, naming), "auto" for the other."""
    if word == "auto" or word in formats.formats():
        return word, "auto"
    if word in names.NAMINGS:
        return "auto", word
    raise ConvertError(
        f"{word!r} is neither a format ({', '.join(formats.formats())}) nor a naming of tensors ({', '.join(names.NAMINGS)})"
    )


def _described(
    foreign: Foreign,
    tensors: Mapping[str, Stored],
    destination: Path,
    decision: Decision | None,
    wanted: Preprocessing,
) -> Conversion:
    notes = [*foreign.source.notes, *foreign.adopted.notes]
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
        filters=_filters(tensors.get(f"{foreign.network.first_layer}.weight")),
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


def _loaded(foreign: Foreign, path: Path) -> Model:
    """Load the network from the file that was just written: what is proven is what is on the disk.

    Into private memory, since it lies in a folder of the user's: whoever cut a mapped file short would end this process.
    """
    return filled(foreign.network, safetensors.tensors(read_unhashed(path)))  # which says it if there is less now than was written


def _reference(path: Path, isolated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read an .npz of `inputs`, (B, C, H, W) or (B, H, W, C), and `outputs`, (B, classes)."""
    if formats.sniff(path) != "npz":
        raise ConvertError(f"{path} is no .npz of arrays, `inputs` and `outputs`")
    with sandbox.read(path, "npz", isolated=isolated) as opened:
        found = {stored.origin: stored.load() for stored in opened.tensors.values()}
    lower = {key.lower(): value for key, value in found.items()}
    inputs = next((lower[key] for key in ("inputs", "input", "x") if key in lower), None)
    outputs = next((lower[key] for key in ("outputs", "output", "y", "logits") if key in lower), None)
    numbers = all(array is not None and array.dtype.kind in "fiu" and array.ndim and len(array) for array in (inputs, outputs))
    if inputs is None or outputs is None or not numbers or inputs.ndim != 4 or len(inputs) != len(outputs):
        held = ", ".join(f"{key} {value.shape}" for key, value in found.items())
        raise ConvertError(f"{path} needs `inputs`, (B, C, H, W) or (B, H, W, C), and `outputs`, (B, classes); it has {held}")
    return inputs.astype(np.float32), outputs.reshape(len(outputs), -1)


@contextmanager
def _temporary(destination: Path, sidecars: Sequence[str] = (), replace: bool = True) -> Iterator[Path]:
    """Lend a path beside the destination; what is there in the end takes its place with its sidecars, or nothing does.

    Raises:
        FileExistsError: meanwhile another program made one of these files, and they are not to be replaced.
    """
    if not destination.parent.is_dir():
        raise FileNotFoundError(f"{destination.parent} is no folder; make it first")
    folder = beside(destination)
    with room(destination):
        folder.mkdir(0o700)
    temporary = folder / destination.name
    moved = [(temporary, destination), *((temporary.with_suffix(suffix), destination.with_suffix(suffix)) for suffix in sidecars)]
    try:
        with room(destination, temporary):
            yield temporary
            for file in filter(Path.is_file, folder.iterdir()):
                sync_file(file)
            if not replace:
                _refuse_existing([place for _, place in moved])
            _move(moved, folder)
            sync_folder(destination.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_existing(places: Sequence[Path]) -> None:
    if there := [place for place in places if place.exists()]:
        raise FileExistsError(f"{there[0]} is there already; replace=True puts the new one in its place")


def _move(moved: Sequence[tuple[Path, Path]], folder: Path) -> None:
    """Put files in their places, the first one last; where one can't be moved, those before it are put back."""
    before = {place: folder / f"before{number}" for number, (_, place) in enumerate(moved[1:])}
    try:
        for file, place in moved[1:]:
            with suppress(FileNotFoundError):
                place.replace(before[place])
            file.replace(place)
        moved[0][0].replace(moved[0][1])
    except OSError:
        for place, old in before.items():
            if old.exists():
                old.replace(place)
            elif not any(file.exists() for file, to in moved if to == place):
                place.unlink(missing_ok=True)
        raise
