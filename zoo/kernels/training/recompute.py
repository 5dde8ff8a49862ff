"""Keep what a BatchNorm read, not what it made: what the layer behind it needs of that is computed again on the way back.

PyTorch keeps two maps for a convolution with BatchNorm and activation: one for BatchNorm's gradient, one for that of the next layer's
weights. The second follows from the first in one pass of the memory, so that a step that keeps only the first trades time for room.
So does, in one product, what a 1x1 convolution makes of few channels that are kept anyway: the widest maps of a bottleneck. And so does
what a network's first convolution makes of images: VGG's largest map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.comparing.precision import uncast
from zoo.kernels.training import kernels
from zoo.kernels.training.calls import CONV2D, arguments, convolution_of, pair
from zoo.kernels.training.record import Call, Recording, Ref, saved_tensor_hooks
from zoo.kernels.training.rounding import to_round

SHARE = 0.25
"""Of the maps of a step: recomputing pays where it frees as much. Below, as in bottlenecks whose sums stay, it costs more than it gives."""

WORTH = 256 << 20
"""Bytes: where as much is freed, two kinds of maps are made again whatever the share is: what a first convolution makes of images
(`remakes`), and what a BatchNorm makes for a chain that `frees` a map. Either is a pass over few channels. ResNet50 gives 2 to 3 % of its
time for 8 % of its room (256 images, H200). In small steps time is what counts."""

_LOOK = {"mean", "add", "add_", "__add__", "__iadd__"}
"""Calls whose gradients need nothing of the maps that they read; a pool to one pixel is a mean, one to more keeps its map."""


@dataclass(frozen=True, slots=True)
class Remade:
    """Maps that are not kept.

    Attributes:
        maps: of each step that would keep such maps, by its place, their numbers.
        convs: of each BatchNorm that would keep what a 1x1 convolution made of fewer channels, by its place, the convolution's place.
    """

    maps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    convs: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.maps.values())) + len(self.convs)


def remade(recording: Recording, steps: Sequence[Any], asked: bool | None, worth: int = WORTH) -> Remade:
    """Choose the maps that are not kept.

    Args:
        recording: of a network.
        steps: what runs: calls and chains.
        asked: True for all that can be made again, False for none; None for those that one pass makes, as far as `SHARE` and `worth` say.
        worth: bytes, as `WORTH`; 0 where another number of images would free more.
    """
    if asked is False:
        return Remade()
    readers: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for number in dict.fromkeys(step.reads):
            readers.setdefault(number, []).append(index)
    found = _able(recording, steps, readers)
    if not asked:
        found = _worth_it(recording, steps, found, worth)
    maps: dict[int, tuple[int, ...]] = {}
    for maker, keeper in found:
        maps[keeper] = (*maps.get(keeper, ()), steps[maker].makes)
    return Remade(maps, _widened(recording, steps, readers) if asked else {})


def _able(recording: Recording, steps: Sequence[Any], readers: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Return the chains whose maps could be made again, each with the one step that would keep its map, by their places."""
    outputs = {int(leaf) for leaf in recording.outputs if isinstance(leaf, Ref)}
    found: list[tuple[int, int]] = []
    for index, step in enumerate(steps):
        if isinstance(step, Call) or not (step.remakes or _norm_alone(step)) or step.makes in outputs:
            continue
        if step.row_out is not None or step.branch_out is not None:
            continue
        who = [(reader, _keeps(recording, steps[reader], step.makes)) for reader in readers.get(step.makes, [])]
        keepers = [reader for reader, keeps in who if keeps]
        if len(keepers) == 1 and not any(keeps is None for _, keeps in who):
            found.append((index, keepers[0]))
    return found


