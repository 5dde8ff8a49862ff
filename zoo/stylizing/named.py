"""The styles that have a name, as records; PyTorch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from weights import BadRecord, Checkpoint
from weights.documents import toml_file
from weights.record import record

SHIPPED = Path(__file__).with_name("styles.toml")
USUAL = "embers"
UNSTATED = "its authors state no licence; ask them before you publish what it paints"


@cache
def styles() -> Mapping[str, Checkpoint]:
    """Return the record of every style that has a name; `stylize` installs one when it is first used, and `zoo pull` does so too.

    Example:
        >>> styles()["embers"].license
        'MIT'
    """
    tables = toml_file(SHIPPED, "Reinstall kernelzoo", refuse=BadRecord)
    rows = (record(model, tag, table, str(SHIPPED), classes_known=False) for model, tags in tables.items() for tag, table in tags.items())
    return {row.tag: row for row in rows}
