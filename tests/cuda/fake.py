"""A device that is none: streams, events and pinned memory of ``torch.cuda``, in the order of an enemy.

What is queued runs only when something is waited for, and the streams that may go on are chosen so that code
which forgets to wait gets wrong bytes: training first, copies first, or at random. Tensors of the device are
tensors of the CPU that say otherwise.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.staging import devices

ORDERS = ("copies first", "random 1", "random 2", "random 3")


class Device:
    def __init__(self, order: str) -> None:
        self.refuses_to_register = False
        self._order, _, seed = order.partition(" ")
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams: list[Stream] = []
        self._pieces: list[tuple[np.ndarray, list[bool]]] = []
        self.default = self.stream()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        devices._side_stream.cache_clear()
        patch.setattr(torch, "Stream", lambda _: self.stream())
        patch.setattr(devices, "_Copied", partial(Event, self))
        accelerator = torch.accelerator
        patch.setattr(accelerator, "current_stream", lambda _=None: self.current())
        patch.setattr(torch.cuda, "default_stream", lambda _=None: self.default)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(devices, "pinned", self.pinned)
        patch.setattr("megackpt.staging.target.pinned", self.pinned)

    def stream(self) -> Stream:
        made = Stream(self)
        self._streams.append(made)
        return made

    def current(self) -> Stream:
        return getattr(self._local, "current", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self._local.current = stream
        yield
        self._local.current = before

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run what is queued, one step after the other, until that is so."""
        while True:
            with self._lock:
                if over():
                    return
                self._choose().step()

    def _choose(self) -> Stream:
        ready = [stream for stream in self._streams if stream.is_ready()]
        assert ready, "the streams wait for one another"
        if self._order == "training":
            return ready[0]  # the default stream was made first
        if self._order == "copies":
            return ready[-1]
        return self._random.choice(ready)

    def run_training(self) -> None:
        """Run what the default stream may do by itself."""
        with self._lock:
            while self.default.is_ready():
                self.default.step()

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.todo for stream in self._streams))

    # The runtime, and memory.

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 - CUDA's name
        return 2 if self.refuses_to_register else 0

    def cudaHostUnregister(self, _: int) -> None:  # noqa: N802
        """Nothing to do."""

    def pinned(self, size: int) -> torch.Tensor:
        """Memory that is overwritten when nothing refers to it: so copies that still need it go wrong."""
        whole, alive = np.zeros(max(1, size), np.uint8), [True]
        self._pieces.append((whole, alive))
        given = whole[:size]

        def freed() -> None:
            alive[0] = False
            whole[:] = 0xEE

        weakref.finalize(given, freed).atexit = False
        return torch.from_numpy(given)

    def borrowed(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The tensor, later: memory of ``pinned`` is not kept for that."""
        address = tensor.data_ptr()
        for whole, alive in self._pieces:
            start = address - whole.ctypes.data
            if 0 <= start < len(whole):
                assert tensor.is_contiguous()
                part = whole[start : start + tensor.nbytes]
                return partial(_view, part, alive, tensor.dtype, tensor.shape)
        return lambda: tensor


def _view(
    octets: np.ndarray, alive: list[bool], dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    assert alive[0], "a copy of freed memory"
    return torch.from_numpy(octets).view(dtype).view(shape)


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.todo: deque[Callable[[], object] | Event] = deque()

    def __enter__(self) -> None:
        self._on = self._device.on(self)
        self._on.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._on.__exit__(*raised)

    def is_ready(self) -> bool:
        if not self.todo:
            return False
        return not isinstance(self.todo[0], Event) or self.todo[0].done

    def step(self) -> None:
        first = self.todo.popleft()
        if not isinstance(first, Event):
            first()

    def wait_event(self, event: Event) -> None:
        self.todo.append(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event(self._device)
        event.record(self)
        event.synchronize()


class Event:
    def __init__(
        self, device: Device, _: torch.device | None = None, blocking: bool = False
    ) -> None:
        self._device = device
        self.done = True

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def record(self, stream: Stream) -> None:
        self.done = False
        stream.todo.append(self._end)

    def _end(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.done)


class DeviceTensor(torch.Tensor):
    """A tensor of the latest device that ``tensor_on`` was called with."""

    is_cuda, is_cpu = True, False
    device = torch.device("cuda", 0)
    at: Device

    def record_stream(self, _: Stream) -> None:
        """Python keeps the memory."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if function is torch.Tensor.copy_:
            return cls._copy(*given, **named)
        if function is torch.Tensor.cpu:
            cls.at.current().synchronize()
            return given[0].as_subclass(torch.Tensor).clone()
        return super().__torch_function__(function, types, given, named)

    @classmethod
    def _copy(
        cls, into: torch.Tensor, value: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        place = cls.at.borrowed(into.as_subclass(torch.Tensor))
        found = cls.at.borrowed(value.as_subclass(torch.Tensor))
        cls.at.current().todo.append(lambda: place().copy_(found()))
        if not non_blocking:
            cls.at.current().synchronize()
        return into


def tensor_on(device: Device, values: torch.Tensor) -> torch.Tensor:
    """These values as a tensor of the device."""
    DeviceTensor.at = device
    strided = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
    return strided.copy_(values).as_subclass(DeviceTensor)
