"""`tune="background"`: the network answers at once, its plan is put in between calls; and `static=True`, whose answers are not copied."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo import fast, plain, why
from zoo.kernels.api.background import MOST, Background
from zoo.kernels.engines import build as engines
from zoo.kernels.measuring import timing
from zoo.kernels.measuring.stopwatch import Stopped, Stopwatch, phase, stopwatch
from zoo.kernels.measuring.timing import graph_time_us
from zoo.kernels.measuring.turns import measure
from zoo.kernels.plans import build

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()


class Gate:
    """Holds the making of plans until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open, self.fault = threading.Event(), threading.Event(), None
        real = engines.build_cpu

        def held(*args: Any) -> Any:
            with phase("being held"):
                self.entered.set()
                assert self.open.wait(60)
            if self.fault is not None:
                raise self.fault
            with phase("going on"):
                return real(*args)

        monkeypatch.setattr(engines, "build_cpu", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def begun(gate: Gate) -> tuple[Any, nn.Module, Tensor]:
    own, x = network(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = fast(own, CPU, tune="background", example=x, progress=False)
    assert gate.entered.wait(60)
    return model, own, x


def test_the_network_answers_while_its_plan_is_made_and_the_plan_afterwards(gate: Gate) -> None:
    model, own, x = begun(gate)
    torch.testing.assert_close(model(x), own(x), rtol=1e-5, atol=1e-6)
    assert not why(model).plans
    assert "a plan is being made" in str(why(model))
    assert "being held; until then the network itself answers" in str(why(model))
    gate.open.set()
    model._background.join()
    assert "a plan is made, and the next call takes it" in str(why(model))
    torch.testing.assert_close(model(x), own(x), rtol=1e-5, atol=1e-6)
    assert len(why(model).plans) == 1
    assert "plan is" not in str(why(model))
    assert model._plain_copy is None  # nobody needs it any more


def test_calls_of_another_shape_are_answered_too_and_planned_next(gate: Gate) -> None:
    model, own, x = begun(gate)
    other = torch.randn(1, 3, 9, 9)
    torch.testing.assert_close(model(other), own(other), rtol=1e-5, atol=1e-6)
    assert "waits for its plan" in str(why(model))
    gate.open.set()
    model._background.join()
    model(other), model(x)
    assert len(why(model).plans) == 2


def test_a_plan_that_cannot_be_made_is_told_once_and_the_network_goes_on(gate: Gate) -> None:
    model, own, x = begun(gate)
    gate.fault = RuntimeError("no room")
    gate.open.set()
    model._background.join()
    with pytest.warns(UserWarning, match="RuntimeError: no room"):
        answer = model(x)
    torch.testing.assert_close(answer, own(x))
    model(x)  # it is tried once more: memory may be free by now
    model._background.join()
    with pytest.warns(UserWarning, match="RuntimeError: no room"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x), model(x)
    assert not model._background.busy()
    assert "no room" in str(why(model))


def test_other_weights_stop_the_plan_of_the_old_ones(gate: Gate) -> None:
    model, own, x = begun(gate)
    old = model._background
    weights = {name: torch.zeros_like(value) for name, value in own.state_dict().items()}
    model.load_state_dict(weights)
    assert not model(x).any()
    gate.open.set()
    old.join()
    model._background.join()
    assert not model(x).any()
    assert len(why(model).plans) == 1
    assert not any(job.ended for job in old._jobs.values())  # it was stopped, not finished


def test_weights_changed_in_place_are_not_answered_by_the_plan(gate: Gate) -> None:
    model, own, x = begun(gate)
    with torch.no_grad():
        own[0].weight.zero_()
    gate.open.set()
    model._background.join()
    torch.testing.assert_close(model(x), own(x))


def test_a_refused_example_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="does not take this example"):
        fast(network(), CPU, tune="background", example=torch.zeros(1, 4, 8, 8))


@pytest.mark.parametrize(("options", "said"), [({"train": True}, "train=True"), ({"dtype": "int8"}, "dtype='int8'")])
def test_what_has_to_be_compared_first_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"goes without {said}"):
        fast(network(), CPU, tune="background", **options)


def test_copies_and_pickles_begin_anew(gate: Gate) -> None:
    model, own, x = begun(gate)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.tune == "background"
    torch.testing.assert_close(twin(x), own(x), rtol=1e-5, atol=1e-6)
    assert plain(model) is own


