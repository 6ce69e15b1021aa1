"""DTensors as shards: against torch's own cutting, and models of real ranks that go from one parallelism to another."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import megackpt
from megackpt import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardingError,
)
from megackpt.adapters.dtensor import runs, sharded
from megackpt.state import apply_factories
from tests.torch_names import (
    CUTS_STRIDES_AT_ONCE,
    DIMENSIONS_THAT_FSDP2_TAKES,
    decoded as decoded_by_torch,
)


# --- where it lies
@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    """A shape, a mesh's shape, and a placement for each of its dimensions."""
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = st.integers(0, len(shape) - 1)
    strided = st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor),
        axis,
        st.integers(1, 8),
    )
    kind = st.one_of(st.just(Replicate()), st.builds(Shard, axis), strided)
    return shape, mesh, [draw(kind) for _ in mesh]


Cutting = Sequence[tuple[int, Placement]]  # which dimension of the mesh, and how


def cut(
    whole: torch.Tensor, mesh: Sequence[int], cutting: Cutting
) -> dict[tuple[int, ...], torch.Tensor]:
    """What torch's own cuts, in this order, leave at each place."""
    pieces = {}
    for place in product(*map(range, mesh)):
        piece = whole
        for dim, how in cutting:
            parts, _ = how._split_tensor(
                piece, mesh[dim], with_padding=False, contiguous=False
            )
            piece = parts[place[dim]]
        pieces[place] = piece
    return pieces


def found(
    whole: torch.Tensor,
    placements: Sequence[Placement],
    pieces: dict[tuple[int, ...], torch.Tensor],
    order: tuple[int, ...] | None = None,
) -> dict[tuple[int, ...], torch.Tensor]:
    """What we take local tensors of these shapes for."""
    mesh = tuple(last + 1 for last in max(pieces))
    taken = {}
    for place, piece in pieces.items():
        part = whole
        axes = runs(
            tuple(whole.shape),
            mesh,
            place,
            tuple(placements),
            tuple(piece.shape),
            order,
        )
        for axis, held in enumerate(axes):
            part = torch.cat([part.narrow(axis, *run) for run in held], axis)
        taken[place] = part
    return taken


def same(
    one: dict[tuple[int, ...], torch.Tensor], other: dict[tuple[int, ...], torch.Tensor]
) -> bool:
    return all(torch.equal(piece, other[place]) for place, piece in one.items())


@given(layouts())
def test_each_rank_holds_what_torch_cuts_for_it_or_is_refused(
    layout: tuple[list[int], list[int], list[Placement]],
) -> None:
    """As distribute_tensor cuts, from left to right, and in the order that torch decodes; refused in doubt alone."""
    shape, mesh, placements = layout
    whole = torch.arange(math.prod(shape)).reshape(shape)
    cutting = [
        (dim, how)
        for dim, how in enumerate(placements)
        if not isinstance(how, Replicate)
    ]
    straight = cut(whole, mesh, cutting)
    order = decoded_by_torch(placements, mesh)
    decoded = straight if order is None else cut(whole, mesh, order)
    for layout_of_torch in (straight, decoded):
        try:
            taken = found(whole, placements, layout_of_torch)
        except ShardingError as error:
            assert "torch makes two layouts" in str(error)  # noqa: PT017 - it may raise
            assert order is None or not same(straight, decoded)
        else:
            # FSDP2's comes first, as torch's full_tensor reads it, where no local shape tells it from the other.
            undecided = all(
                piece.shape == decoded[place].shape for place, piece in straight.items()
            )
            assert same(taken, decoded if undecided else layout_of_torch)


@given(
    st.integers(0, 60),
    st.permutations([("dp", 2), ("ep", 2), ("tp", 3)])
    | st.permutations([("dp", 3), ("tp", 2)]),
)
def test_fsdp2_cuts_what_tensor_parallelism_has_left(
    rows: int, axes: list[tuple[str, int]]
) -> None:
    names, mesh = zip(*axes, strict=True)
    at = names.index("dp")
    placements = [Shard(0) for _ in mesh]
    factor = math.prod(mesh[at + 1 :])
    placements[at] = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
    others = [(dim, Shard(0)) for dim in range(len(mesh)) if dim != at]
    pieces = cut(torch.arange(rows), mesh, [*others, (at, Shard(0))])
    assert same(found(torch.arange(rows), placements, pieces), pieces)


