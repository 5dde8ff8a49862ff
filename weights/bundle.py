"""One file that carries checkpoints to a machine without a network, and everything that proves them there.

    bundle.json                     names, sizes and hashes of all that follows, and which blob belongs to which record
    weights.lock                    the same identities, as other commands read them
    LICENCES.txt                    licence and origin of each, for people
    records/<model>.<tag>.toml      the records
    labels/<name>.tsv               the names of the classes
    golden/<model>.<tag>.safetensors   inputs and what the network made of them
    blobs/<64 hex>                  the weights, safetensors

The same cache writes the same bytes. A member is what `bundle.json` says, in its order, or the bundle is refused; see `weights.archive`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weights import archive
from weights.adding import to_toml
from weights.addresses import Address
from weights.archive import Progress, atomic
from weights.cache import Cache, Installed
from weights.documents import misread, read_json
from weights.errors import BadRecord, LimitExceeded, MalformedFile
from weights.fingerprint import fingerprint
from weights.install import Converter, get
from weights.lock import Entry, Lock
from weights.places import ELSEWHERE
from weights.reading import read_file
from weights.record import Checkpoint
from weights.registry import TAG

log = logging.getLogger("weights")
MANIFEST, LOCK, LICENCES = "bundle.json", "weights.lock", "LICENCES.txt"
VERSION = 2
MANIFEST_LIMIT = 4 << 20
SMALL_LIMIT = 256 << 20
"""Bytes of all members together that are held in memory: records, labels, golden outputs."""
HEX = re.compile(r"[0-9a-f]{64}")
MODEL = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Carried:
    """One checkpoint of a bundle.

    Attributes:
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.
        blob: SHA-256 of its safetensors.
        size_bytes: of the same.
        source_sha256: of what the source served, from which the blob was converted where it differs.
        source_size_bytes: of the same, 0 where nobody counted them.
        commit: of the Hub's repository that served it.
        labels: the name of its member in `labels/`, without the suffix; None where it has no labels, or they stayed at home.
        golden: whether inputs and outputs are there.
    """

    model: str
    tag: str
    blob: str
    size_bytes: int
    source_sha256: str
    source_size_bytes: int
    commit: str | None
    labels: str | None
    golden: bool

    @property
    def name(self) -> str:
        """Name it for people and files."""
        return f"{self.model}.{self.tag}"


@dataclass(frozen=True, slots=True)
class Member:
    """What `bundle.json` says of another member."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a bundle holds, as its first member says."""

    weights: tuple[Carried, ...]
    members: tuple[Member, ...]

    def text(self) -> bytes:
        """Write it in the one way that is read back."""
        facts = {
            "kernelzoo_bundle": VERSION,
            "weights": [asdict(one) for one in self.weights],
            "members": [asdict(one) for one in self.members],
        }
        return json.dumps(facts, indent=1).encode() + b"\n"


