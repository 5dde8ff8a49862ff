"""A network whose body gives tokens: built, run, tapped, with another head and other channels, and images of its size alone."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import CATALOGUE, Model, body, features, head, pyramid, reset_head
from zoo.pretrained.heads import adapt_stem


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(self.norm2(x))


class TinyViT(Model):
    """Patches, a class token, positions, two blocks; its modules are called as in the reference implementations."""

    paper = "https://arxiv.org/abs/2010.11929"
    input_size, fixed_size, size_multiple, min_size = 32, True, 8, 8
    first_layer = "stem.proj"
    classifiers = ("head",)
    width: ClassVar[int] = 16

    def __init__(self, num_classes: int = 5, in_channels: int = 3) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.stem = nn.Sequential()
        self.stem.proj = nn.Conv2d(in_channels, self.width, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, self.width))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, self.width))
        self.blocks = nn.Sequential(Block(self.width), Block(self.width))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, num_classes)

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])


class Windowed(TinyViT):
    """Takes every multiple of a patch."""

    fixed_size = False

    def forward_body(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))


@pytest.fixture
def network() -> TinyViT:
    torch.manual_seed(0)
    return TinyViT().eval()


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_its_features_are_tokens_without_a_stride(network: TinyViT) -> None:
    taken = features(network, ["stem", "blocks.0", "embedding", "body", "logits"])
    with torch.no_grad():
        found = taken(IMAGES)
        assert {key: tuple(value.shape) for key, value in found.items()} == {
            "stem": (2, 16, 4, 4),
            "blocks.0": (2, 17, 16),
            "embedding": (2, 16),
            "body": (2, 17, 16),
            "logits": (2, 5),
        }
        assert torch.equal(found["logits"], network(IMAGES))
        assert torch.equal(found["embedding"], found["body"][:, 0])
        assert torch.equal(head(network)(body(network)(IMAGES)), network(IMAGES))
    assert taken.channels == {"stem": 16, "blocks.0": 16, "embedding": 16, "body": 16, "logits": 5}
    assert taken.strides == {"stem": 8, "blocks.0": None, "embedding": None, "body": None, "logits": None}
    made = body(network)
    assert (made.out_channels, made.stride) == (16, None)


def test_what_needs_a_stride_says_that_tokens_have_none(network: TinyViT) -> None:
    with pytest.raises(ValueError, match="has no map at 'stride/16'"):
        features(network, "stride/16")
    with pytest.raises(ValueError, match="has no pyramid"):
        pyramid(network)
    with pytest.raises(ValueError, match="the body of TinyViT gives no map with a stride"):
        features(network, "blocks.0", output_stride=4)


def test_it_takes_another_head_and_other_channels(network: TinyViT) -> None:
    assert reset_head(network, 3)(IMAGES).shape == (2, 3)
    adapt_stem(network, 1)
    assert network(IMAGES[:, :1]).shape == (2, 3)


def test_images_of_another_size_are_refused_and_told_what_is_taken(network: TinyViT) -> None:
    with pytest.raises(ValueError, match=r"TinyViT takes images of 32x32 pixels alone, got 40x32; resize them"):
        network(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ValueError, match="32x32 pixels alone"):
        features(network, "blocks.0")(torch.zeros(1, 3, 64, 64))
    windowed = Windowed().eval()
    assert windowed(torch.zeros(1, 3, 40, 64)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"sides are multiples of 8 pixels, got 36x32; resize or pad them"):
        windowed(torch.zeros(1, 3, 36, 32))
    with pytest.raises(ValueError, match="at least 8x8"):
        windowed(torch.zeros(1, 3, 0, 8))


def test_it_is_in_no_catalogue_for_nobody_published_it() -> None:
    assert "TinyViT" not in CATALOGUE


@pytest.mark.parametrize("name", ["forward_body", "train", "input_size", "classifiers", "preprocess", "paper"])
def test_a_layer_may_not_hide_what_the_base_uses(name: str) -> None:
    network = TinyViT()
    with pytest.raises(TypeError, match=f"no layer can be called '{name}', which Model uses itself"):
        setattr(network, name, nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["stem", "head", "body", "norm", "stages", "features", "classifier", "neck"])
def test_a_layer_may_be_called_as_the_reference_calls_it(name: str) -> None:
    network = TinyViT()
    setattr(network, name, nn.Linear(2, 2))
    assert network.get_submodule(name) is getattr(network, name)
