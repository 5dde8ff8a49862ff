"""The peers: which there are on a device, what one needs, and that they compute the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zoo
from zoo.bench import inference, peers, subject
from zoo.bench.peers import OURS
from zoo.bench.subject import Subject
from zoo.commands.app import main

CPU = torch.device("cpu")
TINY = zoo.CATALOGUE["ResNet20"]


def test_folding_keeps_the_answer_and_loses_the_batchnorms(small: Subject) -> None:
    folded = peers.folded(small.own)
    assert not any(isinstance(layer, nn.BatchNorm2d) for _, layer in folded.named_modules() if layer is not small.own)
    with torch.no_grad():
        assert subject.relative_error(small.answers(lambda: folded(small.input(torch.float32))), small.reference) < 1e-5
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in small.own.modules())


def test_eager_peers_compute_the_network(small: Subject) -> None:
    with torch.no_grad():
        for name in ("eager-fp32", "eager-cl"):
            call = peers.WAYS[name].build(small, "none")
            assert subject.relative_error(small.answers(call), small.reference) < 1e-5


def test_peers_are_chosen_by_device_and_dtype() -> None:
    gpu = torch.device("cuda")
    named = {w.name for w in peers.select(None, gpu, torch.bfloat16)}
    assert {"eager-fp32", "eager-tf32", "eager", "eager-cl", "compile", "max-autotune", "recipe", OURS} == named
    assert "eager" not in {w.name for w in peers.select(None, gpu, torch.float32)}
    assert [w.name for w in peers.select(["compile", " eager-cl"], gpu, torch.bfloat16)] == [OURS, "eager-cl", "compile"]
    assert "recipe" not in {w.name for w in peers.select(None, CPU, torch.float32)}
    assert "onnxruntime" not in {w.name for w in peers.select(None, CPU, torch.bfloat16)}


def test_an_unknown_peer_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"no peer 'compiled' on cpu in float32; did you mean compile\? There are eager-fp32, eager-cl"):
        peers.select(["compiled"], CPU, torch.float32)


def test_a_peer_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package openvino, which is not installed: pip install openvino"):
        peers.select(["openvino"], CPU, torch.float32)
    assert "openvino" not in {w.name for w in peers.select(None, CPU, torch.float32)}


def test_standard_peers_that_are_left_out_are_named_with_what_they_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in ("onnxscript", "openvino") else there(name))
    monkeypatch.setattr("zoo.kernels.quantizing.quantized.instructions", tuple)  # so that no narrower precision is a peer
    assert peers.left_out(CPU, torch.float32) == {"onnxruntime": ["onnxscript"], "openvino": ["openvino"]}
    assert peers.left_out(torch.device("cuda"), torch.bfloat16) == {}
    monkeypatch.setattr(inference, "measure_cell", lambda *_: pytest.fail("the budget is spent"))
    words = ["bench", "--device", "cpu", "--models", "ResNet20", "--batches", "1", "--budget-s", "0"]
    assert main(words) == 0
    assert "the peer onnxruntime is left out: it needs pip install onnxscript" in capsys.readouterr().err
    assert main([*words, "--peers", "eager-fp32"]) == 0
    assert "left out" not in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--models", "none such"]) == 3
    assert "left out" not in capsys.readouterr().err  # what is wrong stands alone


def test_a_peer_that_needs_two_packages_says_which_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ValueError, match="needs the package onnxscript, which is not installed: pip install onnxscript"):
        peers.select(["onnxruntime"], CPU, torch.float32)
    assert "onnxruntime" not in {w.name for w in peers.select(None, CPU, torch.float32)}


def test_narrower_precisions_stand_beside_float32_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_missing", lambda way: [])
    narrow = set(peers.NARROWER)
    for has, expected in ((("avx512_bf16", "avx512_vnni"), narrow), (("avx_vnni",), {"fast-int8"}), ((), set())):
        monkeypatch.setattr("zoo.kernels.quantizing.quantized.instructions", lambda has=has: has)
        assert {w.name for w in peers.select(None, CPU, torch.float32)} & narrow == expected
        assert not {w.name for w in peers.select(None, CPU, torch.bfloat16)} & narrow
