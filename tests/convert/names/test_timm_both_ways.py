"""Every network that the zoo and timm both have: our random tensors compute the same in timm's, and come back bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from written import written

import zoo
from convert import core, names
from convert.network import layers
from recipes import registry_rows
from zoo.networks.swin import Swin
from zoo.networks.vit import ViT

pytestmark = pytest.mark.reference

UNPUBLISHED = ("GhostNet_050", "GhostNet_130", "SEResNet101", "SEResNet152", "MobileNetV2_035", "MobileNetV2_075")
"""Networks whose architecture timm has, and no weights."""
LARGEST = 300_000_000
"""Parameters of the largest network here: three copies of it in float64 take 7 GB."""
ARCHS: dict[str, tuple[str, dict[str, object]]] = {
    arch: (name, dict(options))
    for name, cls in zoo.CATALOGUE.items()
    if cls.params < LARGEST
    for arch, options in (registry_rows.archs(cls) or {key: {} for key in [name.lower()] if name in UNPUBLISHED}).items()
    if not arch.startswith(("mnasnet_100", "legacy_se")) and not issubclass(cls, ViT | Swin)
}
"""timm's architectures of our networks, and the options that make ours theirs.

Those that take images of a definite size have tests of their own, at smaller sizes; the legacy ones are compared below.
"""


def arithmetic(arch: str) -> object:
    """What a network computes otherwise than its siblings; they are longer and wider."""
    variant, options = ARCHS[arch]
    cls = zoo.CATALOGUE[variant]
    switches = (getattr(cls, "squeeze_excite", False), getattr(cls, "groups", 1) > 1, getattr(cls, "batch_norm", False))
    stem = (bool(getattr(cls, "stem", ())), getattr(cls, "stem_pool", "max"), getattr(cls, "channel_attention", False))
    return cls.family(), cls.paper, switches, stem, options.get("padding"), getattr(cls, "layer_scale", False)


SMALLEST = {arithmetic(arch): arch for arch in sorted(ARCHS, key=lambda arch: -zoo.CATALOGUE[ARCHS[arch][0]].params)}
DRAWN = 1_000_003
"""Numbers drawn for a tensor; a longer one repeats them, at a length that no tensor's axes divide."""


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """Draw every tensor in float64, in which two orders of the same sums differ by nothing that counts."""
    random = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, old in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            state[name] = torch.zeros((), dtype=old.dtype)
            continue
        new = torch.empty(old.shape, dtype=torch.float64)
        if old.dim() >= 2:
            bound = math.sqrt(6 / old[0].numel())
            few = torch.empty(min(new.numel(), DRAWN), dtype=torch.float64).uniform_(-bound, bound, generator=random)
            state[name] = few.repeat(-(-new.numel() // few.numel()))[: new.numel()].view(new.shape)
        elif name.endswith("running_var"):
            state[name] = new.uniform_(0.5, 1.5, generator=random)
        else:
            low, high = (0.8, 1.2) if name.endswith("weight") else (-0.2, 0.2)
            state[name] = new.uniform_(low, high, generator=random)
    return state


@pytest.mark.parametrize(
    "arch", [arch if arch in SMALLEST.values() else pytest.param(arch, marks=pytest.mark.long) for arch in sorted(ARCHS)]
)
def test_random_tensors_go_there_and_come_back(arch: str) -> None:
    import timm

    variant, options = ARCHS[arch]
    cls = zoo.CATALOGUE[variant]
    with torch.device("meta"):
        theirs, ours = timm.create_model(arch).eval(), cls(**options).eval()
    state = drawn(ours)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    their_shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items() if not name.endswith(core.COUNTER)}
    rows = names.rows("timm", cls, shapes)
    structure = layers(ours, (3, cls.input_size, cls.input_size))
    there = {name: torch.from_numpy(stored.array()) for name, stored in written(rows, state, structure).items()}
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == their_shapes
    back, report = core.apply(rows, there, shapes)
    assert report.ok, report
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())
    assert back.keys() == {name for name in state if not name.endswith(core.COUNTER)}

    ours.load_state_dict(state, assign=True)
    counters = {name: torch.tensor(0) for name in theirs.state_dict() if name.endswith(core.COUNTER)}
    theirs.load_state_dict(there | counters, assign=True)
    side = (
        cls.input_size if cls.fixed_size else max(32, cls.min_size + cls.min_size % 2)
    )  # even: at odd sizes SAME and symmetric padding are the same
    images = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = theirs(images), ours(images)
    assert expected.isfinite().all()
    assert (expected[0] - expected[1]).norm() > 1e-4 * expected.norm()  # the logits depend on the image
    assert (logits - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("arch", "variant", "options"),
    [
        ("legacy_seresnet18", "Legacy_SEResNet18", {"ceil_mode": True}),
        ("legacy_seresnext26_32x4d", "SEResNeXt26_32x4d", {"ceil_mode": True}),
        pytest.param("legacy_seresnet50", "SEResNet50", {"ceil_mode": True, "stride_on": "1x1"}, marks=pytest.mark.long),
        pytest.param("legacy_senet154", "SENet154", {"ceil_mode": True}, marks=pytest.mark.long),
    ],
)
def test_the_first_port_of_senet_is_read(arch: str, variant: str, options: dict[str, object]) -> None:
    import timm

    cls = zoo.CATALOGUE[variant]
    with torch.device("meta"):
        theirs, ours = timm.create_model(arch).eval(), cls(**options).eval()
    state = drawn(theirs)
    assert names.recognise(state, cls, ours.state_dict()) == "timm"
    theirs.load_state_dict(state, assign=True)
    ours.load_state_dict(names.to_ours(state, ours.state_dict(), naming="timm", family=cls), assign=True)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images))
