"""MCoreTensorAwareStateDict: what managers of local checkpoints take apart, send, pickle and load."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import CheckpointingException, ShardedObject, ShardedTensor
from megackpt.megatron import shard_distribution
from megackpt.megatron.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.tree import nested_values
from tests.interop.test_megatron import assert_same, data_parallel, state

TP = 2
ALGOS = ("atomic", "fully_parallel")


def pickled(value: Any) -> Any:
    """The value as a manager of local checkpoints writes and reads it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def tensors_of(state_dict: Any) -> dict[str, torch.Tensor]:
    leaves = nested_values(state_dict)
    return {x.key: x.data for x in leaves if isinstance(x, ShardedTensor)}


def weight(rows: int, **options: Any) -> ShardedTensor:
    data = torch.arange(rows * 2.0).reshape(rows, 2)
    return ShardedTensor.from_rank_offsets("w", data, **options)


def alone(
    given: dict[str, Any], algo: str = "atomic", **options: Any
) -> MCoreTensorAwareStateDict:
    return MCoreTensorAwareStateDict.from_state_dict(given, algo, **options)[0]


# ---- several ranks


def round_trips() -> None:
    """TP 2 x DP: all that Megatron declares, by both algorithms and all exchanges, bit for bit."""
    rank = dist.get_rank()
    group = data_parallel(TP)
    for algo in ALGOS:
        given = state(megackpt, rank, TP)
        made, cached = MCoreTensorAwareStateDict.from_state_dict(given, algo, group)
        # Nothing of the caller's is changed.
        assert all(x is not None for x in tensors_of(given).values())
        divided(made, algo, group)
        for again in (False, True):
            if again:
                made, _ = MCoreTensorAwareStateDict.from_state_dict(
                    given, algo, group, cached
                )
            made.copy_tensors_to_cpu()
            for exchange in ("broadcast", "gather_rounds", "gather_object"):
                stored = pickled(made)
                stored.restore_tensor_device(non_blocking=False)
                hollow = stored.pop_tensors()
                stored = pickled(stored)
                assert stored.is_hollow
                stored.insert_tensors(hollow)
                asked = state(megackpt, rank, TP, blank=True)
                found = stored.to_state_dict(
                    asked, algo, exchange, parallelization_group=group
                )
                expected = state(megackpt, rank, TP)
                assert_same(found, expected, f"{algo} {exchange} rank {rank}")


def divided(made: Any, algo: str, group: Any) -> None:
    """Of each tensor with elements one rank of the group has the data, or each."""
    kept = [
        (x.key, x.global_offset)
        for x in nested_values(made.sharded_state_dict)
        if isinstance(x, ShardedTensor) and x.data is not None and x.data.numel()
    ]
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, kept, group=group)
    everything = [name for part in parts for name in part]
    if algo == "atomic":
        assert all(part == kept for part in parts)
    else:
        assert len(everything) == len(set(everything)) > 40
        assert all(parts)


def received_in_place() -> None:
    """Into the caller's tensors of the stored dtype; others, and absent ones, are new."""
    rank = dist.get_rank()
    values = {name: torch.arange(4.0) + i for i, name in enumerate("abcd")}

    def declared(blank: bool) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(
                name, torch.zeros(4) if blank else data.clone(), replica_id=rank
            )
            for name, data in values.items()
        }

    made, _ = MCoreTensorAwareStateDict.from_state_dict(declared(False))
    asked = declared(True)
    asked["a"].data = torch.zeros(4, dtype=torch.float64)
    asked["a"].dtype = torch.float64
    asked["b"].data = None
    asked["c"].data = torch.nn.Parameter(torch.zeros(8)[::2])  # not contiguous
    made.pop_tensors()
    made.init_tensors()
    for tensor, name in zip(made.tensors, kept_names(made), strict=True):
        tensor.copy_(values[name])
    found = made.to_state_dict(asked, "fully_parallel")
    for name, data in values.items():
        assert torch.equal(found[name].detach(), data)
        assert found[name].dtype == torch.float32
    others = [name for name in "cd" if name not in kept_names(made)]
    for name in others:
        assert torch.equal(asked[name].data.detach(), values[name])
    for name in kept_names(made):
        assert found[name] is made.sharded_state_dict[name].data


def kept_names(made: Any) -> list[str]:
    tensors = tensors_of(made.sharded_state_dict)
    return [name for name, data in tensors.items() if data is not None]


