"""Saves from a device and loads into it: bit for bit, whatever training does as soon as it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    AsyncCallsQueue,
    CheckpointManager,
    CorruptCheckpoint,
    ShardedTensor,
)
from tests.cuda.conftest import MIB, Laboratory
from tests.cuda.fake import Device

Tensors = dict[str, torch.Tensor]


def made(lab: Laboratory) -> tuple[Tensors, Tensors]:
    """Values, and the same as tensors of the device: large, small, strided, empty, lazily conjugated."""
    seeded = torch.Generator().manual_seed(0)

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=seeded).to(dtype)

    values = {
        "large": filled(640, 1024),
        "transposed": filled(256, 384).t(),
        "sliced": filled(64, 4096)[:, 1::3],
        "bfloat16": filled(300, 1000, dtype=torch.bfloat16),
        "small": filled(7),
        "number": filled(),
        "empty": filled(0, 3),
        "complex": filled(200, 200, dtype=torch.complex64),
        "flags": filled(70000) > 0,
    }
    tensors = {name: lab.tensor(value) for name, value in values.items()}
    return values, tensors


def state(tensors: Tensors) -> dict[str, Any]:
    return {
        name: ShardedTensor.from_rank_offsets(name, tensor)
        for name, tensor in tensors.items()
    }


def check(found: Tensors, values: Tensors) -> None:
    for name, value in values.items():
        stored = found[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(stored, value.contiguous().view(-1).view(torch.uint8)), name


def loaded(lab: Laboratory, path: Path, values: Tensors) -> Tensors:
    """What a load puts into tensors of the device, of the same strides."""
    targets = {
        name: lab.tensor(torch.empty_like(value).fill_(1))
        for name, value in values.items()
    }
    megackpt.load(state(targets), path)
    return {name: lab.values(target) for name, target in targets.items()}


@pytest.mark.parametrize(
    "format", ["torch_dist", pytest.param("safetensors", marks=pytest.mark.slow)]
)
def test_a_save_and_a_load(lab: Laboratory, tmp_path: Path, format: str) -> None:
    values, tensors = made(lab)
    megackpt.save(state(tensors), tmp_path / "d", format)
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)
    check(loaded(lab, tmp_path / "d", values), values)


@pytest.mark.parametrize(
    "persistent", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_training_goes_on_as_soon_as_save_returns(
    lab: Laboratory, tmp_path: Path, persistent: bool
) -> None:
    values, tensors = made(lab)
    queue = AsyncCallsQueue(persistent)
    for number in range(2):  # the second one into the same buffer
        for name, value in values.items():
            tensors[name].copy_(value)
        path = tmp_path / str(number)
        request = megackpt.save(state(tensors), path, async_sharded_save=True)
        for tensor in tensors.values():
            lab.fill(tensor, number)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        check(megackpt.load_plain_tensors(path), values)
    queue.close()


def test_kernels_run_until_the_tensors_are_changed(
    lab: Laboratory, tmp_path: Path
) -> None:
    values, tensors = made(lab)
    other = lab.tensor(torch.zeros(4))
    lab.fill(tensors["large"], 2)  # the copy waits for what was queued before
    values["large"].fill_(2)
    request = megackpt.save(
        state(tensors), tmp_path / "d", async_sharded_save=True, wait_staged=False
    )
    lab.fill(other, 3)
    if lab.fake is not None:
        lab.fake.run_training()
        assert other.tolist() == [3] * 4  # though no copy was waited for
    request.wait_staged()
    request.wait_staged()
    for tensor in tensors.values():
        lab.fill(tensor, 5)
    request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)
    assert lab.values(other).tolist() == [3] * 4
    request.wait_staged()  # after the end, too


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_copy_follows_the_kernels_queued_before(
    lab: Laboratory, tmp_path: Path, asynchronous: bool
) -> None:
    values = {"large": torch.full((640, 1024), 2.0)}
    tensors = {"large": lab.tensor(torch.zeros(640, 1024))}
    lab.fill(tensors["large"], 2)
    request = megackpt.save(
        state(tensors), tmp_path / "d", async_sharded_save=asynchronous
    )
    if request is not None:
        request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)


def test_without_the_wait_training_may_be_faster_than_the_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the tests above would notice a copy that nothing waits for."""
    fake = Device("training first")
    fake.install(monkeypatch)
    lab = Laboratory(fake)
    values, tensors = made(lab)
    request = megackpt.save(
        state(tensors), tmp_path / "d", async_sharded_save=True, wait_staged=False
    )
    lab.fill(tensors["large"], 5)
    request.execute_sync()
    found = megackpt.load_plain_tensors(tmp_path / "d")
    assert (found["large"] == 5).all()
    check({**found, "large": values["large"]}, values)


