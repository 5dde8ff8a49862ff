"""What `fast` unwraps, refuses and leaves unchanged, and what its proof does with numbers that are none."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection

from zoo import fast, plain, why
from zoo.kernels.comparing.parity import Parity, Reference
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.kinds import is_stem
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.trace import trace
from zoo.kernels.plans import plan as planning
from zoo.kernels.plans import proving
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import Decision
from zoo.kernels.tuning.steps import Candidate, Setting

CPU = torch.device("cpu")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("seen", torch.zeros(4))


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.conv(x)


class CountsOne(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        return self.conv(x)


class AlwaysTrains(Base):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        return F.batch_norm(self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, training=True)


class Strides(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(self.conv(x), (2, 2), (1, 2))


class PoolsLastChannels(Base):
    """PyTorch's pool to one pixel of a channels_last map gives the mean other strides, which move nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.conv(x).contiguous(memory_format=torch.channels_last), 1).flatten(1)


class BatchStatistics(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), None, None, training=True)


X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("network", "reason"), [(Counts, "seen"), (CountsOne, "seen"), (AlwaysTrains, "norm.running_mean"), (Strides, "memory")]
)
def test_what_changes_itself_or_reads_memory_is_not_traced_and_stays_as_it_was(network: type[Base], reason: str) -> None:
    torch.manual_seed(0)
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Untraceable, match=reason):
        trace(model, (X,), {})
    with pytest.warns(UserWarning, match="runs unchanged"):
        quick = fast(model, "cpu", example=X)
    quick(X)
    assert reason in quick.unchanged
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_strides_that_move_nothing_are_traced(device: torch.device) -> None:
    model = PoolsLastChannels().eval().to(device)
    assert "aten.mean.dim" in {str(node.attrs.get("func")) for node in trace(model, (X.to(device),), {}).nodes}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick = fast(model, dtype=torch.float32, example=X)
    with torch.no_grad():
        torch.testing.assert_close(quick(X.to(device)), model(X.to(device)), rtol=1e-4, atol=1e-5)


def test_statistics_of_the_batch_itself_are_traced() -> None:
    graph = trace(BatchStatistics().eval(), (X,), {})
    assert graph.outputs[0].shape == (2, 4, 8, 8)


class Standardised(nn.Conv2d):
    """Weight standardisation (Qiao et al. 2019, arXiv 1903.10520), as timm computes it."""

    def forward(self, input: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


def test_weights_that_are_computed_from_parameters_become_constants() -> None:
    torch.manual_seed(0)
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 5, 3))
    network = nn.Sequential(Standardised(3, 4, 3, padding=1), nn.ReLU(), normed).eval()
    graph, places = understand(network, (X,), {})
    assert [node.op for node in graph.steps()] == ["conv", "conv"]
    with torch.no_grad():
        program = Program(graph, places, {}, Setting(CPU, torch.float32), Weights())
        (got,) = program.run([[X.contiguous(memory_format=torch.channels_last)]])
        torch.testing.assert_close(got, network(X), rtol=1e-4, atol=1e-5)


def test_wrappers_are_taken_off_for_the_plan_and_given_back() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    for wrapper in (nn.DataParallel(inner), torch.compile(inner), nn.DataParallel(nn.DataParallel(inner))):
        quick = fast(wrapper, "cpu", example=X)
        assert plain(quick) is wrapper
        assert quick.unchanged == ""
        assert list(quick.state_dict()) == list(wrapper.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(quick(X), inner.cpu()(X), rtol=1e-4, atol=1e-5)  # DataParallel has moved it to a GPU


@pytest.mark.gpu
def test_a_network_on_a_gpu_runs_on_a_cpu_where_that_is_asked_for() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().cuda()
    quick = fast(network, "cpu", example=X)
    assert quick.unchanged == ""
    with torch.no_grad():
        torch.testing.assert_close(quick(X), network.cpu()(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_layers_that_do_nothing_in_eval_mode_are_no_reason_to_run_unchanged(mode: Any, device: torch.device) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Dropout2d(0.2), nn.Flatten(), nn.AlphaDropout()).eval()
    with mode():
        quick = fast(network, device, torch.float32)  # of an example that is made up, and tried
        assert quick.unchanged == ""
        torch.testing.assert_close(quick(X.to(device)).cpu(), network(X), rtol=1e-3, atol=1e-4)


def test_a_network_with_a_fast_part_is_refused_with_the_way_out() -> None:
    part = fast(nn.Conv2d(3, 4, 3), "cpu", example=X)
    with pytest.raises(ValueError, match=r"plain\(part\)"):
        fast(nn.Sequential(part, nn.ReLU()), "cpu", example=X)


def test_a_network_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match="weight of Conv2d is on the meta device"):
        fast(model, "cpu")


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    model = nn.Conv2d(3, 4, 3)
    model.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="can't be copied"):
        fast(model, "cpu")


