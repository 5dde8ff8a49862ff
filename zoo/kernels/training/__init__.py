"""Training on the zoo's kernels: `fast(model, train=True)` and `fast_step`.

In reading order:

beginning     what `fast` does before it returns; `network` is the module that answers calls
planning      what a kind of call will run: recorded, its chains found, checked, timed
record        the functions of PyTorch that a network calls in a step, at one shape, without data; `calls` reads them
chains        what of them one kernel does, by rules in `convolutions`, `joins`, `shortcuts` and `blocks`; `finder` knows what they may
kernels       what chains call: `zoo.kernels.differentiable` on a GPU, PyTorch's functions on a CPU
replay        the calls again, chains in the place of theirs, under autograd, with the network's own parameters
recompute     which maps a step makes again on the way back; `rounding` casts weights for autocast, many at once
checking      each chain, then the whole network, against float32 before anything is handed over
choosing      which chains are faster than what they stand for; `compiling` has their kernels ready before
contest       chains alone, with PyTorch's compiler between them, or the compiler alone; `segments` are what it is given
windows       what kernels go back through inside of a segment: attention in windows; sums, layer norms and activations, which
              `residual_streams` finds, and `response_norms`
shared        BatchNorms over several processes, which have to decide alike
step          a whole step of training as one CUDA graph: `optimizing` prepares the optimiser, `exchanging` does DDP's work
"""

from zoo.kernels.training.network import FastTraining
from zoo.kernels.training.step import FastStep, fast_step

__all__ = ["FastStep", "FastTraining", "fast_step"]
