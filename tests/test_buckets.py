"""Whole walks in a bucket: many ranks, both formats, both ways between bucket and directory, and what it costs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.__main__ import main
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CorruptCheckpoint,
    StorageError,
)
from megackpt.storage import BucketStorage
from megackpt.testing import ThreadedGroup
from tests.buckets import Bucket, Line
from tests.test_save_load import model, saved

FORMATS = ("torch_dist", "zarr")


@pytest.fixture
def url(bucket: Bucket) -> str:
    return f"{bucket.url}/run/iter_100"


def held(bucket: Bucket) -> list[str]:
    """Every key in it."""
    return list(bucket.keys())


def expect(where: Any, tp: int, pp: int, dp: int) -> None:
    """The model of ``saved`` is there, loaded at this parallelism."""

    def run(group: ThreadedGroup) -> None:
        expected = model(group.rank, tp, pp, dp)
        asked = model(group.rank, tp, pp, dp, blank=True)
        del asked["object"]  # objects cannot be resharded
        state = megackpt.load(asked, where, process_group=group)
        assert torch.equal(state["weight"], expected["weight"].data)
        for name, shard in expected["layers"].items():
            assert torch.equal(state["layers"][name], shard.data), name
        assert state["step"].item() == 11
        assert state["iteration"] == 100

    ThreadedGroup.run(tp * pp * dp, run)


@pytest.mark.parametrize("strategy", FORMATS)
def test_the_walk_of_a_checkpoint(
    tmp_path: Path, bucket: Bucket, url: str, strategy: str
) -> None:
    """Saved, replaced, loaded at other parallelisms, verified; to a directory and back, to another bucket's folder."""
    saved(url, strategy, 2, 2, 2)
    saved(url, strategy, 2, 2, 2)  # the plan is reused, the checkpoint replaced
    expect(url, 3, 1, 2)
    expect(url, 1, 4, 1)
    other = FORMATS[strategy == FORMATS[0]]
    megackpt.convert(url, tmp_path / "local", other)
    expect(tmp_path / "local", 2, 1, 1)
    megackpt.convert(tmp_path / "local", f"{bucket.url}/back", strategy)
    megackpt.convert(f"{bucket.url}/back", f"{bucket.url}/again", other, workers=2)
    for name in ("run/iter_100", "back", "again"):
        expect(f"{bucket.url}/{name}", 1, 1, 1)
        assert megackpt.verify(f"{bucket.url}/{name}").ok
        assert megackpt.check_is_distributed_checkpoint(f"{bucket.url}/{name}")
    assert megackpt.load_common_state_dict(url)["iteration"] == 100
    megackpt.remove_sharded_tensors(url, "layers")
    assert "layers.w" not in megackpt.load_tensors_metadata(url)
    assert bucket.uploads() == []
    assert (
        len(
            {
                key.rpartition("megackpt-")[2][:32]
                for key in held(bucket)
                if "megackpt-" in key
            }
        )
        == 3
    )


def test_other_tools_read_the_folder_of_a_save(
    tmp_path: Path, bucket: Bucket, url: str
) -> None:
    """What the record names is an ordinary checkpoint: copied to a directory, torch reads it by itself."""
    from torch.distributed.checkpoint import FileSystemReader

    saved(url, "torch_dist", 2, 1, 1)
    storage = open_checkpoint(url).storage
    for name in storage.list():
        (tmp_path / name).write_bytes(storage.get(name))
    assert "embedding" in FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    expect(tmp_path, 1, 1, 1)


