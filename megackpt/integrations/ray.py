"""Ray Train: checkpoints that all workers write into the run's directory, and report to Ray."""

from __future__ import annotations

import os
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode

import megackpt
from megackpt.manager import Restored
from megackpt.state import ShardedStateDict

__all__ = ["CheckpointManager"]


class CheckpointManager(megackpt.CheckpointManager):
    """megackpt's manager, for a training function of Ray Train. All workers create and call it.

    A checkpoint is reported to Ray as soon as it is complete, by the call that commits it, on all
    workers. Ray removes the older ones (``ray.train.CheckpointConfig``).

    Args:
        root: a directory in the run's directory (None: the run's directory itself).
        options: of megackpt's manager, other than ``keep_*`` and ``local``. ``asynchronous`` is
            True by default.

    Raises:
        ValueError: ``keep_*`` or ``local`` is given, or the run is in an object store and
            ``root`` is not given.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        given = {name for name, value in options.items() if value is not None}
        if keep := sorted(name for name in given if name.startswith("keep_")):
            raise ValueError(
                f"{', '.join(keep)}: Ray removes the checkpoints of its run, and fails if others "
                "do: give ray.train.CheckpointConfig(num_to_keep=...) to its RunConfig"
            )
        if "local" in given:
            raise ValueError("local is not supported: Ray has no checkpoints in memory")
        if root is None:
            storage = ray.train.get_context().get_storage()
            root = storage.experiment_fs_path
            if storage.storage_filesystem.type_name != "local":
                raise ValueError(
                    f"the run is not in a directory, but at {root} of "
                    f"{storage.storage_filesystem}: give root, as a URL"
                )
        settings: dict[str, Any] = {"naming": "transformers", "asynchronous": True}
        super().__init__(root, **(settings | options))
        reported = ray.train.get_all_reported_checkpoints(
            CheckpointConsistencyMode.COMMITTED
        )
        self._reported = {known.checkpoint.path for known in reported}
        self._metrics: dict[int, dict[str, Any]] = {}
        self._is_announced = False
        self._is_urgent = False

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Like megackpt's manager. Also true, until the next save, if Ray soon takes a node away.

        Collective through Ray. Do not end the training then: Ray would take the run as finished.
        """
        is_due = super().should_save(step, last=last)
        if not self._is_announced and ray.train.get_preemption_info() is not None:
            self._is_announced = self._is_urgent = True
        return is_due or self._is_urgent

    def save(
        self,
        step: int,
        sharded_state_dict: ShardedStateDict | None = None,
        *,
        asynchronous: bool | None = None,
        metrics: Any = None,
        **options: Any,
    ) -> megackpt.AsyncRequest | None:
        """Like megackpt's manager. Rank 0's dict ``metrics`` is reported with the checkpoint.

        The save before a node is taken away is synchronous, unless ``asynchronous`` says otherwise.
        """
        if asynchronous is None and self._is_urgent:
            asynchronous = False
        failed = self.failed_saves
        request = super().save(
            step, sharded_state_dict, asynchronous=asynchronous, **options
        )
        if request is None and self.failed_saves > failed:
            return None
        self._is_urgent = False
        self._metrics[step] = metrics or {}
        if request is None:
            self._report(step)
        return request

    def poll(self) -> list[int]:
        return self._report(*super().poll())

    def finalize(self) -> list[int]:
        return self._report(*super().finalize())

    def restore(self, *args: Any, **options: Any) -> Restored | None:
        """Like megackpt's manager. A step that a killed worker could not report is reported."""
        found = super().restore(*args, **options)
        if found is not None and self.path(found.step) not in self._reported:
            newest = self.latest(own=True)
            if newest is not None and newest.step == found.step:
                self._report(found.step)
        return found

    def close(self, abort: bool = False) -> None:
        try:
            if not abort:
                self.finalize()
        except BaseException:
            abort = True  # this error counts
            raise
        finally:
            super().close(abort)

    def _report(self, *steps: int) -> list[int]:
        for step in steps:
            checkpoint = Checkpoint(self.path(step))
            # Ray removes a path that it knows twice while it is still in use.
            is_known = checkpoint.path in self._reported
            self._reported.add(checkpoint.path)
            ray.train.report(
                self._metrics.pop(step, {}),
                None if is_known else checkpoint,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
        return list(steps)
