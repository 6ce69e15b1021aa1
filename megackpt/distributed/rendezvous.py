"""How ranks find and know each other: by addresses, and by a secret token, in the job's store.

At a new connection, both ends show that they know the token: each sends an HMAC of a number that
its peer has drawn. The token itself does not cross the connection, and an HMAC is of no use for
another connection. All later messages are neither encrypted nor signed.
"""

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
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from megackpt import limits

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

logger = logging.getLogger("megackpt.distributed")

Address = tuple[list[tuple[str, int]], str]
"""Hosts and ports to try in turn, and a name of the listener, which is not secret."""

_CHALLENGE = struct.Struct("!8s16s")  # _MAGIC, a number drawn by the listener
_GREETING = struct.Struct("!BQQQ16s")  # kind, rank, call, number, a number drawn here
_MAGIC = b"megackpt"
_TOKEN_BYTES = 32
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_SHORTEST_GREETING = 0.25
"""Seconds. If there are too many new connections, greetings older than this are ended."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks into the store
_ANSWER_SECONDS = 4.0
_OUTSIDE = "192.0.2.1"  # a documentation address: the way there is the default route
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR

_found: set[bytes] = set()
"""Addresses that this process has found. A later group of the same name has none of them."""

STORE_SILENT = "the job's store does not answer"


class StoreLost(OSError):
    """The job's store does not answer, or is gone."""


class JobStore:
    """The addresses of ranks in the job's store, under a prefix for one process group and lane.

    A client of torch's store waits as long as TCP does when its server is silent. So each use has a
    separate thread, which may be given up.
    """

    def __init__(self, process_group: dist.ProcessGroup, lane: str = "") -> None:
        from torch.distributed import distributed_c10d

        name = process_group.group_name
        # The store of torchrun's agent has the addresses of workers that it has restarted. In other
        # jobs each agent counts its restarts, and the agent of a replaced host begins with 0.
        attempt = "0"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = distributed_c10d.PrefixStore(
            f"megackpt/{name}{lane and '/'}{lane}/{attempt}",
            distributed_c10d._get_default_store(),
        )
        self._name, self._process_group = name, ref(process_group)
        self._names = distributed_c10d._world.pg_names
        self._former = frozenset(_found)
        self._token = b""
        self._uses = 0
        self._heard = 0.0

    def is_silent(self, timeout: float = math.inf) -> bool:
        """Whether the store has not answered for 4 seconds, or half of the timeout."""
        seconds = min(_ANSWER_SECONDS, timeout / 2)
        return self._uses > 0 and time.monotonic() - self._heard > seconds

    async def publish(self, rank: int, listener: Listener) -> None:
        key = f"address/{rank}"
        value = json.dumps(await listener.open(self))

        def publish(store: Any) -> None:
            store.set(key, value)
            store.check([key])  # a set has no answer

        await self.use(publish)

    async def find(self, rank: int) -> Address:
        """The address of a rank, once it has published one.

        The address of a destroyed group in the same store does not count.
        """
        while (found := await self._get(f"address/{rank}")) in self._former:
            await asyncio.sleep(_LONGEST_PAUSE)
        _found.add(found)
        places, name = json.loads(found)
        return places, name

    async def token(self) -> bytes:
        """The secret of these ranks, which the first rank that asks has drawn.

        A destroyed group has no token once another group has its name: a rank that comes with this
        name means the new group.
        """

        def draw(store: Any) -> None:
            if store.add("tokens", 1) == 1:
                store.set("token", secrets.token_hex(_TOKEN_BYTES))

        named = [group for group, name in [*self._names.items()] if name == self._name]
        if any(group is not self._process_group() for group in named):
            raise StoreLost(
                "a process group that was destroyed: another one has its name"
            )
        if not self._token:
            await self.use(draw)
            self._token = bytes.fromhex((await self._get("token")).decode())
        return self._token

    async def _get(self, key: str) -> bytes:
        pause = _FIRST_PAUSE
        while not await self.use(lambda store: store.check([key])):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        value: bytes = await self.use(lambda store: store.get(key))
        return value

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
        threading.Thread(target=run, name="megackpt-store", daemon=True).start()
        self._uses += 1  # now: no thread may be left
        return await future