def test_the_command_line(
    bucket: Bucket, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (100, 200):
        saved(f"{bucket.url}/run/iter_{step}", "torch_dist", 2, 1, 1)
    BucketStorage(f"{bucket.url}/run").put("latest_checkpointed_iteration.txt", b"100")
    begun = f"iter_300/megackpt-{'a' * 32}/.megackpt-saving-{'a' * 32}"
    BucketStorage(f"{bucket.url}/run").put(begun, b"{}")
    other = f"{bucket.url}/run/iter_200"
    told = {}
    for command in (
        ["ls", f"{bucket.url}/run"], ["ls", url], ["show", url], ["show", url, "--common"], ["verify", url],
        ["diff", url, other], ["convert", url, f"{bucket.url}/z", "--to", "zarr"],
    ):  # fmt: skip
        assert main(command) == 0, command
        told[" ".join(command)] = capsys.readouterr().out
    listed = told[f"ls {bucket.url}/run"]
    complete = re.findall(
        r"^iter_(\d+) +megatron +\d+ +(yes|no) ", listed, re.MULTILINE
    )
    assert complete == [("100", "yes"), ("200", "yes"), ("300", "no")]
    assert "iter_200 is newer, and complete" in listed
    assert "is running, or died before it was complete" in listed
    assert re.search(r"^\. .* yes +torch_dist +1 ", told[f"ls {url}"], re.MULTILINE)
    assert "megackpt-" not in told[f"ls {url}"]
    assert "same: yes" in told[f"diff {url} {other}"]
    assert (
        main(["ls", f"{bucket.url}/nothing"])
        == main(["show", f"{bucket.url}/nothing"])
        == 3
    )
    storage = open_checkpoint(url).storage
    storage.put("__0_0.distcp", b"")
    capsys.readouterr()
    assert main(["verify", url]) == 1
    assert "__0_0.distcp" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["safetensors", "torch"])
def test_files_are_written_from_front_to_back(
    tmp_path: Path, bucket: Bucket, url: str, strategy: str
) -> None:
    """As a directory: the common state and objects, several files, tensors of several cells."""
    saved(tmp_path / "local", "torch_dist", 2, 1, 1)
    megackpt.convert(tmp_path / "local", url, strategy)
    expect(url, 2, 1, 1)
    assert megackpt.verify(url).ok
    megackpt.save(large(), tmp_path / "large")
    folder = f"{bucket.url}/large"
    shards = {"safetensors": 3, "torch": None}[strategy]
    megackpt.convert(tmp_path / "large", folder, strategy, shards=shards)
    assert megackpt.verify(folder).ok
    found = megackpt.load_plain_tensors(folder)
    for key, shard in large().items():
        assert torch.equal(found[key], shard.data), key
    assert bucket.uploads() == []


def copy_of(bucket: Bucket, key: str, path: Path) -> Path:
    bucket.client.download_file(bucket.name, key, str(path))
    return path


def loaded_by_its_library(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return load_file(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_one_object(tmp_path: Path, bucket: Bucket, name: str) -> None:
    """It appears when it is complete, and is replaced only if the caller asks for that."""
    strategy = {".pt": "torch"}.get(Path(name).suffix, "safetensors")
    url = f"{bucket.url}/run/{name}"
    local = tmp_path / "local"
    megackpt.save(large(blank=True), local)
    megackpt.convert(local, url, strategy, state=False)
    megackpt.save(large(), local)
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        megackpt.convert(local, url, strategy, state=False)
    steps = []
    done = megackpt.convert(
        local,
        url,
        strategy,
        overwrite=True,
        state=False,
        progress=lambda *step: steps.append(step),
    )
    assert done.target == url
    assert steps[-1] == (1 << 26, 1 << 26)
    assert bucket.keys() == [f"run/{name}"]
    assert bucket.uploads() == []
    copy = copy_of(bucket, f"run/{name}", tmp_path / name)
    found = loaded_by_its_library(copy)
    assert found.keys() == large().keys()
    for key, shard in large().items():
        assert torch.equal(found[key], shard.data), key
    megackpt.convert(local, tmp_path / f"local-{name}", strategy, state=False)
    assert copy.read_bytes() == (tmp_path / f"local-{name}").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_one_small_object_is_replaced(
    tmp_path: Path, bucket: Bucket, name: str
) -> None:
    strategy = {".pt": "torch"}.get(Path(name).suffix, "safetensors")
    for value in (1.0, 2.0):
        weight = ShardedTensor.from_rank_offsets("w", torch.full((3,), value))
        megackpt.save({"w": weight}, tmp_path / "local")
        megackpt.convert(
            tmp_path / "local",
            f"{bucket.url}/{name}",
            strategy,
            overwrite=True,
            state=False,
        )
        found = loaded_by_its_library(copy_of(bucket, name, tmp_path / name))
        assert torch.equal(found["w"], weight.data)


def test_one_object_that_another_job_writes_meanwhile_stays(
    tmp_path: Path, bucket: Bucket
) -> None:
    small = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}
    for name, state in (("large", large()), ("small", small)):
        megackpt.save(state, tmp_path / name)
        other = f"{name}.safetensors"

        def write_too(done: int, total: int, key: str = other) -> None:
            bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"other")

        with pytest.raises(StorageError, match="an object of that name exists"):
            megackpt.convert(
                tmp_path / name,
                f"{bucket.url}/{other}",
                "safetensors",
                state=False,
                progress=write_too,
            )
        assert BucketStorage(bucket.url).get(other) == b"other"
    assert bucket.uploads() == []


