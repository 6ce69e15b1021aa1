"""safetensors: the reference library reads what we write, we read what others wrote, hostile files do nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megackpt import (
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from megackpt.backends.safetensors import INDEX, Safetensors
from megackpt.backends.safetensors.headers import DTYPES, arranged
from megackpt.checkpoint import verify
from megackpt.converter import convert
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.planning.manifest import Location, TensorEntry, TensorMeta
from megackpt.storage import LocalStorage, SingleFile
from megackpt.testing import BackendSuite, ThreadedGroup, Whole, World
from tests.backends.torch_files import State, same, whole


def tensors() -> State:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(6, 8),
        "b": torch.arange(5, dtype=torch.int64),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }


def write(
    path: Path, header: object, data: bytes = b"", length: int | None = None
) -> Path:
    """A file of this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + data
    )
    return path


# -- what the reference library says


@pytest.mark.parametrize("shards", [None, 1, 3])
def test_the_reference_library_reads_ours(tmp_path: Path, shards: int | None) -> None:
    save(whole(tensors()) | {"step": 7}, tmp_path / "c", Safetensors(shards=shards))
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) == (shards or 1)
    found: State = {}
    for file in files:
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    same(found, tensors())
    assert (tmp_path / "c" / INDEX).exists() == (shards == 3)
    os.remove(tmp_path / "c/megackpt.index")
    same(load_plain_tensors(tmp_path / "c"), tensors())
    assert load_common_state_dict(tmp_path / "c") == {"step": 7}


def test_the_index_is_hugging_faces(tmp_path: Path) -> None:
    state = {"x": torch.zeros(100), "y": torch.zeros(10), "z": torch.zeros(100)}
    save(whole(state), tmp_path / "c", Safetensors(max_shard_bytes=450))
    assert json.loads((tmp_path / "c" / INDEX).read_text()) == {
        "metadata": {"total_size": 840},
        "weight_map": {
            "x": "model-00001-of-00002.safetensors",
            "y": "model-00001-of-00002.safetensors",
            "z": "model-00002-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_the_librarys_too(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    octets = (
        torch.randint(0, 2, (48,), dtype=torch.uint8)
        if name == "bool"
        else torch.arange(48, dtype=torch.uint8)
    )
    state = {"t": octets.view(dtype).reshape(2, -1)}
    save_file(state, tmp_path / "theirs.safetensors")
    save(whole(state), tmp_path / "ours", Safetensors())
    for found in (
        load_plain_tensors(tmp_path / "theirs.safetensors"),
        load_file(tmp_path / "ours/model.safetensors"),
    ):
        assert found["t"].dtype == dtype
        assert torch.equal(found["t"].view(torch.uint8), octets.reshape(2, -1))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
            lambda key: key != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "uint8"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    ),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(1, 200),
)
def test_files_are_without_holes_and_within_limits(
    metas: dict[str, tuple[str, list[int]]], shards: int | None, limit: int
) -> None:
    entries = [
        TensorEntry(key, TensorMeta(tuple(shape), dtype))
        for key, (dtype, shape) in metas.items()
    ]
    files = arranged(entries, "model", shards, limit)
    assert {key for file in files for key in file.places} == set(metas)
    assert shards is None or len(files) == max(1, min(shards, len(entries)))
    for file in files:
        ends = [len(file.head)]
        for place in sorted(file.places.values(), key=lambda p: (p.start, p.length)):
            assert place.start == ends[-1]
            ends.append(place.start + place.length)
        sizes = [place.length for place in file.places.values() if place.length]
        assert shards is not None or len(sizes) < 2 or sum(sizes) <= limit
        assert len(file.head) % 8 == 0


# -- several ranks, and resharding


