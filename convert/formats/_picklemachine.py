"""The stack machine of pickles, protocols 0 to 5, in which a call is a record of what would be called.

A class or function is a name and no more, and one that no file of weights needs is refused. Strings of Python 2 are bytes, which
NumPy of that time kept arrays in; long ones stay where they are in the file.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from convert._guard import SPARE_BYTES
from convert.formats._picklearrays import SHORT_BYTES, Call, Name, encoded, filled, from_buffer, is_array, scalar
from convert.kinds import is_dict, is_list, is_tuple
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

MAX_OPERATIONS = 500_000
MAX_ESCAPED_BYTES = 32 * 2**20
"""Of text in the oldest protocol, which takes four times as much once it is read."""
VALUE_BYTES, ITEM_BYTES = 80, 100
"""Of memory that an operation takes, but for those that `COSTS` lists, and an entry of a dict."""
COSTS = dict.fromkeys(b"RbioQ\x81\x8f\x91\x92", 500) | dict.fromkeys(b"c\x93", 240) | dict.fromkeys(b"pqr\x94", 128)
"""Bytes of memory that an operation takes: a record of a call, a name, what is memorised."""

ALLOWED = re.compile(
    r"numpy(\._?core)?(\.(multiarray|numeric))?\.(_reconstruct|scalar|ndarray|dtype|_frombuffer|float\d+|int\d+|uint\d+|bool_?)"
    r"|_codecs\.encode|copy_?reg\.(_reconstructor|__newobj__)|(builtins|__builtin__)\.(object|set|frozenset|list|dict|tuple|bytearray|bytes|str|unicode)"
    r"|collections\.(OrderedDict|defaultdict|deque)"
    r"|(theano|pygpu|lasagne|nolearn)(\.\w+)+"
)
"""What may be named. Nothing of it is imported or called either."""


class _Mark:
    pass


MARK = _Mark()


def safe_key(key: Any) -> Any:
    """Make a key of a dict that can be hashed safely: a tuple can nest deeper than Python's stack."""
    if isinstance(key, bytes):
        return key.decode("latin-1")
    return key if isinstance(key, str | int | float | bool | None) else f"({type(key).__name__})"


