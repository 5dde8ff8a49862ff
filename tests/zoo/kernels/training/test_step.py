"""`fast_step` on a CPU does the steps that people write, and prepares optimisers as a graph needs them."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import fast, fast_step, why
from zoo.kernels.memory.workspaces import clear_workspaces
from zoo.kernels.training import FastStep
from zoo.kernels.training import step as step_module
from zoo.kernels.training.optimizing import Prepared


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Dropout(0.2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def optimizer_of(name: str, network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), 0.1, 0.9) if name == "sgd" else torch.optim.AdamW(network.parameters(), 0.01)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("dtype", "clip", "scaled"), [(None, None, False), (torch.bfloat16, 0.1, False), (torch.bfloat16, 0.1, True)])
def test_a_step_is_the_plain_sequence_with_its_schedule_and_draws(name: str, dtype: Any, clip: float | None, scaled: bool) -> None:
    torch.manual_seed(0)
    eager = Net().train()
    quick = copy.deepcopy(eager)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(n, 3, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)) for n in (4, 4, 3)]
    model = fast(quick, train=True, example=batches[0][0])
    mine, theirs = optimizer_of(name, quick), optimizer_of(name, eager)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (mine, theirs)]
    scalers = [torch.amp.GradScaler("cpu", enabled=scaled) for _ in range(2)]
    step = fast_step(model, nn.CrossEntropyLoss(), mine, dtype=dtype, clip=clip, scaler=scalers[0] if scaled else None)
    for seed, (images, target) in enumerate(batches):
        torch.manual_seed(seed)
        got = step(images, target)
        torch.manual_seed(seed)
        theirs.zero_grad()
        with torch.autocast("cpu", dtype, dtype is not None):
            loss = F.cross_entropy(eager(images), target)
        scalers[1].scale(loss).backward()
        scalers[1].unscale_(theirs)
        if clip is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), clip)
        scalers[1].step(theirs)
        scalers[1].update()
        torch.testing.assert_close(got, loss.detach())
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())
    assert not step.inside
    assert "CPU" in step.unchanged


def test_a_step_in_parts_is_the_step_of_all_of_them_and_a_target_may_be_any_tree() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)).double()
    divided = copy.deepcopy(whole)
    images, classes, weights = torch.randn(6, 3, 8, 8).double(), torch.randint(4, (6,)), torch.rand(6).double()

    def loss(outputs: Tensor, target: dict[str, Any]) -> Tensor:
        return (F.cross_entropy(outputs, target["classes"], reduction="none") * target["weights"][0]).mean() * target["factor"]

    def target(part: slice) -> dict[str, Any]:
        return {"classes": classes[part], "weights": (weights[part], None), "factor": 2.0}

    steps = [fast_step(network, loss, optimizer_of("sgd", network), dtype=None) for network in (whole, divided)]
    for _ in range(2):
        at_once = steps[0](images, target(slice(6)))
        first, *others = [(images[part], target(part)) for part in (slice(2), slice(2, 4), slice(4, 6))]
        in_parts = steps[1](*first, *others)
        torch.testing.assert_close(in_parts, at_once)
    torch.testing.assert_close(divided.state_dict(), whole.state_dict())


def test_a_network_without_parameters_or_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        fast_step(nn.ReLU(), nn.MSELoss(), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    network = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="auto"):
        fast_step(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1), dtype="half")


def test_rates_become_tensors_that_follow_numbers_and_schedulers() -> None:
    network = Net()
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    prepared = Prepared(optimizer)
    assert prepared.inside
    (rate,) = [group["lr"] for group in optimizer.param_groups]
    assert isinstance(rate, Tensor)
    assert optimizer.param_groups[0]["capturable"]
    before = prepared.numbers()
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # as its step would note for the scheduler
    schedule.step()
    assert not prepared.renew()
    assert float(rate) == pytest.approx(0.05)
    optimizer.param_groups[0]["lr"] = 0.3
    assert not prepared.renew()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert prepared.numbers() != before
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert prepared.renew()


def test_optimisers_without_a_form_for_graphs_stay_outside() -> None:
    network = Net()
    assert not Prepared(torch.optim.LBFGS(network.parameters())).inside
    hooked = torch.optim.AdamW(network.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    assert not Prepared(hooked).inside
    assert isinstance(hooked.param_groups[0]["lr"], float)


def follow(network: nn.Module, loss: Any, seeds: list[int], **options: Any) -> tuple[list[float], FastStep]:
    """Do a step at a rate of zero for each seed; return the losses."""
    step = fast_step(network, loss, torch.optim.SGD(network.parameters(), 0.0), dtype=None, **options)
    images, losses = torch.ones(64, 3, 8, 8, device="cuda"), []
    for seed in seeds:
        torch.manual_seed(seed)
        losses.append(step(images, torch.zeros(64, 3, device="cuda")))
    return [float(loss) for loss in losses], step


@pytest.mark.gpu
def test_a_replayed_step_draws_what_its_seed_says() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(192, 3)).cuda()
    seeds = [1, 2, 3, 4, 1, 2, 3, 5, 5]
    losses, step = follow(network, nn.MSELoss(), seeds)
    assert step.replayed == 6
    eager, plain = follow(network, nn.MSELoss(), seeds, unchanged="to compare")
    assert plain.replayed == 0
    assert losses == pytest.approx(eager, rel=1e-5)
    assert len({round(loss, 7) for loss in losses}) == 5


@pytest.mark.gpu
def test_a_step_that_can_not_be_captured_goes_on_as_it_is_and_draws_as_before() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(192, 3)).cuda()

    def looks(outputs: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, target)
        return loss if float(loss.detach()) > 0 else -loss

    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="fast_step runs its calls one by one: the step can't be captured"):
        losses, step = follow(network, looks, [1, 2, 3, 4, 1, 5])
    assert torch.cuda.current_stream() == stream
    assert step.replayed == 0
    assert losses == pytest.approx(follow(network, looks, [1, 2, 3, 4, 1, 5], unchanged="to compare")[0], rel=1e-5)
    assert follow(network, nn.MSELoss(), [1, 2, 3, 4, 1])[1].replayed == 2  # another step of this process can


@pytest.mark.gpu
def test_a_step_in_parts_with_a_tree_of_targets_is_replayed_and_learns_the_same() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).cuda()
    quick = copy.deepcopy(eager)

    def loss(outputs: Tensor, target: tuple[Tensor, Tensor, None]) -> Tensor:
        return (F.cross_entropy(outputs, target[0], reduction="none") * target[1]).mean()

    steps = [
        fast_step(network, loss, torch.optim.AdamW(network.parameters(), 0.01), dtype=None, unchanged=unchanged)
        for network, unchanged in ((eager, "to compare"), (quick, ""))
    ]
    for _ in range(8):
        parts = [(torch.randn(4, 3, 8, 8).cuda(), (torch.randint(4, (4,)).cuda(), torch.rand(4).cuda(), None)) for _ in range(3)]
        first, *others = parts
        wanted, got = (step(*first, *others) for step in steps)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    assert steps[1].replayed == 5
    torch.testing.assert_close(quick.state_dict(), eager.state_dict(), rtol=1e-2, atol=1e-3)


def test_a_replay_behind_zero_grad_learns_what_it_would_have_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph's stand-in: the optimiser is outside of it, and finds the gradients where the graph writes them."""
    torch.manual_seed(0)
    network, images, labels = nn.Linear(4, 2), torch.randn(8, 4), torch.randint(0, 2, (8,))
    twin = copy.deepcopy(network)
    written = [torch.zeros_like(p) for p in network.parameters()]

    class Graph:
        def replay(self) -> None:
            found = torch.autograd.grad(F.cross_entropy(network(images), labels), list(network.parameters()))
            torch._foreach_copy_(written, found)  # pyright: ignore[reportPrivateImportUsage]

    class Outside:
        inside = False

        def __init__(self, optimizer: Any) -> None: ...

        def renew(self) -> bool:
            return False

        def numbers(self) -> tuple[()]:
            return ()

    monkeypatch.setattr(step_module, "EAGER_STEPS", 0)
    monkeypatch.setattr(FastStep, "_capture", lambda *_: step_module._Graph(Graph(), [images, labels], torch.zeros(()), written))
    optimizer, plain = torch.optim.RMSprop(network.parameters(), 0.1), torch.optim.RMSprop(twin.parameters(), 0.1)
    step = fast_step(network, nn.CrossEntropyLoss(), optimizer)
    step.unchanged, step._prepared = "", Outside(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        optimizer.zero_grad()
        step(images, labels)
        plain.zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        plain.step()
    assert step.replayed == 3
    torch.testing.assert_close(network.state_dict(), twin.state_dict())


@pytest.mark.gpu
def test_a_closed_step_has_no_graph_and_captures_again_when_it_is_called() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).cuda()
    _, step = follow(network, nn.MSELoss(), [1, 2, 3, 4, 5])
    assert step.replayed == 2
    graphs = [captured.graph for captured in step._graphs.values()]
    step.close()
    with pytest.raises(RuntimeError):
        graphs[0].replay()
    images = torch.ones(64, 3, 8, 8, device="cuda")
    for _ in range(5):
        step(images, torch.zeros(64, 3, device="cuda"))
    assert step.replayed == 4


