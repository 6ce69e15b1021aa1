"""A port for the rank that other ranks connect to, chosen before that rank starts."""

from __future__ import annotations

import random
import socket

# Below the range from which Linux and macOS take the ports of outgoing connections (32768 and 49152 on).
# A port of that range can be taken by any connection before the rank listens.
PORTS = range(10_000, 32_768)


def unused_port() -> int:
    """A port of 127.0.0.1 that no process uses now."""
    while True:
        # Not the seeded generator of the tests: two processes of them would choose the same ports.
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
