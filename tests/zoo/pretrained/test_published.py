"""`trained(NETWORK, TAG)` where the tag is a file as other libraries publish theirs, from a server on this machine to the network."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import pytest
import torch
from hubserver import HubServer
from parity import randomised
from torch import Tensor

from convert import names, writing
from convert.core import COUNTER, joined
from convert.formats import keras
from convert.formats._torch import stored
from convert.network import layers
from weights import ConvertError, HashMismatch, SizeMismatch, WeightsMismatch
from zoo import MobileNetV1_025, MobileNetV2_035, Model, trained
from zoo.commands.app import main

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


def test_a_path_of_a_file_whose_digest_is_known_brings_the_record_along(
    row: Row, pickled: tuple[dict[str, Tensor], bytes], tmp_path: Path
) -> None:
    data = pickled[1]
    (tmp_path / "copy.pth").write_bytes(data)
    row(MobileNetV2_035, f"https://a.example/w.zip#{FILE}", f"sha1:{hashlib.sha1(data).hexdigest()[:8]}", "pytorch", "pytorchcv")
    checkpoint = trained(MobileNetV2_035, tmp_path / "copy.pth").checkpoint
    assert checkpoint is not None
    assert (checkpoint.tag, checkpoint.preprocessing.mean) == ("theirs", (0.5, 0.5, 0.5))


@pytest.mark.parametrize("digest", ["sha1:" + "0" * 40, "sha1:00000000"])
def test_another_pickle_than_its_digest_says_is_refused_and_nothing_is_left(
    hub: HubServer, row: Row, pickled: tuple[dict[str, Tensor], bytes], own_cache: Path, digest: str
) -> None:
    row(MobileNetV2_035, f"{hub.file(f'{FILE}.zip', zipped(pickled[1]))}#{FILE}", digest, "pytorch", "pytorchcv")
    with pytest.raises(HashMismatch, match=r"expected (a )?sha1 .*Nothing was installed"):
        trained(MobileNetV2_035, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]


def test_a_zip_that_would_fill_the_disk_is_refused(hub: HubServer, row: Row, own_cache: Path) -> None:
    data = bytes(8 << 20)
    digest = f"sha1:{hashlib.sha1(data).hexdigest()}"
    row(MobileNetV2_035, f"{hub.file(f'{FILE}.zip', zipped(data))}#{FILE}", digest, "pytorch", "pytorchcv")
    with pytest.raises(SizeMismatch, match=r"unpacks to 8,388,608 bytes, more than the [\d,]+ that are accepted"):
        trained(MobileNetV2_035, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def kerass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network as Keras published its weights until it was version 3: kernels (h, w, in, out), layers in its order."""
    cls, path = MobileNetV1_025, tmp_path_factory.mktemp("keras") / "mobilenet_2_5_224_tf.h5"
    with torch.device("meta"):
        network = cls(**names.fact("keras", "options", cls))
    state = randomised(network, seed=1)
    rows = names.rows("keras", cls, {name: tuple(tensor.shape) for name, tensor in state.items()})
    tensors = {name: stored(name, tensor) for name, tensor in state.items() if COUNTER not in name}
    keras.write(writing.parts(rows, layers(network, (3, 224, 224)), tensors), path, metadata={})
    return path


def test_a_file_of_keras_with_an_md5_becomes_what_its_path_gives(
    hub: HubServer, row: Row, kerass: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kerass.read_bytes()
    row(MobileNetV1_025, hub.file(kerass.name, data), f"md5:{hashlib.md5(data).hexdigest()}", "keras", "keras")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ZOO_REGISTRY")
        wanted = trained(MobileNetV1_025, kerass).state_dict()
    model = trained(MobileNetV1_025, "theirs")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert model.checkpoint is not None
    assert model.checkpoint.preprocessing.mean == (0.5, 0.5, 0.5)
    assert not [path for path in own_cache.rglob("*") if path.suffix in (".h5", ".part")]
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert torch.equal(trained(MobileNetV1_025, "theirs").state_dict()["classifier.1.weight"], wanted["classifier.1.weight"])


def test_a_file_of_keras_is_read_under_its_publishers_name(hub: HubServer, row: Row, kerass: Path, tmp_path: Path) -> None:
    """Keras 1 said in the name alone whose convention the kernels have."""
    silent = tmp_path / "silent.h5"
    silent.write_bytes(kerass.read_bytes())
    with h5py.File(silent, "r+") as file:
        del file.attrs["backend"]
    data = silent.read_bytes()
    digest = f"md5:{hashlib.md5(data).hexdigest()}"
    row(MobileNetV1_025, hub.file("mobilenet.h5", data), digest, "keras", "keras")
    with pytest.raises(ConvertError, match=r"http://\S+/mobilenet.h5 does not say whether"):
        trained(MobileNetV1_025, "theirs")
    row(MobileNetV1_025, hub.file("mobilenet_tf_dim_ordering_tf_kernels.h5", data), digest, "keras", "keras")
    found = trained(MobileNetV1_025, "theirs").state_dict()
    row(MobileNetV1_025, hub.file("mobilenet_th_kernels.h5", data), digest, "keras", "keras")
    turned = trained(MobileNetV1_025, "theirs").state_dict()
    assert torch.equal(turned["features.0.0.weight"], found["features.0.0.weight"].flip(2, 3))


def test_a_file_of_keras_with_another_md5_is_refused_and_nothing_is_left(hub: HubServer, row: Row, kerass: Path, own_cache: Path) -> None:
    row(MobileNetV1_025, hub.file(kerass.name, kerass.read_bytes()), "md5:" + "0" * 32, "keras", "keras")
    with pytest.raises(HashMismatch, match=r"expected md5 0{32}, got .*Nothing was installed"):
        trained(MobileNetV1_025, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]


def test_a_file_of_keras_of_another_network_says_what_does_not_fit(hub: HubServer, row: Row, kerass: Path, own_cache: Path) -> None:
    data = kerass.read_bytes()
    row(MobileNetV2_035, hub.file(kerass.name, data), f"md5:{hashlib.md5(data).hexdigest()}", "keras", "keras")
    with pytest.raises(WeightsMismatch, match=r"mobilenet_2_5_224_tf.h5 does not hold the weights of MobileNetV2_035"):
        trained(MobileNetV2_035, "theirs")
    assert not [path for kind in ("blobs", "partial") for path in (own_cache / kind).rglob("*") if path.is_file()]


def test_a_bundle_of_a_file_of_keras_is_loaded_where_there_is_no_network(
    hub: HubServer, row: Row, kerass: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kerass.read_bytes()
    row(MobileNetV1_025, hub.file(kerass.name, data), f"md5:{hashlib.md5(data).hexdigest()}", "keras", "keras")
    wanted = trained(MobileNetV1_025, "theirs").state_dict()
    assert main(["bundle", "MobileNetV1_025:theirs", "-o", str(tmp_path / "zoo.tar")]) == 0
    for name in ("ZOO_CACHE", "ZOO_USER_REGISTRY"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert main(["unbundle", str(tmp_path / "zoo.tar")]) == 0
    found = trained(MobileNetV1_025, "theirs").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
