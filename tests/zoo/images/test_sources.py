import io
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from zoo.images import BadImage, Item, Source, decode, open_source
from zoo.images import files as files_module
from zoo.images.preprocess import open_image


def jpeg(seed: int, **options: object) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def folder(root: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(number))
    return root


def shard(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def keys(source: Source) -> list[str]:
    return [item.key for item in source]


def test_a_folder_is_sorted_by_the_parts_of_its_paths_and_its_top_folders_are_the_labels(tmp_path: Path) -> None:
    names = ["dog/b.jpg", "cat/10.jpg", "cat/9.JPEG", "cat/deep/er/1.png", "cat-2/0.jpg", "loose.jpg"]
    folder(tmp_path, names)
    (tmp_path / "cat/notes.txt").write_text("no image")
    (tmp_path / "cat/.hidden.jpg").write_bytes(jpeg(0))
    (tmp_path / "cow").mkdir()
    (tmp_path / "__MACOSX/cat").mkdir(parents=True)
    (tmp_path / "__MACOSX/cat/10.jpg").write_bytes(b"what macOS adds")
    source = open_source(tmp_path)
    assert keys(source) == ["cat/10.jpg", "cat/9.JPEG", "cat/deep/er/1.png", "cat-2/0.jpg", "dog/b.jpg", "loose.jpg"]
    assert [item.label for item in source] == ["cat", "cat", "cat", "cat-2", "dog", None]
    assert source.classes == ["cat", "cat-2", "dog"]
    assert source.empty == ["cow"]
    assert [source.read(i) for i in range(6)] == [jpeg(names.index(key)) for key in keys(source)]
    assert source[3] == Item("cat-2/0.jpg", "cat-2")
    assert len(source) == 6


def test_a_circle_of_links_ends_and_a_linked_folder_is_followed(tmp_path: Path) -> None:
    folder(tmp_path / "real", ["a/1.jpg"])
    (tmp_path / "real/a/round").symlink_to(tmp_path / "real")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    assert keys(open_source(tmp_path)) == ["linked/a/1.jpg", "real/a/1.jpg"]


def test_the_fingerprint_follows_names_sizes_and_times(tmp_path: Path) -> None:
    folder(tmp_path, ["a/1.jpg", "a/2.jpg"])
    first = open_source(tmp_path).fingerprint
    assert open_source(tmp_path).fingerprint == first
    (tmp_path / "a/2.jpg").write_bytes(jpeg(7) + b"x")
    changed = open_source(tmp_path).fingerprint
    (tmp_path / "a/2.jpg").rename(tmp_path / "a/3.jpg")
    assert len({first, changed, open_source(tmp_path).fingerprint}) == 3


def test_tar_shards_follow_each_other_and_take_labels_from_cls_and_json(tmp_path: Path) -> None:
    shard(tmp_path / "s-0000.tar", {"000.jpg": jpeg(0), "000.cls": b"7", "001.cls": b"8", "001.jpg": jpeg(1), "002.jpg": jpeg(2)})
    told = {"label": "cat", "width": 3}
    shard(tmp_path / "s-0001.tar", {"000.json": json.dumps(told).encode(), "000.seg.png": jpeg(3), "dog/x.jpg": jpeg(4), "a.txt": b"-"})
    expected = [
        Item("s-0000.tar/000.jpg", "7"),
        Item("s-0000.tar/001.jpg", "8"),
        Item("s-0000.tar/002.jpg", None),
        Item("s-0001.tar/000.seg.png", "cat"),
        Item("s-0001.tar/dog/x.jpg", "dog"),
    ]
    for where in ("s-{0000..0001}.tar", "s-*.tar", "s-{0000,0001}.tar", ""):
        source = open_source(tmp_path / where)
        assert list(source) == expected
        assert [source.read(i) for i in (4, 0, 3, 1, 2)] == [jpeg(i) for i in (4, 0, 3, 1, 2)]
    assert pickle.loads(pickle.dumps(source)).read(4) == jpeg(4)


def test_shards_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        shard(tmp_path / part / "0.tar", {"1.jpg": jpeg(0)})
    assert keys(open_source(tmp_path)) == ["test/0.tar/1.jpg", "train/0.tar/1.jpg"]


def test_an_image_twice_in_a_tar_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for _ in range(2):
            member = tarfile.TarInfo("1.jpg")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    with pytest.raises(ValueError, match=r"a.tar holds a.tar/1.jpg twice"):
        open_source(tmp_path / "a.tar")


def test_links_in_a_tar_lead_to_their_files_and_what_macos_adds_is_no_image(tmp_path: Path) -> None:
    def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        made.type, made.linkname = kind, target
        return made

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(member("cat/later.jpg", tarfile.SYMTYPE, "../dog/1.jpg"))
        for name, data in (("dog/1.jpg", jpeg(1)), ("dog/._1.jpg", b"no image"), ("__MACOSX/dog/1.jpg", b"no image"), ("x.cls", b"7")):
            made = member(name)
            made.size = len(data)
            archive.addfile(made, io.BytesIO(data))
        archive.addfile(member("cat/hard.jpg", tarfile.LNKTYPE, "dog/1.jpg"))
        archive.addfile(member("cat/out.jpg", tarfile.SYMTYPE, "/etc/passwd"))
        archive.addfile(member("cat/round.jpg", tarfile.SYMTYPE, "round.jpg"))
        archive.addfile(member("y.cls", tarfile.LNKTYPE, "x.cls"))
        archive.addfile(member("y.jpg", tarfile.LNKTYPE, "dog/1.jpg"))
    source = open_source(tmp_path / "a.tar")
    short = {item.key.removeprefix("a.tar/"): item.label for item in source}
    assert short == {
        "cat/later.jpg": "cat",
        "dog/1.jpg": "dog",
        "cat/hard.jpg": "cat",
        "cat/out.jpg": "cat",
        "cat/round.jpg": "cat",
        "y.jpg": "7",
    }
    for index in (0, 1, 2, 5):
        assert source.read(index) == jpeg(1)
    for index in (3, 4):
        with pytest.raises(FileNotFoundError, match=r"is a link to a file that is not in .*a.tar"):
            source.read(index)


def test_a_name_in_a_tar_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        made = tarfile.TarInfo("k\xe4se/1.jpg")
        made.size = len(jpeg(1))
        archive.addfile(made, io.BytesIO(jpeg(1)))
    source = open_source(tmp_path / "a.tar")
    assert list(source) == [Item("a.tar/k\\xe4se/1.jpg", "k\\xe4se")]
    source[0].key.encode()
    assert source.read(0) == jpeg(1)


def test_a_folder_of_pictures_and_shards_is_not_half_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, ["preview.jpg"])
    for number in range(2):
        shard(tmp_path / f"s-{number}.tar", {f"{number}.jpg": jpeg(number)})
    with pytest.raises(
        ValueError, match=r"holds 1 image files and 2 .tar or .parquet files \(s-0.tar, s-1.tar\).*name the shards, '.*/\*\*/\*.tar'"
    ):
        open_source(tmp_path)
    assert len(open_source(f"{tmp_path}/**/*.tar")) == 2
    folder(tmp_path, ["a/1.jpg", "a/2.jpg"])
    assert len(open_source(tmp_path)) == 3
    assert "holds 3 images beside 2 .tar or .parquet files" in caplog.text


