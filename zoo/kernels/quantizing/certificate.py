"""The certificate of a narrower precision: how far its answers are from float32's, on images that it was not calibrated on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.quantizing.tolerance import Tolerance

Z = 1.959964
"""Standard deviations on either side of 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A comparison of a network in a narrow precision with itself in float32, on held-out images.

    Attributes:
        precision: "int8" or "bfloat16".
        by: the engine that computed it, and what quantised it, with their versions.
        images: how many were compared; none of them calibrated anything.
        calibrated: how many calibrated.
        digest: BLAKE3 of the images compared.
        tolerance: what was asked for.
        error: relative error of the outputs over all images; of several outputs the largest.
        cosine: mean over the images of the cosine between outputs; of several outputs the least.
        least_cosine: that of the worst image.
        top1: images whose most probable class stays; None where the output is no row of logits.
        top5: images whose top-1 class in float32 is among the five most probable ones; None where there are not more than five classes.
        five: images whose five most probable classes are the same five, in any order; None as `top5`.
        right: images that float32 and the narrow precision classify right; None without labels.
        difference: of the accuracy, narrow less float32, in points, with the ends of its 95 % interval, of the paired answers.
        worst: the class that keeps the fewest answers: its index, images that keep theirs, and images of it.
        unproven: why nothing is proven; "" where real images were compared.
        tried: candidates that were compared on these images, this one included; the best of many looks better than it is.
        kept: layers that stay in float, for what int8 did to the answers there.
        cpu: where it was measured.
        rechecked: what a later check on another CPU or with other libraries found; "" where there was none.
    """

    precision: str
    by: str
    images: int
    calibrated: int
    digest: str
    tolerance: Tolerance
    error: float
    cosine: float
    least_cosine: float
    top1: int | None = None
    top5: int | None = None
    five: int | None = None
    right: tuple[int, int] | None = None
    difference: tuple[float, float, float] | None = None
    worst: tuple[int, int, int] | None = None
    unproven: str = ""
    tried: int = 1
    kept: tuple[str, ...] = ()
    cpu: str = ""
    rechecked: str = ""

    def holds(self) -> bool:
        """Tell whether the comparison keeps the tolerance, whatever the images were."""
        asked = self.tolerance
        same = asked.top1 is None or (self.top1 is not None and self.top1 >= asked.top1 * self.images - 1e-9)
        return same and math.isfinite(self.error) and (asked.error is None or self.error <= asked.error)

    @property
    def proven(self) -> bool:
        """Whether real images were compared, and the tolerance is kept."""
        return not self.unproven and self.holds()

    @property
    def state(self) -> str:
        """Say "proven", "UNPROVEN" or "refused"."""
        return "refused" if not self.holds() else "UNPROVEN" if self.unproven else "proven"

    def shares(self) -> str:
        """Say how near it is to float32, in a few words."""
        said = [] if self.top1 is None else [f"same top-1 {_percent(self.top1, self.images)}"]
        return ", ".join([*said, f"relative error {self.error:.2g}", f"cosine {self.cosine:.4f}"])

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Say it all, a line for each finding."""
        whose = f"{self.images} images that calibrated nothing" if self.calibrated else f"{self.images} images"
        said = [f"{self.precision} {self.state}: {self.by}, compared with float32 on {whose} ({self.digest[:12]}); asked: {self.tolerance}"]
        if self.unproven:
            said[0] = f"{self.precision} {self.state}, {self.unproven}; {self.by}, {self.images} images; asked: {self.tolerance}"
        if self.top1 is not None:
            low, high = wilson(self.top1, self.images)
            five = ""
            if self.top5 is not None and self.five is not None:
                five = f"; in the top-5 {_percent(self.top5, self.images)}, the same five {_percent(self.five, self.images)}"
            of = f"{self.top1} of {self.images}, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
            said.append(f"  same top-1 {_percent(self.top1, self.images)} ({of}){five}")
        said.append(f"  relative error {self.error:.3g}, cosine {self.cosine:.5f}, of the worst image {self.least_cosine:.4f}")
        if self.right is not None and self.difference is not None:
            (single, narrow), (mean, low, high) = self.right, self.difference
            accuracy = f"{_percent(single, self.images)} in float32, {_percent(narrow, self.images)} in {self.precision}"
            said.append(f"  accuracy {accuracy}: {mean:+.2f} points, 95 % interval of the paired difference {low:+.2f} to {high:+.2f}")
        if self.worst is not None:
            index, same, of = self.worst
            said.append(f"  worst class {index}: {same} of {of} answers stay")
        if self.tried > 1:
            said.append(f"  {self.tried} candidates were compared on these images, so that the figures flatter this one a little")
        if self.kept:
            some = ", ".join(self.kept[:4]) + (f" and {len(self.kept) - 4} more" if len(self.kept) > 4 else "")
            said.append(f"  {len(self.kept)} layers stay in float by their measured effect: {some}")
        if self.rechecked:
            said.append(f"  {self.rechecked}")
        return said

    def facts(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return asdict(self)

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Certificate:
        """Read what `facts` gave."""
        pairs = {name: tuple(facts[name]) for name in ("right", "difference", "worst", "kept") if facts[name] is not None}
        return cls(**{**facts, **pairs, "tolerance": Tolerance(**facts["tolerance"])})


@dataclass(slots=True)
class Reference:
    """A network's answers in float32 to the images that are compared on.

    Attributes:
        outputs: per tensor of the output (M, ...).
        classifies: whether the output is one row of logits for each image.
        labels: the right classes, or None.
    """

    outputs: list[Tensor]
    classifies: bool
    labels: Tensor | None = None
    spec: Any = field(default=None, repr=False)

    @classmethod
    def measure(cls, network: Callable[..., Any], images: Tensor, labels: Tensor | None, classifies: bool, batch: int = 8) -> Reference:
        """Run a network on all images.

        Raises:
            ValueError: an answer is not finite, or it is no batch of one answer for each image; labels that are no classes of its answers.
        """
        outputs = answers(network, images, batch)
        if not all(one.isfinite().all() for one in outputs if one.is_floating_point()):
            raise ValueError("the network itself gives NaN or infinity for these images, in float32")
        if any(one.shape[:1] != (len(images),) for one in outputs):
            raise ValueError("the network does not answer image by image, so no answers can be compared")
        classifies = classifies and is_logits(outputs)
        if labels is not None and not classifies:
            raise ValueError(
                "labels= are for a network that answers each image with one row of logits, which this one does not; leave them out"
            )
        if labels is not None and not 0 <= int(labels.min()) <= int(labels.max()) < outputs[0].shape[1]:
            raise ValueError(
                f"labels are indices of the network's {outputs[0].shape[1]} classes, from 0; these lie between {int(labels.min())} and "
                f"{int(labels.max())}"
            )
        return cls(outputs, classifies, labels)


def is_logits(outputs: Sequence[Tensor]) -> bool:
    """Tell whether a network's outputs are one row of logits for each image."""
    return len(outputs) == 1 and outputs[0].dim() == 2 and outputs[0].shape[1] > 1


def answers(call: Callable[..., Any], images: Tensor, batch: int = 1) -> list[Tensor]:
    """Return per tensor of the output what a network or an engine gives for all images, in batches of a size."""
    with torch.no_grad():
        parts = [[leaf for leaf in pytree.tree_leaves(call(part)) if isinstance(leaf, Tensor)] for part in images.split(batch)]
    return [torch.cat([one if one.dim() else one[None] for one in column]) for column in zip(*parts, strict=True)]


def compare(
    reference: Reference,
    outputs: Sequence[Tensor],
    precision: str,
    by: str,
    tolerance: Tolerance,
    *,
    calibrated: int,
    digest: str,
    **more: Any,
) -> Certificate:
    """Compare answers with float32's.

    Args:
        reference: float32's.
        outputs: of the narrow precision, for the same images.
        precision: its name.
        by: what computed it.
        tolerance: what is asked.
        calibrated: images that calibrated.
        digest: of the images compared.
        more: other attributes of the certificate.
    """
    cosine = least = 1.0
    for ours, right in zip(outputs, reference.outputs, strict=True):
        a, b = (one.double().reshape(len(one), -1) for one in (ours, right))
        each = torch.nn.functional.cosine_similarity(a, b, dim=1).nan_to_num(-1.0)
        cosine, least = min(cosine, each.mean().item()), min(least, each.min().item())
    error = distance(outputs, reference.outputs)
    made = Certificate(precision, by, len(reference.outputs[0]), calibrated, digest, tolerance, error, cosine, least, **more)
    return _of_classes(made, reference, outputs[0]) if reference.classifies else made


def distance(outputs: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the relative error of answers over all images; of several outputs the largest, and infinity of NaN."""
    found = [((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() for a, b in zip(outputs, right, strict=True)]
    return max((one if one == one else math.inf for one in found), default=0.0)


def _of_classes(made: Certificate, reference: Reference, logits: Tensor) -> Certificate:
    right, ours = reference.outputs[0].argmax(1), logits.argmax(1)
    same = right == ours
    top5 = five = None
    if logits.shape[1] > 5:
        sets = [one.topk(5, 1).indices.sort(1).values for one in (logits, reference.outputs[0])]
        five, top5 = int((sets[0] == sets[1]).all(1).sum()), int((sets[0] == right[:, None]).any(1).sum())
    kinds = right if reference.labels is None else reference.labels
    counts = [(int(same[kinds == kind].sum()), int((kinds == kind).sum()), int(kind)) for kind in kinds.unique()]
    stay, of, kind = min(counts, key=lambda one: (one[0] / one[1], -one[1]))
    made = replace(made, top1=int(same.sum()), top5=top5, five=five, worst=(kind, stay, of))
    if reference.labels is None:
        return made
    single, narrow = right == reference.labels, ours == reference.labels
    gained, lost = int((narrow & ~single).sum()), int((single & ~narrow).sum())
    return replace(made, right=(int(single.sum()), int(narrow.sum())), difference=paired(gained, lost, len(ours)))


def paired(gained: int, lost: int, count: int) -> tuple[float, float, float]:
    """Return the difference of two accuracies of the same images, in points, and the ends of its 95 % interval.

    Only images count that one way classifies right and the other wrong. The interval is Bonett and Price's (2012), an adjusted Wald
    interval, which is not empty where no image differs.

    Args:
        gained: images that the second way alone classifies right.
        lost: images that the first way alone classifies right.
        count: all images.

    Example:
        >>> paired(0, 0, 100)[0]
        0.0
    """
    more, less, of = (gained + 1) / (count + 2), (lost + 1) / (count + 2), count + 2
    middle, half = more - less, Z * math.sqrt(max(0.0, (more + less - (more - less) ** 2) / of))
    return 100 * (gained - lost) / count, 100 * (middle - half), 100 * (middle + half)


def wilson(found: int, count: int) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a share, by Wilson's score (1927)."""
    share, square = found / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _percent(found: int, count: int) -> str:
    return f"{100 * found / count:.1f} %"
