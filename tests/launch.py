"""One rank of the ``ranks`` fixture: loads a test file and calls one of its functions."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from datetime import timedelta

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


if __name__ == "__main__":  # a rank may start processes that import this again
    main()
