"""Files of others in a directory that is saved to: they keep path, inode and bytes, or the save is refused."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import (
    AsyncCallsQueue,
    CheckpointManager,
    ShardedObject,
    ShardedTensor,
    convert,
)
from megackpt.backends.object_files import key_files
from megackpt.checkpoint.index import INDEX, decode_index, sealed_index
from megackpt.dcp import FileSystemWriter
from megackpt.errors import CheckpointingException, NotACheckpoint, StorageError
from megackpt.testing import ThreadedGroup
from tests.buckets import Bucket

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMATS = ("torch_dist", "zarr", "safetensors")
REFUSED = "would collide with this save"
LOOKALIKES = {
    "notes.txt": b"mine",
    "integrity.json": b'{"checked": "yesterday"}',
    "pytorch_model.bin": b"\x80\x02}.",
    "reference.safetensors": struct.pack("<Q", 2) + b"{}",
    "dataset/.zarray": b'{"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4"}',
    "dataset/0": bytes(8),
    "dataset/README": b"how it was measured",
}
"""Files that some format would recognise, and that no save writes."""
OF_THE_FORMAT = {
    "torch_dist": {"model.safetensors": b"?", "zarr.json": b"{}", "model.pt": b"?"},
    "zarr": {".metadata": b"flutter: 3", "model.safetensors": b"?", "model.pt": b"?"},
    "safetensors": {".metadata": b"flutter: 3", "metadata.json": b'{"title": "my data"}',
                    "model.safetensors.index.json": b"{}", "zarr.json": b"{}"},
}  # fmt: skip
"""Names that other formats write."""


def state(value: float, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    whole = torch.arange(64.0).reshape(16, 4) + value
    rows = 16 // ranks
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", whole[rank * rows :][:rows].clone(), (0, rank, ranks)
        ),
        "rng": ShardedObject("rng", {"seed": value}, (1,), (0,), replica_id=rank),
        "step": value,
    }


def loaded(where: Path | str) -> float:
    """The value that was saved, if all of it was."""
    found = megackpt.load(state(-1.0), where)
    assert torch.equal(found["w"], torch.arange(64.0).reshape(16, 4) + found["step"])
    assert found["rng"] == {"seed": found["step"]}
    return float(found["step"])


def put(where: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)


def kept(where: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of each file."""
    files = (path for path in where.rglob("*") if path.is_file())
    return {str(f.relative_to(where)): (f.stat().st_ino, f.read_bytes()) for f in files}


