"""The names of MatConvNet's ported networks, which are Caffe's; their dense layers are convolutions.

Source: https://www.vlfeat.org/matconvnet/pretrained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convert.core import Row, Shape
from convert.names import caffe

FORMATS = ("matconvnet",)


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules where Caffe's names of this network are known."""
    return [replace(row, kind="linear_from_conv") if row.kind == "linear" else row for row in caffe.rows(family, ours)]
