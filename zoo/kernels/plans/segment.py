"""An island of operators, run by PyTorch's compiler: traced on the first tensors that come, compiled once for all islands alike."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.compilation.inductor import function_compiled
from zoo.kernels.errors import first_line
from zoo.kernels.passes.aten import run_aten
from zoo.kernels.passes.graph import Node
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.steps import ATEN, Candidate, Setting

Run = Callable[[Sequence[Tensor]], Any]
_log = logging.getLogger("zoo.kernels")
_compiled: dict[Any, Run | None] = {}
"""What was compiled in this process; None where it can't be."""
_lock = threading.RLock()


class Segment:
    """One island at work.

    Args:
        node: the island.
        setting: device and dtype.
        maps: its results that kernels read, which are laid out in channels_last memory.
        compiled: whether the compiler runs it, or PyTorch operator by operator.
    """

    def __init__(self, node: Node, setting: Setting, maps: set[Node], compiled: bool) -> None:
        self.node, self.setting, self.compiled = node, setting, compiled
        self.body, self.results, self.given = node.attrs["body"], node.attrs["results"], node.attrs["given"]
        self.maps = [result in maps for result in self.results]
        self._bound = {step: bind(step, Candidate(ATEN), setting) for step in self.body if step.op == "pointwise"}
        self._run: dict[Any, Run | None] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Compute the one result, or a tuple of them."""
        if self.compiled:
            form = tuple((tuple(x.shape), x.stride(), x.dtype) for x in inputs)
            if form not in self._run:
                self._run[form] = self._made(form, inputs)
            if (run := self._run[form]) is not None:
                found = run(inputs)
                return found[0] if len(self.results) == 1 else tuple(found)
        found = self.plainly(*inputs)
        return found[0] if len(self.results) == 1 else found

    def plainly(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the results one operator after the other; this is what is traced, too."""
        values: dict[Node, Any] = dict(zip(self.given, inputs, strict=True))
        for step in self.body:
            values[step] = self._step(step, [values[source] for source in step.inputs])
        return tuple(
            _as_map(values[result]) if laid and values[result].dim() == 4 else values[result]
            for result, laid in zip(self.results, self.maps, strict=True)
        )

    def _step(self, step: Node, inputs: list[Any]) -> Any:
        if step in self._bound:
            return self._bound[step](inputs, None)
        if step.op == "cat":
            return torch.cat(inputs, 1)
        if step.op == "view":
            return inputs[0].reshape(step.attrs["shape"])
        value = inputs[0][step.attrs["index"]] if step.op == "item" else run_aten(step, inputs, self.setting.device)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != self.setting.dtype:
            return value.to(self.setting.dtype)
        return value

    def _made(self, form: Any, inputs: Sequence[Tensor]) -> Run | None:
        """Return what was compiled for an island like this one, or compile it; None where that fails."""
        numbers = {node: i for i, node in enumerate((*self.given, *self.body))}
        steps = tuple((*_said(step, self.setting), *(numbers[source] for source in step.inputs)) for step in self.body)
        key = (steps, tuple(numbers[result] for result in self.results), tuple(self.maps), form, str(self.setting))
        with _lock:
            if key not in _compiled:
                try:
                    _compiled[key] = self._compile(inputs)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # whatever the compiler stumbles over: PyTorch's operators compute the same
                    _log.debug("%s: the compiler failed: %s: %s", self.node, type(error).__name__, first_line(error))
                    _compiled[key] = None
            return _compiled[key]

    def _compile(self, inputs: Sequence[Tensor]) -> Run:
        made = function_compiled(lambda *given: list(self.plainly(*given)), inputs)
        return lambda given: made(*given)


def _as_map(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def _said(step: Node, setting: Setting) -> tuple[str, ...]:
    """Write a step down with all arguments but the steps that it reads."""
    attrs = {name: str(value) for name, value in sorted(step.attrs.items()) if name != "source"}
    return (step.op, str(attrs), str(step.roles), str(step.shape), str(step.dtype), str(setting.dtype))
