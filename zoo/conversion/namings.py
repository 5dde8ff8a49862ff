"""The naming that explains a file best: every table of names is tried, and what fits none is an error that lists it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert import names, sandbox
from convert.conversion import IN_ORDER, explain
from convert.core import COUNTER
from convert.match import NoUniqueMatch
from convert.source import Convention, Source, Spatial
from weights import Checkpoint
from weights.errors import WeightsMismatch
from weights.wording import counted
from zoo.conversion.adoption import adopt_by
from zoo.conversion.beside import beside_file
from zoo.conversion.fitting import choices, said
from zoo.conversion.foreign import Foreign
from zoo.conversion.likeness import SURE, recognise
from zoo.conversion.options import Asked
from zoo.conversion.own import OwnNetwork
from zoo.networks.model import Model

KEPT = "the file has its classifier, which is kept"
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")
MATCH = "match"
"""Stands for a naming where modules are paired by topology, shapes and names."""
EXPORTED = ("chainer", "coreml", "graphdef", "mxnet", "ncnn", "openvino", "paddle", "tfjs", "tflite", "torch7")
"""Formats that networks of any names are exported to; where no naming fits, they are paired without one."""


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
    source = sandbox.read(Path(path), format, isolated=isolated, weights_of=weights_of)
    try:
        return adopted(source, model, **chosen)
    except BaseException:
        source.close()
        raise


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
    beside = None if issubclass(model, OwnNetwork) else beside_file(source.path, model)
    asked = Asked(match, convention, spatial, headless or (beside is not None and beside.headless), known, options, beside)
    candidates = _candidates(source, model, naming, match)
    best, refused = _best(source, model, candidates, asked)
    if best is not None and best.adopted.report.ok:
        return _fractional(best)
    if asked.headless:  # it may have what it was allowed to lack
        whole, _ = _best(source, model, candidates, replace(asked, headless=False))
        if whole is not None and whole.adopted.report.ok:
            whole.adopted.notes.append(KEPT)
            return _fractional(whole)
    if (other := _with_other_options(source, model, candidates, asked)) is not None:
        return _fractional(other)
    if refused is not None:
        raise refused
    raise _misfit(source, model, best, candidates)


def _best(source: Source, model: type[Model], candidates: list[str], asked: Asked) -> tuple[Foreign | None, NoUniqueMatch | None]:
    """Try every naming, and return the one that explains most, or why no pairing without a naming is unique."""
    best: Foreign | None = None
    for name in candidates:
        matching = name == MATCH
        named = best if issubclass(model, OwnNetwork) else None  # a file of the network's own names, as far as it goes
        if matching and named is not None and _names_agree(named):
            break
        try:
            found = adopt_by(source, model, "auto" if matching else name, replace(asked, match=matching))
        except NoUniqueMatch as error:
            return best, None if named is not None and _mostly_named(named) else error
        if found is None:
            continue
        if issubclass(model, OwnNetwork) and name == candidates[0] == "torchvision":  # who has its names has all of its tensors
            found.adopted.report.missing.extend((name, name) for name in found.adopted.filled)
        if best is None or (_left(found), found.renamed) < (_left(best), best.renamed):
            best = found
        if best.adopted.report.ok and not best.renamed:  # else another naming may know the classifier's name too
            break
    return best, None


def _with_other_options(source: Source, model: type[Model], candidates: list[str], asked: Asked) -> Foreign | None:
    """Find the one set of constructor options that gives the network the file's tensors; None where none does, or several do."""
    found: list[tuple[dict[str, Any], Foreign]] = []
    for options, _ in () if issubclass(model, OwnNetwork) else choices(model):
        if options.keys() & asked.options.keys():
            continue
        best, _ = _best(source, model, candidates, replace(asked, options={**asked.options, **options}))
        if best is not None and best.adopted.report.ok:
            found.append((options, best))
    if len(found) != 1:
        return None
    options, best = found[0]
    best.adopted.notes.append(f"fits {model.__name__} with {said(options)}, and not without")
    return best


def _misfit(source: Source, model: type[Model], best: Foreign | None, candidates: list[str]) -> WeightsMismatch:
    """Say what of a file does not fit, and of which network it may be."""
    likely = next(iter(recognise(source)), None)
    hint = ""
    if (match := SHARD.search(source.path.name)) is not None:
        hint = f"\nIt is one of {int(match[1])} shards: name the index beside them, a file that ends in .index.json."
    elif likely is not None and likely.confidence >= SURE and likely.called != model.__name__:
        todo = "name that network instead"
        if likely.name == model.__name__:  # "shortcut='B'", as its options are called
            given = " ".join(f"--option {one}" for one in likely.options.replace("'", "").split(", "))
            todo = f"add {given}{'' if source.positional else ' --match'}"
        hint = f"\nIts tensors have the shapes of {likely.called} ({likely.confidence:.0%}): {todo}."
    if best is None:
        tried = f"none of its namings ({', '.join(candidates)}) is of {model.__name__}"
        return WeightsMismatch(f"{source.path} is a {source.format} file, and {tried}; try zoo convert --match{hint}")
    error = WeightsMismatch(
        f"{source.path} does not hold the weights of {model.__name__}, by the naming that explains most ({best.adopted.naming}):\n"
        + explain(best.adopted, {name: tuple(t.shape) for name, t in best.network.state_dict().items()})
        + (
            hint
            or "\nIs it a file of another network? `zoo inspect FILE` shows what it holds"
            + ("; zoo convert --match derives a mapping from topology and shapes." if not source.positional else ".")
        )
    )
    report = best.adopted.report
    head = next(iter(best.network.classifiers), "")
    if head and not report.unmatched and report.missing and all(ours.startswith(f"{head}.") for ours, _ in report.missing):
        error.args = (
            f"{error.args[0]}\nOnly its classifier is missing: zoo convert --headless takes it without, and so does "
            "trained(…, num_classes=…).",
        )
    if source.positional and report.missing and all(ours.rpartition(".")[2].startswith("running_") for ours, _ in report.missing):
        error.args = (
            f"{error.args[0]}\nOnly running statistics are missing, which a list of parameters never has. Save Flux.state(model) in Julia, "
            "which has them.",
        )
    error.missing = [ours for ours, _ in report.missing]
    error.unexpected = list(report.unmatched)
    error.misshaped = [(ours, was, wanted) for _, ours, was, wanted in report.misshaped]
    return error


def _candidates(source: Source, model: type[Model], naming: str, match: bool) -> list[str]:
    """List the ways in which a file may name a network's tensors, the likelier first."""
    own = issubclass(model, OwnNetwork)
    if source.positional and naming == "auto":
        return [IN_ORDER] if own else names.orders(source.format) or [IN_ORDER]
    if match:
        return [MATCH]
    if naming != "auto":
        return [naming]
    return ["torchvision", MATCH] if own else [*names.of_format(source.format), *([MATCH] if source.format in EXPORTED else [])]


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


def _names_agree(found: Foreign) -> bool:
    """Tell whether a file has a network's own names, so that what is missing, or too much, is damage and no other way to name it."""
    report = found.adopted.report
    return _mostly_named(found) and not (report.missing and report.unmatched)


def _mostly_named(found: Foreign) -> bool:
    """Tell whether most of a network's tensors found their places by their names, with their shapes."""
    report = found.adopted.report
    return 2 * (len(found.network.state_dict()) - len(report.missing) - len(report.misshaped)) > len(found.network.state_dict())


def _left(found: Foreign) -> int:
    report = found.adopted.report
    return len(report.missing) + len(report.unmatched) + len(report.contested) + len(report.misshaped)
