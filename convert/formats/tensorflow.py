"""TensorFlow checkpoints, versions 1 and 2, and the variables of a SavedModel; read without TensorFlow.

A checkpoint says nothing of what is computed: kinds follow from the variables' names and axes. Kernels are HWIO, depthwise ones
HWCM, dense ones (in, out), all of cross-correlation; maps are flattened HWC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from convert import _guard
from convert.formats import _tf_bundle, _tf_table
from convert.formats._tf_bundle import Bundle, Entry
from convert.source import Source, Stored
from convert.steps import from_layout
from weights.errors import MalformedFile, UnsupportedFormat
from weights.wording import counted

SUFFIXES = (".index", ".ckpt")
WRITES = False

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOTS = re.compile(
    r"/(?:Momentum|Adam(?:W|ax)?|RMSProp|Adagrad|Adadelta|Ftrl|SGD|LAMB|LARS)(?:Optimizer)?(?:_\d+)?$"
    r"|/\.OPTIMIZER_SLOT/|(?:^|/)optimizer/(?!_trainable_variables/)|^(?:training/)?(?:Adam|RMSprop|SGD|Adamax|Nadam)/"
)
COUNTERS = re.compile(
    r"(?:^|/)(?:global_step|save_counter|beta[12]_power(?:_\d+)?|learning_rate|iterations?|_iterations|decay|momentum)$"
    r"|(?:^|/)keras_api/metrics/"
)
AVERAGE = re.compile(r"/(?:ExponentialMovingAverage|Average|EMA)$")
LEAVES = {
    "weights": "weight", "kernel": "weight", "kernels": "weight", "depthwise_weights": "weight", "depthwise_kernel": "weight",
    "pointwise_weights": "weight", "pointwise_kernel": "weight", "w": "weight", "W": "weight",
    "biases": "bias", "bias": "bias", "b": "bias", "gamma": "weight", "beta": "bias", "scale": "weight", "offset": "bias",
    "moving_mean": "running_mean", "moving_variance": "running_var", "moving_var": "running_var",
}  # fmt: skip
"""TensorFlow's names of a module's tensors, and PyTorch's."""
DEPTHWISE = re.compile(r"depthwise|(?:^|[/_.\d-])dw(?:$|[/_.\d-])|dconv|dwconv", re.IGNORECASE)
TRANSPOSED = re.compile(r"transpose|deconv", re.IGNORECASE)
SPATIAL = {3: "W", 4: "HW", 5: "DHW"}


def sniff(path: Path, head: bytes) -> bool:
    """Tell whether it is an index, its prefix, a checkpoint of version 1, or a folder that holds one of these."""
    del head
    try:
        index = _index(path)
        with index.open("rb") as file:
            file.seek(max(index.stat().st_size - 8, 0))
            return _tf_table.is_table(file.read(8))
    except (OSError, MalformedFile, UnsupportedFormat):
        return False


