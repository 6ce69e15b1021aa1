"""Every kind of request to an object store with every fault: it succeeds, or raises, and nothing is half done."""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import begin, open_checkpoint
from megackpt.errors import CheckpointingException, SaveInProgress, StorageError
from megackpt.storage import bucket as storage, client, objects
from tests.azurite import Container
from tests.buckets import Bucket, Line, Request

RACERS, ROUNDS = 16, 10
REPLACEMENTS, READERS = 30, 3
OFTEN = 0.05
"""The share of requests with a fault, drawn at random."""

Fault = int | str

FAULTS: dict[str, Fault] = {
    "dropped before": "reset",
    "dropped after": "swallow",
    "500": 500,
    "503": 503,
    "truncated": "truncate",
    "late duplicate": "duplicate",
    "slow": "slow",
}

# A request's method, a pattern of its path, and one of its head.
KINDS: dict[str, tuple[str, str, str]] = {
    "PUT": ("PUT", r"/\.megackpt-saving-\w+$", ""),
    "conditional PUT": ("PUT", r"megackpt\.commit$", r"\nif-(none-)?match:"),
    "upload: create": ("POST", r"\?uploads", ""),
    "upload: part": ("PUT", r"partNumber=", ""),
    "upload: complete": ("POST", r"uploadId=", ""),
    "GET": ("GET", r"/[^?]+$", r"\A(?!.*\nrange:)"),
    "range GET": ("GET", r"/[^?]+$", r"\nrange:"),
    "HEAD": ("HEAD", "", ""),
    "LIST": ("GET", r"list-type", ""),
    "DELETE": ("POST", r"\?delete", ""),
}


def is_of_kind(request: Request, kind: str) -> bool:
    method, path, head = KINDS[kind]
    found = re.search(head, request.head.decode(), re.IGNORECASE | re.DOTALL)
    return request.method == method and bool(re.search(path, request.path) and found)


