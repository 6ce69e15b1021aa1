"""Who is saving here: markers that stand while a save goes on, and whether the process behind one lives.

A marker is a small JSON file in the directory that a save writes to. It says who saves, which names the save
may put there, and, once the commit has begun, which file will be the last. While that file is absent the
directory is no checkpoint, whatever else is in it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from megackpt.errors import CorruptCheckpoint, StorageError
from megackpt.planning import cache
from megackpt.storage import LocalStorage, unsafe_names

logger = logging.getLogger("megackpt.checkpoint")

PREFIX = ".megackpt-saving-"
LOCK = ".megackpt-saving"
"""What a marker is called in a bucket: there one save at a time can have it."""
HEARTBEAT = 20.0
"""Seconds between two signs of life of a save."""
SILENCE = 300.0
"""Seconds without one after which a save is taken for dead, where its process cannot be looked at."""

PATIENCE = 2.0
"""Seconds that a save waits at most for its ``turn``."""

LONGEST = 255
"""Bytes that a name may have on any file system that we know."""

active: set[str] = set()
"""Ids of the saves of this process that have begun and not ended."""

os.register_at_fork(
    after_in_child=cache.forget
)  # markers and locks know a save by its id alone


def staging_name(name: str, save_id: str) -> str:
    """The sibling of a directory that a save grows in when it replaces a checkpoint."""
    return f".{name}.megackpt-{save_id}"


def siblings(outer: LocalStorage, name: str) -> dict[str, str]:
    """The siblings that saves to ``name`` made: entry -> save id. ``.old``: a directory set aside."""
    pattern = re.compile(re.escape(f".{name}.megackpt-") + r"([^./]+)(\.old)?")
    found = ((entry, pattern.fullmatch(entry)) for entry in outer.list())
    return {
        entry: match[1] for entry, match in found if match and _is_folder(outer, entry)
    }


def _is_folder(outer: LocalStorage, entry: str) -> bool:
    """A link or a file that bears such a name is somebody else's."""
    status = outer.stat(entry)
    return status is not None and stat.S_ISDIR(status.st_mode)


@functools.cache
def boot() -> str:
    """Names this boot of this machine; empty where it cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


@functools.cache
def namespace() -> str:
    """Names the set of processes that numbers of processes belong to; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started(pid: int) -> int:
    """When a process started (ticks since boot), which tells apart those of one number; 0 = it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()
    except OSError:  # there is none, or none that we may see
        return 0
    return 0 if state in (b"Z", b"X") else int(numbers[18])


@dataclass(frozen=True)
class Marker:
    """What a marker says.

    ``names`` are the top-level names that the save may make; ``last`` is the file whose appearance completes
    it (empty before the commit); ``retire`` are the files of the replaced checkpoint, which may be removed.
    ``removes``: it is no save but the removal of the files in ``names``, which whoever clears up goes on with.
    """

    save_id: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: int = field(default_factory=lambda: started(os.getpid()))
    boot: str = field(default_factory=boot)
    namespace: str = field(default_factory=namespace)
    time: float = field(default_factory=time.time)
    names: tuple[str, ...] = ()
    last: str = ""
    retire: tuple[str, ...] = ()
    removes: bool = False

    @property
    def name(self) -> str:
        return PREFIX + self.save_id

    def put(self, storage: LocalStorage) -> None:
        storage.put(self.name, json.dumps(asdict(self)).encode())

    def finished(self, storage: LocalStorage) -> bool:
        """Did the save complete the directory that it marks?"""
        return bool(self.last) and storage.size(self.last) is not None

    def lives(self, storage: LocalStorage) -> bool:
        """Is this save going on?

        Certain where the process belongs to this boot and namespace. Elsewhere (another host or container) a
        save lives as long as it touches its marker, by the clock of the file system.
        """
        certain = self.runs()
        if certain is not None:
            return certain
        status = storage.stat(self.name)
        return status is not None and storage.now() - status.st_mtime < SILENCE

    def runs(self) -> bool | None:
        """Does the process go on with this save? None if it cannot be looked at from here."""
        if self.boot != boot() or not self.boot or self.namespace != namespace():
            return None
        if self.pid == os.getpid():
            return self.save_id in active
        return started(self.pid) == self.started != 0

    def __str__(self) -> str:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        except (
            ValueError,
            OverflowError,
            OSError,
        ):  # markers are files, and may say anything
            since = "at no time"
        what = "a removal" if self.removes else "a save"
        return f"{what} by process {self.pid} on host {self.host!r}, begun {since}"


def markers(storage: LocalStorage) -> list[Marker]:
    """The markers in a directory. One that cannot be understood counts as a save by nobody we can ask."""
    names = [name for name in storage.list() if name.startswith(PREFIX)]
    return [marker for name in names if (marker := _read(storage, name)) is not None]


def _read(storage: LocalStorage, name: str) -> Marker | None:
    save_id = name.removeprefix(PREFIX)
    try:
        return parsed(storage.get(name, limit=1 << 28), save_id)
    except FileNotFoundError:
        return None  # it was removed since we saw its name
    except CorruptCheckpoint:
        return parsed(b"", save_id)


def parsed(data: bytes, save_id: str | None = None) -> Marker:
    """The marker in these bytes, as far as they tell what they should. ``save_id``: known by the file's name."""
    given = asdict(Marker(save_id or "", "unknown", 0, 0, "", "", 0.0))
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    for key, value in fields.items() if isinstance(fields, dict) else ():
        default = given.get(key)
        if isinstance(default, tuple) and isinstance(value, list):
            given[key] = tuple(
                name for name in value if isinstance(name, str) and _is_name(name)
            )
        elif type(value) is type(default):
            given[key] = value
    last = given["last"] if _is_name(given["last"]) else ""
    return Marker(
        **{
            **given,
            "save_id": given["save_id"] if save_id is None else save_id,
            "last": last,
        }
    )


def _is_name(name: str) -> bool:
    """Markers are read back to remove what they name: only what is below the directory can be meant."""
    if unsafe_names([name]):
        return False
    return all(len(os.fsencode(part)) <= LONGEST for part in name.split("/"))


@contextmanager
def turn(outer: LocalStorage) -> Iterator[None]:
    """One after the other, the saves to directories of ``outer`` begin, are published, and are cleared away.

    Thus one of several that meet wins. Where nobody can be kept out (a file system without locks) or somebody
    clears up for long, their markers still keep saves apart, but all those that meet may lose. Turns do not nest:
    the end of an inner one (of ``Place.abort``) ends the outer one, too.
    """
    deadline = time.monotonic() + PATIENCE
    while not outer.lock() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield
    finally:
        outer.unlock()


class Heartbeat:
    """A sign of life now and then, from a thread of its own, until stopped. ``beat``: whether to go on."""

    def __init__(self, where: str, beat: Callable[[], bool]) -> None:
        self._stopped = threading.Event()
        work = functools.partial(_beat, self._stopped, where, beat)
        self._thread = threading.Thread(
            target=work, name="megackpt-heartbeat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        """Wait for the one that may be under way."""
        self._thread.join()


def _beat(stopped: threading.Event, where: str, beat: Callable[[], bool]) -> None:
    while not stopped.wait(HEARTBEAT):
        try:
            if not beat():
                return  # the save will find out by itself
        except (OSError, StorageError) as error:
            logger.warning(
                "no sign of life could be left for the save in %s: %s", where, error
            )


def touched(storage: LocalStorage, marker: str) -> bool:
    """A sign of life of a save in a directory; False if its marker is gone."""
    try:
        storage.touch(marker)
    except FileNotFoundError:
        return False
    return True
