"""Small models of Core ML's, written by hand; for tests and the fuzzer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protobuf import message, packed


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(held: np.ndarray) -> bytes:
    """Write a tensor as floats, or as halves where it is of halves."""
    return message((2, held.tobytes()) if held.dtype == np.float16 else (1, held.astype("<f4").tobytes()))


def linear(held: np.ndarray, bits: int, scale: Sequence[float], bias: Sequence[float]) -> bytes:
    """Write whole numbers of few bits that stand for reals."""
    flat = np.unpackbits(held.reshape(-1).astype(np.uint8)[:, None], axis=1)[:, 8 - bits :]
    told = message((1, np.array(scale, "<f4").tobytes()), (2, np.array(bias, "<f4").tobytes()))
    return message((30, np.packbits(flat.reshape(-1)).tobytes()), (40, message((1, bits), (101, told))))


def table(held: np.ndarray, bits: int, values: Sequence[float]) -> bytes:
    """Write places in a table of reals."""
    flat = np.unpackbits(held.reshape(-1).astype(np.uint8)[:, None], axis=1)[:, 8 - bits :]
    told = message((1, np.array(values, "<f4").tobytes()))
    return message((30, np.packbits(flat.reshape(-1)).tobytes()), (40, message((1, bits), (102, told))))


def border(*sides: int) -> bytes:
    """Write top, bottom, left and right."""
    edges = [(10, message((1, first), (2, last))) for first, last in (sides[:2], sides[2:])]
    return message(*edges)


def layer(name: str, inputs: Sequence[str], outputs: Sequence[str], number: int, *fields: tuple[int, Any]) -> bytes:
    return message((1, name), *((2, each) for each in inputs), *((3, each) for each in outputs), (number, message(*fields)))


def conv(name: str, x: str, kernel: bytes, sizes: tuple[int, int, int, int], bias: bytes = b"", **how: Any) -> bytes:
    """Write a convolution; its output has its own name."""
    outs, ins, *window = sizes
    pads = [(51, message((1, how["mode"])))] if "mode" in how else [(50, message((1, border(*how.get("pads", (0, 0, 0, 0))))))]
    fields = [(1, outs), (2, ins), (10, how.get("groups", 1)), (20, packed(*window)), (30, packed(*how.get("stride", (1, 1))))]
    fields += [(40, packed(1, 1)), *pads, (60, how.get("back", 0)), (70, int(bool(bias))), (90, kernel)]
    return layer(name, [x], [name], 100, *fields, *([(91, bias)] if bias else []))


def model(layers: Sequence[bytes], output: str, *, image: tuple[int, int, int] = (3, 8, 8), before: bytes = b"", space: int = 0) -> bytes:
    """Write a network of an array, or of an image where its space is named."""
    kind = (
        message((4, message((1, image[2]), (2, image[1]), (3, space)))) if space else message((5, message((1, packed(*image)), (2, 65568))))
    )
    described = message((1, message((1, "image"), (3, kind))), (10, message((1, output))), (100, message((1, "a test"), (3, "maker"))))
    network = message(*((1, each) for each in layers), *([(2, before)] if before else []))
    return message((1, 3), (2, described), (500, network))


def small_network(half: bool = False) -> bytes:
    """An image whose colours are scaled, a convolution with a norm, a depthwise one, a pool, a flatten, a dense layer."""
    dtype = np.float16 if half else np.float32
    scaler = message((10, 1 / 127.5), (20, -0.9), (21, -1.0), (22, -1.1))
    spread = np.abs(draw(4, seed=4)) + 0.5
    leaves = [
        (number, weight(held)) for number, held in ((15, draw(4, seed=1)), (16, draw(4, seed=2)), (17, draw(4, seed=3)), (18, spread))
    ]
    layers = [
        conv("stem", "image", weight(draw(4, 3, 3, 3).astype(dtype)), (4, 3, 3, 3), weight(draw(4)), stride=(2, 2), mode=0),
        layer("bn", ["stem"], ["bn"], 160, (1, 4), (10, 1e-3), *leaves),
        layer("relu", ["bn"], ["relu"], 130, (10, message())),
        conv("dw", "relu", weight(draw(4, 1, 3, 3).astype(dtype)), (4, 1, 3, 3), groups=4, pads=(1, 0, 2, 1)),
        layer("pool", ["dw"], ["pool"], 120, (1, 1), (10, packed(2, 2)), (20, packed(2, 2)), (30, message()), (50, 1)),
        layer("flat", ["pool"], ["flat"], 301, (1, 1)),
        layer("fc", ["flat"], ["fc"], 140, (1, 8), (2, 5), (10, 1), (20, weight(draw(5, 8))), (21, weight(draw(5)))),
        layer("softmax", ["fc"], ["probabilities"], 175),
    ]
    return model(layers, "probabilities", before=message((1, "image"), (10, scaler)), space=20)


def few_bits() -> bytes:
    places = np.arange(4 * 3 * 9).reshape(4, 3, 3, 3)
    layers = [
        conv("a", "image", linear(places % 32, 5, [0.5, 0.25, 1, 2], [1, 2, 3, 4]), (4, 3, 3, 3)),
        conv("b", "a", table(np.arange(8) % 4, 2, [-1, 0, 0.5, 3]), (2, 4, 1, 1)),
    ]
    return model(layers, "b")


def program(folder: Path) -> Path:
    """Write a package of an ML program: a kernel in halves in the weights' file, a bias in the program itself."""
    inside = folder / "net.mlpackage" / "Data" / "com.apple.CoreML"
    (inside / "weights").mkdir(parents=True)
    kernel = draw(4, 3, 3, 3).astype(np.float16).tobytes()
    (inside / "weights" / "weight.bin").write_bytes(bytes(64) + struct.pack("<IIQQ", 0xDEADBEEF, 1, len(kernel), 128) + bytes(40) + kernel)

    def constant(name: str, dtype: int, dims: Sequence[int], held: tuple[int, bytes]) -> bytes:
        kind = message((1, message((1, dtype), (2, len(dims)), *((3, message((1, message((1, n))))) for n in dims))))
        called = message((3, message((1, message((4, message((1, name))))))))
        entries = [(5, message((1, key), (2, value))) for key, value in (("name", called), ("val", message((2, kind), held)))]
        return message((1, "const"), (3, message((1, name))), *entries)

    blob = (5, message((1, "@model_path/weights/weight.bin"), (2, 64)))
    bias = (3, message((1, message((1, message((1, draw(4).tobytes())))))))
    operations = [constant("stem_weight_to_fp16", 10, (4, 3, 3, 3), blob), constant("stem_bias", 11, (4,), bias)]
    block = message(*((3, each) for each in operations), (3, message((1, "conv"))))
    function = message((3, message((1, "CoreML7"), (2, block))))
    written = message((1, 1), (2, message((1, "main"), (2, function))))
    described = message((1, message((1, "image"))), (10, message((1, "y"))))
    (inside / "model.mlmodel").write_bytes(message((1, 8), (2, described), (502, written)))
    return folder / "net.mlpackage"


