"""The registry: TOML tables, one a checkpoint, become frozen and validated records."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from weights.addresses import Address
from weights.arguments import did_you_mean
from weights.documents import read_toml
from weights.errors import BadRecord, NoPretrainedWeights, UnknownWeights
from weights.places import at_home, cache_folder
from weights.record import Alternative, Checkpoint, Preprocessing, record
from weights.regular import read_regular

log = logging.getLogger("weights")
SHIPPED = Path(__file__).parent / "registry"
NOWHERE = Path(os.devnull, "kernelzoo", "registry")
"""Stands for a folder that can't be entered: nothing is ever found in it, and nothing can be written."""
MOST_BYTES = 1 << 20
"""The longest table of records that is read."""
TAG = r"[A-Za-z0-9][A-Za-z0-9_.+-]*"


@dataclass(frozen=True, slots=True)
class Located:
    """A record and where it stands; the lower the rank, the more its default counts: the user's own 0, the shipped last."""

    row: Checkpoint
    path: Path
    rank: int

    def __str__(self) -> str:
        return f"{self.path} [{self.row.model}.{self.row.tag}]"


def checkpoints(model: str | None = None) -> tuple[Checkpoint, ...]:
    """List the records of one model, or all: the shipped ones, those in the folders of ZOO_REGISTRY, and the user's own.

    `default` is true of the one that `find(model)` returns, and of none where that raises. Of two records with one name
    the first is listed, and a warning tells of the other.

    Raises:
        BadRecord: a table is incomplete or contradicts itself; the message names file, table and key.
        InsecureSource: so it does, for a source with http:// on another machine.

    Example:
        >>> [row.tag for row in checkpoints("VGG19")][:2]
        ['imagenet1k_v1', 'tv_in1k']
    """
    return _merged(located(model))


def find(model: str, tag: str | None = None) -> Checkpoint:
    """Look up one record; without a tag, the model's default.

    The user's own default goes before those of ZOO_REGISTRY, in the order of its folders, and these before the shipped one;
    a model's only checkpoint needs no mark.

    Args:
        model: the network's name.
        tag: in any case, IMAGENET1K_V2 for imagenet1k_v2; of two tags that differ in case alone, the one that is spelt so.

    Raises:
        NoPretrainedWeights: no record is of this model.
        UnknownWeights: it has records and none of this tag, the message lists theirs, the nearest first; or no tag was given
            and none is the default.
        BadRecord: two tables have this name, or no tag was given and one folder has several defaults; the message names both.

    Example:
        >>> find("ResNet50", "IMAGENET1K_V2").tag
        'imagenet1k_v2'
    """
    rows = located(model)
    if not rows:
        raise NoPretrainedWeights(f"no checkpoint of {model} is in the registry; import a file with: zoo add FILE {model}:mine")
    tag = _default_tag(rows) if tag is None else tag
    same = [one for one in rows if one.row.tag == tag] or [one for one in rows if one.row.tag.lower() == tag.lower()]
    if not same:
        tags = list(dict.fromkeys(one.row.tag for one in rows))
        hint = did_you_mean(tag, tags, count=3, cutoff=0.4) or "."
        raise UnknownWeights(f"{model} has no checkpoint {tag!r}{hint} It has: {', '.join(tags)}.")
    if len(same) > 1:
        raise BadRecord(f"{' and '.join(map(str, same))} have the same name; rename one of them.")
    return next(row for row in _merged(rows) if row.tag == same[0].row.tag)


def located(model: str | None = None) -> list[Located]:
    """List all tables of one model, or all, as they stand; raises as `checkpoints` does."""
    if model is None:
        return _rows(lambda text: True)
    named = re.compile(rf"\b{re.escape(model)}\b")
    return [one for one in _rows(lambda text: model in text and named.search(text) is not None) if one.row.model == model]


