"""Layers to dream of when nobody names one: there is one for every network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.zoo.dreaming.dreams import drawn, levels, picture
from zoo import CATALOGUE
from zoo.dreaming import dream
from zoo.dreaming.cutting import cut
from zoo.dreaming.layers import LAYERS, usual_layer
from zoo.extraction.taps import Places, trace
from zoo.networks.model import Model

FIRST: dict[str, type[Model]] = {}
for found in CATALOGUE.values():
    FIRST.setdefault(found.family().__name__, found)
TOKENS = {"ViT": "encoder.layers.encoder_layer_6", "MLPMixer": "blocks.4", "ConvMixer": "blocks.16"}


def layer(cls: type[Model]) -> tuple[str, Places]:
    with torch.device("meta"):
        network = cls().eval()
    places = Places(network, trace(network))
    return usual_layer(places), places


@pytest.mark.parametrize("family", sorted(LAYERS))
def test_the_layer_of_a_family_is_one_of_its_networks(family: str) -> None:
    found, places = layer(FIRST[family])
    assert found == LAYERS[family]
    assert places.find(found)


@pytest.mark.parametrize("family", sorted(TOKENS))
def test_a_network_without_a_map_at_stride_16_dreams_of_the_block_in_its_middle(family: str) -> None:
    found, places = layer(FIRST[family])
    assert found == TOKENS[family]
    assert places.find(found)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FIRST))
def test_a_network_of_every_family_dreams(family: str) -> None:
    network = drawn(FIRST[family])
    side = cut(network, None).reading.least + 3
    image = picture(side + 5, side)
    dreamt = dream(network, image, octaves=1, steps=1, progress=False)
    assert 0.5 < np.abs(levels(dreamt) - levels(image)).mean() < 3


@pytest.mark.long
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_network_has_a_layer_to_dream_of(name: str) -> None:
    found, places = layer(CATALOGUE[name])
    (key,) = places.find(found)
    assert key not in ("body", "logits", "embedding")
