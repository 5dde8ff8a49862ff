"""`recommend`: which checkpoint to start from, for these images, on this machine."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weights import WeightsError
from weights.arguments import forgiving, whole
from weights.errors import SourceUnavailable
from weights.places import at_home, cache_folder
from weights.sources import offline as switched_offline
from weights.wording import counted
from zoo.embedding import Embeddings, embed, read
from zoo.embedding.reading import DamagedEmbeddings
from zoo.embedding.run import make_plan
from zoo.kernels.arguments import device_of
from zoo.networks.model import Model
from zoo.pretrained.trained import trained
from zoo.recommendation.budget import Budget
from zoo.recommendation.candidates import Candidate, named_candidates, usual_candidates
from zoo.recommendation.keeping import Shelf
from zoo.recommendation.latency import Latency, machine, measured
from zoo.recommendation.pictures import LEAST, Pictures, opened
from zoo.recommendation.progress import Watch
from zoo.recommendation.result import Ranked, Recommendation, explained
from zoo.recommendation.scoring import APART, NEIGHBOURS, Score, behind, consistency, probe, ranks

IMAGES, QUICK_IMAGES = 2000, 300
"""Images that are compared on at most."""
FOLDS = 5
QUICK_CANDIDATES = 6
FEW, FEW_OF_A_CLASS = 100, 20
"""Images, in all and of a class, below which the result says that they are few."""
UNLABELLED = NEIGHBOURS + 1
"""Images without labels that are needed at least: each is compared with so many others."""
FAILED = 2
"""Downloads that fail one after the other, after which no other is tried."""


@dataclass(frozen=True)
class _Measured:
    """What was found of one candidate before the scores are compared."""

    candidate: Candidate
    embeddings: Embeddings
    latency: Latency | None
    params: int
    mb: float


@forgiving
def recommend(
    images: Any,
    labels: Any = None,
    budget: Budget | Mapping[str, Any] | None = None,
    *,
    models: Iterable[Any] | None = None,
    offline: bool = False,
    device: torch.device | str | None = None,
    quick: bool = False,
    folds: int = FOLDS,
    folder: str | os.PathLike[str] | None = None,
    restart: bool = False,
    progress: bool | Watch = True,
) -> Recommendation:
    """Compare checkpoints on your own images and say which to start fine-tuning from.

    Each candidate's vectors are computed once and kept. With labels, candidates are ranked by a linear probe on the frozen vectors, in
    cross-validation, with its standard error; a k-NN stands beside it. Without labels they are ranked by how consistent the
    neighbourhoods of their vectors are, which says less. Beside that stand the measured milliseconds of one image, the size and the
    licence. Candidates that these images can't tell apart are told as ties, and of those at most one standard error behind the best
    the fastest is recommended.

    An interrupted call goes on where it was when it is repeated, and says how much was there. The ranking is the same every time; the
    milliseconds are those of the first call on this machine, until `restart`.

    Example:
        >>> found = recommend("photos", budget={"max_ms": 20})  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> model = trained(found.best.model, found.best.tag)  # doctest: +SKIP

    Args:
        images: what `zoo.images.open_source` takes: a folder with a folder a class, as `finetune` takes it, tar shards, Parquet; of a
            folder with train and val folders the train one. Or a list of paths, files' bytes, PIL images, uint8 arrays (H, W, 3).
            Of more than 2,000 images so many are drawn, each class's share kept and 10 of each class where they suffice; else fewer,
            and of so many classes that each would have fewer than folds only some. The result says so.
        labels: None takes those that the images have, a folder a class for example; else one for each image, {key: label}, or a file
            of these as `zoo.embedding.knn` takes it. False does without, whatever the folders are called.
        budget: `Budget`, or a table of its fields: `max_ms`, milliseconds of one image through `fast` on the device; `max_mb`,
            megabytes of the checkpoint's file; `license`, an SPDX identifier or "permissive". What exceeds it is shown and never
            recommended; what exceeds size or licence is not computed at all, unless nothing else is left.
        models: candidates, "resnet50" or "resnet50:imagenet1k_v1", the folder of a run, or networks that `trained` returned. None takes
            those on this machine, 12 at most, and up to 4 others that can be fetched, of 120 MB at most: those whose published
            accuracy no smaller one beats.
        offline: compare only what is on this machine; ZOO_OFFLINE=1 means it too.
        device: to compute and to time on; None is the current CUDA device if there is one, else the CPU.
        quick: at most 300 images and 6 candidates, and fewer kernels tried for the times: a first answer.
        folds: of the cross-validation, 2 or more; each class needs so many images.
        folder: where vectors, times and scores are kept; None is `recommendations` in the cache of weights. It may be deleted.
        restart: compute and time anew what an earlier call kept.
        progress: whether a terminal sees a bar; or what shows the work instead.

    Returns:
        The ranking with reasons, `table()`, `picture(path)` and the `trained(...)` line of the best.

    Raises:
        ValueError: one class only, a class with fewer images than folds, labels of another number than images, fewer than two
            images that can be used, no candidate, or a wrong value. The message says what to do.
        TypeError: an argument is of no kind that is taken.
        FileNotFoundError: nothing is at `images` or `labels`.
        WeightsError: no candidate's weights could be had.
        OSError: the folder can't be written, or a remote source of images failed.

    Source:
        Breiman et al. 1984, "Classification and Regression Trees", section 3.4.3, for the rule of one standard error; McNemar 1947,
        https://doi.org/10.1007/BF02295996, for the ties. That a k-NN or a probe on one's own images orders networks better than scores
        without them is measured in https://arxiv.org/abs/2503.18528.
    """
    watch = progress if isinstance(progress, Watch) else Watch(bool(progress))
    limits, folds = Budget.of(budget), whole("folds", folds, 2)
    where = device_of(device)
    pictures = opened(images, labels, QUICK_IMAGES if quick else IMAGES, folds)
    _check_labels(pictures, folds)
    skipped: dict[str, str] = {}
    candidates = _candidates(models, offline or switched_offline() is not None, quick, limits, skipped)
    shelf = Shelf(at_home(folder) if folder is not None else cache_folder() / "recommendations", restart)
    found, left_out = _measure_all(candidates, pictures, where, quick, shelf, skipped, watch)
    return _compared(found, pictures, left_out, skipped, limits, folds, where, shelf, watch)


def _check_labels(pictures: Pictures, folds: int) -> None:
    """Refuse labels by which nothing can be measured, before anything is computed."""
    where, labels = pictures.source.where, pictures.labels
    if labels is None:
        if len(pictures.source) < UNLABELLED:
            raise ValueError(
                f"{where}: {counted(len(pictures.source), 'image')} without labels say nothing, for neighbours are compared; give "
                f"{UNLABELLED} at least, better hundreds, or labels"
            )
        return
    counts = Counter(label for label in labels if label is not None)
    if len(counts) < 2:
        one = next(iter(counts), "")
        raise ValueError(
            f"{where}: all images are of one class, {one!r}, so there is nothing to tell apart. Lay the images into a folder a class, or "
            "give labels; --no-labels (labels=False) compares without labels, which says less"
        )
    _check_folds(counts, folds, where)


def _check_folds(counts: Mapping[str, int], folds: int, where: str) -> None:
    few = sorted((count, label) for label, count in counts.items() if count < folds)
    if not few:
        return
    least, label = few[0]
    others = f", and {counted(len(few) - 1, 'other class has', 'other classes have')} fewer than {folds} too" if len(few) > 1 else ""
    todo = f"Take folds={least}, which is less sure, add" if least >= 2 else "Add"
    raise ValueError(
        f"{where}: {label!r} has {counted(least, 'image')}{others}, and each of {folds} folds needs one. {todo} images, or leave "
        "such classes out"
    )


def _candidates(models: Iterable[Any] | None, offline: bool, quick: bool, limits: Budget, skipped: dict[str, str]) -> list[Candidate]:
    """List whom to compare; what exceeds size or licence is skipped, unless nobody else is left."""
    if models is not None:
        found = named_candidates([models] if isinstance(models, str | Model | type) else models)
        if offline:
            for one in [one for one in found if not one.here]:
                skipped[one.name] = "it is not on this machine, and nothing may be fetched"
                found.remove(one)
    else:
        most = {"most": QUICK_CANDIDATES - 2, "fetched": 2} if quick else {}
        allowed = (lambda license: not Budget(license=limits.license).over(mb=0, license=license)) if limits.license else None
        found = usual_candidates(offline, max_mb=limits.max_mb, license=allowed, **most)
    if not found:
        todo = "name some by models=…, or let some be fetched" if offline else "name some by models=…"
        raise ValueError(f"there is no candidate to compare{': ' + _joined(skipped) if skipped else ''}; {todo}")
    within = [one for one in found if not limits.over(mb=one.mb, license=one.record.license)]
    for one in found:
        if within and one not in within:
            skipped[one.name] = f"over the budget: {'; '.join(limits.over(mb=one.mb, license=one.record.license))}"
    return within or found


def _measure_all(
    candidates: list[Candidate], pictures: Pictures, device: torch.device, quick: bool, shelf: Shelf, skipped: dict[str, str], watch: Watch
) -> tuple[list[_Measured], dict[str, str]]:
    """Embed and time every candidate; what fails is skipped with its reason."""
    found: list[_Measured] = []
    left_out = {one.key: one.why for one in pictures.source.left_out}
    failed = 0
    last: WeightsError | None = None
    for number, one in enumerate(candidates, 1):
        at = f"{number} of {len(candidates)}: {one.name}"
        if failed >= FAILED and not one.here:
            skipped[one.name] = "not tried, for the downloads before it failed"
            continue
        try:
            if not one.here:
                watch.say(f"{at}: fetching {one.mb:.0f} MB")
            model = one.network or trained(one.record.model, one.record.tag, progress=watch.wanted)
        except WeightsError as error:
            last, failed = error, failed + isinstance(error, SourceUnavailable)
            skipped[one.name] = _first(error)
            watch.say(f"{at}: left out: {skipped[one.name]}")
            continue
        failed = 0 if not one.here else failed
        try:
            embeddings = _embedded(model, one, pictures, device, shelf, watch, at, left_out)
        except (FloatingPointError, ValueError) as error:
            if isinstance(error, _NoImages):
                raise ValueError(str(error)) from None
            skipped[one.name] = _first(error)
            watch.say(f"{at}: left out: {skipped[one.name]}")
            continue
        latency = _timed(model, one, device, quick, shelf, watch, at)
        size = sum(value.numel() * value.element_size() for value in model.state_dict().values()) / 1e6
        params = sum(value.numel() for value in model.parameters())
        found.append(_Measured(one, embeddings, latency, params, one.mb if one.record.size_bytes else size))
    if not found:
        if last is not None and all(isinstance(last, WeightsError) for _ in skipped):
            raise type(last)(f"no candidate's weights could be had: {_joined(skipped)}") from last
        raise ValueError(f"no candidate could be compared: {_joined(skipped)}")
    return found, left_out


def _first(error: Exception) -> str:
    """Return an error's first line, with the next one where that only leads to it."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


