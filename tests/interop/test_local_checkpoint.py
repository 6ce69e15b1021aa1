"""MCoreTensorAwareStateDict beside Megatron-Core's own, and in nvidia-resiliency-ext's managers."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
import megackpt.megatron
from megackpt.megatron.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.tree import nested_values
from tests.conftest import PEERS
from tests.interop.test_megatron import NOT_SHARED, assert_same, data_parallel, state

pytestmark = [pytest.mark.megatron, pytest.mark.nvrx]

TP = 2
ROOTS = ("megatron.core.dist_checkpointing", "megackpt.megatron")
MANAGER = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
REPLICAS = "nvidia_resiliency_ext.checkpointing.local.replication.strategies"


def prepared() -> None:
    from interop.megatron_shims import dist_checkpointing

    dist_checkpointing()


def declared(root: str, blank: bool = False) -> dict[Any, Any]:
    """All that this rank declares, but what gloo cannot carry for Megatron."""
    made = state(import_module(f"{root}.mapping"), dist.get_rank(), TP, blank)
    for name in NOT_SHARED:
        del made["model"][f"dtype.{name}"]
    return made


def both() -> None:
    """The same declarations, algorithms and groups: the same division, tensors and results."""
    prepared()
    group = data_parallel(TP)
    for algo in ("atomic", "fully_parallel"):
        theirs, ours = (one_of_both(root, algo, group) for root in ROOTS)
        assert_same(ours, theirs, f"{algo} {dist.get_rank()}")
        for found in (ours[2], ours[5]):
            assert_same(found, declared(ROOTS[1]))


def one_of_both(root: str, algo: str, group: Any) -> list[Any]:
    """What is kept, and given back; the second time with the metadata of the first."""
    kind = import_module(f"{root}.tensor_aware_state_dict").MCoreTensorAwareStateDict
    results: list[Any] = []
    cached = None
    for _ in range(2):
        made, cached = kind.from_state_dict(declared(root), algo, group, cached)
        made.copy_tensors_to_cpu()
        kept = {
            f"{leaf.key} {leaf.global_offset}": leaf.data
            for leaf in nested_values(made.sharded_state_dict)
            if hasattr(leaf, "local_shape") and leaf.data is not None
        }
        kept.pop("empty (0, 0)", None)  # ours keeps it on all ranks
        popped = made.pop_tensors()
        assert made.is_hollow
        made.insert_tensors(popped)
        found = made.to_state_dict(
            declared(root, True), algo, parallelization_group=group
        )
        results += [kept, made.common_state_dict, found]
    return results


def strictness() -> None:
    """What is raised, and which keys are returned: ours raises on all ranks, and returns the keys of all."""
    prepared()
    rank = dist.get_rank()
    for flag in megackpt.StrictHandling:
        for extra in ((), ("asked",)):
            names = ["both", *(extra if rank else ())]
            theirs, ours = (outcomes(root, flag, names) for root in ROOTS)
            if flag.value.startswith("raise") or (
                extra and flag.value == "assume_ok_unexpected"
            ):
                failed = [isinstance(own, str) for own in ours]
                assert failed == [any(isinstance(own, str) for own in theirs)] * 2
                continue
            missing = theirs[0][1] | theirs[1][1] if not extra else ours[0][1]
            assert ours[0] == (["both"], missing, set())
            assert ours[1][1] == missing
            if extra and flag.value != "ignore_all":
                assert ours[1][2] == {"asked"}
            if extra:  # 0.16.1 reports the key, and stumbles over it afterwards
                assert theirs[1] == "AssertionError"
            else:
                assert ours[1] == (["both"], missing, set())


def outcomes(root: str, flag: Any, names: list[str]) -> list[Any]:
    """Of each rank what it gets, or the class of its error."""
    rank = dist.get_rank()
    make = import_module(f"{root}.mapping").ShardedTensor.from_rank_offsets
    kind = import_module(f"{root}.tensor_aware_state_dict").MCoreTensorAwareStateDict

    def some(*names: str) -> dict[str, Any]:
        return {
            name: make(name, torch.ones(4), replica_id=rank if name == "both" else 0)
            for name in names
        }

    made, _ = kind.from_state_dict(some("both", f"stored {rank}"), "atomic")
    outcome: Any
    try:
        found, missing, unexpected = made.to_state_dict(
            some(*names), strict=flag.value, return_mismatch_keys=True
        )
        outcome = sorted(found), missing, unexpected
    except Exception as error:  # noqa: BLE001 - compared
        outcome = type(error).__name__
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, outcome)
    return parts


def managers(folder: str) -> None:
    """Saves and loads of the extension's own manager, with and without copies on another rank."""
    prepared()
    base = import_module("nvidia_resiliency_ext.checkpointing.local.base_state_dict")
    assert issubclass(MCoreTensorAwareStateDict, base.TensorAwareStateDict)
    rank = dist.get_rank()
    group = data_parallel(TP)
    clique = import_module(REPLICAS).CliqueReplicationStrategy
    for copies in (False, True):
        strategy = None
        if copies:
            strategy = clique.from_replication_params(1, 2)
        root = Path(folder, f"copies {copies}")

        def manager(root: Path = root, strategy: Any = strategy) -> Any:
            kind = import_module(MANAGER).LocalCheckpointManager
            return kind(root, repl_strategy=strategy)

        cached = None
        for step, algo in enumerate(("atomic", "fully_parallel", "fully_parallel")):
            given = declared(ROOTS[1])
            made, cached = MCoreTensorAwareStateDict.from_state_dict(
                given, algo, group, cached if step == 2 else None
            )
            manager().save(made, step)
            if copies and step == 2:  # a machine is lost, and another takes its place
                dist.barrier()
                if rank == 1:
                    shutil.rmtree(root / "1")
                dist.barrier()
            again = manager()
            assert again.find_latest() == step
            stored, where = again.load()
            assert where == (step, rank, "")
            found = stored.to_state_dict(
                declared(ROOTS[1], True), algo, parallelization_group=group
            )
            assert_same(found, declared(ROOTS[1]), f"{copies} {step} rank {rank}")


