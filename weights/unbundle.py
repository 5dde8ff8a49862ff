"""What `weights.bundle` wrote, brought into the cache and the registry of another machine: all of it is proven before any of it counts."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from blake3 import blake3

from weights import archive
from weights.adding import to_toml
from weights.addresses import Address
from weights.archive import Progress, Reader, atomic
from weights.auditing import diff
from weights.bundle import LOCK, MANIFEST, MANIFEST_LIMIT, Carried, Contents, Member, entry_of_carried, read_contents
from weights.cache import BUNDLE, Cache, Installed, is_of
from weights.digests import contradict
from weights.documents import misread, read_toml
from weights.errors import BadLock, BadRecord, HashMismatch, MalformedFile, NoSuchFile, NotLocked, SizeMismatch, SourceUnavailable
from weights.fingerprint import fingerprint
from weights.finite import check_file
from weights.header import check_complete
from weights.lock import Entry, Lock, parse
from weights.part import disk, require
from weights.pinning import admit, check_fingerprint, frozen_by
from weights.places import at_home
from weights.reading import hashes, read_file
from weights.record import KEPT, Checkpoint, record
from weights.registry import located, user_folder

IDENTITY = ("format", "names", "num_classes", "embedding", "preprocessing", "options")
"""Facts of a record without which its weights compute something else; the others may differ between versions of the registry."""
Check = Callable[[Checkpoint, Installed, "bytes | None"], str]
"""Runs a checkpoint on the golden inputs, returns what was found, and raises where the outputs are others."""


@dataclass(frozen=True, slots=True)
class Unbundled:
    """What became of one checkpoint.

    Attributes:
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.
        sha256: of its safetensors.
        size_bytes: of the same.
        new: whether it was not in the cache before.
        converted: whether the safetensors was made of another file by the machine that wrote the bundle, whose word it is.
        registered: the file of its record, where it was not in the registry before.
        proof: what the comparison of outputs found.
    """

    model: str
    tag: str
    sha256: str
    size_bytes: int
    new: bool
    converted: bool
    registered: Path | None
    proof: str


def unbundle(
    path: str | Path,
    *,
    check: Check | None = None,
    accept: Callable[[Checkpoint], None] = lambda row: None,
    labels: Callable[[str], bytes] | None = None,
    sha256: str | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Unbundled]:
    """Install a bundle: everything that is in it, or nothing; doing it again changes nothing.

    Args:
        path: what `bundle` wrote.
        check: compares outputs before anything is installed; left out, they are not compared.
        accept: raises where a record's network is not known here.
        labels: reads the table of a record's labels, as it is here; raises ValueError where there is none of that name.
        sha256: of the bundle, where a signature proved it.
        progress: called with (bytes read, bytes in total).

    Returns:
        What became of each checkpoint.

    Raises:
        NoSuchFile: there is none.
        MalformedFile: it is no bundle, or a member is not what it should be; the message names it.
        HashMismatch: so it is, by its bytes; or its lock, a lock here, the registry, or an earlier install has another file of that name.
        NotLocked: neither the registry nor a lock here has a full hash of a checkpoint, and ZOO_FROZEN is set.
        SizeMismatch: it is cut short.
        BadRecord: a record contradicts the one that is here.
        NoSpace, CacheNotWritable: the cache or the registry can't take it.
    """
    path, cache = at_home(path), Cache()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(path))
        reader = Reader(file, str(path), progress)
        text = reader.first(MANIFEST, MANIFEST_LIMIT)
        contents = read_contents(text, str(path))
        _check_length(contents, len(text), reader.size, path)
        known = {one.blob for one in contents.weights if _good(cache, one.blob)}
        needed = [member.size_bytes for member in contents.members if member.name.startswith("blobs/") and member.sha256 not in known]
        if needed:
            cache.prepare()
            cache.sweep()
            require(cache.root, sum(needed))
        staged: dict[str, Installed] = {}
        small: dict[str, bytes] = {}
        for member in contents.members:
            if member.name.startswith("blobs/"):
                staged[member.sha256] = stack.enter_context(_staged(cache, reader, member, path, member.sha256 in known))
            else:
                small[member.name] = reader.small(member.name, member.size_bytes, member.sha256)
        reader.end()
        if sha256 and reader.sha256 != sha256:
            raise HashMismatch(f"{path} changed since its signature was checked: expected sha256 {sha256}, got {reader.sha256}.")
        plans = [_plan(one, small, cache, staged[one.blob], str(path), accept, labels) for one in contents.weights]
        _compare_lock(contents, small, staged, str(path))
        golden = [small.get(f"golden/{plan.one.name}.safetensors") for plan in plans]
        proofs = [check(plan.row, plan.installed, data) if check else "not compared" for plan, data in zip(plans, golden, strict=True)]
        _commit(cache, plans, path.resolve())
        return [_said(plan, proof) for plan, proof in zip(plans, proofs, strict=True)]


def contents(path: str | Path) -> Contents:
    """Read what a bundle says that it holds; nothing is installed, and no member but the first is read.

    Raises:
        NoSuchFile: there is none.
        MalformedFile: it is no bundle.
        SizeMismatch: it is cut short.
    """
    path = at_home(path)
    with _opened(path) as file:
        reader = Reader(file, str(path), lambda done, total: None)
        text = reader.first(MANIFEST, MANIFEST_LIMIT)
        found = read_contents(text, str(path))
        _check_length(found, len(text), reader.size, path)
        return found


@contextlib.contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    try:
        file = path.open("rb", buffering=0) if path.is_file() or not path.exists() else None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSuchFile(f"{path} is not there: name the file that zoo bundle wrote.") from error
    except OSError as error:
        raise SourceUnavailable(f"{path} can't be read: {error.strerror}.") from error
    if file is None:
        raise MalformedFile(f"{path} is no file, and a bundle is one: name what zoo bundle wrote.")
    with file:
        yield file


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be done for one checkpoint: its record as it will be here, its bytes, and the files to write."""

    one: Carried
    row: Checkpoint
    installed: Installed
    new: bool
    record: Path | None
    labels: tuple[Path, bytes] | None


