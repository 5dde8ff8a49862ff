"""Two checkpoints are compared tensor by tensor, and what makes them equal is named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from convert import formats, sandbox
from convert.diff import Entry, diff
from convert.formats import safetensors
from convert.source import Convention, Source, Stored, in_memory
from convert.steps import FlattenOrder, flip, from_layout

Arrays = dict[str, np.ndarray]


def network(seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    shapes = {
        "conv1.weight": (4, 3, 3, 3),
        "bn1.weight": (4,),
        "bn1.bias": (4,),
        "bn1.running_mean": (4,),
        "bn1.running_var": (4,),
        "conv2.weight": (5, 4, 3, 3),
        "fc.weight": (6, 45),
        "fc.bias": (6,),
    }
    return {name: random.uniform(0.1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def source(arrays: Arrays, convention: Convention = "correlation") -> Source:
    def stored(name: str, array: np.ndarray) -> Stored:
        return in_memory(name, array, convention=convention if array.ndim > 2 else None)

    return Source(Path("file.bin"), "test", "test", {name: stored(name, array) for name, array in arrays.items()})


def entry(a: Source, b: Source, name: str) -> Entry:
    return next(entry for entry in diff(a, b).entries if name in (entry.a, entry.b))


def test_the_same_tensors_are_equal() -> None:
    found = diff(source(network()), source(network()))
    assert found.counts == {"equal": 8}
    assert found.identical
    assert not any(entry.step for entry in found.entries)


STEPS: list[tuple[str, Callable[[np.ndarray], np.ndarray], str]] = [
    ("conv1.weight", flip, "a flip of its kernels"),
    ("conv1.weight", lambda k: k.transpose(0, 1, 3, 2), "a transposition of height and width"),
    ("conv1.weight", lambda k: flip(k).transpose(0, 1, 3, 2), "a flip and a transposition of height and width"),
    ("conv1.weight", lambda k: k[:, ::-1], "an exchange of its input channels (BGR)"),
    ("conv1.weight", lambda k: flip(k)[:, ::-1], "a flip and an exchange of its input channels (BGR)"),
    ("conv1.weight", lambda k: k[:, :, ::-1], "a flip of its rows alone"),
    ("conv2.weight", lambda k: k.transpose(2, 3, 1, 0), "a transposition (2,3,1,0)"),
    ("conv2.weight", lambda k: flip(k).transpose(2, 3, 1, 0), "a transposition (2,3,1,0) and a flip"),
    ("fc.weight", lambda w: w.T, "a transposition (1,0)"),
    ("fc.weight", FlattenOrder(5, 3, 3, "hwc").undo, "another flatten order (chw to hwc, 5x3x3)"),
    ("fc.weight", FlattenOrder(5, 3, 3, "hwc").do, "another flatten order (hwc to chw, 5x3x3)"),
    ("fc.weight", lambda w: w.reshape(6, 5, 3, 3), "a reshape"),
]


@pytest.mark.parametrize(("name", "change", "step"), STEPS, ids=[step for _, _, step in STEPS])
def test_the_step_that_makes_a_tensor_equal_is_named(name: str, change: Callable[[np.ndarray], np.ndarray], step: str) -> None:
    changed = network()
    changed[name] = np.ascontiguousarray(change(changed[name]))
    found = entry(source(network()), source(changed), name)
    assert (found.verdict, found.step) == ("equal after a step", step)
    assert diff(source(network()), source(changed)).counts == {"equal": 7, "equal after a step": 1}
    assert diff(source(network()), source(changed)).same
    assert not diff(source(network()), source(changed)).identical


@pytest.mark.parametrize("names", [True, False])
def test_gamma_and_beta_exchanged_are_named(names: bool) -> None:
    changed = network()
    changed["bn1.weight"], changed["bn1.bias"] = changed["bn1.bias"], changed["bn1.weight"]
    if not names:
        changed = {name.replace("bn1", "norm"): array for name, array in changed.items()}
    found = diff(source(network()), source(changed))
    assert [e.step for e in found.entries if e.verdict == "equal after a step"] == ["an exchange of gamma and beta"] * 2
    assert found.counts == {"equal": 6, "equal after a step": 2}


def test_a_kernel_that_both_files_explain_is_equal_and_says_that_it_was_flipped() -> None:
    learnt = {name: flip(array) if array.ndim > 2 else array for name, array in network().items()}
    found = diff(source(network()), source(learnt, "convolution"))
    assert found.identical
    assert {entry.step for entry in found.entries} == {"", "flip as the files say"}
    wrong = diff(source(network()), source(network(), "convolution"))
    assert wrong.counts["equal after a step"] == 2


def test_a_cast_is_named_and_a_wider_type_of_the_same_numbers_is_equal() -> None:
    half = {name: array.astype(np.float16) for name, array in network().items()}
    assert {e.step for e in diff(source(network()), source(half)).entries} == {"a cast from float32 to float16"}
    wide = {name: array.astype(np.float64) for name, array in network().items()}
    assert diff(source(network()), source(wide)).identical


def test_rounding_and_differences_are_told_apart_with_their_size() -> None:
    changed = network()
    changed["fc.bias"] = changed["fc.bias"] * np.float32(1 + 1e-6)
    changed["bn1.bias"] = changed["bn1.bias"] + np.float32(0.25)
    found = diff(source(network()), source(changed))
    assert found.counts == {"equal": 6, "equal to rounding": 1, "different": 1}
    assert not found.same
    other = entry(source(network()), source(changed), "bn1.bias")
    assert other.max_abs == pytest.approx(0.25, rel=1e-5)
    assert other.max_rel == pytest.approx(0.25 / changed["bn1.bias"].max(), rel=1e-5)


def test_tensors_without_a_common_name_are_paired_by_their_values_in_any_order() -> None:
    random = np.random.default_rng(0)
    renamed = {f"layer{number}": array for number, array in enumerate(network().values())}
    renamed["layer0"] = np.ascontiguousarray(flip(renamed["layer0"]))
    renamed["layer6"] = np.ascontiguousarray(renamed["layer6"].T).astype(np.float64)
    names = list(renamed)
    random.shuffle(names)
    found = diff(source(network()), source({name: renamed[name] for name in names}))
    assert [entry.b for entry in found.entries] == [f"layer{number}" for number in range(8)]
    assert {entry.paired_by for entry in found.entries} == {"values"}
    assert found.counts == {"equal": 6, "equal after a step": 2}


def test_tensors_that_only_one_has_are_listed() -> None:
    less, more = network(), network()
    del less["fc.bias"]
    more["head.weight"] = np.zeros((2, 2), np.float32)
    assert diff(source(network()), source(less)).counts == {"equal": 7, "only in A": 1}
    assert [e.b for e in diff(source(network()), source(more)).entries if e.verdict == "only in B"] == ["head.weight"]


def test_other_values_of_the_same_shape_are_paired_and_different() -> None:
    found = diff(source(network()), source({f"x.{name}": array for name, array in network(seed=1).items()}))
    assert found.counts["different"] >= 6
    assert entry(source(network()), source(network(seed=1)), "fc.weight").verdict == "different"


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("turned", [False, True])
def test_a_batchnorm_folded_into_its_convolution_is_named(eps: float, turned: bool) -> None:
    full = network()
    scale = full["bn1.weight"].astype(np.float64) / np.sqrt(full["bn1.running_var"].astype(np.float64) + eps)
    folded = {name: array for name, array in full.items() if not name.startswith("bn1")}
    folded["conv1.weight"] = (full["conv1.weight"] * scale[:, None, None, None]).astype(np.float32)
    folded["conv1.bias"] = (full["bn1.bias"] - full["bn1.running_mean"] * scale).astype(np.float32)
    found = diff(source(folded), source(full)) if turned else diff(source(full), source(folded))
    assert found.counts == {"equal": 3, "equal after a step": 6}
    steps = {entry.step for entry in found.entries} - {""}
    assert steps == {f"a fold of bn1 (eps {eps:g})", "a fold into conv1"}


def test_layouts_of_the_files_are_no_difference() -> None:
    arrays = network()
    theirs = source(arrays)
    hwio = np.ascontiguousarray(arrays["conv1.weight"].transpose(2, 3, 1, 0))
    theirs.tensors["conv1.weight"] = in_memory("conv1/kernel", hwio, *from_layout("conv", "HWIO", hwio.shape), convention="correlation")
    assert diff(source(arrays), theirs).identical


def test_numbers_that_are_none_and_empty_tensors_do_no_harm() -> None:
    arrays = {"a.weight": np.array([np.nan, 1, np.inf], np.float32), "b.weight": np.zeros((0, 3), np.float32), "c": np.array(3)}
    other = {"a.weight": np.array([1, np.nan, np.inf], np.float32), "b.weight": np.zeros((0, 3), np.float32), "c": np.array(3)}
    found = diff(source(arrays), source(other))
    assert [e.verdict for e in found.entries] == ["different", "equal", "equal"]


def test_a_file_with_nan_is_the_same_as_itself() -> None:
    held = network()
    held["fc.bias"][2] = np.nan
    found = diff(source(held), source({name: array.copy() for name, array in held.items()}))
    assert found.identical
    moved = {**held, "fc.bias": np.roll(held["fc.bias"], 1)}
    assert entry(source(held), source(moved), "fc.bias").verdict == "different"


def test_the_table_and_the_json_say_the_same() -> None:
    from rich.console import Console

    changed = network()
    changed["conv1.weight"] = np.ascontiguousarray(flip(changed["conv1.weight"]))
    changed["[red]x\x1b[2J"] = np.zeros(2, np.float32)
    found = diff(source(network()), source(changed))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found.render())
    shown = console.export_text()
    assert "equal after a flip of its kernels" in shown
    assert "[red]x" in shown
    assert "\x1b[2J" not in shown
    assert "bn1.bias" not in shown
    console.print(found.render(equal=True))
    assert "bn1.bias" in console.export_text()
    told = json.loads(json.dumps(found.to_json()))
    assert told["counts"] == found.counts
    assert told["tensors"][0]["step"] == "a flip of its kernels"


@pytest.mark.real
def test_one_network_in_three_formats_is_one_network(real: Path) -> None:
    folder = real / "real" / "ultralight"
    with (
        formats.read(folder / "models/pretrained/version-slim-320.pth") as torch,
        formats.read(folder / "models/onnx/version-slim-320.onnx") as onnx,
    ):
        assert diff(torch, onnx).identical
        with formats.read(folder / "caffe/model/Slim-320/slim-320.caffemodel") as caffe:
            found = diff(torch, caffe)
    assert set(found.counts) == {"equal", "equal after a step"}
    folds = [entry for entry in found.entries if entry.step.startswith("a fold of")]
    assert len([entry for entry in folds if entry.a.endswith(".weight")]) == 25


@pytest.mark.real
@pytest.mark.parametrize(("torch", "caffe"), [("pnet.pt", "det1"), ("rnet.pt", "det2"), ("onet.pt", "det3")])
def test_networks_of_matlab_have_height_and_width_exchanged(real: Path, torch: str, caffe: str) -> None:
    folder = real / "real" / "mtcnn"
    with formats.read(folder / "pytorch" / torch) as a, formats.read(folder / "caffe" / f"{caffe}.caffemodel") as b:
        found = diff(a, b)
    assert {e.b for e in found.entries if not e.verdict.startswith("equal")} == (
        {"conv5-3.weight", "conv5-3.bias"} if caffe == "det2" else set()
    )
    steps = {entry.step.partition(" (")[0] for entry in found.entries}
    assert "a transposition of height and width" in steps
    assert ("another flatten order" in steps) == (torch != "pnet.pt")


def _norms(eps: float = 1e-5) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two layers as they were trained, and as they come back from a format that folds; names sorted, so that their order says nothing."""
    draw = np.random.default_rng(0)
    trained: dict[str, np.ndarray] = {}
    back: dict[str, np.ndarray] = {}
    for n in (1, 2):
        weight, gamma, beta, mean = draw.normal(size=(4, 4, 3, 3)), *draw.normal(size=(3, 4))
        var = draw.uniform(0.5, 2, 4)
        scale = gamma / np.sqrt(var + eps)
        trained |= {f"bn{n}.weight": gamma, f"bn{n}.bias": beta, f"bn{n}.running_mean": mean, f"bn{n}.running_var": var}
        back |= {f"bn{n}.weight": np.ones(4), f"bn{n}.bias": beta - mean * scale, f"bn{n}.running_mean": np.zeros(4)}
        back |= {f"bn{n}.running_var": np.full(4, 1 - eps), f"conv{n}.weight": weight * scale.reshape(-1, 1, 1, 1)}
        trained[f"conv{n}.weight"] = weight
    return tuple({name: held.astype(np.float32) for name, held in sorted(each.items())} for each in (trained, back))  # type: ignore[return-value]


