"""What other tools have fetched already: a file in their caches is a source like any other, and believed only as far as its hash."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weights.record import Checkpoint
from weights.sources import HUB


def elsewhere(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """List files of the Hugging Face cache and of torch.hub's that may be the checkpoint's, as pairs like `candidates`.

    Their bytes are copied and hashed on the way, as those of a download: a hard link would share them with a tool that may write to
    them, and a name proves nothing. So only a row with a full hash, or with a prefix and a size, is looked for.
    """
    if not (checkpoint.sha256 or (checkpoint.sha256_prefix and checkpoint.size_bytes)):
        return
    for source in checkpoint.sources:
        if source.startswith("hf://"):
            places = _hugging_face(source, checkpoint.sha256)
        elif source.startswith(("https://", "http://")):
            places = _torch(source)
        else:
            continue
        for path in places:
            if _may_be(path, checkpoint.size_bytes):
                yield path.absolute().as_uri(), source


def hugging_face_cache() -> Path:
    """Name the Hugging Face cache, by the same variables as its own client and without importing it."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(os.path.expanduser(named)))  # noqa: PTH111  Path's raises for a user who isn't there


def torch_cache() -> Path:
    """Name the folder of torch.hub's downloads, by the same variables as torch and without importing it."""
    home = os.environ.get("TORCH_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/torch"
    return Path(os.path.expanduser(home)) / "hub" / "checkpoints"  # noqa: PTH111


def _hugging_face(source: str, sha256: str | None) -> Iterator[Path]:
    if not (match := HUB.fullmatch(source)):
        return
    folder = hugging_face_cache() / f"models--{match['repo'].replace('/', '--')}"
    if sha256:
        yield folder / "blobs" / sha256  # a large file's is named so
    name = match["file"] or "model.safetensors"
    if ".." not in Path(name).parts:
        yield from sorted((folder / "snapshots").glob(f"*/{_literal(name)}"))


def _torch(source: str) -> Iterator[Path]:
    if (name := unquote(urlsplit(source).path.rpartition("/")[2])) not in ("", ".", "..") and "/" not in name:
        yield torch_cache() / name


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "[*?" else c for c in name)


def _may_be(path: Path, size_bytes: int | None) -> bool:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and 0 < status.st_size == (size_bytes or status.st_size)
