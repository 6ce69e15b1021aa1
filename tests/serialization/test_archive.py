"""Archives that are damaged, compressed or something else are errors."""

from __future__ import annotations

import io
import random
import zipfile

import pytest
import torch

from megackpt import serialization
from megackpt.errors import CorruptCheckpoint
from tests.serialization.pickles import (
    PLAIN,
    raw_archive,
)


def test_damage() -> None:
    blob = serialization.dump(PLAIN | {"tensor": torch.arange(100)})
    rng = random.Random(0)
    for cut in range(0, len(blob), 97):
        with pytest.raises(CorruptCheckpoint):
            serialization.load(blob[:cut], where="common.pt")
    caught = 0
    for _ in range(400):
        data = bytearray(blob)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            found = serialization.load(bytes(data))
        except CorruptCheckpoint:
            caught += 1
        else:  # padding between members, or dates: nothing that means anything
            assert torch.equal(found.pop("tensor"), torch.arange(100))
            assert found == PLAIN
    assert caught > 100


def test_compressed_archives_and_other_files() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\0" * (1 << 20))
    for data in (
        buffer.getvalue(),
        b"\x80\x02N.",
        b"PK\3\4",
        bytes(1000),
        raw_archive(b"\x80\x02N.") + b"x",
    ):
        with pytest.raises(CorruptCheckpoint):
            serialization.load(data)
