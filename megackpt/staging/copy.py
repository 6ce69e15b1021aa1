"""Copy the rows of a save plan to the host, into one buffer."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any
from weakref import finalize

import numpy as np
import torch

from megackpt.errors import ShardingError
from megackpt.staging.buffers import POOL, Buffer, Event, HostCopy, default_cap
from megackpt.staging.source import TensorSource, is_plain_memory, resolved

logger = logging.getLogger("megackpt.staging")

_ALIGNMENT = 64  # bytes
_LARGE = 1 << 20  # bytes

_Move = Callable[[int, int, int], object]
_move_large: _Move = ctypes.memmove  # releases the interpreter's lock
# For small copies: with a writer thread running, each release would wait to get the lock back.
_move_small: _Move = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def copy_to_host(source: TensorSource, cap: int | None = None) -> HostCopy | None:
    """Copy all rows of a save plan, objects included. The tensors may be changed when this returns.

    Copies of CUDA tensors may still run then: work on the streams that are current now may change
    the tensors, and readers of the copy wait for it.

    Returns None where this copy does not fit beside the earlier ones: ``cap`` (None:
    ``default_cap()``) is how many bytes all copies of this process may take together.

    Raises ShardingError for a tensor that has changed its size since it was declared, StorageError
    where the system has no memory.
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


def _log_no_room(rank: int, size: int, cap: int) -> None:
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
    held = source.held
    rows = source.rows
    queued: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(
        list
    )
    for row in np.flatnonzero(~source.is_object).tolist():
        start = starts[row]
        length = lengths[row]
        declared, whole = rows[row]
        value: Any = held[declared]
        # A state may have 100,000 small tensors: most need no call of source.tensor.
        if not whole or type(value) not in (torch.Tensor, torch.nn.Parameter):
            value = source.tensor(row)
        if value.nbytes != length:
            raise ShardingError(
                f"{source.plan.row(row).shard} had {length} bytes when it was declared, and has "
                f"{value.nbytes} now: do not change tensors while save() runs"
            )
        if not length:
            continue
        if is_plain_memory(value) and value.data_ptr():
            move = _move_large
            if length < _LARGE:
                move = _move_small
            move(base + start, value.data_ptr(), length)
            continue
        into = torch.from_numpy(buffer.memory[start : start + length])
        into = into.view(value.dtype).view(value.shape)
        if value.is_cuda:
            queued[value.device].append((into, value.detach()))
        else:
            into.copy_(value.detach())
    if queued:
        _pin(buffer)
    for device, copies in queued.items():
        _queue_copies(device, copies, buffer.pending)


def _queue_copies(
    device: torch.device,
    copies: Iterable[tuple[torch.Tensor, torch.Tensor]],
    pending: list[Event],
) -> None:
    """Queue these copies behind the work of the current stream, and before its further work."""
    current = torch.cuda.current_stream(device)
    side = _side_stream(device)
    side.wait_stream(current)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(side):
            for into, tensor in copies:
                # If the tensor is freed, its memory stays unused until the copy is done.
                tensor.record_stream(side)
                into.copy_(resolved(tensor), non_blocking=True)
    finally:
        done.record(side)
        pending.append(done)
    current.wait_event(done)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pin(buffer: Buffer) -> None:
    """Register the buffer with CUDA. Where that is refused, copies are slower."""
    if buffer.pinned:
        return
    address = buffer.memory.ctypes.data
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    buffer.pinned = int(runtime.cudaHostRegister(address, buffer.size, 0)) == 0
    if buffer.pinned:
        unregister = partial(runtime.cudaHostUnregister, address)
        finalize(buffer, _unpin, unregister, buffer.pending, os.getpid()).atexit = False


def _unpin(
    unregister: Callable[[], object], pending: Iterable[Event], process: int
) -> None:
    if os.getpid() == process:  # a forked child has no devices
        for event in pending:
            event.synchronize()
        unregister()
