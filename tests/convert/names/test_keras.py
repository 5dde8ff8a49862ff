"""Keras itself is the oracle: what its networks compute, ours compute with the tensors of its files, and its own with ours."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applications import LARGE, apart, build, images, logits, logits_of_keras, ours, prepared, randomise

import zoo
from convert import conversion, formats, names, writing
from convert.core import COUNTER, Row
from convert.formats import keras as keras_files
from convert.formats._keras_model import APPLICATIONS
from convert.formats._torch import as_tensor, stored
from convert.names import keras as naming
from convert.network import Layer, layers
from convert.source import Stored
from zoo.networks.model import Model

pytestmark = [
    pytest.mark.reference,
    # Keras's torch backend asks for a copy in NumPy's old way
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

every_variant = pytest.mark.parametrize("variant", APPLICATIONS)
WHOLE = (
    "ResNet50",
    "MobileNetV1_025",
    "MobileNetV2_035",
    "MobileNetV3Small",
    "InceptionV3",
    "InceptionResNetV2",
    "Xception",
    "EfficientNetB0",
    "ConvNeXt_Tiny",
    "EfficientNetV2_B0",
)
"""Whole models are written of these alone: Keras builds them slowly, and what differs within a family is no more than its length."""
ALL = (".weights.h5", ".h5", ".keras")
READ = {
    "VGG16": (".weights.h5",),
    "VGG19": (".h5",),
    "ResNet50": (".h5",),
    "MobileNetV3Small": (".h5",),
    "MobileNetV2_035": (".weights.h5",),
}
READ |= dict.fromkeys(("Xception", *LARGE), (".keras",))
WRITTEN = {"VGG16": (".h5",), "VGG19": (".weights.h5",), "ResNet50": (".weights.h5",), "MobileNetV3Small": (".weights.h5",)}
WRITTEN |= {"MobileNetV2_035": (".h5",), **dict.fromkeys(("Xception", *LARGE), (".weights.h5",))}
"""Formats of the large ones, and of those whose files another one stands for; the others have them all."""


def shapes(network: Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def read(path: Path, network: Model, structure: list[Layer]) -> dict[str, np.ndarray]:
    """The tensors of a file by our names."""
    source = formats.read(path)
    try:
        adopted = conversion.adopt(source, structure, shapes(network), family=type(network), naming="keras")
        assert adopted.report.ok, conversion.explain(adopted, shapes(network))
        return {name: np.ascontiguousarray(one.array()) for name, one in adopted.tensors.items()}
    finally:
        source.close()


def filled(network: Model, tensors: dict[str, np.ndarray]) -> Model:
    state = {name: as_tensor(tensors[name]) if name in tensors else torch.zeros((), dtype=torch.int64) for name in network.state_dict()}
    network.load_state_dict(state, assign=True)
    return network


def write(network: Model, path: Path, structure: list[Layer]) -> None:
    tensors: dict[str, Stored] = {name: stored(name, t) for name, t in network.state_dict().items() if not name.endswith(COUNTER)}
    parts = writing.parts(names.rows("keras", type(network), shapes(network)), structure, tensors)
    notes = {"model": type(network).__name__, "options": names.fact("keras", "options", type(network))}
    notes["preprocessing"] = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    keras_files.write(parts, path, metadata={"kernelzoo": json.dumps(notes), "naming": "keras"})


SHOWN = (
    "ResNet50",
    "MobileNetV1_025",
    "MobileNetV2_035",
    "MobileNetV3Small",
    "Xception",
)


@pytest.mark.parametrize("variant", [v if v in SHOWN else pytest.param(v, marks=pytest.mark.long) for v in APPLICATIONS])
def test_logits_agree_both_ways(variant: str, tmp_path: Path) -> None:
    import keras

    model = build(variant)
    randomise(model, variant)
    network = ours(variant)
    structure = layers(network, (3, network.input_size, network.input_size))
    assert_in_order(model, network)
    states: list[dict[str, np.ndarray]] = []
    for ending in READ.get(variant, ALL):
        path = tmp_path / f"theirs{ending}"
        model.save_weights(path) if ending == ".weights.h5" else model.save(path)
        states.append(read(path, network, structure))
        path.unlink()
    state = states[0]
    assert [name for again in states[1:] for name in state if state[name].tobytes() != again[name].tobytes()] == []
    filled(network, state)
    theirs, mine = prepared(variant, model, images(variant))
    there, here = logits_of_keras(model, theirs), logits(network, mine)
    assert apart(there[:1], there[1:]) > 5e-4  # or no image would matter
    assert apart(here, there) < 1e-4

    loaded: list[list[np.ndarray]] = []
    for ending in WRITTEN.get(variant, ALL if variant in WHOLE else ALL[:2]):
        path = tmp_path / f"ours{ending}"
        write(network, path, structure)
        if ending == ".keras":
            loaded.append(keras.models.load_model(path, compile=False).get_weights())
        else:
            for layer in model.layers:
                layer.set_weights([np.zeros_like(weight) for weight in layer.get_weights()])
            model.load_weights(path)
            loaded.append(model.get_weights())
        path.unlink()
    assert all(np.array_equal(a, b) for again in loaded[1:] for a, b in zip(loaded[0], again, strict=True))
    theirs, mine = prepared(variant, model, images(variant))
    assert apart(logits(network, mine), logits_of_keras(model, theirs)) < 1e-4


def nasnet(variant: str) -> Any:
    """Keras refuses to build its NASNetMobile over torch, but not what that function calls."""
    from keras.src.applications import nasnet as keras_nasnet

    cls: Any = zoo.CATALOGUE[variant]
    sizes: dict[str, Any] = {"penultimate_filters": cls.penultimate, "num_blocks": cls.repeats, "stem_block_filters": cls.stem_channels}
    sizes |= {"weights": None, "classifier_activation": None}
    return keras_nasnet.NASNet(
        input_shape=(66, 75, 3), skip_reduction=cls.skip_reduction, filter_multiplier=2, default_size=cls.input_size,
        classes=10, **sizes,
    )  # fmt: skip


def test_nasnets_logits_agree_both_ways(tmp_path: Path) -> None:
    model, network = nasnet("NASNetAMobile"), ours("NASNetAMobile")
    randomise(model, "NASNetAMobile")
    structure = layers(network, (3, network.input_size, network.input_size))
    pictures = images("NASNetAMobile")
    for ending in (".weights.h5", ".h5"):
        model.save_weights(tmp_path / f"theirs{ending}") if ending == ".weights.h5" else model.save(tmp_path / f"theirs{ending}")
        filled(network, read(tmp_path / f"theirs{ending}", network, structure))
        there = logits_of_keras(model, pictures.transpose(0, 2, 3, 1))
        assert apart(there[:1], there[1:]) > 5e-4
        assert apart(logits(network, pictures), there) < 1e-4
        write(network, tmp_path / f"ours{ending}", structure)
        before = model.get_weights()
        for layer in model.layers:
            layer.set_weights([np.zeros_like(weight) for weight in layer.get_weights()])
        model.load_weights(tmp_path / f"ours{ending}")
        assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    padded = zoo.NASNetAMobile(num_classes=10).eval()
    padded.load_state_dict(network.state_dict())
    assert apart(logits(padded, pictures), there) > 1e-3


@pytest.mark.parametrize("variant", ["NASNetAMobile", pytest.param("NASNetALarge", marks=pytest.mark.long)])
def test_nasnets_rows_come_in_the_order_of_keras_layers(variant: str) -> None:
    import keras

    with keras.device("meta"):
        model = nasnet(variant)
    assert_in_order(model, ours(variant))


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.long) if v in SHOWN else v for v in WHOLE])  # as their logits do
def test_rows_come_in_the_order_of_keras_layers(variant: str) -> None:
    import keras

    with keras.device("meta"):
        model = build(variant)
    assert_in_order(model, ours(variant))


def assert_in_order(model: Any, network: Model) -> None:
    rows = names.rows("keras", type(network), shapes(network))
    theirs = [layer for layer in model.layers if layer.weights and type(layer).__name__ != "Normalization"]
    aligned = naming.align([layer.name for layer in theirs], rows)
    mine = list(dict.fromkeys(re.sub(r"\.(depthwise|pointwise|weight|convnext\w+)$", "", row.theirs) for row in rows))
    assert mine == [aligned[layer.name] for layer in theirs]
    assert naming.order(names.lineage(type(network)), shapes(network)) == [row.ours for row in rows]

    if isinstance(network, zoo.ConvNeXt):  # its Sequentials count their own layers
        return
    counts: Counter[str] = Counter()
    counted: dict[str, str] = {}  # as Keras before 3.6 kept them in .weights.h5: numbered within their class, nameless
    for layer in theirs:
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(layer).__name__).lower().replace("2d", "2d")
        number = f"_{counts[kind]}" if counts[kind] else ""
        counts[kind] += 1
        for half in (".depthwise", ".pointwise") if kind == "separable_conv2d" else ("",):
            counted[kind + number + half] = aligned[layer.name] + half
    assert naming.align(list(counted), rows) == counted


@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        ("ResNet50", {"stride_on": "3x3"}),
        ("MobileNetV1_025", {"padding": "symmetric"}),
        ("MobileNetV1_025", {"padding": "same"}),  # one axis is odd
        ("MobileNetV1_025", {"norm_eps": 1e-5}),
        ("MobileNetV1_025", {"activation": "relu"}),
        ("MobileNetV2_035", {"padding": "symmetric"}),
        ("MobileNetV2_035", {"norm_eps": 1e-5}),
        ("MobileNetV3Small", {"padding": "symmetric"}),
        ("MobileNetV3Small", {"norm_eps": 1e-5}),
        ("InceptionV3", {"padding": "symmetric"}),
        ("Xception", {"padding": "symmetric"}),
        ("Xception", {"norm_eps": 1e-5}),
        ("EfficientNetB0", {"padding": "symmetric"}),
        ("EfficientNetB0", {"norm_eps": 1e-5}),
        ("EfficientNetV2_B0", {"padding": "symmetric"}),
    ],
)
def test_without_one_of_the_namings_options_the_logits_are_others(variant: str, wrong: dict[str, Any]) -> None:
    right = ours(variant).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in right.state_dict().items():
        if tensor.dim() > 1:
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
        elif not name.endswith(COUNTER):
            low = (0.3, 1.0) if name.endswith(("running_var", "weight")) else (-0.2, 0.2)
            tensor.uniform_(*low, generator=generator)
    options = {**names.fact("keras", "options", type(right)), **wrong}
    other = zoo.CATALOGUE[variant](num_classes=10, **options).eval()
    other.load_state_dict(right.state_dict())
    x = (images(variant) * 2 - 1) * (30 if "activation" in wrong else 1)  # only large values are cut off at 6
    assert apart(logits(other, x), logits(right, x)) > 1e-3


def test_mobilenet_v3_built_for_any_size_pads_as_for_even_ones() -> None:
    import keras

    model = keras.applications.MobileNetV3Small(weights=None, classes=10, classifier_activation=None, include_preprocessing=False)
    randomise(model, "MobileNetV3Small")
    x = np.random.default_rng(0).uniform(-1, 1, (1, 3, 66, 75)).astype(np.float32)
    there = logits_of_keras(model, x.transpose(0, 2, 3, 1))
    network = ours("MobileNetV3Small")
    rows = names.rows("keras", type(network), shapes(network))
    weights = {layer.name: [np.asarray(weight) for weight in layer.get_weights()] for layer in model.layers if layer.weights}
    even = zoo.MobileNetV3Small(num_classes=10, padding="even").eval()
    even.load_state_dict(_by_hand(rows, weights, shapes(network)), strict=False)
    same = zoo.MobileNetV3Small(num_classes=10, padding="same").eval()
    same.load_state_dict(even.state_dict())
    assert apart(logits(even, x), there) < 1e-4
    assert apart(logits(same, x), there) > 1e-3


def _by_hand(rows: list[Row], weights: dict[str, list[np.ndarray]], wanted: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for row in rows:
        found = weights[row.theirs]
        if row.kind == "norm":
            leaves = dict(zip(("weight", "bias", "running_mean", "running_var"), found, strict=True))
        else:
            kernel = found[0].transpose(2, 3, 0, 1) if "depthwise" in row.theirs else found[0].transpose(3, 2, 0, 1)
            leaves = {"weight": kernel.reshape(wanted[f"{row.ours}.weight"]), **dict(zip(("bias",), found[1:], strict=False))}
        state |= {f"{row.ours}.{leaf}": torch.from_numpy(np.ascontiguousarray(array)) for leaf, array in leaves.items()}
    return state


@pytest.mark.parametrize("variant", [name for name in APPLICATIONS if name not in LARGE and not name.startswith("VGG")])
def test_preprocessing_is_what_keras_does(variant: str) -> None:
    import keras

    functions = {
        "ResNet50V2": keras.applications.resnet_v2,
        "ResNet": keras.applications.resnet,
        "DenseNet": keras.applications.densenet,
        "MobileNetV1": keras.applications.mobilenet,
        "MobileNetV2": keras.applications.mobilenet_v2,
        "InceptionV3": keras.applications.inception_v3,
        "InceptionResNetV2": keras.applications.inception_resnet_v2,
        "Xception": keras.applications.xception,
    }
    told = names.fact("keras", "preprocessing", zoo.CATALOGUE[variant])
    module = next((module for family, module in functions.items() if variant.startswith(family)), None)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 4, 5, 3)).astype(np.float32)
    x = pixels / 255
    mine = ((x[..., ::-1] if told["channel_order"] == "bgr" else x) - told["mean"]) / told["std"]
    if module is None:
        assert told["built_in"]
        return
    np.testing.assert_allclose(mine, module.preprocess_input(pixels.copy(), data_format="channels_last"), atol=1e-4)


def test_older_spellings_are_todays() -> None:
    def aligned(variant: str, old: list[str]) -> list[str]:
        network = ours(variant)
        found = naming.align(old, names.rows("keras", type(network), shapes(network)))
        return [found[name] for name in old]

    spelt = ["Conv", "Conv/BatchNorm", "expanded_conv/depthwise", "expanded_conv/squeeze_excite/Conv_1", "expanded_conv_3/expand/BatchNorm"]
    assert aligned("MobileNetV3Small", [*spelt, "Conv_1", "Conv_1/BatchNorm", "Conv_2", "Logits"]) == [
        "conv",
        "conv_bn",
        "expanded_conv_depthwise",
        "expanded_conv_squeeze_excite_conv_1",
        "expanded_conv_3_expand_bn",
        "conv_1",
        "conv_1_bn",
        "conv_2",
        "logits",
    ]
    assert aligned("MobileNetV2", ["Conv_1", "Conv_1_bn", "Logits"]) == ["Conv_1", "Conv_1_bn", "predictions"]
    assert aligned("DenseNet121", ["conv1_bn", "fc1000"]) == ["conv1_bn", "predictions"]
    assert aligned("Xception", ["convolution2d_5", "convolution2d_6", "batchnormalization_9", "predictions"]) == [
        "conv2d",
        "conv2d_1",
        "batch_normalization",
        "predictions",
    ]


def test_resnet50_before_2019_has_caffes_names() -> None:
    network = zoo.ResNet50(num_classes=10)
    today, then = (names.rows(naming, zoo.ResNet50, shapes(network)) for naming in ("keras", "keras2017"))
    told = {row.theirs: old.theirs for row, old in zip(today, then, strict=True)}
    assert [told[name] for name in ("conv1_conv", "conv1_bn", "predictions")] == ["conv1", "bn_conv1", "fc1000"]
    assert [told[f"conv2_block1_{part}"] for part in ("0_conv", "0_bn", "1_conv", "3_bn")] == [
        "res2a_branch1",
        "bn2a_branch1",
        "res2a_branch2a",
        "bn2a_branch2c",
    ]
    assert told["conv4_block6_2_conv"] == "res4f_branch2b"
    assert len(set(told.values())) == len(told)
    assert names.fact("keras2017", "options", zoo.ResNet50) == {"stride_on": "1x1", "norm_eps": 1e-3}
    assert names.rows("keras2017", zoo.ResNet101, {}) == []
