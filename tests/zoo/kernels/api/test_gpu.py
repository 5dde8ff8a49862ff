"""`fast` on a GPU: every network in every dtype, shapes that change, threads, memory, and a kernel that is wrong."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.kernels.networks import calibrated
from zoo import MobileNetV2, ResNet18, ResNet50, fast, plain, why
from zoo.kernels import ops
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.compilation import workers as compiling
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.tuning import choices

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def relative(got: Tensor, want: Tensor) -> float:
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return error if error == error else float("inf")  # float16 overflows where eager's does


def eager_error(model: nn.Module, x: Tensor, dtype: torch.dtype, want: Tensor) -> float:
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        return relative(copy.deepcopy(plain(model)).to("cuda", dtype)(x.to(dtype)), want)


def exact(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        return copy.deepcopy(plain(model)).to("cuda", dtype)(x.to(dtype))


@pytest.fixture(scope="module")
def resnet() -> Any:
    return fast(calibrated(ResNet18, "cuda"), "cuda", tune="none")


def one_a_family() -> list[Any]:
    """The names of the catalogue: the smallest of each family in every run, its sisters in a long one."""
    families = set()
    names = []
    for name, cls in sorted(zoo.CATALOGUE.items(), key=lambda item: item[1].params):
        names.append(pytest.param(name, marks=[pytest.mark.long] if cls.family() in families else []))
        families.add(cls.family())
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", one_a_family())
def test_every_network_is_as_right_as_eager_in_every_dtype(name: str, dtype: str) -> None:
    model = calibrated(zoo.CATALOGUE[name], "cuda")
    size = model.input_size
    x = natural_images((16, 3, size, size), torch.device("cuda"), seed=200)  # pictures that no plan is checked with
    quick = fast(model, "cuda", DTYPES[dtype], example=x, tune="none")
    report = why(quick)
    assert not report.unchanged
    assert report.parity is not None
    assert report.parity.passes()
    want = exact(model, x, torch.float64 if dtype == "float32" else torch.float32)
    assert want.std(0).mean() > 0.02 * want.std()  # what does not depend on its image shows nothing
    # Sixteen images' errors scatter by some percent, those of four by thirty.
    assert relative(quick(x), want) <= max(1.25 * eager_error(model, x, DTYPES[dtype], want), 2e-5 if dtype == "float32" else 0.0)


class PerImage(nn.Module):
    """A network that divides each image by its length: 0 by 0 for an image of zeros."""

    def __init__(self, network: nn.Module, length: float) -> None:
        super().__init__()
        self.network, self.length = network, length

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x / x.flatten(1).norm(dim=1)[:, None, None, None] * self.length)


OF_EACH_KIND = (
    *("ResNet18", "MobileNetV2_035", "MobileNetV3Small", "EfficientNetB0", "SqueezeNet1_1"),
    *("DenseNet121", "GoogLeNet", "RegNetY_200MF", "ConvNeXtV2_Atto", "Swin_T"),
)
"""Networks that have each kind of kernel among them."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_nan_that_arises_inside_reaches_the_answer(name: str, dtype: str) -> None:
    network = calibrated(zoo.CATALOGUE[name], "cuda")
    x = natural_images((4, 3, network.input_size, network.input_size), torch.device("cuda"), seed=200)
    model = PerImage(network, x.flatten(1).norm(dim=1).mean().item()).eval()
    quick = fast(model, "cuda", DTYPES[dtype], example=x, tune="none")
    assert not why(quick).unchanged
    x[1] = 0
    got, want = quick(x), exact(model, x)
    assert want[1].isnan().all()
    assert torch.equal(got.isnan(), want.isnan())


def test_shapes_that_come_and_go_are_never_stale(resnet: Any) -> None:
    for n, size in ((1, 224), (3, 160), (1, 97), (2, 224), (1, 224), (5, 33), (3, 160)):
        x = torch.randn(n, 3, size, size, device="cuda")
        assert relative(resnet(x), exact(resnet, x)) < 0.05
    assert resnet(torch.empty(0, 3, 224, 224, device="cuda")).shape == (0, 1000)


