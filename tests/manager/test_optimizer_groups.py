"""Parameter groups that changed between a save and a restore: what is restored, warned of, refused."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from megackpt.errors import MismatchError
from megackpt.manager import CheckpointManager
from tests.manager.optimizers import KINDS, Net, has_decay, held, optimizer_of, steps

NAMES = "abcdef"
PAIRS = 500


def drawn_groups(
    draw: random.Random, kind: str, names: list[str]
) -> list[dict[str, Any]]:
    """Groups of these parameters, with equal or different values, and empty ones."""
    groups: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 3)):
        values = {"lr": draw.choice([0.1, 0.1, 0.02])}
        if has_decay(kind):
            values["weight_decay"] = draw.choice([0.0, 0.0, 0.1])
        groups.append({"params": names[number::3], **values})
    groups[0]["params"] += [
        n for n in names if not any(n in g["params"] for g in groups)
    ]
    if draw.random() < 0.3:
        groups.append({"params": [], "lr": 0.7})
    draw.shuffle(groups)
    return groups


def changed_groups(
    draw: random.Random, kind: str, groups: list[dict[str, Any]], names: list[str]
) -> list[dict[str, Any]]:
    """The groups after a few changes: order, empty, split, merged, added, removed, drawn again."""
    new = copy.deepcopy(groups)
    for change in draw.choices(
        ["order", "empty", "split", "merge", "add", "remove", "again", "none"], k=2
    ):
        full = [group for group in new if group["params"]]
        if change == "order":
            draw.shuffle(new)
            for group in new:
                draw.shuffle(group["params"])
        elif change == "empty":
            if draw.random() < 0.5 and len(full) < len(new):
                new = full
            else:
                new.insert(draw.randint(0, len(new)), {"params": [], "lr": 0.3})
        elif change == "split" and len(full[0]["params"]) > 1:
            new.append({**full[0], "params": full[0]["params"][1:], "lr": 0.9})
            full[0]["params"] = full[0]["params"][:1]
        elif change == "merge" and len(full) > 1:
            full[0]["params"] = full[0]["params"] + full[1]["params"]
            new.remove(full[1])
        elif change == "add":
            used = {name for group in new for name in group["params"]}
            unused = [name for name in NAMES if name not in used]
            if unused:
                full[0]["params"] = [*full[0]["params"], unused[0]]
        elif change == "remove" and len(full[0]["params"]) > 1:
            full[0]["params"] = full[0]["params"][1:]
        elif change == "again":
            new = drawn_groups(draw, kind, names)
    return new


def expected(saved: Any, new: Any) -> tuple[bool, bool, list[int | None]]:
    """Whether a restore is refused; whether it warns; the stored group of each full group."""
    stored = [set(group["params"]) for group in saved.param_groups]
    values = [
        {k: v for k, v in group.items() if k != "params"}
        for group in saved.param_groups
    ]
    found = [
        [i for i, names in enumerate(stored) if names & set(group["params"])]
        for group in new.param_groups
    ]
    before = set[Any]().union(*stored)
    after = {p for group in new.param_groups for p in group["params"]}
    every = [i for group in found for i in group]
    refused = any(values[i] != values[group[0]] for group in found for i in group)
    refused |= type(saved) is not type(new) or not before & after
    warns = before != after or len(every) > len(set(every))
    warns |= any(len(group) > 1 for group in found)
    return refused, warns, [group[0] if group else None for group in found]


class Named:
    """Groups and state of an optimizer by the names of its parameters."""

    def __init__(self, net: torch.nn.Module, optimizer: Any) -> None:
        names = {param: name for name, param in net.named_parameters()}
        self.state = {names[p]: v for p, v in optimizer.state.items()}
        self.param_groups = [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]


def check_pair(
    draw: random.Random, root: Path, caplog: pytest.LogCaptureFixture
) -> str:
    """Save an optimizer and restore another one; returns what has come of it."""
    kind = draw.choice(list(KINDS))
    names = sorted(draw.sample(NAMES, draw.randint(2, 5)))
    active = [name for name in names if draw.random() < 0.7]
    net = Net(NAMES)
    groups = drawn_groups(draw, kind, names)
    optimizer = optimizer_of(kind, net, groups)
    steps(net, optimizer, active, range(draw.randint(0, 3)))
    new_net = Net(NAMES)
    other = kind if draw.random() < 0.9 else draw.choice(list(KINDS))
    new_groups = changed_groups(draw, kind, groups, names)
    if not has_decay(other):
        new_groups = [{k: g[k] for k in ("params", "lr")} for g in new_groups]
    new = optimizer_of(other, new_net, new_groups)
    if draw.random() < 0.3:
        own = [name for group in new_groups for name in group["params"]]
        steps(new_net, new, own[:2], range(20, 22))
    saved_as, new_as = Named(net, optimizer), Named(new_net, new)
    refused, warns, sources = expected(saved_as, new_as)
    refused |= type(optimizer) is not type(new)
    before = held(new_net, new)
    caplog.clear()
    with CheckpointManager(root) as manager:
        manager.save(1, model=net, optimizer=optimizer)
        if refused:
            with pytest.raises(MismatchError, match="optimizer"):
                manager.restore(model=new_net, optimizer=new)
            assert held(new_net, new) == before
            return "refused"
        manager.restore(model=new_net, optimizer=new)
    assert len(caplog.records) == warns, [r.getMessage() for r in caplog.records]
    # What it should be: the same optimizer, made by hand.
    by_hand = Net(NAMES)
    by_hand.load_state_dict(net.state_dict())
    model = optimizer_of(other, by_hand, new_groups)
    params = dict(by_hand.named_parameters())
    model.state.clear()
    own = {name for group in new_groups for name in group["params"]}
    for name, values in copy.deepcopy(saved_as.state).items():
        if name in own:
            model.state[params[name]] = values
    for group, source, now in zip(
        model.param_groups, sources, new.param_groups, strict=True
    ):
        given = now if source is None else saved_as.param_groups[source]
        group |= {k: copy.deepcopy(v) for k, v in given.items() if k != "params"}
    if hasattr(model, "calls"):
        model.calls = optimizer.calls
    assert held(new_net, new) == held(by_hand, model)
    for of, its in ((new_net, new), (by_hand, model)):
        steps(of, its, sorted(own), range(4, 14))
    assert held(new_net, new) == held(by_hand, model)
    return "warned" if warns else "restored"


def test_drawn_pairs_of_saved_and_restored_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = []
    for seed in range(PAIRS):
        try:
            outcomes.append(
                check_pair(random.Random(seed), tmp_path / str(seed), caplog)
            )
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert {outcomes.count(kind) > PAIRS // 10 for kind in set(outcomes)} == {True}
    assert set(outcomes) == {"refused", "warned", "restored"}


def saved_and_new(
    root: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> tuple[Any, Any]:
    net, new_net = Net(NAMES), Net(NAMES)
    optimizer = optimizer_of("AdamW", net, before)
    steps(net, optimizer, NAMES, range(2))
    with CheckpointManager(root) as manager:
        manager.save(1, model=net, optimizer=optimizer)
    return new_net, optimizer_of("AdamW", new_net, after)


def test_the_error_names_groups_parameters_and_values(tmp_path: Path) -> None:
    before = [{"params": ["a", "b"], "lr": 0.5}, {"params": ["c"], "lr": 0.25}]
    net, new = saved_and_new(tmp_path, before, [{"params": ["a", "b", "c"]}])
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(
            MismatchError,
            match=r"optimizer: .*group 0 \('a', 'b', lr=0.5\); group 1 \('c', lr=0.25\)",
        ),
    ):
        manager.restore(model=net, optimizer=new)
    assert new.param_groups[0]["lr"] == 0.001
    assert not new.state


def test_one_warning_names_what_was_added_removed_and_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [{"params": ["a", "b", "c"], "lr": 0.5}]
    after = [{"params": ["a", "f"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
    net, new = saved_and_new(tmp_path, before, after)
    with CheckpointManager(tmp_path) as manager:
        manager.restore(model=net, optimizer=new)
    assert [group["lr"] for group in new.param_groups] == [0.5, 0.5]
    assert net.f not in new.state
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for text in (
        "2 groups were one, and have its values: group 0 ('a', 'b', 'c')",
        "parameters were added: 'f'",
        "parameters were removed: 'c'",
    ):
        assert text in record.getMessage()


def test_parameters_that_left_the_model_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_and_new(tmp_path, [{"params": list("ab")}], [{"params": list("ab")}])
    net = Net("bcdef")
    optimizer = optimizer_of("AdamW", net, [{"params": ["b"]}])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(model=net, optimizer=optimizer)
    [record] = caplog.records
    assert "parameters were removed: 'a'" in record.getMessage()


@pytest.mark.parametrize("is_function", [True, False])
def test_a_key_map_renames_the_parameters_of_an_optimizer(
    tmp_path: Path, is_function: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two names are exchanged."""
    groups = [{"params": ["a"], "lr": 0.5}, {"params": ["b"], "lr": 0.25}]
    net, _ = saved_and_new(tmp_path, groups, groups)
    other = dict(zip("ab", "ba", strict=True))

    def key_of(key: str) -> str:
        return ".".join(other.get(part, part) for part in key.split("."))

    keys = [f"model.{n}" for n in "ab"]
    for value in ("step", "exp_avg", "exp_avg_sq"):
        keys += [f"optimizer.state.{name}.{value}" for name in "ab"]
    key_map = key_of if is_function else {key: key_of(key) for key in keys}
    optimizer = optimizer_of("AdamW", net, [{**g, "lr": 9.0} for g in groups])
    plain_net, plain = Net(NAMES), None
    with CheckpointManager(tmp_path) as manager:
        manager.restore(model=net, optimizer=optimizer, key_map=key_map)
        plain = optimizer_of("AdamW", plain_net, groups)
        manager.restore(model=plain_net, optimizer=plain)
    assert not caplog.records
    renamed, found = held(net, optimizer), held(plain_net, plain)
    for name in "ab":
        assert renamed["params"][name] == found["params"][other[name]]
        assert renamed["state"][name] == found["state"][other[name]]
    assert [group["lr"] for group in renamed["groups"]] == [0.25, 0.5]


