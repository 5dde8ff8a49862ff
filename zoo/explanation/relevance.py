"""Layer-wise relevance propagation: the answer is handed back layer by layer, each input in proportion to what it added.

Sources: Bach et al. 2015 (https://doi.org/10.1371/journal.pone.0130140) for epsilon and alpha-beta; Montavon et al. 2019
(https://doi.org/10.1007/978-3-030-28954-6_10) for gamma, the composite, and generalised gamma for negative inputs; Montavon et al. 2017
(https://arxiv.org/abs/1512.02479) for z^B. BatchNorms are folded first. A rule that has no definition for a layer refuses it by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from weights.arguments import number
from zoo.explanation.program import CONVOLUTIONS, Program, copied, relu_of
from zoo.explanation.table import Answer, Question, method, refuse

IMAGES = 8
"""Images at once: every layer's output is kept."""
LEAK = 0.01
"""Relevance, as a share of the score, that may be lost other than to biases."""
GROWTH = 1e3
"""How many times the score the sum of absolute relevances may be: beyond, rounding decides."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a rule's denominator: what a layer gives with its input and parameters changed.

    Attributes:
        input: of the layer's input.
        parameter: of its weight and its bias.
        sign: with which it counts.
        bias: whether the bias counts.
    """

    input: Callable[[Tensor], Tensor]
    parameter: Callable[[Tensor], Tensor]
    sign: float = 1.0
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Terms with one denominator, the share of the relevance that they hand on, and the outputs for which they do (0: all)."""

    terms: tuple[Term, ...]
    share: float = 1.0
    outputs: int = 0


Rule = tuple[Group, ...]


def _same(x: Tensor) -> Tensor:
    return x


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _negative(x: Tensor) -> Tensor:
    return x.clamp(max=0)


EPSILON: Rule = (Group((Term(_same, _same),)),)


def gamma(by: float = 0.25) -> Rule:
    """Favour positive contributions by a factor 1 + `by`; for negative outputs, negative ones."""

    def raised(x: Tensor) -> Tensor:
        return x + by * x.clamp(min=0)

    def lowered(x: Tensor) -> Tensor:
        return x + by * x.clamp(max=0)

    return (
        Group((Term(_positive, raised), Term(_negative, lowered, bias=False)), outputs=1),
        Group((Term(_positive, lowered), Term(_negative, raised, bias=False)), outputs=-1),
    )


def alpha_beta(alpha: float = 2.0, beta: float = 1.0) -> Rule:
    """Hand on `alpha` times the relevance to what added, and take `beta` times from what subtracted; alpha - beta = 1."""
    added = Group((Term(_positive, _positive), Term(_negative, _negative, bias=False)), alpha)
    subtracted = Group((Term(_positive, _negative), Term(_negative, _positive, bias=False)), -beta)
    return (added, subtracted) if beta else (added,)


def box(low: Tensor | float, high: Tensor | float) -> Rule:
    """z^B: for the first layer, whose inputs lie between `low` and `high`."""
    return (
        Group(
            (
                Term(_same, _same),
                Term(lambda x: torch.zeros_like(x) + low, _positive, -1.0),
                Term(lambda x: torch.zeros_like(x) + high, _negative, -1.0),
            )
        ),
    )


FLAT: Rule = (Group((Term(torch.ones_like, torch.ones_like, bias=False),)),)
SQUARED: Rule = (Group((Term(torch.ones_like, torch.square),)),)


@dataclass(frozen=True, slots=True)
class Composite:
    """Which rule a layer gets.

    Attributes:
        first: of the layer that reads the image; None for the rule of its kind.
        convolution, dense: of the others.
        epsilon: stabilises every denominator: times its root mean square for each image, or as it is where `absolute`.
    """

    convolution: Rule
    dense: Rule = EPSILON
    first: Rule | None = None
    epsilon: float = 1e-6
    absolute: bool = False

    def stable(self, z: Tensor) -> Tensor:
        """Move a denominator away from zero."""
        by: Any = self.epsilon
        if not self.absolute:
            by = by * z.square().flatten(1).mean(1).sqrt().clamp(min=1e-12).view(-1, *[1] * (z.dim() - 1))
        return z + torch.where(z >= 0, by, -by)


MOVES = {
    "Flatten", "ZeroPad2d", "PaddedShortcut", "SpaceToDepth", "Permute", "ChannelShuffle", "Unflatten",
    "flatten", "reshape", "view", "cat", "pad", "getitem", "chunk", "split", "unbind", "permute", "transpose", "squeeze", "unsqueeze",
    "contiguous", "unflatten", "narrow", "roll", "channel_shuffle",
}  # fmt: skip
"""What only moves values about, and pads with zeros."""
SAME = {"Identity", "Dropout", "Dropout2d", "StochasticDepth", "LayerScale", "dropout", "imagenet_to_inception"}
"""What leaves every value at its place, scaled at most."""
MEANS = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
MEAN_NAMES = {"mean", "avg_pool2d", "adaptive_avg_pool2d"}
MAXIMA = (nn.MaxPool2d, nn.AdaptiveMaxPool2d)
MAXIMUM_NAMES = {"max_pool2d", "adaptive_max_pool2d", "boolean_dispatch"}


def relevance(program: Program, x: Tensor, goals: Tensor, composite: Composite) -> tuple[Tensor, Tensor]:
    """Hand each image's score back to its pixels.

    Args:
        program: cut at the images.
        x: images (B, C, H, W).
        goals: weights of the logits (B, classes).
        composite: the rules.

    Returns:
        Relevance (B, C, H, W), and what was lost other than to biases (B,), as a share of the score.

    Raises:
        CannotExplain: a layer has no rule.
    """
    with torch.no_grad():
        values = program.values([x])
    depends = {program.tap, *program.behind}
    firsts = _firsts(program)
    held: dict[fx.Node, Any] = {program.result: values[program.result] * goals}
    score = held[program.result].sum(1)
    lost = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for node in reversed(program.behind):
        out = held.pop(node, None)
        if out is None or not isinstance(values[node], Tensor | tuple | list):
            continue
        sources = [source for source in node.all_input_nodes if source in depends and isinstance(values[source], Tensor | tuple | list)]
        shares, taken = _hand_on(program, node, values, sources, out, composite, node in firsts)
        handed = sum((_sum(one) for one in shares), torch.zeros_like(lost)) + taken
        lost += (_sum(out) - handed).abs()
        for source, share in zip(sources, shares, strict=True):
            held[source] = _plus(held.get(source), share)
        if node in values:
            del values[node]
    return held[program.tap], (lost / score.double().abs().clamp(min=1e-12)).float()


def _sum(x: Any) -> Tensor:
    parts = [x] if isinstance(x, Tensor) else [one for one in x if one is not None]
    return sum((part.double().flatten(1).sum(1) for part in parts[1:]), parts[0].double().flatten(1).sum(1))


def _plus(one: Any, other: Any) -> Any:
    if one is None:
        return other
    if isinstance(one, Tensor):
        return one + other
    return [_plus(a, b) if b is not None else a for a, b in zip(one, other, strict=True)]


def _firsts(program: Program) -> set[fx.Node]:
    """Find the layers with weights that read the image, with nothing but moves between."""
    near, found = {program.tap}, set()
    for node, layer in program.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if near.intersection(node.all_input_nodes):
                found.add(node)
        elif near.intersection(node.all_input_nodes) and _name(node, layer) in MOVES | SAME:
            near.add(node)
    return found


def _name(node: fx.Node, layer: nn.Module | None) -> str:
    if layer is not None:
        return type(layer).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target)).lstrip("_")


def _hand_on(
    program: Program, node: fx.Node, values: dict[fx.Node, Any], sources: Sequence[fx.Node], out: Any, composite: Composite, first: bool
) -> tuple[list[Any], Tensor | float]:
    """Return each source's share of a node's relevance, and what the layer's bias took of it, (B,)."""
    layer, name = program.behind_layer(node), _name(node, program.behind_layer(node))
    if node in program.folded:
        return [out], 0.0
    if layer is not None and type(layer) in (*CONVOLUTIONS, nn.Linear):
        rule = composite.dense if isinstance(layer, nn.Linear) else composite.convolution
        share, taken = weighted(layer, values[sources[0]], out, composite.first if first and composite.first else rule, composite)
        return [share], taken
    if relu_of(node, layer) is not None or name in SAME:
        return [out], 0.0
    if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
        share = _proportion(layer, values[sources[0]], out, composite)
        return [share], _sum(out) - _sum(share)  # what it adds is a bias
    if isinstance(layer, MAXIMA) or (layer is None and name in MAXIMUM_NAMES) or name in MOVES:
        return _backward(program, node, values, sources, out), 0.0
    if isinstance(layer, MEANS) or (layer is None and name in MEAN_NAMES):
        z = values[node]
        scaled = _backward(program, node, values, sources, out / composite.stable(z))
        return [scaled[0] * values[sources[0]]], 0.0
    if layer is None and (name in ("add", "iadd") or node.target in (operator.add, torch.add)):
        z = composite.stable(values[node])
        shares = [_summed(values[source] * out / z, values[source]) for source in sources]
        constant = _sum(out) - sum(_sum(one) for one in shares) if len(sources) < 2 else 0.0
        if len(node.all_input_nodes) == 1 and len(node.args) == 2 and node.args[0] is node.args[1]:
            shares = [out]
        return shares, constant
    raise refuse("LRP", program, f"no rule of it is defined for {program.named(node)}", "integrated-gradients")


