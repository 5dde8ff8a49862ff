"""Mutants of Torch7's objects and of TorchScript's programs: one value inside is changed, and what it is made of is written anew."""

from __future__ import annotations

import copy
import pickletools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

NIL, NUMBER, TEXT, TABLE, OBJECT, BOOLEAN, FUNCTION, LEGACY_FUNCTION, RECURSIVE_FUNCTION = range(9)
WIDTHS = {"Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Float": 4, "Double": 8, "Half": 2}
CLASSES = (
    "nn.Sequential", "nn.ConcatTable", "nn.Concat", "nn.CAddTable", "nn.Identity", "nn.SpatialConvolution", "nn.SpatialConvolutionMM",
    "nn.SpatialFullConvolution", "nn.SpatialBatchNormalization", "nn.Linear", "nn.ReLU", "nn.View", "nn.Reshape", "nn.SpatialMaxPooling",
    "nn.SpatialAveragePooling", "nn.DataParallelTable", "nn.gModule", "cudnn.SpatialConvolution", "torch.FloatTensor", "torch.DoubleTensor",
    "torch.LongStorage", "torch.FloatStorage", "torch.CudaTensor", "tds.Hash", "x",
)  # fmt: skip
"""Of modules and what they hold, for one to be called another."""
TORCHS = (
    "torch FloatStorage", "torch DoubleStorage", "torch LongStorage", "torch BoolStorage", "torch QInt8Storage", "torch Size",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_sparse_tensor", "collections OrderedDict",
    "torch.jit._pickle build_intlist", "torch.jit._pickle build_tensorlist", "torch.jit._pickle restore_type_tag", "torch device",
    "__torch__ Other", "__torch__.torch.nn.modules.conv Conv2d", "builtins eval", "os system",
)  # fmt: skip
"""What a program's pickle may name."""
Node = list[Any]
Number = Callable[[int, random.Random], int]
Text = Callable[[str, random.Random], str]


