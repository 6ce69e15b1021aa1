"""How ranks find and know each other: addresses in the job's store, tokens in greetings."""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from megackpt import limits

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

logger = logging.getLogger("megackpt.distributed")

Address = tuple[list[str], int, str]
"""Hosts to try in turn, the port, and the token as hex digits."""

_GREETING = struct.Struct("!8s16sBQQQ")
_MAGIC = b"megackpt"
_TOKEN_BYTES = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks into the store
_ANSWER_SECONDS = 4.0
_OUTSIDE = "192.0.2.1"  # a documentation address: the way there is the default route
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR

_made: Counter[str] = Counter()


STORE_SILENT = "the job's store does not answer"


class StoreLost(OSError):
    """The job's store does not answer, or is gone."""


class JobStore:
    """The addresses of ranks in the job's store, under a prefix for one process group.

    A client of torch's store waits as long as TCP does when its server is silent. So each use has a
    thread of its own, which may be given up.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        from torch.distributed import distributed_c10d

        name = process_group.group_name
        # A later group may have the name of one that was destroyed, in the same store. The store of
        # torchrun's agent has the addresses of workers that it has restarted. In other jobs each
        # agent has a count of its own, and that of a host which was replaced begins with 0.
        _made[name] += 1
        attempt = "0"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = distributed_c10d.PrefixStore(
            f"megackpt/{name}/{attempt}/{_made[name]}",
            distributed_c10d._get_default_store(),
        )
        self._uses = 0
        self._heard = 0.0

    def is_silent(self, timeout: float = math.inf) -> bool:
        """Whether it has not answered for 4 seconds, or half of the timeout."""
        seconds = min(_ANSWER_SECONDS, timeout / 2)
        return self._uses > 0 and time.monotonic() - self._heard > seconds

    async def publish(self, rank: int, port: int, token: bytes) -> None:
        def publish(store: Any) -> None:
            key = f"address/{rank}"
            store.set(key, json.dumps(own_address(port, token, store)))
            store.check([key])  # a set has no answer

        await self.use(publish)

    async def find(self, rank: int) -> Address:
        """The address of a rank, once it has published one."""

        key = f"address/{rank}"
        pause = _FIRST_PAUSE
        while not await self.use(lambda store: store.check([key])):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        hosts, port, token = json.loads(await self.use(lambda store: store.get(key)))
        return hosts, port, token

    async def use(self, function: Callable[[Any], T]) -> T:
        """The result of a function that takes the store. Raises StoreLost."""
        if self.is_silent():
            raise StoreLost(STORE_SILENT)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            self._uses -= 1
            self._heard = time.monotonic()
            if future.done():  # given up
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def run() -> None:
            value, failed = None, None
            try:
                value = function(self._store)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                first = (str(error).splitlines() or [type(error).__name__])[0]
                failed = StoreLost(f"the job's store cannot be reached: {first}")
            loop.call_soon_threadsafe(settle, value, failed)

        if not self._uses:
            self._heard = time.monotonic()
        self._uses += 1
        threading.Thread(target=run, name="megackpt-store", daemon=True).start()
        return await future


def own_address(port: int, token: bytes, store: Any = None) -> Address:
    """Where other hosts reach this one: by the interface that GLOO_SOCKET_IFNAME names.

    Otherwise by the interface on the way to the job's store, or that of the default route.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", name.encode()[:255])
            found = fcntl.ioctl(probe.fileno(), _INTERFACE_ADDRESS, request)
        return [socket.inet_ntoa(found[20:24])], port, token.hex()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    master = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    hosts: list[str] = []
    for target in (master, _OUTSIDE):
        with suppress(OSError):
            family, kind, *_, where = socket.getaddrinfo(
                target or _OUTSIDE, 9, type=socket.SOCK_DGRAM
            )[0]
            with closing(socket.socket(family, kind)) as probe:
                probe.connect(where)  # sends nothing
                hosts.append(probe.getsockname()[0])
    return list(dict.fromkeys(hosts)) or ["127.0.0.1"], port, token.hex()


class Listener:
    """Accepts connections of ranks that know its token."""

    def __init__(
        self, on_greeting: Callable[[socket.socket, int, int, int, int], None]
    ):
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            self.socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        except (OSError, ValueError):  # a system without IPv6
            self.socket = socket.create_server(("", 0), backlog=1024)
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]
        self._on_greeting = on_greeting
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self.socket.fileno() != -1:
            try:
                accepted, _ = await loop.sock_accept(self.socket)
            except OSError as error:  # such as too many open files
                logger.warning("a rank cannot connect yet: %s", error)
                await asyncio.sleep(_LONGEST_PAUSE)
                continue
            task = loop.create_task(self._greet(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _greet(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            async with asyncio.timeout(limits.GREETING_SECONDS):
                data = await receive(accepted, memoryview(bytearray(_GREETING.size)))
                magic, token, kind, *numbers = _GREETING.unpack(data)
                if magic != _MAGIC or not hmac.compare_digest(token, self.token):
                    accepted.close()
                    return
                await asyncio.get_running_loop().sock_sendall(accepted, _MAGIC)
        except (OSError, EOFError, TimeoutError):
            accepted.close()
            return
        tune(accepted)
        self._on_greeting(accepted, kind, *numbers)


async def connect(
    address: Address, kind: int, rank: int, call: int, number: int
) -> socket.socket:
    """A connection to the listener at this address. Raises OSError where none answers so."""
    hosts, port, token = address
    greeting = _GREETING.pack(_MAGIC, bytes.fromhex(token), kind, rank, call, number)
    loop = asyncio.get_running_loop()
    failed: Exception = OSError("no address")
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            async with asyncio.timeout(limits.GREETING_SECONDS):
                await loop.sock_connect(made, (host, port))
                await loop.sock_sendall(made, greeting)
                reply = await receive(made, memoryview(bytearray(len(_MAGIC))))
            if bytes(reply) != _MAGIC:
                raise ConnectionRefusedError(f"another program listens on port {port}")
        except (OSError, EOFError, TimeoutError) as error:
            made.close()
            failed = error
        except BaseException:
            made.close()
            raise
        else:
            tune(made)
            return made
    raise ConnectionError(f"{hosts[-1]}:{port}: {failed!r}") from failed


async def receive(
    source: socket.socket, into: memoryview, note: Callable[[], None] = lambda: None
) -> memoryview:
    """Fill the memory, and return it. ``note`` is called for each part. Raises EOFError."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(into):
        count = await loop.sock_recv_into(source, into[filled:])
        if not count:
            raise EOFError("the connection was closed")
        filled += count
        note()
    return into


def tune(connection: socket.socket) -> None:
    """Small messages leave at once. A host that is silent for long is noticed."""
    seconds = limits.HOST_SILENT_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", seconds // 4),
        ("TCP_KEEPINTVL", seconds // 8),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
