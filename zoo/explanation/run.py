"""Why does a network answer what it answers? `explain`: a map over the photograph, by any method of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from weights.arguments import forgiving, unknown_keyword, whole
from zoo.explanation.geometry import View
from zoo.explanation.program import INPUT, CannotExplain, Program
from zoo.explanation.result import Explanation
from zoo.explanation.table import Question, find_method
from zoo.explanation.targets import Target, single, targets
from zoo.extraction.features import features
from zoo.extraction.taps import EMBEDDING, LOGITS
from zoo.images.preprocess import BadImage, is_many, named_images, preprocess_and_measure, seen_box
from zoo.kernels import Fast, plain
from zoo.labels import Label, labels
from zoo.networks.model import Model
from zoo.prediction.predict import check_preprocessed, network_named, usual_network

if TYPE_CHECKING:
    from weights.record import Preprocessing

USUAL, WHATEVER_HEAD = "gradcam", "hirescam"
"""Methods where none is named: where the head begins with a mean over places, and where it does not."""
IN_CACHE = 8
"""Images that a CPU computes at once: the maps of more leave its cache between two layers."""
_fast_bodies: WeakKeyDictionary[nn.Module, dict[str, Fast]] = WeakKeyDictionary()


@forgiving
def explain(
    model: Any,
    images: Any = None,
    method: str | None = None,
    target: Any = None,
    at: str | None = None,
    top: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Show which parts of an image speak for a network's answer.

    The network is never changed: the work is done by modules of its own around the same numbers, without hooks, flags or gradients.
    Maps keep their scale, and are laid on the whole photograph, crop and resizing undone.

    Example:
        >>> result = explain(trained(EfficientNetLite0), "cat.jpg")  # doctest: +SKIP
        >>> result.label, result.map.shape  # doctest: +SKIP
        ('Egyptian cat', (480, 640))
        >>> explain(model, "cat.jpg", target=("tabby", "tiger cat")).save("why.png")  # doctest: +SKIP

    Args:
        model: what `trained` returns, or `fast` of it, on any device and in any floating-point type, frozen or not; a checkpoint's name;
            or any module that torch.fx can trace, with `at` and a tensor of images. It may be left out, as in `predict`.
        images: as `predict` takes them: paths, PIL images, arrays, a list of these; or a preprocessed tensor (B, C, H, W) or (C, H, W).
        method: a name of `zoo.explanation.METHODS`: "gradcam", "hirescam", "integrated-gradients", "lrp", … None takes Grad-CAM where the
            network's head begins with a mean over places, else HiResCAM.
        target: what is explained: a class by index, name or WordNet id; a synset, "dog", the mean of its classes' logits; a pair of these
            as a tuple, the difference; an embedding (C,), the cosine with the image's; or a list of these, for one map each. None is
            the most probable class.
        at: the layer of the map, as `features` names it; None is the last map that the head reads.
        top: explain so many classes, the most probable first; instead of `target`.
        batch_size: images that go through the network at once; it bounds the memory.
        seed: of methods that draw random numbers.
        options: of the method, {"steps": 100}; its docstring names them.

    Returns:
        An `Explanation` for one image, a list of them for several; where `target` is a list or `top` is given, a list in their place.

    Raises:
        CannotExplain: the method has no definition for this network, layer or target; the message says which has.
        UnknownTap: the network has no such layer.
        BadImage, WrongInput: as in `predict`.
        FloatingPointError: the network computes NaN or infinity.
        TypeError: the model is none, or an option is misspelt.
        ValueError: `batch_size` or `top` is no whole number of at least 1, or the model is untrained and images are no tensor.
    """
    if isinstance(images, nn.Module):
        raise TypeError("explain() takes the network first: explain(model, images)")
    if images is None:
        if isinstance(model, nn.Module):
            raise TypeError("explain(model, images) takes the images, too; without a network: explain(images)")
        model, images = usual_network(), model
    elif isinstance(model, str):
        model = network_named(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain() takes a network, trained(ResNet20), not {model!r:.60}")
    explainer = Explainer(model, method, target, at, top, batch_size, seed, dict(options or {}))
    many = is_many(images)
    found = list(explainer.each(images))
    rows = found if explainer.several else [row[0] for row in found]
    return rows if many else rows[0]


@dataclass
class Explainer:
    """One request: a network and what is asked of it; `each` answers it for images, batch by batch."""

    model: nn.Module
    method: str | None = None
    target: Any = None
    at: str | None = None
    top: int | None = None
    batch_size: int = 32
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_size = whole("batch_size", self.batch_size)
        if self.top is not None:
            self.top = whole("top", self.top)
            if self.target is not None:
                raise ValueError("top asks for the most probable classes and target for named ones; give one of them")
        core = plain(self.model)
        record = getattr(core, "checkpoint", None) if isinstance(core, Model) else None
        self.network, self.record = core, record
        self.preprocessing: Preprocessing | None = record.preprocessing if record is not None else None
        weight = next(core.parameters(), torch.empty(0))
        self.device = self.model.device if isinstance(self.model, Fast) else weight.device
        self.dtype = weight.dtype
        if weight.device.type == "meta":
            raise ValueError(f"this {type(core).__name__} is on the meta device, where tensors have no numbers; load its weights first")
        self.names: tuple[Label, ...] = ()
        if isinstance(core, Model):
            chosen = tuple(origin.label for origin in core.classes or ())
            self.names = chosen or (labels(record.labels) if record is not None and record.labels else ())
        with torch.inference_mode(False):
            self._choose()

    def _choose(self) -> None:
        """Find method and program."""
        vector = any(getattr(one, "ndim", 0) == 1 for one in (self.target if isinstance(self.target, list) else [self.target]))
        result = EMBEDDING if vector else LOGITS
        build = partial(Program, self.network, device=self.device, result=result)
        if self.method is None:
            self.program = build(at=self.at)
            from zoo.explanation.cams import begins_with_mean

            self.chosen = find_method(USUAL if begins_with_mean(self.program) else WHATEVER_HEAD)
        else:
            self.chosen = find_method(self.method)
            if self.chosen.place == "input" and self.at is not None and not self.chosen.reads_layer:
                raise CannotExplain(f"{self.chosen.title} explains the image's pixels, so it has no layer; leave at={self.at!r} out")
            self.program = build(at=INPUT if self.chosen.place == "input" else self.at, fold=not self.chosen.exact)
        for word in self.options:
            if word not in self.chosen.options:
                raise unknown_keyword(self.chosen.title, word, self.chosen.options)
        self.layer: Program | None = build(at=self.at) if self.chosen.reads_layer else None

    @property
    def several(self) -> bool:
        """Whether each image has a list of explanations."""
        return self.top is not None or isinstance(self.target, list)

    def each(self, images: Any) -> Iterator[list[Explanation]]:
        """Yield the explanations of each image."""
        for names, sources, x, views in self.batches(images):
            with torch.inference_mode(False):
                yield from self.batch(names, sources, x.clone() if x.is_inference() else x, views)

    def batches(self, images: Any) -> Iterator[tuple[list[str], list[Any], Tensor, list[View]]]:
        """Yield names, sources, preprocessed images and views, batch by batch; all images of a batch end in one size."""
        if isinstance(images, Tensor) and images.is_floating_point():
            if self.preprocessing is not None:
                check_preprocessed(images, self.preprocessing, self.network.in_channels)  # pyright: ignore[reportArgumentType]
            x = images.detach() if images.dim() == 4 else images.detach()[None]
            if isinstance(self.network, Model):
                self.network.check_input(x)
            for start in range(0, len(x), self.batch_size):
                part = x[start : start + self.batch_size].float()
                height, width = part.shape[-2:]
                view = View((width, height), (0, 0, width, height), (width, height))
                names = [f"images[{start + i}]" for i in range(len(part))]
                yield names, [_shown(one, self.preprocessing) for one in part], part, [view] * len(part)
            return
        if self.preprocessing is None:
            name = type(self.network).__name__
            raise ValueError(
                f"no preprocessing belongs to this {name}, so it takes preprocessed tensors (B, C, H, W) alone; "
                + (f"use trained({name}), or set model.checkpoint" if isinstance(self.network, Model) else "prepare the images yourself")
            )
        named = named_images(images)
        if not named:
            raise BadImage("there are no images to explain: the list is empty")
        for start in range(0, len(named), self.batch_size):
            part = named[start : start + self.batch_size]
            x, pictures = preprocess_and_measure(part, self.preprocessing)
            size = x.shape[-1], x.shape[-2]
            views = [View(picture, seen_box(picture, self.preprocessing), size) for picture in pictures]
            yield [n for n, _ in part], [s for _, s in part], x, views

    def batch(self, names: Sequence[str], sources: Sequence[Any], x: Tensor, views: Sequence[View]) -> list[list[Explanation]]:
        """Explain one batch of preprocessed images."""
        x = x.to(self.device)
        at_tap = self.program.at != INPUT
        kept = self._body(x) if at_tap else [x]
        self._check_map(kept[0])
        with torch.no_grad():
            outputs = self.program.head(kept) if at_tap else self.infer(x)
        if not outputs.isfinite().all():
            raise FloatingPointError(
                f"the network computes NaN or infinite outputs: {self.dtype} is too narrow for it; try model.float(), or check its weights"
            )
        if outputs.dim() != 2:
            raise CannotExplain(f"{self.program.name} answers {tuple(outputs.shape)}, not (images, classes); explain a network that does")
        chances = outputs.float().softmax(1).cpu()
        asked = self._targets(outputs)
        found: list[list[Explanation]] = [[] for _ in range(len(x))]
        for rank in range(len(asked[0])):
            each = [row[rank] for row in asked]
            question = self.question(x, kept, each)
            answer = self.chosen.function(question)
            scores = question.goal(outputs, question.every).tolist()
            rows, columns = self.program.axes(answer.raw.shape[1], answer.raw.shape[2], x)
            raw = answer.raw.float().cpu().numpy()
            for index, one in enumerate(each):
                chance = scores[index] if one.vector is not None else one.probability(chances[index])
                error = None if answer.error is None else answer.error[index]
                found[index].append(
                    Explanation(
                        raw[index].copy(), one.label, one.wnid, chance, scores[index], self.chosen.title, self.program.at, error,
                        self.chosen.error, answer.note, self.chosen.signed, self.chosen.slope, self._called(), names[index],
                        views[index], rows, columns, sources[index],
                    )
                )  # fmt: skip
        return found

    def _check_map(self, found: Any) -> None:
        """Refuse a layer whose answer has no rows and columns."""
        at, layout = self.program.at, self.program.layout
        if not isinstance(found, Tensor):
            raise CannotExplain(f"{at!r} answers a {type(found).__name__}, and one tensor is explained; name a layer that gives one")
        if found.dim() != (3 if layout.axis == 2 else 4):
            raise CannotExplain(
                f"{at!r} answers {tuple(found.shape)}, and a map (images, channels, height, width) is explained; name a layer "
                "that gives one"
            )

    def _targets(self, outputs: Tensor) -> list[list[Target]]:
        """Return the targets of each image."""
        classes = outputs.shape[1]
        known = self.names if len(self.names) == classes else ()
        if self.target is not None:
            wanted, _ = targets(self.target, known, classes)
            for one in wanted:
                if one.vector is not None and len(one.vector) != classes:
                    raise CannotExplain(f"the embedding has {len(one.vector)} numbers, and {self.program.name}'s have {classes}")
                if (one.vector is None) != (self.program.ends == LOGITS):
                    raise CannotExplain("classes and embeddings can't be explained by one call; make two")
            return [wanted] * len(outputs)
        best = outputs.topk(min(self.top or 1, classes), 1).indices.tolist()
        return [[single(index, known) for index in row] for row in best]

    def question(self, x: Tensor, kept: list[Tensor] | None, each: Sequence[Target]) -> Question:
        """Ask for the explanation of one target for each image."""
        asked = Question(
            self.program, x, _goal(each), self.infer, self._body, self.batch_size, self.preprocessing, self.seed, self.options, self.layer
        )
        if kept is not None:
            asked.__dict__["kept"] = kept
        return asked

    def goals(self, x: Tensor) -> list[Target]:
        """Return the first target of each preprocessed image."""
        return [row[0] for row in self._targets(self.infer(x))]

    def raws(self, x: Tensor, goals: Sequence[Target]) -> list[np.ndarray]:
        """Return the raw map of each preprocessed image for a target of its own."""
        kept = self._body(x) if self.program.at != INPUT else [x]
        return list(self.chosen.function(self.question(x, kept, goals)).raw.float().cpu().numpy())

    def _body(self, x: Tensor) -> list[Tensor]:
        """Run what lies before the tap: by fast kernels where the network is fast and the tap is all that is read."""
        if isinstance(self.model, Fast) and self.program.alone and self.program.feature and self.program.at != INPUT:
            with torch.no_grad():
                return [self._fast_body()(x.to(self.dtype))[self.program.at].float()]
        return self.program.body(x)

    def _fast_body(self) -> Fast:
        """Return the network up to the tap as fast as the user's; made once for each network and tap, for plans take time."""
        made = _fast_bodies.setdefault(self.model, {})
        if self.program.at not in made:
            made[self.program.at] = features(self.model, at=[self.program.at])  # pyright: ignore[reportArgumentType, reportCallIssue]
        return made[self.program.at]

    def infer(self, x: Tensor) -> Tensor:
        """Answer without gradients; a fast network gets batches of one shape, for it makes a plan for each."""
        with torch.no_grad():
            if isinstance(self.model, Fast) and self.program.ends == LOGITS:
                missing = self.batch_size - len(x) if len(x) < self.batch_size else 0
                padded = torch.cat([x, x[-1:].expand(missing, -1, -1, -1)]) if missing else x
                return self.model(padded.to(self.dtype))[: len(x)].float()
            parts = x.split(IN_CACHE) if x.device.type == "cpu" else (x,)
            return torch.cat([self.program.head(self.program.body(part)) for part in parts])

    def _called(self) -> str:
        return type(self.network).__name__ if self.record is None else f"{self.record.model}:{self.record.tag}"


def _goal(each: Sequence[Target]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what computes the number that is explained, of outputs and the rows of the batch that they belong to."""
    if each[0].vector is not None:
        vectors = torch.stack([one.vector for one in each if one.vector is not None])
        return lambda outputs, rows: torch.cosine_similarity(outputs.float(), vectors.to(outputs.device)[rows], dim=1)
    made: dict[tuple[int, torch.device], Tensor] = {}

    def score(outputs: Tensor, rows: Tensor) -> Tensor:
        key = outputs.shape[1], outputs.device
        if key not in made:
            made[key] = torch.stack([one.row(outputs.shape[1]) for one in each]).to(outputs.device)
        return (outputs.float() * made[key][rows]).sum(1)

    return score


def _shown(x: Tensor, preprocessing: Preprocessing | None) -> np.ndarray:
    """Return a preprocessed image as a picture, uint8 (H, W, 3): by its record, else stretched to its own range."""
    x = x.detach().float().cpu()
    if preprocessing is None:
        low, high = x.min(), x.max()
        x = (x - low) / (high - low).clamp(min=1e-12)
    else:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        x = x * std + mean
        x = x.flip(0) if preprocessing.channel_order == "bgr" else x
    x = x[:3] if len(x) >= 3 else x[:1].expand(3, -1, -1)
    return (x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