def shards_of(
    group: Any, state: Mapping[str, torch.Tensor], tp: int, cut: Mapping[str, int]
) -> dict[str, Any]:
    """TP x DP: tensors in ``cut`` are cut along that axis, the rest is replicated."""
    dp_rank, tp_rank = divmod(group.rank, tp)
    found: dict[str, Any] = {}
    for key, tensor in state.items():
        if key not in cut:
            found[key] = ShardedTensor.from_rank_offsets(
                key, tensor.clone(), replica_id=group.rank
            )
            continue
        mine = tensor.chunk(tp, cut[key])[tp_rank].contiguous()
        found[key] = ShardedTensor.from_rank_offsets(
            key, mine, (cut[key], tp_rank, tp), replica_id=dp_rank
        )
    return found


CUT = {"rows": 0, "columns": 1, "middle": 1}


BIG = {
    "rows": torch.randn(64, 33),
    "columns": torch.randn(257, 64).to(torch.bfloat16),
    "middle": torch.randn(3, 8, 5),
    "replicated": torch.randn(7, 7),
}


@pytest.mark.parametrize("strategy", [Safetensors(), Safetensors(shards=3)])
def test_tp2_dp2_saves_and_tp4_and_tp1_load(
    tmp_path: Path, strategy: Safetensors
) -> None:
    def saving(group: ThreadedGroup) -> None:
        rng = ShardedObject(
            "rng", {"rank": group.rank}, (2, 2), divmod(group.rank, 2), replica_id=0
        )
        state = shards_of(group, BIG, 2, CUT) | {"rng": rng, "step": 3}
        save(state, tmp_path / "c", strategy, process_group=group)

    def loading(group: ThreadedGroup) -> None:
        wanted = shards_of(
            group, {k: torch.zeros_like(t) for k, t in BIG.items()}, group.size, CUT
        )
        load(wanted, tmp_path / "c", process_group=group)
        for key, shard in shards_of(group, BIG, group.size, CUT).items():
            assert torch.equal(wanted[key].data, shard.data), key

    ThreadedGroup.run(4, saving)
    assert str(verify(tmp_path / "c")).endswith("all good")
    found: State = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found |= load_file(file)
    same(found, BIG)
    for size in (1, 4):
        ThreadedGroup.run(size, loading)
    (tmp_path / "c/megackpt.index").unlink()
    ThreadedGroup.run(2, loading)


def test_a_checkpoint_is_replaced_by_one_in_other_files(tmp_path: Path) -> None:
    save(whole(tensors()), tmp_path / "c", Safetensors(shards=3))
    (tmp_path / "c/config.json").write_text("{}")
    save(whole(tensors()), tmp_path / "c", Safetensors())
    assert sorted(os.listdir(tmp_path / "c")) == [
        "common.pt",
        "config.json",
        "megackpt.index",
        "model.safetensors",
    ]
    same(load_plain_tensors(tmp_path / "c"), tensors())


# -- what others wrote


def hugging_face(folder: Path, stem: str = "model") -> None:
    folder.mkdir()
    state, weight_map = tensors(), {}
    for i, part in enumerate((["a.weight", "b"], ["half", "flag", "scalar", "none"])):
        file = f"{stem}-0000{i + 1}-of-00002.safetensors"
        save_file(
            {key: state[key] for key in part}, folder / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 300, "more": {}}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_directories_of_hugging_faces(tmp_path: Path, stem: str) -> None:
    hugging_face(tmp_path / "c", stem)
    same(load_plain_tensors(tmp_path / "c"), tensors())
    wanted = whole({key: torch.zeros_like(t) for key, t in tensors().items()})
    load(wanted, tmp_path / "c")
    same({key: shard.data for key, shard in wanted.items()}, tensors())
    assert load_tensors_metadata(tmp_path / "c")["a.weight"].global_shape == (6, 8)


