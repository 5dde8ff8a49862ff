import io
import json
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from PIL import Image
from pyarrow import parquet
from rich.console import Console

from weights.progress import count_bar
from zoo import ResNet20, trained
from zoo.embedding import Report, embed, read
from zoo.embedding.decoding import Chunk, Decoder, Decoding, _Remote
from zoo.embedding.feeding import Feeder
from zoo.embedding.flow import Meter
from zoo.embedding.shelf import Shelf
from zoo.extraction.features import features
from zoo.images import files as image_files
from zoo.images import open_source
from zoo.images.folder import Folder
from zoo.images.preprocess import preprocess
from zoo.networks.model import Model


class Deadly(Folder):
    """A folder whose 70th image ends the process that reads it, as a decoder that takes all memory is ended."""

    def __init__(self, where: Path, deadly: bool = True) -> None:
        super().__init__(str(where))
        self.deadly = deadly

    def read(self, index: int) -> bytes:
        if index == 70 and self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


PLAIN: dict[str, Any] = {"fast": False, "workers": 0, "batch_size": 16, "progress": False}


def run(model: Model | str, source: Any, out: Path, **options: Any) -> Report:
    return embed(model, source, out, **{**PLAIN, **options})


def test_every_image_has_the_vector_that_features_gives_of_the_models_own_preprocessing(
    network: Model, photos: Path, tmp_path: Path
) -> None:
    report = run(network, photos, tmp_path / "o.parquet", at=["layer1", "embedding"])
    table = parquet.read_table(tmp_path / "o.parquet")
    assert table.column_names == ["key", "label", "index", "blake3", "layer1", "embedding"]
    files = sorted(photos.rglob("*.jpg"))
    assert table["key"].to_pylist() == [path.relative_to(photos).as_posix() for path in files]
    assert table["label"].to_pylist() == [path.parent.name for path in files]
    assert table["index"].to_pylist() == list(range(120))
    assert table["blake3"].to_pylist() == [blake3(path.read_bytes()).hexdigest() for path in files]
    with torch.no_grad():
        expected = features(network, ["layer1", "embedding"])(network.preprocess(files))
    found = read(tmp_path / "o.parquet")
    assert np.allclose(found.vectors["embedding"], expected["embedding"].numpy(), atol=1e-5)
    assert np.allclose(found.vectors["layer1"], expected["layer1"].mean((2, 3)).numpy(), atol=1e-5)
    assert (report.rows, report.computed, report.resumed, report.unreadable) == (120, 120, 0, [])
    assert report.widths == {"layer1": 16, "embedding": 64}
    assert list(tmp_path.iterdir()) == [tmp_path / "o.parquet"]


def test_a_checkpoints_name_is_its_network(network: Model, photos: Path, tmp_path: Path) -> None:
    run("resnet20:cifar10", photos, tmp_path / "named.npy")
    run(network, photos, tmp_path / "built.npy")
    assert (tmp_path / "named.npy").read_bytes() == (tmp_path / "built.npy").read_bytes()


def test_what_shows_a_jobs_images_is_the_callers(network: Model, photos: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    @contextmanager
    def shown(name: str, total: int, done: int) -> Iterator[Any]:
        told.append((name, total, done))
        yield told.append

    run(network, photos, tmp_path / "o.npy", progress=shown)
    assert told[0] == ("embedding by ResNet20", 120, 0)
    assert sum(told[1:]) == 120


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_shown_on_a_terminal_only(terminal: bool) -> None:
    file = io.StringIO()
    with count_bar("embedding", 8, 2, Console(file=file, force_terminal=terminal, width=100)) as advance:
        advance(3)
    assert ("5/8" in file.getvalue()) == terminal
    assert terminal or not file.getvalue()


def test_pixels_reach_the_network_as_preprocess_would_make_them_bit_for_bit(network: Model, photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))[:8]
    record = network.checkpoint
    assert record is not None
    for channel_order in ("rgb", "bgr"):
        steps = replace(record.preprocessing, channel_order=channel_order)
        chunk = Decoder(open_source(photos), steps)[range(8)]
        feeder = Feeder(torch.nn.Identity(), steps, torch.device("cpu"), 8)
        assert torch.equal(feeder.normalise(chunk.pixels), preprocess(files, steps))


