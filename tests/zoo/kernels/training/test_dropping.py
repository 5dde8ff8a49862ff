"""The proof before training compares rounding: what a network draws in attention and recurrent layers is left out of it too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import fast, why

DROPPED = 0.3
KINDS = {
    "attention": lambda: nn.MultiheadAttention(16, 2, dropout=DROPPED, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=DROPPED, batch_first=True),
    "recurrent": lambda: nn.LSTM(16, 16, 2, dropout=DROPPED, batch_first=True),
    "by name": nn.Identity,
    "by place": nn.Identity,
}


class Drawing(nn.Module):
    """Patches, what draws, and a classifier."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.patches, self.middle, self.head = kind, nn.Conv2d(3, 16, 8, 8), KINDS[kind](), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        share = DROPPED if self.training else 0.0
        if self.kind == "attention":
            y = self.middle(y, y, y, need_weights=False)[0]
        elif self.kind == "recurrent":
            y = self.middle(y)[0]
        elif self.kind == "by name":
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=share)
        elif self.kind == "by place":
            y = F.scaled_dot_product_attention(y, y, y, None, share)
        else:
            y = self.middle(y)
        return self.head(y.mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_attention_drops_is_no_error_that_hides_others(kind: str) -> None:
    torch.manual_seed(0)
    network = Drawing(kind).train()
    images = torch.randn(4, 3, 32, 32)
    found = fast(network, train=True, example=images, progress=False)
    parity = why(found).parity
    assert parity is not None
    assert parity.fast < 1e-5
    assert parity.eager < 1e-5
    torch.manual_seed(1)
    first = found(images)
    assert not torch.equal(first, found(images))  # it still draws when it trains