@contextmanager
def no_large_files() -> Iterator[None]:
    """A write beyond 8 KiB of a file is refused, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_async(value: float, where: Path, form: str, worker: str = "thread") -> None:
    queue = AsyncCallsQueue(persistent=worker == "process")
    queue.schedule_async_request(
        megackpt.save(state(value), where, form, async_sharded_save=True)
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_others_stay_through_all_saves(tmp_path: Path, form: str) -> None:
    where = tmp_path / "c"
    put(where, LOOKALIKES | OF_THE_FORMAT[form])
    before = kept(where)
    megackpt.save(state(1), where, form, overwrite=False)  # for there is no checkpoint
    assert loaded(where) == 1
    assert before.items() <= kept(where).items()
    megackpt.save(state(2), where, form)
    assert loaded(where) == 2
    assert before.items() <= kept(where).items()
    save_async(3, where, form)
    assert loaded(where) == 3
    assert before.items() <= kept(where).items()
    big = ShardedTensor.from_rank_offsets("w", torch.ones(100_000))
    with no_large_files(), pytest.raises(CheckpointingException):
        megackpt.save({"w": big}, where, form)
    assert loaded(where) == 3
    assert before.items() <= kept(where).items()
    report = megackpt.verify(where)
    assert report.ok, report
    assert {name.partition("/")[0] for name in before} == set(report.foreign)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("form", ["zarr", "safetensors"])
def test_an_index_of_an_older_release_names_no_files_of_keys(
    tmp_path: Path, form: str
) -> None:
    """They belong to the checkpoint all the same."""
    key = "key" * 100
    held = {key: ShardedObject(key, {"seed": 1}, (1,), (0,))}
    megackpt.save(held, tmp_path, form)
    path = tmp_path / INDEX
    manifest, small = decode_index(path.read_bytes(), "it")
    (file,) = set(small).intersection(key_files(manifest.tensors))
    named = {name: found for name, found in small.items() if name != file}
    path.write_bytes(sealed_index(manifest, named))
    assert megackpt.verify(tmp_path).foreign == ()
    megackpt.save(held, tmp_path, form)
    path.write_bytes(sealed_index(manifest, named))
    megackpt.save(state(1), tmp_path, form)
    assert not (tmp_path / file).exists()


@pytest.mark.slow
def test_files_of_others_stay_where_a_process_writes(tmp_path: Path) -> None:
    put(tmp_path, LOOKALIKES)
    before = kept(tmp_path)
    for value in (1, 2):
        save_async(value, tmp_path, "torch_dist", "process")
        assert loaded(tmp_path) == value
    assert before.items() <= kept(tmp_path).items()


@pytest.mark.parametrize("form", FORMATS)
def test_a_first_save_that_fails_leaves_what_stood_there(
    tmp_path: Path, form: str
) -> None:
    put(tmp_path, LOOKALIKES | OF_THE_FORMAT[form])
    before = kept(tmp_path)
    big = ShardedTensor.from_rank_offsets("w", torch.ones(100_000))
    with no_large_files(), pytest.raises(CheckpointingException):
        megackpt.save({"w": big}, tmp_path, form)
    assert kept(tmp_path) == before


def test_from_format_to_format(tmp_path: Path) -> None:
    where = tmp_path / "c"
    put(where, LOOKALIKES)
    before = kept(where)
    names = set()
    for value, form in enumerate((*FORMATS, *FORMATS[::-1])):
        megackpt.save(state(value), where, form)
        assert loaded(where) == value
        assert before.items() <= kept(where).items()
        names.add((form, *sorted(kept(where))))
    assert len(names) == len(FORMATS), "nothing of another format is left"


COLLISIONS = [
    ("torch_dist", "metadata.json"), ("torch_dist", ".metadata"), ("torch_dist", "common.pt"),
    ("torch_dist", "__0_0.distcp"), ("torch_dist", "megackpt.index"), ("zarr", "w/table.csv"),
    ("zarr", "zarr.json"), ("zarr", "rng.objects"), ("zarr", "metadata.json"),
    ("safetensors", "model.safetensors"), ("safetensors", "common.pt"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "name"), COLLISIONS)
def test_a_name_that_is_taken_is_refused_before_anything_is_changed(
    tmp_path: Path, form: str, name: str
) -> None:
    put(tmp_path / "c", LOOKALIKES | {name: b"mine"})
    before = kept(tmp_path)

    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            state(1, group.rank, 2), tmp_path / "c", form, process_group=group
        )

    for error in ThreadedGroup.outcomes(2, run):
        assert isinstance(error, CheckpointingException)
        assert REFUSED in str(error)
        assert name.partition("/")[0] in str(error)
    with pytest.raises(StorageError, match=REFUSED):
        megackpt.save(state(1), tmp_path / "c", form)
    assert kept(tmp_path) == before
    (tmp_path / "c" / name).unlink()
    if "/" in name:
        (tmp_path / "c" / name).parent.rmdir()
    megackpt.save(state(1), tmp_path / "c", form)
    assert loaded(tmp_path / "c") == 1


def test_beside_a_checkpoint_a_name_that_the_next_one_takes_is_refused_too(
    tmp_path: Path,
) -> None:
    where = tmp_path / "c"
    megackpt.save(state(1), where, "safetensors")
    put(where, {"metadata.json": b'{"title": "my data"}'})
    before = kept(tmp_path)
    for call in (
        lambda: megackpt.save(state(2), where),
        lambda: save_async(2, where, "torch_dist"),
        lambda: dcp.save(
            {"w": torch.ones(2)}, storage_writer=FileSystemWriter(where), no_dist=True
        ),
    ):
        with pytest.raises(
            (StorageError, CheckpointException), match=rf"metadata\.json {REFUSED}"
        ):
            call()
        assert kept(tmp_path) == before
    assert loaded(where) == 1


def test_files_in_folders_of_the_checkpoint_stay_as_well(tmp_path: Path) -> None:
    where = tmp_path / "c"
    megackpt.save(state(1), where, "zarr")
    put(where, {"w/README": b"mine"})
    before = kept(tmp_path)
    assert megackpt.verify(where).foreign == ("w/README",)
    with pytest.raises(StorageError, match=f"w/README {REFUSED}"):
        megackpt.save(state(2), where, "zarr")
    assert kept(tmp_path) == before
    megackpt.save(state(2), where, "torch_dist")
    assert loaded(where) == 2
    assert kept(where)["w/README"] == before["c/w/README"]
    assert os.listdir(where / "w") == ["README"]


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    where = tmp_path / "c"
    megackpt.save(state(1), where, "zarr")
    (where / "w").rename(tmp_path / "elsewhere")
    (where / "w").symlink_to(tmp_path / "elsewhere")
    before = kept(tmp_path / "elsewhere")
    megackpt.save(state(2), where, "torch_dist")
    assert kept(tmp_path / "elsewhere") == before
    assert (where / "w").is_symlink()


def test_stock_dcp_is_replaced_and_what_only_looks_like_it_is_not(
    tmp_path: Path,
) -> None:
    where = tmp_path / "c"
    dcp.save({"old": torch.ones(4)}, checkpoint_id=where, no_dist=True)
    put(where, LOOKALIKES)
    before = {name: held for name, held in kept(where).items() if name in LOOKALIKES}
    megackpt.save(state(1), where, "zarr")
    assert loaded(where) == 1
    assert before.items() <= kept(where).items()
    assert not list(where.glob("*.distcp"))
    assert not (where / ".metadata").exists()


def test_a_hugging_face_directory_is_not_replaced(tmp_path: Path) -> None:
    megackpt.save({"a": state(1)["w"]}, tmp_path / "hf", "safetensors")
    for name in ("megackpt.index", "common.pt"):
        (tmp_path / "hf" / name).unlink()
    put(tmp_path / "hf", {"config.json": b"{}"})
    before = kept(tmp_path / "hf")
    assert {"model.safetensors", "config.json"} == {*before}
    with pytest.raises(StorageError, match=f"model.safetensors {REFUSED}"):
        megackpt.save(state(2), tmp_path / "hf", "safetensors")
    with pytest.raises(CheckpointingException, match="convert it to another directory"):
        megackpt.remove_sharded_tensors(tmp_path / "hf", "w")
    assert kept(tmp_path / "hf") == before
    megackpt.save(state(2), tmp_path / "hf")
    assert loaded(tmp_path / "hf") == 2
    assert before.items() <= kept(tmp_path / "hf").items()


@pytest.mark.parametrize(
    "text", [b'{"trained_by": "me"}', b"[1, 2]", b"no JSON", b" " * (2 << 20), b"{}"]
)
def test_a_metadata_json_of_others_hides_no_checkpoint(
    tmp_path: Path, text: bytes
) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    megackpt.save({"w": state(1)["w"]}, tmp_path / "ours", "safetensors")
    megackpt.save({"w": state(1)["w"]}, tmp_path / "hf", "safetensors")
    (tmp_path / "hf/megackpt.index").unlink()
    for name, form in (
        ("dcp", "torch_dist"),
        ("hf", "safetensors"),
        ("ours", "safetensors"),
    ):
        expected = megackpt.load_plain_tensors(tmp_path / name)["w"]
        put(tmp_path / name, {"metadata.json": text})
        assert megackpt.check_is_distributed_checkpoint(tmp_path / name)
        for asked in (None, form):
            found = megackpt.load_plain_tensors(tmp_path / name, sharded_strategy=asked)
            assert torch.equal(found["w"], expected)
    put(tmp_path / "none", {"metadata.json": text})
    with pytest.raises(CheckpointingException):
        megackpt.load_plain_tensors(tmp_path / "none")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("hurt", ["a digest", "cut off", "everything"])
def test_of_a_damaged_checkpoint_only_what_is_certain_is_removed(
    tmp_path: Path, form: str, hurt: str
) -> None:
    where = tmp_path / "c"
    megackpt.save(state(1), where, form)
    names = {*kept(where)}
    put(where, LOOKALIKES)
    index = where / "megackpt.index"
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data if hurt == "a digest" else data[:100])
    if hurt == "everything":
        for name in {"metadata.json", ".metadata"} & names:
            (where / name).write_bytes(b"")
    before = kept(where)
    told = hurt == "a digest" or (hurt == "cut off" and form in ("torch_dist", "zarr"))
    if told:
        megackpt.save(state(2), where, form)
        assert loaded(where) == 2
        assert {*kept(where)} == names | LOOKALIKES.keys()
        assert all(kept(where)[name] == before[name] for name in LOOKALIKES)
    else:
        with pytest.raises(
            CheckpointingException, match=f"it is unknown which files|{REFUSED}"
        ):
            megackpt.save(state(2), where, form)
        assert kept(where) == before


def test_data_files_that_a_save_of_others_left_are_not_ours(tmp_path: Path) -> None:
    put(tmp_path, {"__0_0.distcp": b"half", "common.pt": b"half"})
    before = kept(tmp_path)
    with pytest.raises(StorageError, match=r"common\.pt, __0_0|__0_0\.distcp, common"):
        megackpt.save(state(1), tmp_path)
    assert kept(tmp_path) == before


def test_conversions_leave_what_is_in_the_target(tmp_path: Path) -> None:
    megackpt.save(state(1), tmp_path / "source")
    put(tmp_path / "c", LOOKALIKES)
    before = kept(tmp_path / "c")
    for form in (*FORMATS, "torch"):
        megackpt.convert(tmp_path / "source", tmp_path / "c", form, overwrite=True)
        assert loaded(tmp_path / "c") == 1
        assert before.items() <= kept(tmp_path / "c").items()
    megackpt.convert(tmp_path / "source", tmp_path / "c", "zarr", overwrite=True)
    megackpt.remove_sharded_tensors(tmp_path / "c", "w")
    assert "w" not in megackpt.load_tensors_metadata(tmp_path / "c")
    assert before.items() <= kept(tmp_path / "c").items()
    put(tmp_path / "taken", {"metadata.json": b'{"title": "my data"}'})
    taken = kept(tmp_path / "taken")
    with pytest.raises(StorageError, match=rf"metadata\.json {REFUSED}"):
        megackpt.convert(
            tmp_path / "source", tmp_path / "taken", "zarr", overwrite=True
        )
    assert kept(tmp_path / "taken") == taken
    put(tmp_path / "taken", {"model.pt": b"mine"})
    taken = kept(tmp_path / "taken")
    with pytest.raises(StorageError, match=rf"model\.pt {REFUSED}"):
        megackpt.convert(
            tmp_path / "source", tmp_path / "taken", "torch", overwrite=True
        )
    assert kept(tmp_path / "taken") == taken


def test_dcp_saves_leave_what_is_in_the_target(tmp_path: Path) -> None:
    put(tmp_path / "c", LOOKALIKES)
    before = kept(tmp_path / "c")
    for value in (1.0, 2.0):
        writer = FileSystemWriter(tmp_path / "c")
        dcp.save({"w": torch.full((4,), value)}, storage_writer=writer, no_dist=True)
        assert before.items() <= kept(tmp_path / "c").items()
    assert megackpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("form", FORMATS)
def test_retention_removes_the_checkpoint_and_leaves_the_rest(
    tmp_path: Path, form: str
) -> None:
    with CheckpointManager(tmp_path, form, keep_last=1) as manager:
        manager.save(1, state(1))
        put(tmp_path / "iter_0000001", LOOKALIKES | {"w/README": b"mine"})
        before = kept(tmp_path / "iter_0000001")
        manager.save(2, state(2))
    left = kept(tmp_path / "iter_0000001")
    assert left == {
        name: held for name, held in before.items() if name in {*LOOKALIKES, "w/README"}
    }
    put(tmp_path / "iter_0000002", LOOKALIKES | OF_THE_FORMAT[form])
    (step,) = [step for step in CheckpointManager(tmp_path).steps() if step.complete]
    assert (step.step, step.format) == (2, form)
    assert CheckpointManager(tmp_path).restore(state(0)).step == 2


def test_readers_write_nothing(tmp_path: Path) -> None:
    """Also where a save goes on that cannot be looked at: on another host, or in another container."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
    other = tmp_path / "iter_0000002"
    staging = tmp_path / f".iter_0000002.megackpt-{'a' * 32}"
    put(staging, {"__0_0.distcp": b"half"})
    marker = {"save_id": "a" * 32, "host": "node7", "pid": 7, "started": 7, "boot": "another",
              "namespace": "pid:[1]", "time": time.time(), "names": ["__0_0.distcp"]}  # fmt: skip
    put(staging, {f".megackpt-saving-{'a' * 32}": json.dumps(marker).encode()})
    for path in (staging, tmp_path):
        os.utime(path, (1, 1))  # of a directory: when an entry was made or removed
    for call in (megackpt.load_plain_tensors, megackpt.verify):
        with pytest.raises(NotACheckpoint, match="is running, or died"):
            call(other)
    assert not megackpt.check_is_distributed_checkpoint(other)
    reader = CheckpointManager(tmp_path)
    assert [step.step for step in reader.steps() if step.complete] == [1]
    for verify in (False, True):
        found = reader.latest(verify=verify)
        assert found is not None
        assert found.step == 1
    assert reader.restore(state(0)).step == 1
    assert [path.stat().st_mtime for path in (staging, tmp_path)] == [1, 1]


