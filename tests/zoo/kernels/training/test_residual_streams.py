"""What kernels go back through of a transformer's stream: which calls are put together, and that nothing learns anything else."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.stretches import CPU, count, learnt, learnt_or_zeros, like, loss, made_of, same
from zoo.kernels.differentiable import residual_streams as operators
from zoo.kernels.ops import _layout
from zoo.kernels.training import kernels
from zoo.kernels.training import segments as segments_of
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.contest import compiled
from zoo.kernels.training.record import record
from zoo.kernels.training.segments import inductor

C = 16


class Block(nn.Module):
    """A transformer's block as `kind` says: its branches are scaled, kept of some images, or neither."""

    def __init__(self, kind: str = "", heads: int = 2) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.first, self.second = nn.LayerNorm(C), nn.LayerNorm(C, eps=1e-6)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.several = nn.MultiheadAttention(C, heads, batch_first=True)
        self.grow, self.shrink, self.drop = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), nn.Dropout(0.0)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(C) + 0.5) for _ in range(2)])

    def attention(self, x: Tensor) -> Tensor:
        if "torch" in self.kind:
            return self.several(x, x, x, need_weights=False)[0]
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, C))

    def scaled(self, branch: Tensor, index: int, kept: Tensor) -> Tensor:
        branch = self.drop(branch)
        branch = branch * self.scales[index] if "scale" in self.kind else branch
        return branch * kept if "depth" in self.kind else branch

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = x + self.scaled(self.attention(self.first(x)), 0, kept)
        return x + self.scaled(self.shrink(self.drop(F.gelu(self.grow(self.second(x))))), 1, kept)


