"""The files of the module's state: weights, buffers, shapes of parameters, Python state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from megackpt.backends.deepspeed.step_files import StepFiles
from megackpt.backends.torch_reader import Shard, read_contents
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    OBJECT,
    Location,
    TensorEntry,
    TensorMeta,
    size_problem,
)
from megackpt.storage import Storage

Shapes = Mapping[str, tuple[int, ...]]
"""The parameters of a group, by name, in the order of the flat partitions."""
MODULE = "module."
_FROZEN = "frozen_param_fragments."


@dataclass
class ModelStates:
    """What the files of the module's state hold.

    Attributes:
        shards: tensors and objects.
        groups: the trainable parameters of each group, whose values are elsewhere.
        aliases: the name of a tied parameter to the name under which its values are stored.
    """

    shards: list[Shard] = field(default_factory=list)
    groups: list[Shapes] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    def names_of(self, name: str) -> list[str]:
        """The parameter's name, and the names of parameters tied to it."""
        return [name, *(alias for alias, held in self.aliases.items() if held == name)]


class Run(NamedTuple):
    """Elements [start, stop) of a parameter in C order, from element ``offset`` of a rank's part."""

    rank: int
    offset: int
    start: int
    stop: int


def even_runs(numel: int, offset: int, ranks: int) -> list[Run]:
    """The runs of a parameter of ZeRO-3. Each rank has an equal part; the last part is padded."""
    size = -(-numel // ranks)
    return [
        Run(rank, offset, rank * size, min((rank + 1) * size, numel))
        for rank in range(ranks)
        if rank * size < numel
    ]


def located(
    key: str, meta: TensorMeta, runs: Sequence[Run], parts: Sequence[Shard]
) -> list[Shard]:
    """The chunks of a tensor: boxes that are consecutive in the flat ``parts`` of the ranks."""
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
            f"{shard.place.file}: {shard.entry.key!r} is not in C order, which DeepSpeed does not "
            "write"
        )
    return shard._replace(entry=shard.entry._replace(key=key))


def read_model(root: Storage, step: StepFiles) -> ModelStates:
    """The files of the module's state.

    Raises CorruptCheckpoint if the lists of parameters of ranks differ.
    """
    model = ModelStates()
    frozen: Shapes = {}
    fragments: dict[str, list[Shard]] = {}
    for rank, file in enumerate(step.model):
        where = f"{root.location}/{file}"
        found, rest = read_contents(root, file)
        groups = parameter_groups(where, rest, "param_shapes")
        shapes = merged(where, parameter_groups(where, rest, "frozen_param_shapes"))
        if rank == 0:
            model.groups = groups
            frozen = shapes
            model.aliases = _aliases(where, rest)
        _compare(where, (*groups, shapes), (*model.groups, frozen))
        shapes = {**merged(where, groups), **frozen}
        for shard in found:
            key = shard.entry.key
            name = key.removeprefix(MODULE)
            if key.startswith(_FROZEN) and step.partitioned:
                name = key.removeprefix(_FROZEN)
                fragments.setdefault(name, []).append(renamed(shard, MODULE + name))
            elif key.startswith(_FROZEN):
                continue  # ZeRO-2 stores the whole tensor in the module, too
            elif key != name and step.partitioned:
                # ZeRO-3 leaves an empty tensor in place of a parameter, and equal buffers.
                shape = shapes.get(model.aliases.get(name, name))
                if rank == 0 and shape in (None, shard.entry.meta.shape):
                    model.shards.append(shard)
            elif rank == 0:
                model.shards.append(shard)
            elif not shard.entry.meta.is_object:
                model.shards.append(renamed(shard, f"model_states.{rank}.{key}"))
    if step.partitioned:
        model.shards += rank_objects("model_states", step.model)
        for name, shape in frozen.items():
            parts = fragments.get(name, [])
            model.shards += _frozen(root, step, model.names_of(name), shape, parts)
    return model


def _frozen(
    root: Storage,
    step: StepFiles,
    names: Sequence[str],
    shape: tuple[int, ...],
    parts: Sequence[Shard],
) -> list[Shard]:
    """A parameter that is not trained: ZeRO-3 keeps it in equal parts in the module's precision."""
    numel = math.prod(shape)
    size = -(-numel // len(step.model))
    metas = [part.entry.meta for part in parts]
    for rank, file in enumerate(step.model):
        known = rank < len(metas)
        if not known or metas[rank] != TensorMeta((size,), metas[0].dtype):
            raise CorruptCheckpoint(
                f"{root.location}/{file}: the frozen parameter {names[0]!r} of shape {shape} "
                f"should have a part of {size} elements, as on the other ranks"
            )
    meta = TensorMeta(shape, parts[0].entry.meta.dtype)
    runs = even_runs(numel, 0, len(parts))
    found = []
    for name in names:
        found += located(MODULE + name, meta, runs, parts)
    return found


def parameter_groups(where: str, rest: Mapping[str, Any], field: str) -> list[Shapes]:
    """The shapes of parameters by group. Raises CorruptCheckpoint for impossible ones."""
    groups = rest.get(field)
    if groups is None:
        return []
    if isinstance(groups, dict):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise CorruptCheckpoint(f"{where}: {field} is not a list of dicts")
    found: list[Shapes] = []
    for group in groups:
        for name, shape in group.items():
            is_shape = type(name) is str and isinstance(shape, tuple)
            if (
                not is_shape
                or not all(type(n) is int and n >= 0 for n in shape)
                or size_problem(shape, "float64")
            ):
                raise CorruptCheckpoint(
                    f"{where}: {field} has the shape {str(shape)[:200]} for {name!r}"
                )
        found.append({name: tuple(shape) for name, shape in group.items()})
    return found


def merged(where: str, groups: Sequence[Shapes]) -> Shapes:
    """The parameters of all groups. Raises CorruptCheckpoint for a name in two."""
    found: dict[str, tuple[int, ...]] = {}
    for group in groups:
        for name, shape in group.items():
            if name in found:
                raise CorruptCheckpoint(f"{where} lists the parameter {name!r} twice")
            found[name] = shape
    return found


def _aliases(where: str, rest: Mapping[str, Any]) -> dict[str, str]:
    aliases = rest.get("shared_params") or {}
    pairs = isinstance(aliases, dict) and [*aliases, *aliases.values()]
    if pairs is False or not all(type(name) is str for name in pairs):
        raise CorruptCheckpoint(f"{where}: shared_params is not a dict of names")
    return dict(aliases)


def _compare(where: str, groups: Sequence[Shapes], first: Sequence[Shapes]) -> None:
    """Raise CorruptCheckpoint if a rank lists other parameters than rank 0."""
    names = [item for group in groups for item in group.items()]
    others = [item for group in first for item in group.items()]
    for name, other in zip_longest(names, others):
        if name != other:
            raise CorruptCheckpoint(
                f"{where} lists the parameter {name}, and rank 0 lists {other}"
            )
    if list(map(len, groups)) != list(map(len, first)):
        raise CorruptCheckpoint(f"{where} has other groups of parameters than rank 0")
