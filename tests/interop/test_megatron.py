"""Megatron-Core 0.16.1 itself, in processes of its own: it reads what we save, we read what it saves, bit for bit."""

from __future__ import annotations

import io
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.checkpoint import open_checkpoint
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.testing import ThreadedGroup
from tests.bits import bits, octets

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

DTYPES = [name for name in ITEMSIZE if name != OBJECT]
UNEVEN = {1: (11,), 2: (7, 4), 4: (5, 0, 4, 2)}
BUCKETS = (0, 3, 4, 9, 15, 20)
TPS = (1, 2, 4)  # on 4 ranks: times DP 4, 2, 1
SAVED = ("tp4", "tp2", "tp2 shared", "tp1 shared", "tp2 hinted")
# What Megatron's wrapper for loading cannot carry from rank to rank over gloo, broadcast or pickled.
NOT_SHARED = [
    name for name in DTYPES if name.startswith(("float8", "uint16", "uint32", "uint64"))
]
NOT_SHARED += ["int16", "complex32"]
CONTENT = {"singleton_local_shards": False, "kinds": ["a", "b"]}


# ---- one state, declared alike with Megatron's classes and with ours


def whole() -> dict[str, torch.Tensor]:
    """Every tensor of the state by key, as no rank holds it."""
    return {
        **{f"dtype.{name}": bits((8, 4), name, i) for i, name in enumerate(DTYPES)},
        "layers.weight": bits((4, 8, 3), "bfloat16", 100),
        "experts.weight": bits((2, 4, 4, 2), "float32", 101),
        "glu": bits((16, 3), "float32", 102),
        "uneven": bits((11, 2), "float32", 103),
        "buckets": bits((BUCKETS[-1],), "float64", 104),
        "vocab": bits((12, 2), "float16", 105),
        "norm": bits((7,), "float32", 106),
        "step": torch.tensor(11),
        "empty": torch.empty(0, 5),
    }


def common() -> dict[Any, Any]:
    return {
        "iteration": 100,
        "checkpoint_version": 3.0,
        "args": Namespace(
            lr=0.125,
            betas=(0.9, 0.95),
            dtype=torch.bfloat16,
            out=PosixPath("a/b"),
            none=None,
        ),
        "optimizer": {
            "param_groups": [{"lr": 0.5, "params": [0, 1]}, {"lr": 0.25, "params": [2]}]
        },
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
        "array": np.arange(4, dtype=np.uint32),  # of arrays Megatron trusts these alone
        "shape": torch.Size([2, 3]),
        7: "a key that is no text",
    }


