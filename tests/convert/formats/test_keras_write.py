"""Files that we write for Keras: read back they are ours to the bit, in both conventions, and Keras 2's rules hold in them."""

from __future__ import annotations

import json
import sys
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch

import zoo
from convert import conversion, formats, names, writing
from convert.core import COUNTER
from convert.formats import keras as keras_files
from convert.formats._torch import stored
from convert.network import Layer, layers
from convert.source import Part, in_memory
from convert.steps import FlattenOrder
from weights.errors import ConvertError, MissingLibrary
from zoo.networks.model import Model

ENDINGS = (".hdf5", ".weights.h5")


def part(name: str, kind: str, groups: int = 1, grid: tuple[int, int, int] | None = None, **leaves: np.ndarray) -> Part:
    return Part(name, kind, {leaf: in_memory(leaf, array) for leaf, array in leaves.items()}, groups, grid=grid)


def ramp(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def network(cls: type[Model], **options: Any) -> Model:
    torch.manual_seed(0)
    made = cls(num_classes=7, **options).eval()
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point() and tensor.dim() == 1 and not (cls is zoo.InceptionV3 and name.endswith("bn.weight")):
            tensor.uniform_(0.1, 1)
    return made


@lru_cache(1)
def structure(made: Model) -> list[Layer]:
    """The layers of the network that a test has: finding them takes longer than writing them."""
    return layers(made, (made.in_channels, made.input_size, made.input_size))


def described(made: Model, naming: str = "keras") -> list[Part]:
    tensors = {name: stored(name, tensor) for name, tensor in made.state_dict().items() if not name.endswith(COUNTER)}
    shapes = {name: one.shape for name, one in tensors.items()}
    return writing.parts(names.rows(naming, type(made), shapes), structure(made), tensors)


def read(path: Path, made: Model, naming: str = "keras") -> dict[str, np.ndarray]:
    source = formats.read(path)
    try:
        shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
        adopted = conversion.adopt(source, structure(made), shapes, family=type(made), naming=naming)
        assert adopted.report.ok, conversion.explain(adopted, shapes)
        return {name: np.ascontiguousarray(one.array()) for name, one in adopted.tensors.items()}
    finally:
        source.close()


def same(found: dict[str, np.ndarray], made: Model) -> bool:
    wanted = {name: tensor.numpy() for name, tensor in made.state_dict().items() if not name.endswith(COUNTER)}
    return found.keys() == wanted.keys() and all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "cls",
    [
        zoo.SqueezeNet1_1,
        zoo.MobileNetV1_025,
        zoo.MobileNetV2_035,
        zoo.MobileNetV3Small,
        zoo.DenseNet121,
        zoo.SEResNet18,
        zoo.EfficientNetB0,
    ],
)
def test_what_is_written_reads_back_to_the_bit(cls: type[Model], ending: str, tmp_path: Path) -> None:
    made = network(cls)
    keras_files.write(described(made), tmp_path / f"a{ending}", metadata={})
    assert same(read(tmp_path / f"a{ending}", made), made)


@pytest.mark.parametrize("cls", [zoo.SqueezeNet1_1, zoo.MobileNetV1_025, zoo.ResNet50, zoo.InceptionV3, zoo.Xception])
def test_theanos_convention_reads_back_to_the_bit_and_is_another_file(cls: type[Model], tmp_path: Path) -> None:
    made = network(cls)
    keras_files.write(described(made), tmp_path / "a.h5", convention="convolution", metadata={})
    keras_files.write(described(made), tmp_path / "b.h5", convention="correlation", metadata={})
    assert same(read(tmp_path / "a.h5", made), made)
    with h5py.File(tmp_path / "a.h5") as theano, h5py.File(tmp_path / "b.h5") as tensorflow:
        assert (theano.attrs["backend"], tensorflow.attrs["backend"]) == ("theano", "tensorflow")
        assert [*theano.attrs["layer_names"]] == [*tensorflow.attrs["layer_names"]]
        for layer in theano.attrs["layer_names"]:
            for name in theano[layer].attrs["weight_names"]:
                flipped, plain = theano[layer][name][()], tensorflow[layer][name][()]
                turned = plain[::-1, ::-1] if name.endswith(b"/kernel:0") and plain.ndim == 4 else plain  # a depthwise kernel is not
                assert np.array_equal(flipped, turned)


