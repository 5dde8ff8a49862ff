"""Deep Compression's container: the published one bit for bit, and small ones that are made here."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import seeds_deepcompression as made

from convert.formats import caffe, deepcompression, sniff
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat


def test_weights_come_out_as_they_went_in(tmp_path: Path) -> None:
    (path,) = made.seeds(tmp_path)
    assert sniff(path) == "deepcompression"
    source = deepcompression.read(path)
    assert source.conventions == {"correlation"}
    for name, (weight, bias) in made.network().items():
        np.testing.assert_array_equal(source.tensors[f"{name}.weight"].array(), weight)
        np.testing.assert_array_equal(source.tensors[f"{name}.bias"].array(), bias)
    assert source.graph is not None
    assert [node.op for node in source.graph.nodes] == ["input", "conv", "relu", "conv"]


@pytest.mark.parametrize("change", [-1, 1, -600])
def test_a_file_of_another_length_is_malformed(tmp_path: Path, change: int) -> None:
    (path,) = made.seeds(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(MalformedFile, match="damaged, or the description is of another network"):
        deepcompression.read(path)


def test_entries_beyond_the_weights_are_malformed(tmp_path: Path) -> None:
    (path,) = made.seeds(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\xff" * 4)
    with pytest.raises(MalformedFile, match="conv2 has 60 weights"):
        deepcompression.read(path).tensors["conv2.weight"].array()


def test_a_description_with_dense_layers_is_refused(tmp_path: Path) -> None:
    (path,) = made.seeds(tmp_path)
    more = 'layer { name: "fc6" type: "InnerProduct" bottom: "conv2" top: "fc6" inner_product_param { num_output: 5 } }'
    path.with_suffix(".prototxt").write_text(made.PROTOTXT + more)
    with pytest.raises(UnsupportedFormat, match="'fc6'"):
        deepcompression.read(path)


def test_a_description_that_claims_millions_of_weights_is_refused(tmp_path: Path) -> None:
    (path,) = made.seeds(tmp_path)
    path.with_suffix(".prototxt").write_text(made.PROTOTXT.replace("num_output: 4", "num_output: 400000000"))
    with pytest.raises(LimitExceeded, match="weights"):
        deepcompression.read(path)


def test_mutated_files_raise_one_kind_of_error(tmp_path: Path) -> None:
    (path,) = made.seeds(tmp_path)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(3):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            for stored in deepcompression.read(path).tensors.values():
                stored.array()
        except ConvertError:
            pass


@pytest.mark.real
@pytest.mark.parametrize("described", [True, False])
def test_the_published_container_decodes_bit_for_bit(real: Path, tmp_path: Path, described: bool) -> None:
    folder = real / "real" / "caffe"
    path = folder / "compressed_SqueezeNet.net"
    if not described:
        path = Path(shutil.copy(path, tmp_path / "model.net"))
    assert sniff(path) == "deepcompression"
    source = deepcompression.read(path)
    expected = caffe.read(folder / "squeezenet_v1.0_deepcompression_decoded.caffemodel")
    assert list(source.tensors) == list(expected.tensors)
    for name, stored in expected.tensors.items():
        assert source.tensors[name].array().tobytes() == stored.array().tobytes()
    assert (source.graph == expected.graph) == described
