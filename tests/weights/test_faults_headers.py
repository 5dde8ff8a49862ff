"""Headers that lie, certificates that prove nothing, proxies that are dead: an answer that is right, or an error that says why."""

from __future__ import annotations

import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import server_certificates as certificates
from hubserver import HubServer

import weights
from weights import Checkpoint, patience
from weights.cache import key, read_json
from weights.errors import HashMismatch, InsecureSource, ProtocolError, RateLimited, SizeMismatch, SourceUnavailable, WeightsError
from weights.lock import user_lock

Make = Callable[..., Checkpoint]
SOURCE = "hf://acme/wheels/model.safetensors"


@pytest.mark.parametrize("length", ["-5", "NaN", "1, 2", "0x10", "9" * 30, "", "3"])
def test_a_length_that_is_none_never_makes_a_short_file(
    hub: HubServer, record: Make, data: bytes, sha: str, length: str, cached: Callable[[], dict[str, bytes]]
) -> None:
    hub.fail("bad_length", to=length, times=99)
    try:
        assert bytes(weights.open_weights(record(hub.file("w", data), sha256=sha))) == data
    except WeightsError as error:
        assert "files/w" in str(error)  # noqa: PT017
        assert cached() == {}
    hub.heal()
    assert bytes(weights.open_weights(record(hub.file("w", data), sha256=sha))) == data


@pytest.mark.parametrize("source", [SOURCE, "hf://acme/wheels", "plain"])
def test_paths_in_headers_lead_nowhere(hub: HubServer, record: Make, data: bytes, source: str, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    source = hub.file("w", data) if source == "plain" else source
    around = {path for path in own_cache.parent.rglob("*") if not path.is_relative_to(own_cache)}
    hub.fail("hostile_headers", method="*", times=99)
    assert bytes(weights.open_weights(record(source))) == data
    note = read_json(own_cache / "refs" / f"{key(source)}.json")
    assert note is not None
    assert note["commit"] is None
    assert {path for path in own_cache.parent.rglob("*") if not path.is_relative_to(own_cache)} - around <= {own_cache, user_lock()}
    assert not [path for path in own_cache.rglob("*") if "evil" in path.name]


def test_long_headers_are_read_or_refused(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("long_header")
    assert bytes(weights.open_weights(record(hub.file("w", data)))) == data
    assert len(hub.gets()) == 1


@pytest.mark.parametrize(("source", "path"), [("plain", "/files/"), (SOURCE, ""), ("hf://acme/wheels", "/api/")])
def test_headers_that_drip_end_though_no_byte_is_late(
    hub: HubServer, record: Make, data: bytes, source: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, metadata_s=0.4, window_s=0.3))
    hub.repo("acme/wheels", {"model.safetensors": data})
    row = record(hub.file("w", data) if source == "plain" else source)
    hub.fail("header_drip", method="*", times=99, seconds=0.05, path=path)
    with pytest.raises(SourceUnavailable, match=r"nothing of the file arrived in time|took more than 0 s"):
        weights.get(row)
    hub.heal()
    assert bytes(weights.open_weights(row)) == data


def test_a_list_of_files_without_an_end_is_not_read_into_memory(
    hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data} | {f"file{number}": b"" for number in range(100)})
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, metadata_bytes=1000))
    with pytest.raises(ProtocolError, match="hf://acme/wheels: the Hub's list of files is longer than 1,000 bytes"):
        weights.get(record("hf://acme/wheels"))


