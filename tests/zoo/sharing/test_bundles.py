"""Bundles with their networks, and the commands: what another machine can prove, and what a user is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import weights
from weights.errors import MalformedFile, OutputsDiffer
from weights.lock import Lock
from zoo import ResNet20, trained
from zoo.commands.app import main
from zoo.networks.model import Model
from zoo.pretrained.add_file import add_file
from zoo.sharing.golden_outputs import TOLERANCE, compare, golden

PACKAGED = Path(weights.__file__).parent


@pytest.fixture
def network() -> Model:
    return trained(ResNet20)


@pytest.fixture
def tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of a checkpoint of somebody's own, and then another machine without a network."""
    source = weights.get(weights.find("ResNet20")).path
    labels = tmp_path / "mine.tsv"
    labels.write_text("".join(f"\tclass {number}\n" for number in range(10)))
    add_file(ResNet20, source, "mine", license="MIT", labels=str(labels))
    path = tmp_path / "zoo.tar"
    assert main(["bundle", "ResNet20:mine", "resnet20", "-o", str(path), "-q"]) == 0
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "elsewhere" / "cache"))
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "elsewhere" / "registry"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    return path


def test_a_bundle_proves_its_networks_on_the_other_side(tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["unbundle", str(tar), "-q", "--json"]) == 0
    shipped, mine = json.loads(capsys.readouterr().out)
    assert (shipped["tag"], shipped["new"], mine["tag"], mine["new"]) == ("cifar10", False, "mine", True)
    assert mine["proof"].startswith("outputs 0.0e+00 apart")
    network = trained(ResNet20, "mine")
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(network(images), trained(ResNet20)(images))
    assert network.checkpoint is not None
    assert network.checkpoint.labels == str(tmp_path / "elsewhere" / "registry" / "ResNet20.mine.labels.tsv")


def test_what_is_said_of_a_bundle(tar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unbundle", str(tar)]) == 0
    text = capsys.readouterr().out
    assert "ResNet20:cifar10: was here already" in text
    assert "ResNet20:mine: installed" in text
    assert "registered in" in text
    assert main(["unbundle", str(tar), "--no-check"]) == 0
    assert "not compared" in capsys.readouterr().out


def test_a_network_that_computes_something_else_is_not_installed(
    tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.sharing.golden_outputs._run", lambda network, images: torch.zeros(len(images), 10))
    assert main(["unbundle", str(tar)]) == 1
    assert "ResNet20 computes something else here" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "elsewhere").rglob("blobs/sha256/*/*"))
    assert not (tmp_path / "elsewhere" / "registry").exists()


def test_golden_outputs_are_the_same_bytes_each_time(network: Model) -> None:
    before = torch.get_num_threads()
    first = golden(network)
    assert first == golden(network)
    assert torch.get_num_threads() == before
    tensors = load(first)
    assert (tensors["images"].shape, tensors["logits"].shape) == ((2, 3, 32, 32), (2, 10))
    assert "torch" in compare(network, first)


def test_a_weight_that_changed_a_little_too_much_shows(network: Model) -> None:
    written = golden(network)
    with torch.no_grad():
        network.get_parameter(f"{network.classifiers[0]}.weight").mul_(1 + 10 * TOLERANCE)
    with pytest.raises(OutputsDiffer, match="1e-04 is allowed"):
        compare(network, written)


