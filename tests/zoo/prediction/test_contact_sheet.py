from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.images.preprocess import BadImage
from zoo.prediction import contact_sheet as sheet
from zoo.prediction.contact_sheet import HEIGHT, WIDTH, Line, contact_sheet
from zoo.prediction.predict import UNCERTAIN, Prediction

PREDICTIONS = [Prediction("tabby", "n02123045", 0.5, 281), Prediction("tiger cat", "n02123159", 0.25, 282), Prediction("cat", None, 0.0, 3)]
BEST, GUESS = (0x1A, 0x7F, 0x4B), (0xB3, 0x59, 0x00)


def drawn(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


def count(pixels: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((pixels == colour).all(-1).sum())


def red(width: int = 40, height: int = 30) -> Image.Image:
    return Image.new("RGB", (width, height), (255, 0, 0))


@pytest.mark.parametrize("size", [(40, 30), (400, 300), (4000, 3000), (30, 40), (1, 1), (3, 1000), (1000, 3)])
def test_the_whole_picture_is_shown_in_its_proportions(tmp_path: Path, size: tuple[int, int]) -> None:
    pixels = drawn(contact_sheet([(red(*size), PREDICTIONS)], tmp_path / "a.png"))
    rows, columns = np.nonzero((pixels == (255, 0, 0)).all(-1))
    width, height = int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1
    scale = min(WIDTH / size[0], HEIGHT / size[1])
    assert (width, height) == (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
    assert len(rows) == width * height


@pytest.mark.parametrize("probability", [0.0, 0.001, 0.1, 0.5, 1.0])
def test_the_green_bar_is_as_long_as_the_best_probability(tmp_path: Path, probability: float) -> None:
    pixels = drawn(contact_sheet([(red(), [Prediction("cat", None, probability, 3)])], tmp_path / "a.png"))
    colour = BEST if probability >= UNCERTAIN else GUESS
    widths = (pixels == colour).all(-1).sum(axis=1)
    assert widths.max() == round(WIDTH * probability)
    assert not (pixels == (GUESS if colour is BEST else BEST)).all(-1).any()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_line_of_another_figure_has_its_own_words(tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(sheet, "write", lambda _draw, _x, _y, text, *_: texts.append(text))
    pixels = drawn(contact_sheet([(red(), [Line("猫", f"cosine {share:.3f}", share)])], tmp_path / "a.png"))
    assert texts == [f"cosine {share:.3f}", "猫"]
    assert (pixels == BEST).all(-1).sum(axis=1).max() == round(WIDTH * share)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 12, 19, 40])
def test_every_picture_has_its_place_on_a_page_of_sensible_shape(tmp_path: Path, number: int) -> None:
    entries = [(red(), PREDICTIONS)] * number
    pixels = drawn(contact_sheet(entries, tmp_path / "a.png", titles=[f"picture {i}" for i in range(number)], heading="All"))
    assert count(pixels, (255, 0, 0)) == number * WIDTH * HEIGHT
    if number > 3:
        assert 0.5 < pixels.shape[1] / pixels.shape[0] < 2


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    one, five = (drawn(contact_sheet([(red(), PREDICTIONS)] * 5, tmp_path / "a.png", columns=n)) for n in (1, 5))
    assert one.shape[0] > 4 * one.shape[1]
    assert five.shape[1] > 3 * five.shape[0]


def test_long_and_strange_texts_stay_inside_their_card(tmp_path: Path) -> None:
    text = "\udce9 \n" + "very long " * 40
    long = [Prediction("ptarmigan " * 30, None, 0.5, 0)]
    pixels = drawn(contact_sheet([(red(), long)], tmp_path / "a.png", titles=[text], heading=text))
    assert pixels.shape[1] == WIDTH + 2 * sheet.PAD + 2 * sheet.GAP
    page = tuple(int(sheet.PAGE[i : i + 2], 16) for i in (1, 3, 5))
    for margin in (pixels[:, : sheet.GAP], pixels[:, -sheet.GAP :]):
        assert (margin == page).all()


@pytest.mark.parametrize(
    ("one", "other"), [("Kühe", "Kuhe"), ("Łódź", "Łódz"), ("Αθήνα", "Αθηνα"), ("Київ", "Киів"), ("חתול", "חתוד"), ("猫", "犬")]
)
def test_labels_that_differ_look_different_in_every_script(tmp_path: Path, one: str, other: str) -> None:
    pages = [drawn(contact_sheet([(red(), [Prediction(name, None, 0.5, 0)])], tmp_path / "a.png")) for name in (one, other)]
    assert not np.array_equal(*pages)


def test_paths_pil_images_and_arrays_are_drawn_upright(tmp_path: Path) -> None:
    exif, array = Image.Exif(), np.zeros((30, 40, 3), np.uint8)
    exif[0x0112], array[:, :20] = 6, (255, 0, 0)
    Image.fromarray(np.rot90(array)).save(tmp_path / "turned.png", exif=exif)
    pictures = (tmp_path / "turned.png", Image.fromarray(array), array)
    files = [contact_sheet([(picture, PREDICTIONS)], tmp_path / f"{i}.png") for i, picture in enumerate(pictures)]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = contact_sheet([(red(), PREDICTIONS)], tmp_path / "a.png")
    before = path.read_bytes()

    def fails(self: Image.Image, file: Path, *arguments: object, **options: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(Image.Image, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        contact_sheet([(red(), PREDICTIONS)] * 2, path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"entries": []}, "at least one picture, got none"),
        ({"titles": ["a", "b"]}, "one title for each of its 1 pictures, got 2"),
        ({"columns": 0}, "columns must be at least 1, got 0"),
        ({"path": "sheet.jpg"}, r"a PNG file, got sheet\.jpg; name it sheet\.png"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    arguments = {"entries": [(red(), PREDICTIONS)], "path": "sheet.png"} | arguments
    arguments["path"] = tmp_path / arguments["path"]
    with pytest.raises(ValueError, match=message):
        contact_sheet(**arguments)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_can_not_be_read_leaves_no_sheet(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"none\.jpg: there is no such file"):
        contact_sheet([(tmp_path / "none.jpg", PREDICTIONS)], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
