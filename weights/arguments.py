"""Arguments of public functions: numbers of any library, and words that were misspelt."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> str:
    """Name the known words that are most like one, in any case: "; did you mean epochs?", or "" where none is.

    Example:
        >>> did_you_mean("Epoch", ["epochs", "steps"])
        '; did you mean epochs?'
    """
    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), folded, n=count, cutoff=cutoff)
    return f"; did you mean {' or '.join(folded[one] for one in near)}?" if near else ""


def python_scalar(value: Any) -> Any:
    """Return a scalar of NumPy as Python's own number, word or truth value, and anything else as it is."""
    numpy: Any = sys.modules.get("numpy")  # whoever has such a scalar has loaded it
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of any library as Python's own.

    Args:
        name: of the argument, for the error.
        value: an int, a NumPy integer, a tensor of one whole number.
        least: the smallest that is allowed.

    Raises:
        ValueError: it is no whole number, True or False, or too small.
    """
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        number = least - 1 if truth else operator.index(value)
    except (TypeError, ValueError):  # the latter by tensors and arrays of several numbers
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is a whole number of at least {least}, got {value!r}")
    return number


def wrong(name: str, message: str) -> ValueError:
    """Make the error of an argument's value; a command tells it as one of the option of that name."""
    error = ValueError(message)
    error.__dict__["argument"] = name
    return error


def number(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """Return a finite number of any library as Python's own.

    Raises:
        ValueError: it is none, or is outside of `least` to `most`, which belong to it.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not least <= found <= most or math.isinf(found):
        raise ValueError(f"{name} is a finite number from {least:g} to {most:g}, got {value!r}")
    return found


def unknown_keyword(called: str, word: str, known: Iterable[str], words: Mapping[str, str] | None = None) -> TypeError:
    """Make the error of a keyword that a function does not take.

    Args:
        called: the function or class as its caller wrote it, "predict()".
        word: the keyword.
        known: those that it takes.
        words: what to do instead of keywords that other libraries have.
    """
    known = list(known)
    todo = (words or {}).get(word)
    hint = f"; {todo}" if todo else did_you_mean(word, known) or f"; it takes {', '.join(known) or 'none'}"
    return TypeError(f"{called} takes no {word!r}{hint}")


def forgiving(function: F) -> F:
    """Let a function take NumPy's scalars as Python's, and name the word that a misspelt keyword was meant to be."""
    known = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        for word in () if takes_all else given:
            if word not in known:
                raise unknown_keyword(f"{function.__name__}()", word, known)
        return function(*map(python_scalar, args), **{name: python_scalar(value) for name, value in given.items()})

    return call  # pyright: ignore[reportReturnType]
