"""Checkpoints in shards: a JSON file, `model.safetensors.index.json`, says which tensor lies in which file beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from convert.kinds import is_dict
from convert.source import Source, Stored
from weights.documents import read_json
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

MAX_INDEX_BYTES = 64 * 2**20
MAX_SHARDS = 10_000


def sniff(head: bytes, ending: bytes) -> bool:
    """Tell an index of shards whose names end so."""
    return head.lstrip()[:1] == b"{" and b'"weight_map"' in head and ending + b'"' in head


def read(path: Path, opened: Callable[[Path], Source]) -> Source:
    """Read what an index describes.

    Args:
        path: the index.
        opened: opens one shard.

    Raises:
        MalformedFile: it is no index, a shard is not beside it, or lacks a tensor that the index promises.
        UnsafeFormat: it names a file in another folder.
        LimitExceeded: it is longer than any index, or names more shards.
    """
    places = listed(path)
    files = list(dict.fromkeys(places.values()))
    if absent := [name for name in files if not path.with_name(name).is_file()]:
        raise MalformedFile(f"{path} names {absent[0]}, which is not beside it. Fetch all {len(files)} shards")
    sources: dict[str, Source] = {}

    def close() -> None:
        for source in sources.values():
            source.close()

    try:
        for name in files:
            sources[name] = opened(path.with_name(name))
        tensors: dict[str, Stored] = {}
        for name, file in places.items():
            if name not in sources[file].tensors:
                raise MalformedFile(f"{path} says that {name!r:.100} is in {file}, and it is not. Fetch both anew, of the same version")
            tensors[name] = sources[file].tensors[name]
    except BaseException:
        close()
        raise
    first = sources[files[0]]
    return Source(path, first.format, first.framework, tensors, facts={"shards": str(len(files))}, close=close)


def listed(path: Path) -> dict[str, str]:
    """List which tensor lies in which file; raises as `read` does."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise LimitExceeded(f"{path}: {path.stat().st_size} bytes of an index of shards; at most {MAX_INDEX_BYTES} are read")
    told = read_json(path.read_text("utf-8", "surrogateescape"), f"the index of shards {path}", "Fetch it again")
    found = told.get("weight_map") if is_dict(told) else None
    if not is_dict(found) or not found:
        raise MalformedFile(f"{path} has no weight_map; an index of shards has one")
    places: dict[str, str] = {}
    for name, file in found.items():
        if not isinstance(name, str) or not isinstance(file, str):
            raise MalformedFile(f"{path}: its weight_map has something else than names")
        if Path(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise UnsafeFormat(f"{path} names the file {file!r:.100}; only files in its own folder are opened")
        if file.endswith(".json"):
            raise MalformedFile(f"{path} names {file!r:.100} as a shard; shards hold tensors, and an index none")
        places[name] = file
    if (count := len(set(places.values()))) > MAX_SHARDS:
        raise LimitExceeded(f"{path} names {count} shards; at most {MAX_SHARDS} are read")
    return places
