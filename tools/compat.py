"""Runs the tests that need pip alone on the oldest, the newest and a nightly torch, and on every Python that is found.

python tools/compat.py [--only NAME ...] [--where EXPRESSION] [PATH ...]

Each pair of Python and torch has a virtual environment in .compat, with the versions of .constraints.txt but for
torch's. The pair "nightly" runs if it is named, and takes the torch of an index of nightlies, which pip's own settings
name (PIP_EXTRA_INDEX_URL). Prints a table in Markdown, and fails if a test fails. Imports the standard library alone:
it runs outside of the environments.
"""

from __future__ import annotations

import argparse
import configparser
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".compat"
CONSTRAINTS = ROOT / ".constraints.txt"
NIGHTLY = "nightly"
ORDINARY = ("oldest", "newest", "debian", "python3.12", "python3.13", "python3.14")
"""The pairs that run if none is named."""
DEBIAN = "/usr/bin/python3.11"
"""Python 3.11.2 on Debian 12: a release that pickles members of enums as calls of getattr."""


class Pair(NamedTuple):
    """A Python (None: this machine has none), and what pip installs as torch."""

    name: str
    python: str | None
    torch: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="of a pair; may be repeated"
    )
    parser.add_argument("--where", default="", metavar="EXPRESSION", help="pytest's -m")
    parser.add_argument("paths", nargs="*", help="of tests; all by default")
    options = parser.parse_args()
    known = pairs()
    unknown = set(options.only or ()) - {pair.name for pair in known}
    if unknown:
        names = ", ".join(pair.name for pair in known)
        parser.error(f"no such pair: {', '.join(sorted(unknown))}; there are {names}")
    rows, failed = [], False
    for pair in known:
        if pair.name not in (options.only or ORDINARY):
            continue
        if pair.python is None:
            rows.append(f"| {pair.name} | not found | | | | |")
            failed |= bool(options.only)  # a job that was named must run
            continue
        print(f"{pair.name}: {pair.python} with {pair.torch}", flush=True)
        row, passed = tested(pair, installed(pair), options.where, options.paths)
        rows.append(row)
        failed |= not passed
    print(
        "\n| pair | Python | torch | tests | minutes | date |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
    return failed


def pairs() -> list[Pair]:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    floor = re.search(
        r"^torch>=([\d.]+)$", settings["options"]["install_requires"], re.MULTILINE
    )
    own = re.search(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
    if floor is None or own is None:
        raise SystemExit("setup.cfg or .constraints.txt names no torch")
    debian = DEBIAN if version_of(DEBIAN) == "3.11.2" else None
    return [
        Pair("oldest", debian or sys.executable, f"torch=={floor[1]}"),
        Pair("newest", sys.executable, "torch"),
        Pair("debian", debian, own[0]),
        *(
            Pair(f"python{minor}", interpreter(minor), own[0])
            for minor in ("3.12", "3.13", "3.14")
        ),
        # A lower bound that is a pre-release lets pip take pre-releases, of torch alone.
        Pair(NIGHTLY, sys.executable, f"torch>={floor[1]}.dev0"),
    ]


def interpreter(minor: str) -> str | None:
    """On the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{minor}"),
        *map(str, pyenv.glob(f"versions/{minor}.*/bin/python")),
    ]
    return next(
        (python for python in found if python and version_of(python).startswith(minor)),
        None,
    )


def version_of(python: str) -> str:
    """Such as 3.11.2; empty if it does not run (pyenv leaves such commands on the PATH), or makes no venv."""
    try:
        # Debian has ensurepip in a separate package, python3-venv.
        return answer(
            python, "import ensurepip, platform; print(platform.python_version())"
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


def answer(python: str, program: str) -> str:
    command = [python, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return done.stdout.strip()


def installed(pair: Pair) -> str:
    """The Python of the pair's environment, which is made or brought up to date."""
    folder = ENVIRONMENTS / pair.name
    python = str(folder / "bin" / "python")
    if version_of(python) != version_of(str(pair.python)):
        subprocess.run([str(pair.python), "-m", "venv", "--clear", folder], check=True)
    constraints = folder / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    constraints.write_text(
        "".join(line for line in lines if not line.startswith("torch=="))
    )
    asked = [
        "--upgrade",
        "--constraint",
        str(constraints),
        pair.torch,
        "--editable",
        f"{ROOT}[test]",
    ]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *asked], check=True)
    torch = answer(python, "import torch; print(torch.__version__)")
    if pair.name == NIGHTLY and ".dev" not in torch:
        raise SystemExit(
            f"pip found no nightly of torch, and installed {torch}: name the index of nightlies "
            "in PIP_EXTRA_INDEX_URL"
        )
    return python


def tested(pair: Pair, python: str, where: str, paths: list[str]) -> tuple[str, bool]:
    """A row of the table, and whether all tests passed."""
    report = ENVIRONMENTS / f"{pair.name}.xml"
    report.unlink(missing_ok=True)
    command = [
        python,
        "-m",
        "pytest",
        "--quiet",
        "--numprocesses=3",
        "--dist=worksteal",
    ]
    command += [f"--junitxml={report}", "-p", "no:cacheprovider", "-m", where, *paths]
    began = time.monotonic()
    passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    minutes = (time.monotonic() - began) / 60
    torch = answer(python, "import torch; print(torch.__version__)")
    cells = (
        pair.name,
        version_of(python),
        torch,
        counted(report),
        f"{minutes:.0f}",
        f"{dt.date.today()}",  # noqa: DTZ011
    )
    return f"| {' | '.join(cells)} |", passed


def counted(report: Path) -> str:
    if not report.exists():
        return "pytest did not end"
    suite = ET.parse(report).getroot()[0]
    skipped, failed = (
        int(suite.get("skipped", 0)),
        int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
    )
    passed = int(suite.get("tests", 0)) - skipped - failed
    return f"{passed} passed, {skipped} skipped, {failed} failed"


if __name__ == "__main__":
    sys.exit(main())
