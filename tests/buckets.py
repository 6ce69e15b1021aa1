"""Buckets for tests: a real S3 server on the loopback, and a line to it that does what lines do."""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "something",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Bucket:
    """One bucket of the server, new and empty; ``client`` is boto3's, for a look from outside."""

    name: str
    endpoint: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def keys(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [one["Key"] for page in pages for one in page.get("Contents", ())]

    def uploads(self) -> list[str]:
        """Uploads in parts that are neither finished nor given up."""
        return [
            one["Key"]
            for one in self.client.list_multipart_uploads(Bucket=self.name).get(
                "Uploads", ()
            )
        ]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The server's endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket, and the environment that leads to it (child processes inherit it)."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": s3_server}).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=s3_server)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return Bucket(name, s3_server, client)


@dataclass
class Request:
    """One request on its way: the head can be changed."""

    method: str
    path: str
    head: bytes
    body: bytes

    def without(self, header: str) -> None:
        self.head = re.sub(rb"(?im)^" + header.encode() + rb":.*\r\n", b"", self.head)


@dataclass
class Line:
    """A proxy before the server. ``fault(request)`` says what happens to each request:

    None: it goes through. A number: that is the answer, and the server never hears of it. "reset": the connection
    breaks before, "swallow": after the server has done it. "truncate": the answer breaks off in the middle,
    "shorten": it is half as long as it should be, and says that this is all. "flip": its last byte is another.
    "slow": all takes a while longer. "duplicate": the server gets a copy of the request some moments later.
    """

    endpoint: str
    fault: Callable[[Request], int | str | None] = lambda _: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    sent: int = 0
    """Bytes of the bodies of all answers."""
    late: list[Request] = field(default_factory=list)
    """Requests of which the server has had a copy."""
    server: tuple[str, int] = "", 0

    def once(self, how: int | str, method: str, path: str = "", times: int = 1) -> None:
        """Let this happen to the first requests of this kind."""
        left = [times]

        def fault(request: Request) -> int | str | None:
            if request.method != method or path not in request.path or not left[0]:
                return None
            left[0] -= 1
            return how

        self.fault = fault

    def repeat(self) -> None:
        """Send the server one more copy of these, much later."""
        late, self.late = self.late, []
        for request in late:
            _forward(request, self.server)

    def asked(self, method: str, path: str = "") -> int:
        return sum(m == method and path in p for m, p in self.seen)


@pytest.fixture
def line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The way to the bucket leads through this."""
    with line_to(bucket.endpoint) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
        yield line


@contextmanager
def line_to(endpoint: str) -> Iterator[Line]:
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        line = Line(f"http://127.0.0.1:{listening.getsockname()[1]}")
        line.server = host, int(port)
        threading.Thread(
            target=_accept, args=(listening, line, line.server), daemon=True
        ).start()
        yield line
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, line: Line, server: tuple[str, int]) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return  # closed: the test is over
        threading.Thread(
            target=_serve, args=(connection, line, server), daemon=True
        ).start()


def _serve(connection: socket.socket, line: Line, server: tuple[str, int]) -> None:
    """The requests of one connection, each by a connection of its own to the server."""
    with connection, connection.makefile("rb") as stream:
        while request := _request(stream):
            line.seen.append((request.method, request.path))
            how = line.fault(request)
            if how == "slow":
                time.sleep(0.2)
            if how == "duplicate":
                line.late.append(request)
                threading.Timer(0.05, _forward, [request, server]).start()
            if isinstance(how, int):
                connection.sendall(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % how)
                continue
            answer = b"" if how == "reset" else _forward(request, server)
            if how in ("reset", "swallow"):
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                return
            head, _, body = answer.partition(b"\r\n\r\n")
            if how == "flip":
                body = body[:-1] + bytes([body[-1] ^ 1])
            if how == "truncate" and not body:
                connection.sendall(head[: len(head) // 2])
                return
            if how in ("truncate", "shorten"):
                body = body[: len(body) // 2]
            if how == "shorten":
                head = re.sub(
                    rb"(?im)^(content-length:) *\d+", rb"\1 %d" % len(body), head
                )
                if found := re.search(rb"(?im)^content-range: bytes (\d+)-(\d+)", head):
                    last = b"%d" % (int(found[1]) + len(body) - 1)
                    head = head[: found.start(2)] + last + head[found.end(2) :]
            line.sent += len(body)
            connection.sendall(head + b"\r\n\r\n" + body)
            if how == "truncate":
                return


def _request(stream: Any) -> Request | None:
    try:
        head = b""
        while (text := stream.readline()) != b"\r\n":
            if not text:
                return None
            head += text
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        body = stream.read(int(length[1])) if length else b""
    except OSError:
        return None  # the client went away
    method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    return Request(method, path, head, body)


def _forward(request: Request, server: tuple[str, int]) -> bytes:
    head = re.sub(rb"(?im)^(connection|expect):.*\r\n", b"", request.head)
    with socket.create_connection(server) as upstream:
        upstream.sendall(head + b"Connection: close\r\n\r\n" + request.body)
        return b"".join(iter(lambda: upstream.recv(1 << 20), b""))
