"""The registry: what names mean, how packages add to it, which format a directory is of, and Megatron's defaults."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import BackendError, NotACheckpoint, ShardedTensor, Strategy, strategies
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.strategies import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from megackpt.strategies.formats import formats
from megackpt.testing import ThreadedGroup

ROOT = Path(__file__).resolve().parent.parent

BACKEND = """
from dataclasses import replace

from megackpt.backends.torch_dist import TorchDist

class Mine(TorchDist):
    properties = replace(TorchDist.properties, name="mine")

class Newer(Mine):
    properties = replace(Mine.properties, version=2, reads=frozenset({2}))

class Reader(Newer):
    properties = replace(Mine.properties, version=3, reads=frozenset({1, 2, 3}))
"""


def with_line(line: str) -> str:
    """The same, in which ``Mine`` has one line more."""
    first = '    properties = replace(TorchDist.properties, name="mine")\n'
    return BACKEND.replace(first, f"{first}    {line}\n")


def state(value: float = 1.0, size: int = 4):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((size,), value))}


def saved_as(directory: Path) -> tuple[str, int]:
    return open_checkpoint(directory).manifest.backend


@pytest.fixture(autouse=True)
def a_registry_of_its_own():
    """What a test registers ends with it."""
    formats.cache_clear()
    default_strategies.clear()
    yield
    formats.cache_clear()
    default_strategies.clear()


@pytest.fixture
def plug(tmp_path, monkeypatch):
    """Installs a package: its entry points, and its one module."""
    count = 0

    def install(
        entries: dict[str, str], source: str = BACKEND, package: str = "megackpt-mine"
    ) -> str:
        nonlocal count
        count += 1
        site, module = tmp_path / f"site{count}", f"plugged_{tmp_path.name}_{count}"
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        lines = [
            f"{name} = {module}:{attribute}" for name, attribute in entries.items()
        ]
        info.joinpath("entry_points.txt").write_text(
            "\n".join(["[megackpt.backends]", *lines])
        )
        site.joinpath(f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        formats.cache_clear()
        return module

    return install


# -- names


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ("torch_dist", 1)),
        ("zarr", ("zarr", 2)),
        (("torch_dist", 1), ("torch_dist", 1)),
        (Strategy("zarr"), ("zarr", 2)),
        (Strategy("zarr", 2, balance=False), ("zarr", 2)),
        (Zarr(), ("zarr", 2)),
    ],
)
def test_whatever_names_a_format_saves_in_it_and_loads_it(tmp_path, given, expected):
    megackpt.save(state(7.0), tmp_path / "c", given)
    assert saved_as(tmp_path / "c") == expected
    for asked in (given, None):
        assert megackpt.load(state(), tmp_path / "c", asked)["w"].tolist() == [7.0] * 4


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(tmp_path):
    for call in (megackpt.save, megackpt.load):
        with pytest.raises(
            BackendError,
            match=r"unknown format 'zar': known are .*torch_dist.*; did you mean 'zarr'\?",
        ):
            call(state(), tmp_path / "c", "zar")
    with pytest.raises(
        BackendError, match=r"unknown format 'xyzzy': known are [a-z_, ]*$"
    ):
        megackpt.save(state(), tmp_path / "c", "xyzzy")


@pytest.mark.parametrize("wrong", [5, ("zarr",), ("zarr", "2"), TorchDist])
def test_what_names_no_format_is_refused(tmp_path, wrong):
    with pytest.raises(BackendError, match="a strategy is a name"):
        megackpt.save(state(), tmp_path / "c", wrong)


def test_options_go_to_the_format_or_are_refused(tmp_path):
    megackpt.save(state(), tmp_path / "c", Strategy(options={"separation_hint": "w"}))
    assert "w__0_0.distcp" in [path.name for path in (tmp_path / "c").iterdir()]
    with pytest.raises(
        BackendError, match=r"'zarr' does not take the options \{'colour': 'red'\}"
    ):
        megackpt.save(
            state(), tmp_path / "d", Strategy("zarr", options={"colour": "red"})
        )
    with pytest.raises(
        BackendError, match="options of a Strategy must be a dict, not 'red'"
    ):
        Strategy("zarr", options="red")


def test_a_version_that_is_not_written_or_not_known(tmp_path):
    with pytest.raises(
        BackendError,
        match=r"version 7 of the format 'zarr' is not written .*: it writes \[2\]",
    ):
        megackpt.save(state(), tmp_path / "c", ("zarr", 7))
    with pytest.raises(
        BackendError,
        match="version 7 of the format 'zarr' is not known to this release",
    ):
        megackpt.load(state(), tmp_path / "c", ("zarr", 7))


# -- formats of other packages


def test_a_package_adds_a_format_by_its_entry_point(tmp_path, plug):
    plug({"mine": "Mine"})
    megackpt.save(state(3.0), tmp_path / "c", "mine")
    assert saved_as(tmp_path / "c") == ("mine", 1)
    assert megackpt.load(state(), tmp_path / "c")["w"].tolist() == [3.0] * 4
    with pytest.raises(BackendError, match="did you mean 'mine'"):
        megackpt.save(state(), tmp_path / "d", "mime")


def test_versions_of_a_format_stand_beside_each_other(tmp_path, plug):
    plug({"mine": "Mine", "mine@2": "Newer"})
    for given, version in (("mine", 2), (("mine", 1), 1), (("mine", 2), 2)):
        megackpt.save(state(float(version)), tmp_path / "c", given)
        assert saved_as(tmp_path / "c") == ("mine", version)
        assert megackpt.load(state(), tmp_path / "c")["w"][0] == version
    with pytest.raises(
        BackendError,
        match=r"version 3 .* is not known to this release: it has \[1, 2\]",
    ):
        strategies.backend_named("mine", 3)


def test_an_old_version_may_be_read_and_not_written(tmp_path, plug):
    module = importlib.import_module(plug({"mine@3": "Reader"}))
    megackpt.save(state(1.5), tmp_path / "old", module.Mine())
    for asked in (None, "mine", ("mine", 1), ("mine", 3)):
        assert megackpt.load(state(), tmp_path / "old", asked)["w"][0] == 1.5
    assert megackpt.get_default_load_sharded_strategy(tmp_path / "old") == Strategy(
        "mine", 1
    )
    with pytest.raises(
        BackendError,
        match=r"version 1 of the format 'mine' is not written .* it writes \[3\]",
    ):
        megackpt.save(state(), tmp_path / "new", ("mine", 1))


RAISES = "raise RuntimeError('not today')"
BROKEN = [
    ({"mine": "Mine"}, "import nowhere", "needs a package .*'nowhere'.*: pip install megackpt-mine"),
    ({"mine": "Mine"}, RAISES, "'mine' cannot be imported: RuntimeError: not today"),
    ({"mine": "Absent"}, BACKEND, "'mine' cannot be imported: AttributeError: .*Absent"),
    ({"mine": "function"}, "def function(): ...", r"of megackpt-mine is broken: \w+:function is not a subclass"),
    ({"mine": "Mine"}, "class Mine: ...", r"is broken: \w+:Mine is not a subclass of megackpt.backends.base.Backend"),
    (
        {"mine": "Half"},
        "from megackpt.backends.base import Backend\nclass Half(Backend):\n    ...\n",
        "Half lacks finish, layout, read, read_manifest, write",
    ),
    ({"mine": "Newer"}, BACKEND, r"is of \('mine', 1\), and Newer.properties of \('mine', 2\)"),
    ({"mine": "Mine"}, "raise SystemExit(7)", "'mine' cannot be imported: SystemExit: 7"),
    ({"mine": "Mine"}, with_line("properties = replace(properties, reads=())"),
        "Mine.properties.reads lacks its own version, 1"),
    ({"mine": "Mine"}, with_line("__init__ = lambda self: 1 / 0"), "does not take the options .*by zero"),
    ({"mine@two": "Mine"}, BACKEND, "in the entry point 'mine@two' the version after @ is not a number"),
    ({"mine@0": "Mine"}, BACKEND, "is not a number >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "source", "told"), BROKEN)
def test_a_broken_plug_in_is_told_of_when_asked_for_and_breaks_nothing_else(
    tmp_path, plug, entries, source, told
):
    plug(entries, source)
    with pytest.raises(BackendError, match=told):
        megackpt.save(state(), tmp_path / "c", "mine")
    megackpt.save(state(5.0), tmp_path / "c")
    bare(tmp_path / "c")  # now all formats are asked
    assert megackpt.load(state(), tmp_path / "c")["w"][0] == 5.0
    with pytest.raises(
        NotACheckpoint, match=f"(?s)no known format .*not asked: mine: .*{told}"
    ):
        megackpt.load(state(), tmp_path)


def test_two_packages_that_register_one_format_are_both_left_aside(tmp_path, plug):
    plug({"mine": "Mine"})
    plug({"mine": "Mine"}, package="megackpt-other")
    with pytest.raises(
        BackendError,
        match=r"of megackpt-\w+ and megackpt-\w+ is broken: all of them register it",
    ):
        megackpt.save(state(), tmp_path / "c", "mine")
    megackpt.save(state(), tmp_path / "c")


def test_a_built_in_name_is_not_to_be_had(tmp_path, plug, caplog):
    source = BACKEND.replace('"mine"', '"torch_dist"')
    plug({"torch_dist": "Mine", "torch_dist@2": "Newer"}, source)
    with caplog.at_level(logging.WARNING):
        megackpt.save(state(), tmp_path / "c", "torch_dist")
    assert (
        "megackpt-mine registers a format 'torch_dist', which is built in: it is ignored"
        in caplog.text
    )
    assert type(open_checkpoint(tmp_path / "c").backend) is TorchDist
    assert saved_as(tmp_path / "c") == ("torch_dist", 1)


def test_a_backend_that_nobody_registered_is_given_as_an_object(tmp_path, plug):
    module = plug({})
    mine = importlib.import_module(module).Mine()
    megackpt.save(state(2.0), tmp_path / "c", mine)
    with pytest.raises(
        BackendError, match=f"{tmp_path}/c: unknown format 'mine': known are"
    ):
        megackpt.load(state(), tmp_path / "c")
    assert megackpt.load(state(), tmp_path / "c", mine)["w"][0] == 2.0
    assert set(megackpt.load_tensors_metadata(tmp_path / "c", mine)) == {"w"}
    bare(tmp_path / "c")
    assert megackpt.load(state(), tmp_path / "c", mine)["w"][0] == 2.0


def test_an_object_that_cannot_read_the_version_says_so(tmp_path, plug):
    module = importlib.import_module(plug({"mine": "Mine"}))
    megackpt.save(state(), tmp_path / "c", "mine")
    with pytest.raises(BackendError, match=r"reads \[2\], and this is version 1"):
        megackpt.load(state(), tmp_path / "c", module.Newer())


def test_what_a_plug_in_raises_while_it_reads_is_told_as_its_own(
    tmp_path, plug, monkeypatch
):
    mine = importlib.import_module(plug({})).Mine()
    megackpt.save(state(), tmp_path / "c", mine)
    bare(tmp_path / "c")

    def read_manifest(self, root):
        raise ValueError("what is this")

    monkeypatch.setattr(type(mine), "read_manifest", read_manifest)
    with pytest.raises(
        BackendError,
        match=r"/c: the format 'mine' failed at reading .*: ValueError: what is this",
    ):
        megackpt.load(state(), tmp_path / "c", mine)


# -- which format a directory is of


def bare(directory: Path) -> None:
    """Leave what stock DCP writes, and nothing that says who wrote it."""
    for name in ("megackpt.index", "metadata.json"):
        (directory / name).unlink()


def test_a_directory_of_two_formats_is_an_error_that_says_how_to_choose(tmp_path, plug):
    plug({"mine": "Mine"})
    megackpt.save(state(4.0), tmp_path / "c")
    bare(tmp_path / "c")

    def load(group, asked):
        loaded = megackpt.load(
            state(),
            tmp_path / "c",
            asked,
            validate_access_integrity=False,
            process_group=group,
        )
        return loaded["w"].tolist()

    told = (
        f"{tmp_path}/c can be read as 'torch_dist' and as 'mine', and has no metadata.json that says which: "
        "choose by sharded_strategy='torch_dist'"
    )
    for error in ThreadedGroup.outcomes(2, lambda group: load(group, None)):
        assert isinstance(error, BackendError)
        assert told in str(error)
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "c")
    for asked in ("mine", ("mine", 1), Strategy("torch_dist"), TorchDist()):
        assert (
            ThreadedGroup.run(2, lambda group, asked=asked: load(group, asked))
            == [[4.0] * 4] * 2
        )
    with pytest.raises(BackendError, match="can be read as 'torch_dist' and as 'mine'"):
        megackpt.load_tensors_metadata(tmp_path / "c")
    for call in (
        megackpt.load_tensors_metadata,
        megackpt.load_sharded_metadata,
        megackpt.load_plain_tensors,
    ):
        assert "w" in call(tmp_path / "c", sharded_strategy="mine")
    assert (
        megackpt.load_common_state_dict(tmp_path / "c", sharded_strategy="mine") == {}
    )


def test_metadata_json_decides_alone(tmp_path, plug):
    plug({"mine": "Mine"})
    for name in ("mine", "torch_dist"):
        megackpt.save(state(), tmp_path / name, name)
        (tmp_path / name / "megackpt.index").unlink()
        assert saved_as(tmp_path / name) == (name, 1)


@pytest.mark.parametrize("gone", [[], ["megackpt.index"]])
def test_another_format_than_the_one_asked_for(tmp_path, gone):
    megackpt.save(state(), tmp_path / "c")
    for name in gone:
        (tmp_path / "c" / name).unlink()
    told = f"{tmp_path}/c: it holds the format 'torch_dist', not 'zarr': leave sharded_strategy out"
    for asked in ("zarr", Zarr()):
        with pytest.raises(BackendError, match=told):
            megackpt.load(state(), tmp_path / "c", asked)


def test_a_directory_that_the_format_asked_for_does_not_know(tmp_path):
    megackpt.save(state(), tmp_path / "c")
    bare(tmp_path / "c")
    with pytest.raises(NotACheckpoint, match="the format 'zarr' does not recognise it"):
        megackpt.load(state(), tmp_path / "c", "zarr")


def test_a_format_that_fails_at_recognising_hides_no_other(tmp_path, plug):
    plug(
        {"mine@3": "Reader"},
        BACKEND + "\n    def recognises(self, root):\n        return 1 / 0\n",
    )
    megackpt.save(state(6.0), tmp_path / "c")
    bare(tmp_path / "c")
    assert megackpt.load(state(), tmp_path / "c")["w"][0] == 6.0
    with pytest.raises(NotACheckpoint, match="not asked: mine: division by zero"):
        megackpt.load(state(), tmp_path / "site1")


def test_a_built_in_format_whose_package_is_missing(tmp_path):
    """In a process that cannot import numcodecs."""
    megackpt.save(state(), tmp_path / "zarr", "zarr")
    megackpt.save(state(), tmp_path / "dcp")
    bare(tmp_path / "dcp")
    code = f"""
        import sys
        sys.modules["numcodecs"] = None  # as if it were not installed
        import torch, megackpt
        state = {{"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}}
        def told(call, *arguments):
            try:
                call(*arguments)
            except megackpt.CheckpointingException as error:
                return f"{{type(error).__name__}}: {{error}}"
        missing = "the format 'zarr' needs a package that is not installed"
        saving = told(megackpt.save, state, r"{tmp_path}/new", "zarr")
        assert saving.startswith(f"BackendError: {{missing}}"), saving
        assert saving.endswith(": pip install numcodecs google-crc32c"), saving
        loading = told(megackpt.load, state, r"{tmp_path}/zarr")
        assert loading.startswith(r"BackendError: {tmp_path}/zarr: " + missing), loading
        default = told(megackpt.get_default_save_sharded_strategy, "zarr", 2)
        assert default.startswith("BackendError: Cannot import a default strategy for: ('save_sharded', 'zarr', 2)")
        megackpt.save(state, r"{tmp_path}/new")
        assert megackpt.load(state, r"{tmp_path}/dcp")["w"].tolist() == [1.0] * 4
        unknown = told(megackpt.load, state, r"{tmp_path}")
        assert "no known format" in unknown and "not asked: zarr: " + missing in unknown, unknown
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


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

    def load(group, asked):
        loaded = megackpt.load(
            state(),
            tmp_path / "c",
            asked,
            validate_access_integrity=False,
            process_group=group,
        )
        return loaded["w"][0].item()

    for asked in (None, "torch_dist", ("torch_dist", 1), Strategy("torch_dist")):
        assert ThreadedGroup.run(2, lambda group, asked=asked: load(group, asked)) == [
            8.0,
            8.0,
        ]
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
        loaded = megackpt.load(
            state(),
            tmp_path / "c",
            asked,
            validate_access_integrity=False,
            process_group=group,
        )
        assert loaded["w"].tolist() == [8.0] * 4
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
