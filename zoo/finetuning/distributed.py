"""Several processes, on one machine or many: who they are, and how a network becomes one over all of them.

The loss is a mean over the images of a whole step, so the mean of the processes' gradients is the gradient of one process that
has them all. BatchNorm takes its statistics over all processes; with more than one, every number is the same as with one, but for
the order of sums and the draws of dropout, which differ between processes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run.

    Attributes:
        rank: this one's number, 0 writes the files.
        size: how many there are.
        device: where this one computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Give every process the values of all, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" and self.device.index is not None else None)


@contextmanager
def world(device: str | None) -> Iterator[World]:
    """Join the processes that torchrun started; alone where it started none.

    Args:
        device: "cpu", "cuda" or "cuda:1"; None takes a GPU where there is one.

    Raises:
        ValueError: the device is none, or not there; or there are more processes than GPUs.
    """
    rank, size, local = _who()
    place = chosen(device, local if size > 1 else None)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if size == 1 or dist.is_initialized():
        yield World(rank, size, place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    try:
        yield World(rank, size, place)
    finally:
        dist.destroy_process_group()


def _who() -> tuple[int, int, int]:
    """Return this process's number, how many there are, and its number on this machine: the caller's group's, else torchrun's."""
    told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        numbers = {name: int(value) for name, value in told.items() if value is not None}
    except ValueError:
        raise ValueError(f"the environment's {told} are no numbers; start the processes with torchrun") from None
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return rank, size, numbers.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count()))
    if "WORLD_SIZE" not in numbers and numbers.get("RANK", 0):
        raise ValueError(
            f"RANK is {numbers['RANK']} and WORLD_SIZE is not set, so this process is one of unknown many; start them with torchrun, which "
            "sets both"
        )
    return numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1), numbers.get("LOCAL_RANK", 0)


def chosen(device: str | None, local: int | None) -> torch.device:
    """Turn a device's name into a device; `local` is the process's number on this machine, where there are several."""
    there = torch.cuda.is_available()
    try:
        place = torch.device(device or ("cuda" if there else "cpu"))
    except RuntimeError:
        raise ValueError(f'a device is "cpu", "cuda" or "cuda:1", got {device!r}') from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f'a device is "cpu", "cuda" or "cuda:1", got {device!r}')
    if place.type == "cpu":
        return place
    index = local if local is not None and place.index is None else place.index or 0
    if not there or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if there else 0
        if not count:
            raise ValueError(f'there is no cuda:{index}: this machine has no GPU; leave the device out, or say "cpu"')
        raise ValueError(f"there is no cuda:{index}: this machine has {count} GPUs; start as many processes as GPUs, or device='cpu'")
    return torch.device("cuda", index)


def spread(model: nn.Module, here: World, units: list[nn.Module], fsdp: bool) -> nn.Module:
    """Make one network of all processes' networks.

    Args:
        model: on the device; with `fsdp` anywhere, and its parameters become divided tensors on the device, in place.
        here: the processes.
        units: the layers that FSDP gathers one after the other.
        fsdp: whether to divide parameters, gradients and optimiser.

    Returns:
        What is to be called in a step.
    """
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(here.device.type, (here.size,))
        for part in (*units, model):  # in float32, autocast does the rest: BatchNorm takes no statistics of another type than its weights
            fully_shard(part, mesh=mesh)
        return model
    if here.size == 1:
        return model
    indices = [here.device.index] if here.device.type == "cuda" else None
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # the name before torch 2.15
    still: dict[str, Any] = {name: False}
    return nn.parallel.DistributedDataParallel(model, device_ids=indices, **still)


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor, on the CPU, that FSDP may have divided; every process has to ask."""
    full: Any = getattr(x, "full_tensor", None)
    return (x if full is None else full()).detach().to("cpu", copy=True).contiguous()


def fill(target: Tensor, value: Tensor) -> None:
    """Put the whole tensor `value` into `target`, which FSDP may have divided."""
    mesh = getattr(target, "device_mesh", None)
    with torch.no_grad():
        if mesh is None:
            target.copy_(value)
            return
        from torch.distributed.tensor import distribute_tensor

        target.copy_(distribute_tensor(value.to(target.device), mesh, target.placements))  # pyright: ignore[reportAttributeAccessIssue]


def own(x: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP divided, or all of another."""
    part: Any = getattr(x, "to_local", None)
    return x if part is None else part()