def _summed(share: Tensor, like: Tensor) -> Tensor:
    return share.sum_to_size(like.shape) if share.shape != like.shape else share


def _proportion(layer: nn.Module, x: Tensor, out: Tensor, composite: Composite) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        z = layer(x)
        (slope,) = torch.autograd.grad(z, x, out / composite.stable(z.detach()))
    return x.detach() * slope


def _backward(program: Program, node: fx.Node, values: dict[fx.Node, Any], sources: Sequence[fx.Node], out: Any) -> list[Any]:
    """Hand relevance back by a node's own derivative."""
    with torch.enable_grad():
        inner = {
            source: [v.detach().requires_grad_() for v in values[source]]
            if isinstance(values[source], tuple | list)
            else values[source].detach().requires_grad_()
            for source in sources
        }
        layer = program.behind_layer(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: inner.get(n, values.get(n)))
        target: Any = node.target
        if layer is not None:
            made = layer(*args, **kwargs)
        else:
            made = getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
        outs, given = ([made], [out]) if isinstance(made, Tensor) else (list(made), list(out))
        pairs = [(o, g) for o, g in zip(outs, given, strict=True) if g is not None and o.requires_grad]
        flat = [v for one in inner.values() for v in (one if isinstance(one, list) else [one])]
        found = iter(torch.autograd.grad([o for o, _ in pairs], flat, [g for _, g in pairs], allow_unused=True))
    shares: list[Any] = []
    for one in inner.values():
        got = [next(found) for _ in (one if isinstance(one, list) else [one])]
        shares.append(
            [g if g is not None else torch.zeros_like(v) for g, v in zip(got, one, strict=True)]
            if isinstance(one, list)
            else got[0] if got[0] is not None else torch.zeros_like(one)
        )  # fmt: skip
    return shares


