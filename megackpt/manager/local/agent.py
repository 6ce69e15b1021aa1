"""The agent of a host: a process that drains the local saves of one run, and outlives the trainer.

A host has one agent for a run: it holds the lock of the folder ``.agent``. Each local save that is
due in the storage starts an agent if none runs, and so does the next restore.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from subprocess import CalledProcessError

from megackpt.async_save.worker_process import start_detached
from megackpt.errors import CheckpointingException
from megackpt.manager.local.drain import HostDrain
from megackpt.manager.local.pieces import AGENT
from megackpt.storage import LocalStorage

logger = logging.getLogger("megackpt.manager")

POLL_SECONDS = 0.5
"""Between two looks for marks of other hosts, and for new saves."""
_IDLE_SECONDS = 30.0
"""An agent that has nothing to drain for so long ends."""
_LONGEST_PAUSE = 60.0
"""Seconds between two attempts at a storage that refuses. The first pause is POLL_SECONDS."""


def ensure_agent(location: str) -> None:
    """Start the agent of this host for a run, unless one runs.

    ``location``: the directory of the run on this host. A failure is logged; the next save tries
    again.
    """
    folder = LocalStorage(f"{location}/{AGENT}")
    if folder.lock():
        # A child that was forked meanwhile has the descriptor, too, and would keep the lock.
        folder.unlock()
        folder.close()
        try:
            start_detached(__name__, location)
        except (OSError, CalledProcessError) as error:
            logger.warning("no agent can be started to drain %s: %s", location, error)


def main(location: str) -> None:
    """Drain the saves in ``location`` until there are none for a while."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(10)  # training is first, and the agent does not starve
    folder = LocalStorage(f"{location}/{AGENT}")
    while folder.lock():
        drain = HostDrain(location)
        serve(drain)
        folder.unlock()
        # A save that came meanwhile has found the lock held.
        if not drain.has_news():
            return


def serve(drain: HostDrain) -> None:
    """Drain until there is nothing to do for a while. A storage that refuses is asked again."""
    pause = POLL_SECONDS
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < _IDLE_SECONDS:
        try:
            is_waiting = drain.work()
            pause = POLL_SECONDS
        except (CheckpointingException, OSError) as error:
            is_waiting = True
            drain.fail(error)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if is_waiting:
            idle_since = time.monotonic()
        time.sleep(pause)
