"""A weight file of any framework as a network of the zoo: which network, built how, with which tensor where."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import weights
from convert import names, sandbox
from convert.conversion import Adopted, adopt, explain
from convert.core import COUNTER, Row
from convert.match import NoUniqueMatch
from convert.match import match as derive
from convert.network import Layer, layers
from convert.source import Convention, Source, Spatial
from weights import Checkpoint
from weights.errors import BadRecord, LimitExceeded, MalformedFile, WeightsMismatch
from weights.wording import counted
from zoo.networks.assignment import assign
from zoo.networks.model import Model

M = TypeVar("M", bound=Model)

ACTIVATIONS = {"leaky_relu": "leaky_relu_0.1"}
"""Operations of a graph whose name here is another one."""

MOST_PIXELS = 2048
"""Side of the images that a file may ask to be proven on."""

NOTES = "kernelzoo"
"""The key of our notes in the metadata of a safetensors file."""


@dataclass(slots=True)
class Foreign:
    """A file, and the network that its tensors were given to.

    Attributes:
        source: what the reader found.
        model: the class.
        network: built on the meta device with `options`.
        layers: of the network.
        adopted: the tensors by our names.
        options: constructor keywords without which these weights compute something else.
        known: the registry's record of these very bytes, if there is one.
        convention, spatial: what was said or decided, where the file doesn't say; None where the file is believed.
        renamed: whether the file's classifier has another name than in its naming.
    """

    source: Source
    model: type[Model]
    network: Model
    layers: list[Layer]
    adopted: Adopted
    options: dict[str, Any] = field(default_factory=dict)
    convention: Convention | None = None
    spatial: Spatial | None = None
    known: Checkpoint | None = None
    renamed: bool = False

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are prepared, fields of `weights.Preprocessing`: what the file says, over what its naming is known to want."""
        if noted := notes(self.source.facts, self.model):
            return dict(noted["preprocessing"])
        if self.known is not None and self.known.model == self.model.variant().__name__:
            return asdict(self.known.preprocessing)
        known = names.fact(self.adopted.naming, "preprocessing", self.model) if self.adopted.naming in names.NAMINGS else {}
        both = {**known, **self.source.preprocessing}
        side = self.image_size
        if side not in (None, self.network.input_size) and not {"resize", "crop"} & both.keys():
            both |= {"resize": side, "crop": side}
        return {name: both[name] for name in ("resize", "crop", "interpolation", "mean", "std", "channel_order") if name in both}

    @property
    def image_size(self) -> int | None:
        """Side in pixels of the images that the file's network takes, where its graph says it."""
        for node in self.source.graph.nodes if self.source.graph is not None else ():
            shape = [side for side in node.attrs.get("shape", ()) if isinstance(side, int)] if node.op == "input" else []
            if len(shape) == 3:
                if max(shape) > MOST_PIXELS:
                    raise LimitExceeded(
                        f"{self.source.path} asks for images of {max(shape)} pixels a side; at most {MOST_PIXELS} are tried"
                    )
                sides = shape[1:] if node.attrs.get("layout", "nchw") == "nchw" else shape[:2]
                if sides[0] == sides[1] and sides[0] >= self.network.min_size:
                    return sides[0]
        return None

    @property
    def labels(self) -> str | None:
        """The name of its list of labels: noted by `zoo convert`, or ImageNet's where its naming is of networks with these classes."""
        if noted := notes(self.source.facts, self.model):
            return noted.get("labels")
        if self.known is not None and self.known.model == self.model.variant().__name__:
            return self.known.labels
        head = self.adopted.tensors.get(f"{self.network.classifiers[0]}.weight")
        return "imagenet1k" if head is not None and head.shape[0] == 1000 and self.adopted.naming in names.NAMINGS else None

    def settled(self) -> Source:
        """Return the source with what was decided about it, for the execution of its graph."""
        source = self.source
        if self.spatial is not None:
            source = replace(source, spatial=self.spatial)
        if self.convention is None or source.graph is None:
            return source
        nodes = [
            replace(node, attrs={**node.attrs, "convention": self.convention}) if "convention" in node.attrs else node
            for node in source.graph.nodes
        ]
        return replace(source, graph=replace(source.graph, nodes=tuple(nodes)))

    @property
    def takes_pixels(self) -> bool:
        """Whether the source network takes pixels, 0..255, and prepares them itself."""
        graph = self.source.graph
        if graph is not None:
            first = next((node for node in graph.nodes if node.op != "input"), None)
            return first is not None and first.op == "affine"
        known = names.fact(self.adopted.naming, "preprocessing", self.model) if self.adopted.naming in names.NAMINGS else {}
        return bool(known.get("built_in", False))


