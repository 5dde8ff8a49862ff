"""Vectors of many images: `embed` computes and writes them, `read` reads them back, `nearest` and `knn` ask what they know."""

from zoo.embedding.neighbours import Neighbour, nearest
from zoo.embedding.probing import Probed, knn
from zoo.embedding.reading import Embeddings, read
from zoo.embedding.report import Report, Skipped
from zoo.embedding.run import embed

__all__ = ["Embeddings", "Neighbour", "Probed", "Report", "Skipped", "embed", "knn", "nearest", "read"]
