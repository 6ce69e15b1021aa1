"""One strategy of a user's own, under Megatron-Core 0.16.1 and under megackpt: the same calls, files and results."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.megatron

ROOTS = ("megatron.core.dist_checkpointing", "megackpt.megatron")
COMMON = {"iteration": 7, "args": {"lr": 0.5}}


def strategies(root: str, calls: list[Any]) -> tuple[type[Any], type[Any]]:
    """The classes that a user derives: a file for each tensor, and nothing for objects."""
    base = import_module(f"{root}.strategies.base")
    mapping = import_module(f"{root}.mapping")
    tools = import_module(f"{root}.dict_utils")

    def file_of(shard: Any) -> str:
        return f"{shard.key}.{'.'.join(map(str, shard.global_offset))}.pt"

    class Saves(base.AsyncSaveShardedStrategy):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__("of_a_user", 3)

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            files = {}
            for shard in tools.nested_values(sharded_state_dict):
                main = mapping.is_main_replica(shard.replica_id)
                calls.append(("save", shard.key, shard.global_offset, main))
                if main:
                    data = shard.data.detach().clone()
                    files[Path(checkpoint_dir) / file_of(shard)] = data
            request = import_module(f"{root}.strategies.async_utils").AsyncRequest
            return request(write, (files,), [lambda: calls.append("finalized")])

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()

    class Loads(base.LoadShardedStrategy):  # type: ignore[misc, name-defined]
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            def read(shard: Any) -> Any:
                calls.append(("load", shard.key, shard.global_offset))
                return torch.load(Path(checkpoint_dir) / file_of(shard))

            return tools.dict_list_map_outplace(read, sharded_state_dict)

        def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
            found = {}
            for key, shape in (("w", (8, 4)), ("norm", (4,))):
                empty = torch.empty(shape, device="meta")
                found[key] = mapping.ShardedTensor.from_rank_offsets(key, empty)
            return found

        def check_backend_compatibility(self, loaded_backend: Any) -> None:
            pass

        def check_version_compatibility(self, loaded_version: Any) -> None:
            pass

    return Saves, Loads


def write(files: dict[Path, torch.Tensor]) -> None:
    for path, data in files.items():
        torch.save(data, path)


def state(root: str, blank: bool) -> dict[str, Any]:
    """On two ranks of DP: both hold all, but for half of "w", each its own."""
    mapping = import_module(f"{root}.mapping")
    rank = dist.get_rank()
    made = mapping.ShardedTensor.from_rank_offsets
    half = torch.full((4, 4), float(rank + 1))
    norm = torch.arange(4.0)
    if blank:
        half, norm = torch.zeros(4, 4), torch.zeros(4)
    return {
        "layers": [
            {"w": made("w", half, (0, rank, 2))},
            {"norm": made("norm", norm, replica_id=rank)},
        ],
        "big": made("big", torch.ones(64) * (not blank), replica_id=rank),
        "small": made("small", torch.ones(2) * (not blank), replica_id=rank),
        "o": mapping.ShardedObject("o", {"x": [1, 2]}, (1,), (0,), replica_id=rank),
        **({} if blank else COMMON),
    }


def both(folder: str) -> None:
    """Each step by Megatron, then by megackpt; the other one reads it."""
    from interop.megatron_shims import dist_checkpointing

    dist_checkpointing()
    seen: dict[tuple[Any, ...], Any] = {}
    for root in ROOTS:
        calls: list[Any] = []
        saves, loads = strategies(root, calls)
        lib = import_module(root)
        parallel = import_module(f"{root}.strategies.fully_parallel")
        for wrapped in (False, True):
            for later in (False, True):
                at = Path(folder, f"{root} {wrapped} {later}")
                if dist.get_rank() == 0:
                    at.mkdir()
                dist.barrier()
                strategy = saves()
                if wrapped:
                    strategy = parallel.FullyParallelSaveStrategyWrapper(strategy)
                request = lib.save(
                    state(root, False), str(at), strategy, async_sharded_save=later
                )
                if later:
                    request.execute_sync()
                dist.barrier()
                case = "saved", wrapped, later
                check(seen, case, root, calls)
                check(seen, ("files", *case), root, content(at))
    for root in ROOTS:
        calls = []
        _, loads = strategies(root, calls)
        lib = import_module(root)
        parallel = import_module(f"{root}.strategies.fully_parallel")
        for algorithm in ("", "broadcast", "gather_object"):
            for source in ROOTS:
                reader = loads()
                if algorithm:
                    reader = parallel.FullyParallelLoadStrategyWrapper(
                        reader, exchange_algo=algorithm
                    )
                at = Path(folder, f"{source} True True")
                found = lib.load(state(root, True), str(at), reader)
                check(seen, ("loaded", algorithm, source), root, calls)
                same_values(found)


def check(seen: dict[Any, Any], case: Any, root: str, value: Any) -> None:
    """What Megatron has done first; then megackpt does the same."""
    mine = list(value)
    if isinstance(value, list):
        value.clear()
    assert seen.setdefault(case, mine) == mine, (case, root)


def content(at: Path) -> list[Any]:
    found = []
    for path in sorted(at.rglob("*.pt")):
        loaded = torch.load(path, weights_only=False)
        tensor = isinstance(loaded, torch.Tensor)
        found.append((str(path.relative_to(at)), loaded.tolist() if tensor else loaded))
    return [*found, (at / "metadata.json").read_text()]


def same_values(found: dict[str, Any]) -> None:
    rank = dist.get_rank()
    assert torch.equal(found["layers"][0]["w"], torch.full((4, 4), float(rank + 1)))
    assert torch.equal(found["layers"][1]["norm"], torch.arange(4.0))
    assert found["big"].sum() == 64
    assert found["o"] == {"x": [1, 2]}
    assert {name: found[name] for name in COMMON} == COMMON


def distributions() -> None:
    """Assignments of random shards, and the exchange of what was loaded, side by side."""
    from interop.megatron_shims import dist_checkpointing

    dist_checkpointing()
    theirs, ours = (import_module(f"{root}.exchange_utils") for root in ROOTS)
    their, our = (import_module(f"{root}.strategies.fully_parallel") for root in ROOTS)
    draw = random.Random(5)
    for _ in range(100):
        ranks = {
            (f"k{i}", (i, 0), None): sorted(draw.sample(range(4), draw.randint(1, 4)))
            for i in range(draw.randint(0, 12))
        }
        sizes = {name: draw.choice((1, 2, 2, 3, 8)) for name in ranks}
        crossing = {name for name in ranks if draw.random() < 0.3}
        arguments = ranks, sizes, 4, crossing
        assert ours.distribute_shards_to_ranks(
            *arguments
        ) == theirs.distribute_shards_to_ranks(*arguments)
    group = dist.new_group([0, 1])
    for ignoring in (False, True):
        made = []
        for root, module, last in ((ROOTS[0], theirs, their), (ROOTS[1], ours, our)):
            given = state(root, False)
            if ignoring:
                given["small"].replica_id = 5  # its main replica is in another group
            found = module.determine_main_replica_uniform_distribution(
                given, group, ignoring
            )
            last.distribute_main_replicas_with_precomputed_distribution(
                given, group, found
            )
            ids = [given[name].replica_id for name in ("big", "small")]
            mains, shards, metadata, ranks = found
            made.append((mains, shards, list(metadata), dict(ranks), ids))
        assert made[0] == made[1]
    for algorithm in ("broadcast", "gather_object"):
        exchange(theirs, ours, algorithm)
    with pytest.raises(NotImplementedError):
        ours.exchange_by_distribution({}, {}, found, group, "other")


def exchange(theirs: Any, ours: Any, algorithm: str) -> None:
    """Each rank has loaded what is its own, and gets the rest; one broadcast for each shared shard."""
    results = []
    for root, module in zip(ROOTS, (theirs, ours), strict=True):
        given = state(root, True)
        found = module.determine_main_replica_uniform_distribution(given, None, True)
        shards = {s.key: s for s in (given["big"], given["small"])}
        loaded, unloaded = {}, {}
        for name, rank in found.main_rank_for_shard.items():
            if name[0] in shards and rank == dist.get_rank():
                loaded[name] = torch.full_like(shards[name[0]].data, 3.0)
            elif name[0] in shards:
                unloaded[name] = shards[name[0]]
            else:
                del found.all_ranks_for_shard[name][:-1]
        found = found._replace(
            main_rank_for_shard={
                name: rank
                for name, rank in found.main_rank_for_shard.items()
                if name[0] in shards
            }
        )
        count = counted()
        result = module.exchange_by_distribution(
            loaded, unloaded, found, None, algorithm
        )
        results.append(
            (sorted(result), [result[name].sum() for name in sorted(result)])
        )
        assert count() == (2 if algorithm == "broadcast" else 0)
    assert results[0] == results[1]
    assert len(results[0][0]) == 2


def counted() -> Any:
    """Counts the calls of ``torch.distributed.broadcast`` from now on, until it is asked."""
    real, number = dist.broadcast, []

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        number.append(1)
        return real(*args, **kwargs)

    dist.broadcast = broadcast

    def ask() -> int:
        dist.broadcast = real
        return len(number)

    return ask


@pytest.mark.parametrize("act", ["both", "distributions"])
def test_side_by_side(act: str, tmp_path: Path, ranks: Any, peers: Any) -> None:
    given = (tmp_path,) if act == "both" else ()
    ranks(globals()[act], 2, *given, env=peers, timeout=240)