def _saved(path: Path, arrays: dict[str, np.ndarray]) -> Source:
    safetensors.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    return formats.read(path)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_batchnorms_that_were_folded_on_the_way_are_explained(swapped: bool, kept: bool, tmp_path: Path) -> None:
    trained, back = _norms()
    if not kept:
        back |= {f"conv{n}.bias": back[f"bn{n}.bias"] for n in (1, 2)}
        back = {name: held for name, held in back.items() if not name.startswith("bn")}
    pair = [_saved(tmp_path / "a.safetensors", trained), _saved(tmp_path / "b.safetensors", back)]
    found = diff(*(pair[::-1] if swapped else pair))
    assert found.same
    assert not found.identical
    assert "a fold of BatchNorms" in found.summary()


def test_a_fold_with_another_shift_is_different(tmp_path: Path) -> None:
    trained, back = _norms()
    back["bn2.bias"] = back["bn2.bias"] + np.float32(0.01)
    found = diff(_saved(tmp_path / "a.safetensors", trained), _saved(tmp_path / "b.safetensors", back))
    verdicts = {entry.a: entry.verdict for entry in found.entries}
    assert verdicts["conv1.weight"] == "equal after a step"
    assert verdicts["conv2.weight"] == verdicts["bn2.bias"] == "different"


def test_step_counters_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    for name, steps in (("a.pth", 1), ("b.pth", 2)):
        torch.save({"norm.weight": torch.ones(2), "norm.num_batches_tracked": torch.tensor(steps)}, tmp_path / name)
    with sandbox.read(tmp_path / "a.pth") as a, sandbox.read(tmp_path / "b.pth") as b:
        found = diff(a, b)
    assert found.same
    assert found.summary() == "1 equal; 1 step counter of BatchNorms not compared"
    assert found.to_json()["not_compared"] == ["norm.num_batches_tracked"]