def metadata_used_again() -> None:
    """It saves the check and the distribution, where it fits on all ranks."""
    rank = dist.get_rank()
    calls = []
    module = sys.modules["megackpt.megatron.local_checkpoint"]
    real = shard_distribution.determine_main_replica_uniform_distribution

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    module.determine_main_replica_uniform_distribution = counted  # type: ignore[attr-defined]

    def declared(*names: str) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(
                name, torch.full((4,), float(ord(name))), replica_id=rank
            )
            for name in names
        }

    _, cached = MCoreTensorAwareStateDict.from_state_dict(declared(*"abcd"))
    assert len(calls) == 1
    MCoreTensorAwareStateDict.from_state_dict(declared(*"abcd"), cached_metadata=cached)
    assert len(calls) == 1
    # One rank has lost the metadata, or declares another state: all ranks distribute again.
    own = None if rank == 0 else cached
    MCoreTensorAwareStateDict.from_state_dict(declared(*"abcd"), cached_metadata=own)
    assert len(calls) == 2
    names = "abce"
    if rank == 1:
        names = "bde"
    given = declared(*names)
    # "a" and "c" are the main replicas of rank 0, "d" has none: not checked here, but found below.
    for shard in given.values():
        shard.replica_id = 0 if rank == 0 or shard.key == "d" else 1
    made, fresh = MCoreTensorAwareStateDict.from_state_dict(
        given, cached_metadata=cached
    )
    assert len(calls) == 3
    assert set(fresh.main_rank_for_shard) == {(name, (0,), None) for name in "abcde"}
    found = made.to_state_dict(declared(*names), "fully_parallel", strict="ignore_all",
                               validate_access_integrity=False)  # fmt: skip
    assert {name: int(found[name][0]) for name in found} == {n: ord(n) for n in names}


def refused_together() -> None:
    """An error of one rank is raised on all, and the next call works."""
    rank = dist.get_rank()

    def declared(part: int = rank) -> dict[str, Any]:
        return {"w": weight(4).narrow(0, 0, 4)[0], "o": ShardedObject("o", 1, (2,), (part,))}  # fmt: skip

    def sharded(rows: int, part: int, parts: int) -> dict[str, Any]:
        made = ShardedTensor.from_rank_offsets(
            "w", torch.ones(rows, 2), (0, part, parts)
        )
        return {"w": made}

    with pytest.raises(megackpt.CoverageError, match="'w'"):  # two main replicas
        MCoreTensorAwareStateDict.from_state_dict(declared())
    broken = sharded(4, rank, 2)
    if rank == 1:
        broken["w"].data = None
    with pytest.raises(megackpt.ShardingError, match="no data to save"):
        MCoreTensorAwareStateDict.from_state_dict(broken)
    made, _ = MCoreTensorAwareStateDict.from_state_dict(sharded(4, rank, 2))
    with pytest.raises(megackpt.MismatchError, match="Global shape mismatch"):
        made.to_state_dict(sharded(2, rank, 2))
    with pytest.raises(
        megackpt.MismatchError, match=r"'w': offset \(0, 0\).*this rank has"
    ):
        made.to_state_dict(sharded(4, 1 - rank, 2))
    with pytest.raises(megackpt.MismatchError, match="parallelism of its save"):
        made.to_state_dict(sharded(8, 0, 1), validate_access_integrity=False)
    algo, exchange = ("other", "gossip") if rank == 1 else ("atomic", "broadcast")
    with pytest.raises(CheckpointingException, match=r"rank 1: .*not 'other'"):
        MCoreTensorAwareStateDict.from_state_dict(sharded(4, rank, 2), algo)
    with pytest.raises(CheckpointingException, match=r"rank 1: .*not 'gossip'"):
        made.to_state_dict(sharded(4, rank, 2), "fully_parallel", exchange)
    if rank == 1:
        made.pop_tensors()
    with pytest.raises(CheckpointingException, match=r"rank 1.*is hollow"):
        made.to_state_dict(sharded(4, rank, 2))
    if rank == 1:
        made.insert_tensors([torch.full((4, 2), 3.0)])
    found = made.to_state_dict(sharded(4, rank, 2))
    assert found["w"].sum() == (24 if rank else 8)

    shared = {"w": weight(4, replica_id=rank)}
    made, _ = MCoreTensorAwareStateDict.from_state_dict(shared)
    with pytest.raises(CheckpointingException, match="another rank keeps it"):
        made.to_state_dict(shared)
    if kept_names(made):
        made.sharded_state_dict["w"].data = None
    with pytest.raises(CheckpointingException, match="another rank keeps it"):
        made.to_state_dict(shared, "fully_parallel")


def strictness() -> None:
    """Keys that no rank asks for are the same everywhere; unexpected ones are a rank's own."""
    rank = dist.get_rank()

    def declared(*names: str) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in names
        }

    made, _ = MCoreTensorAwareStateDict.from_state_dict(
        declared(f"own{rank}", f"{rank}")
    )
    asked = declared(f"own{rank}", *(["extra"] if rank else []))
    _, missing, unexpected = made.to_state_dict(
        asked, strict=megackpt.StrictHandling.RETURN_ALL, return_mismatch_keys=True
    )
    assert missing == {"0", "1"}
    assert unexpected == ({"extra"} if rank else set())
    with pytest.raises(megackpt.MismatchError, match=r"Unexpected keys.*\n.*'extra'"):
        made.to_state_dict(asked)
    # Rank 0 holds "0", and rank 1 cannot have it.
    asked = declared("own0") if rank == 0 else declared("own1", "1", "0")
    with pytest.raises(megackpt.MismatchError, match=r"Unexpected keys.*\n.*'0'"):
        made.to_state_dict(asked, strict="raise_all")


