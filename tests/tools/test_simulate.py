"""The simulator: what it says of plans, files and bytes is what real saves and loads do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import ShardedTensor
from megackpt.backends.base import Backend
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.distributed import messages, process_group
from megackpt.distributed.wire_format import pack
from megackpt.errors import CheckpointingException
from megackpt.planning.manifest import Declarations, Manifest
from megackpt.state import dtype_named
from megackpt.storage import FileReader, LocalStorage
from megackpt.strategies import backend_named
from megackpt.testing import ThreadedGroup

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from simulation import charts, simulator, wire  # noqa: E402 - next to the tool, which finds them so
from simulation.model import Model  # noqa: E402
from simulation.parallelism import Parallelism  # noqa: E402

sys.path.remove(str(TOOLS))

DENSE = Model(layers=4, hidden=64, ffn=96, heads=8, groups=4, vocabulary=500)
LARGE = Model(
    layers=1,
    hidden=1024,
    ffn=2048,
    heads=8,
    groups=4,
    vocabulary=3000,
    optimizer="none",
)
MIXED = Model(
    layers=2,
    hidden=48,
    ffn=64,
    heads=4,
    groups=2,
    vocabulary=300,
    experts=4,
    dtype="float16",
)
CASES = [
    (DENSE, Parallelism(2, 2, 2), Parallelism(4, 1, 1)),
    (DENSE, Parallelism(1, 1, 4), Parallelism(1, 2, 2)),
    (MIXED, Parallelism(1, 2, 4, 2), Parallelism(2, 1, 4, 4)),
    (
        Model(layers=2, hidden=64, ffn=96, heads=8, groups=4, distributed=False),
        Parallelism(2, 1, 2),
        None,
    ),
    (LARGE, Parallelism(2, 1, 1), Parallelism(1, 1, 2)),
]
IDS = [
    "TP2 PP2 DP2",
    "ZeRO over DP4",
    "experts",
    "replicated optimizer",
    "cells that are shards",
]


def state_of(part: Declarations) -> dict[str, Any]:
    """The state dict of a rank that declares this, but for the common state."""
    state: dict[str, Any] = {"iteration": 7}
    for i, row in enumerate(part.rows()):
        if row.meta.is_object:
            continue
        box, dtype = row.shard.box, dtype_named(row.meta.dtype)
        data = (
            torch.arange(box.volume, dtype=torch.float32).to(dtype).reshape(box.shape)
        )
        whole = row.meta.shape
        cuts = tuple(
            max(1, n // max(1, s)) for n, s in zip(whole, box.shape, strict=True)
        )
        state[f"{i}"] = ShardedTensor(
            row.shard.key,
            data,
            dtype,
            box.shape,
            whole,
            box.offset,
            cuts,
            row.replica_id,
        )
    return state


def really_saved(
    parts: Sequence[Declarations], folder: Path, to: str
) -> list[list[str]]:
    def save(group: ThreadedGroup) -> list[str]:
        megackpt.save(state_of(parts[group.rank]), folder, to, process_group=group)
        return group.log

    return ThreadedGroup.run(len(parts), save)


def places(manifest: Manifest) -> dict[tuple[str, str], tuple[str, int, int, int]]:
    """Of each chunk, by key and box: file, start, length, writer."""
    found = {}
    for row, number in enumerate(manifest.chunks.tensor.tolist()):
        chunk = manifest.chunk(row)
        at = chunk.location
        found[manifest.tensors[number].key, str(chunk.box)] = (
            at.file,
            at.start,
            at.length,
            chunk.writer,
        )
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The bytes of every read, by the name of the file."""
    done: dict[str, list[int]] = {}
    lock = threading.Lock()
    opened = LocalStorage.open

    class Watched(FileReader):
        def __init__(self, inner: FileReader, name: str) -> None:
            self.inner, self.name, self.size = inner, name, inner.size

        def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
            self.inner.read_into(start, buffers)
            with lock:
                done.setdefault(self.name, []).append(sum(map(len, buffers)))

        def close(self) -> None:
            self.inner.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(
        LocalStorage, "open", lambda self, name: Watched(opened(self, name), name)
    )
    return done


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
@pytest.mark.parametrize(("model", "job", "target"), CASES, ids=IDS)
def test_a_simulated_save_and_load_are_the_real_ones(
    tmp_path: Path,
    reads: dict[str, list[int]],
    model: Model,
    job: Parallelism,
    target: Parallelism | None,
    to: str,
) -> None:
    model = model.padded(job.tensor)
    logs = really_saved(model.declared(job), tmp_path / "real", to)
    real = open_checkpoint(tmp_path / "real").manifest
    common = real.chunks_of("common_state")[0].location.length
    foretold = simulator.simulate_save(model, job, backend_named(to), common)
    assert places(foretold.manifest) == places(real)
    written = np.bincount(real.chunks.writer, real.chunks.length, job.ranks)
    assert foretold.written.tolist() == written.tolist()
    assert foretold.all_files == len(real.files)
    for name, size in foretold.small.items():
        assert (tmp_path / "real" / name).stat().st_size == size, name
    assert (tmp_path / "real" / "megackpt.index").stat().st_size == foretold.index
    stored = {
        p.relative_to(tmp_path / "real").as_posix()
        for p in (tmp_path / "real").rglob("*")
        if p.is_file()
    }
    assert stored == {*real.files, *foretold.small, "megackpt.index"}
    assert logs == [list(simulator.SAVE_COLLECTIVES)] * job.ranks
    if target is not None:
        check_load(model, target, foretold, tmp_path / "real", reads)


