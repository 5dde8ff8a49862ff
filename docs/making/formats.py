"""docs/formats.md: every format that is read or written, and every naming of networks' parts."""

from __future__ import annotations

import inspect
from types import ModuleType

from convert.formats import formats
from convert.names import NAMINGS, of_format
from making.tables import generated, page, table

HEAD = """\
# Formats and namings

A *format* is a container and how each kind of layer is stored in it; a *naming* is which of a file's modules is which of ours. They are
independent: {formats} formats and {namings} namings, not their product. `zoo inspect FILE` tells both, `zoo convert` takes either after
`--from` and `--to`, and the destination's ending chooses its format. [How conventions are decided and proven](convert.md),
[how to add one](adding.md).

## Formats
"""
READING = """\
*Told by*: a format whose files begin with something of their own is told by that; the others by their structure, and are asked last. The
ending of a source's name is no evidence, but for TensorFlow's checkpoints and files without any mark. *Its namings* occur in few formats;
those that may occur in any are below. Orbax folders are read and not written; what is written for Flux was read back by the readers here,
not by Julia. No reader needs the framework, runs code of the file or unpickles it ([strangers' files](weights.md#strangers-files)).

## Namings

`trained` and `zoo convert` try those of the file's format, torchvision's and timm's first, and take the first that gives every tensor a
place and leaves none of ours empty. *Knows*: what else the naming tells of a network, so that it need not be given.
"""
FACTS = {
    "options": "constructor options",
    "preprocessing": "preprocessing",
    "order": "the order of a file without names",
    "mend": "older spellings",
    "told": "files beside it",
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
            table(["format", "what", "endings", "written", "told by", "its namings"], rows),
            READING,
            table(["naming", "whose", "formats", "knows"], named),
        )
    }


def _format(name: str, module: ModuleType) -> list[str]:
    endings = " ".join(f"`{suffix}`" for suffix in module.SUFFIXES)
    sidecars = " ".join(f"`{suffix}`" for suffix in getattr(module, "SIDECARS", ()))
    written = "yes" if module.WRITES else "no"
    written += f", with {sidecars} beside it" if sidecars and module.WRITES else ""
    written += ", the network's graph too" if getattr(module, "EXPORTS", False) else ""
    told = "its structure" if getattr(module, "WEAK", False) else "its first bytes or files"
    namings = [naming for naming in of_format(name) if hasattr(NAMINGS[naming], "FORMATS")]
    return [f"`{name}`", _first(module), endings, written, told, " ".join(namings)]


def _naming(name: str, module: ModuleType) -> list[str]:
    found = " ".join(getattr(module, "FORMATS", ())) or "any"
    return [f"`{name}`", _first(module), found, ", ".join(words for fact, words in FACTS.items() if hasattr(module, fact))]


def _first(module: ModuleType) -> str:
    """Return the first sentence of a module's words about itself, without the full stop."""
    return " ".join((inspect.getdoc(module) or "").replace("``", "`").split("\n\n")[0].split()).rstrip(".")
