"""First pass: run the network once on tensors without data and write down every ATen operator that it calls.

Control flow that depends on shapes is resolved by the run itself; a trace therefore holds for one shape. What depends on the
values of pixels can't be traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.passes.attention import Whole
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.state import Signs
from zoo.kernels.passes.unloaded import compiler_unloaded

aten = torch.ops.aten

_FREE = {  # what these return holds the values of its first argument, in the same shape
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default, aten.contiguous.default,
}  # fmt: skip
_BY_MEMORY = ("as_strided", "view.dtype", "set_", "resize_", "_foreach_")
"""Operators that depend on how a tensor lies in memory, or change several at once."""
_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
_RANDOM = (
    "rand", "bernoulli", "normal", "dropout", "multinomial", "uniform", "exponential", "poisson", "geometric", "cauchy", "log_normal",
    "native_dropout",
)  # fmt: skip


_WITHOUT_VALUES = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")
"""Operators, by the ends of their names, that take no more of a tensor than its shape and type."""
AGAIN = 3
"""Calls that are compared with the first where that one left a sign."""
VALUES = 10_000
"""Numbers of a constant that are compared."""


def of_values(node: Node) -> list[Node]:
    """Return the nodes whose values this one is computed of; of others it takes the shape and the type."""
    without = node.op == "aten" and node.attrs["func"]._overloadpacket.__name__.endswith(_WITHOUT_VALUES)
    return [] if without else node.inputs


class Ref(int):
    """Stands in an operator's arguments for the node's input of this number."""


class _Shown(Untraceable):
    """Memory was written through one view that another one shows."""


@torch.inference_mode(False)  # in which operators that do nothing in eval mode, such as dropout, come whole
def trace(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None) -> Graph:
    """Record what `network` computes in eval mode for arguments of these shapes.

    Args:
        network: any module; it is neither run nor changed, its copy on the meta device is.
        args: positional arguments; of tensors only shape and dtype matter.
        kwargs: keyword arguments, likewise.
        device: where the constants of the graph are put; the network's own device if None.

    Returns:
        a graph of "input", "const" and "aten" nodes whose constants are the network's parameters, in their own dtype.

    Raises:
        Untraceable: the flow depends on values, an operator is random, one writes into a parameter or buffer, or what the network
            computes depends on its calls before.
        ValueError: the network itself refuses such input; its own message.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        reason = f"{type(network).__name__} is TorchScript, whose operators can't be recorded; call fast on the Python module"
        raise Untraceable(reason, anyway=True)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    try:
        nodes, outputs, out_spec = _recorded(network, leaves, spec, device)
    except _Shown as refusal:
        try:
            nodes, outputs, out_spec = _recorded(network, leaves, spec, device, pure=True)
        except Untraceable as error:
            raise (error if error.anyway else refusal) from None
    graph = Graph(nodes, [node for node in nodes if node.op == "input"], outputs, out_spec)
    if not any(isinstance(leaf, Node) for leaf in graph.outputs):
        raise Untraceable(f"{type(network).__name__} returns no tensor", anyway=True)
    graph.prune()
    return graph


def _recorded(
    network: nn.Module, leaves: list[Any], spec: Any, device: torch.device | None, pure: bool = False
) -> tuple[list[Node], list[Any], Any]:
    """Record a copy of a network, which is called again where that leaves a sign.

    Args:
        network: any module.
        leaves: its arguments.
        spec: their structure.
        device: of constants.
        pure: let PyTorch say each write in place as a new tensor, and of each view what it shows then. A network that keeps tensors is
            refused: from call to call they aren't told apart.

    Returns:
        The nodes; the leaves of what the copy returned, nodes where they are tensors; their structure.
    """
    constants: dict[int, tuple[str, Tensor]] = {}
    twin = _meta_copy(network, constants)
    before, buffers = Signs(twin), dict(twin.named_buffers(remove_duplicate=False))
    recorder = _Recorder(twin, constants, device)
    result = _record(twin, leaves, spec, recorder, pure)
    read = {node.attrs["name"] for node in recorder.nodes if node.op == "const" and "name" in node.attrs}
    for name, buffer in twin.named_buffers(remove_duplicate=False):
        if name in read and buffers.get(name) is not buffer:
            raise Untraceable(f"forward reads {name} and puts another tensor in its place, which a plan would not", anyway=True)
    if before != Signs(twin):
        if pure:
            raise Untraceable("forward keeps something for the next call")
        _refuse_a_memory(twin, leaves, spec, recorder, result)
    outputs, out_spec = pytree.tree_flatten(result)
    return recorder.nodes, [recorder.node_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in outputs], out_spec


