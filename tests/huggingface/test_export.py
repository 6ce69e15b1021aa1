"""Exports to Hugging Face's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import ShardedObject, limits
from megackpt.backends.safetensors import Safetensors
from megackpt.checkpoint import Transaction
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.converter import convert, export_huggingface
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.huggingface import (
    Fuse,
    Part,
    Table,
    Tied,
    Transpose,
    as_huggingface,
    llama,
)
from tests.huggingface.models import (
    CONFIG,
    equal,
    files_in,
    numbered,
    ours,
    shard,
    theirs,
)


@pytest.mark.parametrize(
    "strategy",
    [
        "zarr",
        megackpt.Strategy("zarr", options={"compression": "zstd"}),
        "torch",
        "safetensors",
    ],
    ids=["zarr", "zarr-zstd", "torch", "safetensors"],
)
def test_every_format_is_exported(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cast on the way; and, of one of them, by worker processes."""
    if strategy == "zarr":
        monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 16384)
    hf, table = tmp_path / "hf", llama(CONFIG)
    hf.mkdir()
    save_file(theirs(), hf / "model.safetensors")
    state = ours(0, 1, stacked=True)
    megackpt.load(as_huggingface(state, table), hf)
    megackpt.save(state, tmp_path / "saved")
    megackpt.convert(tmp_path / "saved", tmp_path / "training", strategy)
    export_huggingface(
        tmp_path / "training", tmp_path / "out", table, CONFIG, cast="fp32", workers=2
    )
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {key: value.float() for key, value in theirs().items()},
    )
    assert megackpt.verify(tmp_path / "out").ok


def test_an_export_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    state = {
        "a": shard("a", torch.zeros(4)), "b": shard("b", torch.zeros(4)), "half": shard("half", torch.zeros(2))
    }  # fmt: skip
    megackpt.save(state, tmp_path / "training")

    def told(table: Table, **options: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            export_huggingface(
                tmp_path / "training", tmp_path / "out", table, {}, **options
            )
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    same: dict[str, Any] = {"a": "a", "b": "b", "half": "c"}
    unfit = told({"a": "a", "layers.#.w": Fuse(("x.#", "y.#")), "other": "a"})
    assert "no rule fits 'b', 'half'" in unfit
    assert "no tensor fits the rule 'layers.#.w' (for 'x.#', 'y.#')" in unfit
    assert "'other'" not in unfit  # what it is for, 'a' gives
    assert (
        "'a': [0:4] is in 2 tensors: Tied for all but one (it is made of 'a', 'b')"
        in told(same | {"b": "a"})
    )
    lost = told(
        same | {"b": Part(Fuse(("b", "c", "d"), (1, 1, 2)), 0, (1, 1)), "half": None}
    )
    assert "'d' is made of nothing that the checkpoint holds" in lost
    assert "'d': [2:4] is in nothing that the checkpoint holds" in told(
        same | {"half": Part("d", 0, (1, 1))}
    )
    assert "'a' would have the shapes [(2,), (4,)], by 'a', 'half'" in told(
        same | {"half": "a"}
    )
    state["half"] = shard("half", torch.zeros(2, dtype=torch.int8))
    state["rest"] = shard("rest", torch.zeros(2))
    megackpt.save(state, tmp_path / "training")
    split = same | {"half": Part("d", 0, (1, 1)), "rest": Part("d", 1, (1, 1))}
    assert "'d' would be of float32 and int8" in told(split)
    assert "\n" not in told(same | {"rest": None, "half": Transpose("d")}), (
        "one problem, one line"
    )


def test_the_files_beside(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    beside = tmp_path / "pretrained"
    beside.mkdir()
    with pytest.raises(StorageError, match=r"a directory that has a config\.json"):
        export_huggingface(tmp_path / "training", tmp_path / "out", {"a": "a"}, beside)
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ):
        (beside / name).write_text(f'"{name}"')
    with pytest.raises(StorageError, match="cannot be read"):
        export_huggingface(
            tmp_path / "training", tmp_path / "out", {"a": "a"}, tmp_path / "nowhere"
        )
    assert not (tmp_path / "out").exists()
    copied = {
        "tokenizer.model.v3",
        "source.spm",
        "bpe.codes",
        "dict.txt",
        "LICENSE",
        "train.py",
    }
    left = {
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        ".gitattributes",
        "model.onnx_data",
    }
    left |= {"vocab.txt.old", "vocab.txt.old2", "megackpt.journal"}
    for name in copied | left:
        (beside / name).write_text(name)
    folders = {
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tool.jinja",
    }
    for name in {*folders, "runs/config.json", "odd.json/config.json"}:
        (beside / name).parent.mkdir()
        (beside / name).write_text("{}")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "../training")]
    (beside / "modules.json").write_text(json.dumps(modules))
    arguments = (tmp_path / "training", tmp_path / "out", {"a": "a"}, beside)
    export_huggingface(*arguments, index=True)
    copied |= {"config.json", "tokenizer.json", "modules.json"} | folders
    assert files_in(tmp_path / "out") == copied | {
        "model.safetensors",
        "megackpt.index",
    }

    told = {"dtype": "bfloat16", "hidden_size": 3}
    (beside / "config.json").write_text(json.dumps(told))
    for cast, dtype in ((None, "float32"), ("fp16", "float16")):
        before = (tmp_path / "out/config.json").read_bytes()
        with pytest.raises(
            StorageError, match=r"config\.json would collide with this save"
        ):
            export_huggingface(*arguments, cast=cast, overwrite=True, index=True)
        assert (tmp_path / "out/config.json").read_bytes() == before
        (tmp_path / "out/config.json").unlink()
        export_huggingface(*arguments, cast=cast, overwrite=True, index=True)
        assert json.loads((tmp_path / "out/config.json").read_text()) == told | {
            "dtype": dtype
        }
    assert files_in(tmp_path / "out") == copied | {
        "model.safetensors",
        "megackpt.index",
    }
    (beside / "modules.json").write_text('[{"path": "0_Transformer"}]')
    with pytest.raises(StorageError, match="the model is in one of the folders"):
        export_huggingface(*arguments, overwrite=True)