def _check_length(contents: Contents, first: int, size: int, path: Path) -> None:
    """Find a bundle that was cut short, or has more behind its end, before reading it."""
    wanted = archive.length([first, *(member.size_bytes for member in contents.members)])
    if size > wanted:
        raise MalformedFile(f"{path} has {size - wanted:,} bytes behind its end. It was changed.")
    if size < wanted:
        sizes, name = [first], MANIFEST
        for member in contents.members:
            sizes.append(member.size_bytes)
            name = member.name
            if archive.length(sizes) - 2 * archive.BLOCK > size:
                break
        raise SizeMismatch(f"{path} is cut short: expected {wanted:,} bytes, got {size:,}; it ends in {name}. Copy it again.")


def _good(cache: Cache, sha256: str) -> bool:
    path = cache.blob(sha256)
    with contextlib.suppress(OSError):
        return path.is_file() and not path.is_symlink() and hashes(path)[0] == sha256
    return False


@contextlib.contextmanager
def _staged(cache: Cache, reader: Reader, member: Member, path: Path, known: bool) -> Generator[Installed]:
    """Bring a blob into `partial` and prove it; what is in the cache already is only proven."""
    sha256, hasher, fast = member.sha256, hashlib.sha256(), blake3()
    place = cache.blob(sha256) if known else cache.temporary(sha256)
    try:
        with contextlib.nullcontext() if known else disk(cache.root), contextlib.nullcontext() if known else place.open("xb") as file:
            for data in reader.member(member.name, member.size_bytes):
                hasher.update(data)
                fast.update(data)
                if file:
                    file.write(data)
        archive.check(str(path), member.name, sha256, hasher.hexdigest())
        (check_complete if known else check_file)(place, f"{path}, {member.name}")
        yield Installed(place, sha256, fast.hexdigest(), member.size_bytes, str(path), sha256)
    finally:
        if not known:
            place.unlink(missing_ok=True)