class Machine:
    """The stack machine of pickles, protocols 0 to 5, whose calls are records.

    Attributes:
        operations: of a pickle, at most.
        more: operations that only pickles of one kind have.
        room: bytes of memory that what is read may still take.
    """

    operations: ClassVar[int] = MAX_OPERATIONS
    more: ClassVar[dict[int, Callable[[Any], Any]]] = {}

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0
        self.room = 2 * len(data) + 3 * SPARE_BYTES // 4
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        actions = {**_ACTIONS, **self.more}
        for _ in range(self.operations):
            code = self.take(1)[0]
            if code == 0x2E:  # STOP
                return self.pop()
            action = actions.get(code)
            if action is None:
                raise MalformedFile(f"{self.path}: byte {code:#x} at {self.at - 1} is no operation of a pickle that holds weights")
            self.room -= COSTS.get(code, VALUE_BYTES)
            if self.room < 0:
                raise LimitExceeded(f"{self.path}: a pickle of more values than a file of its size has: it is damaged or hostile")
            action(self)
        raise LimitExceeded(f"{self.path}: a pickle of more than {self.operations} operations; lists of arrays need a few hundred")

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.data) - self.at:
            raise MalformedFile(f"{self.path} is cut short: {size} bytes are due at {self.at}, {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def line(self) -> bytes:
        step = 4096
        for start in range(self.at, len(self.data), step):
            chunk = bytes(self.data[start : start + step])
            if (end := chunk.find(b"\n")) >= 0:
                line = bytes(self.data[self.at : start + end])
                self.at = start + end + 1
                return line
        raise MalformedFile(f"{self.path} is cut short in a line")

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise MalformedFile(f"{self.path}: operation at {self.at - 1} finds nothing to work on")
        return self.stack[-1]

    def popped(self, count: int) -> list[Any]:
        """Take so many off the stack, the last at the end."""
        return [self.pop() for _ in range(count)][::-1]

    def marked(self) -> list[Any]:
        """Take everything off the stack down to the mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is MARK:
                taken = self.stack[at + 1 :]
                del self.stack[at:]
                return taken
        raise MalformedFile(f"{self.path}: operation at {self.at - 1} finds no mark")

    def name(self, module: Any, attribute: Any) -> Name:
        module, attribute = _text(module), _text(attribute)
        if not ALLOWED.fullmatch(f"{module}.{attribute}"):
            raise UnsafeFormat(
                f"{self.path} holds more than arrays: reading it would call {module}.{attribute}"[:300]
                + ", which could run any code. Nothing of it was run. Ask its author for the arrays alone, best as .npz."
            )
        return Name(module, attribute)

    def called(self, what: Any, arguments: Any) -> Any:
        if isinstance(what, Name) and str(what) == "_codecs.encode" and is_tuple(arguments):
            return encoded(arguments)
        if isinstance(what, Name) and what.attribute == "_frombuffer":
            return from_buffer(arguments, str(self.path))
        if isinstance(what, Name) and what.attribute == "scalar":
            return scalar(arguments)
        return Call(what, arguments)

    def put(self, key: int) -> None:
        self.memo[key] = self.top()

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Call):
            target.elements.extend(values)
        elif is_list(target):
            target.extend(values)
        else:
            raise MalformedFile(f"{self.path}: values are appended to a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        """Set keys and values, which take turns, in what is on top."""
        target = self.top()
        items = target.items if isinstance(target, Call) else target
        if not is_dict(items) or len(values) % 2:
            raise MalformedFile(f"{self.path}: items are set in a {type(target).__name__}")
        self.room -= ITEM_BYTES * len(values) // 2
        for key, value in zip(values[::2], values[1::2], strict=True):
            items[self.key(key)] = value

    def key(self, key: Any) -> Any:
        return safe_key(key)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise MalformedFile(f"a {type(value).__name__} is no name")


def _bytes(machine: Machine, size: int) -> bytes | memoryview:
    data = machine.take(size)
    return bytes(data) if size <= SHORT_BYTES else data


def _python2(machine: Machine, size: int) -> Any:
    """Read a string of Python 2: short ones are words, long ones contents of arrays."""
    data = _bytes(machine, size)
    return data.decode("latin-1") if isinstance(data, bytes) else data


def _quoted(machine: Machine) -> Any:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] not in b"'\"" or line[-1:] != line[:1]:
        raise MalformedFile(f"{machine.path}: a string without quotes at {machine.at}")
    data = codecs.escape_decode(line[1:-1])[0]
    return data.decode("latin-1") if len(data) <= SHORT_BYTES else memoryview(data)


def _escaped(machine: Machine) -> str:
    line = machine.line()
    if len(line) > MAX_ESCAPED_BYTES:
        raise LimitExceeded(f"{machine.path}: a line of {len(line)} bytes of text")
    return line.decode("raw-unicode-escape")


def _integer(machine: Machine) -> Any:
    line = machine.line()
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L"))


def _long(machine: Machine, size: int) -> int:
    if size > SHORT_BYTES:
        raise LimitExceeded(f"{machine.path}: a number of {size} bytes")
    return int.from_bytes(machine.take(size), "little", signed=True)


def _build(machine: Machine) -> None:
    """Give a record its state; an array's state becomes the array."""
    state, target = machine.pop(), machine.top()
    if not isinstance(target, Call):
        return
    if is_array(target) and is_tuple(state) and len(state) == 5:
        _, shape, dtype, fortran, data = state
        # an array of objects is a list of them
        state = data if is_list(data) else filled(data, dtype, shape, "F" if fortran else "C", "array")
    target.state = state


def _object(machine: Machine) -> None:
    what, *arguments = machine.marked() or [None]
    machine.push(machine.called(what, tuple(arguments)))


def _get(machine: Machine, key: int) -> None:
    if key not in machine.memo:
        raise MalformedFile(f"{machine.path}: nothing was memorised as {key}")
    machine.push(machine.memo[key])


def _dict(machine: Machine) -> None:
    values = machine.marked()
    machine.push({})
    machine.set_items(values)


_NAMED: dict[str, Callable[[Machine], object]] = {
    "(": lambda m: m.push(MARK),
    "0": lambda m: m.pop(),
    "1": lambda m: m.marked(),
    "2": lambda m: m.push(m.top()),
    "\x80": lambda m: m.take(1),
    "\x95": lambda m: m.take(8),  # FRAME: what it frames follows anyway
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "I": lambda m: m.push(_integer(m)),
    "L": lambda m: m.push(_integer(m)),
    "J": lambda m: m.push(m.number("<i")),
    "K": lambda m: m.push(m.number("<B")),
    "M": lambda m: m.push(m.number("<H")),
    "\x8a": lambda m: m.push(_long(m, m.number("<B"))),
    "\x8b": lambda m: m.push(_long(m, m.number("<i"))),
    "F": lambda m: m.push(float(m.line())),
    "G": lambda m: m.push(m.number(">d")),
    "S": lambda m: m.push(_quoted(m)),
    "T": lambda m: m.push(_python2(m, m.number("<i"))),
    "U": lambda m: m.push(_python2(m, m.number("<B"))),
    "B": lambda m: m.push(_bytes(m, m.number("<I"))),
    "C": lambda m: m.push(_bytes(m, m.number("<B"))),
    "\x8e": lambda m: m.push(_bytes(m, m.number("<Q"))),
    "\x96": lambda m: m.push(_bytes(m, m.number("<Q"))),
    "V": lambda m: m.push(_escaped(m)),
    "X": lambda m: m.push(_unicode(m, m.number("<I"))),
    "\x8c": lambda m: m.push(_unicode(m, m.number("<B"))),
    "\x8d": lambda m: m.push(_unicode(m, m.number("<Q"))),
    "]": lambda m: m.push([]),
    "l": lambda m: m.push(m.marked()),
    "a": lambda m: m.append(m.popped(1)),
    "e": lambda m: m.append(m.marked()),
    ")": lambda m: m.push(()),
    "t": lambda m: m.push(tuple(m.marked())),
    "\x85": lambda m: m.push(tuple(m.popped(1))),
    "\x86": lambda m: m.push(tuple(m.popped(2))),
    "\x87": lambda m: m.push(tuple(m.popped(3))),
    "}": lambda m: m.push({}),
    "d": _dict,
    "s": lambda m: m.set_items(m.popped(2)),
    "u": lambda m: m.set_items(m.marked()),
    "\x8f": lambda m: m.push(Call(Name("builtins", "set"), ())),
    "\x90": lambda m: m.append(m.marked()),
    "\x91": lambda m: m.push(Call(Name("builtins", "set"), (), elements=m.marked())),
    "c": lambda m: m.push(m.name(m.line(), m.line())),
    "\x93": lambda m: m.push(m.name(*m.popped(2))),
    "R": lambda m: m.push(m.called(*m.popped(2))),
    "b": _build,
    "i": lambda m: m.push(m.called(m.name(m.line(), m.line()), tuple(m.marked()))),
    "o": _object,
    "\x81": lambda m: m.push(Call(*m.popped(2))),
    "\x92": lambda m: m.push(Call(*m.popped(3)[:2])),
    "p": lambda m: m.put(int(m.line())),
    "q": lambda m: m.put(m.number("<B")),
    "r": lambda m: m.put(m.number("<I")),
    "\x94": lambda m: m.put(len(m.memo)),
    "g": lambda m: _get(m, int(m.line())),
    "h": lambda m: _get(m, m.number("<B")),
    "j": lambda m: _get(m, m.number("<I")),
}
_ACTIONS: dict[int, Callable[[Machine], Any]] = {ord(code): action for code, action in _NAMED.items()}


def _unicode(machine: Machine, size: int) -> Any:
    """Read text; long text is bytes of an array as Python 3 writes them for Python 2, and stays where it is until then."""
    data = machine.take(size)
    return str(data, "utf-8", "surrogatepass") if size <= SHORT_BYTES else data
