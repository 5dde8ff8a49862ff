"""Networks as their papers print them: `model` is the base of all, `layers` what families share, a family a file, no variant's numbers.

Called, it lists the names of the catalogue: ``zoo.networks("*resnet*")``.

Example:
    >>> networks("vgg1?_bn")
    ['VGG11_BN', 'VGG13_BN', 'VGG16_BN', 'VGG19_BN']
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Networks(ModuleType):
    """This package, which is a function too."""

    def __call__(self, *pattern: str, **others: str) -> list[str]:
        """List the networks whose names a pattern means, in any case; see `zoo.variants.networks`."""
        from zoo.variants import networks

        return networks(*pattern, **others)


sys.modules[__name__].__class__ = _Networks
