"""A sharded state dict of ours as one of Hugging Face's tensors: what a load asks for, and a save writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.huggingface.linking import Links, Table, link
from megackpt.adapters.huggingface.rules import Piece
from megackpt.adapters.megatron import native
from megackpt.planning.box import Box, Boxes
from megackpt.state import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    declare,
    extract,
)


def as_huggingface(
    sharded_state_dict: ShardedStateDict, table: Table
) -> ShardedStateDict:
    """The same state, declared under Hugging Face's names: give it to ``load`` or to ``save`` instead.

    Each tensor is declared piece by piece, and each piece is a view of it: a load reads the ranges that this rank
    needs, straight into the model, and gives back tensors in the shapes and places of ``sharded_state_dict``.
    All else (objects, common state, tensors that the table says they do not have) stays on each rank as it is.

    For keys that no rule fits, or several do, and for shapes that rules cannot be of, the ``load`` or ``save`` raises
    MismatchError on all ranks; ShardingError for declarations that contradict themselves. All at once.
    """
    try:
        shards = extract(sharded_state_dict, native).shards
        declare(shards, rank=0)
        links = link(
            table,
            [
                (s.key, tuple(s.global_shape))
                for s in shards
                if isinstance(s, ShardedTensor)
            ],
        )
        result: ShardedStateDict = tree.dict_list_map_outplace(
            _Renaming(links), sharded_state_dict
        )
    except Exception as error:  # noqa: BLE001 - of a rule or a factory of the caller's, it may be any
        return {"huggingface": _raising(error)}
    return result


def _raising(error: Exception) -> ShardedTensorFactory:
    """In the place of a state that cannot be declared: where all ranks meet, they all hear of it."""

    def build(*_: object) -> NoReturn:
        raise error

    return ShardedTensorFactory("huggingface", None, build, build)


class _Renaming:
    """What becomes of each leaf of a state."""

    def __init__(self, links: Links) -> None:
        self._links = {
            named: (pieces, Boxes.of(p.box for p in pieces))
            for named, pieces in links.items()
        }

    def __call__(self, leaf: Any) -> Any:
        leaf = native(leaf)
        if isinstance(leaf, ShardedTensorFactory):
            return self._around(leaf)
        if not isinstance(leaf, ShardedTensor):
            kept = leaf.data if isinstance(leaf, ShardedObject) else leaf
            return (
                leaf
                if isinstance(leaf, LocalNonpersistentObject)
                else LocalNonpersistentObject(kept)
            )
        pieces, boxes = self._links[leaf.key, tuple(leaf.global_shape)]
        return (
            _Pieced(leaf, pieces, boxes).factory()
            if pieces
            else LocalNonpersistentObject(leaf.data)
        )

    def _around(self, factory: ShardedTensorFactory) -> ShardedTensorFactory:
        """The caller's own factory, with what it builds renamed."""

        def build(*arguments: Any) -> Any:
            return tree.dict_list_map_outplace(self, factory.build_fn(*arguments))

        return ShardedTensorFactory(
            factory.key,
            factory.data,
            build,
            factory.merge_fn,
            factory.replica_id,
            factory.flattened_range,
        )


class _Pieced:
    """One ShardedTensor and the pieces over there that lie in it: of all of its tensor, with their ``boxes``.

    ``beside``: of others of theirs that its tensor is made of, one piece each. They are asked for by name, in a box
    without elements: so all ranks miss the same where one of them is not there, also those that have padding only.
    """

    def __init__(
        self, shard: ShardedTensor, pieces: Sequence[Piece], boxes: Boxes
    ) -> None:
        prepended = shard.prepend_axis_num
        self.shard = shard
        self.box = Box(
            tuple(shard.global_offset), (1,) * prepended + tuple(shard.local_shape)
        )
        stacked = slice(
            pieces[0].stacked
        )  # of a tensor of all layers there are very many
        start, stop = self.box.offset[stacked], self.box.stop[stacked]
        near = (
            (boxes.offset[:, stacked] < stop) & (boxes.stop[:, stacked] > start)
        ).all(axis=1)
        there = [pieces[i] for i in np.flatnonzero(near).tolist()] or pieces[:1]
        self.pieces = [
            inside for piece in there if (inside := piece.within(self.box)) is not None
        ]
        met = {piece.key for piece in self.pieces}
        # A box without elements of what this one does not meet: at the beginning, so inside whatever its shape.
        self.beside = {
            piece.key: replace(piece, there=Box.whole(piece.shape))
            for piece in there
            if piece.key not in met and piece.shape
        }
        data = shard.data
        if data is None or data.is_meta:
            data = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
        self.data = data.detach()
        self.whole = self.data[(*(None,) * prepended, ...)]

    def factory(self) -> ShardedTensorFactory:
        return ShardedTensorFactory(
            self.shard.key, self.data, self._built, self._merged, self.shard.replica_id
        )

    def _built(
        self, _key: str, _data: Any, replica_id: ReplicaId, _range: slice | None
    ) -> list[ShardedTensor]:
        views = [
            (piece, piece.view(self.whole[self._place(piece)])) for piece in self.pieces
        ]
        views += [
            (p, self.data.new_empty((0, *p.shape[1:]))) for p in self.beside.values()
        ]
        return [self._declared(piece, view, replica_id) for piece, view in views]

    def _declared(
        self, piece: Piece, view: torch.Tensor, replica_id: ReplicaId
    ) -> ShardedTensor:
        if piece.tied:
            replica_id = (
                (1, *replica_id)
                if isinstance(replica_id, tuple | list)
                else 1 + replica_id
            )
        return ShardedTensor(
            piece.key,
            view,
            self.shard.dtype,
            tuple(view.shape),
            piece.shape,
            piece.there.offset,
            None,
            replica_id,
            allow_shape_mismatch=self.shard.allow_shape_mismatch and not piece.exact,
        )

    def _merged(self, _loaded: Any) -> torch.Tensor:
        """The tensor itself, which the pieces are views of; zero where there are none."""
        if sum(piece.box.volume for piece in self.pieces) < self.box.volume:
            padding = torch.ones(
                self.box.shape, dtype=torch.bool, device=self.data.device
            )
            for piece in self.pieces:
                padding[self._place(piece)] = False
            bits = (
                self.whole.view(torch.uint8) if self.whole.itemsize == 1 else self.whole
            )  # for float8
            bits.masked_fill_(padding, 0)
        return self.data

    def _place(self, piece: Piece) -> tuple[Any, ...]:
        return (*piece.box.relative_to(self.box).slices(), ...)
