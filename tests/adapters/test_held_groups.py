"""An optimizer's groups on several ranks, compared when they are saved."""

from __future__ import annotations

import fractions
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import megackpt
from megackpt.adapters.optimizer import optim_state_to_sharding_state
from megackpt.adapters.param_groups import _text
from megackpt.errors import ShardingError
from megackpt.state import ShardedTensor
from megackpt.testing import ThreadedGroup

RATES = {"a": 1.0, "b": 2.0, "c": 3.0}


def staged(
    group,
    order,
    directory,
    *,
    act=megackpt.save,
    rates=RATES,
    names=False,
    own=("a", "bc"),
):
    """An optimizer of which stages have different parameters: saved; or loaded: its rates then, and its next save."""
    mine = [name for name in order if name in own[group.rank]]
    params = {name: nn.Parameter(torch.zeros(4)) for name in mine}
    optimizer = torch.optim.SGD(
        {"params": [params[n]] if n in mine else [], "lr": rates[n]}
        | ({"name": n} if names else {})
        for n in order
    )
    shards = {
        i: ShardedTensor.from_rank_offsets(name, params[name])
        for i, name in enumerate(mine)
    }

    def done(act, directory):
        state = {"o": optim_state_to_sharding_state(optimizer.state_dict(), shards)}
        return act(state, directory, process_group=group)

    loaded = done(act, directory)
    if loaded is None:
        return None
    optimizer.load_state_dict(loaded["o"])
    return [found["lr"] for found in optimizer.param_groups], partial(
        done, megackpt.save
    )


@pytest.mark.parametrize(
    ("order", "names"), [("abc", False), ("abc", True), ("acb", True), ("cab", True)]
)
def test_groups_of_other_stages_through_two_generations(tmp_path, order, names):
    nothing = dict.fromkeys("abc", 9.0)

    def generations(group):
        staged(group, "abc", tmp_path / "1", names=names)
        _, again = staged(
            group, order, tmp_path / "1", act=megackpt.load, rates=nothing, names=names
        )
        again(tmp_path / "2")
        return staged(
            group, order, tmp_path / "2", act=megackpt.load, rates=nothing, names=names
        )[0]

    assert ThreadedGroup.run(2, generations) == [[RATES[name] for name in order]] * 2


