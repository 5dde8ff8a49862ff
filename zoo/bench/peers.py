"""The ways to run a network and to train it: ours, and what PyTorch and the CPU engines offer, each as its documentation would have it."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from weights.arguments import did_you_mean
from zoo.bench.learner import Learner
from zoo.bench.subject import Subject, tf32
from zoo.kernels.memory.workspaces import clear_workspaces
from zoo.networks.model import Model

Call = Callable[[], Tensor]
OURS = "fast"
HALF, QUARTER = "fast-bf16", "fast-int8"
"""Ways to run a network on a CPU of ours too: in fewer bits than float32."""
NARROWER = {"openvino-shipped": "bfloat16", HALF: "bfloat16", QUARTER: "int8"}
"""What computes in fewer bits beside float32, where the CPU has instructions for it."""
MODULE, SMALL = "fast-module", "fast-recompute"
"""Ways to train of ours too: without the graph, and in as little memory as it can."""
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WARMUPS = 3
"""Calls of a new way before it is captured or measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run or to train a network.

    Attributes:
        name: for `--peers` and records.
        label: for tables and charts; `{dtype}` stands for the measured dtype.
        says: one line for the page.
        build: takes a `Subject`, or a `Learner` to train, and what `fast` is to tune; returns a call on its images, or a step.
        devices: "cuda" or "cpu", where it exists.
        exact: computes in float32, whatever the measured dtype.
        uses_tf32: its float32 products are TF32's.
        standard: measured unless `--peers` says otherwise.
        needs: the packages without which it is left out.
    """

    name: str
    label: str
    says: str
    build: Callable[[Any, str], Call]
    devices: tuple[str, ...] = ("cuda", "cpu")
    exact: bool = False
    uses_tf32: bool = False
    standard: bool = True
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OurCall:
    """A call or a step of ours, and what says which op does which part of it.

    Attributes:
        run: the call.
        network: what `fast` returned.
    """

    run: Call
    network: nn.Module

    def __call__(self) -> Tensor:
        """Run the network, or do a step."""
        return self.run()

    def ops(self) -> dict[str, dict[str, Any]]:
        """Return steps, time and PyTorch's time by op, as `zoo.kernels.reports.report.PlanReport.by_op`; {} without a plan."""
        from zoo.kernels import why

        plans = why(self.network).plans
        return plans[-1].by_op() if plans else {}


def note_ops(row: dict[str, Any], call: object) -> None:
    """Write into a way's row which op wins which steps, where the way is ours and has a plan."""
    if isinstance(call, OurCall) and (ops := call.ops()):
        row["ops"] = ops


class _Halves(nn.Module):
    """A zoo network without its input check, which torch.fx can't trace."""

    def __init__(self, network: Model) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.forward_head(self.network.forward_body(x))


