"""The bytes of an HDF5 file, taken within limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from weights.errors import LimitExceeded, MalformedFile

UNDEFINED = 2**64 - 1
"""The address of what is not there."""
MAX_STRUCTURE_BYTES = 64 * 2**20
"""Of headers, indexes and heaps read from one file; structures that refer to themselves end here."""


@dataclass(slots=True)
class Bytes:
    """A file's bytes by address, and an account of how many were read for its structure.

    Attributes:
        base: what every address is relative to.
        budget: bytes of structure that may still be read.
    """

    buffer: memoryview
    path: Path
    what: str
    base: int = 0
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = min(8 * len(self.buffer) + 2**20, MAX_STRUCTURE_BYTES)

    def take(self, address: int, count: int, *, counted: bool = True) -> memoryview:
        """View `count` bytes at an address; MalformedFile where the file has them not, LimitExceeded when it is read round in circles."""
        start = self.base + address
        if address < 0 or count < 0 or start + count > len(self.buffer):
            raise MalformedFile(
                f"{self.path} is no readable {self.what}: {count} bytes at {start} are beyond its end, {len(self.buffer)}. Is it cut short?"
            )
        if counted:
            self.budget -= count + 16
            if self.budget < 0:
                raise LimitExceeded(f"{self.path}: the structure of this {self.what} takes more bytes than it can have")
        return self.buffer[start : start + count]

    def expect(self, address: int, signature: bytes, count: int) -> memoryview:
        """View `count` bytes that begin with a signature."""
        view = self.take(address, count)
        if bytes(view[: len(signature)]) != signature:
            raise MalformedFile(f"{self.path} is no readable {self.what}: {signature.decode()} is missing at {self.base + address}")
        return view

    def word(self, view: memoryview, at: int, count: int = 8) -> int:
        """Read a number of `count` bytes, the lowest first."""
        if at < 0 or at + count > len(view):
            raise MalformedFile(f"{self.path} is no readable {self.what}: a piece of its structure is {len(view)} bytes, too short")
        return int.from_bytes(view[at : at + count], "little")

    def cursor(self, view: memoryview) -> Cursor:
        return Cursor(self, view)


@dataclass(slots=True)
class Cursor:
    """A place in a view, moving on as it is read."""

    data: Bytes
    view: memoryview
    at: int = 0

    def take(self, count: int, *, pad: int = 1) -> memoryview:
        """View the next bytes, and move on to the next multiple of `pad` counted from here."""
        if count < 0 or self.at + count > len(self.view):
            raise MalformedFile(f"{self.data.path} is no readable {self.data.what}: a piece of its structure ends early")
        found = self.view[self.at : self.at + count]
        self.at += -(-count // pad) * pad
        return found

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def byte(self) -> int:
        return self.take(1)[0]

    def skip(self, count: int) -> None:
        self.take(count)

    def name(self, pad: int = 1) -> bytes:
        """Read up to a zero byte, and move on behind it, to a multiple of `pad` counted from here."""
        rest = self.view[self.at :]
        end = bytes(rest[: 2**16]).find(b"\0")
        if end < 0:
            raise MalformedFile(f"{self.data.path} is no readable {self.data.what}: a name doesn't end")
        found = bytes(rest[:end])
        self.at += -(-(end + 1) // pad) * pad
        return found

    def rest(self) -> memoryview:
        return self.view[min(self.at, len(self.view)) :]
