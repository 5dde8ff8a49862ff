"""Darknet: where each number of a file belongs, what its sections compute, and what is written and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import seeds_darknet as made

import zoo
from convert import execute, network, writing
from convert.core import Row, modules
from convert.formats import darknet, sniff
from convert.source import Part, in_memory
from weights.errors import ConvertError, MalformedFile, UnsupportedFormat

NET = "[net]\nwidth=4\nheight=4\nchannels=2\n"
BEFORE = ("bias", "weight", "running_mean", "running_var")


def arrays() -> list[np.ndarray]:
    return made.numbers(shape for section in made.SHAPES for shape in section)


def read(folder: Path, cfg: str, data: bytes) -> darknet.Source:
    return darknet.read(made.save(folder / "files", cfg, data))


@pytest.mark.parametrize("version", made.VERSIONS)
def test_every_number_lands_where_darknets_reader_puts_it(tmp_path: Path, version: str) -> None:
    source = read(tmp_path, made.CFG, made.encode(arrays(), made.VERSIONS[version]))
    conv, grouped, up, dense = np.split(np.array(arrays(), object), [5, 7, 9])
    expected = {
        **{f"0.norm.{leaf}": value for leaf, value in zip(BEFORE, conv, strict=False)},
        "0.conv.weight": conv[4],
        "2.conv.bias": grouped[0],
        "2.conv.weight": grouped[1],
        "8.conv.bias": up[0],
        "8.conv.weight": up[1],
        "9.norm.bias": dense[0],
        "9.dense.weight": dense[1].reshape(-1, 5).T if version == "transposed" else dense[1],
        **{f"9.norm.{leaf}": value for leaf, value in zip(BEFORE[1:], dense[2:], strict=True)},
    }
    assert list(source.tensors) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(source.tensors[name].array(), value)
    assert source.facts["images seen"] == "64"
    assert {name for name, stored in source.tensors.items() if stored.convention} == {"0.conv.weight", "2.conv.weight", "8.conv.weight"}


def test_the_two_darknets_normalise_differently(tmp_path: Path) -> None:
    attrs = {}
    for version in ("pjreddie", "AlexeyAB"):
        graph = read(tmp_path, made.CFG, made.encode(arrays(), made.VERSIONS[version])).graph
        assert graph is not None
        attrs[version] = next(node for node in graph.nodes if node.op == "norm").attrs
    assert attrs == {"pjreddie": {"eps": 1e-6, "moment": "sqrt+eps"}, "AlexeyAB": {"eps": 1e-5, "moment": "variance"}}


@pytest.mark.reference
def test_the_graph_computes_what_opencv_computes(tmp_path: Path) -> None:
    import cv2

    cfg = made.CFG[: made.CFG.index("[deconvolutional]")] + "[convolutional]\nfilters=2\nsize=1\nactivation=linear\n"
    data = [*arrays()[:7], *made.numbers([(2,), (2, 6, 1, 1)])]
    source = read(tmp_path, cfg, made.encode(data))
    images = np.random.default_rng(0).random((1, 4, 10, 12), "f4")
    net = cv2.dnn.readNetFromDarknet(str(source.path.with_suffix(".cfg")), str(source.path))
    net.setInput(images)
    expected = net.forward("conv_8")
    assert source.graph is not None
    (end,) = source.graph.outputs
    np.testing.assert_allclose(execute.run(source, images)[end], expected, rtol=1e-4, atol=1e-5)


def test_maxpool_of_two_at_stride_one_keeps_the_size(tmp_path: Path) -> None:
    source = read(
        tmp_path,
        NET + "[convolutional]\nfilters=1\nactivation=linear\n[maxpool]\nsize=2\nstride=1\n",
        made.encode(made.numbers([(1,), (1, 2, 1, 1)])),
    )
    images = np.zeros((1, 2, 4, 4))
    images[0, 0] = np.arange(16).reshape(4, 4)
    values = execute.run(source, images, keep=["0.conv", "1.maxpool"])
    expected = np.pad(values["0.conv"][0, 0], ((0, 1), (0, 1)), mode="edge")  # Darknet looks one pixel right and below
    np.testing.assert_array_equal(
        values["1.maxpool"][0, 0], np.maximum.reduce([expected[i : i + 4, j : j + 4] for i in (0, 1) for j in (0, 1)])
    )


@pytest.mark.parametrize(("version", "biases"), [("pjreddie", False), ("AlexeyAB", True)])
def test_a_lone_batchnorm_has_biases_in_one_darknet_only(tmp_path: Path, version: str, biases: bool) -> None:
    values = made.numbers([(2,)] * (4 if biases else 3))
    source = read(tmp_path, NET + "[batchnorm]\n", made.encode(values, made.VERSIONS[version]))
    assert list(source.tensors) == [f"0.norm.{leaf}" for leaf in (BEFORE if biases else BEFORE[1:])]
    for stored, value in zip(source.tensors.values(), values, strict=True):
        np.testing.assert_array_equal(stored.array(), value)


Shapes = dict[str, tuple[int, ...]]


def layers(sizes: dict[str, tuple[int, int]], kind: str, kernel: tuple[int, ...] = ()) -> Shapes:
    """List biases and weights of the layers inside a recurrent section, each from so many channels to so many."""
    found: Shapes = {}
    for name, (before, after) in sizes.items():
        found |= {f"{name}.{kind}.bias": (after,), f"{name}.{kind}.weight": (after, before, *kernel)}
    return found


SECTIONS: dict[str, Shapes] = {
    "[local]\nfilters=3\nsize=3\n": {"local.bias": (3, 2, 2), "local.weight": (4, 3, 2, 3, 3)},
    "[convolutional]\nfilters=3\nsize=3\nflipped=1\n": {"conv.bias": (3,), "conv.weight": (2, 3, 3, 3)},
    "[convolutional]\nfilters=3\nnumload=2\n": {"conv.bias": (2,), "conv.weight": (2, 2, 1, 1)},
    "[convolutional]\nfilters=3\nbatch_normalize=1\ndontloadscales=1\n": {"norm.bias": (3,), "conv.weight": (3, 2, 1, 1)},
    "[connected]\noutput=3\n": {"dense.bias": (3,), "dense.weight": (3, 32)},
    "[shortcut]\nfrom=0\nweights_type=per_feature\n": {"shortcut.weight": (2,)},
    "[implicit_add]\nfilters=7\n": {"implicit.weight": (7,)},
    "[rnn]\nhidden=3\noutput=4\n": layers({"input": (32, 3), "self": (3, 3), "output": (3, 4)}, "dense"),
    "[lstm]\noutput=3\n": layers({side + gate: (width, 3) for side, width in (("w", 32), ("u", 3)) for gate in "ifog"}, "dense"),
    "[gru]\noutput=3\n": layers({side + gate: (width, 3) for side, width in (("w", 32), ("u", 3)) for gate in "zrh"}, "dense"),
    "[crnn]\nhidden_filters=3\noutput_filters=4\n": layers({"input": (2, 3), "self": (3, 3), "output": (3, 4)}, "conv", (3, 3)),
}


@pytest.mark.parametrize(("section", "shapes"), SECTIONS.items(), ids=[section.replace("\n", " ").strip() for section in SECTIONS])
def test_every_section_with_numbers_takes_its_own(tmp_path: Path, section: str, shapes: Shapes) -> None:
    first = "[convolutional]\nfilters=2\nactivation=linear\n"
    lead = [(2,), (2, 2, 1, 1)]
    values = made.numbers([*lead, *shapes.values()])
    source = read(tmp_path, NET + first + section, made.encode(values))
    assert list(source.tensors)[2:] == [f"1.{name}" for name in shapes]
    for (name, stored), value, shape in zip(list(source.tensors.items())[2:], values[2:], shapes.values(), strict=True):
        if "flipped" in section and name.endswith("weight"):
            # written as the matrix (weights of a filter, filters)
            np.testing.assert_array_equal(stored.array(), value.reshape(18, 3).T.reshape(3, 2, 3, 3))
        else:
            assert stored.shape == shape
            np.testing.assert_array_equal(stored.array(), value)


def test_a_file_that_was_cut_off_on_purpose_says_where(tmp_path: Path) -> None:
    source = read(tmp_path, made.CFG, made.encode(arrays()[:5]))
    assert len(source.tensors) == 5
    assert any("end with section 0; none are left for 2 sections behind, from 2 on" in note for note in source.notes)


def test_sections_that_are_not_to_be_loaded_have_no_numbers(tmp_path: Path) -> None:
    cfg = made.CFG.replace("filters=6\ngroups=3", "filters=6\ndontload=1\ngroups=3")
    values = arrays()
    source = read(tmp_path, cfg, made.encode(values[:5] + values[7:]))
    assert "2.conv.weight" not in source.tensors
    np.testing.assert_array_equal(source.tensors["8.conv.weight"].array(), values[8])
    assert any("dontload" in note for note in source.notes)


@pytest.mark.parametrize(("floats", "said"), [(-1, "ends within section 9"), (1, "another network's description")])
def test_numbers_that_the_description_does_not_explain_are_malformed(tmp_path: Path, floats: int, said: str) -> None:
    data = made.encode(arrays())
    with pytest.raises(MalformedFile, match=said):
        read(tmp_path, made.CFG, data[: 4 * floats] if floats < 0 else data + bytes(4 * floats))


@pytest.mark.parametrize(
    ("cfg", "error", "said"),
    [
        ("filters=3\n", MalformedFile, "no setting of a section"),
        ("[convolutional]\n", MalformedFile, "not \\[net\\]"),
        (NET + "[route]\nlayers=5\n", MalformedFile, "refers to"),
        (NET + "[conv_lstm]\n", UnsupportedFormat, "conv_lstm"),
        (NET + "[convolutional]\ngroups=3\n", MalformedFile, "3 groups"),
        (NET + "[convolutional]\nstride=0\n", MalformedFile, "Darknet file"),
        (NET + "[convolutional]\nfilters=-2\n", MalformedFile, "shapes"),
        (NET + "[convolutional]\nfilters=1000000000000\nsize=100\n", MalformedFile, "ends within"),
        (NET + "# kernelzoo {\n", MalformedFile, "line 5 is no JSON"),
    ],
)
def test_descriptions_that_make_no_sense_say_so(tmp_path: Path, cfg: str, error: type[ConvertError], said: str) -> None:
    with pytest.raises(error, match=said):
        read(tmp_path, cfg, made.encode(arrays()))


def test_without_description_the_numbers_come_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "net.weights"
    path.write_bytes(made.encode(arrays()))
    assert sniff(path) == "darknet"
    source = darknet.read(path)
    assert source.positional
    assert list(source.tensors) == ["0"]
    np.testing.assert_array_equal(source.tensors["0"].array(), np.concatenate([array.reshape(-1) for array in arrays()]))
    assert "net.cfg" in source.notes[0]


def parts_of(cls: type[zoo.Model]) -> list[Part]:
    model = cls()
    state = {name: np.random.default_rng(0).normal(0, 1, value.shape).astype("f4") for name, value in model.state_dict().items()}
    rows = [Row(module, module, kind) for module, kind in modules({name: value.shape for name, value in state.items()}).items()]
    layers = network.layers(model, (3, cls.input_size, cls.input_size))
    return writing.parts(rows, layers, {name: in_memory(name, value) for name, value in state.items()})


SMALL = ("SqueezeNet1_1", "ResNet20", "MobileNetV3Small", "MobileNetV1_025", "DenseNet_BC_100_12", "SEResNet18", "DenseNet121")
"""Every kind of module: gates, depthwise kernels, BatchNorms before convolutions, biases. InceptionV3's flat kernels are below."""


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize("name", SMALL)
def test_what_is_written_reads_back_bit_for_bit(tmp_path: Path, name: str, convention: str) -> None:
    parts = parts_of(zoo.CATALOGUE[name])
    path = tmp_path / "net.weights"
    darknet.write(parts, path, convention=convention, metadata={"source": "a file\nof two lines"})
    source = darknet.read(path)
    assert source.facts["source"] == "a file\nof two lines"
    assert source.conventions == {convention}
    expected = {f"{part.name}.{leaf}": stored for part in parts for leaf, stored in part.leaves.items()}
    assert set(source.tensors) == set(expected)
    for tensor, stored in expected.items():
        assert source.tensors[tensor].as_correlation().array().tobytes() == stored.array().tobytes()
        if convention == "convolution" and stored.shape[2:] == (3, 3):
            assert source.tensors[tensor].array().tobytes() != stored.array().tobytes()


