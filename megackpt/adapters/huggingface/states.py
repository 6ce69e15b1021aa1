"""A sharded state dict of ours, declared as Hugging Face's tensors, for a load or a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.huggingface.rules import Piece
from megackpt.adapters.huggingface.table_links import Links, Table, link
from megackpt.adapters.megatron import from_megatron
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
    """The same state, declared under Hugging Face's names, for ``load`` or ``save``.

    Each tensor is declared in pieces that are views of it. A load reads the ranges that this rank
    needs straight into the model, and returns tensors in the shapes and places of
    ``sharded_state_dict``. Everything else (objects, common state, tensors that the table maps to
    None) is neither loaded nor saved: each rank keeps its own.

    Errors are raised by the ``load`` or ``save``, on all ranks: MismatchError for keys that no
    rule fits, or several, and for impossible shapes; ShardingError for declarations that
    contradict themselves. Each names everything that is wrong.
    """
    try:
        shards = extract(sharded_state_dict, from_megatron).shards
        declare(shards, rank=0)
        tensors = [
            (shard.key, tuple(shard.global_shape))
            for shard in shards
            if isinstance(shard, ShardedTensor)
        ]
        adapter = _LeafAdapter(link(table, tensors))
        result: ShardedStateDict = tree.dict_list_map_outplace(
            adapter, sharded_state_dict
        )
    except Exception as error:  # noqa: BLE001 - the caller's code may raise anything
        return {"huggingface": _raise_later(error)}
    return result


def _raise_later(error: Exception) -> ShardedTensorFactory:
    """A state that raises when it is saved or loaded, so that the error reaches all ranks."""

    def build(*_: object) -> NoReturn:
        raise error

    return ShardedTensorFactory("huggingface", None, build, build)


class _LeafAdapter:
    """Maps each leaf of a state."""

    def __init__(self, links: Links) -> None:
        self._links = {}
        for tensor, pieces in links.items():
            self._links[tensor] = pieces, Boxes.of(piece.box for piece in pieces)

    def __call__(self, leaf: Any) -> Any:
        leaf = from_megatron(leaf)
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf
        if isinstance(leaf, ShardedTensorFactory):
            return self._adapt_factory(leaf)
        if isinstance(leaf, ShardedTensor):
            pieces, boxes = self._links[leaf.key, tuple(leaf.global_shape)]
            if pieces:
                return _PiecesOfShard(leaf, pieces, boxes).factory()
        if isinstance(leaf, (ShardedTensor, ShardedObject)):
            return LocalNonpersistentObject(leaf.data)
        return LocalNonpersistentObject(leaf)

    def _adapt_factory(self, factory: ShardedTensorFactory) -> ShardedTensorFactory:
        """The caller's factory, with what it builds adapted."""

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


class _PiecesOfShard:
    """One ShardedTensor, and the pieces of its global tensor that lie in it.

    ``empty``: one piece for each other tensor of theirs that the shard's region is near. They are
    declared as boxes without elements. So all ranks miss the same names if one is not stored, also
    ranks that hold only padding.
    """

    def __init__(
        self,
        shard: ShardedTensor,
        pieces: Sequence[Piece],
        boxes: Boxes,
    ) -> None:
        prepended = shard.prepend_axis_num
        self.shard = shard
        local_shape = (1,) * prepended + tuple(shard.local_shape)
        self.box = Box(tuple(shard.global_offset), local_shape)
        # A tensor of all layers has very many pieces: find those of this shard's layers first.
        stacked = slice(pieces[0].stacked)
        start, stop = self.box.offset[stacked], self.box.stop[stacked]
        overlaps = (boxes.offset[:, stacked] < stop) & (boxes.stop[:, stacked] > start)
        near = [pieces[i] for i in np.flatnonzero(overlaps.all(axis=1)).tolist()]
        near = near or list(pieces[:1])
        self.pieces = []
        for piece in near:
            inside = piece.within(self.box)
            if inside is not None:
                self.pieces.append(inside)
        keys = {piece.key for piece in self.pieces}
        self.empty: dict[str, Piece] = {}
        for piece in near:
            if piece.key not in keys and piece.shape:
                # At the start, which is inside of a stored tensor of any shape.
                self.empty[piece.key] = replace(piece, there=Box.whole(piece.shape))
        data = shard.data
        if data is None or data.is_meta:
            data = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
        self.data = data.detach()
        self.with_prepended = self.data[(*(None,) * prepended, ...)]

    def factory(self) -> ShardedTensorFactory:
        shard = self.shard
        return ShardedTensorFactory(
            shard.key, self.data, self._build, self._merge, shard.replica_id
        )

    def _build(
        self,
        _key: str,
        _data: Any,
        replica_id: ReplicaId,
        _range: slice | None,
    ) -> list[ShardedTensor]:
        shards = []
        for piece in self.pieces:
            view = piece.view(self.with_prepended[self._index(piece)])
            shards.append(self._declare(piece, view, replica_id))
        for piece in self.empty.values():
            view = self.data.new_empty((0, *piece.shape[1:]))
            shards.append(self._declare(piece, view, replica_id))
        return shards

    def _declare(
        self,
        piece: Piece,
        view: torch.Tensor,
        replica_id: ReplicaId,
    ) -> ShardedTensor:
        if piece.tied:  # never the main replica
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

    def _merge(self, _loaded: Any) -> torch.Tensor:
        """The tensor, whose views were filled. Padding becomes zero."""
        if sum(piece.box.volume for piece in self.pieces) < self.box.volume:
            padding = torch.ones(
                self.box.shape, dtype=torch.bool, device=self.data.device
            )
            for piece in self.pieces:
                padding[self._index(piece)] = False
            values = self.with_prepended
            if values.itemsize == 1:
                values = values.view(torch.uint8)  # torch cannot fill float8
            values.masked_fill_(padding, 0)
        return self.data

    def _index(self, piece: Piece) -> tuple[Any, ...]:
        return (*piece.box.relative_to(self.box).slices(), ...)
