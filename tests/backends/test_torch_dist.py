"""torch_dist: torch DCP reads what we write, we read what others wrote, and hostile files do nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megackpt.backends.archives import frame, frame_lengths
from megackpt.backends.torch_dist import TorchDist
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
)
from tests.backends.torch_dist_states import (
    DTYPES,
    SAVE_ID,
    Held,
    Saved,
    foreign,
    halves,
    load,
    load_all,
    piece,
    save,
    thing,
)
from tests.bits import assert_same, bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:`torch_dist`"
)


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    tensors = {
        f"layer.{dtype}": bits((6, 5), dtype, i) for i, dtype in enumerate(DTYPES)
    }
    tensors |= {f"scalar.{dtype}": bits((), dtype, i) for i, dtype in enumerate(DTYPES)}
    tensors |= {
        "empty": torch.empty(0, 3),
        "large": bits((1700, 400), "float32"),
        "ü/odd key": torch.ones(1, 1, 4),
    }
    return tensors


@pytest.fixture(scope="module")
def saved(
    model: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    """Two ranks: 2-dimensional tensors by rows, all others on rank 0; an object each; the common state."""
    ranks: list[list[Held]] = [[thing(COMMON_KEY, {"iteration": 7})], []]
    for key, tensor in model.items():
        if tensor.dim() == 2 and len(tensor):
            for rank, box in enumerate(halves(*tensor.shape)):
                ranks[rank].append(piece(key, tensor, box, rank))
        else:
            ranks[0].append(piece(key, tensor))
    for rank in range(2):
        ranks[rank].append(
            thing("rng_state", [{"rank": rank}], (0, rank), (1, 2), rank)
        )
    return save(tmp_path_factory.mktemp("torch_dist"), ranks)


class TestOwn:
    @pytest.mark.parametrize("verify", [True, False])
    def test_every_dtype_resharded(
        self, saved: Saved, model: dict[str, torch.Tensor], verify: bool
    ) -> None:
        wanted = []
        for key, tensor in model.items():
            box = (
                Box((1, 2), (4, 3))
                if tensor.shape == (6, 5)
                else Box.whole(tensor.shape)
            )
            wanted.append(piece(key, torch.zeros_like(tensor), box))
        load(saved, wanted, verify)
        for declared, tensor in wanted:
            assert isinstance(tensor, torch.Tensor)
            assert_same(tensor, model[declared.shard.key][declared.shard.box.slices()])

    def test_objects_and_common_state(self, saved: Saved) -> None:
        _, shards = load_all(saved)
        assert shards == {
            (COMMON_KEY, ()): {"iteration": 7},
            ("rng_state", (0, 0)): [{"rank": 0}],
            ("rng_state", (0, 1)): [{"rank": 1}],
        }

    def test_the_directory(self, saved: Saved) -> None:
        names = set(os.listdir(saved.path))
        assert names == {
            "common.pt",
            ".metadata",
            "metadata.json",
            *(f"__{r}_{n}.distcp" for r in (0, 1) for n in (0, 1)),
        }
        assert names <= set(TorchDist().layout(2, saved.manifest).files)
        assert json.loads((saved.path / "metadata.json").read_bytes()) == {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        assert (
            list(TorchDist().finish(saved.root, saved.manifest).files)[-1]
            == "metadata.json"
        )
        payloads = saved.manifest.chunks.start[
            [
                not saved.manifest.tensors[t].meta.is_object
                for t in saved.manifest.chunks.tensor
            ]
        ]
        assert not (payloads % 64).any()

    def test_without_the_index_it_is_the_same(
        self, saved: Saved, model: dict[str, torch.Tensor]
    ) -> None:
        tensors, shards = load_all(foreign(saved.path))
        assert tensors.keys() == model.keys()
        for key, tensor in model.items():
            assert_same(tensors[key], tensor)
        assert shards[COMMON_KEY, ()] == {"iteration": 7}
        assert shards["rng_state", (0, 1)] == [{"rank": 1}]

    def test_a_flipped_bit_is_caught(
        self, saved: Saved, model: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        here = save(tmp_path, [[piece("w", model["large"])]])
        chunk = here.manifest.chunks_of("w")[0]
        file = tmp_path / chunk.location.file
        data = bytearray(file.read_bytes())
        data[chunk.location.start + (1 << 20) + 17] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=r"'w'.*__0_0.distcp.*block 1"):
            load(here, [piece("w", torch.zeros_like(model["large"]))])

    def test_hint_and_number_of_files(
        self, model: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        held = [
            piece(f"{group}.{i}", model["large"][:10])
            for group in ("model", "optimizer")
            for i in range(4)
        ]
        backend = TorchDist(files_per_rank=3, separation_hint="optimizer")
        here = save(tmp_path, [held], backend)
        expected = {
            f"{hint}__0_{n}.distcp" for hint in ("", "optimizer") for n in range(3)
        }
        assert set(here.manifest.files) == expected
        assert expected <= set(backend.layout(1, here.manifest).files)
        for entry in here.manifest.tensors:
            file = here.manifest.chunks_of(entry.key)[0].location.file
            assert file.startswith("optimizer") == entry.key.startswith("optimizer")
        for wrong in (
            {"files_per_rank": 0},
            {"separation_hint": "a/b"},
            {"separation_hint": ""},
        ):
            with pytest.raises(BackendError):
                TorchDist(**wrong)  # type: ignore[arg-type]

    def test_two_items_of_one_name(self, tmp_path: Path) -> None:
        with pytest.raises(BackendError, match="x/shard_0_1"):
            save(
                tmp_path,
                [[piece("x/shard_0_1", torch.ones(2)), thing("x", 1, (0,), (1,))]],
            )

    def test_a_model_that_gives_too_few_bytes(self, tmp_path: Path) -> None:
        declared, _ = piece("w", torch.ones(4))
        with pytest.raises(BackendError, match=r"'w' .* should have 16 bytes"):
            save(tmp_path, [[(declared, lambda: b"abc")]])
        assert not list(tmp_path.iterdir())


class TestStockDcp:
    def test_load(self, saved: Saved, model: dict[str, torch.Tensor]) -> None:
        state: dict[str, Any] = {
            key: torch.zeros_like(tensor) for key, tensor in model.items()
        }
        state |= {
            "rng_state/shard_0.0_1.2": io.BytesIO(),
            "rng_state/shard_0.1_1.2": io.BytesIO(),
        }
        dcp.load(state, checkpoint_id=saved.path, no_dist=True)
        for key, tensor in model.items():
            assert_same(state[key], tensor)
        assert state["rng_state/shard_0.1_1.2"] == [{"rank": 1}]

    def test_dcp_to_torch_save(
        self, saved: Saved, model: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        dcp_to_torch_save(saved.path, tmp_path / "whole.pt")
        state = torch.load(tmp_path / "whole.pt", weights_only=False)
        for key, tensor in model.items():
            assert_same(state[key], tensor)

    def test_metadata_is_what_torch_would_make(self, saved: Saved) -> None:
        found = pickle.loads((saved.path / ".metadata").read_bytes())
        described: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for key, meta in saved.manifest.tensors:
            chunks = saved.manifest.chunks_of(key)
            if key == COMMON_KEY:
                continue
            if meta.is_object:
                for chunk in chunks:
                    name = (
                        f"{key}/shard_{chunk.box.offset[0]}.{chunk.box.offset[1]}_1.2"
                    )
                    described[name] = dcp_metadata.BytesStorageMetadata()
                    places[dcp_metadata.MetadataIndex(name)] = _place(chunk, 0, 0)
                continue
            properties = dcp_metadata.TensorProperties(dtype=getattr(torch, meta.dtype))
            listed = [
                dcp_metadata.ChunkStorageMetadata(
                    torch.Size(c.box.offset), torch.Size(c.box.shape)
                )
                for c in chunks
            ]
            described[key] = dcp_metadata.TensorStorageMetadata(
                properties, torch.Size(meta.shape), listed
            )
            for chunk in chunks:
                head, tail = map(len, frame(meta.dtype, chunk.box.shape))
                places[dcp_metadata.MetadataIndex(key, chunk.box.offset)] = _place(
                    chunk, head, tail
                )
        about = dcp_metadata.StorageMeta(save_id=SAVE_ID)
        expected = dcp_metadata.Metadata(described, None, places, about)
        expected.version = "1.0.0"  # no argument: torch 2.8 has no such field, and reads those that have
        assert found == expected
        assert found.version == expected.version
        assert type(found.state_dict_metadata["large"].size) is torch.Size

    def test_wide_numbers_in_metadata(self, saved: Saved) -> None:
        far = replace(
            saved.manifest.chunks, start=saved.manifest.chunks.start + (1 << 40)
        )
        table = (
            TorchDist()
            .finish(saved.root, replace(saved.manifest, chunks=far))
            .files[".metadata"]
        )
        near = pickle.loads((saved.path / ".metadata").read_bytes()).storage_data
        for index, place in pickle.loads(table).storage_data.items():
            assert place.offset == near[index].offset + (1 << 40)

    def test_records_are_plain_torch_archives(
        self, saved: Saved, model: dict[str, torch.Tensor]
    ) -> None:
        table = pickle.loads((saved.path / ".metadata").read_bytes())
        index = dcp_metadata.MetadataIndex("layer.bfloat16", (3, 0))
        place = table.storage_data[index]
        data = (saved.path / place.relative_path).read_bytes()[place.offset :][
            : place.length
        ]
        assert_same(
            torch.load(io.BytesIO(data), weights_only=True), model["layer.bfloat16"][3:]
        )


def _place(chunk: Any, head: int, tail: int) -> _StorageInfo:
    return _StorageInfo(
        chunk.location.file,
        chunk.location.start - head,
        chunk.location.length + head + tail,
    )


class TestRecords:
    @pytest.mark.parametrize(
        "size",
        [
            0,
            1,
            (1 << 31) - 1,
            1 << 31,
            (1 << 32) - 70000,
            (1 << 32) - 1,
            1 << 32,
            5 << 30,
        ],
    )
    def test_sizes_around_the_limits(self, tmp_path: Path, size: int) -> None:
        head, tail = frame("uint8", (1, size))
        assert not len(head) % 64
        lengths = frame_lengths("uint8", np.array([[1, size], [3, 3]], np.int64))
        assert [int(n[0]) for n in lengths] == [len(head), len(tail)]
        with open(tmp_path / "sparse", "wb") as file:
            file.write(head)
            file.truncate(len(head) + size)
            file.seek(len(head) + size)
            file.write(tail)
        tensor = torch.load(tmp_path / "sparse", weights_only=True, mmap=size > 0)
        assert tensor.shape == (1, size)
        assert tensor.is_contiguous()
