"""Calls as users write them, for tests/test_typed_calls.py: mypy checks them, nobody runs them.

Where a line is wrong, a comment at its end has the code of mypy's error.
"""

import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megackpt
import megackpt.megatron as dist_checkpointing
from megackpt import (
    AsyncCallsQueue,
    AsyncLoadRequest,
    CheckpointManager,
    Strategy,
    StrictHandling,
)
from megackpt.converter import export_huggingface
from megackpt.testing import ThreadedGroup

PATH = "run/step_1"
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
state = megackpt.sharded({"model": model.state_dict()})


class Data:
    """A data loader that can be resumed."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> bool:
        return bool(state)


# A save and a load.
megackpt.save(state, PATH)
megackpt.save(state, PATH, ("zarr", 2), overwrite=False, timeout=timedelta(minutes=3))
megackpt.save(state, PATH, Strategy(balance=False), process_group=dist.new_group([0]))
megackpt.save(state, PATH, overwite=False)  # call-arg
megackpt.save(state, PATH, timeout=180)  # arg-type
megackpt.save(state, PATH, process_group="gloo")  # arg-type
megackpt.load(state, PATH, strict="raise_all", dtype_policy="error", verify=False)
megackpt.load(state, PATH, strict=StrictHandling.LOG_ALL, key_map={"a": "b"})
megackpt.load(state, PATH, strict=False, key_map=str.lower, trusted=[Data])
megackpt.load(state, PATH, strict="raise")  # arg-type
megackpt.load(state, PATH, dtype_policy="cast")  # arg-type
megackpt.load(state, PATH, verfy=False)  # call-arg
request: AsyncLoadRequest = megackpt.load(state, PATH, asynchronous=True)
request.wait()["model"]
request.wait(timeout=3)  # call-arg
megackpt.load(state, PATH, asynchronous="process")  # arg-type
ThreadedGroup.run(2, lambda group: megackpt.load(state, PATH, process_group=group))
megackpt.sharded(model.state_dict(), replicated="all")
megackpt.sharded(model.state_dict(), replicated="some")  # arg-type
AsyncCallsQueue(on_error="warn")
AsyncCallsQueue(on_error="ignore")  # arg-type

export_huggingface("run", "out", {"a.*": "*"}, "pretrained", cast="bf16", workers=2)
export_huggingface("run", "out", {"a.*": "*"}, {}, overwite=True)  # call-arg

# The checkpoints of a run.
manager = CheckpointManager(
    "run", asynchronous="process", naming="plain", best_mode="max"
)
CheckpointManager("run", asynchronous="processes")  # arg-type
CheckpointManager("run", naming="orbax")  # arg-type
CheckpointManager("run", on_error="log")  # arg-type
CheckpointManager("run", best_mode="smallest")  # arg-type
CheckpointManager("run", keep_lats=3)  # arg-type
manager.on_signal(signal.SIGTERM)
manager.save(1, state, overwrite=False)
manager.save(1, model=model, optimizer=optimizer, scheduler=scheduler, data=Data())
manager.save(1, model=DistributedDataParallel(model), extra={"epoch": 3}, metric=0.5)
manager.save(1, model=model, overwite=False)  # arg-type
manager.save(1, model=model, epoch=3)  # arg-type
found = manager.restore(model=model, optimizer=optimizer, extra={}, strict="log_all")
manager.restore(state, step=3, verify=False, trusted=(Data,))
manager.restore(state, strict="log")  # arg-type
manager.restore(model=model, verfy=False)  # arg-type
print(found.step)  # union-attr

# Under Megatron's names.
dist_checkpointing.save(state, PATH, async_sharded_save=True, overwrite=False)
dist_checkpointing.load(state, PATH, strict="raise_all", verify=False)
dist_checkpointing.load(state, PATH, asynchronous=True)
dist_checkpointing.save(state, PATH, overwite=False)  # call-arg
dist_checkpointing.load(state, PATH, strict="raise")  # arg-type
dist_checkpointing.load(state, PATH, verfy=False)  # call-arg
