"""Objects of a bucket: whole or absent, asked for again when the network fails, counted."""

from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megackpt.checkpoint import absolute
from megackpt.errors import CheckpointReplaced, CorruptCheckpoint, StorageError
from megackpt.storage import (
    BucketStorage,
    LocalStorage,
    conditional_puts,
    is_url,
    root_at,
)
from megackpt.storage.objects import BucketWriter
from tests.buckets import Bucket, Line, Request
from tests.storage.object_reads import MIB, read, views


@pytest.fixture
def root(bucket: Bucket) -> BucketStorage:
    return BucketStorage(f"{bucket.url}/run/iter_1")


def test_write_and_read(root: BucketStorage, bucket: Bucket) -> None:
    with root.create("a/b.bin") as writer:
        writer.write(views(b"head", b"", b"tail"))
        assert writer.position == 8
        assert root.size("a/b.bin") is None
    assert bucket.keys() == ["run/iter_1/a/b.bin"]
    assert (root.size("a/b.bin"), root.get("a/b.bin")) == (8, b"headtail")
    assert read(root, "a/b.bin", 2, 3, 0, 2) == [b"adt", b"", b"ai"]
    with pytest.raises(
        CorruptCheckpoint,
        match=r"b\.bin ends at byte 8: 2 bytes from byte 8 on are missing",
    ):
        read(root, "a/b.bin", 5, 5)


def test_multipart(line: Line, root: BucketStorage, bucket: Bucket) -> None:
    data = random.Random(0).randbytes(40 * MIB + 3)
    with root.create("big") as writer:
        writer.expect(len(data))
        writer.write(views(data[:5], data[5 : 30 * MIB], data[30 * MIB :]))
        assert bucket.uploads() == ["run/iter_1/big"]
    assert bucket.uploads() == []
    line.seen.clear()
    pieces = read(root, "big", 1, 20 * MIB, 5, len(data) - 20 * MIB - 6)
    assert b"".join(pieces) == data[1:]
    assert len(line.seen) == 1 + 5


def test_the_memory_of_a_write_may_be_reused(line: Line, root: BucketStorage) -> None:
    """Staging buffers are, while obstore sends parts in the background."""
    line.fault = lambda request: "slow" if request.method == "PUT" else None
    memory = bytearray(16 * MIB)
    with root.create("f") as writer:
        for number in range(1, 5):
            memory[:] = bytes([number]) * len(memory)
            writer.write([memoryview(memory)])
        memory[:] = bytes(len(memory))
    found = root.get("f")
    for number in range(1, 5):
        part = found[(number - 1) * len(memory) : number * len(memory)]
        assert part == bytes([number]) * len(memory)


