"""Addresses: what is shown, what is noted, what is sent; and that nothing but `reveal` gives the rest."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import pytest

from weights.addresses import Address, hushed, redacted
from weights.errors import InsecureSource

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("https://example.org/w.pth", "https://example.org/w.pth"),
        (f"https://ada:{SECRET}@example.org:8443/w.pth?token={SECRET}&x=1#part", "https://example.org:8443/w.pth?token=…&x=…#…"),
        (f"https://example.org/w?{SECRET}", "https://example.org/w?…"),
        (f"https://example.org/w?{SECRET}=1&{SECRET * 9}=1", "https://example.org/w?s3cret=…&…"),
        (f"https://ada:{SECRET}/x@example.org/w", "https://…"),
        (f"https://ada:{SECRET}?x@example.org/w", "https://…"),
        (f"https://ada:{SECRET}#x@example.org/w", "https://…"),
        (f"https://ada:{SECRET}/w", "https://…"),
        (f"https://ada@{SECRET}:x@example.org/w", "https://example.org/w"),
        (f"//ada:{SECRET}@example.org/w?k={SECRET}", "//example.org/w?k=…"),
        (f"https:/example.org/w?k={SECRET}", "https:/example.org/w?k=…"),
        (f" https://ada:{SECRET}@example.org/w", " https://example.org/w"),
        (f"https://[::1]:8080/w?k={SECRET}", "https://[::1]:8080/w?k=…"),
        ("hf://acme/wheels@main/model.safetensors", "hf://acme/wheels@main/model.safetensors"),
        ("pypi://lite0-model==0.1.0+cpu/lite0/w.pth", "pypi://lite0-model==0.1.0+cpu/lite0/w.pth"),
        ("file:///home/ada/what?.pth", "file:///home/ada/what?.pth"),
        ("package:embedded/w.safetensors", "package:embedded/w.safetensors"),
        ("imagenet1k_v1", "imagenet1k_v1"),
    ],
)
def test_an_address_is_shown_with_its_host_and_path_and_without_its_secrets(raw: str, shown: str) -> None:
    address = Address(raw)
    assert str(address) == repr(address)[1:-1] == f"{address}" == str(f"{address:s}") == "%s" % address == "".join([address]) == shown  # noqa: UP031
    assert json.loads(json.dumps({"at": address, address: 1})) == {"at": shown, shown: 1}
    assert str(pickle.loads(pickle.dumps(address))) == shown
    assert address.reveal() == raw
    assert shown.count(SECRET) == ("=…&…" in shown)  # a name is no secret
    for text in (address.noted, address.bare, address.encode().decode(), address.lower()):
        assert SECRET not in text or "=…&…" in shown


def test_addresses_are_equal_where_all_of_them_is() -> None:
    one, other = Address("https://example.org/w?key=1"), Address("https://example.org/w?key=2")
    assert str(one) == str(other)
    assert one != other
    assert len({one, other, Address("https://example.org/w?key=1")}) == 2
    assert one == "https://example.org/w?key=1"
    assert one in ("https://example.org/w?key=1",)
    assert copy.deepcopy([one])[0] is copy.copy(one) is Address(one) is one


def test_what_is_noted_tells_queries_apart_and_stays_what_it_is() -> None:
    one, other = Address("https://example.org/w?key=1#x").noted, Address("https://example.org/w?key=2").noted
    assert one.startswith("https://example.org/w?sha256-")
    assert one == Address("https://example.org/w?key=1").noted == Address(one).noted == str(Address(one))
    assert one != other


def test_what_goes_to_strangers_has_no_query_and_no_fragment() -> None:
    bare = "https://example.org/w.pth"
    assert Address(f"{bare}?token=s3cret#part").bare == Address(f"{bare}#t?k").bare == Address(bare).bare == bare
    assert Address("hf://acme/wheels@v1/w").bare == "hf://acme/wheels@v1/w"


def test_a_file_inside_of_an_address_takes_the_query_along() -> None:
    assert Address("https://ada:pw@example.org/zoo/?sig=1").inside("abc").reveal() == "https://ada:pw@example.org/zoo/abc?sig=1"


@pytest.mark.parametrize("raw", ["https://[::1/w", "https://example.org:x/w", "https://example.org:99999/w", "https://exa\u2100mple.org/w"])
def test_an_address_that_can_not_be_read_is_an_error_of_ours(raw: str) -> None:
    with pytest.raises(InsecureSource, match=r"is no address: its host or its port can't be read\. Check how it is written\."):
        _ = Address(raw).parts


def test_other_programs_words_are_cleaned_of_addresses() -> None:
    said = f"Client error '403' for url 'https://ada:{SECRET}@example.org/w?sig={SECRET}' (see https://example.org/help)."
    assert redacted(said) == "Client error '403' for url 'https://example.org/w?sig=…' (see https://example.org/help)."
    assert redacted(ValueError("no address")) == "no address"


def test_the_libraries_of_http_say_nothing_of_our_requests_and_go_on_with_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    names = ("httpx2", "httpcore2.http11", "huggingface_hub.utils._http", "weights")
    loggers = [logging.getLogger(name) for name in names]
    with hushed(), hushed():
        for logger in loggers:
            logger.info("GET ?sig=1")
    assert [record.name for record in caplog.records] == ["weights"]
    loggers[0].info("GET somebody else's")
    assert [record.name for record in caplog.records] == ["weights", "httpx2"]
