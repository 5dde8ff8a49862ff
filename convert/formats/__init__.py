"""A file per container and how each kind of layer is stored in it; adding a format is adding its file.

Every module here has

- ``SUFFIXES``: endings of the files that it writes, or reads by tradition, the commonest first;
- ``WRITES``: whether it has ``write``;
- ``sniff(path, head)``: whether this is such a file, by its first `HEAD_BYTES` bytes (none for a folder), never by reading it;
- ``read(path) -> Source``: opens it, checks it, and reads no tensor before it is asked for one;
- ``write(parts, path, *, convention, metadata)``, if it writes: the parts in order, kernels flipped if `convention` says
  "convolution". It may write in place: the caller gives a temporary path and renames it when all is well.

A module that can tell its files only weakly (no magic number) sets ``WEAK = True`` and is asked last. Readers raise
`convert.ConvertError` and nothing else, whatever the bytes are.

Example:
    >>> sorted(formats.formats())[:3]
    ['bson', 'caffe', 'chainer']
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

from convert.formats import _magic
from convert.source import Source
from weights.errors import ConvertError, UnsupportedFormat

HEAD_BYTES = 4096


@cache
def formats() -> dict[str, ModuleType]:
    """Find every format by the name of its module, those that can tell their files for certain first."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    found = {name: importlib.import_module(f"convert.formats.{name}") for name in names}
    return dict(sorted(found.items(), key=lambda item: getattr(item[1], "WEAK", False)))


def sniff(path: Path) -> str:
    """Tell the format of a file, or of a folder that is a checkpoint, by its content.

    Raises:
        FileNotFoundError: there is nothing at this path.
        UnsupportedFormat: no reader knows it.
    """
    if not path.exists() and not path.with_name(f"{path.name}.index").is_file():  # TensorFlow names a checkpoint by what its files share
        raise FileNotFoundError(f"{path}: no such file")
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    for name, module in formats().items():
        if module.sniff(path, head):
            return name
    if path.is_file() and not head:
        raise UnsupportedFormat(f"{path} is no weight file: it is empty; fetch it again")
    if known := _magic.named(path, head):
        raise UnsupportedFormat(f"{path} is no weight file that a reader here knows. It is {known}.")
    if path.is_dir():
        raise UnsupportedFormat(
            f"{path} is no weight file: it is a folder, and none that a reader here knows (TensorFlow's, Orbax's, Core ML's); "
            "name the file in it"
        )
    shown = head[:16].hex(" ")
    raise UnsupportedFormat(f"{path} is no weight file that a reader here knows; it begins with {shown}. Formats: {', '.join(formats())}")


def read(path: Path, format: str = "auto") -> Source:
    """Open a weight file of any format.

    Args:
        path: the file, or the folder of a format that is one.
        format: a name that `formats` lists; "auto" asks the content.

    Raises:
        FileNotFoundError: there is nothing at this path.
        ConvertError: nobody knows this format, the library that reads it is not installed, or the file is damaged, unsafe or
            beyond the limits; the subclass and the message say which and what to do.
    """
    path = Path(path)
    name = sniff(path) if format == "auto" else format
    if name not in formats():
        raise UnsupportedFormat(f"no format {name!r}; there are {', '.join(formats())}")
    return formats()[name].read(path)


def for_writing(path: Path, format: str = "auto") -> ModuleType:
    """Find the format that `path` is to be written in, by its ending unless `format` names it.

    Raises:
        ConvertError: no format has this ending, or none that is written.
    """
    writers = {name: module for name, module in formats().items() if module.WRITES}
    if format != "auto":
        if format not in writers:
            raise ConvertError(f"format {format!r} is not written; there are {', '.join(writers)}")
        return writers[format]
    best = max(
        ((len(suffix), module) for module in writers.values() for suffix in module.SUFFIXES if path.name.endswith(suffix)),
        key=lambda item: item[0],
        default=None,
    )
    if best is None:
        known = ", ".join(f"{' '.join(module.SUFFIXES)} ({name})" for name, module in writers.items())
        raise ConvertError(f"{path.name}: no format is written with this ending; there are {known}. to=FORMAT names one.")
    return best[1]
