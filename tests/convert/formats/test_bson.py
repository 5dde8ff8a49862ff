# ruff: noqa: RUF001 - Flux names its fields in Greek
"""BSON.jl's documents: every era of Flux, what they do not say, and what is written."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import bson as pymongo
import numpy as np
import pytest
import seeds_bson as made
import torch
from bson.int64 import Int64
from torch import Tensor
from torch.nn import functional as F

from convert import execute
from convert.formats import _bsondoc, bson, read, sniff
from convert.source import Convention, Part, Source, Stored, in_memory
from convert.steps import Moment
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[dict], Source]:
    return lambda document: read(made.save(document, tmp_path / "a.bson"))


def mnist(real: Path) -> tuple[Tensor, np.ndarray]:
    """Read MNIST's test set: images (10000, 1, 28, 28) on 0..1, rows first, and labels."""

    def numbers(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((real / "real" / "images" / "mnist" / name).read_bytes()), np.uint8, offset=header)

    images = numbers("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    return torch.tensor(images).float() / 255, numbers("t10k-labels-idx1-ubyte.gz", 8)


def tensors(stored: Sequence[Stored], convention: Convention) -> list[Tensor]:
    return [torch.tensor(item.as_correlation(convention).array().copy()) for item in stored]


def three_convolutions(t: Sequence[Tensor], x: Tensor) -> Tensor:
    for at in (0, 2, 4):
        x = F.max_pool2d(F.relu(F.conv2d(x, t[at], t[at + 1], padding=1)), 2)
    return F.linear(x.flatten(1), t[6], t[7])


@pytest.mark.real
def test_the_stored_accuracy_comes_out_flipped_and_with_rows_first_and_no_other_way(real: Path) -> None:
    source = read(real / "real" / "flux" / "tetsugps_mnist_conv.bson")
    assert source.positional
    assert source.layout is not None
    assert source.layout.convention == "unknown"
    assert source.spatial == "unknown"
    stored = []
    for number, item in enumerate(source.tensors.values()):
        kind, leaf = ("conv" if number < 6 else "linear"), source.layout.leaves["conv"][number % 2]
        item = item.then(*source.layout.steps(kind, leaf, item.stored_shape))
        stored.append(replace(item, convention="convolution") if len(item.shape) == 4 else item)
    images, labels = mnist(real)

    def accuracy(convention: str, x: Tensor) -> float:
        with torch.no_grad():
            return float((three_convolutions(tensors(stored, convention), x).argmax(1).numpy() == labels[: len(x)]).mean())

    columns_first = images.transpose(2, 3)  # the network has rows where PyTorch has columns
    right = accuracy("convolution", columns_first)
    few = slice(0, 2000)
    wrong = [accuracy("correlation", columns_first[few]), accuracy("convolution", images[few]), accuracy("correlation", images[few])]
    assert f"{right:.4f}" == source.facts["acc"] == "0.9928"
    assert max(wrong) < 0.25


@pytest.mark.real
def test_every_real_file_opens_and_gives_its_tensors(real: Path) -> None:
    counts = {}
    for path in sorted((real / "real" / "flux").glob("*.bson")):
        assert sniff(path) == "bson"
        source = read(path)
        counts[path.stem] = len([item.array() for item in source.tensors.values()])
        assert source.tensors or any("left out" in note for note in source.notes)
    assert counts == {
        "alphago_agz_base": 6,
        "alphago_weights_agz_base": 4,
        "bsonjl_test": 0,  # complex integers
        "bsonjl_test_41_from_32bit": 1,
        "bsonjl_test_41_from_64bit": 1,
        "bsonjl_test_MultiDimsArray_from_64bit": 1,
        "tetsugps_mnist_conv": 8,
    }


@pytest.mark.real
def test_alphagos_two_files_agree_and_its_batch_norm_keeps_a_standard_deviation(real: Path) -> None:
    folder = real / "real" / "flux"
    whole, listed = read(folder / "alphago_agz_base.bson"), read(folder / "alphago_weights_agz_base.bson")
    assert [np.array_equal(listed.tensors[str(i)].load(), whole.tensors[name].load()) for i, name in enumerate(ORDER)] == [True] * 4
    spread = whole.tensors["layers.2.running_var"]
    assert spread.steps == (Moment("std", 1e-5),)
    np.testing.assert_allclose(np.sqrt(spread.array().astype("f8") + 1e-5), spread.load(), rtol=1e-5)
    assert whole.graph is not None
    assert whole.graph.nodes[2].attrs["moment"] == "std"


ORDER = ("layers.1.weight", "layers.1.bias", "layers.2.bias", "layers.2.weight")
"""What `Flux.params` lists of Chain(Conv, BatchNorm): beta before gamma."""


def test_a_params_list_has_beta_before_gamma() -> None:
    from convert.formats._flux import layout

    assert layout().leaves["norm"] == ("bias", "weight")


def test_dense_weights_of_a_list_come_out_transposed_and_kernels_as_they_lie() -> None:
    from convert.formats._flux import layout

    steps = layout().steps
    assert [str(step) for step in steps("linear", "weight", (9, 7))] == ["transpose(1,0)"]
    assert steps("conv", "weight", (4, 3, 3, 5)) == () == steps("linear", "bias", (7,))
    assert [str(step) for step in steps("depthwise", "weight", (3, 2, 3, 3))] == ["reshape(3x2x3x3 to 6x1x3x3)"]


def test_a_tracker_era_chain_is_seen_through_with_w_b_and_backrefs(opened: Callable[[dict], Source]) -> None:
    source = opened(document := made.tracker_era())
    assert list(source.tensors) == [
        *("layers.1.weight", "layers.1.bias"),
        *("layers.2.weight", "layers.2.bias", "layers.2.running_mean", "layers.2.running_var"),
        *("layers.3.weight", "layers.3.bias"),
    ]
    refs = [np.frombuffer(item["data"], "f4") for item in document["_backrefs"]]
    assert np.array_equal(source.tensors["layers.2.bias"].array(), refs[2])
    assert np.array_equal(source.tensors["layers.2.weight"].array(), refs[3])
    assert np.array_equal(source.tensors["layers.3.weight"].array(), refs[4].reshape(4, 7).T)
    assert source.conventions == {"convolution"}
    assert source.framework.startswith("Flux.jl 0.4 to 0.7")


def test_dense_of_flux_0_4_has_its_activation_first(opened: Callable[[dict], Source]) -> None:
    weight, bias = made.floats(4, 7), made.floats(7)
    old = made.struct("Flux", "Dense", data=[made.RELU, made.array(weight), made.array(bias)])
    source = opened({"model": made.struct("Flux", "Chain", data=[[old]])})
    assert np.array_equal(source.tensors["layers.1.weight"].array(), weight.T)
    assert source.graph is not None
    assert [node.op for node in source.graph.nodes] == ["input", "dense", "relu"]


def test_later_batch_norms_keep_a_variance(opened: Callable[[dict], Source]) -> None:
    fields = [made.RELU, *(made.array(made.floats(4)) for _ in range(4)), 1e-5, 0.1, True]
    source = opened({"model": made.struct("Flux", "Chain", data=[made.tuple_of(made.struct("Flux", "BatchNorm", data=fields))])})
    assert source.tensors["layers.1.running_var"].steps == ()


def test_a_depthwise_conv_of_its_own_has_the_multiplier_before_the_channel(opened: Callable[[dict], Source]) -> None:
    weight = made.floats(3, 2, 3, 3)  # reversed: channel, multiplier
    source = opened(made.tracker_era(weight))
    stored = source.tensors["layers.1.weight"]
    assert np.array_equal(stored.array(), weight.reshape(6, 1, 3, 3))
    assert stored.convention == "convolution"


def test_cross_cor_is_not_flipped_and_conv_is(opened: Callable[[dict], Source]) -> None:
    chain = made.struct(
        "Flux", "Chain", data=[made.tuple_of(*(made.conv(made.floats(4, 4, 3, 3), False, name=n) for n in ("CrossCor", "Conv")))]
    )
    source = opened({"model": chain})
    assert [source.tensors[f"layers.{n}.weight"].convention for n in (1, 2)] == ["correlation", "convolution"]
    assert "layers.1.bias" not in source.tensors
    kernel = source.tensors["layers.2.weight"]
    assert np.array_equal(kernel.as_correlation().array(), kernel.load()[:, :, ::-1, ::-1])


def test_a_state_tells_conv_from_cross_cor_by_the_groups_it_keeps(opened: Callable[[dict], Source]) -> None:
    source = opened(made.state())
    assert source.tensors["layers.1.weight"].convention == "convolution"
    assert source.tensors["layers.3.weight"].convention == "correlation"
    assert source.tensors["layers.4.running_var"].steps == ()
    assert any("optimiser" in note for note in source.notes)
    assert source.graph is None
    assert source.spatial == "unknown"


def test_kernels_without_their_layers_fields_are_taken_for_conv_only_in_a_chain(opened: Callable[[dict], Source]) -> None:
    bare = {"weight": made.array(made.floats(4, 3, 3, 3)), "bias": made.array(made.floats(4))}
    chained = opened({"state": made.named(layers=made.tuple_of(made.named(**bare)))})
    assert chained.conventions == {"convolution"}
    assert any("taken for Flux's Conv" in note for note in chained.notes)
    alone = opened({"state": {"stem": bare}})
    assert alone.conventions == {"unknown"}
    assert any("nothing says" in note for note in alone.notes)


def test_a_conv_transpose_in_a_state_is_known_by_its_bias(opened: Callable[[dict], Source]) -> None:
    fields = {
        "weight": made.array(made.floats(8, 5, 2, 2)),
        "bias": made.array(made.floats(10)),
        "stride": made.ints(2, 2),
        "groups": Int64(2),
    }
    source = opened({"state": made.named(layers=made.tuple_of(made.named(**fields)))})
    assert source.tensors["layers.1.weight"].shape == (8, 5, 2, 2)
    assert source.conventions == {"convolution"}


def test_params_of_zygote_give_a_list_in_order(opened: Callable[[dict], Source]) -> None:
    arrays = [made.floats(4, 3, 3, 3), made.floats(4), made.floats(9, 7)]
    source = opened(made.zygote_params(arrays))
    assert source.positional
    assert all(np.array_equal(source.tensors[str(i)].load(), array) for i, array in enumerate(arrays))


def test_lazy_transposes_are_undone(opened: Callable[[dict], Source]) -> None:
    weight = made.floats(4, 7)
    wrapped = made.struct("LinearAlgebra", "Adjoint", data=[made.array(weight)])
    dense = made.struct("Flux", "Dense", data=[wrapped, made.array(made.floats(4)), made.IDENTITY])
    source = opened({"model": made.struct("Flux", "Chain", data=[made.tuple_of(dense)])})
    assert np.array_equal(source.tensors["layers.1.weight"].array(), weight)  # transposed twice


def test_metalheads_files_of_2018_are_never_flipped(opened: Callable[[dict], Source]) -> None:
    for document in (made.caffe2(), {"weights": made.struct("Base", "Dict", data=[list(made.caffe2()), list(made.caffe2().values())])}):
        source = opened(document)
        assert source.conventions == {"correlation"}
        assert source.spatial == "hw"
        assert source.tensors["gpu_0/pred.weight"].shape == (5, 4)  # (out, in) as it lies
        assert {"gpu_0/res_conv1_bn." + leaf for leaf in ("weight", "bias", "running_mean", "running_var")} <= set(source.tensors)


def test_a_state_of_a_metalhead_model_is_told_by_the_struct_around_it(opened: Callable[[dict], Source]) -> None:
    conv = made.named(weight=made.array(made.floats(4, 3, 3, 3)), stride=made.ints(1, 1), groups=Int64(1))
    chain = made.named(layers=made.tuple_of(made.named(layers=made.tuple_of(conv))))
    assert opened({"model_state": made.named(layers=chain)}).spatial == "hw"
    assert opened({"model_state": chain}).spatial == "unknown"


def test_a_whole_model_is_executed_as_pytorch_computes_it(opened: Callable[[dict], Source]) -> None:
    model = made.modern()
    model["data"][0]["data"].pop()  # the closure
    source = opened({"model": model})
    t = {name: torch.tensor(item.as_correlation().array().copy()).double() for name, item in source.tensors.items()}
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = F.max_pool2d(F.relu(F.conv2d(x, t["layers.1.weight"], t["layers.1.bias"], padding=1)), 2)
    inner = "layers.3.layers.layers."
    b = F.conv2d(a, t[inner + "1.weight"], padding=1)
    mean, variance, gamma, beta = (t[f"{inner}2.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias"))
    a = a + F.relu(F.batch_norm(b, mean, variance, gamma, beta, eps=1e-5))
    a = torch.cat([F.relu(F.conv2d(a, t["layers.4.layers.1.weight"], t["layers.4.layers.1.bias"])), a], 1)
    wanted = F.linear(F.avg_pool2d(a, 2).flatten(1), t["layers.8.weight"], t["layers.8.bias"])
    assert source.graph is not None
    source.spatial = "hw"  # what the file does not say
    got = execute.run(source, x.numpy())[source.graph.outputs[0]]
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-10, atol=1e-10)


