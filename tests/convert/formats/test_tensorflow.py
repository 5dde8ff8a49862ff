"""TensorFlow checkpoints of both versions: every tensor arrives, under its layer's name and in PyTorch's form, or the file is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from seeds_tensorflow import field, first, layers, second, seeds, table, variables

from convert import formats
from convert.formats import _tf_table, pytorch, tensorflow
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, B.4, and the check value of every table of CRCs."""
    assert _tf_table.crc32c(bytes(32)) == 0x8A9136AA
    assert _tf_table.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _tf_table.crc32c(bytes(range(32))) == 0x46DD794E
    assert _tf_table.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [4095, 4096, 70_001, 17_000_000])
def test_lanes_give_the_checksum_that_bytes_one_by_one_give(size: int) -> None:
    data = np.random.default_rng(0).bytes(size)
    state = 0
    for start in range(0, size if size < 100_000 else 0, 1000):  # too short for lanes
        state = _tf_table.crc32c(data[start : start + 1000], state)
    if size < 100_000:
        assert _tf_table.crc32c(data) == state
    cut = size // 3
    assert _tf_table.crc32c(data) == _tf_table.crc32c(data[cut:], _tf_table.crc32c(data[:cut]))


def test_snappy_copies_may_reach_into_what_they_write() -> None:
    assert _tf_table.snappy(memoryview(bytes([10, 0 << 2, 97, 8 << 2 | 2, 1, 0])), 100) == b"a" * 10
    with pytest.raises(LimitExceeded):
        _tf_table.snappy(memoryview(bytes([10, 0 << 2, 97, 8 << 2 | 2, 1, 0])), 9)
    with pytest.raises(MalformedFile):
        _tf_table.snappy(memoryview(bytes([10, 0 << 2, 97, 8 << 2 | 2, 2, 0])), 100)


@pytest.mark.parametrize("how", ["plain", "packed", "sharded", "version 1"])
def test_every_dialect_gives_the_same_tensors(tmp_path: Path, how: str) -> None:
    held = variables()
    path = (
        first(tmp_path / "old.ckpt", held)
        if how == "version 1"
        else second(tmp_path / "model", held, snappy=how == "packed", shards=3 if how == "sharded" else 1)
    )
    source = formats.read(path)
    assert source.format == "tensorflow"
    conv, depthwise = source.tensors["MobilenetV1/Conv2d_0.weight"], source.tensors["MobilenetV1/Conv2d_1_depthwise.weight"]
    assert (conv.array() == held["MobilenetV1/Conv2d_0/weights"].transpose(3, 2, 0, 1)).all()
    assert (depthwise.array() == held["MobilenetV1/Conv2d_1_depthwise/depthwise_weights"].transpose(2, 3, 0, 1).reshape(16, 1, 3, 3)).all()
    for leaf, number in (("weight", 1), ("bias", 2), ("running_mean", 3), ("running_var", 4)):
        assert (source.tensors[f"MobilenetV1/Conv2d_0/BatchNorm.{leaf}"].array() == number).all()
    assert source.tensors["MobilenetV1/Logits/Conv2d_1c_1x1.weight"].shape == (5, 16, 1, 1)
    assert source.conventions == {"correlation"}
    assert source.flatten == "hwc"
    assert len(source.tensors) == 8
    assert len(source.notes) == 2  # slots and counters; averages


def test_moving_averages_are_taken_when_asked_for(tmp_path: Path) -> None:
    held = variables()
    source = tensorflow.read(second(tmp_path / "model", held), averages=True)
    assert (source.tensors["MobilenetV1/Conv2d_0.weight"].load() == held["MobilenetV1/Conv2d_0/weights"] + 1).all()
    only = {name: array for name, array in held.items() if name.endswith("ExponentialMovingAverage")}
    assert list(tensorflow.read(second(tmp_path / "only", only)).tensors) == ["MobilenetV1/Conv2d_0.weight"]


