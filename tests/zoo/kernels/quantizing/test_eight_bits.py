"""int8 and fp8 for GPUs: the chain of narrow layers by its definition on a CPU, what is kept of it, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.quantizing.pictures import Chain, distance, shapes
from zoo.kernels import fast
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.graph import Graph
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.narrowing import narrow
from zoo.kernels.plans.program import Program
from zoo.kernels.plans.ranges import KINDS, Scales, measure
from zoo.kernels.quantizing import certify
from zoo.kernels.quantizing.certificate import Reference, compare
from zoo.kernels.quantizing.certify import slower
from zoo.kernels.quantizing.eight_bits import EightBits, filled
from zoo.kernels.quantizing.tolerance import Tolerance
from zoo.kernels.reports.report import Row
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")
NEAR = {"int8": 0.05, "fp8": 0.12}
"""Relative errors of a few layers in these types."""


class Tokens(nn.Module):
    """A patch embedding and a transformer's MLP behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.norm = nn.Conv2d(3, 32, 4, stride=4), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 8 classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "tokens": Tokens}


def understood(network: nn.Module, images: Tensor) -> tuple[Graph, Any]:
    return understand(network.eval(), (images,), {}, CPU, islands=True)


def measured(network: nn.Module, kind: str, images: Tensor) -> Scales:
    return measure(*understood(network, images), [[images]], kind, CPU)


def narrowed(network: nn.Module, kind: str, keep: frozenset[int] = frozenset()) -> Graph:
    images = shapes(8)
    graph, places = understood(network, images)
    narrow(graph, places, measured(network, kind, images), kind, keep, clip=True)
    graph.prune()
    return graph


def answer(graph: Graph, images: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    program = Program(graph, {}, {}, Setting(CPU, dtype), Weights(), compiled=False)
    given = images.to(dtype).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        return program.run([[given] * len(program.forms[node]) for node in graph.inputs])[0]


def kinds(graph: Graph) -> list[tuple[str, Any]]:
    return [(node.op, node.attrs.get("stored")) for node in graph.steps()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_narrow_layers_are_near_float32(name: str, kind: str) -> None:
    network, images = NETWORKS[name]().eval(), shapes(8)
    with torch.no_grad():
        right = network(images)
    off = distance(answer(narrowed(network, kind), images), right)
    assert 1e-3 < off < NEAR[kind], "8 bits, and the same network"


@pytest.mark.parametrize("kind", KINDS)
def test_no_wide_map_lies_between_narrow_layers(kind: str) -> None:
    """The first layer writes 8 bits, a pool hands them on, a shortcut is read as it is stored, and only the mean reads a wide map."""
    found, dtype = kinds(narrowed(Chain(), kind)), KINDS[kind]
    assert [op for op, _ in found if op == "quantize"] == []
    assert found.count(("narrow_conv", dtype)) == 3
    assert found.count(("narrow_conv", None)) == 1
    assert ("conv", dtype) in found
    assert ("pool", dtype) in found


@pytest.mark.parametrize("kind", KINDS)
def test_a_shortcut_that_is_only_added_is_stored_narrow_too(kind: str) -> None:
    """A projection's output, which no layer multiplies."""

    class Projected(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.enter(torch.relu(self.stem(x))))
            return self.head(torch.relu(self.last(torch.relu(self.narrow(torch.relu(self.widen(x))) + self.enter(x)))).mean((2, 3)))

    found = kinds(narrowed(Projected(), kind))
    assert found.count(("narrow_conv", KINDS[kind])) == 4
    assert [op for op, _ in found if op == "quantize"] == []


def test_every_calibration_image_calibrates_in_full_batches() -> None:
    parts = filled(50, 8)
    assert {len(part) for part in parts} == {8}
    assert set(torch.cat(parts).tolist()) == set(range(50))


def test_a_layer_norm_writes_what_the_layer_behind_it_reads() -> None:
    found = kinds(narrowed(Tokens(), "fp8"))
    assert ("layer_norm", torch.float8_e4m3fn) in found
    assert ("quantize", torch.float8_e4m3fn) not in found


def test_a_layer_that_is_kept_stays_wide_and_the_next_rounds_what_it_reads() -> None:
    network, images = Chain(), shapes(8)
    scales = measured(network, "int8", images)
    kept = frozenset([sorted(scales.means)[1]])
    graph, places = understood(network, images)
    assert narrow(graph, places, scales, "int8", kept, clip=True) == 3
    assert ("quantize", torch.int8) in kinds(graph)


def test_what_may_make_nan_of_numbers_is_followed_by_no_int8() -> None:
    """int8 has no NaN, which fp8 hands on."""
    network = Chain(middle=lambda x: torch.log(x + 1))
    layers = {kind: len(measured(network, kind, shapes(8)).means) for kind in KINDS}
    assert (layers["fp8"], layers["int8"]) == (4, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_image_that_is_not_finite_answers_nan_and_no_other_does(kind: str, value: float) -> None:
    graph, images = narrowed(Chain(), kind), shapes(8)
    bad = images.clone()
    bad[2, 1, 3, 3] = value
    found, right = answer(graph, bad), answer(graph, images)
    assert bool(found[2].isnan().any())
    assert torch.equal(found[[0, 1, 3]], right[[0, 1, 3]])


class Pools(nn.Module):
    """A value that a convolution reads beside the second of two maxima of it, which an outlier is no part of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.enter = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.wide, self.deep, self.head = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 8 classes."""
        x = torch.relu(self.enter(torch.relu(self.stem(x))))
        deep = nn.functional.max_pool2d(nn.functional.max_pool2d(x, 2, ceil_mode=True)[:, :, :, :], 3, stride=5)
        return self.head(torch.cat([torch.relu(self.wide(x)).mean((2, 3)), torch.relu(self.deep(deep)).mean((2, 3))], 1))


def test_maxima_of_maxima_have_the_scale_of_what_they_are_made_of() -> None:
    """The second one, which leaves an outlier out, is measured by itself: its smaller range must not become the first one's."""
    network, images = Pools().eval(), shapes(8)
    images[:, :, 15, 15] = 30.0
    graph, places = understood(network, images)
    with torch.no_grad():
        right = network(images)
    narrow(graph, places, measured(network, "fp8", images), "fp8", frozenset(), clip=True)
    graph.prune()
    assert [kind for op, kind in kinds(graph) if op == "pool"] == [torch.float8_e4m3fn] * 2
    assert distance(answer(graph, images), right) < NEAR["fp8"]


def test_no_int8_follows_what_may_make_nan_however_far_behind() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(3)))
            self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(torch.log(self.stem(x))).mean((2, 3)))

    with pytest.raises(Untraceable, match="no dense layer"):
        measured(Logs(), "int8", shapes(8).abs())


