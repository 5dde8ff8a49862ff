"""Write the pages that follow from the registries, or say which are stale.

python docs/generate.py            # writes api.md, models.md, accuracy-speed.svg, formats.md, cli.md beside this file
python docs/generate.py --check    # writes nothing; exit code 1 and their names if any would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from making import api, commands, formats, models

DOCS = Path(__file__).parent


def pages() -> dict[str, str]:
    """Return every generated text by its name in docs/."""
    return {**models.write(models.record()), **formats.write(), **commands.write(), **api.write()}


def stale(written: dict[str, str]) -> list[str]:
    """Name the files in docs/ that are not what they should be."""
    return [name for name, text in written.items() if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where something would change")
    check = parser.parse_args().check
    written = pages()
    old = stale(written)
    for name in old:
        if not check:
            (DOCS / name).write_text(written[name], encoding="utf-8")
        print(f"{'stale' if check else 'wrote'} docs/{name}{': run `make docs-pages`' if check else ''}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
