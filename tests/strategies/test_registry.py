"""The registry: what names mean, how packages add to it, and which format a directory is of."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import textwrap

import pytest

import megackpt
from megackpt import BackendError, NotACheckpoint, Strategy, strategies
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.testing import ThreadedGroup
from tests.strategies.plugged import (
    BACKEND,
    ROOT,
    bare,
    load_over,
    saved_as,
    state,
    with_line,
)

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


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    for call in (megackpt.save, megackpt.load):
        with pytest.raises(
            BackendError,
            match=r"unknown format 'zar': known are [a-z_, ]*torch_dist, zarr$",
        ):
            call(state(), tmp_path / "c", "zar")


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
    with pytest.raises(
        BackendError, match=r"unknown format 'mime': known are .*mine, "
    ):
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
def test_a_broken_plug_in_raises_when_asked_for_and_other_formats_work(
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


def test_an_unregistered_backend_is_given_as_an_object(tmp_path, plug):
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


def test_an_exception_of_a_plug_in_names_its_format(tmp_path, plug, monkeypatch):
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


def test_a_directory_of_two_formats_is_an_error_that_says_how_to_choose(tmp_path, plug):
    plug({"mine": "Mine"})
    megackpt.save(state(4.0), tmp_path / "c")
    bare(tmp_path / "c")

    told = (
        f"{tmp_path}/c can be read as 'torch_dist' and as 'mine', and has no metadata.json that says which: "
        "choose by sharded_strategy='torch_dist'"
    )
    for error in ThreadedGroup.outcomes(
        2, lambda group: load_over(group, tmp_path / "c", None)
    ):
        assert isinstance(error, BackendError)
        assert told in str(error)
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "c")
    for asked in ("mine", ("mine", 1), Strategy("torch_dist"), TorchDist()):
        assert (
            ThreadedGroup.run(
                2, lambda group, asked=asked: load_over(group, tmp_path / "c", asked)
            )
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
        assert saving.endswith(": pip install numcodecs google-crc32c tensorstore zarr"), saving
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
