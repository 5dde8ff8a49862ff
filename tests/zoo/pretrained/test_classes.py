"""Classes by meaning: which rows of the old head the new one is made of, and that everything says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import randomised
from torch import nn

import zoo
from weights import Checkpoint, Preprocessing
from zoo import GoogLeNet, InceptionV3, Model, ResNet18, ResNet20, SqueezeNet1_1, predict, trained
from zoo.labels import Label, Origin, labels
from zoo.pretrained.classes import AmbiguousClass, choose_classes, origin, rows_below, synsets
from zoo.pretrained.heads import reset_head

IMAGENET = labels("imagenet1k")
STEPS = Preprocessing(64, 64, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RECORD = Checkpoint("any", "test", ("file:///none",), "pytorch", "ours", 1000, STEPS, "MIT", "a test", labels="imagenet1k")


def alive(make: Any) -> Model:
    with torch.device("meta"):
        network = make().eval()
    network.load_state_dict(randomised(network), assign=True)
    network.checkpoint = RECORD
    return network


def test_dog_is_the_118_breeds() -> None:
    found = origin("dog", IMAGENET)
    assert found.rows == tuple(range(151, 269))
    assert (found.how, found.label) == ("averaged", Label("dog", "n02084071"))
    assert origin("n02084071", IMAGENET).rows == found.rows


def test_wordnet_ids_and_names_find_their_row() -> None:
    for wanted in ("n02123045", "tabby", "Tabby", "tabby_cat", " tabby  cat"):
        assert origin(wanted, IMAGENET).rows == (281,)
    assert origin("tabby", IMAGENET) == Origin(Label("tabby", "n02123045"), (281,))
    assert origin("cat", IMAGENET).label.wnid == "n02121620"  # a big cat is a cat too, but by another of its names
    assert origin("bird", IMAGENET).how == "averaged"
    assert origin("my_new_class", IMAGENET) == Origin(Label("my_new_class"), ())


def test_every_id_is_its_own_row() -> None:
    for row, label in enumerate(IMAGENET):
        assert label.wnid is not None
        assert origin(label.wnid, IMAGENET) == Origin(label, (row,))


def test_the_table_of_parents_is_whole() -> None:
    table = synsets()
    assert {label.wnid for label in IMAGENET} <= table.keys()
    assert all(parent in table for synset in table.values() for parent in synset.parents)
    below = rows_below(IMAGENET)
    assert below["n00001740"] == tuple(range(1000))  # entity
    assert below.keys() == table.keys()
    sizes = {"n01503061": 59, "n02084071": 118, "n01861778": 218, "n00015388": 398}  # bird, dog, mammal, animal
    assert {wnid: len(below[wnid]) for wnid in sizes} == sizes


def test_an_ambiguous_name_gives_the_ids() -> None:
    with pytest.raises(AmbiguousClass, match=r"'crane' means 2 things: n02012849 \(crane\), n03126707 \(crane\)\. Give the WordNet id"):
        origin("crane", IMAGENET)
    with pytest.raises(AmbiguousClass, match=r"n02958343.*n02959942"):
        origin("car", IMAGENET)
    assert origin("crane bird", IMAGENET).rows == (134,)
    assert origin("n03126707", IMAGENET).rows == (517,)


HEADS = {
    "ResNet18": ResNet18,
    "SqueezeNet1_1": SqueezeNet1_1,
    "GoogLeNet-aux": partial(GoogLeNet, aux_logits=True),
    "InceptionV3-aux": partial(InceptionV3, aux_logits=True),
    "MobileNetV3Small": zoo.MobileNetV3Small,
}


@pytest.mark.parametrize("subject", HEADS)
def test_rows_are_reused_averaged_and_drawn_anew(subject: str, caplog: pytest.LogCaptureFixture) -> None:
    network = alive(HEADS[subject])
    old = {name: (layer.weight.clone(), layer.bias.clone()) for name in network.classifiers for layer in [network.get_submodule(name)]}
    with caplog.at_level(logging.WARNING, "zoo"):
        choose_classes(network, ["n02123045", "dog", "my_new_class", "tench"])
    for name, (weight, bias) in old.items():
        layer: Any = network.get_submodule(name)
        assert layer.weight.shape[0] == layer.bias.shape[0] == 4
        assert torch.equal(layer.weight[0], weight[281])
        assert torch.equal(layer.bias[3], bias[0])
        torch.testing.assert_close(layer.weight[1], weight[151:269].mean(0))
        torch.testing.assert_close(layer.bias[1], bias[151:269].mean())
        assert layer.weight[2].abs().sum() > 0
        assert not any(torch.equal(layer.weight[2], row) for row in weight)
    assert network.num_classes == 4
    assert network.checkpoint is not None
    assert (network.checkpoint.num_classes, network.checkpoint.labels) == (4, None)
    assert network.classes is not None
    assert [o.how for o in network.classes] == ["reused", "averaged", "new", "reused"]
    head = network.classifiers[0]
    assert f"{head} has 4 classes; 2 reused: tabby, tench; 1 averaged: dog (of 118); 1 new and untrained: my_new_class" in caplog.text


def test_logits_of_reused_classes_stay() -> None:
    network = alive(ResNet18).double()  # a row of a product of three and of a thousand rows is summed in another order
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        old = network(x)
        choose_classes(network, ["n02123045", "dog", "goldfish"])
        new = network(x)
    torch.testing.assert_close(new, torch.stack([old[:, 281], old[:, 151:269].mean(1), old[:, 1]], 1))


def test_predictions_have_the_chosen_names(caplog: pytest.LogCaptureFixture) -> None:
    network = alive(ResNet18)
    choose_classes(network, ["n02123045", "dog", "my new class"])
    found = predict(network, np.zeros((70, 70, 3), np.uint8))
    assert {(p.index, p.label, p.wnid) for p in found} == {(0, "tabby", "n02123045"), (1, "dog", "n02084071"), (2, "my new class", None)}
    reset_head(network, 3)
    assert network.classes is None
    assert {p.label for p in predict(network, np.zeros((70, 70, 3), np.uint8))} == {"class 0", "class 1", "class 2"}


def test_trained_takes_them_of_a_list_without_ids(caplog: pytest.LogCaptureFixture) -> None:
    whole = trained(ResNet20)
    with caplog.at_level(logging.WARNING, "zoo"):
        network = trained(ResNet20, classes=["cat", "dog", "zebra"])
    assert torch.equal(network.fc.weight[:2], whole.fc.weight[[3, 5]])
    assert network.classes is not None
    assert [o.rows for o in network.classes] == [(3,), (5,), ()]
    assert "2 reused: cat, dog; 1 new and untrained: zebra" in caplog.text
    assert not network.training
    assert all(p.requires_grad for p in network.parameters())


def test_both_numbers_and_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"classes=\['cat'\] says how many there are; leave num_classes=1 out"):
        trained(ResNet20, classes=["cat"], num_classes=1)


def test_two_words_for_one_class_get_its_row_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    network = alive(ResNet18)
    old = network.fc.weight.detach().clone()
    choose_classes(network, ["n02123045", "tabby", "dog"])
    assert torch.equal(network.fc.weight[0], old[281])
    assert torch.equal(network.fc.weight[1], old[281])
    assert "'n02123045' and 'tabby' mean the same" in caplog.text


def test_classes_that_cannot_be_are_refused() -> None:
    network = alive(ResNet18)
    with pytest.raises(ValueError, match="the same class twice: 'mine' and 'Mine'"):
        choose_classes(network, ["mine", "Mine"])
    with pytest.raises(ValueError, match="classes names none"):
        choose_classes(network, [])
    for wrong in ("dog", [3]):
        with pytest.raises(TypeError, match="classes are a list of WordNet ids and names"):
            choose_classes(network, wrong)  # pyright: ignore[reportArgumentType]
    assert network.num_classes == 1000
    for record in (None, replace(RECORD, labels=None)):
        network.checkpoint = record
        with pytest.raises(ValueError, match="this ResNet18 has no checkpoint whose classes have names"):
            choose_classes(network, ["dog"])


def test_a_file_of_another_number_of_classes_has_no_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(ResNet18(num_classes=7).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="no checkpoint whose classes have names"):
        trained(ResNet18, tmp_path / "w.safetensors", classes=["dog"])


def test_reset_head_returns_the_network_with_a_new_classifier(caplog: pytest.LogCaptureFixture) -> None:
    network = alive(ResNet18)
    with caplog.at_level(logging.WARNING, "zoo"):
        assert reset_head(network, 5) is network
    assert network(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert "fc is new and untrained, 5 classes instead of 1000" in caplog.text
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="num_classes is a whole number of at least 1"):
            reset_head(network, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"reset_head\(\) takes a network of the zoo, plain\(model\) of a fast one"):
        reset_head(nn.Linear(3, 3), 5)  # pyright: ignore[reportArgumentType]
