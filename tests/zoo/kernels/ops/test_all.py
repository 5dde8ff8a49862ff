"""Every op of `zoo.kernels.ops` against its reference in float32, at awkward sizes, into poisoned memory."""

from __future__ import annotations

import inspect
import json
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from zoo.kernels import __main__ as command
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.measuring.roofline import Limits, floor_us, measure
from zoo.kernels.measuring.timing import NotCapturable, alternate, event_time_us, graph_time_us
from zoo.kernels.ops import cublaslt, cudnn_conv, cudnn_graph, discover, narrow_cublaslt, narrow_cudnn

OPS = discover()
CASES = [(name, index) for name, op in OPS.items() for index in range(len(op.CASES))]
HALVES = (torch.bfloat16, torch.float16)
LIBRARIES = (cudnn_conv, cudnn_graph, narrow_cudnn, narrow_cublaslt)
"""Ops whose library may refuse what `narrow_conv`'s or `conv`'s cases ask for."""
INTERFACE = ("reference", "supports", "configs", "launch", "cost", "make", "CASES", "LARGE_CASES", "TOLERANCE")
"""What every op's module has; one that takes weights has `PACK` or `prepare` too."""


def label(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def cased(name: str, index: int) -> str:
    return f"{name}-{OPS[name].CASES[index]['name'].replace(' ', '_').replace(',', '')}"


every_op = pytest.mark.parametrize("op", list(OPS.values()), ids=list(OPS))
every_case = pytest.mark.parametrize(("name", "index"), CASES, ids=[cased(*case) for case in CASES])


def drawn(op: ModuleType, index: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """The arguments of a case; None where the op says that it doesn't take them, which no Triton op may say of its own cases."""
    args = checking.draw(op, op.CASES[index], dtype, device)
    refused = op.supports(**args)
    assert not refused or op in LIBRARIES or dtype != torch.float32, refused
    return None if refused else args


def empty(args: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and not value.numel() for value in args.values())


def cheap(op: ModuleType, device: torch.device) -> list[int]:
    """The cases by the bytes that they move; the interpreter's without the dearest third."""
    moved = {index: op.cost(**checking.draw(op, case, torch.float32, device))[1] for index, case in enumerate(op.CASES)}
    order = sorted(moved, key=lambda index: moved[index])
    return order if device.type == "cuda" else order[: -(-2 * len(order) // 3)]


def strides(x: Tensor) -> list[int]:
    """Of the axes that have any."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def passed(outcome: checking.Outcome) -> None:
    assert not outcome.fault
    assert outcome.error <= outcome.tolerance


@every_op
def test_every_op_has_the_whole_interface(op: ModuleType) -> None:
    assert [name for name in INTERFACE if not hasattr(op, name)] == []
    assert hasattr(op, "PACK") or hasattr(op, "prepare") or "weight" not in inspect.signature(op.reference).parameters
    assert {torch.float32, torch.bfloat16, torch.float16} <= set(op.TOLERANCE)
    assert {"out", "config"} <= set(inspect.signature(op.launch).parameters)
    for cases in (op.CASES, op.LARGE_CASES):
        assert len({case["name"] for case in cases}) == len(cases)
    assert all(getattr(op, name).__doc__ for name in ("reference", "supports", "configs", "launch", "cost", "make"))


@every_op
def test_every_op_is_tried_with_no_image_and_with_one(op: ModuleType) -> None:
    batches = {
        next(v for v in checking.draw(op, case, torch.float32, "cpu").values() if isinstance(v, Tensor)).shape[0] for case in op.CASES
    }
    assert {0, 1} <= batches


@every_case
def test_float32_agrees_with_the_reference_and_stays_in_its_slice(name: str, index: int, device: torch.device) -> None:
    """Each case with another config; the first of all is what the tests below launch."""
    op = OPS[name]
    if args := drawn(op, index, torch.float32, device):
        configs = op.configs(**checking.packed(op, args))
        passed(checking.check(op, args, torch.float32, config=configs[index % len(configs)], sliced=True))


@pytest.mark.parametrize("dtype", HALVES, ids=label)
@every_op
def test_half_precision_agrees_with_the_reference(op: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    """On the GPU every case; in the interpreter every fourth cheap one, each dtype other ones."""
    first, step = (0, 1) if device.type == "cuda" else (HALVES.index(dtype), 4)
    for index in cheap(op, device)[first::step]:
        if args := drawn(op, index, dtype, device):
            passed(checking.check(op, args, dtype))


@every_op
def test_every_config_agrees_with_the_reference(op: ModuleType, device: torch.device) -> None:
    """On the GPU at every case, in the interpreter the most promising at one."""
    cases = cheap(op, device)
    for index in cases if device.type == "cuda" else cases[-1:]:
        args = drawn(op, index, torch.float32, device)
        if not args or empty(args):
            continue
        configs = op.configs(**checking.packed(op, args))
        assert json.loads(json.dumps(configs)) == configs
        references = checking.expected(op, args)
        for config in configs if device.type == "cuda" else configs[:4]:
            passed(checking.check(op, args, torch.float32, config=config, references=references))


@every_op
def test_memory_in_another_order_is_refused_or_read_right(op: ModuleType, device: torch.device) -> None:
    for index in range(len(op.CASES)):
        args = checking.draw(op, op.CASES[index], torch.float32, device)
        names = [key for key, value in args.items() if isinstance(value, Tensor) and value.dim() == 4 and key in ("x", "residual")]
        if not names or empty(args):
            continue
        for key in names:
            other = args | {key: args[key].transpose(2, 3).contiguous().transpose(2, 3)}
            if not op.supports(**other):
                passed(checking.check(op, other, torch.float32))
        return


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@every_op
def test_what_an_op_makes_by_itself_lies_as_its_outlines_say(op: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    for index in cheap(op, device)[::4]:
        args = drawn(op, index, dtype, device)
        if not args:
            continue
        with torch.inference_mode():
            results = checking.as_tuple(op.launch(**checking.packed(op, args)))
        for outline, result in zip(checking.outlines(op, args), results, strict=True):
            assert (outline.shape, outline.dtype) == (result.shape, result.dtype)
            assert not result.numel() or strides(outline) == strides(result)


@every_op
def test_cost_counts_at_least_the_result(op: ModuleType, device: torch.device) -> None:
    for case in op.CASES:
        args = checking.draw(op, case, torch.float32, device)
        flop, moved = op.cost(**args)
        assert flop >= 0
        assert moved >= sum(result.numel() * result.element_size() for result in checking.outlines(op, args))


@pytest.mark.parametrize("op", [cudnn_conv, cudnn_graph, cublaslt], ids=lambda op: op.__name__)
def test_what_the_libraries_refuse_is_said(op: ModuleType) -> None:
    args = checking.draw(op, op.CASES[0], torch.float32, "cpu")
    channels = args["x"].shape[1]
    assert "affine" in op.supports(**args, scale=torch.ones(channels), shift=torch.ones(channels))
    assert "gate" in op.supports(**args, gate=torch.ones(args["x"].shape[0], channels))
    assert "activation" in op.supports(**args | {"act": "selu"})
    assert "type" in op.supports(**args | {"x": args["x"].double()})
    assert "of another type" in op.supports(**args, out_dtype=torch.float16)


@pytest.mark.parametrize("op", [cudnn_conv, cudnn_graph], ids=lambda op: op.__name__)
def test_cudnn_is_refused_off_the_gpu(op: ModuleType) -> None:
    assert "CUDA" in op.supports(**checking.draw(op, op.CASES[0], torch.float32, "cpu"))


@pytest.mark.parametrize("case", cudnn_conv.CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_the_reference_of_the_libraries_is_convolution_bias_sum_activation(case: dict[str, Any]) -> None:
    args = checking.draw(cudnn_conv, case, torch.float32, "cpu")
    top, bottom, left, right = args["padding"]
    padded = F.pad(args["x"].double(), (left, right, top, bottom))
    y = F.conv2d(padded, args["weight"].double(), args["bias"].double(), args["stride"], 0, args["dilation"], args["groups"])
    y = y if args.get("residual") is None else y + args["residual"].double()
    plain = {"none": torch.nn.Identity(), "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu}
    expected = plain[args["act"]](y)
    for result in (cudnn_conv.reference(**args), cudnn_conv.launch(**cudnn_conv.prepare(**args))):
        assert checking.relative_error(result, expected) < 1e-5


def test_a_kernel_that_writes_too_little_or_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    args = checking.draw(cublaslt, cublaslt.CASES[0], torch.float32, "cpu")
    launch = cublaslt.launch

    def lazy(out: Tensor, **rest: Any) -> Tensor:
        launch(out=out, **rest)[0, 0] = torch.nan
        return out

    def greedy(out: Tensor, **rest: Any) -> Tensor:
        launch(out=out, **rest)
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1 if out.storage_offset() else 0).add_(1)
        return out

    def elsewhere(out: Tensor, **rest: Any) -> Tensor:
        return launch(out=out, **rest).clone()

    monkeypatch.setattr(cublaslt, "launch", lazy)
    assert checking.check(cublaslt, args, torch.float32).error == torch.inf
    monkeypatch.setattr(cublaslt, "launch", greedy)
    assert "beside" in checking.check(cublaslt, args, torch.float32, sliced=True).fault
    monkeypatch.setattr(cublaslt, "launch", elsewhere)
    assert "not in `out`" in checking.check(cublaslt, args, torch.float32).fault


def run(**options: Any) -> None:
    defaults = {"ops": ["cublaslt"], "large": False, "dtype": ["float32"], "every": False, "jobs": 1, "only": "", "json_file": None}
    command.main(**defaults | options)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    run(json_file=tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [case["name"] for case in cublaslt.CASES]
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in rows)


def test_the_command_fails_where_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launch = cublaslt.launch
    monkeypatch.setattr(cublaslt, "launch", lambda **args: launch(**args).mul_(1.001))
    with pytest.raises(typer.Exit) as exit_:
        run(only="linear")
    assert exit_.value.exit_code == 1
    assert "1 failed" in capsys.readouterr().out


def test_the_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    ceilings = Limits({"bfloat16": 100e12, "float32": 10e12, "tf32": 50e12}, 2e12)
    assert floor_us(1e9, 1e3, torch.bfloat16, ceilings) == pytest.approx(10)
    assert floor_us(1e9, 1e3, torch.float32, ceilings) == pytest.approx(100)
    assert floor_us(1e9, 1e3, torch.float32, ceilings, tf32=True) == pytest.approx(20)
    assert floor_us(1e3, 4e6, torch.bfloat16, ceilings) == pytest.approx(2)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_is_timed_without_its_launch_cost() -> None:
    x = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    moved = 2 * x.numel() / (1e-6 * graph_time_us(lambda: x.clone()))
    assert 0.3 < moved / measure(torch.cuda.current_device()).bytes_per_s < 1.2
    small = torch.zeros(16, device="cuda")
    assert graph_time_us(lambda: small.add_(1)) < 5
    times = alternate({"one": lambda: x.clone(), "two": lambda: (x.clone(), x.clone())}, rounds=5)
    assert 1.5 < median(times["two"]) / median(times["one"]) < 2.5
    assert event_time_us(lambda: x.clone(), target_ms=20) == pytest.approx(median(times["one"]), rel=0.3)


@pytest.mark.gpu
def test_a_call_that_synchronises_is_named_and_leaves_the_device_usable() -> None:
    x = torch.ones(16, device="cuda")
    with pytest.raises(NotCapturable, match="captured"):
        graph_time_us(lambda: x.sum().item())
    assert graph_time_us(lambda: x.add(1)) > 0
    assert x.sum().item() == 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=label)
@every_case
def test_best_guesses_agree_on_the_gpu(name: str, index: int, dtype: torch.dtype) -> None:
    op = OPS[name]
    if args := drawn(op, index, dtype, torch.device("cuda")):
        references = checking.expected(op, args)
        for config in op.configs(**checking.packed(op, args))[:3]:
            for sliced in (False, True):
                passed(checking.check(op, args, dtype, config=config, sliced=sliced, references=references))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "index"),
    [(name, index) for name, op in OPS.items() for index in range(len(op.LARGE_CASES))],
    ids=[f"{name}-{case['name'].replace(' ', '_')}" for name, op in OPS.items() for case in op.LARGE_CASES],
)
def test_every_config_agrees_at_real_shapes_on_the_gpu(name: str, index: int) -> None:
    """Thousands of turns of a loop, of which the cases above have a few: one kernel was right in those and wrong in these.

    Sums of millions of products in another order are up to 1.1e-4 off; that one was off by 0.1.
    """
    op = OPS[name]
    args = checking.draw(op, op.LARGE_CASES[index], torch.bfloat16, torch.device("cuda"))
    if refused := op.supports(**args):
        assert op in LIBRARIES or op is cublaslt, refused
        return
    references = checking.expected(op, args)
    for place, config in enumerate(op.configs(**checking.packed(op, args))[:6]):
        try:
            outcome = checking.check(op, args, torch.bfloat16, config=config, references=references)
        except OutOfResources:  # tuning leaves out what doesn't fit this device; the first must
            if place == 0:
                raise
            continue
        assert not outcome.fault
        assert outcome.error <= max(outcome.tolerance, 2e-4), config
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op not in (cudnn_graph, narrow_cudnn) or find_spec("cudnn")], ids=lambda op: op.__name__
)
def test_launches_can_be_captured_into_a_cuda_graph(op: ModuleType) -> None:
    args = next(filter(None, (drawn(op, index, torch.bfloat16, torch.device("cuda")) for index in range(len(op.CASES)))))
    arguments = checking.packed(op, args)
    with torch.inference_mode():
        op.launch(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = checking.as_tuple(op.launch(**arguments))
        for result in results:
            result.fill_(checking.poison(result.dtype))
        graph.replay()
    for result, reference in zip(results, checking.expected(op, args), strict=True):
        assert checking.relative_error(result, reference) <= checking.tolerance(op, args, torch.bfloat16)
