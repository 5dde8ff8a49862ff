"""Keras files of every dialect: small ones written here from the description of each, with scipy as the judge of orientation."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.signal import convolve2d, correlate2d

from convert import execute, formats
from convert.formats import keras
from convert.source import Source
from tests.convert.formats import seeds_keras as made
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat

OIHW = made.KERNEL.transpose(3, 2, 0, 1)


def expected(images: np.ndarray, filtered: Callable[..., np.ndarray], order: str) -> np.ndarray:
    """Compute the network of the seeds with scipy alone: convolution, ReLU, BatchNorm, flatten, dense, softmax."""
    maps = np.stack(
        [[sum(filtered(x[i], OIHW[o, i], "valid") for i in range(2)) + made.BIAS[o] for o in range(4)] for x in images.astype(float)]
    )
    maps = np.maximum(maps, 0)
    maps = (maps - 3) / np.sqrt(4 + 0.01) * 1 + 2
    vectors = maps.transpose(0, *(1 + "chw".index(letter) for letter in order)).reshape(len(images), -1)
    scores = vectors @ made.DENSE.astype(float)
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def load_all(path: Path) -> None:
    for stored in formats.read(path).tensors.values():
        stored.load()


def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 2, 8, 8))


def computed(source: Source) -> np.ndarray:
    assert source.graph is not None
    return execute.run(source, images())[source.graph.outputs[0]]


def test_every_dialect_gives_the_same_tensors(tmp_path: Path) -> None:
    for path in made.seeds(tmp_path):
        source = formats.read(path)
        assert source.format == "keras"
        if source.positional:
            continue
        np.testing.assert_array_equal(source.tensors["conv.weight"].array(), OIHW)
        np.testing.assert_array_equal(source.tensors["conv.bias"].array(), made.BIAS)
        np.testing.assert_array_equal(source.tensors["fc.weight"].array(), made.DENSE.T)
        for leaf, value in (("weight", 1), ("bias", 2), ("running_mean", 3), ("running_var", 4)):
            if path.suffix != ".json":
                assert source.tensors[f"bn.{leaf}"].array().tolist() == [value] * 4


def test_theano_kernels_are_true_convolutions_and_others_are_not(tmp_path: Path) -> None:
    for backend, convention in (("theano", "convolution"), ("tensorflow", "correlation"), ("cntk", "correlation"), ("jax", "correlation")):
        source = formats.read(made.keras_2(tmp_path / f"{backend}.h5", backend))
        assert source.conventions == {convention}
        judge = convolve2d if backend == "theano" else correlate2d
        np.testing.assert_allclose(computed(source), expected(images(), judge, "hwc"), atol=1e-9)
    flipped = formats.read(tmp_path / "theano.h5").tensors["conv.weight"]
    np.testing.assert_array_equal(flipped.as_correlation().array(), OIHW[:, :, ::-1, ::-1])


def test_theano_flips_only_some_layers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["backend"], file.attrs["keras_version"] = b"theano", b"2.2.4"
        kernel = np.ones((3, 3, 4, 5), np.float32)
        layers = [
            ("c", {"c/kernel:0": kernel}),
            ("t", {"t/kernel:0": kernel, "t/bias:0": np.ones(4, np.float32)}),
            ("d", {"d/depthwise_kernel:0": kernel}),
            ("s", {"s/depthwise_kernel:0": kernel, "s/pointwise_kernel:0": np.ones((1, 1, 20, 2), np.float32)}),
            ("one", {"one/kernel:0": np.ones((3, 4, 5), np.float32)}),
            ("three", {"three/kernel:0": np.ones((3, 3, 3, 4, 5), np.float32)}),
        ]
        made.put(file, "layer_names", layers)
    tensors = formats.read(tmp_path / "a.h5").tensors
    assert {name: stored.convention for name, stored in tensors.items() if stored.convention} == {
        "c.weight": "convolution",
        "t.weight": "convolution",
        "d.weight": "correlation",
        "s.depthwise.weight": "correlation",
        "s.pointwise.weight": "correlation",
        "one.weight": "convolution",
        "three.weight": "convolution",
    }
    assert {name: stored.shape for name, stored in tensors.items()} == {
        "c.weight": (5, 4, 3, 3),
        "t.weight": (5, 4, 3, 3),
        "t.bias": (4,),
        "d.weight": (20, 1, 3, 3),
        "s.depthwise.weight": (20, 1, 3, 3),
        "s.pointwise.weight": (2, 20, 1, 1),
        "one.weight": (5, 4, 3),
        "three.weight": (5, 4, 3, 3, 3),
    }


@pytest.mark.parametrize("ordering", ["th", "tf"])
def test_keras_1_kernels_are_read_in_either_ordering_and_nobody_knows_their_orientation(tmp_path: Path, ordering: str) -> None:
    source = formats.read(made.keras_1(tmp_path / "a.h5", ordering, config=False))
    np.testing.assert_array_equal(source.tensors["conv.weight"].array(), OIHW)
    assert source.conventions == {"unknown"}
    assert source.flatten == {"th": "chw", "tf": "hwc"}[ordering]


def test_the_names_of_the_old_application_files_say_what_their_kernels_are(tmp_path: Path) -> None:
    for kernels, convention in (("th", "convolution"), ("tf", "correlation")):
        path = made.keras_1(tmp_path / f"vgg_weights_th_dim_ordering_{kernels}_kernels.h5", "th", config=False)
        source = formats.read(path)
        assert source.conventions == {convention}
        assert f"{kernels}_kernels" in source.notes[0]


def test_the_running_std_of_keras_1_is_a_variance(tmp_path: Path) -> None:
    source = formats.read(made.keras_1(tmp_path / "a.h5"))
    assert source.tensors["bn.running_var"].array().tolist() == [4] * 4
    assert source.graph is not None
    norm = next(node for node in source.graph.nodes if node.name == "bn")
    assert norm.attrs == {"eps": 0.01, "moment": "variance"}


def test_keras_0_has_an_order_and_a_standard_deviation(tmp_path: Path) -> None:
    source = formats.read(made.keras_0(tmp_path / "a.h5"))
    assert source.positional
    assert list(source.tensors) == ["0", "1", "2"]
    assert source.layout is not None
    assert source.layout.convention == "unknown"
    first = source.tensors["0"]
    np.testing.assert_array_equal(first.then(*source.layout.steps("conv", "weight", first.stored_shape)).array(), OIHW)
    dense = source.tensors["2"]
    np.testing.assert_array_equal(dense.then(*source.layout.steps("linear", "weight", dense.stored_shape)).array(), made.DENSE.T)
    deviation = np.array([3.0, 0.5], np.float32)
    (step,) = source.layout.steps("norm", "running_var", (2,))
    np.testing.assert_allclose(step.do(deviation), [9.0, 0.25])


def test_names_that_are_split_over_attributes_are_joined(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        names = [f"layer_{number}" for number in range(12)]
        for part in range(3):
            file.attrs[f"layer_names{part}"] = [name.encode() for name in names[4 * part : 4 * part + 4]]
        for number, name in enumerate(names):
            group = file.create_group(name)
            group.attrs["weight_names0"], group.attrs["weight_names1"] = [f"{name}/kernel:0".encode()], [f"{name}/bias:0".encode()]
            group[f"{name}/kernel:0"], group[f"{name}/bias:0"] = np.full((2, 3), number), np.full(3, number)
    tensors = formats.read(tmp_path / "a.h5").tensors
    assert list(tensors) == [f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")]
    assert tensors["layer_10.weight"].array().tolist() == [[10, 10]] * 3


def test_a_batch_norm_without_scale_has_a_shift(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        names = ("beta", "moving_mean", "moving_variance")
        made.put(file, "layer_names", [("bn", {f"bn/{name}:0": np.full(2, number) for number, name in enumerate(names)})])
    with h5py.File(tmp_path / "b.weights.h5", "w") as file:
        for number in range(3):
            file[f"layers/batch_normalization/vars/{number}"] = np.full(2, number)
    for path, name in (("a.h5", "bn"), ("b.weights.h5", "batch_normalization")):
        tensors = formats.read(tmp_path / path).tensors
        values = {key.removeprefix(f"{name}."): int(stored.array()[0]) for key, stored in tensors.items()}
        assert values == {"bias": 0, "running_mean": 1, "running_var": 2}


def test_a_depthwise_kernel_keeps_channels_before_multipliers(tmp_path: Path) -> None:
    kernel = np.arange(2 * 2 * 3 * 2, dtype=np.float32).reshape(2, 2, 3, 2)
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["layers/depthwise_conv2d/vars/0"] = kernel
    weight = formats.read(tmp_path / "a.weights.h5").tensors["depthwise_conv2d.weight"].array()
    for channel in range(3):
        for multiplier in range(2):
            np.testing.assert_array_equal(weight[2 * channel + multiplier, 0], kernel[:, :, channel, multiplier])


def test_weights_without_names_are_called_by_class_and_number(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        for number in range(12):  # in the alphabet, conv2d_10 comes before conv2d_2
            name = f"conv2d_{number}" if number else "conv2d"
            file[f"_layer_checkpoint_dependencies/{name}/vars/0"] = np.full((1, 1, 1, 1), number, np.float32)
        file["optimizer/vars/0"] = np.zeros(3)
        file["_layer_checkpoint_dependencies/dropout/seed_generator/vars/0"] = np.zeros(2, np.uint32)
    source = formats.read(tmp_path / "a.weights.h5")
    assert source.facts["names"] == "class counters"
    assert list(source.tensors) == ["conv2d.weight", *(f"conv2d_{number}.weight" for number in range(1, 12))]
    assert [int(stored.array().item()) for stored in source.tensors.values()] == list(range(12))


def test_weights_with_names_have_those(tmp_path: Path) -> None:
    source = formats.read(made.keras_3(tmp_path / "a.weights.h5"))
    assert "names" not in source.facts
    assert {name.split(".")[0] for name in source.tensors} == {"conv", "bn", "fc"}
    old = formats.read(made.keras_3(tmp_path / "b.weights.h5", named=False, lists="_layer_checkpoint_dependencies"))
    assert {name.split(".")[0] for name in old.tensors} == {"conv2d", "batch_normalization", "dense"}


def test_an_archive_s_weights_are_looked_at_in_place_or_unpacked(tmp_path: Path) -> None:
    for path in (made.archive(tmp_path / "a.keras"), made.archive(tmp_path / "b.keras", packed=True)):
        source = formats.read(path)
        np.testing.assert_allclose(computed(source), expected(images(), correlate2d, "hwc"), atol=1e-9)
        assert source.facts["keras_version"] == "3.4.1"


def test_numpy_weights_in_an_archive_are_read_without_running_their_pickle(tmp_path: Path) -> None:
    layers = {"layers/conv2d": {"0": made.KERNEL, "1": made.BIAS}, "layers/dense": {"0": made.DENSE}}
    pickled: dict[str, Any] = {name: np.asanyarray(values, object) for name, values in layers.items()}
    np.savez(tmp_path / "w.npz", **pickled)
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as file:
        file.writestr("config.json", json.dumps(made.sequential()))
        file.write(tmp_path / "w.npz", "model.weights.npz")
    tensors = formats.read(tmp_path / "a.keras").tensors
    np.testing.assert_array_equal(tensors["conv.weight"].array(), OIHW)
    np.testing.assert_array_equal(tensors["fc.weight"].array(), made.DENSE.T)


def test_shards_are_joined_and_none_is_looked_for_elsewhere(tmp_path: Path) -> None:
    path = made.sharded(tmp_path / "a.weights.json")
    assert set(formats.read(path).tensors) == {"conv.weight", "conv.bias", "fc.weight"}
    (tmp_path / "a_00001.weights.h5").unlink()
    with pytest.raises(MalformedFile, match="a_00001"):
        formats.read(path)
    for name in ("../other.weights.h5", "/etc/x.weights.h5", "..\\x.weights.h5"):
        path.write_text(json.dumps({"weight_map": {"/vars": name}}))
        with pytest.raises(UnsafeFormat, match="own folder"):
            formats.read(path)


def test_a_lambda_is_named_and_never_run(tmp_path: Path) -> None:
    config = made.sequential()
    config["config"]["layers"].insert(1, {"class_name": "Lambda", "config": {"name": "code", "function": ["4wEAAAA=", None, None]}})
    path = made.keras_2(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file.attrs["model_config"] = json.dumps(config)
    source = formats.read(path)
    assert source.graph is not None
    assert source.graph.unknown == ["Lambda"]
    assert "conv.weight" in source.tensors


def test_a_config_that_makes_no_sense_costs_the_graph_only(tmp_path: Path) -> None:
    path = made.keras_2(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file.attrs["model_config"] = json.dumps({"class_name": "MyModel", "config": {"units": 3}})
    source = formats.read(path)
    assert source.graph is None
    assert "not understood" in source.notes[0]
    np.testing.assert_array_equal(source.tensors["conv.weight"].array(), OIHW)


def test_flatten_reads_the_order_of_its_maps(tmp_path: Path) -> None:
    for stated, order in ((None, "chw"), ("channels_last", "chw"), ("channels_first", "hwc")):
        config = made.sequential()
        for layer in config["config"]["layers"]:
            if layer["class_name"] == "Flatten":
                layer["config"] = {"name": "flatten", **({"data_format": stated} if stated else {})}
            elif layer["class_name"] == "Conv2D":
                layer["config"] |= {"data_format": "channels_first", "batch_input_shape": [None, 2, 8, 8]}
            elif layer["class_name"] == "BatchNormalization":
                layer["config"]["axis"] = 1
        path = made.keras_2(tmp_path / f"{stated}.h5")
        with h5py.File(path, "a") as file:
            file.attrs["model_config"] = json.dumps(config)
        source = formats.read(path)
        assert source.flatten == order
        np.testing.assert_allclose(computed(source), expected(images(), correlate2d, order), atol=1e-9)


def test_theano_pads_both_sides_alike_at_a_stride(tmp_path: Path) -> None:
    config = made.sequential()
    config["config"]["layers"][0]["config"] |= {"padding": "same", "strides": [2, 2]}
    pads = {}
    for backend in ("theano", "tensorflow"):
        path = made.keras_2(tmp_path / f"{backend}.h5", backend)
        with h5py.File(path, "a") as file:
            file.attrs["model_config"] = json.dumps(config)
        graph = formats.read(path).graph
        assert graph is not None
        pads[backend] = graph.nodes[1].attrs["pads"]
    assert pads == {"theano": (1, 1, 1, 1), "tensorflow": "same_upper"}


def test_models_that_call_models_a_million_times_are_refused(tmp_path: Path) -> None:
    model: dict[str, Any] = {"class_name": "Activation", "config": {"name": "a", "activation": "relu"}}
    for depth in range(30):  # 2 ** 30 layers in a few kilobytes
        layers = [
            {"class_name": "InputLayer", "name": "i", "config": {"name": "i"}, "inbound_nodes": []},
            {**model, "name": "m", "config": {**model["config"], "name": "m"}, "inbound_nodes": [[["i", 0, 0, {}]], [["m", 0, 0, {}]]]},
        ]
        config = {"name": f"f{depth}", "layers": layers, "input_layers": [["i", 0, 0]], "output_layers": [["m", 1, 0]]}
        model = {"class_name": "Functional", "config": config}
    path = made.keras_2(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        del file.attrs["model_config"]
        file.attrs["model_config"] = np.array(json.dumps(model), h5py.string_dtype())
    with pytest.raises(LimitExceeded, match="more than"):
        formats.read(path)


def test_what_is_not_keras_is_not_taken_for_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["results/run1"] = np.zeros(3)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("config.json", "{}")
    (tmp_path / "index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    (tmp_path / "a.txt.zip").write_bytes(zipped(**{"a.txt": "{}"}))
    for name in ("a.txt.zip", "index.json"):
        path = tmp_path / name
        assert not keras.sniff(path, path.read_bytes()[:4096])
    with pytest.raises(UnsupportedFormat, match="none of Keras's"):
        formats.read(tmp_path / "a.h5")
    with pytest.raises(MalformedFile, match="without weights"):
        formats.read(tmp_path / "a.zip")


def zipped(**members: str) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in members.items():
            file.writestr(name, text)
    return archive.getvalue()


@pytest.mark.parametrize("first", ["metadata.json", "config.json", "model.weights.h5"])
def test_an_archive_is_told_by_its_first_member_whichever_it_is(first: str, tmp_path: Path) -> None:
    good = next(path for path in made.seeds(tmp_path) if path.suffix == ".keras")
    with zipfile.ZipFile(good) as file:
        members = {name: file.read(name) for name in file.namelist()}
    path = tmp_path / "turned.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name in sorted(members, key=lambda name: name != first):
            file.writestr(name, members[name])
    with formats.read(path) as turned, formats.read(good) as plain:
        assert (turned.format, list(turned.tensors)) == ("keras", list(plain.tensors))


def test_a_file_cut_short_says_so(tmp_path: Path) -> None:
    for path in made.seeds(tmp_path):
        if path.suffix == ".json":
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(MalformedFile, match=path.name):
            load_all(path)
