"""One place has one spelling, and what a lock pins there is found by every name that leads to it."""

from __future__ import annotations

import pytest

from weights.addresses import Address
from weights.places import ELSEWHERE, asked_at, pinned_at

COMMIT = "c" * 40


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://example.org/w.pth", "https://EXAMPLE.org:443/w.pth#top"),
        ("http://127.0.0.1:80/w", "http://127.0.0.1/w"),
        ("file:///srv/a%20b", "file://localhost/srv/a b"),
        ("hf://acme/wheels", "hf://acme/wheels@main"),
        ("hf://acme/wheels@refs%2Fpr%2F1/w", "hf://acme/wheels@refs%2fpr%2F1/w"),
    ],
)
def test_a_place_has_one_spelling(one: str, other: str) -> None:
    assert asked_at(one) == asked_at(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://example.org/w.pth", "https://example.org:8443/w.pth"),
        ("https://example.org/w.pth", "https://example.org/W.pth"),
        ("https://example.org/w?key=1", "https://example.org/w?key=2"),
        ("hf://acme/wheels@v1/w", "hf://acme/wheels@v2/w"),
        ("hf://acme/wheels/a", "hf://acme/wheels/b"),
    ],
)
def test_other_files_have_other_places(one: str, other: str) -> None:
    assert asked_at(one) != asked_at(other)


def test_an_address_with_a_query_is_found_by_the_hash_that_a_lock_has_of_it() -> None:
    key = Address("https://example.org/w?key=1").noted
    assert set(pinned_at(key, (key,))) == {asked_at("https://example.org/w?key=1")}
    assert asked_at("https://example.org/w?key=2") not in pinned_at(key, (key,))


def test_what_ships_or_came_in_a_bundle_has_no_place_of_its_own() -> None:
    assert asked_at("package:embedded/w.safetensors") is asked_at(f"{ELSEWHERE}model.safetensors") is None  # two bundles may have one each


@pytest.mark.parametrize(
    ("key", "recorded"), [("hf://acme/wheels@v2", ()), ("ResNet50:mine", ("hf://acme/wheels@v2",)), ("ResNet50:gone", ())]
)
def test_an_entry_of_the_hub_is_found_by_its_commit_and_by_the_revision_that_was_asked_for(key: str, recorded: tuple[str, ...]) -> None:
    places = set(pinned_at(key, (f"hf://acme/wheels@{COMMIT}/model.safetensors",), recorded))
    by_commit = {asked_at(f"hf://acme/wheels@{COMMIT}{file}") for file in ("", "/model.safetensors")}
    by_name = {asked_at(f"hf://acme/wheels@v2{file}") for file in ("", "/model.safetensors")}
    assert places == (by_commit if key == "ResNet50:gone" else by_commit | by_name)


def test_another_file_of_a_repository_is_not_the_one_that_its_name_means() -> None:
    places = set(pinned_at("hf://acme/wheels/other.safetensors", (f"hf://acme/wheels@{COMMIT}/other.safetensors",)))
    assert asked_at("hf://acme/wheels/other.safetensors") in places
    assert asked_at("hf://acme/wheels") not in places
