"""Checks of the common state, which rank 0 stores: its size, and differences between ranks."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megackpt import events, limits, tree
from megackpt.adapters.param_groups import HeldGroup
from megackpt.errors import ShardingError, join_truncated
from megackpt.state.storable import is_distributed

logger = logging.getLogger("megackpt.saver")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_warned: set[tuple[str, str]] = set()  # (parent directory, text) of large states


def groups_to_store(
    rank_0s: Mapping[str, HeldGroup], needed: Sequence[Mapping[str, HeldGroup]]
) -> dict[tree.Path, bytes]:
    """The pickled groups that replace rank 0's groups without parameters.

    They come from the lowest rank that has a parameter of the group. ``needed[i]`` are the
    groups with parameters on rank i. Raises ShardingError where the hyperparameters of another
    rank would be lost.
    """
    stored = {name: (0, group) for name, group in rank_0s.items()}
    lost: list[str] = []
    for rank, own in enumerate(needed):
        for name, group in own.items():
            if name not in stored:
                lost.append(f"{name} is on rank {rank}, and not on rank 0")
                continue
            holder, held = stored[name]
            differing = [
                key for key, text in group.texts.items() if held.texts.get(key) != text
            ]
            if held.needed:
                for key in differing:
                    theirs = _cut(held.texts.get(key, "absent"))
                    lost.append(
                        f"{name}{key} is {_cut(group.texts[key])} on rank {rank}, "
                        f"{theirs} on rank {holder}"
                    )
            elif differing and not group.values:
                lost.append(
                    f"{name} is too large on rank {rank} for rank 0 to store it: "
                    "set it there as well"
                )
            else:
                stored[name] = rank, group
    if lost:
        raise ShardingError(
            "groups of parameters differ between ranks, and one list of them is stored: "
            f"{join_truncated(lost, 6)}. Build the optimizer of the same groups on all ranks, "
            "also of those without a parameter there; and give groups a 'name', or leave them in "
            "the order of the checkpoint that was loaded"
        )
    replaced = {}
    for name, (_, group) in stored.items():
        if group.values and group.texts != rank_0s[name].texts:
            replaced[rank_0s[name].path] = group.values
    return replaced


def _cut(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."


def check_size(common: Mapping[Any, Any], directory: str) -> None:
    """Warn of tensors and arrays in the common state that are large together.

    Raises ShardingError from ``limits.COMMON_STATE_BYTES`` on. Reads no data. A run that saves the
    same again, to this directory or a sibling, is warned once.
    """
    total = 0
    largest = -1
    where = ""
    undeclared = 0
    counted: set[Any] = set()
    for path, value, in_dicts in _tensors_and_arrays(common):
        identity, nbytes = _stored_once(value, in_dicts)
        if identity in counted or not nbytes:
            continue
        counted.add(identity)
        total += nbytes
        if not in_dicts or isinstance(value, np.ndarray):
            undeclared += nbytes  # ``megackpt.sharded`` leaves these as they are
        if nbytes > largest:
            largest = nbytes
            where = tree.show(path)
    if total < limits.COMMON_STATE_WARNING_BYTES:
        return
    values = f"{len(counted)} tensors and arrays"
    if len(counted) == 1:
        values = "1 tensor or array"
    text = (
        f"the common state holds {values}, {events.format_size(total)} in all, the largest at "
        f"{where}: rank 0 alone writes them, every rank that loads reads all of them, and they "
        "are not resharded. Declare them instead: "
        "megackpt.save(megackpt.sharded(state), directory), loaded by "
        "megackpt.load(megackpt.sharded(state), directory)"
    )
    if undeclared:
        text += (
            f" (which leaves {events.format_size(undeclared)} as they are, numpy arrays and "
            "values in tuples or sets: torch.from_numpy and lists make tensors of them that "
            "it declares)"
        )
    if total >= limits.COMMON_STATE_BYTES:
        raise ShardingError(f"{text}. Or allow it: allow_large_common_state=True")
    warned = os.path.dirname(directory), text
    if warned not in _warned:
        _warned.add(warned)
        logger.warning("%s (allow_large_common_state=True silences this)", text)


def _tensors_and_arrays(
    common: Mapping[Any, Any],
) -> Iterator[tuple[tree.Path, Any, bool]]:
    """Path, value, and whether only dicts and lists contain it; looks into tuples and sets."""
    todo: list[tuple[tree.Path, Any]] = [((), common)]
    seen: set[int] = set()  # a tuple may hold a list that holds it
    while todo:
        above, node = todo.pop()
        for path, leaf in tree.walk(node):
            if isinstance(leaf, torch.Tensor | np.ndarray):
                yield (*above, *path), leaf, not above
            elif isinstance(leaf, tuple | set | frozenset) and id(leaf) not in seen:
                seen.add(id(leaf))
                for i, value in enumerate(leaf):
                    todo.append(((*above, *path, i), value))


def _stored_once(value: Any, in_dicts: bool) -> tuple[Any, int]:
    """An identity, equal for values that a pickle stores once, and the bytes stored."""
    if isinstance(value, np.ndarray):
        return id(value), value.nbytes
    if value.is_meta or is_distributed(value):  # no data, or refused elsewhere
        return None, 0
    if value.layout is not torch.strided:
        if "sparse" in str(value.layout):
            count = value._nnz()
        else:
            count = value.numel()
        return id(value), value.element_size() * count
    own = value.numel() * value.element_size()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return id(value), own
    storage = value.untyped_storage()
    if in_dicts and storage.nbytes() > own:
        # A view of a larger tensor is copied before it is stored, at each of its places.
        return object(), own
    return (value.device, storage.data_ptr()), storage.nbytes()


def warn_of_difference(rank: int, rank_0s: bytes, own: Any) -> None:
    """Log where this rank's view of the common state differs from rank 0's pickled one.

    Comparing runs code of the values. An exception in it is logged, and the save continues.
    """
    try:
        theirs = torch.load(io.BytesIO(rank_0s), map_location="cpu", weights_only=False)
        _compare(rank, theirs, own)
    except Exception as error:  # noqa: BLE001 - it is logged
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Where it does cannot be found out: comparing failed (%s: %s)",
            rank,
            type(error).__name__,
            events.format_error(error),
        )


def _compare(rank: int, rank_0s: Any, own: Any) -> None:
    only_rank_0s, only_own, mismatched = tree.diff(
        tree.dict_list_map_outplace(_comparable, rank_0s),
        tree.dict_list_map_outplace(_comparable, own),
    )
    if only_own or only_rank_0s or mismatched:
        # The texts are made here, not in a log handler: the repr of a key may raise.
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            rank,
            str(only_rank_0s),
            rank,
            str(only_own),
            str(mismatched),
        )
    tensors: list[tree.Path] = []
    others = only_own
    for path, *kinds in mismatched:
        is_tensor = any(issubclass(kind, torch.Tensor) for kind in kinds)
        (tensors if is_tensor else others).append(path)
    if others:
        logger.warning(
            "of %s and %d more one rank's values alone are saved, and a load gives them to all "
            "ranks: a value of each rank belongs in a PerRank or a ShardedObject, or in a "
            "LocalNonpersistentObject, which is not saved",
            tree.show(others[0]),
            len(others) - 1,
        )
    if tensors:
        logger.warning(
            "only rank 0's values of %s and %d more tensors are saved: tensors that differ "
            "between ranks belong in a ShardedTensor (sharded_state_dict(), not state_dict())",
            tree.show(tensors[0]),
            len(tensors) - 1,
        )


def _comparable(leaf: Any) -> Any:
    """The bits of a tensor of a dtype that torch cannot compare."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    try:
        torch.ne(leaf, leaf)
    except RuntimeError:
        bits = _INTEGERS.get(leaf.dtype.itemsize)
        if bits is not None and not leaf.is_quantized:
            return leaf.detach().resolve_conj().view(bits)
    return leaf