def test_kernels_lie_as_keras_has_them(tmp_path: Path) -> None:
    conv, depthwise, transposed, dense = ramp(2, 3, 2, 5), ramp(6, 1, 2, 3), ramp(2, 3, 4, 5), ramp(3, 12)
    parts = [
        part("conv", "conv", weight=conv, bias=ramp(2)),
        part("dw", "depthwise", groups=3, weight=depthwise),
        part("up", "transposed", weight=transposed),
        part("sep.depthwise", "depthwise", groups=3, weight=depthwise),
        part("sep.pointwise", "conv", weight=ramp(4, 6, 1, 1), bias=ramp(4)),
        part("norm", "norm", bias=ramp(4), running_mean=ramp(4) + 1, running_var=ramp(4) + 2),
        part("dense", "linear", grid=(3, 2, 2), weight=dense, bias=ramp(3)),
    ]
    keras_files.write(parts, tmp_path / "a.h5", metadata={})
    with h5py.File(tmp_path / "a.h5") as file:
        stored = {name.decode(): file[layer][name][()] for layer in file.attrs["layer_names"] for name in file[layer].attrs["weight_names"]}
    assert [*stored] == [
        *("conv/kernel:0", "conv/bias:0", "dw/depthwise_kernel:0", "up/kernel:0"),
        *("sep/depthwise_kernel:0", "sep/pointwise_kernel:0", "sep/bias:0"),
        *("norm/beta:0", "norm/moving_mean:0", "norm/moving_variance:0", "dense/kernel:0", "dense/bias:0"),
    ]
    assert np.array_equal(stored["conv/kernel:0"], conv.transpose(2, 3, 1, 0))
    assert np.array_equal(stored["dw/depthwise_kernel:0"], depthwise.reshape(3, 2, 2, 3).transpose(2, 3, 0, 1))
    assert np.array_equal(stored["up/kernel:0"], transposed.transpose(2, 3, 1, 0))
    assert stored["sep/pointwise_kernel:0"].shape == (1, 1, 6, 4)
    hwc = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]  # of three channels of 2x2, counted as CHW
    assert np.array_equal(stored["dense/kernel:0"], dense[:, hwc].T)
    assert np.array_equal(FlattenOrder(3, 2, 2, "hwc").do(stored["dense/kernel:0"].T), dense)


def test_layers_are_counted_by_class(tmp_path: Path) -> None:
    parts = [part("a", "conv", weight=ramp(1, 1, 1, 1)), part("n", "norm", running_mean=ramp(1), running_var=ramp(1))]
    parts += [part("b", "conv", weight=ramp(2, 1, 1, 1)), part("c", "depthwise", weight=ramp(1, 1, 3, 3))]
    keras_files.write(parts, tmp_path / "a.weights.h5", metadata={})
    with h5py.File(tmp_path / "a.weights.h5") as file:
        found = {group: file["layers"][group]["vars"].attrs["name"] for group in file["layers"]}
    assert found == {"batch_normalization": "n", "conv2d": "a", "conv2d_1": "b", "depthwise_conv2d": "c"}


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
@pytest.mark.parametrize("ending", [".weights.h5", ".h5"])
def test_other_dtypes_keep_their_bits(dtype: str, ending: str, tmp_path: Path) -> None:
    weight = ramp(2, 3, 5, 4).astype(getattr(ml_dtypes, dtype, dtype))
    if (dtype, ending) == ("bfloat16", ".h5"):
        with pytest.raises(ConvertError, match="bfloat16"):
            keras_files.write([part("conv", "conv", weight=weight)], tmp_path / f"a{ending}", metadata={})
        return
    keras_files.write([part("conv", "conv", weight=weight)], tmp_path / f"a{ending}", metadata={})
    source = formats.read(tmp_path / f"a{ending}")
    found = source.tensors["conv.weight"].array()
    assert found.dtype == weight.dtype
    assert found.tobytes() == weight.tobytes()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_same_network_gives_the_same_bytes(ending: str, tmp_path: Path) -> None:
    made = described(network(zoo.MobileNetV1_025))
    for name in ("a", "b"):
        keras_files.write(made, tmp_path / f"{name}{ending}", metadata={"kernelzoo": '{"model":"MobileNetV1_025"}'})
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_many_layer_names_are_cut_into_several_attributes(tmp_path: Path) -> None:
    parts = [part(f"layer_{'x' * 100}_{number}", "linear", weight=ramp(1, 1)) for number in range(700)]
    keras_files.write(parts, tmp_path / "a.h5", metadata={})
    with h5py.File(tmp_path / "a.h5") as file:
        assert "layer_names" not in file.attrs
        assert len(file.attrs["layer_names0"]) + len(file.attrs["layer_names1"]) <= 700
    assert len(formats.read(tmp_path / "a.h5").tensors) == 700


