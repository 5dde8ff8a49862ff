"""`train_style("photos", "starry.jpg", "starry")`: from a folder of photographs and one picture to a style that `stylize` knows."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weights import BadRecord
from weights.arguments import forgiving, python_scalar, unknown_keyword, whole
from weights.documents import json_file, read_json
from weights.places import at_home
from weights.whole import whole as written_whole
from weights.whole import write_whole
from zoo.images import open_source
from zoo.networks.fingerprint import state_digest
from zoo.networks.model import Model
from zoo.pretrained.run_folder import ROW, WEIGHTS, save_tensors
from zoo.pretrained.trained import trained
from zoo.stylizing import sheets
from zoo.stylizing.crops import crops
from zoo.stylizing.learning import Learner, Terms, Weights, seeded, terms
from zoo.stylizing.losses import TAPS, LossNetwork, StyleLoss
from zoo.stylizing.networks import StyleNetwork
from zoo.stylizing.painting import as_batch, read
from zoo.stylizing.pictures import Pictures, steps_of
from zoo.stylizing.progress import Show, bar
from zoo.stylizing.style_files import NETWORKS, SETTINGS, network_of, write_style

STATE, LOG = "last.safetensors", "log.jsonl"
USUAL_LOSS = "EfficientNetLite0"
MEASURED = 16
"""Photographs that the terms' scales are taken from."""
TOLD = 20
"""Steps between two lines of the curve."""
CHANGEABLE = ("sheet_every", "save_every", "device", "compile")
"""Settings that a resumed training may change; all others would make it another one."""
WORDS = {"epochs": "say how many steps of batch_size photographs instead", "learning_rate": "did you mean lr?"}


class Stopped(KeyboardInterrupt):
    """Somebody stopped the training; its state is saved, and the message says how it goes on."""


