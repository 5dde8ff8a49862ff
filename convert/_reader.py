"""The process that reads a stranger's file: it gives up what it needs not, says so, opens the file, and hands tensors out one by one.

Started by `convert.sandbox` with Python's own isolation. Words come in a line of JSON each, and go out as a length and JSON, behind which
a tensor's bytes may follow. Standard output is kept for that; what a library prints goes nowhere. A process that runs a file by its
framework instead gets its images at the second line, and answers once.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import mmap
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from convert._confined import Protections, close, enclose
from convert._manifest import CUT, described, dtype_name, packed, unpacked
from convert.source import Source
from weights.errors import ConvertError, LimitExceeded

SLICE = 1 << 24
MAX_WORDS = 4000
THREADED = ("flax", "keras", "openvino")
"""Formats some of whose libraries need threads."""
THREADS, THREADS_OF_A_CORE = 64, 4
IMPORTED = {"flax": ("tensorstore",)}
"""Libraries that a reader may ask for, loaded while memory is still free: what they take is no fault of the file's."""


class _Heard(logging.Handler):
    """Keeps what readers log, for the other process to say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[list[Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < 100:
            self.records.append([record.levelno, record.getMessage()[:MAX_WORDS]])


def main() -> None:
    """Get ready for the file that the first line names, open it at the second, and serve its tensors until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    questions = sys.stdin.buffer
    asked = json.loads(questions.readline())
    made = enclose(asked["inputs"], asked["folder"], _threads(asked))
    _end_with_who_asks()
    heard = _Heard()
    logging.getLogger("convert").addHandler(heard)
    logging.getLogger("convert").setLevel(logging.INFO)
    if asked["runs"]:
        _run(asked, made, questions, answers)
    module = importlib.import_module(f"convert.formats.{asked['format']}")
    for library in IMPORTED.get(asked["format"], ()) if Path(asked["path"]).is_dir() else ():
        with suppress(ImportError):  # the reader says it better
            importlib.import_module(library)
    _answer(answers, _closed(asked, made))
    source = _tell(answers, lambda: _opened(module, asked), heard) if questions.readline() else None
    while source is not None and (line := questions.readline()):
        _give(answers, source, json.loads(line), asked)
    os._exit(0)  # nothing is left to tidy up, and a library's own ending could only fail


def _end_with_who_asks() -> None:
    """End this process, busy or not, when nobody is left who could ask: it hears neither the terminal's signals nor its group's."""
    if not hasattr(select, "poll"):
        return
    left = select.poll()
    left.register(0, 0)  # for its end alone, which is always told

    def wait() -> None:
        left.poll()
        if os.getpid() == os.getpgrp():
            with suppress(OSError):  # refused, once this process is confined: then it has started nothing
                os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _threads(asked: dict[str, Any]) -> int:
    """Say how many threads a file's libraries may start: TensorStore's, JAX's and TensorFlow's; the others are told to do with one."""
    runs = asked["format"] == "openvino" or os.environ.get("KERAS_BACKEND") != "torch"
    some = runs if asked["runs"] else asked["format"] != "openvino" and Path(asked["path"]).is_dir()
    return THREADS + THREADS_OF_A_CORE * (os.cpu_count() or 1) if some and asked["format"] in THREADED else 0


def _closed(asked: dict[str, Any], made: Protections) -> dict[str, Any]:
    """Give up the rest, and say what is in force."""
    close(made, asked["inputs"], asked["size_bytes"], asked["cpu_s"], asked["spare_bytes"], _threads(asked), told=asked["told"])
    return {"protections": made.held, "missing": made.missing}


def _run(asked: dict[str, Any], made: Protections, questions: BinaryIO, answers: BinaryIO) -> None:
    """Let the file's framework, which is imported while its threads may be started, compute outputs of the images that come."""
    framework = importlib.import_module("convert._framework")
    framework.prepare(asked["format"])
    _answer(answers, _closed(asked, made))
    told = json.loads(questions.readline())
    computed = framework.run(Path(asked["path"]), asked["format"], unpacked(told["images"]), last=told["last"])
    if isinstance(computed, str):
        _answer(answers, {"why": computed})
    else:
        _answer(answers, {"made": packed(computed[0]), "by": computed[1]})
    os._exit(0)


