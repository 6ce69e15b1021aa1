"""Megatron's default strategies: registered for saving and for loading."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import BackendError, ShardedTensor, Strategy
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.zarr import Zarr
from megackpt.strategies import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from megackpt.testing import ThreadedGroup
from tests.strategies.plugged import ROOT, bare, load_over, state

# -- Megatron's defaults

SAVE, LOAD = StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED
ONE_FILE = Strategy("torch_dist", options={"files_per_rank": 1})


def test_the_actions_have_megatrons_values():
    assert {action.name: action.value for action in StrategyAction} == {
        "LOAD_COMMON": "load_common",
        "LOAD_SHARDED": "load_sharded",
        "SAVE_COMMON": "save_common",
        "SAVE_SHARDED": "save_sharded",
    }


@pytest.mark.megatron
def test_megatron_has_what_we_think():
    base = (
        ROOT
        / ".peers"
        / "megatron"
        / "core"
        / "dist_checkpointing"
        / "strategies"
        / "base.py"
    )
    body = ast.parse(base.read_text(encoding="utf-8")).body
    found = {
        node.name: node
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    actions = [
        node for node in found["StrategyAction"].body if isinstance(node, ast.Assign)
    ]
    assert {ast.unparse(a.targets[0]): ast.literal_eval(a.value) for a in actions} == {
        action.name: action.value for action in StrategyAction
    }
    for ours in (get_default_strategy, register_default_strategy):
        theirs = [argument.arg for argument in found[ours.__name__].args.args]
        assert theirs == list(ours.__annotations__)[: len(theirs)]


def distcp_files(directory: Path) -> int:
    return len(list(directory.glob("*.distcp")))


def test_what_is_registered_for_saving_is_what_saves(tmp_path):
    several = {**state(), "v": ShardedTensor.from_rank_offsets("v", torch.zeros(3))}
    megackpt.save(several, tmp_path / "before")
    assert distcp_files(tmp_path / "before") == 2
    register_default_strategy(SAVE, "torch_dist", 1, ONE_FILE)
    for i, given in enumerate((None, "torch_dist", ("torch_dist", 1))):
        megackpt.save(several, tmp_path / str(i), given)
        assert distcp_files(tmp_path / str(i)) == 1
    for i, given in enumerate((Strategy(), TorchDist())):  # said in so many words
        megackpt.save(several, tmp_path / f"explicit{i}", given)
        assert distcp_files(tmp_path / f"explicit{i}") == 2
    megackpt.convert(tmp_path / "before", tmp_path / "converted", "torch_dist")
    assert distcp_files(tmp_path / "converted") == 1


def test_no_lookup_takes_away_what_was_registered(tmp_path):
    register_default_strategy(SAVE, "torch_dist", 1, ONE_FILE)
    for _ in range(2):
        assert get_default_strategy(SAVE, "torch_dist", 1) is ONE_FILE
        assert get_default_strategy(LOAD, "torch_dist", 1) == Strategy("torch_dist", 1)
        assert megackpt.get_default_save_sharded_strategy() is ONE_FILE
        megackpt.save(state(), tmp_path / "c")
    assert default_strategies == {
        "save_sharded": {("torch_dist", 1): ONE_FILE},
        "load_sharded": {},
    }


@dataclass(frozen=True)
class Counting(TorchDist):
    """Counts how often instances read."""

    reads_done = []  # noqa: RUF012 - shared on purpose

    def read(self, root, plan, into, verify):
        self.reads_done.append(plan)
        super().read(root, plan, into, verify)


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_registered_for_loading_is_what_loads(tmp_path, gone):
    megackpt.save(state(8.0), tmp_path / "c")
    if gone:
        bare(tmp_path / "c")
    counting = Counting()
    register_default_strategy(LOAD, "torch_dist", 1, counting)
    Counting.reads_done.clear()

    for asked in (None, "torch_dist", ("torch_dist", 1), Strategy("torch_dist")):
        loads = ThreadedGroup.run(
            2, partial(load_over, directory=tmp_path / "c", asked=asked)
        )
        assert loads == [[8.0] * 4] * 2
    assert len(Counting.reads_done) >= 8
    seen = len(Counting.reads_done)
    assert load_alone(tmp_path / "c", TorchDist()) == 8.0
    assert len(Counting.reads_done) == seen
    assert megackpt.load_plain_tensors(tmp_path / "c")["w"][0] == 8.0
    assert len(Counting.reads_done) == seen + 1


def load_alone(directory, asked):
    return megackpt.load(state(), directory, asked)["w"][0].item()


def test_what_is_registered_for_loading_says_who_reads(tmp_path):
    """Whether the format is named or found, unless the caller gives a policy; around None, it is that format's."""
    megackpt.save(state(8.0), tmp_path / "c", "zarr")
    wrapped = megackpt.FullyParallelLoadStrategyWrapper(None, exchange_algo="always")
    register_default_strategy(LOAD, "zarr", 2, wrapped)

    def exchanged(group, asked):
        assert load_over(group, tmp_path / "c", asked) == [8.0] * 4
        return "exchange" in group.log

    for asked in (None, "zarr", ("zarr", 2)):
        assert (
            ThreadedGroup.run(2, lambda group, asked=asked: exchanged(group, asked))
            == [True] * 2
        )
    for asked in (Strategy("zarr"), Zarr()):
        assert (
            ThreadedGroup.run(2, lambda group, asked=asked: exchanged(group, asked))
            == [False] * 2
        )


def test_a_name_of_ones_own(tmp_path, plug):
    mine = importlib.import_module(plug({})).Mine()
    register_default_strategy(SAVE, "mine", 1, mine)
    register_default_strategy(LOAD, "mine", 1, mine)
    megackpt.save(state(9.0), tmp_path / "c", "mine")
    assert megackpt.load(state(), tmp_path / "c")["w"][0] == 9.0
    assert megackpt.load(state(), tmp_path / "c", "mine")["w"][0] == 9.0
    assert (
        megackpt.get_default_load_sharded_strategy(tmp_path / "c").make_backend()
        is mine
    )


def test_defaults_that_cannot_be(tmp_path):
    with pytest.raises(
        BackendError,
        match=r"Cannot find a default strategy for: \('save_sharded', 'xyzzy', 1\)",
    ):
        get_default_strategy(SAVE, "xyzzy", 1)
    with pytest.raises(
        BackendError,
        match=r"Cannot find a default strategy for: \('load_sharded', 'zarr', 9\)",
    ):
        get_default_strategy(LOAD, "zarr", 9)
    with pytest.raises(
        BackendError,
        match=r"Cannot find a default strategy for: \('load_common', 'torch', 1\)",
    ):
        get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    for action in (StrategyAction.LOAD_COMMON, StrategyAction.SAVE_COMMON):
        with pytest.raises(NotImplementedError, match="stores the common state itself"):
            register_default_strategy(action, "torch", 1, ONE_FILE)
    for wrong in (None, object()):
        with pytest.raises(BackendError, match="strategy"):
            register_default_strategy(SAVE, "torch_dist", 1, wrong)
    assert not default_strategies["save_sharded"]
