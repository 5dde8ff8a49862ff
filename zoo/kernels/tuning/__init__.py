"""From a graph of steps to a kernel for each: what could compute a step, checked and timed at its shape.

steps      the kinds of steps, the ops that could compute each, and the arguments that an op takes of a step
binding    a step bound to a kernel, its constants packed
candidates which kernels, with which launch parameters, could compute a step with its inputs
tasks      a candidate as work for `zoo.kernels.compilation`, which fills Triton's cache
expected   what a step should compute, of its first and last images where they are many
contest    times candidates, each only after its result was right
choices    what contests have found, kept between processes in a file
choose     takes what is known, holds contests for what isn't, and applies the merges that pay
"""