def state(lib: Any, rank: int, tp: int, blank: bool = False) -> dict[Any, Any]:
    """What this rank holds at TP = ``tp`` (fastest) x DP; ``lib`` has the classes. Blank: to be loaded into."""
    t, d = rank % tp, rank // tp
    full = {
        key: torch.zeros_like(tensor) if blank else tensor
        for key, tensor in whole().items()
    }

    def cut(key: str, axis: int) -> torch.Tensor:
        return full[key].chunk(tp, axis)[t].clone()

    def sharded(key: str, axis: int) -> Any:
        return lib.ShardedTensor.from_rank_offsets(
            key, cut(key, axis), (axis, t, tp), replica_id=(0, 0, d)
        )

    def replicated(key: str) -> Any:
        return lib.ShardedTensor.from_rank_offsets(
            key, full[key].clone(), replica_id=(0, t, d)
        )

    def prepended(key: str, *at: int) -> Any:
        counts = full[key].shape
        piece = full[key][at].chunk(tp)[t].clone()
        places = [(axis, number, counts[axis]) for axis, number in enumerate(at)]
        return lib.ShardedTensor.from_rank_offsets(
            key,
            piece,
            *places,
            (len(at), t, tp),
            replica_id=(0, 0, d),
            prepend_axis_num=len(at),
        )

    def run(key: str, start: int, stop: int, copy: int = 0) -> Any:
        piece = full[key][start:stop].clone()
        begin = (start, *(0,) * (piece.dim() - 1))
        shape, total = tuple(piece.shape), tuple(full[key].shape)
        return lib.ShardedTensor(
            key, piece, piece.dtype, shape, total, begin, None, (0, copy, d)
        )

    def halves(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[Any]:
        return [
            lib.ShardedTensor.from_rank_offsets(
                key, part.clone(), (0, t + i * tp, 2 * tp), replica_id=replica
            )
            for i, part in enumerate(data.chunk(2))
        ]

    glu = torch.cat([part.chunk(tp)[t] for part in full["glu"].chunk(2)])
    start = sum(UNEVEN[tp][:t])
    return {
        "model": {
            **{
                key: sharded(key, i % 2)
                for i, key in enumerate(full)
                if key.startswith("dtype.")
            },
            "layers": [prepended("layers.weight", i) for i in range(4)],
            "experts": {
                f"{i}.{j}": prepended("experts.weight", i, j)
                for i in range(2)
                for j in range(4)
            },
            "glu": lib.ShardedTensorFactory("glu", glu, halves, torch.cat, (0, 0, d)),
            "vocab": sharded("vocab", 0),
            "norm": replicated("norm"),
        },
        "uneven": run("uneven", start, start + UNEVEN[tp][t]),
        "buckets": [
            run("buckets", BUCKETS[i], BUCKETS[i + 1]) for i in range(5) if i % tp == t
        ],
        "step": replicated("step"),
        "empty": run(
            "empty", 0, 0, copy=t
        ),  # in a regular grid Megatron divides by its size
        "rng": lib.ShardedObject(
            "rng_state", None if blank else [{"tp": t}], (1, tp), (0, t), d
        ),
        "stream": lib.ShardedObject(
            "stream", None if blank else io.BytesIO(b"octets"), (1,), (0,), rank
        ),
        "extra": [
            lib.ShardedObject("extra._state", {"i": i}, (3,), (i,), rank)
            for i in range(3)
        ],
        "local": lib.LocalNonpersistentObject(rank),
        **({} if blank else common()),
    }


def pair(lib: Any, rank: int, *values: str | None) -> dict[str, Any]:
    """Two objects under one name."""
    return {
        f"pair {i}": lib.ShardedObject("pair", value, (1,), (0,), rank)
        for i, value in enumerate(values)
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """``expected`` may be declared: then its data counts. Tensors are compared by their bits."""
    if hasattr(expected, "replica_id"):
        expected = expected.data
    if hasattr(expected, "unwrap"):
        expected = expected.unwrap()
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{where}/{i}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert octets(found) == octets(expected), where
    elif isinstance(expected, io.BytesIO):
        assert found.getvalue() == expected.getvalue(), where
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected, where, strict=True)
    else:
        assert type(found) is type(expected), where
        assert found == expected, where


def loaded_equals(
    load: Callable[[dict[Any, Any]], Any],
    lib: Any,
    rank: int,
    tp: int,
    saved_tp: int,
    without: Sequence[str] = (),
) -> None:
    """``load`` fills this rank's blank state at TP = ``tp``; objects that belong to a TP rank only at their own.

    ``without``: dtypes that are not asked for.
    """
    asked, expected = state(lib, rank, tp, blank=True), state(lib, rank, tp)
    for either in (asked, expected):
        if tp != saved_tp:
            del either["rng"]
        for name in without:
            del either["model"][f"dtype.{name}"]
    assert_same(
        load(asked), {**expected, "content_metadata": CONTENT}, f"TP {tp} rank {rank}"
    )


# ---- what Megatron's processes do


def data_parallel(tp: int) -> dist.ProcessGroup:
    """The group of the ranks that hold copies of what this rank holds."""
    size = dist.get_world_size()
    mine, _ = dist.new_subgroups_by_enumeration(
        [list(range(t, size, tp)) for t in range(tp)]
    )
    return mine


def megatron_reads(folder: str) -> None:
    """On 4 ranks: all of what we saved, at each parallelism; each rank by itself, and shared among copies."""
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
    )

    rank = dist.get_rank()
    for tp in TPS:
        copies = data_parallel(tp)
        strategies = {
            "each by itself": TorchDistLoadShardedStrategy(),
            **{
                exchange: FullyParallelLoadStrategyWrapper(
                    TorchDistLoadShardedStrategy(), copies, exchange_algo=exchange
                )
                for exchange in ("broadcast", "gather_object")
                if copies.size() > 1
            },
        }
        for saved_tp, (name, strategy) in product(TPS, strategies.items()):
            load = partial(
                peer.load,
                checkpoint_dir=f"{folder}/tp{saved_tp}",
                sharded_strategy=strategy,
            )
            without = () if name == "each by itself" else NOT_SHARED
            loaded_equals(load, mapping, rank, tp, saved_tp, without)
    megatron_asks_around(peer, f"{folder}/tp2")
    we_take_what_megatron_declares(f"{folder}/again")
    dist.barrier()