class _NoImages(ValueError):
    pass


def _embedded(
    model: Model, one: Candidate, pictures: Pictures, device: torch.device, shelf: Shelf, watch: Watch, at: str, left_out: dict[str, str]
) -> Embeddings:
    """Return the vectors of the images, those that an earlier call kept if there are any.

    On plain kernels: those that `fast` chooses may change from day to day, and the last bits with them.
    """
    source = pictures.source
    plan = make_plan(model, source, "embedding", None, device, None, False, "cpu", True)
    facts = {name: value for name, value in plan.facts().items() if name not in ("place", "source", "tag", "model")}
    path = shelf.path("vectors", one.name, [facts, machine(device)], ".safetensors")
    if path.is_file() and not shelf.restart:
        try:
            found = read(path)
        except DamagedEmbeddings:
            path.unlink()
        else:
            watch.say(f"{at}: {counted(len(found.keys), 'image')} embedded by an earlier call")
            shelf.reused += 1
            _note_left_out(found, pictures, left_out)
            return found
    report = embed(
        model,
        source,
        shelf.place(path),
        device=device,
        fast=False,
        workers=0,  # processes take longer to start than so few images to decode, and need a program that can be imported
        dedupe=True,
        restart=shelf.restart,
        progress=lambda _, total, done: watch.images(f"{at}: embedding", total, done),
    )
    left_out |= {image.key: image.why for image in report.unreadable}
    left_out |= {image.key: f"a copy of {image.copy_of}" for image in report.copies}
    found = read(path)
    if not len(found.keys):
        why = next(iter(left_out.items()), ("", ""))
        raise _NoImages(f"{source.where}: none of {counted(len(source), 'image')} can be used; {why[0]}: {why[1]}")
    return found