def _plan(
    one: Carried,
    small: dict[str, bytes],
    cache: Cache,
    blob: Installed,
    place: str,
    accept: Callable[[Checkpoint], None],
    labels: Callable[[str], bytes] | None,
) -> _Plan:
    theirs = _record(one, small[f"records/{one.name}.toml"], place)
    accept(theirs)
    table = small.get(f"labels/{one.labels}.tsv")
    here = next((found for found in located(one.model) if found.row.tag == one.tag), None)
    row, written = here.row if here else theirs, None
    if not here and any(source.startswith("package:") for source in row.sources):
        raise BadRecord(f"{place}: {one.model}:{one.tag} ships with another version of kernelzoo: update it here.")
    if here:
        _compare(here.row, theirs, one, f"{place} brings another {one.model}:{one.tag} than {here}")
    if table is not None and labels:
        own = here.row.labels if here else theirs.labels
        try:
            same = own is not None and labels(own) == table
        except ValueError:
            same = False
        if not same and (here or one.labels != one.name):
            raise BadRecord(f"{place}: the labels {one.labels} are others here, or missing; update kernelzoo on both machines.")
        if not same:
            written = user_folder() / f"{one.name}.labels.tsv", table
            row = replace(row, labels=str(written[0]))
    if row.format == "safetensors" and one.blob != one.source_sha256:
        raise MalformedFile(f"{place}: the blob of {one.name} has another hash than the file that it is. It was changed.")
    name, switch = f"{one.model}:{one.tag}", frozen_by()
    todo = f"On a machine that has it: zoo lock {name}; then bring its weights.lock here, into the folder where you call zoo unbundle"
    try:
        held, pin = admit(cache, row if here else replace(row, sha256=None))  # the bundle's own word is no record's hash
    except NotLocked as error:
        what = f"{place}: neither the registry nor a lock here has a full hash of {name}, and {switch} takes no bundle's own word"
        raise NotLocked(f"{what}. {todo}; or, if you trust who wrote the bundle, unbundle it once without {switch}.") from error
    if held.sha256 and held.sha256 != one.source_sha256:
        raise HashMismatch(f"{place}: a lock pins {one.model}:{one.tag} to sha256 {held.sha256}, the bundle has {one.source_sha256}.")
    # the bundle says what its tensors were made of, the lock knows them
    known = check_fingerprint(replace(row, sha256=one.source_sha256), pin, blob.path, f"{place}, {one.name}")
    _compare_installs(cache, row, one, place)
    registered = None if here else user_folder() / f"{one.name}.toml"
    there = cache.lookup(row)
    if there and there.source_sha256 == one.source_sha256 and hashes(there.path)[0] == there.sha256:
        return _Plan(one, row, there, False, registered, written)
    if not known and one.blob != one.source_sha256 and switch:
        raise NotLocked(
            f"{place}: no lock has the fingerprint of {name}, whose tensors are the sender's word, and {switch} takes none. {todo}."
        )
    return _Plan(one, row, replace(blob, source=row.sources[0], source_sha256=one.source_sha256), True, registered, written)


def _record(one: Carried, text: bytes, place: str) -> Checkpoint:
    name = f"{place}: records/{one.name}.toml"
    told = read_toml(text, name, "It was changed")
    with misread(f"{name} is no record of one checkpoint", "It was changed"):
        ((model, rows),) = told.items()
        ((tag, facts),) = rows.items()
        row = record(model, tag, facts, name)
    if (row.model, row.tag, row.sha256) != (one.model, one.tag, one.source_sha256) or (one.labels or row.labels) != row.labels:
        raise MalformedFile(f"{name} is the record of something else. It was changed.")
    if row.labels and not one.labels and row.labels.endswith(".tsv"):
        raise MalformedFile(f"{name} has its labels in a file, {row.labels}, and brings none. It was changed.")
    if row.default:
        raise MalformedFile(f"{name} claims to be the default, which is for this machine to say. It was changed.")
    return row


