"""The connection between the ranks of one process group, remade when it has failed.

The job's store tells what the broken connections cannot: who was missing, and to a rank that comes late, that the
others have gone on.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megackpt import limits
from megackpt.distributed.failures import LEFT, departure
from megackpt.distributed.waiting import Arrivals, Wait
from megackpt.errors import RankLost

if TYPE_CHECKING:
    import torch.distributed as dist


ADVICE = (
    "The trainer's own process groups are as they were, and the next save or load connects afresh. "
    "Where a rank is only slow, give a longer timeout."
)
LATE = "came late"
REFUSED = "began one while another thread of its process was at work over the same group, and was refused"
LAST_ADVICE = "The control group could not be made anew; the job must restart."

_made: Counter[str] = Counter()


class Line:
    """The connection between the ranks of one process group, remade when it has failed.

    A call is one save or load, with all that goes on with it later. Keys in the job's store, below a prefix for this
    line: ``failed``, the number of the latest call in which the line broke; ``here/C/R``, how rank R came
    out of call C; ``left/C``, some rank says there that it left; ``story/C``, what the coordinator found out about the
    failure of call C.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        from torch.distributed import distributed_c10d, get_process_group_ranks

        name = process_group.group_name
        _made[name] += (
            1  # a later group may have the name of one that was destroyed, in the same store
        )
        self.store = distributed_c10d.PrefixStore(
            f"megackpt/{name}/{_made[name]}", distributed_c10d._get_default_store()
        )
        self.rank, self.size = process_group.rank(), process_group.size()
        self.arrivals = Arrivals(self.store, self.rank, self.size)
        self.global_ranks = get_process_group_ranks(process_group)
        self.call = 0
        self.made_in = 0
        self._late_before = False
        self._told: tuple[int, dict[int, str]] = (
            0,
            {},
        )  # in which call this rank was told last, and of whom
        self.gloo: Any = None  # a ProcessGroupGloo, whose messages torch does not describe to type checkers

    def open(
        self, timeout: timedelta, refused: Sequence[bool] = (), since: int = 0
    ) -> None:
        """Begin a call: connected to all ranks, or a RankFailure.

        ``since``: go on with what that call began, which is over if the line has broken then or later. ``refused``:
        what never came here before this, and whether it would have been a call.
        """
        from torch.distributed import ProcessGroupGloo, distributed_c10d

        self.call += sum(refused)
        try:
            if refused:  # other ranks may be waiting in them
                self.gloo = None
                self._sign(REFUSED)
            self.call += not since
            failed = self._came_through(self.call)
            if failed < (since or self.call) and (
                self.gloo is None or failed >= self.made_in
            ):
                store = distributed_c10d.PrefixStore(f"gloo/{self.call}", self.store)
                self.gloo = None
                self._connect(
                    lambda: ProcessGroupGloo(store, self.rank, self.size, timeout),
                    timeout,
                )
                self.made_in = self.call
        except RuntimeError as error:
            raise self.broken("connect", timeout, error) from error
        if failed < (since or self.call):
            self._late_before = False
            return
        if not since:
            if (
                self._late_before
            ):  # twice running: it has left a call out, and would be behind for ever
                self.call = failed + 1
            self._late_before = not self._late_before
        raise self._given_up(failed)

    def _connect(self, connect: Callable[[], Any], timeout: timedelta) -> None:
        step = self.call, 0
        self.arrivals.post(
            step
        )  # at once, as this thread keeps the store to itself while it connects
        absent = partial(self.arrivals.absent, step)
        with Wait(self.rank, "connect", absent, timeout=timeout.total_seconds()):
            self.gloo = connect()

    def broken(self, stage: str, timeout: timedelta, error: Exception) -> RankLost:
        """Give the connection up, find out who is missing, and say so."""
        try:
            earlier = self._came_through(self.call)
            self._sign("here")  # before the others can notice
            self.gloo = None
            patience = min(limits.MISSING_RANKS_SECONDS, timeout.total_seconds())
            told = self._call_the_roll if self.rank == 0 else self._story
            story = told(self.call, patience)
            if (
                self.made_in <= earlier < self.call
            ):  # the others may have stayed away because of that
                story["missing"] = {
                    **self._story(earlier, 0)["missing"],
                    **story["missing"],
                }
        except (
            RuntimeError
        ) as lost:  # the store's server is gone too, as when rank 0 held it and died
            self.gloo = None
            story = {
                "text": f"the job's store cannot be reached either ({_first_line(lost)})",
                "missing": {},
            }
        missing = {int(rank): str(word) for rank, word in story["missing"].items()}
        self._told = self.call, missing
        who = "; ".join(
            f"rank {rank}{self._globally(rank)} {word}"
            for rank, word in missing.items()
        )
        advice = LAST_ADVICE if stage == "connect" and self.call > 1 else ADVICE
        return RankLost(
            f"the ranks lost one another in the stage {stage!r} (timeout {timeout.total_seconds():g} s): "
            f"{who or story['text']}.\n  torch says: {_first_line(error)}\n  {advice}",
            missing,
        )

    def _globally(self, rank: int) -> str:
        return (
            ""
            if self.global_ranks[rank] == rank
            else f" (global rank {self.global_ranks[rank]})"
        )

    def confirm(self, timeout: timedelta, since: int = 0) -> None:
        """RankLost if any rank has given this up, as after this process was stopped for long."""
        try:
            failed = self._failed()
        except RuntimeError as error:
            raise self.broken("commit", timeout, error) from error
        if failed >= (since or self.call):
            raise self._given_up(failed)

    def parted(self, what: str, since: int, patience: float) -> bool:
        """Say that this rank has given up what that call began; on rank 0: have all, or do they in so many seconds?"""
        try:
            if self._failed() < since:  # nobody may wait for this rank to go on with it
                self._sign("gave it up")
                self.gloo = None
            self.store.set(f"parted/{what}/{self.rank}", "")
            keys = [f"parted/{what}/{rank}" for rank in range(self.size)]
            return self.rank > 0 or _until(lambda: self.store.check(keys), patience)
        except RuntimeError:  # the store is gone: nobody can be heard of
            return False

    def leave(self, reason: BaseException) -> None:
        """Give the connection up because this rank cannot go on; the others notice at once."""
        self.gloo = None
        try:
            self._sign(departure(reason))
            self.store.set(f"left/{self.call}", "")
        except RuntimeError as error:
            reason.add_note(f"the other ranks could not be told: {_first_line(error)}")

    def _sign(self, word: str) -> None:
        self.store.set(self._here(self.call), word)
        if self.rank == 0 and word != "here":  # it is itself who tells it
            self.store.set(
                f"story/{self.call}", json.dumps({"text": "", "missing": {0: word}})
            )
        self.store.set("failed", str(max(self.call, self._failed())))

    def _failed(self) -> int:
        return int(self.store.compare_set("failed", "", "-1"))

    def _came_through(self, call: int) -> int:
        """The latest call in which the line broke; where that is one before this call, this rank was there."""
        failed = self._failed()
        if self.made_in <= failed < call:
            self.store.compare_set(self._here(failed), "", "here")
        return failed

    def _here(self, call: int) -> str:
        return f"here/{call}/{self.rank}"

    def _call_the_roll(self, call: int, patience: float) -> dict[str, Any]:
        keys = [f"here/{call}/{rank}" for rank in range(self.size)]
        _until(
            lambda: self.store.check(keys) or self.store.check([f"left/{call}"]),
            patience,
        )
        missing: dict[int, str] = {}
        for rank, key in enumerate(keys):
            word = (
                self.store.get(key).decode()
                if self.store.check([key])
                else "did not answer"
            )
            if word != "here":
                missing[rank] = word
        left = {rank: word for rank, word in missing.items() if word.startswith(LEFT)}
        gone = {rank: word for rank, word in missing.items() if word != LATE}
        # Who has left says so, and others may not have noticed. Nobody is late where somebody is gone: it was told
        # before he could come.
        missing = left or gone or missing
        story = {
            "text": "every rank is there, but a connection broke",
            "missing": missing,
        }
        self.store.set(f"story/{call}", json.dumps(story))
        return story

    def _story(self, call: int, patience: float) -> dict[str, Any]:
        key = f"story/{call}"
        if _until(
            lambda: self.store.check([key]), 2 * patience + 2
        ):  # who tells it waits as well
            return dict(json.loads(self.store.get(key)))
        return {"text": "", "missing": {0: "did not answer"}}

    def _given_up(self, failed: int) -> RankLost:
        """The others have lost one another in this call, to which this rank comes later, or has come through."""
        self.gloo = None
        if self._told[0] != failed:
            self.store.compare_set(self._here(failed), "", LATE)
            teller = self.rank == 0 and not self.store.check([f"story/{failed}"])
            story = (self._call_the_roll if teller else self._story)(
                failed, limits.MISSING_RANKS_SECONDS / 2
            )
            self._told = (
                failed,
                {int(rank): str(word) for rank, word in story["missing"].items()},
            )
        missing = self._told[1]
        told = (
            "; ".join(f"rank {rank} {word}" for rank, word in missing.items())
            or "a connection was lost"
        )
        late = f"rank {self.rank} comes too late: " if self.rank in missing else ""
        return RankLost(
            f"{late}the other ranks have given this save or load up ({told}). "
            "They were told so too; the next one begins afresh.",
            missing,
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
