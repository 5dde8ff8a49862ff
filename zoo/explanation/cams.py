"""Class activation maps: a layer's channels, weighted by what they do to the answer. A is the layer's map, g = dy/dA."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.explanation.program import Program
from zoo.explanation.table import Answer, Question, method, refuse


def _sum(weights: Tensor, maps: Tensor) -> Tensor:
    """Return sum_k w_k A_k of weights (B, K) or (B, K, h, w)."""
    return (weights[..., None, None] * maps).sum(1) if weights.dim() == 2 else (weights * maps).sum(1)


@method("cam", "CAM", "https://arxiv.org/abs/1512.04150", signed=True)
def cam(q: Question) -> Answer:
    """Sum_k w_k A_k with the classifier's weights (eq. 1 and 2); only where the head is a mean over places and one dense layer."""
    if not is_mean_and_dense(q.program):
        raise refuse("CAM", q.program, f"its head behind {q.program.at!r} is not a mean over places and one dense layer", "hirescam")
    cells = q.activation.shape[2] * q.activation.shape[3]
    return Answer(_sum(q.gradient.mean((2, 3)) * cells, q.activation))  # behind a mean, the gradient is the weight over the cells


def begins_with_mean(program: Program) -> bool:
    """Tell whether what follows the tap is a mean over places, which gives all cells of a channel the same gradient."""
    kinds = (kind for node, layer in program.modules() if (kind := _kind(node, layer)) != "nothing")
    return next(kinds, "") == "mean"


def is_mean_and_dense(program: Program) -> bool:
    """Tell whether a mean over places and one dense layer are all that follows the tap, dropout and flattening left out."""
    kinds = [kind for node, layer in program.modules() if (kind := _kind(node, layer)) != "nothing"]
    return kinds == ["mean", "dense"]


def _kind(node: torch.fx.Node, layer: nn.Module | None) -> str:
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return "mean" if layer.output_size in (1, (1, 1)) else "other"
    if isinstance(layer, nn.Linear):
        return "dense"
    if isinstance(layer, nn.Identity | nn.Dropout | nn.Dropout2d | nn.Flatten):
        return "nothing"
    if layer is None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name == "mean":
            axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
            return "mean" if set(axes if isinstance(axes, tuple | list) else (axes,)) in ({2, 3}, {-2, -1}) else "other"
        if name == "adaptive_avg_pool2d":
            return "mean" if node.args[1] in (1, (1, 1)) else "other"
        if name in ("flatten", "dropout", "contiguous"):
            return "nothing"
    return "other"


@method("gradcam", "Grad-CAM", "https://arxiv.org/abs/1610.02391")
def gradcam(q: Question) -> Answer:
    """relu(sum_k mean(g_k) A_k), eq. 1 and 2."""
    return Answer(_sum(q.gradient.mean((2, 3)), q.activation).relu())


@method("gradcam++", "Grad-CAM++", "https://arxiv.org/abs/1710.11063")
def gradcam_plus_plus(q: Question) -> Answer:
    """Eq. 10 and 19, for y = exp(score): w_k = sum alpha relu(g), alpha = g^2 / (2 g^2 + g^3 sum A_k).

    Where g is 0, so is the term; nothing is added to the denominator, beside which g^2 is small behind a mean over places.
    """
    g, total = q.gradient.double(), q.activation.double().sum((2, 3), keepdim=True)
    below = 2 * g**2 + total * g**3
    alpha = torch.where(below != 0, g**2 / torch.where(below == 0, 1, below), 0)
    weights = (alpha * g.relu()).sum((2, 3)).float()
    return Answer(_sum(weights, q.activation).relu())


@method("hirescam", "HiResCAM", "https://arxiv.org/abs/2011.08891")
def hirescam(q: Question) -> Answer:
    """relu(sum_k g_k A_k), cell by cell (eq. 5): what the cells contribute, whatever the head is."""
    return Answer((q.gradient * q.activation).sum(1).relu())


@method("layercam", "LayerCAM", "https://doi.org/10.1109/TIP.2021.3089943")
def layercam(q: Question) -> Answer:
    """relu(sum_k relu(g_k) A_k), eq. 5 and 6: for early layers."""
    return Answer((q.gradient.relu() * q.activation).sum(1).relu())