def _record(twin: nn.Module, leaves: list[Any], spec: Any, recorder: _Recorder, pure: bool = False) -> Any:
    """Run the copy on tensors without data like `leaves`, under a recorder, and return what comes out."""
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for index, (leaf, original) in enumerate(zip(meta, leaves, strict=True)):
        if isinstance(leaf, Tensor):
            recorder.define(leaf, Node("input", [], {"index": index}, tuple(leaf.shape), original.dtype))
    args, kwargs = pytree.tree_unflatten(meta, spec)
    hooks = _name_layers(twin, recorder)
    call = _pure(twin) if pure else twin
    try:
        with (
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            compiler_unloaded(),
            recorder,
            Whole(),
        ):
            return call(*args, **kwargs)
    except (Untraceable, ValueError):
        raise
    except Exception as error:
        where = recorder.where() or f"{type(twin).__name__}: "
        if "on meta tensors" in str(error) and "item()" in str(error):
            raise Untraceable(
                f"{where}forward asks for a value, as of a branch or `.item()`, which a plan would keep for ever", anyway=True
            ) from error
        raise Untraceable(f"{where}{type(error).__name__}: {first_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _pure(twin: nn.Module) -> Callable[..., Any]:
    """Return a call of the copy in which nothing is written in place, its parameters and buffers among what is not."""
    tables: list[dict[str, Any]] = [table for module in twin.modules() for table in (module._parameters, module._buffers)]
    own = [dict(table) for table in tables]

    def called(held: list[dict[str, Any]], args: Any, kwargs: Any) -> Any:
        for table, shown in zip(tables, held, strict=True):
            table.update(shown)
        try:
            result = twin(*args, **kwargs)
            if any(table.get(name) is not value for table, shown in zip(tables, held, strict=True) for name, value in shown.items()):
                raise Untraceable("forward puts another tensor in a parameter's or buffer's place", anyway=True)
            return result
        finally:
            for table, before in zip(tables, own, strict=True):
                table.update(before)

    call = torch.func.functionalize(called, remove="mutations")
    return lambda *args, **kwargs: call(own, args, kwargs)


def _refuse_a_memory(twin: nn.Module, leaves: list[Any], spec: Any, first: _Recorder, result: Any) -> None:
    """Record a copy again whose first call has left something: what was only put away, such as a grid, changes nothing.

    Raises:
        Untraceable: what it computes of its inputs depends on its calls before, or on random numbers that are not PyTorch's.
    """
    told, of_input = _told(first, result), first.of_input()
    alive, known, stale = first.alive, first.by_tensor, first.stale  # of all calls so far
    for _ in range(AGAIN):
        again = _Recorder(twin, dict(first.constants), first.device)
        for tensor in alive:  # what was computed of an input may not be read in another call
            node = known[id(tensor)]
            if node not in of_input and "tensor" not in node.attrs and id(tensor) not in stale:
                again.define(tensor, Node("const", [], {}, node.shape, node.dtype))
        try:
            result = _record(twin, leaves, spec, again)
        except (Untraceable, ValueError) as error:
            raise Untraceable(
                f"forward keeps something for the next call, which a plan would not: {error}", anyway=True
            ) from None  # no network's
        if told != _told(again, result):
            raise Untraceable("forward computes something else in the next call, which a plan would not", anyway=True)
        of_input |= again.of_input()
        alive, known, stale = [*alive, *again.alive], known | again.by_tensor, stale | again.stale


def _told(recorder: _Recorder, result: Any) -> Any:
    """Write down what is computed of the inputs; of what is not, the shape, and the values where the network has no name for them."""
    of_input = recorder.of_input()
    numbers = {node: number for number, node in enumerate(node for node in recorder.nodes if node in of_input)}

    def constant(node: Node) -> Any:
        held = node.attrs.get("tensor")
        if not isinstance(held, Tensor) or node.attrs.get("name") or held.device.type == "meta" or held.numel() > VALUES:
            return node.shape, str(node.dtype)
        return node.shape, str(node.dtype), held.tolist()

    def refer(node: Node) -> Any:
        return numbers[node] if node in of_input else constant(node)

    steps = [(node.said(), [*map(refer, node.inputs)]) for node in numbers]
    outputs, spec = pytree.tree_flatten(result)
    return steps, [refer(recorder.node_of(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in outputs], repr(spec)


def _meta_copy(network: nn.Module, constants: dict[int, tuple[str, Tensor]]) -> nn.Module:
    """Copy the module structure with every parameter and buffer replaced by one without data, noted in `constants`."""
    memo: dict[int, Any] = {}
    kept: list[Tensor] = []
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in memo:
            continue
        empty: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
        constants[id(empty)] = (name, tensor)
        kept.append(empty)
    try:
        twin = copy.deepcopy(network, memo)
    except Exception as error:
        raise Untraceable(f"{type(network).__name__} can't be copied: {type(error).__name__}: {error}", anyway=True) from error
    return twin.eval()


def _name_layers(twin: nn.Module, recorder: _Recorder) -> list[Any]:
    hooks: list[Any] = []
    for name, module in twin.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(recorder.enter(name)))
            hooks.append(module.register_forward_hook(recorder.leave, always_call=True))
    return hooks


class _Recorder(TorchDispatchMode):
    """Writes a node for every operator; in-place operators make a new node, and older views of that memory become unreadable."""

    def __init__(self, twin: nn.Module, constants: dict[int, tuple[str, Tensor]], device: torch.device | None) -> None:
        super().__init__()
        self.constants, self.device = constants, device
        self.owned = {tensor.untyped_storage()._cdata: name for name, tensor in (*twin.named_parameters(), *twin.named_buffers())}
        self.nodes: list[Node] = []
        self.layer: list[str] = []
        self.by_tensor: dict[int, Node] = {}
        self.stale: dict[int, str] = {}
        self.storage: dict[int, set[int]] = {}
        self.alive: list[Tensor] = []

    def enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self.layer.append(name)

    def leave(self, *_: object) -> None:
        self.layer.pop()

    def where(self) -> str:
        """Name the layer that is running, for the beginning of a message."""
        return f"{self.layer[-1]}: " if self.layer else ""

    def of_input(self) -> set[Node]:
        """Return the nodes whose values depend on those of an input."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.op == "input" or any(source in found for source in of_values(node)):
                found.add(node)
        return found

    def define(self, tensor: Tensor, node: Node) -> None:
        if id(tensor) not in self.by_tensor:
            self.alive.append(tensor)
        self.by_tensor[id(tensor)] = node
        self.storage.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
        self.nodes.append(node)

    def node_of(self, tensor: Tensor) -> Node:
        if writer := self.stale.get(id(tensor)):
            raise _Shown(f"{writer} wrote in place into memory that is read later through another view")
        if (node := self.by_tensor.get(id(tensor))) is not None:
            return node
        if known := self.constants.get(id(tensor)):
            name, real = known
        elif tensor.device.type != "meta":
            name, real = "", tensor
        else:
            raise Untraceable("a tensor appeared that no recorded operator made")
        value = real.detach()
        node = Node("const", [], {"tensor": value.to(self.device) if self.device else value, "name": name}, tuple(real.shape), real.dtype)
        self.define(tensor, node)
        return node

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch to leave `__torch_dispatch__` as it is: wrapped for its compiler, the first trace would load all of that."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket.__name__
        if any(packet.startswith(word) for word in _RANDOM):
            raise Untraceable(f"{self.where()}{packet} is random", anyway=True)
        if packet == "as_strided_" and _moves_nothing(*args, **kwargs):  # a pool to one pixel says so that it is channels_last
            return func(*args, **kwargs)
        if packet == "unfold_backward":  # what PyTorch makes of a write into windows forgets what lies between them
            raise Untraceable(f"{self.where()}windows of a tensor were written in place", anyway=True)
        if any(f"{packet}.{func._overloadname}".startswith(word) for word in _BY_MEMORY):
            raise Untraceable(f"{self.where()}{packet} depends on how tensors lie in memory")
        inputs: list[Node] = []

        def refer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            inputs.append(self.node_of(leaf))
            return Ref(len(inputs) - 1)

        noted_args, noted_kwargs = pytree.tree_map(refer, (tuple(args), dict(kwargs)))
        result = func(*args, **kwargs)
        layers = (self.layer[-1],) if self.layer else ()
        writes = [
            arg
            for schema, arg in zip(func._schema.arguments, args, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write and isinstance(arg, Tensor)
        ]
        writes += [t for name, t in kwargs.items() if name == "out" and isinstance(t, Tensor)]
        if func in _FREE and isinstance(result, Tensor) and not writes:
            self.by_tensor[id(result)] = inputs[0]
            self.alive.append(result)
            self.storage.setdefault(result.untyped_storage()._cdata, set()).add(id(result))
            return result
        written = writes if packet not in _NORMS else _statistics(func, args, kwargs)
        if own := next((name for t in written if (name := self.owned.get(t.untyped_storage()._cdata))), ""):
            raise Untraceable(f"{self.where()}{packet} changes {own} in every call", anyway=True)
        attrs = {"func": func, "args": noted_args, "kwargs": noted_kwargs}
        if isinstance(result, Tensor):
            for tensor in writes:
                for other in self.storage.get(tensor.untyped_storage()._cdata, set()) - {id(tensor)}:
                    self.stale[other] = f"{layers[0]} ({packet})" if layers else packet
            self.define(result, Node("aten", inputs, attrs, tuple(result.shape), result.dtype, layers=layers))
        elif isinstance(result, tuple | list):
            if written:
                raise Untraceable(f"{packet} writes in place and returns several tensors")
            first = next((item.dtype for item in result if isinstance(item, Tensor)), torch.float32)
            whole = Node("aten", inputs, attrs, (), first, layers=layers)
            self.nodes.append(whole)
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    self.define(item, Node("item", [whole], {"index": index}, tuple(item.shape), item.dtype, layers=layers))
        elif result is not None:
            raise Untraceable(f"{packet} reads a value")
        return result


def _moves_nothing(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> bool:
    """Tell whether strides leave each number of a tensor where it is: those along a dimension of one mean nothing."""
    same = tuple(size) == x.shape and storage_offset in (None, x.storage_offset())
    return same and all(count == 1 or old == new for count, old, new in zip(size, x.stride(), stride, strict=True))


def _statistics(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the running statistics that a batch normalisation updates: none in eval mode."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if not given.get("training", "no_training" not in str(func)):
        return []
    return [t for name in ("running_mean", "running_var") if isinstance(t := given.get(name), Tensor)]
