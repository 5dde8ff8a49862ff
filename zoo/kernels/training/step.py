"""`fast_step(model, loss, optimizer)`: a whole step of training, on a GPU as one CUDA graph."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from weights.arguments import forgiving
from weights.callers import stacklevel
from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.errors import first_line
from zoo.kernels.measuring.timing import release_generator
from zoo.kernels.memory.graph_pool import growing
from zoo.kernels.memory.workspaces import clear_workspaces
from zoo.kernels.training.exchanging import Exchange, quiet
from zoo.kernels.training.losses import OnePass
from zoo.kernels.training.optimizing import Prepared
from zoo.kernels.training.watching import Watch

EAGER_STEPS = 3
"""Steps of a new shape that run as they are before one is captured: libraries and optimisers make what they keep in the first ones."""
KEPT_GRAPHS = 4
KNOWN_SHAPES = 64
"""Shapes whose first steps are counted: who has another one at each step would have them counted for ever."""

UNTOUCHED = -12345.678
"""What a graph's loss is before its first replay: one that stays so has captured nothing, for its kernels went to another stream."""

Parts = Sequence[tuple[Any, Any]]
"""The images and targets of a step, which are computed one after the other."""


@dataclass(slots=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    graph: Any
    given: list[Tensor]
    loss: Tensor
    gradients: list[Tensor | None]


class FastStep:
    """A step of training: forward, loss, backward and optimiser; `fast_step` makes it.

    On a CPU, and where no CUDA graph can be captured, the same calls run one by one.

    Attributes:
        unchanged: why steps are not replayed as a graph; empty where they are, or will be after `EAGER_STEPS` of a shape.
        inside: whether the optimiser is a part of the graph.
        replayed: steps that were replayed so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | None,
        scaler: Any,
        clip: float | None,
        unchanged: str,
    ) -> None:
        self.model, self.loss, self.optimizer, self.scaler, self.clip = model, loss, optimizer, scaler, clip
        self.device = next(model.parameters()).device
        self._one_pass = None if unchanged else OnePass()
        self.dtype = dtype
        self.unchanged = unchanged or _refused(model) or ("a CPU has no CUDA graphs" if self.device.type != "cuda" else "")
        self._exchange: Exchange | None = None
        if isinstance(model, DistributedDataParallel) and not unchanged and not Exchange.refuses(model):
            self._exchange = Exchange(model)
        self.replayed = 0
        self._prepared = Prepared(optimizer) if not self.unchanged else None
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._eager: dict[Any, int] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._watch = Watch(model)
        self._told = self._began = False

    @property
    def inside(self) -> bool:
        """Whether the optimiser is a part of the graph."""
        return self._prepared is not None and self._prepared.inside and self.scaler is None

    def __call__(self, images: Any, target: Any, *more: tuple[Any, Any]) -> Tensor:
        """Do one step.

        Args:
            images: what the model takes, on its device.
            target: what the loss takes beside the model's outputs: a tensor, or tuples, lists and dicts of some.
            *more: further (images, target) of the step, which are computed one after the other to need less memory. The gradient is
                that of the mean of all parts' losses.

        Returns:
            the loss before the step, a scalar on the device that no later step overwrites; nobody waits for it.

        Raises:
            TypeError: a further part is no pair.
            ValueError: the loss is no scalar.
            RuntimeError: gradients are switched off around the call.
        """
        for part in more:
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise TypeError(f"further parts of a step are pairs: step(images, target, (images, target)), got a {type(part).__name__}")
        if not torch.is_grad_enabled():
            raise RuntimeError("a step needs gradients; call it outside of torch.no_grad() and torch.inference_mode()")
        if not self.model.training and not self._told:
            self._told = True
            warnings.warn(
                "the network is in eval mode: its BatchNorms learn no statistics, dropout draws nothing, and a fast network runs as it is; "
                "call model.train() before the first step, unless that is meant",
                stacklevel=stacklevel(),
            )
            for module in self.model.modules():
                if getattr(type(module), "trains_fast", False):
                    module.expect_eval()  # pyright: ignore[reportCallIssue]
        if not self._began:
            self._began = True
            _warn_of_left_out(self.model, self.optimizer)
        parts = ((images, target), *more)
        if self._exchange is not None and (reason := Exchange.hooked(self.model)):  # pyright: ignore[reportArgumentType]
            self._exchange, self.unchanged = None, _outside(reason)
            if self._prepared is not None:
                self._forget()
                self._prepared = None
        if self._prepared is None:
            return self._plainly(parts)
        if self._prepared.renew():
            self._forget()
        leaves, kind = _leaves(parts)
        key = self._key(leaves, kind)
        new = (captured := self._graphs.get(key)) is None
        if captured is None:
            if (done := self._eager.get(key, 0)) < EAGER_STEPS:
                self._eager[key] = done + 1
                if len(self._eager) > KNOWN_SHAPES:
                    del self._eager[next(iter(self._eager))]
                return self._aside(parts)
            captured = self._capture(parts)
            if captured is None:
                return self._plainly(parts)
            self._graphs[key] = captured
            while len(self._graphs) > KEPT_GRAPHS:
                torch.cuda.synchronize(self.device)
                self._graphs.popitem(last=False)
        else:
            for own, given in zip(captured.given, tensors_of(leaves), strict=True):
                own.copy_(given, non_blocking=True)
        self._graphs.move_to_end(key)
        for parameter, gradient in zip(self._parameters(), captured.gradients, strict=True):
            parameter.grad = gradient  # another graph may have been the last, or somebody's zero_grad has let it go
        captured.graph.replay()
        if new and bool(captured.loss == UNTOUCHED):
            return self._never(parts)
        self.replayed += 1
        self._finish()
        return captured.loss.clone()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _key(self, leaves: list[Any], kind: Any) -> Any:
        """Return what a graph holds for: shapes, modes, numbers that are part of it, and where everything lies."""
        assert self._prepared is not None
        shapes = tuple((x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else repr(x) for x in leaves)
        return kind, shapes, self._watch.state(), self._prepared.numbers()

    def _casts(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, self.dtype is not None, cache_enabled=False)

    def _learn(self, parts: Parts) -> Tensor:
        """Forward, loss and backward, of several processes together."""
        if self._exchange is None:
            return self._there_and_back(self.model, parts)
        self._exchange.spread()
        with self._exchange.stand_ins() as learnt:
            loss = self._there_and_back(self._exchange.network, parts)
        self._exchange.average(learnt)
        return loss

    def _there_and_back(self, model: nn.Module, parts: Parts) -> Tensor:
        losses: list[Tensor] = []
        for number, (images, target) in enumerate(parts, 1):
            with quiet(model, number < len(parts)):
                with self._casts():
                    outputs = model(images)
                    loss = self.loss(outputs, target) if self._one_pass is None else self._one_pass(self.loss, outputs, target)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                    raise ValueError(f'the loss has to be a scalar, got {what}; PyTorch\'s losses give one with reduction="mean"')
                loss = loss if len(parts) == 1 else loss / len(parts)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _clip(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self.clip)

    def _finish(self, everything: bool = False) -> None:
        """Do what of a step is no part of the graph."""
        if self.scaler is not None:
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif everything or not self.inside:
            self._clip()
            self.optimizer.step()

    def _plainly(self, parts: Parts) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._learn(parts)
        self._finish(everything=True)
        return loss

    def _aside(self, parts: Parts) -> Tensor:
        """Do a step as it is, on a stream of its own: what it leaves behind must not tie a capture to the caller's stream."""
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                loss = self._plainly(parts)
        finally:  # whoever catches an error finds everything written
            torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor in tensors_of(parts):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return loss

    def _capture(self, parts: Parts) -> _Graph | None:
        """Capture a step, which is not done thereby; None where that is impossible."""
        leaves, spec = pytree.tree_flatten(parts)
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        own = [x.detach().to(self.device, copy=True) if isinstance(x, Tensor) else x for x in leaves]
        parts = pytree.tree_unflatten(own, spec)
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # others may pin memory meanwhile
        try:
            now = torch.cuda.stream(torch.cuda.current_stream(self.device))  # a capture that fails leaves its own stream behind
            with now, growing(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
                loss = self._learn(parts)
                if self.inside:
                    self._clip()
                    self.optimizer.step()
        except Exception as error:  # compilers of kernels have errors of their own; the end of the capture may have one above the first
            # no name for the inner error: its traceback would hold this frame, and that the step's autograd graph, of another stream
            release_generator(self.device)
            self._give_up(first_line(error.__context__ or error) or type(error.__context__ or error).__name__)
            return None
        finally:
            clear_workspaces()
        loss.fill_(UNTOUCHED)
        return _Graph(graph, tensors_of(own), loss, [p.grad for p in self._parameters()])

    def _never(self, parts: Parts) -> Tensor:
        """Give a graph up that does nothing, and do the step as it is."""
        self._give_up("its graph is empty")
        return self._plainly(parts)

    def _give_up(self, reason: str) -> None:
        self.unchanged = f"the step can't be captured: {reason}"
        warnings.warn(f"fast_step runs its calls one by one: {self.unchanged}", stacklevel=stacklevel())
        self.optimizer.zero_grad(set_to_none=True)
        self._forget()
        self._prepared = None
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the old one believes to be captured still, and would refuse to draw

    def close(self) -> None:
        """Let the graphs go; a later call captures anew.

        With several processes this comes before `destroy_process_group`: NCCL waits there until no graph holds a call of its own any
        more, for ever if one does.
        """
        if self._graphs:
            self._forget()

    def _forget(self) -> None:
        """Begin without graphs: the optimiser has other tensors now, or nobody wants them any more."""
        torch.cuda.synchronize(self.device)
        for captured in self._graphs.values():
            captured.graph.reset()  # not when all who know it are gone, which cycles of references put off
        self._graphs.clear()
        self._eager.clear()
        self._pool = None  # nobody's any more, so the allocator refuses to take it up again


def _leaves(parts: Parts) -> tuple[list[Any], Any]:
    """Return what is in the parts, in order, and their structure; of tensors alone, which is usual, without asking what there could be."""
    leaves = [leaf for part in parts for leaf in part]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, len(parts)
    leaves, spec = pytree.tree_flatten(parts)
    return leaves, repr(spec)


def _outside(reason: str) -> str:
    return f"DistributedDataParallel exchanges gradients outside of a graph: {reason}"


def _refused(model: nn.Module) -> str:
    if isinstance(model, DistributedDataParallel) and (reason := Exchange.refuses(model)):
        return _outside(reason)
    if any(hasattr(module, "unshard") for module in model.modules()):
        return "FSDP gathers parameters outside of a graph"
    return ""


def _check(model: nn.Module, loss: Any, optimizer: Any, scaler: Any, clip: Any) -> None:
    """Refuse what would fail at the first step, or train something else without a word; `fast_step` says what is raised."""
    if getattr(type(model), "answers_fast", False):
        raise ValueError("fast(model) computes no gradients; make a step of fast(plain(model), train=True)")
    for name, value in (("loss", loss), ("optimizer", optimizer), ("scaler", scaler)):
        if isinstance(value, type):
            raise TypeError(f"{name} is the class {value.__name__}; build it first")
    able = all(hasattr(optimizer, word) for word in ("param_groups", "step", "zero_grad"))
    fits = {"loss": callable(loss), "optimizer": able, "scaler": scaler is None or hasattr(scaler, "scale")}
    if wrong := [name for name, right in fits.items() if not right]:
        given = {"loss": loss, "optimizer": optimizer, "scaler": scaler}[wrong[0]]
        raise TypeError(f"{wrong[0]} can't be a {type(given).__name__}: fast_step(model, loss, optimizer)")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure; fast_step computes it once: take another "
            "optimiser, or call fast(model, train=True) in a loop of your own"
        )
    mine = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimiser has no parameter of the model; build it over model.parameters()")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise ValueError(f"clip is the largest norm of the gradients, a number above 0, got {clip!r}")


def _warn_of_left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn of parameters that get gradients and no step, as a new last layer's behind the optimiser; several processes may mean it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in grouped]
    if left:
        more = f" and {len(left) - 1} more ask for gradients and are" if len(left) > 1 else " asks for gradients and is"
        warnings.warn(
            f"{left[0]}{more} in no group of the optimiser, so this step teaches them nothing; build the optimiser once the "
            "network has its last layers, or freeze what shall stay by requires_grad_(False)",
            stacklevel=stacklevel(),
        )


@forgiving
def fast_step(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    dtype: torch.dtype | str | None = "auto",
    scaler: Any = None,
    clip: float | None = None,
    unchanged: str = "",
) -> FastStep:
    """Return a function that does a whole step of training: `step(images, target)` gives the loss.

    On a GPU the step is captured into a CUDA graph after its first `EAGER_STEPS` calls of a shape, which are steps like all others, so
    nothing of the model, the optimiser or the random numbers has to be put back; another shape gets a graph of its own. A rate that a
    scheduler or the caller changes is heeded: it is a tensor that the graph reads. Other numbers of the optimiser are part of the
    graph, which is captured anew when they change. Optimisers without a form for graphs run behind it.

    Args:
        model: a network in train mode, best `fast(model, train=True)`, or DistributedDataParallel around it, whose exchange of
            gradients and buffers the step then does itself, inside of the graph.
        loss: takes the model's outputs and the target, returns a scalar.
        optimizer: over the model's parameters. On a GPU SGD, Adam and AdamW become fused, and rates become tensors.
        dtype: of autocast; "auto" is bfloat16 on a GPU, float16 there with a scaler, none on a CPU. None leaves it out.
        scaler: a `torch.amp.GradScaler`, for float16.
        clip: the largest norm of the gradients.
        unchanged: why the calls shall run one by one, as PyTorch does them, on a GPU too; empty where they needn't.

    Returns:
        the step. With several processes, `close()` it before they part: see there.

    Raises:
        ValueError: the model has no parameters, or is `fast(model)`, which computes no gradients; the optimiser has none of them,
            or computes the loss by a closure;
            `dtype` is none that autocast takes; or `clip` is no number above 0.
        TypeError: the loss, optimiser or scaler is none.

    Examples:
        >>> model = fast(ResNet50().cuda().train(), train=True)                          # doctest: +SKIP
        >>> step = fast_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1, 0.9))    # doctest: +SKIP
        >>> step(images, labels)                                                         # doctest: +SKIP
    """
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    _check(model, loss, optimizer, scaler, clip)
    if isinstance(dtype, str):
        if dtype != "auto":
            raise ValueError(f'dtype is a torch.dtype, None or "auto", got {dtype!r}')
        half = torch.float16 if scaler is not None else torch.bfloat16
        dtype = half if first.device.type == "cuda" else None
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'dtype is torch.bfloat16, torch.float16, None for no autocast, or "auto", got {dtype}')
    dtype = None if dtype == torch.float32 else dtype
    return FastStep(model, loss, optimizer, dtype, scaler, clip, unchanged)
