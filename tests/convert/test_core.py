from __future__ import annotations

import numpy as np
import pytest
import torch
from written import written

from convert.core import Row, apply, modules, strip_wrappers
from convert.network import Layer
from convert.source import in_memory

SHAPES = {
    "conv.weight": (4, 3, 2, 2), "conv.bias": (4,),
    "norm.weight": (4,), "norm.bias": (4,), "norm.running_mean": (4,), "norm.running_var": (4,), "norm.num_batches_tracked": (),
    "head.weight": (5, 16), "head.bias": (5,),
}  # fmt: skip
ROWS = [Row("c", "conv", "conv"), Row("bn", "norm", "norm"), Row("top", "head", "linear_from_conv")]


def theirs() -> dict[str, np.ndarray]:
    shapes = {"c.weight": (4, 3, 2, 2), "c.bias": (4,), "top.weight": (5, 4, 2, 2), "top.bias": (5,), "bn.num_batches_tracked": ()}
    shapes |= {f"bn.{leaf}": (4,) for leaf in ("weight", "bias", "running_mean", "running_var")}
    return {name: np.random.default_rng(len(name)).normal(size=shape) for name, shape in shapes.items()}


def test_every_tensor_finds_its_place_and_shape() -> None:
    ours, report = apply(ROWS, theirs(), SHAPES)
    assert report.ok
    assert {name: tensor.shape for name, tensor in ours.items()} == SHAPES
    assert np.array_equal(ours["head.weight"], theirs()["top.weight"].reshape(5, 16))


def test_the_way_back_is_derived_and_bit_exact() -> None:
    given = theirs()
    ours, _ = apply(ROWS, given, SHAPES)
    head = Layer("head", "linear", ("norm",), grid=(4, 2, 2))
    back = written(ROWS, {name: in_memory(name, tensor) for name, tensor in ours.items()}, [head])
    assert back.keys() == given.keys() - {"bn.num_batches_tracked"}
    assert all(np.array_equal(stored.array(), given[name]) for name, stored in back.items())


def test_a_row_may_name_one_tensor_that_is_no_layers() -> None:
    shapes = {"block.layer_scale": (4, 1, 1), "block.table": (3, 2), "block.conv.weight": (4, 4, 1, 1)}
    assert modules(shapes) == {"block.layer_scale": "parameter", "block.table": "parameter", "block.conv": "conv"}
    rows = [
        Row("b.gamma", "block.layer_scale", "parameter_from_vector"),
        Row("b.table", "block.table", "parameter"),
        Row("b.c", "block.conv", "conv"),
    ]
    given = {"b.gamma": np.arange(4.0), "b.table": np.ones((3, 2)), "b.c.weight": np.ones((4, 4, 1, 1))}
    ours, report = apply(rows, given, shapes)
    assert report.ok
    assert {name: tensor.shape for name, tensor in ours.items()} == shapes
    back = written(rows, {name: in_memory(name, tensor) for name, tensor in ours.items()})
    assert back.keys() == given.keys()
    assert all(np.array_equal(stored.array(), given[name]) for name, stored in back.items())
    _, report = apply(rows, {**given, "b.gamma": np.ones(5)}, shapes)
    assert report.misshaped == [("b.gamma", "block.layer_scale", (5,), (4, 1, 1))]


def test_torch_tensors_are_carried_without_a_copy() -> None:
    given = {name: torch.from_numpy(np.asarray(tensor)) for name, tensor in theirs().items()}
    ours, report = apply(ROWS, given, SHAPES)
    assert report.ok
    assert ours["head.weight"].data_ptr() == given["top.weight"].data_ptr()


def test_all_mistakes_are_collected() -> None:
    given = theirs() | {"extra.weight": np.zeros(1), "c.weight": np.zeros((4, 3, 3, 3))}
    del given["top.bias"]
    rows = [*ROWS, Row("c", "head", "linear"), Row("gone", "nowhere", "conv")]
    _, report = apply(rows, given, SHAPES | {"new.weight": (1,)})
    assert ("head.bias", "top.bias") in report.missing
    assert ("new.weight", "") in report.missing
    assert report.unmatched == ["extra.weight"]
    assert ("c.weight", "conv.weight", (4, 3, 3, 3), (4, 3, 2, 2)) in report.misshaped
    assert {"head.weight", "head.bias", "c.weight"} <= set(report.contested)
    assert report.unused == [Row("gone", "nowhere", "conv")]
    assert not report.complete
    assert not report.ok


def test_another_number_of_classes_is_complete_and_not_ok() -> None:
    given = theirs() | {"top.weight": np.zeros((7, 4, 2, 2)), "top.bias": np.zeros(7)}
    ours, report = apply(ROWS, given, SHAPES)
    assert report.complete
    assert not report.ok
    assert ours["head.weight"].shape == (7, 16)


def test_batchnorms_counter_may_be_absent_on_either_side() -> None:
    given = theirs()
    del given["bn.num_batches_tracked"]
    assert apply(ROWS, given, SHAPES)[1].ok
    without = {name: shape for name, shape in SHAPES.items() if "num_batches" not in name}
    assert apply(ROWS, theirs(), without)[1].ok


def test_a_bias_that_only_one_side_has_is_reported() -> None:
    assert apply(ROWS, theirs(), {n: s for n, s in SHAPES.items() if n != "conv.bias"})[1].unmatched == ["c.bias"]


def test_a_bias_without_a_weight_is_a_parameter_and_that_of_a_batch_norm_without_scale_is_not() -> None:
    shapes = {"act.scale": (1,), "act.bias": (1,), "norm.running_mean": (4,), "norm.running_var": (4,), "norm.bias": (4,)}
    assert modules(shapes) == {"act.scale": "parameter", "act.bias": "parameter", "norm": "norm"}


def test_modules_are_told_by_their_tensors() -> None:
    assert modules(SHAPES) == {"conv": "conv", "norm": "norm", "head": "linear"}


@pytest.mark.parametrize(
    ("names", "stripped"),
    [
        (["module.a", "module.b"], ["a", "b"]),
        (["_orig_mod.module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),
        ([], []),
    ],
)
def test_wrappers_are_stripped_only_from_all_names(names: list[str], stripped: list[str]) -> None:
    assert list(strip_wrappers(dict.fromkeys(names))) == stripped
