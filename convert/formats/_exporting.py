"""What the formats share that hold a whole computation: networks are exported to them, and run before they are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from convert import execute
from convert.source import Convention, Source
from weights.errors import ConvertError

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("convert")

TOLERANCE = 1e-4
"""Largest relative difference between what a file computes and what PyTorch does, in float32."""


def refuse(path: Path, what: str, convention: Convention) -> NoReturn:
    """Refuse to write parts: they say what the layers are, not how they are joined.

    Args:
        path: the file.
        what: the format, "ONNX".
        convention: that was asked for.

    Raises:
        ConvertError: always; `export` of the same format writes a network.
    """
    if convention == "convolution":
        raise ConvertError(f"{path}: {what} computes cross-correlation, whatever is asked; leave the kernel convention out")
    raise ConvertError(f"{path}: {what} holds the whole computation; export(network, path, input_shape=...) writes it")


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Tell the largest difference, by the largest number that is expected; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.abs(actual - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def judged(
    path: Path,
    by: str,
    made: np.ndarray,
    network: nn.Module,
    example: Any,
    read: Callable[[Path], Source],
    *,
    written: nn.Module | None = None,
    prepared: bool = True,
) -> float:
    """Compare what a file computes with what the network does.

    Where float32 itself can't decide, since rounding moves the network's own outputs, the file is executed in float64 beside the network.

    Args:
        path: the file.
        by: what ran it, "LiteRT 2.3".
        made: its outputs, (B, …).
        network: what was written; in float32 and eval mode.
        example: its images.
        read: the format's reader.
        written: the network with the very numbers of the file, where the file has others for the same function.
        prepared: whether the file takes the same images as the network.

    Returns:
        The largest relative difference in float32.

    Raises:
        ConvertError: it computes something else.
    """
    expected = answered(path, network, example).numpy()
    difference = relative(made, expected)
    exact = network if written is None else written
    if not difference < TOLERANCE and not (prepared and rounding_explains(path, exact, example[:1], expected[:1], read)):
        raise ConvertError(f"{path}: {by} computes other outputs than PyTorch, by {difference:.2g} of the largest: nothing to rely on")
    return difference


def answered(path: Path, network: nn.Module, example: Any) -> Any:
    """Return the tensor that a network answers.

    Raises:
        ConvertError: it answers something else, which no file can be compared with.
    """
    import torch

    with torch.inference_mode():
        answer = network(example)
    if not isinstance(answer, torch.Tensor):
        raise ConvertError(
            f"{path}: the network answers a {type(answer).__name__}, and one tensor can be written and compared; wrap it in a module that "
            "returns one"
        )
    return answer


def rounding_explains(path: Path, network: nn.Module, image: Any, expected: np.ndarray, read: Callable[[Path], Source]) -> bool:
    """Tell whether float32's own rounding explains a difference: then PyTorch has it too, and in float64 there is none.

    Args:
        path: the file.
        network: with the file's numbers.
        image: one, as the file takes it.
        expected: what PyTorch computes of it in float32.
        read: the format's reader.
    """
    import torch

    with torch.inference_mode():
        precise = network.double()(image.double()).numpy()
    network.float()
    rounding = relative(expected, precise)
    with read(path) as source:
        if rounding < TOLERANCE / 10 or source.graph is None or source.graph.unknown:
            return False
        (again,) = execute.run(source, image.numpy()).values()
    log.warning("%s: rounding to float32 moves these outputs by %.2g of the largest, in PyTorch too", path, rounding)
    return relative(again.reshape(precise.shape) if again.size == precise.size else again, precise) < max(TOLERANCE, rounding / 100)
