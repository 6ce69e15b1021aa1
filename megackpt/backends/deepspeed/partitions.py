"""The files of ZeRO: the module's state, and the values of parameters in flat partitions.

ZeRO-1 and 2 join the parameters of a group to one vector, pad it, and cut it into equal partitions,
one for each rank. ZeRO-3 cuts each parameter into equal parts, and joins a rank's parts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

from megackpt.backends.deepspeed.step_files import ADVICE, StepFiles
from megackpt.backends.torch_reader import Shard, read_contents
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    OBJECT,
    Location,
    TensorEntry,
    TensorMeta,
    size_problem,
)
from megackpt.storage import Storage

MASTER = "fp32"
MODULE = "module."
_FROZEN = "frozen_param_fragments."
_STATE = "optimizer_state_dict"
_NUMBER = "([0-9]{1,6})"
_FLAT = {
    False: re.compile(rf"{_STATE}\.single_partition_of_fp32_groups\.{_NUMBER}"),
    True: re.compile(rf"{_STATE}\.fp32_flat_groups\.{_NUMBER}"),
}
"""By ``StepFiles.partitioned``: the names of the master weights."""
_MOMENT = re.compile(
    rf"{_STATE}\.(?:base_optimizer_state|{_STATE})\.(?:state\.)?{_NUMBER}\.(.+)",
    re.DOTALL,
)

Shapes = Mapping[str, tuple[int, ...]]
"""The parameters of a group, by name, in the order of the flat partitions."""
Partitions = Mapping[int, dict[str, Shard]]
"""For each group of one rank the flat tensors, and tensors without axes, by the state's name."""


class ModelStates(NamedTuple):
    """What the files of the module's state hold.

    Attributes:
        shards: tensors and objects.
        groups: the parameters of each group, whose values are elsewhere.
        tied: the name of a parameter to all names of tied parameters whose values it has.
    """

    shards: list[Shard]
    groups: list[Shapes]
    tied: Mapping[str, list[str]]


class _Run(NamedTuple):
    """Elements [start, stop) of a parameter, which begin at ``offset`` in a rank's partition."""

    rank: int
    offset: int
    start: int
    stop: int


def rank_objects(key: str, files: Sequence[str]) -> list[Shard]:
    """All but the tensors of each rank's file, as objects of one grid."""
    entry = TensorEntry(key, TensorMeta((len(files),), OBJECT))
    return [
        Shard(entry, Box((rank,), (1,)), Location(file, 0, 0), False)
        for rank, file in enumerate(files)
    ]


def renamed(shard: Shard, key: str) -> Shard:
    """Raises BackendError if its bytes are not in C order: a view is read by its first name."""
    if not shard.has_bytes:
        raise BackendError(
            f"{shard.place.file}: {shard.entry.key!r} is not in C order, and DeepSpeed writes it so"
        )
    return shard._replace(entry=shard.entry._replace(key=key))


def parameter_shapes(where: str, rest: Mapping[str, Any]) -> list[Shapes]:
    """The parameters by group, and at the end the frozen parameters.

    Raises CorruptCheckpoint for impossible ones.
    """
    groups = rest.get("param_shapes") or []
    if not isinstance(groups, list):
        raise CorruptCheckpoint(f"{where}: param_shapes is not a list")
    groups = [*groups, rest.get("frozen_param_shapes") or {}]
    seen = set()
    for group in groups:
        if not isinstance(group, dict):
            raise CorruptCheckpoint(
                f"{where}: param_shapes has a group that is no dict"
            )
        for name, shape in group.items():
            is_shape = isinstance(shape, tuple) and type(name) is str
            is_shape = is_shape and all(type(n) is int and n >= 0 for n in shape)
            if not is_shape or name in seen or size_problem(shape, "float64"):
                raise CorruptCheckpoint(
                    f"{where} lists the parameter {name!r} twice, or with an impossible shape: "
                    f"{str(shape)[:200]}"
                )
            seen.add(name)
    return groups