def own_hosts(store: Any = None) -> list[str]:
    """Where other hosts reach this one: by the interface that GLOO_SOCKET_IFNAME names.

    Otherwise by the interfaces on the way to the job's store and on the default route: the name of
    the store's host may lead processes on that host to a loopback address.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        # A socket that is bound to the interface (SO_BINDTODEVICE) would know its address as well,
        # but needs privileges before Linux 5.7.
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", name.encode()[:255])
            found = fcntl.ioctl(probe.fileno(), _INTERFACE_ADDRESS, request)
        return [socket.inet_ntoa(found[20:24])]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    master = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    targets = [master, _OUTSIDE]
    if master in ("localhost", "::1") or master.startswith("127."):
        targets = [master]  # so all ranks are on this host
    hosts: list[str] = []
    for target in targets:
        with suppress(OSError):
            family, kind, *_, where = socket.getaddrinfo(
                target or _OUTSIDE, 9, type=socket.SOCK_DGRAM
            )[0]
            with closing(socket.socket(family, kind)) as probe:
                probe.connect(where)  # does not send
                hosts.append(probe.getsockname()[0])
    return list(dict.fromkeys(hosts)) or ["127.0.0.1"]


class Listener:
    """Accepts connections of ranks that know the token, after ``open``."""

    def __init__(
        self, on_greeting: Callable[[socket.socket, int, int, int, int], None]
    ):
        self.sockets: list[socket.socket] = []
        self._name = secrets.token_hex(_NONCE_BYTES)
        self._places: list[tuple[str, int]] = []
        self._on_greeting = on_greeting
        self._opening = asyncio.Lock()
        self._serving: list[asyncio.Task[None]] = []
        self._greetings: dict[asyncio.Task[None], float] = {}
        """Connections that have not shown that they are of this job, the oldest first."""

    async def open(self, store: JobStore) -> Address:
        """Listen at the addresses of ``own_hosts`` only. Returns the address to publish."""
        async with self._opening:
            if not self.sockets:
                await store.token()
                for host in await store.use(own_hosts):
                    made = _bound(host)
                    self.sockets.append(made)
                    self._places.append((host, made.getsockname()[1]))
                    serving = self._serve(made, store)
                    self._serving.append(asyncio.create_task(serving))
        return self._places, self._name

    def close(self) -> None:
        for task in (*self._serving, *self._greetings):
            task.cancel()
        for each in self.sockets:
            each.close()

    async def _serve(self, listening: socket.socket, store: JobStore) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._greetings) >= limits.GREETINGS:
                # Wait until a greeting has ended. The oldest one ends soon, the next ones wait.
                oldest, began = next(iter(self._greetings.items()))
                left = began + _SHORTEST_GREETING - time.monotonic()
                if left <= 0:
                    oldest.cancel()
                await asyncio.wait(
                    self._greetings, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as too many open files
                logger.warning("a rank cannot connect yet: %s", error)
                await asyncio.sleep(_LONGEST_PAUSE)
                continue
            task = loop.create_task(self._greet(accepted, store))
            self._greetings[task] = time.monotonic()
            task.add_done_callback(self._greetings.pop)

    async def _greet(self, accepted: socket.socket, store: JobStore) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted.setblocking(False)
            async with asyncio.timeout(limits.GREETING_SECONDS):
                token = await store.token()
                nonce = secrets.token_bytes(_NONCE_BYTES)
                await loop.sock_sendall(accepted, _CHALLENGE.pack(_MAGIC, nonce))
                greeting = await _received(accepted, _GREETING.size)
                shared = self._name, nonce, greeting
                given = await _received(accepted, _PROOF_BYTES)
                if not hmac.compare_digest(given, _proof(token, "connect", *shared)):
                    raise ConnectionRefusedError("it does not know the token")
                await loop.sock_sendall(accepted, _proof(token, "accept", *shared))
            tune(accepted)
            self._on_greeting(accepted, *_GREETING.unpack(greeting)[:4])
        except BaseException as error:
            accepted.close()
            if not isinstance(error, (OSError, EOFError, TimeoutError)):
                raise


def _bound(host: str) -> socket.socket:
    """A socket that listens at this address only, or at all addresses if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:  # an address of another host, or with a zone of IPv6
        logger.warning("listening at all addresses, as at %s: %s", host, error)
        any_host = "::" if family == socket.AF_INET6 else "0.0.0.0"
        made = socket.create_server((any_host, 0), family=family, backlog=1024)
    made.setblocking(False)
    return made


def _proof(token: bytes, side: str, name: str, nonce: bytes, greeting: bytes) -> bytes:
    """The proof to the peer that this end knows the token. ``name``: of the listener."""
    return hmac.digest(token, f"{side} {name} ".encode() + nonce + greeting, "sha256")


async def connect(
    address: Address, token: bytes, kind: int, rank: int, call: int, number: int
) -> socket.socket:
    """A connection to the listener at this address. OSError without a proof of the token."""
    places, name = address
    failed: Exception = OSError("no address")
    host, port = "", 0
    for host, port in places:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        greeting = _GREETING.pack(
            kind, rank, call, number, secrets.token_bytes(_NONCE_BYTES)
        )
        try:
            async with asyncio.timeout(limits.GREETING_SECONDS):
                await asyncio.get_running_loop().sock_connect(made, (host, port))
                await _introduce(made, token, name, greeting)
        except (OSError, EOFError, TimeoutError) as error:
            made.close()
            failed = error
        except BaseException:
            made.close()
            raise
        else:
            tune(made)
            return made
    raise ConnectionError(f"{host}:{port}: {failed!r}") from failed


async def _introduce(
    made: socket.socket, token: bytes, name: str, greeting: bytes
) -> None:
    magic, nonce = _CHALLENGE.unpack(await _received(made, _CHALLENGE.size))
    if magic != _MAGIC:
        raise ConnectionRefusedError("another program listens there")
    proof = _proof(token, "connect", name, nonce, greeting)
    await asyncio.get_running_loop().sock_sendall(made, greeting + proof)
    answer = await _received(made, _PROOF_BYTES)
    if not hmac.compare_digest(answer, _proof(token, "accept", name, nonce, greeting)):
        raise ConnectionRefusedError("it does not know the token")


async def _received(source: socket.socket, count: int) -> bytes:
    return bytes(await receive(source, memoryview(bytearray(count))))


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