@method("xgradcam", "XGrad-CAM", "https://arxiv.org/abs/2008.02312")
def xgradcam(q: Question) -> Answer:
    """relu(sum_k w_k A_k), w_k = sum g A / sum A (eq. 8); a channel whose sum is 0 has no weight."""
    total = q.activation.sum((2, 3))
    weights = torch.where(total != 0, (q.gradient * q.activation).sum((2, 3)) / torch.where(total == 0, 1, total), 0)
    return Answer(_sum(weights, q.activation).relu())


@method("eigencam", "Eigen-CAM", "https://arxiv.org/abs/2008.00299", signed=True)
def eigencam(q: Question) -> Answer:
    """The cells along the first right singular vector of A as (cells, channels); it knows no class.

    A's sign is arbitrary in the paper; here the cell of the greatest norm is positive. Channels are not centred, as in the paper.
    """
    rows = q.activation.flatten(2).transpose(1, 2)  # (B, cells, K)
    vector = torch.linalg.svd(rows.double(), full_matrices=False).Vh[:, 0]
    along = (rows.double() @ vector[..., None])[..., 0]
    strongest = rows.norm(dim=2).argmax(1, keepdim=True)
    sign = along.gather(1, strongest).sign()
    return Answer((along * torch.where(sign == 0, 1, sign)).float().unflatten(1, q.activation.shape[2:]))


@method("scorecam", "Score-CAM", "https://arxiv.org/abs/1910.01279", long=True)
def scorecam(q: Question) -> Answer:
    """relu(sum_k w_k A_k), w = softmax over k of the goal on the image times channel k, enlarged and scaled to 0..1 (eq. 3 to 5).

    The image is masked in the network's own units, so that what is hidden has the mean colour; a flat channel hides all. The goal on
    the hidden image is subtracted by eq. 3, and the softmax takes it out again. One forward pass for each channel.
    """
    size, maps = q.x.shape[-2:], q.activation
    found = torch.empty(maps.shape[:2], device=maps.device)
    for row in range(len(maps)):
        for start in range(0, maps.shape[1], q.rows):
            part = maps[row, start : start + q.rows, None]
            mask = F.interpolate(part, size=size, mode="bilinear", align_corners=False)
            low, high = mask.amin((2, 3), keepdim=True), mask.amax((2, 3), keepdim=True)
            mask = torch.where(high > low, (mask - low) / torch.where(high > low, high - low, 1), 0)
            found[row, start : start + q.rows] = q.scores(q.x[row] * mask, q.every[row].expand(len(part)))
    return Answer(_sum(found.softmax(1), maps).relu())


@method(
    "ablationcam", "Ablation-CAM", "https://openaccess.thecvf.com/content_WACV_2020/html/Desai_Ablation-CAM_WACV_2020_paper.html", long=True
)
def ablationcam(q: Question) -> Answer:
    """relu(sum_k w_k A_k), w_k = (y - y without channel k) / abs(y), eq. 2: by abs(y), for with a negative y all signs would turn.

    One pass behind the tap for each channel.
    """
    maps, kept = q.activation, q.kept
    found = torch.empty(maps.shape[:2], device=maps.device)
    with torch.no_grad():
        y = q.goal(q.program.head(kept), q.every)
        for row in range(len(maps)):
            others = [one[row : row + 1] if one.dim() and len(one) == len(maps) else one for one in kept]
            for start in range(0, maps.shape[1], q.rows):
                channels = torch.arange(start, min(start + q.rows, maps.shape[1]), device=maps.device)
                without = maps[row].repeat(len(channels), 1, 1, 1)
                without[torch.arange(len(channels), device=maps.device), channels] = 0
                inner = [q.program.layout.tensor_of(without, others[0])]
                inner += [one.expand(len(channels), *one.shape[1:]) if one.dim() and len(one) == 1 else one for one in others[1:]]
                found[row, channels] = q.goal(q.program.head(inner), q.every[row].expand(len(channels)))
    scale = y.abs()[:, None]
    weights = torch.where(scale > 0, (y[:, None] - found) / torch.where(scale == 0, 1, scale), 0)
    return Answer(_sum(weights, maps).relu())
