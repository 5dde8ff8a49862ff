"""From steps and their kernels to what answers calls on a GPU.

balance    rounds weights for half precision so that outputs keep their means
program    the bound steps, run one after the other
plan       the same, captured as a CUDA graph, with buffers for what comes in
"""
