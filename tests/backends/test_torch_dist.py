"""torch_dist: torch DCP reads what we write, we read what others wrote, and hostile files do nothing."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megackpt import serialization
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_dist.metadata_reader import parse_name
from megackpt.backends.torch_dist.record_frame import frame, frame_lengths
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    UntrustedClass,
)
from megackpt.planning.box import Box, Boxes
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import plan_save
from megackpt.staging.source import TensorSource
from megackpt.staging.target import LoadTarget
from megackpt.storage import LocalStorage

GOLDEN = Path(__file__).parent.parent / "golden"
DTYPES = [name for name in ITEMSIZE if name != OBJECT]
SAVE_ID = "00112233445566778899aabbccddeeff"

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:`torch_dist`"
)

Blob = Callable[[], bytes]
Held = tuple[Declaration, "torch.Tensor | Blob | None"]


@dataclass(frozen=True)
class Saved:
    root: LocalStorage
    manifest: Manifest

    @property
    def path(self) -> Path:
        return Path(self.root.location)


def piece(key: str, whole: torch.Tensor, box: Box | None = None, rank: int = 0) -> Held:
    """A rank's own piece of a tensor, contiguous."""
    box = box or Box.whole(whole.shape)
    meta = TensorMeta(tuple(whole.shape), str(whole.dtype).removeprefix("torch."))
    data = whole[box.slices()].contiguous()
    return Declaration(ShardId(key, box), meta, 0, False, data.nbytes, rank), data


def thing(
    key: str,
    value: Any,
    offset: tuple[int, ...] = (),
    shape: tuple[int, ...] = (),
    rank: int = 0,
) -> Held:
    """A rank's shard of an object."""
    shard = ShardId(key, Box(offset, (1,) * len(shape)))
    return Declaration(
        shard, TensorMeta(shape, OBJECT), 0, False, 100, rank
    ), lambda: serialization.dump(value)


def save(
    path: Path, ranks: Sequence[Sequence[Held]], backend: TorchDist | None = None
) -> Saved:
    backend = backend or TorchDist()
    root = LocalStorage(path, create=True)
    plans, manifest = plan_save(
        [Declarations.of([d for d, _ in held]) for held in ranks]
    )
    results = []
    for plan, held in zip(plans, ranks, strict=True):
        source = TensorSource(
            plan, [value for _, value in held], Boxes.of(d.shard.box for d, _ in held)
        )  # type: ignore[misc]
        results.append(backend.write(root, plan, source))
    manifest = replace(
        manifest.located(results),
        save_id=SAVE_ID,
        backend=(backend.properties.name, backend.properties.version),
    )
    for name, data in backend.finish(root, manifest).files.items():
        root.put(name, data)
    return Saved(root, manifest)


def load(saved: Saved, wanted: Sequence[Held], verify: bool = True) -> dict[int, bytes]:
    declared = Declarations.of([d for d, _ in wanted])
    stored = [
        None if d.meta.is_object else getattr(torch, d.meta.dtype) for d, _ in wanted
    ]
    tensors = [
        value if isinstance(value, torch.Tensor) else None for _, value in wanted
    ]
    landing = LoadTarget(tensors, Boxes.of(d.shard.box for d, _ in wanted), stored, {})
    TorchDist().read(saved.root, plan_load(declared, saved.manifest), landing, verify)
    return landing.blobs


def load_all(
    saved: Saved,
) -> tuple[dict[str, torch.Tensor], dict[tuple[str, tuple[int, ...]], Any]]:
    """All tensors whole, and all objects by key and offset."""
    wanted: list[Held] = []
    for key, meta in saved.manifest.tensors:
        if meta.is_object:
            wanted += [
                thing(key, None, c.box.offset, meta.shape)
                for c in saved.manifest.chunks_of(key)
            ]
        else:
            wanted.append(
                piece(key, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)))
            )
    blobs = load(saved, wanted)
    tensors = {d.shard.key: t for d, t in wanted if isinstance(t, torch.Tensor)}
    shards = {
        (wanted[i][0].shard.key, wanted[i][0].shard.box.offset): serialization.load(b)
        for i, b in blobs.items()
    }
    return tensors, shards


def foreign(path: Path) -> Saved:
    root = LocalStorage(path)
    backend = TorchDist()
    assert backend.recognises(root)
    return Saved(root, backend.read_manifest(root))


