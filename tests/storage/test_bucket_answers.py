"""Requests to a bucket whose answers fail, are lost or are cut off."""

from __future__ import annotations

import random

import pytest

from megackpt.errors import StorageError
from megackpt.storage import (
    BucketStorage,
)
from tests.buckets import Bucket, Line, Request
from tests.storage.object_reads import MIB, read, views


@pytest.mark.parametrize("how", [503, 429, 500, "reset", "truncate"])
def test_reading_goes_on_where_an_answer_fails(
    faulty: BucketStorage, line: Line, how: int | str
) -> None:
    data = random.Random(1).randbytes(9 * MIB)
    faulty.put("f", data)
    line.once(how, "GET", times=3)
    assert read(faulty, "f", 1, len(data) - 1) == [data[1:]]
    assert line.asked("GET") >= 1 + 3 + 2
    line.once(how, "GET", times=3)
    assert faulty.get("f") == data
    if how != "truncate":  # of a listing: an error, see below
        line.once(how, "HEAD", times=3)
        assert faulty.size("f") == len(data)
        line.once(how, "GET", "list-type", times=3)
        assert faulty.list() == ["f"]
    if isinstance(how, int):
        line.once(how, "POST", "delete", times=3)
        faulty.delete("f")
        assert faulty.list() == []


def test_an_answer_that_is_too_short_once_is_asked_for_again(
    faulty: BucketStorage, line: Line
) -> None:
    data = random.Random(3).randbytes(9 * MIB)
    faulty.put("f", data)
    for how in ("shorten", "truncate"):
        with faulty.open("f") as reader:
            into = bytearray(100)
            line.once(how, "GET")
            reader.read_into(MIB, [memoryview(into)])
        assert into == data[MIB : MIB + 100]
    line.once("truncate", "GET")
    assert faulty.get("f") == data
    for work in (faulty.list, faulty.objects):
        line.once("truncate", "GET", "list-type")
        assert list(work()) == ["f"]


def test_an_answer_that_is_too_short_is_an_error(
    faulty: BucketStorage, line: Line
) -> None:
    faulty.put("f", bytes(9 * MIB))
    with faulty.open("f") as reader:
        for how in ("shorten", "truncate"):
            line.fault = lambda _, how=how: how
            with pytest.raises(StorageError, match=r"cannot read .*/f"):
                reader.read_into(MIB, [memoryview(bytearray(100))])
    for work in (faulty.list, faulty.objects):
        line.fault = lambda request: "truncate" if "list-type" in request.path else None
        with pytest.raises(StorageError, match=r"cannot list .*/run"):
            work()


def test_an_absent_answer_is_not_taken_for_a_short_one(
    faulty: BucketStorage, line: Line
) -> None:
    line.fault = lambda _: "reset"
    asked = []
    for name in ("antigen", "antibody"):
        before = line.asked("GET")
        with pytest.raises(StorageError, match="cannot read"):
            faulty.get(name)
        asked.append(line.asked("GET") - before)
    assert asked[0] == asked[1] > 0


@pytest.mark.parametrize("how", [503, "reset", "swallow"])
def test_nothing_is_lost_when_a_put_fails_or_its_answer_does(
    faulty: BucketStorage, line: Line, how: int | str
) -> None:
    line.once(how, "PUT")
    faulty.put("f", b"1")
    line.once(how, "PUT")
    assert faulty.put_if_match("g", b"2", None)
    line.once(how, "PUT")
    assert not faulty.put_if_match("g", b"3", None)
    assert faulty.put_if_match("g", b"2", None)  # perhaps a lost answer of our own
    line.once(how, "PUT")
    _, version = faulty.get_version("g")
    assert faulty.put_if_match("g", b"4", version)
    line.once(how, "PUT")
    with faulty.create("h") as writer:
        writer.write(views(b"5"))
    line.once(how, "PUT", times=3)
    faulty.put_new({"i": b"6", "j": b"7"})
    assert [faulty.get(name) for name in "fghij"] == [b"1", b"4", b"5", b"6", b"7"]


