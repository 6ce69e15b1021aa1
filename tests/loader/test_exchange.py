"""Loads in which ranks read for one another: each byte once in a group, everybody's values exact, one story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    ShardedObject,
    ShardedTensor,
    Strategy,
)
from megackpt.backends import ranges
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import open_checkpoint
from megackpt.loader import load_operation
from megackpt.loader.comparison import Comparison, LoadRequest
from megackpt.planning import exchange_plan
from megackpt.storage import kernel
from megackpt.storage.bucket import BucketStorage
from megackpt.storage.files import LocalReader
from megackpt.storage.local import LocalStorage
from megackpt.testing import ThreadedGroup
from tests.buckets import Bucket

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
]  # fmt: skip
PLAIN = ["broadcast", "gather", "broadcast", "gather", "broadcast"]
SHARED = [*PLAIN, "exchange", "gather", "broadcast", "gather", "broadcast"]
SHARED[3:3] = ["gather", "scatter"]
ALWAYS = Strategy(exchange="always")


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def full(dtype: torch.dtype) -> torch.Tensor:
    octets = torch.arange(12 * 8 * dtype.itemsize, dtype=torch.int64) * 37 % 251
    return (
        (octets % 2 if dtype is torch.bool else octets)
        .to(torch.uint8)
        .view(dtype)
        .reshape(12, 8)
    )


def model(rank: int, tp: int, blank: bool = False) -> dict[str, Any]:
    """Tensors of all dtypes, cut along both axes over tp ranks; ranks with the same rank % tp hold the same."""
    t, replica = rank % tp, (0, 0, rank // tp)

    def shard(key: str, whole: torch.Tensor, axis: int) -> ShardedTensor:
        piece = whole.chunk(tp, axis)[t].clone()
        if blank:
            piece.view(torch.uint8).zero_()
        return ShardedTensor.from_rank_offsets(
            key, piece, (axis, t, tp), replica_id=replica
        )

    return {
        **{named(dtype): shard(named(dtype), full(dtype), 0) for dtype in DTYPES},
        "columns": shard("columns", full(torch.float32), 1),
        "bias": ShardedTensor.from_rank_offsets(
            "bias", torch.arange(7.0) * (not blank), replica_id=rank
        ),
        "step": ShardedTensor.from_rank_offsets(
            "step", torch.tensor(0 if blank else 11), replica_id=rank
        ),
        "none": ShardedTensor.from_rank_offsets(
            "none", torch.empty(0, 3), replica_id=rank
        ),
        "object": ShardedObject(
            "object", None if blank else {"who": t}, (tp,), (t,), replica_id=rank // tp
        ),
        "iteration": -1 if blank else 100,
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if isinstance(value, ShardedTensor):
            assert found[key].dtype == value.data.dtype
            a, b = (
                x.contiguous().reshape(-1).view(torch.uint8)
                for x in (found[key], value.data)
            )
            assert torch.equal(a, b), key
        else:
            assert found[key] == (
                value.data if isinstance(value, ShardedObject) else value
            ), key


def saved(directory: Path, strategy: Any, tp: int, ranks: int) -> None:
    ThreadedGroup.run(
        ranks,
        lambda g: megackpt.save(
            model(g.rank, tp), directory, strategy, process_group=g
        ),
    )


def loaded(
    directory: Path, tp: int, ranks: int, strategy: Callable[[int], Any], **options: Any
) -> list[list[str]]:
    """Loads the model at this parallelism and compares it; gives each rank's log of collectives."""

    def run(group: ThreadedGroup) -> list[str]:
        asked = model(group.rank, tp, blank=True)
        objects = [key for key in asked if key == "object" and options.get("reshaped")]
        for key in objects:  # objects cannot be resharded
            del asked[key]
        rest = {name: value for name, value in options.items() if name != "reshaped"}
        state = megackpt.load(
            asked, directory, strategy(group.rank), process_group=group, **rest
        )
        same(
            state, {k: v for k, v in model(group.rank, tp).items() if k not in objects}
        )
        return group.log

    return ThreadedGroup.run(ranks, run)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small tensor is read by itself, as a model's large ones are, and nothing that lies between along with it."""
    monkeypatch.setattr(exchange_plan, "SMALL_READS", 1)
    monkeypatch.setattr(ranges, "SKIP", 0)
    monkeypatch.setattr(ranges, "GAP", 0)


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have no process groups of torch's: here a number stands for one."""
    monkeypatch.setattr(load_operation, "domain_of", lambda group, _: group or 0)


