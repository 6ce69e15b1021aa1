"""The ranks of the ``ranks`` fixture: processes that load a test file and call one of its functions.

``launch.py FILE FUNCTION CALL`` is one rank. ``launch.py`` alone is a parent that has imported torch and forks ranks,
which saves each of them the seconds of the import: it reads an order (a JSON line) and answers with the exit codes.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist


def main() -> None:
    if call := sys.argv[1:] or next(rank_of_orders(), None):
        run(*call)


def run(file: str, name: str, told: str) -> None:
    call = json.loads(told)
    spec = importlib.util.spec_from_file_location("test_of_ranks", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what the file defines can be pickled
    spec.loader.exec_module(module)
    if call["init"]:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call['rendezvous']}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=30),
        )
    getattr(module, name)(*call["args"])
    if call["init"]:
        dist.destroy_process_group()
        leave()


def leave() -> NoReturn:
    """End this rank well, and at once, after all has been done: Python's exit handlers run, C++'s do not.

    gloo's threads may outlive ``destroy_process_group`` where there were further groups (device meshes, groups of
    libraries), and now and then abort a process that ends as usual (pytorch#190489). That is not what we test.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank_of_orders() -> Iterator[list[str]]:
    """In the parent: carries out orders until there are no more. In a rank: yields its call, once."""
    import hypothesis  # noqa: F401  what most test files import
    import pytest  # noqa: F401
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import megackpt.backends.torch_dist
    import megackpt.backends.zarr
    import megackpt.dcp
    import megackpt.testing  # noqa: F401

    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        pids = []
        for rank in order["ranks"]:
            pid = os.fork()
            if not pid:
                os.chdir(order["directory"])
                become(rank, order["env"] | rank["env"])
                yield order["call"]
                return
            pids.append(pid)
        print(json.dumps(codes(pids, order["timeout"])), flush=True)


def become(rank: dict[str, Any], env: dict[str, str]) -> None:
    """Take this rank's environment and files in place of the parent's."""
    os.environ.clear()
    os.environ.update(env)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for fd, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, rank["out"], flags),
        (2, rank["err"], flags),
    ):
        opened = os.open(path, mode, 0o644)
        os.dup2(opened, fd)
        os.close(opened)


def codes(pids: list[int], timeout: float) -> list[int | None]:
    """How each rank ended; None: it ran longer than ``timeout`` seconds, or the caller is gone, and was killed."""
    deadline = time.monotonic() + timeout
    ended: list[int | None] = []
    for pid in pids:
        end = os.pidfd_open(pid)
        ready, _, _ = select.select(
            [end, sys.stdin], [], [], max(deadline - time.monotonic(), 0)
        )
        if end not in ready:
            os.kill(pid, signal.SIGKILL)
        os.close(end)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.append(code if end in ready else None)
    return ended


if __name__ == "__main__":  # a rank may start processes that import this again
    main()
