"""Arguments of public functions: numbers of any library become Python's, and a misspelt word is told the right one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from weights.arguments import did_you_mean, forgiving, python_scalar, unknown_keyword, whole


@pytest.mark.parametrize("value", [4, np.int64(4), np.uint8(4), np.array(4), torch.tensor(4)], ids=lambda v: type(v).__name__)
def test_a_whole_number_of_any_library_is_pythons(value: Any) -> None:
    found = whole("count", value)
    assert found == 4
    assert type(found) is int
    assert json.dumps(found) == "4"


@pytest.mark.parametrize(
    "value", [0, -1, 2.0, "4", None, True, np.bool_(True), np.float64(2), torch.tensor(True), np.array([1, 2]), torch.ones(2)], ids=repr
)
def test_what_is_no_whole_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="count is a whole number of at least 1, got"):
        whole("count", value)


@pytest.mark.parametrize(
    ("value", "kind"), [(np.float32(0.5), float), (np.bool_(True), bool), (np.str_("cat"), str), (np.int8(3), int)], ids=repr
)
def test_a_scalar_of_numpy_becomes_pythons_own(value: Any, kind: type) -> None:
    assert type(python_scalar(value)) is kind
    assert python_scalar(value) == value


def test_arrays_and_tensors_stay_what_they_are() -> None:
    for value in (np.zeros(3), torch.zeros(()), [np.int64(1)]):
        assert python_scalar(value) is value


def test_a_word_is_compared_in_any_case() -> None:
    assert did_you_mean("EPOCH", ["epochs", "steps"]) == "; did you mean epochs?"
    assert did_you_mean("resnet5", ["ResNet50", "ResNet56", "VGG19"], count=2) == "; did you mean ResNet56 or ResNet50?"
    assert did_you_mean("colour", ["epochs"]) == ""


def test_a_keyword_that_nothing_is_like_gets_the_list_and_one_of_another_library_gets_advice() -> None:
    assert str(unknown_keyword("f()", "colour", ["top", "images"])) == "f() takes no 'colour'; it takes top, images"
    assert str(unknown_keyword("f()", "device", ["top"], {"device": "move it"})) == "f() takes no 'device'; move it"


def test_a_forgiving_function_takes_numpys_scalars_and_keeps_its_signature() -> None:
    @forgiving
    def f(count: int, *, rate: float = 1.0) -> tuple[type, type]:
        """Say what came."""
        return type(count), type(rate)

    assert f(np.int64(3), rate=np.float32(0.1)) == (int, float)
    assert f.__name__ == "f"
    assert f.__doc__ == "Say what came."
    with pytest.raises(TypeError, match=r"f\(\) takes no 'rat'; did you mean rate\?"):
        f(1, rat=2)  # pyright: ignore[reportCallIssue]


def test_a_forgiving_function_that_takes_any_keyword_checks_them_itself() -> None:
    @forgiving
    def f(**options: int) -> dict[str, int]:
        return options

    assert f(anything=np.int64(1)) == {"anything": 1}
