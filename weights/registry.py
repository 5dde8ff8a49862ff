"""The registry: TOML tables, one a checkpoint, become frozen and validated records."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weights.errors import BadRecord, NoPretrainedWeights, UnknownWeights

SHIPPED = Path(__file__).parent / "registry"
FORMATS = ("safetensors", "pytorch")
SCHEMES = ("hf", "https", "file", "package")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
TAG = r"[A-Za-z0-9][A-Za-z0-9_.+-]*"


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
    """

    resize: int | None
    crop: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channel_order: str = "rgb"

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise BadRecord(f"interpolation is one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.channel_order not in ("rgb", "bgr"):
            raise BadRecord(f'channel_order is "rgb" or "bgr", got {self.channel_order!r}')
        if not self.mean or len(self.mean) != len(self.std):
            raise BadRecord(f"mean and std need one number per channel each, got {self.mean} and {self.std}")
        if any(s <= 0 for s in self.std):
            raise BadRecord(f"std must be positive, got {self.std}")
        for name in ("resize", "crop"):
            if (side := getattr(self, name)) is not None and side <= 0:
                raise BadRecord(f"{name} is a number of pixels, got {side}")
        if self.resize is not None and self.crop is not None and self.resize < self.crop:
            raise BadRecord(f"a crop of {self.crop} pixels does not fit an image resized to {self.resize}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that is known of one set of weights.

    Attributes:
        model: the variant's class name, "ResNet50".
        tag: the name of this checkpoint among the variant's, "imagenet1k_v2".
        sources: URLs that serve the same bytes, tried in order: hf://org/repo[@revision]/file, https://, file://, package:path.
        format: of the file that the sources serve, "safetensors" or "pytorch".
        names: the naming of its tensors, a table of `convert.names`.
        num_classes: width of its classifier; 0 in an `adhoc` record that was not told.
        preprocessing: what `metrics` were measured with.
        license: SPDX identifier, or "unstated".
        provenance: how these facts were learnt.
        default: whether `trained(model)` takes this one.
        sha256: of the file that the sources serve, 64 hex digits, where it is publicly known.
        sha256_prefix: the first hex digits, where only those are known.
        size_bytes: of the file that the sources serve.
        labels: the name of the list of labels, "imagenet1k" or "cifar10"; None where the classes are not known.
        metrics: percentages, {"top1": 80.858, "top5": 95.434}, under `preprocessing`.
        metrics_data: the images that they were measured on.
        options: constructor keywords without which these weights compute something else.
        recipe: link to, or name of, how it was trained.
        params: trainable parameters that the publisher states.
        gmacs: multiply-accumulates of one image that the publisher states, in 10^9.
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
    labels: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    params: int | None = None
    gmacs: float | None = None


def checkpoints(model: str | None = None) -> tuple[Checkpoint, ...]:
    """List the records of one model, or all: the shipped ones, those in the folders of ZOO_REGISTRY, and the user's own.

    Raises:
        BadRecord: a table is incomplete or contradicts itself or another; the message names file, table and key.
    """
    named = re.compile(rf"\b{re.escape(model or '')}\b")
    rows = _rows(lambda text: named.search(text) is not None)
    seen: dict[tuple[str, str], str] = {}
    defaults: dict[str, list[str]] = {}
    for row, place in rows:
        if other := seen.get((row.model, row.tag)):
            raise BadRecord(f"{place}: {other} has the same name; rename one of them.")
        seen[row.model, row.tag] = place
        defaults.setdefault(row.model, []).extend([place] if row.default else [])
    for name, places in defaults.items():
        if len(places) != 1 and model in (None, name):
            tags = ", ".join(tag for m, tag in seen if m == name)
            raise BadRecord(
                f"{name} needs one table with default = true, " + (f"got {' and '.join(places)}." if places else f"among {tags}.")
            )
    return tuple(row for row, _ in rows if model in (None, row.model))


def find(model: str, tag: str | None = None) -> Checkpoint:
    """Look up one record; without a tag, the model's default.

    Raises:
        NoPretrainedWeights: no record is of this model.
        UnknownWeights: it has records and none of this tag; the message lists theirs, the nearest first.
    """
    rows = {row.tag: row for row in checkpoints(model)}
    if not rows:
        raise NoPretrainedWeights(
            f"no checkpoint of {model} is in the registry; import a file with: zoo add FILE --model {model} --tag mine"
        )
    if tag is None:
        return next(row for row in rows.values() if row.default)
    if tag not in rows:
        nearest = difflib.get_close_matches(tag, rows, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
        raise UnknownWeights(f"{model} has no checkpoint {tag!r}{hint} It has: {', '.join(rows)}.")
    return rows[tag]


def recognise(sha256: str) -> Checkpoint | None:
    """Find the record whose file has this SHA-256; where only a prefix of it is public, the prefix decides."""
    rows = [row for row, _ in _rows(lambda text: sha256 in text or any(sha256.startswith(p) for p in _PREFIX.findall(text)))]
    full = (row for row in rows if row.sha256 == sha256)
    prefix = (row for row in rows if row.sha256 is None and row.sha256_prefix and sha256.startswith(row.sha256_prefix))
    return next(full, None) or next(prefix, None)


def adhoc(model: str, source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that the user names and no registry knows.

    Args:
        model: the variant's class name.
        source: hf://org/repo[@revision][/file], https://..., file://... or a path.
        **facts: fields of `Checkpoint` that are known; the others say that they are not: `names` is "auto", `num_classes` 0,
            the licence "unstated", and the preprocessing is ImageNet's usual one (256, 224, bilinear).

    Raises:
        BadRecord: a fact has the wrong name or type, or the source is of no allowed kind.
    """
    url = source if _SCHEME.match(source) else Path(source).expanduser().absolute().as_uri()
    last = url.partition("?")[0].rsplit("/", 1)[-1]
    safe = last.endswith(".safetensors") or (url.startswith("hf://") and url.removeprefix("hf://").count("/") == 1)
    usual = {"resize": 256, "crop": 224, "interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    table = {
        "sources": [url],
        "format": "safetensors" if safe else "pytorch",
        "names": "auto",
        "num_classes": 0,
        "license": "unstated",
        "provenance": "named by the user; the preprocessing is assumed, not known",
        "preprocessing": usual,
    }
    tag = facts.pop("tag", source)
    return record(model, tag, table | facts, f"the record of {source}")


def user_folder() -> Path:
    """The folder that `zoo add` writes to: ZOO_USER_REGISTRY, else `kernelzoo/registry` beside the user's other configuration."""
    if named := os.environ.get("ZOO_USER_REGISTRY"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_config_path

    return user_config_path("kernelzoo", appauthor=False) / "registry"


_PREFIX = re.compile(r'^sha256_prefix\s*=\s*"([0-9a-f]{6,64})"', re.MULTILINE)
_SCHEME = re.compile(r"(?:[a-z][a-z0-9+.-]*://|package:)", re.IGNORECASE)
_FIELDS = {f.name: f for f in fields(Checkpoint) if f.name not in ("model", "tag")}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple": (list, tuple),
    "Mapping": (dict,),
}


def record(model: str, tag: str, table: Mapping[str, Any], place: str) -> Checkpoint:
    """Validate one table into a record.

    Args:
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.
        table: the fields of `Checkpoint` as TOML has them: arrays are lists, `preprocessing` is a table.
        place: where the table stands, for the messages.

    Raises:
        BadRecord: a key is unknown, missing or of the wrong type, or two facts contradict each other.
    """
    try:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", model):
            raise BadRecord(f"{model!r} is no class name")
        facts = _typed(table, _FIELDS, "")
        if not isinstance(facts["preprocessing"], Preprocessing):
            steps = _typed(facts["preprocessing"], {f.name: f for f in fields(Preprocessing)}, "preprocessing.")
            facts["preprocessing"] = Preprocessing(**steps)
        row = Checkpoint(model=model, tag=tag, **facts)
        _consistent(row)
    except BadRecord as error:
        raise BadRecord(f"{place}: {error}") from None
    return row


def _typed(table: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise BadRecord(
                f"unknown key {prefix + key!r}; " + (f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}.")
            )
        allowed, _, item = str(known[key].type).partition(" | ")[0].partition("[")
        kinds = _TYPES.get(allowed, (dict, Preprocessing))
        if value is None and known[key].default is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRecord(f"{prefix + key} is a {known[key].type}, got {value!r}")
        if isinstance(value, (list, tuple)):
            kinds = _TYPES[item.split(",")[0]]
            if not value or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in value):
                raise BadRecord(f"{prefix + key} is a {known[key].type} with at least one entry, got {value!r}")
            value = tuple(value)
        facts[key] = value
    needed = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING} - {"resize", "crop"}
    if absent := [prefix + name for name in known if name in needed - set(facts)]:
        raise BadRecord(f"{', '.join(absent)} missing" + ('; a licence that nobody states is "unstated"' if "license" in absent else ""))
    return ({"resize": None, "crop": None} if prefix else {}) | facts


def _consistent(row: Checkpoint) -> None:
    if row.format not in FORMATS:
        raise BadRecord(f"format is one of {', '.join(FORMATS)}, got {row.format!r}")
    for source in row.sources:
        scheme = source.partition(":")[0]
        loopback = scheme == "http" and urlsplit(source).hostname in ("127.0.0.1", "localhost", "::1")
        if scheme not in SCHEMES and not loopback:
            raise BadRecord(f"a source starts with one of {', '.join(SCHEMES)}, got {source!r}")
        if scheme == "package" and row.format != "safetensors":
            raise BadRecord(f"{source} ships with the package and must be safetensors")
        if scheme == "package" and row.sha256 is None:
            raise BadRecord(f"{source} ships with the package and needs its sha256")
    if row.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", row.sha256):
        raise BadRecord(f"sha256 is 64 lower-case hex digits, got {row.sha256!r}; where only the first are known, say sha256_prefix")
    if row.sha256_prefix is not None and not re.fullmatch(r"[0-9a-f]{6,64}", row.sha256_prefix):
        raise BadRecord(f"sha256_prefix is 6 to 64 lower-case hex digits, got {row.sha256_prefix!r}")
    if row.sha256 and row.sha256_prefix and not row.sha256.startswith(row.sha256_prefix):
        raise BadRecord(f"sha256 {row.sha256} does not start with sha256_prefix {row.sha256_prefix}")
    for name in ("size_bytes", "params", "gmacs"):
        if (count := getattr(row, name)) is not None and not count > 0:
            raise BadRecord(f"{name} is positive, got {count}")
    if row.num_classes < 0:
        raise BadRecord(f"num_classes is positive, got {row.num_classes}")
    for name, value in row.metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise BadRecord(f"metrics.{name} is a percentage, 0 to 100, got {value!r}")
    if row.metrics and not row.metrics_data:
        raise BadRecord("metrics mean nothing without metrics_data, the images that they were measured on")


def _folders() -> Iterator[tuple[Path, bool]]:
    yield SHIPPED, True
    for folder in filter(None, os.environ.get("ZOO_REGISTRY", "").split(os.pathsep)):
        if not (path := Path(folder).expanduser()).is_dir():
            raise BadRecord(f"ZOO_REGISTRY names {folder}, which is no folder")
        yield path, False
    yield user_folder(), False


def _rows(wanted: Callable[[str], bool]) -> list[tuple[Checkpoint, str]]:
    """All records of the files whose text is `wanted`; of shipped files, whose style a test keeps, only of the wanted tables."""
    rows: list[tuple[Checkpoint, str]] = []
    for folder, ours in _folders():
        for path in sorted(folder.glob("*.toml")):
            stat = path.stat()
            text = _text(path, stat.st_mtime_ns, stat.st_size)
            if wanted(text):
                parts = [t for t in re.split(r"^(?=\[)", text, flags=re.MULTILINE) if wanted(t)] if ours else [text]
                rows += [row for part in parts for row in _parse(part, path)]
    return rows


@lru_cache(maxsize=256)
def _text(path: Path, mtime_ns: int, size_bytes: int) -> str:
    del mtime_ns, size_bytes  # in the key: a file that changed is read again
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecord(f"{path}: {error}") from error


@lru_cache(maxsize=1024)
def _parse(text: str, path: Path) -> tuple[tuple[Checkpoint, str], ...]:
    try:
        models = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRecord(f"{path}: {error}") from error
    rows = []
    for model, tables in models.items():
        for tag, table in tables.items() if isinstance(tables, dict) else ((None, None),):
            place = f"{path} [{model}.{tag}]"
            if not isinstance(table, dict):
                raise BadRecord(f"{path}: {model} holds no tables; a checkpoint is a table [{model}.tag]")
            if not re.fullmatch(TAG, str(tag)):
                raise BadRecord(f"{place}: a tag is letters, digits and _ . + -, got {tag!r}")
            rows.append((record(model, str(tag), table, place), place))
    return tuple(rows)
