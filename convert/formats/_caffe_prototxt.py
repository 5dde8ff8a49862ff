"""Protocol Buffers' text format, in which Caffe's networks are described: .prototxt.

Fields are taken as they come, without a schema: what a layer doesn't have nobody asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert._guard import MAX_DEPTH
from convert.formats._caffe_schema import Message
from convert.formats._mapped import description
from weights.errors import LimitExceeded, MalformedFile

MAX_BYTES = 4 * 2**20
"""ResNet-152's description has 0.2 MB."""
TOKENS = re.compile(
    r"""(?P<skip>[\s,;]+|\#[^\n]*)"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?)(?![\w.]))"""
    r"""|(?P<word>-?[A-Za-z_][\w./-]*)"""
    r"""|(?P<mark>[:{}<>\[\]])"""
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
Token = tuple[str, str, int]


def read(path: Path) -> Message:
    """Read a description.

    Raises:
        MalformedFile: it is no text format; the message says which line.
        LimitExceeded: it is larger, or nests deeper, than a network's.
    """
    text = description(path, MAX_BYTES)
    try:
        return parse(text)
    except MalformedFile as error:
        raise type(error)(f"{path}: {error}") from error


def parse(text: str) -> Message:
    """Read a description; raises as `read` does."""
    tokens = _tokens(text)
    message, end = _message(tokens, 0)
    if end[1]:
        raise MalformedFile(f"line {end[2]}: {end[1]!r} closes what nothing opened")
    return message


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        match = TOKENS.match(text, at)
        if match is None:
            raise MalformedFile(f"line {line}: {text[at : at + 20]!r} is no text format")
        if match.lastgroup != "skip":
            yield match.lastgroup or "", match[0], line
        line += match[0].count("\n")
        at = match.end()
    while True:
        yield "end", "", line


def _message(tokens: Iterator[Token], depth: int) -> tuple[Message, Token]:
    """Read fields up to a closing mark or the end; return them and that mark."""
    if depth > MAX_DEPTH:
        raise LimitExceeded("the description nests deeper than any network's")
    found: Message = {}
    for token in tokens:
        kind, name, line = token
        if kind == "end" or name in ("}", ">"):
            return found, token
        if kind != "word":
            raise MalformedFile(f"line {line}: wanted the name of a field, got {name!r}")
        mark = next(tokens)
        if mark[1] == ":":
            mark = next(tokens)
        values = found.setdefault(name, [])
        if mark[1] == "[":
            for element in tokens:
                if element[1] == "]":
                    break
                values.append(_value(element, tokens, depth))
        else:
            values.append(_value(mark, tokens, depth))
    raise MalformedFile("the description has no end")


def _value(token: Token, tokens: Iterator[Token], depth: int) -> Any:
    kind, value, line = token
    if value in ("{", "<"):
        inner, end = _message(tokens, depth + 1)
        if end[1] != {"{": "}", "<": ">"}[value]:
            raise MalformedFile(f"line {line}: what {value!r} opens ends with {end[1] or 'the text'!r}")
        return inner
    if kind == "text":
        return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), value[1:-1])
    if kind == "number":
        return _number(value)
    if kind == "word":
        return {"true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}.get(value, value)
    raise MalformedFile(f"line {line}: wanted a value, got {value or 'the end'!r}")


def _number(text: str) -> int | float:
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text) if len(text) <= 20 else float(text)
    if "x" in text.lower():
        return int(text, 16)
    return float(text.rstrip("fF"))