def _worth_it(recording: Recording, steps: Sequence[Any], found: list[tuple[int, int]], worth: int) -> list[tuple[int, int]]:
    """Return those that nobody need ask for: all BatchNorms' where they are a large share of a step's maps; few passes that free much."""

    def size(some: list[tuple[int, int]]) -> int:
        return sum(_bytes(recording, steps[maker].makes) for maker, _ in some)

    maps = {number for step in steps for number in (step.makes if isinstance(step, Call) else (step.makes,))}
    norms = [pair for pair in found if not steps[pair[0]].remakes]
    largely = size(norms) >= SHARE * sum(_bytes(recording, number) for number in maps)
    few = [pair for pair in found if steps[pair[0]].remakes and not steps[pair[0]].frees]  # which has saved more time than this would cost
    few += [] if largely else [pair for pair in norms if not isinstance(steps[pair[1]], Call) and steps[pair[1]].frees]
    return (norms if largely else []) + (few if size(few) >= worth else [])


def _widened(recording: Recording, steps: Sequence[Any], readers: dict[int, list[int]]) -> dict[int, int]:
    """Find the BatchNorms that alone read what a 1x1 convolution makes of fewer channels, and those convolutions, by their places."""
    outputs = {int(leaf) for leaf in recording.outputs if isinstance(leaf, Ref)}
    together = set(to_round(recording, steps)[0])
    makers = {int(s.result): index for index, s in enumerate(steps) if isinstance(s, Call) and _widens(recording, s, together)}
    norms = [(index, step.reads[0]) for index, step in enumerate(steps) if not isinstance(step, Call) and step.norm is not None]
    return {index: makers[x] for index, x in norms if x in makers and readers[x] == [index] and x not in outputs}


def _widens(recording: Recording, call: Call, together: set[int]) -> bool:
    """Tell a 1x1 convolution of few channels into more; what it reads is in its result's dtype, or in `together`, rounded to that.

    Where autocast casts for it alone, PyTorch keeps that copy, and whoever changes the original meanwhile may.
    """
    conv = convolution_of(recording.values, call)
    if conv is None or (conv.bias, conv.groups, conv.padding) != (None, 1, (0, 0)):
        return False
    x, weight, dtype = recording.values[conv.x], recording.values[conv.weight], recording.values[conv.makes].dtype
    out, fewer, *kernel = weight.shape
    cast = x.dtype != dtype or (weight.dtype != dtype and conv.weight not in together)
    return kernel == [1, 1] and not cast and out >= kernels.WIDER * fewer


def _norm_alone(step: Any) -> bool:
    return step.norm is not None and not step.norm["residual"] and len(step.reads) == _OF_A_NORM


_OF_A_NORM = 5
"""What a BatchNorm alone reads: the map, weight, bias and both running statistics. A convolution joined to it reads more."""


def _keeps(recording: Recording, step: Any, number: int) -> bool | None:
    """Tell whether a step keeps a map that it reads for its gradient; None where that is not known."""
    if isinstance(step, Call):
        if step.name == "conv2d":
            return list(step.reads).count(number) == 1 and int(step.args[0]) == number if step.args else None
        mean = step.name == "adaptive_avg_pool2d" and recording.values[step.result].shape[2:] == (1, 1)
        return False if mean or step.name in _LOOK else None
    if step.keeps_no_map:
        return False
    if step.branch_out is not None or number not in step.reads:
        return None
    if step.op == "scale_channels":
        return True if step.reads[-1] == number != step.reads[0] else None
    if step.norm is not None:
        added = step.norm["residual"] and step.norm["act"] == "none" and step.reads[-1] == number != step.reads[0]
        return False if added else None
    if step.fresh and step.reads[-1] == number != step.reads[0]:
        return False
    return True if step.reads[0] == number and step.calls[0].name == "conv2d" else None


def _bytes(recording: Recording, number: int) -> int:
    """Return the size of a map; 0 of anything else, which is small."""
    if number >= len(recording.values) or len(recording.values[number].shape) != 4:
        return 0
    return prod(recording.values[number].shape) * recording.values[number].dtype.itemsize


def as_is(tensor: Tensor) -> Tensor:
    """Keep a tensor, or give it back: the hook of a check, beside which nobody else's may pack what it saves."""
    return tensor


