"""A network as an ONNX graph whose weights stay where they are: what OpenVINO and onnxruntime both read."""

from __future__ import annotations

import io
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import with_tensors
from zoo.kernels.passes.attention import of_itself

OPSET = 17
ALONE = 8192
"""Numbers that NumPy's products take on one thread; of more than 10,000 its library starts others, which wait busily."""
_EXPORTING = threading.Lock()
"""The exporter, and the filters of warnings, are the whole process's."""


class EngineError(RuntimeError):
    """An engine can't run this network; the message says why."""


@dataclass(frozen=True)
class Exported:
    """An ONNX model without its weights.

    Attributes:
        graph: the serialised model; every tensor of `tensors` is an input of it.
        tensors: float32 or integer, by the names that the graph gives them; they share memory with the network's where the types agree.
        inputs: the names of the example's tensors, in their order.
        outputs: the names of the output's tensors, in the order in which pytree flattens them.
    """

    graph: bytes
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """What a network returns: the structure, and each tensor's type.

    Attributes:
        spec: pytree's.
        leaves: per leaf its type if it is a tensor, else the constant itself.
    """

    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, output: Any) -> Form:
        """Read the form off an output.

        Raises:
            EngineError: it holds something that could depend on the input and is no tensor.
        """
        leaves, spec = pytree.tree_flatten(output)
        for leaf in leaves:
            if not (leaf is None or isinstance(leaf, Tensor | bool | int | str)):
                raise EngineError(f"the network returns a {type(leaf).__name__}, which an exported graph can't")
        return cls(spec, tuple(leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @property
    def count(self) -> int:
        """How many of the leaves are tensors."""
        return sum(isinstance(leaf, torch.dtype) for leaf in self.leaves)

    def tensors(self, arrays: list[Any]) -> list[Tensor]:
        """Return what an engine computed, in the types that the network itself returns; on the arrays' own memory where these agree."""
        types = [leaf for leaf in self.leaves if isinstance(leaf, torch.dtype)]
        made = map(torch.from_numpy, arrays)
        return [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor, dtype in zip(made, types, strict=True)]

    def build(self, tensors: list[Tensor]) -> Any:
        """Put tensors, in the order of the leaves, into the structure, in the types that the network itself returns."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given).to(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in self.leaves], self.spec)


def export(network: nn.Module, example: tuple[Tensor, ...], form: Form) -> Exported:
    """Trace a network for the example's shapes, and no others.

    Args:
        network: in eval mode, on the CPU; not changed.
        example: its inputs.
        form: of what it returns.

    Returns:
        The graph in float32, whatever the network's type is.

    Raises:
        EngineError: PyTorch can't export the network, or what it computes depends on its input's values.
    """
    twin = recast(network, torch.float32)
    inputs = tuple(f"input_{index}" for index in range(len(example)))
    held, wrapped = io.BytesIO(), _Flat(twin)
    outputs = tuple(f"output_{index}" for index in range(form.count))
    with _EXPORTING, _silent(), warnings.catch_warnings(record=True) as warned, torch.no_grad(), _StaticShapes():
        # Recorded, not raised: an exception can't pass through the tracer. The exporter also speaks of its age, and of constants that
        # static shapes make harmless.
        warnings.simplefilter("always")
        try:
            torch.onnx.export(
                wrapped,
                tuple(_float(each) for each in example),
                held,  # pyright: ignore[reportArgumentType]  # it takes files, and says only that it takes paths
                dynamo=False,  # the newer exporter takes twenty times as long
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,  # what it makes of weights would be in no file; engines fold themselves
                export_params=False,  # else they are copied, twice, and may not exceed 2 GiB
            )
        except Exception as error:  # an exporter fails in any way whatever
            raise EngineError(f"PyTorch can't export it to ONNX: {first_line(error)}") from error
    for warning in warned:
        # The graph would take for ever the branch that the example took.
        if issubclass(warning.category, TracerWarning) and str(warning.message).startswith("Converting a tensor to a"):
            raise EngineError("what it computes depends on its input's values: it converts a tensor to a Python value")
    named = dict(wrapped.named_parameters(remove_duplicate=False)) | dict(wrapped.named_buffers(remove_duplicate=False))
    return Exported(held.getvalue(), {name: tensor.detach() for name, tensor in named.items()}, inputs, outputs)


def recast(network: nn.Module, dtype: torch.dtype, change: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Copy the modules, with floating-point tensors in another type; a tensor that has it already is shared, not copied.

    Args:
        network: not changed, and no tensor of its copy may be changed in place.
        dtype: of parameters and buffers.
        change: what else to do to each floating-point tensor, such as another memory format.

    Returns:
        The copy, whose parameters ask for no gradients.
    """
    change = change or (lambda tensor: tensor)
    return with_tensors(network, lambda tensor: change(tensor.to(dtype)) if tensor.is_floating_point() else tensor)


def as_array(tensor: Tensor) -> Any:
    """Return an input as the contiguous NumPy array that an engine reads; without a copy where it is that already.

    NumPy copies on this thread alone. PyTorch would wake its threads, and they spin for milliseconds, beside the engine's own.
    """
    if tensor.dtype is torch.float32 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor.numpy()
    return np.asarray(_float(tensor.detach()).numpy(), order="C")


def finite(tensor: Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity, by its sum, which either would show; a sum that overflows counts as one.

    NumPy adds on this thread alone, see `as_array`; only bfloat16, which it lacks, is widened by PyTorch first. Of few numbers, as scores
    are, it is the sum of their squares, which asks for no guard against warnings.
    """
    if not tensor.is_floating_point():
        return True
    held = tensor.detach()
    array = (held.float() if held.dtype is torch.bfloat16 else held).numpy()
    if array.size <= ALONE and array.dtype != np.float16 and math.isfinite(np.vdot(array, array)):
        return True  # else it is looked at again, for squares overflow sooner
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum(dtype=np.float64 if array.dtype == np.float64 else np.float32)))


def within(tensor: Tensor, most: float) -> bool:
    """Tell whether all numbers of a tensor lie between -most and most; NaN does not."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    held = tensor.detach()
    array = (held.float() if held.dtype is torch.bfloat16 else held).numpy()
    return float(array.max()) <= most and float(array.min()) >= -most  # not in float16, in which 1e6 is infinite


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def first_line(error: BaseException) -> str:
    """Say in one line what went wrong."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from ")]  # a C++ library begins with where in its source
    return said[0][:300] if said else repr(error)[:300]


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the exporter from printing graphs that fail to stdout: it turns its log on, and leaves it on for the whole process."""
    torch._C._jit_set_onnx_log_enabled(False)
    with mock.patch.object(torch._C, "_jit_set_onnx_log_enabled"):
        yield


class _Flat(nn.Module):
    """A network that returns the tensors of its output, and no structure."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(self.network(*inputs))
        # An output that is an input, or that is returned twice, would have two names.
        return tuple(torch.clone(leaf) for leaf in leaves if isinstance(leaf, Tensor))


class _StaticShapes(TorchFunctionMode):
    """Make sizes plain numbers while PyTorch traces, and adaptive pools something that ONNX can say.

    Traced sizes are tensors: a comparison of them would look like a branch on a value, and arithmetic on them would stay in the graph.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.adaptive_avg_pool2d:
            return self._pool(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # which compares shapes where this mode doesn't see it
            with self:
                found = of_itself(F.scaled_dot_product_attention, *args, **kwargs)
            return function(*args, **kwargs) if found is None else found
        if function == _SHAPE or function is Tensor.size:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = function(*args, **kwargs)
                return torch.Size(map(int, found)) if isinstance(found, tuple) else int(found)
        return function(*args, **kwargs)

    @staticmethod
    def _pool(input: Tensor, output_size: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            height, width = (int(size) for size in input.shape[-2:])
        wanted = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
        rows, columns = (own if size is None else int(size) for size, own in zip(wanted, (height, width), strict=True))
        if (height, width) == (rows, columns):
            return input
        if height % rows == 0 and width % columns == 0:
            return F.adaptive_avg_pool2d(input, (rows, columns))
        # ONNX has no pool whose windows differ in size; a mean over windows is a matrix, whatever their sizes are.
        down, across = (F.adaptive_avg_pool1d(torch.eye(side), count) for side, count in ((height, rows), (width, columns)))
        return down.T @ (input @ across)


_SHAPE = Tensor.shape.__get__  # pyright: ignore[reportAttributeAccessIssue]