def test_only_the_latest_shapes_wait() -> None:
    hold, seen = threading.Event(), list[int]()

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hold.wait(60)
        seen.append(args[0])
        return lambda: None

    background = Background(make, CPU)
    for number in range(MOST + 4):
        background.ask(number, (number,), {}, str(number))
    hold.set()
    background.join()
    assert len(seen) <= MOST + 1
    assert seen[-1] == MOST + 3
    job = background.made(MOST + 3)
    assert job is not None
    assert job.error is None


def test_a_stopped_phase_raises_what_no_handler_of_errors_catches() -> None:
    watch = Stopwatch()
    watch.unwanted.set()
    with pytest.raises(Stopped), stopwatch(watch), phase("one"):
        pass
    assert not issubclass(Stopped, Exception)


def test_a_stopwatch_tells_the_phase_that_runs(gate: Gate) -> None:
    model, _, _ = begun(gate)
    assert next(iter(model._background._jobs.values())).watch.running()[0] == "being held"


def test_a_process_ends_while_a_plan_is_made() -> None:
    code = (
        "import torch, zoo\n"
        "own = zoo.network('ResNet20').eval()\n"
        "model = zoo.fast(own, 'cpu', tune='background', progress=False)\n"
        "print(tuple(model(torch.zeros(1, 3, 32, 32)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "(1, 10)"), done.stderr
    assert "Traceback" not in done.stderr


def test_untraceable_networks_run_on_and_say_so() -> None:
    class OfValues(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    model = fast(OfValues(), CPU, tune="background", example=torch.ones(2), progress=False)
    model._background.join()
    with pytest.warns(UserWarning, match="runs unchanged for this shape"):
        assert model(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.gpu
def test_on_a_gpu_the_plan_answers_what_the_network_answered() -> None:
    own, x = network(), torch.randn(4, 3, 32, 32, device="cuda")
    model: Any = fast(own, "cuda", torch.float32, tune="background", example=x, progress=False)
    first = second = model(x)
    while not why(model).plans:  # calls measure for the plan
        second = model(x)
    second = model(x)
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_static_answers_are_overwritten_and_keep_to_one_thread() -> None:
    own = network()
    model = fast(own, "cuda", torch.float32, static=True, example=torch.zeros(2, 3, 16, 16), progress=False)
    one, two = torch.randn(2, 3, 16, 16, device="cuda"), torch.randn(2, 3, 16, 16, device="cuda")
    answer = model(one)
    kept = answer.clone()
    again = model(two)
    assert again.data_ptr() == answer.data_ptr()
    assert not torch.equal(answer, kept)
    expected = own.cuda()(two)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)
    refused: list[BaseException] = []

    def call() -> None:
        try:
            model(one)
        except RuntimeError as error:
            refused.append(error)

    other = threading.Thread(target=call)
    other.start()
    other.join()
    assert "answers one thread" in str(refused[0])


@pytest.mark.gpu
def test_a_static_answer_may_be_given_back() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return torch.relu(x + 1) + state

    model = fast(Sums(), "cuda", torch.float32, static=True, example=(torch.zeros(512, 512), torch.zeros(512, 512)), progress=False)
    x, state = torch.ones(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda")
    for turn in range(1, 4):
        state = model(x, state)
        assert state.eq(2 * turn).all()


@pytest.mark.gpu
def test_static_answers_that_show_weights_are_copies() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.weight, self.weight

    model = fast(Shows(), "cuda", torch.float32, static=True, example=torch.zeros(2, 3), progress=False)
    x = torch.ones(2, 3, device="cuda")
    model(x)[1].zero_()
    assert model(x)[0].eq(1).all()
    assert model(x)[1].eq(1).all()


@pytest.mark.gpu
def test_an_image_that_is_written_where_the_plan_reads_it_is_not_copied() -> None:
    own = network()
    for example in (torch.zeros(2, 3, 16, 16), torch.zeros(256, 3, 64, 64)):
        model = fast(own, "cuda", torch.float32, static=True, example=example, progress=False)
        (room,) = model.static_inputs()
        if room is None:  # packed before the network reads it
            assert len(example) == 256
            continue
        assert room.shape == example.shape
        for seed in range(3):
            torch.manual_seed(seed)
            image = torch.randn(example.shape)
            expected = own.cpu()(image).cuda()
            room.copy_(image)
            torch.testing.assert_close(model(room), expected, rtol=1e-4, atol=1e-5)
            room.copy_(image)
            torch.testing.assert_close(model(room.transpose(2, 3)), own(image.transpose(2, 3)).cuda(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(image.cuda()), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="static=True"):
        fast(own, "cuda", torch.float32, example=torch.zeros(2, 3, 16, 16), progress=False).static_inputs()


def test_static_goes_without_training() -> None:
    with pytest.raises(ValueError, match="static goes without train"):
        fast(network(), CPU, train=True, static=True)  # pyright: ignore[reportCallIssue]


def test_on_a_cpu_static_changes_nothing() -> None:
    model = fast(network(), CPU, static=True, example=torch.zeros(2, 3, 8, 8), progress=False)
    assert model.static_inputs() == [None]
    with pytest.raises(RuntimeError, match="static=True"):
        fast(network(), CPU, example=torch.zeros(2, 3, 8, 8), progress=False).static_inputs()
    one = model(torch.ones(2, 3, 8, 8))
    kept = one.clone()
    model(torch.zeros(2, 3, 8, 8))
    assert torch.equal(one, kept)


def measured_to_its_end(make: Any) -> None:
    """Have a plan made, and measure what its thread waits for, without a GPU."""
    background = Background(make, CPU)
    with patch.object(timing, "_apart", lambda call, *_: call()):
        background.ask("a", (1,), {}, "a")
        while background.made("a") is None:
            measure()
    background.join()


def test_calls_measure_for_the_thread() -> None:
    found = list[int]()

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.extend(graph_time_us(partial(int, number)) for number in range(3))  # pyright: ignore[reportArgumentType]
        return lambda: None

    measured_to_its_end(make)
    assert found == [0, 1, 2]


def test_an_error_of_what_is_measured_reaches_the_thread_that_asked() -> None:
    caught = list[Exception]()

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            graph_time_us(lambda: 1 / 0)
        except ZeroDivisionError as error:
            caught.append(error)
        return lambda: None

    measured_to_its_end(make)
    assert len(caught) == 1


def test_a_thread_that_waits_for_a_call_ends_when_it_is_stopped() -> None:
    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph_time_us(lambda: 1)
        raise AssertionError("nobody has measured")

    background = Background(make, CPU)
    background.ask("a", (1,), {}, "a")
    background.stop()
    background.join()
    measure()
    assert background.made("a") is None


@pytest.mark.gpu
def test_a_caller_may_wait_for_the_device_all_the_while() -> None:
    own, x = zoo.network("ResNet18").eval(), torch.randn(4, 3, 224, 224, device="cuda")
    model: Any = fast(own, "cuda", tune="background", example=x, progress=False)
    twin = copy.deepcopy(own).cuda()
    with torch.no_grad():
        expected = answer = twin(x)
        while not why(model).plans:
            answer = model(x)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            twin(x)
    assert float((answer - expected).norm() / expected.norm()) < 0.1


def test_plans_that_no_call_comes_for_are_forgotten() -> None:
    background = Background(lambda args, kwargs: lambda: None, CPU)  # pyright: ignore[reportArgumentType]
    for number in range(MOST + 5):
        background.ask(number, (number,), {}, str(number))
        background.join()
    assert len(background.told()) == MOST
    assert background.made(0) is None


def measure_until_stopped() -> None:
    while True:
        measure()


def test_an_interrupted_measurement_is_made_by_the_next_call() -> None:
    calls = list[int]()

    def measured() -> float:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return 3.0

    found = list[float]()

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(graph_time_us(measured))
        return lambda: None

    background = Background(make, CPU)
    with patch.object(timing, "_apart", lambda call, *_: call()):
        background.ask("a", (1,), {}, "a")
        with pytest.raises(KeyboardInterrupt):
            measure_until_stopped()
        while background.made("a") is None:
            measure()
    assert found == [3.0]
    background.join()


def test_a_network_that_nobody_has_any_more_stops_its_plan(gate: Gate) -> None:
    model, _, _ = begun(gate)
    background = model._background
    del model
    gc.collect()
    gate.open.set()
    background.join()
    assert background._stopped
    assert not any(job.ended for job in background._jobs.values())


def test_changed_weights_stop_the_plan(gate: Gate) -> None:
    model, own, x = begun(gate)
    with torch.no_grad():
        own[0].weight.zero_()  # pyright: ignore[reportIndexIssue]
    model(x)
    assert model._background._stopped


def test_a_thread_that_waits_to_make_a_plan_measures_for_the_one_that_makes_one() -> None:
    """Else both would wait for ever: the plan in the background for a call, and the caller for that plan."""
    taken, found = threading.Event(), list[int]()

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with build._alone():
            taken.set()
            found.append(graph_time_us(lambda: 7))  # pyright: ignore[reportArgumentType]
        return lambda: None

    background = Background(make, CPU)
    with patch.object(timing, "_apart", lambda call, *_: call()):
        background.ask("a", (1,), {}, "a")
        assert taken.wait(60)
        with build._alone():
            assert found == [7]
    background.join()
