"""Dense blocks are found however a network concatenates, train like the network, and come apart where they are wrong or slow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo import fast, why
from zoo.kernels.training import choosing, kernels, shared
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import Recording, record
from zoo.kernels.training.replay import Chain, Replay


class Layer(nn.Module):
    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8, eps=1e-3, momentum=0.3), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return self.dropout(self.conv2(torch.relu_(self.norm2(y))))


class Dense(nn.Module):
    """A stem, a block of three layers, a transition, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(Layer(6 + 4 * index, dropout) for index in range(3))
        self.norm = nn.BatchNorm2d(18)
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.block(self.stem(x)))).mean((2, 3)))

    def block(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Lists(Dense):
    """Concatenates all that there is anew for every layer, as torchvision does; the first time a list of one."""

    def block(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


class Watched(Dense):
    """Somebody else reads what the second layer makes."""

    def block(self, x: Tensor) -> Tensor:
        one = torch.cat([x, self.layers[0](x)], 1)
        new = self.layers[1](one)
        two = torch.cat([one, new], 1)
        return torch.cat([two, self.layers[2](two)], 1) * new.mean()


class Written(Dense):
    """The block's map is changed in place."""

    def block(self, x: Tensor) -> Tensor:
        return super().block(x).mul_(2)


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks be found as on a GPU."""
    monkeypatch.setattr(kernels, "dense_block_refuses", lambda *_, **__: "")


def recorded(network: nn.Module) -> Recording:
    return record(network, (images(),), {}, torch.device("cpu"))


def chains(network: nn.Module, without: dict[int, str] | None = None) -> list[Chain]:
    return steps_of(recorded(network), without or {})[1]


def pair(network: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = network().train()
    return eager, copy.deepcopy(eager)


def learn(called: Any, network: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    for seed in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(called(images(seed)), torch.tensor([0, 1, 2, 1])).backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(b.state_dict(), a.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("network", [Dense, Lists])
def test_blocks_train_as_the_network_does(network: Callable[[], nn.Module]) -> None:
    eager, quick = pair(network)
    model = fast(quick, train=True, example=images())
    assert [(row.kernel, row.layers) for row in why(model).rows] == [("dense block", "layers"), ("batch_norm + relu", "norm")]
    for called, trained in ((eager, eager), (model, quick)):
        learn(called, trained)
    same(eager, quick)
    assert quick.state_dict()["layers.2.norm1.num_batches_tracked"] == 2


@pytest.mark.usefixtures("blocks")
def test_frozen_layers_get_no_gradient_and_the_others_theirs() -> None:
    eager, quick = pair(Dense)
    for network in (eager, quick):
        network.stem.requires_grad_(False)  # pyright: ignore[reportCallIssue]
        network.layers[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue, reportCallIssue]
    model = fast(quick, train=True, example=images())
    for called in (eager, model):
        called(images(1)).square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == name.startswith(("stem", "layers.0")), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_whole_network_gives_the_same_gradients_and_statistics(reentrant: bool) -> None:
    eager, quick = pair(Dense)
    model = fast(quick, train=True, example=images())
    for called in (eager, model):
        result: Any = checkpoint(called, images(3).requires_grad_(), use_reentrant=reentrant)
        result.square().mean().backward()
    same(eager, quick)
    for p, q in zip(eager.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_autocast_with_a_scaler_moves_parameters_as_the_network_does() -> None:
    eager, quick = pair(Dense)
    before = copy.deepcopy(eager.state_dict())
    model = fast(quick, train=True, dtype=torch.float16, example=images())
    assert next(row.kernel for row in why(model).rows) == "dense block"
    for called, trained in ((eager, eager), (model, quick)):
        scaler, optimizer = torch.amp.GradScaler("cpu", 2.0**10), torch.optim.SGD(trained.parameters(), 0.1)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(called(images(1)).float(), torch.tensor([0, 1, 2, 1]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not model.unchanged
    for name, start in before.items():
        if start.is_floating_point():
            mine, theirs = (network.state_dict()[name] - start for network in (quick, eager))
            assert float((mine - theirs).norm()) <= 0.03 * float(theirs.norm()) + 1e-6, name


@pytest.mark.usefixtures("blocks")
def test_the_norm_behind_takes_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    real = kernels.batch_norm_act
    monkeypatch.setattr(kernels, "batch_norm_act", lambda *parts, **options: rows.append(options.get("row")) or real(*parts, **options))
    eager, quick = pair(Dense)
    recording = recorded(quick)
    steps, _, counted = steps_of(recording, {})
    replay = Replay(recording, steps, counted)
    replay(replay.at(quick), [images(1)])
    eager(images(1))
    assert [row.shape for row in rows] == [(3, 18)]
    same(eager, quick)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda network: network.layers[1].norm2.eval(), "eval mode"),
        (lambda network: setattr(network.layers[1].dropout, "p", 0.2), "dropout"),
    ],
)
def test_a_block_with_a_layer_of_another_kind_is_left_to_smaller_chains_and_why_says_so(change: Any, said: str) -> None:
    eager, quick = pair(Dense)
    for network in (eager, quick):
        change(network)
    model = fast(quick, train=True, example=images())
    rows = why(model).rows
    assert [row.note for row in rows if row.layers == "layers"] == [next(row.note for row in rows if said in row.note)]
    assert not any(row.kernel == "dense block" for row in rows)
    assert any(row.kernel == "batch_norm + relu" and "layers.1" in row.layers for row in rows)
    for called, trained in ((eager, eager), (model, quick)):
        torch.manual_seed(0)
        learn(called, trained, 1)
    same(eager, quick)


@pytest.mark.usefixtures("blocks")
def test_norms_that_exchange_statistics_are_left_to_the_chains_that_can() -> None:
    recording = recorded(Dense().train())
    for call in recording.calls:
        if call.name == "batch_norm":
            call.func = shared.shared_batch_norm
    found = steps_of(recording, {})[1]
    assert ["exchange statistics" in chain.note for chain in found if chain.op == "dense block"] == [True]
    assert sum(chain.op.startswith("shared_batch_norm") for chain in found) == 7


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("network", [Watched, Written])
def test_what_somebody_else_reads_or_writes_is_in_no_block(network: Callable[[], nn.Module]) -> None:
    eager, quick = pair(network)
    model = fast(quick, train=True, example=images())
    assert not model.unchanged
    found = [row.shape[1] for row in why(model).rows if row.kernel == "dense block"]
    assert found == ([14] if network is Written else [])  # the first two layers alone
    for called in (eager, model):
        called(images(1)).square().sum().backward()
    for p, q in zip(eager.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / 2


def wrong(real: Any, how: str) -> Any:
    def op(x: Tensor, *tensors: Tensor, layers: Any) -> tuple[Tensor, Tensor]:
        if how == "statistics":
            layers = [layer | {"second": layer["second"] | {"momentum": 0.31}} for layer in layers]
        if how == "kernel":
            tensors = (*tensors[:14], _Half.apply(tensors[14]), *tensors[15:])  # pyright: ignore[reportAssignmentType]
        if how == "raises":
            raise RuntimeError("out of registers")
        y, row = real(x, *tensors, layers=layers)
        return (_Half.apply(y) if how == "input" else y * 1.001 if how == "output" else y), row  # pyright: ignore[reportReturnType]

    return op


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("output", "output: relative error"),
        ("input", "gradient"),
        ("kernel", "gradient of weight"),
        ("statistics", "statistic"),
        ("raises", "out of registers"),
    ],
)
def test_a_planted_fault_is_found_and_the_block_comes_apart_into_its_chains(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "dense_block", wrong(kernels.dense_block, how))
    eager, quick = pair(Dense)
    model = fast(quick, train=True, example=images())
    rows = why(model).rows
    assert [said in row.note for row in rows if row.note] == [True]
    assert [row.kernel for row in rows if not row.note] == ["batch_norm + relu"] * 7
    for called, trained in ((eager, eager), (model, quick)):
        learn(called, trained, 1)
    same(eager, quick)


@pytest.mark.usefixtures("blocks")
def test_a_block_that_is_slower_than_its_chains_is_left_to_them() -> None:
    recording = recorded(Dense().train())
    times = iter([30.0, 20.0, 5.0, 5.0, 25.0])  # the block, its chains, the norm behind with and without statistics, PyTorch's calls

    def clock(call: Callable[[], object]) -> float:
        call()
        return next(times, 1.0 if len(asked) % 2 else 2.0) if not asked.append(0) else 0.0

    asked: list[int] = []
    makes = next(chain.key for chain in steps_of(recording, {})[1] if chain.op == "dense block")
    found = choosing.slower(recording, {}, choosing.Times(), clock)
    assert found[makes] == "no faster: 30 us, without it 20 us"
    steps, _, _ = steps_of(recording, found)
    assert not any(isinstance(step, Chain) and step.op == "dense block" for step in steps)


@pytest.mark.usefixtures("blocks")
def test_a_block_is_timed_against_the_chains_that_it_would_be() -> None:
    chain = next(chain for chain in chains(Dense().train()) if chain.op == "dense block")
    assert sum(isinstance(piece, Chain) for piece in chain.pieces) == 6
    assert {call for piece in chain.pieces for call in (piece.calls if isinstance(piece, Chain) else (piece,))} == set(chain.calls)


@pytest.mark.usefixtures("blocks")
def test_chains_that_would_fall_back_do_not_make_a_block_look_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "conv_stats", lambda x, kernel: (F.conv2d(x, kernel), None))
    monkeypatch.setattr(kernels, "norm_act_conv_refuses", lambda *_, **__: "not here")
    monkeypatch.setattr(kernels, "conv_stats_refuses", lambda *_: "")
    with torch.autocast("cpu", torch.float16):
        recording = recorded(Dense().train())
        chain = next(chain for chain in steps_of(recording, {})[1] if chain.op == "dense block")
        assert sum(isinstance(piece, Chain) and piece.op == "1x1, statistics" for piece in chain.pieces) == 3
        times = iter([3.0, 5.0, 2.0, 9.0])  # the block, its chains, those without the joins, PyTorch's calls
        assert choosing.times(recording, chain, None, choosing.Times(), lambda call: call() and next(times)) == (3.0, 2.0)  # pyright: ignore[reportArgumentType]


def test_without_a_gpu_no_block_is_made() -> None:
    assert not any(chain.op == "dense block" for chain in chains(Dense().train()))


@pytest.mark.reference
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_the_blocks_of_other_libraries_are_found(library: str) -> None:
    if library == "timm":
        from timm.models.densenet import DenseNet

        network = DenseNet(growth_rate=8, block_config=(2, 3, 2, 2), num_classes=5).train()
    else:
        from torchvision.models.densenet import DenseNet

        network = DenseNet(8, (2, 3, 2, 2), 16, num_classes=5).train()
    recording = record(network, (torch.randn(2, 3, 64, 64),), {}, torch.device("cpu"))
    found = [chain.layers for chain in steps_of(recording, {})[1] if chain.op == "dense block"]
    assert found == [f"features.denseblock{number}" for number in (1, 2, 3, 4)]
