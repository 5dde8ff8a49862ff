"""MURA: several views make a study, and a study gets one decision.

Source: Rajpurkar et al. 2017, "MURA: Large Dataset for Abnormality Detection in Musculoskeletal Radiographs",
https://arxiv.org/abs/1712.06957, sections 2 and 3.
"""

from __future__ import annotations

import re

import numpy as np

from zoo.images import Source

STUDY = re.compile(r"(?P<group>(?:.*/)?study[^/]*_(?P<label>positive|negative))/[^/]+$")
KIND = re.compile(r"(?:^|/)XR_([A-Z]+)/")
LABELS = {"negative": "normal", "positive": "abnormal"}
"""What the folders say, and what it means; "abnormal" sorts first."""


class Studies(Source):
    """A source whose files lie as MURA's: `XR_WRIST/patient00011/study1_negative/image1.png`; the last folder tells the class."""

    def __init__(self, source: Source) -> None:
        self._source = source
        groups, labels, kinds = [], [], []
        for item in source:
            match = STUDY.match(item.key)
            if match is None:
                raise ValueError(
                    f"{source.where}: {item.key} does not lie as MURA's images do: XR_WRIST/patient00011/study1_negative/image1.png"
                )
            groups.append(match["group"])
            labels.append(LABELS[match["label"]])
            kind = KIND.search(item.key)
            kinds.append(kind[1] if kind else "")
        self._groups, self._kinds = groups, kinds
        super().__init__(source.where, [item.key for item in source], labels, [source.fingerprint])
        self.left_out, self.others = source.left_out, source.others

    def read(self, index: int) -> bytes:
        """Return the bytes of one view."""
        return self._source.read(index)

    def group(self, index: int) -> str:
        """Name the study that a view belongs to."""
        return self._groups[index]

    def stratum(self, index: int) -> str:
        """Name the kind of a view's study, "WRIST"; each is balanced for itself."""
        return self._kinds[index]


def one_decision(probabilities: np.ndarray, targets: np.ndarray, groups: list[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Average the probabilities of all images of a group.

    Args:
        probabilities: (N, classes).
        targets: (N,), the same within a group.
        groups: N names.

    Returns:
        Probabilities (G, classes), targets (G,), and the groups' names, sorted.

    Raises:
        ValueError: the images of one group are of several classes.

    Source: Rajpurkar et al. 2017, section 3: the study is abnormal if the mean probability of its views is above 0.5.
    """
    names, place = np.unique(np.array(groups), return_inverse=True)
    counts = np.bincount(place, minlength=len(names))
    mean = np.stack([np.bincount(place, weights=column, minlength=len(names)) / counts for column in probabilities.T], axis=1)
    first = np.zeros(len(names), dtype=np.int64)
    first[place] = targets
    mixed = np.flatnonzero(np.bincount(place, weights=first[place] != targets, minlength=len(names)))
    if len(mixed):
        raise ValueError(f"the images of {names[mixed[0]]} are of several classes, and a group gets one decision")
    return mean, first, names.tolist()
