"""The protocol of a save in a bucket: who wins, what is left over, and what an unlucky line or process may cost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megackpt.checkpoint import (
    begin,
    clear,
    object_target,
    open_checkpoint,
    open_same,
    remove,
    staging_storage,
    verify,
    verifying,
)
from megackpt.checkpoint.records import RECORD
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.storage import BucketStorage, bucket as bucket_room, client

RACERS = 16
SAVER = """
import sys, uuid
from megackpt.checkpoint import begin
place = begin(sys.argv[1], save_id=sys.argv[2])
place.storage.put("rank0.bin", b"half of it")
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def url(bucket) -> str:
    return f"{bucket.url}/run/iter_100"


@pytest.fixture
def quick(monkeypatch):
    """What is tried again is tried at once."""
    monkeypatch.setattr(client, "PAUSE", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.01)


def held(bucket) -> list[str]:
    """Every key in it."""
    return list(bucket.keys())


def identity() -> str:
    return uuid.uuid4().hex


def save_of(url: str) -> str:
    return open_checkpoint(url).manifest.save_id


def written(saves, url: str, value: int, **options):
    """A save that lacks nothing but its commit."""
    place = begin(url, save_id=identity(), **options)
    return place, [saves.write(place, rank, value) for rank in range(2)]


def assert_only(bucket, url: str) -> None:
    """Nothing but the record and the folder that it names is under this URL."""
    above = url.removeprefix(f"{bucket.url}/")
    (name,) = {key.removeprefix(f"{above}/").split("/")[0] for key in held(bucket)} - {
        "megackpt.commit"
    }
    assert name == f"megackpt-{save_of(url)}"


def test_a_save_is_one_folder_and_a_record_that_names_it(bucket, url, saves):
    saves.save(url, 1)
    save_id = save_of(url)
    record = json.loads(BucketStorage(url).get("megackpt.commit"))
    assert record["save_id"] == save_id
    folder = f"run/iter_100/megackpt-{save_id}"
    names = {"metadata.json", "megackpt.index", "toc", "rank0.bin", "rank1.bin"}
    assert {*held(bucket)} == {
        "run/iter_100/megackpt.commit",
        *(f"{folder}/{name}" for name in names),
    }
    assert record["objects"] == len(names)
    assert (
        saves.load(f"{url}/megackpt-{save_id}") == saves.load(url) == 1
    )  # the folder is a checkpoint by itself
    assert verify(url).ok
    assert not verify(url).foreign


def test_a_checkpoint_is_replaced_and_the_old_one_removed(bucket, url, saves):
    saves.save(url, 1)
    old = open_checkpoint(url)
    with pytest.raises(CheckpointExists, match="pass overwrite=True"):
        saves.save(url, 2, overwrite=False)
    saves.save(url, 2)
    assert saves.load(url) == 2
    assert_only(bucket, url)
    assert not old.storage.is_current()
    with pytest.raises(CheckpointReplaced):
        open_same(url, old.manifest.save_id)


@pytest.mark.parametrize("save_id", ["mine", "", "../x", "0" * 31, "A" * 32])
def test_a_save_whose_id_is_no_uuid_is_refused_before_anything_is_put(
    bucket, url, save_id
):
    with pytest.raises(
        StorageError,
        match=r"not an id for a save in an object store: give uuid\.uuid4\(\)\.hex",
    ):
        begin(url, save_id=save_id)
    assert held(bucket) == []


def test_what_is_replaced_while_it_is_verified_is_verified_anew(
    bucket, url, saves, monkeypatch
):
    saves.save(url, 1)
    real, left = verifying._Work.compare, [2]

    def run(self, *args):
        if left[0]:
            left[0] -= 1
            saves.save(url, 2)
        return real(self, *args)

    monkeypatch.setattr(verifying._Work, "compare", run)
    report = verify(url)
    assert (report.problems, left) == ((), [0])


def test_what_others_put_beside_a_checkpoint_is_left_alone(bucket, url, saves):
    others = {
        f"run/iter_100/megackpt-{name}/f"
        for name in ("gpt2", "run_7", "0123456789abcdef")
    }
    for key in others:
        BucketStorage(bucket.url).put(key, b"theirs")
    saves.save(f"{url}/megackpt-nested", 3)
    for value in (1, 2):
        saves.save(url, value)
    assert (saves.load(url), saves.load(f"{url}/megackpt-nested")) == (2, 3)
    assert others < {*held(bucket)}


def test_a_failed_save_leaves_what_was_there(bucket, url, saves):
    saves.save(url, 1)
    place, results = written(saves, url, 2)
    with staging_storage(url, place.save_id) as storage:
        assert storage.location == place.path

    def refuse() -> None:
        raise StorageError("a rank is gone")

    with pytest.raises(StorageError, match="a rank is gone"):
        saves.commit(place, results, confirm=refuse)
    place.abort()
    assert saves.load(url) == 1
    assert_only(bucket, url)
    with pytest.raises(StorageError, match="not visible from here"):
        staging_storage(url, place.save_id).__enter__()


