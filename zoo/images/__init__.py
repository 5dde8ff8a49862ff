"""Sources of many images: folders, tar shards, Parquet files, lists, and each of them by URL."""

from zoo.images.decoding import decode
from zoo.images.opening import open_source
from zoo.images.preprocess import BadImage
from zoo.images.source import Item, Source

__all__ = ["BadImage", "Item", "Source", "decode", "open_source"]
