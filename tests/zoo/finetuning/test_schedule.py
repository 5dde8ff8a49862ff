"""What learns how fast."""

from __future__ import annotations

import pytest
import torch
from small import Tiny

import zoo
from zoo.finetuning.average import Average
from zoo.finetuning.schedule import depths, freeze, layers, make_optimizer, parameter_groups, rate_at, training_mode
from zoo.finetuning.settings import Settings


@pytest.mark.parametrize(
    ("name", "count"),
    [("VGG11", 11), ("ResNet18", 10), ("MobileNetV2", 20), ("DenseNet121", 63), ("GoogLeNet", 13), ("EfficientNetB0", 19)],
)
def test_layers_are_blocks_and_every_parameter_is_in_one(name: str, count: int) -> None:
    with torch.device("meta"):
        model = zoo.CATALOGUE[name]()
    inside = [id(p) for layer in layers(model) for p in layer.parameters()]
    assert sorted(inside) == sorted(id(p) for p in model.parameters())
    far = depths(model)
    assert max(far.values()) + 1 == count
    assert far[f"{model.first_layer}.weight"] == count - 1
    assert far[f"{model.classifiers[0]}.weight"] == 0


def test_the_blocks_of_a_transformer_are_layers_and_its_positions_learn_as_slowly_as_the_first() -> None:
    with torch.device("meta"):
        model = zoo.ViT_Ti_16()
    far = depths(model)
    assert far.keys() == dict(model.named_parameters()).keys()
    assert max(far.values()) + 1 == 1 + 12 + 1
    assert {far[name] for name in ("conv_proj.weight", "encoder.pos_embedding", "class_token")} == {13}
    assert far["encoder.layers.encoder_layer_11.mlp.0.weight"] == far["encoder.ln.weight"] == 1


def test_rates_fall_from_layer_to_layer_and_norms_and_biases_do_not_decay() -> None:
    groups = parameter_groups(Tiny(), Settings(layer_decay=0.5, weight_decay=0.1), head_only=False)
    found = {(g["weight_decay"], g["scale"]): len(g["params"]) for g in groups}
    assert found == {(0.1, 1.0): 1, (0.0, 1.0): 1, (0.1, 0.5): 1, (0.0, 0.5): 2, (0.1, 0.25): 1, (0.0, 0.25): 2}


def test_the_rate_rises_then_falls_as_a_cosine() -> None:
    settings = Settings(warmup=0.1, final_lr=0.01)
    rates = [rate_at(step, 100, 200, settings) for step in range(100, 200)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == max(rates) == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.505)
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)


def test_only_the_head_learns_first_and_norms_keep_still() -> None:
    model = Tiny()
    freeze(model, head_only=True)
    training_mode(model, still_norms=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, Settings(), head_only=True)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_the_average_follows_the_weights_and_gives_them_back() -> None:
    model = Tiny()
    average = Average(model, 0.9)
    with torch.no_grad():
        start = model.fc.bias.clone()
        model.fc.bias.add_(1.0)
    average.update(model, 100_000)
    assert torch.allclose(average.tensors["fc.bias"], start + 0.1)
    with average.inside(model):
        assert torch.allclose(model.fc.bias, start + 0.1)
    assert torch.allclose(model.fc.bias, start + 1)
