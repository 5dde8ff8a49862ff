"""Mutants that their container still opens: one value inside is changed, and lengths, checksums and offsets are written anew.

A flipped byte mostly breaks a length or a checksum, and the reader refuses before it looks at what the file says. These reach it.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import random
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import structured_torch

NUMBERS = (0, 1, 2, 3, 5, 7, 127, 128, 255, 1000, 65_535, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
TEXTS = ("", "x", "conv", "Conv", "float16", "int64", "../x", "/", "\0", "é" * 3, "a" * 5000, "-1", "SAME", "NHWC", "%s", "1e999")
DEEPEST = 12
"""Messages in one another that are looked into."""
Field = tuple[int, int, Any]
"""Of a protobuf message: number, wire type, and a whole number, bytes or a list of fields."""


def number(value: int, draw: random.Random) -> int:
    """Draw a neighbour of a number, or one of the usual sizes and ends."""
    near = (value + 1, value - 1, value * 2, value // 2, -value, value ^ (1 << draw.randrange(32)))
    return draw.choice(near if draw.random() < 0.6 else NUMBERS)


def text(value: str, draw: random.Random) -> str:
    """Change a text, or the number that it is."""
    if draw.random() < 0.7 and (found := list(re.finditer(r"\d+", value))):
        at = draw.choice(found)
        return value[: at.start()] + str(number(int(at[0][:300]), draw)) + value[at.end() :]
    if value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(("", "0", "/", ":", ".", "é", value[at] * 2)) + value[at + 1 :]
    return draw.choice(TEXTS)


def value(held: Any, draw: random.Random) -> Any:
    """Change one value somewhere inside a document."""
    if isinstance(held, dict) and held:
        key, how = draw.choice(list(held)), draw.random()
        if how < 0.08:
            return {name: one for name, one in held.items() if name != key}
        if how < 0.12:
            return {**held, draw.choice(TEXTS): held[key]}
        return {**held, key: value(held[key], draw)}
    if isinstance(held, list) and held:
        at, how = draw.randrange(len(held)), draw.random()
        if how < 0.08:
            return held[:at] + held[at + 1 :]
        if how < 0.16:
            return [*held, held[at]]
        if how < 0.22:
            other = draw.randrange(len(held))
            return [*held[:at], held[other], *held[at + 1 :]]
        return [*held[:at], value(held[at], draw), *held[at + 1 :]]
    if isinstance(held, bool):
        return not held
    if isinstance(held, int) and draw.random() < 0.8:
        return number(held, draw)
    if isinstance(held, float) and draw.random() < 0.8:
        return draw.choice((0.0, -held, held * 1e9, math.inf, math.nan, 1e308))
    if isinstance(held, str) and draw.random() < 0.8:
        return text(held, draw)
    return draw.choice((None, True, 0, -1, 0.5, "x", [], {}, [[]], [1, "a"]))


def of_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(value(json.loads(data), draw)).encode("utf-8", "surrogatepass")


def of_xml(data: bytes, draw: random.Random) -> bytes:
    """Change an attribute or what an element holds, leave an element out, or say it twice."""
    held, how = data.decode("utf-8", "replace"), draw.random()
    elements = list(re.finditer(r"<(\w+)(?:\s[^<>]*)?(?:/>|>[^<>]*</\1>)", held))
    if elements and how < 0.2:
        at = draw.choice(elements)
        return (held[: at.start()] + (at[0] * 2 if how < 0.1 else "") + held[at.end() :]).encode()
    values = list(re.finditer(r'(?<==")[^"<]*(?=")|(?<=>)[^<>\s][^<>]*(?=<)', held))
    at = draw.choice(values)
    made = text(at[0], draw).replace("\0", "0").replace("<", "").replace('"', "")
    return (held[: at.start()] + made + held[at.end() :]).encode("utf-8", "surrogatepass")


def of_words(data: bytes, draw: random.Random) -> bytes:
    """Change a word of a text, leave a line out, or say it twice."""
    lines, how = data.decode("utf-8", "replace").split("\n"), draw.random()
    at = draw.randrange(len(lines))
    if how < 0.1:
        lines.pop(at)
    elif how < 0.2:
        lines.insert(at, draw.choice(lines))
    else:
        words = re.split(r"(\s+|=|,)", lines[at])
        place = draw.randrange(len(words))
        words[place] = text(words[place], draw)
        lines[at] = "".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while shift < 70:
        found |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return found, at
    raise ValueError("no number")


def _write_varint(held: int) -> bytes:
    held &= 2**64 - 1
    made = bytearray()
    while held > 127:
        made.append(held & 127 | 128)
        held >>= 7
    return bytes([*made, held])


def fields(data: bytes, depth: int = 0) -> list[Field] | None:
    """Take a message apart, and those inside it; None where the bytes are none."""
    made: list[Field] = []
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            which, wire = key >> 3, key & 7
            if not 0 < which < 20_000:
                return None
            if wire == 0:
                held, at = _varint(data, at)
                made.append((which, wire, held))
            elif wire in (1, 5):
                width = 8 if wire == 1 else 4
                made.append((which, wire, data[at : at + width]))
                at += width
            elif wire == 2:
                length, at = _varint(data, at)
                content = data[at : at + length]
                at += length
                inside = fields(content, depth + 1) if content and depth < DEEPEST and not _printable(content) else None
                made.append((which, wire, content if inside is None else inside))
            else:
                return None
            if at > len(data):
                return None
    except (IndexError, ValueError):
        return None
    return made


def _printable(content: bytes) -> bool:
    return all(32 <= byte < 127 for byte in content)


def written(message: list[Field]) -> bytes:
    """Write a message, with the lengths that its parts have now."""
    parts: list[bytes] = []
    for which, wire, held in message:
        parts.append(_write_varint(which << 3 | wire))
        if wire == 0:
            parts.append(_write_varint(held))
        else:
            content = written(held) if isinstance(held, list) else held
            parts += [_write_varint(len(content)), content] if wire == 2 else [content]
    return b"".join(parts)


def of_fields(message: list[Field], draw: random.Random) -> list[Field]:
    """Change one field somewhere inside a message."""
    if not message:
        return [(draw.randrange(1, 12), 0, draw.choice(NUMBERS))]
    at, how = draw.randrange(len(message)), draw.random()
    which, wire, held = message[at]
    if isinstance(held, list) and how < 0.85:
        return [*message[:at], (which, wire, of_fields(held, draw)), *message[at + 1 :]]
    if how < 0.88:
        return message[:at] + message[at + 1 :]
    if how < 0.93:
        return [*message[:at], message[at], *message[at:]]
    if how < 0.96:
        return [*message[:at], (draw.randrange(1, 30), wire, held), *message[at + 1 :]]
    if wire == 0:
        made: Any = number(int(message[at][2]), draw)
    elif isinstance(held, list):
        made = draw.choice(message)[2] if wire == 2 else held
        made = made if isinstance(made, bytes | list) else b""
    elif wire == 2 and _printable(held):
        made = text(held.decode(), draw).encode("utf-8", "surrogatepass")
    else:
        made = of_numbers(held, draw) if wire != 2 or draw.random() < 0.5 else held[: draw.randrange(len(held) + 1)]
    return [*message[:at], (which, wire, made), *message[at + 1 :]]


def of_numbers(data: bytes, draw: random.Random) -> bytes:
    """Change a small whole number where one stands: counts, sizes, kinds and offsets of a binary file."""
    width = draw.choice((1, 2, 4, 4, 4, 8))
    changed = bytearray(data)
    if len(data) < width:
        return bytes(draw.randrange(256) for _ in data)
    for _ in range(200):
        at = draw.randrange(len(data) - width + 1)
        at -= at % draw.choice((1, width))
        held = int.from_bytes(data[at : at + width], "little")
        if 0 < held <= max(len(data), 4096):
            made = number(held, draw) % 2 ** (8 * width)
            changed[at : at + width] = made.to_bytes(width, "little")
            break
    return bytes(changed)


def of_pickle(data: bytes, draw: random.Random) -> bytes:
    """Change what one opcode carries, or exchange two opcodes."""
    found = list(pickletools.genops(data))
    ends = [*(place for _, _, place in found[1:] if place is not None), len(data)]
    spans = [(place or 0, end) for (_, _, place), end in zip(found, ends, strict=True)]
    at = draw.randrange(len(found))
    start, end = spans[at]
    code = data[start : start + 1]
    held = data[start + 1 : end]
    how = draw.random()
    if how < 0.1:
        return data[:start] + data[end:]
    if how < 0.2:
        return data[:end] + data[start:]
    if code == b"X":
        said = text(held[4:].decode("utf-8", "replace"), draw).encode("utf-8", "surrogatepass")
        return data[: start + 1] + struct.pack("<I", len(said)) + said + data[end:]
    if code in (b"K", b"M", b"J"):
        width = len(held)
        made = number(int.from_bytes(held, "little"), draw) % 2 ** (8 * width)
        return data[: start + 1] + made.to_bytes(width, "little") + data[end:]
    if code == b"c":
        return data[: start + 1] + draw.choice((b"torch\nFloatStorage\n", b"torch\nIntStorage\n", b"torch\nSize\n", held)) + data[end:]
    return data[:start] + draw.choice((b"N", b"K\x01", b"]", b"}", b")", b"\x89", b"(", b"t", b"0")) + data[end:]


def of_npy(data: bytes, draw: random.Random) -> bytes:
    """Change an array's header, its length kept right."""
    length = int.from_bytes(data[8:10], "little")
    said = data[10 : 10 + length].decode("latin-1")
    at = draw.choice(list(re.finditer(r"\d+|'[^']*'|True|False", said)))
    inside = at[0].strip("'")
    kinds = ("<f4", "<f2", ">f4", "<i8", "|b1", "|u1", "|O", "<U3", "<c8", "<f16")
    other = draw.choice(kinds) if draw.random() < 0.3 else text(inside, draw).replace("'", "")
    made = (said[: at.start()] + (f"'{other}'" if at[0][:1] == "'" else other) + said[at.end() :]).encode("latin-1", "replace")
    return data[:8] + struct.pack("<H", min(len(made), 65_535)) + made + data[10 + length :]


