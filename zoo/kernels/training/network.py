"""`fast(model, train=True)`: the same network, trained on other kernels; its parameters are the model's own."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree

from weights.callers import stacklevel
from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.errors import Untraceable
from zoo.kernels.measuring.stopwatch import stopwatch
from zoo.kernels.memory.workspaces import give_back
from zoo.kernels.reports.report import PlanReport, Report, named
from zoo.kernels.training.choosing import Timer, timer
from zoo.kernels.training.kernels import on_kernels
from zoo.kernels.training.planning import Known, checked, device_of
from zoo.kernels.training.recompute import as_is
from zoo.kernels.training.replay import Moved, Places, Replay

KEPT_PLANS = 8
"""Kinds of calls whose plans are kept; the one that was not used for longest goes first."""

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


@dataclass(slots=True)
class _Plan:
    """What one kind of call runs; without a replay the plain network, for the reason in the report."""

    replay: Replay | None
    places: Places | None
    report: PlanReport
    unchanged: str = ""


class FastTraining(nn.Module):
    """A network that trains on kernels chosen for its layers; `fast(model, train=True)` makes it, `plain` gives the network back.

    Sub-modules, parameters and buffers *are* the network's, under the same names: an optimiser made before keeps working, and
    `state_dict`, DistributedDataParallel, `fully_shard`, averages and freezing see the network itself. In train mode the calls that
    were recorded run again under autograd, chains of them as one kernel; in eval mode, and where that can't be done, the network runs.

    A plan is made for each input shape, dtype, autocast state and set of train flags at its first call; the `KEPT_PLANS` last used
    are kept. Copies and pickles carry the network, and make their plans anew.
    """

    trains_fast = True
    """What `plain` and `why` know it by."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, tune: str, recompute: bool | None = None) -> None:
        super().__init__()
        self._adopt(network)
        self.__dict__["dtype"], self.__dict__["tune"], self.__dict__["recompute"] = dtype, tune, recompute
        self.__dict__["told"], self.__dict__["_knows_eval"] = [], False
        self._fresh()

    def _adopt(self, network: nn.Module) -> None:
        self.__dict__["network"] = network  # no child: its own children are, under their own names
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(network, name)
        self.__dict__["training"] = network.training

    def _fresh(self) -> None:
        self.__dict__["_plans"] = OrderedDict()
        self.__dict__["_known"] = Known(most=6 if self.tune == "full" else 0, recompute=self.recompute)
        self.__dict__["_lock"] = threading.RLock()
        self.__dict__["_seen"] = self.__dict__["_refused"] = ""

    def __getattr__(self, name: str) -> Any:
        """Give what the network has: its options, its methods."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (network := self.__dict__.get("network")) is None:
                raise
            return getattr(network, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the network computes in its present mode."""
        network: nn.Module = self.network
        if not self.training:
            self._warn_of_eval()
            return network(*args, **kwargs)
        self.expect_eval()
        leaves, form = _flat(args, kwargs)
        key, self.__dict__["_seen"] = _kind_of_call(network, leaves, form)
        for _ in range(2):
            plan = None if key is None else self._kept(key) or self._plan(key, args, kwargs)
            if plan is None or plan.replay is None or plan.places is None:
                return network(*args, **kwargs)
            try:
                return plan.replay(plan.places, [_last(leaf) for leaf in leaves])
            except Moved:  # another plan is needed; what moves at every call runs unchanged
                self._plans.pop(key, None)
        return network(*args, **kwargs)

    def _warn_of_eval(self) -> None:
        """Warn once of a network that seems to be trained in eval mode: its answers ask for gradients, and it never trained before."""
        if self._knows_eval or not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters()):
            return
        self.expect_eval()
        warnings.warn(
            "the network is in eval mode, so it runs as it is, and its BatchNorms learn no statistics; call model.train() before training, "
            "or torch.no_grad() around what only looks",
            stacklevel=stacklevel(),
        )

    def expect_eval(self) -> None:
        """Note that nobody needs to be warned of eval mode any more: somebody was, or the network was called in train mode."""
        self.__dict__["_knows_eval"] = True

    def prepare(self, args: tuple[Any, ...], casts: torch.dtype | None) -> None:
        """Check the network before its first step, and make the first plan if it is in train mode.

        Args:
            args: positional arguments of that call.
            casts: the dtype of the autocast that it will run under, None for none.
        """
        with torch.autocast(device_of(args).type, casts, casts is not None):
            leaves, form = _flat(args, {})
            key, self.__dict__["_seen"] = _kind_of_call(self.network, leaves, form)
            if self.training:
                self.expect_eval()
            if self.training and key is not None:
                self._plan(key, args, {})
                return
            try:
                checked(copy.deepcopy(self.network).train(), args, {}, self._known)
            except Untraceable as error:
                self.__dict__["_refused"] = str(error)
                warnings.warn(f"{type(self.network).__name__} trains unchanged for this shape: {error}", stacklevel=stacklevel())
            self._give_back(args, {})

    def refuse(self, reason: str) -> None:
        """Say that the network will run unchanged."""
        self.__dict__["_refused"] = reason
        warnings.warn(f"{type(self.network).__name__} trains unchanged: {reason}", stacklevel=stacklevel())

    def _kept(self, key: Any) -> _Plan | None:
        """Return the plan of a kind of calls, and note that it is the last one used."""
        plan = self._plans.get(key)
        if plan is not None and len(self._plans) > 1:
            with self._lock:
                if key in self._plans:
                    self._plans.move_to_end(key)
        return plan

    def _plan(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan:
        with self._lock:
            if (plan := self._plans.get(key)) is not None:
                return plan
            shapes = [tuple(tensor.shape) for tensor in tensors_of((args, kwargs))]
            learns = torch.is_grad_enabled()  # which is on while this is checked
            try:
                hooks = torch.autograd.graph.saved_tensors_hooks(as_is, as_is)
                # what the check saves is not for a checkpoint around this call
                with torch.inference_mode(False), hooks, stopwatch() as seconds:
                    found = checked(self.network, args, kwargs, self._known, self._clock(args, kwargs), learns)
                plan = _Plan(found.replay, found.replay.at(self.network), PlanReport(shapes, found.rows, found.parity, found.notes))
                plan.report.seconds = seconds
            except Untraceable as error:
                plan = _Plan(None, None, PlanReport(shapes, notes=[f"runs unchanged: {error}"]), str(error))
                warnings.warn(f"{type(self.network).__name__} trains unchanged for this shape: {error}", stacklevel=stacklevel())
            plan.report.given = named(args, kwargs) + _casting((args, kwargs))
            self._give_back(args, kwargs)
            self._plans[key] = plan
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
            return plan

    def _clock(self, args: Any, kwargs: Any) -> Timer | None:
        device = device_of((args, kwargs))
        if self.tune == "none" or (self.tune != "full" and not on_kernels(device)):  # a compiler takes longer than a CPU's short training
            return None
        clock = timer(device)
        if self.tune == "quick":  # launch parameters that "full" finds are not kept, so that its times would mislead
            self._known.keep(device)
        return clock

    def _give_back(self, args: Any, kwargs: Any) -> None:
        device = device_of((args, kwargs))
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            give_back(device)

    @property
    def unchanged(self) -> str:
        """Why the last call ran the network as it is; empty where it didn't."""
        last = next(reversed(self._plans.values()), None)
        return self._seen or (last.unchanged if last is not None else self._refused)

    @property
    def device(self) -> torch.device:
        """Where the network's parameters lie, and inputs belong."""
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    def report(self) -> Report:
        """Return what `why` shows."""
        device = str(self.device)
        waits = "" if self.training or self._plans else "it is in eval mode, where the network runs itself; train by model.train()"
        plans = [plan.report for plan in self._plans.values()]
        unchanged = self.unchanged or waits
        unplanned = [] if plans or unchanged else ["there is no plan yet; the next call in train mode makes one"]
        return Report(plans, unchanged, device, str(self.dtype).removeprefix("torch."), unplanned, list(self.told))

    def train(self, mode: bool = True) -> FastTraining:
        """Set the network's mode, and this one's."""
        self.network.train(mode)
        self.__dict__["training"] = self.network.training
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's `state_dict`."""
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the network."""
        return self.network.load_state_dict(state_dict, strict=strict, assign=assign)

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError("DataParallel copies a network at every call; use DistributedDataParallel, or plain(model)")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plans out, which belong to this process and device."""
        return {name: self.__dict__[name] for name in ("network", "dtype", "tune", "recompute", "told", "_knows_eval")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without plans."""
        nn.Module.__init__(self)
        self._adopt(state["network"])
        for name in ("dtype", "tune", "recompute"):
            self.__dict__[name] = state[name]
        self.__dict__["told"], self.__dict__["_knows_eval"] = state.get("told", []), state.get("_knows_eval", False)
        self._fresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTraining:
        """Copy the network."""
        twin = FastTraining.__new__(FastTraining)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def extra_repr(self) -> str:
        """Say how many plans there are, and why none runs."""
        return f"plans={len(self._plans)}" + (f", unchanged: {self.unchanged}" if self.unchanged else "")


def _last(leaf: Any) -> Any:
    """Return images in channels_last memory on a GPU, whose fastest kernels read that."""
    images = isinstance(leaf, Tensor) and leaf.is_cuda and leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last) if images else leaf


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of a call's arguments and what tells their order from others; of tensors alone, which is usual, in no time."""
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return args, len(args)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, repr(spec)


_LEAVES = Tensor | bool | int | float | str | torch.dtype | torch.device | type(None)


def _kind_of_call(network: nn.Module, leaves: Sequence[Any], form: Any) -> tuple[Any, str]:
    """Return what a plan is made for, or None and why the network has to run itself."""
    flags, reason = _survey(network)
    if not reason and not all(isinstance(leaf, _LEAVES) for leaf in leaves):
        reason = "an argument is neither a tensor nor a number"
    if reason:
        return None, reason
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (form, tuple(_key(leaf) for leaf in leaves), flags, casts, torch.is_grad_enabled()), ""


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf).__name__, repr(leaf)


def _survey(network: nn.Module) -> tuple[tuple[Any, ...], str]:
    """Go through the modules at every call: which they are, in which mode, and whether one has hooks, which a recording wouldn't call."""
    flags: list[Any] = []
    stack: list[nn.Module] = [network]
    while stack:
        module = stack.pop()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return (), f"a hook of {_path(network, module)} has to be called"
        learning = tuple(p.requires_grad for p in module._parameters.values() if p is not None)
        flags.append((id(module), module.training, learning))
        stack.extend(child for child in module._modules.values() if child is not None)
    if any(getattr(module_hooks, name, None) for name in _GLOBAL_HOOKS):
        return (), "a hook of all modules has to be called"
    return tuple(flags), ""


def _path(network: nn.Module, module: nn.Module) -> str:
    return next((name for name, known in network.named_modules() if known is module and name), type(network).__name__)


def _casting(arguments: Any) -> str:
    """Say which dtype autocast computes in, "" without it."""
    kind = device_of(arguments).type
    return f", autocast {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" if torch.is_autocast_enabled(kind) else ""
