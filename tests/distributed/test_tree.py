"""The tree of connections: its shape, who may join it, and what ranks say that call differently."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

import megackpt
from megackpt import (
    AsyncCallsQueue,
    CheckpointingException,
    RankLost,
    ShardedTensor,
    limits,
)
from megackpt.distributed import (
    connection_states,
    group_over,
    messages,
    process_group,
    rank_tree,
    rendezvous,
)

SOON = timedelta(seconds=20)


@pytest.mark.parametrize("size", [1, 2, 31, 33, 1024, 1025, 16_384])
def test_the_shape_of_the_tree(size):
    below = {rank: messages.children_of(rank, size) for rank in range(size)}
    for rank, children in below.items():
        end = rank + 1
        for child, span in children.items():
            assert messages.parent_of(child) == rank
            assert child == end  # subtrees are consecutive
            end = min(child + span, size)
    connected = sorted(child for children in below.values() for child in children)
    assert connected == list(range(1, size))
    # And a connection to the parent, two of an exchange, a listener and the two of the event loop.
    assert max(len(children) for children in below.values()) + 6 <= 130


def test_parts_are_joined_and_split():
    parts = [b"", b"abc", memoryview(b"\0" * 5)]
    assert [bytes(part) for part in messages.split(messages.join(parts))] == [
        bytes(part) for part in parts
    ]


def tree_here():
    return next(iter(process_group._known.values()))[""].tree


def strangers():
    """Connections that do not know the token, or talk too much, change nothing."""
    import torch.distributed as dist

    with group_over(timeout=SOON) as group:
        assert group.all_agree(1)
    before = len(tree_here().sockets())
    if group.rank == 0:
        (listening,) = tree_here()._listener.sockets
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"megackpt" + bytes(500)):
            with socket.create_connection(listening.getsockname(), 10) as stranger:
                stranger.sendall(data)
                try:
                    while stranger.recv(64):
                        pass
                except ConnectionResetError:
                    continue
    dist.barrier()
    with group_over(timeout=SOON) as group:
        assert group.all_agree(1)
    assert len(tree_here().sockets()) == before


def test_a_connection_without_the_token_cannot_join(ranks):
    ranks(strangers, 2)


def test_ranks_connect_after_the_limit_of_open_files_was_met():
    async def connect_at_the_limit():
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept
        refused = []

        async def refuse_once(listening):
            if not refused:
                refused.append(listening)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await accept(listening)

        loop.sock_accept = refuse_once
        arrived = loop.create_future()
        listener = rendezvous.Listener(lambda made, *_: arrived.set_result(made))
        store = MemoryStore()
        address = await listener.open(store)
        made = await rendezvous.connect(
            address, await store.token(), messages.LINK, 1, 0, 0
        )
        accepted = await asyncio.wait_for(arrived, 10)
        listener.close()
        for each in (made, accepted):
            each.close()
        assert refused

    asyncio.run(connect_at_the_limit())


class MemoryStore:
    """The job's store for ranks that are objects of one process."""

    def __init__(self):
        self.addresses = {}

    def is_silent(self, timeout=0.0):
        return False

    async def use(self, function):
        return ["127.0.0.1"]

    async def token(self):
        return b"secret"

    async def publish(self, rank, listener):
        self.addresses[rank] = await listener.open(self)

    async def find(self, rank):
        while rank not in self.addresses:
            await asyncio.sleep(0.01)
        return self.addresses[rank]


def test_a_parent_may_end_as_soon_as_it_has_sent_its_last_message():
    store = MemoryStore()
    parent, child = (rank_tree.Tree(rank, 2, store) for rank in range(2))

    def step(tree, number):
        made = messages.CollectiveStep(1, number, 20.0, "write", "save", "c")
        tree.calls.steps[1] = made
        return made

    sent = parent.start(parent.broadcast(step(parent, 1), b"first"))
    first = child.start(child.broadcast(step(child, 1), None))
    assert bytes(first.result(10)) == b"first"
    sent.result(10)
    parent.start(parent.broadcast(step(parent, 2), b"last")).result(10)
    parent.close()
    deadline = time.monotonic() + 10
    while 0 in child._links:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    last = child.start(child.broadcast(step(child, 2), None))
    assert bytes(last.result(10)) == b"last"
    child.close()