@pytest.mark.gpu
def test_neither_a_plan_nor_a_graph_leaves_scratch_memory_of_libraries_behind() -> None:
    """cuBLAS keeps 32 MiB for each stream and thread that has multiplied, and each chain is timed on a stream of its own."""
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())]
    network, images = nn.Sequential(*layers).cuda().train(), torch.randn(8, 64, 16, 16, device="cuda")
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    model = fast(network, train=True, example=images, dtype=torch.bfloat16)
    assert torch.cuda.memory_allocated() - before < 2**24
    step = fast_step(model, lambda outputs, _: outputs.square().mean(), torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(6):
        step(images, images)
    assert step.replayed == 3
    del step
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**25


def made_step(**changed: Any) -> FastStep:
    network = Net().train()
    given = {"model": network, "loss": nn.CrossEntropyLoss(), "optimizer": optimizer_of("sgd", network)} | changed
    return fast_step(given.pop("model"), given.pop("loss"), given.pop("optimizer"), **given)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"clip": -1}, ValueError, "above 0, got -1"),
        ({"clip": float("nan")}, ValueError, "above 0, got nan"),
        ({"dtype": torch.int8}, ValueError, "got torch.int8"),
        ({"scaler": True}, TypeError, "scaler can't be a bool"),
        ({"loss": nn.CrossEntropyLoss}, TypeError, "the class CrossEntropyLoss; build it first"),
        ({"loss": 3}, TypeError, "loss can't be a int"),
        ({"optimizer": torch.optim.SGD}, TypeError, "the class SGD; build it first"),
        ({"optimizer": nn.CrossEntropyLoss()}, TypeError, "optimizer can't be a CrossEntropyLoss"),
        ({"optimizer": optimizer_of("sgd", Net())}, ValueError, "no parameter of the model"),
        ({"optimizer": torch.optim.LBFGS(Net().parameters())}, ValueError, "by a closure"),
        ({"model": nn.ReLU()}, ValueError, "no parameters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_fail_or_train_something_else_is_refused_at_once(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made_step(**changed)


def test_a_network_for_inference_is_no_step() -> None:
    model = fast(nn.Conv2d(3, 4, 3), "cpu", tune="none", example=torch.randn(1, 3, 5, 5))
    with pytest.raises(ValueError, match=r"fast\(plain\(model\), train=True\)"):
        made_step(model=model)


def test_calls_that_no_step_can_come_of_say_what_they_lack() -> None:
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    step = made_step()
    with pytest.raises(TypeError, match="pairs"):
        step(x, y, x)
    for off in (torch.no_grad, torch.inference_mode):
        with pytest.raises(RuntimeError, match="needs gradients"), off():
            step(x, y)
    with pytest.raises(ValueError, match=r"scalar, got a tensor \(2,\)"):
        made_step(loss=nn.CrossEntropyLoss(reduction="none"))(x, y)
    assert step(x, y, (x, y)).isfinite()


def test_a_step_in_eval_mode_says_once_what_does_not_learn() -> None:
    network = Net().eval()
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    model = fast(network, train=True, example=x)
    assert "eval mode" in str(why(model))
    step = fast_step(model, nn.CrossEntropyLoss(), optimizer_of("sgd", network))
    with pytest.warns(UserWarning, match=r"is in eval mode.*call model\.train\(\)"):
        step(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, y)
        model.train()
        step(x, y)
    assert "eval mode" not in str(why(model))


def test_a_network_is_checked_in_inference_mode_as_outside() -> None:
    x = torch.randn(2, 3, 8, 8)
    network = Net().train()
    with torch.inference_mode():
        model = fast(network, train=True, example=x)
    assert model.unchanged == ""
    assert why(model).rows


def test_a_last_layer_that_no_group_holds_is_warned_of_once() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).train()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    network[1] = nn.Linear(4, 3)
    step = fast_step(network, nn.CrossEntropyLoss(), optimizer)
    with pytest.warns(UserWarning, match=r"1\.weight and 1 more ask for gradients and are in no group"):
        step(torch.ones(2, 4), torch.tensor([0, 1]))
    step(torch.ones(2, 4), torch.tensor([0, 1]))
    network[1].requires_grad_(False)
    fast_step(network, nn.CrossEntropyLoss(), optimizer)(torch.ones(2, 4), torch.tensor([0, 1]))
