"""Small networks of ncnn's, written by hand; for tests and the fuzzer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HALF, PLAIN = 0x01306B47, 0


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Making:
    """A network that grows layer by layer; each output has its layer's name."""

    def __init__(self, channels: int = 3, size: int = 8) -> None:
        self.lines: list[str] = []
        self.content = b""
        self.layer("Input", "images", (), f"0={size} 1={size} 2={channels}")

    def layer(self, kind: str, name: str, inputs: Sequence[str], settings: str = "", outputs: Sequence[str] = ()) -> str:
        outs = outputs or (name,)
        self.lines.append(" ".join([kind, name, str(len(inputs)), str(len(outs)), *inputs, *outs, *settings.split()]))
        return name

    def weight(self, held: np.ndarray, flag: int = PLAIN) -> None:
        """Add a weight as it is written behind its flag: in halves, in a table's places, or as it is."""
        if flag == HALF:
            raw = held.astype(np.float16).tobytes()
            self.content += struct.pack("<I", flag) + raw + bytes(-len(raw) % 4)
        elif flag:
            table = np.zeros(256, np.float32)
            values, places = np.unique(held.reshape(-1), return_inverse=True)
            table[: len(values)] = values
            raw = places.astype(np.uint8).tobytes()
            self.content += struct.pack("<I", flag) + table.tobytes() + raw + bytes(-len(raw) % 4)
        else:
            self.content += struct.pack("<I", 0) + held.tobytes()

    def plain(self, *arrays: np.ndarray) -> None:
        self.content += b"".join(held.tobytes() for held in arrays)

    def written(self, path: Path) -> Path:
        blobs = sum(int(line.split()[3]) for line in self.lines)
        path.write_text("\n".join(["7767517", f"{len(self.lines)} {blobs}", *self.lines, ""]))
        path.with_suffix(".bin").write_bytes(self.content)
        return path


def small_network(flag: int = PLAIN) -> Making:
    """A strided convolution with a norm, a depthwise one with its activation, a branch, a pool, a dense layer."""
    m = Making()
    m.layer("Convolution", "stem", ["images"], "0=4 1=3 3=2 4=1 5=1 6=108")
    m.weight(np.round(draw(4, 3, 3, 3), 1), flag)
    m.plain(draw(4))
    m.layer("BatchNorm", "bn", ["stem"], "0=4 1=0.001")
    m.plain(draw(4, seed=1), draw(4, seed=3), np.abs(draw(4, seed=4)) + np.float32(0.5), draw(4, seed=2))
    m.layer("ReLU", "relu", ["bn"])
    m.layer("Split", "split", ["relu"], "", ["one", "two"])
    m.layer("ConvolutionDepthWise", "dw", ["one"], "0=4 1=3 4=1 5=1 6=36 7=4 9=2 -23310=1,0.1")
    m.weight(draw(4, 1, 3, 3), HALF if flag == HALF else PLAIN)
    m.plain(draw(4, seed=5))
    m.layer("Eltwise", "sum", ["dw", "two"], "0=1")
    m.layer("Pooling", "pool", ["sum"], "0=0 1=2 2=2 5=1")
    m.layer("InnerProduct", "fc", ["pool"], "0=5 1=1 2=80")
    m.weight(draw(5, 16))
    m.plain(draw(5))
    m.layer("Softmax", "probabilities", ["fc"])
    return m


def seeds(folder: Path) -> list[Path]:
    small = small_network().written(folder / "small.param")
    return [small, small_network(HALF).written(folder / "half.param"), small_network(1).written(folder / "table.param")]