def _merged(rows: list[Located]) -> tuple[Checkpoint, ...]:
    kept: dict[tuple[str, str], Located] = {}
    models: dict[str, list[Located]] = {}
    for one in rows:
        models.setdefault(one.row.model, []).append(one)
        if (first := kept.setdefault((one.row.model, one.row.tag), one)) is not one:
            log.warning("%s is left out: %s has the same name; rename one of them", one, first)
    defaults: set[tuple[str, str]] = set()
    for model, ones in models.items():
        with contextlib.suppress(BadRecord, UnknownWeights):  # `find` raises them, the list has no default
            defaults.add((model, _default_tag(ones)))
    marked = ((one.row, name in defaults) for name, one in kept.items())
    return tuple(row if row.default == default else replace(row, default=default) for row, default in marked)


def _default_tag(rows: list[Located]) -> str:
    model, marked = rows[0].row.model, [one for one in rows if one.row.default]
    first = [one for one in marked if one.rank == min(other.rank for other in marked)]
    if len(first) > 1:
        raise BadRecord(f"{model} has several defaults, {' and '.join(map(str, first))}: keep default = true in one, or name a tag.")
    tags = list(dict.fromkeys(one.row.tag for one in first or rows))
    if len(tags) > 1:
        raise UnknownWeights(f"none of the checkpoints of {model} is the default; name one: {', '.join(tags)}.")
    return tags[0]


def recognise(
    sha256: str, by: Callable[[str], str] | None = None, *, model: str | None = None, format: str | None = None
) -> Checkpoint | None:
    """Find the record whose file has this SHA-256; where only a prefix of it is public, the prefix decides.

    Args:
        sha256: of the file.
        by: hashes the file by the algorithm of another digest and writes it as that is written, for publishers who state no SHA-256;
            it is called only where no record has the SHA-256.
        model, format: of the file, where they are known: records of others are then not asked for another digest.

    Example:
        >>> row = recognise(find("ResNet20").sha256)
        >>> f"{row.model}:{row.tag}"
        'ResNet20:cifar10'
    """
    rows = [one.row for one in _rows(lambda text: sha256 in text or any(sha256.startswith(p) for p in _PREFIX.findall(text)))]
    full = (row for row in rows if row.sha256 == sha256)
    prefix = (row for row in rows if row.sha256 is None and row.sha256_prefix and sha256.startswith(row.sha256_prefix))
    known = next(full, None) or next(prefix, None)
    if known is not None or by is None:
        return known
    weak = [one.row for one in _rows(lambda text: _DIGEST.search(text) is not None) if one.row.digest]
    weak = [row for row in weak if model in (None, row.model) and format in (None, row.format)]
    found = {algorithm: by(f"{algorithm}:") for algorithm in dict.fromkeys((row.digest or "").partition(":")[0] for row in weak)}
    return next((row for row in weak if any(one.startswith(row.digest or "-") for one in found.values())), None)