def we_take_what_megatron_declares(folder: str) -> None:
    from megatron.core.dist_checkpointing import mapping

    megackpt.save(state(mapping, dist.get_rank(), 2), folder, content_metadata=CONTENT)
    loaded_equals(
        partial(megackpt.load, checkpoint_dir=folder), mapping, dist.get_rank(), 1, 2
    )


def megatron_asks_around(peer: Any, folder: str) -> None:
    """The other ways to read a checkpoint."""
    from megatron.core.dist_checkpointing import mapping, serialization

    rank, full, stored = (
        dist.get_rank(),
        whole(),
        {**common(), "content_metadata": CONTENT},
    )
    assert_same(peer.load_common_state_dict(folder), stored)
    assert_same(peer.load_content_metadata(folder), CONTENT)
    assert_same(peer.load_plain_tensors(folder), {**full, **stored})
    doubled = pair(mapping, rank, None, None)
    two = peer.load(
        doubled, str(Path(folder).parent / "pair"), validate_access_integrity=False
    )
    assert_same(two, pair(mapping, 0, "one", "two"))
    for found, ours in (
        (
            serialization.load_tensors_metadata(folder),
            megackpt.load_tensors_metadata(folder),
        ),
        (
            serialization.load_sharded_metadata(folder),
            megackpt.load_sharded_metadata(folder),
        ),
    ):
        described = {key: description(value) for key, value in ours.items()}
        assert {key: description(value) for key, value in found.items()} == described
    wider = mapping.ShardedTensor.from_rank_offsets(
        "vocab",
        torch.ones(4, 2, dtype=torch.float16),
        (0, rank, 4),
        allow_shape_mismatch=True,
    )
    padded = torch.cat([full["vocab"], torch.zeros(4, 2, dtype=torch.float16)])
    assert_same(
        peer.load({"vocab": wider}, folder)["vocab"], padded[4 * rank : 4 * rank + 4]
    )


def description(declared: Any) -> tuple[Any, ...]:
    """What metadata says of a tensor or an object."""
    dtype = getattr(declared, "dtype", None)
    return (
        declared.key,
        dtype,
        tuple(declared.global_shape),
        tuple(declared.global_offset),
    )


def megatron_saves(folder: str) -> None:
    """On 4 ranks: each by itself, with the work shared among copies, and with files of their own for the layers."""
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistSaveShardedStrategy,
    )

    def plain(**options: Any) -> Any:
        return TorchDistSaveShardedStrategy("torch_dist", 1, **options)

    strategies = {
        "tp4": plain(),
        "tp2": plain(),
        "tp2 shared": FullyParallelSaveStrategyWrapper(plain(), data_parallel(2), True),
        "tp1 shared": FullyParallelSaveStrategyWrapper(plain()),
        "tp2 hinted": plain(separation_hint="layers"),
    }
    for name, strategy in strategies.items():
        declared = state(mapping, dist.get_rank(), int(name[2]))
        where = Path(folder) / name
        where.mkdir(exist_ok=True)
        dist.barrier()
        peer.save(declared, str(where), strategy, content_metadata=dict(CONTENT))
    where = Path(folder) / "pair"
    where.mkdir(exist_ok=True)
    dist.barrier()
    declared = pair(mapping, dist.get_rank(), "one", "two")
    peer.save(
        declared, str(where), validate_access_integrity=False
    )  # which takes the two for doubled
    dist.barrier()


