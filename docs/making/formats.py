"""docs/formats.md: every format that is read or written, and every naming of networks' parts."""

from __future__ import annotations

import inspect
from types import ModuleType

from convert.formats import formats
from convert.names import NAMINGS, of_format
from making.tables import generated, page, table

HEAD = """\
# Formats and namings

A *format* is a kind of file. A *naming* is the names that a framework gives to a network's layers. They are independent: {formats}
formats and {namings} namings are known. `zoo inspect FILE` shows both. `zoo convert` takes either after `--from` and `--to`; otherwise
the content and OUT's ending decide. [Convert](convert.md) shows how, and [add your own](adding.md) how to add one.

## Formats

No reader needs the framework or runs code of the file ([strangers' files](weights.md#strangers-files)).
"""
READING = """\
- **Recognised by**: formats with a mark of their own are tried first. The ending decides only for TensorFlow checkpoints and files
  without any mark.
- **Namings**: those that occur mainly in this format. The others are below.
- **Orbax** folders are read and not written. Files for **Flux** were read back by the readers here, not by Julia.

## Namings

`trained` and `zoo convert` take the first naming that fits: every tensor has a place, and none of ours stays empty. *Also gives* lists
what else a naming tells, so that you need not say it.
"""
FACTS = {
    "options": "constructor options",
    "preprocessing": "preprocessing",
    "order": "order without names",
    "mend": "older spellings",
    "told": "facts in files beside it",
}


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    known = formats()
    rows = [_format(name, known[name]) for name in sorted(known)]
    named = [_naming(name, module) for name, module in sorted(NAMINGS.items())]
    return {
        "formats.md": page(
            generated("convert/formats and convert/names"),
            HEAD.format(formats=len(known), namings=len(NAMINGS)),
            table(["format", "what", "endings", "written", "recognised by", "namings"], rows),
            READING,
            table(["naming", "whose", "formats", "also gives"], named),
        )
    }


def _format(name: str, module: ModuleType) -> list[str]:
    endings = " ".join(f"`{suffix}`" for suffix in module.SUFFIXES)
    sidecars = " ".join(f"`{suffix}`" for suffix in getattr(module, "SIDECARS", ()))
    written = "yes" if module.WRITES else "no"
    written += f", with {sidecars}" if sidecars and module.WRITES else ""
    written += ", with graph" if getattr(module, "EXPORTS", False) else ""
    told = "structure" if getattr(module, "WEAK", False) else "first bytes"
    namings = [naming for naming in of_format(name) if hasattr(NAMINGS[naming], "FORMATS")]
    return [f"`{name}`", _first(module), endings, written, told, " ".join(namings)]


def _naming(name: str, module: ModuleType) -> list[str]:
    found = " ".join(getattr(module, "FORMATS", ())) or "any"
    return [f"`{name}`", _first(module), found, ", ".join(words for fact, words in FACTS.items() if hasattr(module, fact))]


def _first(module: ModuleType) -> str:
    """Return the first sentence of a module's words about itself, without the full stop."""
    return " ".join((inspect.getdoc(module) or "").replace("``", "`").split("\n\n")[0].split()).rstrip(".")
