"""What ranks are told besides: that they contradict one another, or that something will not come back as it was."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megackpt import events, tree
from megackpt.adapters.param_groups import HeldGroup
from megackpt.distributed.failures import name_ranks
from megackpt.errors import ShardingError, join_truncated
from megackpt.planning.manifest import ITEMSIZE
from megackpt.state.storable import is_distributed

logger = logging.getLogger("megackpt.saver")

LARGE_COMMON_STATE = 1 << 20
"""Bytes of tensors and arrays in the common state from which on a save warns."""
LARGEST_COMMON_STATE = 2 << 30
"""Bytes from which on a save refuses them, unless ``allow_large_common_state`` is set."""
_BITS = {
    dtype: {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        dtype.itemsize
    ]
    for name in ITEMSIZE
    if name.startswith("float8") or name in ("complex32", "uint16", "uint32", "uint64")
    for dtype in [getattr(torch, name, None)]
    if dtype is not None
}
_told: set[str] = set()  # classes that have to be trusted
_warned: set[tuple[str, str]] = set()  # of large common states: where, and what


def check_same(what: str, said: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(said):
        ranks.setdefault(word, []).append(rank)
    if len(ranks) > 1:
        named = [f"{name_ranks(those)}: {word}" for word, those in ranks.items()]
        raise ShardingError(
            f"the ranks of one save {what}: {join_truncated(named, 4)} (all must agree)"
        )


def groups_to_store(
    rank_0s: Mapping[str, HeldGroup], needed: Sequence[Mapping[str, HeldGroup]]
) -> dict[tree.Path, bytes]:
    """What goes in place of groups of which rank 0 has no parameter: those of the lowest rank that has some.

    Raises ShardingError where other ranks need hyperparameters that would be lost all the same.
    """
    stored = {place: (0, group) for place, group in rank_0s.items()}
    lost: list[str] = []
    for rank, own in enumerate(needed):
        for place, group in own.items():
            if place not in stored:
                lost.append(f"{place} is on rank {rank}, and not on rank 0")
                continue
            holder, held = stored[place]
            differing = [
                key for key, text in group.texts.items() if held.texts.get(key) != text
            ]
            if held.needed:
                lost += [
                    f"{place}{key} is {_cut(group.texts[key])} on rank {rank}, "
                    f"{_cut(held.texts.get(key, 'absent'))} on rank {holder}"
                    for key in differing
                ]
            elif differing and not group.values:
                lost.append(
                    f"{place} is too large on rank {rank} for rank 0 to store it: set it there as well"
                )
            else:
                stored[place] = rank, group
    if lost:
        raise ShardingError(
            "groups of parameters differ between ranks, and one list of them is stored: "
            f"{join_truncated(lost, 6)}. Build the optimizer of the same groups on all ranks, also of "
            "those without a parameter there; and give groups a "
            "'name', or leave them in the order of the checkpoint that was loaded"
        )
    return {
        rank_0s[place].path: group.values
        for place, (_, group) in stored.items()
        if group.texts != rank_0s[place].texts and group.values
    }


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_common_size(common: Mapping[Any, Any], directory: str) -> None:
    """Warn of tensors and arrays in the common state that are large together; refuse very large ones.

    Raises ShardingError from ``LARGEST_COMMON_STATE`` on. The walk reads no data. A run that saves the same again, to
    this directory or beside it, is warned once.
    """
    total, largest, where, left = 0, -1, "", 0
    counted: set[Any] = set()
    for path, value, walked in _tensors_and_arrays(common):
        identity, nbytes = _stored_once(value, walked)
        if identity in counted or not nbytes:
            continue
        counted.add(identity)
        total += nbytes
        left += nbytes * (
            not walked or isinstance(value, np.ndarray)
        )  # which ``sharded`` leaves as they are
        if nbytes > largest:
            largest, where = nbytes, tree.show(path)
    if total < LARGE_COMMON_STATE:
        return
    values = (
        "1 tensor or array"
        if len(counted) == 1
        else f"{len(counted)} tensors and arrays"
    )
    text = (
        f"the common state holds {values}, {events.format_size(total)} in all, the largest at {where}: rank 0 alone "
        "writes them, every rank that loads reads all of them, and they are not resharded. Declare them instead: "
        "megackpt.save(megackpt.sharded(state), directory), loaded by megackpt.load(megackpt.sharded(state), directory)"
    )
    if left:
        text += (
            f" (which leaves {events.format_size(left)} as they are, numpy arrays and what is in tuples or sets: "
            "torch.from_numpy and lists make tensors of them that it declares)"
        )
    if total >= LARGEST_COMMON_STATE:
        raise ShardingError(f"{text}. Or allow it: allow_large_common_state=True")
    warned = os.path.dirname(directory), text
    if warned not in _warned:
        _warned.add(warned)
        logger.warning("%s (allow_large_common_state=True silences this)", text)


def _tensors_and_arrays(
    common: Mapping[Any, Any],
) -> Iterator[tuple[tree.Path, Any, bool]]:
    """Path, value, and whether only dicts and lists are around it; tuples and sets are looked into as well."""
    todo: list[tuple[tree.Path, Any]] = [((), common)]
    seen: set[int] = set()  # a tuple may hold a list that holds it
    while todo:
        above, node = todo.pop()
        for path, leaf in tree.walk(node):
            if isinstance(leaf, torch.Tensor | np.ndarray):
                yield (*above, *path), leaf, not above
            elif isinstance(leaf, tuple | set | frozenset) and id(leaf) not in seen:
                seen.add(id(leaf))
                todo += [((*above, *path, i), part) for i, part in enumerate(leaf)]


def _stored_once(value: Any, walked: bool) -> tuple[Any, int]:
    """What is the same for values that a pickle holds once, and the bytes that it holds."""
    if isinstance(value, np.ndarray):
        return id(value), value.nbytes
    if value.is_meta or is_distributed(value):  # no data; refused elsewhere
        return None, 0
    if value.layout is not torch.strided:
        return id(value), value.element_size() * (
            value._nnz() if _is_sparse(value) else value.numel()
        )
    own = value.numel() * value.element_size()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return id(value), own
    storage = value.untyped_storage()
    if walked and storage.nbytes() > own:
        return (
            object(),
            own,
        )  # of a view of a larger tensor a copy is stored, one at each place
    return (value.device, storage.data_ptr()), storage.nbytes()


def _is_sparse(value: torch.Tensor) -> bool:
    return value.layout in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )


def warn_of_untrusted(wanted: Iterable[str]) -> None:
    """Say now what a load would say too late: that it has to be told to trust a class."""
    for refusal in wanted:
        _told.add(refusal)
        logger.warning("this is saved, but will not simply load: %s", refusal)


def untold(wanted: Iterable[str]) -> list[str]:
    """Those of them that this process has not told of yet."""
    return [refusal for refusal in wanted if refusal not in _told]


def warn_of_difference(rank: int, coordinators: bytes, own: Any) -> None:
    """Log where this rank's view of the common state differs from rank 0's, which comes pickled.

    That they differ is a warning. Comparing runs the values' own code, and whatever fails in it is logged, too: no
    save fails of it.
    """
    try:
        _compare(
            rank,
            torch.load(
                io.BytesIO(coordinators), map_location="cpu", weights_only=False
            ),
            own,
        )
    except Exception as error:  # noqa: BLE001 - it is logged
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Where it does cannot be found out: comparing failed (%s: %s)",
            rank,
            type(error).__name__,
            _message(error),
        )


def _message(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error's own code
        return "its text cannot be had"


def _compare(rank: int, coordinators: Any, own: Any) -> None:
    views = [
        tree.dict_list_map_outplace(_comparable, view) for view in (own, coordinators)
    ]
    only_own, only_coordinators, mismatched = tree.diff(*views)
    if only_own or only_coordinators or mismatched:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            rank,
            str(
                only_coordinators
            ),  # here, and not in a handler: keys may fail to be shown
            rank,
            str(only_own),
            str(mismatched),
        )
    tensors = [
        path
        for path, *kinds in mismatched
        if any(issubclass(kind, torch.Tensor) for kind in kinds)
    ]
    others = [path for path, *_ in mismatched if path not in tensors]
    if others or only_own:
        logger.warning(
            "of %s%s rank 0's values alone are saved, and all ranks get them at a load: what each rank has of its own "
            "belongs in a ShardedObject, or in a LocalNonpersistentObject, which is not saved",
            tree.show((others or only_own)[0]),
            f" and {len(others) + len(only_own) - 1} more"
            if len(others) + len(only_own) > 1
            else "",
        )
    if tensors:
        logger.warning(
            "only rank 0's values of %s and %d more tensors are saved: what differs between ranks belongs in a "
            "ShardedTensor (sharded_state_dict(), not state_dict())",
            tree.show(tensors[0]),
            len(tensors) - 1,
        )


def _comparable(leaf: Any) -> Any:
    """The bits of tensors of dtypes that torch cannot compare (float8, complex32, unsigned integers)."""
    if (
        not isinstance(leaf, torch.Tensor)
        or leaf.dtype not in _BITS
        or leaf.layout is not torch.strided
    ):
        return leaf
    return leaf.detach().resolve_conj().view(_BITS[leaf.dtype])
