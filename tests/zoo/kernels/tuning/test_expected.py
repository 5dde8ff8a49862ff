"""What results are compared with: right values, of the first and last images where they are many, or of all, some at a time."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.kernels.measuring.fresh_thread import elsewhere
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.merge import merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning import contest, expected
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.contest import random_inputs
from zoo.kernels.tuning.expected import Expected
from zoo.kernels.tuning.steps import ATEN, COMPUTED, MERGED, Candidate, Setting

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.bfloat16)


def steps(network: nn.Module, images: Tensor) -> list[tuple[Node, dict[Node, Place]]]:
    """Return the steps of a network that kernels compute, merged ones too."""
    graph, places = understand(network.eval(), (images,), {}, CPU)
    return [(node, places) for node in (*graph.steps(), *(merge.node for merge in merges(graph, places))) if node.op in COMPUTED]


def step(images: int) -> tuple[Node, list[Tensor]]:
    """Return a convolution with ReLU of so many images, 8 x 6 x 6, and inputs for it."""
    node, places = steps(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), torch.empty(images, 8, 6, 6))[0]
    return node, random_inputs(node, places, SETTING)


def plain(node: Node, inputs: list[Tensor]) -> Any:
    return bind(node, Candidate(ATEN), SETTING)(inputs, None)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare four images of 8 x 6 x 6 at a time."""
    monkeypatch.setattr(expected, "MOST", 4 * 8 * 6 * 6)


@pytest.mark.parametrize(("images", "few"), [(1, None), (4, None), (5, 4), (64, 4)])
def test_as_many_images_are_compared_at_a_time_as_there_is_room_for(little: None, images: int, few: int | None) -> None:
    assert expected._fitting(*step(images)) == few


@pytest.mark.parametrize("images", [3, 5, 16])
def test_plain_pytorch_is_off_by_its_rounding_alone(little: None, images: int) -> None:
    node, inputs = step(images)
    (error,) = Expected(node, inputs, SETTING).errors(plain(node, inputs))
    assert 0 < error < 8e-3


@pytest.mark.parametrize(("image", "found"), [(0, True), (1, True), (8, False), (14, True), (15, True)])
@pytest.mark.parametrize("wrong", [torch.nan, 9.0])
def test_a_wrong_image_at_either_end_is_found_at_once_and_any_among_all(little: None, image: int, found: bool, wrong: float) -> None:
    node, inputs = step(16)
    value = plain(node, inputs)
    right = expected.errors(node, inputs, SETTING, [value])
    value[image, 3, 2, 2] = wrong
    (error,) = Expected(node, inputs, SETTING).errors(value)
    assert (error > 2e-2) == found
    assert expected.errors(node, inputs, SETTING, [value])[0] > 1e-2 > right[0]


def test_errors_of_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    node, inputs = step(16)
    values = [plain(node, inputs), 1.5 * plain(node, inputs)]
    whole = expected.errors(node, inputs, SETTING, values)
    monkeypatch.setattr(expected, "MOST", 3 * 8 * 6 * 6)  # the last part is of one image
    assert expected.errors(node, inputs, SETTING, values) == pytest.approx(whole, rel=1e-4)
    assert whole[1] == pytest.approx(0.5, rel=1e-2)


def test_an_input_without_images_has_all_compared(little: None) -> None:
    node, inputs = step(16)
    assert expected._fitting(node, [*inputs, torch.ones(8)]) is None
    assert expected._fitting(node, [*inputs, torch.ones(())]) is None


@pytest.mark.parametrize("name", ["MobileNetV3Small", "MobileNetV1_025", "ResNet18", "SqueezeNet1_1", "SEResNet18"])
def test_every_kind_of_step_has_its_images_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "MOST", 1)  # two images
    kinds: dict[str, tuple[Node, dict[Node, Place]]] = {}
    for node, places in steps(zoo.CATALOGUE[name](), torch.empty(6, 3, 64, 64)):
        kinds.setdefault(f"{node.op} {len(node.inputs)}", (node, places))
    assert len(kinds) > 1
    for node, places in kinds.values():
        inputs = random_inputs(node, places, SETTING)
        assert expected._fitting(node, inputs) == 2
        value, right = plain(node, inputs), Expected(node, inputs, SETTING)
        assert max(right.errors(value)) < 1e-2
        values = value if isinstance(value, tuple) else (value,)
        assert len(right.errors(value)) == len(values)
        for wrong, image in itertools.product(range(len(values)), range(6)):
            sign = torch.ones(6, *[1] * (values[wrong].dim() - 1))
            sign[image] = -1
            turned = tuple(each * sign.to(each.dtype) if number == wrong else each for number, each in enumerate(values))
            assert (right.errors(turned)[wrong] > 0.5) == (image in (0, 5))
        assert max(expected.errors(node, inputs, SETTING, [value])) < 2e-2


