"""A server that speaks enough of the Hugging Face Hub for its real client, and that can fail in every way we know; on 127.0.0.1 only.

with HubServer() as hub:
    commit = hub.repo("acme/wheels", {"model.safetensors": data})    # large files: a redirect to a second port, the CDN
    url = hub.file("resnet50-11ad3fa6.pth", data)                    # a plain file server's file
    hub.fail("cut", after=1000, times=2)                             # the next two GETs of a body
    hub.log                                                          # every request, with the bytes that were sent
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

BROKEN = {"cut", "reset", "stall", "drip"}
WRONG = {"flip", "swap", "changed", "endless", "gzip", "no_etag", "weak_etag", "long_header", "latin_etag", "long_etag"}
LENGTHS = {"short_length", "long_length", "no_length", "bad_length"}
RANGES = {"range_changed", "range_ignored", "range_elsewhere", "range_total", "range_star", "range_multipart", "range_digits"}
ANSWERS = {"drop", "status", "html", "redirect", "garbage", "header_drip"}
METADATA = {"linked_size", "linked_etag", "no_commit", "deep_list", "odd_list"}
HOSTILE = {"hostile_headers"}
SIGNATURE = "c0ffee-signature-of-the-bucket"
"""Stands in every address of the CDN that the Hub leads to, as the buckets of today want it."""
FAULTS = sorted(BROKEN | WRONG | LENGTHS | RANGES | ANSWERS | METADATA | HOSTILE)


@dataclass
class Fault:
    kind: str
    path: str = ""
    method: str = "GET"
    times: int = 1
    after: int = 0
    seconds: float = 0.0
    status: int = 503
    to: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    port: str
    method: str
    path: str
    range: str | None
    if_range: str | None
    token: str | None
    status: int = 0
    fault: str | None = None
    sent: int = 0


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, str] = {}
        self.bodies: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.lock = threading.Lock()
        self.servers = [self._serve("hub"), self._serve("cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self.servers)

    def _serve(self, port: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "port": port})
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def repo(self, name: str, files: dict[str, bytes]) -> str:
        """Commit files to a repository's main branch; returns the commit."""
        commits = self.repos.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        self.heads[name] = commit
        self.bodies |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        return commit

    def file(self, name: str, data: bytes) -> str:
        """Serve a plain file; returns its URL."""
        self.bodies[name] = data
        return f"{self.url}/files/{name}"

    def fail(self, kind: str, **how: Any) -> None:
        assert kind in FAULTS, kind
        with self.lock:
            self.faults.append(Fault(kind, **how))

    def heal(self) -> None:
        with self.lock:
            self.faults.clear()
            self.log.clear()

    def gets(self, path: str = "") -> list[Request]:
        """The GETs that were answered with a body, or a piece of one."""
        with self.lock:
            return [
                r for r in self.log if r.method == "GET" and path in r.path and r.status in (200, 206) and not r.path.startswith("/api/")
            ]

    def take(self, port: str, method: str, path: str) -> Fault:
        """Choose the first fault that can happen to this request, and use it up by one."""
        body = port == "cdn" or path.startswith("/files/")
        possible = ANSWERS | HOSTILE | (BROKEN | WRONG | LENGTHS | RANGES if body else METADATA)
        with self.lock:
            for fault in self.faults:
                if fault.kind in possible and fault.times and fault.method in (method, "*") and fault.path in path:
                    fault.times -= 1
                    return fault
        return Fault("")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # clients that die are part of the tests
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    port: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        header = self.headers.get
        self.entry = Request(self.port, self.command, self.path, header("Range"), header("If-Range"), header("Authorization"))
        with self.hub.lock:
            self.hub.log.append(self.entry)
        try:
            self.fault = self.hub.take(self.port, self.command, self.path)
            self.entry.fault = self.fault.kind or None
            if self.fault.kind in ANSWERS:
                self.answer_wrongly(self.fault)
            else:
                self.route(unquote(urlsplit(self.path).path))
        except OSError:
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: bytes = b"", **headers: str | int | None) -> None:
        self.entry.status = status
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def hang_up(self) -> None:
        """Close with a reset instead of an orderly end."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def answer_wrongly(self, fault: Fault) -> None:
        if fault.kind == "drop":
            self.hang_up()
        elif fault.kind == "status":
            self.answer(fault.status, b"no", **fault.headers)
        elif fault.kind == "html":
            self.answer(200, b"<html><form>Sign in to this network</form></html>", Content_Type=fault.headers.get("type", "text/html"))
        elif fault.kind == "redirect":
            self.answer(302, Location=fault.to or self.path)
        elif fault.kind == "header_drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            for _ in range(int(30 / fault.seconds)):
                self.wfile.write(b"a")
                time.sleep(fault.seconds)
            self.close_connection = True
        else:
            self.wfile.write(os.urandom(200) + b"\r\n\r\n")
            self.close_connection = True

    def route(self, path: str) -> None:
        first, *rest = path.strip("/").split("/")
        if self.port == "cdn" or first == "files":
            name = rest[-1] if rest else first
            known = name in self.hub.bodies
            self.body(self.hub.bodies[name], hashlib.sha256(self.hub.bodies[name]).hexdigest()) if known else self.answer(404)
        elif first == "api" and len(rest) >= 3:
            self.api("/".join(rest[1:3]), rest[3:])
        elif len(rest) >= 4 and rest[1] == "resolve":
            self.resolve(f"{first}/{rest[0]}", rest[2], "/".join(rest[3:]))
        else:
            self.answer(404)

    def commit_of(self, repo: str, revision: str) -> str | None:
        commits = self.hub.repos.get(repo)
        if commits is None:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        commit = self.hub.heads[repo] if revision == "main" else revision
        if commit not in commits:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            return None
        return commit

    def api(self, repo: str, rest: list[str]) -> None:
        if (commit := self.commit_of(repo, rest[1] if len(rest) > 1 else "main")) is None:
            return
        files = self.hub.repos[repo][commit]
        if rest[:1] == ["tree"]:
            facts: Any = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        else:
            facts = {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        odd = {"deep_list": b"[" * 100_000, "odd_list": b'{"siblings": [{"rfilename": [9]}, 3]}'}.get(self.fault.kind)
        self.answer(200, odd or json.dumps(facts).encode(), Content_Type="application/json", X_Repo_Commit=commit)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if (commit := self.commit_of(repo, revision)) is None:
            return None
        data = self.hub.repos[repo][commit].get(name)
        if data is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=commit)
        kind = self.fault.kind
        sha256 = hashlib.sha256(data).hexdigest()
        headers: dict[str, Any] = {
            "X_Repo_Commit": None if kind == "no_commit" else commit,
            "X_Linked_Etag": '"{}"'.format("0" * 64 if kind == "linked_etag" else sha256),
            "X_Linked_Size": len(data) + 7 * (kind == "linked_size"),
            "ETag": f'"{sha256}"',
        }
        if kind == "hostile_headers":
            headers |= {"X_Repo_Commit": "../../../evil", "Content_Disposition": 'attachment; filename="../../evil"'}
        if not name.endswith((".safetensors", ".pth", ".bin")):
            return self.answer(200, data, X_Repo_Commit=commit, ETag=f'"{sha256[:40]}"')
        return self.answer(302, Location=f"{self.hub.cdn}/blobs/{sha256}?X-Amz-Signature={SIGNATURE}&Expires=9", **headers)

    def body(self, data: bytes, etag: str) -> None:
        fault, kind = self.fault, self.fault.kind
        if kind == "flip":
            at = fault.after % len(data)
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if kind in ("swap", "changed", "range_changed"):
            data = data[:9] + bytes(b ^ 0x55 for b in data[9:])
            etag = etag if kind == "swap" else hashlib.sha256(data).hexdigest()
        tag: str | None = None if kind == "no_etag" else f'W/"{etag}"' if kind == "weak_etag" else f'"{etag}"'
        tag = {"latin_etag": f'"caf\xe9 {etag}"', "long_etag": f'"{etag * 200}"'}.get(kind, tag)
        headers: dict[str, Any] = {"ETag": tag, "Content_Type": "application/octet-stream"}
        status, start, total = 200, 0, len(data)
        wanted = self.headers.get("Range")
        if wanted and kind != "range_ignored" and (kind == "range_changed" or self.headers.get("If-Range") == tag):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= total:
                return self.answer(416, Content_Range=f"bytes */{total}")
            start = start // 2 if kind == "range_elsewhere" else start
            status = 206
            said = {"range_total": str(total + 1000), "range_star": "*", "range_digits": "9" * 5000}.get(kind, str(total))
            at = "1" * 5000 if kind == "range_digits" else start
            headers["Content_Range"] = None if kind == "range_multipart" else f"bytes {at}-{total - 1}/{said}"
        body = data[start:]
        headers["Content_Length"] = len(body)
        if kind == "gzip":
            status, body = 200, gzip.compress(bytes(10_000_000))
            headers |= {"Content_Encoding": "gzip", "Content_Length": len(body)}
        if kind in ("short_length", "long_length"):
            headers["Content_Length"] = max(0, len(body) + (10 if kind == "long_length" else -10))
            body = body[: headers["Content_Length"]]
            self.close_connection = True
        if kind == "bad_length":
            headers["Content_Length"] = fault.to or "-5"
            self.close_connection = True
        if kind == "long_header":
            headers["X_Long"] = "a" * 60_000
        if kind == "hostile_headers":
            headers |= {"ETag": '"../../../evil"', "Content_Disposition": 'attachment; filename="../../evil"'}
        if kind in ("no_length", "endless"):
            headers |= {"Content_Length": None, "Connection": "close"}
            self.close_connection = True
        self.entry.status = status
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.send(body, fault)
        return None

    def send(self, body: bytes, fault: Fault) -> None:
        if fault.kind == "endless":
            body = bytes(1 << 16)
            while True:
                self.count(self.connection.send(body))
        broken = fault.kind in BROKEN or (fault.kind in ("no_etag", "weak_etag", "latin_etag", "long_etag") and fault.after)
        limit = min(fault.after, len(body)) if broken else len(body)
        for at in range(0, limit, 1 << 14):
            piece = body[at : min(at + (1 << 14), limit)]
            self.wfile.write(piece)
            self.count(len(piece))
        if broken:
            self.close_connection = True
        if fault.kind == "reset":
            time.sleep(0.02)  # what was sent arrives before the reset does
            self.hang_up()
        if fault.kind == "stall":
            time.sleep(fault.seconds)
        if fault.kind == "drip":
            for byte in body[limit:]:
                self.wfile.write(bytes([byte]))
                self.count(1)
                time.sleep(fault.seconds)

    def count(self, sent: int) -> None:
        with self.hub.lock:
            self.entry.sent += sent
