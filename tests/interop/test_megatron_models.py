"""Models and optimizers of Megatron-Core 0.16.1: saved, and loaded at another parallelism.

Also through Megatron itself. All tensors are compared bit by bit. Processes that import Megatron
start slowly: one set of them does everything, and the tests compare what it left.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import StrictHandling
from tests.interop.megatron_training import (
    RESHARDABLE,
    declared,
    trained_state,
    training,
)
from tests.interop.state_comparison import compare, tensors_of

pytestmark = pytest.mark.megatron

DENSE = ("gpt", "tied", "bert", "t5", "mamba")
SPARSE = ("experts", "grouped", "mixed")
KINDS = (*DENSE, *SPARSE)
FEWER = ("gpt", "optimizer", "buckets", "buckets of experts")
LAYOUTS = (
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 4, 1),
)  # TP, PP, EP: on 4 ranks, the rest DP
EXPERT_LAYOUTS = (*LAYOUTS, (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2))
BY_BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
SINGLE = {"singleton_local_shards": True}
Layout = tuple[int, ...]
NOT_ASKED = {
    "output_layer.weight",
    "decoder.layers.mlp.linear_fc2._extra_state",
}  # a tensor, and objects


# ---- what Megatron's processes do; each step leaves checkpoints for the tests


def reload(
    kind: str, layout: Layout, source: Path, target: Path, load: Any, **metadata: Any
) -> None:
    """Into a model of other parameters, which has to accept all that was loaded; it is saved again."""
    from interop.megatron_models import built, parallel

    with parallel(*layout):
        model = built(kind, 2)
        state = model.sharded_state_dict(metadata=metadata or None)
        found = load(state, source)
        assert found.keys() == state.keys()
        result = model.load_state_dict(found)
        assert not result.missing_keys
        assert not result.unexpected_keys
        megackpt.save(model.sharded_state_dict(metadata=metadata or None), target)


def loaded(state: dict[str, Any], source: Path) -> Any:
    found, missing, unexpected = megackpt.load(
        state, source, strict=StrictHandling.RETURN_ALL
    )
    assert not missing
    assert not unexpected
    return found


def resharded(
    folder: Path, kind: str, saved: Layout, layouts: Sequence[Layout], **metadata: Any
) -> None:
    from interop.megatron_models import parallel

    with parallel(*saved):
        megackpt.save(declared(kind, 1, **metadata), folder / "saved")
    for layout in layouts:
        reload(
            kind,
            layout,
            folder / "saved",
            folder / "-".join(map(str, layout)),
            loaded,
            **metadata,
        )


def exchanged(folder: Path, kind: str, saved: Layout, layout: Layout) -> None:
    """Megatron saves, we load; we save, Megatron loads."""
    from interop.megatron_models import parallel
    from megatron.core import dist_checkpointing as peer

    theirs = made(folder / "theirs")
    with parallel(*saved):
        peer.save(declared(kind, 1), str(theirs))
        megackpt.save(declared(kind, 1), folder / "ours")
    reload(kind, layout, theirs, folder / "from theirs", loaded)
    reload(
        kind,
        layout,
        folder / "ours",
        folder / "by theirs",
        lambda state, at: peer.load(state, str(at)),
    )
    found = peer.load_plain_tensors(str(folder / "ours"))
    tensors = {
        key: value for key, value in found.items() if isinstance(value, torch.Tensor)
    }
    compare(tensors, megackpt.load_plain_tensors(folder / "ours"))


def made(folder: Path) -> Path:
    """A directory, on all ranks: which Megatron does not make by itself."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def in_the_background(folder: Path) -> None:
    """The model trains on while it is written."""
    from interop.megatron_models import built, parallel

    queue = megackpt.AsyncCallsQueue()
    with parallel(2, 2):
        model = built("gpt", 1)
        megackpt.save(model.sharded_state_dict(), folder / "saved")
        request = megackpt.save(
            model.sharded_state_dict(), folder / "2-2", async_sharded_save=True
        )
        queue.schedule_async_request(request)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def as_megatron_does(folder: Path) -> None:
    """Each strictness, validated or not, gives what Megatron's own load gives; the tensors are the model's own."""
    from interop.megatron_models import built, parallel
    from megatron.core import dist_checkpointing as peer
    from megatron.core.dist_checkpointing.validation import StrictHandling as Flags

    with parallel(2, 2):
        megackpt.save(declared("gpt", 1), folder / "saved")
        for strict in Flags:
            for validate in (True, False):
                ours, theirs = (
                    outcome(
                        load,
                        folder / "saved",
                        validate_access_integrity=validate,
                        strict=strict,
                    )
                    for load in (megackpt.load, peer.load)
                )
                assert ours[0] == theirs[0], (strict, ours, theirs)
                compare(ours[1], theirs[1], str(strict))
        model = built("gpt", 2)
        state = model.sharded_state_dict()
        found = megackpt.load(state, folder / "saved")
        held = dict(model.named_parameters())
        same = [
            name for name, p in held.items() if found[name].data_ptr() == p.data_ptr()
        ]
        assert len(same) == len(held) - sum(
            "linear_fc1" in name for name in held
        )  # which factories put together
        assert type(
            state["decoder.layers.0.mlp.linear_fc1.weight"]
        ).__module__.startswith("megatron.")
        model.load_state_dict(found)
        megackpt.save(state, folder / "again")


