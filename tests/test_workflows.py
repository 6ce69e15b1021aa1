"""The files for a public host: workflows run targets of the Makefile, on what setup.cfg promises, with few rights."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import named
from tools import compat

ROOT = Path(__file__).resolve().parent.parent
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
COMPATIBILITY = HOST / "workflows" / "compatibility.yml"


def loaded(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in loaded(path)["jobs"].values():
        yield from job["steps"]


def matrix() -> dict[str, Any]:
    return loaded(COMPATIBILITY)["jobs"]["tests"]["strategy"]["matrix"]


def settings() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


def test_the_matrix_has_the_pythons_of_the_classifiers() -> None:
    classifiers = settings()["metadata"]["classifiers"]
    promised = re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert matrix()["python"] == promised
    assert settings()["options"]["python_requires"] == f">={promised[0]}"


def test_the_matrix_has_pairs_of_the_compatibility_tool() -> None:
    pairs = {pair.name for pair in compat.pairs()}
    assert matrix()["torch"] == ["oldest", "newest", "nightly"]
    assert pairs.issuperset(matrix()["torch"])
    assert pairs - {compat.NIGHTLY} == set(compat.ORDINARY)


def test_a_nightly_pair_ends_where_pip_found_a_release_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is named "nightly" must not report on another torch."""
    (nightly,) = (pair for pair in compat.pairs() if pair.name == compat.NIGHTLY)
    (tmp_path / nightly.name).mkdir()
    monkeypatch.setattr(compat, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(compat.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(compat, "answer", lambda *_: "2.15.0")
    with pytest.raises(SystemExit, match="found no nightly of torch, and installed 2"):
        compat.installed(nightly)
    monkeypatch.setattr(compat, "answer", lambda *_: "2.16.0.dev20261129+cpu")
    assert compat.installed(nightly).endswith("nightly/bin/python")


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    """So each step can be run at home, and says there what it says here."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    commands = [shlex.split(step["run"]) for step in steps(path) if "run" in step]
    assert commands
    for command, *words in commands:
        assert command == "make"
        settings_of_make = [word for word in words if "=" in word]
        assert targets.issuperset(set(words) - set(settings_of_make)), words
        for setting in settings_of_make:
            assert f"$({setting.partition('=')[0]})" in makefile, setting


def test_the_checks_of_continuous_integration_are_in_a_workflow() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    wanted = set(re.findall(r"make --no-print-directory ([\w-]+)$", run, re.MULTILINE))
    asked = {
        step["run"].removeprefix("make ")
        for step in steps(HOST / "workflows" / "check.yml")
        if "run" in step
    }
    assert {"check", "compat-core"} == wanted
    assert wanted <= asked


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_a_workflow_has_no_right_that_it_does_not_name(path: Path) -> None:
    assert loaded(path)["permissions"] == {}
    for job in loaded(path)["jobs"].values():
        assert job["permissions"]["contents"] == "read"


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_actions_are_named_by_commits(path: Path) -> None:
    """A tag can be moved to other code."""
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_the_checklist_of_a_release_names_each_file_with_a_placeholder() -> None:
    text = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    placeholder = re.compile(r"(?<![\w$])(OWNER|CONDUCT-ADDRESS)\b")
    files = [
        *(path for path in HOST.rglob("*") if path.is_file()),
        ROOT / "CITATION.cff",
    ]
    having = {
        named(path)
        for path in files
        if placeholder.search(path.read_text(encoding="utf-8"))
    }
    listed = re.search(
        r"^These files have placeholders: (.*?)\.$", text, re.MULTILINE | re.DOTALL
    )
    assert listed
    assert (
        set(re.findall(r"`([^`]+)`", listed[1]))
        - {
            "OWNER",
            "CONDUCT-ADDRESS",
        }
        == having
    )


def test_each_path_of_codeowners_exists() -> None:
    lines = (HOST / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert paths[0] == "*"
    assert all((ROOT / path.strip("/")).is_dir() for path in paths[1:])


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    package = (ROOT / "megackpt" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{citation["version"]}"' in package
    assert citation["license"] == settings()["metadata"]["license"]
    assert [{"name": settings()["metadata"]["author"]}] == citation["authors"]
