"""Small foreign documents: read, or refused by one error that names the place and what to do, however they are broken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from weights.documents import MISREAD, json_file, misread, number, read_json, read_toml, table, toml_file
from weights.errors import BadRecord, LimitExceeded, MalformedFile

DEEP = 100_000
BAD_JSON: dict[str, tuple[bytes | str, str]] = {
    "nothing": (b"", r"is no JSON that can be read \(Expecting value"),
    "no UTF-8": (b'{"a": "\xff"}', "is no JSON: it is not UTF-8, at byte 7"),
    "lists in lists": (b"[" * DEEP, "is nested more than 64 deep"),
    "objects in objects": (b'{"a":' * 65 + b"1" + b"}" * 65, "is nested more than 64 deep"),
    "mixed, and with brackets in strings": (b'{"]}": [' * 33 + b"1" + b"]}" * 33, "is nested more than 64 deep"),
    "a number of 5,000 digits": (b"1" * 5000, r"is no JSON that can be read \(a number of 5000 digits\)"),
    "a number of 70 bits": (b"1" * 21, r"is no JSON that can be read \(a number of 21 digits"),
    "a string without an end": (b'"' + b'\\"' * DEEP, r"is no JSON that can be read \(Unterminated string"),
    "a line of control characters": (b'{"\x1b[2J": 1, \x1b', r"is no JSON that can be read"),
    "too long": (b" " * (1 << 20), "has more than the 65,536 bytes"),
}
BAD_TOML: dict[str, tuple[str, str]] = {
    "arrays in arrays": (f"a = {'[' * DEEP}", "is nested more than 64 deep"),
    "tables in tables": ("a = " + "{a = " * 65 + "1" + "}" * 65, "is nested more than 64 deep"),
    "dotted keys": (f"{'.'.join('a' * 66)} = 1", "is nested more than 64 deep"),
    "dotted tables": (f"[{'.'.join('a' * 5000)}]", "is nested more than 64 deep"),
    "a number of 5,000 digits": (f"a = {'1' * 5000}", "is no TOML that can be read"),
    "a number of 20,000 bits": (f"a = 0x{'f' * 5000}", r"a number of 20000 bits"),
    "no date": ("a = 1979-13-41", "is no TOML that can be read"),
    "a key twice": ("a = 1\na = 2", "is no TOML that can be read"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
@pytest.mark.parametrize("refuse", [MalformedFile, BadRecord])
def test_bad_json_is_one_error_that_says_where_and_what_to_do(kind: str, refuse: type[Exception]) -> None:
    data, said = BAD_JSON[kind]
    began = time.process_time()
    with pytest.raises(refuse, match=rf"^note\.json {said}.*\. Delete it\.$") as caught:
        read_json(data, "note.json", "Delete it.", refuse=refuse, most_bytes=1 << 16 if kind == "too long" else 1 << 24)
    assert time.process_time() - began < 1
    assert "\x1b" not in str(caught.value)
    assert isinstance(caught.value, LimitExceeded) == (refuse is MalformedFile and ("nested" in said or "more than" in said))


@pytest.mark.parametrize("kind", BAD_TOML)
def test_bad_toml_is_too(kind: str) -> None:
    text, said = BAD_TOML[kind]
    with pytest.raises(MalformedFile, match=rf"a\.toml {said}.*|a\.toml is no TOML that can be read \({said}"):
        read_toml(text, "a.toml")


def test_what_is_right_is_read() -> None:
    assert read_json(b'{"a": [1, "[[[{", 2.5, null, 18446744073709551615]}', "x") == {"a": [1, "[[[{", 2.5, None, (1 << 64) - 1]}
    assert read_json("[" * 64 + "]" * 64, "x")
    assert read_toml("a = '[[['\nb = '''\n[['''\nc = \"\"\"\n\\\"[{\"\"\"\n# [[[\n[t.u]\nx = [1]", "x")["t"] == {"u": {"x": [1]}}
    assert read_toml("\n".join(f"a{n} = [1]" for n in range(500)), "x")["a499"] == [1]


def test_a_pipe_is_not_waited_for_and_a_long_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        json_file(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b" " * 2000)
    for read in (json_file, toml_file):
        with pytest.raises(LimitExceeded, match=r"long has more than the 1,000 bytes"):
            read(tmp_path / "long", most_bytes=1000)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "expected a table, got a list"),
        ({}, "size is missing"),
        ({"size": True}, "size is true or false, expected int"),
        ({"size": "1"}, "size is a text, expected int"),
        ({"size": None}, "size is nothing, expected int"),
    ],
)
def test_fields_are_of_their_types(value: Any, said: str) -> None:
    with pytest.raises(MalformedFile, match=rf"^x is no note \({said}\)\. Delete it\.$"), misread("x is no note", "Delete it"):
        table(value, {"size": int})


@pytest.mark.parametrize("kind", [*MISREAD, UnicodeDecodeError, OverflowError, KeyError])
def test_whatever_a_damaged_document_makes_code_raise_becomes_its_error(kind: type[Exception]) -> None:
    error = kind("utf-8", b"", 0, 1, "x") if kind is UnicodeDecodeError else kind("why")
    with (
        pytest.raises(BadRecord, match=r"^x is no index \(.+\)\. Fetch it again, or write it anew\.$"),
        misread("x is no index", refuse=BadRecord),
    ):
        raise error


def test_our_own_errors_pass_and_others_too() -> None:
    for error in (BadRecord("mine"), LimitExceeded("mine"), OSError("disk"), MemoryError()):
        with pytest.raises(type(error)), misread("x"):
            raise error


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("0", 0), ("1234", 1234), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("9" * 5000, None), ("", None), (None, None)],
        *[(text, None) for text in ("-1", " 1", "1_0", "0x1", "\u00b2", "\u0663")],
    ],
)
def test_a_number_of_a_stranger_is_of_ascii_digits_and_not_too_long(text: str | None, found: int | None) -> None:
    assert number(text) == found
