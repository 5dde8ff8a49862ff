"""What lies beside weights is asked for once, at their commit, and never in the way of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hubserver import HubServer

import weights
from weights import Checkpoint, beside, patience
from weights.beside import files_beside, local_files_beside

NAMES = ("config.json", "preprocessor_config.json")


def test_files_of_the_same_folder_and_commit_are_read_once(hub: HubServer, data: bytes, record: Callable[..., Checkpoint]) -> None:
    hub.repo("acme/wheels", {"sub/model.safetensors": data, "sub/config.json": b'{"a": 1}', "config.json": b"another's"})
    row = record("hf://acme/wheels/sub/model.safetensors")
    weights.get(row)
    hub.repo("acme/wheels", {"sub/model.safetensors": data, "sub/config.json": b'{"a": 2}'})
    assert files_beside(row, NAMES) == {"config.json": b'{"a": 1}'}
    hub.heal()
    assert files_beside(row, NAMES) == {"config.json": b'{"a": 1}'}
    assert hub.log == []


@pytest.mark.parametrize("switch", ["ZOO_OFFLINE", "ZOO_FROZEN"])
def test_offline_and_frozen_nothing_is_asked(
    switch: str, hub: HubServer, data: bytes, record: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data, "config.json": b"{}"})
    row = record("hf://acme/wheels")
    weights.get(row)
    hub.heal()
    monkeypatch.setenv(switch, "1")
    assert files_beside(row, NAMES) == {}
    monkeypatch.delenv(switch)
    assert hub.log == []
    assert files_beside(row, NAMES) == {"config.json": b"{}"}
    monkeypatch.setenv(switch, "1")
    assert files_beside(row, NAMES) == {"config.json": b"{}"}


def test_a_file_that_is_too_large_or_that_breaks_off_is_left_out_with_a_warning(
    hub: HubServer,
    data: bytes,
    record: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data, "config.json": b"{}" * 500})
    row = record("hf://acme/wheels")
    weights.get(row)
    monkeypatch.setattr(beside, "MOST_BYTES", 999)
    with caplog.at_level(logging.WARNING, "weights"):
        assert files_beside(row, NAMES) == {}
    assert "what is beside hf://acme/wheels could not be read" in caplog.text
    assert "999 bytes" in caplog.text
    monkeypatch.setattr(beside, "MOST_BYTES", 1000)
    hub.fail("status", status=503, path="config.json", method="*", times=patience.PATIENCE.tries)
    assert files_beside(row, NAMES) == {}
    assert files_beside(row, NAMES) == {"config.json": b"{}" * 500}  # no failure is remembered


def test_weights_of_another_source_have_nothing_beside_them(hub: HubServer, data: bytes, record: Callable[..., Checkpoint]) -> None:
    row = record(hub.file("model.safetensors", data))
    weights.get(row)
    assert files_beside(row, NAMES) == {}


def test_local_files_are_regular_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").mkdir()
    assert local_files_beside(tmp_path / "model.safetensors", NAMES) == {"config.json": b"{}"}
    monkeypatch.setattr(beside, "MOST_BYTES", 1)
    assert local_files_beside(tmp_path / "model.safetensors", NAMES) == {}
