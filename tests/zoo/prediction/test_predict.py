from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from weights import Checkpoint, Preprocessing
from zoo import ResNet20
from zoo.images.preprocess import BadImage, preprocess
from zoo.labels import labels
from zoo.networks.model import Model
from zoo.prediction.predict import Prediction, WrongInput, check_preprocessed, predict

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = Preprocessing(256, 224, "bilinear", MEAN, STD)
CIFAR = Preprocessing(32, 32, "bilinear", (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
HALVES = Preprocessing(32, 32, "bilinear", (0.5,) * 3, (0.5,) * 3)
CAFFE = Preprocessing(256, 224, "bilinear", (0.48235, 0.45882, 0.40784), (1 / 255,) * 3)
GREY = Preprocessing(32, 28, "bilinear", (0.1307,), (0.3081,))
PLAIN = Preprocessing(32, 32, "bilinear", (0.0,) * 3, (1.0,) * 3)
RECORDS = {"imagenet": IMAGENET, "cifar": CIFAR, "halves": HALVES, "caffe": CAFFE, "grey": GREY}


def record(preprocessing: Preprocessing = CIFAR, labels: str | None = "cifar10", num_classes: int = 10) -> Checkpoint:
    return Checkpoint("ResNet20", "test", ("file:///none",), "pytorch", "ours", num_classes, preprocessing, "MIT", "a test", labels=labels)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    network = ResNet20().eval()
    network.checkpoint = record()
    return network


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_predictions_are_the_softmax_of_the_models_own_preprocessing(model: Model) -> None:
    image = noise(50, 40, 3)
    expected = model(model.preprocess(image)).softmax(1)[0]
    found = predict(model, image, top=10)
    assert [p.probability for p in found] == sorted((p.probability for p in found), reverse=True)
    assert sorted(p.index for p in found) == list(range(10))
    for p in found:
        assert p.probability == pytest.approx(expected[p.index].item(), rel=1e-6)
        assert (p.label, p.wnid) == (labels("cifar10")[p.index].name, None)


def test_one_image_gives_a_list_and_several_a_list_each(model: Model, tmp_path: Path) -> None:
    array = noise(40, 40, 3)
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    single = predict(model, path, top=3)
    assert len(single) == 3
    assert all(isinstance(p, Prediction) for p in single)
    for one in (str(path), Image.fromarray(array), array, torch.from_numpy(array), model.preprocess(path)[0]):
        assert predict(model, one, top=3) == single
    for many in ([path], (array,), array[None], torch.from_numpy(array)[None], model.preprocess(path)):
        assert predict(model, many, top=3) == [single]
    assert predict(model, []) == []
    assert predict(model, torch.zeros(0, 3, 32, 32)) == []


def test_long_lists_go_through_the_network_in_batches(model: Model) -> None:
    images, sizes = [noise(20 + i, 30, 3) for i in range(7)], []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    batched = predict(model, images, batch_size=3)
    order = [[p.index for p in row] for row in batched]
    assert sizes == [3, 3, 1]
    assert order == [[p.index for p in predict(model, image)] for image in images]
    sizes.clear()
    assert [[p.index for p in row] for row in predict(model, model.preprocess(images), batch_size=4)] == [
        [p.index for p in r] for r in batched
    ]
    assert sizes == [4, 3]


def test_a_bad_image_deep_in_a_list_is_named_by_its_place(model: Model) -> None:
    with pytest.raises(BadImage, match=r"images\[5\]: expected an array of uint8"):
        predict(model, [noise(40, 40, 3)] * 5 + [np.zeros((40, 40, 3))], batch_size=2)


def test_the_model_is_left_as_it_was_found(model: Model) -> None:
    model.train()
    model.get_submodule("layer1").eval()  # frozen, as in fine-tuning
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert predict(model, noise(40, 40, 3)) == predict(model, noise(40, 40, 3))
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.extend(m.training for m in module.modules()))
    found = predict(model, noise(40, 40, 3))
    assert seen
    assert not any(seen)
    model.eval()
    assert predict(model, noise(40, 40, 3)) == found
    for name, module in model.named_modules():
        module.training = modes[name]
    with pytest.raises(BadImage):
        predict(model, "none.jpg")
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_input_follows_the_models_dtype(model: Model, dtype: torch.dtype) -> None:
    expected = predict(model, noise(40, 40, 3), top=10)
    found = {p.index: p.probability for p in predict(model.to(dtype), noise(40, 40, 3), top=10)}
    assert all(found[p.index] == pytest.approx(p.probability, abs=0.02) for p in expected)


@pytest.mark.gpu
def test_the_input_follows_the_models_device(model: Model) -> None:
    expected = predict(model, noise(40, 40, 3), top=10)
    found = {p.index: p.probability for p in predict(model.cuda(), noise(40, 40, 3), top=10)}
    assert all(found[p.index] == pytest.approx(p.probability, abs=1e-3) for p in expected)


def test_classes_without_names_are_numbered(model: Model) -> None:
    for unnamed in (record(labels=None), record(labels="imagenet1k")):  # a thousand names can't be those of ten classes
        model.checkpoint = unnamed
        assert all((p.label, p.wnid) == (f"class {p.index}", None) for p in predict(model, noise(40, 40, 3)))


def test_wordnet_ids_come_with_imagenets_names() -> None:
    model = ResNet20(num_classes=1000).eval()
    model.checkpoint = record(labels="imagenet1k", num_classes=1000)
    p = predict(model, noise(40, 40, 3))[0]
    assert (p.label, p.wnid) == (labels("imagenet1k")[p.index].name, labels("imagenet1k")[p.index].wnid)


def test_a_prediction_reads_well() -> None:
    assert str(Prediction("tabby", "n02123045", 0.8734, 281)) == "tabby (n02123045) 87.3%"
    assert str(Prediction("cat", None, 1.0, 3)) == "cat 100.0%"


def test_an_untrained_model_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"this ResNet20 is untrained.*use trained\(ResNet20\)"):
        predict(ResNet20(), noise(40, 40, 3))


