"""Many tensors into one piece of host memory, as fast as memory goes, and beside what devices are doing."""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any
from weakref import finalize

import torch

from megackpt.errors import ShardingError
from megackpt.planning.box import Int64
from megackpt.staging.memory import Arena, Event
from megackpt.staging.source import Staged, in_order, plain

ALIGNMENT = 64
_LARGE = 1 << 20

_Move = Callable[[int, int, int], object]
_move_large: _Move = ctypes.memmove  # lets other threads run
# For small ones: to give up the interpreter's lock for each would mean to wait for other threads each time.
_move_small: _Move = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
_USUAL = (torch.Tensor, torch.nn.Parameter)


def padded(lengths: Int64) -> Int64:
    """What rows of these lengths take where each begins aligned."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def copy_rows(staged: Staged, rows: Iterable[int], starts: Int64, arena: Arena) -> None:
    """Copy these rows of tensors, all of each, to where ``starts`` (for all rows) says.

    What lies on a GPU is there when the arena is ``ready``; it may be changed at once, by work that this thread's
    current streams are given from now on.
    """
    arena.ready()
    base = arena.memory.ctypes.data
    held, sources = staged.held, staged.rows
    lengths, begins = staged.lengths.tolist(), starts.tolist()
    queued: defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = (
        defaultdict(list)
    )
    for row in rows:
        source, whole = sources[row]
        value: Any = held[source]
        length, start = lengths[row], begins[row]
        if not (whole and type(value) in _USUAL):
            value = staged.tensor(row)
        if value.nbytes != length:
            raise ShardingError(
                f"{staged.plan.row(row).shard} had {length} bytes when it was declared, and has {value.nbytes} now: "
                "tensors must stay as they are while save() runs"
            )
        if in_order(value) and (value.data_ptr() or not length):
            (_move_small if length < _LARGE else _move_large)(
                base + start, value.data_ptr(), length
            )
        elif length:
            octets = torch.from_numpy(arena.memory[start : start + length])
            place = octets.view(value.dtype).view(value.shape)
            if value.is_cuda:
                queued[value.device].append((place, value.detach()))
            else:
                place.copy_(value.detach())
    if queued:
        _pin(arena)
    for device, copies in queued.items():
        _queue(device, copies, arena.pending)


def _queue(
    device: torch.device,
    copies: Iterable[tuple[torch.Tensor, torch.Tensor]],
    pending: list[Event],
) -> None:
    """Queue these copies after what the current stream has been given, and before what it will be given."""
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(side):
            for place, tensor in copies:
                tensor.record_stream(
                    side
                )  # if it is freed, its memory stays unused until the copy is done
                place.copy_(plain(tensor), non_blocking=True)
    finally:
        done.record(side)
        pending.append(done)
    current.wait_event(done)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pin(arena: Arena) -> None:
    """Let devices write into it by themselves. Where that is refused, copies are right all the same, and slower."""
    if not arena.pinned:
        address = arena.memory.ctypes.data
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        arena.pinned = int(runtime.cudaHostRegister(address, arena.size, 0)) == 0
        if arena.pinned:
            unregister = partial(runtime.cudaHostUnregister, address)
            finalize(
                arena, _unpin, unregister, arena.pending, os.getpid()
            ).atexit = False


def _unpin(
    unregister: Callable[[], object], pending: Iterable[Event], process: int
) -> None:
    if os.getpid() == process:  # a forked child has no devices
        for event in pending:
            event.synchronize()
        unregister()
