"""`zoo lock`: written, compared and shown; and what `trained` makes of a lock."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
from hubserver import HubServer

import weights
from convert.formats import safetensors
from weights import ChangedUpstream, NoSpace, NotLocked
from weights.adding import to_toml
from weights.lock import SHIPPED_LOCK, Lock, user_lock
from weights.record import record
from zoo import ResNet20, trained
from zoo.commands.app import main
from zoo.sharing import locks as locking


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
    assert "1 entry, 0 as locked, 0 not in the cache, 1 differs" in shown
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
    assert main(["--frozen", "pull", "DenseNet169"]) == 3
    assert "no lock has a full hash of DenseNet169:imagenet1k_v1, only the prefix b2777c0a" in capsys.readouterr().err.replace("\n", " ")
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
    assert "(as its record says)" in capsys.readouterr().out
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
    for again, code in ((["lock", "--update"], 1), (["lock", "--update", hidden], 3)):
        assert main(again) == code
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


def row(tag: str, source: str, **facts: str) -> str:
    """Write a table of a registry as a user does."""
    made = weights.adhoc("ResNet20", source, **{"tag": tag, "num_classes": 10, "format": "safetensors", "license": "MIT"} | facts)
    return to_toml(made)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tables").mkdir()
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "tables"))
    return tmp_path / "tables" / "ours.toml"


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call the command with --frozen, and thaw what it leaves in the environment."""

    def call(*arguments: str) -> int:
        with monkeypatch.context() as patch:
            patch.setenv("ZOO_FROZEN", "0")
            return main(["--frozen", *arguments])

    return call


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("asked", ["url", "ResNet20:mine"])
@pytest.mark.parametrize("recorded", [False, True])
def test_an_update_renews_a_source_under_every_name_that_the_lock_has_for_it(
    hub: HubServer,
    project: Path,
    tmp_path: Path,
    tables: Path,
    own_cache: Path,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    recorded: bool,
    frozen: Callable[..., int],
) -> None:
    old, new = wheels(tmp_path / "w"), wheels(tmp_path / "w")
    url = hub.file("w.safetensors", old)
    assert main(["lock", url]) == 0
    tables.write_text(row("mine", url))
    assert main(["lock", "ResNet20:mine"]) == 0
    assert {key: entry.sha256 for key, entry in Lock.read(project).entries.items()} == {url: digest(old), "ResNet20:mine": digest(old)}
    hub.file("w.safetensors", new)
    tables.write_text(row("mine", url, **({"sha256": digest(new)} if recorded else {})))
    rmtree(own_cache)
    assert main(["pull", "ResNet20", "-w", "mine"]) == main(["lock", "ResNet20:mine"]) == 1
    capsys.readouterr()
    assert main(["lock", "--update", url if asked == "url" else asked]) == 0
    assert capsys.readouterr().out.count("changed") == 2
    assert {entry.sha256 for entry in Lock.read(project).entries.values()} == {digest(new)}
    assert frozen("pull", "ResNet20", "-w", "mine") == 0
    assert frozen("lock", "--check") == 0, said(capsys)  # though no place of that machine's came along


