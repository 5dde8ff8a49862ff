"""Small documents of others, JSON and TOML: capped in bytes and depth before they are parsed, and typed errors when they fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import tomllib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

from weights.errors import LimitExceeded, MalformedFile, WeightsError
from weights.regular import open_regular
from weights.wording import clause, printable

MOST_BYTES = 16 << 20
MOST_DEPTH = 64
MOST_NUMBER = 1 << 64
"""What no whole number reaches: no reader needs more bits, and many a writer fails at them."""
MISREAD = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, EOFError, struct.error, AssertionError)
"""What code raises that takes a document for something else than it is."""
AGAIN = "Fetch it again, or write it anew"
Refuse = Callable[[str], Exception]
"""Makes the error of a document of a message; an error's class is one."""
_STRING = r'"(?:[^"\\]|\\.)*+"?'
_JSON = re.compile(rf'{_STRING}|[^\[\]{{}}"]++', re.DOTALL)
_LINE = r"\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?|\#[^\n]*+"
_TOML = re.compile(rf"\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+(?:\"\"\")?|'''(?:[^']|'(?!''))*+(?:''')?|{_LINE}|[^\[\]{{}}\"'\#]++", re.DOTALL)


def read_json(
    data: bytes | str,
    place: object,
    todo: str = AGAIN,
    *,
    refuse: Refuse = MalformedFile,
    most_bytes: int = MOST_BYTES,
    most_depth: int = MOST_DEPTH,
    **how: Any,
) -> Any:
    """Parse JSON.

    Args:
        data: UTF-8, or text.
        place: what the document is called, for the message.
        todo: what the reader of the message can do.
        refuse: makes the error; left out, MalformedFile, and LimitExceeded of what is too long or too deep.
        most_bytes: of the document.
        most_depth: of arrays and objects inside of each other.
        **how: as `json.loads` takes it.

    Raises:
        Exception: what `refuse` makes, and nothing else, whatever stands in the document.

    Example:
        >>> read_json(b'{"a": [1]}', "figures.json")
        {'a': [1]}
    """
    how = {"parse_int": _integer} | how
    return _parsed(data, place, "JSON", todo, refuse, most_bytes, most_depth, _JSON, lambda text: json.loads(text, **how))


def read_toml(
    data: bytes | str,
    place: object,
    todo: str = AGAIN,
    *,
    refuse: Refuse = MalformedFile,
    most_bytes: int = MOST_BYTES,
    most_depth: int = MOST_DEPTH,
) -> dict[str, Any]:
    """Parse TOML, as `read_json` does JSON; tables inside of each other count for the depth, however they are written."""
    return _parsed(data, place, "TOML", todo, refuse, most_bytes, most_depth, _TOML, tomllib.loads)


def json_file(path: Path, todo: str = AGAIN, **how: Any) -> Any:
    """Read a regular file as JSON: no pipe is waited for, and no more is read than the limit allows.

    Raises:
        OSError: it can't be read, or is no regular file.
        Exception: as `read_json`.
    """
    return read_json(_capped(path, how), path, todo, **how)


def toml_file(path: Path, todo: str = AGAIN, **how: Any) -> dict[str, Any]:
    """Read a regular file as TOML, as `json_file` does JSON."""
    return read_toml(_capped(path, how), path, todo, **how)


