"""A format of somebody else: the example package, installed by pip, found by its entry point, proved by its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "megackpt-npz"
PAGE = ROOT / "docs" / "adding-a-backend.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where pip has installed the example, from a copy and without asking any index."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    alone = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(folder / "site"),
    ]
    run([*pip, *alone, str(folder / "source")])
    return folder / "site"


def run(command, site=None, cwd=ROOT):
    path = os.pathsep.join([*([str(site)] if site else []), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_an_installed_format_works_by_its_name(site, tmp_path):
    program = """
        import torch, megackpt
        from megackpt import ShardedObject, ShardedTensor, Strategy
        from megackpt.testing import ThreadedGroup

        whole = torch.arange(240, dtype=torch.float32).reshape(12, 20).to(torch.bfloat16)

        def shards(rank, size, part):
            return {
                "w": ShardedTensor.from_rank_offsets("w", part, (0, rank, size)),
                "rng": ShardedObject("rng", {"seed": rank}, (size,), (rank,)),
                "step": 7,
            }

        def save(group):
            state = shards(group.rank, 4, whole.chunk(4)[group.rank].clone())
            megackpt.save(state, "saved", "npz", process_group=group)
            megackpt.save(state, "options", Strategy("npz", 1, {"prefix": "part"}), process_group=group)

        def load(group):
            rank, size = group.rank, group.size
            columns = torch.zeros(12, 20 // size, dtype=torch.bfloat16)
            asked = {"w": ShardedTensor.from_rank_offsets("w", columns, (1, rank, size)), "step": 0}
            return megackpt.load(asked, directory, process_group=group)

        ThreadedGroup.run(4, save)
        for directory in ("saved", "options"):
            parts = ThreadedGroup.run(2, load)
            assert torch.equal(torch.cat([part["w"] for part in parts], 1), whole)
            assert [part["step"] for part in parts] == [7, 7]
        assert megackpt.get_default_load_sharded_strategy("saved") == Strategy("npz", 1)
        assert megackpt.verify("saved").ok
        for source, target, to in (("saved", "zarr", "zarr"), ("zarr", "back", "npz"), ("back", "dist", "torch_dist")):
            megackpt.convert(source, target, to)
            assert torch.equal(megackpt.load_plain_tensors(target)["w"], whole)
        loaded = megackpt.load({"rng": ShardedObject("rng", None, (4,), (2,))}, "back", validate_access_integrity=False)
        assert loaded["rng"] == {"seed": 2}
    """
    run([sys.executable, "-c", textwrap.dedent(program)], site, tmp_path)
    megackpt = [sys.executable, "-m", "megackpt"]
    assert "format: npz\nversion: 1\n" in run(
        [*megackpt, "show", "saved"], site, tmp_path
    )
    assert run([*megackpt, "verify", "back"], site, tmp_path).startswith("ok: yes\n")


def test_damage_is_found(site, tmp_path):
    program = """
        import torch, megackpt
        from pathlib import Path
        state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
        megackpt.save(state, "c", "npz")
        archive = Path("c/rank_0.npz")
        data = bytearray(archive.read_bytes())
        data[data.index(torch.ones(4).numpy().tobytes()) + 2] ^= 1
        archive.write_bytes(data)
        (problem,) = megackpt.verify("c").problems
        assert "'w' [0:1000]" in problem and "rank_0.npz" in problem, problem
        try:
            megackpt.load(state, "c")
        except megackpt.CorruptCheckpoint as error:
            assert "'w' [0:1000] in rank_0.npz is damaged" in str(error), error
        else:
            raise SystemExit("nobody noticed")
    """
    run([sys.executable, "-c", textwrap.dedent(program)], site, tmp_path)


def test_without_the_package_the_name_is_unknown(site, tmp_path):
    """What has to be installed to read a checkpoint of a format that is not there: at least its name is told."""
    save = "import torch, megackpt; megackpt.save({'a': 1}, 'c', 'npz')"
    run([sys.executable, "-c", save], site, tmp_path)
    load = """
        import megackpt
        try:
            megackpt.load_common_state_dict("c")
        except megackpt.BackendError as error:
            assert "/c: unknown format 'npz': known are" in str(error), error
        else:
            raise SystemExit("read without its package")
    """
    run([sys.executable, "-c", textwrap.dedent(load)], None, tmp_path)


@pytest.mark.slow
def test_its_own_tests_pass_where_it_is_installed(site, tmp_path):
    """Among them the conformance tests, as an author of a plug-in runs them: warnings are errors."""
    shutil.copy(EXAMPLE / "test_megackpt_npz.py", tmp_path)
    options = [
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    told = run(
        [sys.executable, "-m", "pytest", *options, "test_megackpt_npz.py"],
        site,
        tmp_path,
    )
    assert re.search(r"\b\d{2} passed", told)
    assert "failed" not in told
    assert "skipped" not in told


def test_the_conformance_tests_can_be_imported_without_pytest():
    program = "import sys; import megackpt.testing; sys.exit('pytest' in sys.modules)"
    run([sys.executable, "-c", program])


def test_the_page_shows_the_whole_module_and_nothing_else():
    """The blocks of the page up to "Using it" are the module, in its order and to the letter."""
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(
        r"^```python\n(.*?)^```$",
        text.partition("## Using it")[0],
        re.MULTILINE | re.DOTALL,
    )
    module = (EXAMPLE / "megackpt_npz.py").read_text(encoding="utf-8")
    docstring, _, code = module.partition('"""\n\n')
    assert "\n\n".join(shown).split() == code.split()
    assert all(block.rstrip() in module for block in shown)
    assert docstring.startswith('"""A format for megackpt')


@pytest.mark.parametrize("name", ["pyproject.toml", "test_megackpt_npz.py"])
def test_the_page_shows_the_other_files_as_they_are(name):
    text = PAGE.read_text(encoding="utf-8")
    content = (EXAMPLE / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    taken = [block for block in blocks if block.rstrip() in content]
    assert len(taken) == 1
    assert {
        "pyproject.toml": "[project.entry-points",
        "test_megackpt_npz.py": "class TestNpz",
    }[name] in taken[0]
