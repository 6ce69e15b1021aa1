"""Single bits flipped anywhere in a checkpoint: an ordinary load says so, or gives what was saved, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

import megackpt
from megackpt.errors import CheckpointingException
from tests.faults.share import part

FORMATS = ("torch_dist", "zarr", "safetensors", "torch")


def outcome_of(states, where: Path) -> str:
    try:
        found = megackpt.load(states.declared(1, empty=True), where)
    except CheckpointingException:
        return "caught"
    try:
        states.compare(found, 1)
    except AssertionError:
        return "wrong"
    return "harmless"


def flipped(
    states, where: Path, count: int, seed: int
) -> tuple[Counter[str], Counter[str], list[str]]:
    """Outcomes, the files in which a flip was harmless, and what went wrong. Each bit is put back."""
    files = sorted(path for path in where.rglob("*") if path.is_file())
    places = [(path, byte) for path in files for byte in range(path.stat().st_size)]
    dice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    harmless: Counter[str] = Counter()
    wrong = []
    for _ in range(count):
        (path, byte), bit = dice.choice(places), dice.randrange(8)
        with open(path, "r+b") as file:
            file.seek(byte)
            (right,) = file.read(1)
            file.seek(byte)
            file.write(bytes([right ^ 1 << bit]))
            file.flush()
            outcome = outcome_of(states, where)
            outcomes[outcome] += 1
            if outcome == "harmless":
                harmless[path.name] += 1
            elif outcome == "wrong":
                wrong.append(f"{path.relative_to(where)}, byte {byte}, bit {bit}")
            file.seek(byte)
            file.write(bytes([right]))
    return outcomes, harmless, wrong


def written(states, where: Path, name: str) -> None:
    """A checkpoint of this format: saved, or (a torch file) exported."""
    saved = where.with_name("saved") if name == "torch" else where
    megackpt.save(states.declared(1), saved, "torch_dist" if name == "torch" else name)
    if name == "torch":
        megackpt.convert(saved, where, name)


HEAD = ("one bit flipped", "flips", "caught", "harmless", "unnoticed", "harmless where")


def counted(
    kind: str, outcomes: Counter[str], harmless: Counter[str]
) -> tuple[object, ...]:
    where = ", ".join(f"{name} {count}" for name, count in sorted(harmless.items()))
    return (
        kind,
        outcomes.total(),
        outcomes["caught"],
        outcomes["harmless"],
        outcomes["wrong"],
        where,
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 300) for name in FORMATS[:2]]
    + [pytest.param(name, part(2000), marks=pytest.mark.campaign) for name in FORMATS],
)
def test_a_flipped_bit_is_caught_or_harmless(
    states, note, tmp_path, name, count
) -> None:
    written(states, tmp_path / "ckpt", name)
    outcomes, harmless, wrong = flipped(states, tmp_path / "ckpt", count, seed=count)
    note(HEAD, *counted(name, outcomes, harmless))
    assert not wrong
    assert outcomes["caught"] > count / 3
    assert states.seen(tmp_path / "ckpt") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("name", FORMATS)
def test_without_the_index_errors_are_still_ours(states, note, tmp_path, name) -> None:
    """Where the digests have been taken away a load cannot see all; how much it sees is a figure."""
    written(states, tmp_path / "ckpt", name)
    (tmp_path / "ckpt" / "megackpt.index").unlink()
    outcomes, harmless, _ = flipped(states, tmp_path / "ckpt", part(2000), seed=3)
    note(HEAD, *counted(f"{name}, its megackpt.index removed", outcomes, harmless))
    assert outcomes["caught"]
    assert states.seen(tmp_path / "ckpt") == 1
