"""Objects as blobs: any picklable value to bytes and back, without ever running what the bytes ask for.

A blob is what ``torch.save`` writes, so that torch and Megatron-Core read ours and we read theirs. Reading goes
through a pickle machine of our own that knows an allow-list only; it changes nothing global, so threads may load
at the same time.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    RefusedObject,
    UntrustedClass,
)
from megackpt.serialization import standins
from megackpt.serialization.archive import Archive
from megackpt.serialization.enums import ENUMS_BY_NAME, enum_by_value
from megackpt.serialization.finding import finder as finder
from megackpt.serialization.machine import Machine
from megackpt.serialization.rules import Find, Persistent
from megackpt.serialization.shape import check_shape
from megackpt.serialization.standins import (
    StandIn as StandIn,
    StandInClass as StandInClass,
)
from megackpt.serialization.wrapping import unwrapped as unwrapped, wrapped as wrapped

if TYPE_CHECKING:
    import torch  # imported where values are made: those who only look at names and sizes need none


def dump(value: Any, check: Callable[[Any], None] | None = None) -> bytes:
    """The blob of a value: what torch.save writes. Raises what pickle raises for values that cannot be pickled.

    StandIns for plain classes of Megatron-Core are written as what they stand for. ``check`` sees all that is within
    but Python's plain values and containers, and may raise.
    """
    plain = check is None and not ENUMS_BY_NAME
    blob = _saved(value, pickle if plain else _watched(check))
    return _saved(value, standins) if standins.__name__.encode() in blob else blob


def _watched(check: Callable[[Any], None] | None) -> Any:
    """What torch.save takes for pickle, whose pickler shows what it meets."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if check is not None:
                check(value)
            return enum_by_value(value)

    return types.SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _saved(value: Any, pickle_module: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickle_module)
    return buffer.getvalue()


def load(
    data: bytes,
    *,
    trusted: Sequence[type | Callable[..., Any]] = (),
    stand_ins: bool = False,
    where: str = "",
) -> Any:
    """The value of a blob; tensors on the CPU.

    Known classes (plain data of Python, numpy and torch), ``trusted`` ones and those given to
    ``torch.serialization.add_safe_globals`` are made; classes of Megatron-Core become StandIns unless trusted, and
    with ``stand_ins`` all others do.

    Raises:
        UntrustedClass: the blob names any other class or function. Nothing of it was run.
        RefusedObject: the blob is whole, and holds what is not made of bytes from a file, whoever is trusted.
        CorruptCheckpoint: the blob is damaged.
        CheckpointingException: torch, or a trusted class, refuses what the blob describes.
        All begin with ``where``.
    """
    try:
        return _Blob(data, finder(trusted, stand_ins)).load()
    except UntrustedClass as error:
        raise UntrustedClass(f"{where}: {error}" if where else str(error)) from None
    except CorruptCheckpoint as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from error
    except (
        RuntimeError
    ) as error:  # of torch's, or of a trusted class: it need not be the file's fault
        raise CheckpointingException(
            f"{where}: an object cannot be made here: {type(error).__name__}: {error}"
        ) from error


def check(blob: bytes) -> list[str]:
    """Would ``load`` give back what ``dump`` has just written? What it has to be told to trust, a text a class.

    Raises CorruptCheckpoint for what it refuses whatever is trusted. No code of any class runs.
    """
    from megackpt.serialization.rehearsing import rehearse

    return rehearse(blob)


def interpreted(pickle: bytes, find: Find, storage: Persistent) -> Any:
    """The value of a pickle that torch.save wrote. Raises CorruptCheckpoint for one that could do harm."""
    machine = Machine(pickle, find, storage)
    kept: Container[int] | None = None
    try:
        value = machine.load()
        kept = check_shape(value)
        return value
    finally:
        machine.discard(kept)


class _Blob:
    """A torch archive in memory."""

    def __init__(self, data: bytes, find: Find) -> None:
        self._find = find
        self._storages: dict[str, torch.TypedStorage] = {}
        self._archive = Archive.of(data)

    def load(self) -> Any:
        if not self._archive.little_endian:
            raise CorruptCheckpoint(
                "the object was saved on a big-endian machine: load and save it with torch there"
            )
        pickled = self._archive.content("data.pkl")
        try:
            return interpreted(pickled, self._find, self._storage)
        except CorruptCheckpoint as error:
            # What has the checksum that it was written with is no damage, whatever it is.
            if (
                isinstance(error, UntrustedClass)
                or not self._archive.members["data.pkl"].crc
            ):
                raise
            raise RefusedObject(
                f"{error} (the bytes are as they were written)"
            ) from error

    def _storage(self, persistent_id: Any) -> torch.TypedStorage:
        """The storage that a pickle refers to: ("storage", kind, name, device, number of elements)."""
        import torch

        tag, dtype, name, _, count = persistent_id
        if (
            tag != "storage"
            or not isinstance(dtype, torch.dtype)
            or type(name) is not str
            or type(count) is not int
        ):
            raise CorruptCheckpoint("a pickle refers to a storage in an unknown way")
        known_storage = self._storages.get(name)
        if known_storage is not None:
            return known_storage
        if f"data/{name}" not in self._archive.members:
            raise CorruptCheckpoint(f"the storage {name!r} of a tensor is missing")
        content = self._archive.content(f"data/{name}")
        if count < 0 or count * dtype.itemsize != len(content):
            raise CorruptCheckpoint(
                f"the storage {name!r} holds {len(content)} bytes, not {count} of {dtype}"
            )
        octets = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        storage = torch.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=octets.untyped_storage(), dtype=dtype, _internal=True
        )
        self._storages[name] = storage
        return storage
