"""Two hundred random faults; `make faults-network` injects a thousand. After each, `network_faults` checks what must be true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults_page import write_section
from hubserver import HubServer
from network_faults import FAULTS, Arena, Outcome, inject, summary

BASE = int(os.environ.get("ZOO_FAULT_SEED", "1"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_faults_break_no_invariant(group: int, tmp_path: Path) -> None:
    with HubServer() as hub:
        arena = Arena(hub, tmp_path)
        outcomes = [inject(arena, seed, BASE) for seed in range(group, 200, GROUPS)]
    assert [(outcome.seed, outcome.source, outcome.faults, outcome.violations) for outcome in outcomes if outcome.violations] == []
    assert {outcome.result for outcome in outcomes} > {"right"}  # some came through, some were refused


def test_a_broken_invariant_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import network_faults

    from weights import fetch

    monkeypatch.setattr(network_faults, "FAULTS", ["swap"])
    monkeypatch.setattr(fetch, "_prove", lambda *_: None)  # a client that checks nothing
    with HubServer() as hub:
        arena = Arena(hub, tmp_path)
        found = {line.partition(":")[0] for seed in range(12) for line in inject(arena, seed, 3).violations}
    assert "wrong bytes" in found


def test_the_faults_of_two_hundred_seeds_are_all_that_the_server_knows(tmp_path: Path) -> None:
    from unittest.mock import Mock

    from network_faults import Injection

    drawn: set[str] = set()
    for seed in range(200):
        hub = Mock(spec=HubServer, url="http://127.0.0.1:1", cdn="http://127.0.0.1:2")
        hub.file.side_effect = lambda name, _: f"http://127.0.0.1:1/files/{name}"
        hub.repo.return_value = "0" * 40
        with Arena(hub, tmp_path).injection(seed) as home:
            injection = Injection(Arena(hub, tmp_path), home, seed, BASE)
            injection.fail()
        drawn |= {fault.partition(" ")[0] for fault in injection.outcome.faults}
    assert set(FAULTS) <= drawn


def test_the_report_counts_and_leaves_other_sections_alone(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    page.write_text("# Injected faults\n\n<!-- faults-files begin -->\n## Files\n\ntheirs\n<!-- faults-files end -->\n")
    good = Outcome(0, "https", "cold", ["cut x2"], "right", 0.1)
    bad = Outcome(1, "hf", "warm", ["flip x1"], "HashMismatch", 0.2, ["leak: ['a']", "leak: ['b']"])
    for _ in range(2):
        write_section(page, "Network", summary([good, bad], 5, 1.0))
    text = page.read_text()
    assert text.count("## Network\n") == 1
    assert "<!-- faults-files begin -->\n## Files\n\ntheirs\n<!-- faults-files end -->\n" in text
    assert "| leaked partials | 1 |" in text
    assert "| **recovered without a manual step** | **100.0 %** |" in text
    assert "- 5:1 hf, warm, flip x1: leak: ['a']; leak: ['b']" in text
