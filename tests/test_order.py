"""What conftest.py promises of every test: any place in the order, the same numbers, and no network but this machine's."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from order import shuffle


def listed(seed: int) -> list[tuple[Path, int]]:
    items: Any = [SimpleNamespace(path=Path(f"test_{file}.py"), number=number) for file in range(9) for number in range(9)]
    shuffle(items, seed)
    return [(item.path, item.number) for item in items]


def test_a_seed_says_an_order_of_files_and_of_the_tests_of_each() -> None:
    written, one, two = listed(0), listed(1), listed(2)
    assert written == sorted(written)
    assert one == listed(1)
    assert sorted(one) == sorted(two) == written
    assert [path for path, _ in one[::9]] != [path for path, _ in two[::9]]
    assert all(len({path for path, _ in one[start : start + 9]}) == 1 for start in range(0, 81, 9))
    assert [number for _, number in one[:9]] != sorted(number for _, number in one[:9])


@pytest.mark.parametrize("turn", range(2))
def test_every_test_draws_the_same_numbers(turn: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_another_machine_is_out_of_reach(family: socket.AddressFamily) -> None:
    address = ("192.0.2.1", 80) if family == socket.AF_INET else ("2001:db8::1", 80)
    with socket.socket(family, socket.SOCK_DGRAM) as open_:
        for call in (open_.connect, open_.connect_ex, lambda to: open_.sendto(b"x", to), lambda to: open_.sendmsg([b"x"], [], 0, to)):
            with pytest.raises(AssertionError, match=f"a test reached for {address[0]}"):
                call(address)


def test_no_name_is_looked_up_but_this_machines() -> None:
    for call in (socket.gethostbyname, lambda name: socket.getaddrinfo(name, 80), lambda name: socket.create_connection((name, 80))):
        with pytest.raises(AssertionError, match=r"a test reached for example\.org"):
            call("example.org")
    assert socket.getaddrinfo("localhost", 80)