KINDS = {
    "float": float,
    "np": np.float32,
    "dict": lambda rate: {"peak": [rate]},
    "set": lambda rate: {"x", str(rate)},
    "object": lambda rate: fractions.Fraction(int(rate)),
    "large": lambda rate: torch.full((20,), rate),
    "int": lambda rate: 10**400 + int(rate),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_guess_is_not_stored(tmp_path, caplog, kind):
    """Rank 0 cannot tell which of the groups that it has no parameter of is which; rank 1 has the right values."""
    rates = {name: KINDS[kind](rate) for name, rate in RATES.items()}
    trusted = [fractions.Fraction]

    def generations(group):
        load = partial(megackpt.load, trusted=trusted)
        staged(group, "abc", tmp_path / "1", rates=rates)
        found, again = staged(group, "acb", tmp_path / "1", act=load)
        assert_alike(
            found, [rates[name] for name in ("abc" if group.rank == 0 else "acb")]
        )
        again(tmp_path / "2")
        return staged(group, "acb", tmp_path / "2", act=load)[0]

    for found in ThreadedGroup.run(2, generations):
        assert_alike(found, [rates[name] for name in "acb"])
    assert (
        "2 groups have no parameter on this rank, so their stored groups are taken in order"
        in caplog.text
    )


def assert_alike(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (
            torch.equal(ours, theirs)
            if isinstance(ours, torch.Tensor)
            else ours == theirs
        )


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize(
    "orders", [("a", "bc"), ("a", "b"), ("ab", "b"), ("b", "ab"), ("ab", "ba")]
)
def test_stages_with_other_groups(tmp_path, orders, names):
    """Loaded right where rank 0 has those of which others have parameters, by name; else refused, at every save."""

    def run(group):
        staged(
            group, "ab", tmp_path, names=names, own=("a", "b")
        )  # whose plan could be used again
        staged(group, orders[group.rank], tmp_path, names=names, own=orders)
        nothing = dict.fromkeys("abc", 9.0)
        order = orders[group.rank]
        return staged(
            group,
            order,
            tmp_path,
            names=names,
            own=orders,
            act=megackpt.load,
            rates=nothing,
        )[0]

    if names and orders in (("ab", "b"), ("ab", "ba")):
        assert ThreadedGroup.run(2, run) == [
            [RATES[name] for name in order] for order in orders
        ]
        return
    with pytest.raises(
        ShardingError,
        match="of the same groups on all ranks, also of those without a parameter there",
    ):
        ThreadedGroup.run(2, run)
    assert [
        group["lr"]
        for group in megackpt.load_common_state_dict(tmp_path)["o"]["param_groups"]
    ] == [1, 2]


def test_a_rate_that_one_rank_changed_is_heard_where_a_plan_is_used_again(tmp_path):
    def save(group, own):
        rates = dict(RATES)
        for step in range(3):
            rates["b"] = 5.0 + step if step < 2 or group.rank else 0.0
            staged(group, "ab", tmp_path, rates=rates, own=own, names=True)

    ThreadedGroup.run(2, partial(save, own=("a", "b")))
    assert [
        group["lr"]
        for group in megackpt.load_common_state_dict(tmp_path)["o"]["param_groups"]
    ] == [1, 7]
    with pytest.raises(
        ShardingError, match=r"\[name='b'\]\['lr'\] is 7\.0 on rank 1, 0\.0 on rank 0"
    ):
        ThreadedGroup.run(2, partial(save, own=("b", "ab")))


@pytest.mark.parametrize("later", [False, True])
def test_what_only_groups_with_parameters_have(tmp_path, later):
    """As of an optimizer that counts its steps in its groups, and passes over empty ones."""

    def run(group):
        group_b = {"params": [0]} if group.rank else {"params": []}
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        for steps in range(3):
            state = {
                "state": {},
                "param_groups": [
                    group_b | {"lr": 1.0} | ({"step": steps} if group.rank else {})
                ],
            }
            shards = {0: shard} if group.rank else {}
            state = {"o": optim_state_to_sharding_state(state, shards)}
            request = megackpt.save(
                state, tmp_path, async_sharded_save=later, process_group=group
            )
            if later:
                queue = megackpt.AsyncCallsQueue()
                queue.schedule_async_request(request)
                queue.close()

    ThreadedGroup.run(2, run)
    assert megackpt.load_common_state_dict(tmp_path)["o"]["param_groups"] == [
        {"lr": 1.0, "step": 2}
    ]


@pytest.mark.parametrize("groups", [None, [], [{"params": [], "lr": 5.0}]])
def test_ranks_without_parameters_have_no_say_in_a_plan_that_is_used_again(
    tmp_path, groups
):
    def run(group):
        param = nn.Parameter(torch.zeros(2))
        shard = ShardedTensor.from_rank_offsets(f"w{group.rank}", param)
        state = {"model": shard}
        if group.rank == 0:
            own = torch.optim.SGD([param], lr=1.0).state_dict()
            state["o"] = optim_state_to_sharding_state(own, {0: shard})
        elif groups is not None:
            state["o"] = optim_state_to_sharding_state(
                {"state": {}, "param_groups": groups}, {}
            )
        for _ in range(2):
            megackpt.save(state, tmp_path, process_group=group)
        return group.log.count("scatter")

    assert ThreadedGroup.run(2, run) == [1, 1]


def test_texts_tell_values_apart_and_nothing_else():
    alike = [
        (1, 1.0, True, np.float64(1), np.int32(1), torch.tensor(1.0)),
        ((0.9, 0.95), [0.9, 0.95], np.array([0.9, 0.95]).tolist()),
        ({"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1.0}),
        (
            torch.arange(40).reshape(4, 10),
            torch.arange(40).reshape(4, 10).T.contiguous().T,
        ),
        (torch.ones(40)[::2], torch.ones(20)),
        (torch.zeros(3, device="meta"), torch.zeros(3, device="meta")),
        (torch.device("cuda", 0), torch.device("cuda", 1)),  # each rank's own
        (lambda: 1, lambda: 2),  # cannot be pickled
    ]
    texts = [{_text(value) for value in values} for values in alike]
    assert [len(told) for told in texts] == [1] * len(alike)
    others = [
        {2**53 + 1},
        np.float32(0.1),
        10**400,
        torch.zeros(4, device="meta"),
        torch.full((20,), 2).bfloat16(),
    ]
    others += [
        torch.arange(40).reshape(10, 4),
        np.bool_(False),
        "1.0",
        None,
        np.longdouble(1),
        b"x",
        math.nan,
    ]
    assert len(set.union(*texts, map(_text, others))) == len(alike) + len(others)
