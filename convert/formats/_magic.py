"""What a file is that no reader here knows, told by how it begins, and the way round."""

from __future__ import annotations

import re
from pathlib import Path

UNPACK = "unpack it and name a file in it"
ANEW = "ask for the file that it was made from: ONNX, PyTorch, Keras"
BEGINNINGS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs.", "a pointer of Git LFS, not the file itself", "git lfs pull fetches it"),
    (0, b"<!DOCTYPE html", "a web page, saved in the place of a file", "fetch it by the link behind the download button"),
    (0, b"<!doctype html", "a web page, saved in the place of a file", "fetch it by the link behind the download button"),
    (0, b"<html", "a web page, saved in the place of a file", "fetch it by the link behind the download button"),
    (0, b"\x1f\x8b", "packed by gzip", UNPACK),
    (0, b"BZh", "packed by bzip2", UNPACK),
    (0, b"\xfd7zXZ\0", "packed by xz", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "packed by zstd", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"PK\x03\x04", "a zip archive, of none that frameworks write", UNPACK),
    (0, b"GGUF", "GGUF, llama.cpp's format", "its networks are no networks for images; ask for the safetensors that it was made from"),
    (0, b"ptrt", "an engine of TensorRT's, compiled for one kind of GPU", ANEW),
    (0, b"ftrt", "an engine of TensorRT's, compiled for one kind of GPU", ANEW),
    (0, b"RKNN", "a network compiled by RKNN for Rockchip's processors", ANEW),
    (0, b"\x7fELF", "a program or a library; networks compiled by TVM or Neuron are such", ANEW),
    (4, b"ET12", "a program of ExecuTorch's", "ask for the state dict of the module that it was exported from"),
    (0, b"B\0C\0N\0", "a network of CNTK's first version", "CNTK's own save in ONNX, or a converter of its time, brings it further"),
    (0, b"\x89PNG\r\n", "a picture", "name the file of the weights"),
    (0, b"\xff\xd8\xff", "a picture", "name the file of the weights"),
    (0, b"%PDF", "a document", "name the file of the weights"),
    (0, b"RDX", "a data file of R's", "write the arrays as .npz or safetensors"),
    (0, b"SQLite format 3", "a database", "name the file of the weights"),
)  # fmt: skip
"""Where, how, what that is, and what to do."""
SHARD = re.compile(r"[-.]shard\d+(of\d+)?(\.bin)?$")
"""How TensorFlow.js calls the parts of its weights."""
DESCRIPTIONS = (
    (".prototxt", "Caffe's description of a network, without weights", "name the .caffemodel"),
    ("-symbol.json", "MXNet's description of a network, without weights", "name the .params"),
    (".cfg", "a description of a network, as Darknet has it, without weights", "name the .weights"),
    (".pbtxt", "TensorFlow's description of a graph as text", "name the .pb that has the weights"),
    (".py", "Python code", "name the file of the weights; --model mypackage.mymodule:Class takes a network of your own"),
    (".ipynb", "a notebook", "name the file of the weights"),
)
"""Files beside weights by the ends of their names."""
TENSORFLOW_SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}$")
COMPILED = {
    "coremldata.bin": "a model that Core ML has compiled (.mlmodelc)",
    "model.espresso.net": "a model that Core ML has compiled (.mlmodelc)",
}


def named(path: Path, head: bytes) -> str:
    """Say what a file or folder is and what to do, "" where its beginning tells nothing."""
    if path.is_dir():
        found = next((what for name, what in COMPILED.items() if (path / name).is_file()), "")
        return f"{found}: ask for the .mlmodel or .mlpackage that it was made from" if found else ""
    for place, begins, what, todo in BEGINNINGS:
        if head[place : place + len(begins)] == begins:
            return f"{what}: {todo}"
    if path.name.endswith(".param.bin"):
        return "ncnn's binary description, which has no names: ask for the .param that it was made from"
    if SHARD.search(path.name):
        return (
            "probably a shard of TensorFlow.js's weights, which has no names: name the model.json, or the weights_manifest.json, beside it"
        )
    if match := TENSORFLOW_SHARD.match(path.name):
        return f"a shard of a TensorFlow checkpoint, which has no names: name {match[1]}.index beside it"
    for ending, what, todo in DESCRIPTIONS:
        if path.name.endswith(ending) and b"\0" not in head:
            return f"{what}: {todo}"
    if path.suffix == ".blob":
        return f"probably a network that OpenVINO has compiled for one device: {ANEW}"
    return ""
