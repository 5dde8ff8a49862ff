"""Which published file a source is: found by its hashes, and not waited for where no record can be of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile import seeds
from roundtrips import built

import weights
from convert import formats, sandbox
from convert.formats import _sharded, safetensors
from weights.adding import to_toml
from weights.digests import of_file
from weights.errors import LimitExceeded
from zoo import ResNet20
from zoo.conversion import identity
from zoo.conversion.convert import convert
from zoo.conversion.notes import file_sha256
from zoo.networks.model import Model

Keep = Callable[..., None]


@pytest.fixture(scope="module")
def network() -> Model:
    return built("ResNet20")


@pytest.fixture
def source(network: Model, tmp_path: Path) -> Path:
    torch.save(network.state_dict(), tmp_path / "a.pth")
    return tmp_path / "a.pth"


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Put a record of ResNet20 into a registry of the test's own."""
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "registry"))
    (tmp_path / "registry").mkdir()

    def kept(**facts: object) -> None:
        facts = {"format": "pytorch", "names": "torchvision", "num_classes": 10, "labels": "cifar10", "license": "MIT", **facts}
        row = replace(weights.adhoc("ResNet20", "https://a.example/a.pth", **facts), tag="theirs", provenance="a test")
        (tmp_path / "registry" / "own.toml").write_text(to_toml(row))

    return kept


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hear which weak hashes are computed."""
    heard: list[str] = []

    def listening(path: Path, digest: str) -> str:
        heard.append(digest)
        return of_file(path, digest)

    monkeypatch.setattr(identity, "of_file", listening)
    return heard


@pytest.mark.parametrize("algorithm", ["sha256", "sha256 prefix", "md5", "sha1"])
def test_a_published_file_is_known_by_whatever_hash_is_public(algorithm: str, source: Path, keep: Keep, tmp_path: Path) -> None:
    digest = hashlib.new(algorithm.split()[0], source.read_bytes()).hexdigest()
    keep(
        **{"sha256": {"sha256": digest}, "sha256 prefix": {"sha256_prefix": digest[:8]}}.get(algorithm, {"digest": f"{algorithm}:{digest}"})
    )
    made = convert(source, tmp_path / "b.safetensors", ResNet20)
    assert "the published file of ResNet20:theirs" in made.certificate.verdict
    assert made.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_another_file_is_no_published_one_though_a_record_could_be_of_it(
    source: Path, keep: Keep, hashed: list[str], tmp_path: Path
) -> None:
    keep(digest=f"md5:{'0' * 32}")
    made = convert(source, tmp_path / "b.safetensors", ResNet20)
    assert hashed == ["md5:"]
    assert made.certificate.verdict.startswith("UNPROVEN")


@pytest.mark.parametrize("facts", [{"names": "pytorchcv"}, {"size_bytes": 1}, {"format": "keras", "names": "keras"}])
def test_a_weak_hash_of_another_naming_size_or_format_is_not_computed(
    facts: dict[str, object], source: Path, keep: Keep, hashed: list[str], tmp_path: Path
) -> None:
    keep(digest=f"md5:{hashlib.md5(source.read_bytes()).hexdigest()}", **facts)
    convert(source, tmp_path / "b.safetensors", ResNet20)
    assert not hashed


def test_a_file_with_our_notes_is_nobodys(network: Model, keep: Keep, hashed: list[str], tmp_path: Path) -> None:
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors", {"format": "pt"})
    noted = convert(tmp_path / "a.safetensors", tmp_path / "noted.safetensors", ResNet20)
    keep(digest=f"md5:{'0' * 32}", format="safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20)
    assert hashed == ["md5:"]
    convert(noted.destination, tmp_path / "c.safetensors", ResNet20)
    assert hashed == ["md5:"]


@pytest.mark.parametrize("format", ["openvino", "ncnn", "paddle", "mxnet", "tfjs", "darknet"])
def test_the_hash_of_each_file_that_a_source_was_read_from_is_noted(format: str, tmp_path: Path) -> None:
    found = 0
    for path in (path for path in seeds(format, tmp_path) if path.is_file()):
        with sandbox.read(path, format) as source, formats.read(path, format) as here, identity.hashing(path) as hashes:
            assert source.beside == here.beside
            told = hashes.beside(source)
            assert list(told) == [name for name in source.beside if name != path.name]
            assert all(sha256 == hashlib.sha256((path.parent / name).read_bytes()).hexdigest() for name, sha256 in told.items())
            found += len(told)
    assert found


def test_an_index_longer_than_any_is_not_hashed_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    monkeypatch.setattr(_sharded, "MAX_INDEX_BYTES", 10)
    with pytest.raises(LimitExceeded, match="at most 10 are read"):
        file_sha256(tmp_path / "model.safetensors.index.json")