@pytest.mark.parametrize(
    ("sizes", "rows", "rank", "row"),
    [((3, 2), 7, 5, 6), ((2, 2, 3), 9, 3, 5)][:DIMENSIONS_THAT_FSDP2_TAKES],
)
def test_a_real_module_of_fsdp2_that_does_not_divide(
    sizes: tuple[int, ...], rows: int, rank: int, row: int
) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes)
    )
    mesh = init_device_mesh(
        "cpu", sizes, mesh_dim_names=("dp", "ep", "tp")[: len(sizes)]
    )
    left = mesh["ep", "tp"] if mesh.ndim > 2 else mesh["ep"]
    module = nn.Module()
    weight = distribute_tensor(
        torch.arange(float(rows)), left, [Shard(0)] * left.ndim, src_data_rank=None
    )
    module.register_parameter("w", nn.Parameter(weight))
    state = sharded(fully_shard(module, mesh=mesh["dp"]).state_dict())
    dist.destroy_process_group()
    apply_factories(state)
    (piece,) = state["w"]
    assert (piece.global_offset, piece.data.tolist()) == ((row,), [row])


def test_copies_that_the_local_shapes_tell_apart_are_what_distribute_tensor_cuts() -> (
    None
):
    strided = (
        _StridedShard(0, split_factor=2),
        Shard(0),
    )  # FSDP2's over tensor parallelism
    copies = cut(torch.arange(7), (3, 2), list(enumerate(strided)))
    if (
        CUTS_STRIDES_AT_ONCE
    ):  # and what they are is as long as what they might be, on some ranks
        with pytest.raises(
            ShardingError,
            match=r"torch makes two layouts, and .* axis of 7\. .*plain Shard",
        ):
            found(torch.arange(7), strided, copies)
    else:
        assert same(found(torch.arange(7), strided, copies), copies)
    by_views = (
        _StridedShard(0, split_factor=6),
        Shard(0),
        Shard(0),
    )  # whose spec tells the order
    copies = cut(torch.arange(9), (2, 2, 3), list(enumerate(by_views)))
    assert same(found(torch.arange(9), by_views, copies, (0, 1, 2)), copies)
    twice = (
        _StridedShard(0, split_factor=6),
        _StridedShard(0, split_factor=2),
        Shard(0),
    )
    copies = cut(torch.arange(9), (2, 3, 2), list(enumerate(twice)))
    with pytest.raises(
        ShardingError,
        match=r"torch makes two layouts, and .* axis of 9\. .*plain Shard",
    ):
        found(torch.arange(9), twice, copies)
    over_strides = (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3))
    with pytest.raises(
        ShardingError,
        match=r"torch makes two layouts, and .* axis of 12\. .*plain Shard",
    ):
        found(
            torch.arange(12),
            over_strides,
            cut(torch.arange(12), (2, 2), list(enumerate(over_strides))),
        )


def test_the_order_of_the_cuts_is_the_meshs_or_another() -> None:
    whole, twice = torch.arange(7), (Shard(0), Shard(0))
    for a, b in product(range(2), range(2)):
        for order, expected in (
            (None, whole.chunk(2)[a].chunk(2)),
            ((1, 0), whole.chunk(2)[b].chunk(2)),
        ):
            piece = expected[b if order is None else a]
            ((run,),) = runs((7,), (2, 2), (a, b), twice, tuple(piece.shape), order)
            assert torch.equal(whole.narrow(0, *run), piece)


