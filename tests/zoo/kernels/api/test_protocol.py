"""A fast network is a module: what PyTorch does with modules and tensors gives the network's answer, or a refusal that says what to do."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from zoo import fast, plain
from zoo.kernels.api.network import Fast
from zoo.networks.resnet import CIFARResNet


class ResNet8(CIFARResNet, n=1):
    """A block a stage, so that plans are made in a moment."""


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def made(network: nn.Module) -> Fast:
    return fast(network.eval(), "cpu", example=IMAGES, tune="none", progress=False)


@pytest.fixture(scope="module")
def network() -> ResNet8:
    torch.manual_seed(0)
    return ResNet8().eval()


@pytest.fixture
def quick(network: ResNet8) -> Fast:
    return made(network)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = made(ResNet8())
        self.last = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.backbone(x))


def near(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("prefix", ["", "network."])
def test_other_parameters_are_used_for_one_call(quick: Fast, network: ResNet8, prefix: str, tie_weights: bool) -> None:
    before = quick(IMAGES)
    other = {name: 1.5 * value for name, value in network.named_parameters()}
    wanted = functional_call(network, other, (IMAGES,))
    assert not near(wanted, before)
    found = functional_call(quick, {prefix + name: value for name, value in other.items()}, (IMAGES,), tie_weights=tie_weights)
    assert near(found, wanted)
    assert torch.equal(quick(IMAGES), before)


@torch.no_grad()
def test_one_of_many_parameters_is_enough(quick: Fast, network: ResNet8) -> None:
    other = {"fc.bias": torch.ones(10)}
    assert near(functional_call(quick, other, (IMAGES,)), functional_call(network, other, (IMAGES,)))


@torch.no_grad()
def test_a_parents_parameters_reach_it(quick: Fast) -> None:
    parent = Parent()
    other = {"backbone.fc.bias": torch.full((10,), 3.0)}
    plainly = copy.deepcopy(parent)
    plainly.backbone = plain(plainly.backbone)  # pyright: ignore[reportAttributeAccessIssue]
    for tie_weights in (True, False):
        assert near(functional_call(parent, other, (IMAGES,), tie_weights=tie_weights), functional_call(plainly, other, (IMAGES,)))


@torch.no_grad()
def test_a_parent_loads_its_own_state(quick: Fast) -> None:
    parent = Parent()
    before = parent(IMAGES)
    assert {name for name, _ in parent.named_parameters()} == parent.state_dict().keys() - {name for name, _ in parent.named_buffers()}
    assert "backbone.conv1.weight" in parent.state_dict()
    parent.load_state_dict(parent.state_dict())
    assert near(parent(IMAGES), before)
    for assign in (False, True):
        zeros = {name: torch.zeros_like(value) for name, value in parent.state_dict().items()}
        parent.load_state_dict(zeros, assign=assign)
        assert parent.backbone(IMAGES).abs().sum() == 0
    with pytest.raises(RuntimeError, match=r"backbone\.fc\.bias"):
        parent.load_state_dict({name: value for name, value in zeros.items() if name != "backbone.fc.bias"})


def test_names_of_parameters_and_buffers_are_the_networks(quick: Fast, network: ResNet8) -> None:
    assert [name for name, _ in quick.named_parameters()] == [name for name, _ in network.named_parameters()]
    assert [name for name, _ in quick.named_buffers()] == [name for name, _ in network.named_buffers()]
    assert quick.state_dict().keys() == network.state_dict().keys()
    assert all(ours is theirs for ours, theirs in zip(quick.parameters(), network.parameters(), strict=True))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.temperature = nn.Conv2d(3, 4, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) / self.temperature


def test_the_networks_attributes_are_read_and_not_set() -> None:
    quick = made(Scaled())
    assert quick.temperature == 1.0
    with pytest.raises(AttributeError, match=r"set it on plain\(model\), and call fast\(plain\(model\)\) again"):
        quick.temperature = 2.0
    quick.nickname = "mine"  # nobody reads it but who set it
    assert quick.nickname == "mine"
    assert not hasattr(plain(quick), "nickname")


@pytest.mark.parametrize(
    "add",
    [
        lambda quick: setattr(quick, "more", nn.Linear(2, 2)),
        lambda quick: setattr(quick, "conv", nn.Conv2d(3, 4, 3)),
        lambda quick: quick.add_module("more", nn.Linear(2, 2)),
        lambda quick: quick.register_buffer("more", torch.ones(2)),
        lambda quick: quick.register_parameter("more", nn.Parameter(torch.ones(2))),
    ],
)
def test_no_layer_is_added_unseen(add: Callable[[Fast], Any]) -> None:
    quick = made(Scaled())
    with pytest.raises(AttributeError, match=r"plain\(model\)"):
        add(quick)
    assert not hasattr(plain(quick), "more")


@torch.no_grad()
def test_a_layer_that_was_replaced_is_seen_and_answered_by_the_network() -> None:
    quick = made(Scaled())
    itself = plain(quick)
    itself.conv = nn.Conv2d(3, 4, 3).eval()
    assert near(quick(IMAGES), itself(IMAGES))
    itself.conv.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))
    assert near(quick(IMAGES), itself(IMAGES))


@torch.no_grad()
def test_lazily_negated_and_conjugated_inputs_are_read_right(quick: Fast, network: ResNet8) -> None:
    negated = torch.randn(2, 3, 32, 32, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert near(quick(negated), network(negated))


@torch.no_grad()
def test_transforms_of_functions_give_the_networks_answer(quick: Fast, network: ResNet8) -> None:
    assert near(vmap(quick)(IMAGES[:, None]), vmap(network)(IMAGES[:, None]))
    ours, theirs = (jvp(call, (IMAGES,), (torch.ones_like(IMAGES),)) for call in (quick, network))
    assert near(ours[0], theirs[0])
    assert near(ours[1], theirs[1])


def test_forward_mode_gives_the_networks_derivative(quick: Fast, network: ResNet8) -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(IMAGES, torch.ones_like(IMAGES))
        ours, theirs = (forward_ad.unpack_dual(call(dual)) for call in (quick, network))
    assert ours.tangent is not None
    assert near(ours.tangent, theirs.tangent)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def test_export_and_tracing_take_the_network(quick: Fast, network: ResNet8) -> None:
    wanted = network(IMAGES)
    assert near(torch.export.export(quick, (IMAGES,)).module()(IMAGES), wanted)
    traced = torch.jit.trace(quick, IMAGES, check_trace=False)  # pyright: ignore[reportPrivateImportUsage]
    other = torch.randn(2, 3, 32, 32)
    assert near(traced(other), network(other))


class Marked(Tensor):
    """A subclass that PyTorch keeps through operations."""


@torch.no_grad()
def test_a_subclass_of_tensors_is_the_networks(quick: Fast, network: ResNet8) -> None:
    found = quick(IMAGES.as_subclass(Marked))
    assert type(found) is Marked
    assert near(found.as_subclass(Tensor), network(IMAGES))


@torch.no_grad()
def test_another_default_device_changes_nothing(network: ResNet8) -> None:
    with torch.device("meta"):
        quick = fast(network, "cpu", example=IMAGES, tune="none", progress=False)
        found = quick(IMAGES)
    assert near(found, network(IMAGES))


def test_what_no_plan_answers_is_refused_where_the_network_trains() -> None:
    trains = ResNet8()
    quick = fast(trains, "cpu", example=IMAGES, tune="none", progress=False)
    with pytest.raises(RuntimeError, match=r"torch\.func, such as vmap, which .* use plain\(model\), or plain\(model\)\.eval\(\) first"):
        vmap(quick)(IMAGES[:, None])
    assert trains.training


@torch.no_grad()
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_have_a_network_of_their_own(quick: Fast, network: ResNet8, way: str) -> None:
    if way == "deepcopy":
        twin = copy.deepcopy(quick)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(quick))
    else:
        torch.save(quick, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert near(twin(IMAGES), quick(IMAGES))
    assert plain(twin) is not network
    assert all(ours is theirs for ours, theirs in zip(twin.parameters(), plain(twin).parameters(), strict=True))
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    assert twin(IMAGES).abs().sum() == 0
    assert quick(IMAGES).abs().sum() > 0


@dataclasses.dataclass
class Answer:
    logits: Tensor
    name: str = "answer"


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.conv(x).mean((2, 3)))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Answering runs unchanged")
def test_a_dataclass_is_answered_as_one() -> None:
    network = Answering().eval()
    quick = made(network)
    for images in (IMAGES, 2 * IMAGES):
        found = quick(images)
        assert isinstance(found, Answer)
        assert near(found.logits, network(images).logits)


def added(quick: Fast, network: nn.Module) -> None:
    network.get_parameter("fc.bias").add_(5)


def loaded(quick: Fast, network: nn.Module) -> None:
    network.load_state_dict({name: 0 * value for name, value in network.state_dict().items()})


def assigned(quick: Fast, network: nn.Module) -> None:
    network.load_state_dict({name: 0 * value for name, value in network.state_dict().items()}, assign=True)


def replaced(quick: Fast, network: nn.Module) -> None:
    network.fc = nn.Linear(64, 10).eval()


def parameter(quick: Fast, network: nn.Module) -> None:
    network.get_submodule("fc").bias = nn.Parameter(torch.ones(10))


def norm(quick: Fast, network: nn.Module) -> None:
    network.bn1 = nn.BatchNorm2d(16).eval()
    nn.init.constant_(network.bn1.bias, 2.0)


def buffer(quick: Fast, network: nn.Module) -> None:
    network.get_submodule("bn1").running_mean = torch.ones(16)


def applied(quick: Fast, network: nn.Module) -> None:
    quick.apply(lambda layer: nn.init.zeros_(layer.weight) if isinstance(layer, nn.Linear) else None)


@torch.no_grad()
@pytest.mark.parametrize("change", [added, loaded, assigned, replaced, parameter, norm, buffer, applied])
def test_weights_that_change_behind_it_are_never_the_old_ones(change: Callable[[Fast, nn.Module], None]) -> None:
    torch.manual_seed(0)
    network = ResNet8().eval()
    quick = made(network)
    before = quick(IMAGES)
    change(quick, network)
    wanted = network(IMAGES)
    assert not near(wanted, before)
    assert near(quick(IMAGES), wanted)
    again = fast(plain(quick), "cpu", example=IMAGES, tune="none", progress=False)
    assert near(again(IMAGES), wanted)
    assert again.extra_repr().endswith("plans=1")


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
        lambda x: torch._efficientzerotensor(x.shape),
        lambda x: x + 0j,
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: (10 * x).int(),
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: torch.cat([x, x], 3)[..., ::2],
    ],
    ids=["sparse", "mkldnn", "nested", "zeros", "complex", "quantised", "int", "expanded", "strided"],
)
@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantize_per_tensor|quantiz).*:UserWarning")
def test_tensors_of_any_kind_get_the_networks_answer_or_its_own_error(
    change: Callable[[Tensor], Tensor], quick: Fast, network: ResNet8
) -> None:
    def answer(call: nn.Module) -> Tensor | tuple[type[Exception], str]:
        try:
            return call(change(IMAGES))
        except Exception as error:
            return type(error), str(error)

    ours, theirs = answer(quick), answer(network)
    assert near(ours, theirs) if isinstance(ours, Tensor) and isinstance(theirs, Tensor) else ours == theirs


def test_nothing_of_the_network_is_deleted_unseen(quick: Fast) -> None:
    with pytest.raises(AttributeError, match=r"keeps its 'fc': delete it from plain\(model\)"):
        del quick.fc
    quick.nickname = "mine"
    del quick.nickname
    assert not hasattr(quick, "nickname")
    assert hasattr(plain(quick), "fc")
