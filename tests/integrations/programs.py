"""Programs, most of them of documentation pages, run on ranks that are killed and started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PEERS, ROOT, Ranks

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNER = """
import builtins, logging, os, signal, sys, time

program, last = sys.argv[1], sys.argv[2]
sys.argv = [program]
show = builtins.print

def show_and_die(*values, **options):
    show(*values, **options)
    time.sleep(0.1)  # a step of a real model takes longer than a save
    if values and str(values[0]).startswith(last):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = show_and_die
logs = logging.StreamHandler()
logs.setFormatter(logging.Formatter("%(levelname)s of %(name)s: %(message)s"))
logging.getLogger("megackpt").addHandler(logs)
import torch
torch.set_num_threads(1)
exec(compile(open(program).read(), program, "exec"), {"__name__": "__main__"})
sys.stdout.flush()
"""
FSDP_ON_CPU = """
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

start = AcceleratorState.__init__


def start_with_fsdp(self, *args, fsdp_plugin=None, **options):
    start(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = start_with_fsdp
"""
"""Before a program: accelerate uses FSDP on accelerators only, and drops the plug-in on CPUs."""


UNDISTURBED: dict[tuple[str, int], dict[int, float]] = {}
"""Page or file, and ranks -> the losses of a run; those of variants of the program are the same."""


class Program:
    """A program, which prints a line ``step N: LOSS`` for each step.

    Args:
        page: the page of docs/integrations with the whole program, or a file of tests/integrations.
    """

    def __init__(self, page: str, folder: Path, ranks: Ranks, *peers: str) -> None:
        if page.endswith(".py"):
            self.source = Path(__file__).with_name(page).read_text(encoding="utf-8")
        else:
            text = (ROOT / "docs" / "integrations" / page).read_text(encoding="utf-8")
            self.source = max(FENCE.findall(text), key=len)
        self._page = page
        self._folder = folder
        self._ranks = ranks
        self.log = ""
        self._env = {
            "PYTHONPATH": ":".join([str(ROOT), *(str(PEERS / peer) for peer in peers)])
        }

    def run(
        self, nproc: int, run: str, *, killed_at: int | None = None
    ) -> dict[int, float]:
        """Step -> loss of one life of a run; its rank 0 dies at the step ``killed_at``."""
        folder = self._folder / run
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(self.source)
        (folder / "runner.py").write_text(RUNNER)
        last = f"step {killed_at}:" if killed_at else "never"
        done = self._ranks(
            folder / "runner.py", nproc, folder / "train.py", last,
            timeout=240, check=killed_at is None, env=self._env | {"HOME": str(folder)}, cwd=folder,
        )  # fmt: skip
        self.log = "".join(each.stderr for each in done)
        if killed_at is not None:
            assert done[0].returncode == -9, done[0].stderr[-3000:]
        lines = re.findall(r"^step (\d+): (\S+)$", done[0].stdout, re.MULTILINE)
        assert lines, done[0].stdout + done[0].stderr[-3000:]
        return {int(step): float(loss) for step, loss in lines}

    def resumes_without_a_warning(self, longer: str, shorter: str) -> None:
        """A run that ended after fewer steps goes on, and megackpt logs no WARNING."""
        assert longer in self.source
        whole = self.source
        self.source = whole.replace(longer, shorter)
        first = self.run(2, "resumed")
        self.source = whole
        second = self.run(2, "resumed")
        assert min(second) == max(first) + 1
        assert "WARNING of megackpt" not in self.log

    def survives(
        self,
        nproc: int,
        others: int,
        *,
        killed_at: int,
        saved: int,
        by: Program | None = None,
    ) -> None:
        """A run killed at a step resumes, not at its beginning, with the losses of another run.

        Args:
            others: the number of ranks that resume.
            saved: the step of a save that was complete before.
            by: the program that resumes.
        """
        if (self._page, nproc) not in UNDISTURBED:
            UNDISTURBED[self._page, nproc] = self.run(nproc, "undisturbed")
        undisturbed = UNDISTURBED[self._page, nproc]
        steps = max(undisturbed)
        assert set(undisturbed) == set(range(1, steps + 1))
        first = self.run(nproc, "killed", killed_at=killed_at)
        second = (by or self).run(others, "killed")
        assert saved < min(second) <= killed_at + 1
        assert max(second) == steps
        assert set(first) == set(range(1, killed_at + 1))
        for step, loss in [*first.items(), *second.items()]:
            assert loss == pytest.approx(undisturbed[step], abs=2e-6), step
