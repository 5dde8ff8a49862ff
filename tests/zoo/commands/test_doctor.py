"""The doctor: says what works, breaks on nothing, shows no secret, and its exit code can be trusted."""

from __future__ import annotations

import errno
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weights
from convert import sandbox
from weights import Cache, ReaderUnavailable
from zoo.commands import doctor
from zoo.commands.app import main
from zoo.commands.doctor import Finding, broken, examine

CONNECT, PROTECTIONS = socket.create_connection, sandbox.protections


def refusing(monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], bool]) -> None:
    """Give a network where some hosts refuse and others answer; this machine is itself."""

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "127.0.0.1":
            return CONNECT(address, timeout)
        if refused(address[0]):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, lambda host: False)
    monkeypatch.setattr(sandbox, "protections", lambda: (["no writing", "memory 1.2 GB"], []))


def found(area: str, name: str) -> Finding:
    return next(one for one in examine() if (one.area, one.name) == (area, name))


def test_a_machine_where_everything_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {one["area"] for one in findings} >= {"python", "cache", "disk", "registry", "network", "compute", "extras", "strangers' files"}
    assert not [one for one in findings if one["state"] == "broken"]
    assert all(one["todo"] for one in findings if one["state"] in ("warning", "broken", "absent"))
    assert main(["doctor"]) == 0
    assert "Everything that the zoo needs works." in capsys.readouterr().out


def test_a_host_that_can_not_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refusing(monkeypatch, lambda host: "pytorch" in host)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "warning network, download.pytorch.org:443: no connection (refused)" in text
    assert "ok      network, huggingface.co:443: reached" in text
    assert "works; some of what is not in the cache can not be fetched now" in text


def test_a_machine_without_a_network_is_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refusing(monkeypatch, lambda host: True)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "warning network, huggingface.co:443: no connection (refused)\n          check network, proxy and firewall" in text


@pytest.mark.parametrize(
    ("variable", "value", "host", "todo"),
    [
        ("ZOO_MIRROR", "https://mirror.example.org/zoo", "mirror.example.org:443", "mend or unset ZOO_MIRROR"),
        ("HF_ENDPOINT", "https://hub.example.org", "hub.example.org:443", "mend or unset HF_ENDPOINT"),
        ("HTTPS_PROXY", "http://proxy.example.org:3128", "proxy.example.org:3128", "mend or unset the proxy's variables"),
    ],
)
def test_a_host_that_was_asked_for_by_name_and_can_not_be_reached_is_broken(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, host: str, todo: str
) -> None:
    monkeypatch.setenv(variable, value)
    refusing(monkeypatch, lambda host: "example" in host)
    one = found("network", host)
    assert (one.state, one.todo) == ("broken", todo)
    assert main(["doctor"]) == 1


def test_offline_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    refusing(monkeypatch, lambda host: pytest.fail("it tried"))
    one = found("network", "hosts")
    assert (one.state, one.found) == ("ok", "not tried: ZOO_OFFLINE=1")


def test_a_host_that_never_answers_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONNECT_S", 0.1)
    refusing(monkeypatch, lambda host: bool(time.sleep(600)))
    began = time.monotonic()
    one = found("network", "huggingface.co:443")
    assert time.monotonic() - began < 300  # the host would take twice as long
    assert "no answer within" in one.found


def test_connections_are_tried_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
        assert (found("network", host).state, found("network", host).found) == ("ok", "reached")
    one = found("network", host)
    assert (one.state, one.todo) == ("broken", "mend or unset HF_ENDPOINT")
    assert one.found.startswith("no connection (")


def test_behind_a_proxy_the_proxy_is_what_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example.org:3128")
    findings = examine()
    assert "proxy.example.org:3128" in {one.name for one in findings}
    assert "huggingface.co:443" not in {one.name for one in findings}
    assert "secret" not in str(findings)


def test_no_token_and_no_password_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("ZOO_MIRROR", "https://me:verysecret@mirror.example.org/zoo")
    main(["doctor"])
    main(["doctor", "--json"])
    text = capsys.readouterr().out
    assert "Hub token: present" in text
    assert "https://mirror.example.org/zoo" in text
    assert "verysecret" not in text