def test_the_object_graph_names_layers_and_shapes_tell_kinds(tmp_path: Path) -> None:
    arrays, names = layers()
    saved = second(tmp_path / "variables" / "variables", arrays, names=names).parent.parent
    source = formats.read(saved)
    by_path = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): array for name, array in arrays.items()}
    expected = {
        "stem.weight": by_path["layer_with_weights-0/kernel"].transpose(3, 2, 0, 1),
        "sep.depthwise.weight": by_path["layer_with_weights-1/depthwise_kernel"].transpose(2, 3, 0, 1).reshape(8, 1, 3, 3),
        "sep.pointwise.weight": by_path["layer_with_weights-1/pointwise_kernel"].transpose(3, 2, 0, 1),
        "sep.pointwise.bias": by_path["layer_with_weights-1/bias"],
        "dw.weight": by_path["layer_with_weights-2/kernel"].transpose(2, 3, 0, 1).reshape(10, 1, 3, 3),
        "dw.bias": by_path["layer_with_weights-2/bias"],
        "up.weight": by_path["layer_with_weights-3/kernel"].transpose(3, 2, 0, 1),
        "up.bias": by_path["layer_with_weights-3/bias"],
        "head.weight": by_path["layer_with_weights-4/kernel"].T,
        "head.bias": by_path["layer_with_weights-4/bias"],
    }
    assert list(source.tensors) == list(expected)
    for name, array in expected.items():
        assert (source.tensors[name].array() == array).all(), name


def test_without_an_object_graph_paths_are_names(tmp_path: Path) -> None:
    arrays, _ = layers()
    assert "layer_with_weights-0.weight" in tensorflow.read(second(tmp_path / "model", arrays)).tensors


