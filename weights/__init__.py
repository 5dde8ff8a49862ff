"""Weights that are proven: a registry of checkpoints, one downloader that checks every byte, and a cache that can't hand out wrong ones.

    buffer = open_weights(find("VGG19"), to_safetensors=...)

What the environment can say; it is read at each call:
    ZOO_CACHE           the cache, instead of `kernelzoo` in the user's cache folder; it may be read-only and filled beforehand
    ZOO_OFFLINE=1       no network, and HF_HUB_OFFLINE=1 means the same
    ZOO_MIRROR          a folder or URL that is asked first for a file named as the SHA-256, or as a source's path ends
    ZOO_REGISTRY        folders with further tables, separated as in PATH
    ZOO_USER_REGISTRY   the folder that `add` writes to, instead of `kernelzoo/registry` in the user's configuration folder
    HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY, ... as huggingface_hub and httpx2 read them
"""

from weights.adding import add, remove
from weights.cache import Cache, Installed
from weights.errors import (
    BadRecord,
    CacheNotWritable,
    ConvertError,
    CorruptCache,
    HashMismatch,
    InsecureSource,
    LimitExceeded,
    MalformedFile,
    MissingLibrary,
    NoPretrainedWeights,
    NoSpace,
    Offline,
    ProtocolError,
    RateLimited,
    ReaderCrashed,
    SizeMismatch,
    SourceUnavailable,
    UnknownWeights,
    UnsafeFormat,
    UnsupportedFormat,
    WeightsError,
    WeightsMismatch,
)
from weights.install import get, open_weights, verify, verify_all
from weights.reading import load, read_file
from weights.record import Checkpoint, Preprocessing
from weights.registry import adhoc, checkpoints, find, recognise

__all__ = [
    "BadRecord",
    "Cache",
    "CacheNotWritable",
    "Checkpoint",
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
    "Offline",
    "Preprocessing",
    "ProtocolError",
    "RateLimited",
    "ReaderCrashed",
    "SizeMismatch",
    "SourceUnavailable",
    "UnknownWeights",
    "UnsafeFormat",
    "UnsupportedFormat",
    "WeightsError",
    "WeightsMismatch",
    "add",
    "adhoc",
    "checkpoints",
    "find",
    "get",
    "load",
    "open_weights",
    "read_file",
    "recognise",
    "remove",
    "verify",
    "verify_all",
]