def adhoc(model: str, source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that the user names and no registry knows.

    Args:
        model: the variant's class name.
        source: hf://org/repo[@revision][/file], https://..., file://... or a path.
        **facts: fields of `Checkpoint` that are known; the others say that they are not: `names` is "auto", `num_classes` 0,
            the licence "unstated", and the preprocessing is ImageNet's usual one (256, 224, bilinear).

    Raises:
        BadRecord: a fact has the wrong name or type, or the source is of no allowed kind.
        InsecureSource: the source is http:// on another machine.

    Example:
        >>> adhoc("ResNet50", "hf://acme/wheels/model.safetensors", num_classes=4).license
        'unstated'
    """
    url = Address(source if _SCHEME.match(source) else at_home(source).absolute().as_uri())
    last = url.bare.rsplit("/", 1)[-1]
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
    return record(model, tag, table | facts, f"the record of {Address(source)}", classes_known=False)


def user_folder() -> Path:
    """The folder that `zoo add` writes to, see `named_folder`; one that can't exist where that can't be read.

    Raises:
        BadRecord: ZOO_USER_REGISTRY names it, and it can't be read.
    """
    folder = named_folder()
    if os.environ.get("ZOO_USER_REGISTRY"):
        _there("ZOO_USER_REGISTRY", folder)
        return folder
    try:
        folder.stat()
        os.scandir(folder).close()
    except (PermissionError, NotADirectoryError):  # HOME is another user's, as in a container that runs as `--user 1000`, or no folder
        _warn_of_home(folder)
        return NOWHERE
    except OSError:
        pass
    if folder.is_absolute():
        return folder
    _warn_of_home(folder)  # a "~" that nobody could resolve
    return NOWHERE


def named_folder() -> Path:
    """Name the folder for the user's own records, whether it can be entered or not: ZOO_USER_REGISTRY, else `own/registry` in the folder
    that ZOO_CACHE names, for there lie their weights, else `kernelzoo/registry` beside the user's other configuration.
    """
    if named := os.environ.get("ZOO_USER_REGISTRY"):
        return _expanded("ZOO_USER_REGISTRY", named)
    if os.environ.get("ZOO_CACHE"):
        return cache_folder() / "own" / "registry"
    from platformdirs import user_config_path

    try:
        return user_config_path("kernelzoo", appauthor=False) / "registry"
    except RuntimeError:  # this user has no home at all
        return Path("~", ".config", "kernelzoo", "registry")


def _there(variable: str, folder: Path) -> bool:
    """Whether a folder that a variable names is there; one that can't be read is an error, not an empty one."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise BadRecord(
            f"{variable} names {folder}, which can't be read ({error.strerror}): set it to a folder that you may read."
        ) from error
    return True


def _expanded(variable: str, named: str) -> Path:
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:
        raise BadRecord(f"{variable} names {named}, and there is no such home: set it to a folder.") from error


@lru_cache(maxsize=1)
def _warn_of_home(folder: Path) -> None:
    switch = "ZOO_CACHE" if os.environ.get("ZOO_CACHE") else "HOME"
    log.warning("%s can't be entered: nothing of your own is read or kept there; set %s, or ZOO_USER_REGISTRY to a folder", folder, switch)


_PREFIX = re.compile(r'^sha256_prefix\s*=\s*"([0-9a-f]{6,64})"', re.MULTILINE)
_DIGEST = re.compile(r'^digest\s*=\s*"', re.MULTILINE)
_HEAD = re.compile(r"\[([A-Za-z]\w*)\.([\w+-]+)\]\n")
_SCHEME = re.compile(r"(?:[a-z][a-z0-9+.-]*://|package:)", re.IGNORECASE)


def _folders() -> Iterator[tuple[Path, int]]:
    """List the folders in the order of their records, each with the rank of its defaults."""
    own = user_folder()
    named = [_expanded("ZOO_REGISTRY", folder) for folder in os.environ.get("ZOO_REGISTRY", "").split(os.pathsep) if folder]
    named = [folder for folder in dict.fromkeys(named) if folder != own]
    yield SHIPPED, len(named) + 1
    for rank, folder in enumerate(named, 1):
        if not _there("ZOO_REGISTRY", folder):
            raise BadRecord(f"ZOO_REGISTRY names {folder}, which is no folder")
        yield folder, rank
    yield own, 0


def _rows(wanted: Callable[[str], bool]) -> list[Located]:
    """All records of the files whose text is `wanted`; of shipped files, whose style a test keeps, only of the wanted tables."""
    rows: list[Located] = []
    for folder, rank in _folders():
        for path in sorted(folder.glob("*.toml")):
            if path.name.startswith("."):  # an editor's lock or copy: Emacs' is a link to nowhere
                continue
            try:
                stat = path.stat()
            except OSError as error:
                raise BadRecord(f"{path}: {error.strerror}") from error
            key = path, stat.st_mtime_ns, stat.st_size
            if wanted(text := _text(*key)):
                parts = [table for table in _tables(*key) if wanted(table)] if folder == SHIPPED else [text]
                read = _parse_shipped if folder == SHIPPED else _parse
                rows += [Located(row, path, rank) for part in parts for row in read(part, path)]
    return rows


