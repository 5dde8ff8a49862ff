"""A file is described by its own words, without reading a tensor, and its network is recognised by shapes and names."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from rich.console import Console

import zoo
from convert.graph import Graph, Node
from convert.inspect import inspect
from convert.source import Convention, Positional, Source, Stored, in_memory
from convert.steps import Shape, from_layout
from weights.errors import ConvertError
from zoo.conversion.inspect import chosen, show
from zoo.conversion.inspect import inspect as look


def unread() -> NoReturn:
    raise AssertionError("a tensor was read")


def stored(origin: str, shape: Shape, convention: Convention | None = None, layout: str = "HWIO") -> Stored:
    steps = from_layout("conv", layout, shape) if len(shape) == 4 else from_layout("linear", "IO", shape) if len(shape) == 2 else ()
    return Stored(origin, shape, np.dtype("<f4"), unread, steps, convention)


def theirs(convention: Convention = "correlation") -> Source:
    tensors = {
        "block.conv.weight": stored("block/conv/kernel:0", (3, 5, 3, 4), convention),
        "block.bn.running_mean": stored("block/bn/moving_mean:0", (4,)),
        "block.bn.running_var": stored("block/bn/moving_variance:0", (4,)),
        "fc.weight": stored("fc/kernel:0", (4, 2)),
    }
    graph = Graph((Node("in", "input"), Node("block.conv", "conv", ("in",)), Node("odd", "unknown:Wobble", ("block.conv",))), ("odd",))
    return Source(
        Path("a.h5"), "keras", "Keras 2.4.0", tensors, graph=graph, flatten="hwc", facts={"backend": "tensorflow"}, notes=["a note"]
    )


SHAPES: dict[str, Shape] = {
    "0.weight": (4, 3, 3, 5),
    "1.running_mean": (4,),
    "1.running_var": (4,),
    "2.weight": (2, 4),
    "1.num_batches_tracked": (),
}


def test_a_source_is_described_without_reading_it() -> None:
    found = inspect(theirs())
    assert (found.format, found.framework, found.flatten, found.spatial) == ("keras", "Keras 2.4.0", "hwc", "hw")
    first = found.tensors[0]
    assert (first.name, first.origin) == ("block.conv.weight", "block/conv/kernel:0")
    assert (first.shape, first.stored_shape, first.dtype, first.size_bytes) == ((4, 3, 3, 5), (3, 5, 3, 4), "float32", 720)
    assert first.steps == ("transpose(3,2,0,1)",)
    assert found.parameters == 180 + 4 + 4 + 8
    assert found.size_bytes == 4 * found.parameters
    assert found.conventions == {"correlation": 1}
    assert "tensorflow" in found.convention_reason
    assert found.unknown_ops == ("Wobble",)
    assert found.layers == {"input": 1, "conv": 1, "unknown:Wobble": 1}
    assert found.notes == ("a note",)


def test_the_tree_nests_by_modules() -> None:
    tree = inspect(theirs()).tree()
    assert list(tree) == ["block", "fc"]
    assert list(tree["block"]) == ["conv", "bn"]
    assert tree["block"]["bn"]["running_var"].shape == (4,)


def test_a_tensor_and_a_module_of_one_name_are_both_in_the_tree() -> None:
    source = theirs()
    source.tensors = {"a": stored("a", (1,)), "a.b": stored("b", (2,)), "c.d": stored("d", (3,)), "c": stored("c", (4,))}
    text = json.dumps(inspect(source).tree(), default=lambda tensor: tensor.origin)
    assert all(f'"{origin}"' in text for origin in "abcd")


@pytest.mark.parametrize(
    ("convention", "word"), [("correlation", "correlates"), ("unknown", "does not say"), ("convolution", "Theano")], ids=lambda value: value
)
def test_the_kernel_convention_comes_with_its_reason(convention: Convention, word: str) -> None:
    found = inspect(theirs(convention))
    assert found.conventions == {convention: 1}
    assert word in found.convention_reason


def test_the_likely_network_is_the_one_whose_shapes_the_file_has() -> None:
    wider = {name: tuple(2 * dim for dim in shape) for name, shape in SHAPES.items()}
    other_head = SHAPES | {"2.weight": (9, 4)}
    found = inspect(theirs(), {"wider": wider, "other head": other_head, "right": SHAPES})
    assert [one.name for one in found.likely] == ["right", "other head"]
    assert found.likely[0].confidence == 1.0
    assert found.likely[1].confidence == pytest.approx(3 / 5)


def test_dense_layers_and_convolutions_of_one_pixel_are_one() -> None:
    convolved = SHAPES | {"2.weight": (2, 4, 1, 1)}
    assert inspect(theirs(), {"convolved": convolved}).likely[0].confidence == 1.0


def test_a_file_that_keeps_only_an_order_is_compared_by_sizes() -> None:
    source = theirs()
    source.tensors = {str(i): Stored(str(i), s.stored_shape, s.stored_dtype, unread) for i, s in enumerate(source.tensors.values())}
    source.positional, source.layout, source.facts = True, Positional({}, lambda kind, leaf, shape: ()), {}
    found = inspect(source, {"right": SHAPES}, {"right": "VGG"})
    assert (found.likely[0].name, found.likely[0].confidence, found.likely[0].naming) == ("right", 1.0, "")
    assert found.conventions == {"unknown": 1}


def test_of_two_networks_with_the_same_shapes_the_one_whose_names_are_known_comes_first() -> None:
    source = theirs()
    source.format = "pytorch"
    source.tensors = {name: in_memory(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}
    renamed = {f"x{name}": shape for name, shape in SHAPES.items()}
    found = inspect(source, {"renamed": renamed, "same": SHAPES}, {"renamed": "Other", "same": "Other"})
    assert [(one.name, one.naming) for one in found.likely] == [("same", "torchvision"), ("renamed", "")]


def test_json_holds_everything() -> None:
    source = theirs()
    source.preprocessing = {"mean": np.array([0.5]), "range": np.float32(255)}
    told = json.loads(json.dumps(inspect(source, {"right": SHAPES}).to_json()))
    assert told["preprocessing"] == {"mean": [0.5], "range": 255.0}
    assert told["tensors"][0]["stored_shape"] == [3, 5, 3, 4]
    assert told["likely"][0] == {"name": "right", "confidence": 1.0, "naming": "", "options": ""}
    assert told["parameters"] == 196


def printed(source: Source, tensors: bool = False) -> str:
    console = Console(width=180, record=True, file=io.StringIO())
    show(inspect(source, {"right": SHAPES}), console, tensors=tensors)
    return console.export_text()


def test_what_is_printed_names_the_facts() -> None:
    text = printed(theirs())
    for words in (
        "Keras 2.4.0",
        "196 numbers",
        "right 100%",
        "1 of correlation",
        "height, width, channels",
        "unknown: Wobble",
        "a note",
        "running_mean 4",
    ):
        assert words in text
    assert "transpose(3,2,0,1)" in printed(theirs(), tensors=True)


def test_a_files_words_can_neither_colour_nor_move_the_cursor() -> None:
    source = theirs()
    source.facts = {"title": "[bold]x[/bold]\x1b[2J"}
    source.tensors["a\x1b]0;b.weight"] = stored("evil\x07", (2,))
    for text in (printed(source), printed(source, tensors=True)):
        assert "\x1b" not in text
        assert "[bold]x[/bold]" in text


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "network", "naming"),
    [
        ("pytorch/cifar_resnet20-12fca82f.th", "ResNet20", "akamaster"),
        ("pytorch/mobilenetV1X0.25_pretrain.tar", "MobileNetV1_025", "biubug6"),
        ("lasagne/cifar_resnet_n5.npz", "ResNet32", ""),
        ("caffe/squeezenet_v1.0_deepcompression_decoded.caffemodel", "SqueezeNet1_0", "caffe"),
    ],
)
def test_real_files_of_known_networks_are_recognised(real: Path, file: str, network: str, naming: str) -> None:
    found = look(real / "real" / file)
    assert (found.likely[0].name, found.likely[0].confidence, found.likely[0].naming) == (network, 1.0, naming)
    assert chosen(real / "real" / file, None) is zoo.CATALOGUE[network]


@pytest.mark.real
def test_a_network_without_its_classifier_is_recognised_and_a_foreign_one_is_not(real: Path) -> None:
    assert chosen(real / "real" / "keras" / "mobilenet_2_5_224_tf_no_top.h5", None) is zoo.MobileNetV1_025
    with pytest.raises(ConvertError, match="Name it: model=NAME, or model=mymodule:Class"):
        chosen(real / "real" / "jld2" / "unkdeve_lenet.jld2", None)
    assert chosen(real / "real" / "jld2" / "unkdeve_lenet.jld2", "VGG19") is zoo.VGG19