def check_load(
    model: Model,
    job: Parallelism,
    save: simulator.Save,
    folder: Path,
    reads: dict[str, list[int]],
) -> None:
    foretold = simulator.simulate_load(model, job, save)
    parts = model.declared(job)
    reads.clear()

    def load(group: ThreadedGroup) -> list[str]:
        megackpt.load(
            state_of(parts[group.rank]), folder, process_group=group, verify=False
        )
        return group.log

    assert (
        ThreadedGroup.run(job.ranks, load)
        == [list(simulator.LOAD_COLLECTIVES)] * job.ranks
    )
    data = {
        name: sizes
        for name, sizes in reads.items()
        if name.endswith(".distcp") or "/c." in name
    }
    assert sum(map(sum, data.values())) == foretold.read.sum()
    assert sum(map(len, data.values())) == foretold.requests.sum()


def test_what_ranks_send_is_what_is_counted() -> None:
    save = simulator.simulate_save(
        DENSE.padded(2), Parallelism(2, 1, 2), backend_named("torch_dist")
    )
    parts = DENSE.padded(2).declared(Parallelism(2, 1, 2))
    assert save.gathered.tolist() == [len(pack(part)) for part in parts]
    assert save.rows == sum(map(len, parts))


OPERATIONS = ["first save", "next save", "load"]


def counted(directory: str, *job: int) -> None:
    """A rank of a real group: what it has sent after each operation, and its connections."""
    messages.FAN_OUT = 2
    held = state_of(DENSE.padded(2).declared(Parallelism(*job))[dist.get_rank()])
    counts = []
    for operation in OPERATIONS:
        if operation == "load":
            megackpt.load(held, directory)
        else:
            megackpt.save(held, directory)
        ((group,),) = (kept.values() for kept in process_group._known.values())
        sent = group.tree.counts
        counts.append([sent["messages"], sent["bytes"], len(group.tree._links)])
    dist.barrier()  # a rank that ends closes its connections, which others may count still
    print(json.dumps(counts))


@pytest.mark.parametrize(
    "job", [(2, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)]
)
def test_the_wire_is_that_of_real_ranks(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: tuple[int, ...]
) -> None:
    """In two or three levels: connections, messages and bytes of each rank are as foretold."""
    monkeypatch.setattr(messages, "FAN_OUT", 2)
    monkeypatch.setattr(wire, "DIRECTORY", str(tmp_path / "c"))
    size = math.prod(job)
    done = ranks(counted, size, tmp_path / "c", *job, timeout=120)
    told = np.array([json.loads(rank.stdout) for rank in done])
    real = open_checkpoint(tmp_path / "c").manifest
    common = real.chunks_of("common_state")[0].location.length
    save = simulator.simulate_save(
        DENSE.padded(2),
        Parallelism(*job),
        backend_named("torch_dist"),
        common,
        milliseconds=real.milliseconds,
    )
    before = np.zeros_like(told[:, 0])
    for number, operation in enumerate(OPERATIONS):
        foretold = save.wires[operation]
        assert foretold.levels == size.bit_length() - 1
        sent = told[:, number] - before
        before = told[:, number]
        assert before[:, 2].tolist() == foretold.connections.tolist()
        assert sent[:, 0].tolist() == foretold.messages.tolist(), operation
        assert sent[:, 1].tolist() == foretold.sent.tolist(), operation
        assert foretold.sent.sum() == foretold.received.sum()


