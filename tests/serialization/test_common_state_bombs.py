"""A common.pt of some kilobytes that asks for much: each is read, or refused, in bounded time and memory."""

from __future__ import annotations

import io
import os
import resource
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import CheckpointingException
from tests.serialization.pickles import named, number, text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MEMORY = 256 << 20
SECONDS = 20  # of processor time: what is to be caught takes minutes, or does not end
TIMES = 60_000


def again(function: str, argument: bytes) -> bytes:
    """The same call many times over, of an argument that is written once."""
    return (
        named(function)
        + b"q\x01"
        + argument
        + b"q\x020]("
        + b"h\x01h\x02R" * TIMES
        + b"e"
    )


def tensor(shape: tuple[int, ...], *more: bytes) -> bytes:
    """One element, as often as the shape says."""
    storage = (
        b"("
        + text("storage")
        + named("torch.LongStorage")
        + text("0")
        + text("cpu")
        + b"K\x01tQ"
    )
    sizes = b"(" + b"".join(map(number, shape)) + b"t(" + b"K\x00" * len(shape) + b"t"
    ordered = named("collections.OrderedDict") + b")R"
    return (
        named("torch._utils._rebuild_tensor_v2") + b"(" + storage + b"K\x00" + sizes + b"\x89" + ordered
        + b"".join(more) + b"tR"
    )  # fmt: skip


LAYOUT = (
    named("torch.serialization._get_layout") + b"(" + text("torch.sparse_coo") + b"tR"
)


def sparse(elements: int) -> bytes:
    indices, values = tensor((1, elements)), tensor((elements,))
    return b"(" + LAYOUT + b"(" + indices + values + b"(" + number(1 << 40) + b"ttt"


NEGATIVE = b"}" + text("neg") + b"\x88s"
BOMBS = {
    "negated": b"](" + tensor((1 << 28,), NEGATIVE) * 4 + b"e",
    "a sparse tensor": named("torch._utils._rebuild_sparse_tensor") + sparse(1 << 40) + b"R",
    "sparse tensors": again("torch._utils._rebuild_sparse_tensor", sparse(1 << 22)),
    "time zones": again("zoneinfo.ZoneInfo._unpickle", b"(" + text("America/New_York") + b"\x89t"),
    "paths": again("pathlib.PurePosixPath", b"(" + text("/".join("a" * 128)) + b"q\x03" + b"h\x03" * 999 + b"t"),
    "a dotted name": named("__builtin__.getattr") + b"q\x00" + named("megatron.core.X") + text("b") + b"\x86Rq\x020"
    + text("a" * 255) + b"q\x010" + b"h\x00h\x02h\x01\x86Rq\x020" * 25_000 + b"N",
    "a dict, shared": b"](}q\x02(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(30_000)) + b"u"
    + b"h\x02" * TIMES + b"e",
}  # fmt: skip


def write(path: Path, pickled: bytes) -> None:
    torch.save({"x": torch.ones(1, dtype=torch.int64)}, path)
    archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w") as file:
        for name in archive.namelist():
            is_pickle = name.endswith("data.pkl")
            value = b"\x80\x02}" + text("x") + pickled + b"s."
            file.writestr(name, value if is_pickle else archive.read(name))


def read_in_bounds(where: Path) -> int:
    """In a process of little memory and time: how it ended."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    status = 1
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            megackpt.load_common_state_dict(where)
            status = 0
        except CheckpointingException as error:
            status = 3 if "memory" in str(error) else 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_ask_for_much(tmp_path: Path, name: str) -> None:
    where = tmp_path / "c"
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, where)
    (where / "megackpt.index").unlink()
    torch.set_num_threads(1)  # the process below is forked
    write(where / "common.pt", BOMBS[name])
    assert read_in_bounds(where) == 0


def test_members_of_an_archive_that_lie_in_the_same_bytes(tmp_path: Path) -> None:
    """Each tensor would take memory of its own."""
    where = tmp_path / "c"
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, where)
    (where / "megackpt.index").unlink()
    with zipfile.ZipFile(where / "common.pt", "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02}.")
        file.writestr("a/data/0", bytes(1000))
    data = (where / "common.pt").read_bytes()
    entry = data[data.rindex(b"PK\1\2") : data.rindex(b"PK\5\6")]
    more = b"".join(entry[:-1] + b"%d" % n for n in range(1, 4))
    end = [*struct.unpack("<4s4H2LH", data[-22:])]
    end[3:6] = end[3] + 3, end[4] + 3, end[5] + len(more)
    (where / "common.pt").write_bytes(data[:-22] + more + struct.pack("<4s4H2LH", *end))
    with pytest.raises(megackpt.CorruptCheckpoint, match="same bytes"):
        megackpt.load_common_state_dict(where)


def test_unusual_tensors_come_back(tmp_path: Path) -> None:
    shared = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(1).expand(2), (4,), check_invariants=True
    )
    for value in (shared, torch._neg_view(torch.arange(3.0))):
        megackpt.save({"x": value}, tmp_path / "c")
        found = megackpt.load({}, tmp_path / "c")["x"]
        assert torch.equal(found.to_dense(), value.to_dense())
        megackpt.save({"x": found}, tmp_path / "c")
