"""`zoo lock`: written, compared and shown; and what `trained` makes of a lock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest
from hubserver import HubServer

from convert.formats import safetensors
from weights import ChangedUpstream, NotLocked
from weights.lock import SHIPPED_LOCK, Lock, user_lock
from zoo import ResNet20, trained
from zoo.cli import main


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder / "weights.lock"


def wheels(path: Path) -> bytes:
    safetensors.save(ResNet20().state_dict(), path)
    return path.read_bytes()


def test_a_lock_is_written_extended_and_checked(hub: HubServer, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["lock"]) == 2
    assert main(["lock", "ResNet20", "hf://acme/wheels"]) == 0
    assert "new       hf://acme/wheels  sha256 " in capsys.readouterr().out
    lock = Lock.read(project)
    assert (list(lock.entries), lock.serial) == (["ResNet20:cifar10", "hf://acme/wheels"], 1)
    assert lock.entries["hf://acme/wheels"].tensors == len(ResNet20().state_dict())
    assert lock.entries["ResNet20:cifar10"] == Lock.read(SHIPPED_LOCK).entries["ResNet20:cifar10"]
    assert not user_lock().exists()
    before = project.read_bytes()
    for again in (["lock"], ["lock", "resnet20:cifar10", "ResNet20:hf://acme/wheels"]):
        assert main(again) == 0
        assert project.read_bytes() == before
    capsys.readouterr()
    assert main(["lock", "--check", "--json"]) == 0
    audits = json.loads(capsys.readouterr().out)
    assert [(Path(one["path"]), one["entries"], len(one["proven"])) for one in audits][:1] == [(project, 2, 2)]
    assert main(["lock", "--remove", "ResNet20"]) == 0
    assert list(Lock.read(project).entries) == ["hf://acme/wheels"]
    assert main(["lock", "--remove", "ResNet20"]) == 3


def test_one_name_that_fails_leaves_the_lock_as_it_was(hub: HubServer, project: Path, tmp_path: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["lock", "ResNet20"]) == 0
    before = project.read_bytes()
    assert main(["lock", "hf://acme/wheels", "hf://acme/none"]) == 4
    assert project.read_bytes() == before
    assert main(["lock", "hf://acme/wheels", "VGG19:nope"]) == 3
    assert main(["lock", "--frozen", "ResNet20"]) == 2
    assert project.read_bytes() == before


def test_a_check_exits_1_with_a_table_and_an_edited_lock_with_its_line(
    hub: HubServer, project: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["lock", "hf://acme/wheels"]) == 0
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    asked = len(hub.log)
    sha = Lock.read(project).entries["hf://acme/wheels"].sha256 or ""
    blob = own_cache / "blobs" / "sha256" / sha[:2] / sha
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert main(["lock", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "hf://acme/wheels content" in shown
    assert sha in shown
    assert "1 entries, 0 as locked, 0 not in the cache, 1 differ" in shown
    assert len(hub.log) == asked
    project.write_text(project.read_text().replace(sha, sha[:8]))
    assert main(["lock", "--check"]) == 1
    assert "line 8: sha256 is 64 lower-case hex digits, got 8 characters" in capsys.readouterr().err.replace("\n", " ")


def test_two_locks_are_shown_side_by_side(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "diff", str(SHIPPED_LOCK)]) == 3
    assert main(["lock", "ResNet20"]) == 0
    same = tmp_path / "same.lock"
    same.write_bytes(project.read_bytes())
    assert main(["lock", "diff", str(same)]) == main(["lock", "--diff", str(same)]) == 0
    assert main(["lock", "diff", str(tmp_path / "none")]) == 3
    assert main(["lock", "diff"]) == 2
    capsys.readouterr()
    assert main(["lock", "diff", str(SHIPPED_LOCK), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {"key": "VGG19:imagenet1k_v1", "what": "entry", "locked": None, "found": "dcbb9e9d"} in rows
    assert main(["lock", "diff", str(SHIPPED_LOCK)]) == 1
    assert "VGG19:imagenet1k_v1" in capsys.readouterr().out


def test_an_update_pins_what_is_served_today_in_the_project_and_for_the_user(hub: HubServer, project: Path, tmp_path: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    trained(ResNet20, "hf://acme/wheels")
    old = Lock.read(user_lock()).entries["hf://acme/wheels"]
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["lock", "hf://acme/wheels"]) == 0
    assert Lock.read(project).entries["hf://acme/wheels"] == old
    assert main(["lock", "--update"]) == 0
    new = Lock.read(project).entries["hf://acme/wheels"]
    assert new.sha256 != old.sha256
    assert new.commit != old.commit
    assert Lock.read(user_lock()).entries["hf://acme/wheels"] == new
    project.unlink()
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["lock", "--update", "hf://acme/wheels"]) == 0
    assert not project.exists()
    assert Lock.read(user_lock()).entries["hf://acme/wheels"].sha256 not in (old.sha256, new.sha256)


def test_trained_is_frozen_by_keyword_variable_and_option(
    hub: HubServer, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    with pytest.raises(NotLocked, match="no lock has a full hash of hf://acme/wheels"):
        trained(ResNet20, "hf://acme/wheels", frozen=True)
    monkeypatch.setenv("ZOO_FROZEN", "0")  # and put back afterwards: the option sets it
    assert main(["pull", "ResNet20", "-w", "hf://acme/wheels", "--frozen"]) == 3
    assert main(["--frozen", "pull", "VGG19"]) == 3
    assert "no lock has a full hash of VGG19:imagenet1k_v1, only the prefix dcbb9e9d" in capsys.readouterr().err.replace("\n", " ")
    assert main(["lock", "hf://acme/wheels"]) == 3
    assert hub.log == []
    monkeypatch.setenv("ZOO_FROZEN", "0")
    assert main(["lock", "hf://acme/wheels"]) == 0
    monkeypatch.setenv("ZOO_FROZEN", "1")
    assert trained(ResNet20, "hf://acme/wheels").num_classes == 10
    assert trained(ResNet20).num_classes == 10
    assert main(["lock", "--check"]) == 0


def test_trained_refuses_what_changed_and_pull_calls_only_a_published_hash_published(
    hub: HubServer, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    assert main(["pull", "ResNet20", "-w", "hf://acme/wheels"]) == 0
    assert f"(as pinned in {user_lock()}; published is none)" in capsys.readouterr().out
    assert main(["pull", "ResNet20"]) == 0
    assert "(as published)" in capsys.readouterr().out
    assert main(["lock", "hf://acme/wheels"]) == 0
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    del hub.repos["acme/wheels"][commit]
    trained(ResNet20, "hf://acme/wheels")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ChangedUpstream, match=f"{project} says sha256"):
        trained(ResNet20, "hf://acme/wheels")


def test_pull_says_when_no_lock_has_what_came(
    hub: HubServer, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": wheels(tmp_path / "w")})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "file" / "registry"))  # no lock can be written
    assert main(["pull", "ResNet20", "-w", "hf://acme/wheels"]) == 0
    said = "in no lock, so another time it may be another; published is none"
    assert f"({said})" in capsys.readouterr().out
    assert main(["pull", "ResNet20", "-w", "hf://acme/wheels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"] == said


def test_what_is_locked_by_an_address_with_a_query_stays_as_it_is(
    hub: HubServer, project: Path, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = hub.file("w.safetensors", wheels(tmp_path / "w")) + "?signature=s3cret"
    assert main(["lock", signed, "ResNet20"]) == 0
    before = Lock.read(project).entries
    (hidden,) = (key for key in before if "?" in key)
    rmtree(own_cache)  # on another machine
    hub.heal()
    assert main(["lock"]) == main(["lock", hidden]) == 0
    assert (Lock.read(project).entries, hub.log) == (before, [])
    capsys.readouterr()
    assert main(["lock", "--update"]) == 3
    assert "name it as you first did, with the whole address" in capsys.readouterr().err.replace("\n", " ")
    hub.file("w.safetensors", wheels(tmp_path / "w"))
    assert main(["lock", "--update", signed]) == 0
    assert Lock.read(project).entries[hidden].sha256 != before[hidden].sha256
    assert main(["lock", "--remove", signed]) == 0
    assert list(Lock.read(project).entries) == ["ResNet20:cifar10"]


def test_the_shipped_lock_is_made_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "--shipped", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(" entries, serial 1\n")
    assert Lock.read(tmp_path / "weights.lock").entries == Lock.read(SHIPPED_LOCK).entries