def weighted(layer: nn.Module, x: Tensor, out: Tensor, rule: Rule, composite: Composite) -> tuple[Tensor, Tensor]:
    """Hand a convolution's or dense layer's relevance on by a rule: the input's, and what the bias took, (B,)."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    whole = layer(x) if any(group.outputs for group in rule) else None
    total, taken = torch.zeros_like(x), torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for group in rule:
        made: list[tuple[Term, Tensor, Tensor, Tensor | None]] = []
        with torch.enable_grad():
            for term in group.terms:
                shifted = term.parameter(bias) if bias is not None and term.bias else None
                inner = term.input(x).detach().requires_grad_()
                made.append((term, inner, copied(layer, weight=term.parameter(weight), bias=shifted)(inner), shifted))
        z = sum((term.sign * y.detach() for term, _, y, _ in made), torch.zeros_like(made[0][2]))
        share = group.share * out / composite.stable(z)
        if group.outputs and whole is not None:
            share = share * (whole > 0 if group.outputs > 0 else whole < 0)
        for term, inner, y, shifted in made:
            (slope,) = torch.autograd.grad(y, inner, term.sign * share)
            total += inner.detach() * slope
            if shifted is not None:
                channels = shifted.view(1, -1, *[1] * (share.dim() - 2)) if isinstance(layer, nn.Conv2d) else shifted
                taken += _sum(term.sign * share * channels)
    return total, taken


def _limits(q: Question) -> tuple[Tensor, Tensor]:
    """Return what a black and a white photograph are to the network; of the user's tensors, their own range."""
    if q.preprocessing is None:
        return q.x.amin((0, 2, 3), keepdim=True), q.x.amax((0, 2, 3), keepdim=True)
    black = q.black()
    return black, black + q.deviation()


