from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from zoo.images import BadImage, decode, open_source
from zoo.recommendation.pictures import InMemory, drawn, opened


def test_a_folder_brings_its_labels_and_its_train_part_is_taken(photos: Path, tmp_path: Path) -> None:
    found = opened(photos, None, 100)
    assert Counter(found.labels) == {"circle": 10, "square": 10, "stripes": 10}
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(photos)
    assert opened(tmp_path, None, 100).asked == 30


def test_images_of_a_program_are_as_those_of_files(photos: Path) -> None:
    path = sorted((photos / "circle").iterdir())[0]
    pixels = np.asarray(decode(path.read_bytes()))
    source = InMemory([path, path.read_bytes(), decode(path.read_bytes()), pixels])
    assert all((np.asarray(decode(source.read(i))) == pixels).all() for i in range(4))
    assert not source.shared
    assert source.fingerprint == InMemory([path, path.read_bytes(), decode(path.read_bytes()), pixels]).fingerprint
    assert source.fingerprint != InMemory([path, path, path, path]).fingerprint
    with pytest.raises(ValueError, match="image 1 of the list can't be used"):
        InMemory([pixels, 3.0])


def test_labels_are_one_for_each_image_or_known_by_key(photos: Path, tmp_path: Path) -> None:
    source = open_source(photos)
    assert opened(source, np.arange(30) % 2, 100).labels == [str(i % 2) for i in range(30)]
    told = {item.key: "x" if number % 2 else "y" for number, item in enumerate(source)}
    told.pop(source[0].key)
    found = opened(source, told, 100).labels
    assert found is not None
    assert found[:3] == [None, "x", "y"]
    file = tmp_path / "labels.csv"
    file.write_text("".join(f"{key},{label}\n" for key, label in told.items()))
    assert opened(source, file, 100).labels == found
    assert opened(source, False, 100).labels is None
    with pytest.raises(ValueError, match="there are 30 images and 29 labels; give one label for each image"):
        opened(source, ["a"] * 29, 100)
    with pytest.raises(ValueError, match="none of the labels' keys is an image of"):
        opened(source, {"no.png": "x"}, 100)
    with pytest.raises(TypeError, match="labels are a list"):
        opened(source, 3, 100)


def test_images_that_cant_be_any_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no images in the list"):
        opened([], None, 100)
    with pytest.raises(TypeError, match="images are a folder"):
        opened(3, None, 100)
    with pytest.raises(BadImage):
        decode(InMemory([b"nothing"]).read(0))


def test_of_many_images_each_class_keeps_its_share() -> None:
    labels = ["a"] * 800 + ["b"] * 190 + ["c"] * 12
    chosen = drawn(labels, 100)
    assert Counter(labels[i] for i in chosen) == {"a": 72, "b": 18, "c": 10}
    assert chosen == sorted(chosen) == drawn(labels, 100)


@pytest.mark.parametrize(("classes", "most", "folds", "kept", "least"), [(1000, 2000, 2, 1000, 2), (300, 2000, 5, 300, 6)])
def test_of_many_classes_each_has_fewer_than_ten_images_rather_than_all_too_many(
    classes: int, most: int, folds: int, kept: int, least: int
) -> None:
    counts = Counter(index % classes for index in drawn([str(i % classes) for i in range(13 * classes)], most, folds))
    assert (sum(counts.values()), len(counts), min(counts.values())) == (most, kept, least)


@pytest.mark.parametrize(("most", "kept"), [(2000, 200), (300, 30)])
def test_of_classes_too_many_for_the_folds_some_are_drawn_whole(most: int, kept: int) -> None:
    counts = Counter(index % 1000 for index in drawn([str(i % 1000) for i in range(13_000)], most, 5))
    assert Counter(counts.values()) == {10: kept}


def test_images_without_a_label_are_no_class_that_keeps_ten() -> None:
    labels = [None] * 12 + [str(i % 10) for i in range(2000)]
    counts = Counter(labels[index] for index in drawn(labels, 100, 5))
    assert counts == {str(i): 10 for i in range(10)}


def test_a_part_of_a_source_reads_the_images_that_it_names(photos: Path) -> None:
    found = opened(photos, np.arange(30) // 15, 24)
    assert (len(found.source), found.asked) == (24, 30)
    assert found.labels is not None
    assert Counter(found.labels) == {"0": 12, "1": 12}
    assert (found.fewer, found.left) == (0, 0)
    few = opened(photos, None, 12, 3)
    assert (len(few.source), few.fewer, few.left) == (12, 3, 0)
    some = opened(photos, None, 12, 5)
    assert (len(some.source), some.fewer, some.left) == (12, 2, 1)
    assert all(found.source.read(i) == (photos / found.source[i].key).read_bytes() for i in range(24))