@pytest.mark.parametrize("how", [503, "reset", "swallow"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")],
)
def test_an_upload_in_parts_goes_on(
    faulty: BucketStorage,
    bucket: Bucket,
    line: Line,
    how: int | str,
    method: str,
    path: str,
) -> None:
    data = random.Random(2).randbytes(33 * MIB)
    line.once(how, method, path)
    with faulty.create("f") as writer:
        writer.write(views(data))
    line.fault = lambda _: None
    assert faulty.get("f") == data
    if (path, how) != ("uploads", "swallow"):  # of that one only the server knows
        assert bucket.uploads() == []


def test_what_fails_for_good_says_where_how_often_and_why(
    faulty: BucketStorage, line: Line, bucket: Bucket
) -> None:
    faulty.put("f", b"12")
    line.fault = lambda _: 503
    told = rf"cannot read {bucket.url}/run/f: .* after 9 retries,.*503"
    with pytest.raises(StorageError, match=told):
        faulty.get("f")
    line.fault = lambda _: 403
    seen = len(line.seen)
    for work in (
        faulty.get,
        faulty.size,
        faulty.open,
        faulty.delete,
        lambda n: faulty.put(n, b""),
    ):
        with pytest.raises(StorageError, match=rf"cannot .* {bucket.url}/run/f: .*403"):
            work("f")
    assert len(line.seen) - seen == 5  # not asked twice
    line.fault = lambda request: "truncate" if request.method == "GET" else None
    with pytest.raises(StorageError, match=r"cannot read .*body error"):
        faulty.get("f")


@pytest.mark.parametrize("how", [403, 503])
def test_an_upload_that_fails_for_good_leaves_nothing(
    faulty: BucketStorage, line: Line, bucket: Bucket, how: int
) -> None:
    line.fault = lambda request: how if "partNumber=2" in request.path else None
    with (
        pytest.raises(StorageError, match=rf"cannot write {bucket.url}/run/f"),
        faulty.create("f") as writer,
    ):
        writer.write(views(bytes(70 * MIB)))
    assert (bucket.keys(), bucket.uploads()) == ([], [])
    line.fault = lambda request: how if "uploadId" in request.path else None
    told = (
        rf"cannot write {bucket.url}/run/f: .*{how}.*; and cannot give up the upload of"
    )
    with pytest.raises(StorageError, match=f"(?s){told}"), faulty.create("f") as writer:
        writer.write(views(bytes(70 * MIB)))


@pytest.mark.parametrize("path", ["partNumber=2", "uploadId", "run/f"])
def test_a_write_that_finds_nothing_is_an_error_of_the_storage(
    faulty: BucketStorage, line: Line, bucket: Bucket, path: str
) -> None:
    """As where a rule of the bucket has dropped the upload meanwhile."""
    line.fault = lambda request: 404 if path in request.path else None
    written = rf"cannot write {bucket.url}/run/f: .*404"
    with pytest.raises(StorageError, match=written), faulty.create("f") as writer:
        writer.write(views(bytes(70 * MIB)))
    if path == "run/f":
        with pytest.raises(StorageError, match=written):
            faulty.put("f", b"")
        with pytest.raises(StorageError, match=written):
            faulty.put_if_match("f", b"", None)
        with pytest.raises(StorageError, match=written):
            faulty.put_new({"f": b""})


def test_a_folder_is_removed_by_requests_that_name_what_is_there(
    faulty: BucketStorage, line: Line, bucket: Bucket
) -> None:
    faulty.put_new({"a/1": b"", "a/2": b"", "ab": b""})
    bodies: list[bytes] = []

    def record(request: Request) -> None:
        if request.method == "POST":
            bodies.append(request.body)

    line.fault = record
    faulty.delete("a")
    assert bucket.keys() == ["run/ab"]
    assert b"run/a/1" in bodies[0]
    assert b"run/a<" not in bodies[0]
