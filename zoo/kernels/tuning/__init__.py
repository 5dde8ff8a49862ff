"""From a graph of steps to a kernel for each: what could compute a step, checked and timed at its shape.

candidates which kernels could compute a step, and how a step is bound to one of them
choices    what was found before, kept between processes in a file
choose     times what was not, keeps the fastest right one, and applies the merges that pay
"""
