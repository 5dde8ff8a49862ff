"""Time single layers of ResNet50, VGG19 and ViT-B/16 in bfloat16 and in 8 bits, each by several libraries and kernels, on a GPU.

    python recipes/eight_bits_kernels.py [--batch 256] [--configs 8]

A figure is the median time in a CUDA graph of the fastest configuration of those tried, in microseconds. Triton's kernels are `conv`'s,
without factors; cuDNN's graphs have a factor for each channel, bias, shortcut, ReLU and the output's factor; cuBLASLt's products a bias.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from zoo.kernels.measuring.timing import graph_time_us
from zoo.kernels.ops import conv, cudnn_graph
from zoo.kernels.ops._tiles import tiled

FP8 = torch.float8_e4m3fn
LAYERS = [
    (64, 64, 56, 1, 1, False), (64, 64, 56, 3, 1, False), (64, 256, 56, 1, 1, True), (256, 64, 56, 1, 1, False),
    (256, 128, 56, 1, 1, False), (128, 128, 56, 3, 2, False), (128, 512, 28, 1, 1, True), (512, 128, 28, 1, 1, False),
    (128, 128, 28, 3, 1, False), (512, 256, 28, 1, 1, False), (256, 256, 14, 3, 1, False), (256, 1024, 14, 1, 1, True),
    (1024, 256, 14, 1, 1, False), (512, 512, 7, 3, 1, False), (512, 2048, 7, 1, 1, True), (2048, 512, 7, 1, 1, False),
    (64, 64, 224, 3, 1, False), (64, 128, 112, 3, 1, False), (128, 128, 112, 3, 1, False), (128, 256, 56, 3, 1, False),
    (256, 256, 56, 3, 1, False), (256, 512, 28, 3, 1, False), (512, 512, 28, 3, 1, False), (512, 512, 14, 3, 1, False),
]  # fmt: skip
"""Channels in and out, pixels of a side, kernel, stride, and whether a shortcut is added."""
LINEAR = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
TOKENS = 197

Way = tuple[str, Callable[[], Any]]


class Layer:
    """A convolution's maps and weights in one type."""

    def __init__(self, batch: int, sizes: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> None:
        c, k, side, self.kernel, self.stride, shortcut = sizes
        self.padding, self.channels, self.outputs = self.kernel // 2, c, k
        self.size = (side + 2 * self.padding - self.kernel) // self.stride + 1
        self.x = self._map(batch, c, side, side, dtype)
        self.weight = self._map(k, c, self.kernel, self.kernel, dtype)
        self.residual = self._map(batch, k, self.size, self.size, dtype) if shortcut else None
        self.out = self._map(batch, k, self.size, self.size, dtype)
        self.bias = torch.randn(k, device="cuda")

    @staticmethod
    def _map(n: int, c: int, h: int, w: int, dtype: torch.dtype) -> Tensor:
        drawn = torch.randn(n, c, h, w, device="cuda", dtype=torch.bfloat16)
        drawn = (drawn * 20).clamp(-127, 127) if dtype == torch.int8 else drawn / 2
        return drawn.to(dtype).contiguous(memory_format=torch.channels_last)


def by_triton(layer: Layer, most: int) -> Iterator[Way]:
    """Yield `conv`'s kernel with its first configurations, of bytes those with a deep k too."""
    item, taps = layer.x.element_size(), layer.kernel**2
    rows = layer.x.shape[0] * layer.size**2
    more: dict[str, Any] = {"fold": taps > 1 and layer.channels % 64 != 0, "residual": layer.residual is not None, "exact": False}
    found = tiled(rows, layer.outputs, layer.channels, taps, item, **more)[:most]
    if item == 1:
        deep = [one | {"BK": min(128, layer.channels), "stages": min(one["stages"], 4)} for one in found if one["BK"] < 128]
        found += [one for one in deep if one not in found and one["BK"] >= 32]
    options: dict[str, Any] = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 4, "act": "relu", "out": layer.out}
    for config in found:
        yield str(config), lambda config=config: conv.launch(layer.x, layer.weight, layer.bias, layer.residual, config=config, **options)


def by_cudnn_wide(layer: Layer) -> Iterator[Way]:
    """Yield cuDNN's plans in bfloat16."""
    options: dict[str, Any] = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 4, "act": "relu", "out": layer.out}
    for plan in range(8):
        yield (
            f"plan {plan}",
            lambda plan=plan: cudnn_graph.launch(
                x=layer.x, weight=layer.weight, bias=layer.bias.bfloat16(), residual=layer.residual, config={"plan": plan}, **options
            ),
        )


