"""Clocks: kernels and models timed on a GPU, phases of making a plan, the roofline; and a thread that leaves nothing behind."""