@pytest.mark.parametrize(("apart", "same"), [(0.4, True), (0.7, True), (0.9, False)])
def test_another_best_class_shows_unless_it_is_a_tie(network: Model, apart: float, same: bool) -> None:
    """Each logit is within the tolerance, and yet two of them can change places by nearly twice of it."""
    head = network.get_submodule(network.classifiers[0])
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1, 1 - 0.5 * TOLERANCE, *[0.0] * 8]))
    tensors = load(golden(network))
    tensors["logits"] += TOLERANCE * torch.tensor([-apart, apart, *[0.0] * 8])
    written = save(tensors, {"golden": json.dumps({"torch": "0", "machine": "another"})})
    if same:
        assert "outputs" in compare(network, written)
    else:
        with pytest.raises(OutputsDiffer, match=r"an image's best class was behind by 1\.3e-04 of .* where 1e-04 is a tie"):
            compare(network, written)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_no_numbers_show(network: Model, value: float) -> None:
    written = golden(network)
    with torch.no_grad():
        next(network.parameters()).fill_(value)
    with pytest.raises(OutputsDiffer):
        compare(network, written)


def test_golden_outputs_of_another_network_or_none_are_refused(network: Model) -> None:
    notes = {"golden": json.dumps({"torch": "1", "machine": "x"})}
    images, logits = torch.rand(2, 3, 32, 32), torch.rand(2, 10)
    wrong = [
        ({"images": images}, notes),
        ({"images": images, "logits": logits}, {}),
        ({"images": images[:, :1].contiguous(), "logits": logits}, notes),
        ({"images": images, "logits": logits[:, :5].contiguous()}, notes),
        ({"images": images[:0], "logits": logits[:0]}, notes),
        ({"images": images.double(), "logits": logits}, notes),
        ({"images": images, "logits": logits / 0}, notes),
        ({"images": images, "logits": logits}, {"golden": "[" * 10_000}),
        ({"images": torch.zeros(1, 3, 4000, 8), "logits": logits[:1]}, notes),
    ]
    for tensors, told in wrong:
        with pytest.raises(MalformedFile):
            compare(network, save(tensors, told))
    for data in (b"", b"x" * 100, golden(network)[:-1]):
        with pytest.raises(MalformedFile):
            compare(network, data)


def test_a_network_that_nobody_knows_is_not_installed(
    tar: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.sharing.bundles.variants", dict)
    assert main(["unbundle", str(tar)]) == 3
    assert "update it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["bundle", "ResNet51"], 3),
        (["bundle", "ResNet20:none"], 3),
        (["bundle", "DenseNet264"], 3),
        (["bundle"], 2),
        (["unbundle", "missing.tar"], 3),
        (["unbundle", "zoo.tar", "--signature", "x.sig"], 2),
        (["mirror", "m", "ResNet20", "--serve"], 2),
        (["mirror", "m", "--serve"], 3),
        (["mirror", "m", "--serve", "--forget"], 2),
        (["mirror", "m"], 3),
        (["mirror", "m", "ResNet51"], 3),
        (["verify", "zoo.tar"], 2),
        (["verify", "--signature", "x.sig", "--key", "x.pem", "missing"], 3),
        (["sign", "missing", "--key", "x.pem"], 3),
        (["sbom"], 3),
        (["sbom", "--lock", "missing.lock"], 3),
    ],
)
def test_a_mistake_has_one_message_and_a_code(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] in ([], ["m"])


