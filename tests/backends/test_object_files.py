"""Objects beside tensors: names that are legal everywhere and tell keys apart, and what is found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from megackpt.backends.object_files import (
    decode_key,
    encode_key,
    folder,
    key_files,
    objects_in,
    parse_shard,
    shard_file,
    write_object,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import COMMON_KEY, OBJECT, TensorEntry, TensorMeta
from megackpt.storage import LocalStorage, digest


@given(
    st.text(
        alphabet=st.one_of(st.characters(), st.sampled_from("._%/~objectslck")),
        max_size=300,
    )
)
def test_names_tell_keys_apart_and_are_legal(key: str) -> None:
    name = encode_key(key)
    assert name.isascii()
    assert 0 < len(name) <= 200
    assert not name.startswith((".", "__"))
    assert not name.endswith((".objects", ".__lock"))
    assert "/" not in name
    assert name not in ("zarr.json", "metadata.json", "common.pt", "megackpt.index")
    decoded = decode_key(name)
    assert decoded == key or (decoded is None and len(name) > 150)


def test_ordinary_keys_stay_as_they_are() -> None:
    key = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
    assert encode_key(key) == key
    assert encode_key("a/b") == "a%2Fb"
    assert len({encode_key("layer." * 60 + str(i)) for i in range(100)}) == 100


def test_shard_files_are_named_as_megatron_does() -> None:
    entry = TensorEntry("rng_state", TensorMeta((2, 3), OBJECT))
    assert (
        shard_file(entry, Box((1, 2), (1, 1))) == "rng_state.objects/shard_1.2_2.3.pt"
    )
    assert parse_shard("shard_1.2_2.3.pt") == ((1, 2), (2, 3))
    assert parse_shard("shard__.pt") == ((), ())
    for odd in (
        f"shard_0_{2**31}.pt",
        "shard_2_2.pt",
        "shard_1_2.3.pt",
        "shard_1._2.pt",
        "x.pt",
        "shard_0_1.pt.tmp",
    ):
        assert parse_shard(odd) is None


@pytest.mark.parametrize(
    "key", ["rng", "a/b", "\ud800", "ключ" * 60, "n" * 5000, "\ud800" * 300]
)
def test_what_was_written_is_found(tmp_path: Path, key: str) -> None:
    root = LocalStorage(tmp_path)
    entries = [
        (TensorEntry(key, TensorMeta((2,), OBJECT)), Box((i,), (1,))) for i in range(2)
    ]
    entries.append((TensorEntry(COMMON_KEY, TensorMeta((), OBJECT)), Box((), ())))
    written = {}
    for number, (entry, box) in enumerate(entries):
        blob = b"%d" % number * 3
        place, digests = write_object(root, entry, box, iter([memoryview(blob)]))
        assert digests == digest(blob)
        assert root.get(place.file)[place.start :][: place.length] == blob
        written[entry, box] = place
    for name, content in key_files(entry for entry, _ in entries).items():
        root.put(name, content)
    assert {(entry, box): place for entry, box, place in objects_in(root)} == written


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    root = LocalStorage(tmp_path)
    entry = TensorEntry("n" * 300, TensorMeta((1,), OBJECT))
    write_object(root, entry, Box((0,), (1,)), iter([memoryview(b"blob")]))
    (tmp_path / folder(entry) / "key").write_text("another")
    with pytest.raises(CorruptCheckpoint, match=r"n+%~.*\.objects is not the folder"):
        list(objects_in(root))
    root.delete(folder(entry))
    for name in ("shard_0_1.pt", "shard_0.0_1.1.pt"):
        (tmp_path / "x.objects").mkdir(exist_ok=True)
        (tmp_path / "x.objects" / name).write_bytes(b"")
    with pytest.raises(
        CorruptCheckpoint, match=r"x\.objects is not the folder of one object's shards"
    ):
        list(objects_in(root))
    root.delete("x.objects")
    (tmp_path / "y.objects").mkdir()
    (tmp_path / "y.objects/shard_0_1.pt").symlink_to("/etc/passwd")
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        list(objects_in(root))
