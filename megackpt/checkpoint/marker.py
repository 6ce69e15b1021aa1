"""The marker file of a save: the process that writes, and the checkpoint that it replaces.

A sibling directory of the target, ``.NAME.megackpt-ID``, holds one save. While the marker of ID is
in it, the save is not published. After an exchange the marker is in the target, and the sibling
holds the old checkpoint. A suffix (``.NAME.megackpt-ID.SUFFIX``) means that another owner has taken
the directory: no process may publish it any more.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from megackpt.errors import CorruptCheckpoint, SaveInProgress
from megackpt.planning import cache
from megackpt.storage import LocalStorage, Storage

logger = logging.getLogger("megackpt.checkpoint")

PREFIX = ".megackpt-saving-"

LONGEST_NAME = 255
"""Bytes of a name on the usual file systems."""

ASIDE = "old"
"""The suffix of a directory that was renamed away because the file system cannot exchange."""

ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a removal regards a save as dead whose process it cannot inspect."""

active: set[str] = set()
"""Ids of the saves of this process that have not ended."""

_LARGEST_MARKER = 1 << 20

# A forked child must not use the plans of its parent: markers identify a save by its id alone.
os.register_at_fork(after_in_child=cache.forget)


def staging_name(name: str, save_id: str) -> str:
    """The sibling directory of ``name`` in which a save writes."""
    return f".{name}.megackpt-{save_id}"


def owner_suffix(save_id: str) -> str:
    """The suffix by which a save marks directories that it has taken from other saves."""
    return save_id[:8]


class Sibling(NamedTuple):
    """A sibling directory of the target: its name, the id in the name, and the suffix or ""."""

    entry: str
    save_id: str
    suffix: str


def siblings(outer: LocalStorage, name: str) -> list[Sibling]:
    """The directories that saves to ``name`` made. Links and files of such names are ignored."""
    pattern = re.compile(re.escape(f".{name}.megackpt-") + r"([^./]+)(?:\.([^./]+))?")
    found = []
    for entry in outer.list():
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        status = outer.stat(entry)
        if status is not None and stat.S_ISDIR(status.st_mode):
            found.append(Sibling(entry, match[1], match[2] or ""))
    return found


@functools.cache
def boot() -> str:
    """The id of this boot of this machine; "" where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def namespace(kind: str = "pid") -> str:
    """This process's namespace of process ids, or of "time"; "" where the system does not say.

    Each call reads it: a forked process may be in another namespace than its parent.
    """
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def started(pid: int) -> int:
    """When a process started, in ticks since boot as this time namespace counts them.

    0: it is unknown. -1: the process has ended, and its parent has not asked for its status.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return 0  # /proc lists the processes of another namespace
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    # The state is also Z if only the first thread of the process has ended.
    if state in (b"Z", b"X") and numbers[16] == b"1":
        return -1
    return int(numbers[18])


@dataclass(frozen=True)
class Marker:
    """The content of a marker file.

    ``base`` identifies the checkpoint that the save replaces ("" for none), see
    ``directory_target.version``. ``removes``: this is a removal, not a save.
    ``time_namespace``: the one in which ``started`` was read; "" in markers of older versions.
    """

    save_id: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: int = field(default_factory=lambda: started(os.getpid()))
    boot: str = field(default_factory=boot)
    namespace: str = field(default_factory=namespace)
    time: float = field(default_factory=time.time)
    base: str = ""
    removes: bool = False
    time_namespace: str = field(default_factory=lambda: namespace("time"))

    @property
    def name(self) -> str:
        return PREFIX + self.save_id

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_local(self) -> bool:
        """Can this process address the marker's process by its id?"""
        same_boot = self.boot and self.boot == boot()
        return bool(same_boot and self.pid > 0 and self.namespace == namespace())

    def runs(self) -> bool | None:
        """Does the process still work on this save? None if this process cannot find out."""
        if not self.is_local():
            return None
        if self.pid == os.getpid():
            return self.save_id in active
        with suppress(
            OSError, OverflowError
        ):  # it is of another user, or no process id
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
        # The id may have been given to another process.
        now = started(self.pid)
        if not (now and self.started) or self.time_namespace != namespace("time"):
            return None
        return now == self.started

    def is_dead(self, abandoned: bool = False) -> bool:
        """Is it certain that the process has ended?

        ``abandoned``: also true after a day, if this process cannot find out.
        """
        runs = self.runs()
        if runs is None:
            return abandoned and time.time() - self.time > ABANDONED_AFTER
        return not runs

    def __str__(self) -> str:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        except (ValueError, OverflowError, OSError):
            since = "at an unknown time"
        kind = "save"
        if self.removes:
            kind = "removal"
        return f"a {kind} by process {self.pid} on host {self.host!r}, started {since}"


def parse_marker(data: bytes, save_id: str) -> Marker:
    """Parse a marker. Fields that are missing or of a wrong type are unknown."""
    values: dict[str, Any] = asdict(
        Marker(save_id, "unknown", 0, 0, "", "", 0.0, time_namespace="")
    )
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        for key, value in fields.items():
            if key != "save_id" and type(value) is type(values.get(key)):
                values[key] = value
    return Marker(**values)


def read_marker(storage: Storage, name: str, save_id: str) -> Marker | None:
    """The marker in the file ``name``; None if the file does not exist."""
    try:
        marker = parse_marker(storage.get(name, limit=_LARGEST_MARKER), save_id)
    except FileNotFoundError:
        return None
    except CorruptCheckpoint:
        marker = parse_marker(b"", save_id)
    if marker.time:
        return marker
    # The marker is damaged, and its save may run.
    return replace(marker, time=storage.modified(name) or time.time())


def markers(storage: Storage) -> list[Marker]:
    """The markers in a directory."""
    found = []
    for name in storage.list():
        if name.startswith(PREFIX):
            marker = read_marker(storage, name, name.removeprefix(PREFIX))
            if marker is not None:
                found.append(marker)
    return found


def refuse_working(location: str, alive: list[Marker]) -> None:
    """SaveInProgress if there are markers of saves that may be alive."""
    for marker in alive:
        raise SaveInProgress(
            f"{location} is being written by {marker}, and is left alone"
        )
