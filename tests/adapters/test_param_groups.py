"""Groups of an optimizer's parameters are found again by what they are; what is not there is told by name."""

from __future__ import annotations

import copy
import gc
import logging
import re

import pytest
import torch
from torch import nn

import megackpt
from megackpt.adapters.modules import add_prefix_for_sharding
from megackpt.adapters.optimizer import optim_state_to_sharding_state
from megackpt.errors import MismatchError, RankFailure
from megackpt.state import ShardedTensor, ShardedTensorFactory
from megackpt.testing import ThreadedGroup

SHAPES = {"a": (2, 3), "b": (3,), "c": (4,), "d": (1,)} | {
    f"f.{i}": (2,) for i in range(3)
}


def declared(*groups, lr=1e-3):
    """An optimizer of groups (names of its parameters, hyperparameters), and its declared state."""
    names = [name for group, _ in groups for name in group]
    params = {name: nn.Parameter(torch.zeros(SHAPES[name])) for name in names}
    optimizer = torch.optim.Adam(
        ({"params": [params[n] for n in group], **more} for group, more in groups),
        lr=lr,
    )
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    shards = {
        i: ShardedTensor.from_rank_offsets(name, params[name])
        for i, name in enumerate(names)
    }
    return optimizer, lambda: {
        "optimizer": optim_state_to_sharding_state(optimizer.state_dict(), shards)
    }


def reloaded(directory, *groups, **options):
    """The learning rates, group by group, of an optimizer of these groups after a load."""
    optimizer, state = declared(*groups)
    loaded = megackpt.load(state(), directory, **options)["optimizer"]
    assert [group["params"] for group in loaded["param_groups"]] == [
        group["params"] for group in optimizer.state_dict()["param_groups"]
    ]
    optimizer.load_state_dict(loaded)
    return [group["lr"] for group in optimizer.param_groups]


def saved(directory, *groups):
    """Saves an optimizer whose group i has learning rate i + 1."""
    optimizer, state = declared(*groups)
    for rate, group in enumerate(optimizer.param_groups, 1):
        group["lr"] = float(rate)
    megackpt.save(state(), directory)
    return directory


def megatron(wd_mult, expert=False, prefix=""):
    """What a group of Megatron-Core's has; NeMo's have the prefix."""
    values = {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
    }
    return {
        f"{prefix if key.endswith('mult') else ''}{key}": value
        for key, value in values.items()
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"name": "decay"}, {"name": "no_decay"}),
        (megatron(1.0), megatron(0.0)),
        (megatron(1.0), megatron(1.0, expert=True)),
        ({}, {}),
        ({"name": "same"}, {"name": "same"}),
    ],
)
def test_groups_and_parameters_in_another_order(tmp_path, first, second):
    saved(tmp_path, (["a", "b"], first), (["c", "d"], second))
    assert reloaded(tmp_path, (["d", "c"], second), (["b", "a"], first)) == [2, 1]


def test_megatrons_groups_whatever_their_prefix(tmp_path):
    saved(tmp_path, (["a"], megatron(1.0)), (["b"], megatron(0.0)))
    groups = (
        (["b"], megatron(0.0, prefix="pre_")),
        (["a"], {**megatron(1.0, prefix="pre_"), "default_config": True}),
    )
    assert reloaded(tmp_path, *groups) == [2, 1]


def test_what_is_stored_is_as_before_and_no_more(tmp_path):
    saved(tmp_path, (["a"], {}))
    assert not any(
        "param_group" in key for key in megackpt.load_plain_tensors(tmp_path)
    )
    (group,) = megackpt.load_common_state_dict(tmp_path)["optimizer"]["param_groups"]
    assert group["lr"] == 1.0
    assert not {"params", "param_names"} & group.keys()


def test_names_of_parameters_are_each_ranks_own(tmp_path):
    params = [("x", nn.Parameter(torch.ones(2)))]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    optimizer.state[params[0][1]] = {"momentum_buffer": torch.ones(2)}
    shards = {0: ShardedTensor.from_rank_offsets("x", params[0][1])}
    state = {"o": optim_state_to_sharding_state(optimizer.state_dict(), shards)}
    megackpt.save(state, tmp_path)
    assert (
        "param_names"
        not in megackpt.load_common_state_dict(tmp_path)["o"]["param_groups"][0]
    )
    optimizer.load_state_dict(megackpt.load(state, tmp_path)["o"])
    assert optimizer.param_groups[0]["param_names"] == ["x"]