def test_a_cache_of_links(tmp_path: Path) -> None:
    hugging_face(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in os.listdir(tmp_path / "blobs"):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    same(load_plain_tensors(tmp_path / "snapshot"), tensors())
    wanted = whole({"b": torch.zeros(5, dtype=torch.int64)})
    load(wanted, tmp_path / "snapshot", strict="ignore_all")
    assert torch.equal(wanted["b"].data, tensors()["b"])
    assert verify(tmp_path / "snapshot").ok
    (tmp_path / "blobs/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"not there: model-00002-of-00002\.safetensors"
    ):
        load_plain_tensors(tmp_path / "snapshot")


@pytest.mark.parametrize("name", ["x.safetensors", "adapter", "weights.bin"])
def test_a_file_by_its_path(tmp_path: Path, name: str) -> None:
    save_file(tensors(), tmp_path / name)
    (tmp_path / "other.safetensors").write_bytes(b"rubbish")
    (tmp_path / "common.pt").write_bytes(b"rubbish")
    same(load_plain_tensors(tmp_path / name), tensors())
    (tmp_path / "link").symlink_to(name)
    same(load_plain_tensors(tmp_path / "link"), tensors())
    assert load_common_state_dict(tmp_path / name) == {}


def test_what_an_author_noted_is_in_no_ones_way(tmp_path: Path) -> None:
    noted = {"format": "pt", "training": '{"rank": 8}'}
    save_file(tensors(), tmp_path / "x.safetensors", metadata=noted)
    assert load_common_state_dict(tmp_path / "x.safetensors") == {"__metadata__": noted}
    assert load(whole(tensors()), tmp_path / "x.safetensors").keys() == tensors().keys()
    same(load_plain_tensors(tmp_path / "x.safetensors"), tensors())
    for made in ("torch_dist", "torch", "safetensors"):
        convert(tmp_path / "x.safetensors", tmp_path / made, made)
        assert load_common_state_dict(tmp_path / made) == {"__metadata__": noted}


def test_of_several_files_without_an_index_none_is_taken(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    with pytest.raises(NotACheckpoint):
        load_plain_tensors(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    same(load_plain_tensors(tmp_path), {"w": torch.ones(2)})


def test_of_one_file_and_indices_that_is_taken_which_transformers_takes(
    tmp_path: Path,
) -> None:
    hugging_face(tmp_path / "c")
    other = '{"metadata": {}, "weight_map": {"x": "consolidated-00001-of-00001.safetensors"}}'
    (tmp_path / "c/consolidated.safetensors.index.json").write_text(other)
    save_file(
        {"x": torch.ones(2)}, tmp_path / "c/consolidated-00001-of-00001.safetensors"
    )
    same(load_plain_tensors(tmp_path / "c"), tensors())
    save_file({"w": torch.ones(2)}, tmp_path / "c/model.safetensors")
    same(load_plain_tensors(tmp_path / "c"), {"w": torch.ones(2)})
    with pytest.raises(StorageError, match="would collide with this save"):
        save(whole(tensors()), tmp_path / "c", Safetensors(shards=2))
    same(load_plain_tensors(tmp_path / "c"), {"w": torch.ones(2)})


@pytest.mark.parametrize("stray", ["model.safetensors", INDEX])
def test_what_would_be_taken_for_the_checkpoint_is_refused(
    tmp_path: Path, stray: str
) -> None:
    """Of a clone without its large files, or a download that was cut off. Beside one file no index is looked at."""
    for shards in (1, 2):
        folder = tmp_path / f"{shards}"
        folder.mkdir()
        (folder / stray).write_text("version https://git-lfs.github.com/spec/v1\n")
        if (shards, stray) == (1, INDEX):
            save(whole(tensors()), folder, Safetensors(shards=shards))
            same(load_plain_tensors(folder), tensors())
        else:
            with pytest.raises(
                StorageError, match=f"{stray} would collide with this save"
            ):
                save(whole(tensors()), folder, Safetensors(shards=shards))
        assert (folder / stray).read_text().startswith("version https://git-lfs")


def test_only_what_is_needed_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(
        {"t": torch.randn(1024, 512), "other": torch.randn(1 << 20)},
        tmp_path / "x.safetensors",
    )
    count = 0
    real = os.preadv

    def counting(fd: int, buffers: Any, start: int) -> int:
        nonlocal count
        done = real(fd, buffers, start)
        count += done
        return done

    part = ShardedTensor.from_rank_offsets(
        "t", torch.zeros(128, 512), (0, 3, 8), replica_id=0
    )
    monkeypatch.setattr(os, "preadv", counting)
    load(
        {"t": part},
        tmp_path / "x.safetensors",
        validate_access_integrity=False,
        strict="ignore_all",
    )
    assert 128 * 512 * 4 <= count <= 128 * 512 * 4 + 2000  # the header, twice


# -- what it cannot hold, and single files


def test_what_cannot_be_held_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    state = {
        "good": torch.zeros(2),
        "bad": torch.zeros(2, dtype=torch.complex128),
        "__metadata__": torch.zeros(1),
    }
    with pytest.raises(
        BackendError, match=r"'bad': the format has no complex128; '__metadata__'"
    ):
        save(whole(state), tmp_path / "c", "safetensors")
    assert not (tmp_path / "c").exists()


class _Suite(BackendSuite):
    __test__ = False
    backend = Safetensors()


def test_the_one_file_that_holds_everything() -> None:
    suite, plain = _Suite(), {"t": Whole.random("float32", (4, 4), (2, 4))}
    _, manifest = suite.planned(World(plain), 2)
    assert Safetensors().layout(1, manifest).files == ["model.safetensors"]
    _, manifest = suite.planned(World(plain | {"u": plain["t"]}), 1)
    names = Safetensors(max_shard_bytes=32).layout(1, manifest).files
    assert names[:2] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    _, manifest = suite.planned(World(plain, {"rng": {(0,): b""}}, b"common"), 1)
    names = Safetensors().layout(1, manifest).files
    assert sorted(names) == ["common.pt", "model.safetensors", "rng.objects"]


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 0},
        {"max_shard_bytes": 0},
        {"shards": 1.5},
        {"shards": True},
        {"shards": "x"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="whole number from 1 on"):
        Safetensors(**options)


# -- hostile files

ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
LIES: dict[str, tuple[object, bytes]] = {
    "garbage": (b"{garbage", b""),
    "a list": ([], b""),
    "deep": (b'{"a":' * 100_000, b""),
    "twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b""),
    "twice inside": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
        b"",
    ),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "no entry": ({"a": 5}, b""),
    "negative": ({"a": ENTRY | {"shape": [-4]}}, b"1234"),
    "fraction": ({"a": ENTRY | {"shape": [4.0]}}, b"1234"),
    "boolean": ({"a": ENTRY | {"shape": [True], "data_offsets": [0, 1]}}, b"1"),
    "overflow": ({"a": ENTRY | {"shape": [1 << 62, 8]}}, b"1234"),
    "overflow of none": (
        {"a": ENTRY | {"shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}},
        b"",
    ),
    "many digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "many axes": ({"a": ENTRY | {"shape": [1] * 65 + [4]}}, b"1234"),
    "too long": ({"a": ENTRY | {"data_offsets": [0, 5]}}, b"12345"),
    "backwards": ({"a": ENTRY | {"data_offsets": [4, 0]}}, b"1234"),
    "beyond": ({"a": ENTRY | {"data_offsets": [4, 8]}}, b"1234"),
    "cut off": ({"a": ENTRY}, b"123"),
    "trailing": ({"a": ENTRY}, b"12345"),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, b"123456"),
    "same place": ({"a": ENTRY, "b": ENTRY}, b"1234"),
    "hole": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [5, 9]}}, b"123456789"),
    "metadata": ({"__metadata__": {"a": 5}, "a": ENTRY}, b"1234"),
    "metadata of no kind": ({"__metadata__": "x", "a": ENTRY}, b"1234"),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_errors(tmp_path: Path, lie: str) -> None:
    write(tmp_path / "x.safetensors", *LIES[lie])
    with pytest.raises(
        (CorruptCheckpoint, NotACheckpoint), match=r"x\.safetensors|no known format"
    ):
        Safetensors().read_manifest(SingleFile(tmp_path / "x.safetensors"))


