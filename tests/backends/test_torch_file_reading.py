"""torch files of others: what torch.save and Lightning write, and files that lie."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import (
    ShardedObject,
    ShardedTensor,
    convert,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_file import TorchFile
from megackpt.checkpoint import verify
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    UntrustedClass,
)
from megackpt.storage import LocalStorage, SingleFile
from tests.backends.torch_files import GOLDEN, TENSORS, State, same, whole


@pytest.mark.parametrize("indexed", [True, False])
def test_a_checkpoint_that_was_saved_in_parallel_is_read(
    tmp_path: Path, indexed: bool
) -> None:
    """By four ranks, with an earlier version."""
    folder = tmp_path / "c"
    shutil.copytree(GOLDEN, folder)
    if not indexed:
        (folder / "megackpt.index").unlink()
    expected = torch.load(f"{GOLDEN}.expected.pt", weights_only=True)
    same(load_plain_tensors(folder), expected)
    assert load_common_state_dict(folder) == {
        "step": 1234,
        "args": {"lr": 0.1, "betas": (0.9, 0.95)},
    }
    report = verify(folder)
    assert report.ok
    assert report.checked
    rngs = {rank: ShardedObject("rng", None, (4,), (rank,)) for rank in range(4)}
    columns = ShardedTensor.from_rank_offsets(
        "model.columns.weight", torch.zeros(6, 4).bfloat16(), (1, 2, 4)
    )
    found = load({"rng": rngs, "w": columns}, folder, validate_access_integrity=False)
    assert torch.equal(found["w"], expected["model.columns.weight"][:, 8:12])
    assert found["rng"][3] == {"rank": 3, "state": bytes(range(3, 12))}
    convert(folder, tmp_path / "again", "torch")
    same(load_plain_tensors(tmp_path / "again"), expected)
    if indexed:  # a save replaces it, with all of its files
        save(whole(TENSORS), folder)
        same(load_plain_tensors(folder), TENSORS)
        assert not (folder / "model.pt").exists()


# -- what torch.save wrote of others


def lightning() -> dict[str, Any]:
    """A training state as PyTorch Lightning and NeMo nest it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"base_lrs": [0.1], "last_epoch": 5}],
        "hyper_parameters": {"args": Namespace(lr=0.1), "betas": (0.9, 0.95)},
        "rng": {
            "python": random.Random(0).getstate(),
            "numpy": np.arange(3),
            "torch": torch.get_rng_state(),
        },
    }


def test_a_nested_training_state(file: Callable[[object], Path]) -> None:
    value = lightning()
    path = file(value)
    found = load_plain_tensors(path)
    for key, tensor in value["state_dict"].items():
        assert torch.equal(found[f"state_dict.{key}"], tensor)
    first = value["optimizer_states"][0]["state"][0]
    assert torch.equal(found["optimizer_states.0.state.0.exp_avg"], first["exp_avg"])
    assert torch.equal(found["rng.torch"], value["rng"]["torch"])
    common = load_common_state_dict(path)
    assert common["epoch"] == 3
    assert (
        common["optimizer_states"][0]["param_groups"]
        == value["optimizer_states"][0]["param_groups"]
    )
    assert common["lr_schedulers"] == value["lr_schedulers"]
    assert common["hyper_parameters"] == value["hyper_parameters"]
    assert common["rng"]["python"] == value["rng"]["python"]
    assert np.array_equal(common["rng"]["numpy"], np.arange(3))
    assert "state_dict" not in common
    assert verify(path).ok
    assert verify(path).checked


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda t: t[2:],
    "transposed": lambda t: t.t(),
    "column": lambda t: t[:, 1:3],
    "every second": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "scalar": lambda t: t[1, 1],
    "empty": lambda t: t[3:3],
    "parameter": torch.nn.Parameter,
    "buffer": torch.nn.Buffer,
    "conjugated": lambda t: torch.complex(t, t + 1).conj(),
    "negated": lambda t: torch.complex(t, t + 1).conj().imag,
    "more axes": lambda t: t.reshape(2, 3, 2, 4).permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(file: Callable[[object], Path], view: str) -> None:
    base = torch.randn(6, 8)
    expected = VIEWS[view](base).detach()
    found = load_plain_tensors(file({"base": base, "view": VIEWS[view](base), "n": 1}))
    assert torch.equal(found["view"], expected.resolve_conj())
    assert torch.equal(found["base"], base)