def octets(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if tensor.numel()
        else b""
    )


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert octets(found) == octets(expected)


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bits at all, but for bool, which has two values."""
    top = 2 if dtype == "bool" else 256
    size = math.prod(shape) * ITEMSIZE[dtype]
    bits = torch.randint(
        0,
        top,
        (size,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return (
        bits.view(getattr(torch, dtype)).reshape(shape)
        if size
        else torch.empty(shape, dtype=getattr(torch, dtype))
    )


def halves(rows: int, columns: int) -> list[Box]:
    return [
        Box((0, 0), (rows // 2, columns)),
        Box((rows // 2, 0), (rows - rows // 2, columns)),
    ]


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    tensors = {
        f"layer.{dtype}": random((6, 5), dtype, i) for i, dtype in enumerate(DTYPES)
    }
    tensors |= {
        f"scalar.{dtype}": random((), dtype, i) for i, dtype in enumerate(DTYPES)
    }
    tensors |= {
        "empty": torch.empty(0, 3),
        "large": random((1700, 400), "float32"),
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


class TestForeign:
    def test_golden_of_megatron_core(self) -> None:
        tensors, shards = load_all(foreign(GOLDEN / "mcore-0.16.1-tp2pp1dp2"))
        expected = torch.load(
            GOLDEN / "mcore-0.16.1-tp2pp1dp2.expected.pt", weights_only=True
        )
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_same(tensors[key], tensor)
        assert shards[COMMON_KEY, ()]["iteration"] == 100
        assert shards["rng_state", (0, 1)][0][0]["tp"] == 1
        extra = "decoder.layers.self_attention.core_attention._extra_state"
        assert [shards[extra, (i,)][0]["layer"] for i in range(4)] == [0, 1, 2, 3]

    def test_stock_dcp(self, tmp_path: Path) -> None:
        base = torch.arange(20.0)
        state = {
            "plain": random((900, 700), "bfloat16"),
            "nested": {
                "x": torch.tensor(2.0),
                "text": "hi",
                "list": [1, torch.ones(2, dtype=torch.uint16)],
            },
            "transposed": torch.arange(6).reshape(2, 3).t(),
            "view": base[3:9],
            "strided": base[::3],
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "empty": torch.empty(0, 4),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        }
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        tensors, shards = load_all(foreign(tmp_path))
        for key in ("plain", "transposed", "view", "strided", "empty", "fp8"):
            assert_same(tensors[key], state[key].contiguous())  # type: ignore[union-attr]
        assert_same(tensors["parameter"], torch.ones(3))
        assert tensors["conjugate"].tolist() == [1 - 2j]
        assert_same(tensors["nested.list.1"], torch.ones(2, dtype=torch.uint16))
        assert tensors["nested.x"] == 2
        assert shards == {("nested.text", ()): "hi", ("nested.list.0", ()): 1}

    def test_only_the_ranges_needed_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        big = random((4096, 512), "float32")
        dcp.save({"w": big}, checkpoint_id=tmp_path, no_dist=True)
        here = foreign(tmp_path)
        count = 0
        pread = os.preadv

        def counted(fd: int, buffers: Any, offset: int, *rest: Any) -> int:
            nonlocal count
            done = pread(fd, buffers, offset, *rest)
            count += done
            return done

        monkeypatch.setattr(os, "preadv", counted)
        held = piece("w", torch.zeros_like(big), Box((1024, 0), (512, 512)))
        load(here, [held])
        assert count <= 512 * 512 * 4 + 8192
        assert isinstance(held[1], torch.Tensor)
        assert_same(held[1], big[1024:1536])

    @pytest.mark.parametrize(
        ("name", "parsed"),
        [
            ("rng/shard_0.1_4.2", ("rng", (0, 1), (4, 2))),
            ("a/b/shard_x/shard_3_4", ("a/b/shard_x", (3,), (4,))),
            ("a/shard_4_4", ("a/shard_4_4", (), ())),
            ("a/shard_1_4.4", ("a/shard_1_4.4", (), ())),
            ("plain", ("plain", (), ())),
            ("old/shard_0.3_4", ("old", (0, 3), (4, -1))),
            ("old/shard_0.3.1_4", ("old/shard_0.3.1_4", (), ())),
            ("common_state/shard_0_1", (COMMON_KEY, (), ())),
            ("common_state/shard_0_2", ("common_state/shard_0_2", (), ())),
        ],
    )
    def test_names_of_objects(
        self, name: str, parsed: tuple[str, tuple[int, ...], tuple[int, ...]]
    ) -> None:
        assert parse_name(name) == parsed

    def test_recognises(self, tmp_path: Path) -> None:
        root = LocalStorage(tmp_path)
        backend = TorchDist()
        assert not backend.recognises(root)
        with pytest.raises(NotACheckpoint):
            backend.read_manifest(root)
        root.put(".metadata", b"")
        assert backend.recognises(root)
        root.put("metadata.json", b'{"sharded_backend": "zarr"}')
        assert not backend.recognises(root)
        root.put("metadata.json", b'{"sharded_backend": 5}')
        assert not backend.recognises(root)
        for text in (
            b"[" * 100_000,
            b"[]",
            b'{"title": "my data"}',
            b" " * (2 << 20),
        ):  # another program's
            root.put("metadata.json", text)
            assert backend.recognises(root)


class _System:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class TestHostile:
    @pytest.fixture
    def stock(self, tmp_path: Path) -> Path:
        dcp.save(
            {"w": torch.arange(12.0).reshape(3, 4)},
            checkpoint_id=tmp_path / "ckpt",
            no_dist=True,
        )
        return tmp_path / "ckpt"

    def rewrite(self, stock: Path, change: Callable[[Any], None]) -> LocalStorage:
        table = pickle.loads((stock / ".metadata").read_bytes())
        change(table)
        (stock / ".metadata").write_bytes(pickle.dumps(table))
        return LocalStorage(stock)

    def test_a_pickle_that_runs_code_runs_nothing(self, stock: Path) -> None:
        witness = stock / "witness"
        root = self.rewrite(
            stock, lambda table: setattr(table, "planner_data", _System(witness))
        )
        with pytest.raises(UntrustedClass, match=r"(posix|os).system"):
            TorchDist().read_manifest(root)
        assert not witness.exists()

    @pytest.mark.parametrize(
        "path", ["../secret", "/etc/passwd", "a/../../b", "", "a\0b", "a//b"]
    )
    def test_paths_stay_inside(self, stock: Path, path: str) -> None:
        (stock.parent / "secret").write_bytes(bytes(5000))
        root = self.rewrite(
            stock,
            lambda t: [
                setattr(i, "relative_path", path) for i in t.storage_data.values()
            ],
        )
        with pytest.raises(CorruptCheckpoint, match="not a file inside the checkpoint"):
            TorchDist().read_manifest(root)

    def test_a_link_is_not_followed(self, stock: Path) -> None:
        secret = stock.parent / "secret"
        os.rename(stock / "__0_0.distcp", secret)
        os.symlink(secret, stock / "__0_0.distcp")
        with pytest.raises(CorruptCheckpoint):
            TorchDist().read_manifest(LocalStorage(stock))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("offset", 1 << 40),
            ("length", 1 << 40),
            ("offset", -1),
            ("length", 3),
            ("length", 1 << 70),
            ("offset", "0"),
        ],
    )
    def test_lying_places(self, stock: Path, field: str, value: Any) -> None:
        root = self.rewrite(
            stock, lambda t: [setattr(i, field, value) for i in t.storage_data.values()]
        )
        with pytest.raises(CorruptCheckpoint):
            TorchDist().read_manifest(root)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: setattr(
                t.state_dict_metadata["w"], "size", torch.Size([1 << 62, 1 << 62])
            ),
            lambda t: setattr(t.state_dict_metadata["w"], "size", torch.Size([3])),
            lambda t: setattr(t.state_dict_metadata["w"], "size", torch.Size([2, 4])),
            lambda t: setattr(t.state_dict_metadata["w"], "size", "large"),
            lambda t: setattr(t.state_dict_metadata["w"], "chunks", None),
            lambda t: setattr(t, "state_dict_metadata", [1]),
            lambda t: setattr(t, "storage_data", {}),
            lambda t: setattr(t, "storage_data", {1: 2}),
        ],
    )
    def test_contradictions(self, stock: Path, change: Callable[[Any], None]) -> None:
        with pytest.raises(CorruptCheckpoint):
            TorchDist().read_manifest(self.rewrite(stock, change))

    def test_compressed_checkpoints_are_refused_clearly(self, stock: Path) -> None:
        def compress(table: Any) -> None:
            for info in table.storage_data.values():
                info.transform_descriptors = ["zstd"]

        with pytest.raises(BackendError, match="zstd"):
            TorchDist().read_manifest(self.rewrite(stock, compress))

    def test_any_damage_to_metadata_is_an_error_or_harmless(self, stock: Path) -> None:
        whole = (stock / ".metadata").read_bytes()
        rng = np.random.default_rng(0)
        for cut in range(0, len(whole), 37):
            (stock / ".metadata").write_bytes(whole[:cut])
            with pytest.raises(CorruptCheckpoint):
                TorchDist().read_manifest(LocalStorage(stock))
        for _ in range(300):
            data = bytearray(whole)
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            (stock / ".metadata").write_bytes(data)
            try:
                TorchDist().read_manifest(LocalStorage(stock))
            except (CorruptCheckpoint, BackendError):
                continue

    def test_bombs(self, stock: Path) -> None:
        bombs = [
            b"\x80\x04" + b")" + b"\x85" * 200_000 + b"0}NNs.",  # deep
            b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",  # a deep key
            b"\x80\x04}" + b")" + b"2\x86" * 60 + b"Ns.",  # a key that doubles 60 times
            b"\x80\x04\x96" + struct.pack("<Q", 1 << 60) + b".",  # a long bytearray
            b"\x80\x04Nr\xff\xff\xff\xff.",  # a far memo entry
            b"\x80\x04" + b"(" * 200_000 + b".",
        ]
        for bomb in bombs:
            (stock / ".metadata").write_bytes(bomb)
            with pytest.raises(CorruptCheckpoint):
                TorchDist().read_manifest(LocalStorage(stock))

    def test_a_record_that_is_none(self, stock: Path) -> None:
        file = stock / "__0_0.distcp"
        file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(CorruptCheckpoint, match="'w'"):
            load(foreign(stock), [piece("w", torch.zeros(3, 4))])

    def test_a_record_of_another_shape(self, stock: Path) -> None:
        other = stock.parent / "other"
        dcp.save(
            {"w": torch.arange(12.0).reshape(4, 3)}, checkpoint_id=other, no_dist=True
        )
        (stock / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
        with pytest.raises(CorruptCheckpoint, match="'w'"):
            load(foreign(stock), [piece("w", torch.zeros(3, 4))])