def gather(tree, number, own=b"x", path="c", call=1):
    made = messages.CollectiveStep(call, number, 20.0, "write", "save", path)
    tree.calls.steps[call] = made
    return tree.start(tree.gather(made, own, b"".join))


@pytest.fixture
def linked():
    """A parent and its child, with a connection."""
    store = MemoryStore()
    parent, child = (rank_tree.Tree(rank, 2, store) for rank in range(2))
    for each in [gather(tree, 1) for tree in (parent, child)]:
        each.result(10)
    yield parent, child
    parent.close()
    child.close()


async def lose(tree, rank, error):
    """The connection to this rank breaks."""
    link = tree._links[rank]
    link.shut()
    tree._on(rank, *rank_tree._loss(error))


def test_a_lost_connection_does_not_fail_a_step_that_begins_after_it(linked):
    parent, child = linked

    async def begin():
        await lose(parent, 1, TimeoutError("it connects afresh"))
        step = parent.calls.steps[1] = messages.CollectiveStep(
            1, 2, 20.0, "write", "save", "c"
        )
        return await parent.gather(step, b"own ", b"".join)

    gathered = parent.start(begin())
    time.sleep(0.5)  # longer than the loss of a connection takes to fail a step
    gather(child, 2, b"other").result(10)
    assert gathered.result(10) == b"own other"


@pytest.mark.parametrize("seen", [True, False])
def test_a_connection_that_replaces_a_lost_one_does_not_hide_the_loss(linked, seen):
    """``seen``: by this end; else only the other end has seen the loss."""
    parent, _ = linked
    gathered = gather(parent, 2)
    near, far = socket.socketpair()
    near.setblocking(False)

    async def replace():
        while not parent.calls.steps[1].awaited:
            await asyncio.sleep(0.01)
        if seen:
            await lose(parent, 1, ConnectionResetError("reset"))
        parent._on(1, connection_states.Event.OPENED, near)

    parent.start(replace()).result(10)
    with far, pytest.raises(messages.CallFailed, match="connection broke"):
        gathered.result(10)


@pytest.mark.parametrize(
    ("kind", "label", "payload"),
    [
        (messages.STATE, b"", b"{{{"),
        (messages.REPORT, b"", b"[]"),
        (messages.ASK, b"\xff", b""),
    ],
)
def test_a_damaged_message_fails_at_once(kind, label, payload):
    store = MemoryStore()
    parent, child = (rank_tree.Tree(rank, 2, store) for rank in range(2))
    for each in [gather(tree, 1) for tree in (parent, child)]:
        each.result(10)
    waiting = gather(parent, 2)
    head = messages._HEADER.pack(kind, len(label), 1, 2, len(payload))
    child._links[0].socket.sendall(head + label + payload)
    with pytest.raises(messages.CallFailed) as failed:
        waiting.result(10)
    assert failed.value.verdict.missing[1].startswith(messages.Reason.BROKEN)
    parent.close()
    child.close()


@pytest.mark.parametrize("shift", ["", "x", "xy"])
def test_a_path_is_cut_between_any_two_bytes(shift):
    store = MemoryStore()
    trees = [rank_tree.Tree(rank, 2, store) for rank in range(2)]
    first, second = (gather(tree, 1, b"x", shift + "€" * 30_000) for tree in trees)
    assert (first.result(10), second.result(10)) == (b"xx", None)
    for tree in trees:
        tree.close()