def test_a_metalhead_model_saved_whole_is_a_chain_in_a_struct(opened: Callable[[dict], Source]) -> None:
    bound = made.struct(
        "PartialFunctions", "PartialFunction", data=[made.function("Metalhead", "addact"), made.tuple_of(made.RELU), made.named()]
    )
    block = made.struct("Flux", "Parallel", data=[bound, made.tuple_of(made.IDENTITY, made.conv(made.floats(3, 3, 3, 3), False))])
    chain = made.struct("Flux", "Chain", data=[made.tuple_of(block)])
    source = opened({"model": made.struct("Metalhead", "ResNet", data=[chain])})
    assert source.spatial == "hw"
    assert source.conventions == {"convolution"}
    assert list(source.tensors) == ["layers.layers.1.layers.2.weight"]
    assert source.graph is not None
    assert [node.op for node in source.graph.nodes] == ["input", "conv", "relu", "add", "relu"]
    assert source.graph.nodes[3].inputs == ("input", "layers.layers.1.layers.2.σ")


def test_strides_and_pads_come_out_rows_first(opened: Callable[[dict], Source]) -> None:
    layer = made.conv(made.floats(4, 3, 3, 3), False, activation=made.IDENTITY)
    layer["data"][3], layer["data"][4] = made.ints(1, 2), made.ints(3, 4, 5, 6)  # Julia's first axis is the last one here
    source = opened({"model": made.struct("Flux", "Chain", data=[made.tuple_of(layer)])})
    assert source.graph is not None
    node = source.graph.nodes[1]
    assert node.attrs["stride"] == (2, 1)
    assert node.attrs["pads"] == (5, 3, 6, 4)  # top, left, bottom, right