# ---- tests


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by us at each TP on 4 ranks."""
    folder = tmp_path_factory.mktemp("ours")

    def run(group: ThreadedGroup) -> None:
        for tp in TPS:
            declared = state(megackpt, group.rank, tp)
            megackpt.save(
                declared,
                folder / f"tp{tp}",
                content_metadata=CONTENT,
                process_group=group,
            )
        declared = pair(megackpt, group.rank, "one", "two")
        megackpt.save(
            declared,
            folder / "pair",
            validate_access_integrity=False,
            process_group=group,
        )

    ThreadedGroup.run(4, run)
    return folder


@pytest.fixture(scope="module")
def theirs(
    tmp_path_factory: pytest.TempPathFactory, ranks: Any, peers: dict[str, str]
) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    ranks(megatron_saves, 4, folder, env=peers, timeout=240)
    return folder


def test_megatron_reads_what_we_save(
    ours: Path, ranks: Any, peers: dict[str, str]
) -> None:
    ranks(megatron_reads, 4, ours, env=peers, timeout=240)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 1), (4, 1), (2, 2)])
def test_we_read_what_megatron_saves(theirs: Path, name: str, tp: int, dp: int) -> None:
    def run(group: ThreadedGroup) -> None:
        loaded_equals(
            lambda asked: megackpt.load(
                asked, theirs / name, process_group=group, dtype_policy="error"
            ),
            megackpt,
            group.rank,
            tp,
            int(name[2]),
        )

    ThreadedGroup.run(tp * dp, run)


@pytest.mark.parametrize("name", SAVED)
def test_the_whole_of_what_megatron_saves(theirs: Path, name: str) -> None:
    assert_same(megackpt.load_plain_tensors(theirs / name), whole())
    assert_same(
        megackpt.load_common_state_dict(theirs / name),
        {**common(), "content_metadata": CONTENT},
    )
    assert megackpt.load_content_metadata(theirs / name) == CONTENT
    report = megackpt.verify(theirs / name)
    assert report.ok, report
    assert report.checked
    assert not report.foreign


def test_objects_under_one_name(theirs: Path) -> None:
    found = megackpt.load(
        pair(megackpt, 0, None, None), theirs / "pair", validate_access_integrity=False
    )
    assert found == {"pair 0": "one", "pair 1": "two"}


def test_flipped_bytes_in_megatrons_files_are_found(
    theirs: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(theirs / "tp2", tmp_path / "ckpt")
    manifest = open_checkpoint(folder).manifest
    content = {
        "layers.weight": octets(whole()["layers.weight"])[-8:],
        "rng_state": b"\x80\x02",
    }
    files = set()
    for key, some in content.items():
        location = manifest.chunks_of(key)[-1].location
        data = bytearray((folder / location.file).read_bytes())
        data[data.index(some, location.start) + 1] ^= 4
        (folder / location.file).write_bytes(data)
        files.add(location.file)
    report = megackpt.verify(folder)
    assert len(report.problems) == 2
    for told in (*content, *files):
        assert any(told in problem for problem in report.problems), told


def test_megatrons_checkpoint_is_replaced_by_ours(theirs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(theirs / "tp2", tmp_path / "ckpt")
    (folder / "notes.txt").write_text("not ours")
    (folder / "latest.json").write_text("{}")
    megackpt.save(
        {"only": megackpt.ShardedTensor.from_rank_offsets("only", torch.ones(3))},
        folder,
    )
    assert_same(megackpt.load_plain_tensors(folder), {"only": torch.ones(3)})
    assert (folder / "notes.txt").read_text() == "not ours"
    assert megackpt.verify(folder).foreign == ("latest.json", "notes.txt")