def test_notes_travel_along_and_hurt_no_reader(tmp_path: Path) -> None:
    notes = json.dumps({"model": "MobileNetV1_025", "transforms": "x" * 200_000})
    made = network(zoo.MobileNetV1_025)
    for ending in ENDINGS:
        keras_files.write(described(made), tmp_path / f"a{ending}", metadata={"kernelzoo": notes})
        with h5py.File(tmp_path / f"a{ending}") as file:
            assert file["kernelzoo"][()].decode() == notes
        assert formats.read(tmp_path / f"a{ending}").facts["kernelzoo"] == notes
        assert same(read(tmp_path / f"a{ending}", made), made)


def test_shards_are_read_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"write them into one file, \.weights\.h5"):
        keras_files.write(described(network(zoo.MobileNetV1_025)), tmp_path / "a.weights.json", metadata={})
    assert not list(tmp_path.iterdir())


def test_efficientnets_file_holds_the_preprocessing_that_keras_does(tmp_path: Path) -> None:
    made = described(network(zoo.EfficientNetB0))
    keras_files.write(
        made, tmp_path / "a.weights.h5", metadata={"kernelzoo": '{"preprocessing":{"mean":[0.1,0.2,0.3],"std":[0.5,0.6,0.7]}}'}
    )
    told = formats.read(tmp_path / "a.weights.h5").preprocessing
    assert told["mean"] == pytest.approx((0.1, 0.2, 0.3))
    assert told["std"] == pytest.approx((0.5, 0.6, 0.7))
    keras_files.write(made, tmp_path / "b.weights.h5", metadata={})
    assert formats.read(tmp_path / "b.weights.h5").preprocessing["mean"] == pytest.approx((0.485, 0.456, 0.406))


@pytest.mark.parametrize("ending", [".weights.h5", ".keras", ".model.h5"])
def test_keras_3_has_no_true_convolution(ending: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="Theano"):
        keras_files.write([part("a", "conv", weight=ramp(1, 1, 1, 1))], tmp_path / f"a{ending}", convention="convolution", metadata={})


@pytest.mark.reference
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "needs its architecture"),
        ({"model": "SqueezeNet1_1"}, "no SqueezeNet1_1.*weights.h5"),
        ({"model": "MobileNetV1_025", "options": {}}, r"computes with padding = 'even', the network at hand with 'its default'"),
        ({"model": "MobileNetV1_050"}, "builds MobileNetV1_050 otherwise"),
    ],
)
def test_a_whole_model_that_would_compute_something_else_is_refused(told: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = described(network(zoo.MobileNetV1_025))
    with pytest.raises(ConvertError, match=message):
        keras_files.write(made, tmp_path / "a.keras", metadata={"kernelzoo": json.dumps(told)})


def test_without_keras_only_weights_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    made = network(zoo.MobileNetV1_025)
    notes = {"kernelzoo": '{"model":"MobileNetV1_025"}'}
    with pytest.raises(MissingLibrary, match="keras"):
        keras_files.write(described(made), tmp_path / "a.keras", metadata=notes)
    keras_files.write(described(made), tmp_path / "a.h5", metadata=notes)
    assert same(read(tmp_path / "a.h5", made), made)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("ending", [".keras", ".model.h5"])
def test_keras_loads_a_whole_model_and_computes_our_logits(ending: str, tmp_path: Path) -> None:
    import keras

    options = names.fact("keras", "options", zoo.MobileNetV1_025)
    made = network(zoo.MobileNetV1_025, **options)
    notes = {"kernelzoo": json.dumps({"model": "MobileNetV1_025", "options": options})}
    paths = [tmp_path / f"{name}{ending}" for name in "ab"]
    for path in paths:
        keras_files.write(described(made), path, metadata=notes)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    x = torch.empty(1, 3, 224, 224).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    model = keras.models.load_model(paths[0], compile=False)
    there = np.asarray(keras.ops.convert_to_numpy(model(x.permute(0, 2, 3, 1).numpy(), training=False)))
    with torch.inference_mode():
        here = made(x).numpy()
    assert np.abs(here - there).max() < 1e-4 * np.abs(there).max()
    assert same(read(paths[0], made), made)
    assert formats.read(paths[0]).facts["kernelzoo"] == notes["kernelzoo"]
    if ending == ".keras":
        with zipfile.ZipFile(paths[0]) as archive:
            assert json.loads(archive.read("metadata.json"))["kernelzoo"] == notes["kernelzoo"]


@pytest.mark.reference
def test_a_legacy_file_of_a_whole_mobilenet_v3_is_refused_as_keras_cannot_read_it(tmp_path: Path) -> None:
    made = described(network(zoo.MobileNetV3Small))
    with pytest.raises(ConvertError, match=r"write \.keras"):
        keras_files.write(made, tmp_path / "a.model.h5", metadata={"kernelzoo": '{"model":"MobileNetV3Small"}'})
