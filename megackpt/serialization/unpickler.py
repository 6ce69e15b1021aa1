"""Python's restricted unpickler behind a scan, so that a pickle runs no code and stays bounded.

The scan translates the pickle. Opcodes that call, hash or change a value become persistent ids:
``function args REDUCE`` becomes ``persistent_load(((function, args), REDUCE))``. What remains
builds numbers, text, lists and tuples only. So Python's unpickler calls nothing but ``find_class``
and ``persistent_load``, and these do only what the rules of the caller allow.

The scan also checks each length and memo index against the size of the pickle, because the
unpickler allocates first and reads later. Opcodes: Python's pickletools.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.limits import Budget, check_shape
from megackpt.serialization.trust import GETATTR, Name, refusal


@dataclass(frozen=True, slots=True)
class Rule:
    """How the unpickler treats one global.

    Without ``call`` or ``build``, a pickle that tries it is refused.

    Args:
        value: the global as data, for example as an element of a list.
        call: runs when the pickle calls the global.
        new: runs when the pickle makes an instance without a call; by default the same.
        build: sets the state of such an instance; takes the instance and the state.
        clear: empties an instance. For types that Python frees by recursion, so that a long
            chain of them would exhaust the stack.
        hashed: the values that a call hashes, from its arguments.
        cost: what a call costs beside copying, from its arguments, in units of the budget.
        by_reference: the arguments are kept, not copied.
        trusted: the user trusts the global, so the call gets no limits and takes keywords.
    """

    value: Any
    call: Callable[..., Any] | None = None
    build: Callable[[Any, Any], None] | None = None
    new: Callable[..., Any] | None = None
    clear: Callable[[Any], None] | None = None
    hashed: Callable[..., Iterable[Any]] | None = None
    cost: Callable[..., int] | None = None
    by_reference: bool = False
    trusted: bool = False


Find = Callable[[str, str], Rule]
"""Module and name of a global to its rule. Raises UntrustedClass for an unknown one."""
Persistent = Callable[[tuple[Any, ...]], Any]


def items_of(items: Iterable[Any] = (), *_: Any) -> Iterable[Any]:
    """``Rule.hashed`` of a call that hashes each item of its first argument."""
    return items


def keys_of(items: Iterable[Any] = (), *_: Any) -> Iterable[Any]:
    """``Rule.hashed`` of a call that makes a mapping from a mapping or from pairs."""
    return items if isinstance(items, dict) else [item[0] for item in items]


def unpickle(data: bytes, find: Find, persistent: Persistent | None = None) -> Any:
    """The value of a pickle. ``persistent`` gives the value of a persistent id.

    Raises:
        UntrustedClass: ``find`` refuses a global.
        CorruptCheckpoint: the pickle is damaged, or would exhaust stack, time or memory.
    """
    unpickler = Unpickler(data, find, persistent)
    kept: Container[int] | None = None
    try:
        value = unpickler.load()
        kept = check_shape(value)
        return value
    finally:
        unpickler.discard(kept)


_FIXED = {
    opcode: length
    for length, opcodes in {
        1: b".(012N\x88\x89])}\x8flt\x85\x86\x87\x94\x93R\x81\x92baes\x90ud\x91Q",
        2: b"\x80Khq",
        3: b"M",
        5: b"Jjr",
        9: b"G\x95",
    }.items()
    for opcode in opcodes
}
"""Opcode to its length in bytes, with its argument."""
_COUNTED = {
    opcode: width
    for width, opcodes in {1: b"\x8a\x8cCU", 4: b"\x8bXB", 8: b"\x8d\x8e\x96"}.items()
    for opcode in opcodes
}
"""Opcode to the width of its count, which so many bytes follow."""
_OPERANDS = {
    b"R": b"\x86",  # function, arguments
    b"\x81": b"\x86",  # NEWOBJ: class, arguments
    b"\x92": b"\x87",  # NEWOBJ_EX: class, arguments, keywords
    b"b": b"\x86",  # BUILD: instance, state
    b"a": b"\x85\x86",  # APPEND: target, (item,)
    b"e": b"t\x86",  # APPENDS: target, items
    b"\x90": b"t\x86",  # ADDITEMS: target, items
    b"s": b"\x86\x86",  # SETITEM: target, (key, value)
    b"u": b"t\x86",  # SETITEMS: target, (key, value, key, value, ...)
    b"d": b"t",  # DICT: (key, value, key, value, ...)
    b"\x91": b"t",  # FROZENSET: items
    b"Q": b"",  # BINPERSID: the persistent id
}
"""Opcode to the opcodes that make one tuple of its operands."""
_TRANSLATED = {
    opcode[0]: operands + b"K" + opcode + b"\x86Q"
    for opcode, operands in _OPERANDS.items()
}
_REDUCE, _NEWOBJ, _NEWOBJ_EX, _BUILD = b"R\x81\x92b"
_APPEND, _APPENDS, _ADDITEMS, _SETITEM, _SETITEMS = b"ae\x90su"
_DICT, _FROZENSET, _PERSISTENT, _GLOBAL = b"d\x91Qc"
_STOP, _FRAME, _BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT = b".\x95hjqr"

_GETATTRS = (b"cbuiltins\ngetattr\n", b"c__builtin__\ngetattr\n")
_LONGEST_NAME = 1024  # characters of a dotted name
_MAPPINGS = frozenset((dict, OrderedDict, Counter, defaultdict))
_SEQUENCES = frozenset((list, deque))


def translate(data: bytes) -> bytes:
    """A pickle that leaves every call, hash and change to ``persistent_load``.

    Protocols 2 and 3 write a nested class as ``getattr(Outer, "Inner")``. There the pickle needs
    no trust in ``Outer``, so a global right after getattr becomes a Name, which is not looked up.

    Raises CorruptCheckpoint for lengths that reach beyond the pickle, and for unknown opcodes.
    """
    parts: list[bytes] = []
    names: dict[int, bytes] = {}  # memo index of a Name to its GLOBAL opcode
    getattrs: set[int] = set()  # memo indices of getattr
    after_getattr = False
    name = b""  # the Name on top of the stack
    copied = at = 0
    while at < len(data):
        opcode = data[at]
        if opcode in _FIXED:
            end = at + _FIXED[opcode]
        elif opcode in _COUNTED:
            start = at + 1 + _COUNTED[opcode]
            end = start + int.from_bytes(data[at + 1 : start], "little")
        elif opcode == _GLOBAL:
            end = data.index(b"\n", data.index(b"\n", at) + 1) + 1
        else:
            raise CorruptCheckpoint(f"unknown pickle opcode {opcode} at byte {at}")
        if end > len(data):
            raise CorruptCheckpoint(f"a pickle ends in the middle of byte {at} on")

        replaced = _TRANSLATED.get(opcode)
        if opcode == _STOP:
            parts.append(data[copied:end])
            body = b"".join(parts)
            # One frame for all, so that the unpickler reads it at once.
            return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body
        if opcode in (_BINPUT, _LONG_BINPUT):
            index = int.from_bytes(data[at + 1 : end], "little")
            if index > len(data) + 255:
                raise CorruptCheckpoint(f"a pickle has a gap in its memo at byte {at}")
            if after_getattr:
                getattrs.add(index)
            elif name:
                names[index] = name
        elif opcode in (_BINGET, _LONG_BINGET):
            index = int.from_bytes(data[at + 1 : end], "little")
            name = names.get(index, b"") if after_getattr else b""
            if index in names and not after_getattr:
                replaced = names[index]
            after_getattr = index in getattrs
        elif opcode == _GLOBAL:
            found = data[at:end]
            name = found if after_getattr and found not in _GETATTRS else b""
            after_getattr = found in _GETATTRS
            if name:
                replaced = _name_opcodes(found)
        else:
            after_getattr, name = False, b""
            if opcode == _FRAME:
                replaced = b""
        if replaced is not None:
            parts += (data[copied:at], replaced)
            copied = end
        at = end
    raise CorruptCheckpoint("a pickle has no end")


def _name_opcodes(opcode: bytes) -> bytes:
    """Opcodes that push a Name: ``persistent_load(((module, name), GLOBAL))``."""
    pushed = b""
    for text in opcode[1:].split(b"\n")[:2]:
        pushed += b"X" + struct.pack("<I", len(text)) + text
    return pushed + b"\x86Kc\x86Q"


class Unpickler(pickle.Unpickler):
    """Reads one pickle by the rules that ``find`` gives for its globals."""

    def __init__(
        self, data: bytes, find: Find, persistent: Persistent | None = None
    ) -> None:
        try:
            translated = translate(data)
        except ValueError as error:  # a GLOBAL without its two lines
            raise CorruptCheckpoint(f"a pickle is damaged: {error}") from error
        super().__init__(io.BytesIO(translated), encoding="latin-1")
        self._find = find
        self._persistent = persistent
        # By the identity of the value, which the rule keeps alive.
        self._rules: dict[int, tuple[Rule, str, str]] = {}
        self._globals: dict[tuple[str, str], Rule] = {}
        self._made: dict[int, tuple[Any, Rule]] = {}
        self._budget = Budget(len(data))

    def load(self) -> Any:
        """The value. Raises CorruptCheckpoint for anything but a whole, plain pickle."""
        try:
            return super().load()
        except CorruptCheckpoint:
            raise
        except (
            pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError,
            ArithmeticError, RecursionError, struct.error,
        ) as error:  # fmt: skip
            raise CorruptCheckpoint(f"a pickle is damaged: {error}") from error
        except MemoryError as error:
            raise CorruptCheckpoint(
                "a pickle takes more memory than there is"
            ) from error

    def discard(self, kept: Container[int] | None = None) -> None:
        """Clear the instances, except those with the identities ``kept``, to free them safely.

        Instances that a trusted object may hold are left alone, unless nothing is kept.
        """
        made = list(self._made.values())
        if kept is not None and any(rule.trusted for _, rule in made):
            return
        for value, rule in made:
            if rule.clear is not None and (kept is None or id(value) not in kept):
                rule.clear(value)

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return GETATTR
        rule = self._globals.get((module, name))
        if rule is None:
            rule = self._globals[module, name] = self._find(module, name)
            self._rules[id(rule.value)] = rule, module, name
        return rule.value

    def persistent_load(self, translated: Any) -> Any:
        """Do what an opcode asks for. ``translated``: its operands, and the opcode."""
        operands, opcode = translated
        if opcode in (_REDUCE, _NEWOBJ):
            function, args = operands
            return self._call(function, args, {}, opcode == _NEWOBJ)
        if opcode in (_SETITEM, _SETITEMS):
            return self._set_items(*operands)
        if opcode in (_APPEND, _APPENDS):
            target, items = operands
            if type(target) not in _SEQUENCES and not self._is_trusted(target):
                raise CorruptCheckpoint(
                    f"a pickle appends to a {type(target).__name__}"
                )
            target.extend(items)
            return target
        if opcode == _BUILD:
            return self._build(*operands)
        if opcode == _PERSISTENT:
            if self._persistent is None or type(operands) is not tuple:
                raise CorruptCheckpoint(
                    "a pickle has a persistent id of an unknown kind"
                )
            return self._persistent(operands)
        if opcode == _ADDITEMS:
            target, items = operands
            if type(target) is not set:
                raise CorruptCheckpoint(
                    f"a pickle adds to a {type(target).__name__} as to a set"
                )
            self._budget.hash(items, target)
            target.update(items)
            return target
        if opcode == _DICT:
            return self._set_items({}, operands)
        if opcode == _FROZENSET:
            self._budget.hash(operands)
            return frozenset(operands)
        if opcode == _NEWOBJ_EX:
            function, args, kwargs = operands
            return self._call(function, args, kwargs, True)
        return Name(*operands)

    def _call(self, function: Any, args: Any, kwargs: Any, new: bool) -> Any:
        if function is GETATTR:
            return self._attribute(args)
        rule = self._rules[id(function)][0] if id(function) in self._rules else None
        call = None if rule is None else (new and rule.new) or rule.call
        if rule is None or call is None or type(args) is not tuple:
            raise CorruptCheckpoint(
                f"a pickle calls a {type(function).__name__} that may not be called"
            )
        if type(kwargs) is not dict or (
            kwargs and not rule.trusted and not rule.by_reference
        ):
            raise CorruptCheckpoint("a pickle gives keywords to a function without any")
        for arg in args:
            if type(arg) is Name:
                raise UntrustedClass(refusal(arg.module, arg.name))
        if not rule.trusted:
            copied = (args, kwargs) if rule.by_reference else (args, *args, kwargs)
            self._budget.copy(copied)
            if rule.hashed is not None:
                self._budget.hash(rule.hashed(*args))
            if rule.cost is not None:
                self._budget.spend(rule.cost(*args))
        value = self._called(call, args, kwargs)
        if rule.build is not None or rule.clear is not None:
            self._made[id(value)] = value, rule
        return value

    def _attribute(self, args: Any) -> Any:
        """``getattr(Outer, "Inner")``: the global with that dotted name. getattr never runs."""
        if type(args) is tuple and len(args) == 2 and args[0] is not GETATTR:
            owner, part = args
            module = name = ""
            if type(owner) is Name:
                module, name = owner.module, owner.name
            elif id(owner) in self._rules:
                _, module, name = self._rules[id(owner)]
            if module and type(part) is str:
                # Each level of a chain keeps a longer name.
                if len(name) + len(part) > _LONGEST_NAME:
                    raise CorruptCheckpoint("the dotted name of a class is too long")
                return self.find_class(module, f"{name}.{part}")
        return self._find("builtins", "getattr")  # which refuses it

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return call(*args, **kwargs)

    def _set_items(self, target: Any, items: tuple[Any, ...]) -> Any:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            raise CorruptCheckpoint("a pickle sets a key without a value")
        if type(target) in _MAPPINGS:
            self._budget.hash(keys, target)
        elif not self._is_trusted(target):
            raise CorruptCheckpoint(f"a pickle sets items of a {type(target).__name__}")
        for key, value in zip(keys, values, strict=True):
            target[key] = value
        return target

    def _build(self, instance: Any, state: Any) -> Any:
        _, rule = self._made.get(id(instance), (None, None))
        if rule is None or rule.build is None:
            raise CorruptCheckpoint(
                f"a pickle sets the state of a {type(instance).__name__}"
            )
        if not rule.trusted:
            parts = state if type(state) is tuple and not rule.by_reference else ()
            self._budget.copy((state, *parts))
        self._built(rule.build, instance, state)
        return instance

    def _built(
        self, build: Callable[[Any, Any], None], instance: Any, state: Any
    ) -> None:
        build(instance, state)

    def _is_trusted(self, instance: Any) -> bool:
        """Was it made by a class that the user trusts?"""
        _, rule = self._made.get(id(instance), (None, None))
        return rule is not None and rule.trusted
