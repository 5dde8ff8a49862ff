"""`fast(model, "cuda", "int8" | "fp8", calibration=...)` on a GPU: certified, held to it, kept, and not taken where it is no faster."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.kernels.quantizing.pictures import Chain, distance, shapes
from zoo.kernels import Fast, fast, plain, why
from zoo.kernels.plans.ranges import KINDS
from zoo.kernels.quantizing import certify

pytestmark = pytest.mark.gpu
LOOSE = {"error": 0.3}


@pytest.fixture(scope="module", params=KINDS)
def eight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On a GPU, with a folder of its own for what is kept."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("eight")))
    patch.setattr(certify, "_slow", lambda made, build, say: (frozenset(), build(made)))  # so small a network is no faster in 8 bits
    network = Chain().eval()
    example = shapes(32)
    options: dict[str, Any] = {"calibration": shapes(96), "tolerance": LOOSE, "example": example, "progress": False}
    yield fast(network, "cuda", request.param, **options), request.param, options
    patch.undo()


def test_it_is_certified_and_says_so(eight: Any) -> None:
    model, kind, _ = eight
    images = shapes(32, seed=7)
    with torch.no_grad():
        right = plain(model)(images)
    assert 1e-4 < distance(model(images.cuda()).cpu(), right) < 0.3
    said = " ".join(str(why(model)).split())
    assert model.precision == kind
    assert f"{kind} proven" in said
    assert "48 images that calibrated nothing" in said
    assert "narrow_conv" in said or "narrow_cudnn" in said or "left wide because" in said


def test_an_image_that_is_not_finite_answers_nan(eight: Any) -> None:
    model, _, _ = eight
    images = shapes(32, seed=3).cuda()
    right = model(images).clone()
    images[5, 0, 2, 2] = torch.nan
    found = model(images)
    assert bool(found[5].isnan().any())
    assert torch.equal(found[:5], right[:5])


def test_another_batch_is_held_to_the_certificate(eight: Any) -> None:
    model, kind, _ = eight
    images = shapes(5, seed=2)
    with torch.no_grad():
        right = plain(model)(images)
    assert distance(model(images.cuda()).cpu(), right) < 0.3
    assert kind in str(model.report().plans[-1].parity) or "computed in bfloat16" in str(model.report())


def test_another_size_is_computed_in_half_precision(eight: Any) -> None:
    model, _, _ = eight
    images = shapes(4, side=24)
    with torch.no_grad():
        right = plain(model)(images)
    assert distance(model(images.cuda()).cpu(), right) < 0.03
    assert "computed in bfloat16" in " ".join(str(why(model)).split())


def test_it_is_made_once_and_pickled_with_its_certificate(eight: Any) -> None:
    model, kind, options = eight
    again = fast(plain(model), "cuda", kind, **options)
    assert again.quantized.digest == model.quantized.digest
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: Fast = torch.load(stream, weights_only=False)
    assert loaded.proofs == model.proofs
    images = shapes(32, seed=1).cuda()
    assert distance(loaded(images).cpu(), model(images).float().cpu()) < 0.05


def test_other_weights_lose_the_certificate(eight: Any) -> None:
    model = copy.deepcopy(eight[0])
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    images = shapes(32).cuda()
    with torch.no_grad():
        right = plain(model)(images.cpu())
    assert distance(model(images).cpu(), right) < 0.03
    assert model.proofs == []


def test_what_is_no_faster_is_not_taken(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "_slow", lambda made, build, say: (None, build(None)))
    with pytest.warns(UserWarning, match="int8 is no faster than bfloat16 here"):
        model = fast(Chain(), "cuda", "int8", calibration=shapes(96), tolerance=LOOSE, example=shapes(32), progress=False)
    assert model.precision == "bfloat16"


def test_auto_names_what_it_took_and_what_the_others_lose(own_cache: Path) -> None:
    model = fast(Chain(), "cuda", "auto", calibration=shapes(96), tolerance=LOOSE, example=shapes(32), progress=False)
    said = " ".join(str(why(model)).split())
    assert 'the fastest whose certificate holds, by dtype="auto"' in said
    assert all(name in said for name in ("bfloat16", "int8", "fp8"))