def test_a_mirror_is_written_and_verified_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    assert main(["mirror", str(folder), "ResNet20", "-q"]) == 0
    assert "ZOO_MIRROR=" in capsys.readouterr().out
    assert main(["mirror", str(folder)]) == 0
    blob = next(path for path in folder.iterdir() if path.name != "index.json")
    blob.write_bytes(b"other")
    assert main(["mirror", str(folder)]) == 1
    assert "CHANGED" in capsys.readouterr().err
    assert main(["mirror", str(folder)]) == 1
    told = capsys.readouterr()
    assert f"0 files in '{folder}', 1 missing." in told.out
    todo = f"fetch it again by zoo mirror {folder} ResNet20:cifar10, or give it up by zoo mirror {folder} --forget"
    assert "".join(told.err.split()) == "".join(f"MISSING {blob.name}: {todo}".split())
    assert main(["mirror", str(folder), "ResNet20:cifar10", "-q"]) == 0
    assert f"what it was lies in .damaged.{blob.name}" in " ".join(capsys.readouterr().err.split())
    assert main(["mirror", str(folder), "--forget"]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_that_an_earlier_version_moved_aside_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    assert main(["mirror", str(folder), "ResNet20", "-q"]) == 0
    (folder / ".damaged.old.pth").touch()
    assert main(["mirror", str(folder)]) == 1
    assert f"MISSING old.pth: fetch it again by zoo mirror {folder} MODEL" in " ".join(capsys.readouterr().err.split())


def test_a_signed_bundle_is_verified_before_it_is_installed(tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        made = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (tmp_path / f"{name}.key").write_bytes(made)
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    assert main(["sign", str(tar), "--key", str(tmp_path / "ours.key")]) == 0
    signed = ["--signature", f"{tar}.sig", "--key"]
    assert main(["verify", *signed, str(tmp_path / "ours.pub"), str(tar)]) == 0
    assert main(["verify", *signed, str(tmp_path / "theirs.pub"), str(tar)]) == 1
    assert main(["unbundle", str(tar), *signed, str(tmp_path / "theirs.pub")]) == 1
    assert not (tmp_path / "elsewhere").exists()
    folder = tmp_path / "folder"  # signed rightly, and no bundle all the same
    folder.mkdir()
    (folder / tar.name).write_bytes(tar.read_bytes())
    assert main(["sign", str(folder), "--key", str(tmp_path / "ours.key")]) == 0
    capsys.readouterr()
    assert main(["unbundle", str(folder), "--signature", f"{folder}.sig", "--key", str(tmp_path / "ours.pub")]) == 1
    assert "is no file, and a bundle is one" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "elsewhere").exists()
    assert main(["unbundle", str(tar), *signed, str(tmp_path / "ours.pub")]) == 0
    logging.getLogger("weights").setLevel(logging.NOTSET)


def test_a_bill_of_materials_is_written(tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tarfile

    with tarfile.open(tar) as file:
        lock = file.extractfile("weights.lock")
        assert lock is not None
        (tmp_path / "weights.lock").write_bytes(lock.read())
    assert main(["sbom", "--lock", str(tmp_path / "weights.lock"), "-o", str(tmp_path / "sbom.json")]) == 0
    made = json.loads((tmp_path / "sbom.json").read_text())
    assert [one["version"] for one in made["components"]] == ["cifar10", "mine"]
    capsys.readouterr()
    assert main(["sbom", "--lock", str(tmp_path / "weights.lock"), "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == made


def test_what_is_there_is_replaced_when_asked_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Lock({}, 1).write(tmp_path / "weights.lock")
    for command in (["bundle", "ResNet20", "-q"], ["sbom", "--lock", str(tmp_path / "weights.lock")]):
        (tmp_path / "mine").write_text("mine")
        assert main([*command, "-o", str(tmp_path / "mine")]) == 1
        assert "mine' is there already; --replace puts the new one in its place" in capsys.readouterr().err
        assert (tmp_path / "mine").read_text() == "mine"
        assert main([*command, "-o", str(tmp_path / "mine"), "--replace"]) == 0
        assert (tmp_path / "mine").read_bytes() != b"mine"


def test_a_bundle_is_listed_without_installing_it(tar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "--list", str(tar), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["model"], one["tag"]) for one in found["weights"]] == [("ResNet20", "cifar10"), ("ResNet20", "mine")]
    assert main(["bundle", "--list", str(tar)]) == 0
    assert capsys.readouterr().out.startswith("ResNet20:cifar10: ")
    assert main(["bundle", "ResNet20", "--list", str(tar)]) == 2
    assert main(["bundle", "--list", str(tar.with_name("none.tar"))]) == 3
    capsys.readouterr()
    tar.with_name("cut.tar").write_bytes(tar.read_bytes()[:-1000])
    assert main(["bundle", "--list", str(tar.with_name("cut.tar"))]) == 1
    assert "Traceback" not in capsys.readouterr().err
