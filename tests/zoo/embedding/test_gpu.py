from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.embedding import embed
from zoo.networks.model import Model

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"batch_size": 32, "progress": False}


def rows(out: Path) -> np.ndarray:
    return np.load(out)


def test_a_gpu_gives_the_cpus_vectors_and_the_same_bytes_again(network: Model, photos: Path, tmp_path: Path) -> None:
    embed(network, photos, tmp_path / "cpu.npy", device="cpu", fast=False, **OPTIONS)
    for name in ("a", "b"):
        report = embed(network, photos, tmp_path / f"{name}.npy", device="cuda", dtype=torch.float32, workers=2, **OPTIONS)
    assert report.rows == 120
    assert np.abs(rows(tmp_path / "a.npy") - rows(tmp_path / "cpu.npy")).max() < 1e-3 * np.abs(rows(tmp_path / "cpu.npy")).max()
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_normalisation_on_a_gpu_has_the_bits_of_preprocess(network: Model, photos: Path) -> None:
    from zoo.embedding.decoding import Decoder
    from zoo.embedding.feeding import Feeder
    from zoo.images import open_source

    assert network.checkpoint is not None
    steps = network.checkpoint.preprocessing
    chunk = Decoder(open_source(photos), steps)[range(8)]
    feeder = Feeder(torch.nn.Identity(), steps, torch.device("cuda"), 8)
    files = sorted(photos.rglob("*.jpg"))[:8]
    assert torch.equal(feeder.normalise(chunk.pixels.cuda()).cpu(), network.preprocess(files))


def test_nvjpeg_differs_by_little_and_leaves_the_rest_to_pillow(network: Model, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    files = sorted(photos.rglob("*.jpg"))[:40]
    for number, path in enumerate(files):
        (folder / f"{number:02d}.jpg").write_bytes(path.read_bytes())
    with Image.open(files[0]) as picture:
        picture.save(folder / "90.png")
        picture.rotate(90).save(folder / "91.jpg", exif=exif(8), quality=95)
        picture.convert("CMYK").save(folder / "92.jpg")
    (folder / "93.jpg").write_bytes(files[0].read_bytes()[:-300])
    for name in ("cpu", "gpu"):
        report = embed(network, folder, tmp_path / f"{name}.npy", decode=name, device="cuda", dtype=torch.float32, **OPTIONS)
        assert [e.key for e in report.unreadable] in (["93.jpg"], [])
    one, other = (rows(tmp_path / f"{name}.npy")[:43] for name in ("cpu", "gpu"))
    cosine = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert cosine.min() > 0.98
    assert np.array_equal(one[40:43], other[40:43])


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made