def bundle(
    rows: Sequence[Checkpoint],
    path: str | Path,
    *,
    to_safetensors: Converter | None = None,
    golden: Callable[[Checkpoint, Installed], bytes] | None = None,
    labels: Callable[[str], bytes] | None = None,
    progress: Progress = lambda done, total: None,
) -> Contents:
    """Write checkpoints into one file; what is not in the cache is fetched first.

    Args:
        rows: records of the registry.
        path: the file, which appears when it is complete.
        to_safetensors: as for `get`.
        golden: makes the safetensors of inputs and outputs; left out, the other side has nothing to compare with.
        labels: reads the table of a record's labels.
        progress: called with (bytes written, bytes in total).

    Returns:
        What was written.

    Raises:
        HashMismatch: a cached file is not what was installed.
        NoSpace, CacheNotWritable: the file can't be written.
        WeightsError: whatever `get` raises.
    """
    path, cache = Path(path).absolute(), Cache()
    if path.is_dir():
        raise BadRecord(f"{path} is a folder: name the file, {path / 'zoo.tar'}.")
    if nameless := [row for row in rows if not re.fullmatch(TAG, row.tag)]:
        what = f"{nameless[0].model} of {nameless[0].tag} has no tag by which the other side could call it"
        raise BadRecord(f"{what}: give it one first, zoo add FILE {nameless[0].model}:mine.")
    carried: dict[str, tuple[Carried, Checkpoint, Path]] = {}
    entries: dict[str, Entry] = {}
    small: dict[str, bytes] = {}
    for row in sorted(rows, key=lambda row: (row.model, row.tag)):
        installed = get(row, to_safetensors=to_safetensors)
        sha256, data = read_file(installed.path)
        archive.check(str(installed.path), f"{row.model}:{row.tag}", installed.sha256, sha256)
        size, tensors = len(data), fingerprint(data, str(installed.path))
        del data  # hundreds of megabytes, while the network runs
        refs = [found for source in row.sources if (found := cache.ref(source)) and found["source_sha256"] == installed.source_sha256]
        ref = refs[0] if refs else {}
        row = _portable(row, installed)
        tests = golden(row, installed) if golden else None
        table = None
        if row.labels and labels:
            table = f"{row.model}.{row.tag}" if row.labels.endswith(".tsv") else row.labels
            small[f"labels/{table}.tsv"] = labels(row.labels)
            row = replace(row, labels=table)
        served = size if row.sha256 == sha256 else ref.get("source_size") or row.size_bytes or 0
        one = Carried(row.model, row.tag, sha256, size, row.sha256 or sha256, served, ref.get("commit"), table, tests is not None)
        carried[one.name] = one, row, installed.path
        entries[f"{row.model}:{row.tag}"] = entry_of_carried(one, row, tensors)
        small[f"records/{one.name}.toml"] = to_toml(row).encode()
        if tests is not None:
            small[f"golden/{one.name}.safetensors"] = tests
    chosen = list(carried.values())
    small[LOCK] = Lock(entries, serial=1).render().encode()
    small[LICENCES] = _licences(chosen)
    blobs = {one.blob: (place, one.size_bytes) for one, _, place in chosen}
    order = sorted(small, key=lambda name: ("/" in name, name))
    members = [Member(name, len(small[name]), hashlib.sha256(small[name]).hexdigest()) for name in order]
    members += [Member(f"blobs/{sha256}", size, sha256) for sha256, (_, size) in sorted(blobs.items())]
    contents = Contents(tuple(one for one, _, _ in chosen), tuple(members))
    text = contents.text()
    total = archive.length([len(text), *(member.size_bytes for member in members)])
    with atomic(path, total) as file:
        writer = archive.Writer(file, total, progress)
        writer.small(MANIFEST, text)
        for member in members:
            if member.name in small:
                writer.small(member.name, small[member.name])
            else:
                writer.large(member.name, blobs[member.sha256][0], member.size_bytes, member.sha256)
        writer.end()
    return contents


def read_contents(text: bytes, place: str) -> Contents:
    """Read `bundle.json` and see that it makes sense, whoever wrote it.

    Raises:
        MalformedFile: it does not, or a later version wrote it.
        LimitExceeded: it asks for more memory than any bundle needs.
    """
    facts = read_json(text, f"{place}: {MANIFEST}", "It was changed")
    with misread(f"{place}: {MANIFEST} makes no sense", "It was changed"):
        if (version := facts["kernelzoo_bundle"]) != VERSION:
            todo = "make it again with zoo bundle" if version in range(VERSION) else "update kernelzoo"
            raise MalformedFile(f"{place} has layout {version!r} and this version reads {VERSION}: {todo}.")
        contents = Contents(tuple(Carried(**one) for one in facts["weights"]), tuple(Member(**one) for one in facts["members"]))
        if contents.text() != text:
            raise ValueError("it is not written as kernelzoo writes it")
        for one in contents.weights:
            _check_carried(asdict(one))
        named = {LOCK, LICENCES} | {f"blobs/{one.blob}" for one in contents.weights}
        named |= {f"records/{one.name}.toml" for one in contents.weights}
        named |= {f"golden/{one.name}.safetensors" for one in contents.weights if one.golden}
        named |= {f"labels/{one.labels}.tsv" for one in contents.weights if one.labels}
        names = [member.name for member in contents.members]
        if len(set(names)) < len(names) or len({one.name for one in contents.weights}) < len(contents.weights) or not contents.weights:
            raise ValueError("a name stands there twice, or none")
        if odd := sorted(named ^ set(names)):
            raise ValueError(f"{odd[0]} is {'missing' if odd[0] in named else 'of no checkpoint'}")
        sizes = {one.blob: one.size_bytes for one in contents.weights}
        for member in contents.members:
            if not _counts(member.size_bytes) or not _spells(HEX, member.sha256):
                raise ValueError(f"{member.name} has no size or hash")
            folder, _, last = member.name.rpartition("/")
            if folder == "blobs" and (member.sha256, member.size_bytes) != (last, sizes[last]):
                raise ValueError(f"{member.name} contradicts itself")
            archive.header(member.name, member.size_bytes)
        if (held := sum(member.size_bytes for member in contents.members if not member.name.startswith("blobs/"))) > SMALL_LIMIT:
            raise LimitExceeded(f"{place}: records, labels and golden outputs of {held:,} bytes; {SMALL_LIMIT:,} is more than any need.")
    return contents