def test_pixels_go_over_the_shelf_and_hardly_anything_through_the_pipe(network: Model, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "circle", tmp_path / "p")
    files = sorted((tmp_path / "p").iterdir())
    with Image.open(files[1]) as picture:
        picture.save(files[1], "PNG")
    files[2].write_text("no image")
    with Image.open(files[3]) as picture:
        picture.resize((900, 900)).save(files[3], quality=100)
    assert network.checkpoint is not None
    for gpu in (False, True):
        decoder = Decoder(open_source(tmp_path / "p"), network.checkpoint.preprocessing, gpu=gpu)
        with Decoding(decoder, [range(8)], 1, held=1, pinned=False, polite=False) as decoding:
            shelf = decoding._shelf
            assert shelf is not None
            place = shelf.take()
            shelf.memory.fill_(255)
            told = _Remote(decoder, shelf.memory)[range(8), place]
            assert len(pickle.dumps({**told, "files": {k: v for k, v in told["files"].items() if isinstance(v, int)}})) < 2000
            found, wanted = decoding._arrived(told, shelf), decoder[range(8)]
            assert found.problems == wanted.problems
            assert np.array_equal(found.digests, wanted.digests)
            shown = [row for row in range(8) if row not in wanted.files]
            assert torch.equal(found.pixels[shown], wanted.pixels[shown])
            assert {k: v.numpy().tobytes() for k, v in found.files.items()} == {k: files[k].read_bytes() for k in wanted.files}
            assert len(found.files) == (6 if gpu else 0)
            decoding.done([found])
            assert shelf.take() == place


def test_memory_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(OSError, match=r"need 2 MiB of shared memory, and there is less \(unable .*\): take fewer with --workers"):
        Shelf(2, 2**20, False)


def test_rates_count_from_the_first_decoded_image_and_not_from_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Chunk(range(10 * i, 10 * i + 10), torch.empty(0), np.empty(0), begun=100.0 + i % 2, seconds=2.0) for i in range(4)]
    meter, report = Meter(), Report(Path("o"), workers=2)
    now = iter((108.0, 108.1, 108.2, 110.0))
    monkeypatch.setattr("zoo.embedding.flow.time.monotonic", lambda: next(now))
    for chunk in meter.watch(made):
        meter.finished(len(chunk.rows))
    meter.tell(report, 1.0, 70.0)
    assert report.preparing_s == 30.0
    assert (report.images_s, report.decoder_images_s, report.model_images_s) == (4.0, 10.0, 40.0)


def test_the_same_job_writes_the_same_bytes_whoever_decodes(network: Model, photos: Path, tmp_path: Path) -> None:
    for name, workers in (("a", 0), ("b", 0), ("c", 2)):
        run(network, photos, tmp_path / f"{name}.parquet", workers=workers)
    assert len({(tmp_path / f"{name}.parquet").read_bytes() for name in "abc"}) == 1


def test_all_formats_hold_the_same(network: Model, photos: Path, tmp_path: Path) -> None:
    for suffix in ("parquet", "npy", "safetensors"):
        run(network, photos, tmp_path / f"o.{suffix}")
        first = (tmp_path / f"o.{suffix}").read_bytes()
        run(network, photos, tmp_path / f"o.{suffix}", restart=True)
        assert (tmp_path / f"o.{suffix}").read_bytes() == first
    one, two, three = (read(tmp_path / f"o.{suffix}") for suffix in ("parquet", "npy", "safetensors"))
    for other in (two, three):
        assert (other.keys, other.labels, other.about) == (one.keys, one.labels, one.about)
        assert np.array_equal(other.index, one.index)
        assert np.array_equal(other.vectors["embedding"], one.vectors["embedding"])
    assert one.about["model"] == "ResNet20"
    assert one.about["source"] == str(photos)
    assert np.load(tmp_path / "o.npy").shape == (120, 64)


