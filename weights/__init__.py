"""Weights that are proven: a registry of checkpoints, one downloader that checks every byte, and a cache that can't hand out wrong ones.

    buffer = open_weights(find("VGG19"), to_safetensors=...)

What the environment can say; it is read at each call:
    ZOO_CACHE           the cache, instead of `kernelzoo` in the user's cache folder; it may be read-only and filled beforehand
    ZOO_OFFLINE=1       no network, and HF_HUB_OFFLINE=1 means the same
    ZOO_MIRROR          a folder or URL that is asked first for a file named as the SHA-256, or as a source's path ends; http:// in the
                        local network is asked only by the full SHA-256
    ZOO_REGISTRY        folders with further tables, separated as in PATH
    ZOO_USER_REGISTRY   the folder that `add` writes to, instead of `own/registry` in the folder of ZOO_CACHE where that is set, else
                        `kernelzoo/registry` in the user's configuration folder; the user's own lock lies beside it
    ZOO_FROZEN=1        only what a record or a lock has a full hash of, hashed again at each load; nothing new is pinned
    HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY, ... as huggingface_hub and httpx2 read them

Nothing is loaded before it is asked for: TAB and a damaged cache's messages need no downloader.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weights.adding import add, remove
    from weights.cache import Cache, Installed
    from weights.collecting import Collected, Removed, gc
    from weights.errors import (
        BadLock,
        BadRecord,
        BadSignature,
        CacheNotWritable,
        CallRefused,
        ChangedUpstream,
        ConvertError,
        CorruptCache,
        HashMismatch,
        InsecureSource,
        LimitExceeded,
        MalformedFile,
        MissingLibrary,
        NonFinite,
        NoPretrainedWeights,
        NoSpace,
        NoSuchFile,
        NotLocked,
        Offline,
        OutputsDiffer,
        ProtocolError,
        RateLimited,
        ReaderCrashed,
        ReaderUnavailable,
        SizeMismatch,
        SourceUnavailable,
        UnknownWeights,
        UnsafeFormat,
        UnsupportedFormat,
        WeightsError,
        WeightsMismatch,
    )
    from weights.install import Verified, get, open_weights, verify, verify_all
    from weights.reading import load, read_file
    from weights.record import Checkpoint, Preprocessing
    from weights.registry import adhoc, checkpoints, find, recognise

__all__ = [
    "BadLock",
    "BadRecord",
    "BadSignature",
    "Cache",
    "CacheNotWritable",
    "CallRefused",
    "ChangedUpstream",
    "Checkpoint",
    "Collected",
    "ConvertError",
    "CorruptCache",
    "HashMismatch",
    "InsecureSource",
    "Installed",
    "LimitExceeded",
    "MalformedFile",
    "MissingLibrary",
    "NoPretrainedWeights",
    "NoSpace",
    "NoSuchFile",
    "NonFinite",
    "NotLocked",
    "Offline",
    "OutputsDiffer",
    "Preprocessing",
    "ProtocolError",
    "RateLimited",
    "ReaderCrashed",
    "ReaderUnavailable",
    "Removed",
    "SizeMismatch",
    "SourceUnavailable",
    "UnknownWeights",
    "UnsafeFormat",
    "UnsupportedFormat",
    "Verified",
    "WeightsError",
    "WeightsMismatch",
    "add",
    "adhoc",
    "checkpoints",
    "find",
    "gc",
    "get",
    "load",
    "open_weights",
    "read_file",
    "recognise",
    "remove",
    "verify",
    "verify_all",
]

_PLACES = {
    "adding": "add remove",
    "cache": "Cache Installed",
    "collecting": "Collected Removed gc",
    "install": "Verified get open_weights verify verify_all",
    "reading": "load read_file",
    "record": "Checkpoint Preprocessing",
    "registry": "adhoc checkpoints find recognise",
}
_PLACE = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for; what `_PLACES` does not have is an error's class."""
    if name not in __all__:
        raise AttributeError(f"module 'weights' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"weights.{_PLACE.get(name, 'errors')}"), name)
    return found