def open_foreign(
    path: Path,
    model: type[Model],
    *,
    format: str = "auto",
    naming: str = "auto",
    match: bool = False,
    convention: Convention | None = None,
    spatial: Spatial | None = None,
    headless: bool = False,
    isolated: bool = True,
    **options: Any,
) -> Foreign:
    """Read a file of any format as the weights of `model`.

    Args:
        path: the file, or the folder of a format that is one.
        model: a class of the catalogue.
        format: one of `convert.formats`, "keras"; "auto" asks the content.
        naming: a table of `convert.names`; "auto" finds the one that explains the file.
        match: derive the mapping from topology, shapes and names instead of a table.
        convention: of the kernels, where the file doesn't say or says it wrongly.
        spatial: "hw" or "wh", likewise.
        headless: whether the file may lack the classifier: the network then ends in what its classifier reads.
        isolated: False reads the file in this process, see `convert.sandbox`.
        **options: constructor keywords; they win over the file's and the naming's.

    Raises:
        WeightsMismatch: the file's tensors are not the network's; both names and shapes are listed.
        Undecided: the file doesn't say the kernel convention, and it was not given.
        ConvertError: the file can't be read.
    """
    source = sandbox.read(Path(path), format, isolated=isolated)
    return adopted(source, model, naming=naming, match=match, convention=convention, spatial=spatial, headless=headless, **options)


def adopted(
    source: Source,
    model: type[Model],
    *,
    naming: str = "auto",
    match: bool = False,
    convention: Convention | None = None,
    spatial: Spatial | None = None,
    headless: bool = False,
    known: Checkpoint | None = None,
    **options: Any,
) -> Foreign:
    """Give the tensors of an open file to `model`; as `open_foreign`."""
    candidates = ["auto"] if match else names.of_format(source.format) if naming == "auto" else [naming]
    best: Foreign | None = None
    for name in candidates:
        found = _with(source, model, name, match, convention, spatial, headless, known, options)
        if found is None:
            continue
        if best is None or (_left(found), found.renamed) < (_left(best), best.renamed):
            best = found
        if best.adopted.report.ok and not best.renamed:  # else another naming may know the classifier's name too
            break
    if best is not None and best.adopted.report.ok:
        return _fractional(best)
    if best is None:
        tried = ", ".join(candidates)
        raise WeightsMismatch(
            f"{source.path} is a {source.format} file, and none of its namings ({tried}) is of {model.__name__}; try zoo convert --match"
        )
    error = WeightsMismatch(
        f"{source.path} does not hold the weights of {model.__name__}, by the naming that explains most ({best.adopted.naming}):\n"
        + explain(best.adopted, {name: tuple(t.shape) for name, t in best.network.state_dict().items()})
        + "\nIs it a file of another network? `zoo inspect FILE` shows what it holds; zoo convert --match derives a mapping from "
        "topology and shapes."
    )
    report = best.adopted.report
    head = best.network.classifiers[0]
    if not report.unmatched and report.missing and all(ours.startswith(f"{head}.") for ours, _ in report.missing):
        error.args = (
            f"{error.args[0]}\nOnly its classifier is missing: zoo convert --headless takes it without, and so does "
            "trained(…, num_classes=…).",
        )
    error.missing = [ours for ours, _ in report.missing]
    error.unexpected = list(report.unmatched)
    error.misshaped = [(ours, was, wanted) for _, ours, was, wanted in report.misshaped]
    raise error


def _fractional(found: Foreign) -> Foreign:
    """Refuse quantised weights: their numbers mean nothing without their scales."""
    tensors = found.adopted.tensors
    whole = [name for name, stored in tensors.items() if stored.dtype.kind in "iub" and not name.endswith(COUNTER)]
    if whole:
        raise WeightsMismatch(
            f"{found.source.path} holds whole numbers where {found.model.__name__} computes with fractions, in "
            f"{counted(len(whole), 'tensor')}: {', '.join(whole[:3])}. Quantised weights are not read; convert the file "
            "from before it was quantised."
        )
    return found