def among(group: int) -> Strategy:
    return Strategy(exchange="always", load_group=group)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, start, bytes) of everything that is read."""
    seen: list[tuple[str, int, int]] = []
    opened, read = LocalStorage.open, LocalReader.read_into

    def open_(self: Any, name: str) -> Any:
        reader = opened(self, name)
        reader.name = name
        return reader

    def read_into(self: Any, start: int, buffers: Any) -> None:
        seen.append((getattr(self, "name", ""), start, sum(b.nbytes for b in buffers)))
        read(self, start, buffers)

    monkeypatch.setattr(LocalStorage, "open", open_)
    monkeypatch.setattr(LocalReader, "read_into", read_into)
    return seen


def times_read(
    directory: Path, seen: list[tuple[str, int, int]], key: str = ""
) -> set[int]:
    """How often the bytes of the checkpoint's chunks (of one tensor) were read."""
    manifest = open_checkpoint(directory).manifest
    counts = {
        name: np.zeros((directory / name).stat().st_size, np.int64)
        for name in manifest.files
    }
    for name, start, nbytes in seen:
        if name in counts:
            counts[name][start : start + nbytes] += 1
    chunks, found = manifest.chunks, set()
    for i, number in enumerate(chunks.tensor.tolist()):
        if chunks.length[i] and key in ("", manifest.tensors[number].key):
            start = int(chunks.start[i])
            part = counts[manifest.files[chunks.file[i]]][
                start : start + int(chunks.length[i])
            ]
            found |= set(part.tolist())
    return found


@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
@pytest.mark.parametrize("verify", [True, False])
def test_replicas_read_each_byte_once(
    tmp_path: Path, strategy: str, verify: bool, reads: list[Any]
) -> None:
    saved(tmp_path, strategy, 2, 4)
    reads.clear()
    format_ = Strategy(strategy, exchange="always")
    logs = loaded(tmp_path, 2, 4, lambda _: format_, verify=verify)
    assert logs == [SHARED] * 4
    assert times_read(tmp_path, list(reads)) == {1}
    reads.clear()
    assert loaded(tmp_path, 2, 4, lambda _: None, verify=verify) == [PLAIN] * 4
    assert times_read(tmp_path, list(reads), "bias") == {4}


@pytest.mark.parametrize(
    ("before", "after", "ranks"), [(1, 2, 4), (2, 1, 3), (2, 4, 4), (4, 2, 2)]
)
def test_each_byte_is_read_once_at_another_parallelism(
    tmp_path: Path, before: int, after: int, ranks: int, reads: list[Any]
) -> None:
    saved(tmp_path, "torch_dist", before, 4)
    reads.clear()
    logs = loaded(tmp_path, after, ranks, lambda _: ALWAYS, verify=False, reshaped=True)
    assert logs == [SHARED] * ranks
    assert times_read(tmp_path, list(reads), "float64") == {1}
    assert times_read(tmp_path, list(reads), "bias") == {1}


def test_two_groups_at_once_and_ranks_that_keep_out(
    tmp_path: Path, numbered: None, reads: list[Any]
) -> None:
    saved(tmp_path, "torch_dist", 2, 6)
    reads.clear()
    assert loaded(tmp_path, 2, 6, lambda rank: among(rank % 2)) == [SHARED] * 6
    assert times_read(tmp_path, list(reads), "float64") == {1}
    assert times_read(tmp_path, list(reads), "bias") == {2}  # once in each group
    reads.clear()
    loaded(tmp_path, 2, 6, lambda rank: among(1) if rank < 3 else None)
    assert times_read(tmp_path, list(reads), "bias") == {4}
    reads.clear()
    auto = Strategy(
        exchange="auto", load_group=7
    )  # a local directory: these read apart
    loaded(tmp_path, 2, 6, lambda rank: among(1) if rank < 3 else auto)
    assert times_read(tmp_path, list(reads), "bias") == {4}
    reads.clear()
    assert loaded(tmp_path, 2, 6, among) == [PLAIN] * 6  # each is a group of its own
    assert times_read(tmp_path, list(reads), "bias") == {6}


