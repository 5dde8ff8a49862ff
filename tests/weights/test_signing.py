"""Signatures: only the right key, only the very files that were signed (injection S4)."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from weights.errors import BadSignature, MissingLibrary, SourceUnavailable
from weights.signing import sign, verify_signature

Keys = tuple[Path, Path]


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], Keys]:
    def make(name: str) -> Keys:
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = tmp_path / f"{name}.key", tmp_path / f"{name}.pub"
        plain = serialization.NoEncryption()
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "zoo.tar").write_bytes(b"a bundle" * 1000)
    return tmp_path / "zoo.tar"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.safetensors", "deep/b.safetensors"):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_bytes(name.encode())
    return tmp_path / "models"


def test_the_right_key_proves_the_very_bytes(bundle: Path, keys: Callable[[str], Keys]) -> None:
    import hashlib

    private, public = keys("ours")
    signature = sign(bundle, private)
    assert signature == bundle.with_name("zoo.tar.sig")
    assert verify_signature(bundle, signature, public) == {"zoo.tar": hashlib.sha256(bundle.read_bytes()).hexdigest()}


def test_another_key_is_refused(bundle: Path, keys: Callable[[str], Keys]) -> None:
    signature = sign(bundle, keys("ours")[0])
    with pytest.raises(BadSignature, match=r"is not what .* signs, by the key"):
        verify_signature(bundle, signature, keys("theirs")[1])


def test_another_key_that_claims_to_be_ours_is_refused(bundle: Path, keys: Callable[[str], Keys]) -> None:
    ours, theirs = keys("ours"), keys("theirs")
    good, bad = (json.loads(sign(bundle, private).read_bytes()) for private, _ in (ours, theirs))
    bad["verificationMaterial"] = good["verificationMaterial"]
    bundle.with_name("zoo.tar.sig").write_text(json.dumps(bad))
    with pytest.raises(BadSignature):
        verify_signature(bundle, bundle.with_name("zoo.tar.sig"), ours[1])


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "not json", '{"dsseEnvelope": {}}', "[" * 100_000])
def test_a_signature_that_is_none_is_refused(bundle: Path, keys: Callable[[str], Keys], text: str) -> None:
    bundle.with_name("x.sig").write_text(text)
    with pytest.raises(BadSignature):
        verify_signature(bundle, bundle.with_name("x.sig"), keys("ours")[1])


@pytest.mark.parametrize(
    "strip",
    [
        lambda facts, envelope: envelope.update(signatures=[]),
        lambda facts, envelope: envelope.update(signatures=envelope["signatures"] * 2),
        lambda facts, envelope: envelope["signatures"][0].update(sig=""),
        lambda facts, envelope: envelope.pop("payload"),
        lambda facts, envelope: facts.pop("verificationMaterial"),
        lambda facts, envelope: facts.pop("dsseEnvelope"),
    ],
)
def test_a_stripped_signature_is_refused(bundle: Path, keys: Callable[[str], Keys], strip: Callable[..., object]) -> None:
    private, public = keys("ours")
    signature = sign(bundle, private)
    facts = json.loads(signature.read_bytes())
    strip(facts, facts["dsseEnvelope"])
    signature.write_text(json.dumps(facts))
    with pytest.raises(BadSignature):
        verify_signature(bundle, signature, public)


def test_no_signature_at_all_is_an_error(bundle: Path, keys: Callable[[str], Keys]) -> None:
    with pytest.raises(SourceUnavailable, match=r"zoo\.tar\.sig can't be read"):
        verify_signature(bundle, bundle.with_name("zoo.tar.sig"), keys("ours")[1])


def test_another_models_signature_is_refused(bundle: Path, tmp_path: Path, keys: Callable[[str], Keys]) -> None:
    private, public = keys("ours")
    (tmp_path / "other.tar").write_bytes(b"another bundle")
    signature = sign(tmp_path / "other.tar", private)
    with pytest.raises(BadSignature, match="Hash mismatch"):
        verify_signature(bundle, signature, public)


def test_a_changed_byte_is_refused(bundle: Path, keys: Callable[[str], Keys]) -> None:
    private, public = keys("ours")
    signature = sign(bundle, private)
    data = bytearray(bundle.read_bytes())
    data[4000] ^= 1
    bundle.write_bytes(data)
    with pytest.raises(BadSignature, match="Hash mismatch"):
        verify_signature(bundle, signature, public)


def test_a_payload_that_was_edited_is_refused(bundle: Path, keys: Callable[[str], Keys]) -> None:
    import hashlib

    private, public = keys("ours")
    signature = sign(bundle, private)
    facts = json.loads(signature.read_bytes())
    old = hashlib.sha256(bundle.read_bytes()).hexdigest()
    bundle.write_bytes(b"evil")
    payload = base64.b64decode(facts["dsseEnvelope"]["payload"]).decode().replace(old, hashlib.sha256(b"evil").hexdigest())
    facts["dsseEnvelope"]["payload"] = base64.b64encode(payload.encode()).decode()
    signature.write_text(json.dumps(facts))
    with pytest.raises(BadSignature):
        verify_signature(bundle, signature, public)


@pytest.mark.parametrize(
    "name", ["extra.safetensors", "deep/extra.py", ".gitignore", ".git/hooks/evil", ".github/evil", ".hidden", "models.sig"]
)
def test_an_extra_file_in_the_folder_is_refused(folder: Path, keys: Callable[[str], Keys], name: str) -> None:
    private, public = keys("ours")
    signature = sign(folder, private)
    assert set(verify_signature(folder, signature, public)) == {"a.safetensors", "deep/b.safetensors"}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"evil")
    with pytest.raises(BadSignature, match=f"Extra files found.*{name}"):
        verify_signature(folder, signature, public)


def test_a_missing_file_and_a_link_are_refused(folder: Path, tmp_path: Path, keys: Callable[[str], Keys]) -> None:
    private, public = keys("ours")
    signature = sign(folder, private)
    (folder / "a.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(BadSignature, match="Missing files"):
        verify_signature(folder, signature, public)
    os.symlink(tmp_path / "a.safetensors", folder / "a.safetensors")  # noqa: PTH211
    with pytest.raises(BadSignature):
        verify_signature(folder, signature, public)
    with pytest.raises(BadSignature):
        sign(folder, private)


def test_a_signature_that_leaves_files_out_is_refused(folder: Path, tmp_path: Path, keys: Callable[[str], Keys]) -> None:
    from model_signing import hashing, signing

    private, public = keys("ours")
    (folder / "ignored").write_bytes(b"anything")
    config = signing.Config().use_elliptic_key_signer(private_key=private)
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[folder / "ignored"]))
    config.sign(folder, tmp_path / "x.sig")
    with pytest.raises(BadSignature, match="it leaves out"):
        verify_signature(folder, tmp_path / "x.sig", public)


def test_a_signature_never_lies_in_the_folder_that_it_signs(folder: Path, keys: Callable[[str], Keys]) -> None:
    with pytest.raises(BadSignature, match="name a place outside"):
        sign(folder, keys("ours")[0], folder / "models.sig")


def test_a_key_of_another_kind_signs_nothing(bundle: Path, keys: Callable[[str], Keys], tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    made = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "rsa.key").write_bytes(made)
    for bad in (tmp_path / "rsa.key", keys("ours")[1], bundle):
        with pytest.raises(BadSignature, match="can't be signed"):
            sign(bundle, bad)
    assert not bundle.with_name("zoo.tar.sig").exists()


def test_an_encrypted_key_wants_its_password(bundle: Path, keys: Callable[[str], Keys], tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(keys("ours")[0].read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"open sesame")
    (tmp_path / "locked.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(BadSignature, match="can't be signed"):
        sign(bundle, tmp_path / "locked.key", password="wrong")
    signature = sign(bundle, tmp_path / "locked.key", password="open sesame")
    assert verify_signature(bundle, signature, tmp_path / "ours.pub")


def test_without_the_library_the_way_to_get_it_is_said(bundle: Path, keys: Callable[[str], Keys], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model_signing", "model_signing.hashing"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibrary, match=r"pip install 'kernelzoo\[signing\]'"):
        sign(bundle, keys("ours")[0])
