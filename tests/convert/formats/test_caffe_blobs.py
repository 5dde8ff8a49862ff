"""Caffe's tensors: every way in which they were ever stored, what becomes of a BatchNorm, and damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import seeds_caffe as made
from seeds_caffe import Layer

from convert.formats import caffe, sniff
from weights.errors import ConvertError, LimitExceeded, MalformedFile

DRAW = np.random.default_rng(0)


def read(folder: Path, data: bytes, name: str = "net.caffemodel") -> caffe.Source:
    path = folder / name
    path.write_bytes(data)
    return caffe.read(path)


def normal(*dims: int) -> np.ndarray:
    return DRAW.normal(0, 1, dims).astype("f4")


@pytest.mark.parametrize("style", made.STYLES)
def test_every_way_to_store_numbers_reads_alike(tmp_path: Path, style: str) -> None:
    source = read(tmp_path, made.v2(made.old(), style=style))
    conv, _, _, dense, _ = made.old()
    expected = {"conv1.weight": conv.blobs[0], "conv1.bias": conv.blobs[1], "fc.weight": dense.blobs[0], "fc.bias": dense.blobs[1]}
    assert list(source.tensors) == list(expected)
    for name, array in expected.items():
        stored = source.tensors[name]
        assert stored.shape == array.shape
        assert stored.stored_dtype == ("<f8" if "double" in style else "<f4")
        np.testing.assert_array_equal(stored.array(), array)


def test_all_three_generations_of_layers_read_alike(tmp_path: Path) -> None:
    header = made.inputs("data", made.DATA)
    sources = [read(tmp_path, encode(made.old(), header=header), f"{encode.__name__}.caffemodel") for encode in (made.v0, made.v1, made.v2)]
    assert [source.facts["layers"] for source in sources] == ["layers of 2013", "layers of 2014", "layers of 2014 and later"]
    for source in sources:
        assert source.graph == sources[2].graph
        assert source.graph is not None
        assert source.graph.nodes[0].attrs["shape"] == made.DATA[1:]
        for name, stored in sources[2].tensors.items():
            np.testing.assert_array_equal(source.tensors[name].array(), stored.array())


def test_packed_numbers_are_views_of_the_file(tmp_path: Path) -> None:
    array = read(tmp_path, made.v2(made.old())).tensors["conv1.weight"].array()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_kernels_are_of_correlation_and_nothing_else_has_a_convention(tmp_path: Path) -> None:
    source = read(tmp_path, made.v2(made.small()))
    conventions = {name: stored.convention for name, stored in source.tensors.items() if stored.convention}
    assert conventions == dict.fromkeys(("conv1.weight", "dw.weight", "wide.weight", "up.weight"), "correlation")


def test_batchnorm_divides_by_its_factor_and_takes_in_its_scale(tmp_path: Path) -> None:
    mean, variance, gamma, beta = normal(4), np.abs(normal(4)), normal(4), normal(4)
    layers = [
        Layer("bn", "BatchNorm", ["x"], ["x"], [mean * 999.98, variance * 999.98, np.array([999.98], "f4")]),
        Layer("scale", "Scale", ["x"], ["x"], [gamma, beta]),
    ]
    tensors = read(tmp_path, made.v2(layers)).tensors
    assert list(tensors) == ["bn.running_mean", "bn.running_var", "bn.weight", "bn.bias"]
    for leaf, value in (("running_mean", mean), ("running_var", variance), ("weight", gamma), ("bias", beta)):
        np.testing.assert_allclose(tensors[f"bn.{leaf}"].array(), value, rtol=2e-7)
    assert abs(tensors["bn.running_var"].load() / variance - 1).min() > 900


def test_a_factor_of_zero_means_that_nothing_was_gathered(tmp_path: Path) -> None:
    layers = [Layer("bn", "BatchNorm", ["x"], ["x"], [normal(4), normal(4), np.zeros(1, "f4")])]
    tensors = read(tmp_path, made.v2(layers)).tensors
    assert not tensors["bn.running_mean"].array().any()
    assert not tensors["bn.running_var"].array().any()


@pytest.mark.parametrize(
    "order", [("weight", "bias", "running_mean", "running_var", ""), ("running_mean", "running_var", "", "weight", "bias")]
)
def test_forks_with_five_blobs_are_told_apart_by_the_place_of_the_scalar(tmp_path: Path, order: tuple[str, ...]) -> None:
    values = {leaf: normal(4) for leaf in order if leaf}
    blobs = [values[leaf] if leaf else np.array([2], "f4") for leaf in order]
    tensors = read(tmp_path, made.v2([Layer("bn", "BatchNorm", ["x"], ["y"], blobs)])).tensors
    assert set(tensors) == {f"bn.{leaf}" for leaf in values}
    for leaf, value in values.items():
        np.testing.assert_array_equal(tensors[f"bn.{leaf}"].array(), value / 2 if leaf.startswith("running") else value)


def test_a_scale_that_someone_else_reads_too_stays_alone(tmp_path: Path) -> None:
    statistics = [normal(4), np.abs(normal(4)), np.ones(1, "f4")]
    layers = [
        Layer("bn", "BatchNorm", ["x"], ["y"], statistics),
        Layer("scale", "Scale", ["y"], ["z"], [normal(4), normal(4)]),
        Layer("sum", "Eltwise", ["y", "z"], ["sum"], params={"eltwise_param": {"operation": "SUM"}}),
    ]
    source = read(tmp_path, made.v2(layers))
    assert list(source.tensors) == ["bn.running_mean", "bn.running_var", "scale.weight", "scale.bias"]
    assert source.graph is not None
    assert [(node.name, node.op, node.inputs) for node in source.graph.nodes[1:]] == [
        ("bn", "norm", ("x",)),
        ("scale", "scale", ("bn",)),
        ("sum", "add", ("bn", "scale")),
    ]


def test_a_file_that_says_nothing_of_who_reads_whom_joins_neighbours(tmp_path: Path) -> None:
    layers = [
        Layer("bn", "BatchNorm", blobs=[normal(4), np.abs(normal(4)), np.ones(1, "f4")]),
        Layer("scale", "Scale", blobs=[normal(4), normal(4)]),
    ]
    source = read(tmp_path, made.v2(layers))
    assert {name.partition(".")[0] for name in source.tensors} == {"bn"}
    assert source.graph is None
    assert any("no graph" in note for note in source.notes)


def test_a_transposed_dense_weight_lies_the_other_way(tmp_path: Path) -> None:
    weight = normal(3, 5)
    layer = Layer("fc", "InnerProduct", ["x"], ["y"], [weight], {"inner_product_param": {"num_output": 5, "transpose": True}})
    np.testing.assert_array_equal(read(tmp_path, made.v2([layer])).tensors["fc.weight"].array(), weight.T)


def test_layers_for_training_only_are_left_out(tmp_path: Path) -> None:
    data = Layer("train", "Data", top=["data", "label"], include="TRAIN")
    loss = Layer("loss", "SoftmaxWithLoss", ["fc", "label"], ["loss"])
    extra = Layer("extra", "InnerProduct", ["fc"], ["extra"], [normal(2, 5)], {"inner_product_param": {"num_output": 2}}, include="TRAIN")
    source = read(tmp_path, made.v2([data, *made.old()[:4], extra, loss]))
    assert source.graph is not None
    assert source.graph.outputs == ("fc",)
    assert not any(name.startswith("extra") for name in source.tensors)


def test_two_layers_of_one_name_stay_two(tmp_path: Path) -> None:
    layers = [Layer("fc", "InnerProduct", [f"x{i}"], [f"y{i}"], [normal(2, 3)]) for i in range(2)]
    assert list(read(tmp_path, made.v2(layers)).tensors) == ["fc.weight", "fc#2.weight"]


def test_a_layer_that_nobody_knows_keeps_its_blobs(tmp_path: Path) -> None:
    source = read(tmp_path, made.v2([Layer("lstm", "LSTM", ["x", "cont"], ["h"], [normal(8, 3), normal(8), normal(8, 2)])]))
    assert list(source.tensors) == ["lstm.blob0", "lstm.blob1", "lstm.blob2"]
    assert source.graph is not None
    assert source.graph.unknown == ["LSTM"]


def test_means_of_the_data_layer_become_preprocessing(tmp_path: Path) -> None:
    transform = {"transform_param": {"mean_value": [104.0, 117.0, 123.0], "scale": 0.017}}
    source = read(tmp_path, made.v2([Layer("d", "Data", top=["data"], params=transform), *made.old()]))
    assert source.preprocessing["channel_order"] == "bgr"
    assert source.preprocessing["mean"] == pytest.approx((104 / 255, 117 / 255, 123 / 255))
    assert source.preprocessing["std"] == pytest.approx((1 / (0.017 * 255),) * 3)


def test_a_mean_image_beside_the_file_is_read_as_the_mean_of_each_channel(tmp_path: Path) -> None:
    image = np.stack([np.full((4, 5), mean, "f4") for mean in (104, 117, 123)])[None]
    (tmp_path / "mean.binaryproto").write_bytes(made.blob(image, "legacy packed"))
    source = read(tmp_path, made.v2(made.old()))
    assert source.preprocessing["mean"] == pytest.approx((104 / 255, 117 / 255, 123 / 255))
    (tmp_path / "mean.binaryproto").write_bytes(b"\x0a\xff")
    assert read(tmp_path, made.v2(made.old())).preprocessing == {}


def test_a_mean_file_elsewhere_is_not_opened(tmp_path: Path) -> None:
    image = made.blob(np.ones((1, 3, 2, 2), "f4"), "legacy packed")
    (tmp_path / "elsewhere.binaryproto").write_bytes(image)
    inside = tmp_path / "inside"
    inside.mkdir()
    layer = Layer("d", "Data", top=["data"], params={"transform_param": {"mean_file": str(tmp_path / "elsewhere.binaryproto")}})
    assert "mean" not in read(inside, made.v2([layer, *made.old()])).preprocessing


def test_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    for path in made.seeds(tmp_path):
        assert sniff(path) == "caffe"
    renamed = tmp_path / "weights.bin"
    renamed.write_bytes(made.v2(made.old()))
    assert caffe.sniff(renamed, renamed.read_bytes()[:4096])
    for other in (b"PK\3\4", b"\x89HDF", b'{"a": 1}', b"\x0a\x03one\ntwo", b"", b"\x12"):
        assert not caffe.sniff(tmp_path / "x.caffemodel", other)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_malformed(tmp_path: Path, keep: float) -> None:
    whole = made.v2(made.small())
    with pytest.raises(MalformedFile, match=r"net\.caffemodel"):
        read(tmp_path, whole[: int(len(whole) * keep)])


def net(blob: bytes) -> bytes:
    return made.chunk(100, made.chunk(1, "c") + made.chunk(2, "Convolution") + made.chunk(7, blob))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (net(made.chunk(5, bytes(16)) + made.chunk(7, made.shape((5,)))), "has 4 numbers"),
        (net(made.chunk(5, bytes(7))), "no whole number"),
        (net(made.chunk(5, bytes(8)) + made.chunk(8, bytes(8))), "two sizes"),
        (net(made.chunk(5, bytes(8)) + made.tag(5, 5) + bytes(3)), "cut short"),
        (net(made.chunk(5, bytes(4)) + made.chunk(7, made.shape((-1,)))), "claims the shape"),
        (net(made.chunk(7, made.shape((2**40, 2**40)))), "claims the shape"),
        (made.chunk(1, "net"), "no layers"),
        (made.v2([Layer("relu", "ReLU", ["x"], ["y"])]), "no tensor"),
        (made.tag(100, 2) + made.varint(2**60), "claims"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(MalformedFile, match=said):
        read(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        net(made.chunk(5, bytes(4)) + made.chunk(7, made.shape([1] * 9))),
        net(b"".join(made.chunk(5, bytes(4)) for _ in range(10_001))),
        made.chunk(1, "n") + made.chunk(100, made.chunk(106, made.chunk(4, b"\1" * 2_000_001))),
    ],
    ids=["axes", "pieces", "fields"],
)
def test_limits_hold(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(LimitExceeded):
        read(tmp_path, data)


def test_mutated_files_raise_one_kind_of_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    seeds = [path.read_bytes() for path in made.seeds(tmp_path)[:4]]
    for number in range(200):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(int(rng.integers(1, 6))):
            at = int(rng.integers(len(data)))
            data[at : at + int(rng.integers(1, 4))] = rng.bytes(int(rng.integers(0, 5)))
        try:
            for stored in read(tmp_path, bytes(data)).tensors.values():
                stored.array()
        except ConvertError:
            pass