# --- one rank
@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_is_no_place_is_refused_with_the_reason(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    summands = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(
        ShardingError, match=r"'m\.w': it is Partial.* over dimension 0 .*redistribute"
    ):
        megackpt.save(sharded({"w": summands}, "m."), tmp_path / "a")
    odd = DTensor.from_local(
        torch.ones(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
    )
    with pytest.raises(
        ShardingError,
        match=r"'w': the local tensor of shape \(3,\) is not the piece of \(4,\)",
    ):
        megackpt.save(sharded({"w": odd}), tmp_path / "a")
    meta = DTensor.from_local(torch.ones(4, device="meta"), mesh, [Shard(0)])
    with pytest.raises(ShardingError, match=r"'w' is on the meta device: .*to_empty"):
        megackpt.save(sharded({"w": meta}), tmp_path / "a")
    nowhere = DTensor.from_local(
        torch.ones(4), mesh, [Shard(1)], run_check=False, shape=(4,), stride=(1,)
    )
    with pytest.raises(
        ShardingError,
        match=r"'w': it is Shard\(dim=1\) over dimension 0 .* \(4,\) lacks this",
    ):
        megackpt.save(sharded({"w": nowhere}), tmp_path / "a")
    with pytest.raises(
        ShardingError,
        match=r"not one placement for each dimension of a mesh of \(2, 1\)",
    ):
        runs((4,), (2, 1), (0, 0), (Replicate(),), (4,))
    assert not (tmp_path / "a").exists()
    for among in ("dp", 0, [], [1], [-1], [0, "1"], [0.0]):
        with pytest.raises(
            ShardingError,
            match=r"`among` is a DeviceMesh, or some of the 1 ranks by number, not",
        ):
            sharded({}, among=among)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="a state dict is expected, not a Linear"):
        sharded(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"replicated is one of .*, not 'some'"):
        sharded({}, replicated="some")


def test_a_dtensor_that_is_not_declared_is_refused_with_the_way(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    megackpt.save(sharded({"w": [tensor]}), tmp_path / "there")
    way = r"megackpt\.sharded\(state_dict\)"
    for state in ({"w": [tensor]}, {"w": [(1, {"x": tensor})]}):
        with pytest.raises(
            ShardingError,
            match=rf"\['w'\]\[0\]: a DTensor is not common state, .*{way}",
        ):
            megackpt.save(state, tmp_path / "a")
        with pytest.raises(ShardingError, match=way):
            megackpt.load(state, tmp_path / "there")
    with pytest.raises(ShardingError, match=rf"'w': data is a DTensor.*{way}"):
        megackpt.save(
            {"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "a"
        )
    with pytest.raises(ShardingError, match=r"and 30 more$"):
        megackpt.save({"w": [tensor] * 50}, tmp_path / "a")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_fsdp1_makes_without_a_mesh_is_refused_with_the_way(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    from torch.distributed._shard import sharded_tensor

    piece = sharded_tensor.Shard.from_tensor_and_offsets(torch.ones(4), [0], 0)
    state = {"w": sharded_tensor.init_from_local_shards([piece], 4)}
    megackpt.save({"w": torch.ones(4)}, tmp_path / "there")
    way = r"a ShardedTensor is not common state.*FSDP1 makes DTensors .* device_mesh"
    for replicated in ("tensors", "all", "nothing"):
        with pytest.raises(ShardingError, match=way):
            megackpt.save(sharded(state, replicated=replicated), tmp_path / "a")
        with pytest.raises(ShardingError, match=way):
            megackpt.load(sharded(state, replicated=replicated), tmp_path / "there")
    with pytest.raises(
        ShardingError, match=r"(?s)holds a ShardedTensor, .* device_mesh"
    ):
        megackpt.save(sharded({"x": Ema(state["w"])}, replicated="all"), tmp_path / "a")


class Ema:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_nothing_sharded_is_stored_within_an_object(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    shard = ShardedTensor.from_rank_offsets("s", torch.ones(2))
    for value in (
        (cut,),
        [(cut,), 1],
        deque([cut]),
        Ema(cut),
        Ema([{"deep": cut}]),
        {1: [Ema(cut)]},
    ):
        for replicated in ("tensors", "all"):
            with pytest.raises(
                ShardingError,
                match=r"(of which one rank's|is not common state).*\.sharded\(",
            ):
                megackpt.save(
                    sharded({"x": value}, replicated=replicated), tmp_path / "a"
                )
        with pytest.raises(
            ShardingError,
            match=r"the object 'own/.*holds a DTensor, of which one rank's part",
        ):
            megackpt.save(
                {"x": ShardedObject("own", value, (1,), (0,))}, tmp_path / "a"
            )
    with pytest.raises(
        ShardingError,
        match=r"common state, at \['x'\]\['value'\], holds a ShardedTensor \('s'\), which is lost",
    ):
        megackpt.save({"x": Ema(shard)}, tmp_path / "a")
    with pytest.raises(ShardingError, match="holds a LocalNonpersistentObject"):
        megackpt.save(
            {"x": ShardedObject("own", [LocalNonpersistentObject(1)], (1,), (0,))},
            tmp_path / "a",
        )
    assert not (tmp_path / "a").exists()
    kept = {
        "x": Ema(
            (
                torch.ones(2),
                nn.Parameter(torch.ones(1)),
                {"d": deque([{3}, torch.float16])},
            )
        )
    }
    megackpt.save(sharded(kept), tmp_path / "a")
    loaded = megackpt.load(sharded(kept), tmp_path / "a", trusted=(Ema,))["x"].value
    assert torch.equal(loaded[0], torch.ones(2))
    assert loaded[2] == {"d": deque([{3}, torch.float16])}


def test_a_declaration_gives_back_the_dtensor_that_it_holds_now(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    def of(value: float) -> DTensor:
        return distribute_tensor(torch.full((3,), value), mesh, [Shard(0)])

    megackpt.save(sharded({"w": of(1)}), tmp_path)
    blank, other = sharded({"w": of(0)}), of(7)
    loaded = megackpt.load(copy.deepcopy(blank), tmp_path)["w"]
    assert torch.equal(loaded.to_local(), torch.ones(3))
    blank["w"].data = other
    assert megackpt.load(blank, tmp_path)["w"] is other
    assert torch.equal(other.to_local(), torch.ones(3))


def test_a_learning_rate_may_be_a_tensor_in_one_run_and_a_number_in_the_next(
    tmp_path: Path,
) -> None:
    def state(rate: Any) -> dict[str, Any]:
        return {
            "param_groups": [{"lr": rate, "params": ["w"]}],
            "steps": [torch.zeros(2)],
            "n": torch.tensor(1),
        }

    for saved, asked in (
        (torch.tensor(0.5), 0.1),
        (0.5, torch.tensor(0.1)),
        (torch.tensor(0.5),) * 2,
    ):
        declared = sharded(state(saved))
        assert [declared["steps"][0].key, declared["n"].key] == ["steps.0", "n"]
        megackpt.save(declared, tmp_path)
        (group,) = megackpt.load(sharded(state(asked)), tmp_path)["param_groups"]
        assert group == {"lr": saved, "params": ["w"]}
        flat = {"param_groups.w.lr": saved}  # as flatten_optimizer_state_dict has it
        megackpt.save(sharded({"optimizer": flat}), tmp_path)
        asked = sharded({"optimizer": {"param_groups.w.lr": asked}})
        assert megackpt.load(asked, tmp_path)["optimizer"] == flat
    everything = sharded(state(torch.tensor(0.5)), replicated="all")
    assert isinstance(
        everything["param_groups"][0]["lr"], ShardedTensor
    )  # as DCP stores it


def test_other_values_than_dtensors_are_declared_by_replicated(
    mesh: DeviceMesh,
) -> None:
    cut = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    own = ShardedObject("own", 1, (1,), (0,))
    local = LocalNonpersistentObject(7)
    state = {
        "model": {"w": cut, "seen": torch.ones(())},
        "groups": [{"lr": 0.1, "params": ["w", "v"]}],
        "step": 3,
        "kept": [own, local],
    }
    plain = sharded(state, "run.")
    assert (plain["step"], plain["groups"], plain["kept"]) == (
        3,
        state["groups"],
        [own, local],
    )
    assert [plain["model"][name].key for name in ("w", "seen")] == [
        "run.model.w",
        "run.model.seen",
    ]
    apply_factories(plain)
    (piece,) = plain["model"]["w"]
    assert piece.global_shape == (6,)
    assert piece.data.data_ptr() == cut.to_local().data_ptr()
    assert (
        sharded(state, replicated="nothing")["model"]["seen"] is state["model"]["seen"]
    )
    everything = sharded(state, replicated="all")
    assert everything["groups"][0]["params"] == ShardedObject(
        "groups.0.params", ["w", "v"], (), ()
    )
    assert everything["step"] == ShardedObject("step", 3, (), ())
    assert everything["kept"] == [own, local]
    assert isinstance(state["model"]["w"], DTensor)


def test_names_that_come_to_one_key_are_refused(tmp_path: Path) -> None:
    for one, other in (("x", "y"), (torch.zeros(2), torch.ones(2))):
        for state in ({"a": {"b": one}, "a.b": other}, {1: one, "1": other}):
            with pytest.raises(
                megackpt.CoverageError, match="declared it more than once"
            ):
                megackpt.save(sharded(state, replicated="all"), tmp_path / "a")
