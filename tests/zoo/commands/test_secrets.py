"""What opens somebody's storage stands nowhere: a whole session is searched for planted passwords, queries, tokens and signatures."""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import pickle
import tarfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hubserver import SIGNATURE, HubServer

import weights
from convert.formats import safetensors
from weights import HashMismatch, InsecureSource, SourceUnavailable, WeightsError, patience
from weights.addresses import Address
from weights.lock import Lock
from zoo import ResNet20, trained
from zoo.commands.app import main

PASSWORD, QUERY, FRAGMENT, TOKEN = "planted-password", "planted-query", "planted-fragment", "hf_planted"
SECRETS = (PASSWORD, QUERY, FRAGMENT, TOKEN, SIGNATURE)
Expect = Callable[..., None]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    little = patience.Patience(tries=2, backoff_s=0.01, longest_wait_s=1)
    monkeypatch.setattr(patience, "PATIENCE", little)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


class Session:
    """Collects what is shown, logged and raised while commands and functions run."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.log = io.StringIO()
        self.said: list[str] = []

    def zoo(self, *words: str, code: int | None = 0) -> str:
        """Run a command; what it shows."""
        before = logging.root.handlers[:]
        assert main(list(words)) == code or code is None, self.capsys.readouterr()
        logging.root.handlers[:] = before  # the command puts its own there
        out, err = self.capsys.readouterr()
        self.said += [out, err]
        return out + err

    def refused(self, kind: type[WeightsError], call: Callable[[], object]) -> str:
        """Expect an error; its message."""
        with pytest.raises(kind) as caught:
            call()
        self.said += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]
        return str(caught.value)

    def found(self) -> list[str]:
        """Search everything; where a secret stands."""
        texts = {"what was said": "\n".join(self.said), "the logs": self.log.getvalue()}
        files = {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        places = [f"{where}: {text.partition(word)[0][-300:]}" for where, text in texts.items() for word in SECRETS if word in text]
        return places + [where for where, data in files.items() for word in SECRETS if word.encode() in data or word in where]


@pytest.fixture
def session(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Session]:
    folder = own_cache.parent / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "weights.lock").write_text(Lock({}, serial=1).render())
    made = Session(own_cache.parent, capsys)
    ear = logging.StreamHandler(made.log)
    loggers = [logging.getLogger(name) for name in (None, "huggingface_hub", "httpx2", "httpcore2", "weights", "zoo")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.DEBUG)
        logger.addHandler(ear)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # of which levels are on
    yield made
    for logger in loggers:
        logger.removeHandler(ear)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    torch.manual_seed(0)
    safetensors.save(ResNet20().state_dict(), tmp_path / "w")
    return (tmp_path / "w").read_bytes()


def signed(url: str) -> str:
    return f"{url}?token={QUERY}&expires=9#{FRAGMENT}"


def test_a_session_leaves_no_secret_on_the_disk_on_the_screen_or_in_a_log(
    hub: HubServer, session: Session, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name = signed(hub.file("w.safetensors", data)), "ResNet20:mine"

    hub.fail("cut", after=100_000)  # an interrupted download leaves a part and its note
    hub.fail("drop", times=99)
    said = session.refused(SourceUnavailable, lambda: trained(ResNet20, source))
    assert f"{hub.url}/files/w.safetensors?token=…&expires=…" in said
    (note,) = (session.folder / "cache" / "partial").glob("*.json")
    assert note.stat().st_mode & 0o077 == 0
    hub.heal()
    model = trained(ResNet20, source)  # and goes on
    assert hub.log[-1].range == "bytes=100000-"
    assert f"token={QUERY}" in hub.log[-1].path  # which was really sent
    torch.save(model, session.folder / "model.pt")
    (session.folder / "record.pkl").write_bytes(pickle.dumps(model.checkpoint))
    session.said += [repr(model.checkpoint), str(asdict(model.checkpoint)), str(copy.deepcopy(model.checkpoint))]  # type: ignore[arg-type]

    hub.repo("acme/wheels", {"model.safetensors": data})  # the Hub leads to a signed address
    for fault in ({"kind": "status", "status": 403}, {"kind": "status", "status": 404}, {"kind": "swap"}, {"kind": "html"}):
        hub.fail(path="/blobs/", times=99, **fault)
        session.refused(WeightsError, lambda: trained(ResNet20, "hf://acme/wheels"))
        hub.heal()
    for to in (f"http://ada:{PASSWORD}@192.0.2.1/w", f"ftp://x/{'?'}{QUERY}", f"http://[{QUERY}@::1", f"https://u:{PASSWORD}?@x:{QUERY}/"):
        hub.fail("redirect", path="/blobs/", to=f"{to}?X-Amz-Signature={SIGNATURE}", times=99)
        session.refused(WeightsError, lambda: trained(ResNet20, "hf://acme/wheels"))
        hub.heal()
    trained(ResNet20, "hf://acme/wheels")
    assert any(SIGNATURE in request.path for request in hub.log)

    host = hub.url.partition("://")[2]  # a mirror with a login and a query
    monkeypatch.setenv("ZOO_MIRROR", f"http://ada:{PASSWORD}@{host}/files?sig={QUERY}")
    other = safetensors_of(1)
    sha256 = hashlib.sha256(other).hexdigest()
    hub.file("absent", b"")
    row = weights.adhoc("ResNet20", f"{hub.url}/files/gone.safetensors", tag="other", sha256=sha256)
    said = session.refused(SourceUnavailable, lambda: weights.get(row))
    assert f"{hub.url}/files/{sha256}?sig=…: HTTP 404" in said
    hub.file(sha256, data)
    session.refused(HashMismatch, lambda: weights.get(row))
    hub.file(sha256, other)
    weights.get(row)
    assert hub.log[-1].path == f"/files/{sha256}?sig={QUERY}"
    assert hub.log[-1].token is not None

    session.zoo("add", source, name, code=3)  # a command takes files
    weights.add(signed(hub.file("v.safetensors", data)), "ResNet20", "mine", num_classes=10, license="MIT", labels="cifar10")
    session.zoo("pull", "ResNet20", "--weights", source)
    session.zoo("lock", source, "ResNet20:mine", "hf://acme/wheels")
    session.zoo("lock", "--check")
    session.zoo("lock", "--check", "--json")
    session.zoo("lock", "--update", signed(f"{hub.url}/files/nothing"), code=4)
    session.zoo("info", name)
    session.zoo("info", "ResNet20", "--full")
    session.zoo("info", "ResNet20", "--json")
    session.zoo("list", "-c", "--json")
    session.zoo("cache")
    session.zoo("cache", "--json")
    session.zoo("verify")
    session.zoo("sbom", "-o", "sbom.json")
    session.zoo("bundle", name, "-o", "zoo.tar")
    session.zoo("unbundle", "zoo.tar")
    session.zoo("mirror", "mirrored", name)
    session.zoo("gc", "--dry-run", "--json")
    session.zoo("pull", "ResNet20", "--weights", f"https://ada:{PASSWORD}@example.org/w.safetensors", code=1)
    session.zoo("pull", "ResNet20", "--weights", f"https://example.org:{QUERY}/w", code=1)
    monkeypatch.setenv("HTTPS_PROXY", f"http://ada:{PASSWORD}@127.0.0.1:9")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert f"{hub.url}/files?sig=\\u2026" in session.zoo("doctor", "--json", code=None)
    session.zoo("pull", "ResNet20", "--weights", signed("https://example.org/w.safetensors"), code=4)
    with tarfile.open("zoo.tar") as archive:
        session.said.append(repr([archive.extractfile(one).read() for one in archive if one.name.endswith(("toml", "json", "lock"))]))  # type: ignore[union-attr]

    log = session.log.getvalue()
    assert f"GET {hub.url}/files/w.safetensors?token=…&expires=…" in log  # the debugging lines are there
    assert session.found() == []


def safetensors_of(seed: int) -> bytes:
    values = torch.arange(300, dtype=torch.float32) + seed
    from safetensors.torch import save

    return save({"w": values})


def test_the_search_would_find_what_is_planted(session: Session) -> None:
    (session.folder / "cache").mkdir()
    (session.folder / "cache" / f"{QUERY}.json").write_text("{}")
    (session.folder / "cache" / "b.json").write_text(PASSWORD)
    logging.getLogger("httpx2").debug("GET %s", TOKEN)
    session.said.append(SIGNATURE)
    assert len(session.found()) == 4


def test_an_address_that_was_pickled_has_lost_its_secrets(data: bytes) -> None:
    row = weights.adhoc("ResNet20", signed("https://example.org/w.safetensors"))
    assert pickle.loads(pickle.dumps(row)).sources == ("https://example.org/w.safetensors?token=…&expires=…#…",)
    assert replace(row, license="MIT").sources == row.sources
    assert Address(row.sources[0]).reveal() == signed("https://example.org/w.safetensors")


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1", "example.org:x", "[::1", "exa mple"])
@pytest.mark.parametrize("scheme", ["https", "http", "HTTPS"])
def test_a_password_in_a_source_is_refused_without_being_shown(scheme: str, host: str) -> None:
    for password in (PASSWORD, f"{PASSWORD}/", f"{PASSWORD}?", f"{PASSWORD}#", f"{PASSWORD}@", f"x/{PASSWORD}"):
        with pytest.raises((InsecureSource, weights.BadRecord)) as caught:
            weights.adhoc("ResNet20", f"{scheme}://ada:{password}@{host}/w")
        assert PASSWORD not in "".join(traceback.format_exception(caught.value, limit=0))