def test_one_group_is_the_other_whatever_they_are_called(tmp_path):
    saved(tmp_path, (["a"], {"name": "all"}))
    assert reloaded(tmp_path, (["a"], {"name": "everything"})) == [1]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            [(["a"], {"name": "x"}), (["b"], {"name": "y"})],
            [(["a"], {"name": "x"}), (["b"], {"name": "z"})],
            "'z' is not in the checkpoint, which has: 'x'; 'y'. Build",
        ),
        (
            [(["a"], megatron(1.0)), (["b"], megatron(0.0))],
            [(["a"], megatron(1.0)), (["b"], megatron(0.5))],
            "(wd_mult=0.5, lr_mult=1.0, is_expert_parallel=False, is_decoupled_lr=False) is not in the checkpoint",
        ),
        (
            [(["a", "b"], {}), (["c"], {})],
            [(["a", "c"], {}), (["b"], {})],
            "'a', 'c' is several groups in the checkpoint, which has: (lr=1.0,",
        ),
        (
            [(["a", "b"], {}), (["c"], {})],
            [(["a", "b", "c"], {"name": "all"})],
            "'all' could be any of several groups in the checkpoint, which has: (lr=1.0,",
        ),
        (
            [(["a"], {}), (["b"], {})],
            [(["a"], {"name": "x"}), (["b"], {"name": "y"})],
            "'x' could be any of several groups in the checkpoint, which has: (lr=1.0,",
        ),
    ],
)
def test_a_group_that_is_not_there(tmp_path, before, after, told):
    saved(tmp_path, *before)
    with pytest.raises(MismatchError, match=re.escape(told)):
        reloaded(tmp_path, *after)


def test_groups_that_have_names_are_known_by_them_alone(tmp_path):
    saved(
        tmp_path,
        (["a"], {"name": "x", "lr_mult": 1.0}),
        (["b"], {"name": "y", "lr_mult": 1.0}),
    )
    assert reloaded(
        tmp_path,
        (["b"], {"name": "y", "lr_mult": 0.5}),
        (["a"], {"name": "x", "lr_mult": 1.0}),
    ) == [2, 1]


def test_tensors_of_a_group_that_is_split_are_not_shared(tmp_path):
    _, state = declared(
        (["a", "b"], {"lr": torch.tensor(1.0)}), (["c"], {"lr": torch.tensor(2.0)})
    )
    megackpt.save(state(), tmp_path)
    optimizer, state = declared((["a"], {}), (["b"], {}), (["c"], {}))
    optimizer.load_state_dict(megackpt.load(state(), tmp_path)["optimizer"])
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert [group["lr"].item() for group in optimizer.param_groups] == [7, 1, 2]


def test_groups_that_were_alike_may_be_one(tmp_path, caplog):
    for directory, rates in (
        (tmp_path / "1", (0.01, 0.01)),
        (tmp_path / "2", (0.01, 0.01004)),
    ):
        groups = [
            ([name], {"lr": torch.tensor(rate)})
            for name, rate in zip("ab", rates, strict=True)
        ]
        _, state = declared(*groups, (["c"], {"lr": torch.tensor(2.0)}))
        megackpt.save(state(), directory)
    gc.collect()
    caplog.clear()  # of requests that other tests have dropped
    with caplog.at_level(logging.WARNING):
        assert reloaded(tmp_path / "1", (["c"], {}), (["a", "b"], {})) == [
            2,
            torch.tensor(0.01),
        ]
    assert not caplog.text
    with pytest.raises(
        MismatchError, match="'a', 'b' is several groups in the checkpoint"
    ):
        reloaded(tmp_path / "2", (["c"], {}), (["a", "b"], {}))


def test_two_optimizers_of_equal_names_under_prefixes(tmp_path):
    def state(*orders):
        states = {}
        for prefix, order in zip(("first.", "second."), orders, strict=True):
            rates = {"a": 1.0, "b": 2.0} if prefix == "first." else {"a": 3.0, "b": 4.0}
            _, own = declared(*(([name], {"lr": rates[name]}) for name in order))
            states[prefix] = own()
            add_prefix_for_sharding(states[prefix], prefix)
        return states

    megackpt.save(state("ab", "ba"), tmp_path)
    loaded = megackpt.load(state("ba", "ab"), tmp_path)
    rates = [
        [group["lr"] for group in own["optimizer"]["param_groups"]]
        for own in loaded.values()
    ]
    assert rates == [[2, 1], [3, 4]]


