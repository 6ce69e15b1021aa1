"""A second process group over the same ranks, for the thread that sends the copies."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megackpt.distributed import Group, GroupLike

_spare: WeakKeyDictionary[Any, list[GroupLike]] = WeakKeyDictionary()


def another_group(process_group: GroupLike, timeout: timedelta) -> GroupLike:
    """A group of the same ranks, for a thread that works at the same time. Collective.

    A ``Group`` is returned as it is. ``give_back`` keeps any new group for the next call.
    """
    if isinstance(process_group, Group):
        return process_group
    if not (dist.is_available() and dist.is_initialized()):
        return process_group
    over = dist.group.WORLD if process_group is None else process_group
    if spare := _spare.get(over):
        return spare.pop()
    ranks = dist.get_process_group_ranks(over)
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend="gloo", use_local_synchronization=True
    )
    return made


def give_back(made: GroupLike, process_group: GroupLike) -> None:
    """Keep what ``another_group`` has returned, for its next call. All ranks, in the same order.

    torch cannot make a group of the same name again after one was destroyed.
    """
    if made is process_group:
        return
    over = process_group or dist.group.WORLD
    if over is not None:
        _spare.setdefault(over, []).append(made)
