"""Checkpoints that orbax wrote: versions 0 and 1, every layout of files, one process and two."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch

import megackpt
from megackpt import Strategy
from megackpt.__main__ import main
from megackpt.backends.orbax import arrays, endpoint
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
)
from megackpt.manager import list_run
from megackpt.storage import LocalStorage
from tests.bits import assert_same
from tests.buckets import Bucket
from tests.converter.test_memory import peak
from tests.foreign.bars import TARGETS, check_conversions, check_layouts, check_resuming
from tests.hostile.orbax_files import packed
from tests.ports import unused_port

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
GOLDENS = ("orbax-0.12.8-v0", "orbax-0.12.8-v0-plain", "orbax-0.12.8-v1")
KINDS = (
    *("v0", "v0 standard", "v0 manager", "v0 composite", "v0 plain", "v0 zarr3"),
    *("v0 plain zarr3", "v0 chunks", "v0 zarr3 chunks", "v0 without metadata"),
    *("v0 aggregated", "v0 msgpack", "v0 one array", "v0 plain one array"),
    *("v1", "v1 zarr", "v1 plain", "v1 checkpointables"),
)
PROCESSES = ("v0 processes", "v1 processes")
VALUES = {
    "name": "tall",
    "deep.a/b": "short",
    "none": None,
    "empty.dict": {},
    "empty.list": [],
    "empty.tuple": (),
}
"""The common state of the trees with leaves that are no arrays."""


def written_by_orbax(*arguments: str, devices: int = 8) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / '.peers' / 'orbax'}:{ROOT}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "tests.foreign.orbax_writer", *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("orbax")
    assert not written_by_orbax(str(folder), *KINDS).wait()
    port = str(unused_port())
    ranks = [
        written_by_orbax(str(folder), "--rank", str(rank), port, devices=4)
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return folder


def expected(source: Path) -> dict[str, torch.Tensor]:
    file = f"{source}.expected.pt"
    if source.name in GOLDENS:
        file = f"{GOLDEN}/orbax-0.12.8.expected.pt"  # of all: they hold one tree
    found: dict[str, torch.Tensor] = torch.load(file)
    return found


def check(source: Path, unread: tuple[str, ...] = ()) -> None:
    """All tensors, whole and at other layouts; nothing else, and ``verify`` is content."""
    tensors = expected(source)
    found = megackpt.load_plain_tensors(source)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert_same(found[key], tensor, key)
    check_layouts(source, tensors)
    report = megackpt.verify(source)
    assert report.ok, report
    assert report.foreign == unread


@pytest.mark.orbax
@pytest.mark.parametrize("kind", [*KINDS, *PROCESSES])
def test_checkpoints_of_orbax_load_at_any_layout(
    written: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    unread = ("about",) if kind == "v0 composite" else ()
    check(written / kind, unread)
    name, version = megackpt.checkpoint.open_checkpoint(written / kind).manifest.backend
    assert (name, version) == ("orbax", int(kind[1]))
    assert ("about are not trees of arrays" in caplog.text) == bool(unread)


@pytest.mark.orbax
@pytest.mark.parametrize("kind", ["v0", "v0 plain zarr3", "v0 composite", "v1"])
def test_checkpoints_of_orbax_convert_to_every_format(
    written: Path, kind: str, tmp_path: Path
) -> None:
    check_conversions(written / kind, expected(written / kind), tmp_path)
    common = megackpt.load_common_state_dict(tmp_path / "torch_dist")
    assert common == megackpt.load_common_state_dict(written / kind)


@pytest.mark.orbax
def test_leaves_that_are_no_arrays_are_the_common_state(written: Path) -> None:
    for kind in ("v0", "v0 plain", "v0 manager", "v1"):
        assert megackpt.load_common_state_dict(written / kind) == VALUES
    found = megackpt.load_common_state_dict(written / "v0 aggregated")
    assert found == {"step": 3, "rate": 0.25, "name": "x", "none": None}
    assert megackpt.load_common_state_dict(written / "v0 chunks") == {}


@pytest.mark.orbax
def test_show_names_format_and_version(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("v0 manager", "v1"):
        assert main(["show", str(written / kind)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"version: {kind[1]}" in lines
        assert "format: orbax" in lines


@pytest.mark.orbax
def test_one_of_several_items_can_be_asked_for(written: Path) -> None:
    source = written / "v0 composite"
    only = Strategy("orbax", options={"item": "opt"})
    found = megackpt.load_plain_tensors(source, sharded_strategy=only)
    assert {f"opt.{key}" for key in found} == {
        key for key in expected(source) if key.startswith("opt.")
    }
    with pytest.raises(NotACheckpoint, match=r"no item 'x'.*'opt', 'params'"):
        megackpt.load_plain_tensors(
            source, sharded_strategy=Strategy("orbax", options={"item": "x"})
        )


@pytest.mark.orbax
@pytest.mark.parametrize("kind", ["v0 chunks", "v1 plain"])
def test_a_conversion_is_resumed(
    written: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written / kind
    check_resuming(source, expected(source), tmp_path / "out", monkeypatch)


LIMIT = 512 << 20


@pytest.mark.orbax
@pytest.mark.parametrize(
    ("version", "size", "cap"),
    [
        pytest.param("v0", 256, 192 << 20, marks=pytest.mark.slow),
        pytest.param("v1", 256, 192 << 20, marks=pytest.mark.slow),
        pytest.param("v0", 4096, LIMIT, marks=pytest.mark.campaign),
        # To save 4 GiB, this version takes more than 8 GiB of memory.
        pytest.param("v1", 1024, LIMIT, marks=pytest.mark.campaign),
    ],
)
def test_a_conversion_keeps_its_limit_of_memory(
    tmp_path: Path, version: str, size: int, cap: int
) -> None:
    source = tmp_path / "source"
    arguments = [str(source), "--large", version, str(size), "8"]
    assert not written_by_orbax(*arguments).wait()
    formats = ("torch_dist",) if size == 256 else TARGETS
    for to in formats:
        taken = peak(source, tmp_path / to, to, cap)
        print(f"{version}, {size} MiB to {to}: {taken >> 20} MiB")
        assert taken <= cap
        shutil.rmtree(tmp_path / to)


# The golden checkpoints: these tests need no orbax ---------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints(name: str, tmp_path: Path) -> None:
    check(GOLDEN / name)
    assert megackpt.load_common_state_dict(GOLDEN / name) == VALUES
    check_conversions(GOLDEN / name, expected(GOLDEN / name), tmp_path)


@pytest.mark.parametrize("name", GOLDENS)
def test_checkpoints_in_a_bucket_are_read_in_place(bucket: Bucket, name: str) -> None:
    for file in (GOLDEN / name).rglob("*"):
        if file.is_file():
            key = f"run/{file.relative_to(GOLDEN / name)}"
            bucket.client.put_object(
                Bucket=bucket.name, Key=key, Body=file.read_bytes()
            )
    check_layouts(f"{bucket.url}/run", expected(GOLDEN / name))  # type: ignore[arg-type]
    assert megackpt.load_common_state_dict(f"{bucket.url}/run") == VALUES
    assert megackpt.verify(f"{bucket.url}/run").ok


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        shutil.copytree(GOLDEN / name, tmp_path / name)
        return tmp_path / name

    return make


def change(file: Path, edit: Callable[[Any], None]) -> None:
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def test_a_missing_chunk_is_an_error_where_the_writer_stored_all(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    source = copy("orbax-0.12.8-v0-plain")
    (source / "params.layers.0.kernel" / "1.0").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"'params.layers.0.kernel' lacks 1 of"):
        megackpt.load_plain_tensors(source)
    # As orbax wrote before: chunks of zeros were left out.
    change(
        source / "_METADATA",
        lambda d: d.pop("store_array_data_equal_to_fill_value"),
    )
    with caplog.at_level(logging.INFO):
        found = megackpt.load_plain_tensors(source)
    assert "1 chunks are missing, and have the fill value" in caplog.text
    whole = expected(GOLDEN / source.name)["params.layers.0.kernel"]
    kernel = found["params.layers.0.kernel"]
    assert_same(kernel[:16], whole[:16], "the chunks that are there")
    assert not kernel[16:32, :12].any()
    for choice, fits in (("error", False), ("fill", True)):
        strategy = Strategy("orbax", options={"missing_chunks": choice})
        if fits:
            megackpt.load_plain_tensors(source, sharded_strategy=strategy)
            continue
        with pytest.raises(CorruptCheckpoint, match="lacks 1 of its chunks"):
            megackpt.load_plain_tensors(source, sharded_strategy=strategy)
    with pytest.raises(BackendError, match="missing_chunks is 'fill', 'error' or None"):
        Strategy("orbax", options={"missing_chunks": "x"}).make_reader()


def test_two_leaves_of_one_name_are_an_error_that_names_both(
    copy: Callable[[str], Path],
) -> None:
    source = copy("orbax-0.12.8-v0")

    def twice(document: Any) -> None:
        tree = document["tree_metadata"]
        leaf = {
            **tree["('step',)"],
            "key_metadata": [{"key": "params.layers", "key_type": 2}],
        }
        leaf["key_metadata"] += [{"key": "0.bias", "key_type": 2}]
        tree["('params.layers', '0.bias')"] = leaf

    change(source / "_METADATA", twice)
    with pytest.raises(CorruptCheckpoint) as caught:
        megackpt.load_plain_tensors(source)
    assert "('params', 'layers', '0', 'bias')" in str(caught.value)
    assert "('params.layers', '0.bias')" in str(caught.value)


def test_a_conversion_into_orbax_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="orbax"):
        megackpt.convert(GOLDEN / GOLDENS[0], tmp_path / "out", "orbax")
    with pytest.raises(CheckpointingException, match="orbax"):
        megackpt.save({"a": 1}, tmp_path / "out", "orbax")


@pytest.mark.parametrize("golden", GOLDENS)
@pytest.mark.parametrize("inner", [".", "default"])
def test_an_unfinished_save_is_no_checkpoint(
    tmp_path: Path, golden: str, inner: str
) -> None:
    """Arrays without OCDBT would be taken for zarr, with fill values in place of missing chunks."""
    folder = tmp_path / "7.orbax-checkpoint-tmp-3"
    shutil.copytree(GOLDEN / golden, folder / inner)
    (folder / inner / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    (folder / inner / "_METADATA").unlink(missing_ok=True)
    for path in (folder / inner, folder):
        with pytest.raises(NotACheckpoint, match="running, or died"):
            megackpt.load_plain_tensors(path)
    with pytest.raises(NotACheckpoint, match="no known format"):
        megackpt.load_plain_tensors(tmp_path)
    (step,) = list_run(tmp_path).steps
    assert not step.complete
    assert "running, or died" in step.reason


def test_the_share_of_one_process_is_no_checkpoint() -> None:
    share = GOLDEN / GOLDENS[0] / "ocdbt.process_0"
    with pytest.raises(NotACheckpoint, match="directory above"):
        megackpt.load_plain_tensors(share)


def test_dtypes_that_torch_lacks_are_refused_with_their_keys(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "orbax-0.12.8-v0-plain", folder)
    document = min(folder.glob("*/.zarray"))
    described = json.loads(document.read_text())
    document.write_text(json.dumps(described | {"dtype": "int4", "fill_value": None}))
    with pytest.raises(BackendError, match=f"'{document.parent.name}' is of int4"):
        megackpt.load_plain_tensors(folder)


def test_the_latest_step_of_a_run_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("0", "100"):
        shutil.copytree(GOLDEN / GOLDENS[0], tmp_path / name)
    found = megackpt.load_plain_tensors(tmp_path)
    assert found.keys() == megackpt.load_plain_tensors(tmp_path / "100").keys()
    assert "its latest complete step, 100, is read" in caplog.text


# The endpoint ----------------------------------------------------------------------------------------------------


def test_the_endpoint_serves_one_checkpoint_and_ends_with_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import urllib.error
    import urllib.request

    monkeypatch.setattr(arrays, "_IDLE_SECONDS", 0.0)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(b"0123456789")
    (tmp_path / "secret").write_bytes(b"secret")
    with arrays.session(LocalStorage(tmp_path / "in")) as session:
        url = session.endpoint.url
        host = url.split("/")[2]
        ask = urllib.request.Request(f"{url}file", headers={"Range": "bytes=2-4"})
        with urllib.request.urlopen(ask) as answer:
            assert answer.status == 206
            assert answer.read() == b"234"
        with urllib.request.urlopen(f"{url}file") as answer:
            assert answer.read() == b"0123456789"
        for other in (
            f"{url}../secret",
            f"{url}%2e%2e/secret",
            f"http://{host}/file",
            f"http://{host}/",
            f"{url}/etc/passwd",
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(other)
            assert caught.value.code == 403, other
            caught.value.close()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}nothing")
        assert caught.value.code == 404
        caught.value.close()
    for _ in range(100):
        if session.endpoint.socket.fileno() < 0:
            break
        threading.Event().wait(0.1)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}file")
    assert not arrays._sessions


def test_a_proxy_of_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(BackendError, match="no_proxy"):
        megackpt.load_plain_tensors(GOLDEN / GOLDENS[0])
    monkeypatch.setenv("no_proxy", endpoint._HOST)
    assert megackpt.load_plain_tensors(GOLDEN / GOLDENS[0])


def test_shards_of_zarr3_in_plain_files_are_read(tmp_path: Path) -> None:
    # tensorstore asks for the index of a shard by its distance from the end of the file.
    wide = np.arange(64, dtype=np.float32).reshape(8, 8)
    inner = {
        "chunk_shape": [4, 8],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    metadata = {
        "shape": [8, 8],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    kvstore = f"file://{tmp_path}/w/"
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(wide).result()
    leaf = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array"},
    }
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": leaf}}))
    found = megackpt.load_plain_tensors(str(tmp_path))
    assert_same(found["w"], torch.from_numpy(wide), "w")


def test_a_fork_of_a_user_of_tensorstore_gets_an_error() -> None:
    """tensorstore would end such a process."""
    script = f"""
import os
import megackpt
from megackpt.errors import BackendError

folder = {str(GOLDEN / "orbax-0.12.8-v0-plain")!r}
megackpt.load_plain_tensors(folder)
child = os.fork()
if not child:
    try:
        megackpt.load_plain_tensors(folder)
    except BackendError as error:
        os._exit("spawn" not in str(error))
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_values_of_two_items_under_one_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    for name, tree in (("a", {"b.c": 1}), ("a.b", {"c": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint").write_bytes(packed(tree))
    with pytest.raises(CorruptCheckpoint, match="have one key"):
        megackpt.load_common_state_dict(tmp_path)
