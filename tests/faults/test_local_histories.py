"""Random histories of a job that saves on its hosts, against a model of the steps that it may find.

Hosts are lost, leave and come back in any order; the job goes on with fewer or more of them; saves
fail at any write; reads are refused; callers ask for what is not stored; the files that say which
steps count are damaged.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    CheckpointManager,
    LocalTier,
    MismatchError,
    ShardedTensor,
    StorageError,
)
from megackpt.storage import LocalStorage
from megackpt.testing import ThreadedGroup
from tests.faults.share import part

LENGTH = 12
NAMES = ".megackpt-run", ".megackpt-run.copy"
REFUSALS = errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM, errno.EINTR
Found = tuple[int, int]
"""A step, and the value of its tensor, which tells the life that saved it."""
Past = dict[int, int]
"""The value of each step that is complete in the present of the run."""


class Model:
    """What a restore may find. There are several pasts where a save has failed at its end."""

    def __init__(self) -> None:
        self.pasts: list[Past] = [{}]
        self.present = self.pasts

    def find(self, stored: Past, whole: set[Found]) -> list[Found]:
        """``whole``: the local steps of which some host that is there has each piece."""
        newest = {max(stored.items(), default=(-1, -1))}
        return [max(newest | (whole & {*past.items()})) for past in self.pasts]

    def found(self, found: Found, stored: Past, whole: set[Found]) -> None:
        expected = self.find(stored, whole)
        pairs = zip(self.pasts, expected, strict=True)
        self.present = [past for past, other in pairs if other == found]
        assert self.present, (found, expected)

    def saved(self, restored: int, saves: Past, is_certain: bool = True) -> None:
        after = [
            {s: v for s, v in past.items() if s <= restored} | saves
            for past in self.present
        ]
        self.pasts = after if is_certain else self.pasts + after


class History:
    """A job on the hosts of one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.count = self.dice.randint(2, 4)
        self.options = {
            "copies": self.dice.choice([0, 1, 1]),
            "generations": self.dice.choice([2, 2, 3]),
        }
        self.model = Model()
        self.values: dict[str, Found] = {}
        self.stored: Past = {}
        self.garbage: dict[str, bytes] = {}

    @property
    def unknown(self) -> bool:
        """Whether both files that say which local steps count are still as they were damaged."""
        files = {
            path.name: path for path in (self.folder / "run").glob(".megackpt-run*")
        }
        return all(
            name in files and files[name].read_bytes() == self.garbage.get(name)
            for name in NAMES
        )

    def manager(self, hosts: list[int], group: ThreadedGroup) -> CheckpointManager:
        host = f"host{hosts[group.rank]}"
        local = LocalTier(self.folder / host, self.every, host=host, **self.options)
        return CheckpointManager(
            self.folder / "run",
            local=local,
            save_interval=self.interval,
            process_group=group,
        )

    def whole(self, hosts: list[int], life: int) -> set[Found]:
        """The local steps of which these hosts have all pieces."""
        held: dict[str, set[str]] = {}
        for host in hosts:
            for piece in self.folder.glob(f"host{host}/*/step_*/rank_*"):
                if re.fullmatch("rank_[0-9]_of_[0-9]", piece.name):
                    held.setdefault(piece.parent.name, set()).add(piece.name)
        for name in held:
            step = int(name.split("_")[1])
            self.values.setdefault(name, (step, 100 * life + step))
        return {
            self.values[name]
            for name, ranks in held.items()
            if len(ranks) == int(min(ranks)[-1])
        }

    def run(
        self, hosts: list[int], work: Callable[[CheckpointManager, ThreadedGroup], Any]
    ) -> Any:
        def rank(group: ThreadedGroup) -> Any:
            with self.manager(hosts, group) as manager:
                return work(manager, group)

        return ThreadedGroup.run(len(hosts), rank)

    def restore(self, hosts: list[int], asked: str = "w") -> Found | None:
        def restore(manager: CheckpointManager, group: ThreadedGroup) -> Found:
            value = torch.zeros(LENGTH // group.size)
            place = 0, group.rank, group.size
            state = {asked: ShardedTensor.from_rank_offsets(asked, value, place)}
            found = manager.restore(state)
            if found is None:
                return -1, -1
            (only,) = {*value.int().tolist()}
            return found.step, only

        (outcome,) = {*self.run(hosts, restore)}
        return outcome

    def live(self, life: int) -> None:
        dice = self.dice
        hosts = dice.sample(range(self.count), dice.randint(1, self.count))
        for host in range(self.count):
            if dice.random() < 0.15:
                shutil.rmtree(self.folder / f"host{host}", ignore_errors=True)
        self.every = dice.choice([1, 1, 2, 3, 1000])
        self.interval = dice.choice([3, 5, 7, 1000])
        if dice.random() < 0.2:
            self.damage()
        whole = set() if self.unknown else self.whole(hosts, life)
        if dice.random() < 0.3:
            self.disturb(hosts, life)
        found = self.restore(hosts)
        self.model.found(found, self.stored, whole)
        restored = found[0]
        last = restored + dice.randint(0, 4)
        budget = dice.choice([None, dice.randint(1, 60)])
        with failing(self.folder, budget):
            self.train(hosts, life, restored, last)
        self.whole(range(self.count), life)

    def train(self, hosts: list[int], life: int, restored: int, last: int) -> None:
        """Save steps up to the last one, or until a save fails."""
        done: Past = {}
        begun: list[int] = []

        def train(manager: CheckpointManager, group: ThreadedGroup) -> None:
            value = torch.zeros(LENGTH // group.size)
            place = 0, group.rank, group.size
            state = {"w": ShardedTensor.from_rank_offsets("w", value, place)}
            found = manager.restore(state)
            assert (found.step if found else -1) == restored
            for step in range(restored + 1, last + 1):
                value.fill_(100 * life + step)
                if manager.should_save(step):
                    if not group.rank:
                        begun.append(step)
                    manager.save(step, state)
                    if not group.rank:
                        done[step] = 100 * life + step

        with suppress(StorageError):
            self.run(hosts, train)
        complete = {
            step.step: 100 * life + step.step
            for step in CheckpointManager(self.folder / "run").steps()
            if step.complete and step.step > restored
        }
        self.stored |= complete
        done |= complete
        if done:
            self.model.saved(restored, done)
        last = begun[-1] if begun else 0
        if begun and last not in done and last % self.every == 0:
            doubt = done | {last: 100 * life + last}
            self.model.saved(restored, doubt, is_certain=False)

    def damage(self) -> None:
        if not (self.folder / "run" / NAMES[0]).exists():
            return
        both = self.dice.random() < 0.3
        for name in NAMES[: 1 + both]:
            self.garbage[name] = self.dice.randbytes(100)
            (self.folder / "run" / name).write_bytes(self.garbage[name])

    def disturb(self, hosts: list[int], life: int) -> None:
        """Restores that raise, of the right class. They change nothing."""
        whole = set() if self.unknown else self.whole(hosts, life)
        expected = self.model.find(self.stored, whole)
        if self.dice.random() < 0.5:
            raised, text, damage = MismatchError, "other", nullcontext()
        else:
            number = self.dice.choice(REFUSALS)
            raised, text = StorageError, os.strerror(number)
            damage = refusing(self.folder / f"host{self.dice.choice(hosts)}", number)
        with damage:
            try:
                asked = "other" if raised is MismatchError else "w"
                found = self.restore(hosts, asked)
            except raised as error:
                found = None
                if text not in str(error) or {*expected} == {(-1, -1)}:
                    raise
        if found is not None:
            assert found in expected
            assert raised is StorageError or found == (-1, -1)


@contextmanager
def failing(folder: Path, budget: int | None) -> Iterator[None]:
    """After so many writes all others fail, as where the job is killed."""
    numbers = count()

    def wrap(name: str, patch: pytest.MonkeyPatch) -> None:
        real = getattr(LocalStorage, name)

        def write(self: LocalStorage, *args: Any, **options: Any) -> Any:
            if budget is not None and next(numbers) >= budget:
                raise StorageError("killed")
            return real(self, *args, **options)

        patch.setattr(LocalStorage, name, write)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "rename", "create", "delete", "exchange", "rename_new"):
            wrap(name, patch)
        yield


@contextmanager
def refusing(folder: Path, number: int) -> Iterator[None]:
    """The data of pieces in this folder cannot be opened."""
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        fd = real(path, *args, **options)
        where = os.readlink(f"/proc/self/fd/{fd}")
        if where.startswith(str(folder)) and where.endswith(".distcp"):
            os.close(fd)
            raise OSError(number, os.strerror(number))
        return fd

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr("megackpt.limits.RETRY_SECONDS", 0.0)
        yield


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(part(300)), marks=pytest.mark.campaign)]
)
def test_histories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seeds: range, note: Any
) -> None:
    caplog.set_level(logging.CRITICAL, "megackpt")
    lives = 0
    for seed in seeds:
        history = History(tmp_path / str(seed), seed)
        for life in range(1, 9):
            try:
                history.live(life)
            except BaseException as error:
                error.add_note(f"seed {seed}, life {life}")
                raise
            lives += 1
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
    note(("histories", "lives"), len(seeds), lives)