def test_a_folder_a_prefix_a_shard_and_a_saved_model_lead_to_the_index(tmp_path: Path) -> None:
    arrays, names = layers()
    index = second(tmp_path / "run" / "ckpt-2", arrays, names=names)
    second(tmp_path / "run" / "ckpt-1", variables())
    (tmp_path / "run" / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/run/ckpt-2"\nall_model_checkpoint_paths: "ckpt-1"\n')
    ways = [index, index.with_suffix(""), tmp_path / "run", index.with_name("ckpt-2.data-00000-of-00001")]
    assert all("stem.weight" in tensorflow.read(way).tensors for way in ways)
    assert [formats.sniff(way) for way in ways] == ["tensorflow"] * 4
    saved = second(tmp_path / "saved" / "variables" / "variables", arrays, names=names).parent.parent
    (saved / "saved_model.pb").write_bytes(b"\x08\x01")
    assert "stem.weight" in tensorflow.read(saved / "saved_model.pb").tensors
    (tmp_path / "run" / "checkpoint").unlink()
    with pytest.raises(UnsupportedFormat, match=r"ckpt-1\.index, ckpt-2\.index"):
        tensorflow.read(tmp_path / "run")


def test_parts_of_a_variable_are_joined(tmp_path: Path) -> None:
    """The keys are those that TensorFlow 2.21 wrote for a variable of 20 x 10 in three parts."""
    whole = np.arange(200, dtype=np.float32).reshape(20, 10)
    dims, prefix, slices, entries, data = b"\x12\x02\x08\x14\x12\x02\x08\x0a", b"\0big/weights\0\1\1\2", b"", {b"": field(1, 1)}, b""
    for start, length, key in ((0, 7, "8087808a"), (7, 7, "8787808a"), (14, 6, "8e86808a")):
        extents = field(1, field(1, start) + field(2, length)) + field(1, field(1, 0) + field(2, 10))
        part = whole[start : start + length].tobytes()
        shape = field(2, field(2, field(1, length)) + field(2, field(1, 10)))
        entries[prefix + bytes.fromhex(key)] = field(1, 1) + shape + field(4, len(data)) + field(5, len(part))
        slices, data = slices + field(7, extents), data + part
    entries[b"big/weights"] = field(1, 1) + field(2, dims) + slices
    (tmp_path / "m.index").write_bytes(table(entries))
    (tmp_path / "m.data-00000-of-00001").write_bytes(data)
    source = tensorflow.read(tmp_path / "m")
    assert (source.tensors["big.weight"].array() == whole.T).all()
    del entries[prefix + bytes.fromhex("8787808a")]
    (tmp_path / "m.index").write_bytes(table(entries))
    with pytest.raises(MalformedFile, match="lacks its part"):
        tensorflow.read(tmp_path / "m")


def test_a_damaged_tensor_is_found_when_it_is_read(tmp_path: Path) -> None:
    index = second(tmp_path / "model", variables())
    shard = tmp_path / "model.data-00000-of-00001"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    source = tensorflow.read(index)
    with pytest.raises(MalformedFile, match="checksum"):
        source.tensors["MobilenetV1/Conv2d_0.weight"].load()
    source.tensors["MobilenetV1/Logits/Conv2d_1c_1x1.weight"].load()


def test_a_damaged_index_and_a_missing_shard_are_refused(tmp_path: Path) -> None:
    index = second(tmp_path / "model", variables())
    good = index.read_bytes()
    for place in (0, 20, len(good) // 2):
        index.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(MalformedFile):
            tensorflow.read(index)
    index.write_bytes(good)
    (tmp_path / "model.data-00000-of-00001").unlink()
    with pytest.raises(MalformedFile, match="data-00000-of-00001 is not beside it"):
        tensorflow.read(index)


def test_a_key_that_grows_without_end_is_refused() -> None:
    huge = table({b"a" * 20_000: b"", b"": b""})
    with pytest.raises(LimitExceeded, match="a key of"):
        list(_tf_table.items(memoryview(huge)))


def test_a_block_that_unpacks_to_too_much_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="unpacks to"):
        _tf_table.snappy(memoryview(b"\xff\xff\xff\xff\x0f"), 2**20)


def test_seeds_are_all_read(tmp_path: Path) -> None:
    for path in seeds(tmp_path):
        source = formats.read(path)
        assert source.format == "tensorflow"
        for stored in source.tensors.values():
            stored.array()


def test_another_table_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "other.index"
    path.write_bytes(table({b"key": b"value"}))
    with pytest.raises(ConvertError, match="no header"):
        tensorflow.read(path)
    path.write_bytes(struct.pack("<Q", 0xDB4775248B80FB57))
    with pytest.raises(MalformedFile):
        tensorflow.read(path)


def ultralight(name: str) -> str:
    """Translate a layer of the face detector's TensorFlow edition into its PyTorch one's."""
    module, _, leaf = name.rpartition(".")
    parts = {"conv": "", "bn": "", "dconv": "", "convbias": "", "dconvbias": ""}
    head, _, kind = module.rpartition("_")
    assert kind in parts
    if head.startswith("basenet"):
        head = head.replace("basenet", "base_net").replace("convlinear", "ConvLinear")
        inner = f".{kind}" if any(word in head for word in ("branch", "ConvLinear", "shortcut")) else ""
        return f"{head}{inner}.{leaf}"
    place = {"extras": "extras.0.0", "extras_sep": "extras.0.2", "reg_3": "regression_headers.3", "cls_3": "classification_headers.3"}.get(
        head
    )
    if place is None:
        short, number, _ = head.split("_")
        place = f"{'regression' if short == 'reg' else 'classification'}_headers.{number}"
    return f"{place}{'' if '_sep' not in head else '.0' if kind == 'dconvbias' else '.2'}.{leaf}"


@pytest.mark.real
@pytest.mark.parametrize(("name", "count"), [("slim", 159), ("RFB", 209)])
def test_the_face_detector_is_the_same_in_pytorch(real: Path, name: str, count: int) -> None:
    folder = real / "real" / "ultralight"
    source, theirs = (
        tensorflow.read(folder / "tf" / "export_models" / name),
        pytorch.read(folder / f"models/pretrained/version-{name}-320.pth").tensors,
    )
    paired = {ultralight(key): stored for key, stored in source.tensors.items()}
    assert len(paired) == count
    assert paired.keys() == {key for key in theirs if not key.endswith("num_batches_tracked")}
    for key, stored in paired.items():
        assert np.abs(stored.array() - theirs[key].array()).max() < 1e-6, key
