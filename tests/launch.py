"""One rank of the ``ranks`` fixture: loads a test file and calls one of its functions."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist


def main() -> None:
    file, name, told = sys.argv[1:]
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


if __name__ == "__main__":  # a rank may start processes that import this again
    main()
