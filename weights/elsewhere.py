"""What other tools have fetched already: a file in their caches is a source like any other, and believed only as far as its hash."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from weights.places import file_name
from weights.record import Checkpoint
from weights.sources import HUB, Remote, offline

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def elsewhere(checkpoint: Checkpoint) -> Iterator[tuple[Remote, str]]:
    """List files of the Hugging Face cache and of torch.hub's that may be the checkpoint's, each with the source whose it is.

    Their bytes are copied and hashed on the way, as those of a download: a hard link would share them with a tool that may write to
    them. What judges them is the hash that the record or a lock has, be it only its first digits; a name proves nothing. Where none
    is known, the Hub is asked for it (`announced_copy`), and without a network a large file must hash to the name that the Hub's own
    client gave it by the Hub's word.
    """
    known = checkpoint.sha256 or checkpoint.sha256_prefix
    for source in checkpoint.sources:
        if source.startswith("hf://") and (known or offline()):
            found = _hugging_face(source, known)
        elif source.startswith(("https://", "http://")) and (known or checkpoint.published):
            found = _torch(source)
        else:
            continue
        for path, commit, sha256 in found:
            if _may_be(path, checkpoint.size_bytes):
                url = path.absolute().as_uri()
                yield Remote.at(url, url, commit=commit, sha256=sha256), source


def announced_copy(place: str, remote: Remote) -> Remote | None:
    """Find the very file that the Hub announces where its own client has put it: a large file is named by its SHA-256 there."""
    if not remote.sha256 or not (match := HUB.fullmatch(place)):
        return None
    path = _repository(match["repo"]) / "blobs" / remote.sha256
    url = path.absolute().as_uri()
    return Remote.at(url, url, commit=remote.commit, sha256=remote.sha256) if _may_be(path, remote.size_bytes) else None


def hugging_face_cache() -> Path:
    """Name the Hugging Face cache, by the same variables as its own client and without importing it."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(os.path.expanduser(named)))  # noqa: PTH111  Path's raises for a user who isn't there


def torch_cache() -> Path:
    """Name the folder of torch.hub's downloads, by the same variables as torch and without importing it."""
    home = os.environ.get("TORCH_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/torch"
    return Path(os.path.expanduser(home)) / "hub" / "checkpoints"  # noqa: PTH111


def _repository(name: str) -> Path:
    return hugging_face_cache() / f"models--{name.replace('/', '--')}"


def _hugging_face(source: str, known: str | None) -> Iterator[tuple[Path, str | None, str | None]]:
    """List (file, commit, the hash that its name claims), of every commit where a hash is known, else of the one that is meant."""
    if not (match := HUB.fullmatch(source)):
        return
    folder, name = _repository(match["repo"]), match["file"] or "model.safetensors"
    seen = {known}
    if known and _SHA256.fullmatch(known):
        yield folder / "blobs" / known, None, known
    if ".." in Path(name).parts:
        return
    commit = "*" if known else _commit(folder, unquote(match["revision"] or "main"))
    for path in sorted((folder / "snapshots").glob(f"{commit}/{glob.escape(name)}")) if commit else ():
        try:
            stored = path.resolve(strict=True)
        except (OSError, RuntimeError):  # a link that leads nowhere, or in a circle
            continue
        claimed = stored.name if _SHA256.fullmatch(stored.name) else None
        if claimed not in seen and (claimed.startswith(known or "") if claimed else known):
            seen |= {claimed} if claimed else set()
            at = path.relative_to(folder / "snapshots").parts[0]
            yield path, at if _COMMIT.fullmatch(at) else None, claimed


def _commit(folder: Path, revision: str) -> str | None:
    """Look up where a branch stood when the Hub's client last asked."""
    if _COMMIT.fullmatch(revision) or ".." in Path(revision).parts:
        return revision if _COMMIT.fullmatch(revision) else None
    try:
        found = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return found if _COMMIT.fullmatch(found) else None


def _torch(source: str) -> Iterator[tuple[Path, None, None]]:
    if (name := unquote(file_name(source))) not in ("", ".", "..") and "/" not in name:
        yield torch_cache() / name, None, None


def _may_be(path: Path, size_bytes: int | None) -> bool:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and 0 < status.st_size == (size_bytes or status.st_size)