def folded(module: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorms are folded into the convolutions before them, by torch's own `fuse`."""
    from torch.fx.experimental.optimization import fuse

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.fx deprecates what torch.fx calls
        return fuse(_Halves(copy.deepcopy(module)).eval() if isinstance(module, Model) else module)


def _ours(s: Subject, tune: str) -> Call:
    from zoo.kernels import fast

    images = s.input(s.dtype, channels_last=s.device.type == "cuda")  # as the others: every way has its own layout
    network = fast(s.own, s.device, s.dtype, tune=cast(Any, tune), example=images, progress=False)
    return OurCall(lambda: network(images), network)


def _half(s: Subject, tune: str) -> Call:
    from zoo.kernels import fast

    images = s.input(torch.float32)
    network = fast(s.own, s.device, torch.bfloat16, tune=cast(Any, tune), example=images, progress=False)
    return lambda: network(images)


def _quarter(s: Subject, tune: str) -> Call:
    """Calibrate on made-up images, which tells the speed; what it does to answers is for real images to say."""
    from zoo.kernels import fast

    images = s.input(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the error is UNPROVEN, as the page does
        network = fast(s.own, s.device, "int8", tune=cast(Any, tune), example=images, tolerance={"error": 10}, progress=False)
    return lambda: network(images)


def _untuned(build: Callable[..., Call], **options: Any) -> Callable[[Any, str], Call]:
    """Return a way that has nothing which `fast` could tune."""
    return lambda subject, tune: build(subject, **options)


def _eager(s: Subject, exact: bool = False, channels_last: bool = False, with_tf32: bool = False) -> Call:
    dtype = torch.float32 if exact else s.dtype
    network, images = s.placed(s.peer, dtype, channels_last), s.input(dtype, channels_last)
    if not with_tf32:
        return lambda: network(images)

    def call() -> Tensor:
        with tf32(True):
            return network(images)

    return call


def forked_compilers() -> None:
    """Let torch.compile fork the processes that compile: on an H200's machine those that it starts anew died of a broken pipe."""
    from torch._inductor import config

    if hasattr(config, "worker_start_method"):
        config.worker_start_method = "fork"


def _compiled(s: Subject, mode: str | None = None) -> Call:
    network, images = s.placed(s.peer, s.dtype, channels_last=True), s.input(s.dtype, channels_last=True)
    if mode is None and s.device.type == "cpu":
        call: Any = torch.compile(network, dynamic=False, options={"freezing": True})
    else:
        forked_compilers()
        call = torch.compile(network, dynamic=False, mode=mode)
    return lambda: call(images)


def _recipe(s: Subject) -> Call:
    network = s.placed(folded(s.peer), s.dtype, channels_last=True)
    images = s.input(s.dtype, channels_last=True)
    compiled: Any = torch.compile(network, dynamic=False)
    return graphed(lambda: compiled(images))


def graphed(call: Call) -> Call:
    """Capture a call; the replay reads the very tensors that the call read, weights too, and writes where it wrote."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    clear_workspaces()  # cuBLAS's is made anew in the graph's own memory, which nobody else is given
    try:
        with torch.cuda.graph(graph):
            out = call()
    finally:
        clear_workspaces()  # while the graph lives: PyTorch 2.11 crashes where one is freed whose pool is gone

    kept = call, out  # the call too: without it the weights would go, and others' tensors take their place under the graph

    def replay() -> Tensor:
        graph.replay()
        return kept[1]

    return replay


def _onnxruntime(s: Subject) -> Call:
    import onnxruntime

    if s.dtype != torch.float32:
        raise ValueError("onnxruntime's CPU engine computes these networks in float32 only")
    images = s.input(torch.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        file = Path(folder) / "network.onnx"
        torch.onnx.export(s.peer, (images,), file, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: images.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _openvino(s: Subject, shipped: bool = False) -> Call:
    from zoo.kernels.engines.openvino import imported

    openvino = imported()  # without the report that it sends home
    images = s.input(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the tracing that OpenVINO reads
        network = openvino.convert_model(s.peer, example_input=images, input=[tuple(images.shape)])
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    if not shipped:
        settings["INFERENCE_PRECISION_HINT"] = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(s.dtype, "f32")
    request = openvino.Core().compile_model(network, "CPU", settings).create_infer_request()
    array = images.numpy()
    return lambda: torch.from_numpy(request.infer([array], share_inputs=True, share_outputs=True)[0])


def _our_step(learner: Learner, tune: str, recompute: bool | None = None, graph: bool = True) -> Call:
    from zoo.kernels import fast
    from zoo.kernels.training import fast_step

    with torch.autocast(learner.images.device.type, learner.dtype, learner.dtype is not None):
        model = fast(learner.network, train=True, tune=cast(Any, tune), example=learner.images, recompute=recompute)
    if not graph:
        return OurCall(lambda: learner.step(model), model)
    step = fast_step(model, learner.loss, learner.optimizer, dtype=learner.dtype)
    return OurCall(lambda: step(learner.images, learner.labels), model)


def eager_step(learner: Learner) -> Call:
    """Return a step as people write it."""
    return lambda: learner.step(learner.network)


def _compiled_step(learner: Learner, mode: str | None = None) -> Call:
    forked_compilers()
    call: Any = torch.compile(learner.network, dynamic=False, mode=mode)

    def step() -> Tensor:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        return learner.step(call)

    return step


def _table(*ways: Way) -> dict[str, Way]:
    return {way.name: way for way in ways}


_GPU = ("cuda",)
WAYS = _table(
    Way(OURS, "fast()", "`fast(network)`; the time includes copying the images into its graph and the answer out of it", _ours),
    Way("eager-fp32", "eager fp32", "eager, float32 without TF32, NCHW", _untuned(_eager, exact=True), exact=True),
    Way(
        "eager-tf32",
        "eager TF32",
        "eager, float32 as PyTorch ships: TF32 in convolutions, not in products, NCHW",
        _untuned(_eager, exact=True, with_tf32=True),
        devices=_GPU,
        exact=True,
        uses_tf32=True,
    ),
    Way("eager", "eager {dtype}", "eager, {dtype}, NCHW", _untuned(_eager)),
    Way("eager-cl", "eager {dtype} cl", "eager, {dtype}, channels_last", _untuned(_eager, channels_last=True)),
    Way("compile", "compile", "`torch.compile`, {dtype}, channels_last (on a CPU with `freezing`)", _untuned(_compiled)),
    Way(
        "max-autotune",
        "max-autotune",
        '`torch.compile(mode="max-autotune")`, {dtype}, channels_last; its own CUDA graphs copy the images too',
        _untuned(_compiled, mode="max-autotune"),
        devices=_GPU,
    ),
    Way(
        "recipe",
        "fold+compile+graph",
        "the strongest stock recipe: BatchNorm folded by `torch.fx`, `torch.compile`, {dtype}, channels_last, one CUDA graph that is "
        "replayed where its images lie, nothing is copied",
        _untuned(_recipe),
        devices=_GPU,
    ),
    Way(
        "onnxruntime", "onnxruntime", "onnxruntime, float32", _untuned(_onnxruntime), devices=("cpu",), needs=("onnxruntime", "onnxscript")
    ),
    Way("openvino", "OpenVINO", "OpenVINO, {dtype}, latency hint", _untuned(_openvino), devices=("cpu",), needs=("openvino",)),
    Way(
        "openvino-shipped",
        "OpenVINO as shipped",
        "OpenVINO, latency hint, in the precision that it chooses itself: bfloat16 where the CPU has it",
        _untuned(_openvino, shipped=True),
        devices=("cpu",),
        needs=("openvino",),
    ),
    Way(
        HALF,
        "fast() bf16",
        "`fast(network, dtype=torch.bfloat16)`",
        _half,
        devices=("cpu",),
        needs=("openvino",),
    ),
    Way(
        QUARTER,
        "fast() int8, UNPROVEN",
        '`fast(network, dtype="int8")` calibrated on made-up images: its speed is right, its error says little',
        _quarter,
        devices=("cpu",),
        needs=("nncf", "openvino"),
    ),
)
"""Ways to run a network."""
TRAINING = _table(
    Way(OURS, "fast_step()", "`fast_step(fast(network, train=True), …)`; copying the images into its graph counts", _our_step),
    Way(
        SMALL,
        "recomputing",
        "`fast_step(fast(network, train=True, recompute=True), …)`, which makes maps again rather than keep them",
        partial(_our_step, recompute=True),
        standard=False,
    ),
    Way(MODULE, "fast()", "`fast(network, train=True)` in a step as people write it", partial(_our_step, graph=False), standard=False),
    Way("eager-cl", "eager {dtype} cl", "eager, {dtype} autocast, channels_last", _untuned(eager_step)),
    Way("compile", "compile", "`torch.compile` of the network, {dtype} autocast, channels_last", _untuned(_compiled_step)),
    Way(
        "max-autotune",
        "max-autotune",
        '`torch.compile(mode="max-autotune")`, {dtype} autocast, channels_last, with its own CUDA graphs',
        _untuned(_compiled_step, mode="max-autotune"),
        devices=_GPU,
    ),
)
"""Ways to train it."""


def select(peers: Iterable[str] | None, device: torch.device, dtype: torch.dtype, ways: dict[str, Way] | None = None) -> list[Way]:
    """Choose the ways of a run: ours and its peers, in the table's order.

    Args:
        peers: their names; None for the standard ones of the device that are installed.
        device: where they run.
        dtype: what they compute in; in float32 `eager` is `eager-fp32`, and is left out.
        ways: the table.

    Returns:
        At least ours.

    Raises:
        ValueError: no peer of that name, none on that device, or its package is missing; the message says which there are.
    """
    table = WAYS if ways is None else ways
    here = _here(table, device, dtype)
    if peers is None:
        return [way for way in _usual(here, dtype) if not _missing(way)]
    asked = {name.strip() for name in peers} | {OURS}
    for name in sorted(asked):
        if name not in here:
            on = f"{device.type} in {str(dtype).removeprefix('torch.')}"
            raise ValueError(
                f"no peer {name!r} on {on}{did_you_mean(name, here) or '.'} There are {', '.join(n for n in here if n != OURS)}."
            )
        if missing := _missing(here[name]):
            raise ValueError(f"the peer {name} needs the package {missing[0]}, which is not installed: pip install {' '.join(missing)}")
    return [way for name, way in here.items() if name in asked]


def left_out(device: torch.device, dtype: torch.dtype, ways: dict[str, Way] | None = None) -> dict[str, list[str]]:
    """Name the standard peers that `select(None, …)` leaves out, each with the packages that it needs and that are not installed."""
    table = WAYS if ways is None else ways
    return {way.name: missing for way in _usual(_here(table, device, dtype), dtype) if (missing := _missing(way))}


def label(name: str, dtype: str, ways: dict[str, Way] | None = None) -> str:
    """Return a way's label with the dtype's short name, "bf16"; the name itself where the table has none such."""
    short, table = {str(key).removeprefix("torch."): value for key, value in SHORT.items()}, WAYS if ways is None else ways
    return table[name].label.format(dtype=short.get(dtype, dtype)) if name in table else name


def _here(table: dict[str, Way], device: torch.device, dtype: torch.dtype) -> dict[str, Way]:
    return {n: w for n, w in table.items() if device.type in w.devices and not (n == "eager" and dtype == torch.float32)}


def _usual(here: dict[str, Way], dtype: torch.dtype) -> list[Way]:
    from zoo.kernels.quantizing.quantized import narrow_kinds

    single, kinds = dtype == torch.float32, narrow_kinds()
    without = set() if single else {"onnxruntime", *NARROWER}
    without |= {name for name, kind in NARROWER.items() if kind not in kinds}
    return [way for way in here.values() if way.standard and way.name not in without]


def _missing(way: Way) -> list[str]:
    """Return the packages that a way needs and that are not installed."""
    return [package for package in way.needs if importlib.util.find_spec(package) is None]
