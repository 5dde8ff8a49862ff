import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weights import SourceUnavailable
from zoo import recommend
from zoo.networks.model import Model
from zoo.recommendation import run as running
from zoo.recommendation.progress import Watch

Make = Callable[..., Model]


class Heard(Watch):
    def __init__(self) -> None:
        super().__init__(wanted=False)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def ask(shared: Path, times: dict[str, float]) -> Callable[..., Any]:
    """Call `recommend`; times are told by each test, so that none may be kept for the next."""
    del times
    for file in (shared / "times").glob("*"):
        file.unlink()
    return lambda images, *args, **how: recommend(images, *args, **{"folder": shared, "progress": False, "folds": 2} | how)


def test_a_trained_network_is_recommended_and_a_blind_one_is_not(photos: Path, ask: Any, candidate: Make, tmp_path: Path) -> None:
    found = ask(photos, models=[candidate("blind", blind=True), candidate("good")])
    assert [one.name for one in found.ranking] == ["ResNet20:good", "ResNet20:blind"]
    assert found.best.name == "ResNet20:good"
    assert found.trained == 'trained(ResNet20, "good")'
    assert (found.images, found.folds, found.classes) == (30, 2, {"circle": 10, "square": 10, "stripes": 10})
    assert found.chance == pytest.approx(100 / 3)
    assert "Start from ResNet20:good: it has the highest score" in str(found)
    assert "->     1  ResNet20:good" in found.table()
    told = json.loads(json.dumps(found.facts()))
    assert (told["best"], told["ranking"][0]["recommended"]) == ("ResNet20:good", True)
    with Image.open(found.picture(tmp_path / "a.png")) as drawn:
        assert len(np.unique(np.asarray(drawn.convert("RGB")).reshape(-1, 3), axis=0)) > 20
    with pytest.raises(ValueError, match=r"a picture is a PNG file, not 'a.svg'"):
        found.picture(tmp_path / "a.svg")


def test_of_those_that_cant_be_told_apart_the_fastest_is_recommended(photos: Path, ask: Any, candidate: Make, times: Any) -> None:
    times.update(slow=30.0, quick=3.0)
    found = ask(photos, models=[candidate("slow"), candidate("quick"), candidate("blind", blind=True)])
    assert found.best.name == "ResNet20:quick"
    assert [one.rank for one in found.ranking[:2]] == [1, 1]
    assert {one.tag: one.tied for one in found.ranking} == {"slow": True, "quick": True, "blind": False}
    assert "can't tell the best apart from ResNet20:slow: a tie" in str(found) or "it apart from ResNet20:slow: a tie" in str(found)
    assert [one.tag for one in found.pareto()] == ["quick"]


def test_what_exceeds_the_budget_is_shown_and_not_recommended(photos: Path, ask: Any, candidate: Make, times: Any) -> None:
    times.update(good=50.0, blind=5.0)
    models = [candidate("good"), candidate("blind", blind=True)]
    found = ask(photos, budget={"max_ms": 20}, models=models)
    assert found.best.tag == "blind"
    assert found.ranking[0].over == ("50.0 ms, 20 allowed",)
    assert "Better, and over the budget: ResNet20:good (50.0 ms, 20 allowed)." in str(found)
    none = ask(photos, budget={"max_ms": 1}, models=models)
    assert (none.best, none.trained) == (None, "")
    assert none.nearest == "ResNet20:blind (5.0 ms, 1 allowed)"
    assert "No candidate is within the budget; nearest comes ResNet20:blind" in str(none)
    unsure = ask(photos, budget={"max_ms": 5.5}, models=models)
    assert "Whether ResNet20:blind takes 5.5 ms at most can't be told: rounds took 4.5 to 6.0 ms." in unsure.cannot_tell


