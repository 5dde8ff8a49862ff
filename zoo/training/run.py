"""`teach`: the whole way from annotated photographs to a detector or segmenter that `trained` loads from the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from weights import Preprocessing
from weights.arguments import forgiving
from weights.documents import MISREAD, json_file, reason, table
from weights.places import at_home
from weights.whole import write_whole
from zoo.catalogue import any_class
from zoo.detection.detector import Detector
from zoo.detection.evaluation import evaluate
from zoo.detection.learning import LearningDetector
from zoo.detection.truths import Known
from zoo.finetuning.distributed import world
from zoo.finetuning.progress import Show
from zoo.pretrained.run_folder import CONFIG, ROW, write_result
from zoo.pretrained.trained import trained
from zoo.segmentation.segmenter import Segmenter
from zoo.training.detectors import read_known, train_detector
from zoo.training.loop import STATE, LearningSettings, Learnt
from zoo.training.pixel_truths import Painted, read_painted
from zoo.training.segmenters import SIDE, measure_segmenter, train_segmenter

SET_ASIDE = 10
"""One photograph of so many is measured on, and not learnt from, where no others are named."""
FACTS: dict[str, type | tuple[type, ...]] = {
    "task": str, "model": str, "options": dict, "base": (dict, NoneType), "preprocessing": dict, "data": str, "val": (str, NoneType),
    "images": (str, NoneType), "split": (str, NoneType), "size": (int, NoneType), "settings": dict,
}  # fmt: skip
"""Without these no run can go on."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What a finished run is.

    Attributes:
        folder: `trained(name, folder)` loads its weights.
        model: those weights, in eval mode, on the CPU; None in all processes but the first.
        classes: in the network's order, the background first.
        steps: how many there were.
        resumed: how many of them earlier calls had done.
        loss: mean of the last steps' losses.
        measured: numbers of what was set aside, 0 to 1: "map" and "map50" of a detector, "miou" and "pixels" of a segmenter; none where
            nothing was set aside.
        photographs: how many were learnt from, and how many measured on.
    """

    folder: Path
    model: Detector | Segmenter | None
    classes: tuple[str, ...]
    steps: int
    resumed: int
    loss: float
    measured: Mapping[str, float]
    photographs: tuple[int, int]


@forgiving
def teach(
    model: str | type[Detector] | type[Segmenter] | None = None,
    data: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "runs/finetune",
    *,
    val: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    split: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    options: Mapping[str, Any] | None = None,
    size: int | None = None,
    device: str | None = None,
    resume: bool = False,
    restart: bool = False,
    progress: bool | Show = True,
    **settings: Any,
) -> Taught:
    """Teach a detector or a segmenter what is on annotated photographs, and leave a folder from which `trained` loads it.

    An interrupted run goes on with `resume`, and ends with the same numbers. Under torchrun all processes call it with the same
    arguments, each learns from its part of every batch, and the first one writes.

    Args:
        model: a name or class, such as SSDlite320_MobileNet_V3_Large or DeepLabV3_ResNet50.
        data: for a detector what `train_detector` reads: COCO's JSON, a VOC folder or a YOLO folder; for a segmenter a VOC folder or COCO's
            JSON with outlines.
        out: the run's folder.
        val: photographs to measure on, like `data`; if left out, one of ten is set aside where there are that many.
        images: the folder of a COCO file's photographs; looked for beside it if left out.
        split: of a VOC folder for a detector, "train"; every annotation if left out.
        weights: a tag, URL or path, as `trained` takes it; the default checkpoint if left out.
        from_scratch: fresh weights instead.
        options: constructor keywords of the class.
        size: of a segmenter, pixels of the squares that it learns from; 480 if left out.
        device: "cpu", "cuda" or "cuda:1"; a GPU where there is one if left out.
        resume: go on with the run that is in `out`; only `device` and `progress` go with it.
        restart: throw away the run that is in `out`.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.finetuning.progress.Show`.
        **settings: see `LearningSettings`: epochs, batch_size, lr.

    Raises:
        TypeError, ValueError: the network is neither, an argument or the data can't be used, or the run in `out` is damaged.
        FileExistsError: `out` holds a run, and neither `resume` nor `restart` is true.
        FileNotFoundError: the data, or with `resume` the run, are not there.
        Diverged: the loss is no number any more.
        WeightsError: the weights can't be had.

    Example:
        >>> run = teach("SSDlite320_MobileNet_V3_Large", "annotations.json", "runs/boxes", epochs=20)  # doctest: +SKIP
        >>> detect(run.model, "photo.jpg")  # doctest: +SKIP
    """
    folder = at_home(out)
    cls: Any
    facts: dict[str, Any]
    with world(device) as here:
        if resume:
            facts = _known(folder)
            cls = any_class(facts["model"])
        elif (folder / CONFIG).exists() and (folder / STATE).exists() and not restart:  # one without a state has learnt nothing yet
            raise FileExistsError(
                f"'{folder}' holds a run: resume=True goes on with it, restart=True throws it away; or name another folder"
            )
        elif model is None or data is None:
            raise ValueError('teach() needs a network and photographs: teach("SSDlite320_MobileNet_V3_Large", "annotations.json")')
        else:
            cls = any_class(model) if isinstance(model, str) else model
            paths = {"data": data, "val": val, "images": images}
            facts = {name: None if path is None else os.fspath(path) for name, path in paths.items()}
            facts |= {"split": split, "size": size, "settings": asdict(LearningSettings(**settings))}
        how = LearningSettings(**facts["settings"])
        read = _reader(cls, facts["images"], facts["split"], facts["size"])
        part, aside = _parts(read(facts["data"]), None if facts["val"] is None else read(facts["val"]), how.seed)
        classes = part.classes if isinstance(part, Painted) else ("background", *part.classes)
        if resume:
            network = cls(num_classes=len(classes), **facts["options"])
        else:
            network, begun = _begin(cls, len(classes), weights, from_scratch, options or {}, how.seed)
            facts |= begun
            if here.first:
                _write(facts, folder)
            here.barrier()
        learnt = _learn(network.to(here.device), part, folder, facts["size"], how, progress)
        loaded, measured = _leave(cls, network, facts, classes, aside, folder) if here.first else (None, {})
        here.barrier()
    last = learnt.losses[-max(1, len(learnt.losses) // how.epochs) :]
    seen = len(part.photographs), 0 if aside is None else len(aside.photographs)
    return Taught(folder, loaded, tuple(classes), learnt.steps, learnt.resumed, sum(last) / max(1, len(last)), measured, seen)


def _write(facts: Mapping[str, Any], folder: Path) -> None:
    """Begin a run in a folder: what an earlier one left there goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (ROW, STATE):
        (folder / stale).unlink(missing_ok=True)
    write_whole(folder / CONFIG, json.dumps(facts, indent=1) + "\n")


def _learn(network: Any, part: Known | Painted, folder: Path, size: int | None, how: LearningSettings, progress: bool | Show) -> Learnt:
    if isinstance(part, Painted):
        return train_segmenter(network, part, folder, size=size or SIDE, progress=progress, **asdict(how))
    return train_detector(network, part, folder, progress=progress, **asdict(how))


def _leave(
    cls: Any, network: Any, facts: Mapping[str, Any], classes: Sequence[str], aside: Known | Painted | None, folder: Path
) -> tuple[Any, dict[str, float]]:
    """Measure what was learnt, and write the weights with their record; return the network as `trained` loads it, and its numbers."""
    measured = {} if aside is None else _measured(network, aside, classes)
    write_result(
        folder,
        {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()},
        model=cls.variant().__name__,
        options=facts["options"],
        classes=classes,
        preprocessing=_steps(facts["preprocessing"]),
        base=facts["base"],
        metrics={name: round(100 * value, 4) for name, value in measured.items()},
        metrics_data=f"{len(aside.photographs)} photographs of {facts['val'] or facts['data']}" if measured and aside is not None else None,
    )
    return trained(cls, folder), measured


def task_of(folder: Path) -> str:
    """Return the task of the run in a folder; "classification" of `finetune`'s own, and where no run can be read."""
    try:
        return str(json_file(folder / CONFIG).get("task", "classification"))
    except (OSError, *MISREAD):
        return "classification"


def _reader(cls: Any, images: Any, split: str | None, size: int | None) -> Callable[[Any], Known | Painted]:
    """Return what reads the annotations that a network learns from."""
    kind = cls.__name__ if isinstance(cls, type) else repr(cls)
    if isinstance(cls, type) and issubclass(cls, Segmenter):
        if split is not None:
            raise ValueError("split is of a detector's VOC folder; leave it out, or name a folder with the maps of that split")
        return lambda data: read_painted(data, None, images)
    if isinstance(cls, type) and issubclass(cls, LearningDetector):
        if size is not None:
            raise ValueError(f"size is a segmenter's; {kind} resizes by a rule of its own, so leave it out")
        return lambda data: read_known(data, images, split)
    if isinstance(cls, type) and issubclass(cls, Detector):
        raise TypeError(f"{kind} has no losses here, so it learns nothing; SSDlite320_MobileNet_V3_Large and all of torchvision's can")
    raise TypeError(f"teach() takes a detector or a segmenter, such as SSDlite320_MobileNet_V3_Large, not {kind}")


def _parts(data: Known | Painted, val: Known | Painted | None, seed: int) -> tuple[Known | Painted, Known | Painted | None]:
    """Divide photographs into those to learn from and those to measure on; of the latter there may be none."""
    if val is not None:
        if val.classes != data.classes:
            raise ValueError(f"the photographs to measure on have the classes {', '.join(val.classes)}, not {', '.join(data.classes)}")
        return data, val
    count = len(data.photographs)
    if count < SET_ASIDE:
        return data, None
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    aside = set(order[: count // SET_ASIDE])
    return data.part([i for i in range(count) if i not in aside]), data.part(sorted(aside))


def _begin(cls: Any, count: int, named: Any, from_scratch: bool, options: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Build the network with heads for the data's classes, and write down what a resumed run needs to build it again."""
    if from_scratch and named is not None:
        raise ValueError(f"from_scratch takes no weights, got {named!r}; leave one of them out")
    torch.manual_seed(seed)
    network = cls(num_classes=count, **options) if from_scratch else trained(cls, named, num_classes=count, **options)
    record = network.checkpoint
    base = None if record is None else {"name": f"{record.model}:{record.tag}", "sha256": record.sha256, "license": record.license}
    steps = asdict(record.preprocessing) if record is not None else cls.told_by({})[1]
    told = {**(record.options if record is not None else {}), **options}
    facts = {"task": cls.task, "model": cls.variant().__name__, "options": told, "base": base, "preprocessing": steps}
    return network, facts


def _steps(told: Mapping[str, Any]) -> Preprocessing:
    return Preprocessing(**{**told, "mean": tuple(told["mean"]), "std": tuple(told["std"])})


def _measured(network: Any, aside: Known | Painted, classes: Sequence[str]) -> dict[str, float]:
    """Return the numbers that a task is known by; what can't be measured is left out."""
    if isinstance(aside, Painted):
        found = measure_segmenter(network, aside)
        return {"miou": found.miou, "pixels": found.accuracy}
    network.called = tuple(classes)
    precision = evaluate(network, aside).precision
    return {name: value for name, value in (("map", precision.ap), ("map50", precision.ap50)) if value >= 0}


def _known(folder: Path) -> dict[str, Any]:
    """Read what a run wrote down when it began."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run to go on with: there is no {path}")
    try:
        facts = table(json_file(path), FACTS)
        _steps(facts["preprocessing"])
        LearningSettings(**facts["settings"])
    except MISREAD as error:
        raise ValueError(f"{path} is damaged ({reason(error)}), and it says what the run is: bring it back, or begin anew") from None
    return facts
