from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds_theano
from test_npz import by_position, expected, network, same

from convert.formats import theano
from weights import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat


def arrays() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    kernel, dense = draw.standard_normal((4, 3, 3, 3)).astype("f4"), draw.standard_normal((500, 10)).astype("f4")
    return [kernel, draw.standard_normal(4).astype(">f8"), np.asfortranarray(dense), np.arange(3, dtype="i2")]


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_gives_the_same_arrays(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "list.pkl"
    path.write_bytes(pickle.dumps(arrays(), protocol))
    assert theano.sniff(path, path.read_bytes()[:4096])
    source = theano.read(path)
    assert source.positional
    found = [stored.load() for stored in source.tensors.values()]
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, arrays(), strict=True))


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
def test_what_is_written_is_a_list_that_python_reads_and_gives_every_bit_back(convention: str, tmp_path: Path) -> None:
    path = tmp_path / "list.pkl"
    theano.write(network(), path, convention=convention, metadata={})
    assert same(by_position(theano.read(path), network(), convention), expected(network()))
    plain = pickle.loads(path.read_bytes(), encoding="latin1")
    assert isinstance(plain, list)
    assert all(np.array_equal(a, b.load()) for a, b in zip(plain, theano.read(path).tensors.values(), strict=True))


def test_the_model_zoos_dict_is_of_cross_correlation_and_has_its_mean(tmp_path: Path) -> None:
    tree = {"param values": arrays()[:2], "synset words": ["a", "b"], "mean value": np.array([103.939, 116.779, 123.68])}
    (tmp_path / "zoo.pkl").write_bytes(pickle.dumps(tree, 2))
    source = theano.read(tmp_path / "zoo.pkl")
    assert source.layout is not None
    assert source.layout.convention == "correlation"
    assert source.preprocessing["channel_order"] == "bgr"
    assert source.preprocessing["mean"] == pytest.approx((103.939 / 255, 116.779 / 255, 123.68 / 255))
    assert source.preprocessing["std"] == (1 / 255,) * 3


def test_a_bare_list_leaves_the_convention_open(tmp_path: Path) -> None:
    (tmp_path / "list.pkl").write_bytes(pickle.dumps(arrays(), 2))
    layout = theano.read(tmp_path / "list.pkl").layout
    assert layout is not None
    assert layout.convention == "unknown"


def test_nolearns_layers_keep_their_names(tmp_path: Path) -> None:
    kernel, bias, dense = np.zeros((4, 3, 3, 3), "f4"), np.zeros(4, "f4"), np.zeros((36, 5), "f4")
    tree = {
        "conv1": [kernel, bias],
        "bn": [np.full(4, value, "f4") for value in (1, 2, 3, 4)],
        "out": [dense, np.zeros(5, "f4")],
        "pool": [],
    }
    (tmp_path / "nolearn.pkl").write_bytes(pickle.dumps(tree, 2))
    tensors = theano.read(tmp_path / "nolearn.pkl").tensors
    assert tensors["conv1.weight"].shape == (4, 3, 3, 3)
    assert tensors["out.weight"].shape == (5, 36)
    assert tensors["bn.bias"].array()[0] == 1
    assert tensors["bn.running_var"].array()[0] == pytest.approx(1 / 16 - 1e-4)


def test_a_shared_variable_of_theanos_gives_its_array(tmp_path: Path) -> None:
    (tmp_path / "shared.pkl").write_bytes(seeds_theano.shared_variable(arrays()[0]))
    found = theano.read(tmp_path / "shared.pkl").tensors
    assert np.array_equal(found["0"].load(), arrays()[0])


def test_an_array_of_a_graphics_card_gives_its_numbers(tmp_path: Path) -> None:
    plain = pickle.dumps(arrays()[0], 2)
    card = b"\x80\x02](ctheano.sandbox.cuda.type\nCudaNdarray_unpickler\n" + plain[2:-1] + b"\x85Re."
    (tmp_path / "card.pkl").write_bytes(card)
    assert np.array_equal(theano.read(tmp_path / "card.pkl").tensors["0"].load(), arrays()[0])


def test_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for protocol in range(6):
        (tmp_path / "evil.pkl").write_bytes(pickle.dumps([*arrays(), Evil()], protocol))
        with pytest.raises(UnsafeFormat, match="mkdir"):
            theano.read(tmp_path / "evil.pkl")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", [b"cnumpy\nload\n", b"cnumpy.testing\nrunstring\n", b"cbuiltins\neval\n", b"ctheano\n__import__ \n", b"c__builtin__\ngetattr\n"]
)
def test_only_what_weights_need_may_be_named(name: bytes, tmp_path: Path) -> None:
    (tmp_path / "evil.pkl").write_bytes(b"\x80\x02" + name + b"(tR.")
    with pytest.raises(UnsafeFormat, match="Nothing of it was run"):
        theano.read(tmp_path / "evil.pkl")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",  # bytes that are not there
        b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",  # lists in lists
        b"\x80\x02" + b")" + b"\x85" * 100_000 + b"q\x00}h\x00Ns.",  # tuples in tuples, the key of a dict
        b"\x80\x02]q\x00" + b"".join(b"]q%c(" % n + b"h%c" % (n - 1) * 10 + b"e" for n in range(1, 30)) + b".",  # 10 to the 29 by reference
    ],
    ids=["memo", "bytes", "lists", "tuples", "references"],
)
def test_bombs_are_refused_in_no_time(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bomb.pkl").write_bytes(data)
    start = time.process_time()
    with pytest.raises((MalformedFile, LimitExceeded)):
        theano.read(tmp_path / "bomb.pkl")
    assert time.process_time() - start < 50


def test_a_pickle_of_a_million_numbers_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "long.pkl").write_bytes(pickle.dumps(list(range(1_000_000)), 2))
    with pytest.raises(LimitExceeded, match="operations"):
        theano.read(tmp_path / "long.pkl")


def test_pytorchs_old_files_are_left_to_its_reader(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(3)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert not theano.sniff(tmp_path / "old.pth", (tmp_path / "old.pth").read_bytes())
    with pytest.raises(UnsupportedFormat, match="PyTorch"):
        theano.read(tmp_path / "old.pth")


def test_every_dialect_opens(tmp_path: Path) -> None:
    for file in seeds_theano.seeds(tmp_path):
        assert theano.sniff(file, file.read_bytes()[:4096]), file
        assert all(stored.array().shape == stored.shape for stored in theano.read(file).tensors.values())