def test_ranks_may_ask_in_any_order_and_twice(tmp_path: Path, reads: list[Any]) -> None:
    saved(tmp_path, "torch_dist", 1, 3)

    def run(group: ThreadedGroup) -> None:
        asked, expected = model(group.rank, 1, blank=True), model(group.rank, 1)
        keys = sorted(asked, reverse=group.rank % 2 == 1)
        again = ShardedTensor.from_rank_offsets(
            "float64", torch.zeros(12, 8, dtype=torch.float64)
        )
        order = {
            **({"again": again} if group.rank == 2 else {}),
            **{key: asked[key] for key in keys},
        }
        state = megackpt.load(
            order,
            tmp_path,
            ALWAYS,
            process_group=group,
            validate_access_integrity=False,
        )
        same(state, expected)
        assert group.rank != 2 or torch.equal(state["again"], expected["float64"].data)

    reads.clear()
    ThreadedGroup.run(3, run)
    assert times_read(tmp_path, list(reads)) == {1}


def test_odd_memory_in_small_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Any]
) -> None:
    """Strided targets, regions cut into pieces, messages that end within an element."""
    monkeypatch.setattr(load_operation, "COPY_SIZE", 64)
    saved(tmp_path, "torch_dist", 1, 3)
    reads.clear()

    def run(group: ThreadedGroup) -> None:
        base = torch.full((20, 20), -1.0)
        asked = {
            "a": ShardedTensor.from_rank_offsets(
                "float32", base[3:15, 2:18:2], replica_id=group.rank
            ),
            "b": ShardedTensor.from_rank_offsets(
                "columns", torch.zeros(8, 12).t(), replica_id=group.rank
            ),
            "c": ShardedTensor.from_rank_offsets(
                "complex64",
                torch.zeros(12, 8, dtype=torch.complex64).conj(),
                replica_id=group.rank,
            ),
        }
        state = megackpt.load(asked, tmp_path, ALWAYS, process_group=group)
        assert torch.equal(state["a"], full(torch.float32))
        assert torch.equal(state["b"], full(torch.float32))
        found, expected = (
            torch.view_as_real(x.resolve_conj())
            for x in (state["c"], full(torch.complex64))
        )
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        outside = base.clone()
        outside[3:15, 2:18:2] = -1
        assert (outside == -1).all()

    ThreadedGroup.run(3, run)
    assert times_read(tmp_path, list(reads), "columns") == {1}
    loaded(tmp_path, 1, 3, lambda _: ALWAYS)


def test_converted_values_are_handed_to_those_who_convert_alike(
    tmp_path: Path, reads: list[Any]
) -> None:
    saved(tmp_path, "torch_dist", 1, 1)
    reads.clear()

    def run(group: ThreadedGroup) -> torch.Tensor:
        dtype = torch.float32 if group.rank == 3 else torch.int16
        asked = {
            "w": ShardedTensor.from_rank_offsets(
                "bias", torch.zeros(7, dtype=dtype), replica_id=group.rank
            )
        }
        state = megackpt.load(
            asked,
            tmp_path,
            ALWAYS,
            process_group=group,
            validate_access_integrity=False,
        )
        return state["w"]

    for rank, found in enumerate(ThreadedGroup.run(4, run)):
        assert found.tolist() == list(range(7))
        assert found.dtype == (torch.float32 if rank == 3 else torch.int16)
    assert times_read(tmp_path, list(reads), "bias") == {2}


def test_a_piece_of_what_is_stored_and_more_than_is_stored(
    tmp_path: Path, reads: list[Any]
) -> None:
    saved(tmp_path, "torch_dist", 1, 1)
    reads.clear()

    def run(group: ThreadedGroup) -> None:
        asked = ShardedTensor.from_rank_offsets(
            "float32",
            torch.ones(15, 8),
            replica_id=group.rank,
            allow_shape_mismatch=True,
        )
        found = megackpt.load({"w": asked}, tmp_path, ALWAYS, process_group=group)["w"]
        assert torch.equal(found, torch.cat([full(torch.float32), torch.zeros(3, 8)]))

    ThreadedGroup.run(2, run)
    assert times_read(tmp_path, list(reads), "float32") == {1}


