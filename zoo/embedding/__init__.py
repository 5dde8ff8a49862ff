"""Vectors of many images: `embed` computes and writes them, `read` reads them back, `nearest` and `knn` ask what they know."""

from zoo.embedding.neighbours import Neighbour, nearest
from zoo.embedding.probing import Probed, knn
from zoo.embedding.reading import Embeddings, read
from zoo.embedding.report import LeftOut, Report
from zoo.embedding.run import embed

__all__ = ["Embeddings", "LeftOut", "Neighbour", "Probed", "Report", "embed", "knn", "nearest", "read"]
