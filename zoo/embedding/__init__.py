"""Vectors of many images: `embed` computes and writes them, `read` reads them back, `nearest` and `knn` ask what they know."""

from zoo.embedding.nearest import Neighbour as Neighbour
from zoo.embedding.nearest import nearest as nearest
from zoo.embedding.probing import Probed as Probed
from zoo.embedding.probing import knn as knn
from zoo.embedding.reading import Embeddings as Embeddings
from zoo.embedding.reading import read as read
from zoo.embedding.report import LeftOut as LeftOut
from zoo.embedding.report import Report as Report
from zoo.embedding.run import embed as embed