def changed_index(where: Path, change: Any) -> None:
    """With another head, and a digest that is right."""
    data = (where / "megackpt.index").read_bytes()
    magic, version, length = struct.unpack_from("<8sII", data)
    head = json.loads(data[16 : 16 + length])
    change(head)
    text = json.dumps(head).encode()
    body = (
        struct.pack("<8sII", magic, version, len(text)) + text + data[16 + length : -16]
    )
    (where / "megackpt.index").write_bytes(body + xxhash.xxh3_128_digest(body))


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("form", FORMATS)
def test_an_index_that_claims_many_writers(tmp_path: Path, form: str) -> None:
    def claim(head: dict[str, Any]) -> None:
        assert not head["columns"]["writer"][1], "it takes no bytes"
        head["columns"]["writer"] = [head["columns"]["writer"][0], 0, 1 << 30, 1, 0]

    with CheckpointManager(tmp_path, form, keep_last=1) as manager:
        manager.save(1, {"w": state(1)["w"]})
        first = tmp_path / "iter_0000001"
        changed_index(first, claim)
        with little_memory(256 << 20):
            assert megackpt.verify(first).ok
            megackpt.save({"w": state(2)["w"]}, first, form)
        changed_index(first, claim)
        with little_memory(256 << 20):
            manager.save(2, state(2))
        assert not first.exists()


