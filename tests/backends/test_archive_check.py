"""The CRC32s of records that others wrote: all damage is told, and what has no checksum is not called good."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt.backends.archives import WINDOW
from megackpt.backends.torch_dist import TorchDist
from megackpt.storage import LocalStorage

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dist`")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One large record, and more small ones than one thread takes at a time."""
    state = {
        "large": torch.arange(WINDOW, dtype=torch.int32),
        "text": "hi",
        "empty": torch.empty(0),
    }
    state |= {f"small.{i}": torch.full((3,), float(i)) for i in range(150)}
    folder = tmp_path_factory.mktemp("stock")
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def problems(folder: Path) -> list[str] | None:
    root = LocalStorage(folder)
    return TorchDist().verify_native(root, TorchDist().read_manifest(root))


def test_good(stock: Path) -> None:
    assert problems(stock) == []


def test_every_damaged_record_is_reported(stock: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stock, tmp_path / "ckpt")
    manifest = TorchDist().read_manifest(LocalStorage(folder))
    (file,) = manifest.files
    data = bytearray((folder / file).read_bytes())
    at = {
        key: manifest.chunks_of(key)[0].location
        for key in ("large", "small.7", "small.149", "text")
    }
    data[at["large"].start + at["large"].length // 2] ^= 1
    data[data.index(torch.full((3,), 7.0).numpy().tobytes(), at["small.7"].start)] ^= 1
    data[at["small.149"].start + at["small.149"].length - 1] ^= (
        1  # the end of the archive's own directory
    )
    data[data.index(b"\x80\x02", at["text"].start)] ^= 1
    (folder / file).write_bytes(data)
    told = problems(folder)
    assert told is not None
    assert len(told) == len(at)
    for key in at:
        (one,) = (problem for problem in told if f"'{key}'" in problem)
        assert file in one


def test_without_checksums_nothing_is_called_good(tmp_path: Path) -> None:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(computed)
    assert problems(tmp_path) is None