def _compare(here: Checkpoint, theirs: Checkpoint, one: Carried, what: str) -> None:
    """Refuse a record of the same name that would make another network of other bytes."""
    todo = "Nothing was installed; give yours another tag, or zoo remove it."
    if not one.source_sha256.startswith(here.sha256 or here.sha256_prefix or ""):
        raise HashMismatch(f"{what}: expected sha256 {here.sha256 or f'{here.sha256_prefix}…'}, got {one.source_sha256}. {todo}")
    if contradict(here.digest, theirs.digest):
        raise HashMismatch(f"{what}: expected {here.digest}, got {theirs.digest}. {todo}")
    differ = [name for name in IDENTITY if getattr(here, name) != getattr(theirs, name)]
    # the queries stayed where the bundle was written
    places = [tuple(Address(source).bare for source in row.sources) for row in (here, theirs)]
    facts = {name: (getattr(here, name), getattr(theirs, name)) for name in differ}
    if not (here.sha256 or here.sha256_prefix or set(places[0]) & set(places[1])):
        facts["sources"] = places[0], places[1]
    if facts:
        said = "; ".join(f"{name} is {ours!r} here and {others!r} there" for name, (ours, others) in facts.items())
        raise BadRecord(f"{what}: {said}. {todo}")


def _compare_lock(contents: Contents, small: dict[str, bytes], staged: dict[str, Installed], place: str) -> None:
    """Refuse a lock that says something else than the records and the tensors that came with it."""
    entries: dict[str, Entry] = {}
    for one in contents.weights:
        tensors = fingerprint(read_file(staged[one.blob].path)[1], place)
        entry = entry_of_carried(one, _record(one, small[f"records/{one.name}.toml"], place), tensors)
        entries[entry.key] = entry
    wanted = Lock(entries, serial=1)
    if small[LOCK] == wanted.render().encode():
        return
    try:
        first = next(iter(diff(parse(small[LOCK].decode(), Path(LOCK)), wanted)), None)
    except (BadLock, UnicodeDecodeError):
        first = None
    said = f"says of {first.key} the {first.what} {first.locked}, and with it came {first.found}" if first else "is not as it is written"
    raise HashMismatch(f"{place}: its {LOCK} {said}. It was changed. Nothing was installed.")


def _compare_installs(cache: Cache, row: Checkpoint, one: Carried, place: str) -> None:
    """Refuse other bytes than an earlier install here had from the same source."""
    for source in row.sources:
        before = cache.ref(source)
        if before and is_of(before, row) and before["source_sha256"] != one.source_sha256:
            gave = before["source_sha256"]
            raise HashMismatch(f"{place}: {source} gave sha256 {gave} when it was installed here, the bundle has {one.source_sha256}.")


def _commit(cache: Cache, plans: list[_Plan], bundle: Path) -> None:
    """Give everything its name: contents first, then the notes that lead to them, the records last, all of them or none."""
    before: dict[Path, bytes | None] = {}
    with _restored(before), contextlib.ExitStack() as records:
        for plan in plans:
            written = [(plan.record, to_toml(plan.row).encode())] if plan.record else []
            for path, data in [*written, *([plan.labels] if plan.labels else [])]:  # the last entered is the first to appear
                with disk(path.parent):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    before[path] = path.read_bytes() if path.is_file() else None
                records.enter_context(atomic(path)).write(data)
        for plan in plans:
            if plan.new:
                cache.prepare()
                path = cache.blob(plan.one.blob)
                if plan.installed.path != path and plan.installed.path.exists():
                    cache.publish(plan.installed.path, plan.one.blob)
                installed, kept = replace(plan.installed, path=path), plan.row.format in KEPT
                if plan.row.format != "safetensors":
                    cache.derive(installed, BUNDLE, kept)
                size, digest = plan.one.source_size_bytes, plan.row.digest
                cache.record(plan.row.sources[0], installed, plan.one.commit, None, size, BUNDLE, bundle, digest, kept)


@contextlib.contextmanager
def _restored(before: dict[Path, bytes | None]) -> Generator[None]:
    """Put back, when anything goes wrong, what was at these paths before; None stands for nothing."""
    try:
        yield
    except BaseException:
        for path, data in before.items():
            with contextlib.suppress(OSError):
                if data is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != data:
                    with atomic(path) as file:
                        file.write(data)
        raise


def _said(plan: _Plan, proof: str) -> Unbundled:
    one = plan.one
    converted = one.blob != one.source_sha256
    return Unbundled(one.model, one.tag, plan.installed.sha256, plan.installed.size_bytes, plan.new, converted, plan.record, proof)
