"""Chains of weights: versions in one directory or bucket, each based on the version before.

A version is a checkpoint with ``version.json``. An anchor has all weights. Each other version has
what changed since the version with the number before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megackpt import limits
from megackpt.checkpoint import Directory, Opened, absolute, open_checkpoint
from megackpt.checkpoint.run_directory import RunDirectory
from megackpt.errors import CorruptCheckpoint, MismatchError, NotACheckpoint

VERSION_FILE = "version.json"
"""The place of a version in its chain, and the digests of its tensors."""
_FORMAT = 1
_PREFIX = "version_"


def path_of(url: Directory, version: int) -> str:
    """The path or URL of a version."""
    return f"{absolute(url)}/{_PREFIX}{version:06d}"


@dataclass(frozen=True)
class Base:
    """The version that a version is based on."""

    version: int
    save_id: str


@dataclass(frozen=True, eq=False)
class Version:
    """An open version.

    Attributes:
        number: of the version.
        base: None for an anchor.
        anchor: the number of its anchor.
        anchor_bytes, chain_bytes: the sizes of the anchor, and of all versions after the anchor up
            to this one.
        digests: key of a tensor -> its digest before and after. They are equal in the first
            version.
    """

    opened: Opened
    number: int
    base: Base | None
    anchor: int
    anchor_bytes: int
    chain_bytes: int
    digests: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, opened: Opened) -> Version:
        """The version in an open checkpoint.

        Raises NotACheckpoint for a checkpoint that is no version, CorruptCheckpoint for a damaged
        ``version.json``.
        """
        where = f"{opened.storage.called}/{VERSION_FILE}"
        try:
            data = opened.storage.get(VERSION_FILE, limits.VERSION_BYTES)
        except FileNotFoundError as error:
            raise NotACheckpoint(
                f"{opened.storage.called} is a checkpoint, and no version of weights: it has no "
                f"{VERSION_FILE}"
            ) from error
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, not {_FORMAT}")
            base = fields["base"]
            names = ("version", "anchor", "anchor_bytes", "chain_bytes")
            numbers = [fields[name] for name in names]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(f"{numbers} are not numbers and sizes")
            pairs = {
                str(key): (int(before, 16), int(after, 16))
                for key, (before, after) in fields["digests"].items()
            }
            if base is not None:
                base = Base(int(base["version"]), str(base["save_id"]))
            elif opened.backend.properties.is_delta:
                raise ValueError("it has no base")
        except (
            ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
        ) as error:  # fmt: skip
            raise CorruptCheckpoint(f"{where} is damaged: {error}") from error
        number, anchor, anchor_bytes, chain_bytes = numbers
        return cls(opened, number, base, anchor, anchor_bytes, chain_bytes, pairs)

    @property
    def save_id(self) -> str:
        return self.opened.manifest.save_id


def version_file(
    number: int,
    base: Version | None,
    is_anchor: bool,
    nbytes: int,
    digests: Mapping[str, tuple[int, int]],
) -> bytes:
    """The content of ``version.json`` for a version of ``nbytes`` bytes after ``base``."""
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "version": number,
        "base": None,
        "anchor": number,
        "anchor_bytes": nbytes,
        "chain_bytes": 0,
        "digests": {
            key: [f"{before:032x}", f"{after:032x}"]
            for key, (before, after) in digests.items()
        },
    }
    if base is not None and not is_anchor:
        fields["base"] = {"version": base.number, "save_id": base.save_id}
        fields["anchor"] = base.anchor
        fields["anchor_bytes"] = base.anchor_bytes
        fields["chain_bytes"] = base.chain_bytes + nbytes
    return json.dumps(fields).encode()


def open_version(url: Directory, version: int) -> Version:
    """The version of this number.

    Raises NotACheckpoint if it is absent, CorruptCheckpoint if it is damaged, or is another version
    by its own account.
    """
    found = Version.of(open_checkpoint(path_of(url, version)))
    if found.number != version:
        raise CorruptCheckpoint(
            f"{path_of(url, version)} holds version {found.number}: it was renamed"
        )
    return found


def versions(url: Directory) -> list[int]:
    """The numbers of the versions in a directory or bucket, ascending, complete or not."""
    try:
        run = RunDirectory(absolute(url))
    except FileNotFoundError:
        return []
    names = {f"{_PREFIX}{n:06d}": n for n in run.names_by_step()}
    return sorted(names[name] for name in run.entries.intersection(names))


def latest(url: Directory) -> Version | None:
    """The complete version with the highest number. None if there is none."""
    for number in reversed(versions(url)):
        try:
            return open_version(url, number)
        except NotACheckpoint:
            continue  # it is being saved, or its save died
    return None


def chain_of(version: Version) -> list[Version]:
    """The anchor of a version, and all versions after it up to this one.

    Raises:
        NotACheckpoint: a version on the way is missing. The message names both.
        MismatchError: a version is based on another save than the one that is there.
    """
    found = [version]
    url = version.opened.storage.called.rpartition("/")[0]
    while (base := found[-1].base) is not None:
        last = found[-1]
        where = path_of(url, base.version)
        if base.version >= last.number:
            raise CorruptCheckpoint(
                f"{last.opened.storage.called} is based on version {base.version}, a later one"
            )
        try:
            before = open_version(url, base.version)
        except NotACheckpoint as error:
            raise NotACheckpoint(
                f"version {version.number} cannot be read: {last.opened.storage.called} is based "
                f"on version {base.version}, and that is gone: {error}"
            ) from error
        if before.save_id != base.save_id:
            raise MismatchError(
                f"version {version.number} cannot be read: {last.opened.storage.called} is based "
                f"on save {base.save_id}, and {where} is save {before.save_id}, of another chain"
            )
        found.append(before)
    return found[::-1]
