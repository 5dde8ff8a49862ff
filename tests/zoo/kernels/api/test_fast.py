"""`fast`, `plain` and `why` as a user meets them, on the CPU; the GPU's side is in test_fast_gpu, what has no plan in test_unplanned."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.answers import close, eager
from zoo import ResNet20, fast, plain, why
from zoo.kernels.api.network import KEPT_PLANS, Fast
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans import proving
from zoo.kernels.reports.report import Report
from zoo.kernels.tuning.choices import Choice, Choices

CPU = torch.device("cpu")


class Small(nn.Module):
    """Two layers, so that engines are built in a moment."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.uniform_(self.bn.running_var, 0.5, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3))) * scale


@pytest.fixture(scope="module")
def small() -> Fast:
    return fast(Small(), "cpu", example=torch.randn(1, 3, 16, 16))


def test_a_fast_network_answers_as_the_plain_one_and_gives_it_back() -> None:
    model = ResNet20()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quick = fast(model, "cpu")
    x = torch.randn(2, 3, 32, 32)
    close(quick(x), eager(model, x))
    assert plain(quick) is model
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(quick.state_dict()) == list(before)


def test_a_cpu_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from torch import nn
from zoo import fast
network, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8)
torch.testing.assert_close(fast(network, "cpu", example=x)(x), network(x).detach(), rtol=1e-4, atol=1e-5)
torch.testing.assert_close(fast(network, train=True, example=x)(x), network(x))
"""
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_fast_of_fast_begins_again_from_the_plain_network(small: Fast) -> None:
    assert plain(fast(small, "cpu", example=torch.randn(1, 3, 16, 16))) is plain(small)
    assert plain(plain(small)) is plain(small)


def test_other_shapes_are_planned_when_they_come_and_the_oldest_plan_goes(small: Fast) -> None:
    quick = copy.deepcopy(small)
    for size in range(8, 8 + KEPT_PLANS + 2):
        x = torch.randn(1, 3, size, size)
        close(quick(x), eager(quick, x))
    assert len(why(quick).plans) == KEPT_PLANS
    assert [(1, 3, 10, 10)] in [plan.shapes for plan in why(quick).plans]
    assert [(1, 3, 8, 8)] not in [plan.shapes for plan in why(quick).plans]


def test_a_shape_that_was_planned_gives_other_answers_for_other_images(small: Fast) -> None:
    a, b = torch.randn(2, 1, 3, 16, 16)
    first = small(a)
    kept = first.clone()
    close(small(b), eager(small, b))
    assert torch.equal(first, kept)  # the second call did not write into the first call's answer
    close(small(a), eager(small, a))


def test_keyword_arguments_reach_the_network(small: Fast) -> None:
    x = torch.randn(1, 3, 16, 16)
    close(small(x, scale=3.0), eager(small, x, scale=3.0))
    close(small(x=x, scale=2.0), eager(small, x, scale=2.0))


def test_an_empty_batch_has_an_empty_answer(small: Fast) -> None:
    assert small(torch.randn(0, 3, 16, 16)).shape == (0, 5)


def test_inputs_of_other_floating_types_give_the_networks_own_type(small: Fast) -> None:
    x = torch.randn(1, 3, 16, 16).bfloat16()
    answer = small(x)
    assert answer.dtype == torch.float32
    close(answer, eager(small, x.float()))


def test_many_threads_get_their_own_answers(small: Fast) -> None:
    images = [torch.randn(1 + i % 2, 3, 16, 16) for i in range(24)]
    answers: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: answers.__setitem__(i, small(images[i]))) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, image in enumerate(images):
        close(answers[i], eager(small, image))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_and_pickles_answer_as_the_original(small: Fast, way: Any) -> None:
    twin = way(small)
    x = torch.randn(1, 3, 16, 16)
    close(twin(x), small(x))
    assert plain(twin) is not plain(small)
    assert twin.dtype == small.dtype


def test_loading_a_state_dict_changes_the_answers(small: Fast) -> None:
    quick, other = copy.deepcopy(small), Small()
    nn.init.normal_(other.fc.weight)
    x = torch.randn(1, 3, 16, 16)
    before = quick(x)
    quick.load_state_dict(other.state_dict())
    close(quick(x), eager(other, x))
    assert not torch.allclose(quick(x), before)


def test_gradients_are_refused_where_they_are_asked_for(small: Fast) -> None:
    x = torch.randn(1, 3, 16, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"plain\(model\)"):
        small(x)
    with torch.no_grad():
        assert not small(x).requires_grad


def test_train_mode_and_moves_are_refused_with_what_to_do(small: Fast) -> None:
    with pytest.raises(RuntimeError, match=r"train plain\(model\)"):
        small.train()
    assert small.eval() is small
    with pytest.raises(RuntimeError, match=r"fast\(plain\(model\), device, dtype\)"):
        small.half()


def test_the_networks_own_errors_stay_its_own() -> None:
    quick = fast(ResNet20(), "cpu", example=torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="takes 3 channels"):
        quick(torch.randn(1, 4, 32, 32))
    with pytest.raises(ValueError, match="normalised floating-point"):
        quick(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"device": "mps"}, "CUDA and CPU"),
        ({"device": "cpu", "dtype": torch.int16}, "bfloat16, torch.float16 or torch.float32"),
        ({"device": "cpu", "tune": "fast"}, '"none", "quick", "full" or "background"'),
        ({"device": torch.float32}, r"stands where the device does; use fast\(model, dtype=torch.float32\)"),
        ({"device": [1]}, r"no device \[1\]"),
        (
            {"device": "cpu", "example": (1, 3, 32, 32)},
            r"such as torch\.randn\(1, 3, 32, 32\), or a tuple of the model\'s arguments; got \(1, 3, 32, 32\)",
        ),
        ({"train": True, "example": "x"}, "example is a tensor"),
        ({"train": "yes"}, "train is True or False, got 'yes'"),
        ({"device": "cpu", "tf32": 1}, "tf32 is True or False, got 1"),
        ({"train": True, "recompute": "yes"}, "True, False or None, got 'yes'"),
        ({"train": True, "tf32": True}, "tf32 goes without train=True"),
    ],
)
def test_wrong_options_say_what_is_allowed(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fast(Small(), **kwargs)


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"cuda:3 was asked for, and PyTorch sees no CUDA device"):
        fast(Small(), "cuda:3")


def test_a_class_instead_of_a_module_is_explained() -> None:
    with pytest.raises(TypeError, match="got type; build it first"):
        fast(ResNet20)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"what fast\(\) returned"):
        why(ResNet20())


def test_parity_says_what_is_allowed_and_why() -> None:
    from zoo.kernels.comparing.parity import Parity

    assert str(Parity(2e-3, 2e-3, 16)) == "relative error 2.00e-03 on 16 images; 1.1 times plain eager's, 2.20e-03, is allowed"
    said = "relative error 7.00e-07 on 1 image, plain eager's is 3.00e-07; up to 1e-05, which sums in another order make, is allowed"
    assert str(Parity(7e-7, 3e-7, 1, floor=1e-5)) == said
    assert Parity(7e-7, 3e-7, 1, floor=1e-5).passes()
    assert "1.1 times" in str(Parity(7e-7, 3e-5, 1, floor=1e-5))


def test_a_cpus_plan_says_what_plain_eager_itself_is_off_by() -> None:
    model = fast(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), "cpu", progress=False)
    model(torch.randn(1, 3, 16, 16))
    parity = why(model).parity
    assert parity is not None
    assert 0 < parity.eager < 2e-6
    assert parity.allowed == 1e-5


def test_why_shows_layers_kernel_times_and_parity(small: Fast) -> None:
    plans = [plan for plan in why(small).plans if plan.parity is not None]  # others have called it with batches of no images
    report = Report(plans, "", "cpu", "float32")
    assert report.parity is not None
    assert report.parity.fast <= max(report.parity.allowed, 1e-5)
    text = str(report)
    assert "16x16" in text
    assert "relative error" in text
    assert report.rows[0].us is not None


def test_a_planted_wrong_kernel_falls_back_and_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zoo.kernels import ops
    from zoo.kernels.comparing.parity import Reference
    from zoo.kernels.comparing.sample_images import natural_images
    from zoo.kernels.tuning.binding import Weights
    from zoo.kernels.tuning.choose import Decision
    from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting

    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    model = Small().eval()
    conv = ops.load("conv")
    right = conv.launch
    monkeypatch.setattr(conv, "launch", lambda *args, **kwargs: right(*args, **kwargs) * 1.02)
    batch = ((natural_images((2, 3, 16, 16), CPU),), {})
    with torch.no_grad():
        graph, places = understand(model, *batch, CPU)
        first = next(node for node in graph.steps() if node.op == "conv")
        decision, choices = Decision(), Choices(CPU)
        for node in graph.steps():
            if node.op in COMPUTED:
                decision.chosen[node], decision.keys[node] = Candidate(ATEN), f"key of {node.op}"
        decision.chosen[first] = Candidate("conv", conv.configs(*_conv_args(first))[0])
        decision.found[first] = Choice("conv")
        choices.put(decision.keys[first], decision.found[first])
        reference = Reference(model, CPU, torch.float32, False, [batch])
        setting = Setting(CPU, torch.float32)
        _, parity, notes = proving.checked(graph, places, decision, setting, Weights(), choices, [batch], reference)
    assert parity.passes()
    assert decision.chosen[first] == Candidate(ATEN)
    assert "fell back" in notes[first]
    assert choices.get(decision.keys[first]) is None


def _conv_args(node: Any) -> tuple[Any, ...]:
    x = torch.empty(node.inputs[0].shape).contiguous(memory_format=torch.channels_last)
    return x, node.attrs["weight"].contiguous(memory_format=torch.channels_last), node.attrs["bias"]


def test_detection_models_run_with_a_fast_backbone() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transform = nn.Identity()
            self.transform.min_size = (64,)  # pyright: ignore[reportAttributeAccessIssue]
            self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            self.roi_heads = nn.Linear(4, 2)

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            found = []
            for image in images:
                scores = self.roi_heads(self.backbone(image[None]).mean((2, 3)))[0]
                found.append({"scores": scores[scores > 0]})
            return found

    model = Detector().eval()
    quick = fast(model, "cpu")
    images = [torch.randn(3, 20, 24), torch.randn(3, 16, 16)]
    for got, want in zip(quick(images), eager(model, images), strict=True):
        close(got["scores"], want["scores"])
    assert plain(quick) is model
    assert "backbone" in str(why(quick)) or why(quick).rows
    twin = copy.deepcopy(quick)
    assert len(twin(images)) == 2


class Fill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, value: Any) -> Tensor:
        return torch.full((2,), value) if isinstance(value, bool) else self.conv(x).mean() + value


def test_numbers_that_are_equal_but_of_other_types_are_other_arguments() -> None:
    x = torch.randn(1, 3, 8, 8)
    quick = fast(Fill(), "cpu", example=(x, 1))
    for value in (1, 1.0, True, 2):
        assert quick(x, value).dtype == eager(quick, x, value).dtype
        close(quick(x, value).float(), eager(quick, x, value).float())
    text = str(why(quick))
    assert all(f"1x3x8x8, {value}, float32 on cpu" in text for value in (1, 1.0, True, 2))


def test_tables_say_which_arguments_they_are_for(small: Fast) -> None:
    quick = copy.deepcopy(small)
    x = torch.randn(1, 3, 16, 16)
    close(quick(x, scale=2.0), eager(quick, x, scale=2.0))
    close(quick(x, scale=torch.tensor(3)), eager(quick, x, scale=torch.tensor(3)))
    text = str(why(quick))
    assert "1x3x16x16, scale=2.0, float32 on cpu" in text
    assert "1x3x16x16, scale=a number int64, float32 on cpu" in text


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return torch.cat([self.conv(x).flatten(1), more], 1)


def test_an_empty_argument_beside_others_does_not_make_the_answer_up() -> None:
    x, none = torch.randn(1, 3, 8, 8), torch.empty(1, 0)
    quick = fast(Joins(), "cpu", example=(x, torch.ones(1, 2)))
    with pytest.warns(UserWarning, match="empty tensor"):
        close(quick(x, none), eager(quick, x, none))


def test_autocast_around_the_call_changes_neither_types_nor_the_check() -> None:
    x = torch.randn(1, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quick = fast(Small(), "cpu", example=x)
        answer = quick(x)
    assert answer.dtype == torch.float32
    close(answer, eager(quick, x))


def test_networks_in_half_precision_need_no_example() -> None:
    quick = fast(Small().bfloat16(), "cpu")
    assert quick.unchanged == ""
    assert quick(torch.randn(1, 3, 32, 32)).dtype == torch.bfloat16
