"""A network of the user's own, any `nn.Module`, as conversions take networks: with its shape of input, without classes or a head."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from convert.core import COUNTER
from convert.formats._torch import as_tensor
from convert.source import Source
from weights.errors import ConvertError
from zoo.networks.model import Model
from zoo.networks.published import Published

SIDES = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512, 227, 48, 40, 16, 8)
"""Sides in pixels of the images that a network is tried with whose shape of input nobody gave; most networks take the first two."""
AS = "zoo_own"


class OwnNetwork(Model):
    """A user's module with what a conversion asks of a network; its tensors, its modules and their names are the module's own.

    The two share their modules, parameters and buffers: what is assigned to one is the other's.
    """

    template: ClassVar[nn.Module]
    image_shape: ClassVar[tuple[int, ...]]
    """Of one input, without the batch: (C, H, W), or (N,) of a network that takes vectors."""
    assumed_shape: ClassVar[bool] = False
    """Whether nobody gave the shape, and a usual one is taken that the network computes with."""
    traced_on: ClassVar[str] = "meta"
    """The device on which its layers are listed: "cpu" where its own code makes tensors that can't be on "meta"."""
    classifiers = ()
    first_layer = ""

    def __init__(self) -> None:
        super().__init__()
        inner = copy.deepcopy(self.template)
        self.__dict__[AS] = inner
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = inner.__dict__[shared]
        self.in_channels, self.num_classes = self.image_shape[0], type(self).outputs

    outputs: ClassVar[int] = 0
    """Numbers that it gives for an image where these are one row, classes for example; else 0."""

    def forward(self, x: Tensor) -> Any:
        """Compute what the module computes."""
        return self.__dict__[AS](x)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter may be called as the user likes."""
        nn.Module.__setattr__(self, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        """Find a module of the user's, also where its name is one that `Model` uses itself."""
        return self.__dict__[AS].get_submodule(target) if target else self

    def train(self, mode: bool = True) -> OwnNetwork:
        """Set the mode of the module too, whose own flag is not shared."""
        super().train(mode)
        self.__dict__[AS].training = mode
        return self


def is_own(model: Any) -> bool:
    """Tell whether something is a network of the user's own: a module that is no `Model`, a class of such, or one adapted already."""
    if inspect.isclass(model):
        return issubclass(model, OwnNetwork) or (issubclass(model, nn.Module) and not issubclass(model, Published))
    return isinstance(model, nn.Module) and not isinstance(model, Published)


def own_network(
    model: nn.Module | Callable[..., nn.Module], example: Sequence[int] | Tensor | None = None, arguments: Mapping[str, Any] | None = None
) -> type[OwnNetwork]:
    """Describe a network of the user's own as a class that conversions take.

    Args:
        model: the module, which is not changed; or a class or function that makes it.
        example: the shape of one input, (C, H, W) or (N,), or a batch of one as a tensor or its shape (1, C, H, W); None tries
            usual sides, which are enough for networks that take any.
        arguments: of the class or function.

    Raises:
        ConvertError: it makes no module, or does not compute with such an input; the message says what it raised.

    Example:
        >>> from torch import nn
        >>> own_network(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()), example=(1, 64, 64)).image_shape
        (1, 64, 64)
    """
    if inspect.isclass(model) and issubclass(model, OwnNetwork):
        return model
    made = built(model, arguments)
    name = type(made).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(made).__name__)
    shape, outputs, device = _shape(made, example, name)
    facts: dict[str, Any] = {
        "template": made,
        "image_shape": shape,
        "assumed_shape": example is None,
        "outputs": outputs,
        "traced_on": device,
        "input_size": shape[-1],
        "first_layer": _first(made, shape),
        "__doc__": OwnNetwork.__doc__,
    }
    return type(name, (OwnNetwork,), facts)


def imported(place: str, arguments: Mapping[str, Any] | None = None, example: Sequence[int] | None = None) -> type[OwnNetwork]:
    """Import a network of the user's own, "mypackage.mymodule:DnCNN", from the current folder or wherever Python finds modules.

    This runs the user's code, as Python's own import does.

    Args:
        place: the module, a colon, and the class, function or module object in it.
        arguments: with which the class or function is called.
        example: the shape of one input, see `own_network`.

    Raises:
        ConvertError: it can't be imported, or is no network; the message says which.
    """
    module, _, attribute = place.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # the user's code raises whatever it stumbles over
        raise ConvertError(
            f"{place} can't be imported: {type(error).__name__}: {error}. Name a class, function or module object of your code as "
            f"mypackage.mymodule:DnCNN; Python looks in {here} first."
        ) from error
    finally:
        sys.path.remove(here)
    if inspect.isclass(found) and issubclass(found, Published):
        raise ConvertError(f"{place} is one of the zoo's networks: zoo convert --model {found.__name__} names it")
    if not callable(found):
        raise ConvertError(f"{place} is {found!r:.60}, which is no network: name a class or function that makes one")
    made: Any = found
    return own_network(made, example, arguments)