def test_an_output_that_is_not_one_for_each_image_is_nan_as_a_whole() -> None:
    class Pixels(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.enter(torch.relu(self.stem(x))))
            return self.narrow(self.widen(x)).permute(0, 2, 3, 1).reshape(-1, 32)

    graph, images = narrowed(Pixels(), "int8"), shapes(8)
    assert not bool(answer(graph, images).isnan().any())
    images[2, 1, 3, 3] = torch.nan
    assert bool(answer(graph, images).isnan().all())


def test_another_graph_is_refused() -> None:
    scales = measured(Chain(), "int8", shapes(8))
    graph, places = understood(Tokens(), shapes(8))
    with pytest.raises(Untraceable, match="the ranges for int8 were measured on another graph"):
        narrow(graph, places, scales, "int8", frozenset(), clip=True)


def test_a_network_without_such_layers_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    with pytest.raises(Untraceable, match="no dense layer of 16 channels"):
        measured(network, "int8", shapes(8))


def test_calibration_that_overflows_is_refused() -> None:
    images = shapes(8)
    images[0, 0, 0, 0] = torch.inf
    with pytest.raises(Untraceable, match="infinite or NaN on the calibration images"):
        measured(Chain(), "fp8", images)


@pytest.fixture
def made() -> EightBits:
    network, images = Chain().eval(), shapes(8)
    with torch.no_grad():
        right = network(images)
    reference = Reference([right], True)
    found = compare(reference, [right + 0.01], "int8", "a test", Tolerance(top1=0.9), calibrated=8, digest="0")
    scales = measured(network, "int8", images)
    return EightBits("int8", (3, 16, 16), scales, frozenset([1]), True, images, (right,), "state", frozenset(), 0.03, found, "key")


