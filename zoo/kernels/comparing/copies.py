"""Copies of a network, on a device and in a dtype: the network itself is neither moved nor changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.backends import cudnn
from torch.backends.cudnn import rnn
from torch.utils import _pytree as pytree


def own_dtype(network: nn.Module) -> torch.dtype:
    """Return the floating dtype of a network's parameters; float32 where it has none."""
    return next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)


def in_own_dtype(network: nn.Module, values: Any) -> Any:
    """Give floating-point tensors, in any structure, the dtype of a network's parameters."""
    own = own_dtype(network)
    return pytree.tree_map(lambda leaf: leaf.to(own) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, values)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in any structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def groups(network: nn.Module) -> dict[int, Any]:
    """Return the groups of processes that modules hold by their ids, as a memo for `copy.deepcopy`, which can't copy them."""
    if not dist.is_available():
        return {}
    return {id(v): v for module in network.modules() for v in module.__dict__.values() if isinstance(v, dist.ProcessGroup)}


def with_tensors(network: nn.Module, made: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy the modules, with what is `made` of each parameter and buffer in its place; parameters ask for no gradients."""
    memo: dict[int, Any] = {}
    for tensor in (*network.parameters(), *network.buffers()):
        new = made(tensor.detach())
        memo[id(tensor)] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(network, memo)


def compacted(network: nn.Module) -> nn.Module:
    """Put the weights of each recurrent layer into one piece of memory: cuDNN warns else, and copies them at each call."""
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
            weights: Any = module._flat_weights
            left_out = all(isinstance(w, Tensor) and w.is_cuda and w.dtype == torch.bfloat16 for w in weights)
            if left_out and fits(weights):
                how = rnn.get_cudnn_mode(module.mode), module.hidden_size, module.proj_size, module.num_layers, module.batch_first
                count = (4 if module.bias else 2) + (module.proj_size > 0)
                with torch.no_grad():
                    torch.ops.aten._cudnn_rnn_flatten_weight(weights, count, module.input_size, *how, bool(module.bidirectional))
    return network


def fits(weights: Sequence[Tensor]) -> bool:
    """Tell whether cuDNN is there to take a layer's weights on a GPU in one piece: none of them is tied to another."""
    return cudnn.enabled and cudnn.is_available() and len({w.data_ptr() for w in weights}) == len(weights)


def on_device(network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of the network in eval mode on a device, without a second copy on the way."""
    twin = with_tensors(network, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True))
    if any(isinstance(module, torch.jit.ScriptModule) for module in twin.modules()):  # whose copies don't heed the memo
        twin = twin.to(device, dtype)
    return compacted(twin.eval())


def channels_last(module: nn.Module) -> nn.Module:
    """Put the weights of convolutions into channels_last memory."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            part.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return module
