"""Pictures and the shipped network, as the tests of `zoo.embedding` have them."""

from tests.zoo.embedding.conftest import network, photos

__all__ = ["network", "photos"]