def load(foreign: Foreign, network: Model | None = None) -> Model:
    """Build the network with the tensors of the file, in eval mode, in torch's default dtype, on the CPU."""
    from convert.formats._torch import as_tensor

    target = network if network is not None else foreign.network
    wanted = target.state_dict()
    state: dict[str, Tensor] = {}
    for name, like in wanted.items():
        if name in foreign.adopted.tensors:
            state[name] = as_tensor(foreign.adopted.tensors[name].array()).to(like.dtype).contiguous()
        elif name.endswith(COUNTER):
            state[name] = torch.zeros((), dtype=torch.int64)
    return assign(target, state).eval()


def notes(facts: Mapping[str, str], model: type[Model]) -> dict[str, Any]:
    """Read what `zoo convert` wrote into a file about the weights of `model`; {} where it wrote nothing, or about another network.

    Raises:
        MalformedFile: the notes are damaged.
    """
    if NOTES not in facts:
        return {}
    try:
        told = json.loads(facts[NOTES])
        if told["model"] != model.variant().__name__:
            return {}
        steps = {key: value for key, value in told["preprocessing"].items() if value is not None}
        told["preprocessing"] = asdict(weights.adhoc(told["model"], "file:///none", preprocessing=steps).preprocessing)
        return {**told, "options": _suited(model, dict(told["options"])), "source": dict(told["source"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadRecord) as error:
        raise MalformedFile(f"the notes of `zoo convert` in this file's metadata are damaged: {error}") from error


def _suited(model: type[Model], options: dict[str, Any]) -> dict[str, Any]:
    """Check that noted options are of their defaults' types: a network would take others, and fail when it computes."""
    bases = [base.__init__ for base in model.__mro__ if "__init__" in vars(base)]
    usual = {name: parameter.default for init in bases for name, parameter in inspect.signature(init).parameters.items()}
    for name, value in options.items():
        kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(usual.get(name)), (bool, int, float, str))
        if type(value) not in kinds:
            raise TypeError(f"the option {name} can't be {str(value)[:100]!r}")
    return options


def file_sha256(path: Path) -> str:
    """Hash a file; of a folder, the names and hashes of its files in the order of their names."""
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            whole.update(f"{file.relative_to(path).as_posix()}\0{file_sha256(file)}\n".encode())
        return whole.hexdigest()
    if not path.exists():  # the prefix of a TensorFlow checkpoint's files
        parts = sorted(path.parent.glob(f"{path.name}.*"))
        return hashlib.sha256("\n".join(f"{part.suffix}\0{file_sha256(part)}" for part in parts).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _left(found: Foreign) -> int:
    report = found.adopted.report
    return len(report.missing) + len(report.unmatched) + len(report.contested) + len(report.misshaped)


def _with(
    source: Source,
    model: type[Model],
    naming: str,
    match: bool,
    convention: Convention | None,
    spatial: Spatial | None,
    headless: bool,
    known: Checkpoint | None,
    options: Mapping[str, Any],
) -> Foreign | None:
    """Try one naming: build the network as it asks, then once more with the file's own number of classes and channels."""
    accepted = _accepted(model)
    noted = notes(source.facts, model)
    usual = names.fact(naming, "options", model) if naming in names.NAMINGS else {}
    recorded = known.options if known is not None and known.model == model.variant().__name__ else {}
    suggested = noted["options"] if noted else {**usual, **_of_graph(source), **recorded}
    keywords = {k: v for k, v in suggested.items() if k in accepted} | dict(options)
    found, renamed = None, False
    for last in (False, True):
        network = _meta(model, keywords)
        if headless:
            network.set_submodule(network.classifiers[0], nn.Identity())
        structure = _structure(model, tuple(sorted(keywords.items())), headless)
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        if match:
            try:
                rows = derive(source, structure, shapes)
            except NoUniqueMatch:
                classes = _classes(source, network)
                if last or headless or classes is None or "num_classes" in options:
                    raise
                keywords["num_classes"] = classes
                continue
            result = adopt(source, structure, shapes, family=model, rows=rows, convention=convention, spatial=spatial)
        elif source.positional:
            if not hasattr(names.NAMINGS[naming], "order"):
                return None
            result = adopt(source, structure, shapes, family=model, naming=naming, convention=convention, spatial=spatial)
        else:
            rows = names.rows(naming, model, shapes)
            if not rows:
                return None
            chosen: dict[str, Any] = {"family": model, "naming": naming, "convention": convention, "spatial": spatial}
            result = adopt(source, structure, shapes, rows=rows, **chosen)
            head = None if headless else _other_head(result, network)
            renamed = head is not None
            if head is not None:
                rows = [row for row in rows if row.ours != head.ours] + [head]
                result = adopt(source, structure, shapes, rows=rows, **chosen)
                result.notes.append(f"the classifier is called {head.theirs} in the file")
        own = {k: v for k, v in keywords.items() if k not in ("num_classes", "in_channels", "dropout")}
        found = Foreign(source, model, network, structure, result, own, convention, spatial, known, renamed)
        widths = {k: v for k, v in _widths(result, network).items() if k in accepted and k not in options and v != getattr(network, k)}
        if not widths:
            break
        keywords |= widths
    return found


def _classes(source: Source, network: Model) -> int | None:
    """Find how many classes a file has, whose only weight like our classifier's has another number of them."""
    wanted = network.state_dict()[f"{network.classifiers[0]}.weight"].shape
    like = [s.shape for n, s in source.tensors.items() if n.endswith(".weight") and s.shape[1:] == tuple(wanted[1:])]
    return like[0][0] if len(like) == 1 else None


def _other_head(result: Adopted, network: Model) -> Row | None:
    """Find the classifier where it is all that is missing, and one module that reads as much is all that is left: a fine-tuned file."""
    head = network.classifiers[0]
    left = {name.rpartition(".")[0] for name in result.report.unmatched}
    missing = {ours.rpartition(".")[0] for ours, _ in result.report.missing}
    if missing != {head} or len(left) != 1:
        return None
    theirs = left.pop()
    ours, wanted = result.theirs.get(f"{theirs}.weight", ()), network.state_dict()[f"{head}.weight"].shape
    if len(ours) < 2 or ours[1] != wanted[1] or set(ours[2:]) - {1}:
        return None
    same = len(ours) == len(wanted)
    return Row(
        theirs,
        head,
        ("linear" if len(wanted) == 2 else "conv") if same else ("linear_from_conv" if len(wanted) == 2 else "conv_from_linear"),
    )


@lru_cache(32)
def _structure(model: type[Model], keywords: tuple[tuple[str, Any], ...], headless: bool) -> list[Layer]:
    """List a network's layers; several namings ask for the same."""
    network = _meta(model, dict(keywords))
    if headless:
        network.set_submodule(network.classifiers[0], nn.Identity())
    return layers(network, (network.in_channels, network.input_size, network.input_size))


def _meta(model: type[M], keywords: Mapping[str, Any]) -> M:
    with torch.device("meta"):
        return model(**keywords)


def _accepted(model: type[Model]) -> set[str]:
    return {name for base in model.__mro__ if "__init__" in vars(base) for name in inspect.signature(base.__init__).parameters}


def _kernel(source: Source, module: str) -> tuple[int, ...]:
    stored = source.tensors.get(f"{module}.weight")
    return stored.shape[2:] if stored is not None else ()


def _of_graph(source: Source) -> dict[str, Any]:
    """Say which constructor keywords the file's own graph asks for."""
    if source.graph is None:
        return {}
    eps = {node.attrs["eps"] for node in source.graph.nodes if node.op == "norm" and "eps" in node.attrs}
    same = {
        node.attrs.get("pads") == "same_upper"
        for node in source.graph.nodes
        if node.op in ("conv", "depthwise") and tuple(node.attrs.get("stride", (1, 1))) != (1, 1)
    }
    found: dict[str, Any] = {}
    if len(eps) == 1:
        found["norm_eps"] = float(f"{eps.pop():.6g}")  # a graph keeps it in float32, 9.99999974e-06
    if same == {True}:
        found["padding"] = "same"
    used = {
        ACTIVATIONS.get(node.op, node.op) for node in source.graph.nodes if node.op in (*ACTIVATIONS, "relu", "relu6", "hardswish", "silu")
    }
    if len(used) == 1:
        found["activation"] = used.pop()
    last = next((node for node in reversed(source.graph.nodes) if node.op == "conv"), None)
    if last is not None and tuple(last.attrs.get("pads", ())) == (1, 1, 1, 1) and _kernel(source, last.name) == (1, 1):
        found["classifier_padding"] = 1
    return found


def _widths(result: Adopted, network: Model) -> dict[str, int]:
    """Read from the tensors how many classes and channels the file has."""
    found: dict[str, int] = {}
    for keyword, layer, axis in (("num_classes", network.classifiers[0], 0), ("in_channels", network.stem, 1)):
        stored = result.tensors.get(f"{layer}.weight")
        if stored is not None and len(stored.shape) > axis:
            found[keyword] = stored.shape[axis]
    return found