@pytest.mark.slow
def test_memory_that_cannot_be_pinned(
    lab: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, tensors = made(lab)
    if lab.fake is not None:
        lab.fake.refuses_to_register = True
    elif lab.kind == "cuda":  # other devices never register the buffer
        runtime = torch.cuda.cudart()
        register = type(runtime).__getattribute__(runtime, "cudaHostRegister")

        class Runtime:
            """Memory that is registered already is refused, by CUDA itself."""

            def cudaHostRegister(self, *given: int) -> int:  # noqa: N802 - CUDA's name
                assert int(register(*given)) == 0
                return int(register(*given))

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    request = megackpt.save(
        state(tensors), tmp_path / "d", async_sharded_save=True, wait_staged=False
    )
    for tensor in tensors.values():
        lab.fill(tensor, 5)  # the copy was complete when save returned
    request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)


@pytest.mark.slow
def test_a_save_that_does_not_fit_is_written_from_the_device(
    lab: Laboratory, tmp_path: Path
) -> None:
    values, tensors = made(lab)
    small = megackpt.Strategy("torch_dist", staging_memory=MIB)
    request = megackpt.save(
        state(tensors),
        tmp_path / "d",
        small,
        async_sharded_save=True,
        wait_staged=False,
    )
    for tensor in tensors.values():
        lab.fill(tensor, 5)
    request.wait_staged()
    request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)


def test_a_load_converts_and_checks(lab: Laboratory, tmp_path: Path) -> None:
    values, tensors = made(lab)
    megackpt.save(state(tensors), tmp_path / "d")
    half = {
        name: lab.tensor(value.to(torch.bfloat16))
        for name, value in values.items()
        if value.dtype == torch.float32
    }
    for tensor in half.values():
        lab.fill(tensor, 9)
    megackpt.load(state(half), tmp_path / "d")
    expected = {name: values[name].to(torch.bfloat16) for name in half}
    check({name: lab.values(tensor) for name, tensor in half.items()}, expected)
    # A flipped bit in the middle of the largest tensor.
    (file,) = (tmp_path / "d").glob("__0_0.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(values["large"][320].numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="'large'"):
        megackpt.load(state(tensors), tmp_path / "d")


@pytest.mark.slow
def test_the_manager_gives_the_request(lab: Laboratory, tmp_path: Path) -> None:
    values, tensors = made(lab)
    with CheckpointManager(tmp_path / "run", asynchronous=True) as checkpoints:
        request = checkpoints.save(1, state(tensors), wait_staged=False)
        assert request is not None
        request.wait_staged()
        for tensor in tensors.values():
            lab.fill(tensor, 5)
        assert checkpoints.save(2, state(tensors), asynchronous=False) is None
    check(megackpt.load_plain_tensors(checkpoints.path(1)), values)


def test_tensors_of_the_cpu_are_copied_when_save_returns(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(600, 1000), "strided": torch.randn(30, 40).t()}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    request = megackpt.save(
        state(tensors), tmp_path / "d", async_sharded_save=True, wait_staged=False
    )
    for tensor in tensors.values():
        tensor.zero_()
    request.wait_staged()
    request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "d"), values)
    megackpt.AsyncRequest(None, (), []).wait_staged()  # one made by hand
