"""A file per container: how its bytes become named tensors, and the way back."""

from convert.formats import pytorch, safetensors

__all__ = ["pytorch", "safetensors"]
