"""`Fast`: the module that answers calls, by a plan for each kind of them, which it makes at the first and keeps."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weights.callers import stacklevel
from zoo.kernels.api.calls import PLAIN, key_of, one_key, special
from zoo.kernels.api.held import Held
from zoo.kernels.errors import Untraceable, called, first_line

if TYPE_CHECKING:  # the passes are loaded by the first call: `import zoo` has to stay quick
    from zoo.kernels.api.background import Background, Finish, Job
    from zoo.kernels.quantizing.bfloat16 import Bfloat16
    from zoo.kernels.quantizing.certificate import Certificate
    from zoo.kernels.quantizing.eight_bits import EightBits
    from zoo.kernels.quantizing.quantized import Quantized
    from zoo.kernels.reports.built_plan import Built
    from zoo.kernels.reports.report import Report
    from zoo.kernels.tuning.binding import Weights
    from zoo.kernels.tuning.choices import Choices
    from zoo.kernels.tuning.request import Request

Tune = Literal["none", "quick", "full", "background"]


KEPT_PLANS = 8
"""Input shapes whose plans a fast network keeps; the one that was not used for longest goes first."""
WHOLE = 512
"""Pixels of a side from which on a detector is compared on images of half its size: of smaller ones too little would be left."""
KEPT_REASONS = 64
"""Input shapes of which it remembers that they have no plan."""


class Fast(nn.Module):
    """A network that runs on kernels chosen for its layers and shapes; `fast` makes it, `plain` gives the network back.

    Parameters, buffers, children and `state_dict` are the plain network's own, under the same names; what runs is a folded copy of
    them, in `dtype` on `device`. `load_state_dict`, a parent's too, renews the copy. Where weights were changed in place otherwise, or
    replaced, the network itself answers, until a new `fast(plain(model))`; on a GPU a tensor or layer that is replaced through a
    reference of one's own is not seen, nor anywhere what is written through `.data`, nor hooks and settings of the network's layers.
    Attributes of the network can't be set here.

    Where a plan has no answer the network itself gives it, on its own device: inside `torch.func.vmap` and its like, with other
    parameters by `torch.func.functional_call`, in forward-mode derivatives, `torch.export` and `torch.jit.trace`, for subclasses of
    Tensor. Where it lies on another device, or is in train mode, the call is refused.

    A plan is made for every input shape at its first call, checked against the plain network, and kept; the `KEPT_PLANS` last used
    are. Calls from many threads are allowed: they are answered in turn, each with its own output tensors. Copies and pickles carry
    the plain network and the options, and make their plans anew. Outputs have the plain network's dtype, and no gradient.

    Example:
        >>> model = fast(trained(ResNet20))  # doctest: +SKIP
        >>> model(torch.randn(8, 3, 32, 32, device=model.device)).shape  # doctest: +SKIP
        torch.Size([8, 10])
    """

    answers_fast = True
    """What `fast_step` refuses it by, without loading this room."""
    _strict: bool = False
    """A plan that can't be made is raised, by the first call; later on, that call runs unchanged."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        tune: Tune,
        tf32: bool,
        progress: bool,
        quantized: Quantized | EightBits | None = None,
        static: bool = False,
    ) -> None:
        super().__init__()
        self._adopt(network)
        self.static = static
        """Whether answers lie in memory that the next call writes again."""
        self.quantized = quantized
        """The network in 8 bits, for calls of one image size, with its certificate; `dtype` is that of all other calls."""
        proof = None if quantized is None else quantized.proof
        self.proofs: list[Certificate] = [] if proof is None else [proof]
        """Certificates of precisions that were compared on a caller's images."""
        self._bfloat16: Bfloat16 | None = None
        """What was certified in bfloat16, where that was chosen because it is proven."""
        self._proven_of = "" if quantized is None else quantized.state
        """Digest of the weights that the proofs are of."""
        self.told: list[str] = []
        """What `why` says beside plans: which precision was taken, and what others would give."""
        self.device, self.dtype, self.tf32, self.progress = device, dtype, tf32, progress
        self.tune: Tune = tune
        self.unchanged = ""
        """Why the network runs unchanged; empty where it doesn't."""
        self.parts: dict[str, str] = {}
        """What runs fast where the network as a whole can't, a detection model's maps: see `zoo.kernels.api.parts`."""
        self._fresh()
        self.training = False  # of this module alone: the network keeps its mode

    def _adopt(self, network: nn.Module) -> None:
        """Take the network's own parameters, buffers and children, so that names and a parent's `state_dict` are what they were."""
        self.__dict__["_network"] = network  # no child: its own children are, under their own names
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(network, name)

    @property
    def network(self) -> nn.Module:
        """What `fast` was called with; `core` is the network in it, without torch.compile's or DataParallel's wrapper."""
        self.__dict__["_touched"] = True  # who has it may replace its weights
        return self._network

    def __getattr__(self, name: str) -> Any:
        """Give the network's data, its checkpoint say, its children and `preprocess`; its methods would run slow, or change it unseen."""
        if name.startswith("_") or "_network" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        core = self.core
        if not hasattr(core, name):
            raise AttributeError(f"neither Fast nor the {type(core).__name__} in it has {name!r}")
        found = getattr(core, name)
        if isinstance(found, nn.Module):
            self.__dict__["_touched"] = True
        elif callable(found) and name != "preprocess":
            raise AttributeError(f"a fast network has no {name!r}; the network itself has: plain(model).{name}")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of its own; one of the network's would change nothing here."""
        layer = isinstance(value, nn.Module | nn.Parameter)
        if not name.startswith("_") and name not in OWN and (layer or hasattr(self.core, name)):
            raise AttributeError(f"a fast network takes no {name!r}: set it on plain(model), and call fast(plain(model)) again")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of its own; those of the network stay."""
        if name in self.__dict__ and not name.startswith("_") and name not in OWN:
            object.__delattr__(self, name)
            return
        raise AttributeError(f"a fast network keeps its {name!r}: delete it from plain(model), and call fast(plain(model)) again")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """List this module and the network's children; whoever asks may replace their weights, so that the next call looks."""
        self.__dict__["_touched"] = True
        return super().named_modules(*args, **kwargs)

    @property
    def core(self) -> nn.Module:
        """The network itself, out of a wrapper that only says how to run it."""
        from zoo.kernels.arguments import core

        return core(self._network)

    def _fresh(self) -> None:
        """Begin without plans."""
        self._plans: OrderedDict[Any, Built] = OrderedDict()
        self._unplanned: dict[Any, str] = {}
        """Shapes that have no plan, and why; none is tried again."""
        self._doubtful: set[Any] = set()
        """Shapes that failed, of which a second failure is believed."""
        self._lock = threading.RLock()
        self._order = threading.Lock()
        self._weights: Weights | None = None
        self._choices: Choices | None = None
        if (background := self.__dict__.get("_background")) is not None:
            background.stop()
        self._background: Background | None = None
        self._caller: threading.Thread | None = None
        self._plain_copy: nn.Module | None = None
        self._fast_parts: list[Any] = []
        self._plain_dtype = self.dtype
        self._touched = self._stale = False
        self._held = Held(self._network)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the plain network computes in eval mode; same arguments, same structure of the result.

        Raises:
            ValueError: a tensor lies on another device; or the network's own error for input that it refuses.
            RuntimeError: a gradient is asked for.
        """
        if self._stale:
            with self._lock:
                self._settle()
                self._fresh()
        if len(args) == 1 and not kwargs and type(image := args[0]) is Tensor and (built := self._replaying(image)) is not None:
            if self.static and built.overwrites([image]) and (changed := self._changed()):
                return self._by_itself(changed, args, kwargs)
            outputs = built.run([image])
            if len(self._plans) > 1:
                self._used(one_key(image))
            if changed := self._changed():  # the GPU computes while this looks whether it may
                return self._by_itself(changed, args, kwargs)
            return outputs[0] if built.single else pytree.tree_unflatten(outputs, built.spec)
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):
            leaves, tensors, spec = list(args), list(args), None
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.static:
            self._one_thread()
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"this fast network runs on {self.device}, the input lies on {tensor.device}; move it with x.to({str(self.device)!r})"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError("fast(model) computes no gradients: call it under torch.no_grad(), or use plain(model) for this")
            if tensor.is_neg() or tensor.is_conj():  # kernels read memory, where neither is carried out yet
                args, kwargs = pytree.tree_map_only(Tensor, lambda lazy: lazy.resolve_conj().resolve_neg(), (args, kwargs))
                return self.forward(*args, **kwargs)
        if reason := special(tensors):
            return self._by_itself(reason, args, kwargs)
        # An object may hold anything, and change.
        planned = not self.unchanged and (spec is None or all(isinstance(leaf, Tensor | PLAIN) for leaf in leaves))
        key = (len(args) if spec is None else repr(spec), *(key_of(leaf) for leaf in leaves)) if planned else None
        built = self._plans.get(key)
        runs_ahead = built is not None and self.device.type == "cuda"  # the GPU computes while this looks whether it may
        if built is not None and self.static and built.overwrites(tensors):
            runs_ahead = False
        if not runs_ahead and (changed := self._changed()):
            return self._by_itself(changed, args, kwargs)
        if not planned:
            return self._run_unchanged(args, kwargs)
        if built is None:
            try:
                built = self._plan(key, args, kwargs)
            except Untraceable as error:
                if self._strict:
                    raise
                try:
                    result = self._run_unchanged(args, kwargs)
                except Exception:  # the network itself refuses the call, of which there is no more to say
                    with self._lock:
                        self._unplanned.pop(key, None)
                    raise
                warnings.warn(f"{called(self._network)} runs unchanged for this shape: {error}", stacklevel=stacklevel())
                return result
            if built is None:
                result = self._run_unchanged(args, kwargs)
                self._plan_behind(key, args, kwargs)
                return result
        elif len(self._plans) > 1:
            self._used(key)
        casting = torch.is_autocast_enabled(self.device.type)  # asked first, for the context costs microseconds
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False) if casting else nullcontext():
            outputs = built.run(tensors)
        if runs_ahead and (changed := self._changed()):
            return self._by_itself(changed, args, kwargs)
        return outputs[0] if built.single else pytree.tree_unflatten(outputs, built.spec)

    def _replaying(self, image: Tensor) -> Built | None:
        """Return the plan that is replayed for an ordinary image, if there is one; of all else this says nothing.

        Behind a call of a few hundred microseconds that was waited for, each line finds cold caches and costs several times what it does
        in a loop, while the GPU waits: what may be looked at later is not looked at here.
        """
        if image.is_nested:  # which has no shape
            return None
        built = self._plans.get(one_key(image))
        if (
            built is None
            or not built.replays
            or image.device != self.device
            or image.requires_grad
            or self.unchanged
            or image.is_neg()
            or image.is_conj()
            or special([image])
        ):
            return None
        if self.static:
            self._one_thread()
        return built

    def static_inputs(self) -> list[Tensor | None]:
        """With `static`, return the tensors to write inputs into: a call with these, each in its own place, does not copy them.

        They are those of the plan that was used last. Write an image there, from the CPU too, on the stream that calls the network, and
        call it with that very tensor. Write it anew for each call. Where there is None, pass a tensor of your own, which is copied: large
        batches are packed before the network reads them, inputs that are no images lie where later maps do, and a CPU has no such tensors.

        Raises:
            RuntimeError: without `static`, or before a first plan was made.

        Example:
            >>> model = fast(trained(ResNet50), static=True)  # doctest: +SKIP
            >>> (room,) = model.static_inputs()               # doctest: +SKIP
            >>> logits = model(image if room is None else room.copy_(image, non_blocking=True))  # doctest: +SKIP
        """
        if not self.static:
            raise RuntimeError("static_inputs() is for fast(model, static=True); other calls copy their inputs")
        with self._order:
            built = next(reversed(self._plans.values()), None)
        if built is None:
            raise RuntimeError("no plan was made yet; call the network once, or see why(model)")
        return built.rooms()

    def _used(self, key: Any) -> None:
        """Note that a plan was used last."""
        with self._order:
            if key in self._plans:
                self._plans.move_to_end(key)

    def _one_thread(self) -> None:
        """Refuse a second thread where the next call overwrites the answers of the last."""
        caller = threading.current_thread()
        if self._caller not in (None, caller) and self.device.type == "cuda":
            raise RuntimeError(
                "a fast network with static=True answers one thread: another's call would overwrite its answers; make one for each thread"
            )
        self._caller = caller

    def _changed(self) -> str:
        """Say whether the network has other weights or layers than the plans were made of; "" if it hasn't.

        A GPU's calls, some of which take less than looking for replaced objects does, look where somebody was given the network.
        """
        found = ""
        if self._held.is_written():
            found = "weights of its network were changed since fast()"
        elif self._touched or self.device.type == "cpu":
            if self._held.is_replaced():
                found = "parameters, buffers or layers of its network were replaced since fast()"
            else:
                self._touched = False
        if found and self._background is not None:
            self._background.stop()  # nobody will ask for the plan of other weights
        if found and not self._plans and not self._unplanned and self._plain_copy is None:  # nothing was made of the old ones
            self._fresh()
            return ""
        return found

    def _by_itself(self, special: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the network itself answer a call that no plan can."""
        from zoo.kernels.comparing.copies import own_dtype

        network = self.core
        places = {str(tensor.device) for tensor in (*network.parameters(), *network.buffers())} - {str(self.device)}
        if places or any(module.training for module in network.modules()):
            todo = f"plain(model).to({str(self.device)!r})" if places else "plain(model).eval()"
            raise RuntimeError(f"{special}, which a fast network has no plan for; use plain(model), or {todo} first")
        own = own_dtype(network)
        args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(own) if leaf.is_floating_point() else leaf, (args, kwargs))
        with torch.no_grad():
            return network(*args, **kwargs)

    def _plan(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Built | None:
        """Make the plan of a shape; None where it is known that there is none, or it is being made behind the calls."""
        if key in self._unplanned and not self._strict:
            return None
        with self._lock:
            if (built := self._plans.get(key)) is not None:
                return built
            if key in self._unplanned and not self._strict:  # since another thread has tried
                return None
            from zoo.kernels.measuring.stopwatch import Stopwatch, stopwatch
            from zoo.kernels.reports.report import named

            job: Job | None = None
            watch = Stopwatch()
            if self.tune == "background":
                job = self._behind(key)
                if job is None:
                    return None
                watch = job.watch
            with self._without_modes():
                try:
                    with stopwatch(watch) as seconds:
                        built = self._beginning()(args, kwargs)() if job is None else _finished(job)
                except Untraceable as error:
                    if error.lasting or key in self._doubtful:
                        self._unplanned[key] = f"{named(args, kwargs)} runs unchanged: {error}"
                        while len(self._unplanned) > KEPT_REASONS:
                            del self._unplanned[next(iter(self._unplanned))]
                    self._doubtful.add(key)
                    if len(self._doubtful) > KEPT_REASONS:
                        self._doubtful.clear()
                    raise
            built.report.given, built.report.seconds = named(args, kwargs), seconds
            if self.static and hasattr(built.run, "static"):
                built.run.static = True  # pyright: ignore[reportFunctionMemberAccess]
            with self._order:
                self._plans[key] = built
                if len(self._plans) > KEPT_PLANS:
                    self._settle()
                while len(self._plans) > KEPT_PLANS:
                    self._plans.popitem(last=False)
            if job is not None and self.device.type == "cpu" and not (self._background and self._background.busy()):
                self._plain_copy = None  # on a GPU another stream may still run it
            return built

    def _behind(self, key: Any) -> Job | None:
        """Return the plan of a shape that was made behind the calls, if this call may put it in now: else it would wait for another's."""
        if self._background is None or self._captures():
            return None
        if self.device.type == "cuda":
            from zoo.kernels.plans.build import is_building

            if is_building():
                return None
        return self._background.made(key)

    def _captures(self) -> bool:
        """Tell whether the caller captures this call, so that nothing may be measured or captured for it."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _without_modes(self) -> AbstractContextManager[None]:
        return _without_modes(self.device)

    def _beginning(self, *, behind: bool = False) -> Callable[[Any, Any], Finish]:
        """Return what begins a plan of arguments (args, kwargs), and doesn't hold this module. What that returns ends the plan.

        Args:
            behind: it is made while calls are answered: without a bar, and PyTorch's compiler does not compete.
        """
        from zoo.kernels.tuning.binding import Weights
        from zoo.kernels.tuning.choices import Choices
        from zoo.kernels.tuning.request import Options, Request

        self._keep_proofs(answering=True)
        if self.device.type == "cuda" and self.quantized is not None:
            from zoo.kernels.quantizing.eight_bits import begin_narrow

            eight: Any = self.quantized
            begin: Any = partial(begin_narrow, eight)
        elif self.device.type == "cuda":
            from zoo.kernels.plans.build import begin_gpu

            begin = partial(begin_gpu, contest=not behind)
        elif self.quantized is not None:
            from zoo.kernels.quantizing.plan import build_int8

            int8: Any = self.quantized
            begin = partial(_at_once, partial(build_int8, int8))
        elif self._bfloat16 is not None:
            from zoo.kernels.quantizing.bfloat16 import build_bfloat16

            begin = partial(_at_once, partial(build_bfloat16, self._bfloat16))
        else:  # without Triton, which exists on Linux only
            from zoo.kernels.engines.build import build_cpu

            begin = partial(_at_once, build_cpu)
        self._weights = Weights() if self._weights is None else self._weights
        self._choices = Choices(self.device) if self._choices is None else self._choices
        options = Options(self.device, self.dtype, "quick" if behind else self.tune, self.tf32, self.progress and not behind)
        network, weights, choices = self.core, self._weights, self._choices
        return lambda args, kwargs: begin(Request(network, args, kwargs, options, weights, choices))

    def _plan_behind(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have a plan made for calls like one that was answered, where that is wanted and not known to fail."""
        if self.tune != "background" or key in self._unplanned:
            return
        if self._captures():
            return
        from zoo.kernels.api.background import Background
        from zoo.kernels.measuring.stopwatch import Stopped
        from zoo.kernels.measuring.turns import measure
        from zoo.kernels.reports.report import named

        reference, device = weakref.ref(self), self.device

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Finish:
            fast = reference()
            if fast is None:
                raise Stopped
            begin = fast._beginning(behind=True)
            del fast  # when nobody has it any more, this is stopped
            with _without_modes(device):
                return begin(args, kwargs)

        with self._lock:
            if self._background is None:
                self._background = Background(make, device)
                weakref.finalize(self, self._background.stop)
            background = self._background
        background.ask(key, args, kwargs, named(args, kwargs))
        with self._without_modes():
            measure()

    def _settle(self) -> None:
        """Wait for what still runs, on any stream, before the memory of a plan goes."""
        if self.device.type == "cuda":
            from zoo.kernels.measuring.turns import nobody_measures

            with nobody_measures():
                torch.cuda.synchronize(self.device)

    def _run_unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from zoo.kernels.comparing.copies import channels_last, on_device, own_dtype

        wanted = own_dtype(self._network)
        with self._lock:
            if self._plain_copy is None:
                self._plain_copy = self._with_parts() if self.parts else channels_last(on_device(self.core, self.device, self.dtype))
                self._plain_dtype = wanted if self.parts else self.dtype
            plain, dtype = self._plain_copy, self._plain_dtype
        try:
            result = _answer(plain, args, kwargs, dtype)
        except RuntimeError as error:
            if dtype == wanted or "type" not in str(error):
                raise
            plain = channels_last(on_device(self.core, self.device, wanted))
            result = _answer(plain, args, kwargs, wanted)  # what it refuses in its own dtype too says nothing of dtypes
            with self._lock:
                self._plain_copy, self._plain_dtype = plain, wanted
                if self.unchanged and self.dtype != wanted:
                    self.unchanged += f"; in {wanted}, for it mixes dtypes"
                    self.dtype = wanted
        return pytree.tree_map(lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, result)

    def _with_parts(self, example: Any = None) -> nn.Module:
        """Copy a detection model to the device in its own dtype, its parts replaced by fast ones; the first is checked at one size."""
        from zoo.kernels.api.parts import with_parts
        from zoo.kernels.comparing.sample_images import natural_images

        tune: Tune = "none" if self.tune == "background" else self.tune  # of which shape would a plan be made behind the calls?

        def made(part: nn.Module) -> Fast:
            return Fast(part, self.device, self.dtype, tune, self.tf32, self.progress)

        whole, self._fast_parts = with_parts(self.core, self.parts, made, self.device)
        if example is not None:
            self._try_parts(whole, example if isinstance(example, tuple) else (example,))
        else:
            sizes = getattr(getattr(self.core, "transform", None), "min_size", (800,))
            size = sizes[0] if isinstance(sizes, tuple | list) else int(sizes)
            side = size if size < WHOLE else 32 * (size // 64)
            first, images = self._fast_parts[0], (natural_images((1, 3, side, side), self.device),)
            try:
                first.prepare(images)
            except Untraceable as error:
                if error.__cause__ is not None:  # the network's own error
                    first.try_plainly(images)
                first.refuse(str(error))
        for part in self._fast_parts:
            part.tune = self.tune if self.tune == "full" else "none"  # every photograph has another size
        return whole

    def _try_parts(self, whole: nn.Module, example: tuple[Any, ...]) -> None:
        """Answer an example, for which each part plans, and tunes, the shapes that it meets."""
        from zoo.kernels.comparing.copies import own_dtype

        try:
            _answer(whole, example, {}, own_dtype(self._network))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the network raises
            name = called(self.core)
            raise ValueError(f"{name} does not take this example: {type(error).__name__}: {first_line(error)}") from error

    def prepare(self, args: tuple[Any, ...]) -> None:
        """Make the first plan.

        Args:
            args: positional arguments of the shapes to plan.

        Raises:
            Untraceable: the network can't be planned for them.
            ValueError: with `tune="background"`, the network refuses them.
        """
        if self.tune == "background":
            self.try_plainly(args)
        self._strict = True
        try:
            self(*args)
        finally:
            self._strict = False

    def try_plainly(self, args: tuple[Any, ...]) -> None:
        """Run the network unchanged once.

        Raises:
            ValueError: it refuses these arguments too, so that they are to blame and not the plan.
        """
        try:
            self._run_unchanged(args, {})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the network raises
            name = called(self.core)
            raise ValueError(f"{name} does not take this example: {type(error).__name__}: {first_line(error)}") from error

    def prepare_parts(self, parts: dict[str, str], example: Any = None) -> None:
        """Let parts run fast and the rest unchanged, by `zoo.kernels.api.parts`; with an example its shapes are planned, and tuned, too.

        Raises:
            ValueError: the network refuses the example.
        """
        from zoo.kernels.comparing.copies import own_dtype

        self.parts = parts
        self.unchanged = f"boxes depend on values, so fast() covers only {', '.join(parts.values())} of {called(self.core)}"
        self._plain_copy, self._plain_dtype = self._with_parts(example), own_dtype(self._network)

    def refuse(self, reason: str) -> None:
        """Run the network unchanged from now on, and warn whoever called `fast`."""
        self.unchanged = reason
        self._unplanned.clear()  # it is said once
        warnings.warn(f"{called(self._network)} runs unchanged: {reason}", stacklevel=stacklevel())

    def report(self) -> Report:
        """Return what `why` shows."""
        from zoo.kernels.reports.report import Report

        with self._lock:
            if self.parts and self._plain_copy is not None:
                from zoo.kernels.api.parts import together

                report = together([part.report() for part in self._fast_parts], self.unchanged)
                report.told.extend(self.told)
                return report
            self._keep_proofs()
            if not self._stale and (changed := self._changed()):
                redo = "the network itself answers, until fast(plain(model)) again"
                return Report([], f"{changed}: {redo}", str(self.device), self.precision, [], list(self.told))
            plans = [built.report for built in self._plans.values()]
            told = [*self.told, *(self._background.told() if self._background is not None else [])]
            if self.device.type == "cpu" and self.precision == "float32" and plans and not told and not self.unchanged:
                from zoo.kernels.quantizing.quantized import left_on_the_table

                told = [line for line in [left_on_the_table()] if line]
            if not plans:  # which would show them
                told += [line for proof in self.proofs for line in proof.lines()]
            return Report(plans, self.unchanged, str(self.device), self.precision, list(self._unplanned.values()), told)

    @property
    def precision(self) -> str:
        """What it computes in, "float32", "bfloat16", "float16", "int8" or "fp8"."""
        return str(self.dtype).removeprefix("torch.") if self.quantized is None else getattr(self.quantized, "kind", "int8")

    def train(self, mode: bool = True) -> Fast:
        """Refuse train mode: folded BatchNorm has no statistics to update; RuntimeError says what to do."""
        if mode:
            raise RuntimeError("a fast network stays in eval mode; train plain(model), then call fast() again")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Fast:
        raise RuntimeError(f"a fast network stays on {self.device} in {self.dtype}; use fast(plain(model), device, dtype) for another")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain network's `state_dict`."""
        return self._network.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the plain network, and make plans and weights anew at the next call."""
        result = self._network.load_state_dict(state_dict, strict=strict, assign=assign)
        self._renew()
        return result

    def _renew(self) -> None:
        """Make plans anew at the next call; what was quantised, and proven, was of other weights."""
        self._stale = True
        if self.quantized is not None or self.proofs:
            self._disown("other weights were loaded")

    def _disown(self, reason: str) -> None:
        """Go back to the dtype itself, for what was quantised, and proven, was of another network."""
        wanted = "auto" if self.quantized is None else self.precision
        if self._bfloat16 is not None:
            self.dtype = torch.float32
        self.quantized, self._bfloat16, self.proofs = None, None, []
        self.told = [f"{reason}: computed in {self.precision}, until fast(plain(model), dtype={wanted!r}, calibration=...) again"]

    def _keep_proofs(self, *, answering: bool = False) -> None:
        """Drop proofs, and what is narrow by them, where the network is no longer the one that they are of.

        Args:
            answering: compares its answers to the kept images too, which a setting may have changed.
        """
        if self.quantized is None and not self.proofs:
            return
        from zoo.kernels.quantizing.quantized import state_of

        kept = self.quantized or self._bfloat16
        if state_of(self.core) != self._proven_of:
            self._disown("the weights were changed since they were compared")
        elif answering and kept is not None and not kept.made_of(self.core):
            self._disown("the network answers otherwise than when it was compared")
        else:
            return
        self._plans.clear()
        self._weights = self._plain_copy = None
        self._plain_dtype = self.dtype

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take part in a parent's `load_state_dict`."""
        super()._load_from_state_dict(*args, **kwargs)
        self._renew()

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse what would become the network's own unseen."""
        raise AttributeError(f"a fast network takes no {name!r}: register it at plain(model), and call fast(plain(model)) again")

    register_parameter = add_module = register_module = register_buffer

    def __getstate__(self) -> dict[str, Any]:
        """Leave plans and copies out; they belong to this process and device."""
        return {name: value for name, value in self.__dict__.items() if name not in HIDDEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without plans."""
        nn.Module.__init__(self)
        self.__dict__.update(state)
        self.__dict__.setdefault("static", False)
        self.__dict__.setdefault("quantized", None)  # of a pickle from before there was any
        self.__dict__.setdefault("proofs", [])
        self.__dict__.setdefault("_bfloat16", None)
        self.__dict__.setdefault("_proven_of", "")
        self.__dict__.setdefault("told", [])
        self.__dict__.setdefault("parts", {"backbone": "the backbone"} if self.__dict__.pop("part", "") else {})
        self._adopt(state["_network"])
        self._fresh()
        self._keep_proofs()
        if self.quantized is not None:  # another processor than the one that it was certified on, perhaps
            self.quantized = self.quantized.checked()
            if (proof := self.quantized.proof) is not None:  # beside those of other precisions
                self.proofs = [proof if one.precision == proof.precision else one for one in self.proofs] or [proof]

    def __deepcopy__(self, memo: dict[int, Any]) -> Fast:
        """Copy the plain network and the options."""
        twin = Fast.__new__(Fast)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def extra_repr(self) -> str:
        """Show device, dtype and shapes planned so far."""
        return f"device={self.device}, dtype={self.precision if self.quantized is not None else self.dtype}, plans={len(self._plans)}" + (
            f", unchanged: {self.unchanged}" if self.unchanged else ""
        )


HIDDEN = {
    "_background", "_caller", "_plans", "_unplanned", "_lock", "_order", "_weights", "_choices", "_plain_copy", "_plain_dtype", "_doubtful",
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_held", "_fast_parts",
}  # fmt: skip
"""Attributes that a copy or a pickle makes anew."""
OWN = {
    "device",
    "dtype",
    "tf32",
    "progress",
    "tune",
    "unchanged",
    "parts",
    "training",
    "quantized",
    "proofs",
    "told",
    "precision",
    "static",
}
"""Attributes of a fast network that are not its network's."""


@contextmanager
def _without_modes(device: torch.device) -> Iterator[None]:
    """Work by PyTorch's own defaults, whatever the caller's are."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), torch.device("cpu"):
        yield


def _finished(job: Job) -> Built:
    """Put in a plan that was made behind the calls.

    Raises:
        Untraceable: there is none, or it could not be put in, for want of memory say.
    """
    if job.finish is None:
        raise job.error or Untraceable("it was stopped")
    try:
        return job.finish()
    except Untraceable:
        raise
    except Exception as error:  # a full GPU, say: the network can still answer, and the plan is tried once more
        raise Untraceable(f"{type(error).__name__}: {first_line(error)}", lasting=False) from error


def _at_once(build: Callable[[Request], Built], request: Request) -> Finish:
    """Make a plan that nothing is left to do of."""
    built = build(request)
    return lambda: built


def _answer(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    def given(leaf: Tensor) -> Tensor:
        cast = leaf.to(dtype) if leaf.is_floating_point() else leaf
        return cast.contiguous(memory_format=torch.channels_last) if cast.dim() == 4 else cast

    args, kwargs = pytree.tree_map_only(Tensor, given, (args, kwargs))
    with torch.no_grad():
        return network(*args, **kwargs)