def test_one_object_cannot_be_read_before_it_appears(
    tmp_path: Path, bucket: Bucket
) -> None:
    megackpt.save(large(), tmp_path / "local")
    with pytest.raises(BackendError, match="leave out verify_target"):
        megackpt.convert(
            tmp_path / "local",
            f"{bucket.url}/x.safetensors",
            "safetensors",
            state=False,
            verify_target=True,
        )
    assert bucket.keys() == []


def test_a_failed_conversion_leaves_no_object_and_no_upload(
    tmp_path: Path, bucket: Bucket
) -> None:
    megackpt.save(large(), tmp_path / "local")
    file = tmp_path / "local" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-(1 << 20)] ^= 1
    file.write_bytes(data)
    for target in ("x.safetensors", "x.pt", "folder"):
        strategy = "torch" if target == "x.pt" else "safetensors"
        with pytest.raises(CorruptCheckpoint):
            megackpt.convert(
                tmp_path / "local", f"{bucket.url}/{target}", strategy, state=False
            )
    assert held(bucket) == []
    assert bucket.uploads() == []


def test_a_compressed_source_with_cells_across_the_rows(
    tmp_path: Path, bucket: Bucket
) -> None:
    """The cells of the file are other ones than the chunks that can only be read whole."""
    weight = torch.arange(4096 * 1024, dtype=torch.float32).reshape(1024, 4096)
    parts = [
        ShardedTensor.from_rank_offsets("w", part.contiguous(), (1, i, 4))
        for i, part in enumerate(weight.chunk(4, 1))
    ]
    megackpt.save({"w": parts}, tmp_path / "local", Zarr(compression="zstd"))
    for strategy in ("safetensors", "torch"):
        url = f"{bucket.url}/{strategy}"
        megackpt.convert(tmp_path / "local", url, strategy)
        assert torch.equal(megackpt.load_plain_tensors(url)["w"], weight)


def test_a_save_by_one_process_fills_a_file_in_order(bucket: Bucket, url: str) -> None:
    megackpt.save(large() | {"iteration": 7}, url, "safetensors")
    found = megackpt.load_plain_tensors(url)
    for key, shard in large().items():
        assert torch.equal(found[key], shard.data), key
    with pytest.raises(StorageError, match="save as torch_dist or zarr, and convert"):
        saved(f"{bucket.url}/columns", "safetensors", 2, 1, 1)
    with pytest.raises(BackendError, match="Save as 'torch_dist'"):
        saved(f"{bucket.url}/other", "torch", 1, 1, 1)
    assert {key.split("/")[0] for key in held(bucket)} == {url.split("/")[3]}
    assert bucket.uploads() == []


