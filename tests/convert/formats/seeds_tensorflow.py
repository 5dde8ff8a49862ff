"""A small writer of TensorFlow checkpoints of both versions, whose files TensorFlow reads, and seeds of every dialect for the fuzzer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}
KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def remainder(state: int) -> int:
    for _ in range(8):
        state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state


REMAINDERS = [remainder(byte) for byte in range(256)]


def crc(data: bytes) -> int:
    """Compute CRC-32C byte by byte, and mask it as TensorFlow does."""
    state = 0xFFFFFFFF
    for byte in data:
        state = state >> 8 ^ REMAINDERS[(state ^ byte) & 255]
    state ^= 0xFFFFFFFF
    return (((state >> 15) | (state << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """Write a protobuf field: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape(array: np.ndarray) -> bytes:
    return b"".join(field(2, field(1, size)) for size in array.shape)


def table(entries: Mapping[bytes, bytes], *, snappy: bool = False, share: bool = True) -> bytes:
    """Write a table of one block, its keys sharing their beginnings."""
    out = b""

    def block(pairs: list[tuple[bytes, bytes]], pack: bool) -> bytes:
        nonlocal out
        data, before = b"", b""
        for key, value in pairs:
            same = (
                next((i for i, (a, b) in enumerate(zip(before, key, strict=False)) if a != b), min(len(before), len(key))) if share else 0
            )
            data += varint(same) + varint(len(key) - same) + varint(len(value)) + key[same:] + value
            before = key
        data += struct.pack("<II", 0, 1)
        if pack:  # what repeats for eight bytes is copied, the rest is literal
            packed = varint(len(data))
            at = 0
            while at < len(data):
                seen = data.rfind(data[at : at + 8], max(0, at - 2000), at + 4)
                if at + 8 <= len(data) and 0 <= seen < at:
                    packed += bytes([7 << 2 | 2]) + struct.pack("<H", at - seen)
                    at += 8
                else:
                    packed += bytes([0]) + data[at : at + 1]
                    at += 1
            data = packed
        data += bytes([int(pack)])
        handle = varint(len(out)) + varint(len(data) - 1)
        out += data + struct.pack("<I", crc(data))
        return handle

    handle = block(sorted(entries.items()), snappy)
    meta = block([], False)
    index = block([(max(entries), handle)], False)
    return out + (meta + index).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def second(
    prefix: Path, variables: Mapping[str, np.ndarray], *, names: Mapping[str, str] | None = None, snappy: bool = False, shards: int = 1
) -> Path:
    """Write a checkpoint of version 2; `names` gives variables the full names that an object graph has."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = [b""] * shards
    entries = {b"": field(1, shards) + field(3, field(1, 1))}

    def add(key: str, kind: int, dims: bytes, content: bytes, checksum: int) -> None:
        shard = len(entries) % shards
        place = field(1, kind) + field(2, dims) + (field(3, shard) if shard else b"") + field(4, len(data[shard])) + field(5, len(content))
        entries[key.encode()] = place + varint(6 << 3 | 5) + struct.pack("<I", checksum)
        data[shard] += content

    for key, array in variables.items():
        add(key, TYPES[array.dtype.name], shape(array), array.tobytes(), crc(array.tobytes()))
    if names is not None:
        nodes = b"".join(
            field(1, field(2, field(1, b"VARIABLE_VALUE") + field(2, full.encode()) + field(3, key.encode())))
            for key, full in names.items()
        )
        lengths = struct.pack("<I", len(nodes))
        guarded = struct.pack("<I", crc(lengths))
        add(KEY, 7, b"", varint(len(nodes)) + guarded + nodes, crc(lengths + guarded + nodes))
    for number, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{number:05d}-of-{shards:05d}").write_bytes(content)
    index = prefix.with_name(f"{prefix.name}.index")
    index.write_bytes(table(entries, snappy=snappy))
    return index


def first(path: Path, variables: Mapping[str, np.ndarray]) -> Path:
    """Write a checkpoint of version 1, each variable in one part."""
    metas, entries = b"", {}
    for name, array in variables.items():
        whole = field(1, b"") * array.ndim
        metas += field(1, field(1, name.encode()) + field(2, shape(array)) + field(3, TYPES[array.dtype.name]) + field(4, whole))
        if array.dtype == np.float32:
            numbers = field(5, array.tobytes())
        else:
            numbers = field(10, b"".join(varint(int(n) & (1 << 64) - 1) for n in array.reshape(-1)))
        key = b"\0" + name.encode() + b"\0\1" + (bytes([1, array.ndim]) if array.ndim else b"\0") + b"\x80\x7f" * array.ndim
        entries[key] = field(2, field(1, name.encode()) + field(2, whole) + field(3, field(1, TYPES[array.dtype.name]) + numbers))
    path.write_bytes(table({b"": field(1, metas), **entries}))
    return path


def variables() -> dict[str, np.ndarray]:
    """The start of a MobileNetV1 as TF-slim names it, with what an optimiser leaves behind."""
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=(3, 3, 3, 8)).astype(np.float32)
    return {
        "MobilenetV1/Conv2d_0/weights": kernel,
        "MobilenetV1/Conv2d_0/weights/RMSProp": kernel * 0,
        "MobilenetV1/Conv2d_0/weights/ExponentialMovingAverage": kernel + 1,
        "MobilenetV1/Conv2d_0/BatchNorm/gamma": np.full(8, 1, np.float32),
        "MobilenetV1/Conv2d_0/BatchNorm/beta": np.full(8, 2, np.float32),
        "MobilenetV1/Conv2d_0/BatchNorm/moving_mean": np.full(8, 3, np.float32),
        "MobilenetV1/Conv2d_0/BatchNorm/moving_variance": np.full(8, 4, np.float32),
        "MobilenetV1/Conv2d_1_depthwise/depthwise_weights": draw.normal(size=(3, 3, 8, 2)).astype(np.float32),
        "MobilenetV1/Logits/Conv2d_1c_1x1/weights": draw.normal(size=(1, 1, 16, 5)).astype(np.float32),
        "MobilenetV1/Logits/Conv2d_1c_1x1/biases": draw.normal(size=5).astype(np.float32),
        "global_step": np.array(7, np.int64),
    }


def layers() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A Keras model's variables by object path, and the full names that belong to the paths."""
    draw = np.random.default_rng(1)
    held = {
        "layer_with_weights-0/kernel": ("model/stem/kernel", (3, 3, 3, 4)),
        "layer_with_weights-1/depthwise_kernel": ("model/sep/depthwise_kernel", (3, 3, 4, 2)),
        "layer_with_weights-1/pointwise_kernel": ("model/sep/pointwise_kernel", (1, 1, 8, 5)),
        "layer_with_weights-1/bias": ("model/sep/bias", (5,)),
        "layer_with_weights-2/kernel": ("model/dw/kernel", (3, 3, 5, 2)),
        "layer_with_weights-2/bias": ("model/dw/bias", (10,)),
        "layer_with_weights-3/kernel": ("model/up/kernel", (2, 2, 7, 10)),
        "layer_with_weights-3/bias": ("model/up/bias", (7,)),
        "layer_with_weights-4/kernel": ("model/head/kernel", (28, 6)),
        "layer_with_weights-4/bias": ("model/head/bias", (6,)),
        "layer_with_weights-0/kernel/.OPTIMIZER_SLOT/optimizer/m": ("model/stem/kernel/m", (3, 3, 3, 4)),
    }
    arrays = {path + VALUE: draw.normal(size=size).astype(np.float32) for path, (_, size) in held.items()}
    return {**arrays, "save_counter" + VALUE: np.array(1, np.int64)}, {path + VALUE: full for path, (full, _) in held.items()}


def seeds(folder: Path) -> list[Path]:
    arrays, names = layers()
    return [
        second(folder / "plain" / "model.ckpt-7", variables()),
        second(folder / "packed" / "model", variables(), snappy=True),
        second(folder / "sharded" / "model", variables(), shards=3),
        second(folder / "named" / "model", arrays, names=names),
        second(folder / "saved" / "variables" / "variables", arrays, names=names).parent.parent,
        first(folder / "old.ckpt", variables()),
    ]
