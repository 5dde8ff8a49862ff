"""torchvision's detectors beside ours with the same tensors, which find many things on small pictures."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from parity import randomised
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.detection import DETECTORS, catalogue

assert catalogue
THEIRS = {name.lower(): name for name in DETECTORS if name.lower() in torchvision.models.list_models(torchvision.models.detection)}
"""Our names by torchvision's."""
SHAPES = ((120, 170), (200, 130), (64, 64))
BOXES = ("bbox_reg", "bbox_pred", "regression_head.module_list")
SCORES = ("cls_logits", "cls_score", "mask_fcn_logits", "kps_score", "bbox_ctrness", "classification_head.module_list")


def photographs() -> list[Tensor]:
    """Draw three soft pictures of different sizes."""
    random = torch.Generator().manual_seed(1)
    return [F.interpolate(torch.rand(1, 3, 12, 12, generator=random), size=size, mode="bicubic").clamp(0, 1)[0] for size in SHAPES]


def targets(num_classes: int) -> list[dict[str, Tensor]]:
    """Draw four things on each picture but the last, which has none."""
    random = torch.Generator().manual_seed(2)
    found: list[dict[str, Tensor]] = []
    for height, width in SHAPES:
        size = torch.tensor([width, height])
        corner = torch.rand(4, 2, generator=random) * size * 0.5
        sides = torch.rand(4, 2, generator=random) * size * 0.4 + 8
        points = corner[:, None] + torch.rand(4, 17, 2, generator=random) * sides[:, None]
        target = {"boxes": torch.cat([corner, corner + sides], 1), "labels": torch.randint(1, num_classes, (4,), generator=random)}
        target["masks"] = (torch.rand(4, height, width, generator=random) > 0.5).to(torch.uint8)
        target["keypoints"] = torch.cat([points, torch.ones(4, 17, 1)], 2)
        found.append(target)
    found[-1] = {name: tensor[:0] for name, tensor in found[-1].items()}
    return found


def pair(theirs: str, num_classes: int, sides: tuple[int, int] = (96, 144)) -> tuple[Any, Any]:
    """Build both, for small images, with the same tensors: those of the last layers are scaled so that scores and boxes differ."""
    cls: Any = DETECTORS[THEIRS[theirs]]
    shorter, longer = sides
    asked: dict[str, Any] = {} if cls.fixed else {"min_size": (shorter,), "max_size": longer}
    small = cls if cls.fixed else type(cls.__name__, (cls,), {}, shorter=(shorter,), longer=longer)
    with torch.device("meta"):
        reference = getattr(torchvision.models.detection, theirs)(weights=None, weights_backbone=None, num_classes=num_classes, **asked)
        ours = small(num_classes)
    assert list(reference.state_dict()) == list(ours.state_dict())
    state = randomised(reference)
    reference.load_state_dict(state, assign=True)
    lively(reference.eval())
    ours.load_state_dict({name: tensor.clone() for name, tensor in reference.state_dict().items()}, assign=True)
    return reference, ours.eval()


@torch.no_grad()
def lively(network: nn.Module) -> None:
    """Take BatchNorm's statistics from the photographs, and scale the last layers so that classes are neither all the same nor certain,
    and boxes lie near their anchors.

    With drawn statistics maps grow a hundredfold, rounding ten thousandfold, and tests would compare the order of two sums.
    """
    norms = {layer: layer.momentum for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)}
    for layer in norms:
        layer.train()
        layer.momentum = 1.0
    network(photographs())
    for layer, momentum in norms.items():
        layer.eval()
        layer.momentum = momentum
        assert layer.running_var is not None
        layer.running_var.clamp_(min=0.3)  # of maps of one pixel three pictures tell little

    def scaled(wanted: float) -> Any:
        seen: set[int] = set()

        def hook(layer: Any, arguments: Any, output: Tensor) -> Tensor | None:
            found = output.std().item()
            if id(layer) in seen and found <= 1.001 * wanted:
                return None
            seen.add(id(layer))
            layer.weight *= wanted / found
            layer.bias.fill_(-2 if wanted > 1 else 0)  # below 0.5 there are more numbers, and so fewer scores are equal
            return layer(*arguments)

        return hook

    hooks = []
    for name, layer in network.named_modules():
        last = isinstance(layer, nn.Conv2d | nn.Linear | nn.ConvTranspose2d) and layer.bias is not None
        for words, wanted in ((BOXES, 0.5), (SCORES, 1.5)):
            if last and any(word in name for word in words):
                hooks.append(layer.register_forward_hook(scaled(wanted)))
    network(photographs())
    for hook in hooks:
        hook.remove()