def test_damaged_and_compressed_tars_say_what_they_are(tmp_path: Path) -> None:
    whole = shard(tmp_path / "whole.tar", {"1.jpg": jpeg(0), "2.jpg": jpeg(1)}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:1800])
    with pytest.raises(ValueError, match=r"cut.tar (is cut off|can't be read as a tar file)"):
        open_source(tmp_path / "cut.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        archive.add(tmp_path / "whole.tar")
    with pytest.raises(ValueError, match=r"packed.tar can't be read as a tar file: it is compressed.*unpack it once"):
        open_source(tmp_path / "packed.tar")
    shard(tmp_path / "bad.tar", {"1.jpg": jpeg(0), "1.json": b"{"})
    with pytest.raises(ValueError, match=r"1.json in .*bad.tar is no JSON"):
        open_source(tmp_path / "bad.tar")


def test_a_tar_that_shrinks_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", {"1.jpg": jpeg(0)})
    source = open_source(path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(OSError, match=r"bytes early; it was cut off since it was opened"):
        source.read(0)


def test_a_list_keeps_its_order_and_takes_paths_urls_and_json(tmp_path: Path) -> None:
    folder(tmp_path, ["p/1.jpg", "p/2.jpg"])
    url = (tmp_path / "p/2.jpg").as_uri()
    (tmp_path / "list.jsonl").write_text(f'{{"url": "{url}", "label": 3}}\n\n{{"path": "p/1.jpg"}}\n{tmp_path}/p/2.jpg\n')
    source = open_source(tmp_path / "list.jsonl")
    assert list(source) == [Item(url, "3"), Item("p/1.jpg", None), Item(f"{tmp_path}/p/2.jpg", None)]
    assert [source.read(i) for i in range(3)] == [jpeg(1), jpeg(0), jpeg(1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg\nb.jpg\na.jpg\n", "lists a.jpg twice"),
        ('{"url": 3}\n', "line 1 names no image: it needs one of url"),
        ('a.jpg\n{"url"\n', "line 2 is no JSON"),
        ("\n", "holds no images"),
    ],
)
def test_a_list_that_is_wrong_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "list.txt")


def test_every_kind_of_source_opens_by_url(tmp_path: Path) -> None:
    folder(tmp_path / "f", ["a/1.jpg", "b/2.jpg"])
    shard(tmp_path / "s-0.tar", {"1.jpg": jpeg(0)})
    shard(tmp_path / "s-1.tar", {"2.jpg": jpeg(1)})
    store = fsspec.filesystem("memory")
    for name in ("f/a/1.jpg", "f/b/2.jpg", "s-0.tar", "s-1.tar"):
        store.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
    store.pipe("/bucket/list.txt", b"memory://bucket/f/a/1.jpg\nf/b/2.jpg\n")
    try:
        for root in (tmp_path.as_uri(), "memory://bucket"):
            found = open_source(f"{root}/f")
            assert list(found) == [Item("a/1.jpg", "a"), Item("b/2.jpg", "b")]
            assert [found.read(0), found.read(1)] == [jpeg(0), jpeg(1)]
            tars = open_source(f"{root}/s-*.tar")
            assert keys(tars) == ["s-0.tar/1.jpg", "s-1.tar/2.jpg"]
            assert keys(open_source(f"{root}/s-{{0..1}}.tar")) == keys(tars)
            assert [tars.read(0), tars.read(1)] == [jpeg(0), jpeg(1)]
            assert found.shared is not root.startswith("memory")
        listed = open_source("memory://bucket/list.txt")
        assert [listed.read(0), listed.read(1)] == [jpeg(0), jpeg(1)]
    finally:
        store.rm("/bucket", recursive=True)


def test_a_remote_read_is_tried_again_and_then_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/flaky/1.jpg", jpeg(0))
    source = open_source("memory://flaky")
    failures = [RuntimeError("503"), RuntimeError("503")]
    whole = type(store).cat_file

    def cat_file(self: object, *args: object, **options: object) -> bytes:
        if failures:
            raise failures.pop()
        return whole(self, *args, **options)

    monkeypatch.setattr(type(store), "cat_file", cat_file)
    monkeypatch.setattr(files_module, "PAUSE_S", 0.0)
    try:
        assert source.read(0) == jpeg(0)
        failures += [RuntimeError("503")] * 9
        with pytest.raises(OSError, match=r"flaky/1.jpg can't be read after 4 attempts: 503"):
            source.read(0)
    finally:
        failures.clear()
        store.rm("/flaky", recursive=True)


def test_what_is_no_source_says_what_one_is(tmp_path: Path) -> None:
    folder(tmp_path, ["a/1.jpg"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(FileNotFoundError, match=r"nowhere' is not there; a source is a folder of images"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"s-1.tar, one of .*, is no file"):
        open_source(tmp_path / "{a/1.jpg,s-1.tar}")
    with pytest.raises(ValueError, match=r"1.jpg is one image; a source is"):
        open_source(tmp_path / "a/1.jpg")
    with pytest.raises(ValueError, match=r"empty' holds no images \(.jpg"):
        open_source(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"x.zip is no source"):
        open_source(tmp_path / "x.zip")
    with pytest.raises(ValueError, match=r"nothing-knows-this://b is not read: a URL of images begins with one of"):
        open_source("nothing-knows-this://b")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_urls_whose_package_is_missing_name_it_when_the_list_is_opened(tmp_path: Path, scheme: str, package: str) -> None:
    (tmp_path / "list.jsonl").write_text(f'{{"url": "{scheme}://bucket/1.jpg"}}\n')
    with pytest.raises(ValueError, match=rf"reading {scheme}://bucket/1.jpg needs {package}, .*: pip install {package}"):
        open_source(tmp_path / "list.jsonl")


def test_decoding_bytes_gives_what_opening_the_file_gives(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for data in (jpeg(0), jpeg(1, exif=exif)):
        (tmp_path / "a.jpg").write_bytes(data)
        assert np.array_equal(np.asarray(decode(data)), np.asarray(open_image(tmp_path / "a.jpg")))
    for data, why in ((b"", "empty"), (b"no image", "no image that Pillow can read"), (jpeg(0)[:300], "cut off or damaged")):
        with pytest.raises(BadImage, match=f"x.jpg: .*{why}"):
            decode(data, "x.jpg")