def read_model(root: Storage, step: StepFiles) -> ModelStates:
    """The files of the module's state, without the parameters whose values are elsewhere.

    Raises CorruptCheckpoint if the lists of parameters of ranks differ.
    """
    model = ModelStates([], [], {})
    fragments: dict[str, list[Shard]] = defaultdict(list)
    frozen: Shapes = {}
    for rank, file in enumerate(step.model):
        where = f"{root.location}/{file}"
        found, rest = read_contents(root, file)
        groups = parameter_shapes(where, rest)
        if not rank:
            frozen = groups[-1]
            model = ModelStates([], groups[:-1], _tied(where, rest))
        _compare(where, groups, (*model.groups, frozen))
        shapes = {name: shape for group in groups for name, shape in group.items()}
        for name, aliases in model.tied.items():
            shapes |= dict.fromkeys(aliases, shapes.get(name, ()))
        for shard in found:
            key = shard.entry.key
            name = key.removeprefix(MODULE)
            if key.startswith(_FROZEN):
                # ZeRO-2 stores the whole tensor, and the same in the module.
                if step.partitioned:
                    name = key.removeprefix(_FROZEN)
                    fragments[name].append(renamed(shard, MODULE + name))
            elif key != name and step.partitioned:
                # ZeRO-3 stores an empty tensor in place of a parameter, and equal buffers.
                shape = shard.entry.meta.shape
                if not rank and shapes.get(name, shape) == shape:
                    model.shards.append(shard)
            elif not rank:
                model.shards.append(shard)
            elif not shard.entry.meta.is_object:
                model.shards.append(renamed(shard, f"model_states.{rank}.{key}"))
    if step.partitioned:
        model.shards.extend(rank_objects("model_states", step.model))
        for name, shape in frozen.items():
            runs, size = _even_runs(shape, 0, len(step.model))
            parts = fragments[name]
            metas = [part.entry.meta for part in parts]
            known = metas and metas[0]._replace(shape=(size,))
            if metas != [known] * len(step.model):
                raise CorruptCheckpoint(
                    f"{root.location}: the frozen parameter {name!r} of shape {shape} needs a part "
                    f"of {size} elements in each of {step.model[0]} and the files of other ranks"
                )
            for alias in (name, *model.tied.get(name, ())):
                model.shards.extend(_located(MODULE + alias, shape, runs, parts))
    return model


def _tied(where: str, rest: Mapping[str, Any]) -> dict[str, list[str]]:
    """The name of a parameter to all names of tied parameters."""
    aliases = rest.get("shared_params") or {}
    if not isinstance(aliases, dict) or {type(v) for v in aliases.values()} - {str}:
        raise CorruptCheckpoint(f"{where}: shared_params is not a dict of names")
    found = defaultdict(list)
    for alias, name in aliases.items():
        found[name].append(alias)
    return found


def _compare(where: str, groups: Sequence[Shapes], first: Sequence[Shapes]) -> None:
    """Raise CorruptCheckpoint if a rank's parameters or their order differ from rank 0's."""
    found = []
    for listed in (groups, first):
        numbered = enumerate(listed)
        found.append([(n, *item) for n, group in numbered for item in group.items()])
    for mine, other in zip_longest(*found):
        if mine != other:
            raise CorruptCheckpoint(
                f"{where} lists the parameter {mine}, and rank 0 lists {other}"
            )


def read_zero(root: Storage, step: StepFiles) -> list[Shard]:
    """The tensors and objects of a step of ZeRO.

    Raises CorruptCheckpoint, naming file and parameter, if files do not fit one another.
    """
    model = read_model(root, step)
    found = model.shards
    if model.groups and not step.optimizer:
        raise CorruptCheckpoint(
            f"{root.location}: {step.model[0]} is there, and its zero_pp_rank_0_mp_rank_00_optim_"
            "states.pt is missing"
        )
    ranks: list[Partitions] = []
    for rank in range(len(step.optimizer)):
        partitions, others = _read_rank(root, step, rank, model.groups)
        ranks.append(partitions)
        found += others
    for number, group in enumerate(model.groups):
        held = [partitions[number] for partitions in ranks]
        for file, states in zip(step.optimizer, held, strict=True):
            if _kinds(states) != _kinds(held[0]):
                raise CorruptCheckpoint(
                    f"{root.location}/{file}: group {number} has {_kinds(states)}, and on rank 0 "
                    f"{_kinds(held[0])}"
                )
        where = f"{root.location}/{step.optimizer[0]}, group {number}"
        runs = _runs(where, held, group, step.partitioned)
        for state, first in held[0].items():
            parts = [states[state] for states in held]
            for name, shape in group.items():
                if not first.entry.meta.shape:
                    found.append(renamed(first, f"{state}.{name}"))
                    continue
                names = [name]
                if state == MASTER:
                    names += model.tied.get(name, [])
                for alias in names:
                    found += _located(f"{state}.{alias}", shape, runs[name], parts)
    if step.optimizer:
        found += rank_objects("optimizer_states", step.optimizer)
    return found


def _kinds(states: Mapping[str, Shard]) -> dict[str, tuple[str, int]]:
    """State to its dtype and number of axes."""
    metas = {state: shard.entry.meta for state, shard in states.items()}
    return {state: (meta.dtype, len(meta.shape)) for state, meta in metas.items()}


def _read_rank(
    root: Storage, step: StepFiles, rank: int, groups: Sequence[Shapes]
) -> tuple[Partitions, list[Shard]]:
    """The partitions of a rank, and all other tensors in its file.

    Raises CorruptCheckpoint if the file is of other ranks or parameters.
    """
    file = step.optimizer[rank]
    where = f"{root.location}/{file}"
    shards, contents = read_contents(root, file)
    rest = contents.get(_STATE)
    if not isinstance(rest, dict):
        raise CorruptCheckpoint(f"{where} has no {_STATE}")
    if "ds_zero_partition_groups" in rest:
        raise BackendError(f"{where} has partitions of experts: {ADVICE}")
    counts = rest.get("partition_count")
    if not isinstance(counts, list):
        counts = [counts]
    if any(type(n) is not int or n != len(step.optimizer) for n in counts):
        raise CorruptCheckpoint(
            f"{where} is one of {str(counts)[:99]} ranks, and {len(step.optimizer)} have files here"
        )
    found: Partitions = {number: {} for number in range(len(groups))}
    others = []
    for shard in shards:
        key = shard.entry.key
        match = _FLAT[step.partitioned].fullmatch(key) or _MOMENT.fullmatch(key)
        if match:
            state = MASTER
            if match.re is _MOMENT:
                state = match[2]
            states = found.get(int(match[1]))
            if states is None or state in states:
                raise CorruptCheckpoint(
                    f"{where} has {key!r}, and the module's state lists {len(groups)} groups"
                )
            states[state] = renamed(shard, key)
        elif not shard.entry.is_common:
            others.append(renamed(shard, f"optimizer_states.{rank}.{key}"))
    _check_rank(where, rest, found, groups)
    return found, others


