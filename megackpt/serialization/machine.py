"""A pickle machine that runs nothing: it knows no import, and calls only what its table of rules allows.

Of pickle's opcodes it has those that protocols 2 to 5 write for plain data. Where a pickle names a global, a
function given by the caller decides what that stands for; where it calls one, the caller's rule is what is
called. Everything is bounded by the bytes given: no length in a pickle allocates more than is there, and what
is copied or hashed again and again is counted.
Opcodes: Python's pickletools.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container
from typing import Any

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.bounds import Budget
from megackpt.serialization.rules import GETATTR, Find, Name, Persistent, Rule

_MAPPINGS = frozenset((dict, OrderedDict, Counter, defaultdict))
_SEQUENCES = frozenset((list, deque))
_INT4, _UNSIGNED4 = struct.Struct("<i"), struct.Struct("<I")
_LONGEST = 1024  # characters of a dotted name
_GETATTRS = frozenset((("builtins", "getattr"), ("__builtin__", "getattr")))


class Machine:
    """Reads one pickle. ``find`` gives the rule of a global; ``persistent`` the value of a persistent id."""

    def __init__(
        self, data: bytes, find: Find, persistent: Persistent | None = None
    ) -> None:
        self._data = data
        self._at = 0
        self._find = find
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._rules: dict[
            int, Rule
        ] = {}  # by the identity of the value, which the rule keeps alive
        self._names: dict[int, tuple[str, str]] = {}  # the same
        self._globals: dict[tuple[str, str], Rule] = {}
        self._made: dict[int, tuple[Any, Rule]] = {}
        self._unused = 0  # getattrs that have not been called
        self._budget = Budget(len(data))

    def discard(self, kept: Container[int] | None = None) -> None:
        """Take apart what was made, so that it is freed without recursion; not what has one of these identities.

        What a trusted object may hold is left alone, unless nothing at all is kept.
        """
        made = list(self._made.values())
        if kept is not None and any(rule.trusted for _, rule in made):
            return
        for value, rule in made:
            if rule.empty is not None and (kept is None or id(value) not in kept):
                rule.empty(value)

    def load(self) -> Any:
        """The value. Raises CorruptCheckpoint for anything but a whole, plain pickle."""
        table, data = _TABLE, self._data
        try:
            while True:
                opcode = data[self._at]
                self._at += 1
                if opcode == 0x2E:  # STOP
                    if self._unused:
                        self._find("builtins", "getattr")  # as a value
                    return self._stack.pop()
                table[opcode](self)
        except CorruptCheckpoint:
            raise
        except KeyError as error:
            raise CorruptCheckpoint(
                f"unknown pickle opcode or memo entry {error} at byte {self._at}"
            ) from error
        except (
            IndexError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error
        ) as error:  # fmt: skip
            raise CorruptCheckpoint(
                f"a pickle is damaged at byte {self._at}: {error}"
            ) from error
        except MemoryError as error:
            raise CorruptCheckpoint(
                f"a pickle takes more memory than there is, at byte {self._at}"
            ) from error

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise CorruptCheckpoint(f"a pickle ends in the middle of {count} bytes")
        self._at += count
        return part

    def _unsigned(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end].decode("utf-8")
        self._at = end + 1
        return line

    def _popped_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _push_global(self, module: str, name: str) -> None:
        if (module, name) in _GETATTRS:
            self._unused += 1
            self._stack.append(GETATTR)
        elif self._stack and self._stack[-1] is GETATTR:
            self._stack.append(Name(module, name))
        else:
            rule = self._globals.get((module, name))
            if rule is None:
                rule = self._globals[module, name] = self._find(module, name)
                self._rules[id(rule.value)] = rule
                self._names[id(rule.value)] = module, name
            self._stack.append(rule.value)

    def _make(
        self, function: Any, args: Any, kwargs: Any = None, new: bool = False
    ) -> None:
        if function is GETATTR and type(args) is tuple and len(args) == 2 and not new:
            owner, part = args
            module, name = self._names.get(id(owner), ("", ""))
            if type(owner) is Name:
                module, name = owner.module, owner.name
            if module and type(part) is str and owner is not GETATTR:
                if (
                    len(name) + len(part) > _LONGEST
                ):  # each level of a chain keeps a longer one
                    raise CorruptCheckpoint("the dotted name of a class is too long")
                self._unused -= 1
                self._push_global(module, f"{name}.{part}")
                return
        rule = (
            self._find("builtins", "getattr")
            if function is GETATTR
            else self._rules.get(id(function))
        )
        call = None if rule is None else (new and rule.new) or rule.call
        if rule is None or call is None or type(args) is not tuple:
            raise CorruptCheckpoint(
                f"a pickle calls a {type(function).__name__} that may not be called"
            )
        if kwargs and not rule.keywords:
            raise CorruptCheckpoint("a pickle gives keywords to what takes none")
        if not rule.trusted:
            self._budget.copy((args, kwargs) if rule.shares else (args, *args, kwargs))
            if rule.keys is not None:
                self._budget.hash(rule.keys(*args))
            if rule.work is not None:
                self._budget.spend(rule.work(*args))
        value = self._called(call, args, kwargs or {})
        if rule.build is not None or rule.empty is not None:
            self._made[id(value)] = value, rule
        self._stack.append(value)

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return call(*args, **kwargs)

    def _trusts(self, instance: Any) -> bool:
        """Was this made by what a user vouches for?"""
        made = self._made.get(id(instance))
        return made is not None and made[1].trusted

    # One method an opcode from here on.

    def _proto(self) -> None:
        if self._unsigned(1) > 5:
            raise CorruptCheckpoint("a pickle is of a protocol newer than 5")

    def _frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._popped_to_mark()

    def _pop_mark(self) -> None:
        self._popped_to_mark()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int4(self) -> None:
        self._stack.append(_INT4.unpack_from(self._data, self._at)[0])
        self._at += 4

    def _int1(self) -> None:
        self._stack.append(self._data[self._at])
        self._at += 1

    def _int2(self) -> None:
        self._stack.append(self._data[self._at] | self._data[self._at + 1] << 8)
        self._at += 2

    def _long1(self) -> None:
        self._stack.append(
            int.from_bytes(self._take(self._unsigned(1)), "little", signed=True)
        )

    def _long4(self) -> None:
        self._stack.append(
            int.from_bytes(self._take(self._unsigned(4)), "little", signed=True)
        )

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _text(self, width: int) -> None:
        self._stack.append(
            self._take(self._unsigned(width)).decode("utf-8", "surrogatepass")
        )

    def _bytes(self, width: int) -> None:
        self._stack.append(self._take(self._unsigned(width)))

    def _latin(self) -> None:
        self._stack.append(self._take(self._unsigned(1)).decode("latin-1"))

    def _bytearray(self) -> None:
        self._stack.append(bytearray(self._take(self._unsigned(8))))

    def _empty_list(self) -> None:
        self._stack.append([])

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _empty_dict(self) -> None:
        self._stack.append({})

    def _empty_set(self) -> None:
        self._stack.append(set())

    def _list(self) -> None:
        items = self._popped_to_mark()
        self._stack.append(items)

    def _tuple(self) -> None:
        items = self._popped_to_mark()
        self._stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _dict(self) -> None:
        items = self._popped_to_mark()
        self._stack.append({})
        self._set_items(items)

    def _frozenset(self) -> None:
        items = self._popped_to_mark()
        self._budget.hash(items)
        self._stack.append(frozenset(items))

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._popped_to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _SEQUENCES and not self._trusts(target):
            raise CorruptCheckpoint(f"a pickle appends to a {type(target).__name__}")
        target.extend(items)

    def _add_items(self) -> None:
        items = self._popped_to_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise CorruptCheckpoint(
                f"a pickle adds to a {type(target).__name__} as to a set"
            )
        self._budget.hash(items, target)
        target.update(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _set_all(self) -> None:
        self._set_items(self._popped_to_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            raise CorruptCheckpoint("a pickle sets a key without a value")
        if type(target) in _MAPPINGS:
            self._budget.hash(keys, target)
        elif not self._trusts(target):
            raise CorruptCheckpoint(f"a pickle sets items of a {type(target).__name__}")
        for key, value in zip(keys, values, strict=True):
            target[key] = value

    def _get(self, width: int) -> None:
        value = self._memo[self._unsigned(width)]
        if type(value) is Name:
            self._push_global(value.module, value.name)
        else:
            self._stack.append(value)

    def _get1(self) -> None:
        value = self._memo[self._data[self._at]]
        self._at += 1
        if type(value) is Name:
            self._push_global(value.module, value.name)
        else:
            self._stack.append(value)

    def _put1(self) -> None:
        self._memo[self._data[self._at]] = self._stack[-1]
        self._at += 1

    def _put4(self) -> None:
        self._memo[_UNSIGNED4.unpack_from(self._data, self._at)[0]] = self._stack[-1]
        self._at += 4

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _global(self) -> None:
        module = self._line()
        self._push_global(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise CorruptCheckpoint(
                "a pickle names a global by something that is no string"
            )
        self._push_global(module, name)

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._make(function, args)

    def _new(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        self._make(kind, args, new=True)

    def _new_with(self) -> None:
        kwargs, args, kind = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if type(kwargs) is not dict:
            raise CorruptCheckpoint(
                "a pickle makes an instance with keywords that are no dict"
            )
        self._make(kind, args, kwargs, new=True)

    def _build(self) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        made = self._made.get(id(instance))
        build = None if made is None else made[1].build
        if made is None or build is None:
            raise CorruptCheckpoint(
                f"a pickle sets the state of a {type(instance).__name__}"
            )
        rule = made[1]
        if not rule.trusted:
            self._budget.copy(
                (state, *state)
                if type(state) is tuple and not rule.shares
                else (state,)
            )
        self._built(build, instance, state)

    def _built(
        self, build: Callable[[Any, Any], None], instance: Any, state: Any
    ) -> None:
        build(instance, state)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise CorruptCheckpoint("a pickle has a persistent id where none can be")
        persistent_id = self._stack.pop()
        if type(persistent_id) is not tuple:
            raise CorruptCheckpoint("a pickle has a persistent id that is no tuple")
        self._stack.append(self._persistent(persistent_id))


Opcode = Callable[[Machine], None]


def _sized(method: Callable[[Machine, int], None], width: int) -> Opcode:
    return lambda machine: method(machine, width)


_TABLE: dict[int, Opcode] = {
    opcode[0]: method
    for opcode, method in {
        b"\x80": Machine._proto, b"\x95": Machine._frame, b"(": Machine._mark, b"0": Machine._pop,
        b"1": Machine._pop_mark, b"2": Machine._dup, b"N": Machine._none, b"\x88": Machine._true,
        b"\x89": Machine._false, b"J": Machine._int4, b"K": Machine._int1, b"M": Machine._int2,
        b"\x8a": Machine._long1, b"\x8b": Machine._long4, b"G": Machine._float,
        b"X": _sized(Machine._text, 4), b"\x8c": _sized(Machine._text, 1), b"\x8d": _sized(Machine._text, 8),
        b"B": _sized(Machine._bytes, 4), b"C": _sized(Machine._bytes, 1), b"\x8e": _sized(Machine._bytes, 8),
        b"U": Machine._latin, b"\x96": Machine._bytearray,
        b"]": Machine._empty_list, b")": Machine._empty_tuple, b"}": Machine._empty_dict,
        b"\x8f": Machine._empty_set, b"l": Machine._list, b"t": Machine._tuple, b"\x85": Machine._tuple1,
        b"\x86": Machine._tuple2, b"\x87": Machine._tuple3, b"d": Machine._dict, b"\x91": Machine._frozenset,
        b"a": Machine._append, b"e": Machine._appends, b"\x90": Machine._add_items, b"s": Machine._set_item,
        b"u": Machine._set_all, b"h": Machine._get1, b"j": _sized(Machine._get, 4),
        b"q": Machine._put1, b"r": Machine._put4, b"\x94": Machine._memoize,
        b"c": Machine._global, b"\x93": Machine._stack_global, b"R": Machine._reduce, b"\x81": Machine._new,
        b"\x92": Machine._new_with, b"b": Machine._build, b"Q": Machine._persistent_id,
    }.items()
}  # fmt: skip
