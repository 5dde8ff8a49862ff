"""`train_style`: the loss's units, what is drawn, and runs that end as if they had never stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

from weights import BadRecord, HashMismatch, UnknownWeights
from zoo.catalogue import VGG16, EfficientNetLite0, ResNet20, SqueezeNet1_0
from zoo.images import BadImage
from zoo.images.preprocess import open_image
from zoo.pretrained.trained import trained
from zoo.stylizing import Johnson, StyleRun, StyleSettings, style_network, stylize, train_style
from zoo.stylizing.crops import crops
from zoo.stylizing.learning import Learner, Weights, rate, seeded
from zoo.stylizing.losses import TAPS, LossNetwork, StyleLoss, Taps, gram, variation
from zoo.stylizing.training import Diverged, Stopped, _Training, loss_network


@pytest.fixture(scope="module")
def measuring() -> SqueezeNet1_0:
    """A loss network of random weights, which has textures too."""
    torch.manual_seed(1)
    return SqueezeNet1_0().eval()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for number in range(4):
        small = Image.fromarray(draw.integers(0, 256, (7, 9, 3), dtype=np.uint8))
        small.resize((120, 96 + number), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def starry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("style") / "starry.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)
    return path


SMALL: dict[str, Any] = {"steps": 4, "batch_size": 2, "size": 64, "style_side": 64, "channels": 2, "sheet_every": 2, "save_every": 2}


def train(photos: Path, starry: Path, out: Path, measuring: SqueezeNet1_0, **told: Any) -> StyleRun:
    return train_style(photos, starry, out, loss_network=measuring, **{"device": "cpu", "progress": False, **SMALL, **told})


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Let somebody stop the next training when so many steps are done."""
    usual = _Training._step

    def stopping(self: _Training, *args: Any) -> None:
        if self.done == step:
            raise error
        usual(self, *args)

    monkeypatch.setattr(_Training, "_step", stopping)


def test_a_training_leaves_a_style_that_stylize_knows(photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0) -> None:
    run = train(photos, starry, tmp_path / "run", measuring, steps=21, sheet_every=20, license="CC0-1.0")
    kept = style_network(tmp_path / "run")
    row = kept.checkpoint
    assert row is not None
    assert (row.model, row.tag, row.license, row.options) == ("Johnson", "run", "CC0-1.0", {"channels": 2})
    assert all(one.equal(other) for one, other in zip(kept.parameters(), run.network.parameters(), strict=True))
    assert stylize(photos / "0.png", tmp_path / "run").size == (120, 96)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.png")) == ["curves.png", "sheet-000020.png", "sheet-000021.png"]
    with Image.open(tmp_path / "run" / "sheet-000021.png") as sheet:
        assert sheet.size == (5 * 192, 2 * 192)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 21] == [line["step"] for line in run.curve]
    assert lines[-1]["style"] > 0