def test_an_update_does_not_contradict_the_record_of_another_name(
    hub: HubServer, project: Path, tmp_path: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = wheels(tmp_path / "w"), wheels(tmp_path / "w")
    url = hub.file("w.safetensors", old)
    tables.write_text(row("mine", url, sha256=digest(old)))
    tables.with_name("b.toml").write_text(row("other", url))
    assert main(["lock", "ResNet20:mine", "ResNet20:other"]) == 0
    before = project.read_bytes()
    hub.file("w.safetensors", new)
    capsys.readouterr()
    assert main(["lock", "--update", "ResNet20:other"]) == 1
    assert (
        f"ResNet20:other now has sha256 {digest(new)}, and ResNet20:mine, which has the same source, {digest(old)} by its record"
        in said(capsys)
    )
    assert project.read_bytes() == before


def test_a_lock_that_is_named_keeps_its_pins_too(
    hub: HubServer, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, file = wheels(tmp_path / "w"), wheels(tmp_path / "w"), tmp_path / "theirs.lock"
    url = hub.file("w.safetensors", old)
    assert main(["lock", url, "--file", str(file)]) == 0
    before = file.read_bytes()
    rmtree(own_cache)
    hub.file("w.safetensors", new)
    capsys.readouterr()
    assert main(["lock", url, "--file", str(file)]) == 1
    assert f"pins {url} to sha256 {digest(old)}" in said(capsys)
    assert file.read_bytes() == before


def test_a_check_of_names_looks_at_them_only(
    hub: HubServer, project: Path, tmp_path: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = hub.file("w.safetensors", wheels(tmp_path / "w"))
    assert main(["lock", "ResNet20", url]) == 0
    tables.write_text(row("gone", url))
    assert main(["lock", "ResNet20:gone"]) == 0
    tables.write_text(row("mine", url))
    capsys.readouterr()
    for names, entries in ((["ResNet20"], 1), ([url], 1), (["ResNet20", url], 2), (["ResNet20:mine"], 2)):  # that is pinned by its source
        assert main(["lock", "--check", "--json", *names]) == (names == ["ResNet20:mine"])
        (audit, *shipped) = json.loads(capsys.readouterr().out)
        assert (Path(audit["path"]), audit["entries"]) == (project, entries)
        assert len(shipped) == ("ResNet20" in names)
    assert main(["lock", "--check"]) == main(["lock", "--check", "ResNet20:gone"]) == 1  # its record is
    capsys.readouterr()
    for name in ("VGG19", "https://example.org/w.safetensors"):
        assert main(["lock", "--check", name, "ResNet20"]) == 3
        told = said(capsys)
        assert f"has a full hash of {name}; zoo lock {name} writes it down" in told
        assert str(project) in told
    assert main(["lock", "--check", "nonsense"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--check", "--update", "ResNet20"],
        ["--check", "--remove", "ResNet20"],
        ["--update", "--remove", "ResNet20"],
        ["--check", "diff", "other.lock"],
        ["--diff", "other.lock", "--check"],
        ["--diff", "other.lock", "diff", "third.lock"],
        ["--diff", "other.lock", "second.lock", "third.lock"],
        ["diff", "other.lock", "second.lock", "--file", "third.lock"],
        ["diff", "other.lock", "--update"],
        ["--shipped", ".", "--check"],
        ["--shipped", ".", "ResNet20"],
        ["--remove"],
    ],
)
def test_two_things_at_once_are_misspelt_and_nothing_is_dropped_in_silence(project: Path, arguments: list[str]) -> None:
    assert main(["lock", "ResNet20"]) == 0
    before = project.read_bytes()
    assert main(["lock", *arguments]) == 2
    assert [(path.name, path.read_bytes()) for path in project.parent.iterdir()] == [("weights.lock", before)]


def test_one_vanished_record_does_not_keep_the_others_from_the_lock(
    hub: HubServer, project: Path, tmp_path: Path, tables: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [hub.file(f"{name}.safetensors", wheels(tmp_path / "w")) for name in "ab"]
    tables.write_text(row("gone", urls[0]))
    assert main(["lock", "ResNet20", "ResNet20:gone", urls[1]]) == 0
    before = dict(Lock.read(project).entries)
    tables.unlink()
    del hub.bodies["b.safetensors"]  # and the source of another is gone
    rmtree(own_cache)
    thinned = {**before, "ResNet20:cifar10": replace(before["ResNet20:cifar10"], license="unstated")}
    Lock(thinned, 2).write(project)
    capsys.readouterr()
    assert main(["lock", "--json"]) == 1
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert {key: entry["state"] for key, entry in told["entries"].items()} == {
        "ResNet20:cifar10": "changed",
        "ResNet20:gone": "failed",
        urls[1]: "failed",
    }
    assert list(told["failed"]) == ["ResNet20:gone", urls[1]]
    assert "ResNet20:gone stays in" in shown.err
    assert "ResNet20 has no checkpoint 'gone'" in shown.err
    assert Lock.read(project).entries == before
    assert main(["lock", "ResNet20:gone"]) == 3  # named, it is all or nothing
    assert main(["lock", "--remove", "ResNet20:gone", urls[1]]) == main(["lock"]) == 0


def test_a_full_disk_is_no_fault_of_one_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["lock", "ResNet20"]) == 0

    def full(*args: object, **more: object) -> None:
        raise NoSpace("the disk is full")

    monkeypatch.setattr("zoo.sharing.locks.obtain", full)
    with pytest.raises(NoSpace):
        locking.write(project)


def test_a_record_of_a_file_of_this_machine_can_be_locked(
    project: Path, tmp_path: Path, tables: Path, capsys: pytest.CaptureFixture[str], frozen: Callable[..., int]
) -> None:
    file, old = tmp_path / "w.safetensors", wheels(tmp_path / "w.safetensors")
    tables.write_text(row("mine", file.as_uri()))
    assert frozen("pull", "ResNet20", "-w", "mine") == 3
    assert "Once without it: zoo lock ResNet20:mine" in said(capsys)
    assert main(["lock", "ResNet20:mine", file.as_uri()]) == 0
    assert {entry.sha256 for entry in Lock.read(project).entries.values()} == {digest(old)}
    assert frozen("pull", "ResNet20", "-w", "mine") == frozen("pull", "ResNet20", "-w", file.as_uri()) == 0
    new = wheels(file)
    capsys.readouterr()
    assert main(["lock"]) == 0
    assert "is no longer the file that" in said(capsys)
    assert main(["lock", "--update"]) == 0
    assert {entry.sha256 for entry in Lock.read(project).entries.values()} == {digest(new)}


@pytest.mark.parametrize("path", ["./w.safetensors", "w.safetensors", "sub/w.pth", "~/w", "..", "ResNet20:./w.safetensors", "/none/w"])
def test_a_path_is_not_locked_and_that_is_said_with_what_to_do(
    project: Path, path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "w.safetensors").write_bytes(b"")
    for command in (["lock"], ["lock", "--update"], ["lock", "--remove"], ["lock", "--check"]):
        assert main([*command, path]) == 3
        told = said(capsys)
        assert f"{path.removeprefix('ResNet20:')} is a path, and a lock holds names and addresses" in told
        assert "zoo add" in told
        assert "file:///" in told
    assert not project.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["lock", "--check", "--file", "MISSING"],
        ["lock", "--check", "ResNet20", "--file", "MISSING"],
        ["lock", "diff", "MISSING", "there.lock"],
        ["lock", "diff", "there.lock", "MISSING"],
        ["lock", "--diff", "MISSING", "--file", "there.lock"],
        ["lock", "--diff", "there.lock", "--file", "MISSING"],
        ["lock", "diff", "there.lock"],
        ["lock", "MISSING"],
        ["sbom"],
        ["sbom", "--lock", "MISSING"],
        ["unbundle", "MISSING"],
        ["unbundle", "MISSING", "--signature", "there.lock", "--key", "there.lock"],
        ["unbundle", "there.lock", "--signature", "MISSING", "--key", "there.lock"],
        ["verify", "MISSING", "--signature", "there.lock", "--key", "there.lock"],
        ["verify", "there.lock", "--signature", "MISSING", "--key", "there.lock"],
        ["sign", "MISSING", "--key", "there.lock"],
        ["sign", "there.lock", "--key", "MISSING"],
        ["mirror", "MISSING", "--serve"],
        ["add", "MISSING", "ResNet20:mine"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("missing", ["./none", "./there.lock/none"])
def test_a_file_that_is_not_there_has_one_exit_code_and_a_message_that_says_what_to_do(
    arguments: list[str], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Lock({}, 1).write(tmp_path / "there.lock")
    assert main([missing if one == "MISSING" else one for one in arguments]) == 3
    told = said(capsys)
    assert "error: " in told
    assert "Errno" not in told
    assert "Traceback" not in told
    assert any(todo in told for todo in ("zoo ", "Check the name", "name the file", "takes a tag")), told
    assert [path.name for path in tmp_path.iterdir()] == ["there.lock"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["lock", "--check", "--file", "folder"],
        ["lock", "diff", "folder", "folder"],
        ["lock", "ResNet20", "--file", "folder"],
        ["sbom", "--lock", "folder"],
        ["unbundle", "folder"],
    ],
    ids=" ".join,
)
def test_a_folder_in_a_files_place_can_not_be_used(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(arguments) == 1
    assert "Errno" not in said(capsys)


def test_frozen_a_bundle_goes_in_by_the_way_that_its_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], frozen: Callable[..., int]
) -> None:
    import torch

    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    monkeypatch.chdir(there)
    torch.save(ResNet20().state_dict(), there / "w.pth")  # so that it is the sender's word what became of it
    assert main(["add", "w.pth", "ResNet20:mine"]) == main(["bundle", "ResNet20:mine", "-q"]) == 0
    monkeypatch.setenv("ZOO_CACHE", str(here / "cache"))
    own = os.environ["ZOO_USER_REGISTRY"]
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(here / "own" / "registry"))
    monkeypatch.chdir(here)
    capsys.readouterr()
    assert frozen("unbundle", "../there/zoo.tar") == 3
    assert "On a machine that has it: zoo lock ResNet20:mine; then bring its weights.lock here" in said(capsys)
    with monkeypatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(there / "cache"))
        patch.setenv("ZOO_USER_REGISTRY", own)
        patch.chdir(there)
        assert main(["lock", "ResNet20:mine"]) == 0
    (here / "weights.lock").write_bytes((there / "weights.lock").read_bytes())
    assert frozen("unbundle", "../there/zoo.tar", "-q") == 0
    assert frozen("pull", "ResNet20", "-w", "mine") == 0


def test_the_hub_is_asked_for_hash_commit_and_size_and_sends_no_file(
    hub: HubServer, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = wheels(tmp_path / "w")
    commit = hub.repo("acme/wheels", {"model.safetensors": data})
    assert main(["lock", "--ask-hub", "hf://acme/wheels/model.safetensors"]) == 0
    entry = Lock.read(project).entries["hf://acme/wheels/model.safetensors"]
    assert (entry.sha256, entry.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert entry.sources == (f"hf://acme/wheels@{commit}/model.safetensors",)
    assert entry.status == "full hash, tensors not seen yet"
    assert not [line for line in hub.log if "blobs" in str(line)]
    assert main(["lock", "hf://acme/wheels/model.safetensors"]) == 0  # the tensors follow when the file comes
    seen = Lock.read(project).entries["hf://acme/wheels/model.safetensors"]
    assert seen.fingerprint
    assert main(["lock", "--ask-hub", "hf://acme/wheels/model.safetensors"]) == 0
    assert Lock.read(project).entries["hf://acme/wheels/model.safetensors"].fingerprint == seen.fingerprint
    hub.repo("acme/wheels", {"model.safetensors": data[:-1] + b"\1"})
    capsys.readouterr()
    assert main(["lock", "--ask-hub", "hf://acme/wheels/model.safetensors"]) != 0
    assert "and the Hub now announces" in capsys.readouterr().err
    assert Lock.read(project).entries["hf://acme/wheels/model.safetensors"] == seen


def test_the_hub_is_not_asked_for_what_is_elsewhere(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "--ask-hub", "VGG19:imagenet1k_v1"]) != 0
    assert "VGG19:imagenet1k_v1 is not on the Hub" in capsys.readouterr().err
    assert not project.exists()


def test_all_rows_of_the_hub_are_asked_and_those_that_fail_are_named(
    hub: HubServer, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("timm/resnet18.a1_in1k", {"model.safetensors": wheels(tmp_path / "w")})
    rows = [weights.find("ResNet18", "a1_in1k"), weights.find("ResNet18", "a2_in1k"), weights.find("VGG19", "imagenet1k_v1")]
    rows[0] = replace(rows[0], sha256_reported=None, reported_by=None)
    monkeypatch.setattr(weights, "checkpoints", lambda model=None: tuple(rows))
    assert main(["lock", "--ask-hub"]) == 1
    assert list(Lock.read(project).entries) == ["ResNet18:a1_in1k"]
    assert "failed hf://timm/resnet18.a2_in1k" in capsys.readouterr().err


def test_what_this_machine_saw_becomes_rows_with_who_and_when(
    hub: HubServer, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomllib

    data = wheels(tmp_path / "w")
    row = replace(
        weights.adhoc("ResNet20", hub.file("w-0.safetensors", data), tag="seen"), sha256_prefix=hashlib.sha256(data).hexdigest()[:8]
    )
    monkeypatch.setattr(weights, "checkpoints", lambda model=None: (row,))
    assert main(["lock", "--contribute", "seen.toml", "--by", "Ada <ada@example.org>"]) == 3 or not Path("seen.toml").exists()
    assert "has fetched no checkpoint" in capsys.readouterr().err
    weights.get(row, progress=False)
    assert main(["lock", "--contribute", "seen.toml"]) == 2
    assert main(["lock", "--contribute", "seen.toml", "--by", "Ada <ada@example.org>"]) == 0
    table = tomllib.loads(Path("seen.toml").read_text())["ResNet20"]["seen"]
    assert table["sources"] == list(row.sources)
    kept = tomllib.loads(to_toml(row))["ResNet20"]["seen"]
    assert record("ResNet20", "seen", kept | table, "the registry", classes_known=False).sha256_reported == table["sha256_reported"]
    assert (table["sha256_reported"], table["size_bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert table["reported_by"].startswith("Ada <ada@example.org>, 20")
