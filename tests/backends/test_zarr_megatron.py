"""zarr version 1, Megatron's old layout: arrays of zarr v2 under their bare keys. Read, whatever is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch

import megackpt
import megackpt.zarr_dtypes
from megackpt import ShardedTensor
from megackpt.backends.zarr import Zarr
from megackpt.backends.zarr.array_metadata import parse_zarray
from megackpt.errors import BackendError, CheckpointingException, CorruptCheckpoint
from megackpt.storage import LocalStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "mcore-0.12.3-zarr-tp2pp1dp2"
CONFIG = {"sharded_backend": "zarr", "sharded_backend_version": 1}
DTYPES = (
    "bool",
    "uint8",
    "int16",
    "int64",
    "float16",
    "bfloat16",
    "float64",
    "complex64",
    "float8_e4m3fn",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metadata.json").write_text(json.dumps(CONFIG))
    return tmp_path


def put(
    path: Path, values: Any, kind: str | None, chunks: list[int], **how: Any
) -> None:
    """An array as tensorstore writes version 2 of zarr; uncompressed if nothing else is asked for."""
    document = {"compressor": None, "chunks": chunks, "dimension_separator": ".", **how}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": document,
        "store_data_equal_to_fill_value": True,
    }
    store = ts.open(spec, dtype=kind, shape=values.shape, create=True).result()
    store.write(values).result()


def random(dtype: str, *shape: int) -> Any:
    kind = ts.dtype(dtype).numpy_dtype
    bits = np.random.default_rng(0).integers(
        0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8
    )
    return bits.view(kind).reshape(shape)


def octets(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dimension_separator": "/"},
        {"compressor": {"id": "zlib", "level": 1}},
        {"compressor": {"id": "zstd", "level": 1}},
        {
            "compressor": {
                "id": "blosc",
                "cname": "lz4",
                "clevel": 5,
                "shuffle": 1,
                "blocksize": 0,
            }
        },
    ],
    ids=str,
)
def test_padded_chunks_of_any_kind(
    folder: Path, dtype: str, how: dict[str, Any]
) -> None:
    values = random(dtype, 7, 5)
    put(folder / "w", values, dtype, [3, 2], **how)
    put(folder / "rows", values, dtype, [4, 5], **how)
    tensors = megackpt.load_plain_tensors(folder)
    assert {octets(t) for t in tensors.values()} == {values.tobytes()}
    manifest = Zarr().read_manifest(LocalStorage(folder))
    raw = Zarr().decoded_bytes(manifest) == 0
    plain = how.keys() <= {"dimension_separator"}
    assert raw.any() == plain
    part = ShardedTensor("w", None, tensors["w"].dtype, (4, 2), (7, 5), (2, 1), None)
    found = megackpt.load({"x": part}, folder, validate_access_integrity=False)["x"]
    assert octets(found) == np.ascontiguousarray(values[2:6, 1:3]).tobytes()


def test_scalars_and_empty(folder: Path) -> None:
    put(folder / "scalar", np.array(7, np.int32), "int32", [])
    put(folder / "empty", np.zeros((0, 4), np.float32), "float32", [1, 4])
    assert (folder / "scalar/0").exists()
    tensors = megackpt.load_plain_tensors(folder)
    assert tensors["scalar"].shape == ()
    assert int(tensors["scalar"]) == 7
    assert tensors["empty"].shape == (0, 4)


def test_keys_stand_as_they_are(folder: Path) -> None:
    keys = ["a.b", "a", "a/b", "a/b/c.d", "%41", "x.sync", "shard_x", "deep/" * 9 + "w"]
    for i, key in enumerate(keys):
        put(folder / key, np.array([i], np.int32), "int32", [1])
    (folder / "a.b.sync").mkdir()
    (folder / "a.b.sync/0.lock").write_text("")
    (folder / "logs").mkdir()
    (folder / "logs/today").write_text("not ours")
    found = megackpt.load_plain_tensors(folder)
    assert {key: int(t) for key, t in found.items()} == {
        key: i for i, key in enumerate(keys)
    }
    (folder / "link").symlink_to(folder / "a")  # a tensor's
    with pytest.raises(CorruptCheckpoint, match="link is not a directory"):
        megackpt.load_plain_tensors(folder)


def test_objects_are_handed_over_in_the_form_of_ours(folder: Path) -> None:
    (folder / "rng/state").mkdir(parents=True)
    for i in range(2):
        torch.save(
            {"seed": i, "t": torch.full((3,), i)}, folder / f"rng/state/shard_{i}_2.pt"
        )
    torch.save({"iteration": 3}, folder / "common.pt")
    put(folder / "w", np.zeros(2, np.float32), "float32", [2])
    asked = {
        str(i): megackpt.ShardedObject("rng/state", None, (2,), (i,)) for i in range(2)
    }
    found = megackpt.load(asked, folder)
    assert [found[str(i)]["seed"] for i in range(2)] == [0, 1]
    assert found["1"]["t"].tolist() == [1, 1, 1]
    assert found["iteration"] == 3
    megackpt.convert(folder, folder.parent / "new", "zarr")
    again = megackpt.load(asked, folder.parent / "new")
    assert again["1"]["t"].tolist() == [1, 1, 1]
    assert again["iteration"] == 3


def test_a_directory_without_metadata_json_is_known_by_its_arrays(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(GOLDEN, tmp_path / "ckpt")
    (folder / "metadata.json").unlink()
    assert megackpt.check_is_distributed_checkpoint(folder)
    assert (
        megackpt.load_plain_tensors(folder).keys()
        == megackpt.load_plain_tensors(GOLDEN).keys()
    )
    assert not Zarr().recognises(LocalStorage(tmp_path))
    (tmp_path / "link").symlink_to(folder / "misc.bool")
    assert not Zarr().recognises(LocalStorage(tmp_path))


def test_lost_chunks_and_cut_ones_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN, tmp_path / "ckpt")
    (folder / "decoder.layers.mlp.linear_fc1.weight/2.3.0").unlink()
    (folder / "misc.bool/0").write_bytes(b"\1" * 7)
    with pytest.raises(CorruptCheckpoint) as caught:
        megackpt.load_plain_tensors(folder)
    assert "decoder.layers.mlp.linear_fc1.weight/2.3.0" in str(caught.value)
    assert "misc.bool/0 has 7 bytes instead of 8" in str(caught.value)
    assert not megackpt.verify(folder).ok


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"shape": [1 << 62, 1 << 62]}, CheckpointingException),
        ({"shape": [4], "chunks": [1 << 61]}, CorruptCheckpoint),
        ({"shape": [-4]}, CorruptCheckpoint),
        ({"shape": [4.0]}, CorruptCheckpoint),
        ({"shape": [4, 4]}, CorruptCheckpoint),
        ({"chunks": [0]}, CorruptCheckpoint),
        ({"chunks": None}, CorruptCheckpoint),
        ({"dtype": "|O"}, BackendError),
        ({"dtype": "<M8[ns]"}, BackendError),
        ({"dtype": [["a", "<f4"]]}, BackendError),
        ({"dtype": None}, BackendError),
        ({"filters": [{"id": "delta"}]}, BackendError),
        ({"compressor": {"id": "nonsense"}}, BackendError),
        ({"compressor": 5}, CorruptCheckpoint),
        ({"order": "X"}, BackendError),
        ({"filters": [{"id": "pickle"}]}, BackendError),
        ({"dimension_separator": "-"}, CorruptCheckpoint),
        ({"zarr_format": 3}, CorruptCheckpoint),
    ],
    ids=str,
)
def test_a_description_that_lies_is_an_error(
    folder: Path, change: dict[str, Any], kind: type[CheckpointingException]
) -> None:
    put(folder / "w", np.arange(4, dtype=np.float64), "float64", [4])
    path = folder / "w/.zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(kind, match="w"):
        megackpt.load_plain_tensors(folder)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"shape": 5}']
)
def test_garbage_is_an_error(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="here"):
        parse_zarray(text, "here")


def test_folders_in_folders_end_somewhere(folder: Path) -> None:
    (folder / "/".join("f" * 40)).mkdir(parents=True)
    with pytest.raises(CorruptCheckpoint, match="deep"):
        megackpt.load_plain_tensors(folder)
