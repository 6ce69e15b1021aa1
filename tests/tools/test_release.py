"""The packages of a release: their metadata, and that the wheel works in an environment of its own."""

from __future__ import annotations

import email
import os
import re
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import megackpt

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://example.org/team/megackpt"
PROGRAM = """
import sys
import torch
import megackpt
from megackpt.__main__ import main

assert megackpt.__file__.startswith(sys.prefix), megackpt.__file__
model = torch.nn.Linear(4, 2)
checkpoints = megackpt.CheckpointManager("run")
checkpoints.save(1, model=model)
assert checkpoints.restore(model=model).step == 1
assert main(["show", checkpoints.path(1), "--html", "map.html"]) == 0
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "dist"
    script = str(ROOT / "tools" / "release.py")
    told = run(sys.executable, script, REPOSITORY, "--out", str(out), cwd=out.parent)
    assert sorted(told.split()) == sorted(map(str, out.iterdir()))
    return out


@pytest.mark.slow
def test_the_metadata_has_absolute_links(packages: Path) -> None:
    (wheel,) = packages.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == megackpt.__version__
    assert metadata["Author"]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls["Source"] == REPOSITORY
    assert set(urls) == {"Source", "Issues", "Documentation", "Changelog"}
    readme = str(metadata.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", readme)
    tag = f"v{megackpt.__version__}"
    for mark, link in links:
        kind = "raw" if mark else "blob"
        prefix = f"{REPOSITORY}/{kind}/{tag}/"
        assert link.startswith(("https://", "http://")), link
        if link.startswith(REPOSITORY):
            assert link.startswith(prefix)
            assert (ROOT / link.removeprefix(prefix).split("#")[0]).exists()
    assert len(links) > 20
    (source,) = packages.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
    assert f"megackpt-{megackpt.__version__}/setup.cfg" in names


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(
    packages: Path, tmp_path: Path
) -> None:
    """What it depends on is found in this environment, so that nothing is downloaded."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = str(place / "bin" / "python")
    (wheel,) = packages.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    (own,) = place.glob("lib/python*/site-packages")
    # A path alone: the .pth files there, such as that of an editable install, do not count.
    (own / "others.pth").write_text("\n".join(site.getsitepackages()))
    run(python, "-I", "-c", PROGRAM, cwd=tmp_path)
    command = str(place / "bin" / "megackpt")
    assert megackpt.__version__ in run(command, "--version", cwd=tmp_path)
    assert "model.weight" in run(command, "show", "run/iter_0000001", cwd=tmp_path)
    assert (tmp_path / "map.html").stat().st_size > 10_000
    assert "megackpt" in os.listdir(own)