@pytest.mark.parametrize("to", ["http://192.0.2.1/api", "file:///etc/passwd", "{hub}/api/models/acme/wheels/revision/main"])
def test_the_list_of_files_is_asked_of_the_hub_and_the_token_stays_there(
    hub: HubServer, record: Make, data: bytes, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("redirect", path="/api/models/", to=to.format(hub=hub.url))
    if "{hub}" in to:  # as of a repository that was renamed
        assert bytes(weights.open_weights(record("hf://acme/wheels"))) == data
    else:
        with pytest.raises(InsecureSource, match=rf"hf://acme/wheels leads elsewhere: refused {to}"):
            weights.get(record("hf://acme/wheels"))
    asked = [r for r in hub.log if r.path != "/api/agent-harnesses"]  # the Hub's client asks for that once a process, of its own accord
    assert {(r.port, r.token) for r in asked} <= {("hub", "Bearer hf_secret"), ("cdn", None)}


def test_a_signed_address_that_expired_is_asked_for_once_more(hub: HubServer, record: Make, data: bytes) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("cut", path="/blobs/", after=120_000)
    hub.fail("status", path="/blobs/", status=403)
    assert bytes(weights.open_weights(record(SOURCE))) == data
    assert [r.status for r in hub.log if r.port == "cdn"] == [200, 403, 206]


def test_an_address_that_stays_forbidden_is_an_error_with_a_hint(hub: HubServer, record: Make, data: bytes) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("status", path="/blobs/", status=403, times=99)
    with pytest.raises(SourceUnavailable, match=r"answered HTTP 403; if it is gated, log in with `hf auth login`, 3 times in a row"):
        weights.get(record(SOURCE))


@pytest.mark.parametrize("sources", [1, 2])
def test_who_is_limited_is_told_until_when(hub: HubServer, record: Make, data: bytes, sources: int) -> None:
    hub.fail("status", status=429, headers={"Retry-After": "3600"})
    hub.fail("status", status=429, headers={"Retry-After": "7200"})
    began = datetime.now(UTC)
    with pytest.raises(RateLimited, match="it asks to wait 3600 s, more than 1 s") as caught:
        weights.get(record(*[hub.file(f"w{number}", data) for number in range(sources)]))
    assert caught.value.retry_at is not None
    assert timedelta(seconds=3590) < caught.value.retry_at - began < timedelta(seconds=3700)


def test_a_wait_beyond_all_calendars_is_no_overflow(hub: HubServer, record: Make, data: bytes) -> None:
    hub.fail("status", status=503, headers={"Retry-After": "9" * 400})
    with pytest.raises(RateLimited) as caught:
        weights.get(record(hub.file("w", data)))
    assert caught.value.retry_at is not None
    assert caught.value.retry_at.year == 9999


def test_one_deadline_holds_for_all_sources(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, deadline_s=1.0, tries=99, read_s=0.3))
    hub.fail("stall", times=99, seconds=1)
    began = time.monotonic()
    with pytest.raises(SourceUnavailable):
        weights.get(record(*[hub.file(f"w{number}", data) for number in range(60)]))
    assert time.monotonic() - began < 30  # a deadline for each would be twice as long


def test_a_part_is_not_lost_where_the_deadline_ends_it(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, deadline_s=2.0))
    row = record(hub.file("w", data))
    hub.fail("drip", after=100_000, times=9, seconds=0.01)
    with pytest.raises(SourceUnavailable, match="too slow; call again to go on"):
        weights.get(row)
    hub.heal()
    assert bytes(weights.open_weights(row)) == data
    assert int((hub.gets()[0].range or "bytes=0-")[6:-1]) >= 100_000


