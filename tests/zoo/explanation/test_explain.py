"""`explain`: the photograph's pixels, targets, and a network that is left as it was."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explained import HALVES, Bright, record
from PIL import Image
from torch import Tensor, nn

from zoo import ResNet20, ViT_Ti_16, fast, features, network
from zoo.explanation import METHODS, CannotExplain, Explanation, explain, measure
from zoo.explanation.geometry import Axis, View
from zoo.images.preprocess import BadImage
from zoo.networks.model import Model


def photograph(width: int, height: int, x: int, y: int, side: int) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y - side // 2 : y + side // 2, x - side // 2 : x + side // 2] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("place", [(2000, 1500), (1130, 900), (2700, 2200), (850, 2050)])
def test_the_maximum_lies_within_half_a_cell_of_a_patch_in_a_large_photograph(place: tuple[int, int], bright: Model) -> None:
    shown = explain(bright, photograph(4000, 3000, *place, 120), target=0)
    assert shown.map.shape == (3000, 4000)
    assert shown.map.dtype == np.float32
    row, column = np.unravel_index(np.nanargmax(shown.map), shown.map.shape)
    half = 16 * 3000 / 256
    assert abs(column - place[0]) <= half
    assert abs(row - place[1]) <= half
    assert shown.peak == pytest.approx((column, row), abs=12)


def test_cells_lie_where_their_receptive_fields_do(bright: Model) -> None:
    """Symmetric padding at stride 2 puts cell 0 of a 7x7 map at pixel 0, not at 16; what the gradient of a cell weighs proves it."""
    x = torch.rand(1, 3, 224, 224) * 2 - 1
    shown = explain(bright, x, target=0)[0]
    x.requires_grad_()
    out = features(bright, at="layers")(x)["layers"]
    (slope,) = torch.autograd.grad(out[0, 0, 3, 3], x)
    weight = slope.abs().sum((0, 1))
    middle = (weight.sum(1) * torch.arange(224)).sum() / weight.sum()
    assert shown.rows.first + 3 * shown.rows.step == pytest.approx(float(middle), abs=0.5)
    assert shown.rows == Axis(0, 32)


def test_the_part_that_was_not_seen_is_nan_and_framed(bright: Model) -> None:
    shown = explain(bright, photograph(400, 300, 200, 150, 40), target=0)
    left, top, right, bottom = shown.seen
    assert (left, top, right, bottom) == (68, 19, 331, 281)
    inside = np.zeros((300, 400), bool)
    inside[top:bottom, left:right] = True
    assert np.array_equal(np.isnan(shown.map), ~inside)
    overlay = np.asarray(shown.overlay())
    assert overlay.shape == (300, 400, 3)
    assert (overlay[top, left:right] == 255).all()
    assert (overlay[~inside] == 0).all()


def test_a_crop_beyond_the_photograph_counts_only_what_is_there() -> None:
    view = View((10, 10), (-5, -5, 15, 15), (20, 20))
    assert view.seen == (0, 0, 10, 10)
    map_ = view.spread(np.arange(400, dtype=np.float32).reshape(20, 20), Axis(0, 1), Axis(0, 1))
    assert np.array_equal(map_, np.arange(400).reshape(20, 20)[5:15, 5:15])


def test_the_photograph_that_exif_turns_is_upright(bright: Model, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(300, 200, 40, 100, 60).save(tmp_path / "turned.jpg", exif=exif)
    shown = explain(bright, tmp_path / "turned.jpg", target=0)
    assert shown.view.size == (200, 300)
    assert shown.photograph().size == (200, 300)
    assert shown.peak[1] < 100


def test_no_evidence_is_empty_and_says_so(bright: Model, tmp_path: Path) -> None:
    shown = explain(bright, photograph(300, 300, 150, 150, 80), target=1)
    assert shown.empty
    assert shown.region is None
    assert np.nanmax(shown.map) == 0
    assert not shown.numbers()["evidence"]
    assert np.array_equal(np.asarray(shown.overlay()), np.asarray(explain(bright, shown.photograph(), target=2).overlay()))
    shown.save(tmp_path / "empty.png")


def test_the_scale_is_kept(bright: Model) -> None:
    """Twice the weights are twice the map: nothing is normalised."""
    picture = photograph(300, 300, 150, 150, 80)
    before = explain(bright, picture, target=0)
    bright.fc.weight.data *= 2
    assert np.allclose(explain(bright, picture, target=0).raw, 2 * before.raw, rtol=1e-6)
    assert before.region is not None
    left, top, right, bottom = before.region.box
    assert left < 150 < right
    assert top < 150 < bottom


def snapshot(network: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    flags = [
        (name, m.training, len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks), type(m), id(m), sorted(vars(m)))
        for name, m in network.named_modules()
    ]
    parameters = [
        (n, p.requires_grad, None if p.grad is None else p.grad.clone(), id(p), p._version) for n, p in network.named_parameters()
    ]
    return buffer.getvalue(), flags, parameters


@pytest.mark.parametrize("name", [*METHODS])
def test_the_network_is_left_as_it_was(name: str) -> None:
    network = Bright()
    network.train()
    network.layers[0].weight.requires_grad_(False)
    network.fc.weight.grad = torch.ones_like(network.fc.weight)
    network.layers[1].register_forward_hook(lambda *_: pytest.fail("a hook of the user's ran"))
    before = snapshot(network)
    options = {"options": {"masks": 8}} if name == "rise" else {"options": {"samples": 2}} if name == "smoothgrad" else {}
    x = torch.rand(1, 3, 64, 64)
    if "attention" in name:
        with pytest.raises(CannotExplain):
            explain(network, x, method=name, **options)
    else:
        explain(network, x, method=name, **options)
    assert repr(snapshot(network)) == repr(before)
    assert network.layers[1].inplace


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_the_network_is_left_as_it_was_by_an_error(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    network = Bright().train()
    before = snapshot(network)

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch.autograd, "grad", fails)
    with pytest.raises(error):
        explain(network, torch.rand(1, 3, 64, 64), method="integrated-gradients")
    assert repr(snapshot(network)) == repr(before)


def test_frozen_networks_and_inference_mode_change_nothing(small: Model, images: Tensor) -> None:
    expected = [explain(small, images, method=name, target=3) for name in ("gradcam", "gradient", "lrp")]
    small.requires_grad_(False)
    with torch.inference_mode():
        found = [explain(small, images.clone(), method=name, target=3) for name in ("gradcam", "gradient", "lrp")]
        made = ResNet20().eval()
        explain(made, images, method="gradient")
    for one, other in zip(expected, found, strict=True):
        assert all(np.array_equal(a.raw, b.raw) for a, b in zip(one, other, strict=True))


def test_a_bfloat16_network_has_the_float32_networks_map(small: Model, images: Tensor) -> None:
    expected = explain(small, images, method="gradcam", target=2)
    gradients = explain(small, images, method="gradient", target=2)
    small.bfloat16()
    for one, other in zip(explain(small, images, method="gradcam", target=2), expected, strict=True):
        assert one.raw.dtype == np.float32
        if other.raw.std() == 0:  # nothing speaks for it, or the map is one cell
            np.testing.assert_allclose(one.raw, other.raw, rtol=0.05)
        else:
            assert np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1] > 0.99
    for one, other in zip(explain(small, images, method="gradient", target=2), gradients, strict=True):
        assert np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1] > 0.95


@pytest.mark.parametrize(
    "name", ["gradcam", "scorecam", "ablationcam", "integrated-gradients", "occlusion", "guided-gradcam", "lrp", "rise"]
)
def test_a_batch_is_its_images_one_by_one(name: str, small: Model, images: Tensor) -> None:
    few = {"rise": {"masks": 20}, "integrated-gradients": {"most": 32}, "occlusion": {"window": 8, "stride": 8}}
    options = few.get(name, {})
    together = explain(small, images, method=name, target=1, options=options)
    for index, one in enumerate(together):
        alone = explain(small, images[index], method=name, target=1, options=options)
        assert np.allclose(one.raw, alone.raw, rtol=1e-4, atol=1e-5 * max(np.abs(alone.raw).max(), abs(alone.score)))
    split = explain(small, images, method="gradcam", target=1, batch_size=1)
    assert [one.name for one in split] == ["images[0]", "images[1]"]


def test_targets_are_linear_in_the_logits(small: Model, images: Tensor) -> None:
    cat, dog, both = (explain(small, images, method="cam", target=t) for t in ("cat", "dog", ("cat", "dog")))
    for a, b, difference in zip(cat, dog, both, strict=True):
        assert np.allclose(difference.raw, a.raw - b.raw, atol=1e-4)
        assert difference.label == "cat - dog"
        assert difference.probability is None
        assert difference.score == pytest.approx(a.score - b.score, abs=1e-4)
    ranked = explain(small, images, top=3)
    assert [len(row) for row in ranked] == [3, 3]
    assert all(a.probability >= b.probability for row in ranked for a, b in itertools.pairwise(row))
    assert [one.label for one in explain(small, images[0], target=["frog", 7])] == ["frog", "horse"]
    assert isinstance(explain(small, images[0]), Explanation)


def test_a_synset_is_the_mean_of_its_classes() -> None:
    torch.manual_seed(0)
    network = ResNet20(num_classes=1000).eval()
    network.checkpoint = record(HALVES, "imagenet1k", 1000)
    x = torch.rand(1, 3, 32, 32) * 2 - 1
    dogs = explain(network, x, method="cam", target="dog")[0]
    assert dogs.label == "dog (118 classes)"
    assert dogs.wnid == "n02084071"
    by_id = explain(network, x, method="cam", target="n02084071")[0]
    assert np.array_equal(dogs.raw, by_id.raw)
    logits = network(x)[0].detach().softmax(0)
    assert dogs.probability == pytest.approx(float(logits[151:269].sum()), rel=1e-4)


def test_an_embedding_is_explained_by_its_cosine(small: Model, images: Tensor) -> None:
    vectors = features(small, at="embedding")(images)["embedding"].detach()
    alike, other = (explain(small, images[0], target=v) for v in vectors)
    assert alike.label == "similarity"
    assert alike.score == pytest.approx(1, abs=1e-5)
    assert other.score == pytest.approx(float(torch.cosine_similarity(vectors[0], vectors[1], dim=0)), abs=1e-5)
    assert not other.empty


def test_any_module_that_can_be_traced_is_explained_with_a_layer() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu_(self.network(x) - 0.1).mean((2, 3)))

    model, x = Foreign(), torch.rand(2, 3, 8, 8)
    shown = explain(model, x, at="network")
    assert shown[0].raw.shape == (4, 4)
    assert shown[0].map.shape == (8, 8)
    assert explain(model, x, method="guided-backprop")[0].raw.shape == (8, 8)
    with pytest.raises(CannotExplain, match="name the layer whose map is explained"):
        explain(model, x)
    with pytest.raises(ValueError, match="no preprocessing belongs to this Foreign"):
        explain(model, np.zeros((8, 8, 3), np.uint8), at="network")


def test_a_token_networks_map_is_its_grid_of_patches() -> None:
    torch.manual_seed(0)
    network = ViT_Ti_16(num_classes=5, image_size=64).eval()
    nn.init.normal_(network.heads.head.weight)
    x = torch.rand(1, 3, 64, 64)
    for name in (None, "attention-rollout", "gradient-attention"):
        shown = explain(network, x, method=name)[0]
        assert shown.raw.shape == (4, 4)
        assert shown.rows == Axis(7.5, 16)
        assert shown.map.shape == (64, 64)
    rollout = explain(network, x, method="attention-rollout")[0]
    assert 0 < rollout.raw.sum() < 1


def test_results_draw_themselves_and_give_numbers(small: Model, tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)).save(tmp_path / "a.png")
    row = explain(small, [tmp_path / "a.png"], top=2)[0]
    assert row[0].name == str(tmp_path / "a.png")
    assert row[0].save(tmp_path / "why.png") == tmp_path / "why.png"
    with Image.open(tmp_path / "why.png") as drawn:
        assert drawn.size == row[0].sheet().size
    numbers = json.loads(json.dumps(row[0].numbers()))
    assert numbers["seen"] == list(row[0].seen)
    assert numbers["most"] == pytest.approx(float(row[0].raw.max()))
    with pytest.raises(ValueError, match=r"name it why\.png"):
        row[0].save(tmp_path / "why.jpg")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"method": "gradcan"}, CannotExplain, "no method 'gradcan'; did you mean gradcam"),
        ({"target": "catt"}, CannotExplain, "no class 'catt'; names, WordNet ids and indices are taken; did you mean"),
        ({"target": 10}, CannotExplain, "there is no class 10; the network has 10, 0 to 9"),
        ({"target": []}, CannotExplain, "empty list"),
        ({"target": ("cat", "dog", "frog")}, CannotExplain, "a difference is of two classes"),
        ({"target": {}}, TypeError, "a target is a class's index"),
        ({"target": np.zeros(64)}, CannotExplain, "embedding of zeros"),
        ({"target": np.ones(3)}, CannotExplain, "the embedding has 3 numbers, and ResNet20's have 64"),
        ({"at": "layer9"}, ValueError, "ResNet20 has no tap 'layer9'"),
        ({"at": "embedding"}, CannotExplain, "is no map"),
        ({"at": "layer*"}, CannotExplain, "means 3 tensors"),
        ({"method": "gradient", "at": "layer2"}, CannotExplain, "has no layer; leave at='layer2' out"),
        ({"method": "cam", "at": "layer1"}, CannotExplain, "CAM is not defined for this ResNet20: its head behind 'layer1'"),
        ({"method": "attention-rollout"}, CannotExplain, "it has no blocks that all attend"),
        ({"options": {"steps": 3}}, TypeError, "Grad-CAM takes no 'steps'"),
        ({"method": "occlusion", "options": {"window": 0}}, ValueError, "window is a whole number of at least 1, got 0"),
        ({"method": "occlusion", "options": {"stride": 1.5}}, ValueError, "stride is a whole number of at least 1, got 1.5"),
        ({"method": "occlusion", "options": {"fill": float("nan")}}, ValueError, "fill is a finite number from -inf to inf, got nan"),
        ({"method": "rise", "options": {"share": 2}}, ValueError, "share is a finite number from 0.001 to 0.999, got 2"),
        ({"method": "smoothgrad", "options": {"noise": -1}}, ValueError, "noise is a finite number from 0 to inf, got -1"),
        ({"method": "integrated-gradients", "options": {"steps": "many"}}, ValueError, "steps is a whole number of at least 1, got 'many'"),
        ({"method": "lrp-alpha-beta", "options": {"alpha": 0.5}}, ValueError, "alpha is a finite number from 1 to inf, got 0.5"),
        ({"target": "cat-dog"}, CannotExplain, "a difference is a pair, ('cat', 'dog'"),
        ({"top": 0}, ValueError, "top is a whole number"),
        ({"top": 1, "target": 1}, ValueError, "give one of them"),
        ({"metod": "cam"}, TypeError, "did you mean method"),
    ],
)
def test_what_cannot_be_is_refused_with_words(
    given: dict[str, Any], error: type[Exception], message: str, small: Model, images: Tensor
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(").replace("*", r"\*")):
        explain(small, images, **given)


@pytest.mark.parametrize("name", ["Swin_T", "Swin_V2_T", "MaxViT_T"])
@pytest.mark.parametrize("method", ["attention-rollout", "gradient-attention"])
def test_attention_inside_windows_is_refused_by_name(name: str, method: str) -> None:
    windowed = network(name, num_classes=3).eval()
    with pytest.raises(CannotExplain, match=f"is not defined for this {name}: it has no blocks that all attend over the same tokens"):
        explain(windowed, torch.rand(1, 3, 224, 224), method=method)


def test_wrong_calls_say_what_to_do(small: Model, images: Tensor) -> None:
    with pytest.raises(TypeError, match="takes the network first"):
        explain(images, small)
    with pytest.raises(TypeError, match="takes the images, too"):
        explain(small)
    with pytest.raises(BadImage, match="the list is empty"):
        explain(small, [])
    with pytest.raises(ValueError, match="no preprocessing belongs to this ResNet20"):
        explain(ResNet20(), "cat.jpg")
    small.fc.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        explain(small, images)


def test_every_method_stands_on_the_page_with_its_options_and_source() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `") and line.endswith(") |")}
    assert rows.keys() == METHODS.keys()
    for name, one in METHODS.items():
        assert one.title in rows[name]
        assert f"({one.source})" in rows[name]
        assert all(f"`{option}`" in rows[name] for option in one.options)
        assert (one.function.__doc__ or "").strip()


def test_a_fast_network_has_the_same_map_and_its_own_kernels_do_the_work(small: Model, images: Tensor) -> None:
    quick = fast(small, "cpu", tune="none")
    for name in ("gradcam", "occlusion"):
        options = {"window": 16, "stride": 16} if name == "occlusion" else {}
        expected = explain(small, images, name, 4, options=options, batch_size=4)
        found = explain(quick, images, name, 4, options=options, batch_size=4)
        for one, other in zip(found, expected, strict=True):
            assert np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1] > 0.999
            assert one.raw.argmax() == other.raw.argmax()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in METHODS if "attention" not in name])
def test_a_gpu_gives_the_cpus_map(name: str, small: Model, images: Tensor) -> None:
    options = {"masks": 64} if name == "rise" else {"samples": 4} if name == "smoothgrad" else {}
    expected = explain(small, images, name, 3, options=options)
    for one, other in zip(explain(small.cuda(), images, name, 3, options=options), expected, strict=True):
        if other.raw.std() == 0:  # nothing speaks for it, or the map is one cell
            np.testing.assert_allclose(one.raw, other.raw, rtol=0.05)
        else:
            assert np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1] > 0.99


class Own(nn.Module):
    """A network of one's own with a map, tokens, attention that answers a pair, and logits, alone or in a dict."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 16, 8, 8), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head, self.named = nn.LayerNorm(16), nn.Linear(16, 5), named

    def forward(self, x: Tensor) -> Any:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        logits = self.head(self.norm(tokens + self.attention(tokens, tokens, tokens)[0]).mean(1))
        return {"logits": logits} if self.named else logits


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("norm", r"'norm' answers \(1, 64, 16\), and a map \(images, channels, height, width\) is explained"),
        ("head", r"'head' answers \(1, 5\), and a map"),
        ("attention", "'attention' answers a tuple, and one tensor is explained"),
    ],
)
def test_a_layer_of_ones_own_that_gives_no_map_is_refused_in_words(at: str, message: str) -> None:
    with pytest.raises(CannotExplain, match=message):
        explain(Own().eval(), torch.rand(1, 3, 64, 64), target=0, at=at)


def test_an_own_network_that_answers_no_tensor_or_has_no_numbers_is_told_so() -> None:
    x = torch.rand(1, 3, 64, 64)
    for how in ({"at": "patches"}, {"method": "saliency"}):
        with pytest.raises(CannotExplain, match="Own answers a dict; explain a module that returns its logits alone"):
            explain(Own(named=True).eval(), x, target=0, **how)
    with pytest.raises(ValueError, match="this Own is on the meta device"):
        explain(Own().to("meta").eval(), x, target=0, at="patches")
    with pytest.raises(BadImage, match="there are no images to measure on"):
        measure(Own().eval(), x[:0], "gradcam", at="patches")
    assert explain(Own().eval(), x, "gradcam", 0, "patches")[0].raw.shape == (8, 8)
