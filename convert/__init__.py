"""convert: any framework's weights in and out, with proof."""

from convert import core, formats, names

__all__ = ["core", "formats", "names"]
