"""Which images are learnt from and which are measured on, and what their classes are."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from dataclasses import dataclass

import numpy as np

from zoo.finetuning.settings import Settings
from zoo.finetuning.studies import Studies
from zoo.images import Source, open_source
from zoo.images.files import folders, is_url, kind

log = logging.getLogger("zoo")

TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation", "dev"), ("test", "testing")
"""Names, in any case, of the folders that say what is for what; of several for the same the first counts."""
SHOWN = 5


@dataclass(frozen=True)
class Split:
    """Images for one purpose.

    Attributes:
        source: where they come from.
        indices: which of the source they are.
        targets: the class of each, int64 (N,).
        groups: what each belongs to where several images get one decision, a study; None where each stands alone.
        strata: parts of the data that are weighted each for itself, a study's kind; None where there are none.
    """

    source: Source
    indices: list[int]
    targets: np.ndarray
    groups: list[str] | None = None
    strata: list[str] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def key(self, position: int) -> str:
        """Return the name of an image by its place in the split."""
        return self.source[self.indices[position]].key


def open_data(
    data: str | os.PathLike[str] | Source, val: str | os.PathLike[str] | Source | None, layout: str
) -> tuple[Source, Source | None]:
    """Open what is learnt from and, where it is named or lies beside it, what is measured on.

    Args:
        data: whatever `zoo.images.open_source` takes, or a folder with a train (training) and a val (valid, validation) folder of these.
        val: the same for the images to measure on; None takes that folder, else one that is called test, with a word of what that
            means, and where there is none leaves it to `split`.
        layout: as in `Settings`.

    Raises:
        ValueError, FileNotFoundError: nothing usable is there.
    """
    if isinstance(data, Source):
        train = data
    else:
        root = os.fspath(data)
        root = root if is_url(root) else os.path.expanduser(root)  # noqa: PTH111 (a URL may be a path here)
        parts = parts_of(root)
        train = open_source(parts.get("train", root))
        if val is None and "train" in parts:
            val = parts.get("val") or parts.get("test")
            if "val" not in parts and "test" in parts:
                log.warning(
                    "%s has no folder val, so %s decides which state is kept, and its accuracy is no longer that of images the run "
                    "knows nothing of; for that set some aside in a folder val, or give them by --val (val=…)",
                    root,
                    parts["test"],
                )
    measured = val if isinstance(val, Source) or val is None else open_source(val)
    if layout == "studies":
        return Studies(train), None if measured is None else Studies(measured)
    return train, measured


def parts_of(root: str) -> dict[str, str]:
    """Find the folders "train", "val" and "test" of a data set, whatever they are called; {} where its folders are classes.

    Raises:
        ValueError: there are some of these and none to learn from.
    """
    if "{" in root or kind(root) != "folder":
        return {}
    there = folders(root)
    names = {name.lower(): name for name in reversed(there)}
    found = {}
    for part, known in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        name = next((names[n] for n in known if n in names), None)
        if name is not None:
            found[part] = f"{root.rstrip('/')}/{name}"
    others = [name for name in there if name.lower() not in (*TRAIN, *VAL, *TEST)]
    if "train" not in found:
        if found and not others:
            raise ValueError(
                f"{root} holds {' and '.join(there)}, which are names for what is measured on, and no folder train to learn from; "
                "if these are classes, name them otherwise"
            )
        return {}
    if others and not folders(found["train"]):
        return {}  # a class of trains, beside others
    return found


def classes_of(train: Source, val: Source | None) -> list[str]:
    """List the classes, sorted.

    Raises:
        ValueError: images without a class, classes without an image, one class only, or other classes among those measured on.
    """
    for source in (train, val):
        if source is None:
            continue
        without = [item.key for item in source if item.label is None]
        if without:
            raise ValueError(
                f"{source.where}: {len(without)} of {len(source)} images have no class ({_some(without)}): lay images into a folder a "
                "class, give the tar .cls files, or the Parquet file a column label"
            )
    empty = getattr(train, "empty", [])
    if empty:
        said = "1 folder is empty" if len(empty) == 1 else f"{len(empty)} folders are empty"
        gone = next((one for one in train.left_out if one.key.partition("/")[0] in empty), None)
        if gone is not None:
            raise ValueError(f"{train.where}: no image of {gone.key.partition('/')[0]} can be read: {gone.key}: {gone.why}")
        raise ValueError(f"{train.where}: {said}, {_some(empty)}; put images there or delete {'it' if len(empty) == 1 else 'them'}")
    if len(train.classes) < 2:
        raise ValueError(
            f"{train.where}: all images are of one class, {_some(train.classes)}: there is nothing to tell apart. Images lie in a folder a "
            "class; with train and val folders give the folder above them"
        )
    if val is not None:
        strange = sorted(set(val.classes) - set(train.classes))
        if strange:
            raise ValueError(f"{val.where} has classes that {train.where} has not: {_some(strange)}; name the folders alike")
        absent = sorted(set(train.classes) - set(val.classes))
        if absent:
            log.warning("%s has no image of %s: nothing is measured of them", val.where, _some(absent))
    return train.classes


def split(train: Source, val: Source | None, classes: list[str], settings: Settings) -> tuple[Split, Split | None]:
    """Give every image its class's number; where nothing is there to measure on, set a share of each class aside.

    What is set aside depends on the names of the images and on the seed, and what belongs to one group stays together.

    Raises:
        ValueError: a class is too small to be divided.
    """
    number = {name: index for index, name in enumerate(classes)}
    if val is not None or settings.val_share == 0:
        return _split(train, range(len(train)), number), None if val is None else _split(val, range(len(val)), number)
    groups: dict[str, dict[str, list[int]]] = {name: {} for name in classes}
    for index, item in enumerate(train):
        name = train.group(index) if isinstance(train, Studies) else item.key
        groups[item.label or ""].setdefault(name, []).append(index)
    kept: list[int] = []
    aside: list[int] = []
    for label, members in groups.items():
        count = max(1, round(settings.val_share * len(members)))
        if count >= len(members):
            raise ValueError(
                f"{train.where}: {label} has {len(members)} image{'' if len(members) == 1 else 's'}, too few to set "
                f"{settings.val_share:.0%} aside for measuring; add some, give images to measure on, or set val_share=0 for none"
            )
        drawn = sorted(members, key=lambda name: hashlib.blake2b(f"{settings.seed}:{name}".encode()).digest())
        for place, name in enumerate(drawn):
            (aside if place < count else kept).extend(members[name])
    return _split(train, sorted(kept), number), _split(train, sorted(aside), number)


def class_weights(part: Split) -> np.ndarray:
    """Weigh each image so that all classes count the same in sum, stratum by stratum, and the mean of all weights is 1.

    For two classes and strata by the kind of study these are the weights of MURA's loss, but for a factor that gives every stratum
    the mean 1.

    Returns:
        float32 (N,).

    Source: Rajpurkar et al. 2017, https://arxiv.org/abs/1712.06957, section 3.1, for strata and two classes.
    """
    strata = part.strata or [""] * len(part)
    cells = Counter(zip(strata, part.targets.tolist(), strict=True))
    sizes, kinds = Counter(strata), Counter(stratum for stratum, _ in cells)
    found = [sizes[s] / (kinds[s] * cells[s, t]) for s, t in zip(strata, part.targets.tolist(), strict=True)]
    return np.array(found, dtype=np.float32)


def _split(source: Source, indices: range | list[int], number: dict[str, int]) -> Split:
    targets = np.array([number[source[i].label or ""] for i in indices], dtype=np.int64)
    if isinstance(source, Studies):
        return Split(source, list(indices), targets, [source.group(i) for i in indices], [source.stratum(i) for i in indices])
    return Split(source, list(indices), targets)


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
