"""Azurite, a server of Azure's blobs for tests: its start, and its containers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / ".peers" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
# The account and the key are the same in every copy of Azurite, and no secret.
ACCOUNT = "devstoreaccount1"
KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
    "K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextmanager
def running() -> Iterator[str]:
    """Its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    where = ["--blobHost", address[0], "--blobPort", str(address[1])]
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen([PROGRAM, "--silent", *where, *options])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), socket.create_connection(address):
                break
            time.sleep(0.1)
        yield f"http://{address[0]}:{address[1]}"
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Container:
    """One container of the server, new and empty."""

    name: str
    endpoint: str

    @classmethod
    def new(cls, endpoint: str) -> Container:
        made = cls(f"container-{uuid.uuid4().hex[:12]}", endpoint)
        address = endpoint.removeprefix("http://")
        path = f"/{ACCOUNT}/{made.name}"
        headers = {
            "x-ms-date": formatdate(usegmt=True),
            "x-ms-version": "2021-08-06",
        }
        signed = "PUT" + "\n" * 12
        signed += "".join(f"{name}:{text}\n" for name, text in headers.items())
        signed += f"/{ACCOUNT}{path}\nrestype:container"
        code = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        signature = base64.b64encode(code).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        connection = http.client.HTTPConnection(address)
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()
        return made

    @property
    def url(self) -> str:
        return f"az://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
        }

    def keys(self) -> list[str]:
        from megackpt.storage import BucketStorage

        root: Any = BucketStorage(self.url)
        return sorted(root.objects())

    def uploads(self) -> list[str]:
        """Blocks without a blob cannot be seen, and Azure removes them."""
        return []