def whole_program(folder: Path) -> Path:
    """Write a package of an ML program that says what it computes: of kernels in halves, in eight bits and in a table of four numbers."""
    inside = folder / "whole.mlpackage" / "Data" / "com.apple.CoreML"
    (inside / "weights").mkdir(parents=True)
    blobs = bytearray(64)

    def kind(dtype: int, dims: Sequence[int]) -> bytes:
        return message((1, message((1, dtype), (2, len(dims)), *((3, message((1, message((1, n))))) for n in dims))))

    def blob(dtype: int, stored: int, array: np.ndarray) -> bytes:
        at, held = len(blobs), array.tobytes()
        blobs.extend(struct.pack("<IIQQ", 0xDEADBEEF, stored, len(held), at + 64) + bytes(40) + held + bytes(-len(held) % 64))
        return message((2, kind(dtype, array.shape)), (5, message((1, "@model_path/weights/weight.bin"), (2, at))))

    def here(dtype: int, dims: Sequence[int], field: int, held: bytes) -> bytes:
        return message((2, kind(dtype, dims)), (3, message((1, message((field, held))))))

    def words(text: str) -> bytes:
        return here(2, (), 4, message((1, text)))

    def whole(*values: int) -> bytes:
        return here(23, (len(values),), 2, message((1, packed(*values))))

    def step(op: str, output: str, inputs: Mapping[str, str] | None = None, attributes: Mapping[str, bytes] | None = None) -> bytes:
        reads = [(2, message((1, role), (2, message((1, message((1, name))))))) for role, name in (inputs or {}).items()]
        told = [(5, message((1, key), (2, value))) for key, value in (attributes or {}).items()]
        return message((1, op), *reads, (3, message((1, output))), *told)

    def const(name: str, value: bytes, output: str = "") -> bytes:
        return step("const", output or name, attributes={"name": words(name), "val": value})

    places = np.packbits(np.array([[place & 1, place >> 1] for place in range(4)] * 6, np.uint8).reshape(-1), bitorder="little")
    operations = [
        const("stem_weight_to_fp16", blob(10, 1, draw(4, 3, 3, 3).astype(np.float16))),
        const("stem_bias", here(11, (4,), 1, message((1, draw(4).tobytes()))), "stem_bias_0"),
        const("pad", whole(0, 1, 0, 1)),
        const("kind", words("custom")),
        const("strides", whole(2, 2)),
        step("conv", "stem_out", {
            "x": "image", "weight": "stem_weight_to_fp16", "bias": "stem_bias_0", "pad": "pad", "pad_type": "kind", "strides": "strides",
        }),
        const("low", here(11, (), 1, message((1, np.float32(0).tobytes())))),
        const("high", here(11, (), 1, message((1, np.float32(6).tobytes())))),
        step("clip", "six", {"x": "stem_out", "alpha": "low", "beta": "high"}),
        step("constexpr_affine_dequantize", "middle_weight_quantized", attributes={
            "name": words("middle_weight_quantized"),
            "quantized_data": blob(21, 4, np.arange(-12, 12, dtype=np.int8).reshape(6, 4, 1, 1)),
            "scale": blob(10, 1, (np.arange(1, 7) / 8).astype(np.float16)),
            "zero_point": blob(21, 4, np.arange(6, dtype=np.int8)),
            "axis": here(23, (), 2, message((1, packed(0)))),
        }),
        step("conv", "middle_out", {"x": "six", "weight": "middle_weight_quantized"}),
        step("silu", "gated", {"x": "middle_out"}),
        const("axes", whole(2, 3)),
        step("reduce_mean", "pooled", {"x": "gated", "axes": "axes"}),
        step("constexpr_lut_to_dense", "head_weight_palettized", attributes={
            "name": words("head_weight_palettized"), "indices": blob(31, 3, places),
            "lut": blob(10, 1, np.array([-1, 0, 0.5, 3], np.float16)),
            "shape": here(33, (2,), 7, message((1, np.array([4, 6], "<u4").tobytes()))),
        }),
        step("linear", "y", {"x": "pooled", "weight": "head_weight_palettized"}),
    ]  # fmt: skip
    block = message((2, "y"), *((3, each) for each in operations))
    function = message((1, message((1, "image"), (2, kind(11, (1, 3, 8, 8))))), (2, "CoreML6"), (3, message((1, "CoreML6"), (2, block))))
    written = message((1, 1), (2, message((1, "main"), (2, function))))
    (inside / "weights" / "weight.bin").write_bytes(bytes(blobs))
    described = message((1, message((1, "image"))), (10, message((1, "y"))))
    (inside / "model.mlmodel").write_bytes(message((1, 8), (2, described), (502, written)))
    return folder / "whole.mlpackage"


def seeds(folder: Path) -> list[Path]:
    made: list[Path] = []
    for name, held in (("small", small_network()), ("half", small_network(half=True)), ("bits", few_bits())):
        made.append(folder / f"{name}.mlmodel")
        made[-1].write_bytes(held)
    return [*made, program(folder), whole_program(folder)]
