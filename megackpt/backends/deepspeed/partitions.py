"""The optimizer's files of ZeRO: each parameter's values, in the flat partitions of the ranks.

ZeRO-1 and 2 join the parameters of a group to one vector, pad it, and cut it into equal partitions,
one for each rank. ZeRO-3 cuts each parameter into equal parts, and joins a rank's parts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megackpt.backends.deepspeed.step_files import StepFiles
from megackpt.backends.deepspeed.model_states import (
    Run,
    Shapes,
    even_runs,
    located,
    rank_objects,
    read_model,
    renamed,
)
from megackpt.backends.torch_reader import Shard, read_contents
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box
from megackpt.planning.manifest import Location, TensorEntry, TensorMeta
from megackpt.storage import Storage

MASTER = "fp32"
_STATE = "optimizer_state_dict"
_NUMBER = "(0|[1-9][0-9]{0,5})"
_FLAT = {
    False: re.compile(rf"{_STATE}\.single_partition_of_fp32_groups\.{_NUMBER}"),
    True: re.compile(rf"{_STATE}\.fp32_flat_groups\.{_NUMBER}"),
}
_MOMENT = re.compile(
    rf"{_STATE}\.(?:base_optimizer_state|{_STATE})\.(?:state\.)?{_NUMBER}\.(.+)",
    re.DOTALL,
)


_ABSENT = Shard(
    TensorEntry("", TensorMeta((), "")), Box((), ()), Location("", 0, 0), True
)


@dataclass
class _Rank:
    """One rank's file.

    Attributes:
        groups: for each group the flat tensors, and tensors without axes, by the state's name.
        others: all other tensors.
        rest: all else of the optimizer's state.
    """

    where: str
    groups: dict[int, dict[str, Shard]]
    others: list[Shard]
    rest: Mapping[str, Any]


def read_zero(root: Storage, step: StepFiles) -> list[Shard]:
    """The tensors and objects of a step of ZeRO.

    Raises CorruptCheckpoint, naming file and parameter, if files do not fit one another.
    """
    model = read_model(root, step)
    ranks = len(step.optimizer)
    lacks_some = step.partitioned and ranks != len(step.model)
    if (model.groups and not ranks) or lacks_some:
        kind = "optim"
        if ranks > len(step.model):
            kind = "model"
        missing = (
            f"zero_pp_rank_{min(ranks, len(step.model))}_mp_rank_00_{kind}_states.pt"
        )
        raise CorruptCheckpoint(
            f"{root.location}/{step.folder}{missing} is missing: {ranks} ranks have files of the "
            f"optimizer, {len(step.model)} of the module"
        )
    found = model.shards
    if not ranks:
        return found
    held = [
        _read_rank(root, file, rank, step.partitioned)
        for rank, file in enumerate(step.optimizer)
    ]
    for rank in held:
        _check_rank(rank, model.groups, ranks)
        found += rank.others
    for number, group in enumerate(model.groups):
        runs = _runs(held, number, group, step.partitioned)
        for state, first in held[0].groups[number].items():
            parts = _parts(held, number, state)
            for name, shape in group.items():
                if not first.entry.meta.shape:
                    found.append(renamed(first, f"{state}.{name}"))
                    continue
                names = [name]
                if state == MASTER:
                    names = model.names_of(name)
                meta = TensorMeta(shape, first.entry.meta.dtype)
                for alias in names:
                    found += located(f"{state}.{alias}", meta, runs[name], parts)
    return found + rank_objects("optimizer_states", step.optimizer)


def _read_rank(root: Storage, file: str, rank: int, partitioned: bool) -> _Rank:
    shards, contents = read_contents(root, file)
    where = f"{root.location}/{file}"
    rest = contents.get(_STATE)
    if not isinstance(rest, dict):
        raise CorruptCheckpoint(f"{where} has no {_STATE}")
    found = _Rank(where, defaultdict(dict), [], rest)
    for shard in shards:
        key = shard.entry.key
        flat = _FLAT[partitioned].fullmatch(key)
        moment = _MOMENT.fullmatch(key)
        if shard.entry.is_common:
            continue
        if flat:
            number, state = flat[1], MASTER
        elif moment:
            number, state = moment[1], moment[2]
        else:
            found.others.append(renamed(shard, f"optimizer_states.{rank}.{key}"))
            continue
        group = found.groups[int(number)]
        if state in group:
            raise BackendError(
                f"{where}: the optimizer has a state named {state!r}, as the master weights"
            )
        group[state] = renamed(shard, key)
    return found


def _check_rank(rank: _Rank, groups: Sequence[Shapes], ranks: int) -> None:
    """Raise CorruptCheckpoint if the file does not fit the others, BackendError for experts."""
    if "ds_zero_partition_groups" in rank.rest:
        raise BackendError(
            f"{rank.where} has partitions of experts: convert the step with DeepSpeed's "
            "ds_to_universal.py, and open the result"
        )
    counts = rank.rest.get("partition_count")
    if not isinstance(counts, list):
        counts = [counts]
    for count in counts:
        if type(count) is not int or count != ranks:
            raise CorruptCheckpoint(
                f"{rank.where} is one of {str(count)[:20]} ranks, and {ranks} have files here"
            )
    if sorted(rank.groups) != list(range(len(groups))):
        raise CorruptCheckpoint(
            f"{rank.where} has {len(rank.groups)} groups of parameters, and the module's state "
            f"lists {len(groups)}"
        )
    mappings = rank.rest.get("param_slice_mappings")
    if isinstance(mappings, list):
        for mapping, shapes in zip(mappings, groups, strict=False):
            if unknown := [name for name in mapping if name not in shapes]:
                raise CorruptCheckpoint(
                    f"{rank.where} has {unknown[0]!r}, which is no parameter of the module's state"
                )
    paddings = rank.rest.get("group_paddings")
    for number, group in rank.groups.items():
        shape = group.get(MASTER, next(iter(group.values()))).entry.meta.shape
        known = {(), shape}
        if isinstance(paddings, list) and paddings[number : number + 1] and shape:
            known.add((shape[0] + paddings[number],))
        for state, shard in group.items():
            if (
                MASTER not in group
                or len(shape) != 1
                or shard.entry.meta.shape not in known
            ):
                raise CorruptCheckpoint(
                    f"{rank.where}: {state!r} of group {number} has the shape "
                    f"{shard.entry.meta.shape}, and the partition has {shape}"
                )


def _parts(held: Sequence[_Rank], number: int, state: str) -> list[Shard]:
    """A state of a group on all ranks. Raises CorruptCheckpoint if ranks differ in its kind."""
    found = [held[0].groups[number][state]]
    first = found[0].entry.meta
    for rank in held[1:]:
        part = rank.groups[number].get(state, _ABSENT)
        meta = part.entry.meta
        if meta.dtype != first.dtype or len(meta.shape) != len(first.shape):
            raise CorruptCheckpoint(
                f"{rank.where}: {state!r} of group {number} is {meta}, and {first} on rank 0"
            )
        found.append(part)
    return found


def _runs(
    held: Sequence[_Rank], number: int, group: Shapes, partitioned: bool
) -> dict[str, list[Run]]:
    """Where the elements of a group's parameters are in the partitions of the ranks.

    Raises CorruptCheckpoint if the sizes do not add up.
    """
    sizes = [rank.groups[number][MASTER].entry.meta.shape[0] for rank in held]
    numels = {name: math.prod(shape) for name, shape in group.items()}
    found: dict[str, list[Run]] = {}
    ranks = len(held)
    offset = 0
    if partitioned:
        for name, numel in numels.items():
            found[name] = even_runs(numel, offset, ranks)
            offset += -(-numel // ranks)
        for holder, size in zip(held, sizes, strict=True):
            if size != offset:
                raise CorruptCheckpoint(
                    f"{holder.where}: the partition of group {number}, {_named(group)}, has {size} "
                    f"elements, and should have {offset}"
                )
        return found
    padding = sum(sizes) - sum(numels.values())
    # DeepSpeed aligns a group to two elements a rank.
    if not 0 <= padding < 2 * ranks:
        raise CorruptCheckpoint(
            f"{held[0].where} and the files of the other ranks have {sum(sizes)} elements of group "
            f"{number}, {_named(group)}, which needs {sum(numels.values())}"
        )
    ends = list(accumulate(sizes))
    first = 0
    for name, numel in numels.items():
        found[name] = []
        at = first
        first += numel
        begin = first - numel
        while at < first:
            rank = bisect_right(ends, at)
            stop = min(first, ends[rank])
            offset = at - ends[rank] + sizes[rank]
            found[name].append(Run(rank, offset, at - begin, stop - begin))
            at = stop
    return found


def _named(group: Shapes) -> str:
    return join_truncated(list(map(repr, group)), 3, ", ")
