"""Shards by torch DCP's protocols: stored as what they say they are, or refused by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import megackpt
from megackpt import CoverageError, ShardedObject, ShardedTensor, ShardingError, sharded
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megackpt.testing import ThreadedGroup
from tests.adapters.named_shards import (
    Chunked,
    as_rank,
    halves,
    part_of,
)


@pytest.mark.parametrize("format", ["torch_dist", "zarr", "safetensors"])
def test_a_tensor_that_says_where_it_lies_is_stored_there(
    format: str, tmp_path: Path
) -> None:
    whole = torch.arange(32.0).reshape(8, 4)

    def state(rank: int, value: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {"x": halves(rank, value), "list": [halves(rank, -value)]}
        with as_rank(rank, 2):
            return given, sharded(given)

    full, blank = (
        [state(rank, value) for rank in range(2)] for value in (whole, whole * 0)
    )

    def ranks(group: Any) -> None:
        megackpt.save(full[group.rank][1], tmp_path, format, process_group=group)
        given, declared = blank[group.rank]
        loaded = megackpt.load(declared, tmp_path, process_group=group)
        assert loaded["x"] is given["x"]
        assert torch.equal(given["x"], full[group.rank][0]["x"])
        assert torch.equal(given["list"][0], full[group.rank][0]["list"][0])

    ThreadedGroup.run(2, ranks)
    stored = megackpt.load_plain_tensors(tmp_path)
    assert torch.equal(stored["x"], whole)
    assert torch.equal(stored["list.0"], -whole)


def test_asynchronous_saves_store_the_same(tmp_path: Path) -> None:
    whole = torch.arange(32.0).reshape(8, 4)

    def ranks(group: Any) -> None:
        queue = megackpt.AsyncCallsQueue()
        mine = halves(group.rank, whole)
        request = megackpt.save(
            sharded({"x": mine}), tmp_path, async_sharded_save=True, process_group=group
        )
        mine.zero_()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()

    ThreadedGroup.run(2, ranks)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["x"], whole)


def test_several_pieces_in_one_padded_tensor_and_ranks_without_any(
    tmp_path: Path,
) -> None:
    """Rows 0, 1 and 6, 7 on rank 0, 2 to 5 on rank 1; none on rank 2. Padding is neither read nor written."""
    whole = torch.arange(24).reshape(8, 3)

    def local(rank: int, value: torch.Tensor) -> torch.Tensor:
        if rank == 2:
            return part_of(
                (8, 3), torch.zeros(0, 3, dtype=value.dtype), ((8, 0), (0, 0), (0, 3))
            )
        buffer = torch.full((5, 4), -1, dtype=value.dtype)
        if rank == 1:
            buffer[:4, 1:] = value[2:6]
            return part_of((8, 3), buffer, ((2, 0), (0, 1), (4, 3)))
        buffer[1:3, :3], buffer[3:5, :3] = value[6:8], value[0:2]
        return part_of(
            (8, 3), buffer, ((6, 0), (1, 0), (2, 3)), ((0, 0), (3, 0), (2, 3))
        )

    def ranks(group: Any) -> None:
        megackpt.save(
            sharded({"x": local(group.rank, whole)}), tmp_path, process_group=group
        )
        blank = local(group.rank, torch.zeros_like(whole))
        megackpt.load(sharded({"x": blank}), tmp_path, process_group=group)
        assert torch.equal(blank, local(group.rank, whole))

    ThreadedGroup.run(3, ranks)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["x"], whole)


def test_what_several_ranks_hold_is_stored_once(tmp_path: Path) -> None:
    """Two copies of two halves, and a whole that all ranks hold; again with the plan of the first save."""
    whole = torch.arange(32.0).reshape(8, 4)

    def ranks(group: Any) -> None:
        for step in range(3):
            state = {
                "half": halves(group.rank % 2, whole + step),
                "same": part_of((3,), torch.ones(3) * step, ((0,), (0,), (3,))),
            }
            megackpt.save(sharded(state), tmp_path / str(step), process_group=group)
        blank = halves(group.rank // 2, whole * 0)
        megackpt.load(sharded({"half": blank}), tmp_path / "2", process_group=group)
        assert torch.equal(blank, halves(group.rank // 2, whole + 2))
        alone = megackpt.Strategy(balance=False)
        megackpt.save(
            sharded({"x": halves(group.rank % 2, whole)}),
            tmp_path / "b",
            alone,
            process_group=group,
        )

    ThreadedGroup.run(4, ranks)
    stored = megackpt.load_plain_tensors(tmp_path / "2")
    assert torch.equal(stored["half"], whole + 2)
    assert stored["same"].tolist() == [2, 2, 2]
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "b")["x"], whole)


def test_holes_and_overlaps_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def ranks(group: Any) -> None:
        for rows in (3, 5):  # of 8: two ranks leave a hole, or meet
            at = group.rank * (8 - rows)
            local = part_of((8,), torch.ones(rows), ((at,), (0,), (rows,)))
            with pytest.raises(CoverageError, match="'x'"):
                megackpt.save(sharded({"x": local}), tmp_path, process_group=group)

    ThreadedGroup.run(2, ranks)
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_offsets": None}, "no global_offsets: its place"),
        ({"global_shape": None, "local_sizes": None}, "no global_shape, local_sizes"),
        (
            {"global_offsets": ((0, 0), (4, 0))},
            "2 global_offsets, 1 local_offsets and 1 local_sizes",
        ),
        ({"global_offsets": ((5, 0),)}, r"not within .* the global_shape \(8, 4\)"),
        ({"global_offsets": ((-1, 0),)}, r"not within .* the global_shape \(8, 4\)"),
        (
            {"local_offsets": ((1, 0),)},
            r"not within the local tensor of shape \(4, 4\)",
        ),
        ({"local_sizes": ((4,),)}, r"has not the 2 axes of the global_shape"),
        ({"global_shape": (8, 4, 1)}, r"has not the 3 axes of the global_shape"),
        ({"global_offsets": ((0.5, 0),)}, "tuple of ints"),
        ({"global_offsets": (0, 0)}, "tuple of ints"),
    ],
)
def test_fields_that_make_no_place_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensor: Any = halves(0, torch.ones(8, 4))
    for name, value in fields.items():
        if value is None:
            delattr(tensor, name)
        else:
            setattr(tensor, name, value)
    for call in (megackpt.save, megackpt.load):
        if call is megackpt.load:
            megackpt.save({"y": 1}, tmp_path / "there")
        with pytest.raises(ShardingError, match=rf"(?s)'m\.x': .*{message}"):
            call(
                sharded({"x": tensor}, "m."),
                tmp_path / ("there" if call is megackpt.load else "a"),
            )
    with pytest.raises(
        ShardingError,
        match=r"\['x'\]: a Tensor with .* is not common state.*\.sharded\(",
    ):
        megackpt.save({"x": tensor}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@dataclass
class Holder:
    value: Any


def test_no_shard_becomes_common_state_or_part_of_an_object(tmp_path: Path) -> None:
    megackpt.save({"y": 1}, tmp_path / "there")
    tensor = halves(0, torch.ones(8, 4))
    chunked = Chunked((4,), {(0,): torch.ones(4)})
    for shard in (tensor, chunked):
        kind = type(shard).__name__
        for state in ({"x": shard}, {"x": [(1, {"y": shard})]}):
            with pytest.raises(
                ShardingError, match=rf"\['x'\].*: a {kind} with .* is not common state"
            ):
                megackpt.save(state, tmp_path / "a")
            with pytest.raises(
                ShardingError, match=rf"\['x'\].*: a {kind} with .* is not common state"
            ):
                megackpt.load(state, tmp_path / "there")
        for state in (
            {"x": Holder(shard)},
            {"x": ShardedObject("o", [shard], (1,), (0,))},
        ):
            with pytest.raises(
                ShardingError, match=rf"holds a {kind} with .*of which one rank's part"
            ):
                megackpt.save(state, tmp_path / "a")
        for replicated in ("tensors", "all", "nothing"):
            megackpt_state = sharded({"x": [shard]}, replicated=replicated)
            assert [leaf.key for leaf in megackpt_state["x"]] == ["x.0"]
    assert not (tmp_path / "a").exists()


def test_a_declaration_that_contradicts_the_tensor_is_refused(tmp_path: Path) -> None:
    tensor = halves(0, torch.ones(8, 4))
    right = ShardedTensor("x", tensor, tensor.dtype, (4, 4), (8, 4), (0, 0), None)
    megackpt.save({"x": right}, tmp_path / "a", validate_access_integrity=False)
    plain = {
        f"p{i}": ShardedTensor.from_rank_offsets(f"p{i}", torch.ones(4, 4))
        for i in range(2)
    }
    with pytest.raises(
        ShardingError,
        match=r"'x': .*global_shape that it is a shard of \(8, 4\), .* \(4, 4\)",
    ):
        megackpt.save(
            plain | {"x": ShardedTensor.from_rank_offsets("x", tensor)}, tmp_path / "b"
        )


def test_it_goes_on_where_the_next_state_is_another_tensor(tmp_path: Path) -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    one = part_of((8, 4), whole.clone(), ((0, 0), (0, 0), (8, 4)))
    megackpt.save(sharded({"x": one}), tmp_path)
    blank = sharded({"x": halves(0, whole * 0)})
    copied = copy.deepcopy(blank)
    loaded = megackpt.load(copied, tmp_path, validate_access_integrity=False)["x"]
    assert torch.equal(loaded, whole[:4])
    assert not blank["x"].data.any()
    other = part_of((8, 4), torch.zeros(2, 4), ((6, 0), (0, 0), (2, 4)))
    blank["x"].data = other
    assert megackpt.load(blank, tmp_path, validate_access_integrity=False)["x"] is other
    assert torch.equal(other, whole[6:])
    meta = part_of((8, 4), torch.zeros(8, 4, device="meta"), ((0, 0), (0, 0), (8, 4)))
    with pytest.raises(ShardingError, match="'x' is on the meta device"):
        megackpt.load(sharded({"x": meta}), tmp_path)


def test_state_of_an_optimizer_is_cut_as_its_parameter(tmp_path: Path) -> None:
    whole = torch.arange(32.0).reshape(8, 4)

    def training(
        rank: int, value: torch.Tensor
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(halves(rank, value))
        for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            setattr(parameter, name, getattr(halves(rank, value), name))
        moment = halves(rank, value * 2).clone()  # says nothing of itself
        model = sharded({"w": parameter})
        state = {
            "state": {
                0: {"step": torch.tensor(float(value.any()) * 3), "exp_avg": moment}
            },
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        known = get_param_id_to_sharded_param_map(model, [parameter])
        return (
            {"model": model, "optimizer": optim_state_to_sharding_state(state, known)},
            parameter,
            moment,
        )

    def ranks(group: Any) -> None:
        state, parameter, moment = training(group.rank, whole)
        megackpt.save(state, tmp_path, process_group=group)
        blank, loaded, loaded_moment = training(group.rank, whole * 0)
        found = megackpt.load(blank, tmp_path, process_group=group)
        assert torch.equal(loaded, parameter)
        assert torch.equal(loaded_moment, moment)
        assert found["optimizer"]["state"][0]["step"] == 3

    ThreadedGroup.run(2, ranks)
    stored = megackpt.load_plain_tensors(tmp_path)
    assert torch.equal(stored["w"], whole)
    assert torch.equal(stored["optimizer.state.exp_avg.w"], whole * 2)


def test_flat_ranges_of_such_a_parameter_are_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(8.0))
    part_of((8,), parameter, ((0,), (0,), (8,)))
    known = get_param_id_to_sharded_param_map(sharded({"w": parameter}), [parameter])
    state = {
        "state": {0: {"exp_avg": torch.ones(4)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    with pytest.raises(
        ShardingError,
        match=r"'optimizer\.state\.exp_avg\.w' .*flat range of a parameter",
    ):
        megackpt.save(
            optim_state_to_sharding_state(state, known, flat_ranges={0: slice(0, 4)}),
            tmp_path / "a",
        )


# --- objects that name their chunks
def test_an_object_that_names_its_chunks_is_stored_and_filled(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)

    def held(rank: int, value: torch.Tensor) -> Chunked:
        rows = ((0, 1), (4, 5)) if rank == 0 else ((2, 3),) if rank == 1 else ()
        return Chunked((6, 2), {(r[0], 0): value[list(r)].clone() for r in rows})

    def ranks(group: Any) -> None:
        state = {"x": held(group.rank, whole)}
        megackpt.save(sharded(state), tmp_path, process_group=group)
        blank = held(group.rank, whole * 0)
        assert (
            megackpt.load(sharded({"x": blank}), tmp_path, process_group=group)["x"]
            is blank
        )
        for offset, data in blank.chunks.items():
            assert torch.equal(data, state["x"].chunks[offset])

    ThreadedGroup.run(3, ranks)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["x"], whole)


def test_a_chunk_that_one_rank_writes_and_others_only_load(tmp_path: Path) -> None:
    class Copy(Chunked):
        rank = 0

        def __create_write_items__(self, fqn: str, x: Any) -> list[WriteItem]:
            return super().__create_write_items__(fqn, x) if self.rank == 1 else []

    class CopyTensor(torch.Tensor):
        """The same as a tensor, whose shape is the global one."""

        held: Copy

        def __create_write_items__(self, fqn: str, x: Any) -> list[WriteItem]:
            return self.held.__create_write_items__(fqn, x)

        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return self.held.__create_chunk_list__()

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            return self.held.__get_tensor_shard__(index)

    def copied(rank: int, value: float) -> CopyTensor:
        tensor = torch.zeros(4).as_subclass(CopyTensor)
        tensor.held = Copy((4,), {(0,): torch.full((4,), value)})
        tensor.held.rank = rank
        return tensor

    def ranks(group: Any) -> None:
        megackpt.save(
            sharded({"x": copied(group.rank, group.rank)}),
            tmp_path,
            process_group=group,
        )
        blank = copied(group.rank, -1)
        megackpt.load(sharded({"x": blank}), tmp_path, process_group=group)
        assert blank.held.chunks[(0,)].tolist() == [1] * 4

    ThreadedGroup.run(2, ranks, timeout=60)


def wrong(**methods: Any) -> Any:
    kind = type("Odd", (Chunked,), methods)
    return kind((4,), {(0,): torch.ones(4)})


def fails(*_: Any) -> Any:
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            type("Half", (), {"__create_chunk_list__": lambda _: []})(),
            "lacks __create_write_items__, __get_ten",
        ),
        (wrong(__create_write_items__=fails), "RuntimeError: not today"),
        (wrong(__create_chunk_list__=fails), "RuntimeError: not today"),
        (
            wrong(__get_tensor_shard__=fails),
            r"chunk at \(0,\): RuntimeError: not today",
        ),
        (
            wrong(__get_tensor_shard__=lambda *_: torch.ones(3)),
            r"of shape \(4,\), and gives \(3,\)",
        ),
        (
            wrong(__get_tensor_shard__=lambda *_: b"x"),
            r"of shape \(4,\), and gives bytes",
        ),
        (
            wrong(__create_chunk_list__=lambda _: []),
            "loads nothing: one name, one global shape",
        ),
        (wrong(__create_write_items__=lambda *_: []), "its global shape is unknown"),
        (
            wrong(
                __create_write_items__=lambda s, k, _: Chunked.__create_write_items__(
                    s, f"{k}.part", s
                )
            ),
            r"under \['m.x', 'm.x.part'\]",
        ),
        (
            wrong(
                __create_write_items__=lambda _, k, __: [
                    WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO)
                ]
            ),
            "does not name its chunks as torch DCP",
        ),
    ],
)
def test_methods_that_contradict_one_another_are_refused(
    shard: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ShardingError, match=rf"(?s)'m\.x': .*{message}"):
        megackpt.save(sharded({"x": shard}, "m."), tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- DTensors whose local tensor names its chunks, and torch DCP's own functions
def uneven(rank: int, value: torch.Tensor) -> DTensor:
    """Rows 0 to 4 and 5 to 7 of eight, as Megatron-FSDP's DTensors have them: closures on the local tensor."""
    first, last = ((0, 5), (5, 8))[rank]
    with as_rank(rank, 2) as mesh:
        local = value[first:last].clone()
        chunk = ChunkStorageMetadata((first, 0), tuple(local.shape))  # type: ignore[arg-type]
        properties = TensorProperties.create_from_tensor(local)

        def items(fqn: str, tensor: DTensor) -> list[WriteItem]:
            data = TensorWriteData(chunk, properties, tensor.size())
            return [
                WriteItem(
                    MetadataIndex(fqn, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=data,
                )
            ]

        local.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        local.__create_write_items__ = items  # type: ignore[attr-defined]
        found: DTensor = DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        found._local_tensor = local  # from_local makes a view, which lacks the closures
        return found


def wrapped(rank: int, value: torch.Tensor) -> DTensor:
    """Columns by twos, in turn: each rank has two chunks in a wrapper, as torchrec has them."""
    with as_rank(rank, 2) as mesh:
        chunks = [
            (column, value[:, column : column + 2].clone())
            for column in (2 * rank, 2 * rank + 4)
        ]
        local = LocalShardsWrapper(
            [data for _, data in chunks], [(0, column) for column, _ in chunks]
        )
        return DTensor.from_local(
            local,
            mesh,
            [Shard(1)],
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )


def contents(tensor: DTensor) -> list[torch.Tensor]:
    local: Any = tensor._local_tensor
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]


@pytest.mark.parametrize("made", [uneven, wrapped])
def test_a_dtensor_whose_local_tensor_names_its_chunks(
    made: Any, tmp_path: Path
) -> None:
    whole = torch.arange(64.0).reshape(8, 8)
    full, blank = (
        [made(rank, value) for rank in range(2)] for value in (whole, whole * 0)
    )

    def ranks(group: Any) -> None:
        state = sharded({"x": full[group.rank]}, among=[0])
        megackpt.save(state, tmp_path, process_group=group)
        loaded = megackpt.load(
            sharded({"x": blank[group.rank]}), tmp_path, process_group=group
        )["x"]
        assert loaded is blank[group.rank]
        for found, expected in zip(
            contents(loaded), contents(full[group.rank]), strict=True
        ):
            assert torch.equal(found, expected)

    ThreadedGroup.run(2, ranks)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["x"], whole)
