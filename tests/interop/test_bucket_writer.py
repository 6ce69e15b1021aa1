"""One bucket, written by Megatron-Core's FileSystemWriterAsync and by ours: what each puts into its queues."""

from __future__ import annotations

import inspect
import queue
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.megatron


def results_of(root: str, folder: Path, bucket: Any) -> tuple[int, Any]:
    """What one call, as Megatron's worker makes it, puts into its queue."""
    module = import_module(f"{root}.strategies.filesystem_async")
    transforms = module.FileSystemWriterAsync(folder).transforms
    results: Any = queue.Queue()
    count: Any = queue.Queue()
    count.put(4)
    module.FileSystemWriterAsync.write_preloaded_data(
        [transforms], 4, bucket, results, count, True
    )
    count.join()
    found: tuple[int, Any] = results.get_nowait()
    return found


def in_line(root: str, folder: Path, bucket: Any) -> Any:
    """A replacement of the function that starts Megatron's processes."""
    module = import_module(f"{root}.strategies.filesystem_async")
    kind = module.FileSystemWriterAsync
    results: Any = queue.Queue()

    def without_processes(
        transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any
    ) -> None:
        local: Any = queue.Queue()
        count: Any = queue.Queue()
        outcome = {}
        for number, one in enumerate(buckets):
            count.put(number)
            kind.write_preloaded_data(transforms, number, one, local, count, True)
            outcome.update([local.get()])
        results.put(outcome)

    kind.write_preloaded_data_multiproc = staticmethod(without_processes)
    transforms = [kind(folder).transforms]
    kind.write_preloaded_data_multiproc(transforms, False, 0, [bucket], results)
    return results.get_nowait()


def both(where: str) -> None:
    from torch.distributed.checkpoint import DefaultSavePlanner

    import megackpt.megatron.strategies.filesystem_async as ours

    folder, planner = Path(where), DefaultSavePlanner()
    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    planner.set_up_planner(state, is_coordinator=True)
    items = planner.create_local_plan().items
    pairs = [(item, planner.resolve_data(item)) for item in items]
    objects = [pair for pair in pairs if not isinstance(pair[1], torch.Tensor)]
    tensors = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
    assert len(objects) == len(tensors) == 1
    roots = "megatron.core.dist_checkpointing", "megackpt.megatron"
    theirs = import_module(f"{roots[0]}.strategies.filesystem_async")
    assert theirs.FileSystemWriterAsync is not ours.FileSystemWriterAsync

    stored = []
    for number, root in enumerate(roots):
        (folder / str(number)).mkdir()
        path = folder / str(number) / "__0_0.distcp"
        bucket = str(path), path.name, (objects, tensors)
        place, results = results_of(root, folder, bucket)
        assert place == 4
        assert {type(result).__name__ for result in results} == {"WriteResult"}
        stored.append([result.index for result in results])
        by_index = {result.index: result for result in results}
        info = by_index[tensors[0][0].index].storage_data
        info = getattr(info, "info", info)
        assert info.relative_path == path.name
        with open(path, "rb") as file:
            file.seek(info.offset)
            assert torch.equal(torch.load(file), state["w"])
        again = in_line(root, folder, bucket)
        assert [result.index for result in again[0]] == stored[-1]

        bad = str(path.parent / "no" / "x"), "x", (objects, tensors)
        place, error = results_of(root, folder, bad)
        assert place == 4
        assert isinstance(error, Exception)
        assert "No such file" in str(error)
    assert stored[0] == stored[1]

    for name in ("write_preloaded_data", "preload_tensors"):
        expected, found = (
            inspect.signature(getattr(module.FileSystemWriterAsync, name))
            for module in (theirs, ours)
        )
        assert list(found.parameters) == list(expected.parameters)


def test_side_by_side(tmp_path: Path, ranks: Any, peers: Any) -> None:
    ranks(both, 1, tmp_path, env=peers, timeout=240)
