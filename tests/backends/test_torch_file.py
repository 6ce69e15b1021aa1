"""torch files: torch reads what we export, we read what torch.save wrote of many shapes, hostile files do nothing."""

from __future__ import annotations

import dataclasses
import io
import os
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import (
    CheckpointManager,
    FullyParallelSaveStrategyWrapper,
    ShardedObject,
    ShardedTensor,
    Strategy,
    convert,
    load,
    load_plain_tensors,
    save,
)
from megackpt.backends.torch_file import TorchFile
from megackpt.checkpoint import verify
from megackpt.errors import (
    BackendError,
)
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.serialization import archive as archive_module
from megackpt.storage import LocalStorage
from megackpt.testing import BackendSuite, ThreadedGroup, Whole, World
from tests.backends.torch_files import STATE, TENSORS, export, same, whole

# -- what torch says


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_reads_ours(tmp_path: Path, mmap: bool) -> None:
    rng = ShardedObject("rng", {"seed": 5}, (1,), (0,), replica_id=0)
    export(whole(TENSORS) | {"rng": rng, "step": 7}, tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == ["megackpt.index", "model.pt"]
    found = torch.load(tmp_path / "c/model.pt", weights_only=True, mmap=mmap)
    blobs = found.pop(STATE)
    same(found, TENSORS)
    assert sorted(blobs) == ["common_state", "rng/shard_0_1"]
    common = torch.load(
        io.BytesIO(bytes(blobs["common_state"].tolist())), weights_only=True
    )
    assert common == {"step": 7}


def test_it_is_a_zip_archive_that_anybody_checks(tmp_path: Path) -> None:
    export(whole(TENSORS) | {"step": 7}, tmp_path / "c")
    with zipfile.ZipFile(tmp_path / "c/model.pt") as archive:
        assert archive.testzip() is None
        places = [member.header_offset for member in archive.infolist()]
        assert places[0] == 0
        data = (tmp_path / "c/model.pt").read_bytes()
        for member in archive.infolist():
            if member.filename.startswith("archive/data/"):
                name, extra = struct.unpack_from("<2H", data, member.header_offset + 26)
                assert (member.header_offset + 30 + name + extra) % 64 == 0


def test_only_tensors_make_a_flat_dict(tmp_path: Path) -> None:
    suite = _Suite()
    suite.save(
        tmp_path / "c", World({"t": Whole.random("float32", (4, 4), (2, 4))}), ranks=2
    )
    assert list(torch.load(tmp_path / "c/model.pt", weights_only=True)) == ["t"]


class _Suite(BackendSuite):
    __test__ = False
    backend = TorchFile()


@pytest.mark.parametrize("name", [name for name in ITEMSIZE if name != OBJECT])
def test_every_dtype_is_torchs_too(tmp_path: Path, name: str) -> None:
    octets = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has something to say about complex32
        state = {"t": octets.view(getattr(torch, name)).reshape(3, -1)}
        torch.save(state, tmp_path / "theirs.pt")
        export(whole(state), tmp_path / "c")
        ours = torch.load(tmp_path / "c/model.pt", weights_only=True)["t"]
        theirs = load_plain_tensors(tmp_path / "theirs.pt")["t"]
    for found in (ours, theirs):
        assert found.dtype == getattr(torch, name)
        assert torch.equal(found.view(torch.uint8), octets.reshape(3, -1))


def test_large_sizes_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "LIMIT", 100)  # otherwise 4 GiB
    state = TENSORS | {"large": torch.ones(40)}
    export(whole(state) | {"step": 7}, tmp_path / "c")
    with zipfile.ZipFile(tmp_path / "c/model.pt") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "c/model.pt", weights_only=True)
    del found[STATE]
    same(found, state)
    (tmp_path / "c/megackpt.index").unlink()
    same(load_plain_tensors(tmp_path / "c"), state)


@pytest.mark.slow
def test_more_members_than_a_plain_directory_counts(tmp_path: Path) -> None:
    suite, whole_tensor = _Suite(), Whole.random("uint8", (1,), (1,))
    suite.save(tmp_path / "c", World({str(i): whole_tensor for i in range(66_000)}))
    with zipfile.ZipFile(tmp_path / "c/model.pt") as archive:
        assert len(archive.namelist()) == 66_003
    assert len(torch.load(tmp_path / "c/model.pt", weights_only=True)) == 66_000
    assert (
        len(TorchFile().read_manifest(LocalStorage(tmp_path / "c")).tensors) == 66_000
    )


# -- several ranks


