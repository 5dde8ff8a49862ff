"""Fourth pass: make one step of what one kernel can do.

    convolution + bias (+ residual) + activation          "conv"
    BatchNorm + activation in front of a 1x1 or a pool    its prologue (DenseNet)
    squeeze-excite                                        "squeeze_excite", its product in the prologue of the 1x1 behind it
    an average less its pixel (* scale) (+ residual)      its "pool" (MetaFormers)
    everything element-wise that is left                  "pointwise"

Every step's `roles` and `attrs` are then the arguments of the kernels in `ops/`. Steps that *may* be joined further, where timing
decides, are `merge.py`'s matter.
"""

from __future__ import annotations

from zoo.kernels.passes.graph import OUTSIDE, Graph, Node, joined
from zoo.kernels.passes.kinds import is_pointwise


def fuse(graph: Graph) -> None:
    """Fuse until nothing more can be fused."""
    for rule in (_pools_first, _differences, _mixers, _epilogues, _elementwise, _prologues, _gates, _squeeze_excite):
        users = graph.users()
        for node in list(graph.nodes):
            if node in users:  # not swallowed meanwhile
                rule(graph, node, users)
        graph.prune()


Users = dict[Node, list[Node]]


def _single(node: Node, users: Users) -> bool:
    return len(users[node]) == 1


def _absorb(graph: Graph, into: Node, node: Node, users: Users) -> None:
    """Let `into` take the place of `node`, which it computes now."""
    into.layers = joined(into, node)
    graph.replace(node, into)
    users[into] = users.pop(node)
    for source in node.inputs:
        if source in users and source is not into:
            users[source] = [into if reader is node else reader for reader in users[source]]


def _pools_first(graph: Graph, node: Node, users: Users) -> None:
    """Average before a linear 1x1 convolution instead of behind it: the same sum, with a quarter of the products."""
    if node.op != "pool" or node.attrs["kind"] != "avg" or any(node.attrs["padding"]) or node.attrs["ceil_mode"]:
        return
    conv = node.inputs[0]
    if not is_pointwise(conv) or not _single(conv, users) or conv.attrs["act"] != "none" or len(conv.inputs) > 1:
        return
    source = conv.inputs[0]
    pool = Node("pool", [source], dict(node.attrs), (*source.shape[:2], *node.shape[2:]), node.dtype, ["x"], node.layers)
    late = Node("conv", [pool], dict(conv.attrs), node.shape, node.dtype, ["x"], conv.layers)
    users[source] = [pool if reader is conv else reader for reader in users[source]]
    users[pool], users[late] = [late], users.pop(node)
    graph.nodes += [pool, late]
    graph.replace(node, late)
    users.pop(conv)


def _differences(graph: Graph, node: Node, users: Users) -> None:
    """Let a pool subtract a map from its averages, where the network does so behind it."""
    if node.op != "add":
        return
    for pool, other in (node.inputs, node.inputs[::-1]):
        free = pool.op == "pool" and pool.attrs["kind"] == "avg" and _single(pool, users) and _negates(other)
        if free and _read(graph, pool, "less", other.inputs[0], node, users):
            return


def _mixers(graph: Graph, node: Node, users: Users) -> None:
    """A factor of such a difference, and a map that is added behind it, join the pool too."""
    if node.op == "affine":
        pool = node.inputs[0]
        free = pool.op == "pool" and "less" in pool.roles and "residual" not in pool.roles and pool.attrs.get("factor") is None
        if free and _single(pool, users) and not bool(node.attrs["shift"].any()):
            pool.attrs["factor"] = node.attrs["scale"].float()
            _absorb(graph, pool, node, users)
    elif node.op == "add":
        for pool, other in (node.inputs, node.inputs[::-1]):
            free = pool.op == "pool" and "less" in pool.roles and "residual" not in pool.roles and _single(pool, users)
            if free and _read(graph, pool, "residual", other, node, users):
                return


def _read(graph: Graph, step: Node, role: str, other: Node, node: Node, users: Users) -> bool:
    """Let a step read another value, and compute what `node` does of both, if that value can be there before it; tell whether it can."""
    if other.op == "const" or other.shape != step.shape or _reaches(other, step):
        return False
    step.add_input(role, other)
    _absorb(graph, step, node, users)
    graph.nodes.remove(step)  # it is computed where the sum was
    graph.nodes.insert(graph.nodes.index(node), step)
    return True


def _negates(node: Node) -> bool:
    return node.op == "affine" and bool((node.attrs["scale"] == -1).all()) and not bool(node.attrs["shift"].any())


def _epilogues(graph: Graph, node: Node, users: Users) -> None:
    """Residual and activation join the convolution in front of them."""
    if node.op == "act" and (conv := node.inputs[0]).op == "conv" and _single(conv, users) and conv.attrs["act"] == "none":
        conv.attrs["act"] = node.attrs["act"]
        _absorb(graph, conv, node, users)
    elif node.op == "add":
        order = {n: i for i, n in enumerate(graph.nodes)}
        both = sorted(node.inputs, key=lambda n: order[n], reverse=True)  # the later one can wait for the other
        if both[0] is both[1]:
            return
        for conv, other in (both, both[::-1]):
            free = conv.op == "conv" and _single(conv, users) and conv.attrs["act"] == "none" and conv.argument("residual") is None
            if free and not _reaches(other, conv):
                conv.add_input("residual", other)
                _absorb(graph, conv, node, users)
                graph.nodes.remove(conv)  # it is computed where the sum was
                graph.nodes.insert(graph.nodes.index(node), conv)
                return


