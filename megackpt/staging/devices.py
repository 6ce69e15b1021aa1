"""Copies between accelerators and the host: side streams, their events, and pinned memory.

A copy is queued on a side stream, which waits for the current stream. So kernels run while
it runs, and code that needs it to be complete waits for its event. ``torch.accelerator`` names the
device: CUDA, ROCm, XPU, NPUs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from megackpt.planning.box import Box
from megackpt.planning.manifest import DIGEST_BLOCK
from megackpt.staging.buffers import Event

COPIED_AT_ONCE = 16 * DIGEST_BLOCK
"""Bytes that are copied to the host at a time where a tensor's memory cannot be written
directly."""

_IN_FLIGHT = 128 << 20  # bytes of one load that are on the way to devices
_SMALL = 64 << 10  # bytes: the driver copies these at once, from any memory
_PORTABLE = 1  # pinned for all devices of this process

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd and lazy conjugation, so that its memory holds its values."""
    return tensor.detach().resolve_conj().resolve_neg()


def has_streams(tensor: torch.Tensor) -> bool:
    """Whether copies of the tensor can run on a side stream of its device."""
    return not tensor.is_cpu and _kind_has_streams(tensor.device.type)


@cache
def _kind_has_streams(kind: str) -> bool:
    if kind in ("cuda", "mps"):  # MPS has one queue
        return kind == "cuda"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and kind == accelerator.type


def synchronize_current_stream() -> None:
    """Wait for the current stream: other threads are about to read tensors of the device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not _kind_has_streams(accelerator.type):
        return
    if accelerator.type != "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.accelerator.current_stream().synchronize()


def synchronize(tensors: Iterable[object]) -> None:
    """Wait for the work that this thread, and our copies, have queued on these tensors' devices.

    Other threads may use the tensors after that.
    """
    devices = {
        t.device for t in tensors if isinstance(t, torch.Tensor) and not t.is_cpu
    }
    for device in devices:
        if not _kind_has_streams(device.type):
            continue
        torch.accelerator.current_stream(device).synchronize()
        # The stream that other threads use. Some modules do not name it.
        module = torch.get_device_module(device)
        if hasattr(module, "default_stream"):
            module.default_stream(device).synchronize()
        else:
            torch.accelerator.synchronize(device)
        _side_stream(device).synchronize()


def pinned(size: int) -> torch.Tensor:
    """``size`` bytes of pinned host memory; of pageable memory if they are few or pinning fails.

    torch keeps freed memory for the next call.
    """
    if size > _SMALL:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class _Copied(torch.Event):
    """The end of copies, and the tensors that must not be freed before it."""

    _held: tuple[torch.Tensor, ...] = ()

    def hold(self, tensor: torch.Tensor, side: torch.Stream) -> None:
        """Keep the memory unused until the copy is done, also if the tensor is freed."""
        try:
            tensor.record_stream(side)
        except NotImplementedError:  # of some backends
            self._held += (tensor,)


def queue_copies(device: torch.device, copies: Copies, pending: list[Event]) -> None:
    """Queue copies of (to, from), behind the present work of the current stream.

    Later work of the current stream may run at the same time as the copies.

    ``pending`` receives the event of their end, also if one of them is refused.
    """
    side = _side_stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    # A wait for the event leaves the processor free.
    done = _Copied(device, blocking=True)
    try:
        with side:
            for into, tensor in copies:
                for each in (into, tensor):
                    if has_streams(each):
                        done.hold(each, side)
                into.copy_(resolved(tensor), non_blocking=True)
    finally:
        done.record(side)
        pending.append(done)


def hold_streams(events: Iterable[tuple[torch.device, Any]]) -> None:
    """Have later work of each device's current stream wait for the event, without waiting here."""
    for device, event in events:
        torch.accelerator.current_stream(device).wait_event(event)


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def register(address: int, size: int) -> Callable[[], object] | None:
    """Pin memory of this process for CUDA or ROCm, until the returned function is called.

    Returns None if it is refused. Other runtimes pin only memory that torch allocates.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size, _PORTABLE)) == 0:
        return lambda: runtime.cudaHostUnregister(address)
    # CUDA reports the refusal once more, to the next kernel.
    with suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
    return None


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in host memory."""
    if not has_streams(tensor):
        return resolved(tensor).cpu()
    made = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    events: list[Event] = []
    queue_copies(tensor.device, [(made, tensor)], events)
    events[0].synchronize()
    return made


def host_blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor of a device, through two pinned pieces that take turns.

    A block is valid until the next one is requested, and the next one is copied meanwhile.
    """
    itemsize = tensor.element_size()
    size = tensor.numel() * itemsize
    starts = [*range(0, size, COPIED_AT_ONCE), size]
    pieces = [pinned(min(COPIED_AT_ONCE, size)) for _ in starts[1:3]]
    ahead: deque[tuple[torch.Tensor, list[Event]]] = deque()

    def first() -> memoryview:
        piece, events = ahead.popleft()
        for event in events:
            event.synchronize()
        return piece.numpy().data

    try:
        for number, (start, stop) in enumerate(pairwise(starts)):
            piece = pieces[number % 2][: stop - start]
            events: list[Event] = []
            ahead.append((piece, events))
            copies = parts(piece, tensor, start // itemsize, stop // itemsize)
            queue_copies(tensor.device, copies, events)
            if number:
                yield first()
        if ahead:
            yield first()
    finally:
        while ahead:  # the memory of the pieces is freed now
            first()


def parts(piece: torch.Tensor, tensor: torch.Tensor, start: int, stop: int) -> Copies:
    """Pairs of equal parts of a piece and of the elements from ``start`` to ``stop``."""
    place = piece.view(tensor.dtype)
    filled = 0
    for run in Box.whole(tensor.shape).runs(start, stop):
        part = place[filled : filled + run.volume]
        filled += run.volume
        yield part.view(run.shape), tensor[run.slices()]


class Uploads:
    """Copies of one load to devices that still run, and the host memory that they read.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: deque[tuple[torch.Tensor, list[Event]]] = deque()
        self._bytes = 0

    def send(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Queue a copy of host memory. Wait for earlier ones while too much is on the way."""
        events: list[Event] = []
        try:
            queue_copies(into.device, [(into, values)], events)
        finally:
            with self._lock:
                self._running.append((values, events))
                self._bytes += values.nbytes
        while True:
            with self._lock:
                if self._bytes <= _IN_FLIGHT:
                    return
                oldest, events = self._running.popleft()
                self._bytes -= oldest.nbytes
            for event in events:
                event.synchronize()