def _note_left_out(found: Embeddings, pictures: Pictures, left_out: dict[str, str]) -> None:
    """Name the images that kept vectors lack; the file beside these says why."""
    from weights.documents import MISREAD, read_json

    beside = found.path.with_name(f"{found.path.name}.left-out.jsonl")
    if beside.is_file():
        for line in beside.read_text(encoding="utf-8").splitlines():
            try:
                told = read_json(line, beside)
                left_out.setdefault(str(told["key"]), told.get("why") or f"a copy of {told.get('copy_of')}")
            except MISREAD:
                continue
    there = set(found.index.tolist())
    for index in range(len(pictures.source)):
        if index not in there:
            left_out.setdefault(pictures.source[index].key, "it can't be used")


def _timed(model: Model, one: Candidate, device: torch.device, quick: bool, shelf: Shelf, watch: Watch, at: str) -> Latency | None:
    record = model.checkpoint
    assert record is not None
    facts = [record.model, dict(record.options), model.num_classes, record.preprocessing.crop, machine(device), str(device), quick]
    watch.say(f"{at}: timing fast() with one image")
    try:
        return shelf.kept("times", one.name, facts, Latency.of, lambda: measured(model, device, quick))[0]
    except (RuntimeError, ValueError) as error:  # its accuracy counts all the same
        watch.say(f"{at}: not timed: {str(error).splitlines()[0]}")
        return None


