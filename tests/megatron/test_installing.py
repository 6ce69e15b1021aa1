"""Our modules under Megatron's names, in a small package that imports them in all the ways that Megatron does."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megackpt
from megackpt import megatron
from megackpt.megatron import import_hook, mapping, serialization

CORE = "megatron.core"
ROOT = f"{CORE}.dist_checkpointing"

SOURCES = {
    "core/__init__.py": "from . import utils, models\nfrom .models import gpt\n",
    "core/package_info.py": "__version__ = {version!r}\n",
    "core/utils.py": "from megatron.core.dist_checkpointing.mapping import ShardedTensor as Renamed\nPLAIN = 7\n",
    "core/models/__init__.py": "from ...core import dist_checkpointing\n",
    "core/models/gpt.py": "import megatron.core.dist_checkpointing.mapping as m\n"
    "from ..dist_checkpointing import ShardedTensor, save\n"
    "from ..dist_checkpointing.validation import determine_global_metadata\n"
    "class Derived(ShardedTensor): pass\n"
    "def declare(key, data): return ShardedTensor.from_rank_offsets(key, data)\n",
    "core/dist_checkpointing/__init__.py": "from .mapping import ShardedTensor\n"
    "from .serialization import save\nfrom . import validation\n",
    "core/dist_checkpointing/mapping.py": "class ShardedTensor:\n"
    "    @classmethod\n    def from_rank_offsets(cls, key, data): return cls()\n",
    "core/dist_checkpointing/serialization.py": "def save(*args): return 'theirs'\n",
    "core/dist_checkpointing/validation.py": "def determine_global_metadata(sd): return 'theirs'\n",
    "core/dist_checkpointing/strategies/__init__.py": "",
    "core/dist_checkpointing/strategies/newest.py": "class Newest: ...\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package ``megatron`` of release 0.16.1; nothing of any other is there, before and after."""
    write(tmp_path, "0.16.1")
    before = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.startswith("megatron.")
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    yield
    megatron.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(before)


def write(folder: Path, version: str) -> None:
    for name, source in SOURCES.items():
        file = folder / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            source.format(version=version) if "{version" in source else source
        )


def core() -> Any:
    return importlib.import_module(CORE)


def held(of: Any) -> list[Any]:
    """What modules of Megatron have taken from dist_checkpointing."""
    gpt = of.models.gpt
    return [
        of.utils.Renamed,
        of.models.dist_checkpointing,
        gpt.m,
        gpt.ShardedTensor,
        gpt.save,
    ]


OURS = [
    mapping.ShardedTensor,
    megatron,
    mapping,
    mapping.ShardedTensor,
    serialization.save,
]


def is_theirs(of: Any) -> bool:
    own = of.dist_checkpointing
    expected = [own.ShardedTensor, own, own.mapping, own.ShardedTensor, own.save]
    return (
        isinstance(own, ModuleType)
        and own.__name__ == ROOT
        and held(of) == expected
        and own.save() == "theirs"
        and sys.modules[f"{ROOT}.mapping"] is own.mapping
        and of.models.gpt.determine_global_metadata({}) == "theirs"
    )


@pytest.mark.usefixtures("package")
def test_before_megatron_is_imported() -> None:
    spec = mapping.__spec__
    with megatron.install():
        of = core()
        assert held(of) == OURS
        assert of.dist_checkpointing is megatron
        assert isinstance(
            of.models.gpt.declare("w", torch.ones(2)), megackpt.ShardedTensor
        )
        assert issubclass(of.models.gpt.Derived, megackpt.ShardedTensor)
        with pytest.raises(
            megackpt.CheckpointingException,
            match="determine_global_metadata is not offered",
        ):
            of.models.gpt.determine_global_metadata({})
        shard = pickle.loads(f"c{ROOT}.mapping\nShardedTensor\n.".encode())
        assert shard is megackpt.ShardedTensor
        assert mapping.__spec__ is spec
        assert mapping.__name__ == "megackpt.megatron.mapping"
        for name in (
            "strategies.newest",
            "table",
            "nothing",
        ):  # the second is a file in our folder
            with pytest.raises(
                ModuleNotFoundError, match=f"{name} has no counterpart in megackpt"
            ):
                importlib.import_module(f"{ROOT}.{name}")
            assert f"{ROOT}.{name}" not in sys.modules
    assert is_theirs(of)
    assert importlib.import_module(f"{ROOT}.strategies.newest").Newest
    assert issubclass(
        of.models.gpt.Derived, megackpt.ShardedTensor
    )  # derived while it was installed


@pytest.mark.usefixtures("package")
def test_after_megatron_is_imported() -> None:
    of = core()
    assert is_theirs(of)
    theirs = {
        name: module for name, module in sys.modules.items() if name.startswith(ROOT)
    }
    derived, plain = of.models.gpt.Derived, of.utils.PLAIN
    megatron.install()
    assert held(of) == OURS
    assert of.dist_checkpointing is megatron
    assert importlib.import_module(f"{ROOT}.strategies.zarr").ZarrLoadShardedStrategy
    assert isinstance(of.models.gpt.declare("w", torch.ones(2)), megackpt.ShardedTensor)
    assert (of.models.gpt.Derived, of.utils.PLAIN) == (
        derived,
        plain,
    )  # not reached, as install() says
    megatron.uninstall()
    assert is_theirs(of)
    assert theirs.items() <= sys.modules.items()
    assert f"{ROOT}.strategies.zarr" not in sys.modules


@pytest.mark.usefixtures("package")
def test_twice_and_one_within_another() -> None:
    first = megatron.install()
    of = core()
    with megatron.install():
        assert held(of) == OURS
    assert held(of) == OURS  # the inner one had put nothing in
    assert sum(finder is import_hook._hook for finder in sys.meta_path) == 1
    with first:
        pass
    assert is_theirs(of)
    megatron.uninstall()
    assert is_theirs(of)


@pytest.mark.parametrize("release", ["0.20.3", None])
def test_an_untested_release_is_warned_of(
    package: None, tmp_path: Path, release: str | None
) -> None:
    write(tmp_path, release or "")
    if release is None:
        (tmp_path / "megatron" / "core" / "package_info.py").unlink()
    version = release or "an unknown release"
    with (
        pytest.warns(UserWarning, match=f"in the place of {version}") as caught,
        megatron.install(),
    ):
        assert held(core()) == OURS
    assert len(caught) == 1


def test_an_untested_release_that_is_imported_already(
    package: None, tmp_path: Path
) -> None:
    write(tmp_path, "0.20.3")
    core()
    with pytest.warns(UserWarning, match="in the place of 0.20.3"):
        megatron.install()


@pytest.mark.parametrize("release", ["0.20.3", "0.16.1"])
def test_an_install_that_raises_exchanges_nothing(
    package: None, tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, release)
    of, replace, calls = core(), import_hook._replace, []

    def interrupted(*modules: Any) -> None:
        replace(*modules)
        calls.append(modules)
        if len(calls) == 1:
            raise KeyboardInterrupt

    if release in import_hook.TESTED:
        monkeypatch.setattr(import_hook, "_replace", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, KeyboardInterrupt)):
            megatron.install()
    assert import_hook._hook not in sys.meta_path
    assert is_theirs(of)


@pytest.mark.usefixtures("package")
def test_a_tested_release_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with megatron.install():
            core()


def test_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with megatron.install(), pytest.raises(ModuleNotFoundError, match="'megatron'"):
        importlib.import_module(ROOT)
