"""Save and load over real processes with gloo: death, replacement under a reader, subgroups, the trainer's groups."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    ShardedObject,
    ShardedTensor,
)

SIZE = 1 << 16


def state(value: float, rank: int, size: int) -> dict[str, Any]:
    """Eight tensors cut over all ranks, one replicated one, and a common value that must go with them."""
    shards: dict[str, Any] = {
        f"w{i}": ShardedTensor.from_rank_offsets(
            f"w{i}", torch.full((SIZE // size,), value), (0, rank, size)
        )
        for i in range(8)
    }
    shards["bias"] = ShardedTensor.from_rank_offsets(
        "bias", torch.full((5,), value), replica_id=rank
    )
    return {**shards, "value": value}


def trainer_still_works() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size()


def save_and_reshard(directory: str) -> None:
    rank = dist.get_rank()
    for strategy in ("torch_dist", "zarr"):
        path = Path(directory) / strategy
        megackpt.save(state(1.0, rank, 4), path, strategy)
        megackpt.save(state(2.0, rank, 4), path, strategy)
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        loaded = megackpt.load(state(0.0, rank % 2, 2), path, process_group=pair)
        assert loaded["value"] == 2.0
        assert all((loaded[f"w{i}"] == 2.0).all() for i in range(8))
        half = Path(directory) / f"{strategy}-half{rank // 2}"
        megackpt.save(
            state(3.0 + rank // 2, rank % 2, 2), half, strategy, process_group=pair
        )
        dist.barrier()
        assert megackpt.load({}, Path(directory) / f"{strategy}-half1")["value"] == 4.0
    trainer_still_works()


def test_resharding_over_processes_and_subgroups(ranks: Any, tmp_path: Path) -> None:
    ranks(save_and_reshard, 4, tmp_path, timeout=120)


def read_once_in_each_group(directory: str) -> None:
    """TP2 x DP2: ranks 0, 2 and ranks 1, 3 hold the same."""
    from megackpt.storage.files import LocalReader

    rank, read = dist.get_rank(), LocalReader.read_into
    counted: list[int] = []  # several threads read: a sum would lose additions

    def read_into(self: Any, start: int, buffers: Any) -> None:
        counted.append(sum(buffer.nbytes for buffer in buffers))
        read(self, start, buffers)

    def held(dtype: torch.dtype, value: float) -> dict[str, Any]:
        data = torch.full((SIZE,), value).to(dtype)
        shards = [
            ShardedTensor.from_rank_offsets(
                f"w{i}", data.clone(), (0, rank % 2, 2), replica_id=rank // 2
            )
            for i in range(40)
        ]
        return {
            "shards": shards,
            "object": ShardedObject(
                "o", {"of": rank % 2}, (2,), (rank % 2,), rank // 2
            ),
        }

    LocalReader.read_into = read_into  # type: ignore[method-assign]
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for dtype, strategy in (
        (torch.float8_e4m3fn, "torch_dist"),
        (torch.complex64, "zarr"),
    ):
        path = Path(directory) / strategy
        megackpt.save(
            held(dtype, 0.5), path, FullyParallelSaveStrategyWrapper(strategy, pair)
        )
        expected = held(dtype, 0.5)["shards"][0].data.view(torch.uint8)
        for group in (pair, None):
            counted.clear()
            wrapper = FullyParallelLoadStrategyWrapper(
                None, group, exchange_algo="always"
            )
            loaded = megackpt.load(held(dtype, 0), path, wrapper)
            assert all(
                torch.equal(found.view(torch.uint8), expected)
                for found in loaded["shards"]
            )
            assert loaded["object"] == {"of": rank % 2}
            total = torch.tensor(sum(counted))
            dist.all_reduce(total)
            nbytes = 2 * 40 * expected.nbytes
            assert nbytes <= int(total) < nbytes * 1.1, (
                int(total),
                nbytes,
            )  # tables of contents, beside
    with pytest.raises(
        megackpt.CheckpointingException, match="load_group must be a process group that"
    ):
        megackpt.load(
            {},
            path,
            FullyParallelLoadStrategyWrapper(None, dist.GroupMember.NON_GROUP_MEMBER),
        )
    trainer_still_works()


def test_ranks_of_a_group_read_each_byte_once(ranks: Any, tmp_path: Path) -> None:
    ranks(read_once_in_each_group, 4, tmp_path, timeout=120)


def one_rank_fails(directory: str) -> None:
    rank = dist.get_rank()
    path = Path(directory) / "ckpt"
    megackpt.save(state(1.0, rank, 4), path)
    broken = state(2.0, rank, 4)
    if rank == 2:
        broken["w3"].data = torch.ones(7)
    with pytest.raises(megackpt.ShardingError, match=r"(?s)rank 2\b.*'w3'"):
        megackpt.save(broken, path)
    trainer_still_works()
    assert megackpt.load(state(0.0, rank, 4), path)["value"] == 1.0
    megackpt.save(state(3.0, rank, 4), path)
    assert megackpt.load(state(0.0, rank, 4), path)["value"] == 3.0


def test_a_failure_is_everybodys_and_the_trainer_goes_on(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(one_rank_fails, 4, tmp_path, timeout=120)


def one_rank_dies(directory: str) -> None:
    from megackpt.backends.torch_dist import TorchDist

    rank = dist.get_rank()
    path = Path(directory) / "ckpt"
    megackpt.save(state(1.0, rank, 3), path)
    write = TorchDist.write

    def killed(self: Any, root: Any, plan: Any, data: Any) -> Any:
        result = write(self, root, plan, data)
        if rank == 1:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    TorchDist.write = killed  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        megackpt.save(state(2.0, rank, 3), path, timeout=timedelta(seconds=8))
    except megackpt.RankFailure as error:
        assert time.monotonic() - start < 40
        print("told:", str(error).replace("\n", " "))
    os._exit(0)  # the default group has lost a rank: leave without a farewell


@pytest.mark.slow
def test_a_killed_rank_is_reported_and_the_old_checkpoint_remains(
    ranks: Any, tmp_path: Path
) -> None:
    finished = ranks(one_rank_dies, 3, tmp_path, timeout=90, check=False)
    assert finished[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert finished[rank].returncode == 0, finished[rank].stderr
        assert "told:" in finished[rank].stdout
    assert megackpt.load({}, tmp_path / "ckpt")["value"] == 1.0
    assert megackpt.verify(tmp_path / "ckpt").ok
    megackpt.save({"value": 5}, tmp_path / "ckpt")
    assert [p.name for p in tmp_path.iterdir() if "megackpt" in p.name] == []


def load_while_replaced(directory: str, rounds: int) -> None:
    """Four ranks read again and again while a fifth, by itself, replaces the checkpoint under them."""
    rank = dist.get_rank()
    path = Path(directory) / "ckpt"
    alone = [dist.new_group([i]) for i in range(5)][rank]
    whole = {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.zeros(SIZE))
        for i in range(8)
    }
    readers = dist.new_group([0, 1, 2, 3])
    if rank == 4:
        for i in range(rounds):
            megackpt.save(state(float(i), 0, 1), path, process_group=alone)
            if i == 0:
                dist.barrier()
            time.sleep(0.05 * (i % 4))
        (Path(directory) / "done").touch()
        dist.barrier()
        return
    dist.barrier()
    seen = set()
    while not (done := _agreed_done(directory, readers)):
        for i in range(8):
            whole[f"w{i}"].replica_id = rank
        try:
            found = megackpt.load(dict(whole), path, process_group=readers)
        except megackpt.CheckpointReplaced:
            continue  # three times in a row: a clear error, on all four ranks
        values = {
            found["value"],
            *(float(v) for i in range(8) for v in found[f"w{i}"].unique()),
        }
        assert len(values) == 1, values
        seen |= values
    assert done
    print(f"rank {rank} saw {len(seen)} different checkpoints")
    dist.barrier()


def _agreed_done(directory: str, group: Any) -> bool:
    flag = torch.tensor(int((Path(directory) / "done").exists()))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def test_a_load_never_mixes_two_checkpoints(ranks: Any, tmp_path: Path) -> None:
    finished = ranks(load_while_replaced, 5, tmp_path, 25, timeout=150)
    seen = [int(re.search(r"saw (\d+)", p.stdout)[1]) for p in finished[:4]]  # type: ignore[index]
    assert min(seen) > 1, "the readers never met a replacement"