def _compared(
    found: list[_Measured],
    pictures: Pictures,
    left_out: dict[str, str],
    skipped: dict[str, str],
    limits: Budget,
    folds: int,
    device: torch.device,
    shelf: Shelf,
    watch: Watch,
) -> Recommendation:
    rows, labels = _common(found, pictures)
    counts = dict(sorted(Counter(labels).items())) if labels is not None else {}
    if labels is not None:
        if len(counts) < 2:
            raise ValueError(f"{pictures.source.where}: the images that can be used are of one class, {next(iter(counts), '')!r}")
        _check_folds(counts, folds, pictures.source.where)
    elif len(rows) < UNLABELLED:
        raise ValueError(f"{pictures.source.where}: only {counted(len(rows), 'image')} can be used, and {UNLABELLED} are needed at least")
    scores = _scores(found, rows, labels, folds, shelf, watch)
    order = sorted(range(len(found)), key=lambda i: (-scores[i].percent, -(scores[i].knn or 0.0), found[i].candidate.name))
    found, scores = [found[i] for i in order], [scores[i] for i in order]
    over = [limits.over(ms=_cost(one), mb=one.mb, license=one.candidate.record.license) for one in found]
    inside = [i for i, why in enumerate(over) if not why]
    chosen, tied = _chosen(found, scores, inside)
    ranking = []
    for place, (one, score, rank) in enumerate(zip(found, scores, ranks(scores), strict=True)):
        points, error = behind(scores[0], score)
        made = _ranked(one, score, rank, points, error)
        ranking.append(replace(made, over=tuple(over[place]), tied=place in tied, recommended=place == chosen))
    best = None if chosen is None else ranking[chosen]
    nearest = "" if best else _nearest(found, limits)
    labelled = labels is not None
    return Recommendation(
        ranking=tuple(ranking),
        best=best,
        nearest=nearest,
        reasons=tuple(explained(ranking, best, nearest, labelled)),
        cannot_tell=tuple(_cannot_tell(ranking, scores, counts, len(rows), pictures, limits, left_out)),
        skipped=skipped,
        left_out=left_out,
        images=len(rows),
        asked=pictures.asked,
        classes=counts,
        chance=100 * max(counts.values()) / len(rows) if counts else None,
        folds=folds if labelled else None,
        device=_device_name(device),
        budget=limits,
        resumed=shelf.reused,
        folder=shelf.folder,
    )


