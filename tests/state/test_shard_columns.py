"""Shards as columns: what each row says, what is refused, and objects that share a blob."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from megackpt.errors import (
    CorruptCheckpoint,
    CoverageError,
    MismatchError,
    ShardingError,
)
from megackpt.planning.box import Box
from megackpt.planning.coverage import check
from megackpt.planning.manifest import (
    COMMON_KEY,
    Declaration,
    Declarations,
    ShardId,
    TensorMeta,
)
from megackpt.state import (
    ShardedObject,
    ShardedTensor,
    bundled,
    declare,
    object_groups,
    unbundled,
)


def test_rows_are_what_was_declared():
    shards = [
        ShardedTensor.from_rank_offsets(
            "w",
            torch.zeros(4, 6, dtype=torch.bfloat16),
            (0, 3, 8),
            (1, 1, 2),
            prepend_axis_num=1,
            replica_id=[0, 1],
        ),
        ShardedTensor.from_rank_offsets(
            "s", torch.tensor(1.0), allow_shape_mismatch=True
        ),
        ShardedObject("rng", {"a": 1}, (4, 2), (1, 0), (0, np.int64(0))),
        ShardedObject("b", io.BytesIO(b"12345"), (1,), (0,)),
    ]
    declared = declare(shards, rank=3, domain=7, common=True, common_replica=3)
    assert list(declared.rows()) == [
        Declaration(
            ShardId("w", Box((3, 4, 0), (1, 4, 6))),
            TensorMeta((8, 8, 6), "bfloat16"),
            (0, 1),
            False,
            48,
            3,
        ),
        Declaration(
            ShardId("s", Box((), ())), TensorMeta((), "float32"), 0, True, 4, 3
        ),
        Declaration(
            ShardId("rng", Box((1, 0), (1, 1))),
            TensorMeta((4, 2), "object"),
            (0, 0),
            False,
            1024,
            3,
        ),
        Declaration(
            ShardId("b", Box((0,), (1,))), TensorMeta((1,), "object"), 0, False, 5, 3
        ),
        Declaration(
            ShardId(COMMON_KEY, Box((), ())),
            TensorMeta((), "object"),
            3,
            False,
            1024,
            3,
        ),
    ]
    assert declared.domains == (7,)
    same = Declarations.of(list(declared.rows()), domain=7)
    assert same.tensors == declared.tensors
    assert np.array_equal(same.boxes.offset, declared.boxes.offset)
    assert np.array_equal(same.boxes.shape, declared.boxes.shape)
    assert declared.boxes.offset.dtype == np.int64


def test_nothing_to_declare():
    assert len(declare([], rank=0)) == 0
    assert len(declare([], rank=0, common=True)) == 1


def test_all_problems_come_at_once():
    wrong = [
        ShardedTensor.from_rank_offsets(f"w{i}", torch.zeros(2)) for i in range(30)
    ]
    for t in wrong:
        t.local_shape = (3,)
    with pytest.raises(
        ShardingError, match=r"(?s)'w0'.*'w1'.*'w19'.*and 10 more shards"
    ) as info:
        declare(wrong, rank=0)
    assert "w20" not in str(info.value)


@pytest.mark.parametrize(
    "change",
    [{"replica_id": "main"}, {"global_offset": (0.5,)}, {"replica_id": (0, None)}],
)
def test_what_is_no_int_is_refused(change):
    t = ShardedTensor("w", None, torch.float32, (2,), (4,), (0,), None)
    for name, value in change.items():
        setattr(t, name, value)
    with pytest.raises(ShardingError, match=r"'w'.*must be ints"):
        declare([t], rank=0)


def test_saving_wants_data():
    bare = ShardedTensor("w", None, torch.float32, (2,), (4,), (0,), None)
    meta = ShardedTensor.from_rank_offsets("m", torch.zeros(2, device="meta"))
    assert len(declare([bare, meta], rank=0)) == 2
    with pytest.raises(
        ShardingError, match=r"(?s)'w'.*no data to save.*'m'.*meta device.*to_empty"
    ):
        declare([bare, meta], rank=0, saving=True)


def test_objects_that_share_a_key_share_a_blob():
    shards = [
        ShardedObject("o", "first", (2,), (0,)),
        ShardedTensor.from_rank_offsets("w", torch.zeros(1)),
        ShardedObject("o", "second", (2,), (0,)),
        ShardedObject("o", "other cell", (2,), (1,)),
    ]
    assert object_groups(shards) == {0: [0, 2], 2: [0, 2], 3: [3]}
    content = bundled(shards[2], [shards[i].data for i in object_groups(shards)[2]])
    assert content == ["first", "second"]
    assert unbundled(shards[2], content, 1) == "second"
    assert unbundled(shards[2], ["one"], 1) == "one"
    with pytest.raises(
        MismatchError,
        match=r"'o/shard_0_2' is asked for 3 times on a rank, and 2 values",
    ):
        unbundled(shards[2], content, 2)
    with pytest.raises(
        CoverageError,
        match=r"'o' is not covered: \[0:1\] .* has 2 main replicas(.|\n)*twice",
    ):
        check(declare(shards, rank=0))
    shards[0].replica_id = 1
    check(declare(shards, rank=0))


def test_an_object_without_a_grid_is_its_own_blob():
    bare = ShardedObject("step", 7, (), ())
    assert bundled(bare, [7]) == 7
    assert unbundled(bare, 7, 0) == 7
    with pytest.raises(
        CorruptCheckpoint, match=r"'o/shard_0_1'.*list of values, not a dict"
    ):
        unbundled(ShardedObject("o", None, (1,), (0,)), {"not": "a list"}, 0)


TRAITS = {
    "key": st.sampled_from(["a", "b", "c", "", 7]),
    "data": st.sampled_from(
        [
            None,
            torch.zeros(2),
            torch.zeros(2, device="meta"),
            torch.zeros(4)[:2],
            [0, 0],
        ]
    ),
    "dtype": st.sampled_from([torch.float32, torch.int8, "float32"]),
    "local_shape": st.sampled_from([(2,), [2], (3,), ("2",)]),
    "global_shape": st.sampled_from([(4,), (4, 2), (-4,)]),
    "global_offset": st.sampled_from([(2,), (0,), (1,), None]),
    "axis_fragmentations": st.sampled_from([(2,), None]),
    "replica_id": st.sampled_from([0, (0, 1), [0, 1], "main"]),
}
SOUND = {
    "key": "a",
    "data": torch.zeros(2),
    "dtype": torch.float32,
    "local_shape": (2,),
    "global_shape": (4,),
}
SOUND |= {"global_offset": (2,), "axis_fragmentations": (2,), "replica_id": 0}
changes = st.one_of(
    st.just({}), *(st.fixed_dictionaries({name: of}) for name, of in TRAITS.items())
)


@given(st.lists(st.tuples(changes, changes), max_size=12), st.booleans())
def test_many_shards_are_declared_as_each_by_itself(changed, saving):
    """Of those that are alike only the first is looked at closely; that must not be seen."""
    rows, problems = [], []
    shards = [ShardedTensor(**{**SOUND, **one, **other}) for one, other in changed]
    for shard in shards:
        try:
            rows += declare([shard], rank=3, saving=saving).rows()
        except ShardingError as error:
            problems.append(str(error))
    if problems:
        with pytest.raises(ShardingError) as info:
            declare(shards, rank=3, saving=saving)
        assert str(info.value) == "\n".join(problems)
    else:
        assert list(declare(shards, rank=3, saving=saving).rows()) == rows


def test_what_a_class_of_the_callers_own_refuses_is_refused():
    class Even(ShardedTensor):
        def validate_metadata_integrity(self):
            if self.key == "odd":
                raise ShardingError("odd one")

    with pytest.raises(ShardingError, match="odd one"):
        declare([Even(**{**SOUND, "key": key}) for key in ("even", "odd")], rank=0)


def test_declaring_changes_nothing():
    t = ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=[0, 1])
    declare([t], rank=0)
    assert t.replica_id == [0, 1]


def test_100_000_shards_with_odd_keys():
    data = torch.zeros(4, 2)
    shards = [
        ShardedTensor.from_rank_offsets(f"layer/{i}.wü '", data, (0, 1, 2))
        for i in range(100_000)
    ]
    declared = declare(shards, rank=1, common=True)
    assert len(declared) == 100_001
    assert int(declared.nbytes[:-1].sum()) == 3_200_000
    assert declared.row(99_999).shard.key == "layer/99999.wü '"
