"""Files that Keras itself writes, of many kinds of layer, and what Keras computes with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import execute, formats
from convert.source import Source

os.environ.setdefault("KERAS_BACKEND", "torch")

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*writable"),
]
ENDINGS = (".h5", ".keras", ".weights.h5")


def randomise(model: Any) -> None:
    draw = np.random.default_rng(0)
    for variable in model.weights:
        positive = variable.path.endswith(("variance", "gamma"))
        spread = 1.5 / np.sqrt(max(np.prod(variable.shape[:-1]), 1)) if len(variable.shape) > 1 else 0.3
        variable.assign(draw.uniform(0.5, 1.5, variable.shape) if positive else draw.normal(size=variable.shape) * spread)


def saved(model: Any, folder: Path) -> dict[str, Source]:
    for ending in ENDINGS:
        (model.save_weights if ending == ".weights.h5" else model.save)(folder / f"a{ending}")
    return {ending: formats.read(folder / f"a{ending}") for ending in ENDINGS}


def agrees(model: Any, images: np.ndarray, folder: Path, close: float = 1e-5) -> dict[str, Source]:
    """Save a model in every way, and compare what its graph computes with what Keras computes."""
    import keras

    randomise(model)
    theirs = keras.ops.convert_to_numpy(model(images, training=False))
    theirs = theirs.transpose(0, 3, 1, 2) if theirs.ndim == 4 else theirs
    sources = saved(model, folder)
    for ending in (".h5", ".keras"):
        source = sources[ending]
        assert source.graph is not None, source.notes
        ours = execute.run(source, images.transpose(0, 3, 1, 2))[source.graph.outputs[0]]
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= close * np.abs(theirs).max()
        assert source.tensors.keys() == sources[".weights.h5"].tensors.keys()
        for name, stored in sources[".weights.h5"].tensors.items():
            np.testing.assert_array_equal(stored.array(), source.tensors[name].array())
    return sources


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_window_lies_where_keras_lays_it(tmp_path: Path, padding: str, stride: int) -> None:
    from keras import Input, Model, layers

    entrance = Input((11, 10, 4))
    # without padding the transposed convolution leaves a gap behind where the stride is larger than the kernel
    x = layers.Conv2DTranspose(6, 4, strides=stride, padding=padding)(entrance)
    x = layers.Conv2D(6, 3, strides=stride, padding=padding, groups=2)(x)
    x = layers.MaxPooling2D((2, 3), stride, padding=padding)(x) if stride < 3 else layers.AveragePooling2D(2)(x)
    agrees(Model(entrance, layers.Conv2D(3, 2, padding="same")(x)), images(2, 11, 10, 4), tmp_path)


def test_a_stated_output_padding_cuts_where_keras_cuts(tmp_path: Path) -> None:
    from keras import Input, Model, layers

    entrance = Input((5, 5, 2))
    outputs = layers.Conv2DTranspose(3, 4, strides=2, padding="same", output_padding=0)(entrance)
    agrees(Model(entrance, outputs), images(1, 5, 5, 2), tmp_path)


def test_layers_of_every_kind_compute_what_keras_computes(tmp_path: Path) -> None:
    from keras import Input, Model, Sequential, layers, ops

    inner = Sequential([Input((8, 8, 4)), layers.Conv2D(4, 3, name="ic"), layers.BatchNormalization(scale=False, name="ib")], name="inner")
    entrance = Input((16, 16, 3), name="image")
    x = layers.Rescaling(0.5, offset=-1)(entrance)
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu", name="first")(x)
    x = layers.Dropout(0.5)(layers.LeakyReLU(0.1)(inner(x)))
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, name="deep", activation="hard_sigmoid")(layers.ZeroPadding2D(((0, 1), (2, 0)))(x))
    x = layers.PReLU(shared_axes=[1, 2], name="slopes")(x)
    x = layers.SeparableConv2D(5, 3, padding="same", depth_multiplier=2, name="apart", activation="gelu")(x)
    y = layers.BatchNormalization(epsilon=0.1)(x)
    z = layers.Multiply()([layers.ELU(0.7)(x), layers.GlobalAveragePooling2D(keepdims=True)(y)])
    x = layers.Concatenate()([x, ops.add(y, 3.0), layers.ReLU(2.5)(z), layers.Maximum()([x, y])])
    x = layers.UpSampling2D(2, interpolation="bilinear")(layers.Cropping2D(1)(x))
    x = layers.Dense(4, activation="softmax")(layers.Flatten()(x))
    sources = agrees(Model(entrance, x), images(2, 16, 16, 3), tmp_path)
    tensors = sources[".keras"].tensors
    assert {"inner.ic.weight", "inner.ib.running_var", "apart.depthwise.weight", "apart.pointwise.bias", "deep.weight"} <= tensors.keys()
    assert "inner.ib.weight" not in tensors
    assert tensors["slopes.weight"].shape == (8,)
    assert tensors["deep.weight"].shape == (8, 1, 3, 3)


def test_a_batch_norm_without_shift_is_told_from_one_without_scale_where_the_file_has_a_config(tmp_path: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.BatchNormalization(center=False, name="bn")])
    sources = saved(model, tmp_path)
    for ending in (".h5", ".keras"):
        assert set(sources[ending].tensors) == {"bn.weight", "bn.running_mean", "bn.running_var"}
    assert set(sources[".weights.h5"].tensors) == {"bn.bias", "bn.running_mean", "bn.running_var"}
    assert "bn" in sources[".weights.h5"].notes[0]


@pytest.mark.parametrize(("name", "size"), [("MobileNetV3Small", 32), ("EfficientNetB0", 32), ("InceptionV3", 75)])
def test_applications_compute_what_keras_computes_in_the_order_of_their_layers(tmp_path: Path, name: str, size: int) -> None:
    import keras

    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=5)
    sources = agrees(model, images(1, size, size, 3), tmp_path)
    order = list(dict.fromkeys(weight.path.split("/")[0] for layer in model.layers for weight in layer.weights))
    for source in sources.values():
        assert list(dict.fromkeys(name.split(".")[0] for name in source.tensors)) == order


def test_what_keras_trained_in_16_bits_is_bfloat16(tmp_path: Path) -> None:
    import keras

    layer = keras.layers.Conv2D(4, 3, name="brain", dtype="bfloat16")
    model = keras.Sequential([keras.Input((8, 8, 3)), layer])
    kernel = keras.ops.convert_to_numpy(keras.ops.cast(layer.kernel, "float32"))
    for source in saved(model, tmp_path).values():
        weight = source.tensors["brain.weight"]
        assert weight.dtype.name == "bfloat16"
        np.testing.assert_array_equal(weight.array().astype(np.float32), kernel.transpose(3, 2, 0, 1))


def test_parts_of_layers_and_layers_in_wrappers_have_names(tmp_path: Path) -> None:
    from keras import Input, Model, layers

    entrance = Input((4, 8, 8, 3))
    x = layers.TimeDistributed(layers.Conv2D(4, 3, name="held"), name="frames")(entrance)
    x = layers.Reshape((36, 16))(x)
    x = layers.LayerNormalization(name="ln")(layers.MultiHeadAttention(2, 3, name="heads")(x, x))
    for source in saved(Model(entrance, x), tmp_path).values():
        assert source.tensors["frames.weight"].shape == (4, 3, 3, 3)
        assert source.tensors["ln.weight"].shape == (16,)
        assert source.tensors["heads.query.kernel"].stored_shape == (16, 2, 3)


def test_a_trained_model_s_optimizer_is_left_out(tmp_path: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32))
    for source in saved(model, tmp_path).values():
        assert set(source.tensors) == {"fc.weight", "fc.bias"}