def of_zip(data: bytes, draw: random.Random) -> bytes:
    """Change a member, name one otherwise, leave one out, or put it in twice; with the checksums that are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at, how = draw.randrange(len(members)), draw.random()
    likely = [place for place, (name, _) in enumerate(members) if name.endswith((".pkl", ".npy", ".json", "version", "byteorder"))]
    at = draw.choice(likely) if likely and draw.random() < 0.7 else at
    program = any(label.endswith("/constants.pkl") for label, _ in members)
    if program and draw.random() < 0.6:
        at = next((place for place, (label, _) in enumerate(members) if label.endswith("/data.pkl")), at)
    name, content = members[at]
    if program and name.endswith("/data.pkl"):
        members[at] = (name, structured_torch.of_program(content, draw, number, text))
    elif program and re.search(r"/data/\d+$", name):
        members[at] = (name, draw.choice((content[:-1], content * 2, content[: len(content) // 2], content[4:], b"")))
    elif how < 0.06:
        members.pop(at)
    elif how < 0.1:
        members.append((name, draw.choice(members)[1]))
    elif how < 0.16:
        members[at] = (text(name, draw).replace("\0", "0") or "x", content)
    else:
        members[at] = (name, structured(content, draw))
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")  # about names that are there twice
        for label, held in members:
            archive.writestr(zipfile.ZipInfo(label[:1000]), held)
    return made.getvalue()


def of_flatbuffer(data: bytes, draw: random.Random) -> bytes:
    """Change one field of one table of a TFLite file, by its schema."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated

    tables: Any = schema_py_generated
    model = tables.ModelT.InitFromPackedBuf(data, 0)
    places: list[tuple[Any, str]] = []
    left = [model]
    while left:
        table = left.pop()
        for name, held in vars(table).items():
            places.append((table, name))
            left += [one for one in (held if isinstance(held, list) else [held]) if hasattr(one, "__dict__")]
    table, name = draw.choice(places)
    held = getattr(table, name)
    if hasattr(held, "dtype"):
        held = held.tolist()
    if isinstance(held, bytes):
        made: Any = text(held.decode("utf-8", "replace"), draw).encode("utf-8", "surrogatepass")
    elif isinstance(held, bool | float):
        made = value(held, draw)
    elif isinstance(held, int):
        made = number(held, draw)
    elif isinstance(held, list) and held:
        at = draw.randrange(len(held))
        made = draw.choice([held[:at], [*held, held[at]], [*held[:at], draw.choice(held), *held[at + 1 :]]])
        if isinstance(held[at], int):
            made = [*held[:at], number(held[at], draw), *held[at + 1 :]]
    else:
        made = None
    setattr(table, name, made)
    builder = flatbuffers.Builder(len(data) + 1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _ways(data: bytes) -> Callable[[bytes, random.Random], bytes]:
    if data[:4] == b"PK\3\4":
        return of_zip
    if data[:8] in (b"\3\0\0\0\1\0\0\0", b"\4\0\0\0\1\0\0\0"):
        return lambda held, draw: structured_torch.of_torch7(held, draw, number, text)
    if data[4:8] == b"TFL3":
        return of_flatbuffer
    if data[:6] == b"\x93NUMPY":
        return of_npy
    if data[:1] in (b"{", b"["):
        return of_json
    if data[:5] == b"<?xml":
        return of_xml
    if data[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"):
        return of_pickle
    if len(data) < 2**20 and data and b"\0" not in data and data.isascii():
        return of_words
    if (message := fields(data)) and len(message) > 1:
        return lambda _, draw: written(of_fields(message, draw))
    return of_numbers


def structured(data: bytes, draw: random.Random) -> bytes:
    """Change one to three values of a file, by what it is made of; where a change makes that impossible, fewer."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            data = _ways(data)(data, draw)
        except (ValueError, TypeError, IndexError, struct.error, AttributeError, OverflowError, zipfile.BadZipFile, zlib.error):
            continue
    return data