def test_closures_stay_dark(opened: Callable[[dict], Source]) -> None:
    source = opened({"model": made.modern()})
    assert source.graph is not None
    assert source.graph.unknown == ["closure"]


@pytest.mark.parametrize("convention", ["convolution", "correlation"])
def test_written_files_come_back_bit_for_bit(tmp_path: Path, convention: Convention) -> None:
    parts = made.parts()
    bson.write(parts, tmp_path / "a.bson", convention=convention, metadata={"who": "a test"})
    source = read(tmp_path / "a.bson")
    assert source.conventions == {convention}
    assert source.facts["who"] == "a test"
    assert source.spatial == "hw"
    wanted = {f"{part.name}.{leaf}": item for part in parts for leaf, item in part.leaves.items() if leaf != "num_batches_tracked"}
    assert set(source.tensors) == set(wanted)
    for name, item in wanted.items():
        got = source.tensors[name].as_correlation().array()
        assert got.dtype == item.dtype
        assert np.array_equal(got, item.array()), name


@pytest.mark.reference
def test_written_files_are_bson_to_another_reader_with_every_integer_of_64_bits(tmp_path: Path) -> None:
    parts = made.parts()
    bson.write(parts, tmp_path / "a.bson")
    data = (tmp_path / "a.bson").read_bytes()
    document = pymongo.decode(data)
    assert pymongo.encode(document) == data
    conv = document["model_state"]["layers"]["1"]["layers"]["1"]
    assert conv["weight"]["size"] == [5, 3, 3, 4]
    assert type(conv["weight"]["size"][0]) is Int64
    assert type(conv["groups"]) is Int64
    kernel = np.frombuffer(conv["weight"]["data"], "<f4").reshape(5, 3, 3, 4, order="F")  # as Julia sees it: W, H, I, O
    assert np.array_equal(kernel, parts[0].leaves["weight"].array()[:, :, ::-1, ::-1].transpose(3, 2, 1, 0))
    assert set(document["model_state"]["layers"]["1"]["layers"]["2"]) == {"γ", "β", "μ", "σ²"}