def test_what_could_not_be_timed_is_over_a_budget_of_time_and_no_other(
    photos: Path, ask: Any, candidate: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = running.measured

    def measured(model: Model, device: torch.device, quick: bool) -> Any:
        if model.checkpoint is not None and model.checkpoint.tag == "good":
            raise RuntimeError("no kernel could be run")
        return told(model, device, quick)

    monkeypatch.setattr(running, "measured", measured)
    models = [candidate("good"), candidate("blind", blind=True)]
    found = ask(photos, budget={"max_ms": 20}, models=models)
    assert (found.best.tag, found.ranking[0].tag, found.ranking[0].ms) == ("blind", "good", None)
    assert found.ranking[0].over == ("its time could not be measured",)
    assert "over the budget: ResNet20:good (its time could not be measured)" in str(found)
    alone = ask(photos, budget={"max_ms": 20}, models=models[:1])
    assert (alone.best, alone.nearest) == (None, "ResNet20:good (its time could not be measured)")
    assert ask(photos, models=models).best.tag == "good"


@pytest.mark.parametrize(
    ("most", "labels", "said"),
    [
        (24, None, "24 of 30 images were drawn, each class's share kept; 3 classes have fewer than 10 of them, though there are more."),
        (18, [str(i // 3) for i in range(30)], "18 of 30 images were drawn, of 6 classes; 4 other classes were left out."),
    ],
)
def test_classes_that_have_fewer_images_because_of_the_draw_are_told(
    most: int, labels: Any, said: str, photos: Path, ask: Any, candidate: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "IMAGES", most)
    assert said in str(ask(photos, labels, models=[candidate("good")]))


def test_what_is_too_large_or_not_allowed_is_not_computed_unless_nothing_else_is_left(photos: Path, ask: Any, candidate: Make) -> None:
    models = [candidate("free", license="MIT"), candidate("closed", license="CC-BY-NC-4.0")]
    found = ask(photos, budget={"license": "permissive"}, models=models)
    assert [one.tag for one in found.ranking] == ["free"]
    assert found.skipped == {"ResNet20:closed": "over the budget: licence CC-BY-NC-4.0, permissive asked for"}
    none = ask(photos, budget={"license": "GPL-3.0", "max_mb": 0.1}, models=models)
    assert none.best is None
    assert len(none.ranking) == 2
    assert none.nearest == f"{none.ranking[0].name} (1.1 MB, 0.1 allowed; licence {none.ranking[0].license}, GPL-3.0 asked for)"
    assert "not for commercial use" in str(ask(photos, models=models[1:]))


def test_an_interrupted_call_goes_on_and_says_so(
    photos: Path, ask: Any, candidate: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = partial(ask, folder=tmp_path / "kept")
    models = [candidate("one"), candidate("two")]
    embedded: list[str] = []
    real = running.embed

    def embed(model: Model, *args: Any, **how: Any) -> Any:
        assert model.checkpoint is not None
        if model.checkpoint.tag == "two" and not embedded.count("two"):
            embedded.append("two")
            raise KeyboardInterrupt
        embedded.append(model.checkpoint.tag)
        return real(model, *args, **how)

    monkeypatch.setattr(running, "embed", embed)
    with pytest.raises(KeyboardInterrupt):
        ask(photos, models=models)
    heard = Heard()
    found = ask(photos, models=models, progress=heard)
    assert embedded == ["one", "two", "two"]
    assert "1 of 2: ResNet20:one: 30 images embedded by an earlier call" in heard.lines
    assert found.resumed == 2  # its vectors and its time
    again = ask(photos, models=models)
    assert again.resumed == 6
    assert again.ranking == found.ranking
    assert ask(photos, models=models, restart=True).resumed == 0
    assert embedded[3:] == ["one", "two"]


def test_damaged_results_are_computed_anew(photos: Path, ask: Any, candidate: Make, tmp_path: Path) -> None:
    ask = partial(ask, folder=tmp_path / "kept")
    first = ask(photos, models=[candidate("good")])
    for file in (tmp_path / "kept").rglob("*.*"):
        file.write_text("{}")
    assert ask(photos, models=[candidate("good")]).ranking == first.ranking


def test_without_labels_it_says_that_this_is_weaker(photos: Path, ask: Any, candidate: Make) -> None:
    found = ask(photos, labels=False, models=[candidate("good"), candidate("blind", blind=True)])
    assert not found.labelled
    assert (found.chance, found.folds, found.ranking[0].knn) == (None, None, None)
    assert "consistency %" in found.table()
    assert "which is weaker" in str(found)
    flat = [path.read_bytes() for path in sorted(photos.rglob("*.png"))]
    assert {one.score for one in ask(flat, models=[candidate("good")]).ranking} <= {one.score for one in found.ranking}


def test_few_images_are_said_to_be_few(photos: Path, ask: Any, candidate: Make) -> None:
    said = str(ask(photos, models=[candidate("good"), candidate("blind", blind=True)]))
    assert "There are 30 images and 3 classes have fewer than 20: take the order as a hint until you have more." in said
    assert "points can't be told with 30 images" in said


def test_labels_that_images_dont_show_are_no_victory(photos: Path, ask: Any, candidate: Make) -> None:
    drawn = np.random.default_rng(0).integers(0, 2, 30)
    said = str(ask(photos, labels=drawn, models=[candidate("good")]))
    assert "No candidate is clearly better than guessing" in said


def test_copies_and_images_that_cant_be_read_are_left_out_and_named(photos: Path, ask: Any, candidate: Make, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(photos, mine)
    files = sorted((mine / "circle").iterdir())
    files[0].write_text("no image")
    shutil.copyfile(files[1], files[2])
    for _ in range(2):  # computed, and then kept
        found = ask(mine, models=[candidate("good")])
        assert found.images == 28
        assert set(found.left_out) == {f"circle/{files[0].name}", f"circle/{files[2].name}"}
        assert found.left_out[f"circle/{files[2].name}"] == f"a copy of circle/{files[1].name}"
    for file in mine.rglob("*.png"):
        file.write_text("no image")
    with pytest.raises(ValueError, match="none of 30 images can be used; circle/"):
        ask(mine, models=[candidate("good")])


def test_images_that_say_nothing_are_refused_before_anything_is_computed(
    photos: Path, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "trained", lambda *_, **__: pytest.fail("nothing is to be loaded"))
    with pytest.raises(ValueError, match=r"all images are of one class, 'x', so there is nothing to tell apart.*labels=False"):
        ask(photos, labels=["x"] * 30)
    with pytest.raises(ValueError, match=r"'b' has 3 images, and each of 5 folds needs one. Take folds=3, which is less sure, add images"):
        ask(photos, labels=["a"] * 27 + ["b"] * 3, folds=5)
    with pytest.raises(
        ValueError, match=r"'b' has 1 image, and 1 other class has fewer than 2 too, and each of 2 folds needs one. Add images"
    ):
        ask(photos, labels=["a"] * 28 + ["b", "c"])
    with pytest.raises(ValueError, match="there are 30 images and 3 labels"):
        ask(photos, labels=["x"] * 3)
    with pytest.raises(ValueError, match="folds is a whole number of at least 2"):
        ask(photos, folds=1)
    for count in (2, 20):
        with pytest.raises(ValueError, match=f"{count} images without labels say nothing, for neighbours are compared; give 21 at least"):
            ask([path.read_bytes() for path in sorted(photos.rglob("*.png"))[:count]])
    with pytest.raises(FileNotFoundError):
        ask(tmp_path / "none")


def test_candidates_that_cant_be_had_are_named_and_the_others_compared(photos: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    real = running.trained

    def trained(name: str, tag: str, **how: Any) -> Any:
        if name == "ResNet20":
            return real(name, tag, **how)
        tried.append(name)
        raise SourceUnavailable(f"no source delivered {name}:\n  the host is away\nmore of it")

    monkeypatch.setattr(running, "trained", trained)
    named = ["resnet20", "resnet50", "vgg19", "densenet121"]
    found = ask(photos, models=named)
    assert [one.model for one in found.ranking] == ["ResNet20"]
    assert tried == ["ResNet50", "VGG19"]
    assert list(found.skipped.values()) == [
        "no source delivered ResNet50: the host is away",
        "no source delivered VGG19: the host is away",
        "not tried, for the downloads before it failed",
    ]
    offline = ask(photos, models=named, offline=True)
    assert set(offline.skipped.values()) == {"it is not on this machine, and nothing may be fetched"}
    with pytest.raises(ValueError, match=r"there is no candidate to compare: ResNet50.*or let some be fetched"):
        ask(photos, models=["resnet50"], offline=True)
    with pytest.raises(SourceUnavailable, match="no candidate's weights could be had: ResNet50"):
        ask(photos, models=["resnet50"])


def test_a_network_that_computes_nan_is_left_out(photos: Path, ask: Any, candidate: Make) -> None:
    broken = candidate("broken")
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    found = ask(photos, models=[broken, candidate("good")])
    assert [one.tag for one in found.ranking] == ["good"]
    assert "NaN" in found.skipped["ResNet20:broken"]
