"""RegNet X and Y compute what torchvision's do, and have the stages that the paper draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models
from torchvision.models.regnet import BlockParams

from recipes import registry_rows
from zoo import CATALOGUE, RegNetX_3_2GF, RegNetX_400MF, RegNetY_16GF, RegNetY_400MF
from zoo.networks.regnet import RegNet

HERE = [name for name in CATALOGUE if name.startswith("RegNet")]
NAMES = [name for name in HERE if name.replace("RegNet", "regnet_").lower() in models.list_models(module=models)]
SHOWN = "RegNetY_400MF"
"""Its gates are all that Y adds to X, and the others are deeper and wider."""


class Narrow(RegNet, depth=3, w0=8, wa=8.0, wm=2.0, group_width=16): ...


def theirs(name: str) -> str:
    return name.replace("RegNet", "regnet_").lower()


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision computes widths with tensors, which have no numbers on the meta device."""
    compute = BlockParams.from_init_params

    def computed(**how: Any) -> BlockParams:
        with torch.device("cpu"):
            return compute(**how)

    monkeypatch.setattr(BlockParams, "from_init_params", computed)


@pytest.mark.reference
@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("name", [name if name == SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], getattr(models, theirs(name)), size)


@pytest.mark.reference
def test_all_of_torchvisions_are_there() -> None:
    assert sorted(map(theirs, NAMES)) == [name for name in models.list_models(module=models) if name.startswith("regnet")]


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in HERE if name not in NAMES])
def test_the_others_have_the_tensors_of_timms(name: str) -> None:
    (arch,) = registry_rows.archs(CATALOGUE[name])
    assert registry_rows.misfit(name, arch, (), 1000) == ""


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(RegNetY_400MF(), models.regnet_y_400mf())


def test_stages_are_those_of_the_papers_figures() -> None:
    assert RegNetX_400MF.stages() == [(32, 1), (64, 2), (160, 7), (400, 12)]
    assert RegNetX_3_2GF.stages() == [(96, 2), (192, 6), (432, 15), (1008, 2)]
    assert RegNetY_16GF.stages() == [(224, 2), (448, 4), (1232, 11), (3024, 1)]


def test_a_stage_that_is_narrower_than_a_group_is_one_group() -> None:
    assert Narrow.stages() == [(8, 1), (16, 1), (32, 1)]
    grouped = [layer.groups for layer in Narrow().trunk_output.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)]
    assert grouped == [1, 1, 2]


def test_a_gate_is_a_quarter_of_what_enters_its_block() -> None:
    with torch.device("meta"):
        blocks = RegNetY_400MF().trunk_output.block2
    assert [block.f.se.fc1.out_channels for block in blocks] == [48 // 4, 104 // 4, 104 // 4]
