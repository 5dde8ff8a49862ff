"""The downloader against a server that fails in every way we know: right bytes, or one of our errors, and never a wrong file."""

from __future__ import annotations

import email.utils
import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Checkpoint, patience
from weights.errors import (
    ChangedUpstream,
    HashMismatch,
    InsecureSource,
    MalformedFile,
    NoSpace,
    Offline,
    ProtocolError,
    RateLimited,
    SizeMismatch,
    SourceUnavailable,
    WeightsError,
)
from weights.lock import user_lock

Make = Callable[..., Checkpoint]
Cached = Callable[[], dict[str, bytes]]


def fetched(checkpoint: Checkpoint) -> bytes:
    return weights.get(checkpoint, progress=False).path.read_bytes()


def test_a_plain_file_arrives_whole(hub: HubServer, record: Make, data: bytes, sha: str, cached: Cached) -> None:
    installed = weights.get(record(hub.file("w", data)))
    assert bytes(weights.load(installed)) == data
    assert installed.sha256 == installed.source_sha256 == sha
    assert installed.path.stat().st_mode & 0o777 == 0o444
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}


@pytest.mark.parametrize("kind", ["cut", "reset", "stall"])
def test_a_broken_download_goes_on_where_it_stopped(hub: HubServer, record: Make, data: bytes, kind: str) -> None:
    hub.fail(kind, after=100_001, seconds=1)
    assert fetched(record(hub.file("w", data))) == data
    first, second = hub.gets()
    assert first.range is None
    assert second.range == f"bytes={first.sent}-"
    assert first.sent + second.sent == len(data)