@pytest.mark.parametrize(
    ("mirror", "state"),
    [
        ("/no/such/folder", "broken"),
        ("ftp://mirror.example.org", "broken"),
        ("http://10.1.2.3:8642", "warning"),
        ("https://mirror.example.org", "ok"),
        ("http://127.0.0.1:8642", "ok"),
    ],
)
def test_a_mirror_is_judged(monkeypatch: pytest.MonkeyPatch, mirror: str, state: str) -> None:
    monkeypatch.setenv("ZOO_MIRROR", mirror)
    assert found("network", "ZOO_MIRROR").state == state


def test_a_cache_that_is_no_folder_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    assert found("cache", "folder").state == "broken"
    assert broken(examine())


def test_a_cache_of_a_later_layout_is_broken(own_cache: Path) -> None:
    own_cache.mkdir()
    (own_cache / "layout.json").write_text('{"version": 2}')
    assert found("cache", "layout").state == "broken"


def test_damage_and_quarantine_are_found(own_cache: Path) -> None:
    cache = Cache()
    cache.prepare()
    sha256 = "ab" + "0" * 62
    blob = cache.blob(sha256)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"short")
    cache.record("https://example.org/w", weights.Installed(blob, sha256, sha256, 99, "https://example.org/w", sha256), None, None, 99)
    (own_cache / "quarantine" / "x").touch()
    assert found("cache", "contents").found == "1 file, 5 bytes"
    assert found("cache", "quarantine").found == "moved aside: 1 damaged file"
    assert found("cache", "damaged").found == "another size than installed: https://example.org/w"
    assert found("cache", "quarantine").state == "warning"


@pytest.mark.parametrize(("held", "state"), [(False, "broken"), (True, "warning")])
def test_a_read_only_cache_is_enough_where_it_is_filled(own_cache: Path, monkeypatch: pytest.MonkeyPatch, held: bool, state: str) -> None:
    (own_cache / "blobs" / "sha256" / "ab").mkdir(parents=True)
    if held:
        (own_cache / "blobs" / "sha256" / "ab" / ("ab" * 32)).write_bytes(b"x")

    def read_only(place: Path, **how: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(place))

    monkeypatch.setattr(Path, "touch", read_only)
    assert found("cache", "writable").state == state


def test_looking_leaves_no_trace(own_cache: Path) -> None:
    examine()
    assert not own_cache.exists()
    assert list(own_cache.parent.iterdir()) == []


def test_a_damaged_registry_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "missing"))
    assert found("registry", "records").state == "broken"
    assert main(["doctor"]) == 1


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(name: str) -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(importlib.util, "find_spec", fails)
    assert main(["doctor"]) == 1
    assert "compute, examination: RuntimeError: odd" in capsys.readouterr().out


def test_every_extra_is_one_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) == set(doctor.GIVES) == set(project["optional-dependencies"]) - {"browser", "dev", "docs"}


def test_protections_of_strangers_files_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert found("strangers' files", "in force").found == "no writing; memory 1.2 GB"
    assert not [one for one in examine() if one.name == "missing"]
    monkeypatch.setattr(sandbox, "protections", lambda: (["no writing"], ["no Landlock: it can read", "no limit of threads"]))
    missing = [one for one in examine() if one.name == "missing"]
    assert [(one.state, one.found) for one in missing] == [("warning", "no Landlock: it can read"), ("warning", "no limit of threads")]
    assert main(["doctor"]) == 0  # a warning is no error
    text = capsys.readouterr().out
    assert "warning strangers' files, missing: no Landlock: it can read\n          read files of authors whom you don't trust on" in text


def test_protections_are_asked_of_a_process_as_it_would_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "protections", PROTECTIONS)
    one = found("strangers' files", "in force")
    assert one.state == "ok"
    assert "256 open files" in one.found or "win" in sys.platform


def test_a_machine_that_starts_no_reader_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ReaderUnavailable("no process could be started")

    monkeypatch.setattr(sandbox, "protections", refuse)
    one = found("strangers' files", "reader")
    assert (one.state, one.found) == ("broken", "no process could be started")


def test_a_system_without_any_protection_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "protections", lambda: ([], ["win32 has none"]))
    assert (found("strangers' files", "in force").state, found("strangers' files", "in force").found) == ("absent", "nothing")
