"""A network that answers in int8, for whoever answers with it: made once, with its certificate."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.kernels import fast


def in_int8(network: nn.Module, calibration: Any, tolerance: Any = None, *, progress: bool = True) -> tuple[Any, list[str]]:
    """Return a network in int8, on the device that it lies on, and the lines of its certificate.

    Args:
        network: what `predict` or `detect` takes.
        calibration: images to calibrate and to compare on, as `fast` takes them.
        tolerance: as of `fast`.
        progress: show it.

    Raises:
        ValueError: as `fast`.

    Example:
        >>> quick, lines = in_int8(trained(ResNet20), "photographs/")  # doctest: +SKIP
    """
    quick = fast(network, next(network.parameters()).device, "int8", calibration=calibration, tolerance=tolerance, progress=progress)
    return quick, [line for proof in quick.proofs for line in proof.lines()]
