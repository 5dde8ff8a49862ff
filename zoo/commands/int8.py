"""`--dtype int8` of commands that answer pictures: the options, and the network that they ask for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zoo.commands.completion import files

DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="float32, or int8 with --calibration: quantised once, then kept. Default: float32.")
]
CalibrationOption = Annotated[
    str | None, typer.Option(metavar="DATA", autocompletion=files, help="With int8: images to calibrate and compare on, 64 or more.")
]


def check_int8(dtype: str | None, calibration: str | None, tolerance: float | None) -> None:
    """Refuse int8 without images to calibrate on, and what goes with int8 alone."""
    if dtype == "int8" and not (calibration or "").strip():
        raise typer.BadParameter("it needs --calibration DATA, 64 images or more of the kind that will be answered", param_hint="--dtype")
    for value, hint in ((calibration, "--calibration"), (tolerance, "--tolerance")):
        if value is not None and dtype != "int8":
            raise typer.BadParameter("it goes with --dtype int8", param_hint=hint)


def check_options(dtype: str | None, calibration: str | None, tolerance: float | None) -> None:
    """Refuse another type than the two, and options that don't go together; before a network is fetched for them."""
    if dtype not in (None, "float32", "int8"):
        raise typer.BadParameter(f"float32 or int8, not {dtype!r}", param_hint="--dtype")
    check_int8(dtype, calibration, tolerance)
    if calibration is not None:
        from zoo.images import open_source

        open_source(calibration)


def narrowed(network: Any, dtype: str | None, calibration: str | None, tolerance: Any, wider: str, *, quiet: bool) -> Any:
    """Return what answers: the network itself, or it in int8, whose certificate is printed.

    Args:
        network: on its device.
        dtype: None, "float32" or "int8".
        calibration: images, see `fast`.
        tolerance: as `fast` takes it.
        wider: how `--tolerance` has to change for more to pass, "a larger number" or "a smaller one".
        quiet: without progress and certificate.
    """
    if dtype != "int8":
        return network
    from zoo.commands.console import err
    from zoo.kernels import fast

    device = next(network.parameters()).device
    try:
        quick = fast(network, device, "int8", calibration=calibration, tolerance=tolerance, progress=not quiet)
    except ValueError as error:
        if not (found := getattr(error, "found", "")):  # of `NotCertified`, whose message speaks Python
            raise
        todo = f"give --calibration more images, --tolerance {wider}, or leave --dtype out"
        raise typer.BadParameter(f"{found}; {todo}", param_hint="--dtype") from None
    if not quiet:
        for proof in quick.proofs:
            err.print(str(proof), style="dim", soft_wrap=True, markup=False)
    return quick