@pytest.mark.parametrize("before", [None, 99])
def test_of_sixteen_racing_saves_one_wins(bucket, url, saves, before):
    """All write in full, and commit at once."""
    if before is not None:
        saves.save(url, before)
    places = [written(saves, url, number) for number in range(RACERS)]
    start = threading.Barrier(RACERS)
    lost: dict[int, Exception] = {}

    def race(number: int) -> None:
        place, results = places[number]
        start.wait()
        try:
            saves.commit(place, results)
        except SaveInProgress as error:
            lost[number] = error
            place.abort()

    threads = [
        threading.Thread(target=race, args=(number,)) for number in range(RACERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = {*range(RACERS)} - lost.keys()
    assert saves.load(url) == winner
    assert_only(bucket, url)


@pytest.mark.parametrize("before", [False, True])
def test_a_save_that_wakes_up_late_cannot_commit(bucket, url, saves, before):
    if before:
        saves.save(url, 1)
    stopped, results = written(saves, url, 2)
    saves.save(url, 3)
    with pytest.raises(SaveInProgress, match="another save has"):
        saves.commit(stopped, results)
    stopped.abort()
    assert saves.load(url) == 3
    assert_only(bucket, url)


def test_a_save_that_wakes_up_at_its_commit_cannot_commit(
    bucket, url, saves, monkeypatch
):
    """Stopped between its last look and the put of its record."""
    stopped, results = written(saves, url, 2)
    real = BucketStorage.put_if_match

    def put_if_match(self, name, data, version):
        if name == RECORD:
            monkeypatch.setattr(BucketStorage, "put_if_match", real)
            saves.save(url, 3)
        return real(self, name, data, version)

    monkeypatch.setattr(BucketStorage, "put_if_match", put_if_match)
    with pytest.raises(SaveInProgress, match="since this one began"):
        saves.commit(stopped, results)
    stopped.abort()
    assert saves.load(url) == 3
    assert_only(bucket, url)


def test_a_save_that_began_after_a_commit_is_not_removed_by_it(
    bucket, url, saves, monkeypatch
):
    first, results = written(saves, url, 1)
    real, later = object_target.ObjectTarget.settle, []

    def settle(self, save_id):
        later.append(written(saves, url, 2))
        real(self, save_id)

    with monkeypatch.context() as patch:
        patch.setattr(object_target.ObjectTarget, "settle", settle)
        saves.commit(first, results)
    saves.commit(*later[0])
    assert saves.load(url) == 2
    assert_only(bucket, url)


def test_what_another_host_left_is_removed_after_the_next_commit(bucket, url, saves):
    dead = identity()
    fields = {"host": "h2", "pid": 1, "boot": "b", "time": 0.0}
    folder = BucketStorage(f"{url}/megackpt-{dead}")
    folder.put(f".megackpt-saving-{dead}", json.dumps(fields).encode())
    with pytest.raises(
        NotACheckpoint, match=r"process 1 on host 'h2'.* is running, or"
    ):
        open_checkpoint(url)
    place = begin(url, save_id=identity())
    assert f"run/iter_100/megackpt-{dead}/.megackpt-saving-{dead}" in held(bucket)
    place.abort()
    saves.save(url, 1)
    assert_only(bucket, url)


def test_what_a_killed_save_left_is_removed_at_begin(bucket, url, saves):
    saves.save(url, 1)
    dead = identity()
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, url, dead],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "begun\n"
        process.kill()
    assert saves.load(url) == 1
    assert f"run/iter_100/megackpt-{dead}/rank0.bin" in held(bucket)
    begin(url, save_id=identity()).abort()
    assert_only(bucket, url)


def test_probes_of_processes_that_died_are_removed(bucket, url, saves, monkeypatch):
    probe = f"{url.removeprefix(f'{bucket.url}/')}/.megackpt-probe-00"
    for work in (lambda: saves.save(url, 1), lambda: clear(url)):
        bucket.client.put_object(Bucket=bucket.name, Key=probe, Body=b"1")
        work()
        assert probe in held(bucket)  # of a process that may live
        with monkeypatch.context() as patch:
            patch.setattr(object_target, "PROBE_SECONDS", -60)
            work()
        assert probe not in held(bucket)
    assert_only(bucket, url)


def test_removal(bucket, url, saves, monkeypatch):
    saves.save(url, 1)
    remove(url)
    assert held(bucket) == []
    with pytest.raises(NotACheckpoint):
        remove(url)
    saves.save(url, 1)
    real = BucketStorage.put_if_match

    def put_if_match(self, name, data, version):
        monkeypatch.setattr(BucketStorage, "put_if_match", real)
        saves.save(url, 2)
        return real(self, name, data, version)

    monkeypatch.setattr(BucketStorage, "put_if_match", put_if_match)
    with pytest.raises(SaveInProgress, match="is left alone"):
        remove(url)
    assert saves.load(url) == 2


def test_a_removal_that_died_leaves_no_checkpoint(bucket, url, saves, monkeypatch):
    saves.save(url, 1)
    with monkeypatch.context() as patch:
        patch.setattr(BucketStorage, "delete", lambda *_: None)
        remove(url)
    with pytest.raises(NotACheckpoint):
        open_checkpoint(url)
    saves.save(url, 2)
    assert saves.load(url) == 2
    assert_only(bucket, url)


def test_a_checkpoint_that_was_uploaded_as_it_is(tmp_path, bucket, url, saves):
    saves.save(tmp_path / "local", 1)
    for path in (tmp_path / "local").iterdir():
        BucketStorage(url).put(path.name, path.read_bytes())
    BucketStorage(url).put("notes.txt", b"mine")
    assert saves.load(url) == 1
    config = BucketStorage(url).get("metadata.json")
    BucketStorage(url).delete("metadata.json")
    with pytest.raises(CorruptCheckpoint, match=r"metadata\.json is missing"):
        saves.load(url)
    BucketStorage(url).put("metadata.json", config)
    with pytest.raises(CheckpointExists):
        saves.save(url, 2, overwrite=False)
    saves.save(url, 2)
    assert saves.load(url) == 2
    left = {key.split("/")[2] for key in held(bucket)}
    assert left == {"notes.txt", "megackpt.commit", f"megackpt-{save_of(url)}"}


# ---- the line


def faults() -> Iterator[tuple[str, str, int | str]]:
    for path in ("rank0.bin", "megackpt.index", "megackpt.commit"):
        for how in (503, "reset", "swallow"):
            yield "PUT", path, how
    for path in ("megackpt.commit", "megackpt.index", "rank0.bin"):
        for how in (503, "reset", "truncate"):
            yield "GET", path, how


@pytest.mark.parametrize(
    "method_path_how",
    [
        fault if "commit" in fault[1] else pytest.param(fault, marks=pytest.mark.slow)
        for fault in faults()
    ],
    ids=str,
)
def test_a_bad_line_loses_nothing(line, url, saves, quick, method_path_how):
    method, path, how = method_path_how
    saves.save(url, 1)
    line.once(how, method, path, times=2)
    before = line.asked(method, path)
    saves.save(url, 2)
    assert saves.load(url) == 2
    assert line.asked(method, path) > before + 1  # it was really asked again


def test_a_commit_whose_answer_never_comes_is_found_in_the_record(
    bucket, line, url, saves, quick
):
    place, results = written(saves, url, 1)
    line.once("swallow", "PUT", "megackpt.commit", times=1000)
    saves.commit(place, results)
    assert saves.load(url) == 1
    assert_only(bucket, url)


def test_a_commit_of_which_nothing_is_known_removes_nothing(
    bucket, line, url, saves, quick
):
    saves.save(url, 1)
    place, results = written(saves, url, 2)
    line.once(503, "PUT", "megackpt.commit", times=1000)
    with pytest.raises(
        StorageError, match=r"not known whether .* so nothing is removed"
    ):
        saves.commit(place, results)
    place.abort()
    assert saves.load(url) == 1
    assert any(f"megackpt-{place.save_id}/rank0.bin" in key for key in held(bucket))
    line.fault = lambda _: None
    saves.save(url, 3)
    assert saves.load(url) == 3
    assert_only(bucket, url)


def test_a_record_that_cannot_even_be_read_leaves_it_open(
    bucket, line, url, saves, quick
):
    """The commit stands, its answer is lost, and the store goes away."""
    saves.save(url, 1)
    place, results = written(saves, url, 2)
    gone = []

    def fault(request):
        if gone or (
            request.method == "PUT" and request.path.endswith("megackpt.commit")
        ):
            gone.append(request)
            return "swallow" if len(gone) == 1 else 503
        return None

    line.fault = fault
    with pytest.raises(
        StorageError, match=rf"not known whether.*If it names {place.save_id} later"
    ):
        saves.commit(place, results)
    line.fault = lambda _: None
    place.abort()
    assert saves.load(url) == 2


def test_clearing_up_that_fails_is_left_to_the_next_save(
    bucket, line, url, saves, quick
):
    saves.save(url, 1)
    line.once(403, "POST", "delete", times=1000)
    saves.save(url, 2)
    assert saves.load(url) == 2
    line.fault = lambda _: None
    saves.save(url, 3)
    assert_only(bucket, url)


# ---- stores that ignore conditions


@pytest.fixture
def careless(line, monkeypatch):
    """A store that takes conditions of a put, and ignores them."""
    monkeypatch.setattr(bucket_room, "_proven", set())

    def fault(request) -> None:
        for header in ("If-None-Match", "If-Match"):
            request.without(header)

    line.fault = fault


@pytest.fixture
def unconditional(line, monkeypatch):
    """A store that knows no conditions of a put, and says so."""
    monkeypatch.setattr(bucket_room, "_proven", set())
    line.fault = lambda request: (
        501 if re.search(rb"(?im)^if-(none-)?match:", request.head) else None
    )


@pytest.fixture(params=["careless", "unconditional"])
def poor(request):
    return request.getfixturevalue(request.param)


def test_a_store_without_conditional_puts_is_refused(poor, bucket, url, saves):
    with pytest.raises(
        StorageError,
        match=r"ignores the conditions of puts.*MEGACKPT_SINGLE_WRITER=1",
    ):
        saves.save(url, 1)
    assert held(bucket) == []


def test_a_single_writer_may_use_it(poor, bucket, url, saves, monkeypatch):
    monkeypatch.setenv("MEGACKPT_SINGLE_WRITER", "1")
    for value in (1, 2):
        saves.save(url, value)
        assert saves.load(url) == value
        assert_only(bucket, url)


# ---- damage


@pytest.mark.parametrize("file", ["rank0.bin", "toc", "megackpt.index"])
@pytest.mark.parametrize("damage", ["truncated", "replaced", "deleted"])
def test_damage_is_found(bucket, url, saves, file, damage):
    saves.save(url, 1)
    storage = open_checkpoint(url).storage
    data = storage.get(file)
    match damage:
        case "truncated":
            storage.put(file, data[:-7])
        case "replaced":
            storage.put(file, bytes([data[0] ^ 1]) + data[1:])
        case "deleted":
            storage.delete(file)
    report = verify(url)
    assert not report.ok
    assert file in str(report)
    if file != "rank0.bin":  # of data files, loads of what is damaged tell
        with pytest.raises(CorruptCheckpoint, match=file):
            open_checkpoint(url)


def test_an_index_of_another_save_is_not_the_one_of_the_record(url, saves):
    saves.save(url, 1)
    storage = open_checkpoint(url).storage
    saves.save(f"{url}0", 1)
    storage.put(
        "megackpt.index", open_checkpoint(f"{url}0").storage.get("megackpt.index")
    )
    with pytest.raises(
        CorruptCheckpoint, match=r"not the one that s3://.*megackpt.commit names"
    ):
        open_checkpoint(url)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (b"", CorruptCheckpoint),
        (b"[]", CorruptCheckpoint),
        (b'{"format": 1}', CorruptCheckpoint),
        (b"{" * 100_000, CorruptCheckpoint),
        (b" " * (1 << 21), CorruptCheckpoint),
        (b'{"format": 2}', BackendError),
    ],
)
def test_a_record_that_says_nothing(bucket, url, saves, record, error):
    saves.save(url, 1)
    BucketStorage(url).put("megackpt.commit", record)
    with pytest.raises(error, match=r"megackpt\.commit"):
        open_checkpoint(url)
    told = (
        r"too new"
        if error is BackendError
        else r"overwrite=True.*, or remove s3://.*megackpt\.commit"
    )
    with pytest.raises(error, match=told):
        saves.save(url, 2, overwrite=False)
    if error is BackendError:  # the next release's checkpoint is whole
        with pytest.raises(error, match=told):
            saves.save(url, 2)
        return
    saves.save(url, 2)
    assert saves.load(url) == 2
    assert_only(bucket, url)


def test_a_record_cannot_lead_elsewhere(url, saves):
    saves.save(url, 1)
    told = json.loads(BucketStorage(url).get("megackpt.commit"))
    for name in ("../other", "a/b", "", "..", "0" * 31, "G" * 32, f"{0:032}\n"):
        BucketStorage(url).put(
            "megackpt.commit", json.dumps(told | {"save_id": name}).encode()
        )
        with pytest.raises(CorruptCheckpoint, match="names no save"):
            open_checkpoint(url)


def test_words_for_what_is_not_there(tmp_path: Path, bucket, url):
    with pytest.raises(NotACheckpoint, match="does not exist: no object is there"):
        open_checkpoint(url)
    BucketStorage(bucket.url).put("run/model.safetensors", b"x")
    with pytest.raises(
        NotACheckpoint, match="is one object: to read a single file, copy it"
    ):
        open_checkpoint(f"{bucket.url}/run/model.safetensors")
    with pytest.raises(NotACheckpoint, match="no known format"):
        open_checkpoint(f"{bucket.url}/run")
