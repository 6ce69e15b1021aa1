"""Megatron-Core 0.12.3 itself, the last with zarr that runs here: it reads its own checkpoints and ours as we do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
ZARR, FLAT = (GOLDEN / f"mcore-0.12.3-{name}-tp2pp1dp2" for name in ("zarr", "flat"))
OLD = ROOT / ".peers" / "mcore-0.12.3"
FLATTENED = {"flat.nd": (8, 6), "flat.one_d": (12,)}
EXTRA = "decoder.layers.self_attention.core_attention._extra_state"
OBJECTS = [f"{EXTRA}/shard_{i}_4" for i in range(4)] + [f"rng_state/shard_0.{i}_1.2" for i in range(2)]


@pytest.fixture
def old(peers: dict[str, str]) -> dict[str, str]:
    """The environment for a process that imports the old release."""
    if not OLD.is_dir():
        pytest.skip('megatron-core 0.12.3 is missing: "make peers" installs it')
    return {**peers, "PYTHONPATH": os.pathsep.join([str(OLD), peers["PYTHONPATH"]])}


def assert_same(found: Any, expected: torch.Tensor, where: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
    pair = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    assert torch.equal(*pair), where


def old_megatron_reads(*folders: str) -> None:
    """On 2 ranks: each tensor and object of these, and the common state, the same as we read them."""
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    import megatron.core
    from megatron.core.dist_checkpointing import mapping, serialization

    assert megatron.core.__version__ == "0.12.3"
    for folder in folders:
        known = {key: description(t) for key, t in serialization.load_tensors_metadata(folder).items()}
        assert known == {key: description(t) for key, t in megackpt.load_tensors_metadata(folder).items()}
        for axis in (0, -1):
            read = megackpt.load(halves(megackpt, known, axis), folder)
            flat = FLATTENED if folder.endswith("flat-tp2pp1dp2") else {}
            asked = {key: value for key, value in halves(mapping, known, axis).items() if key not in flat}
            found = peer.load(asked, folder)
            for key in asked:
                assert_same(found[key], read[key], f"{folder}: {key}, axis {axis}")
        for key in flat:
            asked, expected = run(mapping, key, megackpt.load_plain_tensors(folder)[key])
            assert_same(peer.load({key: asked}, folder)[key], expected, f"{folder}: {key}")
        assert peer.load_common_state_dict(Path(folder)) == megackpt.load_common_state_dict(folder)
        assert objects(mapping, peer.load, folder) == objects(megackpt, megackpt.load, folder)
    dist.barrier()


def description(declared: Any) -> tuple[Any, ...]:
    return declared.dtype, tuple(declared.global_shape)


def halves(lib: Any, known: dict[str, tuple[Any, ...]], axis: int) -> dict[str, Any]:
    """Blank: this rank's half of each tensor along this axis. What is not even is whole on both ranks."""
    rank, asked = dist.get_rank(), {}
    for key, (dtype, whole) in known.items():
        shape, cuts = list(whole), []
        if shape and shape[axis] % 2 == 0:
            shape[axis] //= 2
            cuts = [(axis % len(shape), rank, 2)]
        blank, copy = torch.empty(shape, dtype=dtype), 0 if cuts else rank
        asked[key] = lib.ShardedTensor.from_rank_offsets(key, blank, *cuts, replica_id=copy)
    return asked


def run(lib: Any, key: str, whole: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What this rank holds of a flattened tensor at DP 2, cut where it was not when it was saved; and what is there."""
    assert tuple(whole.shape) == FLATTENED[key]
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, whole.numel())
    expected = whole.reshape(-1)[own]
    blank = torch.empty_like(expected)
    return lib.ShardedTensor.from_rank_offsets_flat(key, blank, whole.shape, flattened_range=own), expected


def objects(lib: Any, load: Callable[..., dict[str, Any]], folder: str) -> dict[str, Any]:
    asked = {
        cell: lib.ShardedObject.empty_from_unique_key(cell, replica_id=dist.get_rank()) for cell in OBJECTS
    }
    found = load(asked, folder)
    return {cell: comparable(found[cell]) for cell in OBJECTS}


def comparable(value: Any) -> Any:
    match value:
        case dict():
            return {key: comparable(item) for key, item in value.items()}
        case list():
            return [comparable(item) for item in value]
        case torch.Tensor():
            return value.dtype, value.tolist()
    return value


def test_it_reads_its_own_checkpoints_and_ours_as_we_do(
    tmp_path: Path, ranks: Any, old: dict[str, str]
) -> None:
    megackpt.convert(ZARR, tmp_path / "new", "torch_dist")
    ranks(old_megatron_reads, 2, ZARR, FLAT, tmp_path / "new", env=old, timeout=240)