class Diverged(FloatingPointError):
    """The loss is no number any more; the last state that was saved is in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleSettings:
    """How a style is trained. All of it is written into the folder's `settings.json`.

    Attributes:
        model: "Johnson", "Engstrom" or "MobileStyle", see `zoo.stylizing.networks`.
        channels: of Johnson's first map, 32, 16 or 8: 6.7, 1.7 or 0.45 MB.
        steps: optimiser steps; a style shows after 500, and is usable after 2,000.
        batch_size: photographs of a step.
        size: their side in pixels.
        lr: the highest learning rate of Adam, which falls over the second half.
        style_weight: of the style picture's texture. Raise it where paintings look too much like photographs.
        content_weight: of what the photograph shows.
        variation_weight: of differences between neighbouring pixels. Raise it where paintings are noisy.
        style_side: the longer side in pixels that the style picture is reduced to; the smaller, the finer the strokes.
        seed: of everything random.
        dtype: "bfloat16" by autocast, "float32", or "auto": bfloat16 on a GPU.
        compile: whether torch.compile is to make the steps faster.
        sheet_every: steps between two sheets of photographs beside their paintings.
        save_every: steps between two saved states.
        device: "cpu", "cuda" or "cuda:1"; None takes a GPU where there is one.
    """

    model: str = "Johnson"
    channels: int = 32
    steps: int = 4000
    batch_size: int = 8
    size: int = 256
    lr: float = 1e-3
    style_weight: float = 10.0
    content_weight: float = 1.0
    variation_weight: float = 0.02
    style_side: int = 384
    seed: int = 0
    dtype: str = "auto"
    compile: bool = False
    sheet_every: int = 500
    save_every: int = 500
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("channels", "steps", "batch_size", "sheet_every", "save_every"):
            whole(name, getattr(self, name))
        whole("size", self.size, 64)
        whole("style_side", self.style_side, 64)
        whole("seed", self.seed, 0)
        if self.size % 4:
            raise ValueError(f"size is a multiple of 4, got {self.size}")
        if self.model not in NETWORKS:
            raise ValueError(f"model is one of {', '.join(NETWORKS)}, got {self.model!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype is auto, float32 or bfloat16, got {self.dtype!r}")
        if not self.lr > 0:
            raise ValueError(f"lr is a number above 0, got {self.lr!r}")
        for name in ("style_weight", "content_weight", "variation_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is at least 0, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> StyleSettings:
        """Read settings by name.

        Raises:
            TypeError: there is none of a name; the message names the nearest.
            ValueError: a value is out of its range.
        """
        known = [field.name for field in fields(cls)]
        for name in told:
            if name not in known:
                raise unknown_keyword("train_style()", name, known, WORDS)
        return cls(**{name: python_scalar(value) for name, value in told.items()})


@dataclass(frozen=True, slots=True)
class StyleRun:
    """What a finished training is.

    Attributes:
        folder: a style that `stylize` knows.
        network: that learnt, in eval mode, on the CPU.
        steps: that were done.
        resumed: of those, steps that earlier calls did.
        curve: the lines of `log.jsonl`: step, loss, style, content, variation.
        unreadable: reasons by the names of photographs that could not be read.
    """

    folder: Path
    network: StyleNetwork
    steps: int
    resumed: int
    curve: list[dict[str, float]]
    unreadable: dict[str, str]


@forgiving
def train_style(
    data: str | os.PathLike[str],
    picture: Any,
    out: str | os.PathLike[str],
    *,
    loss_network: str | Model = USUAL_LOSS,
    loss_weights: str | os.PathLike[str] | None = None,
    license: str = "unstated",
    restart: bool = False,
    progress: bool | Show = True,
    **settings: Any,
) -> StyleRun:
    """Learn the style of one picture from a folder of photographs, and leave a folder that `stylize` takes as a style.

    The same call again goes on with an interrupted training: with the same photographs, picture and settings it ends with the same numbers
    as if it had never stopped. `sheet-*.png` show photographs beside their paintings as it learns, `curves.png` the terms of the loss.

    Args:
        data: photographs, as `zoo.images.open_source` takes them; a few thousand are enough.
        picture: the style picture: a path, a PIL image or an array.
        out: the folder of the training.
        loss_network: what measures style and content: "EfficientNetLite0", "SqueezeNet1_0", "VGG16" or "VGG19", or such a network with
            weights. VGG's are the usual ones, a download of half a gigabyte.
        loss_weights: of a loss network that is named: a tag, URL or path, as `trained` takes it.
        license: what the result's record says of its licence.
        restart: throw away the training that is in `out`.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.stylizing.progress.Show`.
        **settings: see `StyleSettings`.

    Returns:
        The training's result.

    Raises:
        ValueError, TypeError: an argument can't be used; nothing was written.
        FileNotFoundError: nothing is at `data` or `picture`.
        FileExistsError: `out` holds another training, or a finished one.
        BadImage: the style picture or most photographs can't be read.
        WeightsError: the loss network's weights can't be had.
        Diverged: the loss became NaN.
        Stopped: Ctrl-C; the state is in `out`.

    Example:
        >>> train_style("photos", "starry.jpg", "starry", steps=2000)  # doctest: +SKIP
        >>> stylize("cat.jpg", "starry").save("cat-starry.png")  # doctest: +SKIP

    Source:
        https://arxiv.org/abs/1603.08155, section 3; that terms are divided by their value of photographs is ours.
    """
    wanted = StyleSettings.of(settings)
    place = at_home(out)
    image, _ = read(picture)
    source = open_source(data)
    network = _loss_model(loss_network, loss_weights)
    facts = _facts(wanted, os.fspath(data), source.fingerprint, image, network)
    _check_folder(place, facts, restart)
    pictures = Pictures(source, wanted.size)
    device = _device(wanted.device)
    return _Training(wanted, place, facts, pictures, image, network, device, license).run(progress)


def _loss_model(named: str | Model, weights: str | os.PathLike[str] | None) -> Model:
    if isinstance(named, Model):
        if type(named).__name__ not in TAPS:
            raise ValueError(f"loss_network is one of {', '.join(TAPS)}, or such a network with weights, not a {type(named).__name__}")
        if weights is not None:
            raise ValueError("loss_weights are of a loss network that is named; leave them out, for the network has its own")
        return named
    if not isinstance(named, str) or named not in TAPS:
        raise ValueError(f"loss_network is one of {', '.join(TAPS)}, or such a network with weights, got {named!r}")
    return trained(named, weights)


def _device(named: str | None) -> str:
    device = named or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f'there is no GPU here that PyTorch can use; leave device out, or say "cpu" instead of {device!r}')
    return device


def _facts(settings: StyleSettings, where: str, fingerprint: str, image: Any, network: Model) -> dict[str, Any]:
    """Say what makes a training the one that it is."""
    row = network.checkpoint
    return {
        "settings": asdict(settings),
        "photographs": fingerprint,
        "picture": hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest(),
        "loss_network": type(network).__name__,
        "loss_weights": state_digest(network),
        "told": {"photographs": where, "picture": getattr(image, "filename", None), "loss_weights": row and f"{row.model}:{row.tag}"},
    }


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what differs between two trainings."""
    apart = [name for name in ("photographs", "picture", "loss_network", "loss_weights") if one.get(name) != other.get(name)]
    before, now = one.get("settings", {}), other.get("settings", {})
    return apart + [name for name in now if name not in CHANGEABLE and before.get(name) != now[name]]


def _check_folder(folder: Path, facts: Mapping[str, Any], restart: bool) -> None:
    """Refuse a folder that holds another training, and clear it where that is wanted."""
    if restart and (folder / SETTINGS).exists():
        clear(folder)
    if not (folder / SETTINGS).exists():
        return
    todo = "restart=True throws it away; or name another folder"
    before = json_file(folder / SETTINGS, "Begin anew with restart=True", refuse=BadRecord)
    if apart := _same(before, facts):
        raise FileExistsError(f"'{folder}' holds a training with other {', '.join(apart)}: {todo}")
    if (folder / ROW).exists():
        raise FileExistsError(f"'{folder}' holds this training, and it is finished: stylize(photo, {str(folder)!r}) uses it; {todo}")


def clear(folder: Path) -> None:
    """Delete what a training left in its folder, and nothing else; what makes it a style goes first."""
    for name in (ROW, WEIGHTS, SETTINGS, STATE, LOG, sheets.CURVES):
        (folder / name).unlink(missing_ok=True)
    for sheet in folder.glob(sheets.SHEETS):
        sheet.unlink()


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let cuDNN take algorithms that give the same bits each time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


class _Training:
    """A training between its first and its last step."""

    def __init__(
        self,
        settings: StyleSettings,
        folder: Path,
        facts: dict[str, Any],
        pictures: Pictures,
        image: Any,
        network: Model,
        device: str,
        license: str,
    ) -> None:
        self.settings, self.folder, self.facts, self.pictures, self.image = settings, folder, facts, pictures, image
        self.license, self.device = license, device
        options = {"channels": settings.channels} if settings.model == "Johnson" else {}
        self.options = options
        student = seeded(NETWORKS[settings.model], settings.seed, **options).to(device)
        share = min(1.0, settings.style_side / max(image.size))
        reduced = image.resize([max(32, round(share * side)) for side in image.size])
        loss = StyleLoss(loss_network(network).to(device), [as_batch(reduced, torch.device(device))])
        weights = Weights(settings.style_weight, settings.content_weight, settings.variation_weight)
        half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.startswith("cuda"))
        self.learner = Learner(student, loss, weights, lr=settings.lr, steps=settings.steps, half=half, compile=settings.compile)
        self.curve: list[dict[str, float]] = []
        self.window: list[Tensor] = []
        self.done = 0

    def run(self, progress: bool | Show) -> StyleRun:
        settings, folder = self.settings, self.folder
        if not self._resume():
            self.learner.loss.measure(self._draw(settings.steps, MEASURED))
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / SETTINGS, json.dumps(self.facts, indent=1) + "\n")
            self._save()
        resumed = self.done
        show = progress if callable(progress) else lambda steps, done: bar(steps, done, wanted=bool(progress))
        draw = {"batch": settings.batch_size, "size": settings.size, "seed": settings.seed, "device": self.device}
        try:
            with _repeatable(), show(settings.steps, resumed) as told:
                for photographs in steps_of(self.pictures, self.done, settings.steps, **draw):
                    self._step(photographs, told)
        except KeyboardInterrupt:
            self._save()
            raise Stopped(
                f"stopped after step {self.done:,} of {settings.steps:,}; the same call goes on, the state is in '{folder}'"
            ) from None
        return self._finish(resumed)

    def _step(self, photographs: Tensor, told: Any) -> None:
        settings = self.settings
        values = self.learner.step(self.done, photographs)
        self.done += 1  # beside the weights' change: a state that is saved has both
        self.window.append(values)
        last = self.done == settings.steps
        if self.done % TOLD == 0 or last:
            mean = terms(torch.stack(self.window).mean(0))
            self.window.clear()
            if mean.loss != mean.loss or mean.loss in (float("inf"), float("-inf")):
                raise Diverged(f"the loss became {mean.loss} before step {self.done:,}: begin anew with a lower lr or style_weight")
            self.curve.append({"step": self.done, **asdict(mean)})
            told(self.done, mean)
        if self.done % settings.sheet_every == 0 or last:
            self._sheet()
        if self.done % settings.save_every == 0 or last:
            self._save()

    def _draw(self, step: int, count: int) -> Tensor:
        """Draw photographs that no step sees in this way."""
        size, seed = self.settings.size, self.settings.seed
        return crops(
            self.pictures, len(self.pictures), step=step, batch=count, size=size, seed=seed, vary_colours=False, device=self.device
        )

    def _sheet(self) -> None:
        shown = self._draw(self.settings.steps + 1, 4)
        with torch.no_grad():
            painted = self.learner.network(shown)
        sheets.sheet(self.image, shown, painted, self.folder / sheets.name(self.done))
        if len(self.curve) > 1:
            sheets.curves(self.curve, self.folder / sheets.CURVES)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"network.{name}": value for name, value in self.learner.network.state_dict().items()}
        for name, parameter in self.learner.network.named_parameters():
            for key, value in self.learner.optimizer.state.get(parameter, {}).items():
                found[f"adam.{name}.{key}"] = value
        if self.window:
            found["window"] = torch.stack(self.window)
        return {name: value.detach().cpu().contiguous() for name, value in found.items()}

    def _save(self) -> None:
        facts = {"step": self.done, "scales": self.learner.loss.scales, "curve": self.curve}
        with written_whole(self.folder / STATE, sync=True) as unfinished:
            save_tensors(self._tensors(), unfinished, {"format": "pt", "training": json.dumps(facts)})
        write_whole(self.folder / LOG, "".join(json.dumps(line) + "\n" for line in self.curve))

    def _resume(self) -> bool:
        """Take up the state that is in the folder; False where there is none."""
        path = self.folder / STATE
        if not (self.folder / SETTINGS).exists() or not path.exists():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                facts = read_json(file.metadata()["training"], path)
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
            network = self.learner.network
            network.load_state_dict({n.removeprefix("network."): value for n, value in found.items() if n.startswith("network.")})
            for name, parameter in network.named_parameters():
                prefix = f"adam.{name}."
                state = {n.removeprefix(prefix): value for n, value in found.items() if n.startswith(prefix)}
                if state:
                    moved = {key: value if key == "step" else value.to(self.device) for key, value in state.items()}
                    self.learner.optimizer.state[parameter].update(moved)
            style, content, variation = facts["scales"]
            self.learner.loss.scales = ([float(one) for one in style], float(content), float(variation))
            self.curve, self.done = list(facts["curve"]), int(facts["step"])
            self.window = list(found["window"].to(self.device)) if "window" in found else []
        except Exception as error:  # safetensors has an error of its own, and damage can look like anything
            raise BadRecord(f"{path} is no state of a training ({error}); begin anew with restart=True") from error
        return True

    def _finish(self, resumed: int) -> StyleRun:
        facts = self.facts
        told = (
            f"trained by train_style, {self.settings.steps:,} steps, loss network {facts['told']['loss_weights'] or facts['loss_network']}"
        )
        tensors = {name: value.detach().cpu().clone() for name, value in self.learner.network.state_dict().items()}
        network = network_of(tensors, str(self.folder))
        machine = torch.cuda.get_device_name() if self.device.startswith("cuda") else platform.machine()
        provenance = f"{told}, on {machine}; picture sha256 {facts['picture'][:16]} of its pixels"
        network.checkpoint = write_style(self.folder, network, license=self.license, provenance=provenance, options=self.options)
        return StyleRun(self.folder, network, self.settings.steps, resumed, self.curve, self.pictures.unreadable)


def loss_network(model: Model) -> LossNetwork:
    """Take the front of a network that measures style, with the preprocessing that its record says.

    Raises:
        ValueError: it has none of the known taps.
    """
    taps = TAPS[type(model).__name__]
    if (row := model.checkpoint) is not None:
        steps = row.preprocessing
        mean, std = ([255 * one for one in values] for values in (steps.mean, steps.std))
        taps = replace(taps, mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]), bgr=steps.channel_order == "bgr")
    return LossNetwork(list(model.features), taps)  # pyright: ignore[reportArgumentType]: each of them has a Sequential of that name


__all__ = ["Diverged", "Stopped", "StyleRun", "StyleSettings", "Terms", "train_style"]