def test_parameters_of_several_groups_are_not_fused(tmp_path):
    saved(tmp_path, (["f.0", "f.1"], {}), (["f.2"], {}), (["c"], {}))

    def build(key, x, replica_id, _):
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{i}", x[i], replica_id=replica_id)
            for i in range(3)
        ]

    params = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4))]
    optimizer = torch.optim.SGD({"params": [p]} for p in params)
    shards = [
        ShardedTensorFactory("f", params[0], build, list),
        ShardedTensor.from_rank_offsets("c", params[1]),
    ]
    state = optim_state_to_sharding_state(
        optimizer.state_dict(), dict(enumerate(shards))
    )
    with pytest.raises(
        MismatchError,
        match="the group of parameters 'f' is several groups in the checkpoint",
    ):
        megackpt.load({"optimizer": state}, tmp_path)


def test_a_group_that_is_gone(tmp_path, caplog):
    saved(tmp_path, (["a"], {"name": "x"}), (["b"], {"name": "y"}))
    with caplog.at_level(logging.WARNING):
        assert reloaded(tmp_path, (["b"], {"name": "y"})) == [2]
    assert "the checkpoint has a group of parameters that is gone: 'x'" in caplog.text


def test_a_group_that_is_split_goes_on_as_it_was(tmp_path, caplog):
    saved(tmp_path, (["a", "b"], {}), (["c"], {}))
    with caplog.at_level(logging.WARNING):
        assert reloaded(tmp_path, (["b"], {}), (["c"], {}), (["a"], {})) == [1, 2, 1]
    assert re.search(
        r"several groups of parameters were one.*after the load: \(lr=1.0,.*\)",
        caplog.text,
    )


def test_groups_without_a_parameter_here_take_what_is_left(tmp_path):
    """As on a pipeline stage that has no parameter of a group."""
    saved(tmp_path, (["a"], {}), (["b"], {}))
    _, state = declared((["b"], {}), ([], {}))
    loaded = megackpt.load(state(), tmp_path)["optimizer"]
    assert [group["lr"] for group in loaded["param_groups"]] == [2, 1]
    _, state = declared((["b"], {}), ([], {}), ([], {}))
    loaded = megackpt.load(state(), tmp_path)["optimizer"]
    assert [group["lr"] for group in loaded["param_groups"]] == [2, 1, 1e-3]


def test_a_checkpoint_without_any_optimizer(tmp_path):
    megackpt.save({"step": 1}, tmp_path)
    _, state = declared((["a"], {}))
    loaded, _, unexpected = megackpt.load(state(), tmp_path, strict="return_all")
    assert loaded["step"] == 1
    assert "param_groups" not in loaded.get("optimizer", {})
    assert "optimizer.state.exp_avg.a" in unexpected


def test_what_was_declared_once_is_loaded_twice_and_saved_again(tmp_path):
    saved(tmp_path / "first", (["a"], {}), (["b"], {}))
    optimizer, state = declared((["b"], {}), (["a"], {}))
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 2.0, 1.0
    asked = state()
    first = copy.deepcopy(
        megackpt.load(asked, tmp_path / "first")["optimizer"]["param_groups"]
    )
    assert (
        megackpt.load(asked, tmp_path / "first")["optimizer"]["param_groups"] == first
    )
    megackpt.save(asked, tmp_path / "second")
    assert reloaded(tmp_path / "second", (["a"], {}), (["b"], {})) == [1, 2]


def test_a_rank_without_any_parameter(tmp_path):
    saved(tmp_path, (["a"], {}), (["b"], {}))
    state = {
        "state": {},
        "param_groups": [{"params": [], "lr": 9.0}, {"params": [], "lr": 8.0}],
    }
    loaded = megackpt.load(
        {"optimizer": optim_state_to_sharding_state(state, {})}, tmp_path
    )["optimizer"]
    assert [group["lr"] for group in loaded["param_groups"]] == [1, 2]


