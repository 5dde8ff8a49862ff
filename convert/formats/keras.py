"""Keras, every generation: .h5 and .hdf5 (0.x to 3), .weights.h5 and its shards, .keras. No Lambda and no config code is ever run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert._guard import MAX_FACT, check, reading
from convert.formats import _hdf5, _keras_archive, _keras_legacy, _keras_v3, chainer
from convert.formats._hdf5 import Dataset, Group, Hdf5
from convert.formats._keras_config import MAX_CONFIG_BYTES, parse, specs
from convert.formats._keras_graph import NotUnderstood, graph
from convert.formats._keras_layers import Era, Layer, ordering, tensors
from convert.formats._keras_prepared import prepared
from convert.formats._keras_write import NOTES
from convert.formats._keras_write import write as write
from convert.formats._mapped import named_from
from convert.graph import Graph
from convert.source import Convention, Source, Stored
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat

SUFFIXES = (".keras", ".weights.h5", ".h5", ".hdf5", ".weights.json")
WRITES = True
WHAT = "Keras file"
CONVENTIONS: dict[str, Convention] = {
    "theano": "convolution",
    **dict.fromkeys(("tensorflow", "cntk", "jax", "torch", "numpy", "openvino"), "correlation"),
}
"""What each backend does with the kernels of its convolutions."""
HINTED: dict[str, Convention] = {"th": "convolution", "tf": "correlation"}
"""The same by the file's name, for files that don't name their backend."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell a Keras file: an archive by its name or first member, any HDF5 file that is no other format's, or a map of shards."""
    if head[:4] == b"PK\x03\x04":
        return path.suffix == ".keras" or _keras_archive.sniff(head)
    if head.lstrip()[:1] == b"{":
        return b'"weight_map"' in head and b".weights.h5" in head
    return head[:8] == _hdf5.SIGNATURE


def read(path: Path) -> Source:
    """Open a Keras file of any generation.

    Raises:
        MalformedFile, LimitExceeded, UnsafeFormat, UnsupportedFormat.
    """
    with reading(path, WHAT):
        with path.open("rb") as file:
            head = file.read(8)
        size = path.stat().st_size
        if head[:4] == b"PK\x03\x04":
            source = _archive(path)
        elif head == _hdf5.SIGNATURE:
            source = _hdf5_file(path)
        else:
            shards = _shards(path)
            size += sum(shard.stat().st_size for shard in shards)
            source = _sharded(path, shards)
            source.beside = tuple(named_from(path, shard) for shard in shards)
        check(path, source.tensors.values(), size)
    return source


def _marks(root: Group) -> str:
    """Tell which generation wrote an HDF5 file: "named", "numbered", "counted" or "" for none."""
    if "nb_layers" in root.attrs:
        return "numbered"
    if "model_weights" in root.links or _keras_legacy.names(root, "layer_names") is not None:
        return "named"
    if _keras_v3.is_store(root):
        return "counted"
    return "named" if "model_config" in root.attrs else ""


def _hdf5_file(path: Path) -> Source:
    file = Hdf5(path, WHAT)
    kind = _marks(file.root)
    if kind == "numbered":
        return _numbered(path, file)
    if kind == "counted":
        facts = {"dialect": "Keras 3 weights", **_noted(file)}
        return _source(path, {}, *_keras_v3.layers(_keras_v3.entries(file), ()), Era("3"), facts, file)
    if kind != "named":
        if (theirs := chainer.from_hdf5(path, file)) is not None:
            return theirs
        raise UnsupportedFormat(f"{path} is an HDF5 file and none of Keras's: it has {', '.join(list(file.root)[:5]) or 'nothing'}")
    top = file.root["model_weights"] if "model_weights" in file.root.links else file.root
    if not isinstance(top, Group):
        raise MalformedFile(f"{path}: model_weights is no group")
    said = {name: _keras_legacy.attribute(top, name) or _keras_legacy.attribute(file.root, name) for name in ("keras_version", "backend")}
    text = _keras_legacy.attribute(file.root, "model_config")
    config = parse(text, path) if text else {}
    layers = _keras_legacy.layers(file, top, specs(config))
    hint = _keras_legacy.path_hint(path)
    spelt_as_keras_1 = {leaf for layer in layers for leaf, _ in layer.variables} & {"W", "b", "running_std"}
    old = said["keras_version"].startswith(("0", "1")) or (not said["keras_version"] and bool(spelt_as_keras_1))
    known = CONVENTIONS.get(said["backend"])
    era = Era(
        said["keras_version"],
        said["backend"],
        (hint[0] or ordering(layers)) if old else "",
        known or HINTED.get(hint[1], "unknown"),
    )
    facts = {"dialect": "whole model" if text else "weights", **({"kernel order": era.ordering} if old else {}), **_noted(file)}
    source = _source(path, config, layers, "config", era, facts, file)
    if known is None and hint[1]:
        source.notes.append(f"the file does not name its backend; {hint[1]}_kernels in its name says {era.convention}")
    if "optimizer_weights" in file.root.links:
        source.notes.append("the optimizer's state is left out")
    return source