def test_what_large_maps_would_not_fit_beside_each_other_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("conv", [], {}, (256, 192, 264, 264), torch.bfloat16), Node("conv", [], {}, (256, 8, 4, 4), torch.bfloat16)]
    trials: list[Any] = [SimpleNamespace(number=number) for number in range(10)]
    largest = 2 * 256 * 192 * 264 * 264
    for room, counts in ((3 * largest, [3, 3, 3, 1]), (0, [2] * 5), (100 * largest, [10])):
        monkeypatch.setattr(contest, "_room", lambda setting, room=room: room)
        parts = list(contest._at_once(trials, nodes, SETTING))
        assert [len(part) for part in parts] == counts
        assert [trial for part in parts for trial in part] == trials


def test_the_room_is_a_part_of_what_is_free_or_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 72)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8)
    assert contest._room(SETTING) == (16 + 64) // 8


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count how often what PyTorch keeps is given back."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return done


def test_a_first_call_without_room_is_made_again_alone(monkeypatch: pytest.MonkeyPatch, emptied: list[str]) -> None:
    called: list[str] = []

    def call(name: str) -> None:
        called.append(name)
        if name == "large" and called.count("large") == 1:
            raise torch.OutOfMemoryError("no room beside others")
        if name == "wrong":
            raise RuntimeError("no plan")

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(contest, "_room", lambda setting: 1 << 40)
    trials = [contest._Trial(Candidate(ATEN), lambda name=name: call(name)) for name in ("small", "large", "wrong")]
    node, _ = step(2)
    with ThreadPoolExecutor(1, initializer=lambda: setattr(contest._threads, "stream", None)) as pool:
        contest._first_calls(pool, [contest._Contest("key", node, [], trials)], SETTING)
    assert called == ["small", "large", "wrong", "large"]
    assert [bool(trial.failure) for trial in trials] == [False, False, True]
    assert emptied == ["emptied"]


def test_what_searches_for_a_thread_alone_is_called_first_by_the_one_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, emptied: list[str]
) -> None:
    called: list[tuple[str, bool]] = []

    def call(name: str) -> None:
        called.append((name, threading.current_thread() is threading.main_thread()))
        if [name for name, _ in called].count("full") == 1 and name == "full":
            raise torch.OutOfMemoryError("no room beside others")

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(contest, "_room", lambda setting: 1 << 40)
    named = (("cudnn_conv", "full"), ("conv", "ours"), ("cudnn_conv", "fits"))
    trials = [contest._Trial(Candidate(op), lambda name=name: call(name)) for op, name in named]
    node, _ = step(2)
    with ThreadPoolExecutor(1) as pool:
        contest._first_calls(pool, [contest._Contest("key", node, [], trials)], SETTING)
    assert called == [("full", True), ("fits", True), ("ours", False), ("full", True)]
    assert not any(trial.failure for trial in trials)
    assert emptied == ["emptied"]


def test_a_merged_step_without_a_kernel_is_not_run() -> None:
    node, _ = next(found for found in steps(zoo.MobileNetV3Small(), torch.empty(2, 3, 64, 64)) if found[0].op in MERGED)
    choice = contest._fastest(contest._Contest("key", node, [], []), SETTING, "quick", lambda call: call())  # no inputs: it would fail
    assert (choice.op, choice.us) == (ATEN, 0.0)


def test_plain_pytorch_is_timed_by_the_first_guess_and_leaves_it_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[bool, bool]] = []

    def time(call: Any) -> float:
        call()
        found.append((torch.backends.cudnn.benchmark, threading.current_thread() is threading.main_thread()))
        return 5.0 + len(found)

    monkeypatch.setattr(contest, "_time", time)
    node, inputs = step(2)
    trial = contest._Trial(Candidate("cudnn_conv"), lambda: plain(node, inputs))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), elsewhere() as do:
        choice = contest._fastest(contest._Contest("key", node, inputs, [trial]), SETTING, "quick", do)
    assert found == [(False, False), (False, True)]
    assert (choice.op, choice.us, choice.aten_us) == (ATEN, 6.0, 6.0)
