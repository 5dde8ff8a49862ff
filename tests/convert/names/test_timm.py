"""timm itself is the oracle: with its tensors and the record's options, our network computes what timm's does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from written import written

import zoo
from convert import core, names
from convert.network import layers
from weights import Checkpoint, checkpoints
from zoo.networks.model import Model
from zoo.networks.swin import Swin

pytestmark = pytest.mark.reference

ROWS = [row for row in checkpoints() if row.names == "timm" and (row.sources[0].startswith("hf://timm/") or row.model == "Xception")]


def arch(row: Checkpoint) -> str:
    """timm's name of the network: hf://timm/<arch>.<tag>/file, or the one file that is on no hub."""
    return row.sources[0].removeprefix("hf://timm/").partition(".")[0] if row.sources[0].startswith("hf://") else "legacy_xception"


def ours(row: Checkpoint) -> type[Model]:
    return zoo.CATALOGUE[row.model]


def smallest() -> list[Checkpoint]:
    """One record for each arithmetic: a family, its switches, its padding; eps is compared below, for every network.

    Networks of one size are compared at another one by their own tests.
    """
    kinds: dict[object, Checkpoint] = {}
    for row in sorted(ROWS, key=lambda row: ours(row).params):
        cls = ours(row)
        if row.num_classes != 1000 or cls.fixed_size or issubclass(cls, Swin):
            continue
        switches = (getattr(cls, "squeeze_excite", False), getattr(cls, "groups", 1) > 1, getattr(cls, "batch_norm", False))
        kinds.setdefault((cls.__mro__[1], switches, row.options.get("padding")), row)
    return list(kinds.values())


def lively(model: nn.Module) -> nn.Module:
    """Statistics as training leaves them: at their initial values many mistakes can't be seen."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, low, high in (
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.2, 0.2),
                (layer.running_mean, -0.2, 0.2),
                (layer.running_var, 0.2, 1),
            ):
                assert tensor is not None
                nn.init.uniform_(tensor, low, high)
    return model.eval()


def carried(row: Checkpoint, tensors: dict[str, Tensor], **options: object) -> Model:
    with torch.device("meta"):
        model = ours(row)(**options)
    state = names.to_ours(tensors, model.state_dict(), naming="timm", family=type(model))
    model.load_state_dict(state, assign=True)
    return model.eval()


@pytest.mark.parametrize("row", smallest(), ids=lambda row: f"{row.model}-{row.tag}")
def test_logits_equal_timms(row: Checkpoint) -> None:
    import timm

    theirs = lively(timm.create_model(arch(row)))
    side = max(
        64, ours(row).min_size + ours(row).min_size % 2, 2 * ours(row).size_multiple
    )  # even: at odd sizes SAME and symmetric padding are the same
    images = torch.randn(2, 3, side, side)
    with torch.inference_mode():
        expected = theirs(images)
        scale = expected.abs().max()
        assert (carried(row, theirs.state_dict(), **row.options)(images) - expected).abs().max() < 1e-4 * scale
        for left_out in row.options:  # every option is needed
            others = {name: value for name, value in row.options.items() if name != left_out}
            assert (carried(row, theirs.state_dict(), **others)(images) - expected).abs().max() > 1e-3 * scale


SMALLEST = {arch(row): row for row in smallest()}


@pytest.mark.parametrize(
    "row",
    [row if name in SMALLEST else pytest.param(row, marks=pytest.mark.long) for name, row in {arch(row): row for row in ROWS}.items()],
    ids=arch,
)
def test_names_shapes_and_settings_are_timms(row: Checkpoint) -> None:
    import timm

    with torch.device("meta"):
        theirs, model = timm.create_model(arch(row), num_classes=1000), ours(row)(**row.options)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    mapping = names.rows("timm", type(model), shapes)
    _, report = core.apply(mapping, theirs.state_dict(), shapes)
    assert report.ok, report
    structure = layers(model, (3, model.input_size, model.input_size))
    their_shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items() if not name.endswith(core.COUNTER)}
    assert {name: stored.shape for name, stored in written(mapping, model.state_dict(), structure).items()} == their_shapes
    assert settings(model) == settings(theirs)


def settings(model: nn.Module) -> tuple[Counter[float], Counter[object]]:
    """Every eps, and every convolution's kernel, stride, groups and whether TensorFlow's padding may move it."""
    norms = Counter(layer.eps for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    convolutions: Counter[object] = Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1) and not name.startswith("pre_logits"):  # VGG's are dense layers
            same = type(layer).__name__ == "Conv2dSame"
            padding = tuple(side // 2 for side in layer.kernel_size) if layer.padding == "same" else layer.padding
            convolutions[layer.kernel_size, layer.stride, layer.groups, None if same else padding] += 1
    return norms, convolutions