def test_an_index_that_claims_a_huge_cell(tmp_path: Path) -> None:
    megackpt.save({"w": state(1)["w"]}, tmp_path / "c", "zarr")
    changed_index(
        tmp_path / "c",
        lambda head: head["columns"].update(grid_dim=[2, 0, 1 << 61, 1, 0]),
    )
    with little_memory(256 << 20), suppress(CheckpointingException):
        convert(tmp_path / "c", tmp_path / "d", "torch_dist", workers=1)


def test_what_an_export_would_write_alike_stays(tmp_path: Path) -> None:
    megackpt.save(state(1), tmp_path / "source")
    files = {"config.json": b"{}", "templates/a.jinja": b"a"}
    put(tmp_path / "c", files)
    before = kept(tmp_path / "c")
    for _ in range(2):
        convert(
            tmp_path / "source",
            tmp_path / "c",
            "safetensors",
            beside=files,
            overwrite=True,
        )
        assert before.items() <= kept(tmp_path / "c").items()
    (tmp_path / "c/config.json").write_bytes(b"mine")
    before = kept(tmp_path / "c")
    with pytest.raises(StorageError, match=rf"config\.json {REFUSED}"):
        convert(
            tmp_path / "source",
            tmp_path / "c",
            "safetensors",
            beside=files,
            overwrite=True,
        )
    assert kept(tmp_path / "c") == before


