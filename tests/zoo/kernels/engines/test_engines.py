from __future__ import annotations

import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.engine_networks import NAMES, Pair, Shaped, Small, images, plain, tensors_of, varied
from zoo import MobileNetV3Small, fast, why
from zoo.kernels.engines import choose as engines
from zoo.kernels.engines import judge, openvino, pytorch
from zoo.kernels.engines.choose import Engine, EngineError, candidates, choose
from zoo.kernels.engines.export import Form, export, recast


def built(network: nn.Module, *example: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Any:
    (engine,) = (each for each in candidates(network, example, dtype) if each.name == name)
    return engine.build()


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
    assert judge.error([output], [expected]) < 1e-6
    assert [t.dtype for t in tensors_of(output)] == [t.dtype for t in tensors_of(expected)]


@pytest.mark.parametrize("name", NAMES)
def test_eight_threads_get_their_own_answers(small: nn.Module, name: str) -> None:
    call = built(small, images(), name=name)
    inputs = [images(seed=seed) for seed in range(8)]
    expected = [plain(small, x) for x in inputs]
    together = threading.Barrier(8)

    def work(index: int) -> float:
        together.wait()
        return max(judge.error([call(inputs[index])], [expected[index]]) for _ in range(20))

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


class Tokens(nn.Module):
    """A linear layer of each pixel, as in ConvNeXt and transformers, whose weight the exporter would like to transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(F.gelu(self.linear(self.norm(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2), 1).flatten(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_layer_of_each_pixel_is_exported(name: str) -> None:
    network, x = Tokens().eval(), images(2)
    assert judge.error([built(network, x, name=name)(x)], [plain(network, x)]) < 1e-5


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Handing(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x.flatten(1)


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_written_into_and_none_is_handed_on(name: str) -> None:
    x = images().contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    for network, expected in ((Doubling().eval(), [2 * kept]), (Handing().eval(), [kept, kept.flatten(1)])):
        call = built(network, images(), name=name)
        for _ in range(2):
            outputs = tensors_of(call(x))
            assert all(map(torch.equal, outputs, expected))
            assert torch.equal(x, kept)
        for output in outputs:
            output.zero_()
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
    assert judge.error([output], [plain(recast(halved, torch.float32), x.float())]) < 5e-3


def test_the_checks_of_a_zoo_network_are_left_out_of_the_graph() -> None:
    network, x = MobileNetV3Small(num_classes=10).eval(), images(1, 32)
    chosen = choose(network, (x,), budget=0)
    assert not chosen.refused
    assert set(chosen.seconds) == set(chosen.errors) == set(NAMES)
    assert judge.error([chosen.call(x)], [plain(network, x)]) < 1e-5


def test_the_fastest_is_kept_and_every_engine_was_compared(small: nn.Module) -> None:
    said: list[str] = []
    chosen = choose(small, (images(),), budget=0, progress=said.append)
    assert chosen.name == min(chosen.seconds, key=chosen.seconds.__getitem__)
    assert all(found <= allowed for found, allowed in chosen.errors.values())
    assert said[0] == "building openvino"
    assert any(text.startswith("timing") for text in said)


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
        assert judge.error([engine.build()(x)], [plain(small, x)]) < 1e-5
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
    assert judge.error([ours], [theirs]) == pytest.approx(expected, rel=1e-5)


def test_errors_are_taken_over_all_inputs_together() -> None:
    assert judge.error([torch.tensor([0.0]), torch.tensor([4.0])], [torch.tensor([3.0]), torch.tensor([4.0])]) == pytest.approx(0.6)


class Inside(nn.Module):
    """Makes NaN of an image of zeros, and passes it on through what could lose it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.abs().amax((1, 2, 3), keepdim=True)
        return F.max_pool2d(x.relu(), 3, 2).clamp(0, 6).flatten(1)


@pytest.mark.skipif(shutil.which("c++") is None, reason="PyTorch's compiler needs one of C++")
def test_pytorchs_compiler_competes_where_all_is_to_be_tried(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images()
    assert "compile" not in [engine.name for engine in candidates(small, (x,))]
    monkeypatch.setattr(engines, "fastest", lambda trial, example, budget: (dict.fromkeys(trial.calls, 1e-3), "compile"))
    model = fast(small, "cpu", tune="full", example=x, progress=False)
    assert why(model).rows[0].kernel == "compile"
    torch.testing.assert_close(model(x), plain(small, x), rtol=1e-4, atol=1e-5)
    threads, expected = torch.get_num_threads(), plain(small, x)
    for enter in (torch.inference_mode, lambda: torch.device("cpu"), torch.enable_grad, lambda: torch.autocast("cpu")):
        with enter():
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    try:
        for count in (3, 1, 4):
            torch.set_num_threads(count)
            torch.testing.assert_close(model(x.permute(0, 1, 3, 2)), plain(small, x.permute(0, 1, 3, 2)), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        small.classifier.bias += 1
    torch.testing.assert_close(model(x), plain(small, x), rtol=1e-4, atol=1e-5)
    empty = torch.cat([torch.zeros(1, 3, 11, 11), images(1)])
    form = Form.of(plain(Inside(), empty))
    found = pytorch.build(Inside(), (images(),), form, torch.float32, compiler=True)(empty)
    torch.testing.assert_close(found, plain(Inside(), empty), equal_nan=True)
    assert found[0].isnan().all()