def _reaches(start: Node, target: Node) -> bool:
    """Tell whether `start` is computed from `target`."""
    stack, seen = [start], set[Node]()
    while stack:
        node = stack.pop()
        if node is target:
            return True
        if node not in seen:
            seen.add(node)
            stack += node.inputs
    return False


def _elementwise(graph: Graph, node: Node, users: Users) -> None:
    """Affine, gate, sum and activation become a "pointwise" step, in the order that its kernel has."""
    if node.op not in ("affine", "gate", "add", "act") or len(node.shape) != 4:
        return None
    source = node.inputs[0]
    if node.op in ("gate", "add", "act") and source.op == "pointwise" and _single(source, users) and source.shape == node.shape:
        a = source.attrs
        late = "gate" in source.roles or "residual" in source.roles or a["act"] != "none"
        if node.op == "act" and not late and a["pre_act"] == "none":
            a["pre_act"] = node.attrs["act"]
            return _absorb(graph, source, node, users)
        if node.op == "act" and a["act"] == "none":
            a["act"] = node.attrs["act"]
            return _absorb(graph, source, node, users)
        if node.op == "gate" and not late:
            return _extend(graph, source, node, "gate", users)
        if node.op == "add" and a["act"] == "none" and "residual" not in source.roles and not _reaches(node.inputs[1], source):
            return _extend(graph, source, node, "residual", users)
    if node.op == "add" and _can_add(other := node.inputs[1], users) and other is not source and not _reaches(source, other):
        node.inputs.reverse()
        return _extend(graph, other, node, "residual", users)
    roles = {"affine": ["x"], "act": ["x"], "gate": ["x", "gate"], "add": ["x", "residual"]}[node.op]
    attrs = {"scale": None, "shift": None, "pre_act": "none", "act": "none"}
    if node.op == "affine":
        attrs |= {"scale": node.attrs["scale"].float(), "shift": node.attrs["shift"].float()}
    if node.op == "act":
        attrs["pre_act"] = node.attrs["act"]
    node.op, node.roles, node.attrs = "pointwise", roles, attrs
    return None


def _can_add(step: Node, users: Users) -> bool:
    return step.op == "pointwise" and _single(step, users) and step.attrs["act"] == "none" and "residual" not in step.roles


def _extend(graph: Graph, step: Node, node: Node, role: str, users: Users) -> None:
    step.add_input(role, node.inputs[1])
    _absorb(graph, step, node, users)
    graph.nodes.remove(step)
    graph.nodes.insert(graph.nodes.index(node), step)


def _prologues(graph: Graph, node: Node, users: Users) -> None:
    """An affine layer with its activation is done by those that read it, if all of them can."""
    if node.op != "pointwise" or node.attrs["act"] != "none" or len(node.inputs) > 1 or node.attrs["scale"] is None:
        return
    if not users[node] or not all(_takes_prologue(reader) and reader.inputs[0] is node for reader in users[node]):
        return
    if any(reader.inputs.count(node) > 1 for reader in users[node]):  # which would read it all the same
        return
    for reader in users[node]:
        reader.attrs.update(scale=node.attrs["scale"], shift=node.attrs["shift"], pre_act=node.attrs["pre_act"])
        reader.inputs[0] = node.inputs[0]
        reader.layers = joined(node, reader)
    source = node.inputs[0]
    users[source] = [reader for reader in users[source] if reader is not node] + users.pop(node)


def _takes_prologue(node: Node) -> bool:
    if node is OUTSIDE or node.attrs.get("scale") is not None or node.attrs.get("pre_act", "none") != "none" or "gate" in node.roles:
        return False
    return node.op in ("pool", "mean") or is_pointwise(node)


def _gates(graph: Graph, node: Node, users: Users) -> None:
    """The product with squeeze-excite's gate is done by the 1x1 convolution that reads it."""
    if node.op != "pointwise" or node.roles != ["x", "gate"] or node.attrs["act"] != "none" or node.attrs["scale"] is not None:
        return
    if node.attrs["pre_act"] != "none" or not _single(node, users):
        return
    reader = users[node][0]
    if not is_pointwise(reader) or reader.inputs[0] is not node or reader.attrs.get("scale") is not None or "gate" in reader.roles:
        return
    reader.inputs[0] = node.inputs[0]
    reader.add_input("gate", node.inputs[1])
    reader.layers = joined(node, reader)
    for source in node.inputs:
        users[source] = [reader if r is node else r for r in users[source]]
    users.pop(node)


def _squeeze_excite(graph: Graph, node: Node, users: Users) -> None:
    """Mean, 1x1, activation, 1x1, gate function: one step from the map to the gate."""
    if node.op != "mean" or node.attrs.get("scale") is not None or not _single(node, users):
        return
    first = users[node][0]
    if not _is_dense(first) or not _single(first, users):
        return
    second = users[first][0]
    if not _is_dense(second) or second.inputs[0] is not first:
        return
    attrs = {
        "weight1": first.attrs["weight"].flatten(1), "bias1": first.attrs["bias"], "act": first.attrs["act"],
        "weight2": second.attrs["weight"].flatten(1), "bias2": second.attrs["bias"], "gate_act": second.attrs["act"],
    }  # fmt: skip
    if not all(reader is not OUTSIDE and reader.argument("gate") is second for reader in users[second]):
        return
    step = Node("squeeze_excite", [node.inputs[0]], attrs, second.shape, second.dtype, ["x"], joined(node, first, second))
    graph.nodes.insert(graph.nodes.index(second), step)
    users[step] = users.pop(second)
    graph.replace(second, step)


def _is_dense(node: Node) -> bool:
    return is_pointwise(node) and node.shape[2:] == (1, 1) and len(node.inputs) == 1 and node.attrs.get("scale") is None
