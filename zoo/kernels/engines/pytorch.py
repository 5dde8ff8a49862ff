"""PyTorch itself, with BatchNorm folded into the convolutions and maps in channels_last: for where no engine is installed or able."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zoo.kernels.compilation.inductor import function_compiled
from zoo.kernels.engines.export import Form, recast

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ABOUT = (int, torch.Size, torch.dtype, torch.device, torch.layout)
"""What a function returns that asks about a tensor and does not read it."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in when `dtype` is asked for: float32 where PyTorch would only imitate it, slowly."""
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(dtype)
    return dtype if native is None or (torch.backends.mkldnn.is_available() and native()) else torch.float32


def build(network: nn.Module, example: tuple[Tensor, ...], form: Form, dtype: torch.dtype, compiler: bool = False) -> Callable[..., Any]:
    """Fold, and lay the weights out for channels_last.

    Args:
        network: in eval mode; not changed. Weights that need no other layout or type are shared with it.
        example: inputs to follow through the network.
        form: of what the network returns.
        dtype: to compute in; see `precision`.
        compiler: let PyTorch's compiler make it faster, which takes about half a minute and a C++ compiler.

    Returns:
        What takes the network's inputs and returns its output. Folding is done in float32, whatever `dtype` is.

    Raises:
        Exception: whatever PyTorch's compiler stumbles over.
    """
    twin = recast(fold(network, example), dtype, _channels_last)

    def answers(*given: Tensor) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(twin(*given)) if isinstance(leaf, Tensor)]

    def own(tensor: Tensor) -> Tensor:
        made = _channels_last(_cast(tensor, dtype))
        made = made.contiguous() if compiler and made.dim() != 4 else made  # what is compiled is for one layout
        return made.clone() if made is tensor else made  # the network may write into it, and hand it on

    run: Callable[..., Any] = function_compiled(answers, tuple(map(own, example))) if compiler else answers

    def call(*given: Tensor) -> Any:
        with torch.no_grad():
            return form.build(list(run(*map(own, given))))

    return call


def fold(network: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    """Fold each BatchNorm into the convolution before it, where nothing else reads that convolution.

    What reads what is seen by running the network, so that any network will do; a branch that the example does not take stays unfolded.

    Returns:
        A copy in float32, which shares the weights that are float32 already and not folded.
    """
    twin = recast(network, torch.float32)
    for first, second in _pairs(twin, tuple(_cast(each, torch.float32) for each in example)):
        convolution, norm = twin.get_submodule(first), twin.get_submodule(second)
        twin.set_submodule(first, fuse_conv_bn_eval(convolution, norm))  # pyright: ignore[reportArgumentType]
        twin.set_submodule(second, nn.Identity())
    return twin


def _pairs(network: nn.Module, example: tuple[Tensor, ...]) -> list[tuple[str, str]]:
    """Run the network, and list the convolutions that one BatchNorm reads and nobody else, each called once."""
    calls: dict[str, int] = {}
    norm_of: dict[str, str] = {}
    uses: dict[str, int] = {}
    hooks = []

    class Uses(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if type(found) not in ABOUT:
                for each in pytree.tree_leaves((args, kwargs)):
                    if maker := getattr(each, "_made_by", None):
                        uses[maker] = uses.get(maker, 0) + 1
            return found

    def made(name: str) -> Any:
        def note(module: nn.Module, given: Any, output: Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1
            output._made_by = name  # type: ignore[attr-defined]  # an id may be used again, once a tensor is gone

        return note

    def read(name: str) -> Any:
        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            if given and (maker := getattr(given[0], "_made_by", None)):
                norm_of[maker] = name

        return note

    for name, module in network.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            continue
        if type(module) in CONVOLUTIONS:
            hooks.append(module.register_forward_hook(made(name)))
        elif type(module) in NORMS and not module.training and module.running_mean is not None:
            hooks.append(module.register_forward_pre_hook(read(name)))
    try:
        with torch.no_grad(), Uses():
            output = network(*example)
    finally:
        for hook in hooks:
            hook.remove()
    for leaf in pytree.tree_leaves(output):
        if maker := getattr(leaf, "_made_by", None):
            uses[maker] = uses.get(maker, 0) + 1
    return [(maker, norm) for maker, norm in norm_of.items() if calls[maker] == calls[norm] == uses[maker] == 1]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
