"""Our sharded state dicts, declared as Hugging Face's tensors, for a load or a save."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.megatron import from_megatron
from megackpt.errors import ShardingError
from megackpt.huggingface.rules import Piece
from megackpt.huggingface.table_links import TensorId, link
from megackpt.loader.comparison import Transform
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
    sharded_state_dict: ShardedStateDict, table: Transform, rest: bool = False
) -> ShardedStateDict:
    """The same state, declared under Hugging Face's names, for ``load`` or ``save``.

    Each tensor is declared in pieces that are views of it. A load reads the ranges that this rank
    needs straight into the model, and returns tensors in the shapes and places of
    ``sharded_state_dict``. Everything else (objects, common state, tensors that the table maps to
    None) is neither loaded nor saved: each rank keeps its values. With ``rest``, all that fits no
    rule is declared as before. A function in place of a rule is called with each ShardedTensor that
    fits, and returns the declaration to load: a ShardedTensorFactory computes from stored tensors,
    a LocalNonpersistentObject holds another value.

    Errors are raised by the ``load`` or ``save``, on all ranks: MismatchError for keys that no
    rule fits, or several, and for impossible shapes; ShardingError for declarations that
    contradict themselves. Each error names all of its problems.
    """
    try:
        shards = extract(sharded_state_dict, from_megatron).shards
        declare(shards, rank=0)
        tensors = [
            (shard.key, tuple(shard.global_shape))
            for shard in shards
            if isinstance(shard, ShardedTensor)
        ]
        functions: dict[str, Any] = {}
        rules: Any = table
        if isinstance(table, Mapping):  # else ``link`` raises
            functions = {p: rule for p, rule in table.items() if callable(rule)}
            rules = {**table, **dict.fromkeys(functions)}
        linked: dict[TensorId, Any] = {}
        for tensor, pieces in link(rules, tensors, rest=rest).items():
            if any(p.alternating is not None or p.factor != 1 for p in pieces):
                raise ShardingError(
                    f"{tensor[0]!r}: the table changes its values or their order, which "
                    "conversions do, and loads into a model do not"
                )
            linked[tensor] = partial(_adapt, {}, False)
            if pieces:
                boxes = Boxes.of(piece.box for piece in pieces)
                linked[tensor] = partial(_in_pieces, pieces, boxes)
        for pattern, function in functions.items():
            for tensor in link({pattern: None}, linked, rest=True):
                linked[tensor] = function
        result: ShardedStateDict = tree.dict_list_map_outplace(
            partial(_adapt, linked, rest), sharded_state_dict
        )
    except Exception as error:  # noqa: BLE001 - the caller's code may raise anything
        return {"huggingface": _raise_later(error)}
    return result


def _raise_later(error: Exception) -> ShardedTensorFactory:
    """A state that raises when it is saved or loaded, so that the error reaches all ranks."""

    def build(*_: object) -> NoReturn:
        raise error

    return ShardedTensorFactory("huggingface", None, build, build)


def _adapt(linked: Mapping[TensorId, Any], rest: bool, leaf: Any) -> Any:
    """A leaf of a state, as a function in ``linked`` declares it, or kept on this rank.

    With ``rest``, a leaf without such a function stays as it is.
    """
    leaf = from_megatron(leaf)
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf
    if isinstance(leaf, ShardedTensorFactory):
        factory = leaf

        def build(*arguments: Any) -> Any:
            built = factory.build_fn(*arguments)
            return tree.dict_list_map_outplace(partial(_adapt, linked, rest), built)

        return ShardedTensorFactory(
            leaf.key,
            leaf.data,
            build,
            leaf.merge_fn,
            leaf.replica_id,
            leaf.flattened_range,
        )
    if isinstance(leaf, ShardedTensor):
        tensor = leaf.key, tuple(leaf.global_shape)
        if tensor in linked:
            return linked[tensor](leaf)
    if rest:
        return leaf
    if isinstance(leaf, (ShardedTensor, ShardedObject)):
        leaf = leaf.data
    return LocalNonpersistentObject(leaf)


def _near(
    pieces: list[Piece], boxes: Boxes, box: Box
) -> tuple[list[Piece], dict[str, Piece]]:
    """The pieces in a box, and one piece of each other tensor near by.

    ``boxes``: the boxes of ``pieces``.
    """
    # A tensor of all layers has very many pieces: find the pieces of this shard's layers first.
    stacked = slice(pieces[0].stacked)
    overlaps = boxes.offset[:, stacked] < box.stop[stacked]
    overlaps &= boxes.stop[:, stacked] > box.offset[stacked]
    near = [pieces[i] for i in np.flatnonzero(overlaps.all(axis=1)).tolist()]
    held: list[Piece] = []
    # One piece for each other tensor near by is declared as a box without elements: all ranks then
    # report the same missing keys, also ranks that hold only padding.
    others: dict[str, Piece] = {}
    for piece in near or pieces[:1]:
        inside = piece.within(box)
        if inside is not None:
            held.append(inside)
        elif piece.shape:
            others[piece.key] = piece
    for piece in held:
        others.pop(piece.key, None)
    return held, others


def _in_pieces(
    pieces: list[Piece], boxes: Boxes, shard: ShardedTensor
) -> ShardedTensorFactory:
    """A shard, declared as the ``pieces`` of its global tensor that lie in it.

    ``boxes``: the boxes of the pieces. A load fills the views. Elements in no piece are padding,
    and become zero.
    """
    prepended = shard.prepend_axis_num
    box = Box(tuple(shard.global_offset), (1,) * prepended + tuple(shard.local_shape))
    held, others = _near(pieces, boxes, box)
    data = shard.data
    if data is None or data.is_meta:
        data = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
    data = data.detach()
    values = data[(*(None,) * prepended, ...)]

    def index(piece: Piece) -> tuple[Any, ...]:
        return (*piece.box.relative_to(box).slices(), ...)

    def build(_key: str, _data: Any, replica_id: ReplicaId, *_: Any) -> Any:
        tied: ReplicaId = 1  # never the main replica
        if isinstance(replica_id, tuple | list):
            tied = (1, *replica_id)
        shards = []
        for piece in (*held, *others.values()):
            if piece.key in others:
                # At the start, which is inside of a stored tensor of any shape.
                offset: tuple[int, ...] = (0,) * len(piece.shape)
                view = data.new_empty((0, *piece.shape[1:]))
            else:
                offset = piece.there.offset
                view = piece.view(values[index(piece)])
            declared = ShardedTensor(
                piece.key,
                view,
                shard.dtype,
                tuple(view.shape),
                piece.shape,
                offset,
                None,
            )
            declared.replica_id = replica_id
            if piece.tied:
                declared.replica_id = tied
            if not piece.exact:
                declared.allow_shape_mismatch = shard.allow_shape_mismatch
            shards.append(declared)
        return shards

    def merge(_: Any) -> torch.Tensor:
        if sum(piece.box.volume for piece in held) < box.volume:
            padding = torch.ones(box.shape, dtype=torch.bool, device=data.device)
            for piece in held:
                padding[index(piece)] = False
            # torch cannot fill float8
            filled = values
            if values.itemsize == 1:
                filled = values.view(torch.uint8)
            filled.masked_fill_(padding, 0)
        return data

    return ShardedTensorFactory(shard.key, data, build, merge, shard.replica_id)