def _check_rank(
    where: str, rest: Mapping[str, Any], found: Partitions, groups: Sequence[Shapes]
) -> None:
    """Raise CorruptCheckpoint if a partition has the wrong size, or other parameters."""
    mappings = rest.get("param_slice_mappings")
    paddings = rest.get("group_paddings")
    for number, states in found.items():
        shape: tuple[int, ...] = ()
        if MASTER in states:
            shape = states[MASTER].entry.meta.shape
        sizes = {(), shape}
        # The optimizer's state is stored with the padding of the partition.
        padding = _at(paddings, number)
        if type(padding) is int and padding > 0 and shape:
            sizes.add((shape[0] + padding,))
        shapes = {state: shard.entry.meta.shape for state, shard in states.items()}
        if len(shape) != 1 or not sizes.issuperset(shapes.values()):
            raise CorruptCheckpoint(
                f"{where}: the partition of group {number} has the shapes {shapes}, and its master "
                f"weights have {shape}"
            )
        mapping = _at(mappings, number)
        unknown = isinstance(mapping, dict) and mapping.keys() - groups[number].keys()
        if unknown:
            raise CorruptCheckpoint(
                f"{where} has the parameter {min(map(str, unknown))!r}, which the module's state "
                "lacks"
            )


def _at(values: Any, number: int) -> Any:
    """An item of a list that a file may lack."""
    if isinstance(values, list) and number < len(values):
        return values[number]
    return None


def _runs(
    where: str,
    held: Sequence[Mapping[str, Shard]],
    group: Shapes,
    partitioned: bool,
) -> dict[str, list[_Run]]:
    """Where the elements of a group's parameters are in the partitions of the ranks.

    Raises CorruptCheckpoint if the sizes do not add up.
    """
    sizes = [states[MASTER].entry.meta.shape[0] for states in held]
    found: dict[str, list[_Run]] = {}
    ranks = len(held)
    offset = 0
    if partitioned:
        for name, shape in group.items():
            found[name], size = _even_runs(shape, offset, ranks)
            offset += size
        fits = set(sizes) == {offset}
    else:
        ends = list(accumulate(sizes))
        for name, shape in group.items():
            found[name] = []
            begin = offset
            offset += math.prod(shape)
            at = begin
            while at < min(offset, ends[-1]):
                rank = bisect_right(ends, at)
                stop = min(offset, ends[rank])
                first = at - ends[rank] + sizes[rank]
                found[name].append(_Run(rank, first, at - begin, stop - begin))
                at = stop
        # DeepSpeed pads a group to a multiple of two elements a rank.
        fits = 0 <= ends[-1] - offset < 2 * ranks
        # Ranks have equal parts. Only at the end is there padding, which is not stored.
        fits = fits and sizes == sorted(sizes, reverse=True)
    if not fits:
        names = join_truncated([repr(name) for name in group], 3, ", ")
        raise CorruptCheckpoint(
            f"{where}: {names} take {offset} elements, and the partitions of the ranks have {sizes}"
        )
    return found


def _even_runs(
    shape: tuple[int, ...], offset: int, ranks: int
) -> tuple[list[_Run], int]:
    """The runs of a parameter of ZeRO-3, and the size of each rank's part with its padding."""
    numel = math.prod(shape)
    size = -(-numel // ranks)
    runs = [
        _Run(rank, offset, rank * size, min((rank + 1) * size, numel))
        for rank in range(ranks)
        if rank * size < numel
    ]
    return runs, size


def _located(
    key: str, shape: tuple[int, ...], runs: Sequence[_Run], parts: Sequence[Shard]
) -> list[Shard]:
    """The chunks of a tensor: boxes that are consecutive in the flat ``parts`` of the ranks."""
    meta = TensorMeta(tuple(shape), parts[0].entry.meta.dtype)
    entry = TensorEntry(key, meta)
    whole = Box.whole(meta.shape)
    if not whole.volume:
        return [Shard(entry, whole, replace(parts[0].place, length=0), True)]
    found = []
    for run in runs:
        place = parts[run.rank].place
        start = place.start + run.offset * meta.itemsize
        for box in whole.runs(run.start, run.stop):
            length = box.volume * meta.itemsize
            found.append(Shard(entry, box, Location(place.file, start, length), True))
            start += length
    return found
