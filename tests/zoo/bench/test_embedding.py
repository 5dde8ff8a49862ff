import time
from pathlib import Path

import numpy as np
import pytest
import torch

from zoo import ResNet18
from zoo.bench import embedding as bench
from zoo.bench import embedding_rates, photographs
from zoo.images import decode, open_source
from zoo.pretrained.records import find_record


def test_generated_photographs_are_all_different_and_of_imagenets_usual_size(tmp_path: Path) -> None:
    photographs.photographs(tmp_path, 6)
    source = open_source(tmp_path)
    assert source.classes == ["even", "odd"]
    assert len({source.read(i) for i in range(6)}) == 6
    assert {decode(source.read(i)).size for i in range(6)} == {photographs.SIZE}


def test_a_folder_is_repeated_by_links_until_a_run_is_long_enough(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(name.encode())
    source = open_source(photographs.repeated(tmp_path / "p", tmp_path / "r", 8))
    assert len(source) == 8
    assert sorted({source.read(i) for i in range(8)}) == [b"a/1.jpg", b"a/2.jpg", b"b/1.jpg"]
    assert [item.label for item in source] == ["a"] * 6 + ["b"] * 2
    with pytest.raises(ValueError, match="holds no class folders of images"):
        photographs.repeated(tmp_path / "r" / "a", tmp_path / "s", 3)


def test_a_run_is_as_long_as_was_promised_at_the_rate_that_limits() -> None:
    for decoding, computing in ((6000.0, 9000.0), (100.0, 12.0)):
        images = bench.enough(decoding, computing, 256)
        assert images % 256 == 0
        assert images / min(decoding, computing) >= bench.SECONDS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's reader leaves its files to the garbage collector
def test_timms_way_ends_with_a_vector_of_every_image_and_its_clock_begins_with_the_first_image(tmp_path: Path) -> None:
    photographs.photographs(tmp_path / "p", 5)
    model = ResNet18().eval()
    model.checkpoint = find_record("ResNet18")
    run = bench._timm_way(model, tmp_path / "p", tmp_path / "o.npy", 2, 0, torch.device("cpu"))
    begun = time.monotonic()
    rate = run()
    assert 5 / (time.monotonic() - begun) <= rate
    vectors = np.load(tmp_path / "o.npy")
    assert vectors.shape == (5, 512)
    assert np.isfinite(vectors).all()


def test_the_clock_of_anothers_data_set_begins_with_its_first_image_and_stays() -> None:
    images = bench.Clocked(["a", "b"])
    assert (len(images), images.begun.value) == (2, 0.0)
    before = time.monotonic()
    assert images[0] == "a"
    first = images.begun.value
    assert before <= first <= time.monotonic()
    assert images[1] == "b"
    assert images.begun.value == first


def test_the_decoders_own_rate_is_that_of_its_processes(tmp_path: Path) -> None:
    photographs.photographs(tmp_path, 4)
    source, device = open_source(tmp_path), torch.device("cpu")
    model = ResNet18().eval()
    model.checkpoint = find_record("ResNet18")
    plan = embedding_rates.job(model, source, 2, device)
    assert embedding_rates.guessed_decoder_rate(source, plan, 3) > 0
    begun = time.perf_counter()
    rate = embedding_rates.decoder_rate(source, plan, 0)
    assert 4 / (time.perf_counter() - begun) <= rate