@pytest.mark.parametrize("strategy", [*FORMATS, "safetensors", "torch"])
def test_what_is_uploaded_as_it_is_can_be_read(
    tmp_path: Path, url: str, strategy: str
) -> None:
    saved(tmp_path / "source", "torch_dist", 2, 1, 1)
    megackpt.convert(tmp_path / "source", tmp_path / "local", strategy)
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            BucketStorage(url).put(
                str(path.relative_to(tmp_path / "local")), path.read_bytes()
            )
    expect(url, 2, 1, 1)
    assert megackpt.verify(url).ok
    megackpt.convert(url, tmp_path / "back", "torch_dist")
    expect(tmp_path / "back", 1, 1, 1)


def large(blank: bool = False) -> dict[str, Any]:
    """Four tensors of 16 MiB."""
    random = torch.Generator().manual_seed(5)
    tensors = [torch.randn(2048, 2048, generator=random) for _ in range(4)]
    return {
        f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", t * (not blank), replica_id=0)
        for i, t in enumerate(tensors)
    }


@pytest.mark.parametrize("strategy", FORMATS)
def test_a_slice_costs_its_bytes_and_few_requests(
    line: Line, url: str, strategy: str
) -> None:
    """An eighth of each of four tensors, unverified: more than needed is the head of each file, at most 64 KiB."""
    megackpt.save(large(), url, strategy)
    slices = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(256, 2048), (0, 3, 8))
        for key in large()
    }
    line.seen.clear()
    before = line.sent
    state = megackpt.load(slices, url, validate_access_integrity=False, verify=False)
    for key, shard in large().items():
        assert torch.equal(state[key], shard.data[3 * 256 : 4 * 256]), key
    needed = 4 * 256 * 2048 * 4
    assert needed <= line.sent - before <= 1.05 * needed
    assert len(line.seen) <= 4 + 4 + 12  # regions, files, and their metadata
    assert {method for method, _ in line.seen} <= {"GET", "HEAD"}


def on_processes(url: str) -> None:
    """Saves, replaces and loads on every rank of a gloo group of real processes."""
    rank = int(os.environ["RANK"])
    for value in (1.0, 2.0):
        data = torch.full((4, 6), value) * (rank + 1)
        megackpt.save(
            {
                "w": ShardedTensor.from_rank_offsets("w", data, (0, rank, 2)),
                "value": value,
            },
            url,
        )
    blank = ShardedTensor.from_rank_offsets("w", torch.zeros(8, 3), (1, rank, 2))
    state = megackpt.load({"w": blank}, url)
    assert state["value"] == 2.0
    assert torch.equal(
        state["w"], torch.tensor([2.0, 4.0]).repeat_interleave(4)[:, None].expand(8, 3)
    )


def test_real_processes(bucket: Bucket, url: str, ranks: Any) -> None:
    ranks(on_processes, 2, url)
    expected = torch.tensor([2.0, 4.0]).repeat_interleave(4)[:, None].expand(8, 6)
    assert torch.equal(megackpt.load_plain_tensors(url)["w"], expected)
    assert len({key.split("/")[2] for key in held(bucket)}) == 2


@pytest.mark.parametrize("strategy", FORMATS)
def test_a_checkpoint_that_is_replaced_under_a_load_is_loaded_again(
    bucket: Bucket, line: Line, url: str, strategy: str
) -> None:
    """The second save comes between the table of contents and the first byte of data."""

    def state(value: float) -> dict[str, Any]:
        return {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((256, 256), value)),
            "value": value,
        }

    megackpt.save(state(1.0), url, strategy)
    first = open_checkpoint(url).manifest.save_id
    waiting = [True]

    def fault(request: Any) -> None:
        reads_data = first in request.path and not request.path.endswith(
            ("index", "json", ".metadata")
        )
        if request.method == "GET" and reads_data and waiting:
            waiting.clear()
            megackpt.save(state(2.0), url, strategy)

    line.fault = fault
    loaded = megackpt.load(state(0.0), url)
    assert not waiting
    assert loaded["value"] == 2.0
    assert torch.equal(loaded["w"], torch.full((256, 256), 2.0))