def test_top_and_batch_size_are_checked_and_top_may_exceed_the_classes(model: Model) -> None:
    assert len(predict(model, noise(40, 40, 3), top=1000)) == 10
    with pytest.raises(ValueError, match="top is a whole number of at least 1, got 0"):
        predict(model, noise(40, 40, 3), top=0)
    with pytest.raises(ValueError, match="batch_size is a whole number of at least 1, got -1"):
        predict(model, noise(40, 40, 3), batch_size=-1)


def test_a_network_that_computes_nan_is_reported_not_ranked(model: Model) -> None:
    nn.init.constant_(model.get_parameter("fc.bias"), float("nan"))
    with pytest.raises(FloatingPointError, match=r"NaN or infinite logits: torch\.float32 is too narrow"):
        predict(model, noise(40, 40, 3))


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    """Photographs whole and in crops, and flat ones of every grey and some colours."""
    import skimage.data

    names = ("chelsea", "coffee", "rocket", "astronaut", "camera", "moon", "page", "text", "brick", "gravel", "hubble_deep_field", "coins")
    photos = [Image.fromarray(getattr(skimage.data, name)()) for name in names]
    random, crops = np.random.default_rng(0), []
    for photo in photos:
        for side in (8, 32, 100, 150):
            left, top = random.integers(0, photo.width - side), random.integers(0, photo.height - side)
            crops.append(photo.crop((left, top, left + side, top + side)))
    flat = [Image.new("L", (32, 32), grey) for grey in range(256)]
    colours = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue", "yellow", "pink", "khaki", "silver")]
    return photos + crops + flat + colours


@pytest.mark.parametrize("name", RECORDS)
def test_what_the_record_itself_makes_is_never_refused(pictures: list[Image.Image], name: str) -> None:
    p = replace(RECORDS[name], resize=32, crop=28)
    x = preprocess(pictures, p)
    for image in (x, *x):
        check_preprocessed(image, p, len(p.mean))
    for low_contrast in x[:12]:  # a fog in which every normalised value lies within 0..1, as resampled in floating point
        check_preprocessed((low_contrast - low_contrast.min()) / (low_contrast.max() - low_contrast.min()) * 0.9 + 0.03, p, len(p.mean))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        check_preprocessed(x.to(dtype), p, len(p.mean))