def entry_of_carried(one: Carried, row: Checkpoint, tensors: tuple[int, str]) -> Entry:
    """Describe a checkpoint of a bundle as its lock does.

    Args:
        one: what the manifest says of it.
        row: its record in the bundle.
        tensors: how many its blob has, and their fingerprint.
    """
    return Entry(
        f"{one.model}:{one.tag}",
        row.format,
        row.sources,
        row.license,
        one.source_sha256,
        size_bytes=one.source_size_bytes or None,
        tensors=tensors[0],
        fingerprint=tensors[1],
        digest=row.digest,
    )


def _check_carried(facts: dict[str, Any]) -> None:
    """See that one checkpoint is as `bundle` writes it: its fields are what a stranger's JSON held, whatever `Carried` says they are."""
    right = _spells(MODEL, facts["model"]) and _spells(TAG, facts["tag"])
    right = right and _spells(HEX, facts["blob"]) and _spells(HEX, facts["source_sha256"])
    right = right and (facts["commit"] is None or _spells(r"[0-9a-f]{40}", facts["commit"]))
    right = right and (facts["labels"] is None or _spells(TAG, facts["labels"]))
    if not right or not _counts(facts["size_bytes"]) or not _counts(facts["source_size_bytes"], 0) or not isinstance(facts["golden"], bool):
        raise ValueError(f"{facts['model']!r} {facts['tag']!r} is not as it is written")


def _spells(pattern: str | re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(pattern, text) is not None


def _counts(size: Any, least: int = 1) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and least <= size <= archive.LARGEST


def _portable(row: Checkpoint, installed: Installed) -> Checkpoint:
    """Take out of a record what holds on this machine only, and what may be a key, and put in the hash that was seen here."""
    sources: list[str] = []
    for source in row.sources:
        if source.startswith("file:"):
            sources.append(ELSEWHERE + urlsplit(source).path.rpartition("/")[2])
        elif (kept := Address(source).bare) == source:
            sources.append(source)
        else:
            sources.append(kept)
            why = "it may hold a key, and a bundle goes to others"
            log.warning("%s %s: the query of %s is left out, since %s", row.model, row.tag, source, why)
    return replace(row.hashed(installed.source_sha256), sources=tuple(dict.fromkeys(sources)), default=False)


def _licences(chosen: Sequence[tuple[Carried, Checkpoint, Path]]) -> bytes:
    lines = ['The weights in this bundle and their licences; "unstated" means that nobody who publishes them says.']
    for one, row, _ in chosen:
        spdx = (
            "" if row.license == "unstated" or row.license.startswith("LicenseRef-") else f"  https://spdx.org/licenses/{row.license}.html"
        )
        lines += ["", f"{one.model}:{one.tag}: {row.license}{spdx}", *(f"  from {source}" for source in row.sources)]
        lines += [f"  {what}: {text}" for what, text in (("learnt from", row.provenance), ("recipe", row.recipe)) if text]
    return "\n".join([*lines, ""]).encode()