def test_all_ranks_learn_of_a_message_that_is_too_large(monkeypatch):
    monkeypatch.setattr(limits, "CONTROL_MESSAGE_BYTES", 1 << 16)
    store = MemoryStore()
    trees = [rank_tree.Tree(rank, 2, store) for rank in range(2)]
    for each in [gather(tree, 1) for tree in trees]:
        each.result(10)
    for each in [gather(tree, 2, bytes(1 << 17)) for tree in trees]:
        with pytest.raises(messages.CallFailed) as failed:
            each.result(10)
        (word,) = failed.value.verdict.missing.items()
        assert word == (
            1,
            "would have to send a message of 131072 bytes, and ranks accept 65536 at most",
        )
    for tree in trees:
        tree.close()


def test_a_connection_of_a_failed_exchange_is_closed():
    store = MemoryStore()
    trees = parent, child = [rank_tree.Tree(rank, 2, store) for rank in range(2)]
    for each in [gather(tree, 1) for tree in trees]:
        each.result(10)
    parent.start(parent.fail(1, messages.Verdict({1: "left"}))).result(10)

    async def bytes_sent_back():
        address, token = store.addresses[0], await store.token()
        made = await rendezvous.connect(address, token, messages.DATA, 1, 1, 2)
        with made:
            return await asyncio.get_running_loop().sock_recv(made, 1)

    assert child.start(bytes_sent_back()).result(10) == b""
    for tree in trees:
        tree.close()


def test_a_message_that_arrived_before_the_failure_counts(linked):
    """Rank 0 has sent the result of a step, goes on, and gives up. A slower rank takes the result."""
    parent, child = linked
    step = messages.CollectiveStep(1, 2, 20.0, "vote", "save", "c")
    parent.start(parent.broadcast(step, b"result")).result(10)
    parent.start(parent.fail(1, messages.Verdict({0: "gave it up"}))).result(10)
    while child.calls.verdict(1) is None:
        time.sleep(0.01)
    assert child.start(child.broadcast(step, None)).result(10) == b"result"
    later = messages.CollectiveStep(1, 3, 20.0, "write", "save", "c")
    with pytest.raises(messages.CallFailed):
        child.start(child.broadcast(later, None)).result(10)


def test_a_rank_that_closed_its_connection_may_be_second_in_the_next_call(linked):
    """It believed that its parent was silent, and connects again when it calls."""
    parent, child = linked
    child._links[0].shut()
    while parent._links or child._links:
        time.sleep(0.01)
    first = gather(parent, 1, call=2)
    with pytest.raises(TimeoutError):
        first.result(0.5)
    second = gather(child, 1, call=2)
    assert first.result(10) == b"xx"
    assert second.result(10) is None


def test_a_rank_that_ended_before_a_call_is_named_within_seconds(linked):
    parent, child = linked
    child._links[0].shut()
    while parent._links or child._links:
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(messages.CallFailed) as failed:
        gather(parent, 1, call=2).result(15)
    assert failed.value.verdict.missing == {1: messages.Reason.ENDED}
    assert time.monotonic() - began < 10


def too_large():
    """A rank closes the connection over which a message is announced that no rank sends.

    The next call connects again.
    """
    import torch.distributed as dist

    with group_over(timeout=SOON) as group:
        assert group.all_agree(1)
    (before,) = tree_here()._links.values()
    dist.barrier()  # until rank 0 has its link, too
    if group.rank == 1:
        header = messages._HEADER.pack(messages.GATHERED, 0, 9, 1, 1 << 60)
        tree_here()._links[0].socket.sendall(header)
    # The other rank may have connected again already.
    while any(link is before for link in tree_here()._links.values()):
        time.sleep(0.01)
    with group_over(timeout=SOON) as group:
        assert group.all_agree(1)


def test_a_message_that_is_too_large_is_refused(ranks):
    ranks(too_large, 2)


def state(rank, size=3):
    shard = torch.full((8,), float(rank))
    return {"w": ShardedTensor.from_rank_offsets("w", shard, (0, rank, size))}


