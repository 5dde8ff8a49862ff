"""What a PyTorch network is, learnt from one pass on the meta device: its layers in order, who feeds whom, what they flatten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from convert.kinds import is_dict, is_row

if TYPE_CHECKING:
    from torch import nn


UNCHANGED = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "contiguous")
"""Functions that do nothing in eval mode."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with parameters.

    Attributes:
        name: in the network.
        kind: "conv", "depthwise", "transposed", "linear", "norm" or "other".
        inputs: the layers with parameters whose values reach it without passing through another; "" is the network's input.
        groups: of a convolution.
        eps: of a norm.
        grid: of a linear layer that reads a flattened map of more than one pixel: its channels, height and width.
        direct: False of a norm between which and the layer that it reads an activation lies, or something else that computes.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    groups: int = 1
    eps: float | None = None
    grid: tuple[int, int, int] | None = None
    direct: bool = True


def modules_of(network: nn.Module) -> dict[str, nn.Module]:
    """List a network's modules by name, itself as ""."""
    return dict(network.named_modules())  # pyright: ignore[reportUnknownArgumentType]  # torch leaves the generator's type open


def layers(network: nn.Module, input_shape: Sequence[int], device: str = "meta") -> list[Layer]:
    """Run a copy of the network on the meta device, in eval mode, and list its layers in the order in which they compute.

    Args:
        network: any module; it is not changed.
        input_shape: of one image, (C, H, W), or of one vector, (N,).
        device: "cpu" for a network whose code makes tensors that can't be on "meta".

    Returns:
        A layer for each module that has parameters or buffers of its own and was called. One that is called twice is listed once.
    """
    import copy

    import torch

    twin = copy.deepcopy(network).to(device).eval()
    names = {module: name for name, module in modules_of(twin).items()}
    found: dict[str, Layer] = {}
    watch = _Watch()

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        del arguments
        watch.inside += 1

    def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        watch.inside -= 1
        name = names[module]
        fed = [t for t in arguments if isinstance(t, torch.Tensor)]
        inputs = tuple(dict.fromkeys(layer for t in fed for layer in watch.sources(t)))
        if name not in found:
            made = _layer(name, module, inputs, watch.grid(fed[0]) if fed else None)
            found[name] = replace(made, direct=made.kind != "norm" or all(watch.direct(t) for t in fed))
        if isinstance(output, torch.Tensor):
            watch.mark(output, (name,), None)
            watch.fresh.add(id(output))

    owners = [m for m in twin.modules() if any(True for _ in m.parameters(recurse=False)) or any(True for _ in m.buffers(recurse=False))]
    handles = [h for m in owners for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    image = torch.zeros(1, *input_shape, device=device, dtype=next((p.dtype for p in twin.parameters()), torch.float32))
    watch.mark(image, ("",), None)
    watch.fresh.add(id(image))
    try:
        with torch.no_grad(), watch.mode():
            twin(image)
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def _layer(name: str, module: Any, inputs: tuple[str, ...], grid: tuple[int, int, int] | None) -> Layer:
    from torch import nn

    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return Layer(name, "transposed", inputs, module.groups)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        depthwise = module.groups > 1 and module.groups == module.in_channels
        return Layer(name, "depthwise" if depthwise else "conv", inputs, module.groups)
    if isinstance(module, nn.Linear):
        return Layer(name, "linear", inputs, grid=grid if grid and grid[0] * grid[1] * grid[2] == module.in_features else None)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]  # the class of all BatchNorms has no public name
        return Layer(name, "norm", inputs, eps=module.eps)
    return Layer(name, "other", inputs)


class _Watch:
    """Follow tensors through functions: which layers made them, and which map they are the flattened form of."""

    def __init__(self) -> None:
        self.inside = 0
        self.marks: dict[int, tuple[Any, tuple[str, ...], tuple[int, int, int] | None]] = {}
        self.fresh = set[int]()
        """Outputs of layers, which no function has changed; all are kept in `marks`."""

    def mark(self, tensor: Any, layers: tuple[str, ...], grid: tuple[int, int, int] | None) -> None:
        self.fresh.discard(id(tensor))
        self.marks[id(tensor)] = (tensor, layers, grid)  # the tensor is kept, so that its id stays its own

    def sources(self, tensor: Any) -> tuple[str, ...]:
        return self.marks[id(tensor)][1] if id(tensor) in self.marks else ()

    def direct(self, tensor: Any) -> bool:
        return id(tensor) in self.fresh

    def grid(self, tensor: Any) -> tuple[int, int, int] | None:
        return self.marks[id(tensor)][2] if id(tensor) in self.marks else None

    def mode(self) -> Any:
        from torch import Tensor
        from torch.overrides import TorchFunctionMode

        watch = self

        class Follow(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                if watch.inside == 0:
                    fed = [t for t in _flat((args, kwargs or {})) if isinstance(t, Tensor)]
                    same = getattr(function, "__name__", "") in UNCHANGED and bool(fed) and watch.direct(fed[0])
                    made = tuple(dict.fromkeys(layer for t in fed for layer in watch.sources(t)))
                    for out in _flat(result):
                        if isinstance(out, Tensor):
                            watch.mark(out, made, _flattened(fed[0], out, watch) if fed else None)
                            watch.fresh.update([id(out)] if same else ())
                return result

        return Follow()


def _flattened(before: Any, after: Any, watch: _Watch) -> tuple[int, int, int] | None:
    if before.dim() == 4 and after.dim() == 2 and before.shape[1:].numel() == after.shape[1] and before.shape[2] * before.shape[3] > 1:
        return tuple(before.shape[1:])
    return watch.grid(before) if before.shape == after.shape else None


def _flat(values: Any) -> list[Any]:
    if is_row(values):
        return [leaf for value in values for leaf in _flat(value)]
    if is_dict(values):
        return [leaf for value in values.values() for leaf in _flat(value)]
    return [values]