def part(name: str, kind: str, groups: int = 1, **leaves: tuple[int, ...]) -> Part:
    rng = np.random.default_rng(0)
    return Part(name, kind, {leaf: in_memory(leaf, rng.normal(0, 1, shape).astype("f4")) for leaf, shape in leaves.items()}, groups)


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize(
    "parts",
    [
        [part("flat", "conv", weight=(4, 3, 1, 7)), part("tall", "conv", weight=(4, 4, 3, 1), bias=(4,))],
        [part("up", "transposed", weight=(4, 3, 2, 2)), part("bn", "norm", running_mean=(3,), running_var=(3,))],
        [part("fc", "linear", weight=(4, 6)), part("bn", "norm", bias=(4,), running_mean=(4,), running_var=(4,))],
        [part("c", "conv", weight=(4, 6, 1, 1), bias=(4,)), part("bn", "norm", weight=(4,), running_mean=(4,), running_var=(4,))],
    ],
)
def test_what_sections_can_not_say_reads_back_all_the_same(tmp_path: Path, parts: list[Part], convention: str) -> None:
    path = tmp_path / "net.weights"
    darknet.write(parts, path, convention=convention, metadata={})
    source = darknet.read(path)
    expected = {f"{each.name}.{leaf}": stored for each in parts for leaf, stored in each.leaves.items()}
    assert set(source.tensors) == set(expected)
    for name, stored in expected.items():
        np.testing.assert_array_equal(source.tensors[name].as_correlation().array(), stored.array())


