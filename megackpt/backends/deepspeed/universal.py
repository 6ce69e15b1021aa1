"""Universal checkpoints: whole tensors, one file for each state of each parameter."""

from __future__ import annotations

import logging
import math

from megackpt.backends.deepspeed.partitions import (
    MASTER,
    MODULE,
    parameter_shapes,
    rank_objects,
    read_model,
    renamed,
)
from megackpt.backends.deepspeed.step_files import StepFiles
from megackpt.backends.torch_reader import SINGLE, Shard, read_contents
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import OBJECT, Location, TensorEntry, TensorMeta
from megackpt.storage import Storage

logger = logging.getLogger("megackpt.backends")

_COMMON = "optimizer_state.pt"
_PARAMETER = "param"
_MASTER = f"{MASTER}.pt"


def read_universal(root: Storage, step: StepFiles) -> list[Shard]:
    """The tensors and objects of a universal checkpoint.

    The weights of the module are left out where several model-parallel ranks hold them. Raises
    CorruptCheckpoint, naming the file, if a parameter or one of its states is missing.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    found: list[Shard] = []
    if step.parallel:
        logger.info(
            "%s: the weights of the module (%s*) are left out, because model-parallel ranks hold "
            "parts of them; the master weights (%s.*) are whole",
            root.location,
            MODULE,
            MASTER,
        )
        for file in step.model:
            _, rest = read_contents(root, file)
            for group in parameter_shapes(f"{root.location}/{file}", rest)[:-1]:
                shapes.update(group)
        found += rank_objects("model_states", step.model)
        step = step._replace(model=step.model[:1], partitioned=False)
    model = read_model(root, step)
    for shard in model.shards:
        if not (step.parallel and shard.entry.key.startswith(MODULE)):
            found.append(shard)
    for group in model.groups:
        shapes.update(group)
    names = root.list(step.parameters)
    files = {
        name: root.list(f"{step.parameters}/{name}")
        for name in names
        if name != _COMMON
    }
    if missing := [name for name in shapes if name not in files]:
        raise CorruptCheckpoint(
            f"{root.location}/{step.parameters}/{missing[0]} is missing, and the module's state "
            "lists the parameter"
        )
    # The folder of a frozen parameter has the weights alone.
    states = {file for name in shapes for file in files[name]}
    for name, held in files.items():
        folder = f"{step.parameters}/{name}"
        aliases = [alias for alias in model.tied.get(name, []) if alias not in files]
        for file in sorted({_MASTER, *states}):
            if file not in held and (name in shapes or file == _MASTER):
                raise CorruptCheckpoint(
                    f"{root.location}/{folder}/{file} is missing: other parameters have it"
                )
        for file in held:
            key = f"{file.removesuffix('.pt')}.{name}"
            shard = _read_state(root, f"{folder}/{file}", key, shapes.get(name))
            found.append(shard)
            if file == _MASTER:
                found += [renamed(shard, f"{MASTER}.{alias}") for alias in aliases]
    if _COMMON in names:
        found += rank_objects("optimizer_states", [f"{step.parameters}/{_COMMON}"])
    return found


def _read_state(
    root: Storage, file: str, key: str, shape: tuple[int, ...] | None
) -> Shard:
    """One file. ``shape``: of the parameter, if it is known: ZeRO-3's values are stored flat."""
    shards, rest = read_contents(root, file)
    tensors = [shard for shard in shards if not shard.entry.meta.is_object]
    if rest.keys() == {""}:
        entry = TensorEntry(key, TensorMeta((1,), OBJECT))
        return Shard(entry, Box((0,), (1,)), Location(file, 0, 0), False)
    keys = [shard.entry.key for shard in tensors]
    if keys not in ([SINGLE], [_PARAMETER]):
        raise CorruptCheckpoint(
            f"{root.location}/{file} has the tensors {keys[:9]}, and not one alone"
        )
    found = renamed(tensors[0], key)
    (stored, dtype) = found.entry.meta
    if keys == [_PARAMETER] or not stored:
        return found
    if shape is None or stored != (math.prod(shape),):
        raise CorruptCheckpoint(
            f"{root.location}/{file} has {stored} elements of a parameter, and the module's state "
            f"lists the shape {shape} for it"
        )
    entry = TensorEntry(key, TensorMeta(tuple(shape), dtype))
    return Shard(entry, Box.whole(entry.meta.shape), found.place, True)
