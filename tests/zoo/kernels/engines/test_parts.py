"""A batch in parts: of which networks, of how many images, to the same answers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.engine_networks import NAMES, Shaped, Small, images, plain, tensors_of, varied
from zoo.kernels import fast, why
from zoo.kernels.engines import choose as engines
from zoo.kernels.engines import judge, openvino, race
from zoo.kernels.engines.choose import candidates, choose
from zoo.kernels.engines.export import export


def always(part: int) -> bool:
    return True


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
        assert judge.error([found], [expected]) < 1e-5
        assert [t.dtype for t in tensors_of(found)] == [t.dtype for t in tensors_of(expected)]
    kept = call(x)
    before = [tensor.clone() for tensor in tensors_of(kept)]
    call(y)
    assert all(map(torch.equal, tensors_of(kept), before))  # no later call writes over it
    assert len(call.idle) <= openvino.AHEAD * threads  # however many parts there are


def test_parts_of_several_threads_are_not_mixed(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    (engine,) = (each for each in candidates(small, (images(8),), apart=always) if each.name == "openvino/1")
    call, inputs = engine.build(), [images(8, seed=seed) for seed in range(6)]
    expected = [plain(small, x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(lambda i: max(judge.error([call(inputs[i])], [expected[i]]) for _ in range(20)), range(6))) < 1e-5


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
    monkeypatch.setattr(race, "turn", lambda call, example: [0.1 if getattr(call, "parts", 1) > 1 else 0.15])
    network, x = Asking(asks).eval(), images(4)
    x[1] *= 1e4
    model = fast(network, "cpu", example=x)
    assert why(model).plans[0].rows[0].kernel.startswith("openvino/") != asks
    torch.testing.assert_close(model(x), plain(network, x), rtol=1e-4, atol=1e-4)


def test_parts_win_and_are_known_by_name(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "IMAGE", 3 * 11 * 11)
    monkeypatch.setattr(race, "turn", lambda call, example: [0.1 if getattr(call, "parts", 1) == 2 else 0.15])
    x, said = images(4), list[str]()
    chosen = choose(small, (x,), apart=always)
    assert chosen.name == "openvino/2"
    assert chosen.notes[0].startswith("2 images at a time")
    again = choose(small, (x,), cached=chosen.name, progress=said.append, apart=always)
    assert (again.name, said) == ("openvino/2", ["building openvino/2"])
    torch.testing.assert_close(again.call(x), plain(small, x), rtol=1e-5, atol=1e-6)
    asked: list[int] = []
    choose(small, (x,), cached="onnxruntime", apart=lambda part: asked.append(part) is None)
    assert asked == []  # nothing is traced for parts that nobody wants
    mixing = choose(small, (x,), cached=chosen.name)  # a network that mixes images has none of that name: it is timed
    assert set(mixing.seconds) == set(NAMES)
