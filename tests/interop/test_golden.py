"""Small checkpoints that releases of Megatron-Core wrote (or should write), through our face."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.testing import ThreadedGroup

GOLDEN = Path(__file__).parent.parent / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
EXTRA = "decoder.layers.self_attention.core_attention._extra_state"


FLAT = GOLDEN / "mcore-0.12.3-flat-tp2pp1dp2"
ZARR = GOLDEN / "mcore-0.12.3-zarr-tp2pp1dp2"
LAYOUT_C = GOLDEN / "synthetic-layout-c"
every = pytest.mark.parametrize(
    "folder", [NEW, FLAT, LAYOUT_C, ZARR], ids=lambda folder: folder.name
)


def expected(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(f"{folder}.expected.pt", weights_only=True)


def assert_all_same(
    found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        pair = [
            t.contiguous().reshape(-1).view(torch.uint8) for t in (found[key], tensor)
        ]
        assert torch.equal(*pair), key


@every
def test_the_whole(folder: Path) -> None:
    assert not (folder / "megackpt.index").exists()
    assert megackpt.check_is_distributed_checkpoint(folder)
    assert_all_same(megackpt.load_plain_tensors(folder), expected(folder))
    stored = {
        key: (t.dtype, t.local_shape)
        for key, t in megackpt.load_tensors_metadata(folder).items()
    }
    assert stored == {key: (t.dtype, t.shape) for key, t in expected(folder).items()}
    report = megackpt.verify(folder)
    assert report.ok, report
    assert report.checked is (folder != ZARR)  # which has no checksums at all


@pytest.mark.parametrize("folder", [NEW, FLAT, ZARR], ids=lambda folder: folder.name)
def test_common_state(folder: Path) -> None:
    assert megackpt.load_common_state_dict(folder) == {
        "optimizer": {"param_groups": [{"lr": 0.125}]},
        "iteration": 100,
        "checkpoint_version": 3.0,
        "args": {"tp": 2, "pp": 1, "none": None, "flag": True},
        "num_floating_point_operations_so_far": 1.5e12,
        "opt_param_scheduler": {"lr": [0.1, 0.2], "dtype": torch.bfloat16},
    } | (
        {"content_metadata": megackpt.load_content_metadata(NEW)}
        if folder == NEW
        else {}
    )
    assert megackpt.load_content_metadata(NEW) == {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
    }


@pytest.mark.parametrize("folder", [NEW, FLAT, ZARR], ids=lambda folder: folder.name)
def test_objects(folder: Path) -> None:
    found = megackpt.load_sharded_metadata(folder)
    cells = {f"{EXTRA}/shard_{i}_4" for i in range(4)} | {
        f"rng_state/shard_0.{i}_1.2" for i in range(2)
    }
    assert {
        key for key, value in found.items() if isinstance(value, ShardedObject)
    } == cells
    asked = {cell: ShardedObject.empty_from_unique_key(cell) for cell in cells}
    values = megackpt.load(asked, folder)
    assert [values[f"{EXTRA}/shard_{i}_4"]["layer"] for i in range(4)] == [0, 1, 2, 3]
    assert [values[f"rng_state/shard_0.{i}_1.2"][0]["tp"] for i in range(2)] == [0, 1]


@every
@pytest.mark.parametrize("size", [1, 3, 4])
def test_resharded(folder: Path, size: int) -> None:
    """Every tensor cut along its first axis, into pieces that are not of one size."""
    full = expected(folder)

    def run(group: ThreadedGroup) -> None:
        asked: dict[str, Any] = {}
        pieces = {}
        for key, tensor in full.items():
            if not tensor.dim():
                asked[key] = ShardedTensor.from_rank_offsets(
                    key, torch.zeros_like(tensor), replica_id=group.rank
                )
                pieces[key] = tensor
                continue
            start, stop = (
                tensor.shape[0] * i // size for i in (group.rank, group.rank + 1)
            )
            pieces[key] = piece = tensor[start:stop]
            offset = (start, *(0,) * (tensor.dim() - 1))
            shape, total = tuple(piece.shape), tuple(tensor.shape)
            asked[key] = ShardedTensor(
                key, None, tensor.dtype, shape, total, offset, None
            )
        found = megackpt.load(asked, folder, process_group=group, dtype_policy="error")
        assert_all_same({key: found[key] for key in pieces}, pieces)
        assert found["iteration"] == 100

    ThreadedGroup.run(size, run)


@every
@pytest.mark.parametrize("to", ["zarr", "torch_dist"])
def test_converted(tmp_path: Path, folder: Path, to: str) -> None:
    new = tmp_path / "ckpt"
    megackpt.convert(folder, new, to)
    assert_all_same(megackpt.load_plain_tensors(new), expected(folder))
    assert megackpt.load_common_state_dict(new) == megackpt.load_common_state_dict(
        folder
    )
    assert (
        megackpt.load_sharded_metadata(new).keys()
        == megackpt.load_sharded_metadata(folder).keys()
    )
    assert megackpt.verify(new).ok


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("__0_0.distcp", marks=pytest.mark.slow),
        "__3_0.distcp",
        "common.pt",
    ],
)
def test_any_flipped_byte_in_what_is_stored_is_found(tmp_path: Path, file: str) -> None:
    """Each byte that carries content, a few at a time; others (padding, names) may go unnoticed."""
    folder = shutil.copytree(NEW, tmp_path / "ckpt")
    whole = (folder / file).read_bytes()
    manifest = open_checkpoint(NEW).manifest
    for chunk in (manifest.chunk(i) for i in range(len(manifest.chunks))):
        if chunk.location.file != file:
            continue
        start = whole.index(b"data.pkl", chunk.location.start)
        at = whole.index(b"\x80\x02", start) + 20  # in the middle of the pickle
        (folder / file).write_bytes(
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        )
        (problem,) = megackpt.verify(folder).problems
        assert file in problem
        assert "data.pkl" in problem


def test_the_old_zarr_is_not_written(tmp_path: Path) -> None:
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
    told = "version 1 of the format 'zarr' is not written by this release"
    with pytest.raises(megackpt.BackendError, match=told):
        megackpt.save(asked, tmp_path / "ckpt", ("zarr", 1))
    with pytest.raises(megackpt.BackendError, match=told):
        megackpt.convert(NEW, tmp_path / "ckpt", ("zarr", 1))
    assert not list(tmp_path.iterdir())
