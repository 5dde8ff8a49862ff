"""The lines under the picture in docs/training.md: what training-curves.json says of losses."""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "training.md"
BLOCK = re.compile(r"(?<=<!-- curves: written by docs/generate.py -->\n).*?(?=<!-- end of curves -->)", re.DOTALL)


def says() -> str:
    """Return the paragraph."""
    record = json.loads((DOCS / "training-curves.json").read_text(encoding="utf-8"))
    exact, plain, ours = (record["last"][way] for way in ("eager float32", "eager bfloat16", "fast_step bfloat16"))

    def apart(losses: list[float]) -> str:
        return f"{max(abs(one - other) for one, other in zip(losses, exact, strict=True)):.2f}"

    return (
        f"The picture shows {record['model']} on real images, {record['steps']} steps of {record['batch']} images, on one "
        f"{record['device']}. It has {len(exact)} seeds, and all ways see the same images.\n"
        f"Over the last tenth of the steps the mean loss of `fast_step` is at most {apart(ours)} from eager float32's. "
        f"Eager bfloat16's is up to {apart(plain)} from it.\n"
        "`recipes/training_curves.py` draws the picture.\n"
    )


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    return {PAGE.name: BLOCK.sub(lambda _: says(), PAGE.read_text(encoding="utf-8"))}
