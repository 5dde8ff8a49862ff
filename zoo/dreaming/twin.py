"""A twin of a network for gradients of its input: the same numbers, no gradients of weights, and nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from zoo.networks.layers import Conv2dEven, Conv2dSame

HALVES = (torch.float16, torch.bfloat16)
CONVOLUTIONS = (nn.Conv2d, Conv2dEven, Conv2dSame)
"""Which multiply by their weights as they are; others compute them first."""
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def twin(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a module of the same classes in eval mode, whose parameters share memory with the network's and want no gradient.

    Hooks of the forward pass run, for some compute weights; those of the backward pass don't. Half precision becomes float32, where
    gradients of a picture are exact enough, and what overwrites its input gets an output of its own.

    Raises:
        TypeError: it is a script of TorchScript, whose layers can't be reached.
        ValueError: it has no numbers: it is on the meta device.
    """
    return _module(network, device, {})


def _module(module: nn.Module, device: torch.device, known: dict[int, Any]) -> Any:
    if id(module) in known:  # one that is used twice stays one
        return known[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{type(module).__name__} is TorchScript, whose layers can't be reached: give the network that it was made of")
    made = known[id(module)] = module.__class__.__new__(module.__class__)
    made.__dict__ = {name: _own(value, device, known) for name, value in vars(module).items()}
    made.__dict__ |= {hooks: {} for hooks in BACKWARD_HOOKS}
    made.__dict__ |= {"training": False} | ({"inplace": False} if vars(module).get("inplace") is True else {})
    for kind in ("_parameters", "_buffers"):
        own: dict[str, Tensor | None] = vars(module)[kind]
        made.__dict__[kind] = {name: None if value is None else _tensor(value, device, known) for name, value in own.items()}
    made.__dict__["_modules"] = {name: child and _module(child, device, known) for name, child in module._modules.items()}
    return made


def _own(value: Any, device: torch.device, known: dict[int, Any]) -> Any:
    """Return what a twin has for a layer's attribute: tensors of its own, and dicts of its own, the hooks' for example."""
    if isinstance(value, Tensor):
        return _tensor(value, device, known)
    return copy.copy(value) if isinstance(value, dict | set | list) else value


def _tensor(value: Tensor, device: torch.device, known: dict[int, Any]) -> Tensor:
    if id(value) in known:
        return known[id(value)]
    if value.is_meta:
        raise ValueError("the network has no numbers: it is on the meta device; load its weights first, with trained() for example")
    still = value.clone() if value.is_inference() else value.detach()  # the former may not be read under autograd
    still = still.to(device, torch.float32 if still.dtype in HALVES else still.dtype)
    if device.type == "cuda" and still.dim() == 4:
        still = still.contiguous(memory_format=torch.channels_last)
    made = nn.Parameter(still, requires_grad=False) if isinstance(value, nn.Parameter) else still
    known[id(value)] = made
    return made


def fold(graph: fx.Graph, network: nn.Module, kept: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Put every BatchNorm of a twin's graph into the convolution before it, where nobody else reads that, `kept` nodes included.

    A layer that runs twice stays as it is.

    Returns:
        The convolution's node by that of the BatchNorm, which is gone.
    """
    layers = dict(network.named_modules())
    calls = Counter(id(layers[str(node.target)]) for node in graph.nodes if node.op == "call_module")
    folded: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        before = node.args[0] if node.args else None
        if node.op != "call_module" or not isinstance(before, fx.Node) or before.op != "call_module" or before in kept:
            continue
        norm: Any = layers[str(node.target)]
        conv: Any = layers[str(before.target)]
        plain = type(conv) in CONVOLUTIONS and type(norm) is nn.BatchNorm2d and not conv._modules and not _hooked(conv, norm)
        if not plain or len(before.users) != 1 or calls[id(conv)] + calls[id(norm)] != 2 or norm.running_mean is None:
            continue
        numbers: Any = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        parts = fuse_conv_bn_weights(conv.weight, conv.bias, *numbers)
        conv.weight, conv.bias = (nn.Parameter(part.detach(), requires_grad=False) for part in parts)
        node.replace_all_uses_with(before)
        folded[node] = before
        graph.erase_node(node)
    return folded


def _hooked(*layers: nn.Module) -> bool:
    return any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
