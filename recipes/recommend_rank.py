"""Compare the order that `recommend` gives with the accuracy that fine-tuning reaches, on four small sets of real images.

    python recipes/recommend_rank.py WORK --data DATA tune            # the truth: fine-tune every candidate on every set
    python recipes/recommend_rank.py WORK --data DATA estimate        # what recommend, LogME and the size say
    python recipes/recommend_rank.py WORK --data DATA report          # Spearman's rank correlations, as Markdown
    python recipes/recommend_rank.py WORK --data DATA picture         # docs/recommend.png

DATA holds `data/cifar10_test.npz` (CIFAR-10's test images as JPEG) and, from the public repositories that its index names,
`real/images/mnist` and `real/pytorch/cifar_resnet*.th`. The ImageNet checkpoints come from package registries, by `trained`.
What is finished in WORK is kept: each step goes on where it was ended.

The sets are drawn from test images alone, which none of the candidates has seen: those to learn from are what `recommend` is
given too, the others are what the fine-tuned networks are measured on.

    ten       CIFAR-10, 10 classes of 30 images
    animals   its six animals, 50 images each
    vehicles  its four vehicles, 60 images each
    digits    MNIST, 10 classes of 30 images, grey 28 x 28

The ImageNet networks read images of 64 pixels instead of 224 to 260, in both steps, because the images have 28 or 32 and the machine
was small; the CIFAR networks read 32.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.stats import spearmanr

from weights.whole import write_whole
from zoo.catalogue import model_class
from zoo.embedding import read
from zoo.finetuning import finetune
from zoo.images.preprocess import at_size
from zoo.networks.model import Model
from zoo.pretrained.heads import reset_head
from zoo.pretrained.trained import trained
from zoo.recommendation import recommend

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
VEHICLES = ("airplane", "automobile", "ship", "truck")
SIDE = 64
"""Pixels of what the ImageNet networks read here."""
MEASURED = 400
"""Images that a fine-tuned network is measured on."""
EPOCHS = 6


@dataclass(frozen=True)
class Set:
    """One task: the classes, and how many images of each are learnt from."""

    name: str
    classes: tuple[str, ...]
    each: int
    digits: bool = False


SETS = (
    Set("ten", CIFAR, 30),
    Set("animals", ANIMALS, 50),
    Set("vehicles", VEHICLES, 60),
    Set("digits", tuple("0123456789"), 30, digits=True),
)


@dataclass(frozen=True)
class Subject:
    """A candidate: a network, its weights, and whether they are thrown away for random ones."""

    name: str
    network: str
    weights: str | None = None
    file: str | None = None
    random: bool = False

    def build(self, data: Path) -> Model:
        """Load it; random weights keep the preprocessing."""
        source = str(data / self.file) if self.file else self.weights
        model = trained(model_class(self.network), source, progress=False)
        record = model.checkpoint
        assert record is not None
        steps = record.preprocessing
        steps = steps if (steps.crop or 0) <= 32 else at_size(steps, SIDE)
        if self.random:
            torch.manual_seed(len(self.name))
            model = model_class(self.network)(num_classes=model.num_classes, **record.options).eval()
        tag = self.name.rpartition(":")[2]
        model.checkpoint = replace(record, tag=tag, preprocessing=steps)
        return model


SUBJECTS = (
    Subject("ResNet20:cifar10", "ResNet20", "cifar10"),
    Subject("ResNet20:akamaster", "ResNet20", file="real/pytorch/cifar_resnet20-12fca82f.th"),
    Subject("ResNet32:akamaster", "ResNet32", file="real/pytorch/cifar_resnet32-d509ac18.th"),
    Subject("MobileNetV2:imagenet", "MobileNetV2", "imagenet1k_v1"),
    Subject("EfficientNetLite0:imagenet", "EfficientNetLite0"),
    Subject("EfficientNetLite1:imagenet", "EfficientNetLite1"),
    Subject("EfficientNetLite2:imagenet", "EfficientNetLite2"),
    Subject("ResNet20:random", "ResNet20", "cifar10", random=True),
    Subject("MobileNetV2:random", "MobileNetV2", "imagenet1k_v1", random=True),
    Subject("EfficientNetLite0:random", "EfficientNetLite0", random=True),
)


def _cifar(data: Path) -> tuple[list[bytes], list[str]]:
    held = np.load(data / "data" / "cifar10_test.npz")
    jpeg, offset = held["jpeg"], held["offset"]
    return [jpeg[a:b].tobytes() for a, b in itertools.pairwise(offset)], [CIFAR[i] for i in held["label"]]


def _mnist(data: Path) -> tuple[list[np.ndarray], list[str]]:
    folder = data / "real" / "images" / "mnist"
    pixels = np.frombuffer(gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return list(pixels), [str(i) for i in labels]


def folders(work: Path, data: Path, one: Set) -> tuple[Path, Path]:
    """Lay a set's images into folders, a folder a class: to learn from, and to measure on."""
    place = work / "sets" / one.name
    if not place.exists():
        images, labels = _mnist(data) if one.digits else _cifar(data)
        order = np.random.default_rng(0).permutation(len(images))
        unfinished = work / "sets" / f".{one.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        taken = dict.fromkeys(one.classes, 0)
        measured = MEASURED // len(one.classes)
        for index in order:
            label = labels[index]
            if label not in taken or taken[label] >= one.each + measured:
                continue
            part = "train" if taken[label] < one.each else "val"
            taken[label] += 1
            folder = unfinished / part / label
            folder.mkdir(parents=True, exist_ok=True)
            image = images[index]
            if isinstance(image, bytes):
                (folder / f"{index:05d}.jpg").write_bytes(image)
            else:
                Image.fromarray(image).convert("RGB").save(folder / f"{index:05d}.png")
        unfinished.replace(place)
    return place / "train", place / "val"


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def with_new_head(model: Model, classes: int) -> Model:
    """Put a classifier of zeros on, so that none begins with an advantage, nor with a random head that shakes its body."""
    reset_head(model, classes)
    with torch.no_grad():
        for value in model.get_submodule(model.classifiers[0]).parameters():
            value.zero_()
    return model


