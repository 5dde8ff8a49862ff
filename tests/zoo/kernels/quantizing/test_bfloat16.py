"""`dtype="auto"` in bfloat16: which engine is certified, and what later plans are compared with."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.quantizing.pictures import Tiny, shapes
from zoo.kernels import Fast, fast, plain, why
from zoo.kernels.api import precisions
from zoo.kernels.quantizing import bfloat16
from zoo.kernels.quantizing.bfloat16 import Bfloat16, build_bfloat16
from zoo.kernels.quantizing.quantized import version_of
from zoo.kernels.tuning.request import Options, Request

if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)


def left_out(*given: Any) -> Any:
    raise ValueError("left out")


@pytest.fixture
def auto(own_cache: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what takes bfloat16 as on a machine where it is the fastest."""
    taken = {"float32": 3.0, "bfloat16": 1.0}
    monkeypatch.setattr(precisions, "quantized", left_out)
    monkeypatch.setattr(precisions, "_has_bfloat16", lambda: True)
    monkeypatch.setattr(precisions, "_timed", lambda calls, example: {name: taken[name] for name in calls})
    return lambda tolerance=0.3: fast(
        Tiny().eval(), "cpu", "auto", calibration=shapes(64), tolerance={"error": tolerance}, tune="none", progress=False
    )


def told(model: Fast) -> str:
    return " ".join(str(why(model)).split())


def test_the_engine_that_computes_in_bfloat16_is_certified_and_named(auto: Any) -> None:
    model = auto()
    assert model.precision == "bfloat16"
    assert model.proofs[0].by == f"openvino {version_of('openvino')}"
    assert why(model).rows[0].op == "openvino", "whatever engine would win for one image"


def test_another_size_is_computed_in_float32(auto: Any) -> None:
    model, images = auto(), shapes(2, side=20)
    with torch.no_grad():
        assert ((model(images) - plain(model)(images)).norm() / plain(model)(images).norm()).item() < 1e-5
    assert "computed in float32: bfloat16 was certified for images of 3x16x16 alone" in told(model)


def test_other_weights_lose_certificate_and_bfloat16(auto: Any) -> None:
    model, images = auto(), shapes(2)
    model.load_state_dict({name: 2 * value if value.is_floating_point() else value for name, value in plain(model).state_dict().items()})
    with torch.no_grad():
        assert ((model(images) - plain(model)(images)).norm() / plain(model)(images).norm()).item() < 1e-5
    assert (model.precision, model.proofs) == ("float32", [])
    assert "other weights were loaded" in told(model)
    assert "proven" not in told(model)


def test_where_that_engine_fails_bfloat16_is_left_out(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, "ENGINE", "another")
    model = auto()
    assert (model.precision, model.proofs) == ("float32", [])
    assert "bfloat16: another, which computes in it, can't run this network" in told(model)


@pytest.mark.parametrize(("scale", "dtype"), [(1.004, torch.bfloat16), (1.02, torch.float32)])
def test_a_plan_for_another_batch_is_compared_before_it_serves(monkeypatch: pytest.MonkeyPatch, scale: float, dtype: torch.dtype) -> None:
    network: nn.Module = Tiny().eval()
    images = shapes(8)
    with torch.no_grad():
        right = network(images)
    asked: list[torch.dtype] = []

    def build(request: Request) -> Any:
        def run(given: list[Tensor]) -> list[Tensor]:
            assert given[0].shape == request.args[0].shape
            with torch.no_grad():
                return [scale * network(given[0])]

        asked.append(request.options.dtype)
        return SimpleNamespace(run=run, report=SimpleNamespace(notes=[]))

    monkeypatch.setattr(bfloat16, "build_cpu", build)
    certified = Bfloat16((3, 16, 16), images, (right,), 0.004, 0.3, "")
    options, missing = Options(torch.device("cpu"), torch.bfloat16, "none", tf32=False, progress=False), cast(Any, None)
    built = build_bfloat16(certified, Request(network, (shapes(3),), {}, options, missing, missing))
    assert asked[-1] == dtype
    assert built.report.notes == ([] if dtype == torch.bfloat16 else [
        "computed in float32: bfloat16 has an error of 0.02 here, and 0.004 where it was certified"
    ])  # fmt: skip
