"""What TAB offers: networks, tags of checkpoints and files, whatever case they are typed in. It needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

import weights
from weights.registry import located
from zoo.variants import of_all_tasks

COLON = "ZOO_COLON_IS_A_WORD"
"""Is set where a shell takes the colon of NAME:TAG for a word of its own, and so replaces only what stands behind it."""


class AnyCase(str):
    """A word that the parser keeps although it begins in another case than what was typed: it compares beginnings letter by letter."""

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        """Say yes: who offers the word has compared it."""
        return True


def rejoin_colons() -> None:
    """Put NAME:TAG together again, which bash hands over as three words."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = int(os.environ.get("COMP_CWORD", "0") or 0)
    if os.environ.get("_ZOO_COMPLETE") != "complete_bash" or ":" not in words[1 : at + 1]:
        return
    joined: list[str] = []
    for number, word in enumerate(words[: at + 1]):
        glued = bool(joined) and number > 1 and (word == ":" or joined[-1].endswith(":"))
        joined[-1:] = [joined[-1] + word] if glued else [*joined[-1:], word]
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    if ":" in words[max(1, at - 1) : at + 1]:
        os.environ[COLON] = "1"


def names(incomplete: str) -> list[str]:
    """Complete a network's name, or NAME:TAG from the colon on."""
    name, colon, tag = incomplete.partition(":")
    if not colon:
        return _begun(of_all_tasks(), incomplete)
    known = next((one for one in of_all_tasks() if one.lower() == name.lower()), None)
    found = _begun(_tags(known), tag) if known else []
    return found if os.environ.get(COLON) else [AnyCase(f"{known}:{tag}") for tag in found]


def own_names(incomplete: str) -> list[str]:
    """Complete the NAME:TAG of a checkpoint of the user's own, which alone can be removed."""
    try:
        own = [f"{one.row.model}:{one.row.tag}" for one in located() if one.rank == 0]
    except weights.WeightsError:
        return []
    found = _begun(own, incomplete)
    before = incomplete.rpartition(":")[0]
    return [AnyCase(one[len(before) + 1 :]) for one in found] if before and os.environ.get(COLON) else found


def listed_names(incomplete: str) -> list[str]:
    """Complete the last of several names with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [AnyCase(f"{before}{comma}{name}") for name in names(last)]


def tags(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a tag of the network that the line names, else files: a checkpoint may be one."""
    words = [ctx.params.get("model"), *ctx.args]  # the parser leaves arguments alone where an option behind them has no value yet
    named = next((str(word) for word in words if word), "").partition(":")[0].lower()
    known = next((one for one in of_all_tasks() if one.lower() == named), None)
    return (_begun(_tags(known), incomplete) if known else []) or files(incomplete)


def files(incomplete: str) -> list[str]:
    """Complete a file that is typed in another case; any other the shell completes itself, as it does everywhere."""
    folder, slash, begun = incomplete.rpartition("/")
    try:
        there = sorted(os.scandir(Path(f"{folder}{slash}" or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return []
    if not begun or any(entry.name.startswith(begun) for entry in there):
        return []
    found = [entry for entry in there if entry.name.lower().startswith(begun.lower())]
    return [AnyCase(f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}") for entry in found]


def _tags(network: str) -> list[str]:
    try:
        return [row.tag for row in weights.checkpoints(network)]
    except weights.WeightsError:  # a damaged table is told where somebody reads it
        return []


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [AnyCase(word) for word in words if word.lower().startswith(incomplete.lower())]