def test_a_part_of_a_view(file: Callable[[object], Path]) -> None:
    base = torch.randn(40, 60)
    path = file({"t": base.t()})
    part = ShardedTensor.from_rank_offsets(
        "t", torch.zeros(15, 40), (0, 2, 4), replica_id=0
    )
    load({"t": part}, path, validate_access_integrity=False)
    assert torch.equal(part.data, base.t()[30:45])


def test_other_shapes_of_values(file: Callable[[object], Path]) -> None:
    t, u = torch.ones(2), torch.zeros(3)
    same(load_plain_tensors(file(t)), {"tensor": t})
    same(load_plain_tensors(file([t, {"x": u}])), {"0": t, "1.x": u})
    same(load_plain_tensors(file((t, u))), {"0": t, "1": u})
    same(
        load_plain_tensors(file(OrderedDict(x=t, y=OrderedDict(z=u)))),
        {"x": t, "y.z": u},
    )
    same(load_plain_tensors(file(defaultdict(dict, {1: {"s": t}}))), {"1.s": t})
    assert load_common_state_dict(file([t, 5, "x"])) == {1: 5, 2: "x"}
    assert load_common_state_dict(file({"a": {"t": t}, "b": {}})) == {"b": {}}
    assert load_common_state_dict(file({"a": [t, 5, u]})) == {"a": {1: 5}}
    assert load_common_state_dict(file(5)) == {"": 5}
    assert load_plain_tensors(file({"x": 1})) == {}
    tied = load_plain_tensors(file({"x": t, "y": t}))
    same(tied, {"x": t, "y": t})


def test_ambiguous_names_raise(file: Callable[[object], Path]) -> None:
    with pytest.raises(
        BackendError, match=r"named 'a\.b': those at \['a'\]\['b'\] and \['a\.b'\]"
    ):
        load_plain_tensors(file({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}))
    with pytest.raises(BackendError, match="cannot be a name"):
        load_plain_tensors(file({(1, 2): torch.ones(1)}))


class Unknown:
    def __init__(self) -> None:
        self.x = 5


