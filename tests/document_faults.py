"""Damaged documents: every file that this program writes and reads again, changed as a stranger or a bad disk might, one change a seed.

    python tests/document_faults.py --count 20000 --docs docs/notes/faults.md    # make faults-documents

A mutant is made of a good file by one to three changes that know what it is made of: values of other types, numbers too long, deep nests,
keys that are gone, doubled or strange, texts with terminal escapes; then bytes that are flipped, cut, inserted. Of a safetensors file its
header and its notes are changed so too. It may be read, or refused by an error of ours that names the file or says what to do; anything
else, another error, more than five seconds, more memory than twice the file and 200 MB, is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import platform
import random
import re
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent), str(Path(__file__).parent / "convert")]

from hostile import SPARE_BYTES, forget_peak, peak_bytes  # noqa: E402

HANG_S = 5
SHA = "ab" * 32
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, 0.5, 1e308, float("inf"), float("nan")),
    *(
        "",
        "x",
        "../../etc/passwd",
        "\x1b[2J\x1b]0;owned\x07",
        "\u202e",
        "\udc80",
        "a" * 5000,
        SHA,
        "1",
        "http://[::1",
        "https://u:p@x/?q=1",
        "\0",
    ),
    *([], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"b": []}}),
)
RAW = (
    "9" * 5000,
    "-" + "9" * 400,
    "1e999",
    "[" * 2000 + "]" * 2000,
    '{"a":' * 500 + "1" + "}" * 500,
    "0x" + "f" * 6000,
    "'''",
    '"',
    "1979-13-41",
)
"""Texts that no value writes."""
MARK = "@raw-{}@"


class Mutator:
    """Changes documents by the numbers of one seed."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Change one value somewhere inside."""
        draw = self.draw
        if isinstance(value, dict) and value and draw.random() < 0.85 and depth < 20:
            key = draw.choice(list(value))
            how = draw.random()
            if how < 0.12:
                return {k: v for k, v in value.items() if k != key}
            if how < 0.2:
                return {(draw.choice(["", "x", "\x1b[31m", "__class__", "a.b", key + " "]) if k == key else k): v for k, v in value.items()}
            if how < 0.26:
                return value | {draw.choice(["more", "default", "kind", "\0"]): self.odd()}
            return value | {key: self.value(value[key], depth + 1)}
        if isinstance(value, list) and value and draw.random() < 0.7 and depth < 20:
            at = draw.randrange(len(value))
            how = draw.random()
            if how < 0.15:
                return value[:at] + value[at + 1 :]
            if how < 0.3:
                return [*value, value[at]]
            return [*value[:at], self.value(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, str) and value and draw.random() < 0.5:
            at = draw.randrange(len(value))
            return value[:at] + draw.choice(["", "\x1b[1m", "0", "\ufeff", "é", "/", "\n"]) + value[at + 1 :]
        if type(value) is int and draw.random() < 0.4:
            return draw.choice([value + 1, value - 1, -value, value * 2**40, float(value), str(value)])
        return self.odd()

    def odd(self) -> Any:
        return self.draw.choice([*ODD, *(MARK.format(n) for n in range(len(RAW)))])

    def json(self, data: bytes, indent: int | None = None) -> bytes:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(data)
            for _ in range(self.draw.randint(1, 3)):
                value = self.value(value)
            ascii_too = self.draw.random() < 0.7
            return self.raw(json.dumps(value, indent=indent, ensure_ascii=ascii_too).encode("utf-8", "surrogatepass"))
        return self.bytes(data)

    def raw(self, text: bytes) -> bytes:
        for number, raw in enumerate(RAW):
            text = text.replace(f'"{MARK.format(number)}"'.encode(), raw.encode())
        return text

    def lines(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        at = self.draw.randrange(len(lines))
        lines[at] = self.json(lines[at]) if lines[at][:1] == b"{" else self.bytes(lines[at])
        if self.draw.random() < 0.2:
            lines.insert(at, self.draw.choice(lines))
        return b"\n".join(lines)

    def toml(self, data: bytes) -> bytes:
        """Change one value where it stands: nobody writes TOML back as it was."""
        lines = data.decode("utf-8", "replace").split("\n")
        at = self.draw.choice([n for n, line in enumerate(lines) if "=" in line] or [0])
        name, _, old = lines[at].partition("=")
        how = self.draw.random()
        if how < 0.15:
            lines.pop(at)
        elif how < 0.3:
            lines.insert(at, self.draw.choice([lines[at], "[x]", "[[weights]]", "[a.b.c]", ".".join("a" * 90) + " = 1", "more = 1"]))
        else:
            with contextlib.suppress(tomllib.TOMLDecodeError, ValueError):
                old = tomllib.loads(f"x = {old}")["x"]
            new = self.value(old)
            text = self.raw(json.dumps(new, ensure_ascii=True).encode()).decode()
            lines[at] = f"{name}= {text}"
        return "\n".join(lines).encode()

    def bytes(self, data: bytes) -> bytes:
        draw, data = self.draw, data or b"x"
        at, other = draw.randrange(len(data)), draw.randrange(len(data))
        return draw.choice(
            [
                lambda: data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
                lambda: data[:at],
                lambda: data[:at] + data[other:],
                lambda: data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:],
                lambda: (
                    data[:at]
                    + draw.choice([b"{", b"[", b'"', b"\0", b"\xff", b"\x1b[2J", b"\xef\xbb\xbf"]) * draw.choice([1, 3000])
                    + data[at:]
                ),
                lambda: b"",
            ]
        )()

    def safetensors(self, data: bytes) -> bytes:
        if self.draw.random() < 0.25 or len(data) < 10:
            return self.bytes(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        notes = header.get("__metadata__") or {}
        told = [name for name, text in notes.items() if text[:1] in "{["]
        if told and self.draw.random() < 0.7:
            name = self.draw.choice(told)
            notes[name] = self.json(notes[name].encode()).decode("utf-8", "replace")
            made = json.dumps(header).encode()
        else:
            made = self.json(data[8 : 8 + length])
        made += b" " * (-len(made) % 8)
        return struct.pack("<Q", len(made)) + made + data[8 + length :]

    def tar(self, data: bytes) -> bytes:
        """Change headers, or put chains of headers that describe each other in front."""
        if self.draw.random() < 0.3:
            kind = self.draw.choice([tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE])
            info = tarfile.TarInfo("././@LongLink")
            info.type, info.size = kind, self.draw.choice([0, 5, 512])
            return (info.tobuf(tarfile.GNU_FORMAT) + bytes(-(-info.size // 512) * 512)) * self.draw.choice([1, 900, 1500]) + data
        if self.draw.random() < 0.5:
            at = 512 * self.draw.randrange(len(data) // 512)
            block = bytearray(data[at : at + 512])
            place, size = self.draw.choice([(0, 100), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)])
            block[place : place + size] = self.draw.choice(
                [b"\xff" * size, b"9" * size, b"\x80" + b"\xff" * (size - 1), b"-1".ljust(size, b"\0")]
            )[:size]
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            return data[:at] + bytes(block) + data[at + 512 :]
        return self.bytes(data)

    def change(self, path: Path) -> None:
        """Damage a file, by what it is made of nine times of ten."""
        data, draw = path.read_bytes(), self.draw
        kinds = {".json": self.json, ".jsonl": self.lines, ".toml": self.toml, ".lock": self.toml, ".tar": self.tar}
        kinds |= {".safetensors": self.safetensors, ".lst": self.lines}
        known = kinds.get(path.suffix, self.bytes)
        path.chmod(0o644)
        path.write_bytes(known(data) if draw.random() < 0.9 else self.bytes(data))


@dataclass(frozen=True)
class Document:
    """One kind of file: how a good one is written into a folder, which files are changed, how it is read, and how it may be refused."""

    write: Callable[[Path], None]
    files: str
    read: Callable[[Path], object]
    refuse: tuple[type[Exception], ...]
    named: bool = True
    share: float = 1.0
    """Of the mutants that are asked for: some are slow to read."""


def documents() -> dict[str, Document]:
    """List all kinds, imported when they are asked for: torch is among what they need."""
    import numpy as np
    import torch
    from PIL import Image

    import weights
    from convert.formats import safetensors
    from weights import Checkpoint, Preprocessing, WeightsError, adhoc
    from weights.adding import to_toml
    from weights.bundle import Carried, Contents, Member, read_contents
    from weights.errors import BadLock, BadRecord, ConvertError, InsecureSource, MalformedFile
    from weights.header import entries
    from weights.inventory import inventory
    from weights.lock import Entry, Lock
    from weights.mirror import mirror
    from weights.part import Part
    from zoo import ResNet20
    from zoo.bench import record as bench
    from zoo.conversion.notes import notes
    from zoo.embedding import parts, reading
    from zoo.embedding.writing import index_of
    from zoo.finetuning import checkpoint, report, run
    from zoo.images import BadImage, listing, open_source, tar
    from zoo.images.preprocess import open_image
    from zoo.labels import labels
    from zoo.pretrained import run_folder
    from zoo.sharing import golden_outputs

    steps = Preprocessing(256, 224, "bilinear", (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    row = Checkpoint(
        "Net", "v1", ("hf://acme/wheels", "https://example.org/w.pth?token=1"), "pytorch", "torchvision", 10, steps, "MIT", "made up"
    )

    def lock(folder: Path) -> None:
        sources = ("hf://acme/wheels@" + "0" * 40 + "/w.pth", "https://example.org/w?sha256-" + "0" * 12)
        more = {"sha256": SHA, "size_bytes": 1234, "tensors": 2, "fingerprint": SHA}
        kept = {key: Entry(key, "pytorch", sources, "MIT", **more) for key in ("Net:v1", "hf://acme/wheels")}
        Lock(kept, 3).write(folder / "weights.lock")

    def part(folder: Path) -> None:
        made = Part(folder, SHA, "https://example.org/w")
        made.write(b"abc")
        made.remember('"abc"', 9)
        made.release()

    def take(folder: Path) -> None:
        made = Part(folder, SHA, "https://example.org/w")
        if made.etag:
            made.etag.encode("ascii")
        made.discard()

    def cache(folder: Path) -> None:
        small = folder / "w.safetensors"
        safetensors.save({"w": torch.zeros(2)}, small)
        with cached(folder):
            convert = lambda source, made: shutil.copyfile(source, made) and None  # noqa: E731
            for kind in ("safetensors", "pytorch"):
                found = adhoc("ResNet20", str(small), tag=kind, format=kind)
                weights.load(weights.get(found, to_safetensors=convert, progress=False), "stamp")

    @contextlib.contextmanager
    def cached(folder: Path) -> Iterator[None]:
        with mock.patch.dict(
            os.environ, {"ZOO_CACHE": str(folder / "cache"), "ZOO_USER_REGISTRY": str(folder / "own"), "ZOO_OFFLINE": "1"}
        ):
            yield

    def use(folder: Path) -> None:
        with cached(folder):
            for kind in ("safetensors", "pytorch"):
                found = adhoc("ResNet20", str(folder.parent / "good" / "w.safetensors"), tag=kind, format=kind)
                with contextlib.suppress(WeightsError):
                    weights.get(found, to_safetensors=lambda source, made: shutil.copyfile(source, made) and None, progress=False)
            inventory()
            weights.gc(dry_run=True)
            weights.verify_all()

    def mirrored(folder: Path) -> None:
        facts = {"size_bytes": 3, "sha256": SHA, "format": "pytorch", "license": "MIT", "weights": ["Net:v1"]}
        text = {"kernelzoo_mirror": 2, "files": [{"name": SHA} | facts], "missing": [{"name": "w-abababab.pth"} | facts]}
        (folder / "index.json").write_text(json.dumps(text, indent=1))

    def manifest(folder: Path) -> None:
        carried = Carried("Net", "v1", SHA, 100, SHA, 100, None, None, False)
        names = ("weights.lock", "LICENCES.txt", "records/Net.v1.toml")
        members = [Member(name, 9, SHA) for name in names] + [Member(f"blobs/{SHA}", 100, SHA)]
        (folder / "bundle.json").write_bytes(Contents((carried,), tuple(members)).text())

    def registry(folder: Path) -> None:
        (folder / "Net.v1.toml").write_text(to_toml(row))

    def registered(folder: Path) -> None:
        with mock.patch.dict(os.environ, {"ZOO_USER_REGISTRY": str(folder)}):
            for one in weights.checkpoints("Net"):
                f"{one}{to_toml(one)}"

    def run_row(folder: Path) -> None:
        made = adhoc(
            "ResNet20", (folder / run_folder.WEIGHTS).as_uri(), tag="mine", sha256=SHA, num_classes=2, labels=str(folder / "labels.tsv")
        )
        (folder / run_folder.ROW).write_text(to_toml(made))

    def settings(folder: Path) -> None:
        facts: dict[str, Any] = {"model": "ResNet20", "options": {}, "num_classes": 2, "in_channels": 3, "classes": ["a", "b"]}
        facts |= {"preprocessing": {"resize": 32, "crop": 32, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.2] * 3}}
        facts |= {"base": {"name": "ResNet20:cifar10", "sha256": SHA, "license": "MIT"}, "new_head": True, "data": "photos", "val": None}
        facts |= {"fingerprints": [SHA, None], "settings": {"epochs": 2, "lr": 0.1}, "processes": 1}
        (folder / "settings.json").write_text(json.dumps(facts, indent=1))

    def begun(folder: Path) -> None:
        facts, _ = run._known(folder / "settings.json")  # pyright: ignore[reportPrivateUsage]
        json.dumps(facts)

    def state(folder: Path) -> None:
        facts = {"step": 3, "since": 0, "best": {"step": 1, "figure": 0.5}, "done": False, "pending": [0.1], "unreadable": {"a.jpg": "why"}}
        checkpoint.write(folder, {"model.w": torch.zeros(2), "optimizer.w.step": torch.ones(())}, facts, best=False)

    def resumed(folder: Path) -> None:
        _, facts = checkpoint.read(folder / checkpoint.LAST)
        checkpoint.saved_step(folder)
        f"{facts['step'] + 1}{facts['since'] + 1}{sum(facts['pending'])}{sorted(facts['unreadable'].items())}"

    def log(folder: Path) -> None:
        lines = [
            {"kind": kind, "step": n, "epoch": n / 2, "loss": 0.5, "lr": 0.1, "accuracy": 0.5}
            for n in range(3)
            for kind in ("train", "eval")
        ]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def told(folder: Path) -> None:
        rows = report.history(folder)
        for name in ("loss", "lr", "accuracy"):
            sum(x + y for x, y in report._points(rows, name))  # pyright: ignore[reportPrivateUsage]

    plan = SimpleNamespace(facts=lambda: {"format": 1, "model": "ResNet20", "at": ["embedding"], "place": "x"})

    def workplace(folder: Path) -> None:
        parts.Workplace(folder / "out.npy", plan, restart=False).close()  # pyright: ignore[reportArgumentType]
        (folder / "out.npy.parts" / "part-0").touch()

    def work(folder: Path) -> None:
        place = parts.Workplace(folder / "out.npy", plan, restart=False)  # pyright: ignore[reportArgumentType]
        try:
            place.keep_probe("x")
        finally:
            place.close()

    def embed_part(folder: Path) -> None:
        tensors = {"embedding": torch.zeros(2, 3)}
        parts.Part(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, dtype=torch.bool), tensors, {1: "why"}).save(
            folder / "part-0.safetensors"
        )

    about = {"model": "ResNet20", "tag": "cifar10", "at": ["embedding"], "weights": SHA}

    def npy(folder: Path) -> None:
        np.save(folder / "e.npy", np.zeros((2, 3), np.float32))
        rows = [{"key": f"{n}.jpg", "label": "cat", "index": n, "blake3": SHA} for n in range(2)]
        index_of(folder / "e.npy").write_text("".join(json.dumps(line) + "\n" for line in [{"about": about}, *rows]))

    def tensors(folder: Path) -> None:
        made = {"embedding": torch.zeros(2, 3), "index": torch.arange(2), "blake3": torch.zeros(2, 32, dtype=torch.uint8)}
        made |= {"label": torch.tensor([0, -1], dtype=torch.int32), "key": torch.tensor(list(b"ab"), dtype=torch.uint8)}
        told = {reading.ABOUT: json.dumps(about), "kernelzoo.classes": json.dumps(["cat"])}
        safetensors.save(made | {"key.end": torch.tensor([1, 2])}, folder / "e.safetensors", told)

    def parquet(folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns = {"key": ["a", "b"], "label": ["cat", None], "index": [0, 1], "blake3": [b"0" * 32] * 2}
        columns["embedding"] = pa.array([[0.0] * 3] * 2, pa.list_(pa.float32(), 3))  # pyright: ignore[reportArgumentType]
        made = pa.table(columns)
        parquet.write_table(made.replace_schema_metadata({reading.ABOUT: json.dumps(about)}), folder / "e.parquet")

    def embeddings(name: str) -> Callable[[Path], object]:
        def read(folder: Path) -> None:
            found = reading.read(folder / name)
            f"{found.about.get('model')}{found.tap()}{[str(label) for label in found.labels]}"

        return read

    def shard(folder: Path) -> None:
        with tarfile.open(folder / "s.tar", "w") as archive:
            for name, data in {
                "a/1.jpg": b"jpeg",
                "a/1.json": b'{"label": "cat", "more": [1, {"x": 2}]}',
                "a/2.jpg": b"jpeg",
                "a/2.cls": b"dog",
            }.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))

    def images(folder: Path) -> None:
        lines = [json.dumps({"path": f"{n}.jpg", "label": "cat", "more": [n]}) for n in range(3)]
        (folder / "list.lst").write_text("\n".join(lines) + "\n")

    def rows(folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        images = [{"bytes": bytes([n]) * n * 20, "path": f"{n}.png"} for n in range(20)]
        told = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"]}}}})}
        made = pa.table({"image": images, "label": [n % 2 for n in range(20)]}).replace_schema_metadata(told)
        parquet.write_table(made, folder / "p.parquet", row_group_size=7, compression="zstd", data_page_size=200)

    def opened(name: str) -> Callable[[Path], object]:
        def read(folder: Path) -> None:
            source = open_source(folder / name)
            for index in range(len(source)):
                with contextlib.suppress(FileNotFoundError):  # a row without an image is no damaged file
                    source.read(index)

        return read

    def pictures(folder: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
        for ending in ("jpg", "png", "webp", "gif", "bmp", "tiff"):
            Image.fromarray(pixels).save(folder / f"i.{ending}")

    def shown(folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            open_image(path).load()

    def noted(folder: Path) -> None:
        steps = {"resize": 32, "crop": 32, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.2] * 3}
        told = {"model": "ResNet20", "options": {}, "preprocessing": steps, "source": {"file": "x.pth", "sha256": SHA}, "labels": None}
        (folder / "notes.json").write_text(json.dumps(told))

    def believed(folder: Path) -> None:
        notes({"kernelzoo": (folder / "notes.json").read_text("utf-8", "replace")}, ResNet20)

    network = ResNet20().eval()
    network.checkpoint = adhoc("ResNet20", "file:///w.safetensors", preprocessing={**ODD_FREE, "crop": 32, "resize": 32})

    def golden(folder: Path) -> None:
        (folder / "golden.safetensors").write_bytes(golden_outputs.golden(network))

    def cells(folder: Path) -> None:
        rows = {"us": 1.0, "us_low": 1.0, "us_high": 1.0, "images_s": 1.0, "error": 0.0, "build_s": None}
        cell = {"model": "ResNet20", "batch": 1, "date": "2026-11-27", "ways": {"eager": rows}}
        (folder / "bench.json").write_text(
            json.dumps({"format": bench.FORMAT, "about": {"type": "cpu", "dtype": "float32"}, "cells": [cell]})
        )

    def table(folder: Path) -> None:
        (folder / "labels.tsv").write_text("n00000001\tcat\n\tdog\n")

    ours, seen = (WeightsError,), (ValueError,)
    found = {
        "lock": Document(lock, "weights.lock", lambda f: Lock.read(f / "weights.lock"), (BadLock,)),
        "part's note": Document(part, "*.json", take, ()),
        "cache's notes": Document(cache, "cache/**/*.json", use, ours, named=False, share=0.1),
        "mirror's index": Document(mirrored, "index.json", lambda f: mirror(f, []), (BadRecord,)),
        "bundle's manifest": Document(
            manifest, "bundle.json", lambda f: read_contents((f / "bundle.json").read_bytes(), "bundle.json"), (MalformedFile,)
        ),
        "record": Document(registry, "*.toml", registered, (BadRecord, InsecureSource)),
        "run's record": Document(run_row, "weights.toml", lambda f: run_folder.read_row(f), (BadRecord, InsecureSource)),
        "run's settings": Document(settings, "settings.json", begun, seen),
        "run's state": Document(state, "last.safetensors", resumed, (checkpoint.Damaged,)),
        "run's log": Document(log, "log.jsonl", told, ()),
        "embedding's manifest": Document(workplace, "out.npy.parts/manifest.json", work, seen),
        "embedding's part": Document(
            embed_part, "part-0.safetensors", lambda f: parts.Part.load(f / "part-0.safetensors"), (MalformedFile,)
        ),
        "embeddings, npy": Document(npy, "e*", embeddings("e.npy"), seen),
        "embeddings, safetensors": Document(tensors, "e.safetensors", embeddings("e.safetensors"), seen),
        "embeddings, parquet": Document(parquet, "e.parquet", embeddings("e.parquet"), seen),
        "tar of images": Document(shard, "s.tar", lambda f: tar.Tar("s", [str(f / "s.tar")]), seen),
        "list of images": Document(images, "list.lst", lambda f: listing.Listing(str(f / "list.lst")), seen),
        "images, parquet": Document(rows, "p.parquet", opened("p.parquet"), seen),
        "image": Document(pictures, "i.*", shown, (BadImage,)),
        "conversion's notes": Document(noted, "notes.json", believed, (MalformedFile,), named=False),
        "golden outputs": Document(
            golden,
            "golden.safetensors",
            lambda f: golden_outputs.compare(network, (f / "golden.safetensors").read_bytes()),
            ours,
            named=False,
        ),
        "record of measurements": Document(cells, "bench.json", lambda f: bench.merged([f / "bench.json"]), seen),
        "labels": Document(table, "labels.tsv", lambda f: labels(str(f / "labels.tsv")), seen),
        "header": Document(tensors, "e.safetensors", lambda f: entries((f / "e.safetensors").read_bytes()), (ConvertError,), named=False),
    }
    if not _there("pyarrow"):
        del found["embeddings, parquet"], found["images, parquet"]
    return found


ODD_FREE: dict[str, Any] = {"interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.2] * 3}


def _there(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


@dataclass
class Result:
    """What became of one kind's mutants."""

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Hung(BaseException):
    """A mutant is still being read after `HANG_S`."""


def campaign(name: str, document: Document, count: int, base: int = 0, seeds: Iterable[int] | None = None) -> Result:
    """Read so many mutants of one kind, or those of some seeds."""
    result, began = Result(), time.monotonic()
    logging.disable(logging.CRITICAL)
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            good = Path(home) / "good"
            good.mkdir()
            document.write(good)
            document.read(_copy(good, Path(home) / "whole"))  # a good one is read
            for seed in range(count) if seeds is None else seeds:
                folder = _copy(good, Path(home) / str(seed))
                mutator = Mutator(f"{base}:{name}:{seed}")
                files = sorted(path for path in folder.glob(document.files) if path.is_file())
                mutator.change(mutator.draw.choice(files))
                if fault := _outcome(document, folder, result):
                    result.faults.append(f"{base}:{seed}: {fault}")
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)
    result.seconds = time.monotonic() - began
    return result


def _outcome(document: Document, folder: Path, result: Result) -> str:
    """Read one mutant; what is wrong about it, nothing if nothing is."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    forget_peak()
    before = peak_bytes()
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        document.read(folder)
        if (grown := peak_bytes() - before) > 2 * size + SPARE_BYTES:
            return f"{grown >> 20} MB of memory for {size} bytes"
        result.read += 1
        return ""
    except Hung:
        return f"more than {HANG_S} s"
    except document.refuse as error:
        said = str(error)
        result.refused[type(error).__name__] += 1
        if len(said) < 20 or (document.named and not any(path.name in said for path in [folder, *folder.rglob("*")])):
            return f"{type(error).__name__} names no file: {said[:200]!r}"
        if type(error) in (ValueError, json.JSONDecodeError) and re.match(r"(Exp|Ext|Inv|Unt|Exceeds|'utf)", said):
            return f"another library's words: {said[:200]!r}"
        return ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _hang(*_: object) -> None:
    raise Hung


def _copy(good: Path, to: Path) -> Path:
    shutil.copytree(good, to)
    for path in to.rglob("*.json"):  # of projects and seen locks: where they lie now
        with contextlib.suppress(OSError):
            path.chmod(0o644)
    return to


def main() -> int:
    """Run the campaign; exit code 1 if there was a fault."""
    from faults_page import write_section

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind")
    parser.add_argument("--docs", type=Path, help="write the section Documents of this page")
    chosen = parser.parse_args()
    lines = ["| document | mutants | read | refused | by | faults | seconds |", "|---|---:|---:|---:|---|---:|---:|"]
    bad: list[str] = []
    total = 0
    for name, document in documents().items():
        if chosen.only not in (None, name):
            continue
        count = math.ceil(chosen.count * document.share)
        result = campaign(name, document, count, chosen.seed)
        kinds = ", ".join(f"{kind} {times:,}" for kind, times in result.refused.most_common())
        total += count
        bad += [f"- {name}, {fault}" for fault in result.faults]
        row = (
            f"| {name} | {count:,} | {result.read:,} | {result.refused.total():,} | {kinds} | {len(result.faults)} | {result.seconds:.0f} |"
        )
        lines.append(row)
        sys.stderr.write(row + "\n" + "".join(f"  {fault}\n" for fault in result.faults[:20]))
    intro = __doc__.partition("A mutant is")[2] if __doc__ else ""
    head = [
        "A mutant is" + intro.replace("\n", " ").rstrip() + " (`tests/document_faults.py`).",
        "",
        f"`make faults-documents`, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}.",
        "",
    ]
    if chosen.docs:
        write_section(chosen.docs, "Documents", "\n".join([*head, *lines, "", f"{total:,} mutants, {len(bad)} faults.", "", *bad]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
