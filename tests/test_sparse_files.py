"""Sparse files, which claim gigabytes and cost nothing, are errors before they take memory; sparse copies are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CheckpointManager, ShardedTensor
from megackpt.__main__ import main
from megackpt.errors import CheckpointingException, StorageError

GIB, MIB = 1 << 30, 1 << 20
ALLOWED = 256 * MIB
GOLDEN = Path(__file__).parent / "golden"


def holes_are_told(folder: Path) -> bool:
    """Does this file system tell where the holes of a file are?"""
    file = folder / "probe"
    file.touch()
    os.truncate(file, MIB)
    with file.open("rb") as opened:
        try:
            os.lseek(opened.fileno(), 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO
    return False


@pytest.fixture(autouse=True)
def _needs_holes(tmp_path: Path) -> None:
    if not holes_are_told(tmp_path):
        pytest.skip("this file system does not tell of holes")


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ALLOWED
    finally:
        tracemalloc.stop()


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((8,), float(value))),
        "iteration": 3,
    }


def grow(file: Path, size: int = 3 * GIB) -> None:
    os.truncate(file, size)


def sparse_archive(file: Path, size: int = 3 * GIB) -> None:
    """What torch.save could have written, but that the pickle in it is a hole."""
    name = b"archive/data.pkl"
    local = (
        struct.pack("<4s5H3L2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, size, size, len(name), 0)
        + name
    )
    central = struct.pack(
        "<4s6H3L5H2L",
        b"PK\1\2",
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        size,
        size,
        len(name),
        0,
        0,
        0,
        0,
        0,
        0,
    )
    central += name
    at = len(local) + size
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(central), at, 0)
    with file.open("wb") as out:
        out.write(local)
        out.seek(at)
        out.write(central + end)


def without_index(folder: Path, strategy: str) -> None:
    megackpt.save(state(), folder, strategy)
    (folder / "megackpt.index").unlink()


def index(folder: Path) -> None:
    megackpt.save(state(), folder)
    grow(folder / "megackpt.index")


def index_of_zeros(folder: Path) -> None:
    megackpt.save(state(), folder)
    os.truncate(folder / "megackpt.index", 0)
    grow(folder / "megackpt.index")


def head_of_the_index(folder: Path) -> None:
    megackpt.save(state(), folder)
    (folder / "megackpt.index").write_bytes(
        b"megackpt" + struct.pack("<II", 1, 2 * GIB) + b"{"
    )
    grow(folder / "megackpt.index")


def metadata(folder: Path) -> None:
    without_index(folder, "torch_dist")
    grow(folder / ".metadata")


def common_state(strategy: str) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        without_index(folder, strategy)
        grow(folder / "common.pt")

    return forge


def pickle_of_the_common_state(strategy: str) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        without_index(folder, strategy)
        sparse_archive(folder / "common.pt")

    return forge


def config(folder: Path) -> None:
    without_index(folder, "zarr")
    grow(folder / "metadata.json")


def group(folder: Path) -> None:
    without_index(folder, "zarr")
    grow(folder / "zarr.json")


def array(folder: Path) -> None:
    without_index(folder, "zarr")
    grow(folder / "w/zarr.json")


def old_array(folder: Path) -> None:
    shutil.copytree(GOLDEN / "mcore-0.12.3-zarr-tp2pp1dp2", folder)
    grow(folder / "misc.bool/.zarray")


def shard(folder: Path) -> None:
    """Of 2^27 chunks, whose index would have 2 GiB."""
    without_index(folder, "zarr")
    cell = 1 << 27
    sharding = {
        "chunk_shape": [1],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end",
    }
    document = json.loads((folder / "w/zarr.json").read_text())
    document |= {
        "shape": [cell],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [cell]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    (folder / "w/zarr.json").write_text(json.dumps(document))
    grow(folder / "w/c.0")


def padded_chunk(folder: Path) -> None:
    """Of 4 GiB for 4 elements, which is compressed to nothing."""
    shutil.copytree(GOLDEN / "mcore-0.12.3-zarr-tp2pp1dp2", folder)
    document = json.loads((folder / "misc.bool/.zarray").read_text())
    document |= {
        "shape": [4],
        "chunks": [4 * GIB],
        "compressor": {"id": "zlib", "level": 1},
    }
    (folder / "misc.bool/.zarray").write_text(json.dumps(document))
    (folder / "misc.bool/0").write_bytes(zlib.compress(bytes(MIB)))


def odd_record(folder: Path) -> None:
    """Of a tensor that lies in another order, so that torch has to read it; sparse up to its end."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(4, 2).t()}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    size = 3 * GIB
    before = (folder / ".metadata").read_bytes()
    length = file.stat().st_size
    number = b"M" + struct.pack("<H", length)
    assert before.count(number) == 1
    (folder / ".metadata").write_bytes(
        before.replace(number, b"\x8a\x05" + size.to_bytes(5, "little"))
    )
    grow(file, size)