def test_the_same_parts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        darknet.write(parts_of(zoo.ResNet20), tmp_path / f"{name}.weights", convention="correlation", metadata={"x": "y"})
    assert (tmp_path / "a.weights").read_bytes() == (tmp_path / "b.weights").read_bytes()
    assert (tmp_path / "a.cfg").read_bytes() == (tmp_path / "b.cfg").read_bytes()


@pytest.mark.reference
def test_a_batchnorm_without_convolution_computes_the_same_in_darknets_words(tmp_path: Path) -> None:
    import cv2

    norm = part("bn", "norm", weight=(3,), bias=(3,), running_mean=(3,), running_var=(3,))
    leaves = {**norm.leaves, "running_var": in_memory("v", np.array([0.5, 1, 2], "f4"))}
    path = tmp_path / "net.weights"
    darknet.write([Part("bn", "norm", leaves)], path, convention="correlation", metadata={})
    cfg = path.with_suffix(".cfg").read_text().replace("[net]", "[net]\nwidth=4\nheight=4\nchannels=3")
    path.with_suffix(".cfg").write_text(cfg)
    images = np.random.default_rng(0).normal(0, 1, (1, 3, 4, 4)).astype("f4")
    net = cv2.dnn.readNetFromDarknet(str(path.with_suffix(".cfg")), str(path))
    net.setInput(images)
    gamma, beta, mean, variance = (leaves[leaf].array().reshape(3, 1, 1) for leaf in ("weight", "bias", "running_mean", "running_var"))
    np.testing.assert_allclose(net.forward(), (images - mean) / np.sqrt(variance + 1e-5) * gamma + beta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (part("even", "conv", weight=(4, 3, 2, 3)), "even"),
        (part("line", "conv", weight=(4, 3, 3)), "line"),
        (part("up", "transposed", 2, weight=(4, 3, 2, 2)), "up is a transposed convolution of 2 groups"),
        (part("slopes", "other", weight=(4,)), "slopes"),
        (part("layernorm", "norm", weight=(4,), bias=(4,)), "layernorm"),
    ],
)
def test_what_darknet_has_no_section_for_is_refused_by_name(tmp_path: Path, bad: Part, said: str) -> None:
    with pytest.raises(ConvertError, match=said):
        darknet.write([bad], tmp_path / "net.weights", convention="correlation", metadata={})


