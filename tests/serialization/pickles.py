"""Values and hand-made pickles for the tests of serialization."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import io
import math
import pathlib
import signal
import struct
import types
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PLAIN = {
    "numbers": [0, 255, 65536, -5, 2**40, 10**300, 1.5, math.inf, True, None, 1 + 2j],
    "text": ["", "ü\ud800", "x" * 300],
    "bytes": [b"", b"\xff\x00" * 200, bytearray(b"z")],
    "containers": [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        {1: {2: 3}},
        {1, 2},
        frozenset((1,)),
        range(3),
        slice(1, 2),
    ],
    "namespace": argparse.Namespace(
        lr=0.1, path=pathlib.PosixPath("/a/b"), inner=argparse.Namespace(z=1)
    ),
    "simple": types.SimpleNamespace(q=2),
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, {"a": [1]}),
    "deque": collections.deque([1, 2], 5),
    "moment": dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC),
    "days": [dt.date(2026, 1, 2), dt.time(3, 4), dt.timedelta(days=2, seconds=3)],
    "decimal": decimal.Decimal("1.50"),
    "signals": [signal.SIGTERM, signal.SIG_DFL],
    "types": [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.Size([2, 3]),
        torch.device("cpu"),
        np.dtype("<f4"),
        int,
    ],
    "scalars": [np.float32(2.5), np.int64(-3), np.bool_(True), np.complex64(1j)],
}


class Calls:
    """Pickles as a call of any function."""

    def __init__(
        self, function: Callable[..., Any], *args: Any, state: Any = None
    ) -> None:
        self.call = function, args, state

    def __reduce__(self) -> Any:
        return self.call if self.call[2] is not None else self.call[:2]


def archive(pickled: bytes, protocol: int = 2, **storages: bytes) -> bytes:
    """An archive of torch.save's kind. A pickle without a protocol gets one, and its end."""
    if not pickled.startswith(b"\x80"):
        pickled = b"\x80" + bytes([protocol]) + pickled + b"."
    return raw_archive(pickled, **storages)


def raw_archive(pickled: bytes, **storages: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, content in storages.items():
            file.writestr(f"archive/data/{name}", content)
    return buffer.getvalue()


def named(full: str) -> bytes:
    """The GLOBAL opcode."""
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
