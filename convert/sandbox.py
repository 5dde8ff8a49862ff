"""Strangers' files are read in a process of their own, which may do nothing else: this process never parses them.

`read` returns the same `Source` as `convert.formats.read`. Behind it stands another Python, started in isolation, which has given up
writing, the network, other programs and all files but this one, as far as the kernel lets it, and most of its memory and time. It
describes what it found; each tensor comes through a pipe when it is asked for, and each word that comes is checked. So a file that
brings a reader down is an error, and one that takes it over finds itself with nothing to do. `run` lets a framework, onnxruntime or Keras,
compute outputs of a file in the same way, with more memory and time.

A safetensors file is read here: its strict reader is what would check another's answers.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

import weights.errors as errors
from convert import _calls, _framework, formats
from convert._confined import SPARE_BYTES
from convert._guard import check
from convert._kept import Kept
from convert._manifest import CUT, believed, dtype_name, packed, unpacked
from convert.kinds import is_array, is_dict, is_list
from convert.sets import chosen
from convert.source import Shape, Source
from weights.errors import CallRefused, ConvertError, LimitExceeded, MalformedFile, ReaderCrashed, ReaderUnavailable

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("convert")

STARTING_S = 60.0
"""For a reader to get ready: Python and a library or two come from a disk that may be slow."""
OPENING_S = 60.0
"""For opening a file, whose structure alone is read; with `SLOWEST_BYTES_S` for its size."""
SLOWEST_BYTES_S = 5e6
"""Bytes of a file in a second on a slow disk, unpacked."""
CPU_S = 600
RUNNING_S = 600.0
"""For a framework to be imported, and again for it to run a network on a few images: each takes seconds where nothing is wrong."""
RUNNING_CPU_S = 3600
SEAL_FUTURE_WRITE = 0x10
"""Linux' F_SEAL_FUTURE_WRITE (5.1), which Python's fcntl does not name before 3.14."""
RUNNING_BYTES = 8 * 2**30
"""Memory of a framework that runs a network, beside four times the file; the largest network on two images takes a quarter."""
PIPE_BYTES = 1 << 20
"""Of the pipe through which tensors come, as much as Linux gives any user."""
MAX_WORDS = 200
"""Of what is said of a framework."""
MAX_TOLD_BYTES = 128 * 2**20
"""Of a description: a hundred thousand tensors with their steps need half."""
TOLD_BYTES, TOLD_OF_A_BYTE = 4 * 2**20, 64
"""What is told of a small file at most, and more for each of its bytes: parsed, words take thirty times their room."""
COMPANIONS = ("caffe", "coreml", "darknet", "deepcompression", "mxnet", "ncnn", "onnx", "openvino", "paddle", "tensorflow")
"""Formats whose files lie beside one another: their readers may read the folder."""
MOST_COMPANIONS = 1000
"""Files of a folder that are weighed before it is read: it may be somebody's home."""
KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "LC_ALL")
"""What the reader's environment keeps of ours: no token is among it."""
OWN = ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
"""What is the reader's own folder in its environment, for what libraries keep when they are imported."""
MAX_REFUSED = 1000
"""System calls of which is said that they were refused."""
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "KERAS_HOME": os.devnull, "TF_CPP_MIN_LOG_LEVEL": "3"}
"""A framework computes where every machine does, in float32, and as it comes, whatever the user's settings of it are."""
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
START = """
import json, sys, types
root, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])
for name in ("weights", "convert"):  # of the packages themselves nothing is needed, and their start takes as long as a reader's
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{root}/{name}"]
from convert._reader import main
main()
"""


def read(path: Path, format: str = "auto", *, data: Buffer | None = None, isolated: bool = True, weights_of: str | None = None) -> Source:
    """Open a weight file of any format, in a process of its own.

    Args:
        path: the file, or the folder of a format that is one.
        format: a name that `convert.formats.formats` lists; "auto" asks the first bytes.
        data: the file's bytes, where they were read already, for a PyTorch file; the path then only names them.
        isolated: False reads it in this process.
        weights_of: which of several sets of weights is kept, see `convert.sets.chosen`.

    Returns:
        What `convert.formats.read` returns; its fact "read by" says which protections were in force. Tensors can't be read
        after it is closed.

    Raises:
        FileNotFoundError: there is nothing at this path.
        ReaderCrashed: the reader was ended by a signal or a limit, or answered nonsense.
        ReaderUnavailable: this machine started no reader; the file was not looked at.
        CallRefused: the reader was refused a system call; the message names it.
        ConvertError: whatever `convert.formats.read` raises.

    Example:
        >>> with read(Path("vgg19.h5")) as source:  # doctest: +SKIP
        ...     print(source.format, len(source.tensors))
        keras 38
    """
    path = Path(path)
    name = formats.sniff(path) if format == "auto" else format
    here = not isolated or name == "safetensors" or name not in formats.formats()
    source = formats.read(path, name) if here else _Reader(path, name).opened(data)
    try:
        source.tensors = chosen(source.tensors, weights_of, path)
    except BaseException:
        source.close()
        raise
    return source


