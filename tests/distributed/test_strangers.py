"""Who may connect to a rank: challenges, addresses, and crowds of strangers."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megackpt import limits
from megackpt.distributed import messages, rendezvous

SOON = timedelta(seconds=30)


class Store:
    """The job's store for listeners of this process."""

    async def use(self, _: Any) -> list[str]:
        return ["127.0.0.1"]

    async def token(self) -> bytes:
        return b"secret"


Accepted = list[tuple[socket.socket, int, int, int, int]]


def with_listener(
    work: Callable[[rendezvous.Listener, Any, Accepted], Awaitable[None]],
) -> None:
    async def run() -> None:
        accepted: Accepted = []
        listener = rendezvous.Listener(lambda *found: accepted.append(found))
        address = await listener.open(Store())
        try:
            async with asyncio.timeout(60):
                await work(listener, address, accepted)
        finally:
            listener.close()
            for made, *_ in accepted:
                made.close()

    asyncio.run(run())


async def relay(source: socket.socket, to: socket.socket, heard: bytearray) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, 4096):
        heard += data
        await loop.sock_sendall(to, data)


async def overheard(address: Any) -> tuple[bytearray, bytearray]:
    """What a rank and a listener say, as someone between them hears it."""
    (place,), name = address
    loop = asyncio.get_running_loop()
    said, answered = bytearray(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        between.setblocking(False)
        middle = [between.getsockname()], name
        connecting = asyncio.create_task(
            rendezvous.connect(middle, b"secret", messages.LINK, 1, 2, 3)
        )
        near, _ = await loop.sock_accept(between)
        near.setblocking(False)
        with near, socket.create_connection(place) as far:
            far.setblocking(False)
            relays = [
                asyncio.create_task(relay(near, far, said)),
                asyncio.create_task(relay(far, near, answered)),
            ]
            (await connecting).close()
            await asyncio.wait(relays, timeout=10)
    return said, answered


def test_the_token_crosses_no_connection_and_a_greeting_counts_once() -> None:
    async def work(_: Any, address: Any, accepted: Accepted) -> None:
        said, answered = await overheard(address)
        assert [found[1:] for found in accepted] == [(messages.LINK, 1, 2, 3)]
        for heard in (said, answered):
            assert b"secret" not in heard
        loop = asyncio.get_running_loop()
        with socket.create_connection(address[0][0]) as again:
            again.setblocking(False)
            await loop.sock_sendall(again, said)
            heard = b""
            with suppress(ConnectionError):
                while data := await loop.sock_recv(again, 64):
                    heard += data
        assert len(heard) <= rendezvous._CHALLENGE.size  # and no proof
        assert len(accepted) == 1

    with_listener(work)


@pytest.mark.parametrize("wrong", ["token", "listener"])
def test_a_rank_with_another_token_or_another_listener_in_mind_is_refused(
    wrong: str,
) -> None:
    async def work(_: Any, address: Any, accepted: Accepted) -> None:
        token = b"other" if wrong == "token" else b"secret"
        places, name = address
        if wrong == "listener":
            name = "other"
        with pytest.raises(ConnectionError):
            await rendezvous.connect((places, name), token, messages.LINK, 1, 0, 0)
        assert not accepted

    with_listener(work)


def test_a_rank_does_not_talk_to_who_cannot_prove_the_token() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)

            async def pretend() -> None:
                made, _ = await loop.sock_accept(listening)
                with made:
                    made.setblocking(False)
                    challenge = rendezvous._CHALLENGE.pack(b"megackpt", bytes(16))
                    await loop.sock_sendall(made, challenge + bytes(32))
                    await loop.sock_recv(made, 4096)

            pretending = asyncio.create_task(pretend())
            address = [listening.getsockname()], "name"
            with pytest.raises(ConnectionError, match="does not know the token"):
                await rendezvous.connect(address, b"secret", messages.LINK, 1, 0, 0)
            await pretending

    asyncio.run(run())


def test_a_rank_connects_among_many_foreign_connections() -> None:
    async def work(listener: Any, address: Any, accepted: Accepted) -> None:
        held = []
        most = 0
        made = None
        for number in range(600):
            stranger = socket.socket()
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.connect(address[0][0])
            held.append(stranger)
            await asyncio.sleep(1 / 205)
            most = max(most, len(listener._greetings))
            if number == 300:
                made = asyncio.create_task(
                    rendezvous.connect(address, b"secret", messages.LINK, 1, 0, 0)
                )
        assert made is not None
        (await made).close()
        assert len(accepted) == 1
        assert limits.GREETINGS // 2 < most <= limits.GREETINGS
        for stranger in held:
            stranger.close()

    with_listener(work)


# Real ranks


def listening_at() -> set[tuple[str, int]]:
    """Where this process listens: hexadecimal addresses, and ports."""
    inodes, found = set(), set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}")[8:-1])
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


CROWD = """
import socket, sys, time
held, places = [], eval(sys.argv[1])
while True:
    for place in places:
        held.append(socket.socket())
        held[-1].setblocking(False)
        try: held[-1].connect(place)
        except BlockingIOError: pass
        if len(held) > 900: held.pop(0).close()
        if len(held) == 300: print("many", flush=True)
    time.sleep(len(places) / 205)
"""


def saves_in_a_crowd(folder: str) -> None:
    import torch
    import torch.distributed as dist

    import megackpt
    from megackpt import ShardedTensor

    rank = dist.get_rank()
    w = torch.full((8,), float(rank))
    state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, 2))}
    before = listening_at()
    first = threading.Thread(
        target=megackpt.save, args=(state, f"{folder}/first"), kwargs={"timeout": SOON}
    )
    crowded = Path(folder, "crowded")
    if rank == 0:
        first.start()
        while not (own := listening_at() - before):
            time.sleep(0.01)
        assert not {"00000000", "0" * 32} & {address for address, _ in own}
        places = []
        for address, port in own:
            octets = struct.pack("=I", int(address, 16))
            places.append((socket.inet_ntoa(octets), port))
        with subprocess.Popen(
            [sys.executable, "-c", CROWD, repr(places)], stdout=subprocess.PIPE
        ) as crowd:
            assert crowd.stdout is not None
            crowd.stdout.readline()
            crowded.touch()
            first.join()
            descriptors = 0
            for number in range(20):
                megackpt.save(state, f"{folder}/{number % 2}", timeout=SOON)
                descriptors = max(descriptors, len(os.listdir("/proc/self/fd")))
            crowd.kill()
        assert descriptors < 160, descriptors
    else:
        while not crowded.exists():
            time.sleep(0.01)
        first.start()
        first.join()
        for number in range(20):
            megackpt.save(state, f"{folder}/{number % 2}", timeout=SOON)
    assert megackpt.verify(f"{folder}/first").ok


def test_ranks_connect_under_a_flood_of_foreign_connections(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(saves_in_a_crowd, 2, tmp_path)