@pytest.mark.parametrize("name", ["imagenet", "cifar", "caffe", "grey"])
def test_pictures_in_float_resampled_with_overshoot_are_not_refused(pictures: list[Image.Image], name: str) -> None:
    p = replace(RECORDS[name], resize=64, crop=64)
    x = nn.functional.interpolate(preprocess(pictures, p), size=(150, 97), mode="bicubic")
    for image in x:
        check_preprocessed(image, p, len(p.mean))


def photographs(p: Preprocessing, pictures: list[Image.Image]) -> Tensor:
    """The whole photographs on 0..1, as ToTensor gives them."""
    channels = len(p.mean)
    return preprocess(pictures[:12], Preprocessing(48, 48, "bilinear", (0.0,) * channels, (1.0,) * channels))


@pytest.mark.parametrize("name", RECORDS)
def test_photographs_in_0_to_255_are_refused(pictures: list[Image.Image], name: str) -> None:
    for image in photographs(RECORDS[name], pictures) * 255:
        if name != "caffe" or image.max() > 220:  # whose own values reach 151
            with pytest.raises(WrongInput, match=r"they look like 0\.\.255\. Subtract mean .*, once; model\.preprocess"):
                check_preprocessed(image, RECORDS[name], len(RECORDS[name].mean))


@pytest.mark.parametrize("name", RECORDS)
def test_photographs_in_0_to_1_are_refused(pictures: list[Image.Image], name: str) -> None:
    for image in photographs(RECORDS[name], pictures):
        with pytest.raises(WrongInput, match=r"they look like 0\.\.1, not normalised\. Subtract mean"):
            check_preprocessed(image, RECORDS[name], len(RECORDS[name].mean))


def test_0_to_1_is_right_for_a_record_that_does_not_normalise(pictures: list[Image.Image]) -> None:
    check_preprocessed(photographs(PLAIN, pictures), PLAIN, 3)


@pytest.mark.parametrize("name", ["imagenet", "cifar"])
def test_photographs_normalised_twice_are_refused(pictures: list[Image.Image], name: str) -> None:
    p = RECORDS[name]
    once = preprocess(pictures[:4], p)
    twice = (once - torch.tensor(p.mean).view(3, 1, 1)) / torch.tensor(p.std).view(3, 1, 1)
    with pytest.raises(WrongInput, match="they look normalised twice, or for other weights"):
        check_preprocessed(twice, p, 3)
    with pytest.raises(WrongInput, match="they look normalised twice, or for other weights"):
        check_preprocessed(preprocess(pictures[:4], CAFFE), p, 3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 32, 32, 3), r"the channels of shape \(2, 32, 32, 3\) are last, .* x\.permute\(0, 3, 1, 2\)"),
        (torch.zeros(32, 32, 3), r"x\.permute\(2, 0, 1\)"),
        (torch.zeros(2, 1, 32, 32), r"takes 3 channels, got shape \(2, 1, 32, 32\)"),
        (torch.zeros(32, 32), r"expected preprocessed images \(B, 3, H, W\) or \(3, H, W\), got shape \(32, 32\)"),
        (torch.full((3, 32, 32), float("nan")), "NaN or infinite"),
        (torch.full((3, 32, 32), float("-inf")), "NaN or infinite"),
        (torch.rand(1, 3, 32, 32), r"they look like 0\.\.1"),
        (torch.rand(1, 3, 32, 32) * 255, r"they look like 0\.\.255"),
    ],
)
def test_wrong_tensors_are_explained_not_classified(model: Model, x: Tensor, message: str) -> None:
    model.register_forward_hook(lambda *_: pytest.fail("the network ran"))
    with pytest.raises(WrongInput, match=message):
        predict(model, x)


def test_flat_dummies_pass(model: Model) -> None:
    for value in (0.0, 0.5, 1.0):
        assert len(predict(model, torch.full((3, 32, 32), value))) == 5