def test_values_that_others_overwrite_are_not_handed_on(
    tmp_path: Path, reads: list[Any]
) -> None:
    """Rank 0 reads two keys into one memory, so what has landed there is not what others want."""
    tensors = {key: torch.arange(8.0) + 10 * i for i, key in enumerate("abcd")}
    megackpt.save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}, tmp_path
    )
    reads.clear()

    def run(group: ThreadedGroup) -> Any:
        memory = {key: torch.zeros(8) for key in tensors}
        if group.rank == 0:
            memory["c"], memory["a"] = memory["b"], torch.zeros(12)[4:]
        asked = {
            k: ShardedTensor.from_rank_offsets(k, t, replica_id=group.rank)
            for k, t in memory.items()
        }
        again = ShardedTensor.from_rank_offsets(
            "b", torch.zeros(8), replica_id=group.rank + 3
        )
        asked["again"] = again
        return megackpt.load(
            asked,
            tmp_path,
            ALWAYS,
            process_group=group,
            validate_access_integrity=False,
        )

    for rank, state in enumerate(ThreadedGroup.run(3, run)):
        for key, expected in {**tensors, "again": tensors["b"]}.items():
            assert torch.equal(state[key], expected) or (rank == 0 and key in "bc"), (
                rank,
                key,
            )
    assert {key: times_read(tmp_path, list(reads), key) for key in tensors} == {
        "a": {1}, "b": {2}, "c": {2}, "d": {1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        (lambda m: [m[:4], m[4:8], m[8:]], []),
        (lambda m: [m[8:], m[:9], m[2:4]], [0, 1, 2]),
        (lambda m: [m[:12], m[1:2], m[3:4], torch.empty(12, device="meta")], [0, 1, 2]),
        (lambda m: [m[:0], m[4:4], torch.empty(3, device="meta"), m[:1]], []),
        (
            lambda m: [m.view(3, 4)[:, :2], m.view(3, 4)[:, 2:], m.clone()],
            [0, 1],
        ),  # may be: they interlock
    ],
)
def test_memory_that_rows_have_in_common(
    tmp_path: Path, views: Any, expected: list[int]
) -> None:
    memory = torch.zeros(12)
    asked = {
        str(i): ShardedTensor.from_rank_offsets(str(i), view)
        for i, view in enumerate(views(memory))
    }
    stored = {
        k: ShardedTensor.from_rank_offsets(k, torch.ones(s.global_shape))
        for k, s in asked.items()
    }
    megackpt.save(stored, tmp_path)
    found = Comparison.of(
        LoadRequest(str(tmp_path), asked), open_checkpoint(tmp_path).manifest, 0
    )
    assert sorted(found.overlapping().tolist()) == expected


# ---- the policy


def test_auto_reads_apart_where_ranks_have_a_page_cache_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "torch_dist", 1, 2)
    auto = FullyParallelLoadStrategyWrapper("torch_dist")
    assert loaded(tmp_path, 1, 2, lambda _: auto) == [PLAIN] * 2
    monkeypatch.setattr(LocalStorage, "is_remote", lambda _: True)
    assert loaded(tmp_path, 1, 2, lambda _: auto) == [SHARED] * 2
    assert loaded(tmp_path, 1, 2, lambda _: None) == [PLAIN] * 2
    never = FullyParallelLoadStrategyWrapper("torch_dist", exchange_algo="never")
    assert loaded(tmp_path, 1, 2, lambda _: never) == [PLAIN] * 2


def test_what_is_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not LocalStorage(tmp_path).is_remote()
    assert not LocalStorage("/proc").is_remote()
    monkeypatch.setattr(
        kernel, "_NETWORKED", frozenset((0x9FA0,))
    )  # as if that of /proc were one
    assert LocalStorage("/proc").is_remote()
    assert not LocalStorage(tmp_path).is_remote()