def read(path: Path, *, averages: bool = False) -> Source:
    """Open a checkpoint.

    Args:
        path: the `.index` file, the prefix that it shares with its shards, a version 1 file, a SavedModel's folder or its
            saved_model.pb, or a training folder, of which the latest checkpoint counts.
        averages: take the moving averages of the weights, where there are both those and the weights themselves; TF-slim's published
            accuracies are the averages'.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "TensorFlow checkpoint"):
        index = _index(path)
        bundle = _tf_bundle.parse(index)
        entries, notes = _chosen(bundle, averages)
        if not entries:
            raise MalformedFile(f"{path} holds no weights; its variables are {', '.join(e.origin for e in bundle.entries[:10]) or 'none'}")
        tensors = {name: _guard.guarded(stored, path, "TensorFlow checkpoint") for name, stored in _tensors(entries, notes).items()}
        _guard.check(path, tensors.values(), bundle.files.size_bytes)
    if bundle.left_out:
        notes.append(f"left out: {counted(len(bundle.left_out), 'entry', 'entries')} without numbers")
    return Source(
        path,
        "tensorflow",
        f"TensorFlow checkpoint, version {bundle.version}",
        tensors,
        flatten="hwc",
        facts={"index": index.name, **({"object graph": f"{len(bundle.names)} names"} if bundle.names else {})},
        notes=notes,
        beside=bundle.files.others(path) if path.is_file() else (),
        close=bundle.files.close,
    )


def _index(path: Path) -> Path:
    """Find the index, or the file of version 1, that a path leads to."""
    if path.is_dir():
        if (path / "variables" / "variables.index").is_file():
            return path / "variables" / "variables.index"
        if (path / "checkpoint").is_file():
            with (path / "checkpoint").open("rb") as file:
                latest = re.search(rb'^model_checkpoint_path:\s*"([^"\\]{1,1000})"', file.read(65_536), re.MULTILINE)
            name = latest[1].decode("utf-8", "replace") if latest else ""
            if name and (path / Path(name).name).name == Path(name).name and Path(name).name not in ("", "..", "."):
                return _index(path / Path(name).name)  # an absolute path was the writer's; only its last part means something here
        found = sorted(path.glob("*.index"))
        if len(found) == 1:
            return found[0]
        names = ", ".join(f.name for f in found[:5])
        raise UnsupportedFormat(f"{path} is no checkpoint's folder: " + (f"name one of {names}" if found else "it has no .index"))
    if path.name == "saved_model.pb":
        return path.parent / "variables" / "variables.index"
    if (shard := re.fullmatch(r"(.+)\.data-\d{5}-of-\d{5}", path.name)) is not None:
        return path.with_name(f"{shard[1]}.index")
    if not path.is_file() and path.with_name(f"{path.name}.index").is_file():
        return path.with_name(f"{path.name}.index")
    return path


def _chosen(bundle: Bundle, averages: bool) -> tuple[dict[str, Entry], list[str]]:
    """Give every variable that is a weight the name that its layer gave it."""
    notes: list[str] = []
    kept: dict[str, Entry] = {}
    average: dict[str, Entry] = {}
    slots = 0
    named = _named(bundle)
    place = {key: number for number, key in enumerate(bundle.names)}  # a table is in alphabetical order, the object graph in the layers'
    for entry in sorted(bundle.entries, key=lambda entry: place.get(entry.origin, len(place))):
        name, plain = named[entry.origin], entry.origin.removesuffix(SUFFIX)
        if SLOTS.search(entry.origin) or COUNTERS.search(name) or COUNTERS.search(plain) or entry.dtype.kind in "iub":
            slots += 1
        elif AVERAGE.search(name):
            average[AVERAGE.sub("", name)] = entry
        elif name in kept and kept[name].same is not None and kept[name].same == entry.same:
            continue  # a SavedModel lists some variables twice
        else:
            kept[name if name not in kept else plain] = entry
    if slots:
        notes.append(f"{slots} variables of the optimiser and counters were left out")
    if average and (averages or not set(average) & set(kept)):
        notes.append(f"{counted(len(average), 'weight')} from moving averages")
        kept = {**kept, **average}
    elif average:
        notes.append(f"{len(average)} moving averages of weights were kept aside; read(path, averages=True) takes them instead")
    return kept, notes


def _named(bundle: Bundle) -> dict[str, str]:
    """Read the layers' names from the object graph; where it has none, an object's path must do."""
    plain = {entry.origin: entry.origin.removesuffix(SUFFIX) for entry in bundle.entries}
    full = {key: bundle.names[key] for key in plain if "/" in bundle.names.get(key, "") and not SLOTS.search(key)}
    if not full:
        return plain
    weights = [name for name in full.values() if not COUNTERS.search(name)]
    heads = {name.split("/", 1)[0] for name in weights}
    if len(heads) == 1 and min(name.count("/") for name in weights) >= 2:  # Keras 3 puts the model's own name in front
        full = {key: name.split("/", 1)[1] if name in weights else name for key, name in full.items()}
    return {**plain, **{key: name.removesuffix(":0") for key, name in full.items()}}


def _tensors(entries: Mapping[str, Stored], notes: list[str]) -> dict[str, Stored]:
    """Group variables by layer, and give each PyTorch's name and form."""
    layers: dict[str, dict[str, Stored]] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition("/")
        layers.setdefault(module, {})[leaf] = entry
    found: dict[str, Stored] = {}
    guessed: list[str] = []
    for module, leaves in layers.items():
        separable = any(leaf.startswith("depthwise_") for leaf in leaves) and any(leaf.startswith("pointwise_") for leaf in leaves)
        for leaf, stored in _ordered(leaves):
            place = module if not separable else f"{module}.depthwise" if leaf.startswith("depthwise_") else f"{module}.pointwise"
            target = LEAVES.get(leaf, leaf)
            kind, layout = _kind(module, leaf, stored.shape, leaves, guessed) if target == "weight" else ("", "")
            if kind:
                spatial = any(letter in layout for letter in "DHW")
                stored = replace(stored.then(*from_layout(kind, layout, stored.shape)), convention="correlation" if spatial else None)
            found[f"{place}.{target}" if place else target] = stored
    if len(found) < len(entries):
        raise MalformedFile(f"{len(entries) - len(found)} variables share a name with others")
    if guessed:
        notes.append(f"taken for depthwise, having one output for each input: {', '.join(guessed[:10])}")
    return found


def _ordered(leaves: Mapping[str, Stored]) -> Sequence[tuple[str, Stored]]:
    order = ("weight", "bias", "running_mean", "running_var")
    return sorted(leaves.items(), key=lambda item: order.index(LEAVES[item[0]]) if item[0] in LEAVES else len(order))


def _kind(module: str, leaf: str, shape: Sequence[int], leaves: Mapping[str, Stored], guessed: list[str]) -> tuple[str, str]:
    """Tell what a weight is, and the letters of its axes; nothing for a norm's."""
    if len(shape) == 2:
        return "linear", "IO"
    if len(shape) not in SPATIAL:
        return "", ""
    letters = SPATIAL[len(shape)]
    if leaf.startswith("depthwise_"):
        return "depthwise", f"{letters}CM"
    bias = next((leaves[name].shape for name in ("bias", "biases", "b") if name in leaves), None)
    ins, outs = shape[-2:]
    if leaf in ("kernel", "kernels", "w", "W") and len(shape) == 4:
        many = outs != ins and bias == (ins,)
        if TRANSPOSED.search(module) or (many and outs != 1 and not DEPTHWISE.search(module)):
            return "transposed", f"{letters}OI"
        if bias == (ins * outs,) and bias != (outs,):
            return "depthwise", f"{letters}CM"
        if DEPTHWISE.search(module) and (bias is None or bias == (ins * outs,)):
            return "depthwise", f"{letters}CM"
        if bias is None and outs == 1 < ins and max(shape[:-2]) > 1:
            guessed.append(module)
            return "depthwise", f"{letters}CM"
    return "conv", f"{letters}IO"
