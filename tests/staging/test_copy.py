"""Copies of a save: the bytes at the moment of the copy, whatever changes the tensors later, under a cap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.errors import ShardingError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.staging import copy, devices, source as sources
from megackpt.staging.buffers import Buffer, BufferPool, Event, HostCopy
from megackpt.staging.copy import copy_to_host
from megackpt.staging.source import TensorSource, host_array
from tests.cuda.fake import Device

MIB = 1 << 20
DTYPES = [getattr(torch, name) for name in ITEMSIZE if name != OBJECT]
Held = torch.Tensor | Callable[[], bytes]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def source_of(values: Sequence[Held], most: int | None = None) -> TensorSource:
    """The save of these by one rank, in items of at most so many bytes."""
    declared = []
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            meta = TensorMeta(
                tuple(value.shape), str(value.dtype).removeprefix("torch.")
            )
            shard = ShardId(f"k{number}", Box.whole(value.shape))
            declared.append(Declaration(shard, meta, 0, False, value.nbytes, 0))
        else:
            declared.append(
                Declaration(
                    ShardId(f"k{number}", Box((), ())),
                    TensorMeta((), OBJECT),
                    0,
                    False,
                    1,
                    0,
                )
            )
    (plan,), _ = plan_save([Declarations.of(declared)], SavePolicy(max_item_bytes=most))
    return TensorSource(
        plan, list(values), Boxes.of(each.shard.box for each in declared)
    )


def data_of(data: Any, row: int) -> bytes:
    return b"".join(map(bytes, data.blocks(row)))


def all_rows(data: Any, source: TensorSource) -> list[bytes]:
    rows = [data_of(data, row) for row in range(len(source.plan))]
    views = data.views(range(len(rows)), list(map(len, rows)))
    assert any(view is not None for view in views)
    for row, view in zip(rows, views, strict=True):
        assert view is None or view == row
    return rows


def expected(source: TensorSource) -> list[bytes]:
    """The bytes of all rows, the plain way."""
    found = []
    for row, item in enumerate(source.plan.rows()):
        value = source.held[item.source]
        if isinstance(value, torch.Tensor):
            whole = host_array(
                value.detach().resolve_conj().resolve_neg().clone().contiguous()
            )
            found.append(whole[item.shard.box.slices()].tobytes())
        else:
            found.append(value())
        assert len(found[-1]) == item.nbytes or item.meta.is_object, row
    return found


def scramble(source: TensorSource) -> None:
    """Change every tensor's memory in place."""
    for value in source.held:
        if isinstance(value, torch.Tensor):
            octets = torch.tensor([], dtype=torch.uint8).set_(value.untyped_storage())
            octets.bitwise_xor_(1 if value.dtype == torch.bool else 0xFF)


