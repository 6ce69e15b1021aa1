"""Power cuts: a mounted ext4 image, copied as it is, holds what had been made durable by then, and no more."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import megackpt
from tests.faults.share import sampled

pytestmark = pytest.mark.root

FORMATS = ("torch_dist", "zarr", "safetensors")


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An image of a file system; it is mounted at ``live`` beside it."""
    image = tmp_path / "disk.img"
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(image, tmp_path / "live"):
        yield image


def after_a_cut(states, image: Path, folder: Path) -> int | None:
    """What a reader finds on the disk of a copy; the next save there must succeed and leave nothing behind."""
    with mounted(image, folder / "after") as after:
        found = states.seen(after / "ckpt")
        megackpt.save(states.declared(3), after / "ckpt", "torch_dist")
        assert states.seen(after / "ckpt") == 3
        assert {path.name for path in after.iterdir()} == {"ckpt", "lost+found"}
    return found


@pytest.mark.parametrize(
    ("name", "later"),
    [
        *((name, "") for name in FORMATS[:2]),
        ("torch_dist", "thread"),
        pytest.param("torch_dist", "process", marks=pytest.mark.campaign),
        pytest.param("safetensors", "", marks=pytest.mark.campaign),
    ],
)
def test_what_save_has_returned_from_survives(
    jobs, nursery, states, disk, tmp_path, name, later
) -> None:
    """``later``: an asynchronous save, whose files bypass the page cache."""
    where = tmp_path / "live" / "ckpt"
    for value in (1, 2):
        order = nursery.Order(str(where), name, value, str(where.parent), later=later)
        outcome = jobs(order)
        subprocess.run(
            ["cp", "--sparse=always", disk, tmp_path / "copy.img"], check=True
        )
        assert outcome.codes == [0], outcome.story
        assert after_a_cut(states, tmp_path / "copy.img", tmp_path) == value


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "later"), [*((name, "") for name in FORMATS), ("torch_dist", "thread")]
)
@pytest.mark.parametrize("before", [None, 1])
def test_a_cut_at_any_call(
    jobs, nursery, states, note, disk, tmp_path, name, later, before
) -> None:
    """The disk is copied before each call that changes it, while the caller waits."""
    where, copies = tmp_path / "live" / "ckpt", tmp_path / "copies"
    copies.mkdir()
    if before:
        assert jobs(
            nursery.Order(str(where), name, before, str(where.parent))
        ).codes == [0]
    order = nursery.Order(
        str(where),
        name,
        2,
        str(where.parent),
        later=later,
        copy=(str(disk), str(copies)),
    )
    outcome = jobs(order)
    assert outcome.codes == [0], outcome.story
    found = []
    calls = [*enumerate(outcome.calls, 1)]
    chosen = sampled(calls, least=8)
    for number, call in chosen:
        found.append(after_a_cut(states, copies / f"{number}.img", tmp_path))
        (copies / f"{number}.img").unlink()
        assert found[-1] in (before, 2), (number, call)
    count = Counter(found)
    kind = "overwriting" if before else "new save"
    old, none = (count[before], 0) if before else (0, count[None])
    note(
        ("power cut", "points", "old", "none", "new"),
        f"{name}, asynchronous, {kind}" if later else f"{name}, {kind}",
        len(found),
        old,
        none,
        count[2],
    )
    # A cut never takes back what the one before had left standing.
    assert found == sorted(found, key=lambda value: value == 2)
    assert count[before] > 20 * len(chosen) // len(calls)
