"""`zoo inspect`, `zoo convert`, `zoo diff`: what scripts can rely on, and no traceback whatever the file is."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from darknet_file import CFG
from PIL import Image
from roundtrips import built

from convert.formats import safetensors
from convert.steps import flip
from weights import header
from zoo.commands.app import main
from zoo.conversion.notes import NOTES
from zoo.networks.model import Model


@pytest.fixture(scope="module")
def network() -> Model:
    return built("ResNet20")


@pytest.fixture
def ours(network: Model, tmp_path: Path) -> Path:
    safetensors.save(network.state_dict(), tmp_path / "ours.safetensors")
    return tmp_path / "ours.safetensors"


@pytest.fixture
def nameless(network: Model, tmp_path: Path) -> Path:
    """An .npz that doesn't say what its kernels are."""
    np.savez(tmp_path / "a.npz", **{n: t.numpy() for n, t in network.state_dict().items() if "num_" not in n})
    return tmp_path / "a.npz"


@pytest.fixture
def reference(network: Model, tmp_path: Path) -> Path:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        np.savez(tmp_path / "r.npz", inputs=images.numpy(), outputs=network(images).numpy())
    return tmp_path / "r.npz"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        caught = capsys.readouterr()
        assert "Traceback" not in caught.err
        return code, caught.out, " ".join(caught.err.split())

    return call


Run = Callable[..., tuple[int, str, str]]


def test_inspect_names_the_network_and_its_tensors(run: Run, ours: Path) -> None:
    code, out, _ = run("inspect", ours)
    assert code == 0
    assert "ResNet20 100%" in out
    assert "of correlation" in out
    assert "layer3" in out
    code, out, _ = run("inspect", ours, "--tensors")
    assert code == 0
    assert "layer3.0.conv1.weight" in out


def test_inspect_prints_json(run: Run, ours: Path) -> None:
    code, out, _ = run("inspect", ours, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["format"] == "safetensors"
    assert told["likely"][0]["name"] == "ResNet20"
    assert len(told["tensors"]) == 116


def test_inspect_shows_no_markup_or_control_characters_of_a_file(run: Run, tmp_path: Path) -> None:
    evil = "[red]a\x1b[31m"
    safetensors.save({f"{evil}.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors", {"k[bold]": "v\x1b[2J[/red][link=http://x]"})
    for extra in ((), ("--tensors",)):
        code, out, _ = run("inspect", tmp_path / "a.safetensors", *extra)
        assert code == 0
        assert "\x1b[31m" not in out
        assert "\x1b[2J" not in out
        assert "[red]a" in out


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("garbage", lambda p: p.write_bytes(b"\x00garbage\xff" * 99)),
        ("empty", lambda p: p.write_bytes(b"")),
        ("folder", lambda p: p.mkdir()),
        ("text", lambda p: p.write_text("[bold]no weights[/nothing]")),
    ],
)
def test_what_is_no_weight_file_gets_a_message(run: Run, tmp_path: Path, command: str, what: str, make: Callable[[Path], Any]) -> None:
    path = tmp_path / f"{what}[red]"
    make(path)
    more = {"inspect": (), "convert": (tmp_path / "out.safetensors",), "diff": (path,)}[command]
    code, _, err = run(command, path, *more)
    assert code == 1
    assert f"{what}[red] is no weight file" in err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_a_file_that_is_not_there_is_not_known(run: Run, tmp_path: Path, command: str) -> None:
    more = {"inspect": (), "convert": (tmp_path / "out.npz",), "diff": (tmp_path / "b.npz",)}[command]
    code, _, err = run(command, tmp_path / "none.h5", *more)
    assert code == 3
    assert "none.h5: no such file" in err


def test_a_wrong_format_is_a_message(run: Run, ours: Path) -> None:
    code, _, err = run("inspect", ours, "--from", "keras")
    assert code == 1
    assert "ours.safetensors" in err
    code, _, err = run("inspect", ours, "--from", "esperanto")
    assert code == 2
    assert "no format 'esperanto'" in err