@pytest.mark.parametrize("nproc", [2, 4])
def test_round_trips(nproc: int, ranks: Any) -> None:
    ranks(round_trips, nproc, timeout=120)


@pytest.mark.parametrize(
    "act", [received_in_place, metadata_used_again, refused_together, strictness]
)
def test_two_ranks(act: Any, ranks: Any) -> None:
    ranks(act, 2)


# ---- one process


def test_tensors_are_taken_out_and_put_back() -> None:
    made = alone({"model": [{"w": weight(3)}], "step": 4})
    with pytest.raises(CheckpointingException, match="holds its tensors"):
        made.insert_tensors([])
    with pytest.raises(CheckpointingException, match="holds its tensors"):
        made.init_tensors()
    popped = made.pop_tensors()
    assert made.is_hollow
    assert made.common_state_dict == {"step": 4}
    for act in (
        made.pop_tensors,
        made.copy_tensors_to_cpu,
        made.restore_tensor_device,
        lambda: list(made.tensors),
        lambda: made.to_state_dict(None),
        lambda: made.to_state_dict({"w": weight(3)}),
    ):
        with pytest.raises(CheckpointingException, match="is hollow"):
            act()
    with pytest.raises(CheckpointingException, match="2 tensors, and 1 were"):
        made.insert_tensors([*popped, popped[0]])
    with pytest.raises(CheckpointingException, match=r"'w' has shape \(3, 2\)"):
        made.insert_tensors([torch.ones(2, 3)])
    assert made.is_hollow
    made.insert_tensors(iter(popped))
    assert [x is y for x, y in zip(made.tensors, popped, strict=True)] == [True]
    made.pop_tensors()
    made.init_tensors()
    (blank,) = made.tensors
    assert (blank.shape, blank.dtype) == ((3, 2), torch.float32)
    assert not made.is_hollow


def test_what_is_popped_can_be_sent() -> None:
    """torch.distributed sends contiguous tensors only, and leaves of no graph."""
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    given = {"t": ShardedTensor.from_rank_offsets("t", parameter.t())}
    made = alone(given)
    (popped,) = made.pop_tensors()
    assert popped.is_contiguous()
    assert not popped.requires_grad
    made.insert_tensors([popped])
    assert torch.equal(made.to_state_dict(given)["t"], parameter.t())


def test_copies_are_the_states_own() -> None:
    """After the copy training goes on, in the tensors and in the objects; views are cut out."""
    large = torch.zeros(1000)
    args = {"seen": [1]}
    given = {
        "w": ShardedTensor.from_rank_offsets("w", large[:4]),
        "o": ShardedObject("o", args, (1,), (0,)),
        "args": args,
        "tensor": large[4:8],
    }
    made = alone(given)
    assert next(made.tensors).data_ptr() == large.data_ptr()
    made.copy_tensors_to_cpu()
    large += 1
    args["seen"].append(2)
    assert next(made.tensors).untyped_storage().nbytes() == 16
    found = pickled(made).to_state_dict(given)
    assert found["w"].sum() == found["tensor"].sum() == 0
    assert found["o"] == found["args"] == {"seen": [1]}


def test_devices_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their type, as another rank's device has another number. The meta device stands for a GPU."""
    made = alone({"w": weight(2), "v": ShardedTensor.from_rank_offsets("v", torch.ones(1))})  # fmt: skip
    shards = {x.key: x for x in nested_values(made.sharded_state_dict)}
    shards["w"].data = shards["w"].data.to("meta")
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, device: Any, **options: Any) -> torch.Tensor:
        if tensor.is_meta and device == "cpu":  # torch cannot copy from there
            return torch.zeros(tensor.shape)
        return real(tensor, device, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    made.copy_tensors_to_cpu(non_blocking=True)
    assert [x.device.type for x in made.tensors] == ["cpu", "cpu"]
    copy = next(made.tensors)
    made.copy_tensors_to_cpu()
    assert next(made.tensors) is copy  # it is a copy already
    made = pickled(made)
    popped = made.pop_tensors()
    made.insert_tensors(popped)
    made.restore_tensor_device()
    assert [x.device.type for x in made.tensors] == ["meta", "cpu"]
    made.pop_tensors()
    made.init_tensors()
    assert [x.device.type for x in made.tensors] == ["meta", "cpu"]


@pytest.mark.parametrize("algo", ALGOS)
def test_one_process_without_a_group(algo: str) -> None:
    made = alone({"w": weight(2), "step": 4}, algo)
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2))}
    found = pickled(made).to_state_dict(asked, algo)
    assert_same(found, {"w": weight(2).data, "step": 4})


