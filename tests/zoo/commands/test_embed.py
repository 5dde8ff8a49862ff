import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo import ResNet32, embedding
from zoo.commands import app as cli
from zoo.embedding import nearest, read
from zoo.embedding.report import Report
from zoo.networks.model import Model
from zoo.prediction import contact_sheet

FAST = ["--no-fast", "--workers", "0", "--batch-size", "16"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    out = tmp_path_factory.mktemp("embedded") / "o.parquet"
    assert cli.main(["embed", str(photos), "--model", "ResNet20", "-o", str(out), *FAST, "-q"]) == 0
    return out


def test_embed_tells_what_it_wrote_and_how_fast(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embed", str(photos), "-m", "ResNet20", "-o", str(tmp_path / "o.npy"), "--at", "layer2", *FAST]) == 0
    shown = capsys.readouterr().out
    assert "120 rows of layer2 (32)" in shown
    seconds, figure = r"[\d,.]+ s", r"[\d,]+"
    why = rf"^120 images embedded in {seconds} \({seconds} preparing; {figure}/s then, limited by (JPEG decoding|the network)\)$"
    assert re.search(why, shown, re.MULTILINE)
    assert f"wrote '{tmp_path / 'o.npy'}': 120 rows of layer2 (32)" in shown
    assert cli.main(["embed", str(photos), "-m", "ResNet20", "-o", str(tmp_path / "p.npy"), "--json", *FAST]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["widths"], told["unreadable"]) == (120, {"embedding": 64}, [])


def test_unreadable_images_are_a_warning_and_an_error_when_strict(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(photos / "circle", tmp_path / "p")
    bad = sorted((tmp_path / "p").iterdir())[4]
    bad.write_text("no image")
    command = ["embed", str(tmp_path / "p"), "-m", "ResNet20", "-o", str(tmp_path / "o.npy"), *FAST]
    assert cli.main(command) == 0
    shown = capsys.readouterr().err
    assert f"1 image can't be used, without a row:\n  {bad.name}: the file is no image that Pillow can read" in shown
    assert "o.npy.left-out.jsonl" in shown
    assert cli.main([*command, "--restart", "--strict"]) == 1


def test_mistakes_are_one_message_and_a_code(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "o.npy")
    for arguments, code, message in (
        (["embed", str(tmp_path / "none"), "-m", "ResNet20", "-o", out], 3, "is not there; a source is"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--decode", "tpu"], 2, "cpu, gpu, not 'tpu'"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--engine", "spark"], 2, "local, ray, not 'spark'"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--dtype", "int4"], 2, "float32, bfloat16, float16, int8, not 'int4'"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--dtype", "int8"], 2, "it needs --calibration DATA, 64 images or more"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--calibration", str(photos)], 2, "it goes with --dtype int8"),
        (["embed", str(photos), "-m", "ResNet20", "-o", out, "--tolerance", "0.1"], 2, "it goes with --dtype int8"),
        (["embed", str(photos), "-m", "ResNet20", "-o", str(tmp_path / "o.csv")], 2, "the output is a .parquet"),
        (["knn", out], 3, "o.npy is not there; zoo embed DATA"),
    ):
        assert cli.main(arguments) == code
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_folder_is_an_output_with_ray_and_a_file_without(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the cluster's part stood in for: only what is refused before anything is computed is asked here."""
    monkeypatch.setattr(embedding, "embed", lambda _network, _data, path, _at, **_options: Report(path))
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    command = ["embed", str(photos), "-m", "ResNet20", "-q", "-o"]
    assert cli.main([*command, str(tmp_path / "there"), "--engine", "ray"]) == 0
    assert cli.main([*command, str(tmp_path / "file"), "--engine", "ray"]) == 1
    assert "file' can't be made" in capsys.readouterr().err
    (tmp_path / "there.npy").mkdir()
    assert cli.main([*command, str(tmp_path / "there.npy")]) == 1
    assert "it is a folder; name a file in it" in capsys.readouterr().err


def test_a_messy_folder_is_embedded_and_all_of_it_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    (folder / "cat").mkdir(parents=True)
    for name in ("1.jpg", "2.avif", "3.png"):
        Image.new("RGB", (40, 40), "red").save(folder / "cat" / name)
    (folder / "cat/eps.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    (folder / "cat/self.jpg").symlink_to(folder / "cat/self.jpg")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "cat/pipe.jpg")
    for name in ("a.txt", "b.txt", "c.json"):
        (folder / name).write_text("-")
    command = ["embed", str(folder), "-m", "ResNet20", *FAST]
    assert cli.main([*command, "-o", str(tmp_path / "o.npy")]) == 0
    printed = capsys.readouterr()
    assert "3 rows of embedding" in printed.out
    assert "left alone 3 other files: 2 .txt, 1 .json" in printed.out
    said = " ".join(printed.err.split())
    assert "4 images can't be used, without a row: cat/eps.jpg: the file is EPS or PostScript, which is not decoded" in said
    assert "cat/pipe.jpg: it is a pipe, a socket or a device, which is never opened" in said
    assert "loop: it is a link to itself" in said
    assert len((tmp_path / "o.npy.left-out.jsonl").read_text().splitlines()) == 4
    assert cli.main([*command, "-o", str(tmp_path / "s.npy"), "--strict", "-q"]) == 1


@pytest.mark.parametrize("command", [["predict"], ["search", "EMBEDDED"]])
def test_a_pipe_or_an_eps_that_is_called_an_image_is_refused(
    command: list[str], embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "eps.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    words = [str(embedded) if word == "EMBEDDED" else word for word in command]
    for name, why in (
        ("pipe.jpg", "it is a pipe, a socket or a device, which is never opened"),
        ("eps.jpg", "the file is EPS or PostScript, which is not decoded"),
    ):
        assert cli.main([*words, str(tmp_path / name)]) == 1
        assert why in " ".join(capsys.readouterr().err.split())


def test_search_finds_the_image_itself_first_and_draws_a_sheet(
    embedded: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = photos / "square/004.jpg"
    command = ["search", str(embedded), str(asked), "-k", "5"]
    assert cli.main([*command, "--picture", str(tmp_path / "s.png")]) == 0
    shown = capsys.readouterr().out
    assert "square/004.jpg" in shown
    assert "cosine of embedding vectors, ResNet20, among 120 images" in shown
    with Image.open(tmp_path / "s.png") as sheet:
        assert sheet.format == "PNG"
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert found[0]["key"] == "square/004.jpg"
    assert found[0]["similarity"] == pytest.approx(1, abs=1e-5)
    assert len(found) == 5
    assert [f["similarity"] for f in found] == sorted((f["similarity"] for f in found), reverse=True)


def test_a_cosine_is_called_a_cosine_in_the_picture_too(
    embedded: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(contact_sheet, "write", lambda _draw, _x, _y, text, *_: texts.append(text))
    assert cli.main(["search", str(embedded), str(photos / "square/004.jpg"), "-k", "3", "--picture", str(tmp_path / "s.png")]) == 0
    assert texts[0] == "most like 004.jpg, by the cosine of their vectors"
    assert "cosine 1.000" in texts
    assert sum(bool(re.fullmatch(r"cosine -?\d\.\d{3}", text)) for text in texts) == 3
    assert not any("%" in text for text in texts)


def test_a_sheet_of_images_that_moved_says_how_to_find_them(
    photos: Path, network: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photos, tmp_path / "p")
    out = tmp_path / "o.safetensors"
    assert cli.main(["embed", str(tmp_path / "p"), "-m", "ResNet20", "-o", str(out), *FAST]) == 0
    (tmp_path / "p").rename(tmp_path / "moved")
    command = ["search", str(out), str(photos / "square/004.jpg"), "--picture", str(tmp_path / "s.png")]
    assert cli.main(command) == 3
    assert "is not there" in capsys.readouterr().err
    assert cli.main([*command, "--data", str(photos / "square")]) == 3
    assert "say with --data where the images are now" in " ".join(capsys.readouterr().err.split())
    assert cli.main([*command, "--data", str(tmp_path / "moved")]) == 0


def test_vectors_of_another_network_are_not_compared(embedded: Path, photos: Path, network: Model) -> None:
    known = read(embedded)
    asked = photos / "square/004.jpg"
    other = ResNet32().eval()
    other.checkpoint = network.checkpoint
    with pytest.raises(ValueError, match=r"computed with ResNet20 .*, and this is ResNet32 .* can't be compared"):
        nearest(known, other, asked)
    with pytest.raises(ValueError, match="k is how many neighbours"):
        nearest(known, network, asked, k=0)
    assert len(nearest(known, network, asked, k=10_000)) == 120


def test_knn_shows_both_classifiers_and_what_was_done(embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["knn", str(embedded), "--labels", "label"]) == 0
    shown = capsys.readouterr().out
    assert "k-NN, k=20" in shown
    assert "leave one out over 120 images" in shown
    assert cli.main(["knn", str(embedded), "--json", "--no-linear", "-k", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["knn"] > 80
    assert told["linear"] is None
    assert told["chance"] == pytest.approx(100 / 3)


def test_a_label_of_null_is_none(embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = read(embedded)
    told = {key: None if row % 10 == 0 else key.partition("/")[0] for row, key in enumerate(known.keys)}
    (tmp_path / "l.json").write_text(json.dumps(told))
    assert cli.main(["knn", str(embedded), "--labels", str(tmp_path / "l.json"), "--json", "--no-linear"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["images"], shown["classes"]) == (108, 3)


def test_a_runs_weights_are_found_again_by_what_the_file_says(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out, asked = tmp_path / "runs/x", tmp_path / "o.parquet", str(photos / "square/004.jpg")
    told = ["-m", "ResNet20", "--out", str(run), "--steps", "1", "--batch-size", "8", "--device", "cpu", "-q"]
    assert cli.main(["finetune", str(photos), *told]) == 0
    assert cli.main(["embed", str(photos), "-m", str(run), "-o", str(out), *FAST, "-q"]) == 0
    assert read(out).about["place"] == str(run)
    for more in ([], ["-w", str(run)], ["-m", str(run)], ["-m", "ResNet20", "-w", str(run)]):
        capsys.readouterr()
        assert cli.main(["search", str(out), asked, "--json", "-k", "1", *more]) == 0
        assert json.loads(capsys.readouterr().out)["found"][0]["key"] == "square/004.jpg"
    assert cli.main(["search", str(out), asked, "-m", "ResNet20"]) == 0
    run.rename(tmp_path / "moved")
    assert cli.main(["search", str(out), asked]) == 3
    assert "which is not there; say with --weights" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["search", str(out), asked, "-w", str(tmp_path / "moved")]) == 0
    assert cli.main(["search", str(out), asked, "-w", "cifar10"]) == 1
    assert "vectors of two networks can't be compared" in " ".join(capsys.readouterr().err.split())


def test_a_sheet_asked_for_from_another_folder_says_where_the_images_were(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(photos)
    out, asked = tmp_path / "o.npy", str(photos / "square/004.jpg")
    assert cli.main(["embed", "square", "-m", "ResNet20", "-o", str(out), *FAST, "-q"]) == 0
    monkeypatch.chdir(tmp_path)
    command = ["search", str(out), asked, "--picture", str(tmp_path / "s.png")]
    assert cli.main(command) == 3
    shown = " ".join(capsys.readouterr().err.split())
    assert f"square, which the images were embedded from, is not there, seen from {tmp_path}; say with --data" in shown
    assert cli.main([*command, "--data", str(photos / "square")]) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"no", "can't be read as Parquet"),
        ("a.safetensors", b"", "is empty"),
        ("a.txt", b"", "embeddings are a .parquet"),
    ],
)
def test_what_is_no_embedding_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_an_npy_without_its_index_or_with_anothers_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(FileNotFoundError, match=r"a.npy.index.jsonl is not there; it names the rows of a.npy"):
        read(tmp_path / "a.npy")
    (tmp_path / "a.npy.index.jsonl").write_text('{"about": {"at": ["embedding"]}}\n')
    with pytest.raises(ValueError, match=r"has the shape \(3, 2\), and a.npy.index.jsonl names 0 rows"):
        read(tmp_path / "a.npy")
    (tmp_path / "a.npy.index.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds no embeddings that can be read"):
        read(tmp_path / "a.npy")
