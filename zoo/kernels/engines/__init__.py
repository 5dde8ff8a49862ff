"""Inference engines for CPUs: which are there, and which is the fastest for one network and the shapes of its inputs.

    openvino         optional; bfloat16 and float16 where the processor has them
    openvino/2 …     the same for two images of a batch at a time, several times at once
    onnxruntime      optional; float32
    channels_last    PyTorch, BatchNorm folded, channels_last
    eager            the network itself, unchanged: always there, and always right

An engine is the network at one moment, for one set of shapes. It holds a copy of most weights in a layout of its own (VGG19: 0.6 GB)
and reads the rest from the network's memory, which it keeps alive. Of weights that are changed in place later it follows some and not
others: it must be made anew.
"""