def test_the_same_modules_give_the_same_bytes(tmp_path: Path) -> None:
    parts = made.parts()
    for name in ("a.bson", "b.bson"):
        bson.write(parts, tmp_path / name, metadata={"b": "2", "a": "1"})
    assert (tmp_path / "a.bson").read_bytes() == (tmp_path / "b.bson").read_bytes()


def test_a_dtype_that_julia_has_not_is_refused(tmp_path: Path) -> None:
    part = Part("layers.1", "linear", {"weight": in_memory("w", np.zeros((2, 2), "c8"))})
    with pytest.raises(UnsupportedFormat, match="cast it to float32"):
        bson.write([part], tmp_path / "a.bson")


def test_more_than_2_gib_are_refused_with_a_word_on_jld2(tmp_path: Path) -> None:
    huge = Stored("w", (2**15, 2**15), np.dtype("f4"), lambda: np.empty(0))
    with pytest.raises(UnsupportedFormat, match="JLD2 has no such limit"):
        bson.write([Part("layers.1", "linear", {"weight": huge})], tmp_path / "a.bson")


def test_names_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    parts = [Part("layers.1", "linear", {"weight": in_memory("w", made.floats(2, 2))}), Part("layers.1.weight", "norm", {})]
    with pytest.raises(UnsupportedFormat, match="lies inside a tensor"):
        bson.write(parts, tmp_path / "a.bson")


