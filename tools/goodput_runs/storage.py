"""The storage of the run: a small file system of its own, which can be full, over quota, slow or hung.

A loop device on a tmpfs, so that other work on the machine's disk is not felt. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

MIB = 1 << 20
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
SLOW_BYTES_PER_SECOND = 1_000_000
# Of linux/btrfs.h: the codes of the requests, and the commands of the first one.
QUOTA_CONTROL, QUOTA_LIMIT = 0xC0109428, 0x8030942B
QUOTA_ON, QUOTA_OFF, LIMIT_REFERENCED = 1, 2, 1


def mkfs() -> list[str]:
    """The command that makes the file system: btrfs, whose quotas bind root, or else ext4."""
    found = shutil.which("mkfs.btrfs")
    if found:
        # Mixed: data and metadata share blocks, so that both have space again when there is some.
        return [found, "-q", "-f", "--mixed"]
    return ["mkfs.ext4", "-q", "-F"]


def missing(kind: str) -> str | None:
    """Why this machine cannot cause the fault, or None."""
    if kind == "quota" and not shutil.which("mkfs.btrfs"):
        return "mkfs.btrfs is missing (package btrfs-progs)"
    if kind == "slow" and not THROTTLE.exists():
        return "the kernel has no blkio controller of cgroup v1"
    return None


class Storage:
    """A mounted file system: ``folder``/live. ``begin`` a fault of it, and ``end`` it."""

    def __init__(self, folder: Path, mib: int = 320) -> None:
        self.path = folder / "live"
        self._undo = ExitStack()
        memory = folder / "memory"
        for place in (memory, self.path):
            place.mkdir(parents=True)
        size = f"size={mib + 16}m"
        _run("mount", "-t", "tmpfs", "-o", size, "tmpfs", memory)
        self._undo.callback(_run, "umount", "--lazy", memory)
        image = memory / "disk.img"
        with image.open("wb") as file:
            file.truncate(mib * MIB)
        subprocess.run([*mkfs(), image], check=True, stdout=subprocess.DEVNULL)
        _run("mount", "-o", "loop", image, self.path)
        self._undo.callback(_run, "umount", "--lazy", self.path)
        found = subprocess.run(
            ["findmnt", "--noheadings", "--output", "SOURCE", self.path],
            check=True,
            capture_output=True,
            text=True,
        )
        device = os.stat(found.stdout.strip()).st_rdev
        self._number = f"{os.major(device)}:{os.minor(device)}"
        self._filler = self.path / "filler"
        self._ends: dict[str, Callable[[], None]] = {
            "full": self._free,
            "quota": self._lift_quota,
            "slow": self._release,
            "hang": self._thaw,
        }
        self._active: str | None = None

    def begin(self, kind: str) -> None:
        self._active = kind
        if kind == "full":
            self._fill()
        elif kind == "quota":
            self._control_quota(QUOTA_ON)
            limits = struct.pack("QQQQQQ", 0, LIMIT_REFERENCED, 4096, 0, 0, 0)
            self._request(QUOTA_LIMIT, limits)
        elif kind == "slow":
            THROTTLE.write_text(f"{self._number} {SLOW_BYTES_PER_SECOND}")
        elif kind == "hang":
            _run("fsfreeze", "--freeze", self.path)

    def end(self) -> None:
        """The storage is well again."""
        if self._active is not None:
            self._ends[self._active]()
            self._active = None

    def _fill(self) -> None:
        """Another program has taken the space, to the last block."""
        taken, piece = 0, 64 * MIB
        with self._filler.open("wb") as file:
            while piece >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), taken, piece)
                    taken += piece
                except OSError:  # ENOSPC is what this is for
                    piece //= 2

    def _free(self) -> None:
        self._filler.unlink()
        # btrfs gives blocks back when it commits, which it does twice a minute.
        _run("sync", "--file-system", self.path)

    def _lift_quota(self) -> None:
        # A new limit would itself be refused: its transaction exceeds the old one.
        self._control_quota(QUOTA_OFF)

    def _control_quota(self, command: int) -> None:
        self._request(QUOTA_CONTROL, struct.pack("QQ", command, 0))

    def _request(self, code: int, argument: bytes) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, code, bytearray(argument))
        finally:
            os.close(folder)

    def _release(self) -> None:
        THROTTLE.write_text(f"{self._number} 0")

    def _thaw(self) -> None:
        _run("fsfreeze", "--unfreeze", self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.end()
        finally:
            self._undo.close()


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True)
