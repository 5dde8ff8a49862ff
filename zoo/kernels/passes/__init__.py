"""From a network to a graph of steps that kernels can compute: nothing here needs a device or a clock.

graph      what the passes hand to each other: nodes in the order of their execution
trace      the network's ATen operators at one input shape; `state`: signs that the next call may compute something else;
           `attention`: what stays one operator
lower      what they mean: convolution, BatchNorm, pool …
           `aten`: what a node says of its operator, and how that is run; `pixels`: maps seen with their channels last;
           `constants`: what no input goes into
fold       BatchNorm into weights, padding into convolutions
fuse       what one kernel does: convolution + bias + residual + activation …
place      parts of concatenations, computed where they belong
apart      whether images are answered one by one: so that a CPU's engine may take a batch in parts
merge      steps that may become one kernel, where the clock decides: `tuning.choose` applies those that pay
"""
