"""`fast(model, "cpu", "int8", calibration=...)`: its answers, its certificate, its cache, and what it refuses."""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.zoo.kernels.quantizing.pictures import Tiny, shapes
from zoo import ResNet20, features, trained
from zoo.kernels import Fast, fast, plain, why
from zoo.kernels.api import precisions
from zoo.kernels.engines.export import Form
from zoo.kernels.quantizing import by_nncf, by_onnxruntime, keeping, plan, quantize
from zoo.kernels.quantizing import quantized as stored
from zoo.kernels.quantizing.quantize import NotCertified
from zoo.kernels.quantizing.tolerance import Tolerance

pytestmark = pytest.mark.nncf
LOOSE = {"error": 0.3}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return Tiny().eval()


@pytest.fixture
def int8(network: nn.Module, shared_cache: Path) -> Fast:
    return fast(network, "cpu", "int8", calibration=shapes(96), tolerance=LOOSE, progress=False)


@pytest.fixture
def shared_cache(tmp_path_factory: pytest.TempPathFactory, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quantise once for all tests here: half a second each."""
    folder = tmp_path_factory.getbasetemp() / "int8"
    monkeypatch.setenv("ZOO_CACHE", str(folder))
    return folder


def told(model: Fast) -> str:
    """Return what `why` says, without the breaks of its lines."""
    return " ".join(str(why(model)).split())


def distance(ours: Tensor, right: Tensor) -> float:
    return ((ours - right).norm() / right.norm()).item()


def test_answers_are_near_float32s_and_say_so(int8: Fast, network: nn.Module) -> None:
    images = shapes(5, seed=9)
    with torch.no_grad():
        right = network(images)
    off = distance(int8(images), right)
    assert 1e-3 < off < 0.4, "int8, and this network"
    certificate = int8.proofs[0]
    assert certificate.proven
    assert certificate.calibrated == 48
    assert certificate.images == 48
    said = told(int8)
    assert "int8 on cpu" in said
    assert "int8 proven" in said
    assert "same top-1" in said
    assert "48 images that calibrated nothing" in said
    assert int8.precision == "int8"
    assert "dtype=int8" in repr(int8)


def test_a_batch_gives_what_its_images_give(int8: Fast) -> None:
    images = shapes(3, seed=8)
    assert distance(int8(images), torch.cat([int8(image[None]) for image in images])) < 0.02


def test_another_size_is_computed_in_float32(int8: Fast, network: nn.Module) -> None:
    images = shapes(2, side=20)
    with torch.no_grad():
        assert distance(int8(images), network(images)) < 1e-5
    assert "computed in float32: int8 was certified for images of 3x16x16 alone" in told(int8)


def test_the_network_stays_as_it_was(network: nn.Module, int8: Fast) -> None:
    assert plain(int8) is network
    assert int8.state_dict().keys() == network.state_dict().keys()


def test_it_is_made_once(network: nn.Module, int8: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_nncf, "Float", lambda *given: pytest.fail("it was quantised before"))
    again = fast(network, "cpu", "int8", calibration=shapes(96), tolerance=LOOSE, progress=False)
    assert again.proofs == int8.proofs


def test_other_weights_images_or_tolerance_are_another_network(network: nn.Module, int8: Fast) -> None:
    from zoo.kernels.quantizing.images import gather
    from zoo.kernels.quantizing.tolerance import Tolerance

    other = copy.deepcopy(network)
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    images, more = gather(network, shapes(96)), gather(network, shapes(96, seed=3))
    asked = [
        (network, images, Tolerance(0.9)),
        (network, more, Tolerance(0.9)),
        (other, images, Tolerance(0.9)),
        (network, images, Tolerance(0.8)),
    ]
    assert len({quantize.digest(*each, True) for each in asked}) == 4


def test_a_damaged_file_of_the_cache_is_made_anew(network: nn.Module, own_cache: Path) -> None:
    made = fast(network, "cpu", "int8", calibration=shapes(64), tolerance=LOOSE, progress=False)
    assert made.quantized is not None
    file = keeping._place("int8", made.quantized.digest)
    file.write_bytes(file.read_bytes()[:1000])
    again = fast(network, "cpu", "int8", calibration=shapes(64), tolerance=LOOSE, progress=False)
    assert again.proofs == made.proofs
    assert file.stat().st_size > 1000
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("part", ["weights", "graph"])
def test_a_byte_that_changed_in_the_cache_is_noticed(part: str, network: nn.Module, own_cache: Path, caplog: Any) -> None:
    first = fast(network, "cpu", "int8", calibration=shapes(64), tolerance=LOOSE, progress=False)
    (file,) = own_cache.rglob("int8/*.safetensors")
    held = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(held[:8], "little")
    place = json.loads(held[8:start])[part]["data_offsets"]
    held[start + sum(place) // 2] ^= 1
    file.write_bytes(held)
    with caplog.at_level(logging.WARNING, "zoo"):
        again = fast(network, "cpu", "int8", calibration=shapes(64), tolerance=LOOSE, progress=False)
    assert f"{file.name} is damaged: its bytes are not those that were written; it is made anew" in caplog.text
    assert torch.equal(again(shapes(2)), first(shapes(2)))
    assert file.read_bytes() != held


def reloaded(model: Fast) -> Fast:
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def test_it_saves_and_loads_with_its_certificate(int8: Fast) -> None:
    again, images = reloaded(int8), shapes(2)
    assert again.proofs == int8.proofs
    assert "int8 proven" in told(again), "before a first call too"
    assert torch.equal(again(images), int8(images))
    assert torch.equal(copy.deepcopy(int8)(images), int8(images))


def test_another_processor_checks_it_again(int8: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "machine", lambda engine: "another processor; avx2; openvino 1")
    again = reloaded(int8)
    assert again.proofs[0].proven
    assert "checked again on another processor: 8 of the images" in why_of(again)


def test_another_processor_that_gives_other_answers_does_not_use_it(
    int8: Fast, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(int8.quantized, stored.Quantized)
    turned = tuple(-one for one in int8.quantized.certified)
    monkeypatch.setattr(int8, "quantized", replace(int8.quantized, certified=turned, machine="the first"))
    again, images = reloaded(int8), shapes(2)
    assert again.proofs[0].state == "UNPROVEN"
    with torch.no_grad():
        assert distance(again(images), network(images)) < 1e-5
    assert "it was certified on another machine, and gives other answers here" in told(again)


def test_what_was_broken_elsewhere_holds_where_it_was_certified(int8: Fast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certified = int8.quantized
    assert isinstance(certified, stored.Quantized)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "machine", lambda engine: "another processor; avx2; openvino 1")
        patch.setattr(stored.Quantized, "build", lambda *_, **__: 1 / 0)
        broken = certified.checked()
        assert broken.proof.state == "UNPROVEN"
        assert "this machine can't check it" in broken.proof.rechecked
        broken.save(tmp_path / "int8.safetensors")
    again = stored.Quantized.load(tmp_path / "int8.safetensors").checked()
    assert (again.proof, again.broken) == (certified.certificate, "")
    assert broken.checked().proof == certified.certificate


def test_another_processor_is_held_to_what_was_asked(int8: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    certified = int8.quantized
    assert isinstance(certified, stored.Quantized)
    monkeypatch.setattr(stored, "machine", lambda engine: "another processor; avx2; openvino 1")
    monkeypatch.setattr(stored, "LEAST", 1.0)
    for asked, state in ((Tolerance(error=0.3), "proven"), (Tolerance(error=1e-9), "UNPROVEN")):
        certificate = replace(certified.certificate, tolerance=asked, error=0.0)
        found = replace(certified, certified=certified.right, certificate=certificate).checked()
        assert found.proof.state == state, found.proof.rechecked
        assert ("further from float32 here than was asked" in found.broken) == (state == "UNPROVEN")


@pytest.mark.parametrize(("flips", "state"), [(1, "proven"), (2, "UNPROVEN")])
def test_another_processor_keeps_the_classes_that_were_certified(
    flips: int, state: str, int8: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the eight may lie between two classes, where another rounding decides; two are no such chance."""
    certified = int8.quantized
    assert isinstance(certified, stored.Quantized)
    monkeypatch.setattr(stored, "machine", lambda engine: "another processor; avx2; openvino 1")
    monkeypatch.setattr(stored, "LEAST", 10.0)
    (here,) = (one.clone() for one in certified.certified)
    here[:flips] = here[:flips].roll(1, 1)
    certificate = replace(certified.certificate, tolerance=Tolerance(top1=0.5), top1=certified.certificate.images)
    found = replace(certified, certified=(here,), certificate=certificate).checked()
    assert found.proof.state == state
    assert ("2 of 8 images have another class here" in found.broken) == (flips == 2)


def test_layers_of_a_trained_network_read_a_folder_as_it_does(own_cache: Path, tmp_path: Path) -> None:
    for index, image in enumerate(shapes(70, 32).sigmoid()):
        Image.fromarray((255 * image).byte().permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    network = features(trained(ResNet20), at="embedding")
    model = fast(network, "cpu", "int8", calibration=str(tmp_path), tolerance={"error": 0.5}, progress=False)
    assert model.proofs[0].images == 35
    untrained = features(ResNet20(), at="embedding")
    with pytest.raises(ValueError, match="ResNet20 has no checkpoint"):
        fast(untrained, "cpu", "int8", calibration=str(tmp_path), progress=False)


def test_auto_keeps_the_certificates_of_all_precisions(int8: Fast) -> None:
    model = copy.deepcopy(int8)
    other = replace(int8.proofs[0], precision="bfloat16")
    model.proofs = [other, *model.proofs]
    assert [proof.precision for proof in reloaded(model).proofs] == ["bfloat16", "int8"]


class Standardised(nn.Module):
    """A network that divides each image by its deviation: 0 / 0 for a black image."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny()

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_nan_that_arises_inside_is_answered_by_the_network_itself(engine: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Standardised().eval()
    monkeypatch.setattr(by_nncf if engine == "onnxruntime" else by_onnxruntime, "absent", lambda: "left out")
    model = fast(network, "cpu", "int8", calibration=shapes(64), tolerance={"error": 1.0}, progress=False)
    image = shapes(1, seed=7)
    with torch.no_grad():
        assert 1e-4 < distance(model(image), network(image)) < 1.0
    assert why(model).rows[0].kernel == f"{engine} int8"
    assert model(torch.zeros(1, 3, 16, 16)).isnan().all()
    assert model(image).isfinite().all()


def test_a_batch_goes_on_in_the_way_that_has_won(network: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = shapes(4)
    given: dict[str, Any] = {"calibration": shapes(96), "tolerance": LOOSE, "progress": False}
    for winner in ("openvino int8", "openvino int8/1"):
        with monkeypatch.context() as patch:
            patch.setattr(plan, "fastest", lambda trial, *_, winner=winner: (dict.fromkeys(trial.calls, 1e-3), winner))
            choices = own_cache / winner.replace("/", "-")
            patch.setenv("ZOO_CACHE", str(choices))
            first = fast(network, "cpu", "int8", example=images, **given)
            patch.setattr(plan, "fastest", lambda *_: pytest.fail("it was timed again"))
            second = fast(network, "cpu", "int8", example=images, **given)
        assert [why(one).rows[0].kernel for one in (first, second)] == [winner, winner]
        assert why(second).rows[0].us == pytest.approx(1000)


def why_of(model: Fast) -> str:
    model(shapes(1))
    return told(model)


def test_other_weights_lose_the_certificate(network: nn.Module, int8: Fast) -> None:
    model = copy.deepcopy(int8)
    model.load_state_dict({name: 2 * value if value.is_floating_point() else value for name, value in network.state_dict().items()})
    images = shapes(2)
    with torch.no_grad():
        assert distance(model(images), plain(model)(images)) < 1e-5
    assert model.precision == "float32"
    assert "other weights were loaded" in told(model)


def test_without_real_images_it_is_unproven(network: nn.Module, shared_cache: Path) -> None:
    with pytest.warns(UserWarning, match="int8 is UNPROVEN for Tiny: no real images were given"):
        model = fast(network, "cpu", "int8", example=shapes(1), tolerance=LOOSE, progress=False)
    assert not model.proofs[0].proven
    assert "int8 UNPROVEN, no real images were given: these are made up" in told(model)


def test_what_keeps_too_little_is_refused_with_what_was_found(
    network: nn.Module, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "KEEP", (1,))  # half a second for each candidate
    with pytest.raises(NotCertified, match=r"int8 is refused for Tiny: of \d candidates .* relative error of at most 1e-06") as caught:
        fast(network, "cpu", "int8", calibration=shapes(64), tolerance={"error": 1e-6}, progress=False)
    assert len(caught.value.certificates) > 1
    assert all(one.state == "refused" for one in caught.value.certificates)


def test_a_layer_that_hurts_stays_in_float_and_is_named(shared_cache: Path) -> None:
    network = Tiny(wide=3000.0).eval()
    images = shapes(64)
    with pytest.raises(NotCertified):
        quantize_first_only(network, images)
    model = fast(network, "cpu", "int8", calibration=images, tolerance={"error": 0.3}, progress=False)
    certificate = model.proofs[0]
    assert certificate.holds()
    assert certificate.tried > 1
    assert "stem.0" in certificate.kept, "the convolution whose channel is wide"
    assert set(certificate.kept) <= {name for name, _ in network.named_modules()}
    assert "layers stay in float by their measured effect" in told(model)


def quantize_first_only(network: nn.Module, images: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "KEEP", ())
        patch.setattr(quantize.by_onnxruntime, "absent", lambda: "left out")
        fast(network, "cpu", "int8", calibration=images, tolerance={"error": 0.3}, progress=False)


def test_onnxruntime_quantises_where_nncf_is_absent(network: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_nncf, "absent", lambda: "nncf is not installed: pip install 'kernelzoo[int8]'")
    model = fast(network, "cpu", "int8", calibration=shapes(64), tolerance=LOOSE, progress=False)
    images = shapes(3)
    assert "onnxruntime" in model.proofs[0].by
    assert "onnxruntime int8" in why(model).rows[0].kernel
    with torch.no_grad():
        assert 1e-3 < distance(model(images), network(images)) < 0.4
    assert torch.equal(reloaded(model)(images), model(images))


@pytest.mark.parametrize(("has", "most", "said"), [(("int8",), 127, "per channel"), ((), 64, "per channel, weights in 7 bits")])
def test_weights_have_7_bits_where_sums_of_products_would_overflow(
    has: tuple[str, ...], most: int, said: str, network: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(stored, "narrow_kinds", lambda: has)
    monkeypatch.setattr(by_onnxruntime.platform, "machine", lambda: "x86_64")
    given = shapes(64)
    form = Form.of(network(given[:1]))
    graph, _ = by_onnxruntime.quantize(network, given, form)
    arrays = [onnx.numpy_helper.to_array(one) for one in onnx.load_from_string(graph).graph.initializer]
    assert max(int(np.abs(array.astype(int)).max()) for array in arrays if array.dtype == np.int8 and array.ndim == 4) == most
    monkeypatch.setattr(by_nncf, "absent", lambda: "left out")
    model = fast(network, "cpu", "int8", calibration=given, tolerance={"error": 1.0}, progress=False)
    assert model.proofs[0].by.endswith(said)


def test_without_both_it_says_what_to_install(network: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (by_nncf, quantize.by_onnxruntime):
        monkeypatch.setattr(package, "absent", lambda: "it is not installed: pip install 'kernelzoo[int8]'")
    with pytest.raises(ValueError, match=r"kernelzoo\[int8\]"):
        fast(network, "cpu", "int8", calibration=shapes(64), progress=False)


def test_auto_takes_the_fastest_that_is_proven(network: nn.Module, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "KEEP", (1,))
    taken = {"float32": 3.0, "bfloat16": 2.0, "int8": 1.0}
    monkeypatch.setattr(precisions, "_timed", lambda calls, example: {name: taken[name] for name in calls})
    model = fast(network, "cpu", "auto", calibration=shapes(96), tolerance=LOOSE, progress=False)
    assert model.precision == "int8"
    assert "3.00x" in told(model)
    assert "the fastest whose certificate holds" in told(model)
    taken["int8"] = 4.0
    slower = fast(network, "cpu", "auto", calibration=shapes(96), tolerance=LOOSE, progress=False)
    assert slower.precision in ("float32", "bfloat16")  # the second where the processor has it
    exact = fast(network, "cpu", "auto", calibration=shapes(96), tolerance={"error": 1e-9}, progress=False)
    assert exact.precision == "float32"
    assert "refused" in told(exact)


def test_auto_without_images_stays_in_float32(network: nn.Module, shared_cache: Path) -> None:
    model = fast(network, "cpu", "auto", example=shapes(1), progress=False)
    assert model.precision == "float32"
    assert "nothing narrower can be proven without calibration=" in told(model)


def test_the_default_says_what_is_left_on_the_table(network: nn.Module, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "instructions", lambda: ("avx512_vnni",))
    model = fast(network, "cpu", example=shapes(1), progress=False)
    assert "float32 is the default; this CPU also computes int8" in told(model)
    monkeypatch.setattr(stored, "instructions", tuple)
    assert "the default" not in told(model)


def test_precisions_are_shown_beside_each_other(network: nn.Module, shared_cache: Path) -> None:
    said = str(why(fast(network, "cpu", example=shapes(1), progress=False), precisions=True))
    assert "float32" in said
    assert "the reference" in said
    assert "int8" in said
    assert "UNPROVEN" in said


def test_precisions_are_measured_of_images_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="answered one tensor of images"):
        why(fast(nn.Linear(3, 2), "cpu", example=torch.zeros(1, 3), progress=False), precisions=True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "calibration alone": ({"calibration": []}, 'calibration goes with dtype="int8"'),
    "a tolerance alone": ({"tolerance": 0.9}, 'tolerance goes with dtype="int8"'),
    "check alone": ({"dtype": "int8", "check": []}, "check goes with calibration="),
    "training": ({"dtype": "int8", "train": True}, "goes without train=True"),
    "another word": ({"dtype": "int4"}, "dtype is no 'int4'"),
    "a word for a dtype": ({"dtype": "bfloat16"}, r"use dtype=torch\.bfloat16"),
    "a tolerance in percent": ({"dtype": "int8", "calibration": shapes(64), "tolerance": 98}, r"write 98 % as 0\.98"),
    "an example of another size": ({"dtype": "int8", "calibration": shapes(64), "example": shapes(1, side=20)}, "images of 3x20x20"),
    "several arguments": ({"dtype": "int8", "example": (shapes(1), shapes(1))}, "one float tensor of images"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused(network: nn.Module, case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(ValueError, match=said), warnings.catch_warnings():
        fast(network, "cpu", progress=False, **given)


def test_nncf_leaves_other_peoples_logging_alone() -> None:
    by_nncf.imported()
    heard = logging.NullHandler(logging.DEBUG)
    logging.getLogger("nncf").addHandler(heard)  # as pytest does with loggers that hand nothing on
    try:
        by_nncf.imported()
        assert heard.level == logging.DEBUG
    finally:
        logging.getLogger("nncf").removeHandler(heard)
    assert logging.getLoggerClass() is logging.Logger
    assert logging.root.manager.disable == logging.NOTSET
