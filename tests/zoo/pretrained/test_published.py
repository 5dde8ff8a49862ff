"""`trained(NETWORK, TAG)` where the tag is a file as other libraries publish theirs, from a server on this machine to the network."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hubserver import HubServer
from parity import randomised
from torch import Tensor

from convert import names
from convert.core import COUNTER, joined
from weights import HashMismatch, SizeMismatch
from zoo import MobileNetV2_035, Model, trained

Row = Callable[..., None]
FILE = "mobilenetv2_wd35-1234-0b5a71c2.pth"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """Register a checkpoint as the tables of weights/registry do."""

    def write(cls: type[Model], source: str, digest: str, format: str, naming: str) -> None:
        (tmp_path / "registry").mkdir(exist_ok=True)
        (tmp_path / "registry" / "theirs.toml").write_text(
            f'[{cls.__name__}.theirs]\nsources = ["{source}"]\nformat = "{format}"\nnames = "{naming}"\ndigest = "{digest}"\n'
            'num_classes = 1000\nlabels = "imagenet1k"\nlicense = "unstated"\nprovenance = "a test"\n'
            'preprocessing = { resize = 256, crop = 224, interpolation = "bilinear", mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }\n'
        )
        monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "registry"))

    return write


def random_state(cls: type[Model]) -> dict[str, Tensor]:
    with torch.device("meta"):
        network = cls()
    return randomised(network, seed=1)


def pytorchcvs(cls: type[Model], state: dict[str, Tensor]) -> bytes:
    """Write a network as pytorchcv saves it, without the biases that its layers lack."""
    rows = names.rows("pytorchcv", cls, {name: tuple(tensor.shape) for name, tensor in state.items()})
    theirs: dict[str, Tensor] = {}
    for row in rows:
        for leaf in ("weight", "bias", "running_mean", "running_var", COUNTER):
            tensor = state.get(f"{row.ours}.{leaf}")
            if tensor is not None and leaf not in row.lacks:
                theirs[joined(row.theirs, leaf)] = (
                    tensor[:, :, None, None] if row.kind == "linear_from_conv" and leaf == "weight" else tensor
                )
    file = io.BytesIO()
    torch.save(theirs, file)
    return file.getvalue()


def zipped(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FILE, data)
    return made.getvalue()


@pytest.fixture(scope="module")
def pickled() -> tuple[dict[str, Tensor], bytes]:
    state = random_state(MobileNetV2_035)
    return state, pytorchcvs(MobileNetV2_035, state)


def test_a_pickle_in_a_zip_with_pytorchcvs_names_becomes_the_network(
    hub: HubServer, row: Row, pickled: tuple[dict[str, Tensor], bytes], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, data = pickled
    source = f"{hub.file(f'{FILE}.zip', zipped(data))}#{FILE}"
    row(MobileNetV2_035, source, f"sha1:{hashlib.sha1(data).hexdigest()}", "pytorch", "pytorchcv")
    model = trained(MobileNetV2_035, "theirs")
    state = {**state, "classifier.1.bias": torch.zeros(1000)}  # their classifier is a convolution without one
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items() if COUNTER not in name)
    assert model.checkpoint is not None
    assert model.checkpoint.sources == (source,)
    assert not [path for path in own_cache.rglob("*") if path.suffix in (".pth", ".zip", ".part")]
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert torch.equal(trained(MobileNetV2_035, "theirs").state_dict()["classifier.1.weight"], state["classifier.1.weight"])


@pytest.mark.parametrize("digest", ["sha1:" + "0" * 40, "sha1:00000000"])
def test_another_pickle_than_its_digest_says_is_refused_and_nothing_is_left(
    hub: HubServer, row: Row, pickled: tuple[dict[str, Tensor], bytes], own_cache: Path, digest: str
) -> None:
    row(MobileNetV2_035, f"{hub.file(f'{FILE}.zip', zipped(pickled[1]))}#{FILE}", digest, "pytorch", "pytorchcv")
    with pytest.raises(HashMismatch, match="expected (a )?sha1 .*Nothing was installed"):
        trained(MobileNetV2_035, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]


def test_a_zip_that_would_fill_the_disk_is_refused(hub: HubServer, row: Row, own_cache: Path) -> None:
    data = bytes(8 << 20)
    digest = f"sha1:{hashlib.sha1(data).hexdigest()}"
    row(MobileNetV2_035, f"{hub.file(f'{FILE}.zip', zipped(data))}#{FILE}", digest, "pytorch", "pytorchcv")
    with pytest.raises(SizeMismatch, match=r"unpacks to 8,388,608 bytes, more than the [\d,]+ that are accepted"):
        trained(MobileNetV2_035, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]
