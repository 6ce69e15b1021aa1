"""What makes a prefix of a bucket a checkpoint: one record, put in one step, that names the save that counts.

    URL/megackpt.commit      the record; its appearance, or its replacement, is the commit
    URL/megackpt-<save id>/  all files of one save, an ordinary checkpoint by itself
    URL/.megackpt-saving     the lock of the save that goes on

The record holds size and digest of the save's ``megackpt.index``, which holds those of everything else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from megackpt.checkpoint.index import INDEX
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.storage import BucketStorage, Version, digest

RECORD = "megackpt.commit"
FORMAT = 1
_LIMIT = 1 << 20
_FOLDER = re.compile(
    r"megackpt-[0-9a-f]{32}"
)  # a uuid: folders of other people are called otherwise


def folder_of(save_id: str) -> str:
    """Where the files of a save are: under keys that no other save ever has."""
    return f"megackpt-{save_id}"


def folders_among(names: list[str]) -> list[str]:
    """Those that saves have made."""
    return [name for name in names if _FOLDER.fullmatch(name)]


@dataclass(frozen=True)
class Record:
    """``index``: size and digest. ``objects`` and ``nbytes`` are those of all files of the save, for people."""

    save_id: str
    time: float
    index: tuple[int, bytes]
    objects: int
    nbytes: int

    def encode(self) -> bytes:
        size, checksum = self.index
        told = {
            "format": FORMAT,
            "save_id": self.save_id,
            "folder": folder_of(self.save_id),
            "time": self.time,
            "index": {"size": size, "xxh3_128": checksum.hex()},
            "objects": self.objects,
            "bytes": self.nbytes,
        }
        return json.dumps(told, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Record:
        """From what stands in a bucket, of which nothing is believed."""
        try:
            told = json.loads(data)
            if type(told["format"]) is int and told["format"] > FORMAT:
                raise BackendError(
                    f"{where}: format {told['format']} is too new: this release reads up to {FORMAT}"
                )
            index = told["index"]["size"], bytes.fromhex(told["index"]["xxh3_128"])
            record = cls(
                told["save_id"],
                float(told["time"]),
                index,
                told["objects"],
                told["bytes"],
            )
            numbers = (index[0], record.objects, record.nbytes)
            if _FOLDER.fullmatch(folder_of(record.save_id)) and all(
                type(n) is int for n in numbers
            ):
                return record
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CorruptCheckpoint(
                f"{where} is damaged: it does not say which save is the checkpoint"
            ) from error
        raise CorruptCheckpoint(f"{where} is damaged: {record} names no save")


def read_record(outer: BucketStorage) -> tuple[Record | None, Version | None]:
    """The record under this URL, and its version; None where there is none."""
    try:
        data, version = outer.get_version(RECORD, _LIMIT)
    except FileNotFoundError:
        return None, None
    return Record.parse(data, outer.url(RECORD)), version


class Committed(BucketStorage):
    """The files of the save that a record names; called by the URL under which the record stands."""

    def __init__(self, url: str, record: Record) -> None:
        super().__init__(f"{url}/{folder_of(record.save_id)}")
        self._outer = url
        self.record = record

    def __reduce__(self) -> tuple[type[BucketStorage], tuple[str, Record]]:  # type: ignore[override]
        return type(self), (self._outer, self.record)

    @property
    def called(self) -> str:
        return self._outer

    def is_current(self) -> bool:
        found, _ = read_record(BucketStorage(self._outer))
        return found is not None and found.save_id == self.record.save_id

    def get(self, name: str, limit: int = 1 << 32) -> bytes:
        try:
            data = super().get(name, limit)
        except FileNotFoundError as error:
            if name != INDEX:
                raise
            raise CorruptCheckpoint(
                f"{self.url(INDEX)} is missing: {self._outer}/{RECORD} names it"
            ) from error
        if name == INDEX and (len(data), digest(data)) != self.record.index:
            raise CorruptCheckpoint(
                f"{self.url(INDEX)} is not the one that {self._outer}/{RECORD} names: it is damaged, or was "
                "written by somebody else"
            )
        return data