def test_a_listing_whose_fillings_were_changed_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "net.weights"
    darknet.write(
        [part("c", "conv", weight=(2, 1, 1, 1)), part("flat", "conv", weight=(1, 1, 1, 3))], path, convention="correlation", metadata={}
    )
    data = bytearray(path.read_bytes())
    data[20:24] = np.float32(1).tobytes()
    path.write_bytes(data)
    source = darknet.read(path)
    assert source.tensors["c.bias"].array().tolist() == [1, 0]
    data[40:44] = np.float32(1).tobytes()  # among the zeros
    path.write_bytes(data)
    with pytest.raises(MalformedFile, match="is not zero"):
        darknet.read(path).tensors["flat.weight"].array()


def test_mutated_files_raise_one_kind_of_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for path in made.seeds(tmp_path):
        files = [file for file in (path, path.with_suffix(".cfg")) if file.is_file()]
        whole = [file.read_bytes() for file in files]
        for number in range(60):
            file, data = files[number % len(files)], bytearray(whole[number % len(files)])
            for _ in range(3):
                data[int(rng.integers(min(len(data), 300)))] = int(rng.integers(256))
            file.write_bytes(data)
            try:
                for stored in darknet.read(path).tensors.values():
                    stored.array()
            except ConvertError:
                pass
            file.write_bytes(whole[number % len(files)])


