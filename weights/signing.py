"""Who wrote a file or folder: signatures of OpenSSF model-signing with a key of one's own, made and verified without a network.

A signature is a Sigstore bundle beside the file: the SHA-256 of every file, signed with an elliptic-curve key (P-256, P-384 or P-521):

    openssl ecparam -name prime256v1 -genkey -noout -out key.pem
    openssl ec -in key.pem -pubout -out pub.pem
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import os
import stat
from importlib import import_module
from pathlib import Path
from typing import Any

from weights.archive import atomic
from weights.documents import read_json
from weights.errors import BadSignature, MissingLibrary, NoSuchFile, SourceUnavailable, WeightsError

LARGEST = 64 << 20
"""Bytes of a signature that is read at all."""


def sign(what: str | Path, key: str | Path, signature: str | Path | None = None, password: str | None = None) -> Path:
    """Sign a file, or a folder with everything in it.

    Args:
        what: a file or folder without symbolic links.
        key: the private key, PEM.
        signature: where the signature goes; beside `what`, with .sig behind its name, if left out.
        password: of the key, if it is encrypted.

    Returns:
        The signature's path.

    Raises:
        BadSignature: the key can't be read or is of another kind, or the signature would lie in the folder that it signs.
        NoSuchFile: there is no such file.
        MissingLibrary: model-signing is not installed.
        NoSpace, CacheNotWritable: the signature can't be written.
    """
    what = _there(what)
    place = Path(signature).absolute() if signature else what.with_name(what.name + ".sig")
    if what.is_dir() and place.is_relative_to(what):
        raise BadSignature(f"{place} lies in the folder that it signs, and would be an extra file there: name a place outside.")
    signing, _, hashing = _library()
    with _said(f"{what} can't be signed with {key}"):
        config = signing.Config().use_elliptic_key_signer(private_key=_there(key), password=password.encode() if password else None)
        config.set_hashing_config(_everything(hashing))
        with atomic(place) as file:
            between = Path(file.name)
            config.sign(what, between)
    return place


def verify_signature(what: str | Path, signature: str | Path, key: str | Path) -> dict[str, str]:
    """Verify that the owner of a key signed exactly this file, or exactly the files of this folder.

    Args:
        what: the file or folder.
        signature: what `sign`, or another tool of model-signing, wrote.
        key: the public key, PEM; of whom it is, is for the caller to know.

    Returns:
        The SHA-256 of each file that was signed, by its path in the folder; of a single file by its name.

    Raises:
        BadSignature: it is another's, of other bytes, damaged or stripped, or there are files that were not signed.
        NoSuchFile: there is no such file.
        MissingLibrary: model-signing is not installed.
    """
    what, signature = _there(what), _there(signature)
    if signature.is_dir() or signature.stat().st_size > LARGEST:
        raise BadSignature(f"{signature} is no signature: {'a folder' if signature.is_dir() else 'it is far too large'}.")
    _, verifying, hashing = _library()
    with _said(f"{what} is not what {signature} signs, by the key {key}"):
        envelope = read_json(signature.read_bytes(), signature, refuse=BadSignature)["dsseEnvelope"]
        if len(envelope["signatures"]) != 1:
            raise ValueError(f"{len(envelope['signatures'])} signatures where one is needed")
        predicate = read_json(base64.b64decode(envelope["payload"], validate=True), signature, refuse=BadSignature)["predicate"]
        how = predicate["serialization"]
        if how.get("method") != "files" or how.get("hash_type") != "sha256" or how.get("allow_symlinks"):
            raise ValueError("it does not sign the SHA-256 of whole, plain files")
        if how.get("ignore_paths"):
            raise ValueError(f"it leaves out {', '.join(map(str, how['ignore_paths']))}, where anything could be: sign again with zoo sign")
        config = verifying.Config().use_elliptic_key_verifier(public_key=_there(key))
        config.set_hashing_config(_everything(hashing))
        config.verify(what, signature)
    found = {entry["name"]: entry["digest"] for entry in predicate["resources"]}
    return found if what.is_dir() else {what.name: next(iter(found.values()))}


def _everything(hashing: Any) -> Any:
    """Leave nothing out: by default the library overlooks files named like git's, where anything could hide."""
    return hashing.Config().use_file_serialization(hashing_algorithm="sha256").set_ignored_paths(paths=[], ignore_git_paths=False)


def _there(path: str | Path) -> Path:
    path = Path(path).absolute()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSuchFile(f"{path} can't be read: there is no such file. Check the name.") from error
    except OSError as error:
        raise SourceUnavailable(f"{path} can't be read: {error.strerror}.") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise SourceUnavailable(f"{path} is neither a file nor a folder.")
    return path


@contextlib.contextmanager
def _said(what: str) -> Any:
    """Make the library's many errors one of ours, and keep it from printing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (WeightsError, MemoryError):
        raise
    except Exception as error:
        said = str(error).rstrip(". ") or "the signature does not fit"
        with contextlib.suppress(ValueError, SyntaxError):  # the library prints a list, with digests as raw bytes
            lines = ast.literal_eval(said.removeprefix("Signature mismatch: "))
            said = "; ".join(line.partition(": Expected")[0] for line in lines)
        raise BadSignature(f"{what}: {said}{'' if said.endswith('?') else '.'}") from error


def _library() -> tuple[Any, Any, Any]:
    os.environ.setdefault("OTEL_SDK_DISABLED", "true")
    try:
        hashing, signing, verifying = (import_module(f"model_signing.{name}") for name in ("hashing", "signing", "verifying"))
    except ImportError as error:
        todo = "pip install 'kernelzoo[signing]' (model-signing and pyOpenSSL)"
        raise MissingLibrary(f"signatures need OpenSSF's model-signing ({error}): {todo}.") from error
    return signing, verifying, hashing