def test_inputs_in_any_layout_and_type_give_the_same(resnet: Any) -> None:
    x = torch.randn(2, 3, 224, 224, device="cuda")
    want = resnet(x)
    assert relative(resnet(x.contiguous(memory_format=torch.channels_last)), want) == 0
    assert relative(resnet(x.flip(3).flip(3).transpose(2, 3).contiguous().transpose(2, 3)), want) == 0
    assert relative(resnet(x.bfloat16()), want) == 0  # the plan computes in bfloat16 anyway
    with pytest.raises(ValueError, match=r"the input lies on cpu"):
        resnet(x.cpu())


def test_many_threads_and_streams_get_their_own_answers(resnet: Any) -> None:
    images = [torch.randn(1, 3, 224, 224, device="cuda") for _ in range(16)]
    want = [resnet(image) for image in images]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong.extend(i for _ in range(20) if not torch.equal(resnet(images[i]), want[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_pickles_and_inference_mode_work(resnet: Any) -> None:
    x = torch.randn(1, 3, 224, 224, device="cuda")
    want = resnet(x)
    for twin in (copy.deepcopy(resnet), pickle.loads(pickle.dumps(resnet))):
        assert relative(twin(x), want) < 0.02
    with torch.inference_mode():
        assert torch.equal(resnet(x), want)


def test_a_hundred_moves_leave_memory_where_it_was() -> None:
    model = calibrated(ResNet18, "cuda")  # each move proves its plan anew
    x = torch.randn(1, 3, 224, 224, device="cuda")
    for _ in range(3):
        fast(model, "cuda", tune="none")(x)
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(100):
        quick = fast(model, "cuda", tune="none")
        quick(x)
        assert plain(quick) is model
        del quick
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= allocated + 2**20
    assert torch.cuda.memory_reserved() <= reserved + 2**26
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.alone
def test_tuning_is_kept_and_the_second_call_takes_less_than_three_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    model = calibrated(ResNet50, "cuda")
    start = time.perf_counter()
    first = fast(model, "cuda")
    cold = time.perf_counter() - start
    start = time.perf_counter()
    second = fast(model, "cuda")
    warm = time.perf_counter() - start
    assert [row.kernel for row in why(first).rows] == [row.kernel for row in why(second).rows]
    assert all(row.us for row in why(second).rows)
    assert warm < 3
    assert cold < 60


def test_kernels_that_nobody_timed_are_compiled_by_processes_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "zoo"))
    monkeypatch.setattr(compiling, "MOST", 4)
    started: list[int] = []
    there: list[int] = []
    processes, finish = Compilers._processes, Compilers.compile

    def compiled() -> int:
        return len(list((tmp_path / "triton").rglob("*.cubin")))

    def watched(self: Compilers, *args: Any) -> set[int]:
        found = finish(self, *args)
        there.append(compiled())
        return found

    monkeypatch.setattr(Compilers, "_processes", lambda self, tasks: (started.append(tasks), processes(self, tasks))[1])
    monkeypatch.setattr(Compilers, "compile", watched)
    model = calibrated(MobileNetV2, "cuda")
    for number in range(2):
        fast(model, "cuda", example=natural_images((3, 3, 96, 96), torch.device("cuda")), tune="none")
        if not number:
            assert started
            started.clear()
    assert not started  # the second call found all there
    assert there[0] > 20
    assert compiled() - there[0] < 5  # what processes compiled is what the plan launches


@pytest.mark.parametrize("op", ["conv", "cudnn_conv", "stem", "pool", "depthwise"])
def test_a_planted_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str) -> None:
    module = ops.load(op)
    right = module.launch

    def wrong(*args: Any, **kwargs: Any) -> Any:
        value = right(*args, **kwargs)
        for part in value if isinstance(value, tuple) else (value,):
            part[:, : max(1, part.shape[1] // 4)].mul_(2)
        return value

    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "SHIPPED", None)  # what is guessed has all of them
    model = calibrated(MobileNetV2 if op in ("depthwise", "conv") else ResNet18, "cuda")
    assert any(row.kernel.split()[0] == op for row in why(fast(model, "cuda", tune="none")).rows)  # else nothing is planted
    monkeypatch.setattr(module, "launch", wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quick = fast(model, "cuda", tune="none")
    x = torch.randn(2, 3, 224, 224, device="cuda")
    want = exact(model, x)
    assert relative(quick(x), want) <= 1.25 * eager_error(model, x, torch.bfloat16, want)
    assert not any(row.kernel.split()[0] == op for row in why(quick).rows)


def test_torchvisions_and_timms_classifiers_run_fast() -> None:
    import timm
    import torchvision

    for model in (torchvision.models.regnet_y_400mf(), torchvision.models.shufflenet_v2_x0_5(), timm.create_model("convnext_atto")):
        model = model.eval()
        quick = fast(model, "cuda", tune="none")
        assert why(quick).unchanged == ""
        x = torch.randn(2, 3, 224, 224, device="cuda")
        assert relative(quick(x), exact(model, x)) < 0.05


def test_torchvisions_detector_runs_with_a_fast_backbone() -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None).eval()
    quick = fast(model, "cuda", torch.float32, tune="none")
    images = [torch.rand(3, 240, 320, device="cuda"), torch.rand(3, 200, 200, device="cuda")]
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        want = copy.deepcopy(model).cuda()(images)
    got = quick(images)
    assert [set(g) for g in got] == [set(w) for w in want]
    for g, w in zip(got, want, strict=True):
        assert abs(len(g["scores"]) - len(w["scores"])) <= 5


def test_a_graph_whose_answers_differ_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.kernels.plans.plan import Plan

    replayed = Plan.__call__
    monkeypatch.setattr(Plan, "__call__", lambda self, tensors: [leaf * 1.05 for leaf in replayed(self, tensors)])
    quick = fast(calibrated(ResNet18, "cuda"), "cuda", tune="none")
    assert "without a CUDA graph" in str(why(quick))


def windowed() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    network = SwinTransformer([4, 4], 64, [2, 2], [2, 4], [4, 4], num_classes=10).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return network


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_and_islands_are_as_right_as_eager(dtype: str) -> None:
    network, x = windowed(), natural_images((4, 3, 64, 64), torch.device("cuda"))
    model = fast(network, "cuda", DTYPES[dtype], tune="none", example=x)
    ops = [row.op for row in why(model).rows]
    assert ops.count("window_attention") == 4
    assert any("PyTorch's compiler runs" in note for note in why(model).plans[0].notes)  # the joining of four neighbours
    want = exact(network, x, torch.float64 if dtype == "float32" else torch.float32)
    assert relative(model(x), want) <= max(1.1 * eager_error(network, x, DTYPES[dtype], want), 1e-5)


def test_the_compilers_whole_network_is_served_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zoo.kernels.plans import contest

    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setattr(contest, "SURE", 1e9)
    monkeypatch.setattr(contest, "FASTER", 1e9)
    network, x = calibrated(ResNet18, "cuda"), natural_images((2, 3, 64, 64), torch.device("cuda"))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model = fast(network, "cuda", torch.bfloat16, example=x, progress=False)
    assert [row.op for row in why(model).rows] == ["torch.compile"]
    want = exact(network, x)
    assert relative(model(x), want) <= 1.1 * eager_error(network, x, torch.bfloat16, want)
    first, kept = model(x), model(x.flip(0))
    assert torch.equal(first, model(x))  # an answer is the caller's own
    assert torch.equal(kept, model(x.flip(0)))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with torch.cuda.stream(torch.cuda.Stream()):
        other = model(x)
    torch.cuda.synchronize()
    assert torch.equal(other, first)
    again = fast(network, "cuda", torch.bfloat16, tune="none", example=x)  # it is remembered, and made without a race for speed
    assert [row.op for row in why(again).rows] == ["torch.compile"]
