"""What only a real device can show, and DTensors, whose test runs on the CPU as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import megackpt
from megackpt import AsyncRequest, ShardedTensor
from megackpt.staging import devices
from megackpt.staging.buffers import Event
from tests.conftest import Ranks

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


def save_and_load_dtensors(device: str, folder: str) -> None:
    """As one of two ranks, which may share a device."""
    mesh = init_device_mesh(device, (2,))
    rank = mesh.get_local_rank()
    for axis in (0, 1):
        local = torch.randn(300, 500).to(device)
        expected = local.cpu().clone()
        saved = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)
        path = f"{folder}/{axis}"
        request = megackpt.save(
            megackpt.sharded({"weight": saved}),
            path,
            async_sharded_save=True,
            wait_staged=False,
        )
        assert request is not None
        request.wait_staged()
        local.fill_(rank)
        request.execute_sync()
        into = torch.zeros(300, 500).to(device)
        target = DTensor.from_local(into, mesh, [Shard(axis)], run_check=False)
        megackpt.load(megackpt.sharded({"weight": target}), path)
        assert torch.equal(into.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_dtensors(ranks: Ranks, tmp_path: Path, device: str) -> None:
    ranks(save_and_load_dtensors, 2, device, tmp_path, timeout=180)


def begun(large: torch.Tensor, path: Path, *, wait_staged: bool) -> AsyncRequest:
    state = {"large": ShardedTensor.from_rank_offsets("large", large)}
    request = megackpt.save(
        state, path, async_sharded_save=True, wait_staged=wait_staged
    )
    assert request is not None
    return request


def copied_before_a_kernel(device: torch.device) -> bool:
    """Whether our copies are complete when a kernel that was queued after them has ended."""
    torch.ones(1024, device=device).add_(1)
    torch.cuda.current_stream(device).synchronize()
    return bool(devices._side_stream(device).query())


@pytest.mark.cuda
def test_kernels_run_while_the_copy_runs(tmp_path: Path) -> None:
    large = torch.randn(1 << 30, device="cuda")  # 4 GiB: some 80 ms or more
    for _ in range(2):  # the first save pins the memory
        begun(large, tmp_path / "d", wait_staged=True)
        assert copied_before_a_kernel(large.device)
    request = begun(large, tmp_path / "d", wait_staged=False)
    assert not copied_before_a_kernel(large.device)
    request.wait_staged()
    assert copied_before_a_kernel(large.device)


@pytest.mark.cuda
def test_tensors_may_be_freed_while_they_are_copied(tmp_path: Path) -> None:
    large = torch.arange(1 << 26, device="cuda")
    request = begun(large, tmp_path / "d", wait_staged=False)
    del large
    others = [torch.full((1 << 26,), -1, device="cuda") for _ in range(4)]
    request.execute_sync()
    found = megackpt.load_plain_tensors(tmp_path / "d")["large"]
    assert torch.equal(found, torch.arange(1 << 26))
    assert all(int(other[0]) == -1 for other in others)


@pytest.mark.cuda
def test_several_streams_of_the_trainer(tmp_path: Path) -> None:
    """The stream that is current when ``save`` and ``wait_staged`` are called is the one that counts."""
    stream = torch.cuda.Stream()
    large = torch.zeros(1 << 28, device="cuda")
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        for number in range(20):
            large.fill_(number)
        request = begun(large, tmp_path / "d", wait_staged=False)
        request.wait_staged()
        large.fill_(-1)
    request.execute_sync()
    found = megackpt.load_plain_tensors(tmp_path / "d")["large"]
    assert bool((found == 19).all())


@pytest.mark.openreg
def test_another_device_has_pinned_memory_and_a_side_stream() -> None:
    import torch_openreg  # noqa: F401

    values = torch.randn(1 << 20)
    tensor = values.to("openreg")
    device = tensor.device
    into = devices.pinned(tensor.nbytes)
    assert into.is_pinned()
    assert devices._side_stream(device) != torch.accelerator.current_stream(device)
    events: list[Event] = []
    devices.queue_copies(device, [(into.view(torch.float32), tensor)], events)
    del tensor  # the copy still reads its memory
    others = [torch.full((1 << 20,), -1.0).to(device) for _ in range(4)]
    events[0].synchronize()
    assert torch.equal(into.view(torch.float32), values)
    assert all(float(other.cpu()[0]) == -1 for other in others)
