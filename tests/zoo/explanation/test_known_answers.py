"""Maps that other libraries computed: pytorch-grad-cam 1.5.7, captum 0.9.0, zennit 0.5.1 and torchcam 0.5.0 on real images."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import ResNet20, trained
from zoo.explanation import explain
from zoo.explanation.program import INPUT, Program
from zoo.explanation.relevance import EPSILON, FLAT, SQUARED, Composite, Group, Rule, Term, alpha_beta, box, gamma, relevance, weighted
from zoo.networks.model import Model

pytestmark = pytest.mark.real
MEAN, STD = (torch.tensor(values).view(-1, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
CAMS = {"gradcam": "GradCAM", "hirescam": "HiResCAM", "xgradcam": "XGradCAM", "layercam": "LayerCAM", "ablationcam": "AblationCAM"}


@pytest.fixture(scope="module")
def known(real: Path) -> dict[str, np.ndarray]:
    with np.load(real / "real" / "fixtures" / "seeing" / "resnet20_cifar.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def network(real: Path) -> Model:
    return trained(ResNet20, str(real / "real" / "pytorch" / "cifar_resnet20-12fca82f.th"))


@pytest.fixture(scope="module")
def x(known: dict[str, np.ndarray]) -> Tensor:
    return (torch.from_numpy(known["images"]).permute(0, 3, 1, 2) / 255 - MEAN) / STD


def raws(network: Model, x: Tensor, classes: np.ndarray, method: str, at: str | None = None, **options: object) -> np.ndarray:
    return np.stack([explain(network, one, method, int(c), at, options=options).raw for one, c in zip(x, classes, strict=True)])


def near(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert np.abs(found - expected).max() <= tolerance * max(1.0, float(np.abs(expected).max()))


def test_class_activation_maps(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    near(network(x).detach().numpy(), known["logits"])
    compared = 0
    for method, name in CAMS.items():
        for layer in ("layer2", "layer3"):
            for classes in ("target", "second"):
                key = f"gradcam157/{name}/{layer}/{classes}/raw"
                if key in known:
                    compared += 1
                    near(raws(network, x, known[classes], method, layer), known[key].clip(0))
    assert compared == 17
    near(raws(network, x, known["target"], "cam"), known["cam/layer3/target"])


def test_grad_cam_plus_plus_is_the_papers_and_not_torchcams(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    found = raws(network, x, known["target"], "gradcam++", "layer3")
    maps = network.forward_body(x).detach().requires_grad_()
    logits = network.forward_head(maps)
    (g,) = torch.autograd.grad(logits[range(4), known["target"]].sum(), maps)
    a = maps.detach()
    alpha = g**2 / (2 * g**2 + a.sum((2, 3), keepdim=True) * g**3)
    expected = ((alpha.nan_to_num() * g.relu()).sum((2, 3), keepdim=True) * a).sum(1).relu()
    near(found, expected.numpy())
    wrong = known["torchcam050/GradCAMpp/layer3/target/raw"]
    assert np.abs(found - wrong).max() > 10


def test_score_cam_is_its_definition_by_a_loop(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    found = raws(network, x[:1], known["target"][:1], "scorecam")[0]
    maps, scores = network.forward_body(x[:1]).detach()[0], []
    with torch.no_grad():
        for one in maps:
            mask = F.interpolate(one[None, None], size=(32, 32), mode="bilinear", align_corners=False)
            mask = (mask - mask.min()) / (mask.max() - mask.min()) if mask.max() > mask.min() else mask * 0
            scores.append(network(x[:1] * mask)[0, known["target"][0]])
    weights = torch.stack(scores).softmax(0)
    near(found, (weights[:, None, None] * maps).sum(0).relu().numpy())


def test_gradients(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    """Of the batch as a whole, as they were made: where a ReLU's input is zero but for rounding, a batch of one may take the other side."""
    deviation = STD.numpy()

    def together(method: str, at: str | None = None) -> np.ndarray:
        shown = explain(network, x, method, at=at)
        return np.stack([one.raw for one in shown])

    for method, name in (
        ("gradient", "gradient"),
        ("guided-backprop", "GuidedBackprop"),
        ("deconvnet", "Deconvolution"),
        ("guided-gradcam", "GuidedGradCam_layer3_bilinear"),
    ):
        at = "layer3" if method == "guided-gradcam" else None
        near(together(method, at), (known[f"captum090/{name}/target"] / deviation).sum(1))
    near(together("input-x-gradient"), known["captum090/InputXGradient/target"].sum(1))
    near(together("saliency"), np.abs(known["captum090/gradient/target"] / deviation).max(1))


