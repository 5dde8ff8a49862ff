"""Ops with their gradients, as networks that train call them: kernels where they run, else the references under autograd.

Any device and any memory format is taken; maps come back in channels_last memory. Each function is one node of the autograd graph that
keeps no more than its arguments and what it says; none waits for the device, so a step that calls them can be captured as a CUDA graph.
"""

from zoo.kernels.differentiable.convs import conv_bias_act
from zoo.kernels.differentiable.convs import refused as conv_bias_act_refused
from zoo.kernels.differentiable.dense import dense_block, dense_layers
from zoo.kernels.differentiable.dense import refuses as dense_block_refused
from zoo.kernels.differentiable.depthwise import depthwise_conv
from zoo.kernels.differentiable.depthwise import refused as depthwise_conv_refused
from zoo.kernels.differentiable.gates import add_branch, add_branch_refused, scale_channels
from zoo.kernels.differentiable.gates import refused as scale_channels_refused
from zoo.kernels.differentiable.grouped import grouped_conv
from zoo.kernels.differentiable.grouped import refused as grouped_conv_refused
from zoo.kernels.differentiable.losses import cross_entropy
from zoo.kernels.differentiable.nodes import kept_of, made_again
from zoo.kernels.differentiable.norms import batch_norm_act, conv_stats, conv_stats_refused, norm_act_conv, norm_act_conv_refused
from zoo.kernels.differentiable.norms import supports as batch_norm_act_refused
from zoo.kernels.differentiable.pools import avg_pool, avg_pool_refused, max_pool, max_pool_refused, mean_and_map, mean_and_map_refused
from zoo.kernels.differentiable.residual_streams import add_layer_norm, gelu, gelu_linear, glu, glu_linear
from zoo.kernels.differentiable.response_norm import response_linear
from zoo.kernels.differentiable.shortcut import shortcut_conv
from zoo.kernels.differentiable.stem import refused as stem_conv_refused
from zoo.kernels.differentiable.stem import stem_conv
from zoo.kernels.differentiable.widening import conv_norm_act
from zoo.kernels.differentiable.widening import refused as conv_norm_act_refused
from zoo.kernels.differentiable.windows import refused as window_attention_refused
from zoo.kernels.differentiable.windows import window_attention
from zoo.kernels.ops._tuned import tuning

__all__ = [
    "add_branch", "add_branch_refused", "add_layer_norm", "avg_pool", "avg_pool_refused", "batch_norm_act", "batch_norm_act_refused",
    "conv_bias_act", "conv_bias_act_refused", "conv_norm_act", "conv_norm_act_refused", "conv_stats", "conv_stats_refused",
    "cross_entropy", "dense_block", "dense_block_refused", "dense_layers", "depthwise_conv", "depthwise_conv_refused", "gelu",
    "gelu_linear", "glu", "glu_linear", "grouped_conv", "grouped_conv_refused", "kept_of", "made_again", "max_pool", "max_pool_refused",
    "mean_and_map", "mean_and_map_refused", "norm_act_conv", "norm_act_conv_refused", "response_linear", "scale_channels",
    "scale_channels_refused", "shortcut_conv", "stem_conv", "stem_conv_refused", "tuning", "window_attention", "window_attention_refused",
]  # fmt: skip