def test_an_export_of_tp2_dp2_is_loaded_by_tp4(tmp_path: Path) -> None:
    state = {
        "rows": torch.randn(64, 33),
        "columns": torch.randn(257, 64).to(torch.bfloat16),
    }

    def shards(group: ThreadedGroup, fill: float) -> dict[str, Any]:
        tp = 2 if group.size == 4 and not fill else group.size
        dp_rank, tp_rank = divmod(group.rank, tp)
        found = {}
        for axis, (key, tensor) in enumerate(state.items()):
            mine = tensor.chunk(tp, axis)[tp_rank].contiguous()
            data = torch.full_like(mine, fill) if fill else mine
            found[key] = ShardedTensor.from_rank_offsets(
                key, data, (axis, tp_rank, tp), replica_id=dp_rank
            )
        return found

    def saving(group: ThreadedGroup) -> None:
        rng = ShardedObject(
            "rng", {"rank": group.rank}, (4,), (group.rank,), replica_id=0
        )
        save(
            shards(group, 0) | {"rng": rng, "step": 3},
            tmp_path / "saved",
            process_group=group,
        )

    def loading(group: ThreadedGroup) -> None:
        wanted = shards(group, 9.0)
        rng = ShardedObject("rng", None, (4,), (group.rank,), replica_id=0)
        found = load(wanted | {"rng": rng}, tmp_path / "c", process_group=group)
        assert found["rng"] == {"rank": group.rank}
        assert found["step"] == 3
        for axis, (key, tensor) in enumerate(state.items()):
            assert torch.equal(found[key], tensor.chunk(4, axis)[group.rank])

    ThreadedGroup.run(4, saving)
    convert(tmp_path / "saved", tmp_path / "c", "torch")
    assert sorted(os.listdir(tmp_path / "c")) == ["megackpt.index", "model.pt"]
    assert verify(tmp_path / "c").ok
    found = torch.load(tmp_path / "c/model.pt", weights_only=True)
    assert len(found.pop(STATE)) == 5
    same(found, state)
    ThreadedGroup.run(4, loading)
    (tmp_path / "c/megackpt.index").unlink()
    ThreadedGroup.run(4, loading)


def test_without_our_index_checksums_tell(tmp_path: Path) -> None:
    export(whole(TENSORS) | {"step": 7}, tmp_path / "c")
    (tmp_path / "c/megackpt.index").unlink()
    report = verify(tmp_path / "c")
    assert report.ok
    assert report.checked
    data = bytearray((tmp_path / "c/model.pt").read_bytes())
    data[64] ^= 1
    (tmp_path / "c/model.pt").write_bytes(data)
    assert "data/0 does not match its checksum" in str(verify(tmp_path / "c"))


def test_a_tensor_that_was_not_written_is_named(tmp_path: Path) -> None:
    suite = _Suite()
    world = World({key: Whole.random("float32", (4,), (4,)) for key in "abc"})
    (plan,), manifest = suite.planned(world, 1)
    root = LocalStorage(tmp_path, create=True)
    manifest = manifest.located([suite.write(tmp_path, world, plan)])
    rows = np.flatnonzero(manifest.chunks.tensor != 1)
    chunks = manifest.chunks.take(rows)
    with pytest.raises(BackendError, match=r"no rank wrote parts of 'b'$"):
        TorchFile().finish(root, dataclasses.replace(manifest, chunks=chunks))


def test_names_that_would_mean_two_things_are_refused(tmp_path: Path) -> None:
    state = whole({STATE: torch.zeros(2)})
    with pytest.raises(
        BackendError, match=r"'megackpt\.state' is where a torch file keeps"
    ):
        export(state, tmp_path / "c")
    with pytest.raises(BackendError, match="both be named 'x/shard_0_1'"):
        _Suite().planned(World({}, {"x": {(0,): b""}, "x/shard_0_1": {(): b""}}), 1)
    assert not (tmp_path / "c").exists()


# -- saves


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        "torch",
        ("torch", 1),
        Strategy("torch"),
        TorchFile(),
        FullyParallelSaveStrategyWrapper("torch"),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_saves_are_refused_on_every_rank(
    tmp_path: Path, strategy: Any, asynchronous: bool
) -> None:
    def saving(group: ThreadedGroup) -> None:
        shard = ShardedTensor.from_rank_offsets(
            "t", torch.ones(2), (0, group.rank, group.size)
        )
        save(
            {"t": shard},
            tmp_path / "c",
            strategy,
            async_sharded_save=asynchronous,
            process_group=group,
        )

    for outcome in ThreadedGroup.outcomes(3, saving):
        assert isinstance(outcome, BackendError)
        assert "Save as 'torch_dist' or 'safetensors'" in str(outcome)
        assert "megackpt.convert(checkpoint_dir, target, 'torch')" in str(outcome)
    assert not list(tmp_path.iterdir())


def test_saves_of_a_manager_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", "torch", asynchronous=True) as manager:
        with pytest.raises(BackendError, match=r"megackpt\.convert"):
            manager.save(1, whole(TENSORS))
        assert manager.latest() is None
    assert not list(tmp_path.iterdir())


def test_a_refused_save_leaves_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    save(whole(TENSORS), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(BackendError, match="export format"):
        save(whole({"other": torch.ones(3)}), tmp_path, "torch")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
