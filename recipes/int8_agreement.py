"""Compare int8 with float32 on every photograph of a folder: each by a network that was calibrated on the other half.

    python recipes/int8_agreement.py FOLDER [--mobilenetv2 FILE] --out int8_agreement.json

The folder holds any photographs, without labels: what is counted is whether the most probable class stays. They are divided in two by a
fixed draw; up to 300 of one half calibrate, all of the other are compared, and then the other way round. bfloat16, which needs no
calibration, is counted beside it, for how sure the network is of these photographs. MobileNetV2's weights are
torchvision's IMAGENET1K_V1 file; the EfficientNets' come with `kernelzoo[imagenet]`. Written after every network, and resumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from zoo import Model, fast, trained
from zoo.images.folder import image_files
from zoo.kernels.quantizing.quantize import NotCertified
from zoo.kernels.quantizing.quantized import machine


def halves(files: list[str]) -> tuple[list[str], list[str]]:
    """Divide files by a fixed draw."""
    drawn = [files[index] for index in np.random.default_rng(0).permutation(len(files))]
    return sorted(drawn[::2]), sorted(drawn[1::2])


def compared(model: Model, files: list[str]) -> dict[str, Any]:
    """Quantise on each half, and count on the other what stays."""
    found: list[dict[str, Any]] = []
    one, other = halves(files)
    for calibration, check in ((one, other), (other, one)):
        try:
            found.append(fast(model, "cpu", "int8", calibration=calibration, check=check).proofs[0].facts())
        except NotCertified as error:
            tried = [{"by": one.by, "kept": len(one.kept), "top1": one.top1, "error": one.error} for one in error.certificates]
            found.append(error.nearest.facts() | {"refused": str(error), "candidates": tried})
    total = sum(half["images"] for half in found)
    return {"images": total, **{name: sum(half[name] for half in found) for name in ("top1", "top5")}, "halves": found}


def kept_by_bfloat16(model: Model, files: list[str], batch: int = 25) -> int:
    """Count the photographs whose most probable class stays in bfloat16."""
    wide, narrow = (fast(model, "cpu", dtype, progress=False) for dtype in (torch.float32, torch.bfloat16))
    same = 0
    for start in range(0, len(files), batch):
        images = model.batch_of(files[start : start + batch])
        same += int((wide(images).argmax(1) == narrow(images).argmax(1)).sum())
    return same


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mobilenetv2", metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    files = sorted(map(str, image_files(asked.folder)))
    record: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    sources: dict[str, Callable[[], Model]] = {
        "EfficientNetLite0": lambda: trained(zoo.EfficientNetLite0),
        "EfficientNetLite1": lambda: trained(zoo.EfficientNetLite1),
    }
    if asked.mobilenetv2:
        sources["MobileNetV2"] = lambda: trained(zoo.MobileNetV2, asked.mobilenetv2)
    for name, make in sources.items():
        if name not in record:
            record[name] = compared(make(), files) | {"machine": machine("openvino")}
            asked.out.write_text(json.dumps(record, indent=1))
        row = record[name]
        if "bfloat16" not in row:
            row["bfloat16"] = kept_by_bfloat16(make(), files)
            asked.out.write_text(json.dumps(record, indent=1))
        kept = f"int8 keeps the top-1 class of {row['top1']}, and has it among its five of {row['top5']}"
        print(f"{name}, {row['images']} photographs: {kept}; bfloat16 keeps that of {row['bfloat16']}")


if __name__ == "__main__":
    main()