@dataclass(slots=True)
class Widened:
    """What a 1x1 convolution read, or what that is made again from, and its weight, as they are kept; and what it makes.

    Where what BatchNorm makes of it is made again too, it is asked for twice, and there in between.
    """

    x: Any
    weight: tuple[Tensor, int]
    stride: tuple[int, int]
    dtype: torch.dtype
    twice: bool
    there: Tensor | None = None

    def made(self) -> Tensor:
        """Convolve once more, or give what the last time made."""
        if self.there is not None:
            made, self.there = self.there, None
            return made
        with torch.no_grad(), uncast(self.weight[0].device.type):
            made = F.conv2d(_unpacked(self.x).to(self.dtype), _unpacked(self.weight).to(self.dtype), stride=self.stride)
        self.there = made if self.twice else None
        return made


def noting(
    run: Callable[[list[Any]], None], call: Call, how: int, dtype: torch.dtype, again: bool, twice: bool
) -> Callable[[list[Any]], None]:
    """Return a convolution that leaves in a slot what it makes its map from; nothing where that is no gain.

    Args:
        run: runs the convolution.
        call: the convolution.
        how: the slot.
        dtype: of what it makes.
        again: of its input, too, no more is kept than how it is made.
        twice: what BatchNorm makes of its map is made again too.
    """
    given = arguments(call, CONV2D)
    assert given is not None
    x, weight, stride, makes = int(given["input"]), int(given["weight"]), pair(given["stride"]), int(call.result)

    def step(slots: list[Any]) -> None:
        run(slots)
        slots[how] = None
        if not torch.is_grad_enabled() or _packed_elsewhere():
            return
        kept_anyway = slots[weight].requires_grad  # for the weight's own gradient
        if kept_anyway or slots[makes].numel() > slots[x].numel():
            node = kernels.kept_of(slots[x]) if again else None
            slots[how] = Widened(_kept(slots[x]) if node is None else node, _kept(slots[weight]), stride, dtype, twice)

    return step


def without_keeping(
    run: Callable[[list[Any]], None], numbers: tuple[int, ...], widened: tuple[int, int] | None = None
) -> Callable[[list[Any]], None]:
    """Return a step that keeps, of the maps with these numbers, how to make them again.

    Where somebody packs what is saved, a checkpoint or one who moves it elsewhere, everything is theirs. `widened` are the number of what a
    convolution made, and of the slot that says how, which is empty behind the step.
    """

    def step(slots: list[Any]) -> None:
        made = [] if _packed_elsewhere() else [(slots[number], kernels.kept_of(slots[number])) for number in numbers]
        how = {(value.data_ptr(), value.shape, value.dtype): node for value, node in made if node is not None}
        if widened is not None:
            value, recipe, slots[widened[1]] = slots[widened[0]], slots[widened[1]], None
            if recipe is not None:
                how[value.data_ptr(), value.shape, value.dtype] = recipe
        if not how:
            run(slots)
            return

        def pack(tensor: Tensor) -> Any:  # detached: an output would keep the node that keeps it
            found = how.get((tensor.data_ptr(), tensor.shape, tensor.dtype))
            return _kept(tensor) if found is None else found

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
            run(slots)

    return step


def remaking(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a chain's function that keeps what its map is made again from instead of the map, unless somebody else packs what is saved."""

    def remade(*tensors: Any, **options: Any) -> Any:
        return run(*tensors, **options, again=not _packed_elsewhere())

    return remade


def _kept(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _packed_elsewhere() -> bool:
    top = saved_tensor_hooks()
    return top is not None and top[0] is not as_is


def _unpacked(kept: Any) -> Tensor:
    if isinstance(kept, Widened):
        return kept.made()
    if not isinstance(kept, tuple):
        return kernels.made_again(kept)
    tensor, version = kept
    if tensor._version != version:  # hooks take autograd's own question away
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation between forward and backward: "
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        )
    return tensor
