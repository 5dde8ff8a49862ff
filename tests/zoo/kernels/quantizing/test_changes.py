"""Networks that change after they were quantised or proven: what was proven of others must not answer. A stub stands for int8."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.quantizing.pictures import shapes
from zoo.kernels import Fast, plain, why
from zoo.kernels.quantizing import keeping, quantize
from zoo.kernels.quantizing import quantized as stored
from zoo.kernels.quantizing.certificate import Certificate
from zoo.kernels.quantizing.images import gather
from zoo.kernels.quantizing.quantized import Quantized, state_of
from zoo.kernels.quantizing.tolerance import Tolerance

CPU = torch.device("cpu")


class Signed(nn.Module):
    """Two convolutions and a classifier. Its settings change what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
        self.sign, self.flipped = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        """Return five numbers for each image."""
        x = x.flip(3) if self.flipped else x
        return self.sign * self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


class Stub(Quantized):
    """Answers with the weights that it was made of, a little off."""

    def build(self, form: Any, batch: int = 1, *, whole: bool = False) -> Callable[..., Any]:
        """Return a fresh network's answers."""
        return Old()


class Old:
    def __init__(self) -> None:
        self.network = Signed().eval()

    def __call__(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return 1.01 * self.network(images)

    def flat(self, images: Tensor) -> list[Tensor]:
        return [self(images)]


def stub() -> Stub:
    images, network = shapes(8), Signed().eval()
    with torch.no_grad():
        right = network(images)
    proof = Certificate("int8", "a stub", 32, 32, "0", Tolerance(error=0.5), 0.01, 1.0, 1.0)
    engine, here = "openvino", stored.machine("openvino")
    made = Stub(engine, b"", b"", (3, 16, 16), ("out",), "float32", proof, here, images, (right,), (1.01 * right,), "key")
    return replace(made, state=state_of(network))


@pytest.fixture
def int8(own_cache: Any) -> Fast:
    return Fast(Signed().eval(), CPU, torch.float32, "none", False, False, stub())


def negate(model: Fast) -> None:
    with torch.no_grad():
        for value in plain(model).parameters():
            value.neg_()


def reloaded(model: Fast) -> Fast:
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def copied_then_changed(model: Fast) -> Fast:
    twin = copy.deepcopy(model)
    negate(twin)
    return twin


def changed_then_copied(model: Fast) -> Fast:
    model(shapes(1))
    negate(model)
    return copy.deepcopy(model)


def changed_then_saved(model: Fast) -> Fast:
    negate(model)
    return reloaded(model)


def saved_then_loaded_into(model: Fast) -> Fast:
    again = reloaded(model)
    plain(again).load_state_dict({name: -value for name, value in model.state_dict().items()})
    return again


def changed_before_its_first_call(model: Fast) -> Fast:
    negate(model)
    return model


CHANGES = [copied_then_changed, changed_then_copied, changed_then_saved, saved_then_loaded_into, changed_before_its_first_call]


@pytest.mark.parametrize("change", CHANGES)
def test_int8_of_other_weights_answers_no_more(int8: Fast, change: Callable[[Fast], Fast]) -> None:
    model, images = change(int8), shapes(2)
    with torch.no_grad():
        assert torch.allclose(model(images), plain(model)(images), atol=1e-6)
    assert model.precision == "float32"
    assert model.proofs == []
    said = " ".join(str(why(model)).split())
    assert "the weights were changed since they were compared: computed in float32, until fast(plain(model), dtype='int8'" in said
    assert "proven" not in said


@pytest.mark.parametrize("again", [copy.deepcopy, reloaded])
def test_int8_of_the_same_weights_goes_on_to_answer(int8: Fast, again: Callable[[Fast], Fast]) -> None:
    model, images = again(int8), shapes(2)
    with torch.no_grad():
        assert torch.allclose(model(images), 1.01 * plain(model)(images))
    assert model.precision == "int8"
    assert model.proofs == int8.proofs
    assert model.proofs[0].proven


def test_int8_of_another_setting_answers_no_more(int8: Fast) -> None:
    model, images = copy.deepcopy(int8), shapes(2)
    plain(model).__dict__["sign"] = -1.0
    with torch.no_grad():
        assert torch.allclose(model(images), plain(model)(images), atol=1e-6)
    assert model.proofs == []
    assert "the network answers otherwise than when it was compared" in " ".join(str(why(model)).split())


def key(network: nn.Module) -> str:
    return quantize.digest(network.eval(), gather(network, shapes(64)), Tolerance(error=0.5), True)


def test_what_a_network_computes_is_in_the_caches_key() -> None:
    networks = [Signed() for _ in range(4)]
    networks[1].sign, networks[2].flipped = -1.0, True
    edited = type("Signed", (Signed,), {"forward": lambda self, x: Signed.forward(self, x).abs(), "__qualname__": "Signed"})
    assert len({key(each) for each in (*networks[:3], edited())}) == 4
    assert key(networks[3]) == key(networks[0])


def test_settings_are_in_the_key_of_a_network_that_cannot_be_traced() -> None:
    class Dependent(Signed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else super().forward(-x)

    one, two = Dependent(), Dependent()
    assert key(one) == key(two)
    two.sign = -1.0
    assert key(one) != key(two)


@pytest.mark.parametrize("same", [True, False])
def test_what_the_cache_holds_is_compared_before_it_is_used(own_cache: Any, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    network, kept = Signed().eval(), stub()
    kept = kept if same else replace(kept, right=tuple(-one for one in kept.right))
    monkeypatch.setattr(keeping, "cached", lambda *_: kept)
    monkeypatch.setattr(quantize, "_candidates", lambda *given: iter([stub()]))
    monkeypatch.setattr(keeping, "keep", lambda *_: None)
    found = quantize.quantized(network, gather(network, shapes(64)), Tolerance(error=0.5), False)
    assert (found is kept) == same
    assert found.made_of(network)


def test_proofs_beside_float32_are_dropped_with_other_weights(own_cache: Any) -> None:
    model = Fast(Signed().eval(), CPU, torch.float32, "none", False, False)
    model.proofs, model.told = [stub().certificate], ["float32: the fastest whose certificate holds"]
    model._proven_of = state_of(plain(model))
    assert copy.deepcopy(model).proofs == model.proofs
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})
    assert model.proofs == []
    assert model.told == ["other weights were loaded: computed in float32, until fast(plain(model), dtype='auto', calibration=...) again"]


def test_a_report_does_not_prove_what_was_changed_in_place(int8: Fast) -> None:
    images = shapes(2)
    int8(images)
    assert "int8 proven" in str(why(int8))
    negate(int8)
    said = str(why(int8))
    assert "proven" not in said
    assert "the weights were changed since they were compared: computed in float32" in said
    with torch.no_grad():
        torch.testing.assert_close(int8(images), plain(int8)(images), rtol=1e-4, atol=1e-5)


def test_a_report_says_that_the_network_itself_answers_where_its_weights_were_changed() -> None:
    single = Fast(Signed().eval(), CPU, torch.float32, "none", False, False)
    single(shapes(1))
    negate(single)
    report = why(single)
    assert report.plans == []
    assert "weights of its network were changed since fast(): the network itself answers, until fast(plain(model)) again" in str(report)


def test_a_row_shows_what_comes_out_and_what_it_replaced(int8: Fast) -> None:
    int8(shapes(2))
    (row,) = int8.report().rows
    assert row.shape == (2, 5)
    assert row.replaced_us is not None
    assert row.replaced_us > 0


@pytest.mark.parametrize(("same", "said"), [(32, "left on the table: int8 is"), (30, "keeps less on these images than the same top-1 of")])
def test_int8_that_would_be_refused_is_not_recommended(int8: Fast, monkeypatch: pytest.MonkeyPatch, same: int, said: str) -> None:
    from zoo.kernels.api import precisions

    single = Fast(Signed().eval(), CPU, torch.float32, "none", False, False)
    single(shapes(1))
    made = replace(stub(), certificate=replace(stub().certificate, top1=same, unproven="made-up images"))
    monkeypatch.setattr(precisions, "quantized", lambda *_: made)
    monkeypatch.setattr(precisions, "_has_bfloat16", lambda: False)
    monkeypatch.setattr(precisions, "_timed", lambda calls, _: {name: 1.0 if name == "int8" else 2.0 for name in calls})
    found = str(why(single, precisions=True)).replace("\n", " ")
    assert said in found
    assert "int8 is 2.00 times as fast here" in found