def _opened(module: Any, asked: dict[str, Any]) -> Source:
    if asked["fd"] is None:
        return module.read(Path(asked["path"]))
    return module.read(Path(asked["path"]), memoryview(mmap.mmap(asked["fd"], 0, access=mmap.ACCESS_READ)))


def _tell(answers: BinaryIO, opened: Any, heard: _Heard) -> Source | None:
    """Open the source and describe it, or say why not."""
    try:
        source = opened()
        _answer(answers, {"source": described(source), "log": heard.records})
    except Exception as error:
        _answer(answers, {**_refusal(error), "log": heard.records})
        return None
    return source


def _give(answers: BinaryIO, source: Source, question: dict[str, Any], asked: dict[str, Any]) -> None:
    """Say where the file has a tensor's bytes as they are wanted; where it hasn't, send them, unless only that was asked."""
    try:
        array = source.tensors[question["tensor"]].load()
        told = {"dtype": dtype_name(array.dtype), "shape": list(np.shape(array)), "bytes": array.nbytes, "at": _place(array, asked)}
        flat = np.ascontiguousarray(array).reshape(-1) if told["at"] is None and not question.get("place") else None
    except Exception as error:
        _answer(answers, _refusal(error))
        return
    _answer(answers, told)
    if flat is None:
        return
    content = flat.view(np.uint8).data if flat.size else memoryview(b"")
    for start in range(0, len(content), SLICE):
        _write(answers, content[start : start + SLICE])


def _place(array: np.ndarray, asked: dict[str, Any]) -> int | None:
    """Say at which byte of the one file an array begins that is a view of its map; None for every other array.

    Who asks takes the bytes from there itself, out of the file that it has open: for a large file, to send them costs more than all
    else. A reader gains nothing by lying of it, for it may send any bytes.
    """
    whole: Any = array
    while not isinstance(whole, memoryview | mmap.mmap) and whole is not None:
        whole = getattr(whole, "base", None)
    whole = whole.obj if isinstance(whole, memoryview) else whole
    if not (array.size and array.flags.c_contiguous and isinstance(whole, mmap.mmap)):
        return None
    if asked["identity"] is None or len(whole) != asked["size_bytes"]:
        return None
    with suppress(OSError):
        status = Path(asked["path"]).stat()
        if [status.st_dev, status.st_ino, status.st_size] == [*asked["identity"], asked["size_bytes"]]:
            return array.__array_interface__["data"][0] - np.frombuffer(whole, np.uint8).__array_interface__["data"][0]
    return None


def _refusal(error: Exception) -> dict[str, Any]:
    """Say an error by its class and words, so that it can be raised again."""
    if isinstance(error, MemoryError):
        error = LimitExceeded("it asks for more memory than a file of its size needs")
    if isinstance(error, RecursionError):
        error = LimitExceeded("it nests deeper than any network does")
    ours = isinstance(error, ConvertError | FileNotFoundError | PermissionError)
    words = str(error) if ours else f"{type(error).__name__}: {error}"
    told = {"error": [type(error).__name__ if ours else "", words[:MAX_WORDS]]}
    return told | {"not permitted": True} if not ours or _not_permitted(error) else told


def _not_permitted(error: BaseException | None) -> bool:
    """Whether an error comes of a system call that was not permitted."""
    seen = 0
    while error is not None and seen < 100:
        if isinstance(error, OSError) and error.errno == errno.EPERM:
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _answer(answers: BinaryIO, told: dict[str, Any]) -> None:
    text = json.dumps(told).encode()
    _write(answers, memoryview(len(text).to_bytes(8, "little") + text))


def _write(answers: BinaryIO, content: memoryview) -> None:
    while content:
        try:
            content = content[answers.write(content) or 0 :]
        except OSError as error:
            if error.errno == errno.EFAULT:  # the kernel finds no page behind what is mapped, and sends no signal for its own reading
                os._exit(CUT)
            raise