def test_an_optimizer_from_which_all_parameters_were_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [{"params": list("ab"), "lr": 0.5}]
    net, new = saved_and_new(tmp_path, groups, [{"params": [], "lr": 0.25}])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(model=net, optimizer=new)
    [record] = caplog.records
    assert "parameters were removed: 'a', 'b'" in record.getMessage()
    assert new.param_groups[0]["lr"] == 0.25


def test_no_common_parameter_is_an_error(tmp_path: Path) -> None:
    net, new = saved_and_new(tmp_path, [{"params": list("ab")}], [{"params": ["c"]}])
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(
            MismatchError,
            match=r"parameters 'c' were not in .* had 'a', 'b'. A key_map",
        ),
    ):
        manager.restore(model=net, optimizer=new)


def test_schedulers_keep_the_values_of_each_group(tmp_path: Path) -> None:
    """Groups in another order: base_lrs go with the parameters."""

    def job(order: int) -> dict[str, Any]:
        net = Net(NAMES)
        groups = [
            {"params": ["a"], "lr": 0.5},
            {"params": ["b"], "lr": 0.25},
            {"params": ["c"], "lr": 0.125},
        ]
        shifted = groups[order:] + groups[:order]
        optimizer = optimizer_of("momentum", net, shifted)
        parts = [LambdaLR(optimizer, lambda n: 0.9**n), StepLR(optimizer, 3)]
        scheduler = SequentialLR(optimizer, parts, [4])
        return {"model": net, "optimizer": optimizer, "scheduler": scheduler}

    def train(objects: dict[str, Any], numbers: range) -> list[Any]:
        for number in numbers:
            steps(objects["model"], objects["optimizer"], "abc", [number])
            objects["scheduler"].step()
        rates = Named(objects["model"], objects["optimizer"]).param_groups
        return sorted((group["params"], group["lr"]) for group in rates)

    first = job(0)
    train(first, range(2))
    second = job(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, **first)
        manager.restore(**second)
    assert train(second, range(2, 12)) == train(first, range(2, 12))
    values = [
        {n: p.tolist() for n, p in j["model"].named_parameters()}
        for j in (first, second)
    ]
    assert values[0] == values[1]
