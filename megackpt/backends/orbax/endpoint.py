"""Serves the files of a checkpoint to tensorstore over HTTP on the loopback, while a read is open.

OCDBT's data files hold bytes of many arrays, so tensorstore asks for ranges of them. Through this
endpoint it reads from disks and buckets alike, within the bounds of ``Storage``: no links, no names
outside of the checkpoint, no more bytes than a reader expects. Source of the headers that
tensorstore understands: tensorstore 0.1.86, ``kvstore/http/driver.cc``.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, cast
from urllib.parse import unquote

from megackpt.errors import BackendError, CheckpointingException, CorruptCheckpoint
from megackpt.storage import FileReader, Storage, allocate

_HOST = "127.0.0.1"
_NODE_BYTES = 128 << 20
"""Bytes of one answer, unless ``expect`` allows more. Orbax limits a node of OCDBT to 100 MB."""
_WINDOW = 1 << 20
"""Bytes that are read and sent at once."""
_BOMB_BYTES = 16 << 20
_BOMB_RATIO = 16
"""A compressed node may have _BOMB_BYTES more than _BOMB_RATIO times its stored bytes."""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_NODES = (0x0CDB3A2A, 0x0CDB1234, 0x0CDB20DE)
"""The first bytes of a manifest, a version node and a B+tree node of OCDBT."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 128 << 10
"""The most bytes of a block of zstd (RFC 8878, 3.1.1.2)."""
_ZSTD_SMALLEST = 4 << 10
"""Bytes that a block of zstd counts for at least, so that the number of blocks is bounded."""


class Endpoint(ThreadingTCPServer):
    """A server of the files of one checkpoint, until ``is_needed`` returns False.

    ``url`` has an unguessable path. ``errors`` has the errors of the storage: tensorstore reports
    only that a request failed.
    """

    daemon_threads = True
    block_on_close = False
    timeout = 0.2

    def __init__(self, root: Storage, is_needed: Callable[[], bool]) -> None:
        """Raises BackendError if a proxy of the environment would get the requests."""
        proxied = "http" in urllib.request.getproxies()
        if proxied and not urllib.request.proxy_bypass(_HOST):
            raise BackendError(
                f"tensorstore would send its requests to {_HOST} through the proxy of http_proxy: "
                f"add {_HOST} to the environment variable no_proxy"
            )
        super().__init__((_HOST, 0), _Handler)
        self.root = root
        self.secret = secrets.token_urlsafe(16)
        self.url = f"http://{_HOST}:{self.server_address[1]}/{self.secret}/"
        self.errors: list[Exception] = []
        self.largest = _NODE_BYTES
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, args=(is_needed,), daemon=True).start()

    def _serve(self, is_needed: Callable[[], bool]) -> None:
        while is_needed():
            self.handle_request()
        self.server_close()
        # tensorstore keeps its connections. Their threads end, and close them.
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def expect(self, nbytes: int) -> None:
        """Allow answers of this many bytes."""
        self.largest = max(self.largest, nbytes)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Keep the error, unless the client has ended the connection."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        server = cast(Endpoint, self.server)
        prefix = f"/{server.secret}/"
        try:
            if not self.path.startswith(prefix):
                raise CorruptCheckpoint(
                    f"{server.root.location}: it names a file outside of the checkpoint"
                )
            name = unquote(self.path[len(prefix) :], errors="surrogateescape")
            with server.root.open(name) as reader:
                self._send(server, name, reader)
        except FileNotFoundError:
            self._send_status(404)
        except (CheckpointingException, OSError) as error:
            if not isinstance(error, ConnectionError):
                server.errors.append(error)
                self._send_status(403)

    def _send(self, server: Endpoint, name: str, reader: FileReader) -> None:
        where = f"{server.root.location}/{name}"
        start = 0
        stop = reader.size
        status = 200
        asked = self.headers.get("Range")
        if asked is not None:
            match = _RANGE.fullmatch(asked)
            if match is None or int(match[1] or 0) >= reader.size:
                raise CorruptCheckpoint(
                    f"{where} has {reader.size} bytes, and the range {asked} was asked for"
                )
            status = 206
            if match[1]:
                start = int(match[1])
                stop = min(stop, int(match[2] or stop) + 1)
            else:  # The last bytes: the index of a shard.
                start = max(0, stop - int(match[2] or 0))
        length = stop - start
        if length > server.largest:
            raise CorruptCheckpoint(
                f"{where}: {length} bytes from byte {start} on are more than one value has"
            )
        first = allocate(min(length, _WINDOW), where)
        reader.read_into(start, [memoryview(first)])
        _refuse_bomb(reader, start, length, first, where)
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{reader.size}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{reader.size}")
        self.end_headers()
        self.wfile.write(first)
        for at in range(start + len(first), stop, _WINDOW):
            part = memoryview(first)[: min(_WINDOW, stop - at)]
            reader.read_into(at, [part])
            self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """No effect: requests are not logged."""

    def _send_status(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _refuse_bomb(
    reader: FileReader, start: int, length: int, first: bytearray, where: str
) -> None:
    """Raise CorruptCheckpoint for a node of OCDBT that is compressed far too well.

    tensorstore keeps what it decompresses. The headers of the blocks of a frame say how many bytes
    they have at most, so no byte is decompressed here.
    """
    if len(first) < 24 or struct.unpack_from(">IQ", first)[0] not in _NODES:
        return
    if first[4:12] != length.to_bytes(8, "little") or first[12:14] == b"\0\0":
        return
    # tensorstore takes a version of more bytes, too, and would find the frame behind them.
    if first[12:14] != b"\0\1" or first[14:18] != _ZSTD:
        raise CorruptCheckpoint(
            f"{where}: the node of OCDBT at byte {start} has no version and form that are known"
        )
    flags = first[18]
    is_single = flags >> 5 & 1
    at = 19 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    at += (is_single, 2, 4, 8)[flags >> 6]
    total = 0
    header = bytearray(3)
    is_last = False
    while not is_last and at + 3 <= length:
        reader.read_into(start + at, [memoryview(header)])
        block = int.from_bytes(header, "little")
        is_last = bool(block & 1)
        kind = block >> 1 & 3
        size = block >> 3
        total += _ZSTD_BLOCK if kind == 2 else max(size, _ZSTD_SMALLEST)
        at += 3 + (1 if kind == 1 else size)
        if total > _BOMB_BYTES + _BOMB_RATIO * length:
            raise CorruptCheckpoint(
                f"{where}: {length} bytes from byte {start} on decompress to more than {total}"
            )