def test_an_object_of_any_size_has_few_parts(
    root: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores take 10,000 parts and objects of 5 TiB."""
    writer = BucketWriter(root, "x")
    for size in (0, 1 << 40, 5 << 40):
        writer.expect(size)
        assert writer.part >= max(8 * MIB, size / 10_000)
    monkeypatch.setattr("megackpt.storage.objects._MOST_PARTS", 1)
    with (
        pytest.raises(StorageError, match=r"larger than 1 parts of 16777216 bytes"),
        root.create("y") as writer,
    ):
        writer.write(views(bytes(16 * MIB), b"1"))
    assert root.list() == []


def test_threads_share_a_reader(root: BucketStorage) -> None:
    """Each reads elsewhere in one expected span, and none gets the bytes of another."""
    data = random.Random(5).randbytes(64 * MIB)
    root.put("f", data)
    starts = [(7 * n + 1) * MIB for n in range(8)]
    pieces = [bytearray(3 * MIB) for _ in starts]
    with root.open("f") as reader, ThreadPoolExecutor(8) as threads:
        reader.expect([(0, len(data))])
        list(threads.map(reader.read_into, starts, [[memoryview(p)] for p in pieces]))
    assert pieces == [data[start:][: 3 * MIB] for start in starts]


def test_many_small_reads_are_few_requests(line: Line, root: BucketStorage) -> None:
    data = random.Random(3).randbytes(40 * MIB)
    with root.create("f") as writer:
        writer.write(views(data))
    spans = [(s, s + 300) for s in (*range(100, 20 * MIB, 1000), 30 * MIB)]
    with root.open("f") as reader:
        line.seen.clear()
        before = line.sent
        reader.expect(spans)
        pieces = [bytearray(300) for _ in spans]
        for (start, _), piece in zip(spans, pieces, strict=True):
            reader.read_into(start, [memoryview(piece)[:100], memoryview(piece)[100:]])
        assert pieces == [data[start:stop] for start, stop in spans]
        assert len(line.seen) == 4
        assert line.sent - before < 20 * MIB + 300
        again, unforeseen = bytearray(10 * MIB), bytearray(3)
        reader.read_into(5 * MIB, [memoryview(again)])
        reader.read_into(25 * MIB, [memoryview(unforeseen)])
        assert (again, unforeseen) == (data[5 * MIB : 15 * MIB], data[25 * MIB :][:3])
        assert len(line.seen) <= 4 + 3 + 1


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_small_object_is_known_once_it_is_open(
    line: Line, root: BucketStorage, size: int
) -> None:
    data = random.Random(4).randbytes(size)
    root.put("f", data)
    line.seen.clear()
    assert read(root, "f", 0, min(size, 1000), 0) == [data[:1000], b""]
    assert len(line.seen) == 1


def test_absent(root: BucketStorage) -> None:
    for name in ("x", "x/y/z"):
        with pytest.raises(FileNotFoundError):
            root.open(name)
        with pytest.raises(FileNotFoundError):
            root.get(name)
        assert root.size(name) is None
        assert root.list(name) == []
        root.delete(name)


def test_create_is_exclusive_and_abort_leaves_nothing(
    root: BucketStorage, bucket: Bucket
) -> None:
    large = bytes(9 * MIB)
    root.put("x", b"1")
    for data in (b"2", large):
        with pytest.raises(
            StorageError,
            match=r"cannot create s3://.*/run/iter_1/x: an object of that name",
        ):
            root.put_new({"x": data})
        with (
            pytest.raises(StorageError, match="cannot create"),
            root.create("x") as writer,
        ):
            writer.write(views(data))
        writer = root.create("y")
        writer.write(views(data))
        writer.abort()
        writer.abort()
    assert (bucket.keys(), bucket.uploads(), root.get("x")) == (
        ["run/iter_1/x"],
        [],
        b"1",
    )


def test_a_batch(root: BucketStorage) -> None:
    files = {f"{i % 3}/{i}": b"%d" % i for i in range(80)} | {"large": bytes(9 * MIB)}
    root.put_new(files)
    assert root.list() == ["0", "1", "2", "large"]
    assert {name: root.get(name) for name in files} == files
    with (
        pytest.raises(ZeroDivisionError),
        root.batch() as batch,
        batch.create("given up"),
    ):
        raise ZeroDivisionError
    assert root.size("given up") is None


def test_an_object_cannot_be_filled_at_any_place(root: BucketStorage) -> None:
    with root.update("x") as updater:
        updater.write_at(0, [memoryview(b"ab"), memoryview(b"c")])
        updater.write_at(3, [memoryview(b"d")])
        with pytest.raises(
            StorageError, match=r"cannot fill s3://.*/x .*hint: save as torch_dist"
        ):
            updater.write_at(5, [memoryview(b"e")])
    assert root.get("x") == b"abcd"


def test_typed_and_shaped_buffers(root: BucketStorage) -> None:
    import numpy as np

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with root.create("f") as writer:
        writer.write([memoryview(array), memoryview(array[:0])])
    back = np.zeros_like(array)
    with root.open("f") as reader:
        reader.read_into(0, [memoryview(back)])
    assert (back == array).all()


def test_a_conditional_put_has_one_winner_of_sixteen(root: BucketStorage) -> None:
    start = threading.Barrier(16)
    won = []

    def race(number: int) -> None:
        start.wait()
        won.append((root.put_if_match("f", b"%d" % number, None), number))

    threads = [threading.Thread(target=race, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for is_winner, number in won if is_winner]
    assert (len(won), len(winners)) == (16, 1)
    assert root.get("f") == b"%d" % winners[0]


def test_put_if_match_replaces_one_version_only(root: BucketStorage) -> None:
    assert root.put_if_match("f", b"1", None)
    assert not root.put_if_match("f", b"2", None)
    data, version = root.get_version("f")
    assert data == b"1"
    assert root.put_if_match("f", b"3", version)
    assert not root.put_if_match("f", b"4", version)
    assert root.get("f") == b"3"
    root.delete("f")
    assert not root.put_if_match("f", b"5", version)
    assert root.size("f") is None


NAMES = [
    "a%2Fb",
    "a%b",
    "a b",
    "a#b?c",
    "é",
    "[x]*~",
    "x/..y/z",
    "a\\b:c",
    "." + "x" * 200,
]


def test_names_stand_in_the_bucket_as_they_are(
    root: BucketStorage, bucket: Bucket
) -> None:
    root.put_new({name: name.encode() for name in NAMES})
    assert sorted(bucket.keys()) == sorted(f"run/iter_1/{name}" for name in NAMES)
    assert [root.get(name).decode() for name in NAMES] == NAMES
    assert root.list() == sorted(name.partition("/")[0] for name in NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc",
        "..",
        "../x",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "\ud812",
    ],
)
def test_names_that_lead_outside(root: BucketStorage, name: str) -> None:
    for work in (
        root.open,
        root.get,
        root.size,
        root.create,
        root.delete,
        lambda n: root.put(n, b""),
    ):
        with pytest.raises(CorruptCheckpoint, match="not a name of a file"):
            work(name)


@pytest.mark.slow
def test_list_and_delete_know_folders(root: BucketStorage, bucket: Bucket) -> None:
    bucket.client.put_object(
        Bucket=bucket.name, Key="run/iter_1/", Body=b""
    )  # as consoles make folders
    bucket.client.put_object(Bucket=bucket.name, Key="run/iter_10/f", Body=b"")
    many = 1010  # more than one request lists or removes
    root.put_new(
        {f"a/b/{i}": b"" for i in range(many)} | {"a": b"", "ab": b"", "c": b""}
    )
    assert root.list() == ["a", "ab", "c"]
    assert root.list("a") == ["b"]
    assert len(root.list("a/b")) == many
    root.delete("a")
    root.delete("c")
    assert root.list() == ["ab"]
    BucketStorage(f"{bucket.url}/run").delete("iter_1")
    assert bucket.keys() == [
        "run/iter_1/",
        "run/iter_10/f",
    ]  # obstore has no name for the first
    assert BucketStorage(bucket.url).list() == ["run"]
    bucket.client.put_object(Bucket=bucket.name, Key="run/odd//name", Body=b"")
    with pytest.raises(StorageError, match="odd//name"):
        BucketStorage(f"{bucket.url}/run").delete("odd")


def test_a_listing_has_a_limit(
    root: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megackpt.storage.bucket._LISTED", 3)
    root.put_new(dict.fromkeys("abc", b""))
    assert (root.list(), sorted(root.objects())) == (["a", "b", "c"], ["a", "b", "c"])
    root.put("d", b"")
    with pytest.raises(CorruptCheckpoint, match="more than 3 objects"):
        root.objects()
    assert {
        name: size for name, (size, _) in root.folder("..x").objects().items()
    } == {}
    assert root.sizes(["a", "x"]) == [0, None]


def test_get_has_a_limit(root: BucketStorage) -> None:
    root.put("f", b"12345")
    assert root.get("f", limit=5) == b"12345"
    with pytest.raises(CorruptCheckpoint, match="at most 4"):
        root.get("f", limit=4)


def test_an_object_that_is_replaced_while_it_is_read(root: BucketStorage) -> None:
    root.put("f", bytes(100_000))
    with root.open("f") as reader:
        root.put("f", b"1" * 100_000)
        for _ in range(2):
            with pytest.raises(
                CheckpointReplaced, match=r"/f was replaced or removed while"
            ):
                reader.read_into(90_000, [memoryview(bytearray(3))])
            root.delete("f")
        head = bytearray(b"??")
        reader.read_into(0, [memoryview(head)])
        assert head == bytes(2)  # came when it was opened


def test_roots(bucket: Bucket, tmp_path: Path) -> None:
    root = root_at(f"{bucket.url}/run//")
    assert isinstance(root, BucketStorage)
    assert root.location == f"{bucket.url}/run"
    root.put("a/f", b"1")
    assert root.folder("a").get("f") == b"1"
    assert pickle.loads(pickle.dumps(root)).get("a/f") == b"1"
    assert isinstance(root_at(str(tmp_path / "new"), create=True), LocalStorage)
    assert [
        is_url(p) for p in ("s3://b/x", "hdfs://b", tmp_path, "a/b", "/s3:/x", "run:/x")
    ] == [
        True,
        True,
        *[False] * 4,
    ]
    assert absolute("run:/x") == os.path.abspath(
        "run:/x"
    )  # a directory may be called so
    for url in ("hdfs://b/x", "s3://", "s3:///x"):
        with pytest.raises(StorageError, match="not a URL of a bucket"):
            root_at(url)
    for place in (Path("s3://b/x"), "s3:/b/x"):
        for ask in (is_url, root_at, absolute):
            with pytest.raises(
                StorageError,
                match="'s3:/b/x' was a URL, and a Path has made one slash of two",
            ):
                ask(place)
    for url in (
        "s3://me:secret@b/x",
        "s3://me:sec/ret@b/x",
        "s3a://me:secret",
        "S3://me:secret@b",
    ):
        with pytest.raises(StorageError, match="no ':' before") as told:
            root_at(url)
        assert "sec" not in str(told.value).replace("may be secret", "")
    with pytest.raises(StorageError, match="has a part that is"):
        root_at("s3://b/x/../y")


def test_urls_of_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "abfss://container@account.dfs.core.windows.net/run",
        "az://container/run",
    ):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        assert BucketStorage(url).location == url
    assert BucketStorage("gs://bucket/run").location == "gs://bucket/run"


def test_credentials_of_a_profile(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = me\naws_secret_access_key = secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    root = BucketStorage(bucket.url)
    root.put("f", b"1")
    assert root.store.credential_provider().get("access_key_id") == "me"
    monkeypatch.setenv("AWS_PROFILE", "nobody's")
    with pytest.raises(StorageError, match='cannot use the profile "nobody\'s"'):
        BucketStorage(bucket.url)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"])
def test_a_password_in_an_endpoint_is_refused_and_not_repeated(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """obstore does not get it, because its errors would show it in tracebacks."""
    for place in (
        "http://me:hunter2@127.0.0.1:1",
        "http://me:hun/ter2@127.0.0.1:1",
        "me:hunter2@127.0.0.1",
    ):
        monkeypatch.setenv(name, place)
        with pytest.raises(StorageError, match=f"{name} has an '@'") as told:
            BucketStorage(bucket.url)
        error: BaseException | None = told.value
        while error is not None:
            assert "hun" not in str(error)
            error = error.__cause__ or error.__context__


FORKS = """
import os, sys
from megackpt.errors import StorageError
from megackpt.storage import BucketStorage

root = BucketStorage(sys.argv[1])


def child(expected):
    pid = os.fork()
    if pid == 0:
        try:
            found = root.get("f") == b"1" and "read"
        except StorageError as error:
            found = "was forked from one that has used buckets" in str(error) and "refused"
        os._exit(0 if found == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0, expected


child("read")  # this one, which has asked for nothing, is no parent that could leave anything behind
with root.create("g") as writer:
    writer.write([memoryview(bytes(9 << 20))])
reader = root.open("g")
child("refused")
pid = os.fork()
if pid == 0:  # a reader that it was given, which asks threads that are not there
    try:
        reader.expect([(0, 9 << 20)])
        reader.read_into(1 << 20, [memoryview(bytearray(1 << 20))])
    except StorageError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
assert root.get("f") == b"1"  # the parent goes on
"""


def test_a_process_forked_from_one_that_used_buckets_is_refused_and_does_not_hang(
    root: BucketStorage,
) -> None:
    root.put("f", b"1")
    subprocess.run([sys.executable, "-c", FORKS, root.location], check=True, timeout=60)


def test_without_obstore() -> None:
    code = """
import sys
import megackpt.storage as storage
assert not {'obstore', 'boto3', 'torch'} & set(sys.modules), 'imported too early'
sys.modules['obstore'] = None
from megackpt.errors import BackendError
try:
    storage.root_at('s3://bucket/x')
except BackendError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "pip install obstore" in done.stdout


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    root = BucketStorage(f"{bucket.url}-not")
    with pytest.raises(StorageError, match="there is no bucket s3://bucket-"):
        root.put("f", b"")
    with pytest.raises(StorageError, match="there is no bucket s3://bucket-"):
        root.put_if_match("f", b"", None)
    with pytest.raises(StorageError, match="there is no bucket s3://bucket-"):
        root.list()


def test_a_store_is_proven_to_keep_its_word_once(
    faulty: BucketStorage, line: Line, bucket: Bucket
) -> None:
    assert conditional_puts(faulty)
    asked = len(line.seen)
    assert conditional_puts(BucketStorage(f"{bucket.url}/other"))
    assert (len(line.seen), bucket.keys()) == (asked, [])


def test_a_single_writer_needs_no_conditions(
    faulty: BucketStorage, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.fault = unconditional
    with pytest.raises(StorageError, match=r"cannot write .*/f: .*501"):
        faulty.put_if_match("f", b"", None)
    assert not conditional_puts(faulty)
    monkeypatch.setenv("MEGACKPT_SINGLE_WRITER", "1")
    assert conditional_puts(faulty)
    test_put_if_match_replaces_one_version_only(faulty)
    with faulty.create("f") as writer:
        writer.write(views(b"6"))
    with pytest.raises(StorageError, match=r"an object of that name exists"):
        faulty.put_new({"f": b"7"})
    assert faulty.get("f") == b"6"


def unconditional(request: Request) -> int | None:
    """What a store answers that does not know the conditions of a put."""
    return 501 if re.search(rb"(?im)^if-(none-)?match:", request.head) else None


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_ignores_conditions_is_found_out(
    faulty: BucketStorage, line: Line, bucket: Bucket, header: str
) -> None:
    line.fault = lambda request: request.without(header)
    assert not conditional_puts(faulty)
    assert bucket.keys() == []
