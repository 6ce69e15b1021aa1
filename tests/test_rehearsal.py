"""Rehearsed saves: what is foretold is what a real save does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.planning.manifest import Manifest
from megackpt.planning.resharding import Parallelism
from megackpt.rehearsal import Rehearsal, rehearse
from megackpt.strategies import backend_named
from megackpt.testing import ThreadedGroup

GOLDEN = Path(__file__).parent / "golden" / "mcore-0.16.1-tp2pp1dp2"
LAYERS, HIDDEN, WORDS = 4, 16, 64


def state_of(job: Parallelism, rank: int) -> dict[str, Any]:
    """What a rank of a small Megatron would declare."""
    stage, data, cut = list(job.places())[rank]
    tp, state = job.tensor, {}

    def add(
        name: str, shape: tuple[int, ...], axis: int | None, layer: int | None, piece: int, pieces: int
    ) -> None:
        offsets = [] if layer is None else [(0, layer, LAYERS)]
        ahead = len(offsets)
        local = list(shape)
        if axis is not None:
            local[axis] //= pieces
            offsets.append((axis + ahead, piece, pieces))
        state[f"{name}-{layer}-{piece}"] = ShardedTensor.from_rank_offsets(
            name,
            torch.full(local, float(rank)),
            *offsets,
            replica_id=(0, 0 if axis is not None else cut, data),
            prepend_axis_num=ahead,
        )

    for layer in range(LAYERS * stage // job.pipeline, LAYERS * (stage + 1) // job.pipeline):
        add("decoder.layers.qkv.weight", (3 * HIDDEN, HIDDEN), 0, layer, cut, tp)
        add("decoder.layers.proj.weight", (HIDDEN, HIDDEN), 1, layer, cut, tp)
        for half in range(2):
            add("decoder.layers.fc1.weight", (8 * HIDDEN, HIDDEN), 0, layer, cut + half * tp, 2 * tp)
        add("decoder.layers.norm.weight", (HIDDEN,), None, layer, 0, 1)
    if stage == 0:
        add("embedding.weight", (WORDS, HIDDEN), 0, None, cut, tp)
    if stage == job.pipeline - 1:
        add("output_layer.weight", (WORDS, HIDDEN), 0, None, cut, tp)
    return state


def really_saved(job: Parallelism, folder: Path, to: str = "torch_dist") -> Manifest:
    ThreadedGroup.run(
        job.ranks, lambda group: megackpt.save(state_of(job, group.rank), folder, to, process_group=group)
    )
    return open_checkpoint(folder).manifest


def bytes_of_ranks(manifest: Manifest, ranks: int) -> list[int]:
    chunks = manifest.chunks
    tensors = np.array([not entry.meta.is_object for entry in manifest.tensors])[chunks.tensor]
    return [int(chunks.length[tensors & (chunks.writer == rank)].sum()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "job", [Parallelism(1, 2, 2), Parallelism(4, 1, 1), Parallelism(2, 2, 2), Parallelism(2, 1, 3)], ids=str
)
def test_foretold_and_done(tmp_path: Path, job: Parallelism) -> None:
    source = really_saved(Parallelism(tensor=2, pipeline=1, data=2), tmp_path / "source")
    foretold = rehearse(source, job, backend_named("torch_dist"))
    done = really_saved(job, tmp_path / "done")
    common = int(source.chunks.length[source.chunks.tensor == source.numbers()["common_state"]].sum())
    assert bytes_of_ranks(done, job.ranks) == [
        int(n) - common * (r == 0) for r, n in enumerate(foretold.bytes)
    ]
    assert foretold.chunks == len(done.chunks)
    files = [len(set(done.chunks.file[done.chunks.writer == r].tolist())) for r in range(job.ranks)]
    assert foretold.files.tolist() == files
    real = (tmp_path / "done" / "megackpt.index").stat().st_size
    assert abs(foretold.index - real) < 0.25 * real + 200


def foretold_of_golden(job: Parallelism, to: str = "torch_dist") -> Rehearsal:
    return rehearse(open_checkpoint(GOLDEN).manifest, job, backend_named(to))


def test_objects_weigh_what_they_weigh_now() -> None:
    manifest = open_checkpoint(GOLDEN).manifest
    found = foretold_of_golden(Parallelism(2, 2, 2))
    tensors = sum(np.prod(e.meta.shape, dtype=int) * e.meta.itemsize for e in manifest.tensors)
    objects = [entry.meta.is_object for entry in manifest.tensors]
    assert (
        found.bytes.sum() == tensors + manifest.chunks.length[np.array(objects)[manifest.chunks.tensor]].sum()
    )


def test_imbalance() -> None:
    assert foretold_of_golden(Parallelism()).imbalance == 1.0
    found = foretold_of_golden(Parallelism(1, 1, 512))  # more ranks than there is to write
    assert found.imbalance == found.bytes.max() / found.bytes.mean()
    assert found.bytes.min() == 0
    assert found.files.min() == 0


def test_nothing_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "o": ShardedObject("o", 1, (1,), (0,))}
    megackpt.save(state, tmp_path / "a")
    for file in (tmp_path / "a").glob("*.distcp"):
        file.write_bytes(b"")
    manifest = open_checkpoint(tmp_path / "a").manifest
    assert rehearse(manifest, Parallelism(data=2), backend_named("torch_dist")).bytes.sum() > 32
