"""What each of two processes runs: fast networks under DistributedDataParallel and `fully_shard`, beside eager ones."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zoo import fast, why
from zoo.finetuning.norms import share_norms
from zoo.kernels.training import fast_step


class Net(nn.Module):
    """Convolutions whose norms may share statistics, in an order that differs between the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.side, self.second = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.deep, self.third = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.stem(x)))
        y = self.third(self.deep(x))
        x = torch.relu(y + self.second(self.side(x)))
        return self.head(x.mean((2, 3)))


def learn(called: Any, parameters: Any, x: Tensor) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        called(x).square().mean().backward()
        optimizer.step()


def steps(called: nn.Module, parameters: Any, x: Tensor) -> str:
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    step = fast_step(called, lambda outputs, target: (outputs - target).square().mean(), optimizer, dtype=None)
    for _ in range(2):
        step(x, torch.zeros(4))
    return step.unchanged


def whole(network: nn.Module) -> dict[str, Tensor]:
    """All tensors, those that were divided put together."""
    found: dict[str, Any] = {name: tensor.detach() for name, tensor in (*network.named_parameters(), *network.named_buffers())}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}


def main(rank: int, store: str, out: str) -> None:
    """Run one process and keep what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    network, found = Net().train(), {}
    x = torch.randn(2, 4, 3, 8, 8)[rank]
    for name in ("copied", "shared", "stepped", "stepped as it is", "divided", "divided in parts"):
        eager, quick = copy.deepcopy(network), copy.deepcopy(network)
        if name == "shared":
            share_norms(eager)
            share_norms(quick)
        model = fast(quick, train=True, example=x)
        kernels = [row.kernel for row in why(model).rows]
        if name.startswith("divided"):
            mesh = init_device_mesh("cpu", (2,))
            if name == "divided in parts":
                fully_shard(quick.stem, mesh=mesh)
                fully_shard(eager.stem, mesh=mesh)
            learn(fully_shard(eager, mesh=mesh), eager.parameters(), x)
            learn(fully_shard(model, mesh=mesh), model.parameters(), x)
        elif name.startswith("stepped"):
            wrapped = nn.parallel.DistributedDataParallel(model)
            if name == "stepped as it is":
                wrapped.register_comm_hook(None, allreduce_hook)
            learn(nn.parallel.DistributedDataParallel(eager), eager.parameters(), x)
            found[name, "unchanged"] = steps(wrapped, quick.parameters(), x)
        else:
            learn(nn.parallel.DistributedDataParallel(eager), eager.parameters(), x)
            learn(nn.parallel.DistributedDataParallel(model), quick.parameters(), x)
        found[name] = (whole(eager), whole(quick), kernels, model.unchanged)
    torch.save(found, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreting  # beside this file

        interpreting.install()
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