def test_integrated_gradients_and_their_error(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    """Captum's float32 is 6e-4 from float64: at some of the points a ReLU lies so near its corner that rounding turns it."""
    shown = explain(network, x, "integrated-gradients", options={"steps": 50, "fixed": True})
    right = integrated(copy.deepcopy(network).double(), x.double(), known["target"])
    near(np.stack([one.raw for one in shown]), right, 1e-4)
    near(known["captum090/IG50_black_gausslegendre/target"].sum(1), right, 1e-3)
    black = network(((0 - MEAN) / STD).expand(1, -1, 32, 32))[0].detach()
    for one, total, row, index in zip(shown, right.sum((1, 2)), network(x).detach(), known["target"], strict=True):
        difference = float(row[index] - black[index])
        assert one.error == pytest.approx(abs(total - difference) / abs(difference), rel=1e-2)
        assert one.error > 0.01
    complete = explain(network, x[0], "integrated-gradients", int(known["target"][0]))
    assert complete.error is not None
    assert complete.error < 0.01
    difference = complete.score - float(black[known["target"][0]])
    assert abs(complete.raw.sum() - difference) / abs(difference) == pytest.approx(complete.error, abs=1e-4)


def integrated(network: Model, x: Tensor, classes: np.ndarray, steps: int = 50) -> np.ndarray:
    """Integrate by Gauss-Legendre's rule from a black photograph, point by point, as the paper says it."""
    black, total = ((0 - MEAN) / STD).to(x), torch.zeros_like(x)
    for place, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        point = (black + (place + 1) / 2 * (x - black)).requires_grad_()
        goal = network(point).gather(1, torch.from_numpy(classes).long().view(-1, 1).to(x.device)).sum()
        total += weight / 2 * torch.autograd.grad(goal, point)[0]
    return (total * (x - black)).sum(1).numpy()


def test_smoothgrad_is_the_mean_over_the_noise(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    from zoo.explanation.gradients import smoothed
    from zoo.explanation.run import Explainer

    torch.manual_seed(0)
    noise = torch.randn(10, 4, 3, 32, 32)
    explainer = Explainer(network, "smoothgrad", options={"noise": 0.15})
    goals = explainer.goals(x)
    assert [next(iter(goal.weights)) for goal in goals] == known["target"].tolist()
    near(smoothed(explainer.question(x, [x], goals), noise).numpy(), known["own/SmoothGrad10_seed0_015/target"])


def test_occlusion(network: Model, x: Tensor, known: dict[str, np.ndarray]) -> None:
    found = raws(network, x, known["target"], "occlusion", window=8, stride=4)
    near(found, known["captum090/Occlusion_8_4_mean/target"][:, 0])


def raised(w: Tensor) -> Tensor:
    return w + 0.25 * w.clamp(min=0)


SINGLE: dict[str, tuple[Rule, float]] = {
    "Epsilon_1e-6": (EPSILON, 1e-6),
    "Epsilon_0.25": (EPSILON, 0.25),
    "ZPlus": (alpha_beta(1, 0), 1e-6),
    "AlphaBeta_2_1": (alpha_beta(2, 1), 1e-6),
    "AlphaBeta_1_0": (alpha_beta(1, 0), 1e-6),
    "Gamma_0.25": (gamma(0.25), 1e-6),
    "ZBox_-3_3": (box(-3.0, 3.0), 1e-6),
    "Flat": (FLAT, 1e-6),
    "WSquare": (SQUARED, 1e-6),
}
WHOLE = {
    "zennit051/EpsilonPlus": Composite(alpha_beta(1, 0), absolute=True),
    "zennit051/EpsilonAlpha2Beta1": Composite(alpha_beta(2, 1), absolute=True),
    "zennit051/EpsilonGammaBox": Composite(gamma(), first=box(-3.0, 3.0), absolute=True),
    "zennit051/EpsilonPlusFlat": Composite(alpha_beta(1, 0), first=FLAT, absolute=True),
}
NAIVE: tuple[Rule, Rule] = (Group((Term(lambda v: v, raised),)),), (Group((Term(lambda v: v, lambda w: w.clamp(min=0)),)),)
"""Captum's gamma and alpha1beta0, which let negative inputs pass through raised weights."""
CAPTUM = {
    "captum090/LRP_epsilon1e-6": Composite(EPSILON, absolute=True),
    "captum090/LRP_gamma0.25": Composite(NAIVE[0], NAIVE[0], epsilon=1e-9, absolute=True),
    "captum090/LRP_alpha1beta0": Composite(NAIVE[1], NAIVE[1], epsilon=1e-9, absolute=True),
}


class Small(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        sizes = ((3, 8, 1), (8, 12, 2), (12, 16, 1))
        one, two, three = (nn.Conv2d(a, b, 3, stride, 1, bias=bias) for a, b, stride in sizes)
        self.features = nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), nn.MaxPool2d(2), three, nn.ReLU())
        self.fc = nn.Linear(16, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))


@pytest.fixture(scope="module")
def rules(real: Path) -> dict[str, Tensor]:
    with np.load(real / "real" / "fixtures" / "seeing" / "lrp_small.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file}


@pytest.mark.parametrize("name", SINGLE)
def test_a_rule_of_one_convolution(name: str, rules: dict[str, Tensor]) -> None:
    rule, epsilon = SINGLE[name]
    layer = nn.Conv2d(3, 4, 3, padding=1)
    layer.load_state_dict({"weight": rules["one/w"], "bias": rules["one/b"]})
    found, _ = weighted(layer.requires_grad_(False), rules["one/x"], rules["one/R"], rule, Composite(rule, epsilon=epsilon, absolute=True))
    near(found.numpy(), rules[f"one/zennit051/{name}"].numpy(), 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_relevance_of_a_network(bias: bool, rules: dict[str, Tensor]) -> None:
    prefix = "bias" if bias else "nobias"
    network = Small(bias).eval()
    network.load_state_dict({name.partition("/w/")[2]: value for name, value in rules.items() if name.startswith(f"{prefix}/w/")})
    program = Program(network, INPUT, torch.device("cpu"))
    goals = F.one_hot(rules["target"], 5).float()
    for name, composite in (WHOLE if bias else WHOLE | CAPTUM).items():
        found, lost = relevance(program, rules["x"], goals, composite)
        near(found.numpy(), rules[f"{prefix}/{name}"].numpy(), 1e-6)
        assert lost.max() < 1e-3