def _noted(file: Hdf5) -> dict[str, str]:
    """Read what `zoo convert` noted in a file that it wrote."""
    held = file.root[NOTES] if NOTES in file.root.links else None
    if not isinstance(held, Dataset) or held.shape != () or not held.type.text:
        return {}
    return _fact(held.value())


def _fact(said: Any) -> dict[str, str]:
    """Keep notes that are text, of a length that notes have; room that was left for more behind them is taken off."""
    text = said.rstrip() if isinstance(said, str) else ""
    return {NOTES: text} if 0 < len(text) <= MAX_FACT else {}


def _numbered(path: Path, file: Hdf5) -> Source:
    found = _keras_legacy.numbered(file)
    layout = _keras_legacy.positional(found)
    notes = ["the file names neither layers nor backend: an architecture and evidence must say what its parameters are"]
    return Source(
        path,
        "keras",
        "Keras 0.x",
        {str(number): stored for number, stored in enumerate(found)},
        positional=True,
        flatten="chw",
        facts={"dialect": "Keras 0 weights"},
        notes=notes,
        layout=layout,
        close=file.close,
    )


def _archive(path: Path) -> Source:
    archive = _keras_archive.opened(path)
    name = next((name for name in ("model.weights.h5", "model.weights.json", "model.weights.npz") if name in archive.members), None)
    if name is None:
        raise MalformedFile(f"{path} is a .keras file without weights: it holds {', '.join(archive.members)}")
    file = None
    if name.endswith(".npz"):
        found = _keras_archive.numpy_entries(path, archive.members[name])
    elif name.endswith(".json"):
        shards = [shard.name for shard in _keras_v3.shards(Path(name), bytes(archive.members[name]))]
        if absent := [shard for shard in shards if shard not in archive.members]:
            raise MalformedFile(f"{path} lacks {absent[0]}, which its map of weights names")
        found = _keras_v3.merge([_keras_v3.entries(Hdf5(path, WHAT, archive.members[shard])) for shard in shards])
    else:
        file = Hdf5(path, WHAT, archive.members[name])
        found = _keras_v3.entries(file)
    version = archive.metadata.get("keras_version")
    era = Era(version if isinstance(version, str) else "3")
    layers, names = _keras_v3.layers(found, specs(archive.config))
    facts = {"dialect": "Keras 3 archive", **_fact(archive.metadata.get(NOTES))}
    return _source(path, archive.config, layers, names, era, facts, file)


def _shards(path: Path) -> list[Path]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise LimitExceeded(f"{path}: {path.stat().st_size} bytes of a map of shards")
    shards = _keras_v3.shards(path, path.read_bytes())
    if absent := [shard for shard in shards if not shard.is_file()]:
        raise MalformedFile(f"{path} names {absent[0].name}, which is not beside it. Fetch all shards")
    return shards


def _sharded(path: Path, shards: Sequence[Path]) -> Source:
    found = _keras_v3.merge([_keras_v3.entries(Hdf5(shard, WHAT)) for shard in shards])
    layers, names = _keras_v3.layers(found, ())
    return _source(path, {}, layers, names, Era("3"), {"dialect": "Keras 3 weights in shards"}, None)


def _source(
    path: Path, config: Mapping[str, Any], layers: Sequence[Layer], names: str, era: Era, facts: Mapping[str, str], file: Hdf5 | None
) -> Source:
    made: dict[str, Stored] = {}
    for layer in layers:
        for name, stored in tensors(layer, era):
            if name in made:
                raise MalformedFile(f"{path}: two variables are called {name}: {made[name].origin} and {stored.origin}")
            made[name] = stored
    notes: list[str] = []
    if unsaid := [layer.name for layer in layers if layer.kind == "BatchNormalization" and not layer.config and len(layer.variables) == 3]:
        notes.append(f"{unsaid[0]} and {len(unsaid) - 1} more have three variables: taken for a shift, mean and variance without a scale")
    drawn: Graph | None = None
    if config:
        try:
            drawn = graph(config, era, made.get)
        except NotUnderstood as why:
            notes.append(f"what the network computes is not understood: {why}")
        except (ConvertError, MemoryError, RecursionError):
            raise
        except Exception as why:  # a config can be wrong in any way; the weights are good all the same
            notes.append(f"what the network computes is not understood: {type(why).__name__}: {why}")
    orders: set[str] = {node.attrs["order"] for node in drawn.nodes if node.op == "flatten"} if drawn else set()
    framework = f"Keras {era.version or era.generation}" + (f", {era.backend} backend" if era.backend else "")
    version = "" if era.version == "3" else era.version  # weights alone don't say more than that
    known = {"backend": era.backend, "keras_version": version, "names": "class counters" if names == "class counters" else ""}
    return Source(
        path,
        "keras",
        framework,
        made,
        graph=drawn,
        flatten=orders.pop() if len(orders) == 1 else "chw" if era.ordering == "th" else "hwc",
        facts={**{key: value for key, value in known.items() if value}, **facts},
        preprocessing=prepared(drawn, made),
        notes=notes,
        close=file.close if file else lambda: None,
    )
