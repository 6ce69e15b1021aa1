"""WeightPublisher: a trainer publishes versions of its weights, from the shards of its ranks."""

from __future__ import annotations

import operator
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch

from megackpt.adapters.dtensor import sharded
from megackpt.adapters.megatron import from_megatron
from megackpt.async_save import AsyncCallsQueue
from megackpt.checkpoint import absolute
from megackpt.deltas.chain import Version, latest, open_version, path_of, versions
from megackpt.deltas.hf_xor_writer import HfXor
from megackpt.deltas.snapshot import AnchorWriter, DeltaWriter, Snapshot
from megackpt.distributed import DEFAULT_TIMEOUT, GroupLike, group_over
from megackpt.errors import CheckpointExists, CheckpointReplaced, ShardingError
from megackpt.huggingface.states import as_huggingface
from megackpt.saver import save
from megackpt.state import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    extract,
)
from megackpt.state.tensor_subclasses import InnerTensor
from megackpt.storage import Executor

if TYPE_CHECKING:
    from megackpt.huggingface import Table


class WeightPublisher:
    """Publishes versions of weights. Each version stores what changed since the version before.

    A version is a checkpoint in ``url``: ``version_000000``, ``version_000001`` and so on. It is
    complete and durable, or invisible. An anchor, which has all weights, is an ordinary
    torch_dist checkpoint. Each rank keeps the weights that it writes in host memory, in the
    published dtype. No tensor is gathered. Objects and the common state of a state are not
    published.

    All methods are collective. Used as a context manager, it finalizes the last version at the end.

    Args:
        url: the directory or bucket of the versions. A publisher goes on with the versions that
            are there: it reads the weights of the last one.
        table: publish under the names and shapes of Hugging Face, by this table (see
            ``megackpt.huggingface``). None: under the keys of the state.
        dtype: of the published floating tensors, such as torch.bfloat16. None: as they are.
        format: "hf-xor" = write each version a second time, for engines that read
            ``weight_v000001`` and so on: slime, miles, SGLang, ModelExpress. Number the first
            version 1. Each rank then holds its share of the weights once more.
        anchor_every: a version is an anchor if the last anchor is this number of versions old.
        max_chain_share: a version is an anchor if the versions after the last anchor take more than
            this share of its bytes.
        process_group: the ranks that publish (None: the default group, or this process alone).
        timeout: how long any rank waits in one collective step, or in one call to its storage.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        table: Table | None = None,
        dtype: torch.dtype | None = None,
        format: Literal["delta", "hf-xor"] = "delta",
        anchor_every: int = 50,
        max_chain_share: float = 0.5,
        process_group: GroupLike = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        if anchor_every < 1 or max_chain_share < 0:
            raise ValueError(
                f"anchor_every is 1 or more, and max_chain_share 0 or more, not {anchor_every} "
                f"and {max_chain_share}"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is None or a floating dtype, not {dtype}")
        if format not in ("delta", "hf-xor"):
            raise ValueError(f"format is 'delta' or 'hf-xor', not {format!r}")
        self.url = absolute(url)
        self._hf_xor = None
        if format == "hf-xor":
            self._hf_xor = HfXor(self.url, process_group, timeout)
        self._table = table
        self._dtype = dtype
        self._anchor_every = anchor_every
        self._max_chain_share = max_chain_share
        self._process_group = process_group
        self._timeout = timeout
        self._snapshot = Snapshot()
        self._queue = AsyncCallsQueue(
            process_group=process_group, timeout=timeout, staging_bytes=0
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of host memory for the weights of the last version, on this rank."""
        return self._snapshot.nbytes

    def publish(
        self, version: int, state: ShardedStateDict, asynchronous: bool = False
    ) -> None:
        """Publish the weights of a state as a version.

        Args:
            version: the number of the last version plus 1. The first version has any number.
            state: what ``megackpt.save`` takes, or a state dict of tensors and DTensors, which
                ``megackpt.sharded`` declares. Its tensors have the same names and shapes in all
                versions.
            asynchronous: return when the tensors may be changed. Threads write meanwhile. The next
                ``publish``, or ``wait``, makes the version visible, or raises its error.

        Raises:
            CheckpointExists: this version, or a later one, is there.
            ShardingError: versions would be missing before this one.
            MismatchError: the tensors are not those of the last version.
            CorruptCheckpoint: the last version is not what this publisher has published.
            Exception: see ``megackpt.save``.
        """
        self.wait()
        version = operator.index(version)
        base, is_anchor, is_held = self._turn(version)
        snapshot = self._snapshot
        if not (is_held and snapshot.is_committed):
            snapshot.forget()
        snapshot.is_committed = False
        if base is not None and snapshot.base is None:
            snapshot.base = partial(_open_base, self.url, *base)
        kind = AnchorWriter if is_anchor else DeltaWriter
        request = save(
            {"weights": self._weights(state)},
            path_of(self.url, version),
            kind(snapshot, version),
            async_sharded_save=asynchronous,
            overwrite=False,
            process_group=self._process_group,
            timeout=self._timeout,
        )
        if request is None:
            self._conclude(version)
            return
        request.add_finalize_fn(partial(self._conclude, version))
        self._queue.schedule_async_request(request)

    def _conclude(self, version: int) -> None:
        """The version is committed."""
        self._snapshot.commit()
        if self._hf_xor is not None:
            self._hf_xor.write(version)

    def wait(self) -> None:
        """Wait for the version that is being written, and make it visible."""
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        """``wait``, and end the threads that write."""
        self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.close(abort=kind is not None)

    def _turn(self, version: int) -> tuple[tuple[int, str] | None, bool, bool]:
        """By rank 0, which looks at the versions that are there: the number and save id of the
        base, whether the version is an anchor, and whether the snapshots are of the base.
        """
        self._snapshot.base = None

        def decide() -> tuple[tuple[int, str] | None, bool, bool]:
            if version < 0:
                raise ShardingError(
                    f"a version is a number of 0 or more, not {version}"
                )
            with closing(Executor(self._timeout)) as executor:
                last = executor.call(f"opening {self.url}", latest, self.url)
                present = executor.call(f"listing {self.url}", versions, self.url)
            if last is None:
                return None, True, False
            if version <= last.number:
                raise CheckpointExists(
                    f"{self.url} has version {last.number}: the next one is {last.number + 1}, "
                    f"not {version}. Does another trainer publish there?"
                )
            if version > last.number + 1:
                raise ShardingError(
                    f"the next version in {self.url} is {last.number + 1}, not {version}: "
                    "number versions without gaps"
                )
            self._snapshot.base = lambda: last
            held = self._snapshot.save_id == last.save_id
            is_anchor = version - last.anchor >= self._anchor_every
            # Nobody can read a chain of which a version was removed.
            is_anchor |= any(n not in present for n in range(last.anchor, version))
            is_anchor |= last.chain_bytes > self._max_chain_share * last.anchor_bytes
            return (last.number, last.save_id), is_anchor, held

        with group_over(
            self._process_group, self._timeout, f"publish {self.url}"
        ) as group:
            return group.broadcast("publish", decide)

    def _weights(self, state: ShardedStateDict) -> ShardedTensorFactory:
        """The tensors to publish. ``save`` raises errors of their declarations on all ranks."""

        def build(*_: object) -> list[ShardedTensor | LocalNonpersistentObject]:
            declared = sharded(state)
            if self._table is not None:
                declared = as_huggingface(declared, self._table)
            shards = extract(declared, from_megatron).shards
            tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
            # A list that holds nothing would stay in the common state of this rank alone.
            nothing = LocalNonpersistentObject(None)
            return [nothing, *map(self._converted, tensors)]

        return ShardedTensorFactory("weights", None, build, build)

    def _converted(self, shard: ShardedTensor) -> ShardedTensor:
        dtype = self._dtype
        is_kept = isinstance(shard, InnerTensor) or dtype in (None, shard.dtype)
        if is_kept or not shard.dtype.is_floating_point:
            return shard
        values = {f.name: getattr(shard, f.name) for f in fields(ShardedTensor)}
        return _Converted(**{**values, "dtype": dtype}, declared=shard)


@dataclass
class _Converted(ShardedTensor):
    """A tensor that a save converts to ``dtype``, row by row."""

    declared: ShardedTensor = field(kw_only=True, repr=False)

    def validate_metadata_integrity(self) -> None:
        self.declared.validate_metadata_integrity()


def _open_base(url: str, version: int, save_id: str) -> Version:
    """The version that rank 0 has opened."""
    found = open_version(url, version)
    if found.save_id != save_id:
        raise CheckpointReplaced(
            f"{path_of(url, version)} was save {save_id} on rank 0, and is {found.save_id} here: "
            "is the directory shared between all hosts?"
        )
    return found