def tune(work: Path, data: Path, sets: list[Set]) -> None:
    """Fine-tune each candidate on each set, all by the same recipe, and write down the accuracy of the last state."""
    for one in sets:
        learn, measure = folders(work, data, one)
        for subject in SUBJECTS:
            path = work / "truth" / one.name / f"{subject.name.replace(':', '-')}.json"
            if path.exists():
                continue
            begun = time.monotonic()
            model = with_new_head(subject.build(data), len(one.classes))
            assert model.checkpoint is not None
            run = finetune(
                model,
                str(learn),
                path.with_suffix(""),
                val=str(measure),
                preprocessing=model.checkpoint.preprocessing,
                restart=path.with_suffix("").exists(),
                progress=False,
                epochs=EPOCHS,
                batch_size=32,
                optimizer="adamw",
                lr=5e-4,
                flip=not one.digits,
                augment="none",
                eval_every=10**6,
                workers=0,
                device="cpu",
            )
            assert run.metrics is not None
            facts = {"accuracy": 100 * run.metrics.accuracy, "images": run.metrics.count, "seconds": round(time.monotonic() - begun)}
            write_whole(path, json.dumps(facts))
            shutil.rmtree(path.with_suffix(""))
            print(f"{one.name}: {subject.name}: {facts}", flush=True)


def estimate(work: Path, data: Path, sets: list[Set]) -> None:
    """Ask `recommend`, with labels and without, and LogME on the same vectors; write down what each says of every candidate."""
    for one in sets:
        learn, _ = folders(work, data, one)
        path = work / "estimates" / f"{one.name}.json"
        if path.exists():
            continue
        models = [subject.build(data) for subject in SUBJECTS]
        given: dict[str, Any] = {"models": models, "folder": work / "kept", "progress": False}
        labelled, unlabelled = recommend(learn, **given), recommend(learn, labels=False, **given)
        facts: dict[str, dict[str, Any]] = {row.name: {**asdict(row), "probe": row.score, "size": row.params} for row in labelled.ranking}
        for row in unlabelled.ranking:
            facts[row.name]["consistency"] = row.score
        for file in (work / "kept" / "vectors").glob("*.safetensors"):
            held = read(file)
            name = f"{held.about['model']}:{held.about['tag']}"
            if held.about["source"] == str(learn) and name in facts:
                facts[name]["logme"] = logme(np.array(held.vectors["embedding"], np.float64), [str(label) for label in held.labels])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"candidates": facts, "best": labelled.best.name if labelled.best else None}))
        print(f"{one.name}\n{labelled}\n", flush=True)