@lru_cache(maxsize=256)
def _text(path: Path, mtime_ns: int, size_bytes: int) -> str:
    del mtime_ns  # in the key: a file that changed is read again
    if size_bytes > MOST_BYTES:
        raise BadRecord(f"{path} has {size_bytes:,} bytes, and no table of records more than {MOST_BYTES:,}. Move it away.")
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecord(f"{path}: {error}") from error


@lru_cache(maxsize=256)
def _tables(path: Path, mtime_ns: int, size_bytes: int) -> tuple[str, ...]:
    return tuple(re.split(r"^(?=\[)", _text(path, mtime_ns, size_bytes), flags=re.MULTILINE))


@lru_cache(maxsize=4096)
def _parse_shipped(text: str, path: Path) -> tuple[Checkpoint, ...]:
    """Read one table of a shipped file; a test holds all of them to what `record` makes, so that nothing is validated again here."""
    found = quickly(text)
    return _parse(text, path) if found is None else (found,)


def quickly(text: str) -> Checkpoint | None:
    """Read a table that is written as those of the shipped files are, a key in a line: a thousand cost a tenth of what tomllib takes.

    Returns:
        The record, not validated; None of what is written otherwise.
    """
    head = _HEAD.match(text)
    if head is None:
        return None
    facts: dict[str, Any] = {}
    lines = iter(text[head.end() :].splitlines())
    try:
        for line in lines:
            if not line or line[0] == "#":
                continue
            key, sign, value = line.partition(" = ")
            if not sign:
                return None
            if value == "[":
                items = [item.strip().removesuffix(",") for item in iter(lambda: next(lines), "]")]
                facts[key] = tuple(Alternative(**_table(item)) if item[0] == "{" else _scalar(item) for item in items)
            elif key == "sources":
                facts[key] = tuple(_scalar(f'"{item}"') for item in value.removeprefix('["').removesuffix('"]').split('", "'))
            elif key == "preprocessing":
                facts[key] = _steps(value)
            else:
                facts[key] = _table(value) if value[0] == "{" else _scalar(value)
        return Checkpoint(model=head[1], tag=head[2], **facts)
    except (ValueError, TypeError, LookupError, StopIteration):
        return None


def _table(text: str) -> dict[str, Any]:
    if "[" in text or text[:2] != "{ " or text[-2:] != " }":
        raise ValueError(text)
    pairs = (item.partition(" = ") for item in text[2:-2].split(", "))
    return {key: _scalar(value) for key, _, value in pairs}


def _scalar(text: str) -> Any:
    if text[0] == '"':
        if "\\" in text or text.find('"', 1) != len(text) - 1:
            raise ValueError(text)
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return (float if "." in text or "e" in text else int)(text)


@lru_cache(maxsize=1024)
def _steps(text: str) -> Preprocessing:
    """Read the preprocessing of a table: many say the same."""
    steps: dict[str, Any] = {"resize": None, "crop": None}
    steps |= json.loads(re.sub(r"(\w+) = ", r'"\1": ', text))
    steps |= {name: tuple(steps[name]) for name in ("mean", "std")}
    return Preprocessing(**steps)


@lru_cache(maxsize=1024)
def _parse(text: str, path: Path) -> tuple[Checkpoint, ...]:
    models = read_toml(text, path, "Mend it in an editor, or delete it", refuse=BadRecord, most_bytes=MOST_BYTES)
    rows: list[Checkpoint] = []
    for model, tables in models.items():
        for tag, table in cast("dict[str, Any]", tables).items() if isinstance(tables, dict) else ((None, None),):
            place = f"{path} [{model}.{tag}]"
            if not isinstance(table, dict):
                raise BadRecord(f"{path}: {model} holds no tables; a checkpoint is a table [{model}.tag]")
            if not re.fullmatch(TAG, str(tag)):
                raise BadRecord(f"{place}: a tag is letters, digits and _ . + -, got {tag!r}")
            rows.append(record(model, str(tag), cast("dict[str, Any]", table), place))
    return tuple(rows)
