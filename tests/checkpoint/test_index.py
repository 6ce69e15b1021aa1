"""megackpt.index: what goes in comes out, and nothing that is not right comes out."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.checkpoint import decode_index, encode_index
from megackpt.checkpoint.index import pack, unpack
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    COMMON_KEY,
    DIGEST_BLOCK,
    ITEMSIZE,
    LARGEST,
    OBJECT,
    Chunks,
    Manifest,
    TensorEntry,
    TensorMeta,
    TensorValues,
)
from megackpt.storage import digest

GOLDEN = Path(__file__).parent.parent / "golden" / "index-v1"
NUMBERS = st.integers(-1, LARGEST - 1)
DIM = st.one_of(st.integers(0, 5), st.integers(0, 1 << 12))


def column(values) -> np.ndarray:
    return np.array(values, np.int64)


@given(
    st.one_of(
        st.lists(NUMBERS),
        st.lists(st.integers(-1, 300)),
        st.tuples(
            st.integers(0, 1000),
            st.integers(1, 1 << 40),
            st.lists(st.integers(0, 70000)),
        ).map(lambda t: [t[0] + t[1] * v for v in t[2]]),
        st.tuples(st.lists(st.just(0), min_size=20), st.lists(NUMBERS, max_size=2)).map(
            lambda t: t[0] + t[1]
        ),
    )
)
def test_columns_round_trip(values):
    layout, parts = pack(column(values))
    data = b"".join(parts)
    assert len(data) == layout.nbytes
    assert len(data) <= 8 * len(values)
    assert (
        unpack(type(layout).parse([*astuple(layout)]), memoryview(data)).tolist()
        == values
    )


@st.composite
def manifests(draw) -> Manifest:
    keys = draw(st.lists(st.text(max_size=8), unique=True, max_size=6))
    tensors, grids, boxes, tensor, length = [], [], [], [], []
    for i, key in enumerate(keys):
        shape = tuple(draw(st.lists(DIM, max_size=4)))
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        tensors.append(TensorEntry(key, TensorMeta(shape, dtype)))
        grids.append(draw(st.sampled_from([None, tuple(1 for _ in shape), shape])))
        for _ in range(draw(st.integers(0, 4))):
            if dtype == OBJECT and 0 in shape:
                continue
            offset = tuple(draw(st.integers(0, max(s - 1, 0))) for s in shape)
            extent = tuple(
                1 if dtype == OBJECT else draw(st.integers(0, s - o))
                for s, o in zip(shape, offset, strict=True)
            )
            box = Box(offset, extent)
            boxes.append(box)
            tensor.append(i)
            length.append(
                draw(st.integers(0, 3 << 20))
                if dtype == OBJECT
                else box.volume * ITEMSIZE[dtype]
            )
    n = len(boxes)
    order = draw(st.permutations(range(n)))
    files = draw(
        st.lists(
            st.text("abc_0é", min_size=1, max_size=9),
            unique=True,
            min_size=1,
            max_size=4,
        )
    )
    some = st.lists(st.integers(0, len(files) - 1), min_size=n, max_size=n)
    rows = sum(-(-length[i] // DIGEST_BLOCK) for i in order)
    few = rows <= 1000 and draw(st.booleans())
    digests = np.random.default_rng(n).integers(
        0, 256, (rows if few else 0, 16), dtype=np.uint8
    )
    chunks = Chunks(
        np.array([tensor[i] for i in order], np.int32),
        Boxes.of(
            (boxes[i] for i in order),
            max((len(t.meta.shape) for t in tensors), default=0),
        ),
        np.array(
            draw(st.lists(st.integers(0, 20000), min_size=n, max_size=n)), np.int32
        ),
        np.array(draw(some), np.int32),
        column(draw(st.lists(st.integers(0, 1 << 41), min_size=n, max_size=n))),
        column([length[i] for i in order]),
        digests,
    )
    return Manifest(
        tuple(tensors),
        tuple(grids),
        chunks,
        tuple(files),
        "raw",
        ("torch_dist", 1),
        "ab" * 16,
    )


def rows(manifest: Manifest) -> list:
    """All chunks, tensor by tensor, in the order that they have there."""
    order = np.argsort(manifest.chunks.tensor, kind="stable")
    chunks = [(int(manifest.chunks.tensor[i]), manifest.chunk(int(i))) for i in order]
    return [(t, c.box, c.location, c.writer, c.digests.tobytes()) for t, c in chunks]


def described(manifest: Manifest) -> tuple:
    values = manifest.values and [
        column.tolist()
        for column in (manifest.values.nonfinite, manifest.values.largest)
    ]
    return (
        manifest.tensors, manifest.grids, manifest.files, manifest.encoding, manifest.backend,
        manifest.save_id, rows(manifest), values, manifest.differing,
        manifest.milliseconds,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    manifests(),
    st.dictionaries(
        st.text("abc.", min_size=3), st.tuples(st.integers(0, 1 << 40)), max_size=3
    ),
)
def test_round_trip(manifest, small):
    small = {f"s{name}": (size, bytes(range(16))) for name, (size,) in small.items()}
    again, small_again = decode_index(encode_index(manifest, small))
    assert described(again) == described(manifest)
    assert small_again == small
    native = replace(
        manifest,
        encoding="native",
        chunks=replace(manifest.chunks, length=manifest.chunks.start),
    )
    native = replace(
        native, chunks=replace(native.chunks, digests=manifest.chunks.digests[:0])
    )
    assert described(decode_index(encode_index(native, {}))[0]) == described(native)


def example(chunks: int = 6) -> Manifest:
    """A tensor, an object and the common state; what the golden index holds too."""
    tensors = (
        TensorEntry("decoder.weight", TensorMeta((chunks * 4, 8), "bfloat16")),
        TensorEntry("rng_state", TensorMeta((2, 1), OBJECT)),
        TensorEntry(COMMON_KEY, TensorMeta((), OBJECT)),
        TensorEntry("empty/\ud800 key", TensorMeta((0, 5), "float32")),
    )
    boxes = [Box((i * 4, 0), (4, 8)) for i in range(chunks)]
    boxes += [
        Box((1, 0), (1, 1)),
        Box((0, 0), (1, 1)),
        Box((), ()),
        Box((0, 0), (0, 5)),
    ]
    n = len(boxes)
    length = column([64] * chunks + [100, 200, DIGEST_BLOCK + 1, 0])
    total = int((-(-length // DIGEST_BLOCK)).sum())
    return Manifest(
        tensors,
        ((4, 8), None, None, None),
        Chunks(
            np.array([0] * chunks + [1, 1, 2, 3], np.int32),
            Boxes.of(boxes),
            np.arange(n, dtype=np.int32) // 3,
            np.arange(n, dtype=np.int32) // 3,
            np.arange(n, dtype=np.int64) * (1 << 20) + 704,
            length,
            (np.arange(total * 16) % 251).astype(np.uint8).reshape(-1, 16),
        ),
        tuple(f"__{i}_0.distcp" for i in range(-(-n // 3))),
        "raw",
        ("torch_dist", 1),
        "0123456789abcdef" * 2,
    )


def noted() -> Manifest:
    """The example with notes on its values, on replicas that differed, and on the time of the save."""
    largest = np.array([np.inf, -1, -1, 0], np.float32)
    values = TensorValues(column([192, -1, -1, 0]), largest)
    differing = ("empty/\ud800 key", "decoder.weight")
    return replace(example(), values=values, differing=differing, milliseconds=1500)


SMALL = {"metadata.json": (120, bytes(16)), ".metadata": (4000, bytes(range(16)))}


def test_the_golden_index_of_version_1():
    manifest, small = decode_index((GOLDEN / "megackpt.index").read_bytes())
    assert described(manifest) == described(example())
    assert small == SMALL


def test_fields_of_the_head_that_are_not_known_are_passed_over():
    # As in the indexes of earlier builds, which had a fingerprint of each rank.
    again, small = decode_index(
        forged(lambda head: head.update(fingerprints="AAAAAAAAAAA="))
    )
    assert described(again) == described(example())
    assert small == SMALL


def test_notes_round_trip():
    again, _ = decode_index(encode_index(noted(), SMALL))
    assert described(again) == described(noted())


def with_column(name: str, optional: bool) -> bytes:
    """An index with one column more, first among all, and the bytes of its three numbers."""
    data = encode_index(example(), SMALL)
    (length,) = struct.unpack_from("<I", data, 12)
    head = json.loads(data[16 : 16 + length])
    head["columns"] = {name: [3, 2, 0, 1, 0], **head["columns"]}
    if optional:
        head["optional"] = [name]
    text = json.dumps(head).encode()
    size = struct.pack("<I", len(text))
    return sealed(data[:12] + size + text + b"abcdef" + data[16 + length : -16])


def test_an_unknown_optional_column_is_ignored():
    again, small = decode_index(with_column("heat", optional=True))
    assert described(again) == described(example())
    assert small == SMALL


def test_an_unknown_required_column_is_refused():
    with pytest.raises(BackendError, match=r"newer release .* the column 'heat'"):
        decode_index(with_column("heat", optional=False))


def sealed(body: bytes) -> bytes:
    return body + digest(body)


def forged(change, padding: bytes = b"", manifest: Manifest | None = None) -> bytes:
    """An index whose head says something else, with a digest that is right."""
    data = encode_index(manifest or example(), SMALL)
    (length,) = struct.unpack_from("<I", data, 12)
    head = json.loads(data[16 : 16 + length])
    head = change(head) or head
    text = json.dumps(head).encode()
    return sealed(
        data[:12]
        + struct.pack("<I", len(text))
        + text
        + data[16 + length : -16]
        + padding
    )


def in_column(name, **fields):
    places = ("count", "width", "base", "step", "patches")

    def change(head):
        for field, value in fields.items():
            head["columns"][name][places.index(field)] = value

    return change


FORGERIES = {
    "not an object": lambda _: [1, 2],
    "no columns": lambda head: head.pop("columns") and None,
    "a column is missing": lambda head: head["columns"].pop("start") and None,
    "column of text": lambda head: head["columns"].update(start="x"),
    "float": in_column("start", count=10.0),
    "true": in_column("start", base=True),
    "width": in_column("start", width=3),
    "negative count": in_column("start", count=-1),
    "huge count": in_column("start", count=1 << 61),
    "huge base": in_column("start", base=1 << 70),
    "step overflows": in_column("start", step=1 << 61),
    "step 0": in_column("start", step=0),
    "patches": in_column("start", patches=1 << 40),
    "axes": lambda head: head.update(axes=65),
    "fewer axes": lambda head: head.update(axes=1),
    "file out of range": in_column("file", base=1 << 20),
    "no file": in_column("file", base=-1),
    "negative number": in_column("grid", base=-1),
    "writer": in_column("writer", base=1 << 40),
    "offset beyond": in_column("shift0", base=1),
    "shape beyond": in_column("pieces1", base=0),
    "dtype number": in_column("meta_dtype", base=100),
    "dtypes": lambda head: head["dtypes"].__setitem__(3, "pickle"),
    "fewer dtypes": lambda head: head.update(dtypes=head["dtypes"][:2]),
    "dims": in_column("meta_dim", base=1 << 61),
    "tensors do not add up": in_column("count", base=2),
    "text": lambda head: head.update(text=[1, 5]),
    "longer text": lambda head: head.update(text=[1 << 61, 5]),
    "encoding": lambda head: head.update(encoding="pickle"),
    "backend": lambda head: head.update(backend=["x"]),
    "save id": lambda head: head.update(save_id=5),
    "small outside": lambda head: head["small"].update({"../x": [1, "00" * 16]}),
    "small size": lambda head: head["small"].update({"x": [-1, "00" * 16]}),
    "small digest": lambda head: head["small"].update({"x": [1, "00" * 15]}),
    "small hex": lambda head: head["small"].update({"x": [1, "zz"]}),
    "raw lengths": lambda head: head.update(derived=False),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_heads(name):
    with pytest.raises(
        CorruptCheckpoint, match=r"megackpt\.index: the index is damaged: "
    ):
        decode_index(forged(FORGERIES[name]))


FORGED_NOTES = {
    "rows": in_column("nonfinite", count=3),
    "no rows": in_column("largest", count=0, patches=0, width=0),
    "more than elements": in_column("nonfinite", base=0, step=193),
    "huge count": in_column("nonfinite", base=1 << 60),
    "bits of NaN": in_column("largest", base=1),
    "bits beyond 32": in_column("largest", base=1 << 40),
    "differing is text": lambda head: head.update(differing="ab"),
    "differing is a dict": lambda head: head.update(differing={"decoder.weight": 1}),
    "differing is null": lambda head: head.update(differing=None),
    "differing has a number": lambda head: head.update(differing=[1]),
    "differing has no such key": lambda head: head.update(differing=["other"]),
    "milliseconds is null": lambda head: head.update(milliseconds=None),
    "negative milliseconds": lambda head: head.update(milliseconds=-1),
    "milliseconds is text": lambda head: head.update(milliseconds="1"),
    "no time takes so long": lambda head: head.update(milliseconds=1 << 62),
    "optional is null": lambda head: head.update(optional=None),
    "optional has lists": lambda head: head.update(optional=[["nonfinite"]]),
}


@pytest.mark.parametrize("name", FORGED_NOTES)
def test_forged_notes(name):
    with pytest.raises(CorruptCheckpoint, match=r"the index is damaged: "):
        decode_index(forged(FORGED_NOTES[name], manifest=noted()))


def test_notes_need_not_be_named_as_optional():
    data = forged(lambda head: head.pop("optional") and None, manifest=noted())
    assert described(decode_index(data)[0]) == described(noted())


def every_column(head):
    """A huge count of chunks that takes no bytes at all."""
    for name, fields in head["columns"].items():
        if fields[0] == 10:
            head["columns"][name] = [1 << 40, 0, 0, 1, 0]


def test_no_memory_for_rows_that_take_no_bytes():
    tracemalloc.start()
    stories = []
    for padding in range(16):  # so that the rest is whole digests for one of them
        with pytest.raises(CorruptCheckpoint) as caught:
            decode_index(forged(every_column, bytes(padding)))
        stories.append(str(caught.value))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert any("counts" in story for story in stories)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../b", "a\0b", ".", "a//b"]
)
def test_files_outside(name):
    manifest = example()
    with pytest.raises(
        CorruptCheckpoint, match="no name of a file inside a checkpoint"
    ):
        decode_index(
            encode_index(replace(manifest, files=(name, *manifest.files[1:])), SMALL)
        )


def test_doubles():
    manifest = example()
    for change in (
        {"files": ("x",) * 4},
        {"tensors": (manifest.tensors[1],) * 2 + manifest.tensors[2:]},
    ):
        with pytest.raises(CorruptCheckpoint):
            decode_index(encode_index(replace(manifest, **change), SMALL))


def test_too_many_dimensions():
    entry = TensorEntry("x", TensorMeta((1,) * 65, "uint8"))
    chunks = replace(
        example().chunks,
        boxes=Boxes.of([Box((0,) * 65, (1,) * 65)] * 10),
        tensor=np.zeros(10, np.int32),
    )
    chunks = replace(chunks, length=column([1] * 10), digests=chunks.digests[:10])
    with pytest.raises(CorruptCheckpoint):
        decode_index(
            encode_index(
                replace(example(), tensors=(entry,), grids=(None,), chunks=chunks), {}
            )
        )


def test_truncated_longer_and_flipped():
    data = encode_index(example(), SMALL)
    for end in range(0, len(data), 11):
        with pytest.raises(CorruptCheckpoint):
            decode_index(data[:end])
    with pytest.raises(CorruptCheckpoint):
        decode_index(data + b"\0")
    for i in range(len(data)):
        flipped = bytearray(data)
        flipped[i] ^= 4
        with pytest.raises(CorruptCheckpoint):
            decode_index(bytes(flipped))


def test_another_version():
    data = bytearray(encode_index(example(), SMALL))
    data[8] = 9
    with pytest.raises(BackendError, match="version 9 of the index is too new"):
        decode_index(sealed(bytes(data[:-16])))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_the_bytes_say(data):
    """Changed anywhere, with a digest that is right: an error, or a manifest that is consistent."""
    body = bytearray(encode_index(example(), SMALL)[:-16])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(8, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest, _ = decode_index(sealed(bytes(body)))
    except (CorruptCheckpoint, BackendError):
        return
    chunks = manifest.chunks
    assert len(chunks.digests) in (0, chunks.block_bounds[-1])
    for i in range(len(chunks)):
        entry, chunk = manifest.tensors[chunks.tensor[i]], manifest.chunk(i)
        assert Box.whole(entry.meta.shape).contains(chunk.box)
        assert chunk.location.start >= 0
        if not entry.meta.is_object:
            assert chunk.location.length == chunk.box.volume * entry.meta.itemsize
