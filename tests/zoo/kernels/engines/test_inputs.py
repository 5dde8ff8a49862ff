"""`fast` on a CPU, whichever engine wins: images that hold no number, types that are narrow, networks that are alike, and wrong calls."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from convert.formats import onnx as formats_onnx
from tests.zoo.kernels.engine_networks import images
from weights.errors import ConvertError
from zoo import ResNet20, predict, trained
from zoo.kernels import fast, why
from zoo.kernels.engines import choose as engines
from zoo.kernels.engines import judge
from zoo.kernels.engines.export import finite, within

NAMES = ("openvino", "onnxruntime", "channels_last")


def won_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine win whatever its time is."""
    monkeypatch.setattr(engines, "fastest", lambda trial, example, budget: (dict.fromkeys(trial.calls, 1e-3), name))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["openvino/1", *NAMES])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_in_an_image_is_none_in_its_answer(
    small: nn.Module, name: str, poison: float, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    won_by(name, monkeypatch)
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    model, x = fast(small, "cpu", example=images(2)), images(2)
    assert why(model).rows[0].kernel == name
    x[0, 1, 3, 4] = poison
    with torch.no_grad():
        expected = small(x)
    assert not expected[0].isfinite().all()
    assert not any("NaN" in note for note in why(model).plans[0].notes)
    with torch.inference_mode(inference):
        found = model(x)
    assert sum("NaN" in note for note in why(model).plans[0].notes) == (name != "channels_last")
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.allclose(found[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_looks_at_every_number_of_any_layout(dtype: torch.dtype) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.full((2, 3, 40, 50), 60.0, dtype=dtype).contiguous(memory_format=layout)  # whose sum is above float16's largest
        assert finite(x)
        assert finite(x[:, 1:, ::2])
        for poison in (float("nan"), float("inf"), -float("inf")):
            y = x.clone()
            y[1, 2, 39, 49] = poison
            assert not finite(y)
            y[0, 0, 0, 0] = -poison
            assert not finite(y)
    assert finite(torch.tensor([1, 2]))
    assert finite(torch.empty(0, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_engines_may_round_their_answer_as_a_narrow_network_does(small: nn.Module, dtype: torch.dtype) -> None:
    network, x = small.to(dtype), images(2).to(dtype)
    bound = judge.Judge(network, (x,), engines.Plain(network)(x))
    for engine in engines.candidates(network, (x,)):
        if engine.name in NAMES:
            found, allowed = bound(engine.build(), engine.precision)
            assert found <= allowed < 1e-2, engine.name
    wrong, allowed = bound(lambda t: network(t) * 1.01, torch.float32)
    assert wrong > allowed


def test_complex_answers_are_compared_as_numbers() -> None:
    y = torch.randn(4, 5, dtype=torch.complex64)
    assert judge.error([y * (1 + 1e-6)], [y.to(torch.complex128)]) == pytest.approx(1e-6, rel=0.2)
    assert judge.error([y.conj().resolve_conj()], [y]) > 0.5
    assert judge.error([y.real], [y]) == judge.error([y], [y.real]) == float("inf")


class Alternating(nn.Module):
    """Says plus and minus in turn, by a number that no trace can see."""

    calls = [0]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.conv(x) * (1 if self.calls[0] % 2 else -1)


def test_a_network_that_answers_otherwise_each_time_runs_unchanged() -> None:
    network, x = Alternating().eval(), images(2)
    with pytest.warns(UserWarning, match="runs unchanged: it gives another answer for the same input in the next call"):
        model = fast(network, "cpu", example=x)
    a, b = model(x), model(x)
    assert torch.equal(a, -b)


def test_networks_that_are_alike_but_compute_something_else_are_chosen_for_apart(own_cache: Path) -> None:
    x = torch.randn(1, 3, 32, 32)
    for network in (nn.Conv2d(3, 8, 3, stride=1), nn.Conv2d(3, 8, 3, stride=4), nn.Conv2d(3, 8, 3).half(), nn.Conv2d(3, 8, 3)):
        fast(nn.Sequential(network), "cpu", example=x)
    (file,) = (own_cache / "kernels").glob("cpu-*.json")
    keys = [key for key in json.loads(file.read_text())["choices"] if key.startswith("engine ")]
    assert len(keys) == 3
    assert sum("float16 as float32" in key for key in keys) == 1


@pytest.mark.parametrize("first", ["no export", "an export by others", "our own export to a file"])
def test_an_export_that_fails_prints_nothing(first: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x, 2 * x)

    if first == "an export by others":  # which leaves PyTorch's log on, for the whole process
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(nn.ReLU(), (torch.zeros(2),), str(tmp_path / "relu.onnx"), dynamo=False)
    elif first == "our own export to a file":
        with pytest.raises(ConvertError, match="can't export Complex"):
            formats_onnx.export(Complex().eval(), tmp_path / "complex.onnx", input_shape=(3, 8, 8), metadata={})
        assert capfd.readouterr().out == ""
    capfd.readouterr()
    model = fast(Complex().eval(), "cpu", example=images(2))
    assert "can't export" in why(model).rows[0].note
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("example", [3, (), {"x": 1}, np.zeros((1, 3, 32, 32), "f4"), [None]], ids=repr)
def test_an_example_without_tensors_is_refused(example: Any) -> None:
    with pytest.raises(ValueError, match=r"example is a tensor such as torch\.randn"):
        fast(ResNet20(), "cpu", example=example)


@pytest.mark.parametrize("example", [[torch.zeros(1, 3, 32, 32)], {"x": torch.zeros(1, 3, 32, 32)}], ids=["list", "dictionary"])
def test_an_example_that_the_network_refuses_is_refused(example: Any) -> None:
    with pytest.raises(ValueError, match=r"ResNet20 does not take this example: TypeError: ResNet20 takes a tensor \(batch, 3"):
        fast(ResNet20(), "cpu", example=example)


@pytest.mark.parametrize("given", [None, [torch.zeros(1, 3, 32, 32)], np.zeros((1, 3, 32, 32), "f4")], ids=["none", "list", "array"])
def test_a_call_with_no_tensor_says_what_is_taken(given: Any) -> None:
    network = trained(ResNet20)
    for model in (network, fast(network, "cpu")):
        with pytest.raises(TypeError, match=rf"ResNet20 takes a tensor \(batch, 3, height, width\), got a {type(given).__name__}"):
            model(given)


def test_a_fast_network_predicts_and_has_what_the_network_has() -> None:
    network = trained(ResNet20)
    model, picture = fast(network, "cpu"), Image.new("RGB", (32, 32), "red")
    assert model.checkpoint is network.checkpoint
    assert model.preprocess(picture).shape == (1, 3, 32, 32)
    (ours, *_), (theirs, *_) = predict(model, picture), predict(network, picture)
    assert (ours.label, round(ours.probability, 4)) == (theirs.label, round(theirs.probability, 4))
    with pytest.raises(AttributeError, match="neither Fast nor the ResNet20 in it has 'nothing'"):
        _ = model.nothing
    with pytest.raises(AttributeError, match=r"the network itself has: plain\(model\)\.initialise"):
        model.initialise()
    with pytest.raises(AttributeError):
        _ = model._nothing
    assert fast(nn.DataParallel(network), "cpu").checkpoint is network.checkpoint


def test_the_hint_of_an_example_is_given_where_it_helps() -> None:
    class Random(Alternating):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + torch.randn(1)

    with pytest.warns(UserWarning, match="is random$"):
        fast(Random(), "cpu")
    with pytest.warns(UserWarning, match="no convolution of images and no linear layer tells what it takes; pass example="):
        fast(nn.Sequential(nn.Conv1d(3, 3, 3)), "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_within_takes_no_infinity_for_a_number_in_any_type(dtype: torch.dtype) -> None:
    for poison in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2, 3, dtype=dtype)
        assert within(x, 1e6)
        x[1, 2] = poison
        assert not within(x, 1e6)


class Words(nn.Module):
    """The mean of rows of a table; `kind` says how rows are named."""

    def __init__(self, kind: str = "rows") -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, words: Tensor) -> Tensor:
        if self.kind == "in one row":
            rows = self.table(words.reshape(-1)).view(*words.shape, 16)
        elif self.kind == "of another type":
            rows = self.table(words.long())
        elif self.kind == "by brackets":
            rows = self.table.weight[words]
        elif self.kind == "computed":
            rows = self.table(words + 1)
        elif self.kind == "where the largest is":
            rows = self.table(words.argmax(1, keepdim=True))
        else:
            rows = self.table(words)
        return self.head(rows.mean(1))


SHOWN = ("in one row", "of another type", "by brackets")


class Signed(nn.Module):
    """Takes whole numbers of either sign as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float()).relu()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "index"), [("rows", -1), ("rows", 50), ("rows", 2**40), *((kind, 50) for kind in SHOWN)])
def test_an_index_that_no_row_has_is_refused_as_the_network_refuses_it(
    name: str, kind: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    won_by(name, monkeypatch)
    network, words = Words(kind).eval(), torch.randint(50, (2, 7), dtype=torch.int32 if kind == "of another type" else torch.int64)
    model = fast(network, "cpu", example=words)
    assert why(model).rows[0].kernel == name
    assert torch.allclose(model(words), network(words), atol=1e-5)
    words[1, 3] = index
    with pytest.raises(IndexError):
        model(words)
    assert any("beyond its table" in note for note in why(model).plans[0].notes) == (name != "channels_last")


@pytest.mark.parametrize("name", NAMES)
def test_negative_numbers_that_are_no_index_are_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    won_by(name, monkeypatch)
    network, x = Signed().eval(), torch.randint(50, (2, 7))
    model = fast(network, "cpu", example=x)
    assert torch.allclose(model(-x), network(-x), atol=1e-5)


def test_an_index_that_is_computed_is_left_to_pytorch() -> None:
    network, words = Words("computed").eval(), torch.randint(40, (2, 7))
    with pytest.warns(UserWarning, match="an index is computed"):
        model = fast(network, "cpu", example=words)
    assert torch.allclose(model(words), network(words), atol=1e-5)
    with pytest.raises(IndexError):
        model(torch.full_like(words, 49))


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_was_looked_for_is_an_index(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    won_by(name, monkeypatch)
    network, words = Words("where the largest is").eval(), torch.randint(50, (2, 7))
    model = fast(network, "cpu", example=words)
    assert why(model).rows[0].kernel == name
    assert torch.allclose(model(3 * words), network(3 * words), atol=1e-5)
