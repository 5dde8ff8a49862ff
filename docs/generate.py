"""Write the pages that follow from the registries, or say which are stale.

python docs/generate.py            # writes generated pages here, the tables in design.md and finetune.md, and those in zoo/data
python docs/generate.py --check    # writes nothing; exit code 1 and their names if any would change

A check believes the multiply-adds of networks that have some in the table, for counting all takes a minute; tests count one of each family.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from making import api, benchmarks, commands, confined, curves, errors, extras, faults, formats, law, models, networks, scaling, speeds

from zoo import Model
from zoo.variants import variants

DOCS = Path(__file__).parent


def pages(count: Callable[[type[Model]], int] = networks.multiply_adds) -> dict[str, str | bytes]:
    """Return every generated file by its path from docs/; `count` gives a network's multiply-adds for one image."""
    return {
        **networks.write(count),
        **models.write(models.record(), lambda cls: count(cls) / 1e9),
        **formats.write(),
        **commands.write(),
        **api.write(),
        **benchmarks.write(),
        **confined.write(),
        **curves.write(),
        **faults.write(),
        **law.write(),
        **scaling.write(),
        **errors.write(),
        **extras.write(),
        **speeds.write(),
    }


def stale(written: Mapping[str, str | bytes]) -> list[str]:
    """Name the files in docs/ that are not what they should be."""
    there = {name: (DOCS / name).read_bytes() if (DOCS / name).is_file() else None for name in written}
    return [name for name, content in written.items() if there[name] != in_bytes(content)]


def counted(cls: type[Model]) -> int:
    """Return a network's multiply-adds as the table has them, counted where it has none."""
    known = variants().get(cls.__name__)
    return known.multiply_adds if known is not None and known.multiply_adds else networks.multiply_adds(cls)


def in_bytes(content: str | bytes) -> bytes:
    """Return a file's content as it is written."""
    return content.encode() if isinstance(content, str) else content


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where something would change")
    check = parser.parse_args().check
    written = pages(counted if check else networks.multiply_adds)
    old = stale(written)
    for name in old:
        if not check:
            (DOCS / name).write_bytes(in_bytes(written[name]))
        print(f"{'stale' if check else 'wrote'} docs/{name}{': run `make docs-pages`' if check else ''}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
