"""The certificate: what it counts, when it holds, and what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.quantizing.certificate import Certificate, Reference, answers, compare, paired, wilson
from zoo.kernels.quantizing.tolerance import Tolerance, allowed_error, tolerance_of

ROWS = torch.eye(8).repeat(5, 1) * 4 + torch.arange(8) / 10


def compared(ours: Tensor, labels: Tensor | None = None, tolerance: Tolerance | None = None, **more: Any) -> Certificate:
    reference = Reference([ROWS], True, labels)
    return compare(reference, [ours], "int8", "a test", tolerance or Tolerance(0.98), calibrated=32, digest="ab" * 16, **more)


def turned(count: int) -> Tensor:
    """Answer wrongly to the first images."""
    ours = ROWS.clone()
    ours[:count] = ours[:count].roll(1, 1)
    return ours


def test_equal_answers_are_proven() -> None:
    found = compared(ROWS.clone())
    assert (found.top1, found.top5, found.five, found.error, found.cosine) == (40, 40, 40, 0.0, pytest.approx(1.0))
    assert found.proven
    assert found.state == "proven"
    assert "same top-1 100.0 % (40 of 40" in str(found)


def test_answers_that_change_are_counted_and_refused() -> None:
    found = compared(turned(1))
    assert found.top1 == 39
    assert not found.holds()
    assert found.state == "refused"
    assert compared(turned(1), tolerance=Tolerance(0.97)).holds()
    assert found.worst == (0, 4, 5), "class 0 keeps 4 of its 5 answers"


def test_made_up_images_prove_nothing() -> None:
    found = compared(ROWS.clone(), unproven="made up")
    assert found.holds()
    assert not found.proven
    assert found.state == "UNPROVEN"
    assert "UNPROVEN, made up" in str(found)


def test_the_error_is_a_condition_of_its_own() -> None:
    assert not compared(ROWS * 1.2, tolerance=Tolerance(error=0.1)).holds()
    found = compared(ROWS * 1.2, tolerance=Tolerance(0.98, 0.3))
    assert found.holds()
    assert found.error == pytest.approx(0.2)
    assert found.cosine == pytest.approx(1.0)
    assert not compared(torch.full_like(ROWS, math.nan), tolerance=Tolerance(error=5.0)).holds()


def test_labels_give_the_paired_difference() -> None:
    labels = ROWS.argmax(1)
    found = compared(turned(2), labels)
    assert found.right == (40, 38)
    assert found.difference is not None
    mean, low, high = found.difference
    assert mean == pytest.approx(-5.0)
    assert low < -5 < high
    assert "-5.00 points" in str(found)


def test_the_paired_interval_is_bonett_and_prices() -> None:
    # Bonett and Price (2012), Statistical Methods in Medical Research 21: p12 = (f12 + 1) / (n + 2), adjusted Wald.
    gained, lost, count = 3, 7, 200
    a, b, n = (gained + 1) / (count + 2), (lost + 1) / (count + 2), count + 2
    half = 1.959964 * math.sqrt((a + b - (a - b) ** 2) / n)
    assert paired(gained, lost, count) == pytest.approx((-2.0, 100 * (a - b - half), 100 * (a - b + half)))
    none = paired(0, 0, 400)
    assert none[0] == 0
    assert -0.8 < none[1] < 0 < none[2] < 0.8, "no difference found is not no difference"


def test_wilsons_interval_covers_as_often_as_it_says() -> None:
    generator, share, count = torch.Generator().manual_seed(0), 0.97, 100
    drawn = (torch.rand(2000, count, generator=generator) < share).sum(1).tolist()
    inside = sum(low <= share <= high for low, high in (wilson(each, count) for each in drawn))
    assert 0.92 < inside / 2000 < 0.985


def test_a_certificate_survives_json() -> None:
    found = compared(turned(1), ROWS.argmax(1), kept=("stem", "fc"), tried=3, rechecked="elsewhere")
    assert Certificate.of(json.loads(json.dumps(found.facts()))) == found
    assert "2 layers stay in float" in str(found)
    assert "3 candidates" in str(found)
    assert "elsewhere" in str(found)


def test_outputs_that_are_no_logits_have_cosines_and_no_classes() -> None:
    maps = [torch.randn(6, 4, 3, 3), torch.randn(6, 5)]
    reference = Reference(maps, False)
    found = compare(reference, [maps[0], -maps[1]], "int8", "a test", Tolerance(error=0.2), calibrated=32, digest="")
    assert found.top1 is None
    assert found.cosine == pytest.approx(-1.0)
    assert found.error == pytest.approx(2.0)
    assert not found.holds()


def test_a_network_that_gives_nan_has_no_reference() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        Reference.measure(lambda x: x.flatten(1) / 0, torch.zeros(4, 3, 2, 2), None, True)
    with pytest.raises(ValueError, match="image by image"):
        Reference.measure(lambda x: x.sum(0), torch.ones(4, 3, 2, 2), None, True)


def test_answers_do_not_depend_on_the_batch() -> None:
    layer, images = nn.Conv2d(3, 4, 3), torch.randn(5, 3, 8, 8)
    assert torch.allclose(answers(layer, images, 1)[0], answers(layer, images, 4)[0], atol=1e-6)


@pytest.mark.parametrize(("value", "classifies", "expected"), [
    (None, True, Tolerance(0.98)), (None, False, Tolerance(error=0.1)), (0.95, True, Tolerance(0.95)), (1, True, Tolerance(1.0)),
    ({"error": 0.1}, False, Tolerance(error=0.1)), ({"top1": 0.9, "error": 0.1}, True, Tolerance(0.9, 0.1)),
])  # fmt: skip
def test_tolerances_that_are_understood(value: Any, classifies: bool, expected: Tolerance) -> None:
    assert tolerance_of(value, classifies) == expected


@pytest.mark.parametrize(("value", "classifies", "said"), [
    (98, True, r"write 98 % as 0\.98"), (-0.1, True, "from 0 to 1"), ("98%", True, "a share of equal top-1"), (True, True, "a share"),
    ({"top5": 1}, True, "it names 'top5'"), ({}, True, "it names nothing"), (0.98, False, "no share of equal top-1 can be asked"),
    ({"error": -1}, False, "error is a number"),
])  # fmt: skip
def test_tolerances_that_are_refused(value: Any, classifies: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tolerance_of(value, classifies)


def test_another_tolerance_changes_no_finding() -> None:
    found = compared(turned(1))
    assert replace(found, tolerance=Tolerance(0.5)).holds()
    assert found.top1 == 39


def test_one_number_an_image_is_compared_too() -> None:
    right = torch.arange(1.0, 41.0)
    found = compare(Reference([right], False), [1.1 * right], "int8", "test", Tolerance(error=0.2), calibrated=1, digest="")
    assert (round(found.error, 6), found.proven) == (0.1, True)


@pytest.mark.parametrize(("labels", "classifies", "said"), [
    (5, True, r"indices of the network's 4 classes, from 0; these lie between 5 and 5"), (-1, True, "lie between -1"),
    (0, False, "one row of logits"),
])  # fmt: skip
def test_labels_that_are_no_classes_of_the_network_are_refused(labels: int, classifies: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Reference.measure(lambda x: x.flatten(1)[:, :4], torch.randn(6, 3, 2, 2), torch.full((6,), labels), classifies)


def test_a_plan_of_another_batch_is_held_to_what_was_asked() -> None:
    assert allowed_error(0.001, 0.005, None) == 0.005
    assert allowed_error(0.001, 0.005, 0.002) == 0.002
    assert allowed_error(0.003, 0.0045, 0.002) == 0.003, "the images that are kept are a few, and may lie further off than all"
    assert allowed_error(0.001, 0.0015, 0.1) == 0.0015