def test_a_stopped_training_ends_as_if_it_had_never_stopped(
    photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(photos, starry, tmp_path / "whole", measuring)
    with monkeypatch.context() as patched:
        stopped_at(3, patched)
        with pytest.raises(Stopped, match=r"stopped after step 3 of 4; the same call goes on"):
            train(photos, starry, tmp_path / "parts", measuring)
    with pytest.raises(UnknownWeights, match="is a training that is not finished"):
        style_network(tmp_path / "parts")
    told: list[tuple[int, int]] = []

    @contextmanager
    def show(steps: int, done: int) -> Iterator[Any]:
        told.append((steps, done))
        yield lambda step, terms: None

    rest = train(photos, starry, tmp_path / "parts", measuring, progress=show, sheet_every=1)
    assert (rest.steps, rest.resumed, told) == (4, 3, [(4, 3)])
    assert rest.curve == whole.curve
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(files[0][name].equal(files[1][name]) for name in files[0])


def test_a_killed_training_goes_on_from_its_last_state(
    photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(photos, starry, tmp_path / "whole", measuring)
    with monkeypatch.context() as patched:
        stopped_at(3, patched, MemoryError)  # nothing is saved at such an end: the state of step 2 is there
        with pytest.raises(MemoryError):
            train(photos, starry, tmp_path / "parts", measuring)
    rest = train(photos, starry, tmp_path / "parts", measuring)
    assert rest.resumed == 2
    assert all(one.equal(other) for one, other in zip(rest.network.parameters(), whole.network.parameters(), strict=True))


@pytest.mark.gpu
def test_a_gpu_goes_on_from_the_same_state(
    photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(photos, starry, tmp_path / "whole", measuring, device="cuda", steps=20)
    with monkeypatch.context() as patched:
        stopped_at(11, patched)
        with pytest.raises(Stopped):
            train(photos, starry, tmp_path / "parts", measuring, device="cuda", steps=20)
    rest = train(photos, starry, tmp_path / "parts", measuring, device="cuda", steps=20)
    assert rest.resumed == 11
    again = train(photos, starry, tmp_path / "again", measuring, device="cuda", steps=20)
    ways = [run.network.parameters() for run in (rest, whole, again)]
    for one, other, third in zip(*ways, strict=True):  # sums of gradients come in any order, of which Adam makes more
        assert (one - other).norm() <= 4 * (third - other).norm() + 0.01 * other.norm() + 1e-3


def test_another_training_in_the_folder_stays(photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0) -> None:
    train(photos, starry, tmp_path / "run", measuring, steps=1)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="holds a training with other steps, lr: restart=True throws it away; or name another"):
        train(photos, starry, tmp_path / "run", measuring, steps=2, lr=0.5)
    with pytest.raises(FileExistsError, match="holds this training, and it is finished: stylize"):
        train(photos, starry, tmp_path / "run", measuring, steps=1)
    with pytest.raises(FileExistsError, match="other picture"):
        train(photos, photos / "0.png", tmp_path / "run", measuring, steps=1)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert train(photos, starry, tmp_path / "run", measuring, steps=2, restart=True).steps == 2
    assert not (tmp_path / "run" / "sheet-000001.png").exists()


def test_damage_is_named(photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        stopped_at(1, patched)
        with pytest.raises(Stopped):
            train(photos, starry, tmp_path / "run", measuring, steps=2)
    state = (tmp_path / "run" / "last.safetensors").read_bytes()
    (tmp_path / "run" / "last.safetensors").write_bytes(state[: len(state) // 2])
    with pytest.raises(BadRecord, match=r"last\.safetensors is no state of a training .* begin anew with restart=True"):
        train(photos, starry, tmp_path / "run", measuring, steps=2)
    (tmp_path / "run" / "last.safetensors").write_bytes(state)
    train(photos, starry, tmp_path / "run", measuring, steps=2)
    file = tmp_path / "run" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([255 - file.read_bytes()[-1]]))
    with pytest.raises(HashMismatch, match="train it again"):
        style_network(tmp_path / "run")


def test_a_loss_that_is_no_number_ends_the_training(photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0) -> None:
    with pytest.raises(Diverged, match="begin anew with a lower lr or style_weight"):
        train(photos, starry, tmp_path / "run", measuring, lr=1e30)


def test_photographs_that_cannot_be_read_are_left_out(photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in photos.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    run = train(folder, starry, tmp_path / "run", measuring, steps=3, batch_size=4)
    assert list(run.unreadable) == ["3.png"]
    for path in folder.iterdir():
        path.write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    with pytest.raises(BadImage, match="none of 4 photographs"):
        train(folder, starry, tmp_path / "other", measuring, steps=3)
    assert not (tmp_path / "other").exists()


def test_a_loss_is_measured_in_photographs() -> None:
    """A photograph that nobody painted has style 1 and content 0, another photograph content 1, whatever the loss network's numbers are."""
    x = 255 * torch.rand(4, 3, 32, 32)
    for scale in (1.0, 1e4):
        layer = torch.nn.Conv2d(3, 5, 3)
        layer.weight.data *= scale
        loss = StyleLoss(LossNetwork([layer, torch.nn.ReLU()], Taps((1,), 1, (0, 0, 0), (1, 1, 1))), [255 * torch.rand(1, 3, 40, 40)])
        loss.measure(x)
        style, content, rough = loss(x, x)
        assert torch.allclose(torch.stack([style, content, rough]), torch.tensor([1.0, 0.0, 1.0]), atol=1e-5)
        assert torch.allclose(loss(x.roll(1, 0), x)[1], torch.tensor(1.0), atol=1e-5)


def test_a_gram_matrix_is_the_papers() -> None:
    x = torch.randn(2, 3, 4, 5)
    by_hand = torch.stack([sum(one[:, i, j, None] * one[None, :, i, j] for i in range(4) for j in range(5)) / 60 for one in x])
    assert torch.allclose(gram(x), by_hand, atol=1e-6)
    assert gram(x.bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("channels", "height", "width"), [(16, 128, 64), (32, 17, 23), (8, 64, 64)])
def test_a_gram_matrix_of_bfloat16_is_that_of_the_same_numbers_in_float32(
    memory: torch.memory_format, channels: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    half = torch.randn(2, channels, height, width).relu().bfloat16().to(memory_format=memory).requires_grad_()
    whole = half.detach().float().requires_grad_()
    found, right = gram(half), gram(whole)
    assert (found - right).norm() < 2e-3 * right.norm()
    weights = torch.randn(right.shape)
    for grams in (found, right):
        (grams * weights).sum().backward()
    assert half.grad is not None
    assert whole.grad is not None
    assert half.grad.is_contiguous(memory_format=memory)
    assert (half.grad.float() - whole.grad).norm() < 5e-3 * whole.grad.norm()
    assert variation(torch.tensor([[[[0.0, 2.0], [0.0, 2.0]]]])) == 4


def test_taps_are_the_papers_layers() -> None:
    for cls, names in ((VGG16, TAPS["VGG16"].style), (EfficientNetLite0, TAPS["EfficientNetLite0"].style)):
        with torch.device("meta"):
            layers = list(cls().features)  # pyright: ignore
        if cls is VGG16:
            assert all(isinstance(layers[number], torch.nn.ReLU) for number in names)
            convs = [sum(isinstance(one, torch.nn.Conv2d) for one in layers[: number + 1]) for number in names]
            assert convs == [2, 4, 7, 10]  # relu1_2, relu2_2, relu3_3, relu4_3
        assert max(names) < len(layers)


def test_a_loss_network_reads_what_its_record_says(measuring: SqueezeNet1_0) -> None:
    front = loss_network(measuring)
    x = 255 * torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        style, content = front(x)
        y = x.flip(1) - torch.tensor([104.0, 117.0, 123.0]).view(1, 3, 1, 1)
        for number, layer in enumerate(measuring.features[:10]):
            y = layer(y)
            if number == 4:
                assert torch.allclose(content, y, rtol=1e-4, atol=1e-4)
    assert torch.allclose(style[-1], y, rtol=1e-4, atol=1e-4)
    assert [one.shape[1] for one in style] == [96, 128, 256, 384]
    assert front.train().training is False
    assert not any(parameter.requires_grad for parameter in front.parameters())


@pytest.mark.real
@pytest.mark.parametrize(
    ("named", "weights", "mean", "bgr"),
    [
        ("SqueezeNet1_0", "real/caffe/squeezenet_v1.0_deepcompression_decoded.caffemodel", (104.0, 117.0, 123.0), True),
        ("EfficientNetLite0", None, (127.5, 127.5, 127.5), False),
    ],
)
def test_loss_networks_that_can_be_had_measure_style(
    photos: Path, starry: Path, tmp_path: Path, real: Path, named: str, weights: str | None, mean: tuple[float, ...], bgr: bool
) -> None:
    file = None if weights is None else real / weights
    taps = loss_network(trained(named, file)).taps
    assert (taps.bgr, [round(one, 3) for one in taps.mean]) == (bgr, list(mean))
    told: dict[str, Any] = {**SMALL, "steps": 1, "device": "cpu", "progress": False}
    run = train_style(photos, starry, tmp_path / "run", loss_network=named, loss_weights=file, **told)
    assert 0.1 < run.curve[0]["style"] < 10  # near 1, whatever the unit of the network's maps is


def test_crops_depend_on_seed_and_step_alone(photos: Path) -> None:
    pictures = [torch.from_numpy(np.array(open_image(path))).permute(2, 0, 1) for path in sorted(photos.iterdir())]
    draw: dict[str, Any] = {"batch": 3, "size": 32, "seed": 5, "vary_colours": True}
    first = crops(pictures.__getitem__, 4, step=7, **draw)
    torch.manual_seed(99)
    np.random.seed(99)
    assert crops(pictures.__getitem__, 4, step=7, **draw).equal(first)
    assert not crops(pictures.__getitem__, 4, step=8, **draw).equal(first)
    assert first.shape == (3, 3, 32, 32)
    assert first.min() >= 0
    assert first.max() <= 255
    tiny = [torch.zeros(3, 5, 9, dtype=torch.uint8)]
    assert crops(tiny.__getitem__, 1, step=0, **{**draw, "size": 64}).shape == (3, 3, 64, 64)


def test_the_rate_falls_over_the_second_half() -> None:
    assert [round(rate(step, 100, 1.0), 3) for step in (0, 50, 75, 100)] == [1.0, 1.0, 0.51, 0.02]


def test_weights_are_drawn_by_the_seed_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, other = seeded(Johnson, 4, channels=2), seeded(Johnson, 4, channels=2)
    assert torch.get_rng_state().equal(before)
    assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_network_learns_the_texture(measuring: SqueezeNet1_0) -> None:
    """Thirty steps take a third off the loss, and not by leaving the photograph alone."""
    x = F.interpolate(255 * torch.rand(2, 3, 8, 8), (48, 48), mode="bilinear")
    loss = StyleLoss(loss_network(measuring), [255 * torch.rand(1, 3, 64, 64)])
    loss.measure(x)
    learner = Learner(seeded(Johnson, 0, channels=4), loss, Weights(), lr=5e-3, steps=60, half=False)
    found = [learner.step(step, x).tolist() for step in range(30)]
    assert found[-1][0] < 0.67 * found[0][0]
    assert found[-1][1] < 0.67 * found[0][1]


def test_steps_that_cannot_be_compiled_run_as_they_are(
    measuring: SqueezeNet1_0, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(_: Any) -> Any:
        def broken(*_: Any) -> Any:
            raise RuntimeError("no compiler of C")

        return broken

    x = 255 * torch.rand(2, 3, 48, 48)
    loss = StyleLoss(loss_network(measuring), [255 * torch.rand(1, 3, 48, 48)])
    usual = Learner(seeded(Johnson, 0, channels=2), loss, Weights(), lr=1e-3, steps=9, half=False).step(0, x)
    monkeypatch.setattr(torch, "compile", compiled)
    learner = Learner(seeded(Johnson, 0, channels=2), loss, Weights(), lr=1e-3, steps=9, half=False, compile=True)
    assert torch.allclose(learner.step(0, x), usual)
    assert "torch.compile can't make the steps faster here, so they run as they are: no compiler of C" in caplog.text
    learner.step(1, x)


@pytest.mark.long
def test_compiled_steps_learn_the_same(measuring: SqueezeNet1_0) -> None:
    x = 255 * torch.rand(2, 3, 48, 48)
    loss = StyleLoss(loss_network(measuring), [255 * torch.rand(1, 3, 48, 48)])
    found = []
    for compile in (False, True):
        learner = Learner(seeded(Johnson, 0, channels=2), loss, Weights(), lr=1e-3, steps=9, half=False, compile=compile)
        found.append(torch.stack([learner.step(step, x) for step in range(2)]))
    assert torch.allclose(found[0], found[1], rtol=1e-3)


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps is a whole number of at least 1, got 0"),
        ({"size": 70}, ValueError, "size is a multiple of 4, got 70"),
        ({"model": "VGG16"}, ValueError, "model is one of Johnson, Engstrom, MobileStyle, got 'VGG16'"),
        ({"dtype": "float16"}, ValueError, "dtype is auto, float32 or bfloat16, got 'float16'"),
        ({"lr": 0}, ValueError, "lr is a number above 0, got 0"),
        ({"style_weight": -1}, ValueError, "style_weight is at least 0, got -1"),
        ({"epochs": 2}, TypeError, "say how many steps of batch_size photographs instead"),
        ({"stile_weight": 2}, TypeError, "did you mean style_weight"),
        ({"loss_network": "ResNet50"}, ValueError, "loss_network is one of VGG16, VGG19, SqueezeNet1_0, EfficientNetLite0"),
        ({"loss_network": ResNet20()}, ValueError, "not a ResNet20"),
        ({"loss_weights": "x"}, ValueError, "leave them out, for the network has its own"),
        ({"picture": "none.jpg"}, FileNotFoundError, "none.jpg"),
        ({"data": "none"}, FileNotFoundError, "'none' is not there"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_is_written(
    photos: Path, starry: Path, tmp_path: Path, measuring: SqueezeNet1_0, told: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"data": photos, "picture": starry, "out": tmp_path / "run", "loss_network": measuring, **told}
    with pytest.raises(error, match=message):
        train_style(**given)
    assert not (tmp_path / "run").exists()


def test_settings_are_documented() -> None:
    assert all(f"\n        {name}: " in str(StyleSettings.__doc__) for name in StyleSettings.__dataclass_fields__)