def test_a_tensor_is_a_view_of_the_file(opened: Callable[[dict], Source]) -> None:
    source = opened({"params": [made.array(made.floats(4, 3, 3, 3)), made.array(made.floats(4))]})
    array = source.tensors["0"].load()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_shared_references_that_multiply_are_refused(opened: Callable[[dict], Source]) -> None:
    def ref(number: int) -> dict:
        return {"tag": "backref", "ref": Int64(number)}

    backrefs = [made.array(made.floats(1)), *(made.tuple_of(ref(n), ref(n)) for n in range(1, 60))]
    with pytest.raises(LimitExceeded, match="describes more than"):
        opened({"model": ref(60), "_backrefs": backrefs})


def test_references_in_a_circle_end(opened: Callable[[dict], Source]) -> None:
    loop = made.tuple_of({"tag": "backref", "ref": Int64(1)}, made.array(made.floats(2)))
    assert list(opened({"model": {"tag": "backref", "ref": Int64(1)}, "_backrefs": [loop]}).tensors) == ["2"]
    with pytest.raises(MalformedFile, match="of 0"):
        opened({"model": {"tag": "backref", "ref": Int64(1)}})


@pytest.mark.parametrize("size", [[2**40], [-1, -4], [3], [2**62, 2**62]])
def test_sizes_that_do_not_fill_the_bytes_are_refused(opened: Callable[[dict], Source], size: list[int]) -> None:
    array = made.array(made.floats(4)) | {"size": [Int64(n) for n in size]}
    with pytest.raises(MalformedFile, match="array of"):
        opened({"params": [array]})


def test_documents_that_nest_for_ever_are_refused() -> None:
    data = b"\x05\0\0\0\0"
    for _ in range(1000):
        data = (len(data) + 8).to_bytes(4, "little") + b"\x03a\0" + data + b"\0"
    with pytest.raises(LimitExceeded, match="nest deeper"):
        _bsondoc.parse(memoryview(data))


def test_more_elements_than_any_network_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bsondoc, "MAX_ELEMENTS", 10)
    with pytest.raises(LimitExceeded, match="more than 10 elements"):
        _bsondoc.parse(memoryview(pymongo.encode({"a": list(range(20))})))


@pytest.mark.parametrize("cut", [4, 5, 40, -1])
def test_a_cut_file_says_so(tmp_path: Path, cut: int) -> None:
    data = made.save({"params": [made.array(made.floats(4))]}, tmp_path / "a.bson").read_bytes()
    (tmp_path / "a.bson").write_bytes(data[:cut])
    with pytest.raises(ConvertError, match=r"a\.bson"):
        read(tmp_path / "a.bson")


def test_an_element_that_bson_jl_does_not_write_is_refused(opened: Callable[[dict], Source]) -> None:
    with pytest.raises(UnsupportedFormat, match=r"BSON\.jl writes no such thing"):
        opened({"a": 1, "b": pymongo.Regex("a")})
