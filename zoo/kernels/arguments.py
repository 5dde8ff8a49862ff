"""What a call of `fast` asks for: which network, where, in which dtype, and with which arguments the first plan is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import groups, own_dtype
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.trace import trace


def core(model: nn.Module) -> nn.Module:
    """Return the network inside a wrapper that only says how to run it: torch.compile's, DataParallel's, DistributedDataParallel's."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check(model: nn.Module) -> None:
    """Refuse what has no weights to compute with, or no copy.

    Raises:
        ValueError: parameters or buffers on the meta device; a module that can't be copied.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(f"{name} of {type(model).__name__} is on the meta device, without values; load its weights first")
    try:
        copy.deepcopy(model, groups(model) | {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    except Exception as error:  # whatever the part that refuses raises
        if pruned := _pruned(model):
            layer, tensor = pruned
            todo = f"layer {layer!r} is pruned and computes its {tensor} anew in each call: make that final, torch.nn.utils.prune.remove"
            raise ValueError(f"{type(model).__name__} can't be copied, which fast() has to do: {todo}(layer, {tensor!r})") from error
        raise ValueError(f"{type(model).__name__} can't be copied, which fast() has to do: {type(error).__name__}: {error}") from error


def _pruned(model: nn.Module) -> tuple[str, str] | None:
    """Return the first layer that `torch.nn.utils.prune` has pruned, and which tensor of it."""
    for name, layer in model.named_modules():
        held = {key for key, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))}
        for key in sorted(held):
            tensor = key.removesuffix("_orig")
            if key != tensor and f"{tensor}_mask" in held:
                return name, tensor
    return None


def device_of(device: torch.device | str | int | None, auto: bool = False) -> torch.device:
    """Return the device that is meant, an index with "cuda"; ValueError says what there is instead, "auto" too where that is taken."""
    words = '"cuda", "cuda:1", "cpu" or "auto"' if auto else '"cuda", "cuda:1" or "cpu"'
    if isinstance(device, torch.dtype):
        raise ValueError(f"{device} is a dtype, and stands where the device does; use fast(model, dtype={device})")
    if isinstance(device, bool):
        raise ValueError(f"no device {device}; use {words}")
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no device {device!r}; use {words}") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(f"fast runs on CUDA and CPU, got {wanted}; use {words}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f'{wanted} was asked for, and PyTorch sees no CUDA device here; leave device out, or use "cpu"')
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= count:
        raise ValueError(f"{wanted} was asked for, and PyTorch sees {count} CUDA device{'s' * (count != 1)}: cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


NARROW = ("int8", "fp8", "auto")
"""Precisions that have to be proven on a caller's images."""


def narrow_of(dtype: Any) -> str | None:
    """Return "int8", "fp8" or "auto" where one of them is meant; None of every other dtype.

    Raises:
        ValueError: it is another word.
    """
    if dtype is torch.int8:
        return "int8"
    if dtype is torch.float8_e4m3fn:
        return "fp8"
    if isinstance(dtype, str):
        if dtype not in NARROW:
            known = {"bfloat16": "torch.bfloat16", "float16": "torch.float16", "float32": "torch.float32"}
            todo = (
                f"use dtype={known[dtype]}" if dtype in known else 'the words are "int8", "fp8" and "auto", all others are dtypes of torch'
            )
            raise ValueError(f"dtype is no {dtype!r}; {todo}")
        return dtype
    return None


def dtype_of(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; ValueError where it is none of the three."""
    if dtype is None:
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f'dtype is torch.bfloat16, torch.float16 or torch.float32, or "int8", "fp8" (on a GPU) or "auto"; got {dtype!r}')
    return dtype


def example_of(
    model: nn.Module, example: Any, device: torch.device, images: int = 1, record: Callable[..., object] = trace
) -> tuple[Any, ...]:
    """Return arguments to plan first: those given, or images of the size and channels that the network was built for.

    Args:
        model: the network.
        example: a tensor, a tuple of arguments, or None.
        device: where the arguments shall lie.
        images: how many, where none are given.
        record: refuses what the network doesn't take.

    Raises:
        ValueError: the example is a shape, a word, an array, or nothing.
        Untraceable: none is given, and nothing tells what the network takes.
    """
    if example is not None:
        args = example if isinstance(example, tuple) else (example,)
        shape = isinstance(example, tuple) and len(example) > 2 and all(isinstance(size, int) for size in example)
        if shape or isinstance(example, str):
            asked = f"a tensor such as torch.randn{tuple(example)}" if shape else "a tensor such as torch.randn(1, 3, 224, 224)"
            raise ValueError(f"example is {asked}, or a tuple of the model's arguments; got {example!r:.60}")
        leaves = pytree.tree_leaves(args)
        arrays = any(hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) and not isinstance(leaf, Tensor) for leaf in leaves)
        if arrays or not leaves or not (isinstance(example, tuple) or any(isinstance(leaf, Tensor) for leaf in leaves)):
            got = f"a {type(example).__module__}.{type(example).__name__}".replace("builtins.", "")
            asked = "a tensor such as torch.randn(1, 3, 224, 224), or a tuple of the model's arguments, no arrays among them"
            raise ValueError(f"example is {asked}; got {got}")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), args)
    problem: Exception | None = None
    own = own_dtype(model)
    for shape in _shapes(model):
        image = natural_images((images, *shape[1:]), torch.device("cpu")).to(own)
        try:
            record(model, (image,), {})
        except (Untraceable, ValueError) as error:
            problem = problem or error
            if isinstance(error, Untraceable) and error.anyway:
                raise
            continue
        return (image.to(device),)
    raise Untraceable(
        f"{problem or 'no convolution of images and no linear layer tells what it takes'}; "
        "pass example=…, a tensor that it takes, if that is about the shape"
    )


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if channels is None:
        features = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
        return [] if features is None else [(1, features)]
    sizes = [224, 299, 256, 64, 32, 28]
    own = getattr(model, "input_size", None)
    configured = getattr(model, "default_cfg", None)
    if isinstance(configured, dict) and isinstance(configured.get("input_size"), tuple):
        own = configured["input_size"][-1]
    if isinstance(own, int):
        sizes.insert(0, own)
    return [(1, channels, size, size) for size in dict.fromkeys(sizes)]
