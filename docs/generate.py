"""Write the pages that follow from the registries, or say which are stale.

python docs/generate.py            # writes generated pages here, the table of rooms in design.md, and the tables in zoo/data
python docs/generate.py --check    # writes nothing; exit code 1 and their names if any would change
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from making import api, commands, confined, formats, law, models, networks, speeds

DOCS = Path(__file__).parent


def pages() -> dict[str, str | bytes]:
    """Return every generated file by its path from docs/."""
    return {
        **networks.write(),
        **models.write(models.record()),
        **formats.write(),
        **commands.write(),
        **api.write(),
        **confined.write(),
        **law.write(),
        **speeds.write(),
    }


def stale(written: Mapping[str, str | bytes]) -> list[str]:
    """Name the files in docs/ that are not what they should be."""
    there = {name: (DOCS / name).read_bytes() if (DOCS / name).is_file() else None for name in written}
    return [name for name, content in written.items() if there[name] != in_bytes(content)]


def in_bytes(content: str | bytes) -> bytes:
    """Return a file's content as it is written."""
    return content.encode() if isinstance(content, str) else content


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where something would change")
    check = parser.parse_args().check
    written = pages()
    old = stale(written)
    for name in old:
        if not check:
            (DOCS / name).write_bytes(in_bytes(written[name]))
        print(f"{'stale' if check else 'wrote'} docs/{name}{': run `make docs-pages`' if check else ''}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
