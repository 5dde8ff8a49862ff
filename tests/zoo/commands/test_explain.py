"""`zoo explain`: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from zoo.commands.app import main


@pytest.fixture
def photo(photos: Path) -> str:
    return str(sorted((photos / "circle").iterdir())[0])


def test_a_picture_is_explained_and_drawn(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "why.png"
    assert main(["explain", photo, "-m", "ResNet20", "--top", "2", "--picture", str(drawn)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(photo)
    assert text.count("Grad-CAM at layer3: ") == 2
    assert f"drawn in '{drawn}'" in text.replace("\n", "")
    with Image.open(drawn) as sheet:
        assert sheet.size[0] > 900


def test_json_has_the_numbers_and_the_measures(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", photo, "-m", "ResNet20", "--target", "cat - dog", "--target", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["left_out"], told["measured"]) == ([], None)
    rows = told["explanations"]
    assert [row["label"] for row in rows] == ["cat - dog", "cat"]
    assert {row["image"] for row in rows} == {photo}
    assert rows[0]["probability"] is None
    assert main(["explain", photo, "-m", "ResNet20", "--method", "hirescam", "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["method"] == "HiResCAM"
    assert 0 <= found["measured"]["deletion"]["random"] <= 1
    assert len(found["explanations"]) == 1
    assert main(["explain", photo, "-m", "ResNet20", "--all", "--json"]) == 0
    assert any("attention rollout" in why for why in json.loads(capsys.readouterr().out)["left_out"])


def test_all_methods_of_the_network_are_on_one_sheet(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", photo, "-m", "ResNet20", "--all", "--picture", str(tmp_path / "all.png")]) == 0
    with Image.open(tmp_path / "all.png") as sheet:
        assert sheet.width > sheet.height  # five maps abreast, not one
    text = capsys.readouterr().out
    for title in ("Grad-CAM++", "Integrated gradients", "Guided Grad-CAM", "LRP-epsilon", "Occlusion"):
        assert f"{title} at " in text
    assert "left out: attention rollout is not defined for this ResNet20" in text
    assert "RISE" not in text


def test_a_picture_that_cannot_be_read_spoils_no_other(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    assert main(["explain", str(tmp_path / "broken.jpg"), photo, "-m", "ResNet20"]) == 1
    captured = capsys.readouterr()
    assert "broken.jpg" in captured.err
    assert "1 of 2 images explained" in captured.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--method", "gradcan"], 2, "there is no method 'gradcan'; did you mean gradcam"),
        (["--target", "catt"], 2, "the network has no class 'catt'"),
        (["--target", "catt", "--all"], 2, "the network has no class 'catt'"),
        (["--target", "10"], 2, "there is no class 10; the network has 10, 0 to 9"),
        (["--at", "layer9"], 2, "ResNet20 has no tap 'layer9'"),
        (["--method", "attention-rollout"], 1, "attention rollout is not defined for this ResNet20"),
        (["--target", "cat", "--top", "2"], 2, "give one of them"),
        (["--all", "--measure"], 2, "--all takes all methods"),
        (["--measure", "--target", "cat", "--target", "dog"], 2, "one class; give one --target"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], code: int, message: str, photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", photo, "-m", "ResNet20", *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.split()).replace("│ ", "").replace(" │", "")