@pytest.fixture
def url(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    hasten(monkeypatch)
    return f"{bucket.url}/run/iter_100"


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried soon. Uploads in parts are small; all requests go through the line."""
    monkeypatch.setattr(client, "PAUSE", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(objects, "PART", 5 << 20)
    monkeypatch.setattr(objects, "_DEFAULT_PART", 5 << 20)
    monkeypatch.setattr(storage, "_proven", set())


def state(value: float) -> dict[str, Any]:
    """A tensor of 7 MiB, which is sent in two parts, and a small one."""
    large, small = torch.full((7 << 18,), value), torch.full((1000,), value)
    return {
        "large": ShardedTensor.from_rank_offsets("large", large),
        "small": ShardedTensor.from_rank_offsets("small", small),
        "value": value,
    }


def load(url: str) -> float:
    """The value of all that is there."""
    loaded = megackpt.load(state(0.0), url)
    values = {*loaded["large"].unique().tolist(), *loaded["small"].unique().tolist()}
    assert values == {loaded["value"]}
    return float(loaded["value"])


def attempted(work: Callable[[], object]) -> Exception | None:
    """The error of ours, if any. Others are not clean."""
    try:
        work()
    except CheckpointingException as error:
        return error
    return None


def assert_tidy(bucket: Bucket | Container, url: str) -> None:
    """The record, and the folder that it names, are all that is there."""
    above = url.removeprefix(f"{bucket.url}/")
    names = {key.removeprefix(f"{above}/").split("/")[0] for key in [*bucket.keys()]}
    save_id = open_checkpoint(url).manifest.save_id
    assert names == {"megackpt.commit", f"megackpt-{save_id}"}


def run_cell(
    bucket: Bucket, line: Line, url: str, kind: str, fault: Fault, always: bool
) -> str:
    """A save over a checkpoint, and a load: "ok", or which of both raised."""
    megackpt.save(state(1.0), url)
    hits = [0]

    def choose(request: Request) -> Fault | None:
        if not is_of_kind(request, kind) or (hits[0] and not always):
            return None
        hits[0] += 1
        return fault

    line.fault = choose
    began = time.monotonic()
    not_saved = attempted(lambda: megackpt.save(state(2.0), url))
    not_loaded = attempted(lambda: load(url))
    assert time.monotonic() - began < 60
    assert hits[0], f"no request is a {kind}"
    line.fault = lambda _: None
    line.repeat()
    found = load(url)
    assert found == 2.0 or (not_saved is not None and found == 1.0)
    assert megackpt.verify(url).ok
    megackpt.save(state(3.0), url)
    assert load(url) == 3.0
    assert_tidy(bucket, url)
    # Only the server knows of an upload whose creation was not answered.
    if kind != "upload: create":
        assert bucket.uploads() == []
    words = ["save"] * bool(not_saved) + ["load"] * bool(not_loaded)
    return f"{' and '.join(words)} raised" if words else "ok"


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """Printed at the end, as docs/object-stores.md has it."""
    cells: dict[tuple[str, str], str] = {}
    yield cells
    print("\n\n| request | " + " | ".join(FAULTS) + " |")
    print("|---" * (len(FAULTS) + 1) + "|")
    for kind in KINDS:
        row = [cells.get((kind, fault), "-") for fault in FAULTS]
        print(f"| {kind} | " + " | ".join(row) + " |")


@pytest.mark.campaign
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_meets_a_fault(
    bucket: Bucket,
    line: Line,
    url: str,
    table: dict[tuple[str, str], str],
    kind: str,
    fault: str,
) -> None:
    """Once, and then at every such request."""
    once = run_cell(bucket, line, url, kind, FAULTS[fault], always=False)
    always = run_cell(bucket, line, url, kind, FAULTS[fault], always=True)
    table[kind, fault] = once if once == always else f"{once} / {always}"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("conditional PUT", "swallow"), ("DELETE", "reset"), ("LIST", "duplicate")],
)
def test_some_requests_meet_a_fault(
    bucket: Bucket, line: Line, url: str, kind: str, fault: Fault
) -> None:
    run_cell(bucket, line, url, kind, fault, always=False)


def at_random(seed: int, share: float = OFTEN) -> Callable[[Request], Fault | None]:
    """A fault for some requests, whatever they are."""
    draw, lock = random.Random(seed), threading.Lock()
    faults = list(FAULTS.values())

    def choose(_: Request) -> Fault | None:
        with lock:
            return draw.choice(faults) if draw.random() < share else None

    return choose


def race(line: Line, url: str, seed: int, racers: int) -> Counter[str]:
    """Saves that have all written meet at the commit."""
    megackpt.save(state(-1.0), url)
    old = open_checkpoint(url)
    files = {name: old.storage.get(name) for name in old.manifest.files}
    line.fault = at_random(seed)
    start = threading.Barrier(racers)
    ids = [uuid.uuid4().hex for _ in range(racers)]
    outcomes: dict[str, str] = {}

    def run(save_id: str) -> None:
        place = None
        try:
            place = begin(url, save_id=save_id)
            place.storage.put_new(files)
            outcomes[save_id] = "lost"
        except CheckpointingException:
            outcomes[save_id] = "failed before"
        start.wait()
        if place is None:
            return
        try:
            if outcomes[save_id] == "lost":
                place.commit(old.backend, old.manifest)
                outcomes[save_id] = "won"
        except SaveInProgress:
            pass
        except StorageError:
            outcomes[save_id] = "failed"
        place.abort()  # has no effect on what is committed

    threads = [threading.Thread(target=run, args=(save_id,)) for save_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.fault = lambda _: None
    line.repeat()
    found = open_checkpoint(url).manifest.save_id
    winners = [save_id for save_id in ids if outcomes[save_id] == "won"]
    assert winners == [found] or (
        not winners and (found == old.manifest.save_id or outcomes[found] == "failed")
    )
    assert load(url) == -1.0
    return Counter(outcomes.values())


@pytest.mark.campaign
def test_sixteen_race_on_a_bad_line(bucket: Bucket, line: Line, url: str) -> None:
    total: Counter[str] = Counter()
    for seed in range(ROUNDS):
        total += race(line, url, seed, RACERS)
    print(f"\n{ROUNDS} races of {RACERS}: {dict(total)}")
    megackpt.save(state(3.0), url)
    assert load(url) == 3.0
    assert_tidy(bucket, url)


def test_four_race_on_a_bad_line(line: Line, url: str) -> None:
    race(line, url, 1, 4)


def read_while_replaced(line: Line, url: str, replacements: int) -> Counter[str]:
    """One thread saves, others load; all requests of both may meet faults."""
    megackpt.save(state(0.5), url)
    line.fault = at_random(7, OFTEN / 2)
    counts: Counter[str] = Counter()
    ended = threading.Event()
    values: set[float] = set()

    def read() -> None:
        while not ended.is_set():
            try:
                values.add(load(url))
                counts["loads"] += 1
            except CheckpointingException as error:
                counts[f"loads that raised {type(error).__name__}"] += 1

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    committed = {0.5}
    for number in range(replacements):
        if attempted(lambda n=number: megackpt.save(state(n + 1.0), url)) is None:
            counts["saves"] += 1
        else:
            counts["saves that raised"] += 1
        committed.add(number + 1.0)
    ended.set()
    for thread in threads:
        thread.join()
    line.fault = lambda _: None
    assert values <= committed
    counts["different checkpoints"] = len(values)
    return counts


@pytest.mark.campaign
def test_readers_while_it_is_replaced(bucket: Bucket, line: Line, url: str) -> None:
    counts = read_while_replaced(line, url, REPLACEMENTS)
    print(f"\n{dict(counts)}")
    megackpt.save(state(100.0), url)
    assert load(url) == 100.0
    assert_tidy(bucket, url)
