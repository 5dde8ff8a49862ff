"""Mirrors: the publisher's own bytes under the names that ZOO_MIRROR asks for, verified, and served read-only."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, sources
from weights.errors import BadRecord, ChangedUpstream, HashMismatch, InsecureSource, Offline, SourceUnavailable, UnknownWeights
from weights.fetch import Expected, fetch
from weights.lock import Entry, Lock, user_lock
from weights.mirror import index, mirror
from weights.part import Part
from weights.serving import Server, files_of

Make = Callable[..., Checkpoint]
PICKLE = b"PK\x03\x04 a pickle " + bytes(5000)


def of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(hub: HubServer, record: Make, data: bytes, tmp_path: Path) -> Path:
    """A mirror of a safetensors file whose hash is known, and of a pickle of which only the first digits are."""
    rows = [
        record(hub.file("w.safetensors", data), sha256=of(data)),
        record(hub.file(f"net-{of(PICKLE)[:8]}.pth", PICKLE), tag="old", format="pytorch", sha256_prefix=of(PICKLE)[:8]),
    ]
    mirror(tmp_path / "m", rows)
    return tmp_path / "m"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers = []

    def start(folder: Path | None, **how: Any) -> Server:
        servers.append(Server(files_of(folder), **how))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_files_have_the_names_that_clients_ask_for(folder: Path, data: bytes) -> None:
    assert names(folder) == {"index.json", of(data), f"net-{of(PICKLE)[:8]}.pth"}
    assert [(one.name, one.size_bytes, one.weights) for one in index(folder)] == [
        (of(data), len(data), ("ResNet20:test",)),
        (f"net-{of(PICKLE)[:8]}.pth", len(PICKLE), ("ResNet20:old",)),
    ]


@pytest.mark.parametrize("how", ["folder", "server"])
def test_a_client_takes_its_weights_from_the_mirror(
    folder: Path, data: bytes, record: Make, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("ZOO_MIRROR", str(folder) if how == "folder" else serve(folder).url)
    gone = "http://127.0.0.1:9/w.safetensors"
    assert bytes(weights.open_weights(record(gone, sha256=of(data)))) == data
    pickled = record(f"http://127.0.0.1:9/net-{of(PICKLE)[:8]}.pth", format="pytorch", sha256_prefix=of(PICKLE)[:8])
    found = weights.get(pickled, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    assert found.source_sha256 == of(PICKLE)


def test_what_is_there_is_verified_and_not_fetched_again(folder: Path, hub: HubServer, data: bytes, record: Make) -> None:
    hub.heal()
    row = record(f"{hub.url}/files/w.safetensors", sha256=of(data))
    report = mirror(folder, [row, replace(row, tag="same")])
    assert (hub.gets(), report.new, report.damaged) == ([], (), ())
    assert next(one for one in report.files if one.name == of(data)).weights == ("ResNet20:same", "ResNet20:test")


def test_a_file_that_changed_is_moved_aside_and_fetched_again(folder: Path, hub: HubServer, data: bytes, record: Make) -> None:
    (folder / of(data)).write_bytes(data[:-1] + b"?")
    report = mirror(folder, [])
    assert report.damaged == (of(data),)
    assert len(index(folder)) == 1
    report = mirror(folder, [record(f"{hub.url}/files/w.safetensors", sha256=of(data))])
    assert report.new == (of(data),)
    assert (folder / of(data)).read_bytes() == data


def test_a_mirror_that_is_not_there_is_not_verified_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownWeights, match=r"there is nothing at \S+/m, so there is nothing to verify: zoo mirror \S+/m MODEL... makes one"
    ):
        mirror(tmp_path / "m", [])
    assert not (tmp_path / "m").exists()
    with pytest.raises(UnknownWeights, match="is no mirror, it has no index"):
        mirror(tmp_path, [])
    assert names(tmp_path) == set()


@pytest.mark.parametrize("how", ["changed", "deleted"])
def test_what_is_missing_is_told_until_it_is_there_again(folder: Path, hub: HubServer, data: bytes, record: Make, how: str) -> None:
    whole = index(folder)
    if how == "changed":
        (folder / of(data)).write_bytes(data[:-1] + b"?")
    else:
        (folder / of(data)).unlink()
    aside = (of(data),) if how == "changed" else ()
    for damaged in (aside, (), ()):
        report = mirror(folder, [])
        assert (report.damaged, report.aside, [one.name for one in report.missing]) == (damaged, aside, [of(data)])
        assert report.missing[0].weights == ("ResNet20:test",)
    report = mirror(folder, [record(f"{hub.url}/files/w.safetensors", sha256=of(data), tag="second")])
    assert (report.missing, report.aside) == ((), aside)
    assert next(one for one in report.files if one.name == of(data)).weights == ("ResNet20:second", "ResNet20:test")
    (folder / of(data)).unlink()
    mirror(folder, [])
    (folder / of(data)).write_bytes(data)  # from somebody's own copy
    assert mirror(folder, []).missing == ()
    assert [one.name for one in index(folder)] == [one.name for one in whole]


def test_what_was_found_damaged_can_be_given_up_and_what_was_not_told_can_not(folder: Path, data: bytes) -> None:
    (folder / of(data)).write_bytes(b"?")
    assert mirror(folder, [], forget=True).damaged == (of(data),)
    assert [one.name for one in mirror(folder, []).missing] == [of(data)]
    report = mirror(folder, [], forget=True)
    assert (report.missing, report.aside, len(report.files)) == ((), (), 1)
    assert names(folder) == {"index.json", report.files[0].name}
    assert mirror(folder, []) == report


def test_a_whole_mirror_that_can_not_be_written_is_verified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.mirror.atomic", lambda path: pytest.fail("it wrote"))
    assert len(mirror(folder, []).files) == 2


def test_what_lies_in_the_cache_unconverted_is_not_fetched(hub: HubServer, data: bytes, record: Make, tmp_path: Path) -> None:
    row = record(hub.file("w.safetensors", data), sha256=of(data))
    weights.get(row)
    hub.heal()
    mirror(tmp_path / "m", [row])
    assert hub.gets() == []
    assert (tmp_path / "m" / of(data)).read_bytes() == data


def test_wrong_bytes_do_not_enter_a_mirror(hub: HubServer, data: bytes, record: Make, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch):
        mirror(tmp_path / "m", [record(hub.file("w.safetensors", data), sha256="0" * 64)])
    assert names(tmp_path / "m") == {"index.json"}
    assert index(tmp_path / "m") == []


def test_one_that_is_down_and_one_that_lies_are_passed_over_and_named(
    hub: HubServer, data: bytes, record: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    liar = hub.file("other.safetensors", data[::-1])
    mirror(tmp_path / "m", [record("http://127.0.0.1:9/w.safetensors", liar, hub.file("w.safetensors", data), sha256=of(data))])
    assert (tmp_path / "m" / of(data)).read_bytes() == data
    assert names(tmp_path / "m") == {"index.json", of(data)}
    assert any(liar in line and "Nothing was installed" in line for line in caplog.messages)


def test_what_was_finished_before_a_failure_stays(hub: HubServer, data: bytes, record: Make, tmp_path: Path) -> None:
    good = record(hub.file("w.safetensors", data), sha256=of(data))
    with pytest.raises(SourceUnavailable):
        mirror(tmp_path / "m", [good, record(f"{hub.url}/files/missing.safetensors", tag="none", sha256="1" * 64)])
    assert names(tmp_path / "m") == {"index.json", of(data)}
    assert len(index(tmp_path / "m")) == 1


def test_offline_nothing_is_asked(record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("it asked"))
    with pytest.raises(Offline):
        mirror(tmp_path / "m", [record("https://example.org/w.safetensors", sha256="0" * 64)])


NUMBERED = {"name": "w", "size_bytes": 1, "sha256": "0" * 64, "format": "pytorch", "license": "MIT", "weights": [1]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"kernelzoo_mirror": 2, "files": [{"name": "../x"}]}',
        json.dumps({"kernelzoo_mirror": 2, "files": [NUMBERED]}),
    ],
)
def test_a_folder_with_another_index_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(BadRecord, match=r"is no (JSON|index of a mirror)"):
        mirror(tmp_path, [])
    assert (tmp_path / "index.json").read_text() == text


@pytest.mark.parametrize(("version", "todo"), [(1, "delete it and make the mirror again with zoo mirror"), (9, "update kernelzoo")])
def test_an_index_of_another_layout_says_what_to_do_and_nothing_else(tmp_path: Path, version: int, todo: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"kernelzoo_mirror": version, "files": []}))
    with pytest.raises(BadRecord, match=rf"index\.json has layout {version} and this version reads 2: {todo}\.$"):
        mirror(tmp_path, [])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_lies_in_the_way_is_not_overwritten(hub: HubServer, data: bytes, record: Make, tmp_path: Path) -> None:
    name = f"net-{of(PICKLE)[:8]}.pth"
    (tmp_path / name).write_bytes(b"mine")
    row = record(hub.file(name, PICKLE), format="pytorch", sha256_prefix=of(PICKLE)[:8])
    with pytest.raises(BadRecord, match="is no file of this mirror"):
        mirror(tmp_path, [row])
    assert (tmp_path / name).read_bytes() == b"mine"


# -- the server


def test_ranges_are_served_as_the_downloader_asks_for_them(folder: Path, serve: Callable[..., Server], data: bytes) -> None:
    server, size, tag = serve(folder), len(data), f'"{of(data)}"'
    answer, body = ask(server, f"/{of(data)}")
    assert (answer.status, body, answer.headers["ETag"], answer.headers["Accept-Ranges"]) == (200, data, tag, "bytes")
    for asked, part in {
        "bytes=5-9": (5, 10),
        "bytes=100-": (100, size),
        "bytes=-7": (size - 7, size),
        f"bytes=0-{size * 9}": (0, size),
    }.items():
        answer, body = ask(server, f"/{of(data)}", Range=asked)
        assert (answer.status, body) == (206, data[slice(*part)])
        assert answer.headers["Content-Range"] == f"bytes {part[0]}-{part[1] - 1}/{size}"
    assert ask(server, f"/{of(data)}", Range="bytes=5-", If_Range=tag)[0].status == 206
    assert ask(server, f"/{of(data)}", Range="bytes=5-", If_Range='"another"')[1] == data
    for ignored in ("bytes=9-5", "bytes=1-2,4-5", "lines=1-2", "bytes=x-", "bytes=-"):
        assert ask(server, f"/{of(data)}", Range=ignored)[0].status == 200
    for beyond in (f"bytes={size}-", f"bytes={size}-{size + 5}", "bytes=-0"):
        answer, body = ask(server, f"/{of(data)}", Range=beyond)
        assert (answer.status, answer.headers["Content-Range"], body) == (416, f"bytes */{size}", b"")


def test_a_file_that_is_named_by_a_prefix_is_served_by_its_hash_too(
    folder: Path, serve: Callable[..., Server], record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(folder)
    assert ask(server, f"/{of(PICKLE)}")[1] == ask(server, f"/net-{of(PICKLE)[:8]}.pth")[1] == PICKLE
    assert ask(server, f"/{of(PICKLE)[:8]}")[0].status == 404
    row = record("http://127.0.0.1:9/renamed.pth", format="pytorch", sha256_prefix=of(PICKLE)[:8])
    entry = Entry("ResNet20:test", "pytorch", row.sources, "unstated", of(PICKLE))  # a client whose lock knows all of the hash
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_MIRROR", server.url)
    found = weights.get(row, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    assert found.source == f"{server.url}/{of(PICKLE)}"


def test_head_tells_the_length_and_sends_nothing(folder: Path, serve: Callable[..., Server], data: bytes) -> None:
    answer, body = ask(serve(folder), f"/{of(data)}", "HEAD")
    assert (answer.status, answer.headers["Content-Length"], body) == (200, str(len(data)), b"")


def test_nothing_but_the_index_is_served(folder: Path, serve: Callable[..., Server]) -> None:
    for place in (folder / "secret", folder.parent / "secret"):
        place.write_bytes(b"secret")
    server = serve(folder)
    up = ["/../secret", "/..%2fsecret", "/%2e%2e/secret", "//secret", "/./secret", "/..\\secret"]
    for path in [*up, "/.incoming/x", "/secret", "/%00", "/" + "a" * 9000]:
        answer, body = ask(server, path)
        assert answer.status == 404, path
        assert b"secret" not in body


def test_nothing_can_be_written(folder: Path, serve: Callable[..., Server], data: bytes) -> None:
    server = serve(folder)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        assert ask(server, f"/{of(data)}", method)[0].status == 501
    assert (folder / of(data)).read_bytes() == data


def test_a_file_that_became_a_link_or_another_is_not_served(
    folder: Path, serve: Callable[..., Server], data: bytes, tmp_path: Path
) -> None:
    server = serve(folder)
    (tmp_path / "secret").write_bytes(bytes(len(data)))
    (folder / of(data)).unlink()
    (folder / of(data)).symlink_to(tmp_path / "secret")
    assert ask(server, f"/{of(data)}")[0].status == 500
    (folder / of(data)).unlink()
    os.mkfifo(folder / of(data))
    assert ask(server, f"/{of(data)}")[0].status == 500


def test_the_index_is_served_and_grows_with_the_mirror(
    folder: Path, serve: Callable[..., Server], hub: HubServer, record: Make, safetensors: Callable[..., bytes]
) -> None:
    server, more = serve(folder), safetensors(1000, seed=9)
    assert json.loads(ask(server, "/")[1]) == json.loads((folder / "index.json").read_bytes())
    mirror(folder, [record(hub.file("more.safetensors", more), tag="more", sha256=of(more))])
    assert ask(server, f"/{of(more)}")[1] == more


def test_the_cache_can_be_served(hub: HubServer, record: Make, serve: Callable[..., Server], data: bytes) -> None:
    weights.get(record(hub.file("w.safetensors", data)))
    server = serve(None)
    assert ask(server, f"/{of(data)}")[1] == data
    assert ask(server, "/layout.json")[0].status == 404


def test_too_many_at_once_are_told_to_come_back(folder: Path, serve: Callable[..., Server], data: bytes) -> None:
    server = serve(folder)
    taken = sum(server.free.acquire(blocking=False) for _ in range(1000))
    answer, _ = ask(server, f"/{of(data)}")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    server.free.release(taken)
    assert ask(server, f"/{of(data)}")[1] == data


def test_a_client_holds_a_few_connections_and_leaves_room_for_others(
    folder: Path, serve: Callable[..., Server], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.serving.EACH", 2)
    server = serve(folder)
    idle = [socket.create_connection(server.server_address[:2], timeout=300) for _ in range(2)]
    while server.held["127.0.0.1"] < 2:
        time.sleep(0.01)
    with socket.create_connection(server.server_address[:2], timeout=300) as third:
        assert third.recv(100).startswith(b"HTTP/1.1 503 ")
    with socket.create_connection(server.server_address[:2], timeout=300, source_address=("127.0.0.2", 0)) as other:
        other.sendall(f"GET /{of(data)} HTTP/1.0\r\n\r\n".encode())
        assert other.recv(100).startswith(b"HTTP/1.1 200 ")
    for one in idle:
        one.close()
    while server.held:
        time.sleep(0.01)
    assert ask(server, f"/{of(data)}")[1] == data


@pytest.mark.parametrize("how", ["Content-Length: {}", "Transfer-Encoding: chunked\r\nX: {}"])
def test_a_request_with_a_body_is_answered_once(folder: Path, serve: Callable[..., Server], data: bytes, how: str) -> None:
    hidden = f"GET /{of(data)} HTTP/1.1\r\nHost: a\r\n\r\n"
    with socket.create_connection(serve(folder).server_address[:2], timeout=300) as raw:
        raw.sendall(f"GET / HTTP/1.1\r\nHost: a\r\n{how.format(len(hidden))}\r\n\r\n{hidden}".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):  # what it did not read is told so
            while part := raw.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_garbage_does_not_stop_the_server(folder: Path, serve: Callable[..., Server], data: bytes) -> None:
    server = serve(folder)
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"GET /" + b"x" * 70_000):
        with socket.create_connection(server.server_address[:2], timeout=300) as raw:
            raw.sendall(garbage)
    assert ask(server, f"/{of(data)}")[1] == data


def test_a_taken_port_and_a_folder_without_an_index_are_refused(folder: Path, serve: Callable[..., Server], tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="choose another --host or --port"):
        serve(folder, port=serve(folder).server_address[1])
    with pytest.raises(SourceUnavailable, match=r"has no index\.json"):
        serve(tmp_path)


# -- http:// in the local network


LAN = "http://10.1.2.3:8642"


@pytest.fixture
def lan(monkeypatch: pytest.MonkeyPatch, folder: Path, serve: Callable[..., Server]) -> Server:
    """A mirror on another machine, as the client sees it: connections to it lead to a server here."""
    server = serve(folder)
    real = socket.create_connection

    def reach(address: tuple[str, int], *args: Any, **more: Any) -> socket.socket:
        return real(server.server_address[:2] if address[0] == "10.1.2.3" else address, *args, **more)

    monkeypatch.setattr(socket, "create_connection", reach)
    monkeypatch.setenv("ZOO_MIRROR", LAN)
    return server


def test_a_pinned_file_may_come_over_http_from_the_mirror(lan: Server, data: bytes, record: Make) -> None:
    assert bytes(weights.open_weights(record("http://127.0.0.1:9/w.safetensors", sha256=of(data)))) == data


def test_a_mirror_on_http_that_lies_is_not_believed(lan: Server, folder: Path, data: bytes, record: Make) -> None:
    (folder / of(data)).write_bytes(data[:-1] + b"?")
    with pytest.raises(HashMismatch):
        weights.get(record("http://127.0.0.1:9/w.safetensors", sha256=of(data)))
    assert not list(Cache().root.glob("blobs/sha256/*/*"))


def test_what_is_not_pinned_in_full_is_not_asked_over_http(monkeypatch: pytest.MonkeyPatch, record: Make) -> None:
    monkeypatch.setenv("ZOO_MIRROR", LAN)
    row = record("https://example.org/net-12345678.pth", format="pytorch", sha256_prefix="12345678")
    assert list(sources.candidates(row)) == [(row.sources[0], row.sources[0])]
    assert "only files whose full SHA-256 is recorded" in sources.mirror_note(row)


def test_what_is_served_is_logged_without_queries_and_control_characters(
    serve: Callable[..., Server], folder: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="weights")
    ask(serve(folder), f"/{of(data)}?sig=s3cret", "HEAD")
    (line,) = [line for line in caplog.messages if "HEAD" in line]
    assert f"/{of(data)}?…" in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    "mirror",
    ["http://user:secret@10.1.2.3", "http://10.1.2.3?key=1", "http://10.1.2.4", "http://10.1.2.3:81", "https://10.1.2.3", "", "/tmp"],
)
def test_http_elsewhere_stays_forbidden(monkeypatch: pytest.MonkeyPatch, mirror: str) -> None:
    monkeypatch.setenv("ZOO_MIRROR", mirror)
    with pytest.raises(InsecureSource):
        sources.check_url(f"http://10.1.2.3/{'a' * 64}", insecure_ok=True)


@pytest.mark.parametrize("name", ["weights.pth", "a" * 63, "A" * 64, f"x/{'a' * 64}", f"../{'a' * 64}", f"{'a' * 64}?x", f"{'a' * 64}/"])
def test_over_http_only_a_full_hash_is_a_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("ZOO_MIRROR", LAN)
    sources.check_url(f"{LAN}/{'a' * 64}", insecure_ok=True)
    with pytest.raises(InsecureSource):
        sources.check_url(f"{LAN}/{name}", insecure_ok=True)
    with pytest.raises(InsecureSource):
        sources.check_url(f"{LAN}/{'a' * 64}", insecure_ok=False)  # an https source that redirects there


def test_no_token_goes_to_the_mirror(
    lan: Server, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Server]
) -> None:
    seen: list[Any] = []
    handler = lan.RequestHandlerClass
    monkeypatch.setattr(handler, "_get", lambda self, real=handler._get: (seen.append(dict(self.headers)), real(self))[1])
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "netrc").write_text("machine 10.1.2.3 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    place = f"{LAN}/{of(data)}"
    cache = Cache()
    cache.prepare()
    part = Part(cache.partial, of(data), f"{LAN}/{of(data)}")
    fetch(sources.resolve(place), part, Expected(of(data)))
    part.discard()
    assert seen
    assert not [
        name for headers in seen for name, value in headers.items() if "secret" in value or name.lower() in ("authorization", "cookie")
    ]


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/x", "http://10.1.2.4/x", "file:///etc/passwd", f"{LAN}/x"])
def test_a_redirect_of_the_mirror_leads_to_https_or_nowhere(lan: Server, monkeypatch: pytest.MonkeyPatch, data: bytes, target: str) -> None:
    def redirect(self: Any) -> None:
        self._answer(302, b"", {"Location": target})

    monkeypatch.setattr(lan.RequestHandlerClass, "_get", redirect)
    cache = Cache()
    cache.prepare()
    part = Part(cache.partial, of(data), f"{LAN}/{of(data)}")
    with pytest.raises(InsecureSource):
        fetch(sources.resolve(f"{LAN}/{of(data)}"), part, Expected(of(data)))
    part.discard()


# -- locks


def test_what_a_mirror_fetches_first_is_pinned(
    hub: HubServer, data: bytes, record: Make, safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, commit = hub.file("w.safetensors", data), hub.repo("acme/wheels", {"model.safetensors": data})
    rows = [record(url, tag="a"), record("hf://acme/wheels", tag="b")]
    mirror(tmp_path / "m", rows)
    entries = Lock.read(user_lock()).entries
    assert {key: (entry.sha256, entry.size_bytes, entry.fingerprint) for key, entry in entries.items()} == {
        "ResNet20:a": (of(data), len(data), None),
        "ResNet20:b": (of(data), len(data), None),
    }
    assert entries["ResNet20:b"].sources == (f"hf://acme/wheels@{commit}/model.safetensors",)
    new = safetensors(seed=5)
    hub.file("w.safetensors", new)
    with pytest.raises(ChangedUpstream, match=rf"says sha256 {of(data)}, got {of(new)}"):
        mirror(tmp_path / "another", [rows[0]])
    monkeypatch.setenv("ZOO_FROZEN", "1")
    with pytest.raises(ChangedUpstream):
        weights.get(rows[0])


def test_a_mirror_of_a_mirror_is_no_first_sight(
    hub: HubServer, data: bytes, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w.safetensors", data), sha256_prefix=of(data)[:8])
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "first"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "w.safetensors").write_bytes(data)
    mirror(tmp_path / "second", [row])
    weights.get(row)  # of that mirror too, and no first sight either
    mirror(tmp_path / "third", [row])
    assert not user_lock().exists()
    monkeypatch.delenv("ZOO_MIRROR")
    Cache().blob(of(data)).unlink()
    mirror(tmp_path / "fourth", [row])
    assert Lock.read(user_lock()).entries["ResNet20:test"].sha256 == of(data)


def test_what_the_cache_has_from_the_source_itself_is_a_first_sight_for_a_mirror(
    hub: HubServer, data: bytes, record: Make, tmp_path: Path
) -> None:
    row = record(hub.file("w.safetensors", data))
    weights.get(row)
    user_lock().unlink()
    hub.heal()
    mirror(tmp_path / "m", [row])
    assert Lock.read(user_lock()).entries["ResNet20:test"].sha256 == of(data)
    assert hub.gets() == []
