"""Random faults of networks, servers, mirrors and files, one injection a seed, and what must be true after each.

    python tests/network_faults.py --count 1000 --docs docs/notes/faults.md    # make faults-network; it resumes

Each injection draws a source (Hub, https, mirror, file), what is known of its bytes, how the cache is (cold, with a dead process's part,
warm, warm and damaged) and one to three faults at random positions with 1, 2, 3 or 9 repeats. After it the invariants hold:

    I1  what is returned is what the record names           I5  no more bytes on the disk than the limits allow
    I2  every blob hashes to its name                       I6  the deadline is kept
    I3  a failure changes nothing that was there before     I7  with the fault gone, the next call succeeds and leaves nothing over
    I4  every error is ours, and names its source           I8  no byte to another host, no token to another origin
    I9  no password, query, token or signed address on the disk, in a message or in a log of any library
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from faults_page import write_section
from hubserver import FAULTS, SIGNATURE, HubServer

import weights
from weights import Checkpoint, WeightsError, patience
from weights.cache import Cache, key
from weights.part import Part

HURRIED = patience.Patience(
    connect_s=1,
    read_s=0.05,
    tries=3,
    backoff_s=0.002,
    longest_wait_s=0.05,
    window_s=0.08,
    least_bytes=1000,
    deadline_s=0.8,
    most_bytes=1 << 20,
    metadata_s=0.2,
    metadata_bytes=1 << 20,
)
SLACK_S = 2.0
"""What hashing, converting and a busy machine may take beside the deadline."""
SOURCES = ("hf", "hf", "hf@", "https", "https", "mirror", "mirror folder", "file", "several")
STATES = ("cold", "cold", "resume", "resume", "warm", "damaged")
DAMAGES = ("flip", "cut", "empty", "folder", "link", "pipe", "gone")
UNSAFE = ("http://192.0.2.1/w", "file:///etc/passwd", "http://169.254.169.254/w", "http://[::1", "gopher:x", "../../w", "//192.0.2.1/w", "")
TOKEN = "hf_this_is_secret"
PASSWORD, QUERY = "pass-word-of-the-mirror", "query-of-somebody"
SECRETS = (TOKEN, SIGNATURE, PASSWORD, QUERY)
"""None of these may stand in a message, a log line, or a file."""
MARK = b"PK\x03\x04 foreign "
VIOLATIONS = {
    "wrong bytes": "wrong bytes",
    "untyped": "untyped errors",
    "poisoned": "poisoned caches",
    "hang": "hangs",
    "leak": "leaked partials",
    "recovery": "failed recoveries",
    "changed": "failures that changed what was there",
    "disk": "more bytes on the disk than allowed",
    "host": "bytes or tokens to others",
    "secret": "secrets on disk, in messages or in logs",
}


@dataclass
class Outcome:
    """What one injection did."""

    seed: int
    source: str
    state: str
    faults: list[str]
    result: str = ""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class Arena:
    """A Hub, a cache of its own for each injection, and eyes on what leaves this process."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.reached: list[str] = []
        self.heard: list[str] = []
        self.largest_part = 0

    @contextlib.contextmanager
    def injection(self, seed: int) -> Iterator[Path]:
        home = self.folder / str(seed)
        self.reached, self.largest_part = [], 0
        self.heard.clear()
        facts = {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN, "ZOO_CACHE": str(home / "cache"), "ZOO_USER_REGISTRY": str(home / "own")}
        facts |= {"HF_HOME": str(home / "hf"), "TORCH_HOME": str(home / "torch")}
        absent = ("ZOO_MIRROR", "ZOO_OFFLINE", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")
        connect, write = socket.socket.connect, Part.write

        def guarded(connection: socket.socket, address: Any) -> None:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and address[0] != "127.0.0.1":
                self.reached.append(str(address))
                raise OSError("nobody is reached from here")
            connect(connection, address)

        def watched(part: Part, data: bytes) -> None:
            write(part, data)
            self.largest_part = max(self.largest_part, part.size)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, facts))
            for name in absent:
                os.environ.pop(name, None)
            stack.enter_context(mock.patch.object(socket.socket, "connect", guarded))
            stack.enter_context(mock.patch.object(Part, "write", watched))
            stack.enter_context(listening(self.heard))
            try:
                yield home
            finally:
                self.hub.heal()
                shutil.rmtree(home, ignore_errors=True)