@pytest.mark.parametrize("strategy", FORMATS)
@pytest.mark.parametrize("damage", ["truncated", "replaced", "deleted"])
def test_damaged_data_is_not_loaded(
    bucket: Bucket, url: str, strategy: str, damage: str
) -> None:
    saved(url, strategy, 1, 1, 1)
    opened = open_checkpoint(url)
    place = next(iter(opened.manifest.chunks_of("embedding"))).location
    data = opened.storage.get(place.file)
    if damage == "deleted":
        opened.storage.delete(place.file)
    elif damage == "truncated":
        opened.storage.put(place.file, data[: place.start + 10])
    else:
        opened.storage.put(
            place.file,
            data[: place.start]
            + bytes(place.length)
            + data[place.start + place.length :],
        )
    report = megackpt.verify(url)
    assert not report.ok
    assert place.file in str(report)
    with pytest.raises((CorruptCheckpoint, OSError), match=place.file.split("/")[-1]):
        megackpt.load(model(0, 1, 1, 1, blank=True), url)


@pytest.mark.parametrize("persistent", [False, True])
def test_saved_in_the_background(bucket: Bucket, url: str, persistent: bool) -> None:
    queue = megackpt.AsyncCallsQueue(persistent=persistent)
    weight = torch.full((64, 32), 3.0)
    state = {"w": ShardedTensor.from_rank_offsets("w", weight), "step": 3}
    queue.schedule_async_request(megackpt.save(state, url, async_sharded_save=True))
    weight.zero_()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    loaded = megackpt.load({"w": ShardedTensor.from_rank_offsets("w", weight)}, url)
    assert loaded["step"] == 3
    assert torch.equal(weight, torch.full((64, 32), 3.0))
    assert len({key.split("/")[2] for key in held(bucket)}) == 2


def test_a_bucket_that_does_not_exist_is_named(bucket: Bucket) -> None:
    url = "s3://no-such-bucket-here/run/iter_100"
    calls = {
        "save": lambda: megackpt.save({"step": 1}, url),
        "load": lambda: megackpt.load({}, url),
        "verify": lambda: megackpt.verify(url),
        "latest": lambda: megackpt.CheckpointManager(
            "s3://no-such-bucket-here/run"
        ).latest(),
    }
    for name, call in calls.items():
        with pytest.raises(
            StorageError, match=r"there is no bucket s3://no-such-bucket-here[.]"
        ) as caught:
            call()
        assert bucket.endpoint in str(caught.value), name
        assert "<" not in str(caught.value), name
        assert "probe" not in str(caught.value), name


@pytest.mark.parametrize(
    "strategy",
    ["torch_dist", pytest.param("zarr", marks=pytest.mark.slow), "compressed"],
)
def test_a_chunk_that_is_damaged_on_its_way_is_read_once_more(
    line: Line, url: str, strategy: str
) -> None:
    def state(values: torch.Tensor, extra: Any) -> dict[str, Any]:
        shard = ShardedTensor.from_rank_offsets("w", values)
        return {"w": shard, "o": ShardedObject("o", extra, (1,), (0,))}

    chosen: Any = strategy
    if strategy == "compressed":
        chosen = Zarr(compression="zstd")
    megackpt.save(state(torch.arange(100_000.0), ["x" * 1000]), url, chosen)
    files = open_checkpoint(url).manifest.files

    def damage(times: int) -> dict[str, int]:
        """Damage so many answers with data of each file."""
        left = dict.fromkeys(files, times)

        def fault(request: Any) -> str | None:
            for name in files:
                if request.method == "GET" and request.path.endswith(f"/{name}"):
                    left[name] -= 1
                    return "flip" if left[name] >= 0 else None
            return None

        line.fault = fault
        return left

    left = damage(1)
    loaded = megackpt.load(state(torch.zeros(100_000), None), url)
    assert torch.equal(loaded["w"], torch.arange(100_000.0))
    assert loaded["o"] == ["x" * 1000]
    assert max(left.values()) < 0  # each file was damaged once, and read again
    damage(1)
    assert megackpt.verify(url).ok
    damage(99)
    with pytest.raises(CorruptCheckpoint):
        megackpt.load(state(torch.zeros(100_000), None), url)
    assert not megackpt.verify(url).ok
