"""What verify calls good can be loaded; what cannot be read just now is told apart from what is damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import megackpt
from megackpt import CheckpointManager, ShardedObject, ShardedTensor, limits
from megackpt.__main__ import main
from megackpt.errors import CheckpointingException, CorruptCheckpoint, StorageError

FORMATS = ("torch_dist", "zarr", "safetensors")
GOLDEN = Path(__file__).parent / "golden"
DATA = {"torch_dist": "__0_0.distcp", "zarr": "c.0", "safetensors": "model.safetensors"}
"""The file of the tensor in each format."""


class Custom:
    """A class that nobody trusts."""


def state(value: float = 0.0) -> dict[str, Any]:
    tensor = torch.full((1000,), float(value))
    return {
        "w": ShardedTensor.from_rank_offsets("w", tensor),
        "rng": ShardedObject("rng", {"seed": value}, (1,), (0,)),
        "iteration": 3,
    }


def run_of(root: Path, strategy: str) -> CheckpointManager:
    with CheckpointManager(root, strategy) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    return CheckpointManager(root, strategy)


def spoil(file: Path, index: Path | None = None) -> None:
    """Damage the pickle in an archive. With ``index``: so that all digests are those of what is there now."""
    before = file.read_bytes()
    at = before.index(b"\x80\x02", before.index(b"data.pkl"))
    now = before[:at] + b"\xff\xff" + before[at + 2 :]
    file.write_bytes(now)
    if index is not None:
        old, new = (xxhash.xxh3_128_digest(data) for data in (before, now))
        text = index.read_bytes()[:-16]
        assert old in text
        text = text.replace(old, new)
        index.write_bytes(text + xxhash.xxh3_128_digest(text))


@pytest.mark.parametrize("kept", [True, False], ids=["with index", "without index"])
@pytest.mark.parametrize("strategy", FORMATS)
def test_a_common_state_that_cannot_be_read(
    tmp_path: Path, strategy: str, kept: bool
) -> None:
    manager = run_of(tmp_path, strategy)
    step = tmp_path / "iter_0000002"
    spoil(step / "common.pt", step / "megackpt.index" if kept else None)
    if not kept:
        (step / "megackpt.index").unlink()
    with pytest.raises(CorruptCheckpoint):
        megackpt.load(state(), step)
    report = megackpt.verify(step)
    assert not report.ok
    assert "common" in report.problems[0]
    assert "all good" not in str(report)
    assert main(["verify", str(step)]) == 1
    assert manager.latest(verify=True).step == 1


def test_an_object_that_cannot_be_read(tmp_path: Path) -> None:
    megackpt.save(state(), tmp_path, "zarr")
    spoil(tmp_path / "rng.objects/shard_0_1.pt", tmp_path / "megackpt.index")
    with pytest.raises(CorruptCheckpoint):
        megackpt.load(state(), tmp_path)
    (problem,) = megackpt.verify(tmp_path).problems
    assert "rng" in problem


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_but_a_metadata_json(tmp_path: Path, version: int) -> None:
    config = {"sharded_backend": "zarr", "sharded_backend_version": version}
    (tmp_path / "metadata.json").write_text(json.dumps(config))
    report = megackpt.verify(tmp_path)
    assert not report.ok
    with pytest.raises(CorruptCheckpoint):
        megackpt.load({}, tmp_path)


def test_a_step_with_nothing_but_a_metadata_json_is_not_preferred(
    tmp_path: Path,
) -> None:
    manager = run_of(tmp_path, "zarr")
    for entry in list((tmp_path / "iter_0000002").iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    config = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (tmp_path / "iter_0000002/metadata.json").write_text(json.dumps(config))
    assert manager.latest().step == 1
    assert manager.latest(verify=True).step == 1


@pytest.mark.parametrize(
    "golden", [path.name for path in sorted(GOLDEN.glob("*-*")) if path.is_dir()]
)
def test_what_others_wrote_is_good(golden: str) -> None:
    if golden != "index-v1":
        report = megackpt.verify(GOLDEN / golden)
        assert report.ok, report


def test_a_compressed_chunk_without_digests_is_decoded(tmp_path: Path) -> None:
    from megackpt.backends.zarr import Zarr

    megackpt.save(state(1), tmp_path, Zarr("zstd", checksum=False))
    (tmp_path / "megackpt.index").unlink()
    assert megackpt.verify(tmp_path).ok
    file = tmp_path / "w/c.0"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpoint):
        megackpt.load_plain_tensors(tmp_path)
    assert not megackpt.verify(tmp_path).ok


def test_untrusted_classes_are_not_damage(tmp_path: Path, capsys: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2) | {"custom": (Custom(),)})
        step = tmp_path / "iter_0000002"
        report = megackpt.verify(step)
        assert report.ok
        assert len(report.untrusted) == 1
        assert "Custom" in report.untrusted[0]
        assert "Custom" in str(report)
        assert manager.latest(verify=True).step == 2
    assert main(["verify", str(step)]) == 0
    assert "Custom" in capsys.readouterr().out


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_common_state_that_no_trust_makes_loadable_is_a_problem(
    tmp_path: Path,
) -> None:
    megackpt.save(state(1), tmp_path)
    (tmp_path / "megackpt.index").unlink()
    torch.save({"step": Command()}, tmp_path / "common.pt")
    with pytest.raises(CorruptCheckpoint, match="cannot be trusted"):
        megackpt.load_common_state_dict(tmp_path)
    report = megackpt.verify(tmp_path)
    assert not report.ok
    assert "common state" in report.problems[0]
    assert "cannot be trusted" in report.problems[0]
    assert main(["verify", str(tmp_path)]) != 0


@contextlib.contextmanager
def refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, number: int
) -> Iterator[None]:
    """Opening this file in this folder is refused with this error."""
    real = os.open

    def refusing(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> int:
        if os.path.basename(os.fspath(path)) == name:
            above = (
                os.path.realpath(f"/proc/self/fd/{dir_fd}")
                if dir_fd is not None
                else os.path.dirname(path)
            )
            if above.startswith(str(folder)):
                raise OSError(number, os.strerror(number))
        return real(path, *args, dir_fd=dir_fd, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        yield


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("strategy", FORMATS)
def test_a_refusal_is_no_damage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    number: int,
    capsys: Any,
) -> None:
    monkeypatch.setattr(limits, "RETRY_SECONDS", 0.05)
    run = tmp_path / "run"
    manager = run_of(run, strategy)
    step = run / "iter_0000002"
    with refused(monkeypatch, step, DATA[strategy], number):
        for call in (
            lambda: manager.latest(verify=True),
            lambda: manager.restore(state()),
        ):
            with pytest.raises((StorageError, OSError), match=os.strerror(number)):
                call()
        report = megackpt.verify(step)
        assert not report.ok
        assert report.problems == ()
        assert os.strerror(number) in report.unread[0]
        assert "could not be read" in str(report)
        assert main(["verify", str(step)]) == 6
        assert main(["diff", "--read", str(step), str(run / "iter_0000001")]) == 6
        assert (
            main(["convert", str(step), str(tmp_path / "new"), "--to", "torch_dist"])
            == 6
        )
        assert main(["ls", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"unread: {report.unread[0]}" in printed
    assert "problems:" not in printed
    # Nothing of it is remembered as damage: it is the newest again, and it counts among those that stay.
    assert manager.latest(verify=True).step == 2
    assert manager.restore(state()).step == 2


def test_retention_keeps_a_step_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        damaged = refused(
            monkeypatch, tmp_path / "iter_0000002", DATA["torch_dist"], errno.EIO
        )
        with damaged, pytest.raises(StorageError):
            manager.latest(verify=True)
        manager.save(3, state(3))
        assert [step.step for step in manager.steps()] == [2, 3]
        manager.save(4, state(4))
        assert [step.step for step in manager.steps()] == [3, 4]


def test_damage_and_a_refusal_together_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = run_of(tmp_path, "torch_dist")
    step = tmp_path / "iter_0000002"
    spoil(step / "common.pt")
    with refused(monkeypatch, step, DATA["torch_dist"], errno.EIO):
        report = megackpt.verify(step)
        assert report.problems
        assert report.unread
        assert main(["verify", str(step)]) == 1
        assert manager.latest(verify=True).step == 1


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_compressed_chunk_that_may_not_be_read(shared_folder: Path) -> None:
    """Its bytes are read by another library."""
    from megackpt.backends.zarr import Zarr

    directory = shared_folder / "c"
    megackpt.save(state(1), directory, Zarr("zstd"))
    os.chmod(directory / "w/c.0", 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match=r"[Pp]ermission denied"):
            megackpt.load_plain_tensors(directory)
        report = megackpt.verify(directory)
    finally:
        if user == 0:
            os.seteuid(0)
        os.chmod(directory / "w/c.0", 0o600)
    assert report.problems == ()
    assert "ermission denied" in report.unread[0]
    assert megackpt.verify(directory).ok


def test_verify_with_the_index_refused_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megackpt.save(state(), tmp_path / "c")
    with refused(monkeypatch, tmp_path / "c", "megackpt.index", errno.EACCES):
        with pytest.raises(CheckpointingException) as caught:
            megackpt.verify(tmp_path / "c")
        assert isinstance(caught.value, StorageError)
        assert main(["verify", str(tmp_path / "c")]) == 6


def test_a_folder_in_the_place_of_the_index(tmp_path: Path) -> None:
    megackpt.save(state(), tmp_path / "c")
    (tmp_path / "c" / "megackpt.index").unlink()
    (tmp_path / "c" / "megackpt.index").mkdir()
    report = megackpt.verify(tmp_path / "c")
    assert not report.ok
    assert "megackpt.index is not a regular file" in report.problems[0]
    with pytest.raises(CorruptCheckpoint, match=r"index is not a regular file"):
        megackpt.load(state(), tmp_path / "c")
