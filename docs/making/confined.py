"""docs/confined.md: what a reader that a hostile file took over can do, of the record that tests/convert/confinement.py writes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import _calls
from convert._call_table import NUMBERS
from making.tables import generated, page, table

RECORD = Path(__file__).parents[1] / "confined.json"
HEAD = """\
# What a confined reader can do

`trained(…)` and `zoo convert` read a foreign file in [a process of its own](weights.md#strangers-files), which may do little else. What
could a hostile file do if it took that process over? No such file is known, so a program tried. It ran inside the confinement, made
every system call of the kernel's table, and attempted {attempts} things that could harm others.

`zoo doctor` lists the protections that hold on your machine. If one is missing, commands that read such a file say so once.

## Attempts that succeeded, by age of the kernel

Older kernels are emulated: the confinement uses only what they had.
"""
AGES = """\
With the filter and any version of Landlock, nothing acts outside the process. Without Landlock a reader can read your files and not
change them. Without the filter more is possible, and the command says what. Kernels on x86-64 and ARM64 have the filter since Linux
3.19, unless they were built without it. All attempts were made on x86-64. On ARM64 the filter has only been simulated.
"""
EACH = """\
## Each attempt

*acts*: it succeeded. *refused*: the call failed. *ended*: the kernel ended the process.
"""
TABLE = """\
## Each system call

The filter is a list of what is allowed. Arguments are checked where a call can also do harm.
"""
CHECKS = {
    "open": "to read; otherwise EROFS",
    "openat": "to read; otherwise EROFS",
    "mmap": "for ordinary pages; huge pages, which all processes share, get ENOMEM",
    "madvise": "for anything but to mark memory as broken",
    "fcntl": "about descriptors and their flags; not for locks, leases or owners",
    "ioctl": "for the state of a terminal, or how many bytes wait; otherwise ENOTTY",
    "prctl": "to name threads and memory",
    "kill": "to signal the process itself",
    "tgkill": "to signal the process itself",
    "prlimit64": "to read the process's own limits",
    "clone": "to start as many threads as its library needs; otherwise EAGAIN",
}
FOOT = """\
A refused call fails with ENOSYS if it is newer than Linux 5.0, so that the C library makes an older call. Other calls fail with EPERM.
If a library can't do without a call, the error is `CallRefused` and names it. Please report it.

Landlock guards the opening of files. Names, sizes and times of files can still be asked for. The calls `uretprobe` and `uprobe` pass
every filter. The kernel puts them into programs that are traced, and they fail for everybody else.

Recorded on Linux {kernel}, x86-64, as root. `python tests/convert/confinement.py --write docs/confined.json` repeats it in seconds.
`tests/convert/test_confinement.py` compares the record with the machine that runs the tests, also as a user without privileges.
"""


def named(age: dict[str, Any]) -> str:
    """Name an age of the kernel."""
    if age["landlock"] is None:
        return "not confined"
    if age["threads"]:
        return f"filter, Landlock {age['landlock']}, a reader that may start {age['threads']} threads"
    landlock = f"Landlock {age['landlock']}" if age["landlock"] else "no Landlock"
    return f"{'filter' if age['seccomp'] else 'no filter'}, {landlock}"


def column(age: dict[str, Any]) -> bool:
    """Whether an age has a column of its own: the others are as one of these."""
    return not age["threads"] and (age["landlock"] in (None, 6, 0) or (age["landlock"] == 1 and age["seccomp"]))


def outcome(found: str) -> str:
    """Say in a word what came of an attempt."""
    return {"acted": "**acts**", "killed": "ended", "absent": "no such call"}.get(found, found if "threads" in found else "refused")


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    seen: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    acts = [sum(1 for found in one["attempts"].values() if found == "acted") for one in seen]
    said = [_sentences(one["missing"]) if one["age"]["landlock"] is not None else "" for one in seen]
    ages = [[named(one["age"]), str(count), words] for one, count, words in zip(seen, acts, said, strict=True)]
    columns = [one for one in seen if column(one["age"])]
    attempts = [[name, *(outcome(one["attempts"][name]) for one in columns)] for name in seen[0]["attempts"]]
    return {
        "confined.md": page(
            generated("docs/confined.json"),
            HEAD.format(attempts=len(attempts)),
            table(["kernel", "attempts that act outside", "what the command says is missing"], ages, right=(1,)),
            AGES,
            EACH,
            table(["attempt", *(named(one["age"]) for one in columns)], attempts),
            TABLE,
            *_calls_by_answer(seen[1]["table"]),
            table(["call", "allowed if it asks"], [[f"`{name}`", words] for name, words in CHECKS.items()]),
            FOOT.format(kernel=seen[0]["kernel"].partition("-")[0]),
        )
    }


def _sentences(missing: list[str]) -> str:
    return ". ".join(f"{words[0].upper()}{words[1:]}" for words in missing) or "nothing"


def _calls_by_answer(found: dict[str, str]) -> Iterator[str]:
    """Return a table with a row for each answer of the filter, and lists of the calls."""
    if set(CHECKS) != set(_calls.checked(0, False, (0, 0, 0, 0))):
        raise ValueError("CHECKS does not say what convert._calls checks")
    rest = [name for name in found if name not in CHECKS]
    passed = [name for name in NUMBERS["x86_64"] if name in _calls.FREE]
    killed, absent = ([name for name in rest if found[name] == answer] for answer in ("killed", "ENOSYS"))
    others = sum(1 for name in rest if found[name] == "EPERM")
    listed = {"allowed": passed, "end the process": killed, "refused with ENOSYS": absent}
    rows = [[answer, str(len(names))] for answer, names in listed.items()]
    rows += [["allowed with some arguments", str(len(CHECKS))], ["refused with EPERM", f"{others}, all others"]]
    yield table(["answer", "calls"], rows, right=(1,))
    for answer, names in listed.items():
        yield f"These are {answer}:" if answer != "end the process" else "These end the process:"
        yield "\n".join(["```text", *textwrap.wrap(" ".join(names), 120, break_long_words=False), "```"])
    yield "These are allowed with some arguments:"