def run(path: Path, format: str, images: np.ndarray, *, last: bool, isolated: bool = True) -> tuple[np.ndarray, str] | str:
    """Let the framework of a file's format run it, in a process of its own.

    Args:
        path: the file.
        format: one of those that `convert._framework.LIBRARIES` or `DETECTORS` has.
        images: float32 (B, C, H, W).
        last: whether the file's network takes the channels last.
        isolated: False runs it in this process.

    Returns:
        The outputs, (B, classes), and by whom; or why there are none.

    Raises:
        ReaderCrashed: the framework was ended by a signal or a limit, or answered nonsense.
        ReaderUnavailable: this machine started no such process; the file was not looked at.
        FileNotFoundError: the file is gone.
    """
    if not isolated:
        return _framework.run(Path(path), format, images, last=last)
    return _Reader(Path(path), format, runs=True).ran(images, last)


def protections() -> tuple[list[str], list[str]]:
    """Start a reader for nothing, and ask it which protections are in force here, and which are missing.

    Raises:
        ReaderUnavailable: this machine starts no reader.
    """
    reader = _Reader(Path(os.devnull), "npz")
    prepared = reader.prepared(None, {"cpu_s": CPU_S, "spare_bytes": SPARE_BYTES}, {}, STARTING_S)
    reader.close()
    return _words(prepared, "protections"), _words(prepared, "missing")


def _words(prepared: Mapping[str, Any], name: str) -> list[str]:
    found = prepared.get(name)
    return [str(each)[:MAX_WORDS] for each in found] if is_list(found) else []


_said: set[str] = set()


def _say_missing(missing: list[str]) -> None:
    """Say once in a process what protects less here than elsewhere."""
    if new := [each for each in missing if each not in _said]:
        _said.update(new)
        log.warning("strangers' files are read with less protection here, see zoo doctor: %s", "; ".join(new))