def test_convert_finds_the_network_by_itself(run: Run, ours: Path, tmp_path: Path) -> None:
    code, out, _ = run("convert", ours, tmp_path / "b.h5")
    assert code == 0
    assert "ResNet20 from" in out
    assert "UNPROVEN" in out
    assert (tmp_path / "b.h5").is_file()
    code, out, _ = run("convert", tmp_path / "b.h5", tmp_path / "c.safetensors", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["model"] == "ResNet20"
    assert told["parity"]["proven"] is False
    assert told["destination"] == str(tmp_path / "c.safetensors")


def test_convert_asks_for_the_network_where_it_is_not_clear(run: Run, tmp_path: Path) -> None:
    safetensors.save({"a.weight": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    code, _, err = run("convert", tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert code == 1
    assert "Name it: --model NAME, or --model mymodule:Class for" in err
    code, _, err = run("convert", tmp_path / "a.safetensors", tmp_path / "b.npz", "--model", "ResNet20")
    assert code == 1
    assert "conv1.weight, 16x3x3x3" in err
    assert not (tmp_path / "b.npz").exists()


def test_of_two_networks_the_one_with_the_files_names_is_taken(run: Run, tmp_path: Path) -> None:
    """Their shapes are nearly the same."""
    network = built("SqueezeNet1_0")
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    code, out, _ = run("convert", tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert code == 0
    assert "SqueezeNet1_0 from" in out


def test_a_network_that_is_none_is_not_known(run: Run, ours: Path, tmp_path: Path) -> None:
    code, _, err = run("convert", ours, tmp_path / "b.npz", "--model", "ResNet21")
    assert code == 3
    assert "ResNet20" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("b.dat",), 2, "--to FORMAT"),
        (("b.npz", "--to", "esperanto"), 2, "neither a format"),
        (("b.npz", "--from", "esperanto"), 2, "neither a format"),
        (("b.npz", "--kernel-convention", "flipped"), 2, "flipped"),
        (("b.npz", "--spatial", "up"), 2, "up"),
        (("b.npz", "--option", "colour=3"), 2, "it takes num_classes"),
        (("b.npz", "--images", "none"), 3, "there is no folder none"),
        (("b.npz", "--reference", "none.npz"), 3, "none.npz"),
        (("nowhere/b.npz",), 1, "there is no folder"),
        (("b.npz", "--report", "nowhere/r.html"), 1, "there is no folder"),
        (("b.npz", "--option", "num_classes=many"), 2, "is 10 by default"),
        (("b.npz", "--option", "num_classes=0"), 2, "at least 1"),
        (("b.npz", "--report", "ours.safetensors"), 2, "the report is a page: name it 'ours.html'"),
        (("b.npz", "--mean", "1,a,3"), 2, "Invalid value for --mean: numbers with commas"),
        (("b.npz", "--cfg", "b.cfg"), 2, "the .cfg names the network already"),
        ((), 2, "Missing argument"),
    ],
)
def test_a_mistake_gets_a_message_and_an_exit_code(
    run: Run, ours: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    monkeypatch.chdir(ours.parent)
    got, _, err = run("convert", ours.name, *arguments, *(("-m", "ResNet20") if arguments else ()))
    assert got == code
    assert words in err
    assert [path.name for path in ours.parent.iterdir()] == [ours.name]


OWN = """
from torch import nn

class Colours(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x))

class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 4)

    def forward(self, x):
        return self.dense(x.flatten(1))
"""


@pytest.mark.parametrize(
    ("network", "options", "words"),
    [
        ("Colours", ("--images", "photographs"), "the pictures end in different sizes; zoo convert --size SIDE cuts squares"),
        ("Colours", ("--images", "damaged"), "none of the pictures can be opened"),
        ("Colours", ("--reference", "wide.npz"), "Colours can't compute on the reference's inputs, (2, 5, 8, 8)"),
        ("Vectors", ("--fold-input", "--example", "6"), "Vectors does not begin with a convolution"),
        ("Vectors", ("--option", "depth=1"), "your own takes zoo convert --arguments depth=5"),
    ],
)
def test_a_mistake_about_a_network_of_ones_own_gets_a_message(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{network.lower()}"
    (tmp_path / f"{name}.py").write_text(OWN)
    torch.save(getattr(importlib.import_module(name), network)().state_dict(), "a.pth")
    for folder in ("photographs", "damaged"):
        (tmp_path / folder).mkdir()
    for i in range(3):
        Image.new("RGB", (40 + i, 50), (20 * i, 9, 9)).save(tmp_path / "photographs" / f"{i}.png")
    (tmp_path / "damaged" / "a.png").write_bytes(b"no picture")
    np.savez("wide.npz", inputs=np.zeros((2, 5, 8, 8), np.float32), outputs=np.zeros((2, 4, 6, 6), np.float32))
    code, _, err = run("convert", "a.pth", "b.safetensors", "--model", f"{name}:{network}", *options)
    assert code in (1, 2)
    assert words in err
    assert not (tmp_path / "b.safetensors").exists()


def test_what_the_conversion_of_a_detector_would_not_heed_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text(CFG)
    (tmp_path / "a.weights").write_bytes(b"")
    for option in ("--report=r.html", "--images=photographs", "--fold-input", "--size=3", "--weights-of=ema"):
        code, _, err = run("convert", tmp_path / "a.weights", tmp_path / "a.safetensors", option)
        assert code == 2
        assert f"Invalid value for {option.partition('=')[0]}: a Darknet detector's file is converted without it" in err


def test_inspect_and_convert_call_a_naming_by_the_same_word(run: Run, network: Model, tmp_path: Path) -> None:
    """akamaster's files differ from torchvision's in the classifier's name alone, for a network without projections."""
    state = {name.replace("fc.", "linear."): tensor for name, tensor in network.state_dict().items()}
    torch.save(state, tmp_path / "a.th")
    seen = json.loads(run("inspect", tmp_path / "a.th", "--json")[1])["likely"][0]
    made = json.loads(run("convert", tmp_path / "a.th", tmp_path / "b.safetensors", "-m", "ResNet20", "--json")[1])
    assert (seen["name"], seen["naming"], made["source"]["naming"]) == ("ResNet20", "akamaster", "akamaster")


def test_a_file_that_is_there_is_replaced_only_by_force(run: Run, ours: Path, tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(b"precious")
    code, _, err = run("convert", ours, tmp_path / "b.npz", "-m", "ResNet20")
    assert code == 1
    assert "--replace" in err
    assert (tmp_path / "b.npz").read_bytes() == b"precious"
    assert run("convert", ours, tmp_path / "b.npz", "-m", "ResNet20", "--replace")[0] == 0
    assert (tmp_path / "b.npz").stat().st_size > 1_000_000


def test_a_convention_that_nobody_knows_says_what_to_do(run: Run, nameless: Path, reference: Path, tmp_path: Path) -> None:
    code, _, err = run("convert", nameless, tmp_path / "b.safetensors", "-m", "ResNet20")
    assert code == 1
    assert "--kernel-convention convolution or correlation" in err
    code, out, _ = run("convert", nameless, tmp_path / "b.safetensors", "-m", "ResNet20", "--reference", reference)
    assert code == 0
    assert "correlation, by relative error" in out
    assert "PROVEN by source outputs" in out


def test_a_failed_proof_exits_with_1_and_is_reported(run: Run, nameless: Path, reference: Path, tmp_path: Path) -> None:
    arguments = ("convert", nameless, tmp_path / "b.safetensors", "-m", "ResNet20", "--reference", reference)
    wrong = (*arguments, "--kernel-convention", "convolution", "--report", tmp_path / "report.html")
    code, _, err = run(*wrong)
    assert code == 1
    assert "kernels flipped" in err
    assert not (tmp_path / "b.safetensors").exists()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "What went wrong" in page
    assert "kernels flipped" in page
    code, out, _ = run(*wrong, "--unproven")
    assert code == 0
    assert "UNPROVEN: contradicted" in out
    assert (tmp_path / "b.safetensors").is_file()


def test_a_success_is_reported(run: Run, ours: Path, tmp_path: Path) -> None:
    code, out, _ = run("convert", ours, tmp_path / "b.npz", "-m", "ResNet20", "--report", tmp_path / "report.html")
    assert code == 0
    assert "report: " in out
    assert "layer1.0.conv1.weight" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_output_holds_a_files_words_unchanged_but_for_what_moves_the_cursor(run: Run, network: Model, tmp_path: Path) -> None:
    (tmp_path / "in[").mkdir()
    source = tmp_path / "in[" / "red].safetensors"
    state = {name.replace("fc.", "h[bold]\x1b[31m."): tensor for name, tensor in network.state_dict().items()}
    safetensors.save(state, source)
    code, out, _ = run("convert", source, tmp_path / "in[" / "x].npz", "-m", "ResNet20")
    assert code == 0
    assert "in[/red].safetensors" in out
    assert "in[/x].npz" in out
    assert "the classifier is called h[bold]" in out
    assert "\x1b[31m" not in out
    code, _, err = run("convert", source, tmp_path / "b.npz", "-m", "SqueezeNet1_1")
    assert code == 1
    assert "h[bold]" in err
    assert "\x1b[31m" not in err


def test_options_reach_the_network_and_the_notes(run: Run, tmp_path: Path) -> None:
    network = built("MobileNetV1_025", norm_eps=0.01)
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--option", "norm_eps=0.01")[0] == 0
    told = json.loads(header.metadata((tmp_path / "b.safetensors").read_bytes())[NOTES])
    assert told["options"]["norm_eps"] == 0.01
    code, out, _ = run("inspect", tmp_path / "b.safetensors")
    assert code == 0
    assert "from a.safetensors, for MobileNetV1_025" in out


def test_diff_tells_equal_from_different_by_its_exit_code(run: Run, ours: Path, network: Model, tmp_path: Path) -> None:
    assert run("convert", ours, tmp_path / "b.h5", "-m", "ResNet20")[0] == 0
    assert run("diff", ours, tmp_path / "b.h5")[0] == 0
    assert run("diff", ours, ours)[0] == 0
    state = dict(network.state_dict())
    state["fc.bias"] = state["fc.bias"] + 1
    safetensors.save(state, tmp_path / "c.safetensors")
    code, out, _ = run("diff", ours, tmp_path / "c.safetensors")
    assert code == 1
    assert "fc.bias" in out
    assert "layer1.0.conv1.weight" not in out
    code, out, _ = run("diff", ours, tmp_path / "c.safetensors", "--all")
    assert "layer1.0.conv1.weight" in out
    code, out, _ = run("diff", ours, tmp_path / "c.safetensors", "--json")
    assert code == 1
    assert json.loads(out)["same"] is False


def test_one_set_of_a_files_weights_is_inspected_compared_and_converted(run: Run, network: Model, tmp_path: Path) -> None:
    state = network.state_dict()
    averaged = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    torch.save({"model": state, "model_ema": averaged}, both := tmp_path / "both.pth")
    torch.save(averaged, tmp_path / "averaged.pth")
    assert run("diff", both, tmp_path / "averaged.pth", "--weights-of", "ema")[0] == 0
    code, _, err = run("diff", both, tmp_path / "averaged.pth")
    assert code == 1
    assert "model is taken, and --weights-of ema takes model_ema" in err
    code, out, err = run("inspect", both, "--weights-of", "ema", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["likely"][0]["name"] == "ResNet20"
    code, _, err = run("convert", both, tmp_path / "a.safetensors", "--weights-of", "ema")
    assert code == 0
    assert "is taken" not in err  # recognising the network reads the same set
    code, _, err = run("diff", tmp_path / "averaged.pth", tmp_path / "a.safetensors", "--weights-of", "ema")
    assert code == 1
    assert "one set of weights alone" in err


def test_diff_names_flipped_kernels(run: Run, ours: Path, network: Model, tmp_path: Path) -> None:
    state = {n: torch.from_numpy(np.ascontiguousarray(flip(t.numpy()))) if t.dim() == 4 else t for n, t in network.state_dict().items()}
    safetensors.save(state, tmp_path / "b.safetensors")
    _, out, _ = run("diff", ours, tmp_path / "b.safetensors")
    assert "flip" in out


def test_diff_shows_no_markup_of_a_file(run: Run, tmp_path: Path) -> None:
    safetensors.save({"[red]x\x1b[31m.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    safetensors.save({"[/nothing].weight": torch.ones(2, 3)}, tmp_path / "b.safetensors")
    code, out, _ = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1
    assert "[red]x" in out
    assert "[/nothing]" in out
    assert "\x1b[31m" not in out


def test_a_proof_that_nobody_could_give_is_not_called_a_contradiction(run: Run, ours: Path, tmp_path: Path) -> None:
    code, _, said = run("convert", ours, tmp_path / "new.safetensors", "--model", "ResNet20", "--require-proof")
    assert code == 1
    assert "nothing proved that the network computes what the file's does" in said
    assert "give --reference" in said
    assert not (tmp_path / "new.safetensors").exists()
