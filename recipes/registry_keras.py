"""Rows of the checkpoints that keras.applications publishes; `recipes/registry_rows.py` writes them from registry_keras.tsv.

    python recipes/registry_keras.py     # write that table anew, from the installed Keras

A file's address and hash stand in the code that builds its network, so each is built without memory for weights, and asked. Keras states
MD5, of ConvNeXt SHA-256. It states how pixels are scaled and the size, and nothing of resizing and cropping: rows have ImageNet's usual
centre crop of 7/8, and no accuracies, which are none of this package.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import zoo
from convert import names
from convert.formats._keras_model import APPLICATIONS

TABLE = Path(__file__).with_name("registry_keras.tsv")
ALSO: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (
            "NASNet",  # what NASNetMobile and NASNetLarge call; the first refuses to be built over torch
            {"input_shape": (side, side, 3), "default_size": side, "penultimate_filters": filters, "num_blocks": blocks}
            | {"stem_block_filters": stem, "skip_reduction": skips, "filter_multiplier": 2},
        )
        for name, side, filters, blocks, stem, skips in (
            ("NASNetAMobile", 224, 1056, 4, 32, False),
            ("NASNetALarge", 331, 4032, 6, 96, True),
        )
    },
}
"""Our variants that keras.applications has, and convert writes no whole models of."""
NOWHERE: dict[str, str] = {
    **{
        f"mobilenet_{alpha}_{side}_tf.h5": "Keras states no hash of it"
        for alpha in ("1_0", "7_5", "5_0", "2_5")
        for side in (224, 192, 160, 128)
    },
    **{
        f"mobilenet_v2_weights_tf_dim_ordering_tf_kernels_{alpha}_{side}.h5": "Keras states no hash of it"
        for alpha, sides in (("0.35", 5), ("0.5", 5), ("0.75", 5), ("1.0", 5), ("1.3", 1), ("1.4", 1))
        for side in (224, 192, 160, 128, 96)[:sides]
    },
    **{f"resnext{depth}_weights_tf_dim_ordering_tf_kernels.h5": "its network is in Keras no more" for depth in (50, 101)},
    **{
        f"weights_mobilenet_v3_{kind}_float.h5": "a MobileNetV3 that is not here"
        for kind in ("large_224_0.75", "small_224_0.75", "large_minimalistic_224_1.0", "small_minimalistic_224_1.0")
    },
}  # fmt: skip
"""Files that have no row, each with the reason."""


@cache
def files() -> dict[str, tuple[str, str, int]]:
    """Read the files by our networks: address, hash, and the side in pixels of the network's images."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {model: (url, digest, int(side)) for model, url, digest, side in rows}


def version() -> str:
    """Say of which Keras the table is."""
    return TABLE.read_text(encoding="utf-8").partition("\n")[0].partition(";")[0].removeprefix("# Keras ")


def rows(model: str) -> Iterator[dict[str, Any]]:
    """Make the row of a network of ours, where Keras has a file with a hash."""
    if model not in files():
        return
    url, digest, side = files()[model]
    cls = zoo.CATALOGUE[model]
    algorithm, _, digits = digest.partition(":")
    table: dict[str, Any] = {"sources": [url], "format": "keras", "names": "keras"}
    table |= {"sha256": digits} if algorithm == "sha256" else {"digest": digest}
    table |= {"num_classes": 1000, "labels": "imagenet1k", "license": "unstated"}
    steps = names.fact("keras", "preprocessing", cls)
    table["preprocessing"] = {"resize": math.ceil(side / 0.875), "crop": side, "interpolation": "bilinear"}
    table["preprocessing"] |= {"mean": list(steps["mean"]), "std": list(steps["std"])}
    if steps.get("channel_order") == "bgr":
        table["preprocessing"]["channel_order"] = "bgr"
    if options := names.fact("keras", "options", cls):
        table["options"] = options
    told = "keras.applications: address, hash, size and scaling; resize and crop are ImageNet's usual, which it does not state"
    table["provenance"] = f"Keras {version()}: {told}; it states no licence per file, the package's own is Apache-2.0"
    yield table


def left_out() -> dict[str, str]:
    """List the files that have no row, by their names, each with the reason."""
    return dict(NOWHERE)


def published(function: str, arguments: dict[str, Any]) -> tuple[str, str | None, int]:
    """Ask Keras for the address and the hash of a network's weights, and for the side of its images."""
    import keras
    from keras.src.applications import nasnet
    from keras.src.utils import file_utils

    asked: list[tuple[str, str]] = []

    def caught(fname: str, origin: str, file_hash: str = "", **_: Any) -> str:
        asked.append((origin, file_hash))
        return fname

    make = getattr(nasnet if function == "NASNet" else keras.applications, function)
    with (
        mock.patch.object(file_utils, "get_file", caught),
        mock.patch.object(keras.Model, "load_weights"),
        keras.device("meta"),
        warnings.catch_warnings(action="ignore"),  # MobileNetV3's size is not stated, which it says
    ):
        side = make(weights="imagenet", **arguments).input_shape[1] or 224
    ((origin, digits),) = asked
    return origin, f"{'md5' if len(digits) == 32 else 'sha256'}:{digits}" if digits else None, side


def main() -> None:
    """Write the table anew."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    lines = [f"# Keras {keras.__version__}; our network, address, hash, side of its images in pixels"]
    for model, (function, arguments) in sorted({**APPLICATIONS, **ALSO}.items()):
        if model in zoo.CATALOGUE:
            origin, digest, side = published(function, arguments)
            if digest is not None:
                lines.append(f"{model}\t{origin}\t{digest}\t{side}")
    TABLE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