def _common(found: list[_Measured], pictures: Pictures) -> tuple[list[int], list[str] | None]:
    """Return the images, by their place in the source, that every candidate has a vector of and that have a label."""
    there = set.intersection(*(set(one.embeddings.index.tolist()) for one in found))
    labels = pictures.labels
    if labels is None:
        return sorted(there), None
    rows = sorted(index for index in there if labels[index] is not None)
    return rows, [str(labels[index]) for index in rows]


def _scores(found: list[_Measured], rows: list[int], labels: list[str] | None, folds: int, shelf: Shelf, watch: Watch) -> list[Score]:
    known = sorted(set(labels)) if labels is not None else []
    y = torch.tensor([known.index(label) for label in labels]) if labels is not None else None
    scores = []
    for number, one in enumerate(found, 1):
        vectors = one.embeddings.vectors["embedding"]
        place = {int(index): row for row, index in enumerate(one.embeddings.index.tolist())}
        x = torch.from_numpy(np.array(vectors[[place[index] for index in rows]], np.float32))
        watch.say(f"{number} of {len(found)}: {one.candidate.name}: {'probing' if y is not None else 'comparing neighbourhoods'}")
        how = folds if y is not None else f"{NEIGHBOURS} neighbours, shared and mutual"
        facts = [one.embeddings.path.name, rows, labels, how, torch.__version__]

        def compute(x: torch.Tensor = x) -> Score:
            return consistency(x) if y is None else probe(x, y, len(known), folds)

        scores.append(shelf.kept("scores", one.candidate.name, facts, Score.of, compute)[0])
    return scores


def _chosen(found: list[_Measured], scores: list[Score], inside: list[int]) -> tuple[int | None, set[int]]:
    """Choose among those within the budget; and say which of them can't be told apart from the best one.

    Of those at most one standard error of the difference behind the best, the fastest; where nothing is timed, the best.
    """
    if not inside:
        return None, set()
    first = inside[0]
    apart = {i: behind(scores[first], scores[i]) for i in inside}
    near = [i for i, (points, error) in apart.items() if points <= error]
    tied = {i for i, (points, error) in apart.items() if points <= APART * error}
    timed = [i for i in near if _ms(found[i]) is not None]
    return (min(timed, key=lambda i: (_ms(found[i]) or 0.0, i)) if first in timed else first), tied


def _ranked(one: _Measured, score: Score, rank: int, points: float, error: float) -> Ranked:
    record, latency = one.candidate.record, one.latency
    return Ranked(
        name=one.candidate.name,
        model=record.model,
        tag=str(record.tag),
        rank=rank,
        score=score.percent,
        error=score.error,
        knn=score.knn,
        behind=points,
        behind_error=error,
        tied=False,
        ms=None if latency is None else latency.ms,
        ms_low=None if latency is None else latency.low,
        ms_high=None if latency is None else latency.high,
        on="" if latency is None else latency.on,
        mb=one.mb,
        params=one.params,
        license=record.license,
        restriction=one.candidate.restriction,
        side=record.preprocessing.crop or 0,
        width=one.embeddings.vectors["embedding"].shape[1],
    )


