"""Python objects to bytes (blobs) and back, without running code that the bytes name.

A blob has the form of ``torch.save``, so megackpt, torch and Megatron-Core read each other's blobs.
A load makes only classes of an allow-list. It changes no global state, so threads may load at
the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    RefusedObject,
    UntrustedClass,
)
from megackpt.serialization.archive import Archive
from megackpt.serialization.list_of_one import (
    unwrapped as unwrapped,
    wrapped as wrapped,
)
from megackpt.serialization.pickler import dump as dump
from megackpt.serialization.standins import (
    StandIn as StandIn,
    StandInClass as StandInClass,
)
from megackpt.serialization.unpickler import unpickle


def load(
    data: bytes,
    *,
    trusted: Sequence[type | Callable[..., Any]] = (),
    stand_ins: bool = False,
    where: str = "",
) -> Any:
    """The value of a blob, with tensors on the CPU.

    It makes plain data of Python, numpy and torch, and the classes in ``trusted`` and in
    ``torch.serialization.add_safe_globals``. Classes of Megatron-Core and DeepSpeed become
    StandIns unless trusted. With ``stand_ins`` all other classes do, too.

    Raises:
        UntrustedClass: the blob names any other class or function. None of its code ran.
        RefusedObject: the blob is whole, but holds objects that a load never makes.
        CorruptCheckpoint: the blob is damaged.
        CheckpointingException: torch, or a trusted class, raised a RuntimeError.

    Each message begins with ``where``.
    """
    from megackpt.serialization.allowlist import finder, storages

    prefix = ""
    if where:
        prefix = f"{where}: "
    try:
        archive = Archive.of(data)
        if not archive.little_endian:
            raise CorruptCheckpoint(
                "the object was saved on a big-endian machine: load and save it with torch there"
            )
        pickled = archive.content("data.pkl")
        try:
            return unpickle(pickled, finder(trusted, stand_ins), storages(archive))
        except UntrustedClass:
            raise
        except CorruptCheckpoint as error:
            # With a checksum that is right, the bytes are as they were written.
            if archive.members["data.pkl"].crc:
                raise RefusedObject(
                    f"{error} (the bytes are as they were written)"
                ) from error
            raise
    except UntrustedClass as error:
        raise UntrustedClass(f"{prefix}{error}") from None
    except CorruptCheckpoint as error:
        raise type(error)(f"{prefix}{error}") from error
    except RuntimeError as error:
        # From torch, or from a trusted class: the file need not be damaged.
        raise CheckpointingException(
            f"{prefix}an object cannot be made here: {type(error).__name__}: {error}"
        ) from error


def check(blob: bytes) -> list[str]:
    """Check that ``load`` can give back a blob that was just written. No code of a class runs.

    Returns an error text for each class that a load must trust.

    Raises CorruptCheckpoint where a load fails whatever is trusted.
    """
    from megackpt.serialization.save_check import check_loadable

    return check_loadable(blob)
