"""convert: any framework's weights in and out, with proof.

    with convert.read("vgg19.h5") as source: ...   # by a process of its own: tensors with named steps to PyTorch's form
    convert.flip(kernel, "HWIO")                   # true convolution to cross-correlation and back

`zoo.conversion.convert.convert` converts a file for a network of the zoo and proves it; the command is ``zoo convert``.
"""

from convert import core, formats, names
from convert.sandbox import read
from convert.source import Source
from convert.steps import flip
from weights.errors import ConvertError

__all__ = ["ConvertError", "Source", "core", "flip", "formats", "names", "read"]
