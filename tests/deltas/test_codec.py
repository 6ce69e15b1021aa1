"""Changes of elements: what is encoded is decoded, also by the reader of the docs; damage is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.deltas.codec import Encoded, apply, decode, encode, update
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.tensor_digest import MODULUS, digest, key_of
from tests.test_docs import ROOT, blocks

DTYPES = ["<u1", "<u2", "<u4", "<u8"]


def documented() -> dict[str, Any]:
    """The functions of the page."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "delta-format.md", "python"):
        exec(block.text, names)  # noqa: S102
    return names


PAGE = documented()


def encoded_change(old, new):
    held = old.copy()
    places, before, after = update(held, new)
    assert np.array_equal(held, new)
    return encode(new, places, after - before)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3000),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_both_readers_give_the_new_bits(dtype, length, share, is_small, seed):
    random = np.random.default_rng(seed)
    old = random.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True)
    new = old.copy()
    changed = random.random(length) < share
    if is_small:
        new[changed] += random.integers(0, 3, changed.sum()).astype(dtype) - 1
    else:
        top = np.iinfo(dtype).max
        new[changed] = random.integers(0, top, changed.sum(), dtype, endpoint=True)
    encoded = encoded_change(old, new)
    found, read = old.copy(), old.copy()
    apply(decode(encoded, found.dtype, length), found)
    assert np.array_equal(found, new)
    parts = encoded.kind, encoded.changes, encoded.gap_bytes, encoded.payload
    PAGE["apply_piece"](*parts, read)
    assert np.array_equal(read, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kind(dtype):
    old = np.arange(100).astype(dtype)
    assert encoded_change(old, old) == Encoded("same", 0, 0, b"")
    new = old.copy()
    new[70] = 0
    assert encoded_change(old, new).kind == "changes"
    assert encoded_change(old, ~old).kind == "whole"


def test_a_gap_of_three_planes():
    old = np.zeros(70_000, "<u2")
    new = old.copy()
    new[[5, 69_999]] = 1
    encoded = encoded_change(old, new)
    assert (encoded.changes, encoded.gap_bytes) == (2, 3)
    apply(decode(encoded, old.dtype, len(old)), old)
    assert np.flatnonzero(old).tolist() == [5, 69_999]


@pytest.mark.parametrize(
    "forged",
    [
        {"changes": 0},
        {"changes": 101},
        {"changes": 2},
        {"gap_bytes": 0},
        {"gap_bytes": 2},
        {"gap_bytes": 9},
        {"payload": b""},
        {"payload": b"\x28\xb5\x2f\xfd"},
        {"kind": "whole"},
    ],
)
def test_what_does_not_fit_its_box_is_refused(forged):
    old = np.zeros(100, "<u2")
    new = old.copy()
    new[[3, 50, 99]] = 1
    encoded = replace(encoded_change(old, new), **forged)
    with pytest.raises(CorruptCheckpoint):
        apply(decode(encoded, old.dtype, len(old)), old)
    assert not old.any()


def test_a_place_behind_the_box_is_refused():
    old, new = np.zeros(100, "<u2"), np.zeros(100, "<u2")
    new[99] = 1
    with pytest.raises(CorruptCheckpoint, match="is not one of the 99 of its box"):
        decode(encoded_change(old, new), old.dtype, 99)


def test_a_digest_is_that_of_the_docs():
    bits = np.array([7, 0, 65535], "<u2")
    key = key_of("decoder.weight")
    total = 0
    for index, word in enumerate(bits.tolist()):
        low = index * 0x9E3779B97F4A7C15 + word * 0xBB67AE8584CAA73B + key[0]
        high = index * 0x6A09E667F3BCC909 + word * 0x3C6EF372FE94F82B + key[1]
        total += PAGE["mix"](low % 2**64) + (PAGE["mix"](high % 2**64) << 64)
    assert digest(key, np.arange(3, dtype=np.uint64), bits) == total % 2**128


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40_000), st.integers(0, 1 << 32))
def test_a_digest_does_not_depend_on_the_layout(dtype, length, seed):
    """Parts add up, and changed elements are exchanged."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True)
    indices, key = np.arange(length, dtype=np.uint64), key_of(dtype)
    whole = digest(key, indices, bits)
    order = random.permutation(length)
    first, second = order[: length // 3], order[length // 3 :]
    parts = [digest(key, indices[part], bits[part]) for part in (first, second)]
    assert sum(parts) % MODULUS == whole
    changed = bits.copy()
    changed[first] ^= np.array(1, dtype)
    removed = digest(key, indices[first], bits[first])
    added = digest(key, indices[first], changed[first])
    assert digest(key, indices, changed) == (whole - removed + added) % MODULUS


def test_swapped_and_renamed_elements_have_other_digests():
    indices = np.arange(4, dtype=np.uint64)
    bits = np.array([1, 2, 2, 1], "<u4")
    found = {
        digest(key_of(name), indices, each)
        for name in ("a", "b")
        for each in (bits, bits[[1, 0, 2, 3]], np.zeros(4, "<u4"))
    }
    assert len(found) == 6