def test_without_a_state_the_common_part_comes_back() -> None:
    content = {"dp_cp_group": object(), "version": 1}
    made = alone({"w": weight(2), "content_metadata": content, "step": 4})
    assert made.to_state_dict({}) == {"step": 4, "content_metadata": {"version": 1}}
    assert "dp_cp_group" in content


@pytest.mark.parametrize("strict", list(megackpt.StrictHandling))
def test_texts_are_those_of_load(strict: Any, tmp_path: Any, caplog: Any) -> None:
    """The same error, or the same warnings and the same state, as from a checkpoint of the same content."""

    def declared(*names: str) -> dict[str, Any]:
        return {n: ShardedTensor.from_rank_offsets(n, torch.ones(2)) for n in names}

    def outcome(load: Any) -> Any:
        caplog.clear()
        try:
            result = load(declared("both", "asked"))
        except CheckpointingException as error:
            return type(error), str(error)
        return result, [record.getMessage() for record in caplog.records]

    megackpt.save(declared("both", "stored"), tmp_path / "x")
    made = alone(declared("both", "stored"))
    returning = megackpt.StrictHandling.requires_returning_mismatch_keys(strict)
    theirs = outcome(lambda asked: megackpt.load(asked, tmp_path / "x", strict=strict))
    ours = outcome(
        lambda asked: made.to_state_dict(
            asked, strict=strict, return_mismatch_keys=returning
        )
    )
    if not isinstance(theirs[0], type):
        # Megatron's class fails with an AssertionError here.
        assert_same(list(ours[0]), list(theirs[0])) if returning else assert_same(
            ours[0], theirs[0]
        )
        (left,) = {*ours[1]} - {*theirs[1]}
        assert "rank 0 lacks keys that are asked for: 'asked'. Their" in left
        assert ours[1][:-1] == theirs[1]
    else:
        assert ours == theirs


def test_an_error_of_unexpected_keys_names_no_others(tmp_path: Any) -> None:
    """Megatron's callers search the text for keys, also for keys that must not be there."""

    def declared(*names: str) -> dict[str, Any]:
        return {n: ShardedTensor.from_rank_offsets(n, torch.ones(2)) for n in names}

    made = alone(declared("a.weight", "a.bias"))
    with pytest.raises(CheckpointingException, match="Unexpected keys") as caught:
        made.to_state_dict(declared("a.weights", "a.bias"), strict="raise_unexpected")
    assert "'a.weights'" in str(caught.value)
    assert "Missing keys" not in str(caught.value)
    assert "'a.weight'" not in str(caught.value)

    megackpt.save(declared("a.weight", "a.bias"), tmp_path / "x")
    asked = declared("a.weights", "a.bias")
    for load in (
        lambda: made.to_state_dict(asked, strict="raise_all"),
        lambda: megackpt.load(asked, tmp_path / "x", strict="raise_all"),
    ):
        with pytest.raises(CheckpointingException) as caught:
            load()
        unexpected, missing = str(caught.value).split("Missing keys")
        assert "Unexpected keys" in unexpected
        assert "'a.weights'" in unexpected
        assert "'a.weight'" in missing
        assert "'a.bias'" not in missing


def test_names_and_arguments() -> None:
    with pytest.raises(CheckpointingException, match="'atomic' or 'fully_parallel'"):
        alone({"w": weight(2)}, "other")
    with pytest.raises(CheckpointingException, match="not 'other'"):
        alone({"w": weight(2)}).to_state_dict({"w": weight(2)}, "other")
    with pytest.raises(ValueError, match="Invalid strict flag"):
        alone({"w": weight(2)}).to_state_dict({"w": weight(2)}, strict="other")


def test_the_base_class_is_that_of_the_extension_if_it_is_there(tmp_path: Any) -> None:
    program = (
        "from megackpt.megatron.tensor_aware_state_dict import MCoreTensorAwareStateDict\n"
        "print([base.__module__ for base in MCoreTensorAwareStateDict.__mro__[1:]])\n"
    )

    def bases(*path: Any) -> str:
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"],
            check=True,
            capture_output=True,
            text=True,
        )
        return run.stdout.strip()

    assert bases() == "['builtins']"
    package = tmp_path / "nvidia_resiliency_ext" / "checkpointing" / "local"
    package.mkdir(parents=True)
    (package / "base_state_dict.py").write_text("class TensorAwareStateDict: ...\n")
    assert bases(str(tmp_path)) == (
        "['nvidia_resiliency_ext.checkpointing.local.base_state_dict', 'builtins']"
    )
