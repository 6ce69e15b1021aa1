"""A manifest out of somebody's table of contents: what is right is taken, what cannot be is refused."""

from __future__ import annotations

import pytest

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import OBJECT, Location, TensorEntry, TensorMeta, listed

W = TensorEntry("w", TensorMeta((4, 6), "bfloat16"))
O = TensorEntry("o", TensorMeta((2,), OBJECT))  # noqa: E741
LEFT, RIGHT = Box((0, 0), (4, 3)), Box((0, 3), (4, 3))
BIG = 1 << 62


def test_chunks_are_listed_unchanged():
    told = [
        (0, RIGHT, Location("b", 8, 24)),
        (1, Box((1,), (1,)), Location("a", 0, 9)),
        (0, LEFT, Location("b", 32, 24)),
    ]
    manifest = listed([W, O], told, ("npz", 1))
    assert manifest.tensors == (W, O)
    assert (manifest.encoding, manifest.backend, manifest.save_id) == (
        "raw",
        ("npz", 1),
        "",
    )
    assert [(c.box, c.location) for c in manifest.chunks_of("w")] == [
        told[0][1:],
        told[2][1:],
    ]
    assert [(c.box, c.location) for c in manifest.chunks_of("o")] == [told[1][1:]]
    assert manifest.files == ("b", "a")
    assert not len(manifest.chunks.digests)


def test_nothing_is_a_checkpoint_too():
    assert len(listed([], [], ("npz", 1)).chunks) == 0
    assert listed([W], [], ("npz", 1)).tensors == (W,)


@pytest.mark.parametrize(
    "tensors",
    [
        [W, TensorEntry("w", TensorMeta((1,), "int8"))],
        [TensorEntry(5, TensorMeta((1,), "int8"))],
        [TensorEntry(["w"], TensorMeta((1,), "int8"))],
        [TensorEntry("w", TensorMeta((1,), "float7"))],
        [TensorEntry("w", TensorMeta((1,), ["int8"]))],
        [TensorEntry("w", TensorMeta((-1,), "int8"))],
        [TensorEntry("w", TensorMeta((1.0,), "int8"))],
        [TensorEntry("w", TensorMeta((True,), "int8"))],
        [TensorEntry("w", TensorMeta((BIG, 2), "int8"))],
        [TensorEntry("w", TensorMeta((BIG,), "int16"))],
        [TensorEntry("w", TensorMeta((0, BIG, BIG), "int8"))],
        [TensorEntry("w", TensorMeta((1,) * 65, "int8"))],
    ],
)
def test_tensors_that_cannot_be(tensors):
    with pytest.raises(CorruptCheckpoint, match="the table of contents"):
        listed(tensors, [], ("npz", 1))


@pytest.mark.parametrize(
    ("number", "box", "location"),
    [
        (2, LEFT, Location("a", 0, 24)),
        (-1, LEFT, Location("a", 0, 24)),
        ("0", LEFT, Location("a", 0, 24)),
        (0, LEFT, Location("a", 0, 23)),
        (0, LEFT, Location("a", -1, 24)),
        (0, LEFT, Location("a", (1 << 63) - 24, 24)),
        (0, LEFT, Location("a", 0.0, 24)),
        (0, LEFT, Location(None, 0, 24)),
        (0, Box((0, 4), (4, 3)), Location("a", 0, 24)),
        (0, Box((-1, 0), (4, 3)), Location("a", 0, 24)),
        (0, Box((0, 0), (-4, -3)), Location("a", 0, 24)),
        (0, Box((0,), (12,)), Location("a", 0, 24)),
        (0, Box((0, "0"), (4, 3)), Location("a", 0, 24)),
        (0, Box((0, 0), (4, None)), Location("a", 0, 24)),
        (1, Box((0,), (2,)), Location("a", 0, 5)),
        (1, Box((2,), (1,)), Location("a", 0, 5)),
    ],
)
def test_chunks_that_cannot_be(number, box, location):
    with pytest.raises(CorruptCheckpoint, match="the table of contents"):
        listed([W, O], [(number, box, location)], ("npz", 1))
