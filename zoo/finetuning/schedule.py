"""What learns how fast: groups of parameters, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from zoo.finetuning.settings import Settings
from zoo.networks.model import Model


def layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of a network in its order: blocks as wholes, other Sequentials and what holds a row of blocks piece by piece.

    Every parameter belongs to one of them. A piece without a weight matrix, a norm, goes with the layer before it, so it is no layer
    of its own here; `parameter_groups` gives it that layer's rate.
    """
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if not any(True for _ in child.parameters()):
                continue
            weights = sum(p.dim() > 1 for p in child.parameters())
            if weights > 1 and (isinstance(child, nn.Sequential | nn.ModuleList) or any(map(_row_of_blocks, child.children()))):
                walk(child)
            else:
                found.append(child)

    walk(model)
    return found


def _row_of_blocks(module: nn.Module) -> bool:
    """Tell whether a module is three or more blocks of one kind, as in a transformer's encoder."""
    kinds = [type(child) for child in module.children() if not type(child).__module__.startswith("torch.")]
    return isinstance(module, nn.Sequential | nn.ModuleList) and len(kinds) > 2 and len(set(kinds)) == 1


def depths(model: nn.Module) -> dict[str, int]:
    """Return for each parameter's name how many layers lie between its own and the output: 0 for the classifier's."""
    names = {id(module): name for name, module in model.named_modules()}
    place: dict[str, int] = {}
    number = -1
    for layer in layers(model):
        parameters = [f"{names[id(layer)]}.{name}" for name, _ in layer.named_parameters()]
        number += any(p.dim() > 1 for p in layer.parameters()) or number < 0
        place |= dict.fromkeys(parameters, number)
    for name, _ in model.named_parameters():
        place.setdefault(name, 0)  # the network's own parameters, in no layer
    return {name: max(number, 0) - at for name, at in place.items()}


def parameter_groups(model: Model, settings: Settings, head_only: bool) -> list[dict[str, Any]]:
    """Divide a network's parameters by their weight decay and by the factor of their learning rate.

    Args:
        model: the network; what doesn't learn is left out.
        settings: weight decay and layer decay.
        head_only: only the classifiers learn.

    Returns:
        Groups for an optimiser, with `scale`, the factor of the group's rate.
    """
    heads = tuple(f"{name}." for name in model.classifiers)
    far = depths(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if head_only and not name.startswith(heads):
            continue
        decay = settings.decay if parameter.dim() > 1 else 0.0
        scale = 1.0 if head_only else settings.layer_decay ** far[name]
        groups.setdefault((decay, scale), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "scale": scale} for (decay, scale), members in groups.items()]


def make_optimizer(model: Model, settings: Settings, head_only: bool) -> torch.optim.Optimizer:
    """Make the optimiser of a phase."""
    groups = parameter_groups(model, settings, head_only)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True)


def rate_at(step: int, start: int, stop: int, settings: Settings) -> float:
    """Return the factor of the highest rate at a step of the phase `start`..`stop`: a linear rise, then a cosine.

    Source: Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983, equation 5, without restarts.
    """
    done, total = step - start, stop - start
    rise = round(settings.warmup * total)
    if done < rise:
        return (done + 1) / (rise + 1)
    share = (done - rise) / max(1, total - rise)
    return settings.final_lr + (1 - settings.final_lr) * (1 + math.cos(math.pi * share)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def freeze(model: Model, head_only: bool) -> None:
    """Say what gets gradients: the classifiers, or everything."""
    heads = tuple(f"{name}." for name in model.classifiers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not head_only or name.startswith(heads))


def training_mode(model: nn.Module, still_norms: bool) -> None:
    """Put a network into train mode, BatchNorm into eval mode where its statistics shall stay."""
    model.train()
    if still_norms:
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()
