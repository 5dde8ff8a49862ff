"""Sources of many images: folders, tar shards, Parquet files, lists, and each of them by URL."""

from zoo.images.decoding import decode as decode
from zoo.images.opening import open_source as open_source
from zoo.images.source import Item as Item
from zoo.images.source import Source as Source
from zoo.preprocess import BadImage as BadImage
