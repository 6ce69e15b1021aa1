"""The contestants: megackpt in each of its formats, and stock torch DCP. Further peers are in peers.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import megackpt
from benchmarks.states import EIGHTHS, Piece


@dataclass(frozen=True)
class Place:
    """Which rank of how many this process is."""

    rank: int
    ranks: int

    @property
    def parts(self) -> int:
        """The number of parts of each tensor in the saved state; all further ranks hold copies."""
        return min(2, self.ranks)


class Contestant(ABC):
    """One library, as its users call it."""

    name: str
    verifies = False
    """Can its loads check digests?"""

    @abstractmethod
    def declare(self, pieces: Sequence[Piece]) -> Any:
        """The state as this library wants it. Not timed; done once for each state, unless ``wears_out``."""

    @abstractmethod
    def save(self, declared: Any, folder: Path) -> None:
        """Durably, when it returns."""

    @abstractmethod
    def load(
        self, declared: Any, folder: Path, verify: bool
    ) -> Mapping[str, torch.Tensor] | None:
        """Into the tensors of the state. Returns, by key, tensors that it loaded instead of these."""

    wears_out = False


class Megackpt(Contestant):
    verifies = True

    def __init__(self, format_name: str) -> None:
        self.name = format_name

    def declare(self, pieces: Sequence[Piece]) -> dict[str, megackpt.ShardedTensor]:
        return {
            piece.key: megackpt.ShardedTensor.from_rank_offsets(
                piece.key,
                piece.data,
                (0, piece.index, piece.parts),
                replica_id=(0, 0, piece.copy),
            )
            for piece in pieces
        }

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        megackpt.save(declared, folder, self.name)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        one = next(iter(declared.values()))
        whole = bool(
            one.axis_fragmentations[0] != EIGHTHS
        )  # not a slice, which leaves things out on purpose
        megackpt.load(declared, folder, verify=verify, validate_access_integrity=whole)


class _Slice(torch.Tensor):
    """For DCP: one region of a tensor, which no DTensor can describe."""

    piece: Piece

    @classmethod
    def of(cls, piece: Piece) -> _Slice:
        made = torch.empty(1, 1, device="cpu").expand(piece.shape).as_subclass(cls)
        made.piece = piece
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(self.piece.offset), self.piece.data.shape)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.piece.data


@cache
def _mesh(copies: int, parts: int) -> DeviceMesh:
    return init_device_mesh("cpu", (copies, parts), mesh_dim_names=("dp", "tp"))


class StockDcp(Contestant):
    """torch.distributed.checkpoint with its defaults."""

    name = "torch DCP"

    def __init__(self, place: Place) -> None:
        self.place = place

    def declare(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        return {piece.key: self._declared(piece) for piece in pieces}

    def _declared(self, piece: Piece) -> torch.Tensor:
        if self.place.ranks % piece.parts:
            return _Slice.of(piece)
        mesh = _mesh(self.place.ranks // piece.parts, piece.parts)
        return DTensor.from_local(piece.data, mesh, [Replicate(), Shard(0)])

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        dcp_save(declared, checkpoint_id=folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:  # noqa: ARG002
        dcp_load(declared, checkpoint_id=folder)
