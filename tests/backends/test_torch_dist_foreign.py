"""torch_dist: checkpoints of other programs, and .metadata files that lie."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_dist.metadata_reader import parse_name
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    UntrustedClass,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
)
from megackpt.storage import LocalStorage
from tests.backends.torch_dist_states import (
    foreign,
    load,
    load_all,
    piece,
)
from tests.bits import assert_same, bits

GOLDEN = Path(__file__).parent.parent / "golden"

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:`torch_dist`"
)


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
            "plain": bits((900, 700), "bfloat16"),
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
        big = bits((4096, 512), "float32")
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
