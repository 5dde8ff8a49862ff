"""How fast are explanations? Ours beside pytorch-grad-cam's and Captum's, and beside `predict`, in one process.

    pip install grad-cam==1.5.7 captum==0.9.0
    python recipes/explain_speed.py --model ResNet18 --images 8
    python recipes/explain_speed.py --model ResNet50 --images 32 --device cuda --rounds 10
    python recipes/explain_speed.py --photographs photos/         # Grad-CAM over the time of predict, and the memory

Times are of the processor, of all threads together, so that another program's work does not count; on a GPU they are the clock's.
Each round takes the libraries in turn; the table has medians. Maps are compared before any time is printed, without TensorFloat-32; times
are with PyTorch's own settings.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo import explain, fast, network, predict, trained
from zoo.images.kinds import SUFFIXES

ROWS = 32
"""Images that go through the network at once, as `explain` has it."""
CAMS = {"gradcam": "GradCAM", "hirescam": "HiResCAM", "xgradcam": "XGradCAM", "layercam": "LayerCAM"}


def main() -> None:
    """Print the table that was asked for."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--model", default="ResNet18")
    asked.add_argument("--images", type=int, default=8)
    asked.add_argument("--side", type=int, help="of the images in pixels; the network's own if left out")
    asked.add_argument("--cams", action="store_true", help="class activation maps alone")
    asked.add_argument("--no-fast", action="store_true", help="leave out what fast(model) makes of occlusion")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--device", default="cpu")
    asked.add_argument("--photographs", type=Path)
    asked.add_argument("--weights", type=Path, help="of the network that explains photographs; its usual checkpoint if left out")
    given = asked.parse_args()
    if given.photographs:
        beside_predict(given.model, given.photographs, given.rounds, given.device, given.weights)
    else:
        beside_peers(given.model, given.images, given.rounds, given.device, given.side, given.cams, not given.no_fast)


def beside_peers(name: str, images: int, rounds: int, device: str, side: int | None, cams: bool, kernels: bool) -> None:
    """Print milliseconds an image of each method, ours and the peer's."""
    from captum.attr import IntegratedGradients, Occlusion  # pyright: ignore[reportMissingImports]
    from pytorch_grad_cam import GradCAM, HiResCAM, LayerCAM, XGradCAM  # pyright: ignore[reportMissingImports]
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget  # pyright: ignore[reportMissingImports]

    torch.manual_seed(1)
    model = network(name).eval().to(device)
    pixels = side or model.input_size or 224
    x = torch.randn(images, 3, pixels, pixels, device=device)
    layer: Any = model.layer4
    kinds = {"GradCAM": GradCAM, "HiResCAM": HiResCAM, "XGradCAM": XGradCAM, "LayerCAM": LayerCAM}
    print(f"{name}, {images} images of {pixels} pixels, {device}, {torch.get_num_threads()} threads; ms an image, median of {rounds}")
    for ours, theirs in CAMS.items():

        def peer(theirs: str = theirs) -> np.ndarray:
            with kinds[theirs](model=model, target_layers=[layer]) as cam:
                return cam(input_tensor=x, targets=[ClassifierOutputTarget(1)] * images)

        def own(ours: str = ours) -> np.ndarray:
            return np.stack([one.raw for one in explain(model, x, ours, 1, "layer4")])

        _row(ours, own, peer, rounds, images, _scaled)
    if cams:
        return
    black = torch.zeros_like(x)
    integrated = IntegratedGradients(model)
    _row(
        "integrated-gradients, 50 steps",
        lambda: np.stack([o.raw for o in explain(model, x, "integrated-gradients", 1, options={"steps": 50, "fixed": True})]),
        lambda: integrated.attribute(x, black, target=1, n_steps=50, internal_batch_size=32).sum(1).detach().cpu().numpy(),
        rounds,
        images,
    )
    hides = Occlusion(model)
    hidden = {"occlusion, window 32, stride 16": model}
    if kernels:
        hidden["the same by fast(model)"] = fast(model, device, example=x[:1].expand(ROWS, -1, -1, -1).contiguous(), progress=False)
    for title, answers in hidden.items():
        _row(
            title,
            lambda answers=answers: np.stack(
                [o.raw for o in explain(answers, x, "occlusion", 1, batch_size=ROWS, options={"window": 32, "stride": 16})]
            ),
            lambda: hides.attribute(x, (3, 32, 32), (3, 16, 16), target=1, baselines=0).mean(1).detach().cpu().numpy(),
            rounds,
            images,
        )


def _scaled(maps: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Enlarge and scale maps as pytorch-grad-cam does, so that they can be compared."""
    large = torch.nn.functional.interpolate(torch.from_numpy(maps)[:, None], size=size, mode="bilinear")[:, 0]
    large = large - large.amin((1, 2), keepdim=True)
    return (large / (1e-7 + large.amax((1, 2), keepdim=True))).numpy()


def _row(
    name: str,
    own: Callable[[], np.ndarray],
    peer: Callable[[], np.ndarray],
    rounds: int,
    images: int,
    alike: Callable[[np.ndarray, tuple[int, ...]], np.ndarray] | None = None,
) -> None:
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    ours, theirs = own(), peer()
    torch.backends.cudnn.allow_tf32 = allowed
    for run in (own, peer):
        run()
    compared = alike(ours, theirs.shape[1:]) if alike else ours
    apart = float(np.abs(compared - theirs).max() / max(float(np.abs(theirs).max()), 1e-12))
    if not apart < 0.01 or not np.abs(theirs).max() > 0:
        raise SystemExit(f"{name}: the maps differ by {apart:.1%} of their largest value, or are empty; no time is printed")
    times: dict[str, list[float]] = {"own": [], "peer": []}
    for _ in range(rounds):
        for key, run in (("own", own), ("peer", peer)):
            start = clock()
            run()
            times[key].append(1000 * (clock() - start) / images)
    mine, other = statistics.median(times["own"]), statistics.median(times["peer"])
    print(
        f"  {name:32} ours {mine:8.1f}  peer {other:8.1f}  {other / mine:.2f}x  (difference {apart:.0e} of the largest value)", flush=True
    )


def beside_predict(name: str, folder: Path, rounds: int, device: str, weights: Path | None) -> None:
    """Print Grad-CAM's time over predict's for a folder of photographs, and how the memory grows."""
    model = (trained(name) if weights is None else trained(name, str(weights))).to(device)
    photographs = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    runs: dict[str, Callable[[list[Path]], Any]] = {"predict": lambda p: predict(model, p), "explain": lambda p: explain(model, p)}
    for run in runs.values():
        run(photographs[:32])
    times: dict[str, list[float]] = {key: [] for key in runs}
    first = _memory()
    for _ in range(rounds):
        for key, run in runs.items():
            start = clock()
            run(photographs)
            times[key].append(1000 * (clock() - start) / len(photographs))
    slow, fast = statistics.median(times["explain"]), statistics.median(times["predict"])
    print(f"{name}, {len(photographs)} photographs, {device}, {torch.get_num_threads()} threads, median of {rounds} rounds")
    print(
        f"  predict {fast:.1f} ms a photograph, Grad-CAM {slow:.1f} ms: {slow / fast:.2f}x; most memory {first:.0f} -> {_memory():.0f} MB"
    )


def clock() -> float:
    """Return seconds of the processor; with a GPU, of the clock when its work is done."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
