"""Images: what one is, how it is read and prepared; and sources of many: folders, tar shards, Parquet files, lists, URLs of these."""

from zoo.images.decoding import decode
from zoo.images.opening import open_source
from zoo.images.preprocess import BadImage
from zoo.images.source import Item, Source

__all__ = ["BadImage", "Item", "Source", "decode", "open_source"]
