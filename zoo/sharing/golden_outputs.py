"""Golden outputs: what a network makes of a few computed images, so that another machine can prove that its network does the same."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator

import torch
from torch import Tensor

from convert.formats import safetensors
from weights import header
from weights.documents import MISREAD, read_json, reason, table
from weights.errors import MalformedFile, OutputsDiffer
from zoo.conversion.proof_images import natural, prepared
from zoo.networks.model import Model

IMAGES = 2
TOLERANCE = 1e-4
"""Allowed difference of a logit over the largest logit, in float32 on a CPU; other processors and versions of torch round otherwise."""
LARGEST_SIDE = 2048


def golden(network: Model) -> bytes:
    """Run a network, float32 on one thread of the CPU, on computed images.

    Args:
        network: with its checkpoint's record, in eval mode.

    Returns:
        A safetensors file of `images` (B, C, H, W), prepared as the record says, and `logits` (B, classes), with the version of torch, the
        machine and the tolerance in its notes. The same machine gives the same bytes.
    """
    from safetensors.torch import save

    if network.checkpoint is None:
        raise ValueError(f"{type(network).__name__} has no record: golden outputs are of trained networks")
    steps = network.checkpoint.preprocessing
    side = steps.crop or network.input_size
    images = prepared(natural(IMAGES, network.in_channels, side).double() / 255, steps).float()
    logits = _run(network, images)
    notes = {"torch": str(torch.__version__), "machine": platform.machine(), "tolerance": TOLERANCE}
    return save({"images": images.contiguous(), "logits": logits.contiguous()}, {"golden": json.dumps(notes)})


def compare(network: Model, data: bytes) -> str:
    """Run a network on the images of `golden` and compare.

    Args:
        network: in eval mode.
        data: what `golden` returned, on any machine.

    Returns:
        How far the outputs are apart, and which versions made them.

    Raises:
        OutputsDiffer: by more than `TOLERANCE` of the largest logit, or an image's best class is another by more than that.
        MalformedFile: the data is not of this network.
    """
    name = type(network).__name__
    try:
        tensors = safetensors.tensors(memoryview(data))
        notes = table(read_json(header.metadata(memoryview(data)).get("golden", "{}"), "the note"), {"torch": str, "machine": str})
        images, logits = tensors["images"], tensors["logits"]
        theirs = f"torch {notes['torch']!s:.40} on {notes['machine']!s:.40}"
    except MISREAD as error:
        raise MalformedFile(f"the golden outputs of {name} can't be read ({reason(error)}). Bundle it again.") from error
    least = network.min_size
    shaped = images.dim() == 4 and images.shape[1] == network.in_channels and all(least <= n <= LARGEST_SIDE for n in images.shape[2:])
    same = logits.shape == (images.shape[0], network.num_classes) and 0 < images.shape[0] <= 64
    plain = images.dtype == logits.dtype == torch.float32 and bool(images.isfinite().all() and logits.isfinite().all())
    if not (shaped and same and plain):
        raise MalformedFile(f"the golden outputs are not of {name}: images {tuple(images.shape)}, logits {tuple(logits.shape)}")
    found = _run(network, images)
    scale = float(logits.abs().max())
    apart = float((found - logits).abs().max()) / (scale or 1.0)
    here = f"torch {torch.__version__} on {platform.machine()}"
    todo = f"They were written with {theirs}, this is {here}. Nothing was installed; --no-check installs the proven bytes all the same."
    if not apart <= TOLERANCE:  # NaN is not
        far = f"its logits are {apart:.1e} of the largest apart, {TOLERANCE:.0e} is allowed"
        raise OutputsDiffer(f"{name} computes something else here: {far}. {todo}")
    best = found.argmax(1, keepdim=True)
    behind = float((logits.amax(1) - logits.gather(1, best)[:, 0]).max()) / (scale or 1.0)
    if behind > TOLERANCE:
        far = f"was behind by {behind:.1e} of the largest logit there, where {TOLERANCE:.0e} is a tie"
        raise OutputsDiffer(f"{name} computes something else here: an image's best class {far}. {todo}")
    return f"outputs {apart:.1e} apart ({TOLERANCE:.0e} is allowed), written with {theirs}, compared with {here}"


def _run(network: Model, images: Tensor) -> Tensor:
    with torch.inference_mode(), _one_thread():
        return network.float()(images).float().clone()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are rounded in another order by another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