def call(rank, directory, how, queue):
    odd = {"load on rank 0": 0, "argument": 1}.get(how, 2)
    if how.startswith("load") and rank == odd:
        megackpt.load(state(rank), f"{directory}/old", timeout=SOON)
        return
    wait = 20 if how == "argument" and rank == odd else SOON
    later = how == "asynchronous" and rank == odd
    request = megackpt.save(
        state(rank), f"{directory}/new", async_sharded_save=later, timeout=wait
    )
    if request is not None:
        queue.schedule_async_request(request)
    queue.close()


def call_differently(directory, how):
    import torch.distributed as dist

    rank = dist.get_rank()
    megackpt.save(state(rank), f"{directory}/old", timeout=SOON)
    queue = AsyncCallsQueue(timeout=SOON)
    begun = time.monotonic()
    with pytest.raises(CheckpointingException) as caught:
        call(rank, directory, how, queue)
    print(caught.value)
    assert time.monotonic() - begun < 10
    queue.close(abort=True)
    megackpt.save(state(rank), f"{directory}/next", timeout=SOON)


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("load", ["save ", "load ", "(stage 'vote')", "(stage 'open')"]),
        ("load on rank 0", ["save ", "load "]),
        ("asynchronous", ["rank 2 is in ", "(stage 'write')"]),
        ("argument", ["rank 1", "timeout must be a datetime.timedelta, not 20"]),
    ],
)
def test_ranks_that_call_differently_raise_within_seconds(ranks, tmp_path, how, texts):
    done = ranks(call_differently, 3, tmp_path, how)
    for process in done:
        for text in texts:
            if how != "argument" or process is not done[1] or text != "rank 1":
                assert text in process.stdout


def divide_between_two_votes():
    with group_over(timeout=SOON) as group:
        group.all_agree(1)
        if group.rank == 1:
            _ = 1 // 0
        group.all_agree(1)


def an_error_of_one_rank(directory):
    """An exception between the steps of one rank, as of a signal's handler."""
    import torch.distributed as dist

    begun = time.monotonic()
    with pytest.raises((RankLost, ZeroDivisionError)) as caught:
        divide_between_two_votes()
    print(caught.value)
    assert time.monotonic() - begun < 10
    megackpt.save(state(dist.get_rank()), f"{directory}/next", timeout=SOON)


def test_an_error_between_the_steps_of_one_rank_is_raised_on_all_ranks(ranks, tmp_path):
    done = ranks(an_error_of_one_rank, 3, tmp_path)
    for rank in (0, 2):
        assert "rank 1 left: ZeroDivisionError" in done[rank].stdout


SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


def silent_store(port, pid, directory):
    """The job's store is stopped: a group that is connected does not notice, a new one raises in time."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    rank, wait = int(os.environ["RANK"]), timedelta(seconds=2)
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20))
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", store=store, rank=rank, world_size=3)
    other = dist.new_group([0, 1, 2], backend="fake")
    megackpt.save(state(rank), f"{directory}/a", timeout=SOON)
    with group_over(timeout=SOON) as group:
        group.all_agree(1)
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
        group.all_agree(1)
    megackpt.save(state(rank), f"{directory}/b", timeout=SOON)
    begun = time.monotonic()
    with pytest.raises(RankLost, match="the job's store does not answer"):
        megackpt.save(state(rank), f"{directory}/c", timeout=wait, process_group=other)
    assert time.monotonic() - begun < 2 * 2 + 5
    megackpt.save(state(rank), f"{directory}/d", timeout=SOON)
    os._exit(0)


def test_a_silent_store_does_not_hang_a_rank(ranks, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            port = int(server.stdout.readline())
            ranks(silent_store, 3, port, server.pid, tmp_path, init=False)
        finally:
            server.kill()


def agents_that_count_differently(directory):
    """The agent of a host that was replaced has restarted its workers less often."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    megackpt.save(state(rank, 2), f"{directory}/a", timeout=SOON)


def test_ranks_find_each_other_after_a_host_was_replaced(ranks, tmp_path):
    ranks(agents_that_count_differently, 2, tmp_path)
