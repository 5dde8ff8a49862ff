"""The naming that explains a file best: every table of names is tried, and what fits none is an error that lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert import names, sandbox
from convert.conversion import explain
from convert.core import COUNTER
from convert.source import Convention, Source, Spatial
from weights import Checkpoint
from weights.errors import WeightsMismatch
from weights.wording import counted
from zoo.conversion.adoption import adopt_by
from zoo.conversion.beside import beside_file
from zoo.conversion.foreign import Foreign
from zoo.conversion.options import Asked
from zoo.networks.model import Model


def open_foreign(
    path: Path,
    model: type[Model],
    *,
    format: str = "auto",
    isolated: bool = True,
    weights_of: str | None = None,
    **chosen: Any,
) -> Foreign:
    """Read a file of any format as the weights of `model`.

    Args:
        path: the file, or the folder of a format that is one.
        model: a class of the catalogue.
        format: one of `convert.formats`, "keras"; "auto" asks the content.
        isolated, weights_of: how the file is read and which of its sets of weights is meant, see `convert.sandbox.read`.
        **chosen: see `adopted`.

    Raises:
        WeightsMismatch: the file's tensors are not the network's; both names and shapes are listed.
        Undecided: the file doesn't say the kernel convention, and it was not given.
        ConvertError: the file can't be read.
    """
    return adopted(sandbox.read(Path(path), format, isolated=isolated, weights_of=weights_of), model, **chosen)


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
    """Give the tensors of an open file to `model`; errors as of `open_foreign`.

    Args:
        source: the file.
        model: a class of the catalogue.
        naming: a table of `convert.names`; "auto" finds the one that explains the file.
        match, convention, spatial, headless, known: see `Asked`.
        **options: constructor keywords; they win over the file's and the naming's.
    """
    beside = beside_file(source.path, model)
    asked = Asked(match, convention, spatial, headless or (beside is not None and beside.headless), known, options, beside)
    candidates = ["auto"] if match else names.of_format(source.format) if naming == "auto" else [naming]
    best: Foreign | None = None
    for name in candidates:
        found = adopt_by(source, model, name, asked)
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


def _left(found: Foreign) -> int:
    report = found.adopted.report
    return len(report.missing) + len(report.unmatched) + len(report.contested) + len(report.misshaped)