def table(value: Any, fields: Mapping[str, type | tuple[type, ...]] | None = None) -> dict[str, Any]:
    """Return a parsed value that is an object with at least these fields of these types; True and False are no numbers.

    Raises:
        TypeError, KeyError: it is not; to be had inside of `misread`.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected a table, got {_kind(value)}")
    found = cast("dict[str, Any]", value)
    for name, kinds in (fields or {}).items():
        if name not in found:
            raise KeyError(f"{name} is missing")
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(found[name], kinds) or (isinstance(found[name], bool) and bool not in kinds):
            raise TypeError(f"{name} is {_kind(found[name])}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    return found


@contextlib.contextmanager
def misread(what: str, todo: str = AGAIN, refuse: Refuse = MalformedFile, wraps: type[WeightsError] | None = None) -> Generator[None]:
    """Turn what goes wrong while a parsed document is taken apart into one error of that document.

    Args:
        what: the document and what it is not, "index.json is no index of a mirror".
        todo: what the reader of the message can do.
        refuse: makes the error; one that it made itself passes, and so does any of ours,
        wraps: but for these, of readers who don't know which document it is.
    """
    try:
        yield
    except MISREAD as error:
        ours = isinstance(error, WeightsError) or (isinstance(refuse, type) and isinstance(error, refuse))
        if ours and not (wraps is not None and isinstance(error, wraps)):
            raise
        raise refuse(f"{what} ({reason(error)}). {clause(todo)}.") from error


def reason(error: BaseException) -> str:
    """Say in a short line that can be printed why a document was refused: a key that is missing is no sentence of its own."""
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    said = f"{said} is missing" if isinstance(error, KeyError) and " " not in said else said or type(error).__name__
    return clause(printable(said.replace("\n", " "))[:200])


def number(text: str | None, most: int = 10**18) -> int | None:
    """Read a decimal number of ASCII digits that a stranger wrote; None of anything else, or of one that is larger than `most`."""
    if text is None or not 0 < len(text) <= 19 or not (text.isascii() and text.isdigit()):
        return None
    return found if (found := int(text)) <= most else None


def _capped(path: Path, how: Mapping[str, Any]) -> bytes:
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        return file.read(min(os.fstat(file.fileno()).st_size, how.get("most_bytes", MOST_BYTES)) + 1)  # what is asked for is allocated


def _parsed(
    data: bytes | str,
    place: object,
    kind: str,
    todo: str,
    refuse: Refuse,
    most_bytes: int,
    most_depth: int,
    other: re.Pattern[str],
    parse: Callable[[str], Any],
) -> Any:
    todo = clause(todo)
    larger = LimitExceeded if refuse is MalformedFile else refuse
    if len(data) > most_bytes:
        raise larger(f"{place} has more than the {most_bytes:,} bytes that such a document has. {todo}.")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        deep = _deeper(text, most_depth, other)
        found = None if deep else parse(text)
        deep = deep or (kind == "TOML" and _nested(found, most_depth))
    except WeightsError:  # of a hook
        raise
    except UnicodeDecodeError as error:
        raise refuse(f"{place} is no {kind}: it is not UTF-8, at byte {error.start:,}. {todo}.") from error
    except MISREAD as error:
        raise refuse(f"{place} is no {kind} that can be read ({reason(error)}). {todo}.") from error
    if deep:
        raise larger(f"{place} is nested more than {most_depth} deep. {todo}.")
    return found


def _deeper(text: str, most: int, other: re.Pattern[str]) -> bool:
    """Tell before anything is parsed whether brackets are nested deeper than `most`; brackets in strings are none."""
    if text.count("[") + text.count("{") <= most:
        return False
    brackets = other.sub("", text).replace("{", "[").replace("}", "]")
    for _ in range(most):
        fewer = brackets.replace("[]", "")  # the innermost ones
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    if "[]" in brackets:
        return True
    depth = 0  # of those that nothing closes
    for bracket in brackets:
        depth += 1 if bracket == "[" else -1
        if depth > most:
            return True
    return False


def _nested(value: Any, most: int) -> bool:
    """Tell whether tables are nested deeper than `most`, as dotted keys write them without brackets; a number has 64 bits."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        inner = [one for group in level for one in (cast("dict[str, Any]", group).values() if isinstance(group, dict) else group)]
        if long := next((one for one in inner if type(one) is int and abs(one) >= MOST_NUMBER), None):
            raise ValueError(f"a number of {long.bit_length()} bits")
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


def _integer(digits: str) -> int:
    if len(digits) > 21 or abs(found := int(digits)) >= MOST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return found


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "a table", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
