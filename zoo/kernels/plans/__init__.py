"""From steps and their kernels to what answers calls of one shape on a GPU.

build      the way from a network to a plan: passes, balance, choice, proof
balance    rounds weights for half precision so that outputs keep their means
arena      one piece of memory for a run's maps, those over each other that are never there at once
program    the bound steps, run one after the other
plan       the same, captured as a CUDA graph, with buffers for what comes in
proving    compares a plan with the network, before and behind its capture; what is worse than ATen's falls back
rows       what `why` shows of it
"""
