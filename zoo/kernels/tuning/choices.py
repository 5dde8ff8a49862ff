"""What was found by timing, kept between processes: a readable JSON file for each device, driver and set of versions.

For some devices the package brings what was found on one of them, in `zoo/data/kernel_choices`; `recipes/ship_choices.py` makes it.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import os
import platform
import tempfile
import threading
import warnings
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
LEVELS = ("none", "part", "quick", "full")
"""How much was tried; "part" of a step that only counts as a part of a merged one, which alone is timed again."""
GPU_ROOMS, CPU_ROOMS = ("ops", "differentiable", "training"), ("engines", "passes")
"""Folders of what is timed on a GPU, and of what is timed on a CPU and says what may be."""

SHIPPED: Path | None = Path(__file__).parents[2] / "data" / "kernel_choices"
"""Choices that come with the package, a file a kind of device; None where none is wanted, as of who measures how long it takes without."""
HARDWARE = ("device", "capability", "multiprocessors")
"""Facts that a shipped file and a device have in common."""
BY_VERSION = "cudnn_graph"
"""The op whose configurations are numbers in a list of cuDNN's, another one in each version."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that won a step at one shape: its launch parameters, its time, and ATen's; when training a chain, and its pieces'."""

    op: str
    config: dict[str, Any] = field(default_factory=dict)
    us: float = 0.0
    aten_us: float = 0.0
    tried: int = 0
    level: str = "quick"


def folder() -> Path:
    """Return where choices are kept: `kernels` in the folder that ZOO_CACHE names, else in the user's cache folder."""
    if named := os.environ.get("ZOO_CACHE"):
        return Path(named).expanduser().absolute() / "kernels"
    from platformdirs import user_cache_path

    return user_cache_path("kernelzoo", appauthor=False) / "kernels"


def facts(device: torch.device) -> dict[str, Any]:
    """Return what a choice depends on: device, driver and versions."""
    rooms = GPU_ROOMS if device.type == "cuda" else CPU_ROOMS
    found: dict[str, Any] = {"format": FORMAT, "kernels": _code(rooms), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        return found | {"device": f"{device.type} {processor()}", "engines": {name: _version(name) for name in ("openvino", "onnxruntime")}}
    import triton

    properties = torch.cuda.get_device_properties(device)
    found.pop("threads")
    return found | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "cudnn_frontend": _version("nvidia-cudnn-frontend"),
    }


@functools.cache
def _code(rooms: tuple[str, ...]) -> str:
    """Return a hash of the files of what was timed: what was found for others says nothing of these, nor of any that came later."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((Path(__file__).parents[1] / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    with contextlib.suppress(OSError):
        words = path.read_text().split()
        return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")
    return "unknown"


def processor() -> str:
    """Name the machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


class Choices:
    """Choices by step, read once from the file that belongs to a device and these versions.

    A file that can't be read, or whose facts are another device's, is ignored with a warning, and overwritten at the next `save`.
    """

    def __init__(self, device: torch.device) -> None:
        self.facts = facts(device)
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:12]
        self.path = folder() / f"{slug(str(self.facts['device']))}-{digest}.json"
        self._lock = threading.Lock()
        self._found = self._load()
        self._shipped = shipped(self.facts)
        self._changed: set[str] = set()

    def get(self, key: str, level: str = "none") -> Choice | None:
        """Return what was found for a step by tuning at this level or a higher one, here or where the package's choices come from."""
        choice = self._found.get(key) or self._shipped.get(key)
        return choice if choice is not None and choice.op != WRONG and LEVELS.index(choice.level) >= LEVELS.index(level) else None

    def is_shipped(self, key: str) -> bool:
        """Tell whether what is known of a step came with the package."""
        return key not in self._found and key in self._shipped

    def put(self, key: str, choice: Choice) -> None:
        """Note a finding; `save` writes it."""
        with self._lock:
            self._found[key] = choice
            self._changed.add(key)

    def forget(self, key: str) -> None:
        """Drop a finding that turned out wrong."""
        with self._lock:
            if key in self._shipped:
                self._found[key] = Choice(WRONG)  # the next process is brought it again
            else:
                self._found.pop(key, None)
            self._changed.add(key)

    def save(self) -> None:
        """Write what is new, together with what other processes have written meanwhile; a folder that can't be written is no error."""
        with self._lock:
            if not self._changed:
                return
            from filelock import FileLock, Timeout

            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{self.path}.lock", timeout=10):
                    theirs = self._load()
                    merged = theirs | self._found
                    for key in self._changed - self._found.keys():
                        merged.pop(key, None)
                    self._write(merged)
                self._found = merged
                self._changed.clear()
            except (OSError, Timeout) as error:
                warnings.warn(f"the kernel choices could not be kept in {self.path}: {error}; the next process tunes again", stacklevel=2)

    def _write(self, found: dict[str, Choice]) -> None:
        content = {**self.facts, "choices": {key: asdict(found[key]) for key in sorted(found)}}
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _load(self) -> dict[str, Choice]:
        try:
            content = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            warnings.warn(f"{self.path} can't be read ({error}); its kernel choices are ignored", stacklevel=3)
            return {}
        try:
            if {name: content.get(name) for name in self.facts} != self.facts:
                raise ValueError("it belongs to another device or other versions")
            return {key: _checked(value) for key, value in content["choices"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(f"{self.path} is no file of kernel choices ({error}); it is ignored", stacklevel=3)
            return {}


def slug(device: str) -> str:
    """Return a device's name as one of a file."""
    return "".join(c if c.isalnum() else "-" for c in device).strip("-").lower()[:60]


def shipped(facts: dict[str, Any]) -> dict[str, Choice]:
    """Return the choices that the package brings for a device with these facts; none where it brings none, or they are damaged.

    Whatever they say, a plan is compared with the network before it answers. So a choice that no longer fits costs speed alone.
    """
    path = SHIPPED / f"{slug(str(facts['device']))}.json.gz" if SHIPPED else None
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT or any(content[name] != facts.get(name) for name in HARDWARE):
            return {}
        same = content["cudnn"] == facts.get("cudnn")
        found = {key: _checked(dict(zip(SHIPPED_FIELDS, value, strict=True))) for key, value in content["choices"].items()}
        return {key: choice for key, choice in found.items() if same or choice.op != BY_VERSION}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, zlib.error) as error:
        warnings.warn(f"{path} is no file of kernel choices ({error}); install kernelzoo again; it is ignored", stacklevel=3)
        return {}


def pack(facts: dict[str, Any], found: dict[str, Choice]) -> bytes:
    """Return the content of a shipped file: what was found at level "quick", with what it was found on."""
    rows = {key: [getattr(found[key], name) for name in SHIPPED_FIELDS] for key in sorted(found) if found[key].level in ("quick", "part")}
    return gzip.compress(json.dumps({**facts, "choices": rows}, separators=(",", ":")).encode(), mtime=0)


WRONG = ""
"""Stands for the op of a shipped choice that turned out wrong here."""
SHIPPED_FIELDS = ("op", "config", "us", "aten_us", "level")
"""What a shipped file says of a choice, in this order."""


def _checked(value: dict[str, Any]) -> Choice:
    choice = Choice(**value)
    times = isinstance(choice.us, int | float) and isinstance(choice.aten_us, int | float)
    if not (times and isinstance(choice.op, str) and isinstance(choice.config, dict) and choice.level in LEVELS):
        raise ValueError(f"an entry is damaged: {value}")
    return choice