class Transformer(nn.Module):
    """Patches, blocks, a norm and a head; the shares of stochastic depth are drawn before."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, C, 4, 4), nn.Parameter(torch.randn(1, 4, C) * 0.1)
        self.blocks, self.norm, self.head = nn.ModuleList([Block(kind) for _ in range(2)]), nn.LayerNorm(C), nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty((x.shape[0], 1, 1), dtype=x.dtype, device=x.device).bernoulli_(0.7).div_(0.7)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, kept)
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize(
    ("kind", "branches"),
    [
        ("", {"norm branch bias": 4, "linear": 4}),
        ("scale", {"norm branch bias scale": 4, "linear": 4}),
        ("depth", {"norm branch bias share": 4, "linear": 4}),
        ("scale depth", {"norm branch bias scale share": 4, "linear": 4}),
        ("torch", {"norm branch bias": 4, "linear": 2, "attention": 2}),
    ],
)
def test_sums_norms_and_gelu_are_put_together_and_learn_what_they_did(
    kind: str, branches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network, images = Transformer(kind).train(), torch.randn(3, 3, 8, 8, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch)
    # the patches' sum with the positions is the stream that the first norm reads; the products before GELU hand their bias on too
    assert count(calls) == {"norm": 1, "gelu_linear": 2, **branches, "PyTorch's add": 1}
    like(learnt(network, run, images), learnt(network, network, images), 2e-6)


def test_under_autocast_norms_give_what_their_readers_round_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Transformer("scale depth").train(), torch.randn(3, 3, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        run, calls = made_of(network, images, monkeypatch)
        got, eager = learnt(network, run, images), learnt(network, network, images)
    norms = [call.func for call in calls if isinstance(call.func, partial) and call.func.func is kernels.add_layer_norm]
    kinds = [norm.keywords["dtype"] for norm in norms]
    assert kinds == [torch.bfloat16] * 4 + [torch.float32]  # the last one's tokens are averaged, which rounds nothing
    right = learnt(network, network, images)
    errors, usual = (
        [float((t.float() - exact).norm() / exact.norm()) for t, exact in zip(way, right, strict=True) if exact is not None]
        for way in (got, eager)
    )
    ratio = math.exp(fmean(math.log(a / b) for a, b in zip(errors, usual, strict=True)))
    assert ratio < 1.5  # 1.29, for Triton's interpreter cuts bfloat16 where a GPU rounds; PyTorch's functions in its place: 0.99


def test_the_compiler_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Transformer("scale depth").train(), torch.randn(3, 3, 8, 8, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch, inductor)
    assert count(calls)["norm branch bias scale share"] == 4
    like(learnt(network, run, images), learnt(network, network, images), 2e-6)


class Behind(nn.Module):
    """A GELU, and what reads it, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.norm = kind, nn.Linear(C, C), nn.BatchNorm2d(C)
        self.second, self.drop = nn.Linear(C, 8, bias="bare" not in kind), nn.Dropout(0.5 if "dropped" in kind else 0.0)
        self.second.weight.requires_grad_("frozen" not in kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.norm(x).flatten(2).transpose(1, 2))
        y = y * torch.sigmoid(1.702 * y) if "quick" in self.kind else F.gelu(y, approximate="tanh" if "tanh" in self.kind else "none")
        if "by itself" in self.kind:
            return F.linear(y[0], y[0]).tanh()
        if "by hand" in self.kind:
            return (y @ self.second.weight.t()).tanh()
        made = self.second(self.drop(y))
        if "added to" in self.kind:
            made += y[..., :8].detach()
        return made + y.mean() if "twice" in self.kind else made.tanh()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("", True),
        ("bare", True),
        ("frozen", True),
        ("frozen bare", True),
        ("dropped", False),
        ("by hand", False),
        ("read twice", False),
        ("by itself", False),
        ("added to", False),
    ],
)
def test_a_product_of_gelu_keeps_what_gelu_reads_alone(kind: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Behind(kind).train(), torch.randn(3, C, 2, 2, requires_grad=True)
    if kind == "dropped":
        monkeypatch.setattr(segments_of, "drawn", lambda call: False)
    run, calls = made_of(network, images, monkeypatch)
    assert count(calls).get("gelu_linear", 0) == found
    assert count(calls).get("gelu", 0) == (not found)
    if kind != "dropped":  # whose numbers are drawn at each call
        like(learnt(network, run, images), learnt(network, network, images), 2e-6)


@pytest.mark.parametrize("learns", [True, False])
def test_what_gelu_makes_is_not_kept_for_the_product_behind(learns: bool, device: torch.device) -> None:
    before, weight = (torch.randn(shape, device=device).requires_grad_() for shape in ((2, 5, 16), (8, 16)))
    bias, shift = (torch.zeros(c, device=device).requires_grad_() for c in (16, 8))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        made = kernels._ours("gelu_linear")(before, bias, weight, shift, learns=learns)
    assert kept == [before.numel(), weight.numel()]
    expected = F.linear(F.gelu(before), weight, shift)
    gradient = torch.randn(made.shape, device=device)
    found = torch.autograd.grad(made, [before, bias, weight, shift], gradient, allow_unused=True)
    right = torch.autograd.grad(expected, [before, weight, shift], gradient)
    like([made.detach(), found[0], found[1], found[2]], [expected.detach(), right[0], right[0].sum((0, 1)), right[1]], 2e-5)
    assert (found[3] is not None) == learns
    assert found[3] is None or off_by(found[3], right[2]) < 1e-5


class Gated(nn.Module):
    """A product of SiLU and another number, of halves of one product or of two products, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.between = kind, nn.BatchNorm2d(C), nn.LayerNorm(C)
        self.both, self.one, self.two = nn.Linear(C, 2 * C, bias="bare" not in kind), nn.Linear(C, C), nn.Linear(C, C)
        self.last, self.drop = nn.Linear(C, 8, bias="bare" not in kind), nn.Dropout(0.0)
        for module in (self.both, self.one, self.last):
            module.requires_grad_("frozen" not in kind)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).flatten(2).transpose(1, 2)
        if "squares" in self.kind:
            x = x.unflatten(1, (2, -1))
        if "apart" in self.kind:
            gate, value = self.one(x), self.two(x)
        elif "sizes" in self.kind:
            gate, value = self.both(x).split(C, -1)
        elif "tokens" in self.kind:
            gate, value = self.two(x).chunk(2, 1)
        else:
            gate, value = self.both(x).chunk(2, dim=-1)
        if "second" in self.kind:
            gate, value = value, gate
        y = value * F.silu(gate) if "turned" in self.kind else F.silu(gate, inplace="in place" in self.kind) * value
        if "twice" in self.kind:
            y = y + value
        if "normed" in self.kind:
            y = self.between(y)
        if "by hand" in self.kind:
            return (y @ self.last.weight.t()).tanh()
        made = self.last(self.drop(y))
        if "added to" in self.kind:
            made += y[..., :8].detach()
        return made.tanh()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("packed", {"glu_linear": 1, "linear": 1}),
        ("packed, the gate second", {"glu_linear": 1, "linear": 1}),
        ("packed, turned", {"glu_linear": 1, "linear": 1}),
        ("packed, in squares", {"glu_linear": 1, "linear": 1}),
        ("sizes", {"glu_linear": 1, "linear": 1}),
        ("apart", {"glu_linear": 1, "linear": 2}),
        ("apart, frozen", {"glu_linear": 1, "linear": 2}),
        ("apart, turned, in squares", {"glu_linear": 1, "linear": 2}),
        ("packed, frozen", {"glu_linear": 1, "linear": 1}),
        ("apart, normed", {"glu": 1, "linear": 2, "norm": 1}),
        ("packed, by hand", {"glu": 1, "linear": 1}),
        ("packed, added to", {"glu": 1, "linear": 1}),
        ("packed, bare", {"PyTorch's mul": 1}),
        ("packed, read twice", {"PyTorch's mul": 1, "PyTorch's add": 1}),
        ("apart, read twice", {"PyTorch's mul": 1, "PyTorch's add": 1}),
        ("apart, in place", {"PyTorch's mul": 1}),
        ("halves of tokens", {"PyTorch's mul": 1}),
    ],
)
def test_swiglu_is_gone_back_through_where_it_is_one(kind: str, found: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Gated(kind).train(), torch.randn(3, C, 2, 2, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch)
    assert count(calls) == found
    got, right = learnt_or_zeros(network, run, images), learnt_or_zeros(network, network, images)
    like(got, right, 2e-6)


@pytest.mark.parametrize("kind", ["packed, the gate second", "apart"])
def test_the_compiler_takes_swiglu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Gated(kind).train(), torch.randn(3, C, 2, 2, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch, inductor)
    assert count(calls)["glu_linear"] == 1
    like(learnt_or_zeros(network, run, images), learnt_or_zeros(network, network, images), 2e-6)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_what_swiglu_makes_is_not_kept_for_the_product_behind(packed: bool, learns: bool, device: torch.device) -> None:
    first = torch.randn((2, 5, 32 if packed else 16), device=device).requires_grad_()
    second = None if packed else torch.randn((2, 5, 16), device=device).requires_grad_()
    biases = [
        torch.zeros(32 if packed else 16, device=device).requires_grad_(),
        None if packed else torch.zeros(16, device=device).requires_grad_(),
    ]
    weight, shift = torch.randn((8, 16), device=device).requires_grad_(), torch.zeros(8, device=device).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        made = kernels._ours("glu_linear")(first, second, *biases, weight, shift, learns=learns)
    assert kept == [first.numel(), *([] if second is None else [second.numel()]), weight.numel()]
    gate, value = first.chunk(2, -1) if second is None else (first, second)
    expected = F.linear(F.silu(gate) * value, weight, shift)
    gradient = torch.randn(made.shape, device=device)
    read = [t for t in (first, second, weight) if t is not None]
    learning = [t for t in biases if t is not None]
    found = torch.autograd.grad(made, [*read, *learning, shift], gradient, allow_unused=True)
    right = torch.autograd.grad(expected, [*read, shift], gradient)
    halves = right[: len(read) - 1]
    like([made.detach(), *found[: len(read)]], [expected.detach(), *right[: len(read)]], 2e-5)
    like([*found[len(read) : -1]], [half.sum((0, 1)) for half in halves], 2e-5)
    assert (found[-1] is not None) == learns
    assert found[-1] is None or off_by(found[-1], right[-1]) < 1e-5


@pytest.mark.parametrize("packed", [True, False])
def test_maps_beyond_the_kernels_reach_are_gone_back_through_by_pytorch(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layout, "LARGEST", 200)
    first, second = torch.randn(2, 5, 64 if packed else 32), None if packed else torch.randn(2, 5, 32)
    sums, *made = operators._through_glu(torch.randn(2, 5, 32), first, second, "silu", False, True)
    halves = made[0].chunk(2, -1) if packed else made[:2]
    like(
        [*sums, made[-1]],
        [half.sum((0, 1)) for half in halves] + [F.silu((g := first.chunk(2, -1) if packed else (first, second))[0]) * g[1]],
        1e-5,
    )


def off_by(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm())


class Odd(nn.Module):
    """What is like a stream and isn't, or not quite; `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.plain = nn.LayerNorm(C), nn.LayerNorm(C), nn.LayerNorm(C, elementwise_affine=False)
        self.wide, self.norm = nn.LayerNorm((4, C)), nn.BatchNorm2d(C)
        self.one, self.two, self.scale = nn.Linear(C, C), nn.Linear(C, C), nn.Parameter(torch.rand(C) + 0.5)
        self.scale.requires_grad_(kind != "a branch that is written before the sum")  # which autograd refuses to go back through

    def forward(self, x: Tensor) -> Tensor:
        gate = self.norm(x).mean((1, 2, 3)).view(-1, 1, 1)  # BatchNorm is a chain, behind which the stretch begins
        x = x.flatten(2).transpose(1, 2)
        branch = self.one(x)
        if self.kind == "a share that learns":
            return self.first(x + branch * gate)
        if self.kind == "two norms of a sum":
            x = x + branch
            return self.first(x) + self.second(x) * x
        if self.kind == "a branch that is read twice":
            return self.first(x + branch) + branch.tanh()
        if self.kind == "a sum of itself":
            return self.first(branch + branch)
        if self.kind == "written in place":
            x = x + branch
            x.mul_(2)
            return self.first(x) + x
        if self.kind == "a norm without weights":
            return self.plain(x + branch)
        if self.kind == "a norm over two axes":
            return self.wide(x + branch)
        if self.kind == "GELU by tanh":
            return F.gelu(branch, approximate="tanh") + self.two(x).tanh()
        if "GELU by sigmoid" in self.kind:
            y = branch * torch.sigmoid((1.7 if "almost" in self.kind else 1.702) * branch)
            return (y + branch if "again" in self.kind else y) + self.two(x).tanh()
        if self.kind == "GELU of what is read twice":
            return F.gelu(branch) + branch
        if self.kind == "one product used twice":
            return self.first(x + self.one(branch)) + F.gelu(self.one(x))
        if self.kind == "a scale of something else":
            return self.first(x * self.scale + branch * x)
        if self.kind == "a branch that is written before the sum":
            scaled = branch * self.scale
            branch.mul_(2)
            return self.first(x + scaled)
        if self.kind == "tokens and channels exchanged":
            x = x + branch.transpose(1, 2)
            return self.first(x) + x
        if self.kind == "a weight made behind the sum":
            x = x + branch
            return F.layer_norm(x, (C,), self.scale + 1, self.second.bias)
        if self.kind == "separate products":
            y = self.first(x + branch)
            return self.one(y) * self.two(y)
        if self.kind == "a vector":
            return F.gelu(self.one(x[0, 0])) + x
        if self.kind == "broadcast":
            return self.first(x + branch.mean(1, keepdim=True))
        assert self.kind == "both are branches"
        return self.first(self.one(x) + self.two(x)) * x


KINDS = {
    "two norms of a sum": {"norm branch bias": 1, "norm": 1, "linear": 1, "PyTorch's add": 1, "PyTorch's mul": 1},
    "a branch that is read twice": {"norm branch": 1, "PyTorch's add": 1},
    "a sum of itself": {"norm": 1, "PyTorch's add": 1},
    "written in place": {"PyTorch's add": 2, "PyTorch's layer_norm": 1},
    "a norm without weights": {"PyTorch's add": 1, "PyTorch's layer_norm": 1},
    "a norm over two axes": {"PyTorch's add": 1, "PyTorch's layer_norm": 1},
    "GELU by tanh": {"gelu": 1, "linear": 1, "PyTorch's add": 1},
    "GELU by sigmoid": {"gelu": 1, "linear": 1, "PyTorch's add": 1},
    "almost GELU by sigmoid": {"PyTorch's mul": 2, "PyTorch's add": 1},
    "GELU by sigmoid of what is read again": {"PyTorch's mul": 2, "PyTorch's add": 2},
    "GELU of what is read twice": {"PyTorch's gelu": 1, "PyTorch's add": 1},
    "one product used twice": {"norm branch bias": 1, "gelu": 1, "linear": 2, "PyTorch's add": 1},
    "a scale of something else": {"norm branch scale": 1, "PyTorch's mul": 1},
    "a branch that is written before the sum": {"norm branch": 1, "PyTorch's mul": 1},
    "tokens and channels exchanged": {"norm branch": 1, "PyTorch's add": 1},
    "a weight made behind the sum": {"norm": 1, "PyTorch's add": 2},
    "separate products": {"norm branch bias": 1, "linear": 1, "PyTorch's mul": 1},
    "a vector": {"PyTorch's gelu": 1, "PyTorch's add": 1},
    "a share that learns": {"norm branch": 1, "PyTorch's mul": 1},
    "broadcast": {"norm": 1, "PyTorch's add": 1},
    "both are branches": {"norm branch bias": 1, "linear": 1, "PyTorch's mul": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_quite_a_stream_learns_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    side = 4 if kind == "tokens and channels exchanged" else 2  # as many tokens as channels
    network, images = Odd(kind).train(), torch.randn(3, C, side, side, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch)
    assert count(calls) == KINDS[kind]
    like(learnt(network, run, images), learnt(network, network, images), 2e-6)


def test_what_does_not_learn_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Transformer("scale").train(), torch.randn(3, 3, 8, 8)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("scales.0", "grow.bias", "second.weight", "out.bias")))
    recording = record(network, (images,), {}, CPU)
    monkeypatch.setattr(segments_of, "on_kernels", lambda device: True)
    steps, _, counted = steps_of(recording, {})
    replay = compiled(recording, steps, counted, same, None, beside=True)
    assert replay is not None
    places = replay.at(network)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert len(learning) == 8
    got, expected = (torch.autograd.grad(loss(run(images)), learning) for run in (lambda x: replay(places, [x]), network))
    like([*got], [*expected], 2e-6)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 3, 4, 8), (3, 8), (0, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_its_operators_are_what_the_compiler_takes_them_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shapes, dtypes and memory of what they make, without data and with; nothing that they make is another's memory."""
    gradient, total = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    count = total[..., 0].numel()
    checks = ("test_schema", "test_faketensor")
    for branch_dtype, scale in ((None, None), (dtype, None), (torch.bfloat16, torch.ones(8))):
        given = (
            gradient,
            total,
            torch.zeros(count),
            torch.ones(count),
            torch.ones(8),
            total.clone(),
            None if scale is None else total.clone(),
        )
        torch.library.opcheck(operators._through_norm, (*given, scale, None, branch_dtype), test_utils=checks)
    for again in (False, True):
        torch.library.opcheck(operators._through_gelu, (gradient, total, "gelu", again), test_utils=checks)
        for first, second, last in ((torch.cat([total, total], -1), None, False), (total, total.clone(), True)):
            torch.library.opcheck(operators._through_glu, (gradient, first, second, "silu", last, again), test_utils=checks)
    torch.library.opcheck(operators._activated, (total, "gelu_tanh"), test_utils=checks)
