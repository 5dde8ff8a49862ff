from __future__ import annotations

import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import MobileNetV3Small
from zoo.kernels import engines, fast, why
from zoo.kernels.engines import Engine, EngineError, candidates, choose, onnxruntime, openvino, parity, pytorch
from zoo.kernels.engines.export import Form, export, recast

NAMES = ("openvino", "onnxruntime", "channels_last", "eager")
Pair = namedtuple("Pair", "small large")


class Small(nn.Module):
    """A convolution that is folded, one that is read twice, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = self.second(x)
        x = F.relu(self.other(y) + y)
        return self.classifier(x.mean((2, 3)))


class Shaped(nn.Module):
    """Returns what `shape` makes of a small and a large tensor."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.convolution, self.shape = nn.Conv2d(3, 4, 3), shape

    def forward(self, x: Tensor) -> Any:
        large = self.convolution(x)
        return self.shape(large.mean((2, 3)), large)


def varied(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give BatchNorm statistics that a fold could get wrong."""
    torch.manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return network.eval()


@pytest.fixture
def small() -> nn.Module:
    return varied(Small())


def always(part: int) -> bool:
    return True


def images(batch: int = 2, size: int = 11, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def built(network: nn.Module, *example: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Any:
    (engine,) = (each for each in candidates(network, example, dtype) if each.name == name)
    return engine.build()


def plain(network: nn.Module, *given: Tensor) -> Any:
    with torch.no_grad():
        return network(*given)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
def test_an_engine_computes_what_the_network_computes(small: nn.Module, name: str, batch: int) -> None:
    call = built(small, images(batch), name=name)
    x = images(batch, seed=7)  # not what it was built with
    torch.testing.assert_close(call(x), plain(small, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape",
    [
        lambda small, large: (large, small),
        lambda small, large: [small, {"large": large, "none": None}],
        lambda small, large: {"b": small, "a": (large, 3, "text")},
        lambda small, large: Pair(small, large),
        lambda small, large: (small, small),
        lambda small, large: {"winner": small.argmax(1), "flags": large > 0},
    ],
    ids=["tuple", "nested", "dict", "namedtuple", "twice", "integers"],
)
def test_the_output_keeps_its_structure_and_types(name: str, shape: Any) -> None:
    network = Shaped(shape).eval()
    x = images()
    output, expected = built(network, x, name=name)(x), plain(network, x)
    assert type(output) is type(expected)
    assert parity.error([output], [expected]) < 1e-6
    assert [t.dtype for t in _tensors(output)] == [t.dtype for t in _tensors(expected)]


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(("batch", "size", "expected"), [
    (8, 224, [1, 2]), (9, 224, [1, 3]), (7, 224, [1]), (2, 224, [1]), (1, 224, []), (256, 32, [64, 128]), (4, 11, [2]), (16, 512, [1]),
])  # fmt: skip
def test_parts_are_of_about_one_image_or_two(batch: int, size: int, expected: list[int]) -> None:
    pictures = torch.empty(batch, 3, size, size, device="meta")
    assert engines.parts((pictures,)) == engines.parts((torch.empty(batch, 4, device="meta"), pictures)) == expected


@pytest.mark.parametrize("form", ["logits", "several"])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_batch_in_parts_gives_what_it_gives_whole(small: nn.Module, form: str, part: int, threads: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    several = Shaped(
        lambda small, large: {"map": large, "no": (None, 3), "empty": large[:, :0], "winner": small.argmax(1), "flags": large > 0}
    ).eval()
    network, x, y = several if form == "several" else small, images(14), images(14, seed=7)
    (engine,) = (each for each in candidates(network, (x,), apart=always) if each.name == f"openvino/{part}")
    call = engine.build()
    assert isinstance(call, openvino._Requests)
    assert (call.parts, engine.copies_weights, engine.precision) == (14 // part, True, torch.float32)
    together = f", {threads} such parts at once" if threads > 1 else ""
    assert engine.note == f"{part} image{'s' if part > 1 else ''} at a time{together}"
    for given in (x, y, y.contiguous(memory_format=torch.channels_last), y.double()):
        found, expected = call(given), plain(network, given.float())
        assert parity.error([found], [expected]) < 1e-5
        assert [t.dtype for t in _tensors(found)] == [t.dtype for t in _tensors(expected)]
    kept = call(x)
    before = [tensor.clone() for tensor in _tensors(kept)]
    call(y)
    assert all(map(torch.equal, _tensors(kept), before))  # no later call writes over it
    assert len(call.idle) <= openvino.AHEAD * threads  # however many parts there are


def test_parts_of_several_threads_are_not_mixed(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    (engine,) = (each for each in candidates(small, (images(8),), apart=always) if each.name == "openvino/1")
    call, inputs = engine.build(), [images(8, seed=seed) for seed in range(6)]
    expected = [plain(small, x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(lambda i: max(parity.error([call(inputs[i])], [expected[i]]) for _ in range(20)), range(6))) < 1e-5


def test_a_part_that_fails_leaves_nothing_running(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # so that all eight are handed over before the first is waited for
    (engine,) = (each for each in candidates(small, (images(8),), apart=always) if each.name == "openvino/1")
    call, waited, ended = engine.build(), [], []

    class Failing:
        def __init__(self, request: Any) -> None:
            self.request = request

        def wait(self) -> None:
            waited.append(self.request)
            self.request.wait()
            ended.append(self.request)
            if len(waited) == 2:
                raise RuntimeError("no memory left")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.request, name)

    started: list[Failing] = []
    make = openvino._Requests._request

    def planted(self: Any, arrays: Any) -> Any:
        started.append(Failing(make(self, arrays)))
        return started[-1]

    monkeypatch.setattr(openvino._Requests, "_request", planted)
    with pytest.raises(RuntimeError, match="no memory left"):
        call(images(8))
    assert {id(each.request) for each in started} == {id(request) for request in ended}
    assert len(call.idle) == 1  # the first, whose answer was read; of the others' states nothing is known
    monkeypatch.setattr(openvino._Requests, "_request", make)
    torch.testing.assert_close(call(images(8)), plain(small, images(8)), rtol=1e-5, atol=1e-6)


def test_parts_are_tried_where_images_are_apart_and_the_engine_is_there(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(8, 96)
    names = [engine.name for engine in candidates(small, (x,), apart=always)]
    assert names == ["openvino", "openvino/4", "onnxruntime", "channels_last", "eager"]
    assert [engine.name for engine in candidates(small, (x,))] == list(NAMES)
    assert [engine.name for engine in candidates(small, (x,), apart=lambda part: False)] == list(NAMES)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert [engine.name for engine in candidates(small, (x,), apart=always)] == list(NAMES)


def test_a_graph_that_can_not_be_exported_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(engines, "export", lambda *given: tried.append(1) or export(*given))
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    network = Shaped(lambda small, large: torch.special.bessel_j0(small)).eval()
    chosen = choose(network, (images(4),), budget=0, apart=always)
    assert len(tried) == 1
    assert {name: reason for name, reason in chosen.refused.items() if "ONNX" in reason}.keys() >= {"openvino", "openvino/1", "openvino/2"}


def test_half_precision_is_widened_once_for_all_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    network, seen = varied(Small()).bfloat16(), list[int]()

    def noted(*given: Any) -> Any:
        made = export(*given)
        seen.append(made.tensors["network.classifier.weight"].data_ptr())
        return made

    monkeypatch.setattr(engines, "export", noted)
    chosen = choose(network, (images(4).bfloat16(),), budget=0, apart=always)
    assert {"openvino", "openvino/1", "openvino/2"} <= chosen.errors.keys()
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_parts_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    counting = Shaped(lambda small, large: small * small.shape[0]).eval()  # of each image alone, and of how many there are
    chosen = choose(counting, (images(4),), budget=0, apart=always)
    assert {name for name in chosen.refused if "computes something else" in chosen.refused[name]} == {"openvino/1", "openvino/2"}


class Asking(nn.Module):
    """Clamps where there are more than two images, which no picture of an example is large enough to show."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.convolution, self.asks = nn.Conv2d(3, 4, 3), asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return (y.clamp(-50, 50) if x.shape[0] > 2 or not self.asks else y).mean((2, 3))


@pytest.mark.parametrize("asks", [False, True])
def test_fast_takes_parts_only_of_what_does_not_ask_for_their_number(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    monkeypatch.setattr(engines, "_turn", lambda call, example: [0.1 if getattr(call, "parts", 1) > 1 else 0.15])
    network, x = Asking(asks).eval(), images(4)
    x[1] *= 1e4
    model = fast(network, "cpu", example=x)
    assert why(model).plans[0].rows[0].kernel.startswith("openvino/") != asks
    torch.testing.assert_close(model(x), plain(network, x), rtol=1e-4, atol=1e-4)


def test_parts_win_and_are_known_by_name(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    monkeypatch.setattr(engines, "_turn", lambda call, example: [0.1 if getattr(call, "parts", 1) == 2 else 0.15])
    x, said = images(4), list[str]()
    chosen = choose(small, (x,), apart=always)
    assert chosen.name == "openvino/2"
    assert chosen.notes[0].startswith("2 images at a time")
    again = choose(small, (x,), cached=chosen.name, progress=said.append, apart=always)
    assert (again.name, said) == ("openvino/2", ["building openvino/2"])
    torch.testing.assert_close(again.call(x), plain(small, x), rtol=1e-5, atol=1e-6)
    mixing = choose(small, (x,), cached=chosen.name)  # a network that mixes images has none of that name: it is timed
    assert set(mixing.seconds) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_eight_threads_get_their_own_answers(small: nn.Module, name: str) -> None:
    call = built(small, images(), name=name)
    inputs = [images(seed=seed) for seed in range(8)]
    expected = [plain(small, x) for x in inputs]
    together = threading.Barrier(8)

    def work(index: int) -> float:
        together.wait()
        return max(parity.error([call(inputs[index])], [expected[index]]) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_an_output_is_not_overwritten_by_the_next_call(name: str) -> None:
    network = Shaped(lambda small, large: (small, large)).eval()
    call = built(network, images(), name=name)
    first = call(images(seed=1))
    held = [tensor.clone() for tensor in first]
    call(images(seed=2))
    assert all(torch.equal(a, b) for a, b in zip(first, held, strict=True))


@pytest.mark.parametrize("name", NAMES[:3])
def test_an_input_is_not_changed_where_the_network_begins_in_place_on_a_copy(name: str) -> None:
    network = nn.Sequential(nn.Identity(), nn.ReLU(), nn.ReLU(inplace=True)).eval()
    call, x = built(network, images(), name=name), images()
    kept = x.clone()
    assert torch.equal(call(x), kept.relu())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: torch.cat([x, x], 1)[:, 1:4],
        lambda x: x.flip(3).transpose(2, 3),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["channels_last", "slice", "transposed", "with gradient"],
)
def test_any_memory_layout_of_the_input_will_do(small: nn.Module, name: str, layout: Any) -> None:
    x = layout(images())
    output = built(small, images(), name=name)(x)
    assert not output.requires_grad
    torch.testing.assert_close(output, plain(small, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("size", [(3, 2), 7, (None, 4), 11, 13])
def test_adaptive_pools_of_unequal_windows_are_exported(name: str, size: Any) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(size)).eval()
    x = images()
    torch.testing.assert_close(built(network, x, name=name)(x), plain(network, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_several_inputs_and_integers_among_them(name: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.convolution = nn.Embedding(5, 4), nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, unused: Tensor, which: Tensor) -> Tensor:
            return self.convolution(x) + self.table(which)[:, :, None, None]

    network, which = Two().eval(), torch.tensor([3, 1])
    given = (images(), torch.zeros(2), which)
    torch.testing.assert_close(built(network, *given, name=name)(*given), plain(network, *given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_network_in_bfloat16_returns_bfloat16(small: nn.Module, name: str) -> None:
    halved, x = varied(Small()).bfloat16(), images().bfloat16()
    output = built(halved, x, name=name)(x)
    assert output.dtype == torch.bfloat16
    assert parity.error([output], [plain(recast(halved, torch.float32), x.float())]) < 5e-3


def test_the_checks_of_a_zoo_network_are_left_out_of_the_graph() -> None:
    network, x = MobileNetV3Small(num_classes=10).eval(), images(1, 32)
    chosen = choose(network, (x,), budget=0)
    assert not chosen.refused
    assert set(chosen.seconds) == set(chosen.errors) == set(NAMES)
    assert parity.error([chosen.call(x)], [plain(network, x)]) < 1e-5


def test_the_fastest_is_kept_and_every_engine_was_compared(small: nn.Module) -> None:
    said: list[str] = []
    chosen = choose(small, (images(),), budget=0, progress=said.append)
    assert chosen.name == min(chosen.seconds, key=chosen.seconds.__getitem__)
    assert all(found <= allowed for found, allowed in chosen.errors.values())
    assert said[0] == "building openvino"
    assert any(text.startswith("timing") for text in said)


@pytest.mark.parametrize(
    ("winner", "kind"), [("openvino", openvino._Requests), ("onnxruntime", onnxruntime._Session), ("eager", engines._Plain)]
)
def test_the_fastest_engine_wins_even_if_more_than_half_of_its_calls_were_disturbed(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch, winner: str, kind: type
) -> None:
    monkeypatch.setattr(engines, "_turn", lambda call, example: [0.1, 9.0, 0.1, 9.0, 9.0] if isinstance(call, kind) else [0.15])
    chosen = choose(small, (images(),))
    assert (chosen.name, chosen.copies_weights, bool(chosen.notes)) == (winner, winner != "eager", winner != "eager")
    assert isinstance(chosen.call, kind)
    assert chosen.seconds == {name: 0.1 if name == winner else 0.15 for name in NAMES}


def test_an_engine_that_can_not_win_is_timed_once(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engines, "_turn", lambda call, example: [0.1 if isinstance(call, onnxruntime._Session | engines._Plain) else 0.21])
    choose(small, (images(),), progress=said.append)
    timed = [text.split(":")[0] for text in said if text.startswith("timing")]
    assert timed == [f"timing {', '.join(NAMES)}"] + ["timing onnxruntime, eager"] * (engines.ROUNDS - 1)


class Clock:
    """Calls that take the seconds that they are told to, behind a disturbance that ends at some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.disturbed = 0.0
        monkeypatch.setattr(engines.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(engines.time, "sleep", self.rest)

    def rest(self, seconds: float) -> None:
        self.now += seconds

    def call(self, seconds: float, spins: float = 0.0) -> Any:
        def run() -> None:
            self.now += seconds + min(seconds, max(0.0, self.disturbed - self.now))
            self.disturbed = self.now + spins if spins else self.disturbed

        return run


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.07, 0.5])
def test_calls_that_pay_for_the_engine_before_do_not_count(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = Clock(monkeypatch)
    clock.call(0.1, spins=0.05)()
    times = engines._turn(clock.call(seconds), ())
    assert times == pytest.approx([seconds] * len(times))
    assert sum(times) >= engines.TURN


def test_a_long_call_counts_at_once_and_of_short_ones_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert engines._turn(clock.call(2.0), ()) == [2.0]
    assert clock.now == 2.0 + engines.SETTLE
    clock.disturbed = clock.now + engines.SETTLE + 0.01  # what a first call finds
    assert engines._turn(clock.call(0.04), ()) == pytest.approx([0.04])


def raced(monkeypatch: pytest.MonkeyPatch, turns: dict[str, list[float]]) -> tuple[dict[str, int], str]:
    """Hold a race between engines whose turns take so long, the last one again and again; return how many turns each had, and who won."""
    clock, had = Clock(monkeypatch), dict.fromkeys(turns, 0)

    def turn(name: str, example: Any) -> list[float]:
        took = turns[name][min(had[name], len(turns[name]) - 1)]
        had[name] += 1
        clock.now += took
        return [took]

    monkeypatch.setattr(engines, "_turn", turn)
    trial = engines._Trial(lambda call, dtype: (0.0, 1.0), lambda text: None)
    trial.calls = {name: name for name in turns}  # type: ignore[assignment]
    return had, engines._race(trial, (), 10.0)[1]


def test_one_disturbed_turn_of_a_long_call_costs_no_engine_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    had, won = raced(monkeypatch, {"a": [1.3, 1.02], "b": [1.05], "c": [1.1], "d": [1.25], "e": [1.4]})
    assert won == "a"
    assert had["a"] == had["b"] >= engines.FEWEST_ROUNDS
    assert (had["d"], had["e"]) == (2, 1)  # half of the time was over


def test_one_that_was_dropped_does_not_win_because_others_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    had, won = raced(monkeypatch, {"a": [0.1, 0.4], "b": [0.21, 0.1], "c": [0.11, 0.44]})
    assert (had["b"], won) == (1, "a")


@pytest.mark.parametrize("wrong", ["scaled", "nan", "structure", "shape"])
def test_a_planted_wrong_engine_is_refused(small: nn.Module, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    spoil = {
        "scaled": lambda y: y * 1.0001,
        "nan": lambda y: torch.where(y == y.max(), torch.nan, y),
        "structure": lambda y: (y,),
        "shape": lambda y: y[:, :4],
    }[wrong]
    make = openvino.build

    def planted(*args: Any) -> Any:
        call = make(*args)
        return lambda *given: spoil(call(*given))

    monkeypatch.setattr(openvino, "build", planted)
    chosen = choose(small, (images(),), budget=0)
    assert chosen.name != "openvino"
    assert "openvino" not in chosen.seconds
    assert chosen.refused["openvino"].startswith("computes something else: relative error")
    assert chosen.errors["openvino"][0] > chosen.errors["openvino"][1]


def test_an_engine_that_fails_leaves_its_reason_and_the_next_is_taken(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("Exception from src/core.cpp:97:\nthe operator is not known\nmore")

    monkeypatch.setattr(openvino, "build", fail)
    chosen = choose(small, (images(),), budget=0)
    assert chosen.refused == {"openvino": "the operator is not known"}
    assert chosen.name in NAMES[1:]


def test_an_engine_that_fails_while_it_is_timed_is_left_out(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    make = openvino.build

    def planted(*args: Any) -> Any:
        call, calls = make(*args), iter(range(2))

        def run(*given: Tensor) -> Any:
            if next(calls, None) is None:
                raise MemoryError("no memory left")
            return call(*given)

        return run

    monkeypatch.setattr(openvino, "build", planted)
    chosen = choose(small, (images(),), budget=0)
    assert chosen.refused == {"openvino": "no memory left"}
    assert "openvino" not in chosen.seconds


def test_an_interrupt_is_not_taken_for_a_failure(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(openvino, "build", interrupt)
    with pytest.raises(KeyboardInterrupt):
        choose(small, (images(),), budget=0)


@pytest.mark.parametrize(
    ("package", "absent"), [("openvino", ["openvino"]), ("onnxruntime", ["onnxruntime"]), ("onnx", ["openvino", "onnxruntime"])]
)
def test_an_absent_package_is_named_with_its_extra(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch, package: str, absent: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    chosen = choose(small, (images(),), budget=0)
    assert chosen.refused == dict.fromkeys(absent, f"{package} is not installed: pip install 'kernelzoo[cpu]'")


def test_without_any_engine_pytorch_remains(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("openvino", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    chosen = choose(small, (images(),), budget=0)
    assert chosen.name in ("channels_last", "eager")
    assert set(chosen.refused) == {"openvino", "onnxruntime"}


def test_a_network_that_branches_on_values_stays_with_pytorch() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.convolution(x)
            return y if y.mean() > 0 else -y

    network, x = Branching().eval(), images()
    chosen = choose(network, (x,), budget=0)
    assert "depends on its input's values" in chosen.refused["openvino"]
    assert chosen.refused["openvino"] == chosen.refused["onnxruntime"]
    for sign in (1, -1):
        torch.testing.assert_close(chosen.call(sign * x), plain(network, sign * x), rtol=1e-5, atol=1e-6)


def test_a_number_in_the_output_keeps_engines_out() -> None:
    network = Shaped(lambda small, large: (large, small.sum().item())).eval()
    chosen = choose(network, (images(),), budget=0)
    assert chosen.name == "eager"
    assert chosen.refused["openvino"] == "the network returns a float, which an exported graph can't"


def test_a_network_that_can_not_be_copied_runs_as_it_is() -> None:
    network = Small().eval()
    network.lock = threading.Lock()  # type: ignore[assignment]
    chosen = choose(network, (images(),), budget=0)
    assert chosen.name == "eager"
    assert "pickle" in chosen.refused["channels_last"]
    assert chosen.errors["eager"][0] <= chosen.errors["eager"][1]


def test_eager_remains_where_nothing_can_be_compared(small: nn.Module) -> None:
    def bound(call: Any, dtype: torch.dtype) -> tuple[float, float]:
        raise RuntimeError("nothing to compare with")

    chosen = choose(small, (images(),), bound=bound)
    assert (chosen.name, chosen.errors) == ("eager", {"eager": (0.0, 0.0)})
    assert set(chosen.refused.values()) == {"nothing to compare with"}


def test_the_network_s_own_error_comes_through() -> None:
    with pytest.raises(ValueError, match="channels"):
        choose(MobileNetV3Small().eval(), (torch.zeros(1, 4, 64, 64),))


def test_a_cached_choice_builds_only_that_engine(small: nn.Module) -> None:
    said: list[str] = []
    chosen = choose(small, (images(),), cached="onnxruntime", progress=said.append)
    assert said == ["building onnxruntime"]
    assert (chosen.name, chosen.seconds, set(chosen.errors)) == ("onnxruntime", {}, {"onnxruntime"})


def test_a_cached_choice_that_fails_is_chosen_anew(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said: list[str] = []
    chosen = choose(small, (images(),), cached="onnxruntime", budget=0, progress=said.append)
    assert said.count("building onnxruntime") == 1
    assert set(chosen.seconds) == {"openvino", "channels_last", "eager"}


def test_a_cached_name_that_nobody_has_is_chosen_anew(small: nn.Module) -> None:
    assert set(choose(small, (images(),), cached="tensorrt", budget=0).seconds) == set(NAMES)


def test_bfloat16_that_the_processor_lacks_is_computed_in_float32(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (openvino, pytorch):
        monkeypatch.setattr(module, "precision", lambda dtype: torch.float32)
    x = images()
    for engine in candidates(small, (x,), torch.bfloat16)[:3]:
        assert engine.precision == torch.float32
        assert "bfloat16" in engine.note
        assert parity.error([engine.build()(x)], [plain(small, x)]) < 1e-5
    chosen = choose(small, (x,), torch.bfloat16, cached="openvino")
    assert chosen.errors["openvino"][1] < 2e-5
    assert "this processor has no bfloat16" in chosen.notes[0]


def test_bfloat16_is_allowed_what_eager_loses_in_bfloat16(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "precision", lambda dtype: dtype)
    x = images()
    chosen = choose(small, (x,), torch.bfloat16, cached="channels_last")
    found, allowed = chosen.errors["channels_last"]
    assert chosen.precision == torch.bfloat16
    assert chosen.call(x).dtype == torch.float32
    assert 1e-4 < found <= allowed < 2e-2


def test_another_bound_decides(small: nn.Module) -> None:
    asked: list[torch.dtype] = []

    def bound(call: Any, dtype: torch.dtype) -> tuple[float, float]:
        asked.append(dtype)
        return 1.0, 0.5

    chosen = choose(small, (images(),), bound=bound, budget=0)
    assert (chosen.name, len(asked)) == ("eager", 4)
    assert chosen.refused["channels_last"] == "computes something else: relative error 1, allowed 0.5"


def test_nothing_of_the_network_is_changed(small: nn.Module) -> None:
    before = {name: (id(tensor), tensor.clone()) for name, tensor in small.state_dict(keep_vars=True).items()}
    modules = [type(module) for module in small.modules()]
    choose(small, (images(),), budget=0)
    after = small.state_dict(keep_vars=True)
    assert all(id(after[name]) == number and torch.equal(after[name], value) for name, (number, value) in before.items())
    assert all(after[name].requires_grad == (name.endswith(("weight", "bias"))) for name in after)
    assert [type(module) for module in small.modules()] == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in small.modules())


def test_exported_weights_are_the_network_s_own_memory(small: nn.Module) -> None:
    made = export(small, (images(),), Form.of(plain(small, images())))
    assert made.tensors["network.classifier.weight"].data_ptr() == small.get_parameter("classifier.weight").data_ptr()
    assert len(made.graph) < 10_000


def test_a_convolution_that_two_read_keeps_its_norm(small: nn.Module) -> None:
    folded = pytorch.fold(small, (images(),))
    assert isinstance(folded.get_submodule("norm"), nn.Identity)
    assert isinstance(folded.get_submodule("other"), nn.BatchNorm2d)
    torch.testing.assert_close(plain(folded, images()), plain(small, images()), rtol=1e-5, atol=1e-6)


def test_what_is_called_twice_or_watched_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.watched, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.watched.register_forward_hook(lambda module, given, output: output * 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.convolution(x))
            return self.last(self.watched(self.convolution(x)))

    network = varied(Twice())
    folded = pytorch.fold(network, (images(),))
    assert sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules()) == 2
    torch.testing.assert_close(plain(folded, images()), plain(network, images()), rtol=1e-5, atol=1e-6)


def test_openvino_is_imported_without_its_telemetry() -> None:
    module = openvino.imported()
    assert "openvino_telemetry" not in sys.modules
    assert module.tools.ovc.telemetry_utils.tm.__name__ == "openvino.tools.ovc.telemetry_stub"


def test_an_engine_that_can_not_be_built_says_why() -> None:
    with pytest.raises(EngineError, match="no such thing"):
        Engine("none", torch.float32, False, lambda: print, why_not="no such thing").build()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]), 0.08),
        (torch.tensor([3.0, torch.nan]), torch.tensor([3.0, 4.0]), torch.inf),
        (torch.tensor([torch.inf, 4.0]), torch.tensor([torch.inf, 4.0]), 0),
        (torch.tensor([-torch.inf, 4.0]), torch.tensor([torch.inf, 4.0]), torch.inf),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), 0.25),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), torch.inf),
        (torch.tensor([1]), torch.tensor([1.0]), torch.inf),
        (torch.zeros(0), torch.zeros(0), 0),
        ((torch.ones(1), "a"), (torch.ones(1), "b"), torch.inf),
    ],
)
def test_errors_are_relative_and_infinite_where_something_is_missing(ours: Any, theirs: Any, expected: float) -> None:
    assert parity.error([ours], [theirs]) == pytest.approx(expected, rel=1e-5)


def test_errors_are_taken_over_all_inputs_together() -> None:
    assert parity.error([torch.tensor([0.0]), torch.tensor([4.0])], [torch.tensor([3.0]), torch.tensor([4.0])]) == pytest.approx(0.6)
