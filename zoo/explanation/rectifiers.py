"""Guided backpropagation and DeconvNet: every ReLU of the traced graph gets another way back, be it a module or a function.

They show edges more than classes: randomising the classifier hardly changes them (Adebayo et al. 2018, https://arxiv.org/abs/1810.03292).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zoo.explanation.cams import begins_with_mean, gradcam, hirescam
from zoo.explanation.program import Program, Rule, relu_of
from zoo.explanation.table import Answer, Question, method, refuse

OTHERS = {
    "SiLU", "GELU", "Hardswish", "Mish", "ELU", "SELU", "CELU", "LeakyReLU", "PReLU", "RReLU", "Softplus", "Softsign", "Hardtanh",
    "Hardshrink", "Softshrink", "Threshold", "QuickGELU", "SwiGLU", "StarReLU", "SquaredReLU", "GLU", "LogSigmoid",
    "silu", "gelu", "hardswish", "mish", "elu", "selu", "celu", "leaky_relu", "prelu", "rrelu", "softplus", "hardtanh", "glu", "threshold",
}  # fmt: skip
"""Activations, as modules and functions, for which neither paper defines a way back."""


class _Guided(torch.autograd.Function):
    """A ReLU whose gradient passes where both its input and the gradient are positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clamp(0, most)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return slopes[0].relu() * ((x > 0) & (x < ctx.most)), None


class _Deconv(torch.autograd.Function):
    """A ReLU whose gradient passes where it is positive, whatever the input was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        return x.clamp(0, most)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0].relu(), None


def rewriting(program: Program, name: str, kind: type[torch.autograd.Function]) -> Rule:
    """Return a rule that replaces every ReLU behind the tap.

    Raises:
        CannotExplain: there are none, or other activations beside them, or layers that can't be looked into.
    """
    found = 0
    for node, layer in program.modules():
        if relu_of(node, layer) is not None:
            found += 1
            continue
        called = type(layer).__name__ if layer is not None else getattr(node.target, "__name__", str(node.target))
        if called in OTHERS:
            raise refuse(name, program, f"it is defined for ReLU, and {program.named(node)} is another activation", "integrated-gradients")
        if node.op == "call_module" and str(node.target) in program.closed:
            why = f"{program.named(node)} can't be looked into ({program.closed[str(node.target)]})"
            raise refuse(name, program, why, "integrated-gradients")
    if not found:
        raise refuse(name, program, "it has no ReLU", "integrated-gradients")

    def rule(node: fx.Node, layer: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        most = relu_of(node, layer)
        if most is None:
            return NotImplemented
        return kind.apply(args[0] if args else kwargs["input"], most)

    return rule


def guided_slope(q: Question) -> Tensor:
    """Return guided backpropagation's signed answer for every channel, (B, C, H, W), by the network's own pixel values."""
    return q.image_gradients(q.x, q.every, rewriting(q.program, "guided backpropagation", _Guided))[0]


def deconv_slope(q: Question) -> Tensor:
    """Return DeconvNet's answer for every channel, (B, C, H, W), by the network's own pixel values."""
    return q.image_gradients(q.x, q.every, rewriting(q.program, "DeconvNet", _Deconv))[0]


@method("guided-backprop", "Guided backpropagation", "https://arxiv.org/abs/1412.6806", place="input", signed=True, slope=True, exact=True)
def guided(q: Question) -> Answer:
    """The gradient, where each ReLU passes what is positive and had a positive input, summed over the channels by pixels of 0..1."""
    return Answer((guided_slope(q) * q.deviation()).sum(1))


@method("deconvnet", "DeconvNet", "https://arxiv.org/abs/1311.2901", place="input", signed=True, slope=True, exact=True)
def deconvnet(q: Question) -> Answer:
    """The gradient, where each ReLU passes what is positive, summed over the channels by pixels of 0..1; max pools by their switches."""
    return Answer((deconv_slope(q) * q.deviation()).sum(1))


@method(
    "guided-gradcam",
    "Guided Grad-CAM",
    "https://arxiv.org/abs/1610.02391",
    place="input",
    signed=True,
    slope=True,
    exact=True,
    reads_layer=True,
)
def guided_gradcam(q: Question) -> Answer:
    """Guided backpropagation times Grad-CAM of the layer `at`, enlarged by lines (section 3.2); HiResCAM where the head has no mean."""
    return Answer((guided_slope(q) * layer_map(q) * q.deviation()).sum(1))


def layer_map(q: Question) -> Tensor:
    """Return the layer's map for the same images and goals, (B, 1, H, W)."""
    assert q.layer is not None
    program = q.layer
    inner = Question(program, q.x, q.goal, q.infer, program.body, q.rows, q.preprocessing, q.seed)
    inner.__dict__["kept"] = program.body(q.x)
    raw = (gradcam if begins_with_mean(program) else hirescam)(inner).raw
    return F.interpolate(raw[:, None], size=q.x.shape[-2:], mode="bilinear", align_corners=False)