@pytest.mark.real
def test_yolo_fastest_is_consumed_to_the_last_float(real: Path) -> None:
    path = real / "real" / "darknet" / "yolo-fastest-1.1.weights"
    assert sniff(path) == "darknet"
    source = darknet.read(path)
    assert sum(stored.load().size for stored in source.tensors.values()) == 346_062
    assert source.notes == []
    assert source.graph is not None
    assert source.graph.unknown == []
    assert source.graph.outputs == ("120.conv", "129.conv")


@pytest.mark.real
@pytest.mark.reference
def test_yolo_fastest_computes_what_opencv_computes(real: Path, tmp_path: Path) -> None:
    import dataclasses

    import cv2

    path = real / "real" / "darknet" / "yolo-fastest-1.1.weights"
    smaller = tmp_path / "net.cfg"
    smaller.write_text(path.with_suffix(".cfg").read_text().replace("width=320", "width=96").replace("height=320", "height=64"))
    (tmp_path / "net.weights").write_bytes(path.read_bytes())
    source = darknet.read(tmp_path / "net.weights")
    assert source.graph is not None
    images = np.random.default_rng(0).random((1, 3, 64, 96), "f4")
    net = cv2.dnn.readNetFromDarknet(str(smaller), str(path))
    net.setInput(images)
    expected = net.forward("conv_129")
    own = execute.run(source, images)["129.conv"]
    assert abs(own - expected).max() < 2e-3 * abs(expected).max()
    # OpenCV adds 1e-6 to every variance, AlexeyAB's Darknet 1e-5
    nodes = [dataclasses.replace(n, attrs={**n.attrs, "eps": 1e-6}) if n.op == "norm" else n for n in source.graph.nodes]
    source.graph = dataclasses.replace(source.graph, nodes=tuple(nodes))
    np.testing.assert_allclose(execute.run(source, images)["129.conv"], expected, atol=1e-4)
