"""The bytes of one item in a ``.distcp`` file: a stored zip archive that
``torch.load(weights_only=True)`` reads.

An archive is head + payload + tail. The head holds the members ``data.pkl``, ``byteorder`` and
``version`` and the local header of ``data/0``, padded so that the payload (the tensor's C-order
bytes) starts at a multiple of ALIGNMENT; the tail is the central directory. The lengths of head and
tail follow from dtype, number of dimensions and size alone, so that the place of a record follows
from the place of its payload.

CRC fields are 0, as after ``torch.serialization.set_crc32_options(False)``: torch does not check
them, and megackpt has digests of its own. The layout is that of APPNOTE.TXT (zip) and of torch's
serialization notes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from megackpt.backends.archives import (
    LIMIT,
    WIDE,
    Member,
    directory,
    header,
    tensor_opcodes,
)
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE

_MEMBERS = ((b"byteorder", b"little"), (b"version", b"3\n"))
_PAYLOAD = b"data/0"


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """``data.pkl``, torch.save's pickle of a contiguous CPU tensor, its numbers of fixed width."""
    return b"\x80\x02" + tensor_opcodes(dtype, shape, "0") + b"."


@lru_cache(maxsize=16384)
def frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Head and tail of the record of a C-order tensor of this dtype (torch's name) and shape."""
    size = math.prod(shape) * ITEMSIZE[dtype]
    head, members = b"", []
    for name, content in ((b"data.pkl", tensor_pickle(dtype, shape)), *_MEMBERS):
        members.append(Member(name, len(content), len(head)))
        head += header(members[-1]) + content
    members.append(Member(_PAYLOAD, size, len(head)))
    head += header(members[-1], aligned=True)
    return head, directory(members, len(head) + size, size >= LIMIT)


def frame_lengths(dtype: str, shapes: Int64) -> tuple[Int64, Int64]:
    """Lengths of head and tail for each row of ``shapes`` (n, ndim), as of ``frame``."""
    size = np.full(len(shapes), ITEMSIZE[dtype], np.int64)
    filled = size.copy()
    for extent in shapes.T:  # long columns are faster than many short rows
        size *= extent
        filled *= np.maximum(extent, 1)
    kinds = (filled >= WIDE).astype(np.int64) + (size >= LIMIT)
    lengths = np.zeros((2, len(shapes)), np.int64)
    for kind in range(3):
        rows = np.flatnonzero(kinds == kind)
        # All records of one kind have the same lengths.
        if len(rows):
            head, tail = frame(dtype, tuple(shapes[rows[0]].tolist()))
            lengths[0, rows] = len(head)
            lengths[1, rows] = len(tail)
    return lengths[0], lengths[1]
