"""Megatron-Core 0.12.3 itself, the last with zarr that runs here: it reads its own checkpoints and ours as we do."""

from __future__ import annotations

import math
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
OBJECTS = [f"{EXTRA}/shard_{i}_4" for i in range(4)] + [
    f"rng_state/shard_0.{i}_1.2" for i in range(2)
]


@pytest.fixture
def old(peers: dict[str, str]) -> dict[str, str]:
    """The environment for a process that imports the old release."""
    if not OLD.is_dir():
        pytest.skip('megatron-core 0.12.3 is missing: "make peers" installs it')
    return {**peers, "PYTHONPATH": os.pathsep.join([str(OLD), peers["PYTHONPATH"]])}


def assert_same(found: Any, expected: torch.Tensor, where: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
    pair = [
        tensor.contiguous().reshape(-1).view(torch.uint8)
        for tensor in (found, expected)
    ]
    assert torch.equal(*pair), where


def old_megatron_reads(*folders: str) -> None:
    """On 2 ranks: each tensor and object of these, and the common state, the same as we read them."""
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    import megatron.core
    from megatron.core.dist_checkpointing import mapping, serialization

    assert megatron.core.__version__ == "0.12.3"
    for folder in folders:
        known = {
            key: description(t)
            for key, t in serialization.load_tensors_metadata(folder).items()
        }
        assert known == {
            key: description(t)
            for key, t in megackpt.load_tensors_metadata(folder).items()
        }
        for axis in (0, -1):
            read = megackpt.load(halves(megackpt, known, axis), folder)
            flat = FLATTENED if folder.endswith("flat-tp2pp1dp2") else {}
            asked = {
                key: value
                for key, value in halves(mapping, known, axis).items()
                if key not in flat
            }
            found = peer.load(asked, folder)
            for key in asked:
                assert_same(found[key], read[key], f"{folder}: {key}, axis {axis}")
        for key in flat:
            asked, expected = run(
                mapping, key, megackpt.load_plain_tensors(folder)[key]
            )
            assert_same(
                peer.load({key: asked}, folder)[key], expected, f"{folder}: {key}"
            )
            asked, _ = run(mapping, key, megackpt.load_plain_tensors(folder)[key])
            found = megackpt.load({key: asked}, folder)
            assert_same(found[key], expected, f"{folder}: {key}")
            assert found[key] is asked.data
        assert peer.load_common_state_dict(
            Path(folder)
        ) == megackpt.load_common_state_dict(folder)
        assert objects(mapping, peer.load, folder) == objects(
            megackpt, megackpt.load, folder
        )
    dist.barrier()


def old_megatron_declares(folder: str) -> None:
    """On 2 ranks: flattened tensors of its classes, which it saves no better than we."""
    from interop.megatron_shims import dist_checkpointing

    dist_checkpointing()
    from megatron.core.dist_checkpointing import mapping

    state = {}
    for key, shape in FLATTENED.items():
        state[key], own = run(
            mapping, key, torch.arange(float(math.prod(shape))).reshape(shape)
        )
        state[key].data.copy_(own)
    megackpt.save(state, folder)


def old_optimizer(folder: str) -> None:
    """On 4 ranks: its DistributedOptimizer, whose state is flattened, is saved, and loaded at other parallelisms."""
    from interop.megatron_models import parallel, prepare, trained

    prepare(
        (
            "distributed",
            "optimizer",
            "tensor_parallel.random",
            "models.gpt",
            "models.gpt.gpt_layer_specs",
        )
    )
    with parallel(2, 1):
        megackpt.save(flattened(*trained("gpt", 1)), f"{folder}/saved")
    for tp, pp in ((1, 2), (2, 2), (1, 1)):
        with parallel(tp, pp):
            model, optimizer = trained("gpt", 2)
            asked = flattened(model, optimizer, is_loading=True)
            found, *differing = megackpt.load(
                asked, f"{folder}/saved", strict="return_all"
            )
            assert differing == [set(), set()]
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            megackpt.save(flattened(model, optimizer), f"{folder}/tp{tp} pp{pp}")


def flattened(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    state = model.sharded_state_dict()
    how = {"sharding_type": "fully_sharded_model_space", **options}
    return {"model": state, "optimizer": optimizer.sharded_state_dict(state, **how)}


def new_optimizer(folder: str) -> None:
    """On 4 ranks: 0.16's takes the same state, but for a name."""
    from interop.megatron_models import parallel, prepare, trained
    from interop.test_megatron_models import RESHARDABLE, trained_state

    prepare()
    with parallel(4, 1):
        model, optimizer = trained("gpt", 2)
        asked = trained_state(model, optimizer, True, **RESHARDABLE)
        found = megackpt.load(asked, f"{folder}/saved", key_map=named_by_old)
        model.load_state_dict(found["model"])
        found["optimizer"]["param_state_sharding_type"] = "fully_reshardable"
        optimizer.load_state_dict(found["optimizer"])
        megackpt.save(
            trained_state(model, optimizer, False, **RESHARDABLE), f"{folder}/new"
        )


def named_by_old(key: str) -> str:
    return key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")


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
        asked[key] = lib.ShardedTensor.from_rank_offsets(
            key, blank, *cuts, replica_id=copy
        )
    return asked


def run(lib: Any, key: str, whole: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What this rank holds of a flattened tensor at DP 2, cut where it was not when it was saved; and what is there."""
    assert tuple(whole.shape) == FLATTENED[key]
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, whole.numel())
    expected = whole.reshape(-1)[own]
    blank = torch.empty_like(expected)
    return lib.ShardedTensor.from_rank_offsets_flat(
        key, blank, whole.shape, flattened_range=own
    ), expected


def objects(
    lib: Any, load: Callable[..., dict[str, Any]], folder: str
) -> dict[str, Any]:
    asked = {
        cell: lib.ShardedObject.empty_from_unique_key(cell, replica_id=dist.get_rank())
        for cell in OBJECTS
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


def test_what_it_declares_flattened_we_save_in_the_models_shapes(
    tmp_path: Path, ranks: Any, old: dict[str, str]
) -> None:
    ranks(old_megatron_declares, 2, tmp_path / "flat", env=old, timeout=240)
    found = megackpt.load_plain_tensors(tmp_path / "flat")
    for key, shape in FLATTENED.items():
        assert_same(
            found[key], torch.arange(float(math.prod(shape))).reshape(shape), key
        )


@pytest.mark.campaign
def test_optimizers_that_declare_flattened_state(
    tmp_path: Path, ranks: Any, old: dict[str, str], peers: dict[str, str]
) -> None:
    ranks(old_optimizer, 4, tmp_path, env=old, timeout=280)
    ranks(new_optimizer, 4, tmp_path, env=peers, timeout=280)
    saved = megackpt.load_plain_tensors(tmp_path / "saved")
    assert any(key.startswith("optimizer.state.exp_avg.") for key in saved)
    for name in ("tp1 pp2", "tp2 pp2", "tp1 pp1", "new"):
        found = megackpt.load_plain_tensors(tmp_path / name)
        found = {named_by_old(key): tensor for key, tensor in found.items()}
        assert found.keys() == saved.keys()
        for key, tensor in saved.items():
            assert_same(found[key], tensor, f"{name}: {key}")
