"""The table of docs/finetune.md: how training scales over GPUs, by the record that recipes/training_scaling.py writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from making.tables import table

DOCS = Path(__file__).parents[1]
RECORD = DOCS / "training-scaling.json"
PAGE = DOCS / "finetune.md"
BLOCK = re.compile(r"(?<=<!-- scaling: written by docs/generate.py -->\n).*?(?=<!-- end of scaling -->)", re.DOTALL)


def rows() -> str:
    """Return the table with what was measured, where and when."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    cells = [[str(row["gpus"]), f"{row['images_s']:,.0f}", f"{row['a_gpu']:.2f}"] for row in record["rows"]]
    model, side, version = record["model"], record["side"], record["versions"]["torch"]
    on = f"{record['device']}s of one host, torch {version}, {record['date']}"
    words = f"{model} in bfloat16, {record['batch']} images of {side} px per GPU, {on}."
    return f"{table(['GPUs', 'images/s', 'per GPU, over one'], cells, right=(0, 1, 2))}\n\n{words}"


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    return {PAGE.name: BLOCK.sub(lambda _: rows().rstrip() + "\n", PAGE.read_text(encoding="utf-8"))}
