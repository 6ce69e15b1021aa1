"""Many small tensors, whose neighbours are written, read and verified together."""

import os

import pytest
import torch

import megackpt
from megackpt.checkpoint import open_checkpoint, verify, verifying
from megackpt.errors import CorruptCheckpoint, ShardingError
from megackpt.state import ShardedTensor, declare
from megackpt.storage.files import LocalReader


@pytest.fixture
def small(tmp_path):
    """Small tensors, side by side in two files, and the first byte of number 7."""
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(40)}
    megackpt.save(megackpt.sharded(state), tmp_path / "s", "torch_dist")
    manifest = open_checkpoint(tmp_path / "s").manifest
    (chunk,) = manifest.chunks_of("t7")
    return tmp_path / "s" / chunk.location.file, chunk.location.start


def test_one_of_many_small_tensors(small):
    file, start = small
    with file.open("r+b") as opened:
        opened.seek(start + 5)
        opened.write(b"\xff")
    done = []
    report = verify(file.parent, advance=done.append)
    assert report.problems == (
        f"'t7' [0:16]: block 0 of 1 is damaged: {file}, bytes {start} to {start + 64}",
    )
    assert sum(done) == report.bytes
    assert len(done) < 10  # neighbours are read together


def test_small_tensors_where_a_second_read_gives_other_bytes(small, monkeypatch):
    """Only what was wrong is read again."""
    file, start = small
    reads = []
    real = LocalReader.read_into

    def read_into(self, at, buffers):
        real(self, at, buffers)
        if self._path != str(file):
            return
        reads.append((at, sum(map(len, buffers))))
        if at < start < at + reads[-1][1]:
            buffers[0][start - at] ^= 1

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    monkeypatch.setattr(LocalReader, "refetch", lambda _: True)
    assert verify(file.parent, threads=1).ok
    assert reads.count((start, 64)) == 1


def test_small_tensors_behind_the_end_of_their_file(small, monkeypatch):
    file, start = small
    monkeypatch.setattr(verifying, "shortfalls", lambda *_: [])
    os.truncate(file, start + 5)
    named = "".join(verify(file.parent).problems)
    assert "'t7' [0:16]: " in named
    assert "'t0' [0:16]: " not in named


def mixed(fill):
    """Tensors that lie in memory as they are stored, and between them others."""
    state = {}
    for i in range(40):
        tensor = torch.arange(32.0).reshape(4, 8) * i
        if i % 4 == 1:
            tensor = tensor.t().contiguous().t()
        if i % 4 == 2:
            tensor = torch.complex(tensor, tensor).conj()
        if i % 8 == 3:
            tensor = tensor[:, :0]
        state[f"t{i}"] = tensor if fill else torch.zeros_like(tensor)
    return state


@pytest.mark.parametrize("is_verified", [True, False])
def test_neighbours_of_all_kinds(tmp_path, is_verified):
    megackpt.save(megackpt.sharded(mixed(True)), tmp_path / "c", "torch_dist")
    state = mixed(False)
    state["t8"] = state["t8"].double()
    state["t12"] = torch.nn.Parameter(state["t12"])
    held = dict(state)
    loaded = megackpt.load(megackpt.sharded(state), tmp_path / "c", verify=is_verified)
    for key, tensor in mixed(True).items():
        assert torch.equal(loaded[key].to(tensor.dtype), tensor), key
        assert torch.equal(held[key].to(tensor.dtype), tensor), key


def test_a_load_names_the_damaged_one(small):
    file, start = small
    with file.open("r+b") as opened:
        opened.seek(start + 5)
        opened.write(b"\xff")
    state = {f"t{i}": torch.zeros(16) for i in range(40)}
    with pytest.raises(CorruptCheckpoint, match=r"'t7' \[0:16\] in .* is damaged"):
        megackpt.load(megackpt.sharded(state), file.parent)


def test_declarations_of_the_same_structure_are_reused():
    def shards(**changes):
        made = []
        for i in range(4):
            shard = ShardedTensor.from_rank_offsets(f"t{i}", torch.zeros(4), (0, 1, 2))
            made.append(shard)
        for name, value in changes.items():
            setattr(made[2], name, value)
        return made

    first = declare(shards(), rank=0)
    assert declare(shards(), rank=0) is first
    assert declare(shards(data=None), rank=0).row(2) == first.row(2)
    for name, value in {
        "key": "other",
        "replica_id": (0, 1),
        "global_offset": (0,),
        "allow_shape_mismatch": True,
    }.items():
        changed = declare(shards(**{name: value}), rank=0)
        assert changed.row(2) != first.row(2)
        assert changed.row(1) == first.row(1)
    assert declare(shards(), rank=1).rank.tolist() == [1] * 4
    assert declare(shards(), rank=0, common=True).tensors[-1].is_common


@pytest.mark.parametrize("left", [80, 0])
@pytest.mark.parametrize("cut", [slice(16, 48), slice(16, 48, 3)])
def test_a_view_of_a_storage_that_was_cut_is_refused(tmp_path, left, cut):
    whole = torch.arange(64.0)
    state = {"w": ShardedTensor.from_rank_offsets("w", whole[cut])}
    megackpt.save(state, tmp_path / "a")
    whole.untyped_storage().resize_(left)
    with pytest.raises(ShardingError, match="'w': the tensor's storage has fewer"):
        megackpt.save(state, tmp_path / "b")
    with pytest.raises(ShardingError, match="'w': the tensor's storage has fewer"):
        megackpt.load(state, tmp_path / "a")


def test_views_within_their_storage_are_saved(tmp_path):
    whole = torch.arange(64.0)
    views = {
        "last": whole[16:],
        "strided": whole[3::4],
        "expanded": whole[63:].expand(100),
        "columns": whole.view(8, 8).T[7:],
        "empty": whole[:0],
    }
    state = {
        name: ShardedTensor.from_rank_offsets(name, view)
        for name, view in views.items()
    }
    megackpt.save(state, tmp_path / "a")
    blank = {
        name: ShardedTensor.from_rank_offsets(name, torch.zeros(view.shape))
        for name, view in views.items()
    }
    loaded = megackpt.load(blank, tmp_path / "a")
    for name, view in views.items():
        assert torch.equal(loaded[name], view)