def later(folder: str) -> None:
    """Asynchronous saves through our queue, while training changes the tensors."""
    prepared()
    clique = import_module(REPLICAS).CliqueReplicationStrategy
    kind = import_module(MANAGER).LocalCheckpointManager
    strategy = clique.from_replication_params(1, 2)
    for number, (persistent, replicas) in enumerate(((False, strategy), (True, None))):
        saved_later(kind, f"{folder}/{number}", persistent, replicas)


def saved_later(kind: Any, folder: str, persistent: bool, strategy: Any) -> None:
    rank = dist.get_rank()
    queue = megackpt.AsyncCallsQueue(persistent)
    manager = kind(folder, repl_strategy=strategy)
    for step in range(3):
        weight = torch.full((4,), float(step))
        args = {"step": step}
        given = {
            "w": megackpt.ShardedTensor.from_rank_offsets("w", weight, replica_id=rank),
            "args": args,
        }
        made, _ = MCoreTensorAwareStateDict.from_state_dict(given, "atomic")
        request = manager.save(made, step, is_async=True)
        done: list[int] = []
        request.add_finalize_fn(lambda done=done: done.append(1))
        assert queue.schedule_async_request(request) == step
        weight += 100
        args["step"] += 100
        assert queue.maybe_finalize_async_calls(blocking=True) == [step]
        assert done == [1]
        again = kind(folder, repl_strategy=strategy)
        assert again.find_latest() == step
        found = again.load()[0].to_state_dict(given)
        assert found["args"] == {"step": step}
        assert torch.equal(found["w"], torch.full((4,), float(step)))
    queue.close()


def installed(folder: str) -> None:
    """Programs that import Megatron's name get ours, for Megatron's own objects and files, too."""
    prepared()
    rank = dist.get_rank()
    kind = import_module(MANAGER).LocalCheckpointManager
    root, module = ROOTS[0], f"{ROOTS[0]}.tensor_aware_state_dict"
    theirs = import_module(module).MCoreTensorAwareStateDict
    given, asked = declared(root), declared(root, True)
    made, _ = theirs.from_state_dict(declared(root), "fully_parallel")
    kind(folder, "theirs").save(made, 3)
    with megackpt.megatron.install():
        ours = import_module(module).MCoreTensorAwareStateDict
        assert ours is MCoreTensorAwareStateDict
        made, _ = ours.from_state_dict(given, "fully_parallel")
        kind(folder, "ours").save(made, 3)
        for session in ("theirs", "ours"):
            manager = kind(folder, session)
            assert manager.find_latest() == 3
            stored, _ = manager.load()
            assert type(stored) is ours
            found = stored.to_state_dict(asked, "fully_parallel")
            assert_same(found, declared(ROOTS[1]), f"{session} rank {rank}")


def run(act: Any, nproc: int, ranks: Any, *args: Any) -> None:
    path = os.pathsep.join(map(str, [PEERS.parent, PEERS, PEERS / "nvrx"]))
    ranks(act, nproc, *args, env={"PYTHONPATH": path}, timeout=240)


@pytest.mark.parametrize(("act", "nproc"), [(both, 4), (both, 2), (strictness, 2)])
def test_side_by_side(act: Any, nproc: int, ranks: Any) -> None:
    run(act, nproc, ranks)


@pytest.mark.parametrize(
    ("act", "nproc"), [(managers, 4), (managers, 2), (later, 2), (installed, 2)]
)
def test_in_the_extensions_manager(
    act: Any, nproc: int, tmp_path: Path, ranks: Any
) -> None:
    run(act, nproc, ranks, tmp_path)
