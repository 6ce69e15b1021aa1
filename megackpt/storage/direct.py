"""Large files that bypass the page cache, so that they take no memory from other files."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.errors import StorageError
from megackpt.storage import kernel
from megackpt.storage.files import LocalWriter

logger = logging.getLogger("megackpt.storage")

_PIECE = 4 << 20
"""Bytes of one direct write."""
_BLOCK = 4096
"""Bytes. Places and lengths of direct writes are multiples of this. Disks with larger blocks refuse
the last direct write of a file, which is buffered then."""
_UNSUPPORTED = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))
_refusing: set[int] = set()  # devices that refused a first direct write


class DirectWriter(LocalWriter):
    """A new file that bypasses the page cache from ``limits.DIRECT_BYTES`` expected bytes on.

    The bytes are gathered in a piece of aligned memory. The end of the file, less than a block, is
    buffered. Where the file system refuses direct writes, the rest of the file is buffered.
    """

    _piece: NDArray[np.uint8] | None = None  # None: writes are buffered
    _filled = 0

    def expect(self, size: int) -> None:
        if not 0 < limits.DIRECT_BYTES <= size or self._device() in _refusing:
            return
        if not kernel.bypass_cache(self._fd):
            return
        try:
            self._piece = np.frombuffer(mmap(-1, _PIECE), np.uint8)
        except OSError as error:  # no memory
            logger.debug("%s: writes are buffered: %s", self._path, error)
            kernel.bypass_cache(self._fd, False)

    def write(self, buffers: Sequence[memoryview]) -> None:
        for number, buffer in enumerate(buffers):
            if self._piece is None:
                super().write(buffers[number:])
                return
            if buffer.nbytes:
                self._gather(np.frombuffer(buffer.cast("B"), np.uint8))

    def _gather(self, data: NDArray[np.uint8]) -> None:
        while len(data):
            if self._piece is None:
                super().write([data.data])
                return
            part = data[: _PIECE - self._filled]
            # numpy releases the interpreter's lock.
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _PIECE:
                self._filled = 0
                self._write_direct(self._piece.data)

    def _write_direct(self, data: memoryview) -> None:
        before = self._written
        try:
            super().write([data])
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in _UNSUPPORTED:
                raise
            logger.debug("%s: writes are buffered from now on: %s", self._path, error)
            if not self._written:
                _refusing.add(self._device())
            self._piece = None
            kernel.bypass_cache(self._fd, False)
            super().write([data[self._written - before :]])

    @property
    def position(self) -> int:
        return self._written + self._filled

    def close(self) -> None:
        try:
            self._write_rest()
        except BaseException:
            self._release()
            raise
        super().close()

    def _write_rest(self) -> None:
        if self._piece is None or self._fd < 0:
            return
        rest = self._piece[: self._filled].data
        self._filled = 0
        whole = len(rest) // _BLOCK * _BLOCK
        self._write_direct(rest[:whole])
        kernel.bypass_cache(self._fd, False)
        super().write([rest[whole:]])
        self._piece = None

    def _device(self) -> int:
        return os.fstat(self._fd).st_dev