def test_it_is_written_and_read(made: EightBits, tmp_path: Path) -> None:
    made.save(tmp_path / "made.safetensors")
    again = EightBits.load(tmp_path / "made.safetensors")
    assert again.scales.steps == made.scales.steps
    assert again.scales.clipped == made.scales.clipped
    assert all(torch.equal(again.scales.means[index], mean) for index, mean in made.scales.means.items())
    assert (again.certificate, again.keep, again.error, again.digest) == (made.certificate, made.keep, made.error, made.digest)
    assert torch.equal(pickle.loads(pickle.dumps(again)).witness, made.witness)


def test_a_damaged_file_says_so(made: EightBits, tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    made.save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="no network in 8 bits, or it is damaged"):
        EightBits.load(path)


@pytest.mark.parametrize(("error", "passes"), [(0.001, True), (0.5, False)])
def test_a_plan_is_held_to_the_certified_error(made: EightBits, error: float, passes: bool) -> None:
    batches = made.batches(3, CPU)
    assert [len(args[0]) for args, _ in batches] == [3, 3, 3]
    count = len(made.witness)
    right = torch.cat([made.right[0], made.right[0][:1]])
    off = right + error * right.norm() / right.numel() ** 0.5
    found = made.compare([[part] for part in off.split(3)])
    assert found.images == count
    assert found.passes() is passes
    assert "int8: relative error" in str(found)


def test_a_plan_is_held_to_what_was_asked(made: EightBits) -> None:
    certified = replace(made, error=0.02)
    assert certified.limit == pytest.approx(0.03)
    assert replace(certified, certificate=replace(made.certificate, tolerance=Tolerance(error=0.025))).limit == 0.025


def test_before_there_is_a_certificate_any_error_passes(made: EightBits) -> None:
    new = replace(made, error=float("inf"), certificate=None)
    assert new.compare([[torch.zeros_like(made.right[0])]]).passes()


def test_layers_that_are_slower_are_found_whatever_kernels_join_them() -> None:
    scales = Scales([("conv", ("a",)), ("conv", ("b",)), ("conv", ("c",)), ("conv", ("d",))], means=dict.fromkeys(range(4), torch.zeros(1)))
    wide = [Row("a, b", "join", (), 10.0), Row("c", "conv", (), 4.0), Row("d", "conv", (), 4.0)]
    tight = [
        Row("a", "narrow_conv", (), 4.0),
        Row("b", "narrow_conv", (), 5.0),
        Row("c", "quantize", (), 2.0),
        Row("c", "narrow_conv", (), 3.0),
    ]
    tight.append(Row("d", "narrow_conv", (), 2.0))
    assert slower(wide, tight, scales) == {2}


def test_nothing_is_certified_where_every_layer_stays_wide(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Speed may leave one layer narrow, and accuracy take that one."""
    network, images = Chain().eval(), shapes(8)
    scales = measured(network, "int8", images)
    layers = sorted(scales.means)
    first = EightBits("int8", (3, 16, 16), scales, frozenset(), True, images, (), "state")
    monkeypatch.setattr(certify, "candidates", lambda *_: [replace(first, keep=frozenset(layers[:1]))])
    monkeypatch.setattr(certify, "_slow", lambda *_: (frozenset(layers[1:]), "narrow"))
    monkeypatch.setattr(certify, "_digest", lambda *_: "0")
    built: list[Any] = []
    given: Any = (images, "int8", torch.bfloat16, Tolerance(error=1.0), None, CPU, (8, 3, 16, 16))
    assert certify.certified(network, *given, lambda made: built.append(made) or "wide", lambda text: None) == ("wide", None)
    assert built == [None]


def test_fp8_is_for_gpus() -> None:
    with pytest.raises(ValueError, match=r'dtype="fp8" is for GPUs of compute capability 8\.9'):
        fast(Chain(), "cpu", "fp8", calibration=shapes(96))


@pytest.mark.parametrize(("kind", "needs"), [("fp8", "8.9"), ("int8", "8.0")])
def test_a_gpu_that_has_no_such_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str, needs: str) -> None:
    from zoo.kernels.api.precisions import Wanted, proven

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    wanted = Wanted(kind, shapes(96), None, None, None, None, "quick", False)
    with pytest.raises(ValueError, match=rf'dtype="{kind}" needs a GPU of compute capability {needs} or later, and cuda:0 has 7\.5'):
        proven(Chain(), torch.device("cuda:0"), wanted)