def test_of_a_bucket_each_byte_is_fetched_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_plan, "SMALL_READS", 1 << 20)
    fetched, opened = Counter[str](), BucketStorage.open

    def open_(self: Any, name: str) -> Any:
        reader = opened(self, name)
        read = reader.read_into

        def read_into(start: int, buffers: Any) -> None:
            fetched["bytes"] += sum(b.nbytes for b in buffers)
            fetched["ranges"] += 1
            read(start, buffers)

        reader.read_into = read_into
        return reader

    monkeypatch.setattr(BucketStorage, "open", open_)
    where: Any = f"{bucket.url}/run/iter_1"
    saved(where, "torch_dist", 1, 4)
    counts = {}
    for strategy in (None, FullyParallelLoadStrategyWrapper(None)):
        fetched.clear()
        assert loaded(where, 1, 4, lambda _, given=strategy: given)[0] == (
            PLAIN if strategy is None else SHARED
        )
        counts[strategy is None] = fetched.copy()
    nbytes = sum(full(dtype).nbytes for dtype in DTYPES)
    assert (
        counts[True]["bytes"] - counts[False]["bytes"] > 2.9 * nbytes
    )  # three more copies
    assert counts[False]["ranges"] < counts[True]["ranges"]


def test_stages_tell_what_was_read_and_what_was_handed_over(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 1, 2)
    events: list[megackpt.Event] = []
    with megackpt.watching(events.append):
        loaded(tmp_path, 1, 2, lambda _: ALWAYS)
    stages = {rank: [e.stage for e in events if e.rank == rank] for rank in (0, 1)}
    assert stages[0] == ["open", "compare", "share", "read", "exchange", "total"]
    assert stages[1] == ["compare", "read", "exchange", "total"]
    each = sum(
        e.bytes for e in events if e.rank == 0 and e.stage in ("read", "exchange")
    )
    assert [e.bytes for e in events if e.stage == "total"] == [2 * each] * 2


def test_a_rank_that_is_alone_exchanges_nothing(tmp_path: Path) -> None:
    megackpt.save(model(0, 1), tmp_path)
    same(megackpt.load(model(0, 1, blank=True), tmp_path, ALWAYS), model(0, 1))


@pytest.mark.parametrize("given", ["zarr", ("zarr", 2), Strategy("zarr"), None])
def test_wrappers_stand_wherever_a_strategy_does(
    tmp_path: Path, given: Any, reads: list[Any]
) -> None:
    saved(
        tmp_path,
        FullyParallelSaveStrategyWrapper("zarr", do_cache_distribution=True),
        2,
        4,
    )
    assert megackpt.get_default_load_sharded_strategy(tmp_path).backend == "zarr"
    reads.clear()
    wrapped = FullyParallelLoadStrategyWrapper(given, exchange_algo="always")
    assert loaded(tmp_path, 2, 4, lambda _: wrapped) == [SHARED] * 4
    assert times_read(tmp_path, list(reads)) == {1}
    assert set(megackpt.load_tensors_metadata(tmp_path, wrapped)) >= {"bias", "columns"}


def test_wrappers_are_values_that_hold_the_policy() -> None:
    backend = TorchDist()
    save = FullyParallelSaveStrategyWrapper(
        Strategy("zarr", balance=False, options={"checksum": False}), "group"
    )
    assert isinstance(save, Strategy)
    assert (save.backend, save.balance, save.dedup_group) == ("zarr", True, "group")
    assert save.options == {"checksum": False}
    assert (save.parallelization_group, save.do_cache_distribution) == ("group", False)
    assert FullyParallelSaveStrategyWrapper(backend).make_backend() is backend
    assert FullyParallelSaveStrategyWrapper(("zarr", 2)).base_strategy == ("zarr", 2)
    load = FullyParallelLoadStrategyWrapper(backend, "group", True)
    assert (load.load_group, load.exchange, load.base_strategy) == (
        "group",
        "auto",
        backend,
    )
    assert load.make_reader(1) is backend
    assert load.do_cache_distribution
    exchanges = Counter(
        FullyParallelLoadStrategyWrapper("zarr", exchange_algo=name).exchange
        for name in (
            "broadcast",
            "gather_rounds",
            "gather_object",
            "auto",
            "always",
            "never",
        )
    )
    assert exchanges == {"auto": 4, "always": 1, "never": 1}
    with pytest.raises(
        megackpt.BackendError,
        match="exchange must be one of 'auto', 'always', 'never', not 'nccl'",
    ):
        FullyParallelLoadStrategyWrapper("zarr", exchange_algo="nccl")
    with pytest.raises(megackpt.BackendError, match="not 5"):
        FullyParallelSaveStrategyWrapper(5)  # type: ignore[arg-type]
