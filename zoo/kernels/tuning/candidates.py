"""Which kernels could compute a step, with which launch parameters, the most promising first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.kernels import ops
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.kinds import is_depthwise
from zoo.kernels.tuning.binding import named
from zoo.kernels.tuning.steps import FOREIGN, Candidate, Setting, arguments, op_names

OTHERS = ""
"""In limits the ops that are not named."""


EFFORT = 200
"""What `effort` of a kernel "quick" puts up with, a few seconds of compiling: ten times that is a few percent faster, if it is."""

COMPILED = 2
"""Plans for which a library has to compile that "quick" tries of a step, of a large map too: half a second each, one after the other.
EfficientNetB1's 49 took 21 s on an H100, and what they took its own kernels had no time for."""

NARROW_COMPILED = 4
"""The same of int8, all of whose plans cuDNN compiles: the first two are not always the fastest."""

LARGE = 8 << 20
"""Bytes of a map from which on a limit means twice as many of cuDNN's plans: where PyTorch's choice among as many is the faster one, its
map lies beside the plan's."""


def candidates(
    node: Node, inputs: list[Tensor], setting: Setting, limits: dict[str, int] | int | None, *, foreign: bool = True
) -> Iterator[Candidate]:
    """Yield what could compute this step with these inputs, the most promising first; of an op's configurations at most its limit.

    Libraries' kernels are among them if `foreign`: some have to be asked, which takes tens of milliseconds a step. With a limit cuDNN is
    left out of a depthwise convolution that a kernel of ours takes: most likely it searches there for seconds. Should none of ours be
    compiled in time, or right, PyTorch's operators are left.
    """
    ours = False
    for name in op_names(node):
        if name in FOREIGN and (not foreign or (ours and limits is not None and is_depthwise(node))):
            continue
        limit = limits.get(name, limits[OTHERS]) if isinstance(limits, dict) else limits
        if name == "cudnn_graph" and limit is not None and torch.Size(node.shape).numel() * setting.dtype.itemsize >= LARGE:
            limit *= 2
        if node.op in ("squeeze_excite", "depthwise_squeeze"):
            yield from _squeezes(node, inputs, setting, limit)
            continue
        module = ops.load(name)
        args = named(node.roles, inputs) | arguments(node, name, setting)
        prologue = node.op == "conv" and (node.attrs.get("scale") is not None or node.attrs["pre_act"] != "none")
        if (prologue and name != "conv") or not _accepts(module, args) or module.supports(**args):
            continue
        found = module.configs(**args)
        late = module.compiled_late(found, **args) if hasattr(module, "compiled_late") and limit is not None else []
        tried = _affordable(module, found, args, limit, late)
        ours |= name not in FOREIGN and bool(tried)
        yield from (Candidate(name, config, config in late) for config in tried)


def _affordable(
    module: Any, configs: list[dict[str, Any]], args: dict[str, Any], limit: int | None, late: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the first configurations, where there is a limit only those that compile in seconds, if any does, and few of `late`."""
    if limit is None:
        return configs
    if hasattr(module, "effort"):
        configs = [config for config in configs if module.effort(config, **args) <= EFFORT] or configs[:1]
    most = NARROW_COMPILED if module.__name__.endswith("narrow_cudnn") else COMPILED
    return [config for config in configs if config not in late[most:]][:limit]


def _accepts(module: Any, args: dict[str, Any]) -> bool:
    """Tell whether an op has all the optional inputs that a step uses."""
    code = module.reference.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return all(name in known for name in args)


def _squeezes(node: Node, inputs: list[Tensor], setting: Setting, limit: int | None) -> Iterator[Candidate]:
    squeeze = ops.load("squeeze_excite")
    inner = node.attrs.get("squeeze", node.attrs)
    parts = 2 if node.op == "depthwise_squeeze" else 1  # or any other number: of means in parts they may be added up first
    pooled = torch.empty((node.inputs[0].shape[0], parts, node.inputs[0].shape[1]), device=setting.device)
    proxy = Node("squeeze_excite", [], inner, (), node.dtype)
    args = {"pooled": pooled} | arguments(proxy, "squeeze_excite", setting)
    if squeeze.supports(**args):
        return
    seconds = squeeze.configs(**args)[:limit]
    if node.op == "squeeze_excite":
        yield from (Candidate("squeeze_excite", config) for config in seconds)
        return
    depthwise = ops.load("depthwise")
    args = {"x": inputs[0]} | arguments(node, "depthwise", setting) | {"sums": True}
    if depthwise.supports(**args):
        return
    firsts = _affordable(depthwise, depthwise.configs(**args), args, limit, [])
    yield from (Candidate("depthwise_squeeze", {"depthwise": first, "squeeze": seconds[0]}) for first in firsts)
    yield from (Candidate("depthwise_squeeze", {"depthwise": firsts[0], "squeeze": second}) for second in seconds[1:])
