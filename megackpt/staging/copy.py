"""Copy the rows of a save plan to the host, into one buffer."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from weakref import finalize

import numpy as np
import torch

from megackpt.errors import CheckpointingException, ShardingError
from megackpt.staging.buffers import (
    POOL,
    Buffer,
    Event,
    HostCopy,
    available_memory,
    default_cap,
)
from megackpt.staging.devices import (
    has_streams,
    hold_streams,
    host_blocks,
    queue_copies,
    register,
)
from megackpt.staging.source import TensorSource, byte_view

logger = logging.getLogger("megackpt.staging")

_ALIGNMENT = 64  # bytes
_LARGE = 1 << 20  # bytes
_SPARE = 16  # a guess is prepared if this many times its size is available on the host
_LOOKS_EVERY = 5.0  # seconds between two looks at the memory that is left

_Move = Callable[[int, int, int], object]
_move_large: _Move = ctypes.memmove  # releases the interpreter's lock
# For small copies: with a writer thread running, each release would wait to get the lock back.
_move_small: _Move = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def copy_to_host(source: TensorSource, cap: int | None = None) -> HostCopy | None:
    """Copy all rows of a save plan, objects included. CPU tensors may be changed after that.

    Copies of tensors of a device may still run then, with kernels that only read the tensors.
    Call ``hold()`` of the copy before work that changes them. Readers of the copy wait for it.

    Returns None where this copy does not fit into memory with the earlier ones: ``cap`` (None:
    ``default_cap()``) is how many bytes all copies of this process may take together.

    Raises ShardingError for a tensor that has changed its size since it was declared, or whose
    storage was freed or resized meanwhile; StorageError where the system has no memory.
    """
    plan = source.plan
    if cap is None:
        cap = default_cap()
    lengths = plan.lengths
    if int(lengths.sum()) > cap:  # do not serialize the objects in vain
        _log_no_room(plan.rank, int(lengths.sum()), cap)
        return None
    blobs: dict[int, bytes] = {}
    for row in np.flatnonzero(source.is_object).tolist():
        blobs[row] = source.blob(row)
        lengths[row] = len(blobs[row])
    padded = -(-lengths // _ALIGNMENT) * _ALIGNMENT
    starts = np.cumsum(padded) - padded
    buffer = POOL.lease(int(padded.sum()), cap)
    if buffer is None:
        _log_no_room(plan.rank, int(padded.sum()), cap)
        return None
    copy = HostCopy(plan, buffer, starts, lengths)
    release = finalize(copy, POOL.give_back, buffer)
    release.atexit = False
    copy.release = release
    try:
        _copy_tensors(source, copy)
        for row, blob in blobs.items():
            buffer.memory[starts[row] :][: len(blob)] = np.frombuffer(blob, np.uint8)
    except BaseException:
        release()
        raise
    return copy


def prepare(nbytes: int | None = None) -> None:
    """Make ``nbytes`` of staging memory ready for the next copy, in a thread.

    New pages, and pinning them for CUDA, take several times as long as the copy itself. None: for
    the first copy of this process, once a load has given its size and a queue waits for it, if much
    memory is available. This memory is freed if little is left before that copy.
    """
    is_guess = nbytes is None
    if nbytes is None:
        nbytes = POOL.expected
        if not (nbytes and POOL.is_expecting) or POOL.leases or POOL.is_guessing:
            return
        if available_memory() < _SPARE * nbytes:
            return
        POOL.is_guessing = True
    thread = threading.Thread(
        target=_prepare, args=(nbytes, is_guess), name="megackpt-staging", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # the system has no thread left
        logger.warning("staging memory is not prepared: %s", error)


def _prepare(nbytes: int, is_guess: bool) -> None:
    def pin(buffer: Buffer) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _pin(buffer)

    # The first save fixes the default.
    cap = default_cap.__wrapped__() if is_guess else default_cap()
    try:
        if not POOL.prepare(nbytes, cap, pin, is_guess) and not is_guess:
            logger.warning(
                "staging memory is not prepared: staging_bytes of %s does not fit beside copies of "
                "other saves (limit %s bytes)",
                f"{nbytes:,}",
                f"{cap:,}",
            )
    except (CheckpointingException, OSError) as error:
        logger.warning("staging memory is not prepared: %s", error)
    if is_guess:
        while POOL.has_guess and available_memory() >= nbytes:
            time.sleep(_LOOKS_EVERY)
        POOL.free_guess()
        POOL.is_guessing = False


def _log_no_room(rank: int, size: int, cap: int) -> None:
    POOL.free_guess()  # no copy of this size takes it
    logger.log(
        logging.WARNING if rank == 0 else logging.DEBUG,
        "this asynchronous save is written before save() returns: its copy of %s bytes does "
        "not fit beside those of saves in flight (limit %s bytes: Strategy(staging_memory=...))",
        f"{size:,}",
        f"{cap:,}",
    )


def _copy_tensors(source: TensorSource, copy: HostCopy) -> None:
    buffer = copy.buffer
    buffer.wait_for_devices()
    base = buffer.memory.ctypes.data
    starts = copy.starts.tolist()
    lengths = copy.lengths.tolist()
    # A state may have 100,000 small tensors: most need no call of source.tensor.
    memory = source.memory
    sources = source.plan.source
    matches = memory.nbytes[sources] == copy.lengths
    address = np.where(matches, memory.address[sources], 0).tolist()
    queued: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]
    queued = defaultdict(list)
    for row in np.flatnonzero(~source.is_object).tolist():
        start = starts[row]
        length = lengths[row]
        if address[row]:
            move = _move_large
            if length < _LARGE:
                move = _move_small
            move(base + start, address[row], length)
            continue
        value = source.tensor(row)
        if value.nbytes != length:
            raise ShardingError(
                f"{source.plan.row(row).shard} had {length} bytes when it was declared, and has "
                f"{value.nbytes} now: do not change tensors while save() runs"
            )
        if not length:
            continue
        into = torch.from_numpy(buffer.memory[start : start + length])
        into = into.view(value.dtype).view(value.shape)
        if has_streams(value):
            queued[value.device].append((into, value))
        else:
            into.copy_(value)
    source.check()
    events: list[tuple[torch.device, Event]] = []
    for device, copies in queued.items():
        if device.type == "cuda" and _pin(buffer):
            queue_copies(device, copies, buffer.pending)
            events.append((device, buffer.pending[-1]))
            continue
        for into, tensor in copies:
            rest = byte_view(into)
            for block in host_blocks(tensor):
                rest[: len(block)] = block
                rest = rest[len(block) :]
    copy.hold = partial(hold_streams, events)


def _pin(buffer: Buffer) -> bool:
    """Register the buffer with CUDA. Returns whether that is done."""
    if not buffer.pinned:
        unregister = register(buffer.memory.ctypes.data, buffer.size)
        if unregister is not None:
            buffer.pinned = True
            end = finalize(buffer, _unpin, unregister, buffer.pending, os.getpid())
            end.atexit = False
    return buffer.pinned


def _unpin(
    unregister: Callable[[], object], pending: Iterable[Event], process: int
) -> None:
    if os.getpid() == process:  # a forked child has no devices
        for event in pending:
            event.synchronize()
        unregister()