def by_cudnn_narrow(layer: Layer) -> Iterator[Way]:
    """Yield cuDNN's plans for a graph in 8 bits."""
    import cudnn  # pyright: ignore[reportMissingImports]

    kinds: Any = cudnn.data_type
    single, int8 = kinds.FLOAT, layer.x.dtype == torch.int8
    kind = kinds.INT8 if int8 else kinds.FP8_E4M3
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle)
    pack: dict[Any, Tensor] = {}

    def given(name: str, value: Tensor, dtype: Any) -> Any:
        _, c, h, w = value.shape
        made = graph.tensor(name=name, dim=list(value.shape), stride=[h * w * c, 1, w * c, c], data_type=dtype)
        pack[made] = value.view(torch.uint8) if value.dtype == FP8 else value
        return made

    def factor(name: str, value: float, channels: int = 1) -> Any:
        return given(name, torch.full((1, channels, 1, 1), value, device="cuda"), single)

    window: dict[str, Any] = {"stride": [layer.stride] * 2, "dilation": [1, 1]}
    window |= {"pre_padding": [layer.padding] * 2, "post_padding": [layer.padding] * 2}
    window |= {"compute_data_type": kinds.INT32} if int8 else {}
    y = graph.conv_fprop(image=given("x", layer.x, kind), weight=given("weight", layer.weight, kind), **window)
    if int8:
        y.set_data_type(kinds.INT32)
    y = graph.mul(a=y, b=factor("factor", 0.01, layer.outputs))
    y = graph.add(a=y, b=given("bias", layer.bias.view(1, -1, 1, 1), single))
    if layer.residual is not None:
        y = graph.add(a=y, b=graph.mul(a=given("residual", layer.residual, kind), b=factor("residual_factor", 0.1)))
    y = graph.mul(a=graph.relu(input=y), b=factor("out_factor", 10.0))
    _, c, h, w = layer.out.shape
    y.set_output(True).set_data_type(kind).set_dim(list(layer.out.shape)).set_stride([h * w * c, 1, w * c, c])
    pack[y] = layer.out.view(torch.uint8) if layer.out.dtype == FP8 else layer.out
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    for index in range(min(graph.get_execution_plan_count(), 8)):
        try:
            graph.build_plan_at_index(index)
        except RuntimeError:
            continue
        room = torch.empty(max(1, graph.get_workspace_size_plan_at_index(index)), dtype=torch.uint8, device="cuda")

        def run(index: int = index, room: Tensor = room) -> None:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute_plan_at_index(pack, room, index, handle=handle)

        yield graph.get_plan_name_at_index(index), run


def fastest(ways: Callable[[], Iterator[Way]]) -> str:
    """Return the least time and whose it is; "-" and the last reason where nothing runs."""
    found: list[tuple[float, str]] = []
    failed = ""
    try:
        for name, run in ways():
            try:
                run()
                torch.cuda.synchronize()
                found.append((graph_time_us(run, target_ms=2), name))
            except (RuntimeError, TritonError) as error:  # a configuration that doesn't fit this GPU
                failed = f"{type(error).__name__}: {error}"
    except graphs_refused() as error:  # a library that has no such layer
        failed = f"{type(error).__name__}: {error}"
    return f"{min(found)[0]:.1f} ({min(found)[1][:48]})" if found else f"- ({failed.splitlines()[0][:80] if failed else 'no way'})"


def graphs_refused() -> type[Exception]:
    """Return what cuDNN's front end raises of a layer that it has no plan for."""
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn.cudnnGraphNotSupportedError


def product(rows: int, c: int, k: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a linear layer by cuBLASLt."""
    x, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16).to(dtype) for size in ((rows, c), (k, c)))
    bias, one = torch.zeros(k, device="cuda", dtype=torch.bfloat16), torch.ones((), device="cuda")
    if dtype == torch.bfloat16:
        return lambda: torch.addmm(bias, x, weight.t())
    return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x, weight.t(), scale_a=one, scale_b=one, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def main() -> None:
    """Print a line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--configs", type=int, default=8, help="of Triton's to try")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {asked.batch}, microseconds", flush=True)
    for c, k in LINEAR:
        us = {str(dtype): graph_time_us(product(asked.batch * TOKENS, c, k, dtype)) for dtype in (torch.bfloat16, FP8)}
        print(f"linear {c} to {k}: {us}", flush=True)
    for sizes in LAYERS:
        said = []
        for dtype in (torch.bfloat16, torch.int8, FP8):
            layer = Layer(asked.batch, sizes, dtype)
            library = by_cudnn_wide if dtype == torch.bfloat16 else by_cudnn_narrow
            said.append(f"{str(dtype).removeprefix('torch.')} Triton {fastest(lambda layer=layer: by_triton(layer, asked.configs))}")
            said.append(f"cuDNN {fastest(lambda layer=layer, library=library: library(layer))}")
            del layer
            torch.cuda.empty_cache()
        print(f"{sizes}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