def test_a_proxy_is_named_when_it_wants_a_login_and_believed_as_little_as_a_mirror(
    hub: HubServer, record: Make, data: bytes, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    hub.file("w", data)
    row = record("http://127.0.0.1:9/files/w", sha256=sha)  # nobody listens there: only the proxy can have answered
    hub.fail("status", status=407)
    with pytest.raises(SourceUnavailable, match=rf"HTTP 407, the proxy wants a login, and the proxy in HTTP_PROXY={hub.url[7:]}"):
        weights.get(row)
    hub.file("w", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(HashMismatch, match=f"its record says sha256 {sha}"):
        weights.get(row)
    hub.file("w", data)
    assert bytes(weights.open_weights(row)) == data
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    weights.get(row).path.unlink()
    with pytest.raises(SourceUnavailable, match="files/w: ConnectError"):
        weights.get(row)


class _Page(BaseHTTPRequestHandler):
    body = b""
    asked: list[str] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        led = self.path.startswith("/led")
        self.send_response(302 if led else 200)
        self.send_header("Location", "http://127.0.0.1:9/w") if led else None
        self.send_header("Content-Length", "0" if led else str(len(self.body)))
        self.end_headers()
        self.wfile.write(b"" if led else self.body)


@pytest.fixture
def encrypted(tmp_path: Path, data: bytes, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Serve the data over TLS with this certificate, to a client that trusts the tests' authority; returns the URL."""
    (tmp_path / "authority.pem").write_text(certificates.AUTHORITY)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    servers: list[ThreadingHTTPServer] = []

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hangs up is what the tests are about

    def serve(certificate: str) -> str:
        (tmp_path / "server.pem").write_text(certificates.KEY + certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.pem")
        server = Quiet(("127.0.0.1", 0), type("Page", (_Page,), {"body": data, "asked": []}))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"https://127.0.0.1:{server.server_address[1]}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_that_proves_itself_is_served_from(encrypted: Callable[[str], str], record: Make, data: bytes) -> None:
    assert bytes(weights.open_weights(record(f"{encrypted(certificates.GOOD)}/w"))) == data


@pytest.mark.parametrize("certificate", ["EXPIRED", "OF_ANOTHER_HOST", "SELF_SIGNED"])
def test_a_certificate_that_proves_nothing_is_refused(encrypted: Callable[[str], str], record: Make, certificate: str) -> None:
    url = encrypted(getattr(certificates, certificate))
    with pytest.raises(InsecureSource, match=rf"{url}/w: the server can't prove who it is .*Check the clock, the proxy"):
        weights.get(record(f"{url}/w"))


def test_an_encrypted_source_does_not_lead_to_plain_text(encrypted: Callable[[str], str], record: Make) -> None:
    url = encrypted(certificates.GOOD)
    with pytest.raises(InsecureSource, match=rf"{url}/led leads elsewhere: refused http://127\.0\.0\.1:9/w"):
        weights.get(record(f"{url}/led"))


def test_more_bytes_than_announced_by_the_hub_are_too_many(hub: HubServer, record: Make, data: bytes) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("endless", path="/blobs/", times=9)
    with pytest.raises(SizeMismatch, match="sends more than the"):
        weights.get(record(SOURCE))
    assert sum(r.sent for r in hub.gets()) < 40 * len(data)  # what the sockets held


@pytest.mark.parametrize("fault", ["range_digits", "latin_etag", "long_etag"])
def test_headers_of_odd_characters_and_of_thousands_of_digits_cost_a_resume_and_nothing_else(
    hub: HubServer, record: Make, data: bytes, fault: str, own_cache: Path
) -> None:
    url = hub.file("w", data)
    if fault == "range_digits":
        hub.fail("cut", after=120_000)
    hub.fail(fault, times=2, after=120_000 if "etag" in fault else 0)
    assert bytes(weights.open_weights(record(url))) == data
    assert list((own_cache / "partial").iterdir()) == []


@pytest.mark.parametrize(("fault", "said"), [("deep_list", "nested more than 64 deep"), ("odd_list", "rfilename is a list, expected str")])
def test_a_list_of_files_that_makes_no_sense_is_the_hubs_error(hub: HubServer, record: Make, data: bytes, fault: str, said: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail(fault, path="/api/models/", times=9)
    with pytest.raises(ProtocolError, match=rf"^hf://acme/wheels: the Hub's .*{said}"):
        weights.get(record("hf://acme/wheels"))


@pytest.mark.parametrize("variable", ["ZOO_MIRROR", "HTTPS_PROXY", "HF_ENDPOINT"])
@pytest.mark.parametrize("address", ["http://[::1", "https://ada:s3cret@[::1/x?k=s3cret", "https://example.org:port/s3cret@"])
def test_an_address_in_a_variable_that_can_not_be_read_is_an_error_of_ours(
    hub: HubServer, record: Make, sha: str, variable: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, address)
    with pytest.raises(WeightsError) as caught:
        weights.get(record("hf://acme/wheels/model.safetensors", "https://127.0.0.1:9/w", sha256=sha))
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