def test_a_server_that_cuts_again_and_again_is_outlived(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("cut", after=40_000, times=6)
    assert fetched(record(hub.file("w", data))) == data
    assert sum(r.sent for r in hub.gets()) == len(data)


def test_no_progress_ends_in_an_error_and_the_next_call_goes_on(hub: HubServer, record: Make, data: bytes) -> None:
    row = record(hub.file("w", data))
    hub.fail("cut", after=150_000)
    hub.fail("drop", times=9)
    with pytest.raises(SourceUnavailable, match=r"3 times in a row after 150,000 bytes; call again to go on"):
        fetched(row)
    hub.heal()
    assert fetched(row) == data
    assert [r.range for r in hub.gets()] == ["bytes=150000-"]


@pytest.mark.parametrize("kind", ["range_ignored", "range_elsewhere", "range_total", "range_star", "range_multipart", "changed"])
def test_a_resumed_download_never_mixes_two_files(hub: HubServer, record: Make, data: bytes, kind: str) -> None:
    hub.fail("cut", after=120_000)
    hub.fail(kind)
    assert fetched(record(hub.file("w", data), sha256=hashlib.sha256(data).hexdigest())) == data


def test_a_server_that_continues_with_another_file_is_noticed_though_no_hash_is_known(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("cut", after=120_000)
    hub.fail("range_changed")
    assert fetched(record(hub.file("w", data))) == data
    assert [r.range for r in hub.gets()] == [None, "bytes=120000-", None]


def test_content_that_changed_between_pieces_is_fetched_anew(hub: HubServer, record: Make, safetensors: Callable[..., bytes]) -> None:
    old, new = safetensors(seed=1), safetensors(seed=2)
    url = hub.file("w", old)
    hub.fail("cut", after=120_000)
    hub.fail("drop", times=9)
    with pytest.raises(SourceUnavailable):
        fetched(record(url))
    hub.heal()
    hub.file("w", new)
    assert fetched(record(url)) == new
    assert [r.status for r in hub.gets()] == [200]  # If-Range made it the whole file


@pytest.mark.parametrize("kind", ["no_etag", "weak_etag"])
def test_without_a_strong_etag_a_broken_download_starts_over(hub: HubServer, record: Make, data: bytes, kind: str) -> None:
    hub.fail(kind, after=120_000)
    assert fetched(record(hub.file("w", data))) == data
    assert [(r.sent, r.range) for r in hub.gets()] == [(120_000, None), (len(data), None)]


def test_wrong_bytes_are_fetched_once_more_then_refused(hub: HubServer, record: Make, data: bytes, sha: str, cached: Cached) -> None:
    row = record(hub.file("w", data), sha256=sha)
    hub.fail("flip", after=77)
    assert fetched(row) == data
    assert len(hub.gets()) == 2

    other = record(hub.file("x", data), sha256=sha.replace(sha[0], "0" if sha[0] != "0" else "1"))
    with pytest.raises(HashMismatch, match=rf"files/x: its record says sha256 {other.sha256}, got {sha}"):
        fetched(other)
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}


def test_a_prefix_is_checked(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    assert fetched(record(hub.file("w", data), sha256_prefix=sha[:8])) == data
    wrong = "0" * 8
    with pytest.raises(HashMismatch, match=rf"begins with {wrong}, got {sha}"):
        fetched(record(hub.file("x", data), sha256_prefix=wrong))


def test_what_was_installed_once_must_come_again(hub: HubServer, record: Make, safetensors: Callable[..., bytes]) -> None:
    row = record(hub.file("w", safetensors(seed=1)))
    installed = weights.get(row)
    installed.path.unlink()
    hub.file("w", safetensors(seed=2))
    new = hashlib.sha256(safetensors(seed=2)).hexdigest()
    with pytest.raises(ChangedUpstream, match=rf"/weights\.lock says sha256 {installed.sha256}, got {new}"):
        weights.get(row)
    user_lock().unlink()
    with pytest.raises(ChangedUpstream, match=rf"its first install here says sha256 {installed.sha256}, got {new}"):
        weights.get(row)
    hub.file("w", safetensors(seed=1))
    assert weights.get(row) == installed


def test_sizes_that_disagree_are_refused(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    with pytest.raises(SizeMismatch, match=r"its record says 5 bytes, its answer says 300,0\d\d bytes"):
        fetched(record(hub.file("w", data), size_bytes=5))
    hub.fail("short_length", times=9)
    with pytest.raises(SizeMismatch, match="its answer says"):
        fetched(record(hub.file("w", data), size_bytes=len(data)))
    assert cached() == {}


def test_an_endless_body_is_stopped_at_the_announced_size(hub: HubServer, record: Make, data: bytes, sha: str, cached: Cached) -> None:
    hub.fail("endless", times=9)
    with pytest.raises(SizeMismatch, match=r"sends more than the 300,0\d\d bytes"):
        fetched(record(hub.file("w", data), size_bytes=len(data)))
    hub.heal()
    hub.fail("endless", times=9)
    with pytest.raises(SizeMismatch, match=r"sends more than the 4,194,304 bytes"):
        fetched(record(hub.file("w", data), sha256=sha))
    assert cached() == {}


def test_a_body_of_unknown_length_and_hash_is_refused(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    hub.fail("no_length", times=2)
    assert fetched(record(hub.file("w", data), sha256=sha)) == data
    with pytest.raises(ProtocolError, match="neither its length nor its hash is known"):
        fetched(record(hub.file("x", data)))


def test_a_compressed_body_is_refused(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("gzip", times=9)  # of an attempt that a busy machine breaks off too
    with pytest.raises(ProtocolError, match="asked for the plain file, got Content-Encoding gzip"):
        fetched(record(hub.file("w", data)))


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "application/octet-stream"])
def test_a_login_page_is_told_apart(hub: HubServer, record: Make, data: bytes, content_type: str) -> None:
    hub.fail("html", times=9, headers={"type": content_type})
    with pytest.raises(ProtocolError, match="it looks like a login page"):
        fetched(record(hub.file("w", data)))


def test_redirects_end(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("redirect", times=20)
    with pytest.raises(ProtocolError, match="more than 5 redirects"):
        fetched(record(hub.file("w", data)))
    assert len(hub.log) == 6


@pytest.mark.parametrize(
    "to", ["http://192.0.2.1/w", "http://169.254.169.254/w", "file:///etc/passwd", "ftp://127.0.0.1/w", "gopher:x", "http://[::"]
)
def test_a_redirect_to_an_unsafe_place_is_not_followed(hub: HubServer, record: Make, data: bytes, to: str) -> None:
    hub.fail("redirect", to=to)
    with pytest.raises((InsecureSource, ProtocolError), match=r"refused|which is no URL"):
        fetched(record(hub.file("w", data)))


@pytest.mark.parametrize("url", ["http://192.0.2.1/w.safetensors", "http://user@example.org/w.safetensors"])
def test_http_to_another_machine_is_refused(record: Make, url: str) -> None:
    with pytest.raises(InsecureSource, match="use https"):
        weights.get(record(url))


def test_https_does_not_lead_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    from weights.sources import check_url

    check_url("https://example.org/w")
    with pytest.raises(InsecureSource, match=r"refused http://127\.0\.0\.1/w"):
        check_url("http://127.0.0.1/w")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(hub: HubServer, record: Make, data: bytes, status: int) -> None:
    hub.fail("status", status=status, times=2)
    assert fetched(record(hub.file("w", data))) == data
    assert [r.status for r in hub.log] == [status, status, 200]


def test_retry_after_may_be_a_date() -> None:
    for wait_s, least, most in ((30_000, 29_000, 30_001), (-30_000, 0, 0)):
        found = patience._retry_after(email.utils.formatdate(time.time() + wait_s, usegmt=True))
        assert found is not None
        assert least <= found <= most


@pytest.mark.parametrize("value", ["0", "1", "garbage", "-5"])
def test_retry_after_is_obeyed(hub: HubServer, record: Make, data: bytes, value: str) -> None:
    hub.fail("status", status=429, headers={"Retry-After": value})
    began = time.monotonic()
    assert fetched(record(hub.file("w", data))) == data
    assert value != "1" or time.monotonic() - began >= 1


@pytest.mark.parametrize("value", ["86400", "date", "9" * 400])
def test_a_server_that_asks_to_wait_too_long_is_an_error(hub: HubServer, record: Make, data: bytes, value: str) -> None:
    if value == "date":
        value = email.utils.formatdate(time.time() + 86_400, usegmt=True)
    hub.fail("status", status=503, headers={"Retry-After": value})
    with pytest.raises(RateLimited, match=r"HTTP 503; it asks to wait .* more than 1 s"):
        fetched(record(hub.file("w", data)))


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "hf auth login"), (403, "hf auth login"), (404, "Check the name"), (410, "no such file")]
)
def test_a_refusal_says_what_to_do(hub: HubServer, record: Make, data: bytes, status: int, hint: str) -> None:
    hub.fail("status", status=status)
    with pytest.raises(SourceUnavailable, match=f"files/w: HTTP {status}.*{hint}"):
        fetched(record(hub.file("w", data)))


def test_a_body_that_drips_is_given_up(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("drip", times=20, seconds=0.1)
    with pytest.raises(SourceUnavailable, match=r"only \d+ bytes in 0 s, 3 times in a row"):
        fetched(record(hub.file("w", data)))


def test_the_deadline_holds(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", patience.Patience(deadline_s=0.5, window_s=9.0))
    hub.fail("drip", times=20, seconds=0.01)
    with pytest.raises(SourceUnavailable, match=r"bytes in 0 s is too slow; call again to go on"):
        fetched(record(hub.file("w", data)))


def test_a_dead_proxy_is_named_without_its_password(record: Make, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match=r"and the proxy in HTTPS_PROXY=127\.0\.0\.1:9") as caught:
        weights.get(record("https://weights.invalid/w.safetensors"))
    assert "secret" not in str(caught.value)


def test_a_server_that_can_not_prove_itself_is_refused(record: Make, hub: HubServer) -> None:
    with pytest.raises(WeightsError):
        weights.get(record(hub.url.replace("http:", "https:") + "/files/w.safetensors"))


def test_a_full_disk_leaves_nothing(hub: HubServer, record: Make, data: bytes, cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, [100_000]

    def full(fd: int, chunk: Any) -> int:
        room[0] -= len(chunk)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return write(fd, chunk)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpace, match="set ZOO_CACHE to a folder on another disk"):
        fetched(record(hub.file("w", data)))
    assert cached() == {}


def test_a_file_that_can_not_fit_is_not_begun(hub: HubServer, record: Make, data: bytes) -> None:
    with pytest.raises(NoSpace, match="bytes are needed in"):
        weights.get(record(hub.file("w", data), size_bytes=1 << 60))
    assert hub.log == []


def test_what_is_no_safetensors_is_not_installed(hub: HubServer, record: Make, cached: Cached) -> None:
    with pytest.raises(MalformedFile, match="is no safetensors file"):
        weights.get(record(hub.file("w", b"PK\x03\x04" * 100)))
    assert cached() == {}


def test_a_file_that_was_cut_short_is_not_installed_though_no_hash_is_known(
    record: Make, data: bytes, tmp_path: Path, cached: Cached
) -> None:
    for length in (5, 40, len(data) - 1):
        (tmp_path / "w").write_bytes(data[:length])
        with pytest.raises(MalformedFile, match=r"is no safetensors file|the file at \d+: it is cut short"):
            weights.get(record((tmp_path / "w").as_uri()))
    assert cached() == {}


def test_sources_are_tried_in_order_and_all_their_errors_are_told(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    bad = hub.file("lies", data[:-1] + b"?")
    row = record(f"{hub.url}/files/absent", bad, sha256=sha)
    with pytest.raises(HashMismatch, match=r"(?s)absent: HTTP 404.*lies: its record says"):
        weights.get(row)
    hub.heal()
    assert fetched(record(f"{hub.url}/files/absent", bad, hub.file("good", data), sha256=sha)) == data
    assert [r.path for r in hub.log] == ["/files/absent", "/files/lies", "/files/lies", "/files/good"]


def test_a_failure_is_logged_only_where_another_source_is_tried(
    hub: HubServer, record: Make, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    absent, good = f"{hub.url}/files/absent", hub.file("good", data)
    with pytest.raises(SourceUnavailable, match="HTTP 404"):
        weights.get(record(absent))
    assert caplog.messages == []
    assert fetched(record(absent, good)) == data
    assert [message.endswith(f"Trying {good} next.") for message in caplog.messages] == [True]


@pytest.mark.parametrize("source", ["https://weights.invalid/w.safetensors", "hf://acme/wheels", "hf://acme/wheels/w.safetensors"])
@pytest.mark.parametrize(("code", "tries"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 3)])
def test_a_host_that_has_no_address_is_given_up_soon(
    record: Make, source: str, code: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def getaddrinfo(host: str, *args: Any, **more: Any) -> None:
        asked.append(host)
        raise socket.gaierror(code, "who is that")

    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, backoff_s=0.01))
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    with pytest.raises(SourceUnavailable, match=rf"{source}: the host's name could not be resolved \(who is that; .*ZOO_OFFLINE=1\)"):
        weights.get(record(source))
    assert tries <= len(asked) <= tries + 1  # once in a process, the Hub's client has a question of its own


def test_a_mirror_is_asked_first_and_can_not_lie(
    hub: HubServer, record: Make, data: bytes, sha: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = hub.file("origin.safetensors", data)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    (tmp_path / "origin.safetensors").write_bytes(data)
    installed = weights.get(record(origin, sha256_prefix=sha[:8]))
    assert installed.source == (tmp_path / "origin.safetensors").as_uri()
    assert hub.log == []

    installed.path.unlink()
    (tmp_path / "origin.safetensors").write_bytes(data[:-1] + b"?")
    (tmp_path / sha).write_bytes(data)
    assert weights.get(record(origin, sha256=sha)).source == (tmp_path / sha).as_uri()
    (tmp_path / sha).unlink()
    installed.path.unlink()
    assert weights.get(record(origin, sha256=sha)).source == origin

    installed.path.unlink()
    monkeypatch.setenv("ZOO_MIRROR", hub.url + "/files/")
    hub.file(sha, data)
    assert weights.get(record(origin, sha256=sha)).source == f"{hub.url}/files/{sha}"


def test_a_mirror_that_did_not_help_is_named(
    hub: HubServer, record: Make, data: bytes, sha: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    absent = f"{hub.url}/files/absent"
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    with pytest.raises(SourceUnavailable, match=rf"(?s)HTTP 404.* The mirror of ZOO_MIRROR, {tmp_path}, was asked first and delivered"):
        weights.get(record(absent, sha256=sha))
    with pytest.raises(SourceUnavailable, match="was not asked, since no hash is known"):
        weights.get(record(absent))
    assert caplog.messages == []
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "gone"))
    with pytest.raises(SourceUnavailable, match="gone, does not exist"):
        weights.get(record(absent, sha256=sha))
    assert caplog.messages == [f"ZOO_MIRROR names {tmp_path / 'gone'}, which does not exist"]
    assert fetched(record(hub.file("w", data), sha256=sha)) == data
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(Offline, match="gone, does not exist"):
        weights.get(record(absent, sha256="0" * 64))
    monkeypatch.setenv("ZOO_OFFLINE", "0")
    monkeypatch.setenv("ZOO_MIRROR", hub.url + "/empty")
    with pytest.raises(SourceUnavailable, match=r"(?s)/empty/0000.* The mirror of ZOO_MIRROR was asked first and delivered nothing"):
        weights.get(record(absent, sha256="0" * 64))


def test_a_mirror_does_not_serve_what_no_hash_can_judge(
    hub: HubServer, record: Make, data: bytes, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "w").write_bytes(data[:-1] + b"?")
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    assert fetched(record(hub.file("w", data))) == data


def test_a_path_is_a_source_and_a_changed_file_is_read_again(record: Make, tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    path = tmp_path / "my weights.safetensors"
    for seed in (1, 2):
        path.write_bytes(safetensors(seed=seed))
        assert fetched(weights.adhoc("ResNet20", str(path))) == safetensors(seed=seed)
    with pytest.raises(SourceUnavailable, match="is no regular file"):
        weights.get(record(tmp_path.as_uri()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceUnavailable, match="is no regular file"):
        weights.get(record((tmp_path / "pipe").as_uri()))
    with pytest.raises(SourceUnavailable, match=r"absent.safetensors can't be read: No such file"):
        weights.get(weights.adhoc("ResNet20", str(tmp_path / "absent.safetensors")))
