"""From a network to a graph of steps that kernels can compute: nothing here needs a device or a clock.

graph      what the passes hand to each other: nodes in the order of their execution
trace      the network's ATen operators at one input shape
lower      what they mean: convolution, BatchNorm, pool …
fold       BatchNorm into weights, padding into convolutions
fuse       what one kernel does: convolution + bias + residual + activation …
place      parts of concatenations, computed where they belong
merge      steps that may become one kernel, where the clock decides
"""
