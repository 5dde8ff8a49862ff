"""The network that a run trains has the size of images that was asked for, or the run says why not before it begins."""

from __future__ import annotations

from typing import Any

import pytest
from small import Tiny

from zoo.finetuning.network import rebuilt, subject
from zoo.finetuning.settings import Settings
from zoo.networks.mlp_mixer import MLPMixer
from zoo.networks.vit import ViT


class Thin(ViT, patch=8, depth=1, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


class ThinMixer(MLPMixer, depth=1, width=16, patch_size=8, input_size=32): ...


def prepared(model: Any, size: int | None, **options: Any) -> Any:
    fresh = isinstance(model, type)
    return subject(model, ["a", "b"], Settings(size=size), named=None, from_scratch=fresh, options=options, preprocessing=None)


@pytest.mark.parametrize(("size", "options", "side"), [(None, {}, 32), (48, {}, 48), (None, {"image_size": 24}, 24)])
def test_positions_are_made_for_the_size_that_is_asked_for(size: int | None, options: dict[str, Any], side: int) -> None:
    found = prepared(Thin, size, **options)
    assert (found.network.input_size, found.steps.crop) == (side, side)
    again = rebuilt(Thin, {"num_classes": 2, "in_channels": 3, "options": found.options})
    assert again.input_size == side


def test_a_network_of_one_size_says_so_before_the_run_begins() -> None:
    with pytest.raises(ValueError, match="Thin is built for images of 32 px, not for size=48; give its class, Thin, to have it built"):
        prepared(Thin(), 48)
    with pytest.raises(ValueError, match="ThinMixer is built for images of 32 px, not for size=48; leave size out"):
        prepared(ThinMixer, 48)
    assert prepared(Tiny, 48).steps.crop == 48
