"""Training on the zoo's kernels: `fast(model, train=True)` and `fast_step`.

record     the functions of PyTorch that a network calls in a step, at one shape, without data
chains     what of them one kernel does: BatchNorm + residual + activation, depthwise convolutions, gates, pools
replay     the calls again, under autograd, with the network's own parameters
checking   each chain, then the whole network, against float32 before anything is handed over
network    the module that answers calls
step       a whole step of training as one CUDA graph
"""

from zoo.kernels.training.network import FastTraining
from zoo.kernels.training.step import FastStep, fast_step

__all__ = ["FastStep", "FastTraining", "fast_step"]
