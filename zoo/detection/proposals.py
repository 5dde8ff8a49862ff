"""Region proposals: where something could be, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.detection.anchors import Anchors, flattened
from zoo.detection.assigning import UNSURE, assign, sample
from zoo.detection.box_codes import decode, encode
from zoo.detection.resizing import Batch, Outputs, Target
from zoo.detection.suppression import clip, suppress

BETA = 1 / 9
"""Where the loss of codes turns from a parabola to a line."""


class ProposalHead(nn.Module):
    """Whether there is something in each anchor, and where it lies from there."""

    def __init__(self, channels: int, anchors: int, depth: int = 1) -> None:
        """Build it for levels of `channels`, with `anchors` at each pixel, `depth` convolutions before the last ones."""
        super().__init__()
        self.conv = nn.Sequential(*(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()) for _ in range(depth)))
        self.cls_logits = nn.Conv2d(channels, anchors, 1)
        self.bbox_pred = nn.Conv2d(channels, anchors * 4, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return maps of logits (B, A, H, W) and of codes (B, A 4, H, W) for each level."""
        wide = [self.conv(x) for x in levels]
        return [self.cls_logits(x) for x in wide], [self.bbox_pred(x) for x in wide]


class Proposals(nn.Module):
    """The region proposal network.

    Source:
        Ren et al. 2015, section 3: https://arxiv.org/abs/1506.01497.
    """

    overlap = 0.7
    smallest = 1e-3

    def __init__(self, anchors: Anchors, depth: int, most: int = 1000, least: float = 0.0) -> None:
        """Build it.

        Args:
            anchors: at every pixel of every level.
            depth: convolutions of the head.
            most: candidates of a level, and proposals of an image, in eval mode; in train mode these are 2000.
            least: probability of a proposal.
        """
        super().__init__()
        self.anchor_generator = anchors
        self.head = ProposalHead(256, anchors.per_pixel, depth)
        self.most, self.least = most, least

    def forward(self, batch: Batch, maps: tuple[list[Tensor], list[Tensor]], targets: list[Target] | None) -> tuple[list[Tensor], Outputs]:
        """Return the proposals of each image by the head's `maps`, (N, 4), the best first, and the losses where there are targets."""
        logits, codes = [flattened(x, 1)[..., 0] for x in maps[0]], [flattened(x, 4) for x in maps[1]]
        anchors = self.anchor_generator(batch.padded, maps[0])
        with torch.no_grad():
            proposals = self.propose([some.detach() for some in logits], [some.detach() for some in codes], anchors, batch)
        if targets is None:
            return proposals, {}
        return proposals, self.losses(torch.cat(logits, 1), torch.cat(codes, 1), torch.cat(anchors), targets)

    def propose(self, logits: list[Tensor], codes: list[Tensor], anchors: list[Tensor], batch: Batch) -> list[Tensor]:
        """Choose the proposals of each image."""
        sizes = torch.tensor(batch.sizes).to(codes[0].device, non_blocking=True)
        where, score, kind, image = self.candidates(logits, codes, anchors, sizes[:, None])
        most = 2000 if self.training else self.most
        return [where[some] for some in suppress(where, score, kind, image, len(sizes), self.overlap, most)]

    def candidates(
        self, logits: list[Tensor], codes: list[Tensor], anchors: list[Tensor], sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return boxes (N, 4), probabilities, levels and images of the best of each level, for images of `sizes`, height and width."""
        most = 2000 if self.training else self.most
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        kinds: list[Tensor] = []
        for number, (found, code, start) in enumerate(zip(logits, codes, anchors, strict=True)):
            score, at = found.topk(min(most, found.shape[1]), 1)
            boxes.append(decode(code.gather(1, at[..., None].expand(-1, -1, 4)), start[at]))
            scores.append(score.sigmoid())
            kinds.append(torch.full((at.shape[1],), number, device=at.device))
        where, score, kind = clip(torch.cat(boxes, 1), sizes), torch.cat(scores, 1), torch.cat(kinds)
        wide = (where[..., 2:] - where[..., :2] >= self.smallest).all(-1)
        image, at = (wide & (score >= self.least)).nonzero(as_tuple=True)
        return where[image, at], score[image, at], kind[at], image

    def losses(self, logits: Tensor, codes: Tensor, anchors: Tensor, targets: list[Target]) -> Outputs:
        """Return the losses of 256 anchors of each image, at most half of them on something."""
        labels: list[Tensor] = []
        wanted: list[Tensor] = []
        for target in targets:
            number = assign(anchors, target["boxes"], 0.3, 0.7, "ties")
            labels.append((number >= 0).float().masked_fill(number == UNSURE, -1))
            boxes = target["boxes"] if len(target["boxes"]) else anchors.new_zeros(1, 4)
            wanted.append(encode(boxes[number.clamp(min=0)], anchors))
        drawn = [sample(some, 256, 0.5) for some in labels]
        positive, negative = (torch.cat([some[kind] + index * len(anchors) for index, some in enumerate(drawn)]) for kind in (0, 1))
        both = torch.cat([positive, negative])
        codes, truth = codes.flatten(0, 1), torch.cat(labels)
        boxes_loss = F.smooth_l1_loss(codes[positive], torch.cat(wanted)[positive], beta=BETA, reduction="sum") / len(both)
        return {
            "loss_objectness": F.binary_cross_entropy_with_logits(logits.flatten()[both], truth[both]),
            "loss_rpn_box_reg": boxes_loss,
        }