def secret(text: str | bytes) -> bool:
    """Tell whether one of `SECRETS` stands in a text."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return any(word.encode() in data for word in SECRETS)


@contextlib.contextmanager
def listening(heard: list[str]) -> Iterator[None]:
    """Collect what every library logs, at every level, and show none of it."""

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(f"{record.name}: {record.getMessage()}")

    loggers = [logging.getLogger(name) for name in (None, "weights", "huggingface_hub")]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.handlers, logger.propagate = [Ear()], False
    try:
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers, logger.propagate = handlers, propagate


def safetensors(size: int, draw: random.Random) -> bytes:
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    return len(header).to_bytes(8, "little") + header + draw.randbytes(size)


def from_foreign(source: Path, destination: Path, row: Checkpoint) -> None:
    destination.write_bytes(source.read_bytes().removeprefix(MARK))


def content(root: Path, *kinds: str) -> dict[str, bytes]:
    found = (path for kind in kinds for path in (root / kind).rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


class Injection:
    """One seed: its record, its cache, its faults; `run` says what became of it."""

    def __init__(self, arena: Arena, home: Path, seed: int, base: int) -> None:
        self.arena, self.hub, self.home, self.draw = arena, arena.hub, home, random.Random(f"{base}:{seed}")
        draw = self.draw
        self.data = safetensors(draw.choice([draw.randrange(2, 2000), draw.randrange(2, 100_000), draw.randrange(100_000, 300_000)]), draw)
        self.foreign = draw.random() < 0.2
        self.served = MARK + self.data if self.foreign else self.data
        self.sha256 = hashlib.sha256(self.served).hexdigest()
        self.outcome = Outcome(seed, draw.choice(SOURCES), draw.choice(STATES), [])
        self.name = f"w{seed}.pth" if self.foreign else f"w{seed}.safetensors"
        self.local = home / "local.bin"
        self.row = self.record()

    def record(self) -> Checkpoint:
        """Choose the source, and what its record says of the bytes; something always does."""
        draw, hub, kind = self.draw, self.hub, self.outcome.source
        known: dict[str, Any] = draw.choice([{"sha256": self.sha256}, {"sha256_prefix": self.sha256[:8]}, {"sha256": self.sha256}])
        if draw.random() < 0.4:
            known["size_bytes"] = len(self.served)
        commit = hub.repo(f"acme/r{self.outcome.seed}", {self.name: self.served, "README.md": b"."})
        hf = f"hf://acme/r{self.outcome.seed}{f'@{commit}' if kind == 'hf@' else ''}/{self.name}"
        url = hub.file(self.name, self.served) + draw.choice(["", f"?token={QUERY}&x", f"?{QUERY}#{PASSWORD}"])
        sources = [hf if kind.startswith("hf") else url]
        if kind == "hf" and not self.foreign and draw.random() < 0.5:
            sources, known = [hf.rpartition("/")[0]], draw.choice([{}, known])  # the Hub's own hash decides
        if kind == "file":
            self.home.mkdir(parents=True, exist_ok=True)
            self.local.write_bytes(self.served)
            sources, known = [self.local.as_uri()], {"sha256": self.sha256}
        if kind == "several":
            sources = draw.sample([hf, url, f"{hub.url}/files/absent"], k=3)
        if kind.startswith("mirror"):
            known = {"sha256": self.sha256} | known
            known.pop("sha256_prefix", None)
            if kind == "mirror":
                hub.file(self.sha256, self.served)
                host = hub.url.partition("://")[2]
                os.environ["ZOO_MIRROR"] = draw.choice([f"{hub.url}/files", f"http://ada:{PASSWORD}@{host}/files?sig={QUERY}"])
            else:
                (self.home / "mirror").mkdir(parents=True)
                (self.home / "mirror" / self.sha256).write_bytes(draw.choice([self.served, self.served[:-1], b"", self.served[::-1]]))
                os.environ["ZOO_MIRROR"] = str(self.home / "mirror")
        facts = {"tag": "test", "sources": sources, "format": "pytorch" if self.foreign else "safetensors", **known}
        return weights.adhoc("ResNet20", sources[0], **facts)

    def call(self) -> bytes:
        return bytes(weights.open_weights(self.row, to_safetensors=from_foreign, progress=False))

    def prepare(self) -> None:
        """Bring the cache into its state; a second checkpoint lies in it, which nothing may touch."""
        state, cache = self.outcome.state, Cache()
        other = self.home / "bystander.safetensors"
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(safetensors(500, self.draw))
        self.bystander = weights.get(weights.adhoc("ResNet20", str(other)), progress=False)
        if state == "resume":
            at = self.draw.randrange(1, len(self.served))
            wrong = self.draw.random() < 0.2
            places = [*self.row.sources, f"{self.hub.url}/files/{self.sha256}"]
            url = self.draw.choice([place for place in places if place.startswith("http")])
            cache.prepare()
            part = Part(cache.partial, self.row.sha256 or key(self.row.sources[0]), url)
            part.write(self.served[:at][::-1] if wrong else self.served[:at])
            part.remember(f'"{self.sha256}"', len(self.served))
            part.release()
        elif state in ("warm", "damaged"):
            self.call()
            if state == "damaged":
                self.damage(cache.blob(hashlib.sha256(self.data).hexdigest()))

    def damage(self, blob: Path) -> None:
        kind = self.draw.choice(DAMAGES)
        self.outcome.faults.append(f"blob {kind}")
        blob.chmod(0o644)
        right = blob.read_bytes()
        if kind in ("flip", "cut", "empty"):
            at = self.draw.randrange(len(right))
            blob.write_bytes({"flip": right[:at] + bytes([right[at] ^ 4]) + right[at + 1 :], "cut": right[:at], "empty": b""}[kind])
            return
        blob.unlink()
        if kind == "folder":
            blob.mkdir()
        elif kind == "link":
            blob.symlink_to(self.bystander.path)
        elif kind == "pipe":
            os.mkfifo(blob)

    def fail(self) -> None:
        """Draw one to three faults; of a file, that it is damaged itself."""
        draw = self.draw
        if self.outcome.source == "file":
            kind = draw.choice(["flip", "cut", "gone", "pipe", "folder", "longer"])
            self.outcome.faults.append(f"file {kind}")
            at = draw.randrange(len(self.served))
            self.local.unlink()
            wrong = {"flip": self.served[:at] + bytes([self.served[at] ^ 1]) + self.served[at + 1 :], "cut": self.served[:at]}
            wrong["longer"] = self.served + b"."
            if kind in wrong:
                self.local.write_bytes(wrong[kind])
            elif kind == "pipe":
                os.mkfifo(self.local)
            elif kind == "folder":
                self.local.mkdir()
            return
        for _ in range(draw.randint(1, 3)):
            kind, times = draw.choice(FAULTS), draw.choice([1, 2, 3, 9])
            how: dict[str, Any] = {"after": draw.randrange(len(self.served)), "times": times, "seconds": draw.choice([0.03, 0.12])}
            how["method"] = draw.choice(["GET", "GET", "*"])
            if kind == "status":
                how["status"] = draw.choice([401, 403, 404, 407, 408, 410, 416, 418, 429, 451, 500, 502, 503, 504, 204, 206, 302])
                how["headers"] = draw.choice([{}, {}, {"Retry-After": draw.choice(["0", "1", "86400", "soon", "-1", "9" * 30])}])
            if kind == "redirect":
                signed = f"?X-Amz-Signature={SIGNATURE}"
                places = [
                    f"{self.hub.cdn}/blobs/{self.sha256}",
                    f"{self.hub.cdn}/blobs/absent",
                    f"http://[{QUERY}",
                    f"https://{QUERY}@[::1",
                ]
                how["to"] = draw.choice([*UNSAFE, *(place + signed for place in places), f"http://ada:{PASSWORD}@192.0.2.1/w{signed}"])
            if kind == "bad_length":
                how["to"] = draw.choice(["-5", "NaN", "1, 2", "0x10", "9" * 30, "3"])
            self.hub.fail(kind, **how)
            self.outcome.faults.append(f"{kind} x{times}")

    def mend(self) -> None:
        self.hub.heal()
        if self.outcome.source == "file":
            if self.local.is_dir():
                self.local.rmdir()
            self.local.unlink(missing_ok=True)
            self.local.write_bytes(self.served)

    def run(self) -> Outcome:
        outcome, root = self.outcome, self.home / "cache"
        with mock.patch.object(patience, "PATIENCE", patience.Patience(connect_s=5, read_s=10, backoff_s=0.01)):
            self.prepare()
        self.fail()
        before = content(root, "blobs", "refs", "derived")
        self.arena.largest_part = 0
        self.hub.log.clear()
        began = time.monotonic()
        with mock.patch.object(patience, "PATIENCE", HURRIED):
            try:
                found = self.call()
                outcome.result = "right"
                self.expect(found == self.data, "wrong bytes")
            except WeightsError as error:
                outcome.result = type(error).__name__
                self.expect(not secret(said := "".join(traceback.format_exception(error))), "secret", said)
                named = any(
                    word in str(error) for word in (*self.row.sources, "ResNet20:test", str(root), self.name, self.local.name, self.sha256)
                )
                self.expect(named and len(str(error)) > 40, "untyped", str(error))
            except BaseException as error:
                outcome.result = type(error).__name__
                self.expect(False, "untyped", repr(error))
        outcome.seconds = round(time.monotonic() - began, 3)
        self.expect(outcome.seconds < HURRIED.deadline_s * 1.1 + SLACK_S, "hang", f"{outcome.seconds} s")
        self.expect(outcome.state != "warm" or (outcome.result == "right" and not self.hub.log), "changed", "a warm cache needs nobody")
        self.check_traces(root, before)
        told = [line for line in self.arena.heard if secret(line)]
        self.expect(not told, "secret", str(told[:3]))
        self.mend()
        self.recover(root)
        return outcome

    def check_traces(self, root: Path, before: dict[str, bytes]) -> None:
        after = content(root, "blobs", "refs", "derived")
        written = [path for path in self.home.rglob("*") if path.is_file() and (secret(path.name) or secret(path.read_bytes()))]
        self.expect(not written, "secret", str(written))
        for name, found in after.items():
            self.expect(not name.startswith("blobs/") or hashlib.sha256(found).hexdigest() == name[-64:], "poisoned", name)
        if self.outcome.result != "right":
            gone = {name for name in before if after.get(name) != before[name]}
            damaged = {name for name in gone if self.outcome.state == "damaged" and name.startswith("blobs/")}
            changed = (gone - damaged) | (after.keys() - before.keys())
            self.expect(not changed, "changed", str(sorted(changed)))
        self.expect(self.bystander.path.is_file(), "changed", "the bystander is gone")
        parts = [path for path in (root / "partial").iterdir() if path.suffix == ".part"]
        stray = [path.name for path in (root / "partial").iterdir() if path.suffix != ".part" and not path.name.endswith(".part.json")]
        places = {json.loads(path.with_name(f"{path.name}.json").read_bytes())["url"] for path in parts}  # one for each can be resumed
        self.expect(len(parts) == len(places) and not stray, "leak", str([*parts, *stray]))
        limit = len(self.served) if self.row.size_bytes else max(len(self.served), HURRIED.most_bytes)
        self.expect(self.arena.largest_part <= limit + (1 << 16), "disk", f"{self.arena.largest_part} of {limit}")
        # the mirror may have its own login
        sent = [r for r in self.hub.log if r.token and (r.port != "hub" or r.path.startswith("/files/"))]
        others = [f"{r.port}{r.path}" for r in sent if r.port == "cdn" or not (r.token or "").startswith("Basic ")]
        self.expect(not others and not self.arena.reached, "host", str([*others, *self.arena.reached]))
        self.expect(not (self.home / "evil").exists() and not (self.home.parent / "evil").exists(), "host", "a file outside of the cache")

    def recover(self, root: Path) -> None:
        with mock.patch.object(patience, "PATIENCE", patience.Patience(connect_s=5, read_s=10, backoff_s=0.01)):
            try:
                self.expect(self.call() == self.data, "wrong bytes", "after the fault was gone")
            except BaseException as error:
                self.expect(False, "recovery", repr(error))
        left = [path.name for path in (root / "partial").iterdir()]
        left += [path.name for path in (root / "quarantine").iterdir() if self.outcome.state != "damaged"]
        self.expect(not left, "leak", str(left))

    def expect(self, holds: bool, what: str, detail: str = "") -> None:
        if not holds:
            self.outcome.violations.append(f"{what}: {detail}" if detail else what)


def inject(arena: Arena, seed: int, base: int) -> Outcome:
    """Run one injection; the same two numbers draw the same one again."""
    with arena.injection(seed) as home:
        return Injection(arena, home, seed, base).run()


def many(seeds: list[int], base: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder, HubServer() as hub:
        arena = Arena(hub, Path(folder))
        return [inject(arena, seed, base) for seed in seeds]


def summary(outcomes: list[Outcome], base: int, seconds: float) -> str:
    """Write the section of docs/notes/faults.md."""
    count = len(outcomes)
    found = Counter(name for outcome in outcomes for name in {line.partition(":")[0] for line in outcome.violations})
    results = Counter(outcome.result for outcome in outcomes)
    kinds = Counter(re.sub(r" x\d+$", "", fault) for outcome in outcomes for fault in outcome.faults)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    versions = ", ".join(f"{name} {version(name)}" for name in ("huggingface_hub", "httpx2", "filelock"))
    when = f"{datetime.now(UTC):%Y-%m-%d}"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    lines = [
        "A zero is what was found, not a proof: the faults are random, and only of the kinds that are listed.",
        "",
        f"{count:,} injections, seeds {base}:0 to {base}:{max(o.seed for o in outcomes)}, {when}, {python}, {versions}; {seconds:.0f} s.",
        "`make faults-network` repeats it; `python tests/network_faults.py --seed BASE --only NUMBER` repeats one.",
        "",
        "| what must not be | found |",
        "|---|---|",
        *(f"| {words} | {found[name]} |" for name, words in VIOLATIONS.items()),
        f"| **recovered without a manual step** | **{100 * (count - found['recovery']) / count:.1f} %** |",
        "",
        f"The longest took {max(o.seconds for o in outcomes):.1f} s of a deadline of {HURRIED.deadline_s} s; "
        f"no process had more than {memory} MiB of memory.",
        "",
        "| outcome | times |",
        "|---|---|",
        *(f"| {name} | {times} |" for name, times in results.most_common()),
        "",
        "| source and cache | " + " | ".join(sorted(set(STATES))) + " |",
        "|---|" + "---|" * len(set(STATES)),
    ]
    for source in dict.fromkeys(SOURCES):
        cells = [sum(o.source == source and o.state == state for o in outcomes) for state in sorted(set(STATES))]
        lines.append(f"| {source} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Faults: " + ", ".join(f"{name} {times}" for name, times in sorted(kinds.items())) + "."]
    bad = [f"- {base}:{o.seed} {o.source}, {o.state}, {', '.join(o.faults)}: {'; '.join(o.violations)}" for o in outcomes if o.violations]
    return "\n".join([*lines, *(["", *bad] if bad else [])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject random faults of the network and check every invariant.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7, help="the base of all seeds")
    parser.add_argument("--only", type=int, help="repeat this one, and show what it did")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "kernelzoo-network-faults.jsonl")
    parser.add_argument("--docs", type=Path, help="write the section Network of this page")
    chosen = parser.parse_args()

    from rich.console import Console
    from rich.progress import track

    console = Console()
    if chosen.only is not None:
        console.print_json(json.dumps([asdict(outcome) for outcome in many([chosen.only], chosen.seed)]))
        return 0
    done: dict[int, Outcome] = {}
    seconds = 0.0
    files = [Path(__file__), *sorted(Path(weights.__file__).parent.glob("*.py"))]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]  # what other code did says nothing of this
    if chosen.state.exists():
        for line in chosen.state.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill cut short
                row = json.loads(line)
                if (row["base"], row["code"]) == (chosen.seed, code) and row["outcome"]["seed"] < chosen.count:
                    done[row["outcome"]["seed"]] = Outcome(**row["outcome"])
                    seconds += row["took"]
    left = [seed for seed in range(chosen.count) if seed not in done]
    chunks = [left[at : at + 10] for at in range(0, len(left), 10)]
    began = time.monotonic()
    try:
        with ProcessPoolExecutor(chosen.jobs) as pool, chosen.state.open("a") as state:
            runs = [pool.submit(many, chunk, chosen.seed) for chunk in chunks]
            try:
                for run in track(as_completed(runs), f"{len(left)} of {chosen.count} injections", len(runs), console=console):
                    took = (time.monotonic() - began) / 10
                    for outcome in run.result():
                        done[outcome.seed] = outcome
                        state.write(json.dumps({"base": chosen.seed, "code": code, "took": took, "outcome": asdict(outcome)}) + "\n")
                    state.flush()
                    seconds, began = seconds + 10 * took, time.monotonic()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(done)}; the same command goes on")
        return 130
    text = summary(sorted(done.values(), key=lambda o: o.seed), chosen.seed, seconds)
    if chosen.docs:
        write_section(chosen.docs, "Network", text)
    console.print(text, markup=False, highlight=False)
    chosen.state.unlink(missing_ok=True)
    return int(any(outcome.violations for outcome in done.values()))


if __name__ == "__main__":
    sys.exit(main())
