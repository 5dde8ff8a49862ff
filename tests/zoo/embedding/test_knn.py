import json
from pathlib import Path

import numpy as np
import pytest

from zoo.embedding import Embeddings, embed, knn, nearest, read
from zoo.networks.model import Model


def embeddings(vectors: np.ndarray, labels: list[str | None], name: str = "made") -> Embeddings:
    keys = [f"{i}.jpg" for i in range(len(labels))]
    return Embeddings(keys, labels, np.arange(len(labels)), {"embedding": vectors.astype(np.float32)}, {}, Path(name))


def clusters(count: int, spread: float, seed: int = 0, classes: int = 3, width: int = 8) -> Embeddings:
    drawn = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    y = np.arange(count) % classes
    return embeddings(centres[y] + drawn.normal(scale=spread, size=(count, width)), [f"class {i}" for i in y])


def test_separate_clusters_are_told_apart_and_noise_is_not() -> None:
    clear = knn(clusters(150, 0.05))
    assert (clear.knn, clear.linear) == (100, 100)
    assert (clear.images, clear.classes, clear.k) == (150, 3, 20)
    assert clear.chance == pytest.approx(100 / 3)
    drawn = np.random.default_rng(1)
    noise = knn(embeddings(drawn.normal(size=(600, 8)), [str(i % 3) for i in range(600)]))
    assert noise.knn < 45
    assert noise.linear is not None
    assert noise.linear < 45


def test_the_vote_is_that_of_a_loop_over_all_other_images() -> None:
    made = clusters(60, 1.0)
    x = made.vectors["embedding"] / np.linalg.norm(made.vectors["embedding"], axis=1, keepdims=True)
    right = 0
    for i in range(60):
        similar = x @ x[i]
        similar[i] = -np.inf
        votes: dict[str, float] = {}
        for j in np.argsort(-similar)[:7]:
            votes[str(made.labels[j])] = votes.get(str(made.labels[j]), 0) + float(np.exp(similar[j] / 0.07))
        right += max(votes, key=lambda label: votes[label]) == made.labels[i]
    assert knn(made, k=7, linear=False).knn == pytest.approx(100 * right / 60)


def test_no_image_votes_for_itself() -> None:
    alternating = embeddings(np.eye(4)[[0, 0, 1, 1, 2, 2]], ["a", "b"] * 3)  # each image's only like is of the other class
    assert knn(alternating, k=1, linear=False).knn == 0


def test_the_same_question_has_the_same_answer() -> None:
    made = clusters(200, 1.5)
    assert knn(made) == knn(made)


def test_test_images_are_measured_and_others_learnt_from() -> None:
    result = knn(clusters(150, 0.05), test=clusters(30, 0.05, seed=7))
    assert (result.images, result.knn, result.linear) == (30, 100, 100)
    assert result.how.startswith("learnt from 150 images, measured on 30 others")


@pytest.mark.parametrize("suffix", ["json", "tsv", "csv"])
def test_labels_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    made = clusters(90, 0.05)
    told = dict(zip(made.keys, made.labels, strict=True))
    made.labels = [None] * 90
    file = tmp_path / f"labels.{suffix}"
    separator = "\t" if suffix == "tsv" else ","
    text = json.dumps(told) if suffix == "json" else "".join(f"{key}{separator}{label}\n" for key, label in told.items())
    file.write_text(text)
    assert knn(made, file).knn == 100
    told.pop("3.jpg")
    assert knn(made, {k: str(v) for k, v in told.items()}).images == 89


def test_what_cant_be_measured_says_why(tmp_path: Path) -> None:
    made = clusters(30, 0.1)
    with pytest.raises(ValueError, match=r"labels must be of two classes at least, and every image of made is 'x'"):
        knn(embeddings(np.eye(4), ["x"] * 4))
    with pytest.raises(ValueError, match=r"0 of 4 images of made have a label; give them with --labels FILE"):
        knn(embeddings(np.eye(4), [None] * 4))
    with pytest.raises(ValueError, match=r"none of its keys is like '0.jpg'"):
        knn(made, {"cat.jpg": "cat"})
    with pytest.raises(ValueError, match=r"no 'layer1' in it"):
        knn(made, at="layer1")
    with pytest.raises(ValueError, match=r"k is at least 1 and folds at least 2"):
        knn(made, k=0)
    with pytest.raises(ValueError, match=r"test has labels that made has not: other"):
        knn(made, test=embeddings(np.eye(8)[:2], ["class 0", "other"], "test"))
    with pytest.raises(ValueError, match=r"vectors of test have 4 numbers, those of made 8"):
        knn(made, test=embeddings(np.eye(4)[:2], ["class 0", "class 1"], "test"))
    with pytest.raises(FileNotFoundError, match="labels are in one of key, tab or comma"):
        knn(made, tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("a,b\nnothing\n")
    with pytest.raises(ValueError, match=r"bad.csv, line 2: expected a key, a tab or comma, and a label; got 'nothing'"):
        knn(made, tmp_path / "bad.csv")
    for text, why in (("{", "is no JSON"), ("[]", "holds no {key: label}")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=why):
            knn(made, tmp_path / "bad.json")


def test_vectors_of_other_weights_are_not_compared() -> None:
    ours, theirs = clusters(30, 0.1), clusters(30, 0.1)
    ours.about["weights"], theirs.about["weights"] = "1" * 64, "2" * 64
    with pytest.raises(ValueError, match="computed with other weights"):
        knn(ours, test=theirs, linear=False)


def test_a_file_stands_for_what_was_written_into_it(network: Model, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "vectors.safetensors"
    embed(network, photos, file, fast=False, workers=0, progress=False)
    assert knn(str(file)) == knn(read(file))
    assert knn(file, test=file) == knn(read(file), test=read(file))
    one = sorted(photos.rglob("*.jpg"))[7]
    found = nearest(file, network, one, k=3)
    assert found == nearest(read(file), network, one, k=3)
    assert found[0].key == one.relative_to(photos).as_posix()
    with pytest.raises(FileNotFoundError, match="zoo embed"):
        nearest(tmp_path / "none.parquet", network, one)
    with pytest.raises(TypeError, match="the file that embed"):
        knn(np.zeros((3, 4)))  # pyright: ignore[reportArgumentType]