def test_unknown_classes_matter_only_to_the_common_state(
    file: Callable[[object], Path],
) -> None:
    path = file({"t": torch.ones(2), "what": Unknown(), "n": 1})
    same(load_plain_tensors(path), {"t": torch.ones(2)})
    assert list(load_tensors_metadata(path)) == ["t"]
    with pytest.raises(
        UntrustedClass, match=r"Unknown.*not trusted[^\0]*add_safe_globals"
    ):
        load_common_state_dict(path)
    with torch.serialization.safe_globals([Unknown]):
        assert load_common_state_dict(path, trusted=[Unknown])["what"].x == 5


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (
        lambda: {"a": {"t": torch.eye(3).to_sparse()}},
        r"'a\.t' is not a plain tensor \(_rebuild_sparse_tensor",
    ),
    "quantized": (
        lambda: {"t": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        "'t' is not a plain tensor .*_rebuild_qtensor",
    ),
    "meta": (
        lambda: {"t": torch.empty(2, device="meta")},
        "'t' is not a plain tensor .*_rebuild_meta_tensor",
    ),
    "module": (
        lambda: torch.nn.Linear(2, 2),
        r"torch\.nn\.modules\.linear\.Linear, whose code does not run",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_unreadable_content_raises(file: Callable[[object], Path], kind: str) -> None:
    make, told = REFUSED[kind]
    with pytest.raises(BackendError, match=told):
        load_plain_tensors(file(make()))


def test_files_of_old_torch_raise(tmp_path: Path) -> None:
    torch.save(
        {"t": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    with pytest.raises(BackendError, match=r"before version 1\.6.*torch\.save"):
        load_plain_tensors(tmp_path / "old.pt")


def hugging_face(folder: Path) -> State:
    folder.mkdir()
    state = {"x": torch.randn(3), "y": torch.randn(4)}
    for i, (key, tensor) in enumerate(state.items()):
        torch.save({key: tensor}, folder / f"pytorch_model-0000{i + 1}-of-00002.bin")
    names = {
        key: f"pytorch_model-0000{i + 1}-of-00002.bin" for i, key in enumerate(state)
    }
    text = str({"metadata": {}, "weight_map": names}).replace("'", '"')
    (folder / "pytorch_model.bin.index.json").write_text(text)
    return state


def test_directories_of_hugging_faces(tmp_path: Path) -> None:
    state = hugging_face(tmp_path / "several")
    same(load_plain_tensors(tmp_path / "several"), state)
    (tmp_path / "one").mkdir()
    torch.save(state, tmp_path / "one/pytorch_model.bin")
    same(load_plain_tensors(tmp_path / "one"), state)
    torch.save(
        {"x": state["x"], "epoch": 1},
        tmp_path / "several/pytorch_model-00001-of-00002.bin",
    )
    assert load_common_state_dict(tmp_path / "several") == {"epoch": 1}
    torch.save(
        {"y": state["y"], "epoch": 1},
        tmp_path / "several/pytorch_model-00002-of-00002.bin",
    )
    with pytest.raises(BackendError, match="one common state only"):
        load_plain_tensors(tmp_path / "several")


def test_directories_of_other_formats_are_left_to_them(tmp_path: Path) -> None:
    save(whole(TENSORS) | {"n": 1}, tmp_path / "dist", TorchDist())
    assert not TorchFile().recognises(LocalStorage(tmp_path / "dist"))
    assert TorchFile().recognises(SingleFile(tmp_path / "dist/common.pt"))
    (tmp_path / "lone").mkdir()
    torch.save({}, tmp_path / "lone/common.pt")
    with pytest.raises(NotACheckpoint):
        load_plain_tensors(tmp_path / "lone")
    state = hugging_face(tmp_path / "both")
    (tmp_path / "both/model.safetensors").write_bytes(b"")
    assert not TorchFile().recognises(LocalStorage(tmp_path / "both"))
    assert state


# -- hostile files


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def archived(
    pickle_bytes: bytes,
    members: Mapping[str, bytes] | None = None,
    compression: int = 0,
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        content = {
            "data.pkl": pickle_bytes,
            "byteorder": b"little",
            "version": b"3\n",
            **(members or {}),
        }
        for name, data in content.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def tensor(
    count: int = 4,
    offset: int = 0,
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
) -> bytes:
    """The pickle of ``{"t": ...}``, a uint8 tensor of a storage "0" of which this is said."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(n, 2)[2:-1] for n in values) + b"t"

    return (
        b"\x80\x02}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nByteStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpu" + pickle.dumps(count, 2)[2:-1] + b"tQ" + pickle.dumps(offset, 2)[2:-1]
        + numbers(shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip


DATA = {"data/0": b"1234"}
GOOD = archived(tensor(), DATA)


def _patched(data: bytes, name: str, at: int, value: bytes) -> bytes:
    """The archive with other bytes in the directory's entry of a member."""
    entry = data.rindex(b"PK\1\2", 0, data.rindex(name.encode()))
    return data[: entry + at] + value + data[entry + at + len(value) :]


LIES: dict[str, bytes] = {
    "no opcode": archived(b"\x80\x02\xff.", DATA),
    "cut off": GOOD[:-30],
    "garbage after it": GOOD + b"x",
    "compressed": archived(tensor(), DATA, zipfile.ZIP_DEFLATED),
    "a bomb": archived(
        tensor(1 << 30, shape=(1 << 30,)),
        {"data/0": bytes(1 << 20)},
        zipfile.ZIP_DEFLATED,
    ),
    "storage missing": archived(tensor()),
    "storage of another size": archived(tensor(5), DATA),
    "beyond its storage": archived(tensor(shape=(5,)), DATA),
    "beyond by offset": archived(tensor(offset=1), DATA),
    "beyond by strides": archived(tensor(shape=(2,), strides=(4,)), DATA),
    "negative": archived(tensor(shape=(-1,)), DATA),
    "negative stride": archived(tensor(offset=3, strides=(-1,)), DATA),
    "overflow": archived(tensor(shape=(1 << 62, 4), strides=(0, 0)), DATA),
    "overflow of none": archived(
        tensor(shape=(1 << 62, 1 << 62, 0), strides=(0, 0, 0)), DATA
    ),
    "other number of strides": archived(tensor(strides=(1, 1)), DATA),
    "many axes": archived(tensor(shape=(1,) * 65, strides=(0,) * 65), DATA),
    "place beyond the file": _patched(GOOD, "data/0", 42, struct.pack("<L", 1 << 30)),
    "place of nothing": _patched(GOOD, "data/0", 42, struct.pack("<L", 1)),
    "size beyond the file": _patched(
        GOOD, "data/0", 20, struct.pack("<2L", 1 << 30, 1 << 30)
    ),
    "overlap": _patched(
        _patched(GOOD, "data/0", 20, struct.pack("<2L", 60, 60)),
        "data/0",
        42,
        b"\0\0\0\0",
    ),
    "deep": archived(
        b"\x80\x02" + b"}X\x01\0\0\0t" * 10_000 + b"N" + b"s" * 10_000 + b".", DATA
    ),
    "itself": archived(b"\x80\x02}q\0X\x01\0\0\0th\0s.", DATA),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_errors(tmp_path: Path, lie: str) -> None:
    (tmp_path / "x.pt").write_bytes(LIES[lie])
    with pytest.raises(CorruptCheckpoint, match=r"x\.pt"):
        load_plain_tensors(tmp_path / "x.pt")


def test_code_does_not_run(tmp_path: Path) -> None:
    bomb = Bomb(str(tmp_path / "was-here"))
    (tmp_path / "x.pt").write_bytes(archived(pickle.dumps({"n": bomb, "m": [bomb]}, 2)))
    assert load_plain_tensors(tmp_path / "x.pt") == {}
    with pytest.raises(UntrustedClass, match=r"(posix|os)\.system"):
        load_common_state_dict(tmp_path / "x.pt")
    assert not (tmp_path / "was-here").exists()


def test_the_good_one_is_good(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(GOOD)
    assert load_plain_tensors(tmp_path / "x.pt")["t"].tolist() == list(b"1234")


def test_parts_that_are_shared_again_and_again(tmp_path: Path) -> None:
    levels = b"".join(b"](h\1h\1eq\1" for _ in range(20))
    (tmp_path / "x.pt").write_bytes(
        archived(tensor()[:-1] + b"q\1" + levels + b".", DATA)
    )
    with pytest.raises(CorruptCheckpoint, match="same parts again and again"):
        load_plain_tensors(tmp_path / "x.pt")


def test_a_checksum_that_lies_is_noticed(tmp_path: Path) -> None:
    wrong = struct.pack("<L", zlib.crc32(b"other"))
    (tmp_path / "x.pt").write_bytes(_patched(GOOD, "data/0", 16, wrong))
    assert "data/0 does not match its checksum" in str(verify(tmp_path / "x.pt"))
    (tmp_path / "x.pt").write_bytes(_patched(GOOD, "data.pkl", 16, wrong))
    with pytest.raises(CorruptCheckpoint, match=r"data\.pkl are damaged"):
        load_plain_tensors(tmp_path / "x.pt")


def test_big_endian_files_raise(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archived(tensor(), {**DATA, "byteorder": b"big"}))
    with pytest.raises(BackendError, match="big-endian"):
        load_plain_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4", b"PK\3\4" + bytes(100), b"\x80\x02}.", b"{}"]
)
def test_other_files_are_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(NotACheckpoint):
        load_plain_tensors(tmp_path / "x")