def test_an_image_that_cant_be_used_has_no_row_and_moves_no_other_number(network: Model, photos: Path, tmp_path: Path) -> None:
    run(network, photos, tmp_path / "whole.parquet")
    shutil.copytree(photos, tmp_path / "p")
    files = sorted((tmp_path / "p").rglob("*.jpg"))
    files[3].write_bytes(b"")
    files[40].write_bytes(files[40].read_bytes()[:200])
    files[119].write_text("no picture at all")
    report = run(network, tmp_path / "p", tmp_path / "o.parquet")
    assert [(e.index, e.key) for e in report.unreadable] == [(i, files[i].relative_to(tmp_path / "p").as_posix()) for i in (3, 40, 119)]
    assert "empty" in report.unreadable[0].why
    assert "cut off" in report.unreadable[1].why
    assert "no image that Pillow can read" in report.unreadable[2].why
    assert report.listed == tmp_path / "o.parquet.left-out.jsonl"
    assert [json.loads(line)["index"] for line in report.listed.read_text().splitlines()] == [3, 40, 119]
    left, whole = read(tmp_path / "o.parquet"), read(tmp_path / "whole.parquet")
    kept = [i for i in range(120) if i not in (3, 40, 119)]
    assert left.index.tolist() == kept
    assert np.array_equal(left.vectors["embedding"], whole.vectors["embedding"][kept])
    shutil.copytree(photos, tmp_path / "p", dirs_exist_ok=True)
    assert run(network, tmp_path / "p", tmp_path / "o.parquet", restart=True).listed is None
    assert not report.listed.exists()


def test_what_a_source_leaves_out_is_listed_without_an_index_and_other_files_are_counted(network: Model, tmp_path: Path) -> None:
    for seed in range(4):
        (tmp_path / "p").mkdir(exist_ok=True)
        Image.new("RGB", (40, 40), (40 * seed, 90, 90)).save(tmp_path / f"p/{seed}.avif" if seed == 3 else tmp_path / f"p/{seed}.jpg")
    (tmp_path / "p/1.jpg").write_bytes(b"")
    (tmp_path / "p/self.jpg").symlink_to(tmp_path / "p/self.jpg")
    (tmp_path / "p/notes.txt").write_text("no image")
    report = run(network, tmp_path / "p", tmp_path / "o.npy")
    assert (report.rows, report.others) == (3, {".txt": 1})
    assert [(e.key, e.index) for e in report.unreadable] == [("1.jpg", 1), ("self.jpg", None)]
    assert report.listed is not None
    assert [json.loads(line) for line in report.listed.read_text().splitlines()] == [
        {"key": "1.jpg", "index": 1, "why": "the file is empty; get it again"},
        {"key": "self.jpg", "index": None, "why": "it is a link to itself"},
    ]
    assert report.facts()["others"] == {".txt": 1}
    assert report.facts()["unreadable"][1] == {"key": "self.jpg", "index": None, "why": "it is a link to itself"}