def logme(features: np.ndarray, labels: list[str]) -> float:
    """Return LogME: the mean over classes of the log evidence of a Bayesian linear model of that class, per image.

    Source:
        You et al. 2021, "LogME: Practical Assessment of Pre-trained Models for Transfer Learning", https://arxiv.org/abs/2102.11005,
        algorithm 1, with the fixed point of section 4.4.
    """
    count, width = features.shape
    left, values, _ = np.linalg.svd(features, full_matrices=False)
    sigma = values**2
    found = []
    for label in sorted(set(labels)):
        y = np.array([float(each == label) for each in labels])
        along = (left.T @ y) ** 2
        rest = max(float(y @ y - along.sum()), 0.0)
        alpha, beta, length, residual = 1.0, 1.0, 0.0, 0.0
        for _ in range(100):
            ratio = alpha / beta
            gamma = float((sigma / (sigma + ratio)).sum())
            length = float((sigma * along / (sigma + ratio) ** 2).sum())
            residual = float((along / (1 + sigma / ratio) ** 2).sum()) + rest
            alpha, beta = gamma / (length + 1e-12), (count - gamma) / (residual + 1e-12)
            if abs(alpha / beta - ratio) <= 1e-4 * ratio:
                break
        determinant = float(np.log(alpha + beta * sigma).sum()) + (width - len(sigma)) * np.log(alpha)
        evidence = width * np.log(alpha) + count * np.log(beta) - determinant - beta * residual - alpha * length - count * np.log(2 * np.pi)
        found.append(evidence / (2 * count))
    return float(np.mean(found))


def correlation(estimates: list[float], accuracies: list[float]) -> float:
    """Return Spearman's rank correlation; equal values share a rank."""
    found: Any = spearmanr(estimates, accuracies)
    return float(found.statistic)


ESTIMATES = {"probe": "linear probe (recommend)", "knn": "k-NN", "consistency": "without labels", "logme": "LogME", "size": "size"}


def report(work: Path, data: Path, sets: list[Set]) -> None:
    """Print the rank correlations and what they come from."""
    del data
    rows, everyone = [], []
    for one in sets:
        estimates = _kept(work / "estimates" / f"{one.name}.json")
        found = {s.name: _kept(work / "truth" / one.name / f"{s.name.replace(':', '-')}.json") for s in SUBJECTS}
        truth = {name: float(facts.get("accuracy", -1)) for name, facts in found.items()}
        if not estimates or min(truth.values()) < 0:
            print(f"{one.name}: not finished")
            continue
        facts = estimates["candidates"]
        for kind, names in (("all", list(truth)), ("without decoys", [s.name for s in SUBJECTS if not s.random])):
            pairs = [([facts[name][key] for name in names], [truth[name] for name in names]) for key in ESTIMATES]
            cells = [correlation(*pair) for pair in pairs]
            picked = max(truth[name] for name in names) - truth[estimates["best"]]
            rows.append((one.name, kind, len(names), cells, picked))
        everyone += [(one.name, name, facts[name], truth[name]) for name in truth]
    print(f"| set | candidates | {' | '.join(ESTIMATES.values())} | points lost by the pick |")
    print(f"|---|---|{'--:|' * (len(ESTIMATES) + 1)}")
    for name, kind, count, cells, picked in rows:
        print(f"| {name} | {count}, {kind} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {picked:.1f} |")
    for kind in ("all", "without decoys"):
        some = [cells for _, of, _, cells, _ in rows if of == kind]
        if some:
            print(f"| mean | {kind} | {' | '.join(f'{cell:.2f}' for cell in np.mean(some, axis=0))} | |")
    print("\n| set | candidate | probe % | k-NN % | without labels % | LogME | million parameters | fine-tuned % |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for one, name, fact, accuracy in sorted(everyone, key=lambda row: (row[0], -row[2]["probe"])):
        probed = f"{fact['probe']:.1f} ± {fact['error']:.1f}"
        figures = f"{fact['knn']:.1f} | {fact['consistency']:.1f} | {fact['logme']:.3f} | {fact['size'] / 1e6:.2f}"
        print(f"| {one} | {name} | {probed} | {figures} | {accuracy:.1f} |")


def picture(work: Path, data: Path, sets: list[Set]) -> None:
    """Draw docs/recommend.png: the real candidates on the last of the sets, where twenty milliseconds may be spent."""
    learn, _ = folders(work, data, sets[-1])
    models = [subject.build(data) for subject in SUBJECTS if not subject.random]
    found = recommend(learn, budget={"max_ms": 20}, models=models, folder=work / "kept", progress=False)
    print(found, found.picture(Path(__file__).parents[1] / "docs" / "recommend.png"), sep="\n")


STEPS = {"tune": tune, "estimate": estimate, "report": report, "picture": picture}


def main() -> None:
    """Do what the command line says."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("work", type=Path)
    asked.add_argument("--data", type=Path, required=True)
    asked.add_argument("--sets", default=",".join(one.name for one in SETS), help="some of the sets, with commas between them")
    asked.add_argument("step", choices=STEPS)
    given = asked.parse_args()
    STEPS[given.step](given.work, given.data, [one for one in SETS if one.name in given.sets.split(",")])


if __name__ == "__main__":
    main()