def filled(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(
        0,
        256,
        (int(np.prod(shape)) * dtype.itemsize,),
        dtype=torch.uint8,
        generator=generator,
    )
    if dtype == torch.bool:
        octets %= 2
    return octets.view(dtype).reshape(tuple(shape))


def kinds(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of a dtype, contiguous and not."""
    base = filled((6, 10), dtype, 1)
    made = [
        base.clone(),
        base.clone().t(),
        filled((9, 9), dtype, 2)[2:7, 1::3],
        filled((7,), dtype, 3).expand(4, 7),
        filled((1,), dtype, 4).reshape(()),
        filled((3, 0, 2), dtype, 5),
        filled((0, 2), dtype, 6).t(),
        filled((5, 3), dtype, 7)[1:4],
    ]
    if dtype.is_complex:
        made += [base.clone().conj(), base.clone().t().conj()]
    if dtype in (torch.complex64, torch.complex128):
        made.append(base.clone().conj().imag)
    return made


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    """A pool of this test's own."""
    fresh = BufferPool()
    monkeypatch.setattr(copy, "POOL", fresh)
    return fresh


def copied(source: TensorSource, cap: int = 64 * MIB) -> HostCopy:
    made = copy_to_host(source, cap)
    assert made is not None
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_kinds_may_change_as_soon_as_they_are_copied(
    dtype: torch.dtype,
) -> None:
    blobs = [b"", b"blob" * 1000]
    values: list[Held] = [
        *kinds(dtype),
        *kinds(torch.uint8),
        lambda: blobs[0],
        lambda: blobs[1],
    ]
    for most in (None, 64):  # rows that are all of a tensor, and parts of one
        source = source_of(values, most)
        before = expected(source)
        made = copied(source, MIB)
        scramble(source)
        blobs = [blob + b"changed" for blob in blobs]
        assert all_rows(made, source) == before
        made.release()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_kinds_without_a_copy(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are written where the copy does not fit."""
    monkeypatch.setattr(sources, "COPIED_AT_ONCE", 64)
    monkeypatch.setattr(sources, "_SMALL", 32)
    for most in (None, 64):
        source = source_of([*kinds(dtype), lambda: b"blob"], most)
        rows = expected(source)
        assert all_rows(source, source) == rows


def test_parameters_and_other_subclasses() -> None:
    class Own(torch.Tensor):
        pass

    weight = torch.nn.Parameter(filled((4, 4)))
    source = source_of(
        [
            weight,
            filled((3, 3), seed=1).as_subclass(Own),
            torch.nn.Parameter(filled((4, 2))).t(),
        ]
    )
    before = expected(source)
    made = copied(source)
    with torch.no_grad():
        weight.fill_(7)
    assert all_rows(made, source) == before


def test_a_tensor_that_has_changed_its_size_is_refused() -> None:
    tensor = filled((8, 8))
    declared = source_of([tensor])
    tensor.data = filled((2, 2))
    source = replace(declared)  # made between the declaration and the copy
    with pytest.raises(
        ShardingError,
        match=r"'k0'.* had 256 bytes when it was declared, and has 16 now",
    ):
        copy_to_host(source, 256)
    assert copied(source_of([tensor]), 256)  # the buffer is free again


def test_twenty_saves_take_the_memory_of_one(pool: BufferPool) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    source = source_of([filled((2, MIB), seed=seed) for seed in range(4)])
    buffers, sizes = set(), []
    for _ in range(20):
        made = copied(source)
        buffers.add(made.buffer)
        sizes.append(resident())
        made.release()
        made.release()
    assert len(buffers) == 1
    assert max(sizes) - sizes[0] < 16 * MIB


def test_a_copy_without_references_gives_its_memory_back() -> None:
    source = source_of([filled((MIB,))])
    kept = copied(source, 4 * MIB)
    assert copy_to_host(source, 4 * MIB) is None
    assert data_of(kept, 0) == expected(source)[0]
    del kept
    assert copied(source, 4 * MIB)


@pytest.mark.parametrize("objects", [0, 40])
def test_what_does_not_fit_is_not_copied_and_logged(
    objects: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of([filled((15, 16)), lambda: bytes(objects)])
    assert (copy_to_host(source, 960) is None) == (objects > 0)
    assert ("written before save() returns" in caplog.text) == (objects > 0)
    assert copy_to_host(source, 959) is None
    assert "limit 959 bytes: Strategy(staging_memory=...)" in caplog.text


def test_a_copy_that_a_device_refuses_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/cuda has what happens to the others."""
    Device("copies first").install(monkeypatch)
    pending: list[Event] = []

    def copies() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.zeros(8), torch.ones(8)
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        devices.queue_copies(torch.device("cuda"), copies(), pending)
    (end,) = pending
    end.synchronize()
    devices._side_stream.cache_clear()


@pytest.mark.parametrize("refused", [0, 2])
def test_memory_is_registered_with_devices_once_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    log: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            log.append(f"register {size} at {address}")
            return refused

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            log.append("unregister")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    buffer = Buffer.allocate(65536)
    copy._pin(buffer)
    copy._pin(buffer)
    registered = f"register 65536 at {buffer.memory.ctypes.data}"
    del buffer
    assert log == ([registered] * 2 if refused else [registered, "unregister"])