def arguments_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Read arguments of the user's constructor, "depth=17" or "widths=[16, 32]"; what is no Python literal is text.

    Raises:
        ValueError: one is not name=value.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"an argument of your network looks like depth=17, not {pair!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found[name] = {"true": True, "false": False}.get(value, value)
    return found


def shape_of(text: str) -> tuple[int, ...]:
    """Read the shape of one input, "1x64x64"; ValueError where it is none."""
    try:
        shape = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or any(side < 1 for side in shape):
        raise ValueError(f"the shape of one input looks like 1x64x64, channels first, not {text!r}")
    return shape


def built(model: Any, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a module of the user's, or build it by its class or function.

    Raises:
        ConvertError: it can't be built, or is no module.
    """
    arguments = arguments or {}
    if isinstance(model, nn.Module):
        if not arguments:
            return model
        raise ConvertError(f"this {type(model).__name__} is built already, so it takes no arguments ({', '.join(arguments)})")
    called = getattr(model, "__name__", repr(model))
    try:
        made = model(**arguments)
    except Exception as error:  # the user's code raises whatever it stumbles over
        raise ConvertError(
            f"{called}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}) raised {type(error).__name__}: {error}. Give the arguments "
            "that it needs with arguments={…}, or zoo convert --arguments NAME=VALUE."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConvertError(f"{called} made {made!r:.60}, which is no torch.nn.Module")
    return made


def by_own_names(network: nn.Module, source: Source) -> dict[str, Tensor] | None:
    """Read an open file whose names and shapes are the network's own; None where they are not, or where kernels may be turned."""
    own = network.state_dict()
    names = source.tensors.keys() | {name for name in own if name.endswith(COUNTER)}
    if source.format not in ("pytorch", "safetensors") or source.positional or names != own.keys():
        return None
    if any(tuple(stored.shape) != tuple(own[name].shape) for name, stored in source.tensors.items()):
        return None
    if any(stored.convention == "convolution" for stored in source.tensors.values()):
        return None
    held = {name: as_tensor(stored.array()).clone() for name, stored in source.tensors.items()}
    return {name: torch.zeros((), dtype=torch.int64) for name in own if name not in held} | held


def _shape(network: nn.Module, example: Sequence[int] | Tensor | None, name: str) -> tuple[tuple[int, ...], int, str]:
    """Return the shape of one input, the length of the row that the network gives for it, or 0, and where its layers can be listed."""
    if isinstance(example, Tensor):
        example = tuple(example.shape)[1:]
    if example is not None:
        shape = tuple(int(side) for side in example)
        shape = shape[1:] if len(shape) == 4 else shape
        if len(shape) not in (1, 3) or min(shape) < 1:
            raise ConvertError(f"example is the shape of one input, (C, H, W), (N,) or a batch of one, not {tuple(example)}")
        return (shape, *_tried(network, shape, name))
    first = next((m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.ConvTranspose2d)), None)
    if first is None:
        raise ConvertError(
            f"{name} has no convolution and no dense layer that tells its input: give example=(C, H, W), or zoo convert --example 1x64x64"
        )
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    error: ConvertError | None = None
    for shape in [(channels,)] if isinstance(first, nn.Linear) else [(channels, side, side) for side in SIDES]:
        try:
            return (shape, *_tried(network, shape, name))
        except ConvertError as failed:
            error = error or failed
    raise ConvertError(f"{error} Give the shape of one input: example=(C, H, W), or zoo convert --example 1x64x64.") from error


def _tried(network: nn.Module, shape: tuple[int, ...], name: str) -> tuple[int, str]:
    failed: list[Exception] = []
    for device in ("meta", "cpu"):
        twin = copy.deepcopy(network).to(device).eval()
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
        try:
            with torch.no_grad():
                made: Any = twin(torch.zeros(1, *shape, device=device, dtype=dtype))
        except Exception as error:  # the user's code raises whatever it stumbles over
            failed.append(error)
            continue
        return (int(made.shape[1]) if isinstance(made, Tensor) and made.dim() == 2 else 0), device
    error = failed[-1]
    said = f"{type(error).__name__}: {str(error).rstrip('.')}"
    raise ConvertError(f"{name} does not compute with one input of {'x'.join(map(str, shape))}: {said}.") from error


def _first(network: nn.Module, shape: tuple[int, ...]) -> str:
    """Name the convolution that reads the image: the first of as many inputs; "" where there is none."""
    return next((n for n, m in network.named_modules() if isinstance(m, nn.Conv2d) and m.in_channels == shape[0]), "")
