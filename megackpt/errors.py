"""All exceptions of megackpt.

CheckpointingException              the root; the name that Megatron-Core uses
├── ShardingError                   a wrong declaration (a mistake of the caller)
│   ├── CoverageError               the shards of all ranks do not tile a tensor exactly
│   └── ReplicaMismatch             ranks hold different values of the same shard
├── NonfiniteValues                 the strategy refuses NaN and infinite values
├── MismatchError                   requested keys, shapes or dtypes are not the stored ones
├── NotACheckpoint                  there is no (complete) checkpoint at this path
├── CheckpointExists                a complete checkpoint exists and may not be replaced
├── SaveInProgress                  another save to the same directory committed first
├── CorruptCheckpoint               damaged, truncated, contradictory or hostile files
│   ├── UntrustedClass              a pickle names a class that is not trusted
│   ├── RefusedObject               an undamaged pickle that is not safe to load
│   └── CheckpointReplaced          the checkpoint was overwritten while it was being read
├── StorageError                    the storage failed (full, unwritable, input/output error)
├── BackendError                    unknown format, missing package, or unsupported content
└── RankFailure                     other ranks failed; has the error of each of them
    └── RankLost                    other ranks did not answer in time, or ended
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence


class CheckpointingException(Exception):
    """Root of all errors of this package."""


class ShardingError(CheckpointingException):
    """A ShardedTensor, ShardedObject or factory is inconsistent or cannot be stored."""


class CoverageError(ShardingError):
    """The main replicas of all ranks leave holes, overlap, or disagree. Lists every problem."""


class ReplicaMismatch(ShardingError):
    """An audit has found ranks that hold different values of the same shard; see ``Strategy``."""


class NonfiniteValues(CheckpointingException):
    """Tensors to be saved hold NaN or infinite values; see ``Strategy.check_values``."""


class MismatchError(CheckpointingException):
    """Requested keys, global shapes or dtypes differ from the stored ones."""


class NotACheckpoint(CheckpointingException):
    """The directory is missing, empty, incomplete or of no known format."""


class CheckpointExists(CheckpointingException):
    """The directory has a complete checkpoint, and the save was called with ``overwrite=False``."""


class SaveInProgress(CheckpointingException):
    """Another save to the same directory has committed first, or is at work on it."""


class CorruptCheckpoint(CheckpointingException):
    """The files of a checkpoint are damaged, truncated, contradictory or hostile."""


class UntrustedClass(CorruptCheckpoint, pickle.UnpicklingError):
    """A pickle names a class that is not trusted. No code of the pickle was run."""


class RefusedObject(CorruptCheckpoint):
    """The pickle of an object is undamaged, but too deep, too costly, or uses unsupported calls.

    If you trust its author, read it by ``torch.load(..., weights_only=False)``.
    """


class CheckpointReplaced(CorruptCheckpoint):
    """Another save replaced the checkpoint while it was being read. A new attempt will succeed."""


class StorageError(CheckpointingException):
    """The storage failed: no space, no permission, an input/output error."""


class BackendError(CheckpointingException):
    """The format is unknown, its package is missing, or it does not support this content."""


class RankFailure(CheckpointingException):
    """One or more ranks failed. Raised with the same text on every rank.

    ``failures`` maps each failed rank to its error (or the formatted traceback).
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = dict(failures or {})

    def __reduce__(self) -> tuple[type[RankFailure], tuple[str, dict[int, str]]]:
        return type(self), (str(self), self.failures)


class RankLost(RankFailure):
    """Ranks did not answer in time, or ended. They may still be writing to the storage."""


def join_truncated(
    items: Sequence[object],
    limit: int = 20,
    separator: str = "; ",
    others: str = "more",
) -> str:
    """Join the first ``limit`` items, and append the number of the remaining items."""
    texts = [str(item) for item in items[:limit]]
    if len(items) > limit:
        texts.append(f"and {len(items) - limit} {others}")
    return separator.join(texts)


def name_ranks(ranks: Iterable[int], limit: int = sys.maxsize) -> str:
    """``rank 3``, or ``ranks 0-3, 7`` for many: at most ``limit`` spans."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = []
    for first, last in spans:
        separator = ", " if last == first + 1 else "-"
        texts.append(str(first) if first == last else f"{first}{separator}{last}")
    plural = "s" if len(spans) > 1 or spans[0][0] != spans[0][1] else ""
    return f"rank{plural} {join_truncated(texts, limit, ', ')}"