def outcome(load: Any, source: Path, **terms: Any) -> tuple[Any, dict[str, Any]]:
    """Keys that are not there, or not asked for, or that it raised; and what was loaded."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    state = {
        name: shard
        for name, shard in declared("gpt", 2).items()
        if shard.key not in NOT_ASKED
    }
    rank = dist.get_rank()
    state["w"] = ShardedTensor.from_rank_offsets(
        "not.stored", torch.zeros(2), replica_id=rank
    )
    state["o"] = ShardedObject("no.object", None, (dist.get_world_size(),), (rank,))
    try:
        found = load(state, str(source), **terms)
    except (
        BaseException
    ) as error:  # Megatron lets one of torch's through that is no Exception
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        return "raised", {}
    keys = found[1:] if isinstance(found, tuple) else ()
    return keys, found[0] if keys else found


def resumed(
    kind: str,
    layout: Layout,
    source: Path,
    target: Path,
    asked: dict[str, Any],
    kept: dict[str, Any],
    **how: Any,
) -> None:
    """A model and its optimizer, of other values, take what was saved; they are saved again."""
    from interop.megatron_models import parallel, trained

    with parallel(*layout):
        model, optimizer = trained(kind, 2, **how)
        found = loaded(trained_state(model, optimizer, True, **asked), source)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        megackpt.save(trained_state(model, optimizer, False, **kept), target)


def optimized(
    folder: Path, kind: str, saved: Layout, layouts: Sequence[Layout], **how: Any
) -> None:
    """The optimizer's state as tensors of the model's shapes, at any parallelism."""
    from interop.megatron_models import parallel, trained

    with parallel(*saved):
        megackpt.save(
            trained_state(*trained(kind, 1, **how), False, **RESHARDABLE),
            folder / "saved",
        )
    for layout in layouts:
        target = folder / "-".join(map(str, layout))
        resumed(kind, layout, folder / "saved", target, RESHARDABLE, RESHARDABLE, **how)


def by_buckets(folder: Path, kind: str, layout: Layout) -> None:
    """The optimizer's state as its buckets lie in memory, of which DP alone may change; then as the model's tensors."""
    from interop.megatron_models import parallel, trained

    with parallel(*layout):
        model, optimizer = trained(kind, 1)
        megackpt.save(
            trained_state(model, optimizer, False, **BY_BUCKETS), folder / "buckets"
        )
        megackpt.save(
            trained_state(model, optimizer, False, **RESHARDABLE), folder / "saved"
        )
    resumed(kind, layout, folder / "buckets", folder / "same", BY_BUCKETS, RESHARDABLE)


Step = Callable[[Path], None]


def quick() -> dict[str, Step]:
    """By name what 4 ranks do, one after the other."""
    steps: dict[str, Step] = {
        "gpt": partial(resharded, kind="gpt", saved=(2, 2), layouts=[(4, 1), (1, 2)]),
        "gpt, a key for each layer": partial(
            resharded, kind="gpt", saved=(2, 2), layouts=[(1, 4)], **SINGLE
        ),
    }
    for kind in DENSE[1:]:
        steps[kind] = partial(resharded, kind=kind, saved=(2, 2), layouts=[(4, 1)])
    for kind in SPARSE:
        steps[kind] = partial(
            resharded, kind=kind, saved=(2, 1, 2), layouts=[(1, 2, 2)]
        )
    return steps | {
        "in the background": in_the_background,
        "strictness": as_megatron_does,
        "optimizer": partial(optimized, kind="gpt", saved=(2, 2), layouts=[(4, 1)]),
        "optimizer of experts": partial(
            optimized, kind="experts", saved=(2, 1, 2), layouts=[(1, 2, 2)]
        ),
        "optimizer that is not distributed": partial(
            optimized, kind="gpt", saved=(2, 2), layouts=[(1, 2)], distributed=False
        ),
        "buckets": partial(by_buckets, kind="gpt", layout=(2, 1)),
        "buckets of experts": partial(by_buckets, kind="experts", layout=(1, 1, 2)),
        "exchange of gpt": partial(exchanged, kind="gpt", saved=(2, 2), layout=(1, 4)),
        "exchange of experts": partial(
            exchanged, kind="experts", saved=(2, 1, 2), layout=(1, 1, 4)
        ),
        "training": training,
    }


def over(kinds: Sequence[str], layouts: Sequence[Layout]) -> dict[str, Step]:
    """Every kind, from some layouts to all, and exchanged with Megatron."""
    steps: dict[str, Step] = {}
    for kind in kinds:
        for saved in (layouts[0], layouts[-1], layouts[1]):
            steps[f"{kind} {saved}"] = partial(
                resharded, kind=kind, saved=saved, layouts=layouts
            )
        steps[f"{kind} exchanged"] = partial(
            exchanged, kind=kind, saved=(2, 1), layout=(1, 4)
        )
    return steps


def optimizers() -> dict[str, Step]:
    steps: dict[str, Step] = {}
    for kind, saved in (("gpt", (2, 2)), ("gpt", (1, 1)), ("bert", (2, 2))):
        steps[f"{kind} {saved}"] = partial(
            optimized, kind=kind, saved=saved, layouts=LAYOUTS
        )
    for kind in ("experts", "mixed"):
        spread = [layout for layout in EXPERT_LAYOUTS if layout[2] > 1]
        steps[kind] = partial(optimized, kind=kind, saved=(2, 1, 2), layouts=spread)
    return steps


STEPS: dict[str, Callable[[], dict[str, Step]]] = {
    "quick": quick,
    "dense": partial(over, DENSE, LAYOUTS),
    "sparse": partial(over, SPARSE, EXPERT_LAYOUTS),
    "optimizers": optimizers,
}


def walks(folder: str, steps: str) -> None:
    from interop.megatron_models import prepare

    prepare()
    for name, run in STEPS[steps]().items():
        story = ""
        try:
            run(Path(folder) / name)
        except BaseException:  # noqa: BLE001 - whatever it is, the test tells it
            story = traceback.format_exc()
        (Path(folder) / f"{name} on rank {dist.get_rank()}").write_text(story)
        if story:
            raise SystemExit(story)  # the ranks are no longer in step


def two(folder: str) -> None:
    from interop.megatron_models import prepare

    prepare()
    by_buckets(Path(folder), "gpt", (2, 1))


def four(folder: str) -> None:
    from interop.megatron_models import prepare

    prepare()
    at = Path(folder)
    resumed("gpt", (2, 1), at / "buckets", at / "on 4 ranks", BY_BUCKETS, RESHARDABLE)


def fewer(folder: str) -> None:
    """On 2 ranks, what 4 have saved; DP is halved."""
    from interop.megatron_models import prepare

    prepare()
    at = Path(folder)
    reload("gpt", (2, 1), at / "gpt" / "saved", at / "gpt" / "on 2 ranks", loaded)
    for name, kind, layout in (
        ("buckets", "gpt", (2, 1)),
        ("buckets of experts", "experts", (1, 1, 2)),
    ):
        resumed(
            kind,
            layout,
            at / name / "buckets",
            at / name / "on 2 ranks",
            BY_BUCKETS,
            RESHARDABLE,
        )
    resumed(
        "gpt",
        (1, 2),
        at / "optimizer" / "saved",
        at / "optimizer" / "on 2 ranks",
        RESHARDABLE,
        RESHARDABLE,
    )


def check(folder: Path, name: str, ranks: int = 4) -> None:
    """All ranks went through this step, and all that it left holds the same tensors, each once and not all alike."""
    stories = {rank: folder / f"{name} on rank {rank}" for rank in range(ranks)}
    told = [
        f"--- rank {rank}:\n{at.read_text()}"
        for rank, at in stories.items()
        if at.is_file() and at.read_text()
    ]
    if told or not all(at.is_file() for at in stories.values()):
        pytest.fail("\n".join(told) or f"{name}: not reached", pytrace=False)
    at = folder / name
    left = [
        path
        for path in sorted(at.rglob("*"))
        if (path / "metadata.json").is_file() and path.name != "buckets"
    ]
    plain = {path: tensors_of(path) for path in left}
    first, *others = plain.values()
    assert others
    assert (
        sum(
            tensor.unique().numel() > 1
            for tensor in first.values()
            if tensor.numel() > 1
        )
        > len(first) / 2
    )
    for path, found in zip(plain, (first, *others), strict=True):
        compare(found, first, str(path))


# ---- tests


@pytest.fixture(scope="module")
def left(
    tmp_path_factory: pytest.TempPathFactory, ranks: Any, peers: dict[str, str]
) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ranks(walks, 4, folder, "quick", env=peers, timeout=280, check=False)
    return folder


@pytest.fixture(scope="module")
def left_by_fewer(left: Path, ranks: Any, peers: dict[str, str]) -> Path:
    ranks(fewer, 2, left, env=peers, timeout=120)
    return left


@pytest.mark.parametrize("name", [name for name in quick() if name not in FEWER])
def test_what_megatrons_models_and_optimizers_declare(left: Path, name: str) -> None:
    check(left, name)


@pytest.mark.parametrize("name", FEWER)
def test_at_another_number_of_ranks(left_by_fewer: Path, name: str) -> None:
    check(left_by_fewer, name)


@pytest.mark.campaign
@pytest.mark.parametrize("steps", ["dense", "sparse", "optimizers"])
def test_each_kind_at_each_parallelism(
    tmp_path: Path, ranks: Any, peers: dict[str, str], steps: str
) -> None:
    ranks(walks, 4, tmp_path, steps, env=peers, timeout=1200, check=False)
    for name in STEPS[steps]():
        check(tmp_path, name)


@pytest.mark.campaign
def test_buckets_of_the_optimizer_at_twice_the_ranks(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    ranks(two, 2, tmp_path, env=peers, timeout=240)
    ranks(four, 4, tmp_path, env=peers, timeout=240)
    compare(tensors_of(tmp_path / "on 4 ranks"), tensors_of(tmp_path / "saved"))
