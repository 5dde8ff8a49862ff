from pathlib import Path

import numpy as np
import pytest
import torch

from zoo import ResNet32, trained
from zoo.embedding import embed, knn, read

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.mark.real
@pytest.mark.long
def test_neighbours_know_what_the_networks_own_classifier_knows(real: Path, tmp_path: Path) -> None:
    with np.load(real / "data" / "cifar10_test.npz") as stored:
        files, ends, labels = stored["jpeg"].tobytes(), stored["offset"].tolist(), stored["label"].tolist()
    for i in range(len(labels)):
        path = tmp_path / "photos" / CLASSES[labels[i]] / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[ends[i] : ends[i + 1]])
    network = trained(ResNet32, real / "real/pytorch/cifar_resnet32-d509ac18.th")
    embed(network, tmp_path / "photos", tmp_path / "o.npy", fast=False, workers=0, progress=False)
    known = read(tmp_path / "o.npy")
    with torch.no_grad():
        guesses = network.fc(torch.from_numpy(np.array(known.vectors["embedding"]))).argmax(1)
    own = 100 * np.mean([CLASSES[guess] == label for guess, label in zip(guesses.tolist(), known.labels, strict=True)])
    assert own > 80
    assert abs(knn(known, linear=False).knn - own) < 1.5
