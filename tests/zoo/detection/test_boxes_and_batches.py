"""Boxes written and read, photographs made a batch, boxes that overlap dropped: what torchvision's detectors are made of."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor

from zoo import VGG16_BN, ResNet18
from zoo.detection.assigning import NOTHING, UNSURE, assign, sample
from zoo.detection.box_codes import WEIGHTED, at_distances, decode, distances, encode
from zoo.detection.catalogue import SSD300_VGG16, FasterRCNN_MobileNet_V3_Large_320_FPN
from zoo.detection.masks import paste, paste_at_once
from zoo.detection.rcnn import FasterRCNN
from zoo.detection.resizing import Resizing
from zoo.detection.suppression import suppress, suppress_at_once


def boxes(count: int, seed: int = 0, side: float = 300) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=random) * side
    return torch.cat([corner, corner + 5 + torch.rand(count, 2, generator=random) * side / 3], 1)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), WEIGHTED])
def test_codes_are_read_as_they_were_written(weights: tuple[float, float, float, float]) -> None:
    start, true = boxes(50), boxes(50, 1)
    torch.testing.assert_close(decode(encode(true, start, weights), start, weights), true, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(at_distances(distances(true, start), start), true, rtol=1e-5, atol=1e-3)


def test_a_box_learns_the_true_one_that_it_overlaps() -> None:
    true = torch.tensor([[0.0, 0, 10, 10], [100, 100, 110, 110]])
    found = assign(torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 5], [50, 50, 60, 60], [100, 100, 130, 130]]), true, 0.3, 0.7)
    assert found.tolist() == [0, UNSURE, NOTHING, NOTHING]
    every = assign(torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 5], [50, 50, 60, 60], [100, 100, 130, 130]]), true, 0.3, 0.7, "ties")
    assert every.tolist() == [0, UNSURE, NOTHING, 1]
    assert assign(boxes(3), true[:0], 0.3, 0.7).tolist() == [NOTHING] * 3


def test_of_few_positives_all_are_drawn_and_negatives_fill_up() -> None:
    labels = torch.tensor([1, 0, 0, -1, 0, 2, 0])
    positive, negative = sample(labels, 4, 0.5)
    assert positive.tolist() == [0, 5]
    assert len(negative) == 2
    assert set(negative.tolist()) <= {1, 2, 4, 6}
    assert len(sample(labels, 100, 0.5)[1]) == 4


@pytest.mark.parametrize("count", [0, 1, 400])
def test_a_whole_batch_at_once_is_image_by_image(count: int) -> None:
    random = torch.Generator().manual_seed(3)
    where, scores = boxes(count), torch.rand(count, generator=random)
    kinds, images = torch.randint(0, 5, (count,), generator=random), torch.randint(0, 3, (count,), generator=random)
    each = suppress(where, scores, kinds, images, 4, 0.4, 30)
    once = suppress_at_once(where, scores, kinds, images, 4, 0.4, 30)
    assert len(each) == len(once) == 4
    for number, (one, other) in enumerate(zip(each, once, strict=True)):
        assert torch.equal(one, other)
        here = (images == number).nonzero()[:, 0]
        expected = here[torchvision.ops.batched_nms(where[here], scores[here], kinds[here], 0.4)[:30]]
        assert torch.equal(one, expected)


@pytest.mark.gpu
def test_a_gpu_drops_what_a_cpu_does() -> None:
    random = torch.Generator().manual_seed(3)
    where, scores = boxes(4000, side=1300), torch.rand(4000, generator=random)
    kinds, images = torch.randint(0, 90, (4000,), generator=random), torch.randint(0, 8, (4000,), generator=random)
    expected = suppress(where, scores, kinds, images, 8, 0.5, 100)
    found = suppress(*(tensor.cuda() for tensor in (where, scores, kinds, images)), 8, 0.5, 100)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))


@pytest.mark.gpu
def test_a_gpu_crops_what_a_cpu_does() -> None:
    random = torch.Generator().manual_seed(4)
    levels = {str(i): torch.randn(2, 8, 200 >> i, 200 >> i, generator=random) for i in range(4)}
    places = [boxes(500, seed, side=700) for seed in (5, 6)]
    crop = torchvision.ops.MultiScaleRoIAlign(list(levels), 7, 2)
    expected = crop(levels, places, [(800, 800)] * 2)
    found = crop({name: level.cuda() for name, level in levels.items()}, [some.cuda() for some in places], [(800, 800)] * 2)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "expected"), [((480, 640), (800, 1066)), ((640, 480), (1066, 800)), ((300, 1200), (333, 1333)), ((1000, 1000), (800, 800))]
)
def test_the_size_rule(size: tuple[int, int], expected: tuple[int, int]) -> None:
    rule = Resizing((800,), 1333).eval()
    assert rule.size_of(*size) == expected
    batch, targets = rule([torch.rand(3, *size)])
    assert targets is None
    assert batch.sizes == [expected]
    assert all(side % 32 == 0 for side in batch.padded)
    assert batch.images[0, :, expected[0] :].abs().sum() == 0


def test_a_variant_over_another_body_is_one_line_and_takes_trained_layers() -> None:
    class Mine(FasterRCNN, body=ResNet18, sizes=((16,), (32,), (64,), (128,), (256,)), shorter=(64,), longer=96): ...

    own = ResNet18()
    model = Mine(4, body=own).eval()
    assert model.backbone.body.conv1 is own.conv1
    with torch.no_grad():
        found = model([torch.rand(3, 50, 70), torch.rand(3, 70, 40)])
    assert [set(one) for one in found] == [{"boxes", "labels", "scores"}] * 2
    losses = model.train()([torch.rand(3, 50, 70)], [{"boxes": torch.tensor([[5.0, 5, 30, 30]]), "labels": torch.tensor([2])}])
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}


def test_frozen_norms_never_change() -> None:
    model = FasterRCNN_MobileNet_V3_Large_320_FPN(3, norm="frozen", norm_eps=0.0)
    norm = model.train().backbone.body.get_submodule("0.1")
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    assert not norm.training
    assert not any(parameter.requires_grad for parameter in norm.parameters())
    norm(torch.randn(2, 16, 4, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())


def test_what_can_not_be_used_is_refused_in_the_callers_words() -> None:
    model = FasterRCNN_MobileNet_V3_Large_320_FPN(3)
    photograph = torch.rand(3, 32, 32)
    with pytest.raises(ValueError, match="takes a target for each photograph"):
        model([photograph])
    with pytest.raises(ValueError, match=r"5[.]0, 5[.]0, 5[.]0, 9[.]0"):
        model([photograph], [{"boxes": torch.tensor([[5.0, 5, 5, 9]]), "labels": torch.tensor([1])}])
    with pytest.raises(ValueError, match="it should be floating point"):
        model.eval()([photograph.byte()])
    with pytest.raises(ValueError, match="this one is empty"):
        model([])
    with pytest.raises(ValueError, match='norm is "batch" or "frozen"'):
        FasterRCNN_MobileNet_V3_Large_320_FPN(3, norm="layer")
    with torch.device("meta"), pytest.raises(TypeError, match="VGG without BatchNorm"):
        SSD300_VGG16(3, body=VGG16_BN())


@pytest.mark.parametrize(("height", "width", "side", "count"), [(120, 170, 28, 40), (33, 20, 14, 7), (5, 4, 28, 0)])
def test_masks_that_are_pasted_at_once_are_those_that_are_pasted_one_by_one(height: int, width: int, side: int, count: int) -> None:
    torch.manual_seed(0)
    maps, sides = torch.rand(count, side, side), torch.tensor([width, height, width, height]).float()
    corner = torch.rand(count, 2) * sides[:2] * 1.1 - 3
    boxes = torch.cat([corner, corner + torch.rand(count, 2) * 70], 1).clamp(min=torch.zeros(4), max=sides)
    boxes[:1], boxes[1:2] = torch.ones(4), torch.cat([torch.zeros(2), sides[:2]])
    together = paste_at_once(maps, boxes, (height, width))
    assert together.shape == (count, height, width)
    torch.testing.assert_close(together, paste(maps, boxes, (height, width)), rtol=0, atol=1e-5)
