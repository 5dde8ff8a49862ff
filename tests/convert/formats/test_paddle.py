"""Paddle's programs executed in float64 give what OpenVINO computes of them, and state dicts are PyTorch's in Paddle's spelling."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from seeds_paddle import NONE, Making, draw, new_program, small_network, state

from convert import execute, formats
from convert.formats._openvino_export import imported
from convert.source import Source
from weights.errors import MalformedFile

openvino = imported()  # without the report that it sends home

pytestmark = pytest.mark.reference


def compared(path: Path, images: np.ndarray | None = None) -> Source:
    source = formats.read(path)
    images = draw(2, 3, 8, 8, seed=7) if images is None else images
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    expected = next(iter(openvino.Core().compile_model(path.with_suffix(".pdmodel"), "CPU", exact)(images).values()))
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert all(tuple(stored.array().shape) == stored.shape for stored in source.tensors.values())
    return source


def test_a_program_computes_what_another_reader_says_whichever_of_its_files_is_named(tmp_path: Path) -> None:
    path = small_network().written(tmp_path, "probabilities")
    source = compared(path)
    norm = [f"batch_norm_0.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    convs = [f"conv2d_{number}.{leaf}" for number in (0, 1) for leaf in ("weight", "bias")]
    assert list(source.tensors) == [*convs[:2], *norm, *convs[2:], "linear_0.weight", "linear_0.bias"]
    assert list(compared(path.with_suffix(".pdiparams")).tensors) == list(source.tensors)


def test_the_other_operators(tmp_path: Path) -> None:
    m = Making(NONE, 3, 8, 8)
    m.made("scale", "scaled", [NONE, 3, 8, 8], {"X": "x"}, scale=2.0, bias=0.5, bias_after_scale=True)
    a = m.conv(
        "up",
        "scaled",
        draw(3, 4, 3, 3),
        [NONE, 4, 15, 15],
        "conv2d_transpose",
        strides=[2, 2],
        paddings=[1, 1],
    )
    a = m.made("hard_swish", "hs", [NONE, 4, 15, 15], {"X": a}, threshold=6.0, scale=6.0, offset=3.0)
    a = m.made("leaky_relu", "leaky", [NONE, 4, 15, 15], {"X": a}, alpha=0.1)
    how = {"pooling_type": "avg", "ksize": [1, 1], "global_pooling": True, "exclusive": True, "data_format": "NCHW"}
    b = m.made("pool2d", "all", [NONE, 4, 1, 1], {"X": a}, **how, strides=[1, 1], paddings=[0, 0], adaptive=False, ceil_mode=False)
    b = m.made("hard_sigmoid", "gate", [NONE, 4, 1, 1], {"X": b}, slope=0.2, offset=0.5)
    a = m.made("elementwise_mul", "gated", [NONE, 4, 15, 15], {"X": a, "Y": b}, axis=-1)
    a = m.made("concat", "both", [NONE, 8, 15, 15], {"X": [a, "leaky"]}, axis=1)
    sizes = {"out_h": -1, "out_w": -1, "out_d": -1, "data_layout": "NCHW", "interp_method": "nearest"}
    a = m.made("nearest_interp_v2", "large", [NONE, 8, 30, 30], {"X": a}, scale=[2.0, 2.0], align_corners=False, align_mode=1, **sizes)
    a = m.made("clip", "inside", [NONE, 8, 30, 30], {"X": a}, min=-1.0, max=1.0)
    m.made("reduce_mean", "mean", [NONE, 8], {"X": a}, dim=[2, 3], keep_dim=False, reduce_all=False)
    compared(m.written(tmp_path, "mean"))


def test_what_dropout_takes_away_is_taken_away(tmp_path: Path) -> None:
    m = Making(NONE, 3, 8, 8)
    a = m.conv("c", "x", draw(2, 3, 1, 1), [NONE, 2, 8, 8])
    m.made("dropout", "dropped", [NONE, 2, 8, 8], {"X": a}, dropout_prob=0.25, dropout_implementation="downgrade_in_infer", is_test=True)
    m.written(tmp_path, "dropped")
    source, images = formats.read(tmp_path / "net.pdmodel"), draw(2, 3, 8, 8)
    plain, dropped = (execute.run(source, images, keep=[name])[name] for name in ("c", source.graph.outputs[0]))  # pyright: ignore[reportOptionalMemberAccess]
    assert np.abs(dropped - 0.75 * plain).max() < 1e-7


@pytest.mark.parametrize("paired", [False, True])
def test_a_state_dict_is_read_without_running_it(paired: bool, tmp_path: Path) -> None:
    held = {name: (name.replace(".", "_0."), array) if paired else array for name, array in state().items()}
    (tmp_path / "x.pdparams").write_bytes(pickle.dumps({**held, "StructuredToParameterName@@": {"a": "b"}}, protocol=4))
    source = formats.read(tmp_path / "x.pdparams")
    names = ["conv.weight", "conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "fc.weight", "fc.bias"]
    assert list(source.tensors) == names
    for stored, (name, array) in zip(source.tensors.values(), state().items(), strict=True):
        assert (stored.array() == (array.T if name == "fc.weight" else array)).all()
    assert source.tensors["conv.weight"].convention == "correlation"


@pytest.mark.parametrize("gone", [".pdmodel", ".pdiparams"])
def test_one_of_two_files_is_not_enough(gone: str, tmp_path: Path) -> None:
    path = small_network().written(tmp_path, "probabilities")
    path.with_suffix(gone).unlink()
    with pytest.raises(MalformedFile, match=rf"needs net\{gone} beside it, which has .*Fetch it too"):
        formats.read(path.with_suffix({".pdmodel": ".pdiparams", ".pdiparams": ".pdmodel"}[gone]))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    path = small_network().written(tmp_path, "probabilities")
    content = path.with_suffix(".pdiparams").read_bytes()
    for changed in (content[:-4], content + b"1234", content[:40]):
        path.with_suffix(".pdiparams").write_bytes(changed)
        with pytest.raises(MalformedFile, match=r"belong together|is no readable Paddle file"):
            formats.read(path)


@pytest.mark.real
def test_a_real_program_computes_what_another_reader_says(real: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 1, (2, 3, 32, 32)).astype(np.float32)
    compared(real / "real" / "samplenet" / "samplenet.pdmodel", images)


@pytest.mark.parametrize("ending", [".json", ".pdiparams"])
def test_the_weights_of_a_newer_program_are_read_by_their_names(ending: str, tmp_path: Path) -> None:
    path = new_program(tmp_path).with_suffix(ending)
    with formats.read(path) as source:
        assert (source.framework, source.graph) == ("PaddlePaddle 3", None)
        assert source.beside == ({".json": "new.pdiparams", ".pdiparams": "new.json"}[ending],)
        assert (source.tensors["linear_0.weight"].array() == draw(4, 5).T).all()
        assert (source.tensors["conv2d_0.weight"].array() == draw(4, 3, 3, 3)).all()
        for seed, leaf in enumerate(("weight", "bias", "running_mean", "running_var")):
            assert (source.tensors[f"batch_norm2d_0.{leaf}"].array() == draw(4, seed=seed)).all()


def test_a_newer_program_needs_both_of_its_files_and_parameters(tmp_path: Path) -> None:
    path = new_program(tmp_path)
    path.with_suffix(".pdiparams").rename(tmp_path / "elsewhere")
    with pytest.raises(MalformedFile, match=r"needs new\.pdiparams beside it, which has the weights"):
        formats.read(path)
    (tmp_path / "elsewhere").rename(path.with_suffix(".pdiparams"))
    path.write_text('{"base_code":{"magic":"pir"},"program":{"regions":[]}}')
    with pytest.raises(MalformedFile, match="names no parameters"):
        formats.read(path)
