"""Arrays as Julia has them, for who translates a script of Torch.jl or Flux: `tensor`, `collect` and `torch`, as Torch.jl spells them."""

from zoo.julia.arrays import collect, tensor, torch

__all__ = ["collect", "tensor", "torch"]
