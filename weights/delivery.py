"""A checkpoint's served bytes, for the cache and for mirrors alike: what they must be, who is asked in which order, and until when."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from weights import patience
from weights.cache import BUNDLE, Cache, is_of, key, stamp_of
from weights.elsewhere import announced_copy, elsewhere
from weights.errors import (
    BadRecord,
    CacheNotWritable,
    ChangedUpstream,
    HashMismatch,
    NoSpace,
    Offline,
    RateLimited,
    ReaderUnavailable,
    SourceUnavailable,
    WeightsError,
)
from weights.fetch import Expected, changed_upstream, check_reported, fetch
from weights.header import check_complete
from weights.part import Part, require
from weights.patience import patiently
from weights.pinning import Pin, key_of
from weights.places import ELSEWHERE
from weights.progress import bar
from weights.record import Checkpoint
from weights.registry import TAG
from weights.sources import Gone, Remote, candidates, check_announced, is_here, local_path, mirror_note, offline, resolve

log = logging.getLogger("weights")
T = TypeVar("T")
OURS = (NoSpace, CacheNotWritable, BadRecord, ReaderUnavailable)
"""Errors that no other source could mend."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A proven file.

    Attributes:
        part: its bytes, for whoever takes them to move away.
        remote: what served it.
        source: of the record, whose bytes they are.
        commit: of the Hub's repository, where one is known.
        stamp: of a file on this machine, taken before it was read.
        by: who says that these are the source's bytes, where neither it nor a recorded hash does.
    """

    part: Part
    remote: Remote
    source: str
    commit: str | None
    stamp: list[int] | None
    by: str


class Delivery:
    """One file that is wanted; `take` asks for it.

    Args:
        cache: whose notes say what the sources gave before.
        checkpoint: as `weights.pinning.admit` returned it, with the lock's hash.
        pin: what a lock holds it to.
        folder: where parts lie.
        copies: how many of the file must fit there.
        progress: whether a bar may be shown, on a terminal.
        anew: whether only the sources themselves are asked, for what they serve today.
        also: copies on this machine to try first, each with the source that it is of.

    Attributes:
        name: of the file, whoever sends it; parts and locks are named so.

    Raises:
        Offline: nothing of this machine could have it, and a switch forbids the network.
    """

    def __init__(
        self,
        cache: Cache,
        checkpoint: Checkpoint,
        pin: Pin | None,
        folder: Path,
        *,
        copies: int = 1,
        progress: bool = True,
        anew: bool = False,
        also: Sequence[tuple[Remote, str]] = (),
    ) -> None:
        self._cache, self._row, self._pin, self._folder = cache, checkpoint, pin, folder
        self._copies, self._progress, self._anew = copies, progress, anew
        self._others = [] if anew else [*also, *elsewhere(checkpoint)]
        self._places = [(place, source) for place, source in candidates(checkpoint) if not anew or place == source]
        self.name = checkpoint.sha256 or key(checkpoint.sources[0])
        self._title = f"{checkpoint.model}:{checkpoint.tag}"
        places = [place for place, _ in self._places if not place.startswith(ELSEWHERE)]
        local = self._others or any(map(is_here, places))
        if not (places or local):
            raise SourceUnavailable(f"{self._title} is not in {cache.root}.{self._bundled()}")
        if (switch := offline()) and not local:
            todo = f"Unset it to fetch the file once.{mirror_note(checkpoint)}{self._bundled() or self._carried()}"
            raise Offline(f"{self._title} is not in {cache.root}, and {switch} forbids the network. {todo}")

    def take(self, use: Callable[[Arrived], T]) -> T:
        """Ask one place after the other, all within one deadline, until one has the file and `use` has taken it.

        Raises:
            NoSpace, CacheNotWritable, BadRecord, ReaderUnavailable: as soon as they come.
            WeightsError: no place delivered; the message has all of them.
        """
        self._deadline = time.monotonic() + patience.PATIENCE.deadline_s
        failures: list[WeightsError] = []
        for copy, source in self._others:
            if (taken := self._perhaps(copy, source, use, "another place")) is not None:
                return taken
        for number, (place, source) in enumerate(self._places, 1):
            try:
                own = place == source
                remote = self._resolved(place, source)
                if (copy := announced_copy(place, remote)) and (taken := self._perhaps(copy, source, use, "")) is not None:
                    return taken
                with self._received(remote, source, own, "" if own else "another place") as arrived:
                    return use(arrived)
            except OURS:
                raise
            except WeightsError as error:
                failures.append(error)
                if number < len(self._places):
                    log.warning("%s Trying %s next.", error, self._places[number][0])
        raise self._together(failures)

    def _perhaps(self, copy: Remote, source: str, use: Callable[[Arrived], T], by: str) -> T | None:
        """Try a copy on this machine: that it is another file, or damaged, is nobody's concern."""
        try:
            with self._received(copy, source, False, by) as arrived:
                return use(arrived)
        except OURS:
            raise
        except WeightsError as error:
            log.info("a copy on this machine is something else: %s", error)
            return None

    @contextlib.contextmanager
    def _received(self, remote: Remote, source: str, own: bool, by: str) -> Generator[Arrived]:
        """Fetch and prove the file; what is left of it when its taker is done goes, and what can be resumed stays."""
        stamp, commit = _stamp(remote.url), remote.commit or self._commit(source)
        require(self._folder, self._row.size_bytes or remote.size_bytes or 0, self._copies)
        part = Part(self._folder, self.name, remote.url, self._row.digest)
        try:
            with bar(self._title, self._progress) as shown:
                fetch(remote, part, self._expected(source, own), shown, self._deadline)
            if self._row.format == "safetensors":
                check_complete(part.path, remote.source)
            yield Arrived(part, remote, source, commit, stamp, "" if self._row.sha256 else by)
        except (SourceUnavailable, KeyboardInterrupt):
            part.release()
            raise
        finally:
            part.discard()

    def _seen(self, source: str) -> dict[str, Any]:
        """Read what the source gave when it was last installed; nothing where the record was corrected since, which outranks it."""
        seen = None if self._anew or source.startswith("file:") else self._cache.ref(source)
        return seen if seen and is_of(seen, self._row) else {}

    def _commit(self, source: str) -> str | None:
        return (self._pin.commit(source) if self._pin else None) or self._seen(source).get("commit")

    def _expected(self, source: str, own: bool) -> Expected:
        """Say who holds the file to which hash and size; a lock that knows more than the record has lent it its hash."""
        row, pin, seen = self._row, self._pin, self._seen(source)
        facts: dict[str, Any] = {"prefix": row.sha256_prefix, "digest": row.digest, "size_bytes": row.size_bytes, "name": key_of(row)}
        if row.sha256_reported and self._anew:  # the user trusts the publisher: what others reported of size and hash holds no more
            facts["size_bytes"] = None
        elif row.sha256_reported and row.reported_by and not pin:
            facts["reported"] = (row.sha256_reported, row.reported_by)
        if pin:
            facts |= {"by": str(pin.path), "most_bytes": pin.entry.size_bytes}
        else:
            facts["most_bytes"] = seen.get("source_size") or None
        if pin and not pin.recorded:
            expected = Expected(installed=row.sha256, **facts)
        else:
            expected = Expected(sha256=row.sha256, installed=seen.get("source_sha256"), **facts)
        # another place that lies is no change upstream
        return expected if own else replace(expected, sha256=expected.sha256 or expected.installed, installed=None)

    def _resolved(self, place: str, source: str) -> Remote:
        """Resolve a place at its pinned commit; where that is gone, the same bytes may still stand on the branch."""
        expected, commit = self._expected(source, place == source), self._commit(source)
        try:
            remote = patiently(lambda: resolve(place, commit), place, deadline=self._deadline)
        except Gone as gone:
            if not expected.installed:
                raise
            try:
                remote = patiently(lambda: resolve(place), place, deadline=self._deadline)
            except Gone as error:
                why = f"there is nothing to get any more: {str(error).removeprefix(f'{place}: ')}"
                raise changed_upstream(place, expected, None, why) from gone
        if expected.installed and remote.sha256 and remote.sha256 != expected.installed:
            raise changed_upstream(place, expected, remote.sha256)
        check_announced(remote, expected.sha256)
        if remote.sha256:
            check_reported(place, expected, remote.sha256)  # before a byte of it comes
        return remote

    def _bundled(self) -> str:
        """Say which file brought it, where a bundle did: then that brings it again."""
        notes = [note for source in self._row.sources if (note := self._cache.ref(source)) and note.get("by") == BUNDLE]
        notes = [note for note in notes if note["source_sha256"] == (self._row.sha256 or note["source_sha256"])]
        if not notes and not any(source.startswith(ELSEWHERE) for source in self._row.sources):
            return ""
        named = next((str(note["bundle"]) for note in notes if note.get("bundle")), None)
        if named is None:
            return " It came in a bundle, unbundle it again: zoo unbundle FILE"
        there = "" if os.path.exists(named) else ", which is not there now: name the file where it is"  # noqa: PTH110  a note may say anything
        return f" It came in a bundle, unbundle it again: zoo unbundle {named}{there}"

    def _carried(self) -> str:
        """Say how the file comes from another machine; nothing of a name that none but this one knows."""
        if not re.fullmatch(TAG, self._row.tag) or all(source.startswith(("file:", "package:")) for source in self._row.sources):
            return ""
        bundle = f"zoo bundle {self._row.model}:{self._row.tag} -o zoo.tar there, zoo unbundle zoo.tar here"
        mirror = "" if os.environ.get("ZOO_MIRROR") else "; or ZOO_MIRROR=FOLDER, which zoo mirror fills"
        return f" From another machine: {bundle}{mirror}."

    def _together(self, failures: list[WeightsError]) -> WeightsError:
        """Make one error of those of all sources; wrong bytes are the gravest, and a switch the easiest to mend."""
        unreached = any(type(failure) is SourceUnavailable for failure in failures)
        note = mirror_note(self._row) + (self._bundled() or (self._carried() if unreached else ""))
        if len(failures) == 1 and not note:
            return failures[0]
        kinds = [type(failure) for failure in failures]
        gravest = [k for k in (ChangedUpstream, HashMismatch, Offline) if k in kinds]
        kind = gravest[0] if gravest else kinds[0] if len(set(kinds)) == 1 else SourceUnavailable
        lines = "".join(f"\n  {type(failure).__name__}: {failure}" for failure in failures)
        error = kind(f"no source delivered {self._title}:{lines}" + (f"\n {note}" if note else ""))
        if isinstance(error, RateLimited):
            error.retry_at = min((f.retry_at for f in failures if isinstance(f, RateLimited) and f.retry_at), default=None)
        return error


def _stamp(url: str) -> list[int] | None:
    """Tell a local file from what it may become later; None of another source, or where there is no such file."""
    if not url.startswith("file:"):
        return None
    try:
        return stamp_of(local_path(url).stat())
    except (OSError, ValueError):
        return None
