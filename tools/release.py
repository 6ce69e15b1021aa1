"""Build the files for a package index: a wheel and a source archive, with links that work in the index.

    python tools/release.py https://example.org/OWNER/megackpt [--out dist]

The README links to files of the repository, by relative paths; an index shows the README alone. So the
packages are built of a copy of the tracked files in which these links lead to the repository, at the
tag of the version, and in which the metadata names the repository.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
_DESCRIPTION = re.compile(r"^description = .*\n", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("repository", help="its address: https://HOST/OWNER/NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if not re.fullmatch(r"https://[^/\s]+/\S+[^/\s]", options.repository):
        parser.error("the repository is an address like https://HOST/OWNER/NAME")
    with tempfile.TemporaryDirectory(prefix="megackpt-release-") as folder:
        copy = Path(folder)
        copy_tracked_files(copy)
        prepare(copy, options.repository, version())
        build(copy, options.out.absolute())
    for package in sorted(options.out.glob(f"megackpt-{version()}*")):
        print(package)
    return 0


def version() -> str:
    text = (ROOT / "megackpt" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if not found:
        raise SystemExit("megackpt/__init__.py has no __version__")
    return found[1]


def copy_tracked_files(target: Path) -> None:
    command = ["git", "ls-files", "-z", "README.md", "LICENSE", "setup.cfg"]
    names = subprocess.run(
        [*command, "pyproject.toml", "megackpt"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in names.split("\0")[:-1]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)


def prepare(copy: Path, repository: str, version: str) -> None:
    """Absolute links in the README of the copy, and the addresses in its metadata."""
    readme, settings = copy / "README.md", copy / "setup.cfg"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(absolute_links(text, repository, version), encoding="utf-8")
    pages = f"{repository}/blob/v{version}/docs"
    urls = (
        "project_urls =\n"
        f"    Source = {repository}\n"
        f"    Issues = {repository}/issues\n"
        f"    Documentation = {pages}/index.md\n"
        f"    Changelog = {pages}/changelog.md\n"
    )
    text = settings.read_text(encoding="utf-8")
    text, count = _DESCRIPTION.subn(lambda line: line[0] + urls, text, count=1)
    if not count:
        raise SystemExit("setup.cfg has no description")
    settings.write_text(text, encoding="utf-8")


def absolute_links(text: str, repository: str, version: str) -> str:
    """Relative links lead to the files at the tag of the version; pictures to their bytes."""

    def absolute(link: re.Match[str]) -> str:
        mark, name, path = link.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{name}]({repository}/{kind}/v{version}/{path})"

    return _LINK.sub(absolute, text)


def build(source: Path, out: Path) -> None:
    """With the setuptools of this environment; no index is asked."""
    out.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    wheel = [*pip, "--no-build-isolation", "--wheel-dir", str(out), "."]
    archive = f"import setuptools.build_meta as b; b.build_sdist({str(out)!r})"
    for command in (wheel, [sys.executable, "-c", archive]):
        done = subprocess.run(
            command, cwd=source, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