def test_groups_of_parameters_without_state(tmp_path):
    def state(*names, rate=9.0):
        params = [nn.Parameter(torch.zeros(SHAPES[n])) for n in names]
        optimizer = torch.optim.SGD(
            [{"params": [p], "lr": rate + i} for i, p in enumerate(params)]
        )
        shards = {
            i: ShardedTensor.from_rank_offsets(n, params[i])
            for i, n in enumerate(names)
        }
        return {"o": optim_state_to_sharding_state(optimizer.state_dict(), shards)}

    megackpt.save(state("a", "b", "c", rate=1.0), tmp_path)
    loaded = megackpt.load(state("c", "a", "b"), tmp_path)["o"]["param_groups"]
    assert [group["lr"] for group in loaded] == [3, 1, 2]


def test_empty_ranges_ask_for_their_groups_too(tmp_path):
    def state(rank, *names, rates=(9.0, 9.0, 9.0)):
        ranges = [slice(0, 4 if "abc".index(n) % 2 == rank else 0) for n in names]
        masters = [nn.Parameter(torch.zeros(part.stop)) for part in ranges]
        optimizer = torch.optim.Adam(
            {"params": [p], "lr": r} for p, r in zip(masters, rates, strict=False)
        )
        for p in masters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        whole = torch.zeros(2, 2)
        shards = [
            ShardedTensor.from_rank_offsets(n, whole, replica_id=(0, 0, rank))
            for n in names
        ]
        numbers = dict(enumerate(ranges))
        return {
            "o": optim_state_to_sharding_state(
                optimizer.state_dict(), dict(enumerate(shards)), flat_ranges=numbers
            )
        }

    def rates(group, *names):
        loaded = megackpt.load(
            state(group.rank, *names), tmp_path, process_group=group
        )["o"]
        return [g["lr"] for g in loaded["param_groups"]]

    def save(group):
        megackpt.save(
            state(group.rank, "a", "b", "c", rates=(1.0, 2.0, 3.0)),
            tmp_path,
            process_group=group,
        )

    ThreadedGroup.run(2, save)
    assert (
        ThreadedGroup.run(2, lambda group: rates(group, "c", "b", "a"))
        == [[3, 2, 1]] * 2
    )
    assert ThreadedGroup.run(2, lambda group: rates(group, "b", "c")) == [[2, 3]] * 2


def test_what_is_not_loaded_is_unknown(tmp_path):
    """Saved with names, of which an optimizer without names knows nothing."""
    saved(tmp_path, (["a"], {"name": "x"}), (["b"], {"name": "y"}))
    with pytest.raises(
        MismatchError, match=r"'b' is unknown \(no number.*which has: 'x'; 'y'"
    ):
        reloaded(tmp_path, (["b"], {}), (["a"], {}), strict="ignore_all")


def test_an_unknown_group_is_refused_also_behind_one_without_parameters():
    _, state = declared((["a"], {}), (["b"], {}))
    groups = state()["optimizer"]["param_groups"]
    first, second = groups.data
    groups.data = [first | {"params": []}, second]
    with pytest.raises(MismatchError, match="'b' is unknown"):
        groups.merge_fn([{"lr": 5.0}])
    assert groups.without_data().data is None


def test_a_load_that_fails_leaves_the_declaration_as_it_was(tmp_path):
    def fail(_):
        raise RuntimeError

    saved(tmp_path / "first", (["a"], {}), (["b"], {}))
    optimizer, state = declared((["b"], {}), (["a"], {}))
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 2.0, 1.0
    asked = state()
    failing = ShardedTensorFactory(
        "optimizer.state.step.a", None, lambda key, *_: step(key), fail
    )
    with pytest.raises(RankFailure, match="RuntimeError"):
        megackpt.load(
            asked | {"x": failing}, tmp_path / "first", validate_access_integrity=False
        )
    megackpt.save(asked, tmp_path / "second")
    assert reloaded(tmp_path / "second", (["a"], {}), (["b"], {})) == [1, 2]


def step(key):
    return ShardedTensor.from_rank_offsets(key, torch.zeros(()))


def test_a_stored_list_of_parameters_is_not_taken(tmp_path):
    _, state = declared((["a"], {}))
    foreign = state()
    foreign["optimizer"]["param_groups"] = [{"params": [77], "lr": 5.0}]
    megackpt.save(foreign, tmp_path)
    assert reloaded(tmp_path, (["a"], {})) == [5]
