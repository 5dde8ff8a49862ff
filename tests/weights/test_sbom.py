"""The bill of materials: CycloneDX 1.6 by its published schema, complete, and the same bytes for the same lock."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import weights
from weights.errors import BadLock, NoSuchFile
from weights.lock import Entry, Lock
from weights.sbom import lock_entries, sbom

COMMIT = "c" * 40
ENTRIES = (
    Entry(
        "ResNet50:imagenet1k_v2",
        "pytorch",
        ("https://download.pytorch.org/models/resnet50-11ad3fa6.pth", f"hf://org/repo@{COMMIT}/a file.pth"),
        "BSD-3-Clause",
        sha256="11ad3fa6" + "0" * 56,
        size_bytes=102530333,
    ),
    Entry("hf://org/other", "safetensors", (f"hf://org/other@{COMMIT}/model.safetensors",), "Our own licence"),
)


@cache
def validator() -> Any:
    from cyclonedx.schema import SchemaVersion  # these take two seconds, which every run of any test would wait for
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "weights.lock"
    path.parent.mkdir()
    Lock({entry.key: entry for entry in ENTRIES}, serial=7).write(path)
    return path


def made(lock: Path) -> dict[str, Any]:
    return check(sbom("project", lock_entries(lock)[1], "1.2.3"))


def check(text: str) -> dict[str, Any]:
    """Hold it against the published schema, formats of its URLs and dates included, and see that its references lead somewhere."""
    assert validator().validate_str(text) is None
    bom = json.loads(text)
    refs = [bom["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in bom["components"])]
    assert len(set(refs)) == len(refs)
    assert [one["ref"] for one in bom["dependencies"]] == refs
    assert bom["dependencies"][0]["dependsOn"] == refs[1:]
    return bom


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("serialNumber",), "urn:uuid:1"),
        (("components", 0, "type"), "weights"),
        (("components", 0, "hashes", 0, "content"), "11ad3fa6"),
        (("components", 0, "licenses", 0), {"license": {"id": "Our own licence"}}),
        (("components", 0, "externalReferences", 0, "url"), "a b"),
        (("components", 0, "properties", 0, "value"), 5),
        (("components", 0, "found"), "nothing of the kind is in the schema"),
    ],
    ids=lambda place: str(place[-1]) if isinstance(place, tuple) else "",
)
def test_the_schema_refuses_what_is_no_bill(lock: Path, place: tuple[Any, ...], value: Any) -> None:
    bom = made(lock)
    inner: Any = bom
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    assert validator().validate_str(json.dumps(bom)) is not None


def test_it_says_what_is_used_from_where_under_which_licence(lock: Path) -> None:
    bom = made(lock)
    first, second = bom["components"]
    assert (first["name"], first["version"]) == ("ResNet50", "imagenet1k_v2")
    assert first["hashes"] == [{"alg": "SHA-256", "content": "11ad3fa6" + "0" * 56}]
    assert first["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert first["externalReferences"][1]["url"] == f"hf://org/repo@{'c' * 40}/a%20file.pth"
    assert first["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0]["value"] == "80.858"
    assert (second["name"], second["licenses"]) == ("hf://org/other", [{"license": {"name": "Our own licence"}}])
    assert "hashes" not in second


@pytest.mark.parametrize("every", [50, pytest.param(1, marks=pytest.mark.long)])  # a row takes a tenth of a second
def test_the_registry_makes_a_valid_one(every: int) -> None:
    rows = weights.checkpoints()[::every]
    entries = [Entry(f"{row.model}:{row.tag}", row.format, row.sources, row.license, row.sha256) for row in rows]
    bom = check(sbom("all", entries, "1"))
    assert len(bom["components"]) == len(rows)
    named = {licence["license"].get("name") for one in bom["components"] for licence in one["licenses"]}
    assert {name for name in named if not (name or "").startswith("LicenseRef-")} <= {None, "unstated"}


def test_the_same_lock_gives_the_same_bytes_and_another_does_not(lock: Path) -> None:
    entries = lock_entries(lock)[1]
    text = sbom("project", entries, "1")
    assert text == sbom("project", reversed(entries), "1")
    other = json.loads(sbom("project", entries[:1], "1"))
    assert other["serialNumber"] != json.loads(text)["serialNumber"]


def test_the_nearest_lock_upwards_is_taken(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lock.parent / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(lock.parent / "src" / "deep")
    assert lock_entries(None)[0] == lock


def test_no_lock_and_a_broken_one_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoSuchFile, match=r"no weights\.lock lies here or above: zoo lock NAME writes one, and --lock FILE names another"):
        lock_entries(None)
    (tmp_path / "weights.lock").write_text("version = 2")
    with pytest.raises(BadLock, match=r"weights\.lock, line 1"):
        lock_entries(None)


def test_facts_of_other_bytes_are_not_told(lock: Path) -> None:
    shipped = next(row for row in weights.checkpoints() if row.sha256)
    name = f"{shipped.model}:{shipped.tag}"
    same, other = (Entry(name, shipped.format, shipped.sources, "MIT", sha256) for sha256 in (shipped.sha256, "0" * 64))
    assert "modelCard" in json.loads(sbom("project", [same], "1"))["components"][0]
    assert "modelCard" not in json.loads(sbom("project", [other], "1"))["components"][0]
