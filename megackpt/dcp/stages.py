"""A writer's work as a function that the caller runs whenever it likes, between planning and publishing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megackpt.checkpoint import place_of
from megackpt.dcp.memory import Lasting, Resolved, copied
from megackpt.dcp.writing import Ticket, write_items
from megackpt.distributed import Attempt, attempt
from megackpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Mapping


class Work:
    """What one rank writes in one save, and how it went."""

    def __init__(
        self,
        ticket: Ticket,
        plan: SavePlan,
        planner: SavePlanner,
        transforms: Sequence[_StorageWriterTransforms],
    ) -> None:
        self._ticket = ticket
        self._plan = plan
        self._planner = planner
        self._transforms = transforms
        self._outcome: Attempt[list[WriteResult]] | None = (
            None if plan.items else Attempt([])
        )
        self.directory = ticket.directory

    def function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """See ``FileSystemWriter.get_save_function_and_args``."""
        if not self._plan.items:
            return None, None, []
        return self._write, self._preload, [self._ticket.rank, self._planner, self]

    def results(self) -> list[WriteResult]:
        if self._outcome is None:
            raise CheckpointingException(
                f"rank {self._ticket.rank} has not written yet: call the function of get_save_function_and_args, in "
                "this process, and finalize when it has returned"
            )
        return self._outcome.get()

    def written(self, source: SavePlanner | _OnHost) -> list[WriteResult]:
        """Write it now, as ``source`` resolves it."""
        root = place_of(self._ticket.directory, self._ticket.save_id)
        lasting = source if isinstance(source, _OnHost) else Lasting(source)
        return write_items(root, self._ticket, self._plan, lasting, self._transforms)

    def __reduce__(self) -> Any:
        raise CheckpointingException(
            "the second stage of a save runs in its own process, in any thread: for one in another process there "
            "is megackpt.save with async_sharded_save, or torch's async_save"
        )

    def _preload(self) -> _OnHost:
        return _OnHost(
            {
                item.index: copied(self._planner.resolve_data(item))
                for item in self._plan.items
            }
        )

    @staticmethod
    def _write(_rank: int, source: SavePlanner | _OnHost, work: Work) -> None:
        work._outcome = attempt(lambda: work.written(source))


class _OnHost:
    """A planner, as far as one is asked while writing, of what was copied."""

    def __init__(self, data: Mapping[MetadataIndex, Resolved]) -> None:
        self._data = data

    def resolve_data(self, item: WriteItem) -> Resolved:
        return self._data[item.index]
