"""What can go wrong with weights: every error names the source, what was expected, what came, and what to do."""

from collections.abc import Sequence
from datetime import datetime


class WeightsError(Exception):
    """The base of every error of the weight manager.

    Example:
        >>> try:
        ...     find("ResNet50", "nothing")
        ... except WeightsError as error:
        ...     print(type(error).__name__)
        UnknownWeights
    """


class UnknownWeights(WeightsError, LookupError):
    """No record or no source answers to that name."""


class NoPretrainedWeights(WeightsError, LookupError):
    """The network is known and no checkpoint of it is."""


class BadRecord(WeightsError, ValueError):
    """A registry table is incomplete or contradicts itself."""


class SourceUnavailable(WeightsError, OSError):
    """No source could deliver: unreachable, refused, missing, or too slow."""


class NoSuchFile(SourceUnavailable, FileNotFoundError):
    """A file or folder that was named is not there."""


class RateLimited(SourceUnavailable):
    """The server asks to wait longer than we are willing to.

    Attributes:
        retry_at: when it is willing to be asked again.
    """

    retry_at: datetime | None = None


class Offline(SourceUnavailable):
    """The bytes are not in the cache and ZOO_OFFLINE or HF_HUB_OFFLINE forbids the network."""


class InsecureSource(WeightsError, ValueError):
    """A URL or a redirect leaves https, or leads to a place that is not allowed."""


class ProtocolError(WeightsError, OSError):
    """The server's answer makes no sense, a login page instead of a file for example."""


class HashMismatch(WeightsError, ValueError):
    """The bytes are not the ones that the record names."""


class ChangedUpstream(HashMismatch):
    """A source serves other bytes than those that a lock, or its first install here, holds it to.

    Attributes:
        pinned: the SHA-256 that it must have.
        found: the one that it has now; None where nothing is there any more, or more bytes than were pinned, which don't come.
    """

    pinned: str = ""
    found: str | None = None


class BadLock(WeightsError, ValueError):
    """A lock file is damaged, was edited by hand, or is older than one that was seen before."""


class NotLocked(UnknownWeights):
    """No lock has a full hash of the weights, and no new entries are admitted."""


class SizeMismatch(WeightsError, ValueError):
    """There are more or fewer bytes than announced."""


class CorruptCache(WeightsError, OSError):
    """A cached file changed after its install and can't be fetched again now."""


class NoSpace(WeightsError, OSError):
    """The disk is full."""


class CacheNotWritable(WeightsError, OSError):
    """The cache folder can't be written, and the file is not in it."""


class ConvertError(WeightsError, ValueError):
    """A weight file can't be read, written or converted."""


class MalformedFile(ConvertError):
    """A weight file violates its format."""


class NonFinite(MalformedFile):
    """A weight is NaN or infinite.

    Attributes:
        tensor: its name in the file.
    """

    tensor: str = ""


class LimitExceeded(MalformedFile):
    """A weight file asks for more memory, tensors or dimensions than any network needs."""


class UnsafeFormat(ConvertError):
    """A weight file could run code, and is therefore not opened."""


class UnsupportedFormat(ConvertError):
    """No reader knows this kind of file."""


class ReaderCrashed(ConvertError):
    """The process that read a foreign file was brought down by it.

    Attributes:
        path: the file.
        signal: what it died of, "SIGSEGV"; None if of none.
        limit: the limit that ended it, in words; None if none did.
    """

    path: str = ""
    signal: str | None = None
    limit: str | None = None


class CallRefused(ConvertError):
    """The process that read a foreign file was refused a system call that its reader, or whoever took it over, asked for.

    Attributes:
        path: the file.
    """

    path: str = ""


class ReaderUnavailable(WeightsError, OSError):
    """No process could be started here to read a foreign file: the machine's fault, and not the file's."""


class MissingLibrary(ConvertError, ImportError):
    """The library that reads or writes this format is not installed."""


class OutputsDiffer(WeightsError, ValueError):
    """A network computes something else here than where its bundle was written."""


class BadSignature(WeightsError, ValueError):
    """A signature is missing, of another key, or of other files."""


class WeightsMismatch(WeightsError, ValueError):
    """A file's tensors are not the network's.

    Attributes:
        missing: names that the network needs and the file has not.
        unexpected: names that the file has and the network not.
        misshaped: (name, shape in the file, shape in the network).
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    misshaped: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = ()
