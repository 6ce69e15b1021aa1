"""Every exception that megackpt raises on purpose, and how their texts tell of many things.

CheckpointingException              the root; the name that users of Megatron-Core know
├── ShardingError                   the declaration is wrong (a caller's mistake)
│   └── CoverageError               the shards of all ranks do not tile a tensor exactly
├── MismatchError                   keys, shapes or dtypes asked for differ from the stored ones
├── NotACheckpoint                  there is nothing (complete) to read at this place
├── CheckpointExists                a complete checkpoint is there and may not be replaced
├── SaveInProgress                  another live job is saving to the same directory
├── CorruptCheckpoint               the disk is wrong: damaged, truncated, lying or hostile files
│   ├── UntrustedClass              a pickle names a class that is not trusted (also an UnpicklingError)
│   ├── RefusedObject               a pickle is whole, and holds what no trust makes safe to make of it
│   └── CheckpointReplaced          the directory was overwritten while it was being read
├── StorageError                    the disk said no (full, unwritable, input/output error)
├── BackendError                    unknown format or version, missing package, or a format that cannot hold this
└── RankFailure                     other ranks failed; rank -> its story
    └── RankLost                    other ranks did not answer in time, or are gone
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence


class CheckpointingException(Exception):
    """Root of all errors of this package."""


class ShardingError(CheckpointingException):
    """A ShardedTensor, ShardedObject or factory contradicts itself or cannot be stored."""


class CoverageError(ShardingError):
    """The main replicas of all ranks leave holes, overlap, or disagree; the message lists every problem."""


class MismatchError(CheckpointingException):
    """What is asked for differs from what is stored: keys, global shapes or dtypes."""


class NotACheckpoint(CheckpointingException):
    """The directory is missing, empty, incomplete or of no known format."""


class CheckpointExists(CheckpointingException):
    """A complete checkpoint stands here and ``overwrite=False`` was asked for."""


class SaveInProgress(CheckpointingException):
    """Another live job is saving to the same directory."""


class CorruptCheckpoint(CheckpointingException):
    """The files of a checkpoint are damaged, truncated, contradict each other, or try to do harm."""


class UntrustedClass(CorruptCheckpoint, pickle.UnpicklingError):
    """A pickle asks for a class that nobody trusted. Nothing of it was run."""


class RefusedObject(CorruptCheckpoint):
    """An object's pickle is as it was written, and holds what is not made: too deep, too much work, or odd calls.

    Nothing of the files is damaged. Whoever trusts the author reads it by ``torch.load(..., weights_only=False)``.
    """


class CheckpointReplaced(CorruptCheckpoint):
    """The checkpoint was replaced by another save while it was being read; reading again will succeed."""


class StorageError(CheckpointingException):
    """The storage refused: no space, no permission, an input/output error."""


class BackendError(CheckpointingException):
    """The format is unknown, its package is missing, or it cannot hold what is asked of it."""


class RankFailure(CheckpointingException):
    """One or more ranks failed; raised with the same text on every rank.

    ``failures`` maps each failing rank to its story (for a failed step: the formatted traceback).
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = dict(failures or {})

    def __reduce__(self) -> tuple[type[RankFailure], tuple[str, dict[int, str]]]:
        return type(self), (str(self), self.failures)


class RankLost(RankFailure):
    """Ranks did not answer in time, or are gone. What they still do to the disk, nobody knows."""


def some(
    items: Sequence[object], shown: int = 20, between: str = "; ", others: str = "more"
) -> str:
    """The first of these in words, and how many others there are."""
    told = [str(item) for item in items[:shown]]
    return between.join(
        [*told, f"and {len(items) - shown} {others}"] if len(items) > shown else told
    )
