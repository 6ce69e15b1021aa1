"""torchdata's loader with our manager: killed, resumed on other ranks; repartitioned, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import PEERS, ROOT, Ranks
from tests.integrations.programs import Program

pytestmark = pytest.mark.torchdata

REPARTITIONED = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from megackpt import CheckpointManager, CheckpointingException
from megackpt.integrations.data import LoaderState

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
phase = sys.argv[1]


class Numbers(IterableDataset):
    next = 0

    def __iter__(self):
        while self.next < 100:
            self.next += 1
            yield self.next

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def read(loader, batches):
    found = []
    iterator = iter(loader)
    for _ in range(batches):
        found += next(iterator).tolist()
    every = [None] * ranks
    dist.all_gather_object(every, found)
    return sorted(sum(every, []))


def loader(kind, every=1, workers=0, samples=48, seed=0, batch=2):
    data = list(range(samples))
    if kind is Numbers:
        return StatefulDataLoader(Numbers(), batch_size=batch)
    if kind is RandomSampler:
        return StatefulDataLoader(data, batch_size=batch, shuffle=True)
    sampler = kind(data, ranks, rank, seed=seed)
    sampler.set_epoch(3)
    return StatefulDataLoader(
        data, batch_size=batch, sampler=sampler, num_workers=workers, snapshot_every_n_steps=every
    )


KINDS = {"stateful": StatefulDistributedSampler, "plain": DistributedSampler}


def saved(name, loader):
    with CheckpointManager(name) as manager:
        manager.save(1, data=LoaderState(loader))


def restored(name, loader):
    with CheckpointManager(name) as manager:
        manager.restore(data=LoaderState(loader))
    return loader


def refused(name, loader, text):
    try:
        restored(name, loader)
    except CheckpointingException as error:
        assert text in str(error), error
    else:
        raise AssertionError(name)


if phase == "save":
    for name, kind in KINDS.items():
        for workers, every in (0, 1), (2, 2):
            source = loader(kind, every, workers)
            first = read(source, 3)
            saved(f"{name}{workers}", source)
            again = restored(f"{name}{workers}", loader(kind, every, workers))
            saved(f"again{name}{workers}", again)  # before it has read a batch
            everything = sorted(first + read(again, 9))
            assert everything == list(range(48)), (name, workers)
        source = loader(kind)
        assert len(list(source)) == 12
        saved(f"finished{name}", source)
        again = restored(f"finished{name}", loader(kind))
        assert len(list(again)) == 12
    for name, kind in (("random", RandomSampler), ("iterable", Numbers)):
        source = loader(kind)
        read(source, 3)
        saved(name, source)
        again = restored(name, loader(kind))
        assert read(again, 1) == [7, 7, 8, 8] or name == "random"
    for name, batches in ("short", 2), ("uneven", 2 + rank):
        source = loader(StatefulDistributedSampler)
        batch = iter(source)
        for _ in range(batches):
            next(batch)
        saved(name, source)
else:
    for name, kind in KINDS.items():
        for before, workers in ("0", 0), ("2", 0), ("0", 2):
            for prefix in "", "again":
                size = 12 // ranks
                again = restored(f"{prefix}{name}{before}", loader(kind, 1, workers, batch=size))
                rest = read(again, 3)
                order = torch.randperm(48, generator=torch.Generator().manual_seed(3)).tolist()
                assert rest == sorted(order[12:]), (name, rest)
        assert len(list(restored(f"finished{name}", loader(kind)))) == 24 // ranks
    stateful = StatefulDistributedSampler
    refused("random", loader(RandomSampler), "DistributedSampler")
    refused("iterable", loader(Numbers), "DistributedSampler")
    refused("random", loader(stateful), "DistributedSampler")
    refused("stateful0", loader(stateful, samples=50), "order of samples")
    refused("stateful0", loader(stateful, seed=1 if rank == 0 else 0), "order of samples")
    refused("uneven", loader(stateful), "different positions")
    refused("short", loader(stateful), "not divisible by 3")
print("done", flush=True)
dist.destroy_process_group()
"""


def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("data.md", tmp_path, ranks, "torchdata")
    program.survives(2, 1, killed_at=9, saved=2)


@pytest.mark.slow
def test_the_samples_left_are_divided(ranks: Ranks, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REPARTITIONED)
    env = {"PYTHONPATH": f"{ROOT}:{PEERS / 'torchdata'}"}
    for nproc, phase in (2, "save"), (3, "load"):
        done = ranks(program, nproc, phase, timeout=240, env=env, cwd=tmp_path)
        assert "done" in done[0].stdout
