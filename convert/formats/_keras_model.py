"""The architectures of keras.applications, stated and built by Keras itself."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from convert._guard import need
from convert.kinds import is_dict
from convert.names import keras as naming
from convert.source import Stored
from weights.errors import ConvertError

T = TypeVar("T")

SAME = (
    "VGG16", "VGG19", "ResNet50", "ResNet101", "ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2", "DenseNet121", "DenseNet169",
    "DenseNet201", "InceptionV3", "InceptionResNetV2", "Xception", "MobileNetV3Large", "MobileNetV3Small",
    *(f"EfficientNetB{n}" for n in range(8)),
)  # fmt: skip
APPLICATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SAME},
    **{f"ConvNeXt_{size}": (f"ConvNeXt{size}", {}) for size in ("Tiny", "Small", "Base", "Large", "XLarge")},
    **{f"EfficientNetV2_{name}": (f"EfficientNetV2{name}", {}) for name in ("B0", "B1", "B2", "B3", "S", "M", "L")},
    **{f"MobileNetV1{end}": ("MobileNet", {"alpha": alpha}) for end, alpha in (("", 1.0), ("_075", 0.75), ("_050", 0.5), ("_025", 0.25))},
    **{
        f"MobileNetV2{end}": ("MobileNetV2", {"alpha": alpha})
        for end, alpha in (("", 1.0), ("_140", 1.4), ("_075", 0.75), ("_050", 0.5), ("_035", 0.35))
    },
}
"""Our variants that keras.applications has: its function, and its arguments."""


def config(layers: Sequence[tuple[str, Sequence[Stored]]], notes: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """State an architecture, without memory for its weights.

    Args:
        layers: those with weights, in Keras's order: name and variables.
        notes: of the conversion; "model" and "options" matter here.
        path: of the file to be written, for messages.

    Returns:
        The JSON of a .keras file, and Keras's version.

    Raises:
        ConvertError: keras.applications has no such model, or one that computes something else.
        MissingLibrary: Keras is not installed.
    """
    keras = _keras()

    def state() -> str:
        with keras.device("meta" if keras.backend.backend() == "torch" else "cpu"):
            return json.dumps(keras.saving.serialize_keras_object(_built(keras, layers, notes, path)))

    return _apart(state), keras.__version__


def save(layers: Sequence[tuple[str, Sequence[Stored]]], notes: Mapping[str, Any], path: Path) -> None:
    """Let Keras write a whole model as a legacy file; arguments and errors as in `config`."""
    if notes.get("model", "").startswith("MobileNetV3"):  # its "x + 3.0" loses the 3 there
        raise ConvertError(f"{path.name}: Keras can't read its own legacy file of a whole MobileNetV3; write .keras")
    keras = _keras()

    def build() -> None:
        model = _built(keras, layers, notes, path)
        for theirs, (_, variables) in zip(_weighted(model), layers, strict=True):
            theirs.set_weights([variable.array() for variable in variables])
        absl = logging.getLogger("absl")
        level = absl.level
        absl.setLevel(logging.ERROR)  # it recommends another ending
        try:
            model.save(path)
        finally:
            absl.setLevel(level)

    _apart(build)


def _keras() -> Any:
    """Import Keras, over torch where nobody has chosen anything else: TensorFlow, its own choice, may be missing."""
    if "keras" in sys.modules or "KERAS_BACKEND" in os.environ:
        return need("keras")
    os.environ["KERAS_BACKEND"] = "torch"
    try:
        return need("keras")
    finally:
        del os.environ["KERAS_BACKEND"]


def _apart(task: Callable[[], T]) -> T:
    """Run in a thread of its own, where Keras begins to number layers anew and the caller's numbers stay as they are."""
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(task())
        except BaseException as error:  # handed over to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _built(keras: Any, layers: Sequence[tuple[str, Sequence[Stored]]], notes: Mapping[str, Any], path: Path) -> Any:
    name = notes.get("model", "")
    if name not in APPLICATIONS:
        raise ConvertError(
            f"{path.name}: a whole model needs its architecture, and keras.applications has no {name or 'network that has no name'}; "
            "write its weights alone: .weights.h5 or .h5"
        )
    function, arguments = APPLICATIONS[name]
    _check_options(name, notes, path)
    first = next(variables[0].shape for _, variables in layers if len(variables[0].shape) == 4)
    if first[2] != 3 or name.startswith("MobileNetV3"):  # whose padding depends on whether the size is stated
        arguments = {**arguments, "input_shape": (224, 224, first[2])}
    model = getattr(keras.applications, function)(weights=None, classes=layers[-1][1][-1].shape[0], classifier_activation=None, **arguments)
    theirs = [(layer.name, [tuple(weight.shape) for weight in layer.weights]) for layer in _weighted(model)]
    ours = [(layer, [variable.shape for variable in variables]) for layer, variables in layers]
    for there, here in zip_longest(theirs, ours):
        if there != here:
            raise ConvertError(f"{path.name}: Keras {keras.__version__} builds {name} otherwise: its layer {there} would get {here}")
    return model


def _check_options(name: str, notes: Mapping[str, Any], path: Path) -> None:
    """Refuse to write a model that computes something else than the network whose weights it has."""
    family = max((family for family in naming.FAMILIES if name.startswith(family)), key=len)  # EfficientNetV2 is no EfficientNet
    if not is_dict(ours := notes.get("options")):
        return
    for option, theirs in naming.options((name, family)).items():
        alike = ("same", "even") if option == "padding" else (theirs,)  # one thing at the size that the model is built for
        if ours.get(option) not in alike:
            raise ConvertError(
                f"{path.name}: Keras's {name} computes with {option} = {theirs!r}, the network at hand with "
                f"{ours.get(option, 'its default')!r}: with these weights it would compute something else. "
                "Write the weights alone, .weights.h5 or .h5, for a model of your own."
            )


def _weighted(model: Any) -> list[Any]:
    return [layer for layer in model.layers if layer.weights]