def test_the_error_for_an_unknown_dtype_names_it(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": ENTRY | {"dtype": "F4"}}, b"1234")
    with pytest.raises(BackendError, match=r"'a' is of 'F4'"):
        load_plain_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 1000, 0])
def test_headers_of_impossible_length(tmp_path: Path, length: int) -> None:
    write(tmp_path / "x.safetensors", {"a": ENTRY}, b"1234", length)
    with pytest.raises((CorruptCheckpoint, NotACheckpoint)):
        load_plain_tensors(tmp_path / "x.safetensors")


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        told = change(document)
        text = told if isinstance(told, str) else json.dumps(document)
        (folder / INDEX).write_text(text)

    return changed


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX_LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "leads out": (
        _index(lambda d: d["weight_map"].update(b="../x")),
        r"'\.\./x', which leads out",
    ),
    "absolute": (
        _index(lambda d: d["weight_map"].update(b="/etc/passwd")),
        "'/etc/passwd', which leads out",
    ),
    "missing file": (
        _index(lambda d: d["weight_map"].update(b="gone.safetensors")),
        r"not there: gone\.safetensors",
    ),
    "other file": (
        _index(lambda d: d["weight_map"].update(b=SECOND)),
        f"'b' is in {FIRST}, and the .* {SECOND}",
    ),
    "not told": (
        _index(lambda d: [d["weight_map"].pop("b")]),
        f"'b' is in {FIRST}, and the weight_map says nothing",
    ),
    "not held": (
        _index(lambda d: d["weight_map"].update(c=FIRST)),
        f"'c' is not in {FIRST}",
    ),
    "no map": (_index(lambda d: [d.pop("weight_map")]), "no weight_map"),
    "numbers": (_index(lambda d: d["weight_map"].update(b=5)), "no weight_map"),
    "no JSON": (_index(lambda _: "{x"), "cannot be parsed"),
    "twice": (_index(lambda _: '{"weight_map":{"b":"x","b":"y"}}'), "'b' is repeated"),
    "deep": (_index(lambda _: '{"a":' * 100_000), "cannot be parsed"),
    "in two files": (
        lambda f: save_file({"b": torch.zeros(1), "half": torch.zeros(1)}, f / FIRST),
        "'half' is in",
    ),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_indices_that_lie_are_errors(tmp_path: Path, lie: str) -> None:
    change, told = INDEX_LIES[lie]
    hugging_face(tmp_path / "c")
    change(tmp_path / "c")
    with pytest.raises(CorruptCheckpoint, match=told):
        load_plain_tensors(tmp_path / "c")


def test_a_link_to_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "c/model.safetensors").symlink_to("../pipe")
    assert not Safetensors().recognises(LocalStorage(tmp_path / "c"))


# -- a real model


@pytest.mark.slow
def test_a_real_model(tmp_path: Path, minilm: Path) -> None:
    expected = load_file(minilm)
    assert len(expected) > 100
    same(load_plain_tensors(minilm), expected)
    save(whole(expected), tmp_path / "c", Safetensors(max_shard_bytes=20 << 20))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 3
    assert verify(tmp_path / "c").ok
    same(load_plain_tensors(tmp_path / "c"), expected)


def test_locations_are_plain_values() -> None:
    entry = TensorEntry("t", TensorMeta((2,), "float32"))
    (file,) = arranged([entry], "model", None, 100)
    assert file.places == {"t": Location("model.safetensors", len(file.head), 8)}