def header(folder: Path) -> None:
    without_index(folder, "safetensors")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 99_000_000) + b"{")
    grow(folder / "model.safetensors")


def weight_map(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text("{")
    grow(folder / "model.safetensors.index.json", 99_000_000)


def torch_file(folder: Path) -> None:
    megackpt.save(state(), folder.with_name("saved"))
    megackpt.convert(folder.with_name("saved"), folder, "torch")
    (folder / "megackpt.index").unlink()
    grow(folder / "model.pt")


def pickle_of_a_torch_file(folder: Path) -> None:
    folder.mkdir()
    sparse_archive(folder / "pytorch_model.bin", GIB - 1)


FORGED: dict[str, Callable[[Path], None]] = {
    "index": index,
    "index of zeros": index_of_zeros,
    "head of the index": head_of_the_index,
    ".metadata": metadata,
    **{
        f"common.pt, {name}": common_state(name)
        for name in ("torch_dist", "zarr", "safetensors")
    },
    **{
        f"its pickle, {name}": pickle_of_the_common_state(name)
        for name in ("torch_dist", "zarr", "safetensors")
    },
    "metadata.json": config,
    "zarr.json of the group": group,
    "zarr.json of an array": array,
    ".zarray": old_array,
    "zarr shard": shard,
    "padded chunk": padded_chunk,
    "odd record": odd_record,
    "safetensors header": header,
    "weight map": weight_map,
    "torch file": torch_file,
    "pickle of a torch file": pickle_of_a_torch_file,
}


def is_damaged(folder: Path) -> bool:
    try:
        return bool(megackpt.verify(folder).problems)
    except CheckpointingException as error:
        return not isinstance(error, StorageError)


@pytest.mark.parametrize("name", FORGED)
def test_every_reader_refuses_it(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder = run / "iter_0000001"
    FORGED[name](folder)
    manager = CheckpointManager(run)
    with little_memory():
        with pytest.raises(CheckpointingException):
            megackpt.load(state(), folder)
        if name == "metadata.json":  # so large a file of this name is another program's
            assert manager.restore(state()) is None
        else:
            with pytest.raises(CheckpointingException):
                manager.restore(
                    {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 4))}
                )
        with suppress(
            CheckpointingException
        ):  # without what is forged there may be tensors
            megackpt.load_plain_tensors(folder)
    with little_memory():
        assert is_damaged(folder)
        assert manager.latest(verify=True) is None
    with little_memory():
        main(["ls", str(run)])
        for command in (["show"], ["verify"], ["diff", str(folder)]):
            main([*command, str(folder)])
        main(["convert", str(folder), str(tmp_path / "new"), "--to", "torch_dist"])


def test_small_files_of_a_run(tmp_path: Path) -> None:
    """The trackers."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
    grow(tmp_path / "latest_checkpointed_iteration.txt")
    (tmp_path / "latest").touch()
    grow(tmp_path / "latest")
    with little_memory():
        assert CheckpointManager(tmp_path).latest(verify=True).step == 1
        assert CheckpointManager(tmp_path).restore(state()).step == 1
        assert main(["ls", str(tmp_path)]) == 0


def test_the_journal_of_a_conversion(tmp_path: Path) -> None:
    megackpt.save(state(1), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/megackpt.journal").touch()
    grow(tmp_path / "b/megackpt.journal")
    with little_memory():
        main(
            [
                "convert",
                str(tmp_path / "a"),
                str(tmp_path / "b"),
                "--to",
                "zarr",
                "--overwrite",
            ]
        )
        main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zarr"])
    assert megackpt.verify(tmp_path / "c").ok


def sparse_copy(source: str, target: str) -> str:
    """As ``cp --sparse=always`` makes it, and as file systems that compress do: zeros become holes."""
    with open(source, "rb") as read, open(target, "wb") as written:
        while data := read.read(4096):
            written.write(data) if any(data) else written.seek(len(data), os.SEEK_CUR)
        written.truncate(os.path.getsize(source))
    return target


@pytest.mark.parametrize("kept", [True, False], ids=["with index", "without index"])
@pytest.mark.parametrize("strategy", ["torch_dist", "zarr", "safetensors", "torch"])
def test_zeros_that_became_holes_are_data(
    tmp_path: Path, strategy: str, kept: bool
) -> None:
    zeros = torch.zeros(5 << 20)
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(5 << 20))}
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", zeros), "z": zeros},
        tmp_path / "saved",
    )
    megackpt.convert(tmp_path / "saved", tmp_path / "c", strategy)
    shutil.copytree(tmp_path / "c", tmp_path / "sparse", copy_function=sparse_copy)
    if not kept:
        (tmp_path / "sparse/megackpt.index").unlink()
    found = megackpt.load(asked, tmp_path / "sparse")
    assert found["z"].shape == zeros.shape
    assert not found["z"].any()
    assert not found["w"].any()
    assert megackpt.verify(tmp_path / "sparse").ok