def test_the_tree_of_16384_ranks() -> None:
    """At most 130 connections in any process, and three levels."""
    empty = np.zeros(16_384, np.int64)
    tree = wire.first_save(wire.SaveMessages(empty, empty, empty), 0)
    assert tree.levels == 3
    assert tree.connections[0] == tree.connections.max() == 77
    assert tree.connections[1:].max() == 63
    assert tree.connections.sum() == 2 * 16_383
    # Up and down: a vote, the plan; up: the results; twice a question; down: the outcome.
    assert tree.rounds == 3 * (2 + 2 + 1 + 2 * 2 + 1)


def test_every_step_is_printed() -> None:
    command = [
        sys.executable,
        str(TOOLS / "simulate.py"),
        "--tp=2",
        "--dp=2",
        "--ep=2",
        "--experts=2",
        "--layers=2",
    ]
    sizes = [
        "--hidden=64",
        "--ffn=64",
        "--heads=4",
        "--groups=2",
        "--vocabulary=100",
        "--load-pp=2",
    ]
    told = subprocess.run(
        [*command, *sizes, "--json"], check=True, capture_output=True, text=True
    )
    facts = json.loads(told.stdout)["simulations"]
    assert [fact["format"] for fact in facts] == ["torch_dist", "zarr"]
    assert all(fact["load"]["read_over_needed"] >= 1 for fact in facts)
    text = subprocess.run(
        [*command, *sizes], check=True, capture_output=True, text=True
    ).stdout
    assert "simulation_0.format: torch_dist" in text
    assert "simulation_0.ranks: 4" in text
    assert "simulation_0.load.ranks: 2" in text
    for fact in facts:
        assert [row["operation"] for row in fact["wire"]] == OPERATIONS
        assert [row["ranks"] for row in fact["wire"]] == [4, 4, 2]
    assert "wire_0:" in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--dp=3", "--ep=2"], "does not divide"),
        (["--tp=0"], "argument --tp: 0 is not from 1 to"),
        pytest.param(["--heads=3"], "heads must divide", marks=pytest.mark.slow),
        pytest.param(["--dp=16385"], "more than the 16384", marks=pytest.mark.slow),
        pytest.param(["--dtype=float1"], "unknown dtype", marks=pytest.mark.slow),
        pytest.param(["--format=nothing"], "nothing", marks=pytest.mark.slow),
        pytest.param(
            ["--vocabulary-multiple=0"],
            "argument --vocabulary-multiple: 0 is not",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--load-tp=2", "--load-ranks=0"],
            "argument --load-ranks: 0 is not",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--hidden=99999999999"],
            "argument --hidden: 99999999999 is not",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--experts=-1"], "argument --experts: -1 is not", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(asked: list[str], told: str) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "simulate.py"), *asked],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "backend", [Zarr("zstd"), backend_named("safetensors")], ids=["zstd", "safetensors"]
)
def test_formats_whose_layout_depends_on_the_data_are_refused(backend: Backend) -> None:
    with pytest.raises(
        CheckpointingException,
        match=f"cannot simulate a save as {backend.properties.name}",
    ):
        simulator.simulate_save(DENSE.padded(2), Parallelism(2, 1, 1), backend)


def test_many_ranks_in_seconds_of_memory_that_columns_take() -> None:
    model = Model(
        layers=8, hidden=1024, ffn=4096, heads=16, groups=8, vocabulary=32_000
    ).padded(8)
    save = simulator.simulate_save(
        model, Parallelism(8, 4, 64), backend_named("torch_dist")
    )
    assert save.job.ranks == 2048
    assert save.written.sum() == model_bytes(model) + 4096
    assert save.plain_index is not None
    assert save.plain_index <= 32 * save.chunks


def model_bytes(model: Model) -> int:
    elements = sum(int(np.prod(weight.shape)) for weight in model.weights())
    return elements * (2 + 3 * 4)


def test_the_picture_of_scaling_has_the_figures_of_its_page(tmp_path: Path) -> None:
    points = charts.table_points(TOOLS.parent / "docs" / "scaling.md")
    largest = {p.format: p for p in points if p.ranks == charts.RANKS[-1]}
    assert set(largest) == set(charts.FORMATS)
    assert largest["zarr"].coordinator == 2.26
    assert largest["torch_dist"].contents == 114_300_000
    assert {p.sweep for p in points if p.tensors > 781} == {"tensors"}
    empty = tmp_path / "empty.md"
    empty.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no table of simulated saves"):
        charts.table_points(empty)