def _nearest(found: list[_Measured], limits: Budget) -> str:
    """Say who exceeds the budget least, and by what."""
    one = min(found, key=lambda one: limits.excess(ms=_cost(one), mb=one.mb, license=one.candidate.record.license))
    return f"{one.candidate.name} ({'; '.join(limits.over(ms=_cost(one), mb=one.mb, license=one.candidate.record.license))})"


def _cannot_tell(
    ranking: list[Ranked],
    scores: list[Score],
    counts: dict[str, int],
    images: int,
    pictures: Pictures,
    limits: Budget,
    left_out: dict[str, str],
) -> list[str]:
    """Say what these images and this machine can't tell."""
    said = []
    if not counts:
        said.append(
            "Without labels this says how consistent neighbourhoods are, which is weaker: it can't know which differences matter to you. "
            "With ten labelled images a class it would be measured."
        )
    if len(ranking) > 1 and counts:
        errors = [one.behind_error for one in ranking[1:] if one.behind_error > 0]
        if errors:
            said.append(f"Differences below about {APART * float(np.median(errors)):.1f} points can't be told with {images:,} images.")
        second, error = ranking[1], ranking[1].behind_error
        if second.behind > 0 and second.behind <= APART * error:
            needed = images * (APART * error / second.behind) ** 2
            if needed <= 1e6:
                said.append(f"To tell {ranking[0].name} from {second.name}, if they differ as here, takes about {_round(needed):,} images.")
    small = [label for label, count in counts.items() if count < FEW_OF_A_CLASS]
    if images < FEW or small:
        of = f" and {counted(len(small), 'class has', 'classes have')} fewer than {FEW_OF_A_CLASS}" if small else ""
        said.append(f"There are {counted(images, 'image')}{of}: take the order as a hint until you have more.")
    if counts:
        chance = 100 * max(counts.values()) / images
        best = max(scores, key=lambda score: score.percent)
        if best.percent - chance <= APART * best.error:
            guess = f"guessing the most frequent class, {chance:.1f} %"
            said.append(f"No candidate is clearly better than {guess}: the images may not show the labels.")
        if all(score.each.all() for score in scores) and len(scores) > 1:
            said.append("Every candidate names every image rightly: these images are too easy to compare on.")
    if most := limits.max_ms:
        unsure = [one for one in ranking if one.ms_low is not None and one.ms_high is not None and one.ms_low <= most < one.ms_high]
        said += [
            f"Whether {one.name} takes {most:g} ms at most can't be told: rounds took {one.ms_low:.1f} to {one.ms_high:.1f} ms."
            for one in unsure
        ]
    unlabelled = 0 if pictures.labels is None else sum(label is None for label in pictures.labels)
    if unlabelled:
        said.append(f"{counted(unlabelled, 'image')} without a label did not count.")
    if left_out:
        name, why = next(iter(left_out.items()))
        said.append(f"{counted(len(left_out), 'image')} did not count: {name}: {why}{', and others' if len(left_out) > 1 else ''}.")
    if pictures.asked > len(pictures.source):
        kept = f"{len(pictures.source):,} of {pictures.asked:,} images were drawn"
        if pictures.left:
            kept += f", of {len(counts):,} classes; {counted(pictures.left, 'other class was', 'other classes were')} left out"
        else:
            kept += ", each class's share kept"
        if pictures.fewer:
            kept += f"; {counted(pictures.fewer, 'class has', 'classes have')} fewer than {LEAST} of them, though there are more"
        said.append(f"{kept}.")
    return said


def _round(number: float) -> int:
    digits = max(0, len(str(int(number))) - 2)
    return int(-(-number // 10**digits) * 10**digits)


def _ms(one: _Measured) -> float | None:
    return None if one.latency is None else one.latency.ms


def _cost(one: _Measured) -> float:
    """Return the milliseconds that a budget counts: a time that could not be measured is within none."""
    return math.inf if one.latency is None else one.latency.ms


def _joined(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:3]) + ("; …" if len(skipped) > 3 else "")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {counted(torch.get_num_threads(), 'thread')}"