def test_a_source_of_nothing_but_unreadable_images_gives_no_rows(network: Model, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/1.jpg").write_bytes(b"x")
    for suffix in ("parquet", "npy", "safetensors"):
        report = run(network, tmp_path / "p", tmp_path / f"o.{suffix}")
        assert (report.rows, len(report.unreadable)) == (0, 1)
        assert read(tmp_path / f"o.{suffix}").keys == []


def test_an_image_that_vanishes_is_listed(network: Model, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "p")
    source = open_source(tmp_path / "p")
    (tmp_path / "p" / source[5].key).unlink()
    assert [(e.index, "not there" in e.why) for e in run(network, source, tmp_path / "o.parquet").unreadable] == [(5, True)]


def test_dedupe_keeps_the_first_of_equal_files_over_parts(network: Model, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "p")
    files = sorted((tmp_path / "p").rglob("*.jpg"))
    for copy in (50, 110):
        files[copy].write_bytes(files[2].read_bytes())
    report = run(network, tmp_path / "p", tmp_path / "o.parquet", dedupe=True)
    first = files[2].relative_to(tmp_path / "p").as_posix()
    assert [(e.index, e.copy_of) for e in report.copies] == [(50, first), (110, first)]
    assert read(tmp_path / "o.parquet").index.tolist() == [i for i in range(120) if i not in (50, 110)]
    listed = [json.loads(line) for line in (tmp_path / "o.parquet.left-out.jsonl").read_text().splitlines()]
    assert [line["copy_of"] for line in listed] == [first, first]


def test_images_of_this_processs_memory_are_decoded_in_it(network: Model, photos: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in photos.rglob("*.jpg"):
        store.pipe(f"/embedded/{path.relative_to(photos).as_posix()}", path.read_bytes())
    try:
        report = run(network, "memory://embedded", tmp_path / "m.npy", workers=None)
        with pytest.raises(ValueError, match=r"what lies in this process's memory is decoded in it: workers=0"):
            run(network, "memory://embedded", tmp_path / "n.npy", workers=2)
    finally:
        store.rm("/embedded", recursive=True)
    run(network, photos, tmp_path / "f.npy")
    assert (report.rows, report.workers) == (120, 0)
    assert (tmp_path / "m.npy").read_bytes() == (tmp_path / "f.npy").read_bytes()


def test_a_source_whose_store_fails_stops_the_run_and_keeps_what_is_finished(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(photos.as_uri())
    whole = type(source).read

    def flaky(self: Any, index: int) -> bytes:
        if index == 70:
            raise OSError("503 from the store")
        return whole(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(type(source), "read", flaky)
        with pytest.raises(OSError, match=r"503 from the store; what is finished is kept: the same call goes on"):
            run(network, source, tmp_path / "o.npy")
    report = run(network, source, tmp_path / "o.npy")
    assert (report.resumed, report.computed, report.rows) == (64, 56, 120)


def test_fast_kernels_give_the_plain_ones_vectors_and_the_same_bytes_again(network: Model, photos: Path, tmp_path: Path) -> None:
    run(network, photos, tmp_path / "plain.npy")
    for name in ("a", "b"):
        run(network, photos, tmp_path / f"{name}.npy", fast=True)
    plain, fast = np.load(tmp_path / "plain.npy"), np.load(tmp_path / "a.npy")
    assert np.abs(fast - plain).max() < 1e-3 * np.abs(plain).max()
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_the_report_says_which_limits() -> None:
    report = Report(Path("o"), images_s=95.0, decoder_images_s=100.0, model_images_s=400.0)
    assert report.limit == "decoding limits: 0.95 of the decoder's rate, 0.24 of the network's"
    report.decoder_images_s = 500.0
    report.model_images_s = 100.0
    assert report.limit == "the network limits: 0.95 of its rate, 0.19 of the decoder's"
    assert Report(Path("o")).limit == ""


def test_a_network_that_computes_nan_stops_at_the_image_and_names_it(photos: Path, tmp_path: Path) -> None:
    broken = trained(ResNet20)
    with torch.no_grad():
        next(broken.parameters())[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"embedding of circle/000.jpg is NaN or infinite"):
        run(broken, photos, tmp_path / "o.npy")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("o.csv", {}, r"the output is a .parquet, .npy, .safetensors file, got 'o.csv'"),
        ("o.npy", {"at": ["layer1", "layer2"]}, "a .npy file holds one tap's vectors, and layer1, layer2 are several"),
        ("none/o.npy", {}, "there is no folder .*none; make it first"),
        ("o.npy", {"batch_size": 0}, "batch_size is at least 1, got 0"),
        ("o.npy", {"workers": -1}, "workers is the number of decoding processes, got -1; 0 or more"),
        ("o.npy", {"decode": "tpu"}, 'decode is "cpu" or "gpu"'),
        ("o.npy", {"decode": "gpu", "device": "cpu"}, "needs the network on a GPU too"),
        ("o.npy", {"engine": "spark"}, 'the engine is "local" or "ray"'),
        ("o.npy", {"at": "layer9"}, "layer9"),
    ],
)
def test_what_cant_work_is_said_before_anything_is_computed(
    network: Model, photos: Path, tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(network, photos, tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_network_without_a_record_or_without_a_crop_is_refused(network: Model, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"this ResNet20 is untrained.*use trained\(ResNet20\)"):
        run(ResNet20(), photos, tmp_path / "o.npy")
    with pytest.raises(TypeError, match=r"takes a network that knows its preprocessing, and Linear is no network of the zoo: trained\("):
        run(torch.nn.Linear(3, 3), photos, tmp_path / "o.npy")  # pyright: ignore[reportArgumentType]
    bare = trained(ResNet20)
    assert bare.checkpoint is not None
    bare.checkpoint = replace(bare.checkpoint, preprocessing=replace(bare.checkpoint.preprocessing, crop=None))
    with pytest.raises(ValueError, match=r"needs preprocessing that crops"):
        run(bare, photos, tmp_path / "o.npy")


def test_a_decoding_process_that_dies_ends_the_run_with_what_to_do(network: Model, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"a decoding process died.*take fewer with --workers"):
        run(network, Deadly(photos), tmp_path / "o.npy", workers=1)
    assert run(network, Deadly(photos, deadly=False), tmp_path / "o.npy").rows == 120


def test_an_outage_of_the_store_behind_a_local_list_ends_the_run_and_loses_no_row(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fsspec.filesystem("memory")
    files = sorted(photos.rglob("*.jpg"))[:40]
    for file in files:
        store.pipe(f"/listed/{file.name}", file.read_bytes())
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"memory://listed/{file.name}\n" for file in files))
    right = type(store).cat_file

    def out(*args: Any, **kwargs: Any) -> bytes:
        raise ConnectionError("no route")

    monkeypatch.setattr(image_files, "PAUSE_S", 0)
    try:
        monkeypatch.setattr(type(store), "cat_file", out)
        with pytest.raises(OSError, match="can't be read after 4 attempts: no route"):
            embed(network, listing, tmp_path / "o.npy", fast=False, workers=0, progress=False)
        monkeypatch.setattr(type(store), "cat_file", right)
        report = embed(network, listing, tmp_path / "o.npy", fast=False, workers=0, progress=False)
    finally:
        store.rm("/listed", recursive=True)
    assert (report.rows, report.unreadable) == (40, [])


def test_the_index_of_an_array_takes_nobodys_name(network: Model, photos: Path, tmp_path: Path) -> None:
    listing = tmp_path / "pics.jsonl"
    listing.write_text("".join(f'{{"url": "{file}", "label": "x"}}\n' for file in sorted(photos.rglob("*.jpg"))[:3]))
    before = listing.read_text()
    embed(network, listing, tmp_path / "pics.npy", fast=False, workers=0, progress=False)
    assert listing.read_text() == before
    assert len(read(tmp_path / "pics.npy").keys) == 3


def test_a_list_of_urls_that_nothing_here_can_read_says_what_to_install(network: Model, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("s3://bucket/1.jpg\ns3://bucket/2.jpg\n")
    with pytest.raises(ValueError, match=r"reading s3://bucket/2.jpg needs s3fs, which is not installed: pip install s3fs"):
        run(network, tmp_path / "list.txt", tmp_path / "o.npy")


class Broken(Folder):
    def read(self, index: int) -> NoReturn:
        raise ValueError("row group 3 is damaged")


def test_a_source_that_breaks_in_a_process_is_one_message(network: Model, photos: Path, tmp_path: Path) -> None:
    source = Broken(str(photos))
    with pytest.raises(OSError, match="row group 3 is damaged; what is finished is kept"):
        run(network, source, tmp_path / "o.npy")
