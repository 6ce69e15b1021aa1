"""Python's restricted unpickler behind a scan, so that a pickle runs no code and stays bounded.

The scan translates the pickle. Opcodes that call, hash or change a value become persistent ids:
``function args REDUCE`` becomes ``persistent_load(((function, args), REDUCE))``. The remaining
opcodes build numbers, text, lists and tuples only. So Python's unpickler calls only ``find_class``
and ``persistent_load``, and these do only the actions that the rules of the caller allow.

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

import numpy as np

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.pickle_limits import Budget, check_shape
from megackpt.serialization.trust import GETATTR, Name, refusal


@dataclass(frozen=True, slots=True)
class Rule:
    """How the unpickler treats one global.

    Without ``call`` or ``build``, a pickle that tries it is refused.

    Args:
        value: the global as data, for example as an element of a list.
        call: runs when the pickle calls the global.
        build: sets the state of an instance that the pickle made; takes it and the state.
        new: runs when the pickle makes an instance without a call; by default ``call``.
        charge: charges the budget for the cost of a call without the copying; takes the budget and
            the arguments of the call.
        by_reference: the arguments are kept, not copied.
        trusted: the user trusts the global, so the call gets no limits and takes keywords.
    """

    value: Any
    call: Callable[..., Any] | None = None
    build: Callable[[Any, Any], None] | None = None
    new: Callable[..., Any] | None = None
    charge: Callable[..., None] | None = None
    by_reference: bool = False
    trusted: bool = False


_REFUSED = Rule(None)
Find = Callable[[str, str], Rule]
"""Module and name of a global to its rule. Raises UntrustedClass for an unknown one."""
Persistent = Callable[[tuple[Any, ...]], Any]


def charge_items(budget: Budget, items: Iterable[Any] = (), *_: Any) -> None:
    """``Rule.charge`` of a call that hashes each item of its first argument."""
    budget.hash(items)


def charge_keys(budget: Budget, items: Iterable[Any] = (), *_: Any) -> None:
    """``Rule.charge`` of a call that makes a mapping from a mapping or from pairs."""
    budget.hash(items if isinstance(items, dict) else [item[0] for item in items])


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
"""Opcode to the width of its count. The counted bytes follow the count."""
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
_TRANSLATED[0x95] = b""  # FRAME
_REDUCE, _NEWOBJ, _NEWOBJ_EX, _BUILD = b"R\x81\x92b"
_APPEND, _APPENDS, _ADDITEMS, _SETITEM, _SETITEMS = b"ae\x90su"
_DICT, _FROZENSET, _GLOBAL, _STOP = b"d\x91c."
_PUTS = b"qr"  # BINPUT, LONG_BINPUT

_LONGEST_NAME = 1024  # characters of a dotted name
_MAPPINGS = frozenset((dict, OrderedDict, Counter, defaultdict))
_SEQUENCES = frozenset((list, deque))


def translate(data: bytes) -> bytes:
    """A pickle that leaves every call, hash and change to ``persistent_load``.

    Raises CorruptCheckpoint for lengths that reach beyond the pickle, and for unknown opcodes.
    """
    parts: list[bytes] = []
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
        if opcode == _STOP:
            parts.append(data[copied:end])
            body = b"".join(parts)
            # One frame for all, so that the unpickler reads it at once.
            return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body
        if opcode in _PUTS:
            index = int.from_bytes(data[at + 1 : end], "little")
            if index > len(data) + 255:
                raise CorruptCheckpoint(f"a pickle has a gap in its memo at byte {at}")
        elif opcode in _TRANSLATED:
            parts += (data[copied:at], _TRANSLATED[opcode])
            copied = end
        at = end
    raise CorruptCheckpoint("a pickle has no end")


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
        # The last global, if it has no rule, until getattr takes a part of it.
        self._unknown: Name | None = None
        self._has_names = False
        self._made: dict[int, tuple[Any, Rule]] = {}
        self._budget = Budget(len(data))

    def load(self) -> Any:
        """The value. Raises CorruptCheckpoint for anything but a whole, plain pickle."""
        try:
            value = super().load()
            self._refuse_unknown()
            return value
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
        """Clear the instances, except instances whose ids are in ``kept``, to free them safely.

        Instances that a trusted object may hold are left alone, unless ``kept`` is None.
        """
        made = list(self._made.values())
        if kept is not None and any(rule.trusted for _, rule in made):
            return
        for value, rule in made:
            if rule.trusted or (kept is not None and id(value) in kept):
                continue
            # Python frees these by recursion, so a long chain of them would exhaust the stack.
            if isinstance(value, dict | deque):
                value.clear()
            elif isinstance(value, np.ndarray) and value.dtype.hasobject:
                value.fill(None)

    def find_class(self, module: str, name: str) -> Any:
        self._refuse_unknown()
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return GETATTR
        rule = self._globals.get((module, name))
        if rule is None:
            try:
                rule = self._globals[module, name] = self._find(module, name)
            except UntrustedClass:
                self._unknown = Name(module, name)
                self._has_names = True
                return self._unknown
            self._rules[id(rule.value)] = rule, module, name
        return rule.value

    def _refuse_unknown(self) -> None:
        """Raise UntrustedClass, unless getattr took a part of the global that has no rule."""
        if self._unknown is not None:
            self._find(self._unknown.module, self._unknown.name)

    def persistent_load(self, translated: Any) -> Any:
        """Perform an opcode. ``translated``: its operands, and the opcode."""
        operands, opcode = translated
        if opcode in (_REDUCE, _NEWOBJ):
            function, args = operands
            if function is GETATTR:
                return self._attribute(args)
            return self._call(function, args, {}, opcode == _NEWOBJ)
        self._refuse_unknown()
        if opcode in (_SETITEM, _SETITEMS):
            return self._set_items(*operands)
        if opcode in (_APPEND, _APPENDS):
            target, items = operands
            if type(target) not in _SEQUENCES:
                self._check_trusted(target, items)
            target.extend(items)
            return target
        if opcode == _BUILD:
            return self._build(*operands)
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
        if self._persistent is None or type(operands) is not tuple:
            raise CorruptCheckpoint("a pickle has a persistent id of an unknown kind")
        return self._persistent(operands)

    def _call(self, function: Any, args: Any, kwargs: Any, new: bool) -> Any:
        self._refuse_unknown()
        rule, _, _ = self._rules.get(id(function), (_REFUSED, "", ""))
        call = (new and rule.new) or rule.call
        if call is None or type(args) is not tuple:
            raise CorruptCheckpoint(
                f"a pickle calls a {type(function).__name__} that may not be called"
            )
        if type(kwargs) is not dict or (
            kwargs and not rule.trusted and not rule.by_reference
        ):
            raise CorruptCheckpoint("a pickle gives keywords to a function without any")
        self._check_parts(rule, (*args, kwargs))
        if not rule.trusted:
            self._budget.copy((args, kwargs))
            if not rule.by_reference:
                self._budget.copy(args)
            if rule.charge is not None:
                rule.charge(self._budget, *args)
        value = call(*args, **kwargs)
        if rule.build is not None or isinstance(value, dict | deque):
            self._made[id(value)] = value, rule
        return value

    def _check_parts(self, rule: Rule, parts: tuple[Any, ...]) -> None:
        """Refuse names for getattr alone, which the check of the whole value would miss."""
        if rule.trusted and self._has_names:
            check_shape(parts)
        for part in parts:
            if type(part) is Name:
                raise UntrustedClass(refusal(part.module, part.name))

    def _attribute(self, args: Any) -> Any:
        """``getattr(Outer, "Inner")``: the global with that dotted name. getattr never runs."""
        if type(args) is tuple and len(args) == 2 and args[0] is not GETATTR:
            owner, part = args
            module = name = ""
            if type(owner) is Name:
                module, name = owner.module, owner.name
            elif id(owner) in self._rules:
                _, module, name = self._rules[id(owner)]
            if owner is self._unknown:
                self._unknown = None
            if module and type(part) is str:
                # Each level of a chain keeps a longer name.
                if len(name) + len(part) > _LONGEST_NAME:
                    raise CorruptCheckpoint("the dotted name of a class is too long")
                return self.find_class(module, f"{name}.{part}")
        return self._find("builtins", "getattr")  # which refuses it

    def _set_items(self, target: Any, items: tuple[Any, ...]) -> Any:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            raise CorruptCheckpoint("a pickle sets a key without a value")
        if type(target) in _MAPPINGS:
            self._budget.hash(keys, target)
        else:
            self._check_trusted(target, items)
        for key, value in zip(keys, values, strict=True):
            target[key] = value
        return target

    def _build(self, instance: Any, state: Any) -> Any:
        _, rule = self._made.get(id(instance), (None, _REFUSED))
        if rule.build is None:
            raise CorruptCheckpoint(
                f"a pickle sets the state of a {type(instance).__name__}"
            )
        self._check_parts(rule, (state,))
        if not rule.trusted:
            self._budget.copy((state,))
            if type(state) is tuple and not rule.by_reference:
                self._budget.copy(state)
        rule.build(instance, state)
        return instance

    def _check_trusted(self, target: Any, items: tuple[Any, ...]) -> None:
        """Check that an instance, which gets these items, is of a class that the user trusts."""
        _, rule = self._made.get(id(target), (None, _REFUSED))
        if not rule.trusted:
            raise CorruptCheckpoint(f"a pickle adds items to a {type(target).__name__}")
        self._check_parts(rule, items)
