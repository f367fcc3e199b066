# SPDX-License-Identifier: Apache-2.0
"""Pickles as inert data: the pickle is parsed, and nothing that it names is imported, called or changed.

Where Python's unpickler would import a class, call it and set its attributes, `parse` notes that it should have been
done: a `Made` names what makes the object, with which arguments and state. Readers of a format convert the few that
the format has and refuse the rest. The grammar is what Python's picklers of protocols 2 to 5 write for such data; an
instruction beyond it, or a name that is not `known`, is refused.

Time and memory are proportional to the pickle's length (a list costs 80 bytes of memory for one of the pickle):
nothing is allocated for a length or a memo index before the bytes or objects are there. Objects may be referred to
several times and may contain themselves, so a reader has to bound what it makes of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple


class Refused(Exception):
    """The pickle contains what the format does not have; the message says what was found."""


class Name(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:200]


class Pairs(list[tuple[Any, Any]]):
    """A dict, not hashed: its keys may be anything."""

    __slots__ = ()


class Made:
    """An object that `maker` would have made of `arguments`, with `state` and dict items."""

    __slots__ = ("arguments", "maker", "pairs", "state")

    def __init__(self, maker: Name, arguments: tuple[Any, ...]) -> None:
        self.maker, self.arguments = maker, arguments
        self.state: Any = None
        self.pairs: Pairs | None = None

    def __repr__(self) -> str:
        return f"<{self.maker}>"


class Persistent(NamedTuple):
    """A reference to something outside the pickle."""

    id: Any


def parse(data: bytes, known: Callable[[Name], bool]) -> Any:
    """The pickle `data` as `None`, bools, ints, floats, strings, bytes, tuples, lists, and the classes above."""
    try:
        return _Parser(data, known).run()
    except UnicodeDecodeError as error:
        raise Refused(f"a pickle with text that is not UTF-8 ({error.reason})") from error


class _Parser:
    def __init__(self, data: bytes, known: Callable[[Name], bool]) -> None:
        self._data, self._known = data, known
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Positions in the stack."""
        self._memo: list[Any] = []
        """Picklers number what they memoize one after another."""

    def run(self) -> Any:
        data, size = self._data, len(self._data)
        if size < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise Refused("no pickle of protocol 2 to 5")
        self._position = 2
        while self._position < size:
            opcode = data[self._position]
            self._position += 1
            if opcode == 0x2E:  # STOP
                if len(self._stack) != 1 or self._marks:
                    raise Refused("a pickle that ends within an object")
                return self._stack[0]
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise Refused(f"a pickle with the instruction {bytes([opcode])!r}")
            handler(self)
        raise Refused("a truncated pickle")

    # The pickle's bytes and the stack #

    def _take(self, length: int) -> bytes:
        start, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise Refused("a truncated pickle")
        return self._data[start : self._position]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise Refused("a truncated pickle")
        text = self._take(end - self._position)
        self._position += 1
        return text.decode()

    def _pop(self, count: int) -> list[Any]:
        """The last objects of the stack, none from before a mark."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise Refused("a pickle that takes objects that are not there")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            raise Refused("a pickle that takes objects that are not there")
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _top(self, *kinds: type) -> Any:
        """The last object of the stack, which stays there; of exactly one of `kinds`, or of any."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refused("a pickle that takes objects that are not there")
        top = self._stack[-1]
        if kinds and type(top) not in kinds:
            raise Refused(f"a pickle that changes a {type(top).__name__}")
        return top

    # Instructions #

    def constant(self, value: Any) -> None:
        self._stack.append(value)

    def number(self, form: struct.Struct) -> None:
        self._stack.append(self._number(form))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def text(self, length: struct.Struct) -> None:
        self._stack.append(self._take(self._number(length)).decode("utf-8", "surrogatepass"))

    def raw(self, length: struct.Struct) -> None:
        self._stack.append(self._take(self._number(length)))

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple(self._pop(count)))

    def marked_tuple(self) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def append(self) -> None:
        (item,) = self._pop(1)
        self._top(list).append(item)

    def appends(self) -> None:
        items = self._pop_mark()
        self._top(list).extend(items)

    def set_item(self) -> None:
        self._set(self._pop(2))

    def set_items(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._top(Pairs, Made)
        if len(items) % 2:
            raise Refused("a pickle with a key without a value")
        if isinstance(target, Made):
            target.pairs = pairs = Pairs() if target.pairs is None else target.pairs
        else:
            pairs = target
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def global_line(self) -> None:
        module = self._line()
        # Protocol 2 writes the names that Python 2 had.
        self._name("builtins" if module == "__builtin__" else module, self._line())

    def global_stack(self) -> None:
        module, name = self._pop(2)
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if not (type(module) is str and type(name) is str):
            raise Refused("a pickle that names a class by other than strings")
        named = Name(module, name)
        if not self._known(named):
            raise Refused(f"{named}, which is not part of the format")
        self._stack.append(named)

    def make(self) -> None:
        maker, arguments = self._pop(2)
        if type(maker) is not Name or type(arguments) is not tuple:
            raise Refused("a pickle that calls what is no class or function")
        self._stack.append(Made(maker, arguments))

    def build(self) -> None:
        (state,) = self._pop(1)
        target = self._top(Name, Made)
        if isinstance(target, Name) or target.state is not None:
            raise Refused(f"a pickle that changes {target}")
        target.state = state

    def persistent(self) -> None:
        self._stack.append(Persistent(*self._pop(1)))

    def put(self, form: struct.Struct) -> None:
        if self._number(form) != len(self._memo):
            raise Refused("a pickle that numbers its objects otherwise than picklers do")
        self.memoize()

    def memoize(self) -> None:
        self._memo.append(self._top())

    def get(self, form: struct.Struct) -> None:
        index = self._number(form)
        if index >= len(self._memo):
            raise Refused("a pickle that refers to an object that is not there")
        self._stack.append(self._memo[index])

    def frame(self) -> None:
        # What follows was written at once, which does not matter here.
        if self._number(_U64) > len(self._data) - self._position:
            raise Refused("a truncated pickle")


_U8, _U16, _U32, _U64 = (struct.Struct(f"<{kind}") for kind in "BHIQ")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")

_HANDLERS: dict[int, Callable[[_Parser], None]] = {
    ord("N"): lambda parser: parser.constant(None),
    0x88: lambda parser: parser.constant(True),
    0x89: lambda parser: parser.constant(False),
    ord("J"): lambda parser: parser.number(_I32),
    ord("K"): lambda parser: parser.number(_U8),
    ord("M"): lambda parser: parser.number(_U16),
    0x8A: _Parser.long,
    ord("G"): lambda parser: parser.number(_F64),
    0x8C: lambda parser: parser.text(_U8),
    ord("X"): lambda parser: parser.text(_U32),
    ord("C"): lambda parser: parser.raw(_U8),
    ord("B"): lambda parser: parser.raw(_U32),
    ord("("): _Parser.mark,
    ord("]"): lambda parser: parser.constant([]),
    ord("}"): lambda parser: parser.constant(Pairs()),
    ord(")"): lambda parser: parser.constant(()),
    ord("t"): _Parser.marked_tuple,
    0x85: lambda parser: parser.tuple_of(1),
    0x86: lambda parser: parser.tuple_of(2),
    0x87: lambda parser: parser.tuple_of(3),
    ord("a"): _Parser.append,
    ord("e"): _Parser.appends,
    ord("s"): _Parser.set_item,
    ord("u"): _Parser.set_items,
    ord("c"): _Parser.global_line,
    0x93: _Parser.global_stack,
    ord("R"): _Parser.make,
    0x81: _Parser.make,
    ord("b"): _Parser.build,
    ord("Q"): _Parser.persistent,
    ord("q"): lambda parser: parser.put(_U8),
    ord("r"): lambda parser: parser.put(_U32),
    0x94: _Parser.memoize,
    ord("h"): lambda parser: parser.get(_U8),
    ord("j"): lambda parser: parser.get(_U32),
    0x95: _Parser.frame,
}
