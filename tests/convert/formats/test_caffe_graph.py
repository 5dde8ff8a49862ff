"""Caffe's networks executed: OpenCV, which reads the same files with a reader of its own, is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds_caffe as made
from seeds_caffe import Layer

from convert import execute
from convert.formats import _caffe_prototxt as prototxt
from convert.formats import caffe
from convert.graph import Graph
from weights.errors import LimitExceeded, MalformedFile

DRAW = np.random.default_rng(0)
CONV = "convolution_param"
POOL = "pooling_param"


def normal(*dims: int) -> np.ndarray:
    return DRAW.normal(0, 0.5, dims).astype("f4")


def opened(folder: Path, layers: list[Layer], data: tuple[int, ...] = made.DATA) -> caffe.Source:
    path = folder / "net.caffemodel"
    path.write_bytes(made.v2(layers))
    path.with_suffix(".prototxt").write_text(made.prototxt(layers, data))
    return caffe.read(path)


def opencv(folder: Path, images: np.ndarray, layer: str) -> np.ndarray:
    import cv2

    network = cv2.dnn.readNetFromCaffe(str(folder / "net.prototxt"), str(folder / "net.caffemodel"))
    network.setInput(images)
    return network.forward(layer)


def agree(folder: Path, layers: list[Layer], data: tuple[int, ...] = made.DATA) -> None:
    """Compare the values of the last layer."""
    source = opened(folder, layers, data)
    images = DRAW.normal(0, 1, data).astype("f4")
    expected = opencv(folder, images, layers[-1].name)
    got = execute.run(source, images, keep=[layers[-1].name])[layers[-1].name]
    assert got.size == expected.size
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


@pytest.mark.reference
def test_a_network_of_every_layer_computes_what_opencv_computes(tmp_path: Path) -> None:
    for count in (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 17):  # where it goes wrong first is the layer that is wrong
        agree(tmp_path, made.small()[:count])


def conv(size: int = 3, **params: Any) -> Layer:
    groups = params.get("group", 1)
    return Layer(
        "c",
        "Convolution",
        ["data"],
        ["c"],
        [normal(6, 3 // groups, size, size), normal(6)],
        {CONV: {"num_output": 6, "kernel_size": size, **params}},
    )


@pytest.mark.reference
@pytest.mark.parametrize(
    "layers",
    [
        [conv(stride=2, pad=1)],
        [conv(dilation=2, pad=2)],
        [conv(group=3)],
        [conv(1, pad=1)],
        [conv(), Layer("p", "Pooling", ["c"], ["p"], params={POOL: {"pool": "MAX", "kernel_size": 3, "stride": 2}})],
        [conv(), Layer("p", "Pooling", ["c"], ["p"], params={POOL: {"pool": "MAX", "kernel_size": 3, "stride": 2, "pad": 1}})],
        [conv(), Layer("p", "Pooling", ["c"], ["p"], params={POOL: {"pool": "AVE", "kernel_size": 3, "stride": 2}})],
        [conv(), Layer("p", "Pooling", ["c"], ["p"], params={POOL: {"pool": "AVE", "global_pooling": True}})],
        [conv(), Layer("s", "Scale", ["c"], ["s"], [normal(6), normal(6)], {"scale_param": {"bias_term": True}})],
        [conv(), Layer("e", "Eltwise", ["c", "c"], ["e"], params={"eltwise_param": {"operation": "PROD"}})],
        [conv(), Layer("e", "Eltwise", ["c", "c"], ["e"], params={"eltwise_param": {"operation": "SUM", "coeff": [0.5, 2.0]}})],
        [conv(), Layer("f", "Flatten", ["c"], ["f"])],
        [
            conv(),
            Layer("permute", "Permute", ["c"], ["permute"], params={"permute_param": {"order": [0, 2, 3, 1]}}),
            Layer("f", "Flatten", ["permute"], ["f"]),
        ],
        [
            conv(),
            Layer("cut", "Slice", ["c"], ["left", "right"], params={"slice_param": {"axis": 1, "slice_point": [2]}}),
            Layer("r", "Concat", ["right", "left"], ["r"], params={"concat_param": {"axis": 1}}),
        ],
        [
            conv(),
            Layer(
                "fc",
                "InnerProduct",
                ["c"],
                ["fc"],
                [normal(4, 6 * 14 * 18)],
                {"inner_product_param": {"num_output": 4, "bias_term": False}},
            ),
            Layer("fc2", "InnerProduct", ["fc"], ["fc2"], [normal(3, 4)], {"inner_product_param": {"num_output": 3, "bias_term": False}}),
        ],
    ],
    ids=lambda layers: "-".join(layer.type for layer in layers),
)
def test_each_layer_computes_what_opencv_computes(tmp_path: Path, layers: list[Layer]) -> None:
    agree(tmp_path, layers)


@pytest.mark.reference
def test_the_file_alone_says_as_much_as_its_description(tmp_path: Path) -> None:
    described = opened(tmp_path, made.small()).graph
    (tmp_path / "net.prototxt").unlink()
    (tmp_path / "net.caffemodel").write_bytes(made.v2(made.small(), header=made.inputs("data", made.DATA)))
    alone = caffe.read(tmp_path / "net.caffemodel").graph
    assert described is not None
    assert alone is not None
    assert [(node.name, node.op, node.inputs) for node in alone.nodes] == [(node.name, node.op, node.inputs) for node in described.nodes]
    for ours, theirs in zip(alone.nodes, described.nodes, strict=True):
        assert ours.attrs.keys() == theirs.attrs.keys()
        for name, value in ours.attrs.items():
            expected = theirs.attrs[name]
            assert value == (pytest.approx(expected) if isinstance(expected, float) else expected)


def graph(folder: Path, layers: list[Layer]) -> Graph:
    found = opened(folder, layers).graph
    assert found is not None
    return found


def test_layers_in_place_are_layers_of_their_own(tmp_path: Path) -> None:
    nodes = graph(tmp_path, made.small()).nodes
    assert [(node.name, node.inputs) for node in nodes[:4]] == [
        ("data", ()),
        ("conv1", ("data",)),
        ("conv1/bn", ("conv1",)),
        ("relu1", ("conv1/bn",)),
    ]
    assert nodes[2].attrs == {"eps": pytest.approx(1e-3), "moment": "variance", "factor": 7.0}


def test_pooling_rounds_up_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for mode, expected in (({}, "caffe"), ({"round_mode": "FLOOR"}, "floor")):
        pool = Layer("p", "Pooling", ["c"], ["p"], params={POOL: {"pool": "AVE", "kernel_size": 3, "stride": 2, **mode}})
        node = graph(tmp_path, [conv(), pool]).nodes[-1]
        assert (node.attrs["rounding"], node.attrs["count_pad"]) == (expected, "caffe")


def test_response_normalisation_has_all_its_numbers(tmp_path: Path) -> None:
    numbers = {"local_size": 3, "alpha": 0.5, "beta": 0.25, "k": 2.0}  # OpenCV takes k for 1
    node = graph(tmp_path, [conv(), Layer("n", "LRN", ["c"], ["n"], params={"lrn_param": numbers})]).nodes[-1]
    assert node.attrs == {"size": 3, "alpha": 0.5, "beta": 0.25, "k": 2.0}


def test_splits_that_caffe_puts_in_disappear(tmp_path: Path) -> None:
    split = Layer("split", "Split", ["c"], ["c_0", "c_1"])
    both = Layer("sum", "Eltwise", ["c_0", "c_1"], ["sum"], params={"eltwise_param": {"operation": "SUM"}})
    assert graph(tmp_path, [conv(), split, both]).nodes[-1].inputs == ("c", "c")


def test_a_gate_of_squeeze_and_excitation_is_a_product_and_a_sum(tmp_path: Path) -> None:
    gate = [
        conv(),
        Layer("mean", "Pooling", ["c"], ["mean"], params={POOL: {"pool": "AVE", "global_pooling": True}}),
        Layer("out", "Axpy", ["mean", "c", "c"], ["out"]),
    ]
    source = opened(tmp_path, gate)
    assert source.graph is not None
    assert source.graph.unknown == []
    values = execute.run(source, DRAW.normal(0, 1, made.DATA), keep=["c", "mean", "out"])
    np.testing.assert_allclose(values["out"], values["mean"] * values["c"] + values["c"], rtol=1e-12)


def test_what_has_no_words_here_is_called_unknown(tmp_path: Path) -> None:
    assert graph(tmp_path, [conv(), Layer("m", "MVN", ["c"], ["m"])]).unknown == ["MVN"]


def test_a_description_of_another_network_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(made.v2(made.old()))
    path.with_suffix(".prototxt").write_text(made.prototxt(made.small(), made.DATA))
    source = caffe.read(path)
    assert "prototxt" not in source.facts
    assert any("left out" in note and "'conv1/bn'" in note for note in source.notes)
    assert source.graph is not None


def test_a_damaged_description_costs_the_description_only(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(made.v2(made.old()))
    path.with_suffix(".prototxt").write_text("layer { name: 'open'")
    source = caffe.read(path)
    assert len(source.tensors) == 4
    assert any("net.prototxt is left out" in note for note in source.notes)


def test_weights_that_the_description_lacks_are_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(made.v2(made.old()))
    path.with_suffix(".prototxt").write_text(made.prototxt(made.old()[:3], made.DATA))
    source = caffe.read(path)
    assert "fc.weight" in source.tensors
    assert any("not in the description, and in no graph: 1 layer with tensors" in note and "fc" in note for note in source.notes)


def test_text_format_reads_what_people_write() -> None:
    text = """
    # a comment
    name: "quoted \\"twice\\"" input_dim: 1, input_dim: 0x10;
    layer < type: 'Input' top: "a" > layer: { x: -1.5e-3f  flag: true word: LMDB list: [1, 2, 3] }
    """
    assert prototxt.parse(text) == {
        "name": ['quoted "twice"'],
        "input_dim": [1, 16],
        "layer": [
            {"type": ["Input"], "top": ["a"]},
            {"x": [-0.0015], "flag": [True], "word": ["LMDB"], "list": [1, 2, 3]},
        ],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer {\n  name: 'a'\n", "ends with"),
        ("layer { name: 'a' >", "ends with"),
        ("a: 1\n}", "line 2"),
        ("a: 1\n\x00", "line 2"),
        ("a: }", "wanted a value"),
        ("1: 2", "wanted the name"),
        ("a: [1, 2", "wanted a value"),
    ],
)
def test_text_that_is_none_says_where(text: str, said: str) -> None:
    with pytest.raises(MalformedFile, match=said):
        prototxt.parse(text)


def test_text_that_nests_without_end_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        prototxt.parse("a {" * 100_000)


def test_an_input_that_is_called_like_a_layer_is_not_that_layer(tmp_path: Path) -> None:
    layers = [
        Layer("bn", "BatchNorm", ["bn"], ["bn"], [normal(3), abs(normal(3)), np.ones(1, "f4")]),
        Layer("scale", "Scale", ["bn"], ["bn"], [normal(3), normal(3)]),
    ]
    source = opened(tmp_path, layers)
    assert {name.partition(".")[0] for name in source.tensors} == {"bn"}
    assert source.graph is not None
    assert [(node.name, node.op, node.inputs) for node in source.graph.nodes] == [("bn:input", "input", ()), ("bn", "norm", ("bn:input",))]
