"""The record of an object store, ``URL/megackpt.commit``: it names the save that is the checkpoint.

It holds size and digest of the save's ``megackpt.index``, which holds sizes and digests of all
other files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from megackpt.checkpoint.index import INDEX
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.storage import BucketStorage, Version, digest

RECORD = "megackpt.commit"
FORMAT = 1
LARGEST_RECORD = 1 << 20
_FOLDER = re.compile(r"megackpt-[0-9a-f]{32}")
"""A uuid: folders of other programs are named otherwise."""


def save_folder(save_id: str) -> str:
    """The folder of a save."""
    return f"megackpt-{save_id}"


def save_folders(names: list[str]) -> list[str]:
    """The folders of saves among these names."""
    return [name for name in names if _FOLDER.fullmatch(name)]


@dataclass(frozen=True)
class Record:
    """The content of the record. ``index``: size and digest of the save's ``megackpt.index``.

    ``objects`` and ``nbytes`` count all files of the save, for people who read it.
    """

    save_id: str
    time: float
    index: tuple[int, bytes]
    objects: int
    nbytes: int

    def encode(self) -> bytes:
        size, checksum = self.index
        fields = {
            "format": FORMAT,
            "save_id": self.save_id,
            "folder": save_folder(self.save_id),
            "time": self.time,
            "index": {"size": size, "xxh3_128": checksum.hex()},
            "objects": self.objects,
            "bytes": self.nbytes,
        }
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Record | None:
        """The record in untrusted bytes; None for the record of a removal."""
        try:
            fields = json.loads(data)
            if type(fields["format"]) is int and fields["format"] > FORMAT:
                raise BackendError(
                    f"{where}: format {fields['format']} is too new: this release reads "
                    f"up to {FORMAT}"
                )
            if fields.get("removed") is True:
                return None
            index = fields["index"]["size"], bytes.fromhex(fields["index"]["xxh3_128"])
            record = cls(
                fields["save_id"],
                float(fields["time"]),
                index,
                fields["objects"],
                fields["bytes"],
            )
            numbers = (index[0], record.objects, record.nbytes)
            named = _FOLDER.fullmatch(save_folder(record.save_id))
            if named and all(type(number) is int for number in numbers):
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
    """The record under this URL and its version; None without a checkpoint."""
    try:
        data, version = outer.get_version(RECORD, LARGEST_RECORD)
    except FileNotFoundError:
        return None, None
    return Record.parse(data, outer.url(RECORD)), version


class Committed(BucketStorage):
    """The files of the save that a record names, known by the URL of the record."""

    def __init__(
        self, url: str, record: Record, moved: Callable[[], object] = int
    ) -> None:
        super().__init__(f"{url}/{save_folder(record.save_id)}", moved)
        self._outer = url
        self.record = record

    def __reduce__(  # type: ignore[override]
        self,
    ) -> tuple[type[BucketStorage], tuple[str, Record]]:
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
                f"{self.url(INDEX)} is not the one that {self._outer}/{RECORD} names: it "
                f"is damaged, or was written by another program"
            )
        return data
