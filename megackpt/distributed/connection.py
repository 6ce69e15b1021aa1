"""The connection between the ranks of one process group, remade when it has failed.

Broken connections do not show which ranks are missing, or to a late rank that the others have continued. Ranks
write that to the job's store.
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
LAST_ADVICE = "The control group could not be made again; the job must restart."

_made: Counter[str] = Counter()


class Connection:
    """The connection between the ranks of one process group, remade when it has failed.

    A *call* is one save or load, including its asynchronous completion. Keys in the job's store, below a
    prefix for this connection: ``failed``, the latest call in which the connection failed; ``here/C/R``,
    the status of rank R after call C; ``left/C``, set by a rank that left; ``story/C``, the coordinator's
    report on the failure of call C.
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
        self._reported: tuple[int, dict[int, str]] = (
            0,
            {},
        )  # the last reported call, and its missing ranks
        self.gloo: Any = None  # a ProcessGroupGloo, whose messages torch does not describe to type checkers

    def open(
        self, timeout: timedelta, refused: Sequence[bool] = (), since: int = 0
    ) -> None:
        """Start a call: connect to all ranks, or raise RankFailure.

        ``since``: continue with that call, which has failed if the connection has failed then or later.
        ``refused``: earlier steps that were refused to threads, and whether each would have been a call.
        """
        from torch.distributed import ProcessGroupGloo, distributed_c10d

        self.call += sum(refused)
        try:
            if refused:  # other ranks may be waiting in them
                self.gloo = None
                self._post_status(REFUSED)
            self.call += not since
            failed = self._last_failure(self.call)
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
        """Give up the connection, and find the missing ranks. Returns the error to raise."""
        try:
            earlier = self._last_failure(self.call)
            self._post_status("here")  # before the others can notice
            self.gloo = None
            patience = min(limits.MISSING_RANKS_SECONDS, timeout.total_seconds())
            read = self._find_missing_ranks if self.rank == 0 else self._read_report
            report = read(self.call, patience)
            if (
                self.made_in <= earlier < self.call
            ):  # the others may have stayed away because of that
                report["missing"] = {
                    **self._read_report(earlier, 0)["missing"],
                    **report["missing"],
                }
        except (
            RuntimeError
        ) as lost:  # the store's server is gone too, as when rank 0 held it and died
            self.gloo = None
            report = {
                "text": f"the job's store cannot be reached either ({_first_line(lost)})",
                "missing": {},
            }
        missing = {int(rank): str(word) for rank, word in report["missing"].items()}
        self._reported = self.call, missing
        who = "; ".join(
            f"rank {rank}{self._globally(rank)} {word}"
            for rank, word in missing.items()
        )
        advice = LAST_ADVICE if stage == "connect" and self.call > 1 else ADVICE
        return RankLost(
            f"the ranks lost one another in the stage {stage!r} (timeout {timeout.total_seconds():g} s): "
            f"{who or report['text']}.\n  torch says: {_first_line(error)}\n  {advice}",
            missing,
        )

    def _globally(self, rank: int) -> str:
        return (
            ""
            if self.global_ranks[rank] == rank
            else f" (global rank {self.global_ranks[rank]})"
        )

    def confirm(self, timeout: timedelta, since: int = 0) -> None:
        """Raise RankLost if any rank has given this up, as after this process was stopped for long."""
        try:
            failed = self._failed()
        except RuntimeError as error:
            raise self.broken("commit", timeout, error) from error
        if failed >= (since or self.call):
            raise self._given_up(failed)

    def parted(self, what: str, since: int, patience: float) -> bool:
        """Give up the operation of a call. On rank 0: whether all ranks do within so many seconds."""
        try:
            if self._failed() < since:  # no rank may wait for this one to continue
                self._post_status("gave it up")
                self.gloo = None
            self.store.set(f"parted/{what}/{self.rank}", "")
            keys = [f"parted/{what}/{rank}" for rank in range(self.size)]
            return self.rank > 0 or _until(lambda: self.store.check(keys), patience)
        except RuntimeError:  # the store is gone
            return False

    def leave(self, reason: BaseException) -> None:
        """Give up the connection because this rank leaves; the others notice at once."""
        self.gloo = None
        try:
            self._post_status(departure(reason))
            self.store.set(f"left/{self.call}", "")
        except RuntimeError as error:
            reason.add_note(
                f"the other ranks could not be notified: {_first_line(error)}"
            )

    def _post_status(self, word: str) -> None:
        self.store.set(self._here(self.call), word)
        if self.rank == 0 and word != "here":  # rank 0 writes the report itself
            self.store.set(
                f"story/{self.call}", json.dumps({"text": "", "missing": {0: word}})
            )
        self.store.set("failed", str(max(self.call, self._failed())))

    def _failed(self) -> int:
        return int(self.store.compare_set("failed", "", "-1"))

    def _last_failure(self, call: int) -> int:
        """The latest call in which the connection failed. Posts that this rank was present in it."""
        failed = self._failed()
        if self.made_in <= failed < call:
            self.store.compare_set(self._here(failed), "", "here")
        return failed

    def _here(self, call: int) -> str:
        return f"here/{call}/{self.rank}"

    def _find_missing_ranks(self, call: int, patience: float) -> dict[str, Any]:
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
        # Prefer ranks that announced their exit, then ranks that vanished. Report ranks as late only if
        # there are neither.
        missing = left or gone or missing
        report = {
            "text": "every rank is there, but a connection broke",
            "missing": missing,
        }
        self.store.set(f"story/{call}", json.dumps(report))
        return report

    def _read_report(self, call: int, patience: float) -> dict[str, Any]:
        key = f"story/{call}"
        if _until(
            lambda: self.store.check([key]), 2 * patience + 2
        ):  # rank 0 waits as well
            return dict(json.loads(self.store.get(key)))
        return {"text": "", "missing": {0: "did not answer"}}

    def _given_up(self, failed: int) -> RankLost:
        """The error of a rank that comes later to a call in which the connection failed."""
        self.gloo = None
        if self._reported[0] != failed:
            self.store.compare_set(self._here(failed), "", LATE)
            reporter = self.rank == 0 and not self.store.check([f"story/{failed}"])
            report = (self._find_missing_ranks if reporter else self._read_report)(
                failed, limits.MISSING_RANKS_SECONDS / 2
            )
            self._reported = (
                failed,
                {int(rank): str(word) for rank, word in report["missing"].items()},
            )
        missing = self._reported[1]
        who = (
            "; ".join(f"rank {rank} {word}" for rank, word in missing.items())
            or "a connection was lost"
        )
        late = f"rank {self.rank} comes too late: " if self.rank in missing else ""
        return RankLost(
            f"{late}the other ranks have given this save or load up ({who}). "
            "They have raised this as well; the next one starts afresh.",
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