class _Reader:
    """A process that reads or runs one file, and what is asked of it."""

    def __init__(self, path: Path, format: str, *, runs: bool = False) -> None:
        self.path = path
        self.format = format
        self.runs = runs
        self.asking = threading.Lock()
        self.size_bytes = 0
        self.ready = False
        self.refusals: int | None = None
        self.file: Kept | None = None

    def opened(self, data: Buffer | None) -> Source:
        prepared = self.prepared(data, {"cpu_s": CPU_S, "spare_bytes": SPARE_BYTES}, {}, STARTING_S)
        _say_missing(_words(prepared, "missing"))
        try:
            told = self._ask({"open": True}, OPENING_S + self.size_bytes / SLOWEST_BYTES_S)
            return self._believed(prepared, told)
        except BaseException:
            self.close()  # at once: whoever keeps the error would keep the process and its folder
            raise

    def ran(self, images: np.ndarray, last: bool) -> tuple[np.ndarray, str] | str:
        backend = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", _framework.BACKEND)}
        limits = {"cpu_s": RUNNING_CPU_S, "spare_bytes": RUNNING_BYTES}
        prepared = self.prepared(None, limits, WITHOUT_GPU | backend, RUNNING_S)
        _say_missing(_words(prepared, "missing"))
        told = self._ask({"images": packed(images), "last": last}, RUNNING_S + self.size_bytes / SLOWEST_BYTES_S)
        calls = self._refused_calls()
        self.close()
        log.debug("%s was run by a process of its own: %s", self.path, ", ".join(str(each)[:100] for each in prepared["protections"]))
        if isinstance(why := told.get("why"), str):
            return f"{why[:MAX_WORDS]} (refused to it: {_named(calls)})" if calls else why[:MAX_WORDS]
        try:
            made, by = unpacked(told["made"]), told["by"]
            if not (is_array(made) and made.dtype.kind == "f" and isinstance(by, str) and made.shape[:1] == images.shape[:1]):
                raise ValueError("these are no outputs")
            return made.reshape(len(images), -1), by[:MAX_WORDS]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as error:
            raise self._nonsense(error) from error

    def prepared(self, data: Buffer | None, limits: Mapping[str, int], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
        """Start the process, tell it which file it is for, and wait until it has given up what it needs not."""
        inputs = _inputs(self.path, self.format)
        self.size_bytes = memoryview(data).nbytes if data is not None else sum(_size(place, self.path) for place in inputs)
        asked: dict[str, Any] = {"path": str(self.path.absolute()), "format": self.format, "inputs": [str(place) for place in inputs]}
        if data is None and inputs == [self.path.absolute().resolve()] and self.path.is_file() and not self.runs:
            self.file = Kept(self.path)
            self.size_bytes = self.file.size_bytes
        asked |= {"runs": self.runs, "fd": None, "size_bytes": self.size_bytes, **limits}
        asked["identity"] = None if self.file is None else self.file.identity
        asked["cpu_s"] += int(10 * self.size_bytes / SLOWEST_BYTES_S)
        try:
            with _held(data) as held:
                if held is not None:
                    asked |= {"inputs": [], "fd": held}
                self._start([] if held is None else [held], environment, asked)
                prepared = self._ask(asked, seconds)
        except ReaderUnavailable:
            raise
        except (OSError, RuntimeError) as error:  # the latter is of threads
            raise self._unavailable(str(getattr(error, "strerror", None) or error)) from error
        self.ready = True
        return prepared

    def _start(self, fds: list[int], environment: Mapping[str, str], asked: dict[str, Any]) -> None:
        """Start the process in an empty folder of its own, which goes when it goes, with a pipe for what it is refused."""
        reading = writing = folder = None
        try:
            with suppress(OSError):  # nothing can be written here at all
                folder = tempfile.mkdtemp(prefix="zoo-reader-")
            if sys.platform == "linux":
                reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                fds = [*fds, writing]
            self.process = _started(tuple(fds), environment, folder)
        except BaseException:
            _clear(folder, reading)
            raise
        finally:
            if writing is not None:
                os.close(writing)
        self.refusals = reading
        _widened(self.process.stdout)
        self.close = weakref.finalize(self, _end, self.process, folder, reading)
        asked |= {"folder": folder, "told": writing}

    def _refused_calls(self) -> list[str]:
        """Name the system calls that the process was refused."""
        if self.refusals is None or not self.close.alive:
            return []
        with suppress(OSError):
            numbers = os.read(self.refusals, 4 * MAX_REFUSED)
            found = (_calls.name(number) for (number,) in struct.iter_unpack("<i", numbers[: len(numbers) // 4 * 4]))
            return list(dict.fromkeys(found))
        return []

    def _believed(self, prepared: Mapping[str, Any], told: Mapping[str, Any]) -> Source:
        try:
            active = ", ".join(str(each)[:100] for each in prepared["protections"])
            for level, words in told["log"]:
                log.log(int(level), "%s", str(words))
            source = believed(told["source"], self.path, partial(partial, self._load), partial(partial, self._pour), self.close)
            check(self.path, source.tensors.values(), self.size_bytes)
        except LimitExceeded:
            self.close()
            raise
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as error:
            raise self._nonsense(error) from error
        log.debug("%s is read by a process of its own: %s", self.path, active)
        source.reader = active
        return source

    def _load(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
        array = np.empty(shape, dtype)
        if (place := self._place({"tensor": name}, shape, dtype, array)) is not None and self.file is not None:
            self.file.fill(array.reshape(-1).view(np.uint8).data, place, name)
        return array

    def _pour(self, name: str, shape: Shape, dtype: np.dtype[Any], file: FileIO) -> bool:
        """Copy a tensor from file to file, if the reader says that its bytes lie in the file as they are."""
        place = self._place({"tensor": name, "place": True}, shape, dtype, None)
        if place is None or self.file is None:
            return False
        self.file.pour(file, place, math.prod(shape) * dtype.itemsize, name)
        return True

    def _place(self, question: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any], into: np.ndarray | None) -> int | None:
        """Ask for a tensor: where the file has it, or None where its bytes were sent `into` an array, if there is one."""
        size = math.prod(shape) * dtype.itemsize
        with self.asking:
            if not self.close.alive:
                raise ConvertError(f"{self.path} is closed; its tensors can't be read any more")
            told = self._ask(question, OPENING_S + size / SLOWEST_BYTES_S, into)
        place = told.get("at")
        if told.get("dtype") != dtype_name(dtype) or told.get("shape") != list(shape) or told.get("bytes") != size:
            raise self._nonsense(ValueError(f"{question['tensor']!r:.100} is another tensor than it was said to be"))
        if place is None:
            return None
        if self.file is None or type(place) is not int or not 0 <= place <= self.file.size_bytes - size:
            raise self._nonsense(ValueError(f"{question['tensor']!r:.100} is not where it was said to be"))
        return place

    def _ask(self, question: Mapping[str, Any], seconds: float, into: np.ndarray | None = None) -> dict[str, Any]:
        """Ask one thing and wait for the answer, at most so long; a tensor's bytes go `into` an array."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(self.process)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            questions, answers = self.process.stdin, self.process.stdout
            assert questions is not None
            assert answers is not None
            left = memoryview(json.dumps(question).encode() + b"\n")
            while left:
                left = left[questions.write(left) or 0 :]
            length = int.from_bytes(_exactly(answers, 8, late), "little")
            if length > min(MAX_TOLD_BYTES, TOLD_BYTES + TOLD_OF_A_BYTE * self.size_bytes):
                self.close()
                raise LimitExceeded(f"{self.path} holds more than can be told of it: {length} bytes of names and shapes")
            told = json.loads(_exactly(answers, length, late))
            if not is_dict(told):
                raise TypeError("no answer")
            if "error" not in told and told.get("at") is None and into is not None and told["bytes"] == into.nbytes:
                _into(answers, into.reshape(-1).view(np.uint8).data if into.size else memoryview(b""), late)
        except KeyboardInterrupt:  # which a process in a group of its own doesn't hear
            self.close()
            raise
        except (EOFError, OSError) as error:
            raise self._crashed(seconds if late.is_set() else None) from error
        except ConvertError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise self._nonsense(error) from error
        finally:
            timer.cancel()
        if "error" in told:
            if "not permitted" in told and (calls := self._refused_calls()):
                raise self._call_refused(calls, told["error"])
            raise self._refused(told["error"])
        return told

    def _refused(self, error: Any) -> Exception:
        """Raise again what the reader raised; only our own kinds of error are taken."""
        kind, words = error if is_list(error) and len(error) == 2 else ("", str(error))
        found = getattr(errors, str(kind), None) or {"FileNotFoundError": FileNotFoundError, "PermissionError": PermissionError}.get(kind)
        if isinstance(found, type) and issubclass(found, ConvertError | FileNotFoundError | PermissionError):
            return found(str(words))
        return MalformedFile(f"{self.path} can't be read: {words}")

    def _call_refused(self, calls: list[str], error: Any) -> CallRefused:
        refused = CallRefused(
            f"{self.path} can't be read: its reader made {_named(calls)}, which is refused to confined readers ({str(error)[:MAX_WORDS]}). "
            "The file is hostile, or a library here needs more than it used to: please report it with these words. isolated=False of "
            "convert.sandbox.read reads in this process, which is for files whose author you trust."
        )
        refused.path = str(self.path)
        return refused

    def _nonsense(self, error: Exception) -> ReaderCrashed:
        self.close()
        crash = ReaderCrashed(
            f"{self.path} made its reader answer nonsense ({error}); nothing of it was used. Is the file from who you think?"
        )
        crash.path = str(self.path)
        return crash

    def _unavailable(self, why: str) -> ReaderUnavailable:
        return ReaderUnavailable(
            f"no process could be started to read {self.path}: {why}. The file was not looked at. Is there memory, and may this user start "
            "another Python? isolated=False of convert.sandbox.read reads in this process, which is for files whose author you trust."
        )

    def _crashed(self, late_s: float | None) -> ReaderCrashed | ReaderUnavailable:
        """Say what ended the reader; until it is ready, it can't be the file."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.poll()
        calls = self._refused_calls()
        self.close()
        limit = "the limit of processor time" if code == -getattr(signal, "SIGXCPU", 0) != 0 else None
        if late_s is not None:
            limit = f"the deadline of {late_s:.0f} s"
        if limit is not None:
            how = f"was ended by {limit}"
        elif code is not None and code < 0:
            how = f"died of {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        if code == -getattr(signal, "SIGSYS", 0) != 0:
            how += ", the end of who makes a system call that no reader has a reason to make"
        if calls:
            how += f" after {_named(calls)} was refused to it"
        if not self.ready:
            return self._unavailable(f"it {how} before it was ready")
        cut = code in (CUT, -getattr(signal, "SIGBUS", 0))
        why = "the file was cut short while it was read" if cut else "the file is damaged or hostile"
        who, todo = f"the reader of {self.path}", "Fetch it again, from who made it."
        if self.runs:
            who, todo = (
                f"{ {**_framework.LIBRARIES, **_framework.DETECTORS}[self.format] }, which ran {self.path},",
                f"{todo} zoo convert --reference proves without running it here.",
            )
        crash = ReaderCrashed(f"{who} {how}: {why}. Nothing was kept of it. {todo}")
        crash.path, crash.limit = str(self.path), limit
        crash.signal = _signal_name(-code) if code is not None and code < 0 else None
        return crash


def _named(calls: list[str]) -> str:
    return f"the system call{'s' * (len(calls) > 1)} {', '.join(map(repr, calls))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _inputs(path: Path, format: str) -> list[Path]:
    """Say what a reader must be able to open: the file, or its folder where the format has companions."""
    if format in COMPANIONS or path.suffix == ".json" or not path.exists():  # TensorFlow names a checkpoint by what its files share
        linked = [path.absolute().resolve()] if path.is_symlink() else []  # whose file lies elsewhere
        return [path.absolute().parent.resolve(), *linked]
    return [path.absolute().resolve()]


def _size(place: Path, path: Path) -> int:
    """Weigh what a reader may open: the file or folder that was named, and of what lies beside it as much as is looked at."""
    if not place.is_dir():
        return place.stat().st_size
    own = path.absolute().resolve()
    total = own.stat().st_size if own.is_file() else 0
    files = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)  # its own files before those below
    for file in files if place == own else islice(files, MOST_COMPANIONS):
        with suppress(OSError):
            if file != own and stat.S_ISREG((status := file.lstat()).st_mode):
                total += status.st_size
    return total


@contextmanager
def _held(data: Buffer | None) -> Generator[int | None]:
    """Lend bytes as an open file without a name, which nobody can change any more; None where there are none, or no way to do so."""
    if data is None or sys.platform == "win32":
        yield None
        return
    if hasattr(os, "memfd_create"):
        held: IO[bytes] = os.fdopen(os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", buffering=0)
    else:
        held = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    with held:
        left = memoryview(data).cast("B")
        while left:
            left = left[held.write(left[: 1 << 30]) or 0 :]
        if hasattr(os, "memfd_create"):
            _sealed(held.fileno())
        yield held.fileno()


def _sealed(file: int) -> None:
    """Forbid every later change of a file in memory, for every process that holds it."""
    import fcntl

    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, size | fcntl.F_SEAL_WRITE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # The kernel holds some of its pages, as while it moves them. What is to come can be forbidden still, and nobody has mapped it.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, size | SEAL_FUTURE_WRITE)


def _started(fds: tuple[int, ...], more: Mapping[str, str], folder: str | None) -> subprocess.Popen[bytes]:
    """Start a Python that hears nothing of the user's: no environment, no start-up files, no folder of work, no temporary files."""
    here = {"", str(Path.cwd())}
    root = str(Path(__file__).parents[1])
    places = [root, *(entry for entry in sys.path if entry not in here and Path(entry).is_absolute())]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | ALONE | dict(more)
    environment |= dict.fromkeys(OWN, folder or os.devnull)
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", START, root, json.dumps(places)]
    pipe = subprocess.PIPE
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder or os.sep,
        bufsize=0,
        stdin=pipe,
        stdout=pipe,
        stderr=quiet,
        pass_fds=fds,
        start_new_session=True,
    )


def _widened(pipe: IO[bytes] | None) -> None:
    """Let more of a tensor wait in a pipe: with 64 KiB, two processes wake each other 9,000 times for VGG19."""
    if pipe is None or sys.platform != "linux":
        return
    import fcntl

    with suppress(OSError):  # a user may hold too many of them
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started, which may live on when it has ended itself."""
    if sys.platform != "win32":
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _clear(folder: str | None, reading: int | None) -> None:
    if reading is not None:
        os.close(reading)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], folder: str | None, reading: int | None) -> None:
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()
    _clear(folder, reading)


def _exactly(answers: IO[bytes], count: int, late: threading.Event) -> bytes:
    taken = bytearray(count)
    _into(answers, memoryview(taken), late)
    return bytes(taken)


def _into(answers: Any, left: memoryview, late: threading.Event) -> None:
    """Read until all is there; not past the deadline, whoever still holds the pipe."""
    ready = select.poll() if hasattr(select, "poll") else None
    if ready is not None:
        ready.register(answers, select.POLLIN)
    while left:
        while ready is not None and not ready.poll(500):
            if late.is_set():
                raise EOFError
        count = answers.readinto(left)
        if not count:
            raise EOFError
        left = left[count:]