def test_a_boolean_is_no_device() -> None:
    with pytest.raises(ValueError, match="no device True"):
        fast(nn.Conv2d(3, 4, 3), True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_runs_unchanged_and_says_so() -> None:
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    with pytest.warns(UserWarning, match="TorchScript"):
        quick = fast(model, "cpu", example=X)
    with torch.no_grad():
        torch.testing.assert_close(quick(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_network_of_no_tensors_runs_unchanged() -> None:
    class Constant(Base):
        def forward(self, count: int) -> Tensor:
            return self.norm.weight[:count]

    with pytest.warns(UserWarning, match="no tensor"):
        quick = fast(Constant(), "cpu", example=(2,))
    assert quick(3).shape == (3,)


def test_a_scalar_is_an_argument_like_others() -> None:
    class Scaled(Base):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return self.conv(x) * scale

    model = Scaled().eval()
    quick = fast(model, "cpu", example=(torch.tensor(2.0), X))
    with torch.no_grad():
        torch.testing.assert_close(quick(torch.tensor(3.0), X), model(torch.tensor(3.0), X), rtol=1e-4, atol=1e-5)


class Mixes(Base):
    """Every image's output depends on the others of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3))
        return y - y.mean(0)


class Sums(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean()


def reference_of(network: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Reference:
    with torch.no_grad():
        return Reference(network, CPU, dtype, False, [((x,), {})])


@pytest.mark.parametrize("network", [Base, Mixes, Sums])
def test_the_reference_of_a_large_batch_is_that_of_the_whole_batch(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3)) if network is Base else network()
    x = torch.randn(2 * Reference.CHUNK + 5, 3, 8, 8)
    found = reference_of(model.eval(), x)
    with torch.no_grad():
        torch.testing.assert_close(found.outputs[0][0], model(x), rtol=1e-4, atol=1e-5)
    assert (found.chunk == Reference.CHUNK) == (network is Base)


class Masks(Base):
    """Minus infinity belongs into the output."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.where(torch.arange(8) < 4, -math.inf, y)


def test_infinities_that_belong_there_have_to_be_there() -> None:
    torch.manual_seed(0)
    found = reference_of(Masks().eval(), X)
    assert math.isfinite(found.eager)
    right = found.outputs[0][0]
    assert found.compare([[right]]).fast == 0
    for value in (0.0, math.inf, math.nan):
        wrong = right.clone()
        wrong[0, 0, 0, 0] = value
        assert found.compare([[wrong]]).fast == math.inf


def test_nothing_passes_beside_an_eager_that_overflows() -> None:
    for fast_error in (0.0, 1.0, math.inf):
        parity = Parity(fast_error, math.inf, 16)
        assert not parity.passes()
        assert "larger range" in str(parity)


def test_complex_outputs_are_compared_as_numbers() -> None:
    class Spectrum(Base):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft2(self.conv(x).float())

    found = reference_of(Spectrum().eval(), X)
    right = found.outputs[0][0]
    assert 0 < found.compare([[right * 1.01]]).fast < 0.02


def stem_plan(network: nn.Module, x: Tensor) -> Plan:
    graph, places = understand(network, (x,), {})
    (stem,) = [node for node in graph.steps() if node.op == "conv" and is_stem(node)]
    return Plan(Program(graph, places, {stem: Candidate("stem")}, Setting(x.device, torch.float32), Weights()))


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_images_are_packed_inside_and_outside_of_the_graph_alike(room: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PACKED_INSIDE", room)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).eval().to(device)
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        plan = stem_plan(network, torch.randn(2, 3, 20, 24, device=device))
        for x in (torch.randn(2, 3, 20, 24, device=device), torch.randn(2, 20, 24, 3, device=device).permute(0, 3, 1, 2)):
            torch.testing.assert_close(plan.eager([x])[0], network(x), rtol=1e-4, atol=1e-5)


def test_inference_mode_around_the_call_changes_no_number() -> None:
    quick = fast(nn.Conv2d(3, 4, 3), "cpu", example=X)
    with torch.inference_mode():
        inside = quick(X)
    torch.testing.assert_close(quick(X), inside, rtol=1e-6, atol=1e-6)


def test_the_report_of_a_detector_says_that_only_its_backbone_is_fast() -> None:
    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    quick = fast(model, "cpu", progress=False)
    assert "only the backbone" in why(quick).unchanged
    assert why(quick).rows


def test_the_report_as_text_has_no_colours_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(why(fast(nn.Conv2d(3, 4, 3), "cpu", example=X)))


class Captured:
    """Stands for a plan on a GPU: its graph gives the network's answer times a factor, for each way of capturing another."""

    factors: ClassVar[dict[tuple[bool, bool], list[float]]] = {}
    closed: ClassVar[list[tuple[bool, bool]]] = []
    able: ClassVar[bool] = True

    def __init__(self, program: Any) -> None:
        self.program, self.setting, self.note, self.calls = program, program.setting, "", 0
        self.way, self.shares = (False, False), False

    def capture(self, arena: bool = True) -> None:
        self.way, self.shares = (self.program.overlapping, arena), arena and self.able
        if not self.factors[self.way]:
            raise RuntimeError("it synchronises")

    def close(self) -> None:
        self.closed.append(self.way)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        factors = self.factors[self.way]
        return [2 * tensors[0] * factors[min(self.calls // 2, len(factors) - 1)]]


class Bare:
    def __init__(self, graph: Any, places: Any, chosen: Any, setting: Any, weights: Any, overlapping: bool = False) -> None:
        self.graph, self.places, self.setting, self.overlapping = graph, places, setting, overlapping


RIGHT, WRONG, LATE, RAISES = [1.0], [1.5], [1.0, 1.0, 1.5], []
OVERLAP, APART, BOTH = "its kernels don't overlap", "its maps lie apart", "its kernels don't overlap, its maps lie apart"


@pytest.mark.parametrize(
    ("able", "factors", "closed", "note"),
    [
        (True, (RIGHT, RIGHT, RIGHT, RIGHT), [], ""),
        (True, (WRONG, RIGHT, RIGHT, RIGHT), [0], f"{APART}: else the graph had a relative error of 5.0e-01"),
        (True, (LATE, WRONG, RIGHT, RIGHT), [0, 1], f"{OVERLAP}: else the graph had a relative error of 5.0e-01"),
        (True, (WRONG, WRONG, LATE, RIGHT), [0, 1, 2], f"{BOTH}: else the graph had a relative error of 5.0e-01"),
        (True, (WRONG, WRONG, WRONG, WRONG), [0, 1, 2, 3], "runs without a CUDA graph: a relative error of 5.0e-01"),
        (True, (RAISES, RIGHT, RIGHT, RIGHT), [], f"{APART}: else the graph had RuntimeError: it synchronises"),
        (True, (RAISES, RAISES, RIGHT, RIGHT), [], "runs without a CUDA graph: RuntimeError: it synchronises"),
        (False, (RIGHT, RIGHT, RIGHT, RIGHT), [], ""),
        (False, (WRONG, RIGHT, RIGHT, RIGHT), [0], f"{OVERLAP}: else the graph had a relative error of 5.0e-01"),  # the second is the first
        (False, (WRONG, WRONG, WRONG, RIGHT), [0, 2], "runs without a CUDA graph: a relative error of 5.0e-01"),
    ],
)
def test_a_graph_that_answers_otherwise_is_given_up_step_by_step(
    able: bool, factors: tuple[list[float], ...], closed: list[int], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(Base):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    monkeypatch.setattr(proving, "Plan", Captured)
    monkeypatch.setattr(proving, "Program", Bare)
    monkeypatch.setattr(Captured, "factors", dict(zip(proving.WAYS, factors, strict=True)))
    monkeypatch.setattr(Captured, "able", able)
    monkeypatch.setattr(Captured, "closed", [])
    batch = ((X,), {})
    reference = Reference(Twice().eval(), CPU, torch.float32, False, [batch])
    first: Any = Captured(Bare(None, {}, {}, Setting(CPU, torch.float32), None))
    plan, parity = proving.captured(first, Parity(0.0, 0.0, 2), Decision(), Weights(), [batch], reference)
    assert plan.note == note
    assert parity.passes()
    assert Captured.closed == [proving.WAYS[index] for index in closed]


def test_a_pruned_layer_is_named_with_what_makes_it_final() -> None:
    from torch.nn.utils import prune

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    prune.l1_unstructured(network[2], "weight", 0.5)
    network(torch.rand(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"layer '2' is pruned .*: make that final, torch\.nn\.utils\.prune\.remove\(layer, 'weight'\)"):
        fast(network, "cpu")
    prune.remove(network[2], "weight")
    x = torch.rand(1, 3, 8, 8)
    assert torch.allclose(fast(network, "cpu", example=x, progress=False)(x), network(x), atol=1e-5)
