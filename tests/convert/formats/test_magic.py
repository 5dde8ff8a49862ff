"""A file that no reader knows is named by how it begins, with the way round; and a wrong ending is no obstacle."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import seeds

from convert import formats
from weights.errors import UnsupportedFormat

CASES = {
    "a.pth": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS.*git lfs pull"),
    "a.onnx": (b"<!DOCTYPE html><html>", "a web page"),
    "a.bin.gz": (b"\x1f\x8b\x08\0\0\0\0\0", "packed by gzip: unpack it"),
    "a.gguf": (b"GGUF\3\0\0\0", "llama.cpp's format"),
    "a.engine": (b"ftrt\0\0\0\0", "an engine of TensorRT's.*the file that it was made from"),
    "a.so": (b"\x7fELF\2\1\1", "a program or a library"),
    "a.pte": (b"\x20\0\0\0ET12", "ExecuTorch's"),
    "group1-shard1of2.bin": (b"\1\2\3\4" * 9, "a shard of TensorFlow.js's weights"),
    "a.weights": (b"\x89PNG\r\n\x1a\n", "a picture"),
    "a.zip": (b"PK\3\4\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\5\0\0\0a.txt", "a zip archive"),
    "a.param.bin": (b"\0\1\2\3\4", "ncnn's binary description"),
    "a.blob": (b"\x7felf\0\0\0\0", "compiled for one device"),
    "lenet.prototxt": (b'name: "LeNet"\nlayer {', r"Caffe's description .*: name the \.caffemodel"),
    "lenet-symbol.json": (b'{"nodes": [{"op": "null"', r"MXNet's description .*: name the \.params"),
    "yolo.cfg": (b"[net]\nwidth=416", r"a description of a network, as Darknet has it.*: name the \.weights"),
    "net.py": (b"import torch\n", "Python code: name the file of the weights"),
    "model.data-00000-of-00001": (b"\1\2\3\4", r"a shard of a TensorFlow checkpoint.*name model\.index"),
    "a.xyz": (b"nothing that anybody knows", "it begins with 6e 6f"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_no_reader_knows_is_named(name: str, tmp_path: Path) -> None:
    content, words = CASES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedFormat, match=words):
        formats.sniff(tmp_path / name)


def test_a_folder_that_is_a_compiled_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.mlmodelc").mkdir()
    (tmp_path / "a.mlmodelc" / "coremldata.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedFormat, match=r"has compiled .*: ask for the \.mlmodel"):
        formats.sniff(tmp_path / "a.mlmodelc")


@pytest.mark.parametrize("format", ["tflite", "graphdef", "coreml", "mxnet", "tfjs"])
@pytest.mark.parametrize("ending", [".pth", ".bin", ".onnx", ".ts", ""])
def test_a_wrong_ending_is_no_obstacle(format: str, ending: str, tmp_path: Path) -> None:
    good = next(file for file in seeds(format, tmp_path) if file.is_file())
    renamed = good.rename(good.with_name(f"renamed{ending}"))
    assert formats.sniff(renamed) == format