class _Torch7:
    """Reads a file's objects into lists that can be changed: [what, ...]."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.seen: set[int] = set()

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def int(self) -> int:
        return struct.unpack("<i", self.take(4))[0]

    def longs(self, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}q", self.take(8 * count)))

    def text(self) -> bytes:
        return self.take(self.int())

    def object(self) -> Node:
        kind = self.int()
        if kind == NIL:
            return ["nil"]
        if kind == NUMBER:
            return ["number", struct.unpack("<d", self.take(8))[0]]
        if kind == TEXT:
            return ["text", self.text()]
        if kind == BOOLEAN:
            return ["boolean", self.int()]
        index = self.int()
        if index in self.seen:
            return ["seen", kind, index]
        self.seen.add(index)
        if kind == TABLE:
            return ["table", index, [[self.object(), self.object()] for _ in range(self.int())]]
        if kind == OBJECT:
            return self.instance(index)
        if kind in (LEGACY_FUNCTION, RECURSIVE_FUNCTION):
            return ["function", kind, index, self.text(), self.object()]
        raise ValueError("an object of no kind")

    def instance(self, index: int) -> Node:
        version, name = self.text(), self.text()
        called = name.decode("latin-1").removeprefix("torch.")
        if called.endswith("Tensor"):
            axes = self.int()
            return ["tensor", index, version, name, self.longs(axes), self.longs(axes), self.longs(1), self.object()]
        if called.endswith("Storage"):
            (size,) = self.longs(1)
            return ["storage", index, version, name, [size], self.take(size * WIDTHS[called.removesuffix("Storage")])]
        return ["object", index, version, name, self.object()]


def _text(held: bytes) -> bytes:
    return struct.pack("<i", len(held)) + held


def _longs(held: list[int]) -> bytes:
    return b"".join(struct.pack("<Q", number % 2**64) for number in held)


def _int(held: int) -> bytes:
    return struct.pack("<I", held % 2**32)


def written(node: Node) -> bytes:
    """Write an object, with the lengths and counts that its parts have now."""
    match node:
        case ["nil"]:
            return _int(NIL)
        case ["number", number]:
            return _int(NUMBER) + struct.pack("<d", number)
        case ["text", text]:
            return _int(TEXT) + _text(text)
        case ["boolean", held]:
            return _int(BOOLEAN) + _int(held)
        case ["seen", kind, index]:
            return _int(kind) + _int(index)
        case ["table", index, pairs]:
            return _int(TABLE) + _int(index) + _int(len(pairs)) + b"".join(written(one) for pair in pairs for one in pair)
        case ["function", kind, index, code, held]:
            return _int(kind) + _int(index) + _text(code) + written(held)
        case ["tensor", index, version, name, shape, strides, offset, held]:
            head = _int(OBJECT) + _int(index) + _text(version) + _text(name) + _int(len(shape))
            return head + _longs(shape) + _longs(strides) + _longs(offset) + written(held)
        case ["storage", index, version, name, size, data]:
            return _int(OBJECT) + _int(index) + _text(version) + _text(name) + _longs(size) + data
        case ["object", index, version, name, held]:
            return _int(OBJECT) + _int(index) + _text(version) + _text(name) + written(held)
        case _:
            raise ValueError("no object")


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for part in node:
        if isinstance(part, list) and part and isinstance(part[0], str):
            yield from _nodes(part)
        elif node[0] == "table" and isinstance(part, list):
            for pair in part:
                for one in pair:
                    yield from _nodes(one)


def torch7(data: bytes) -> bytes:
    """Take a file apart and write it again: the same bytes."""
    return written(_Torch7(data).object())


def of_torch7(data: bytes, draw: random.Random, number: Number, text: Text) -> bytes:
    """Change one value of one object of a Torch7 file."""
    reading = _Torch7(data)
    whole = reading.object()
    places = list(_nodes(whole))
    node = draw.choice([place for place in places if draw.random() < 0.3 or place[0] not in ("text", "nil")] or places)
    other = draw.choice(places)
    if draw.random() < 0.08:
        node[:] = draw.choice(
            (["nil"], ["number", 1e300], ["number", -1.0], ["text", b"x"], ["boolean", 7], ["seen", OBJECT, 1], copy.deepcopy(other))
        )
    elif node[0] == "number":
        node[1] = float(draw.choice((number(int(node[1]), draw) % 2**53 if abs(node[1]) < 2**53 else 0, -node[1], float("nan"), 0.5)))
    elif node[0] == "text":
        node[1] = text(node[1].decode("latin-1"), draw).encode("utf-8", "surrogatepass")
    elif node[0] == "boolean":
        node[1] ^= draw.choice((1, 1, 2, 255))
    elif node[0] == "seen":
        node[draw.choice((1, 2, 2, 2))] = draw.choice((1, 2, 3, draw.randrange(1, len(places) + 2), 2**31 - 1))
    elif node[0] == "table":
        _table(node, draw, other)
    elif node[0] == "function":
        node[draw.choice((1, 2))] = draw.choice((FUNCTION, LEGACY_FUNCTION, RECURSIVE_FUNCTION, 1))
    elif node[0] == "tensor":
        _tensor(node, draw, number)
    elif node[0] == "storage":
        _storage(node, draw, number)
    else:
        node[3] = draw.choice(CLASSES).encode() if draw.random() < 0.7 else text(node[3].decode("latin-1"), draw).encode()
    return written(whole)


def _table(node: Node, draw: random.Random, other: Node) -> None:
    pairs = node[2]
    how = draw.random()
    if pairs and how < 0.3:
        pairs.pop(draw.randrange(len(pairs)))
    elif pairs and how < 0.5:
        pairs.append(draw.choice(pairs))
    elif pairs and how < 0.8:
        draw.choice(pairs)[1] = copy.deepcopy(other)
    elif pairs and how < 0.9:
        draw.choice(pairs)[0] = list(draw.choice(pairs)[0])
    else:
        node[1] = draw.randrange(1, 40)


def _tensor(node: Node, draw: random.Random, number: Number) -> None:
    held = node[draw.choice((4, 4, 5, 5, 6))]
    how = draw.random()
    if how < 0.1:
        node[3] = draw.choice(CLASSES).encode()
    elif how < 0.2:
        node[4], node[5] = [*node[4], 1], [*node[5], 1]
    elif how < 0.3:
        node[4], node[5] = node[4][1:], node[5][1:]
    elif how < 0.35:
        node[4], node[5] = node[4] * 20, node[5] * 20
    elif held:
        at = draw.randrange(len(held))
        held[at] = number(held[at], draw)


def _storage(node: Node, draw: random.Random, number: Number) -> None:
    how = draw.random()
    if how < 0.3:
        node[4] = [number(node[4][0], draw)]
    elif how < 0.6:
        size = max(1, len(node[5]) // max(1, node[4][0]))
        kept = draw.randrange(node[4][0] + 1)
        node[4], node[5] = [kept], node[5][: kept * size]
    else:
        node[3] = f"torch.{draw.choice(list(WIDTHS))}Storage".encode()


def of_program(data: bytes, draw: random.Random, number: Number, text: Text) -> bytes:
    """Change what one operation of a TorchScript program's pickle carries: a number, a word, a class, what it refers back to, a shape."""
    found = [(one.name, argument, place or 0) for one, argument, place in pickletools.genops(data)]
    ends = [*(place for _, _, place in found[1:]), len(data)]
    carries = {
        "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "GLOBAL", "BINGET", "LONG_BINGET", "NEWTRUE", "NEWFALSE", "NONE",
        "TUPLE", "BINPERSID", "BUILD", "BINPUT",
    }  # fmt: skip
    at = draw.choice([at for at, (name, _, _) in enumerate(found) if name in carries])
    name, argument, start = found[at]
    return data[:start] + _operation(name, argument, draw, number, text, data[start : ends[at]]) + data[ends[at] :]


def _operation(name: str, held: Any, draw: random.Random, number: Number, text: Text, as_it_was: bytes) -> bytes:
    if name == "BINUNICODE":
        said = text(held, draw).encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(said)) + said
    if name in ("BININT", "BININT1", "BININT2", "LONG1"):
        made = number(held, draw)
        size = max(1, (made.bit_length() + 8) // 8)
        return (
            b"J" + struct.pack("<i", made)
            if -(2**31) <= made < 2**31
            else b"\x8a" + bytes([size]) + made.to_bytes(size, "little", signed=True)
        )
    if name == "BINFLOAT":
        return b"G" + struct.pack(">d", draw.choice((-held, 0.0, 1e308, float("nan"), 0.5)))
    if name == "GLOBAL":
        return b"c" + draw.choice(TORCHS).replace(" ", "\n").encode() + b"\n"
    if name in ("BINGET", "LONG_BINGET", "BINPUT"):
        near = max(0, draw.choice((held + 1, held - 1, 0, 1, draw.randrange(256)))) % 2**32
        return (b"q" + bytes([near % 256])) if name == "BINPUT" else b"j" + struct.pack("<I", near)
    if name == "TUPLE":
        return draw.choice((b"tK\x01\x86", b"K\x01t", b"K\x00t", b"J\xff\xff\xff\xfft", b"l", b"t\x85"))
    if name == "BINPERSID":
        return draw.choice((b"0N", b"0)", b"", b"Q2"))
    if name == "BUILD":
        return draw.choice((b"0", b"bN0", as_it_was * 2, b"0}b"))
    return draw.choice((b"N", b"\x88", b"\x89", b"K\x05", b"]", b"}", b")"))