@pytest.mark.slow
def test_an_export_that_fails_touches_no_file_of_others(tmp_path: Path) -> None:
    """Nor does one that meets another."""
    training, out = tmp_path / "training", tmp_path / "out"
    megackpt.save({"a": shard("a", torch.zeros(4))}, training)
    out.mkdir()
    (out / "config.json").write_text("mine")
    before = files_in(tmp_path)

    def export(
        config: dict[str, Any],
        target: Path = out,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        export_huggingface(training, target, table or {"a": "a"}, config, **options)

    for options in (
        {"workers": -3}, {"select": "nothing*"}, {"max_memory": "zz"}, {"max_memory": 10}, {"nope": 1},
        {"table": {"a": "__metadata__"}}, {"target": training / "hf"},
    ):  # fmt: skip
        with pytest.raises((CheckpointingException, ValueError, TypeError)):
            export({}, **options)  # type: ignore[arg-type]
    assert files_in(tmp_path) == before
    assert (out / "config.json").read_text() == "mine"

    def another(done: int, total: int) -> None:
        if not (out / "config.json").exists():
            export({"who": "the second"})

    with pytest.raises(
        StorageError, match=r"config\.json would collide with this save"
    ):
        export({"who": "the first"})
    assert files_in(tmp_path) == before
    assert (out / "config.json").read_text() == "mine"
    (out / "config.json").unlink()
    with pytest.raises((SaveInProgress, StorageError)):
        export({"who": "the first"}, progress=another)
    assert json.loads((out / "config.json").read_text()) == {"who": "the second"}


def test_an_export_leaves_nothing_of_ours(tmp_path: Path) -> None:
    """It replaces no checkpoint, and is not replaced: nothing says that it is ours."""
    training, out = tmp_path / "training", tmp_path / "out"
    state = {key: shard(key, torch.ones(4)) for key in ("a", "b")}
    megackpt.save(state | {"step": 7}, training)
    table = {"*": "model.*"}
    for size, weights in (
        ("1GB", {"model.safetensors"}),
        (16, {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}),
    ):
        export_huggingface(training, out, table, {}, max_shard_size=size)
        if size == 16:
            weights |= {"model.safetensors.index.json"}
        assert files_in(out) == weights | {"config.json"}
        assert {path.name for path in tmp_path.iterdir()} == {"training", "out"}
        equal(
            megackpt.load_plain_tensors(out),
            {f"model.{key}": torch.ones(4) for key in "ab"},
        )
        assert megackpt.verify(out).ok
        before = files_in(out)
        for index, most in ((False, "1GB"), (True, size)):
            with pytest.raises(StorageError, match=r"model.* would collide with this"):
                export_huggingface(
                    training,
                    out,
                    table,
                    {},
                    max_shard_size=most,
                    overwrite=True,
                    index=index,
                )
        assert files_in(out) == before
        shutil.rmtree(out)
    without = Safetensors(index=False)
    tensors = {key: shard(key, torch.ones(4)) for key in ("a", "b")}
    megackpt.save(tensors, out, without)
    assert files_in(out) == {"model.safetensors"}
    convert(training, tmp_path / "both", "safetensors")
    for make in (
        lambda: convert(training, tmp_path / "both", without, overwrite=True),
        lambda: megackpt.save(tensors, training, without),
    ):
        with pytest.raises(
            CheckpointExists, match="without index replaces nothing"
        ) as refused:
            make()
        assert "overwrite" not in str(refused.value)
    megackpt.save(tensors, tmp_path / "both", "safetensors")


def test_what_takes_the_place_of_an_export_is_complete_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    folder, out = tmp_path / "hf/additional_chat_templates", tmp_path / "out"
    folder.mkdir(parents=True)
    for name in ("../config.json", "../tokenizer.json", "tool.jinja"):
        (folder / name).write_text("{}")
    seen: list[set[str]] = []

    real = DirectoryTarget.settle

    def looked(*arguments: Any) -> None:
        seen.append(files_in(out))
        real(*arguments)

    monkeypatch.setattr(DirectoryTarget, "settle", looked)

    def export() -> set[str]:
        export_huggingface(
            tmp_path / "training",
            out,
            {"a": "a"},
            tmp_path / "hf",
            overwrite=True,
            index=True,
        )
        return files_in(out)

    first = export()
    assert export() == first
    assert len(seen) == 2
    assert all(files > first for files in seen), "and the marker"
    (out / folder.name / "mine").write_text("mine")
    with pytest.raises(
        StorageError, match=f"{folder.name} would collide with this save"
    ):
        export()
    shutil.rmtree(out / folder.name)
    (out / folder.name).write_text("a file")
    with pytest.raises(
        StorageError, match=f"{folder.name} would collide with this save"
    ):
        export()
    (out / folder.name).unlink()
    assert export() == first


def test_exports_that_cannot_be_are_refused_before_they_begin(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    (tmp_path / "file").write_text("mine")
    for target, error, said in (
        (
            "model.safetensors",
            BackendError,
            "is one file, and other files go beside it",
        ),
        ("file", StorageError, "a file is in the way"),
    ):
        with pytest.raises(error, match=said):
            export_huggingface(tmp_path / "training", tmp_path / target, {"a": "a"}, {})
    for config, said in (
        ({"dtype": torch.bfloat16}, "cannot hold"),
        (object(), "a dict"),
    ):
        with pytest.raises(MismatchError, match=said):
            export_huggingface(
                tmp_path / "training", tmp_path / "out", {"a": "a"}, config
            )  # type: ignore[arg-type]
    for name in ("model.safetensors", "megackpt.index"):
        with pytest.raises(
            BackendError, match=f"'{name}' is a file of the format safetensors"
        ):
            convert(
                tmp_path / "training",
                tmp_path / "out",
                "safetensors",
                beside={name: b"mine"},
            )
    assert {path.name for path in tmp_path.iterdir()} == {"training", "file"}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"config.json": b"[" * 100_000}, "config.json: maximum recursion"),
        ({"config.json": b"{}", "../evil": b""}, "'../evil' of bytes is not a small"),
        ({"config.json": b"{}", "a\0b": b""}, "is not a name of a file"),
        ({"config.json": b"{}", "\ud800": b""}, "is not a name of a file"),
    ],
)
def test_hostile_files_in_a_checkpoint_are_not_exported(
    tmp_path: Path, stored: dict[str, bytes], said: str
) -> None:
    source = tmp_path / "training"
    files = ShardedObject("files", stored, (1,), (0,), 0)
    state = {"w": shard("model.w", torch.ones(4)), "files": files}
    megackpt.save(state, source)
    with pytest.raises(CorruptCheckpoint, match=said):
        export_huggingface(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == [
        "training"
    ]


def test_a_config_and_a_key_that_are_endless(tmp_path: Path) -> None:
    source, config = tmp_path / "training", tmp_path / "config.json"
    key = f"model.layers.{'9' * 5000}.w"
    megackpt.save({"w": shard(key, torch.ones(4))}, source)
    config.write_bytes(b"[" * 100_000)
    with pytest.raises(StorageError, match="maximum recursion"):
        export_huggingface(source, tmp_path / "out", config=config)
    export_huggingface(source, tmp_path / "out", config={"num_hidden_layers": 1})
    assert [*load_file(tmp_path / "out" / "model.safetensors")] == [key[6:]]


def test_a_training_checkpoint_that_lacks_a_layer_is_not_exported(
    tmp_path: Path,
) -> None:
    """Neither one in the middle nor the last; what other numbers there are (experts, a second stack) is no matter."""
    weights = {
        f"model.layers.{n}.experts.{e}.w": numbered(2)
        for n in (0, 1, 3)
        for e in (0, 5)
    }
    weights["mtp.layers.0.w"] = numbered(2)
    megackpt.save(
        {key: shard(key, value) for key, value in weights.items()},
        tmp_path / "training",
    )
    for config, name, lacking in (
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4", "model.layers.2"),
        (
            {"num_hidden_layers": 5},
            "num_hidden_layers is 5",
            "model.layers.2, model.layers.4",
        ),
        ({"n_layer": 4}, "n_layer is 4", "model.layers.2"),
        (
            {"text_config": {"num_layers": 3}, "num_hidden_layers": 2},
            "num_layers is 3",
            "model.layers.2",
        ),
    ):
        with pytest.raises(MismatchError, match=rf"{name}, .* nothing for {lacking}$"):
            export_huggingface(
                tmp_path / "training", tmp_path / "out", {"*": "*"}, config
            )
    assert not (tmp_path / "out").exists()
    export_huggingface(
        tmp_path / "training", tmp_path / "out", {"*": "*"}, {"num_hidden_layers": 2}
    )
    equal(load_file(tmp_path / "out/model.safetensors"), weights)


def test_another_table_is_another_export(tmp_path: Path) -> None:
    """What an earlier export left is not taken for this one's, though all names and shapes are the same."""
    square = numbered(4, 4)
    megackpt.save({"a": shard("a", square)}, tmp_path / "training")
    for rule, expected in (("a", square), (Transpose("a"), square.T)):
        export_huggingface(
            tmp_path / "training",
            tmp_path / "out",
            {"a": rule},
            {},
            overwrite=True,
            index=True,
        )
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_export_goes_on_where_it_was_cut_off(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the directory that the configuration is taken from."""
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 4096)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 16384)
    whole = numbered(64, 512)
    megackpt.save({"a": shard("a", whole)}, tmp_path / "training")
    config: Any = tmp_path / "out" if in_place else {}
    if in_place:
        config.mkdir()
        (config / "config.json").write_text("{}")
    table = {"a": Fuse((Transpose("b"), Transpose("c")))}
    arguments = (tmp_path / "training", tmp_path / "out", table, config)

    def cut_off(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_huggingface(*arguments, progress=cut_off)
    assert (tmp_path / "out/config.json").exists() == in_place
    with monkeypatch.context() as patched:
        patched.setattr(
            Transaction, "commit", lambda *_: cut_off(1, 1)
        )  # when all but the last file is there
        with pytest.raises(KeyboardInterrupt):
            export_huggingface(*arguments)
    assert (tmp_path / "out/config.json").exists() == in_place
    with pytest.raises(NotACheckpoint, match="this process, was given up"):
        megackpt.load_plain_tensors(tmp_path / "out")
    done = export_huggingface(*arguments)
    assert done.resumed == done.bytes
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {"b": whole[:32].T.contiguous(), "c": whole[32:].T.contiguous()},
    )
    assert files_in(tmp_path / "out") == {
        "config.json",
        "model.safetensors",
    }


def test_tied_alone_cannot_be_exported(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    with pytest.raises(MismatchError, match=r"'a' is made of nothing .* \(tied"):
        export_huggingface(
            tmp_path / "training", tmp_path / "out", {"a": Tied("a")}, {}
        )