def _answer(q: Question, composite: Composite) -> Answer:
    maps: list[Tensor] = []
    errors: list[float] = []
    for start in range(0, len(q.x), IMAGES):
        rows = q.every[start : start + IMAGES]
        x = q.x[start : start + IMAGES]
        with torch.no_grad():
            outputs = q.program.head([x])
        if q.program.ends != "logits":
            raise refuse("LRP", q.program, "it explains classes, not embeddings", "integrated-gradients")
        with torch.enable_grad():
            inner = outputs.detach().requires_grad_()
            (goals,) = torch.autograd.grad(q.goal(inner, rows).sum(), inner)
        found, lost = relevance(q.program, x, goals, composite)
        score = (outputs * goals).sum(1)
        growth = found.abs().flatten(1).sum(1) / score.abs().clamp(min=1e-12)
        if not found.isfinite().all() or bool((lost > LEAK).any()) or bool((growth > GROWTH).any()):
            worst = f"{float(lost.max()):.1%} of the score is lost on the way, and the sizes are {float(growth.max()):,.0f} times it"
            raise refuse("this rule of LRP", q.program, f"it does not conserve relevance there: {worst}", "integrated-gradients")
        maps.append(found.sum(1))
        errors += ((found.flatten(1).sum(1) - score).abs() / score.abs().clamp(min=1e-12)).tolist()
    return Answer(torch.cat(maps), tuple(errors))


LRP = "https://doi.org/10.1007/978-3-030-28954-6_10"
MISSING = "the share of the score that is not in the map's sum: biases took it"


@method("lrp", "LRP", LRP, place="input", signed=True, error=MISSING, options="epsilon gamma")
def lrp(q: Question) -> Answer:
    """z^B on the first layer, gamma (0.25) on convolutions, epsilon (1e-6 of a layer's outputs) on dense layers."""
    low, high = _limits(q)
    rule = gamma(number("gamma", q.options.get("gamma", 0.25), 0))
    return _answer(q, Composite(rule, EPSILON, box(low, high), number("epsilon", q.options.get("epsilon", 1e-6), 0)))


@method(
    "lrp-epsilon",
    "LRP-epsilon",
    "https://doi.org/10.1371/journal.pone.0130140",
    place="input",
    signed=True,
    error=MISSING,
    options="epsilon",
)
def lrp_epsilon(q: Question) -> Answer:
    """The epsilon rule (1e-6 of a layer's outputs) on all layers; with ReLUs alone it is input x gradient."""
    return _answer(q, Composite(EPSILON, epsilon=number("epsilon", q.options.get("epsilon", 1e-6), 0)))


@method("lrp-gamma", "LRP-gamma", LRP, place="input", signed=True, error=MISSING, options="epsilon gamma")
def lrp_gamma(q: Question) -> Answer:
    """The gamma rule (0.25) on all layers."""
    rule = gamma(number("gamma", q.options.get("gamma", 0.25), 0))
    return _answer(q, Composite(rule, rule, epsilon=number("epsilon", q.options.get("epsilon", 1e-6), 0)))


@method(
    "lrp-alpha-beta",
    "LRP-alpha-beta",
    "https://doi.org/10.1371/journal.pone.0130140",
    place="input",
    signed=True,
    error=MISSING,
    options="epsilon alpha",
)
def lrp_alpha_beta(q: Question) -> Answer:
    """The alpha-beta rule on convolutions (alpha 1, beta 0 by default: z+), epsilon on dense layers; beta = alpha - 1."""
    alpha = number("alpha", q.options.get("alpha", 1.0), 1)
    return _answer(q, Composite(alpha_beta(alpha, alpha - 1), epsilon=number("epsilon", q.options.get("epsilon", 1e-6), 0)))
