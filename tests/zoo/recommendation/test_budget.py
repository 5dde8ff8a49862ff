import math

import pytest

from zoo.recommendation import Budget


def test_what_exceeds_is_named_with_what_is_allowed() -> None:
    budget = Budget(max_ms=20, max_mb=10, license="permissive")
    assert budget.over(ms=20, mb=10, license="MIT") == []
    assert budget.over(ms=31.44, mb=250, license="CC-BY-NC-4.0") == [
        "31.4 ms, 20 allowed",
        "250 MB, 10 allowed",
        "licence CC-BY-NC-4.0, permissive asked for",
    ]
    assert Budget(max_ms=1).over(mb=1e6, license="unstated") == []  # not measured yet


def test_a_time_that_could_not_be_measured_is_over_what_is_allowed() -> None:
    budget = Budget(max_ms=20)
    assert budget.over(ms=math.inf, mb=1, license="MIT") == ["its time could not be measured"]
    assert budget.excess(ms=1e6, mb=1, license="MIT") < budget.excess(ms=math.inf, mb=1, license="MIT")
    assert Budget(max_mb=2).over(ms=math.inf, mb=1, license="MIT") == []


def test_a_licence_is_read_in_any_case_and_unstated_is_one() -> None:
    assert Budget(license="mit").over(mb=1, license="MIT") == []
    assert Budget(license="unstated").over(mb=1, license="unstated") == []
    assert Budget(license="permissive").over(mb=1, license="unstated")


def test_a_licence_that_is_not_allowed_is_further_away_than_any_size() -> None:
    budget = Budget(max_mb=10, license="MIT")
    assert budget.excess(mb=1000, license="MIT") < budget.excess(mb=1, license="Apache-2.0")
    assert budget.excess(mb=12, license="MIT") < budget.excess(mb=14, license="MIT")


def test_a_budget_that_means_nothing_is_refused() -> None:
    for wrong in ({"max_ms": 0}, {"max_mb": -1}, {"max_ms": "20"}, {"max_ms": True}):
        with pytest.raises(ValueError, match=r"max_m. is a positive number"):
            Budget.of(wrong)
    with pytest.raises(ValueError, match="license is a name"):
        Budget.of({"license": 3})
    with pytest.raises(TypeError, match=r"budget takes no 'ms'; did you mean max_ms\?"):
        Budget.of({"ms": 3})
    with pytest.raises(TypeError, match="it is spelt license"):
        Budget.of({"licence": "MIT"})
    with pytest.raises(TypeError, match="budget is a Budget or a table"):
        Budget.of(20)  # pyright: ignore[reportArgumentType]
    assert Budget.of(None) == Budget()