def test_a_file_that_cannot_get_its_name_is_removed(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with CheckpointManager(tmp_path) as manager, suppress(CheckpointingException):
        manager.save(1, state(1))
    assert not list(tmp_path.glob(".megackpt-put-*"))


def test_objects_of_others_in_a_bucket_stay(tmp_path: Path, bucket: Bucket) -> None:
    url = f"{bucket.url}/run"
    megackpt.save(state(1), tmp_path / "local", "zarr")
    (tmp_path / "local/megackpt.index").unlink()
    ours = {f"run/{name}": data for name, (_, data) in kept(tmp_path / "local").items()}
    others = {f"run/{name}": data for name, data in LOOKALIKES.items()} | {
        "run/w/README": b"mine"
    }
    for key, data in (ours | others).items():
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=data)
    for value in (2, 3):
        megackpt.save(state(value), url)
        assert loaded(url) == value
        assert others.keys() <= {*bucket.keys()}
        assert not ours.keys() & {*bucket.keys()}
    put_back = {
        "run2/metadata.json": b'{"title": "my data"}',
        "run2/x.safetensors": others["run/reference.safetensors"],
    }
    for key, data in put_back.items():
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=data)
    megackpt.save(state(4), f"{bucket.url}/run2", overwrite=False)
    assert loaded(f"{bucket.url}/run2") == 4
    assert put_back.keys() <= {*bucket.keys()}


def test_a_tilde_is_expanded_by_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user = os.path.basename(os.path.expanduser("~")) or "root"
    known = next(
        (u for u in (user, "root") if os.path.expanduser(f"~{u}") != f"~{u}"), None
    )
    for path in ("~/c", *([f"~{known}/c"] if known else [])):
        with pytest.raises(StorageError, match="expanduser"):
            megackpt.save(state(1), path)
    megackpt.save(state(1), "~nobody-has-this-name/c")  # as in a shell
    assert os.listdir(tmp_path) == ["~nobody-has-this-name"]
