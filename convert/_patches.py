"""Changes to a PyTorch network that last as long as a context: its layers' attributes, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from convert import _windows

if TYPE_CHECKING:
    from torch import Tensor

RELUS = ("relu", "relu_", "relu6", "hardtanh", "leaky_relu", "silu", "hardswish", "elu", "gelu")


@contextmanager
def attributes(changes: list[tuple[Any, str, Any]]) -> Generator[None]:
    """Give modules other values of some attributes: (module, name, value)."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextmanager
def padded(convolutions: list[Any], pads: str, pools: bool = True) -> Generator[None]:
    """Pad as `pads` says, SAME or half the kernel on each side, whatever the layers say themselves."""
    from torch.nn import functional as F

    def convolve(module: Any, x: Tensor) -> Tensor:
        top, left, bottom, right = _around(pads, (x.shape[2], x.shape[3]), module.kernel_size, module.stride, module.dilation)
        padded = F.pad(x, (left, right, top, bottom))
        return F.conv2d(padded, module.weight, module.bias, module.stride, 0, module.dilation, module.groups)

    changed = [module for module in convolutions if max(module.kernel_size) > 1 and any(_amount(module))]
    for module in changed:
        module.forward = partial(convolve, module)
    try:
        with functions(_same_pools) if pools else ExitStack():
            yield
    finally:
        for module in changed:
            del module.forward


def _amount(module: Any) -> tuple[int, ...]:
    """Tell how much a convolution pads; one of a class of its own may pad by itself."""
    from torch import nn

    return tuple(module.padding) if type(module) is nn.Conv2d and not isinstance(module.padding, str) else (1,)


def _around(pads: str, size: _windows.Pair, kernel: _windows.Pair, stride: _windows.Pair, dilation: _windows.Pair) -> _windows.Pads:
    if pads == "symmetric":
        return kernel[0] // 2, kernel[1] // 2, kernel[0] // 2, kernel[1] // 2
    return _windows.resolve(pads, size, kernel, stride, dilation)


Intercept = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


def functions(intercept: Intercept) -> Any:
    """Make a mode in which `intercept` sees every function that a network calls: (its name, it, arguments) to the result."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return intercept(getattr(function, "__name__", ""), function, tuple(args), dict(kwargs or {}))

    return Mode()


_POOL = ("input", "kernel_size", "stride", "padding")
_ARGUMENTS = {"max_pool2d": (*_POOL, "dilation", "ceil_mode", "return_indices"), "avg_pool2d": (*_POOL, "ceil_mode", "count_include_pad")}


def _pool(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Name all arguments of a pool; None if it is none."""
    return {**dict(zip(_ARGUMENTS[name], args, strict=False)), **kwargs} if name in _ARGUMENTS else None


def toggled(argument: str, usual: bool, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Toggle an argument of every pool that has it: ceil_mode, or count_include_pad."""
    pool = _pool(name, args, kwargs)
    if pool is None or argument not in _ARGUMENTS[name]:
        return function(*args, **kwargs)
    return function(**{**pool, argument: not pool.get(argument, usual)})


def _same_pools(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.nn import functional as F

    pool = _pool(name, args, kwargs)
    if pool is None or name != "max_pool2d" or not any(_windows.pair(pool.get("padding"), 0)):
        return function(*args, **kwargs)
    x: Any = pool["input"]
    kernel = _windows.pair(pool["kernel_size"])
    stride = _windows.pair(pool.get("stride") or kernel)
    top, left, bottom, right = _windows.resolve("same_upper", (x.shape[2], x.shape[3]), kernel, stride)
    return F.max_pool2d(F.pad(x, (left, right, top, bottom), value=-float("inf")), kernel, stride)


def reversed_concat(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate channels in reverse order."""
    if name in ("cat", "concat", "concatenate") and args and (kwargs.get("dim", args[1] if len(args) > 1 else 0) in (1, -3)):
        maps, *rest = list(args)
        return function(list(maps)[::-1], *rest, **kwargs)
    return function(*args, **kwargs)


def activated(other: Callable[[Tensor], Tensor], name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put one function in the place of every activation."""
    return other(args[0]) if name in RELUS and args else function(*args, **kwargs)


def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    """List the activations that networks have, by name."""
    from torch.nn import functional as F

    leaky = {f"leaky ReLU of slope {slope}": partial(F.leaky_relu, negative_slope=slope) for slope in (0.01, 0.1, 0.2, 0.3)}
    return {"ReLU": F.relu, "ReLU6": F.relu6, **leaky, "SiLU": F.silu, "hard-swish": F.hardswish, "ELU": F.elu, "GELU": F.gelu}
