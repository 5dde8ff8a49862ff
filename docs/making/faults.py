"""docs/faults.md: what the campaigns of injected faults found, of the report that they write, docs/notes/faults.md."""

from __future__ import annotations

import re
from pathlib import Path

from making.tables import generated, page, table

REPORT = Path(__file__).parents[1] / "notes" / "faults.md"
HEAD = """\
# Injected faults

What happens if the network fails, a disk is full, a file is damaged or a process is killed? Programs cause such faults by the thousand and
check the outcome. The tests of every change run a small part of them. No fault found is no proof that none is left. The faults are
random, and only of the kinds listed here.
"""
NETWORK = """\
## Network

Downloads from the Hub, web servers, mirrors and files meet servers that cut, stall, lie, redirect or send other bytes. Caches begin
cold, warm, damaged or half full. In {injections} injections there were {bad} violations of these rules:

- A download ends with the right bytes, or with an error of the zoo that says what to do.
- No wrong byte enters the cache. Nothing hangs, and no partial file is left behind.
- No secret is written to disk, to a message or to a log.
- The next call succeeds without a manual step. It did in {recovered} % of the cases.
"""
FILES = """\
## Files

Good files of {readers} formats are damaged in one to four places. For {whole} of them, values inside are also changed while the
container stays whole. Each file is refused with an error that names it, or gives tensors. Numbers that are read from npz, ONNX, PyTorch
and safetensors files equal those of the usual library. No reader crashed, hung, ran code, opened another file or took more than twice
the file's size in memory and 200 MB: {files} files, {faults} faults.
"""
LONG = """\
## Long runs

All of these ended with the right bytes:
"""
DOCUMENTS = """\
## Documents

Locks, records, manifests, logs, lists of images and the zoo's other documents get other types, long numbers, deep nests, missing keys
and flipped bytes. Each is read, or refused with an error that names it. {kinds} kinds, {mutants} mutants, {faults} faults.
"""
FOOT = """\
## Repeat it

```console
$ make faults                # all of it, about five hours; an interrupted campaign resumes
```

Each campaign writes its table into [the report](notes/faults.md), with dates, versions and the seeds that repeat one fault.
"""


def section(text: str, name: str) -> str:
    """Return what a campaign has written.

    Raises:
        ValueError: the report has no such section.
    """
    found = re.search(rf"<!-- faults-{name} begin -->(.*?)<!-- faults-{name} end -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{REPORT} has no section {name}; run `make faults`")
    return found[1]


def count(pattern: str, text: str) -> list[str]:
    """Return what a pattern's groups match.

    Raises:
        ValueError: nothing matches.
    """
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{REPORT} says nowhere {pattern}")
    return list(found.groups())


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of tables, without headings."""
    lines = [
        line for line in text.splitlines() if line.startswith("| ") and not re.match(r"\| (reader|what|document|outcome|source)\b", line)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    text = REPORT.read_text(encoding="utf-8")
    network, files, long, documents = (section(text, name) for name in ("network", "files", "long", "documents"))
    must_not = [
        int(number.replace(",", "")) for number in re.findall(r"^\| (?!\*\*)[^|]* \| ([\d,]+) \|$", network.partition("| outcome")[0], re.M)
    ]
    return {
        "faults.md": page(
            generated("docs/notes/faults.md"),
            HEAD,
            NETWORK.format(
                injections=count(r"([\d,]+) injections", network)[0],
                bad=sum(must_not),
                recovered=count(r"recovered without a manual step\*\* \| \*\*([\d.]+) %", network)[0].removesuffix(".0"),
            ),
            _files(files),
            LONG,
            table(["what", "seconds"], [[row[0], f"{int(row[-1]):,}"] for row in _right(long)], right=(1,)),
            _documents(documents),
            FOOT,
        )
    }


def _files(text: str) -> str:
    files, faults = count(r"([\d,]+) files, (\d+) faults", text)
    names = {row[0] for row in rows(text)}
    plain = {name for name in names if "," not in name}
    whole = {name.partition(",")[0] for name in names - plain} & plain  # programs of TorchScript are of PyTorch's reader
    return FILES.format(readers=len(plain), whole=len(whole), files=files, faults=faults)


def _documents(text: str) -> str:
    mutants, faults = count(r"([\d,]+) mutants, (\d+) faults", text)
    return DOCUMENTS.format(kinds=len(rows(text)), mutants=mutants, faults=faults)


def _right(text: str) -> list[list[str]]:
    """Return the rows of the long runs.

    Raises:
        ValueError: one of them did not end right; then the page's sentence has to change.
    """
    found = rows(text)
    if wrong := [row[0] for row in found if row[2] != "right"]:
        raise ValueError(f"{REPORT}: {wrong} did not end right, and docs/making/faults.py says that all did")
    return found
