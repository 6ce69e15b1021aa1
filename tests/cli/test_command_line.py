"""The command line, called as a user calls it: what it prints, where, and its exit status."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import ShardedObject, ShardedTensor, errors
from megackpt.__main__ import main
from megackpt.cli import listing
from megackpt.cli.trees import Item, folded

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
COMMAND = [sys.executable, "-m", "megackpt"]
ESCAPE = "\x1b"


def state(value: float = 0.0) -> dict[str, Any]:
    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024) + value
    return {
        "halves": [
            ShardedTensor.from_rank_offsets("w", h, (0, i, 2))
            for i, h in enumerate(weight.chunk(2))
        ],
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7)),
        "o": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "iteration": 5,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    megackpt.save(state(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.fixture
def plain(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; its exit status is checked, and its stdout returned."""

    def run(*arguments: str | Path, status: int = 0) -> str:
        assert main([str(a) for a in arguments]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def asked(plain: Callable[..., str]) -> Callable[..., Any]:
    """Run a command with --json."""
    return lambda *arguments, status=0: json.loads(
        plain(*arguments, "--json", status=status)
    )


class Shown(NamedTuple):
    """What a command did on a terminal."""

    status: int
    raw: str

    @property
    def text(self) -> str:
        """What a person sees: without colours, trailing spaces, carriage returns."""
        bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw)
        return "\n".join(line.rstrip() for line in bare.replace("\r", "").split("\n"))


def on_terminal(*arguments: str | Path, width: int = 100, **env: str) -> Shown:
    """Run a command in a process whose stdin, stdout and stderr are a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "LC_ALL", "LANG")
    }
    env = {**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        cwd=ROOT,
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # how Linux says that nobody has the other end open any more
            break
        parts.append(part)
    os.close(master)
    return Shown(process.wait(), b"".join(parts).decode())


def piped(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )


# show


def test_show(checkpoint: Path, plain: Callable[..., str]) -> None:
    lines = [line.split() for line in plain("show", checkpoint).splitlines()]
    assert lines[0][1:5] == ["torch_dist", "version", "1,", "save"]
    assert lines[1] == ["KEY", "DTYPE", "SHAPE", "CHUNKS", "SIZE"]
    assert ["w", "float32", "1024x1024", "2", "4.0", "MiB"] in lines
    assert ["step", "int64", "scalar", "1", "8", "B"] in lines
    assert any(line[:3] == ["rng", "object", "1"] for line in lines)
    assert lines[-1][:6] == ["4", "entries,", "5", "chunks,", "3", "files,"]


def test_show_as_json(checkpoint: Path, asked: Callable[..., Any]) -> None:
    facts = asked("show", checkpoint)
    assert (facts["format"], facts["version"], facts["digests"]) == (
        "torch_dist",
        1,
        True,
    )
    assert {e["key"]: (e["dtype"], e["shape"], e["chunks"], e["bytes"]) for e in facts["entries"]}["w"] == (
        "float32", [1024, 1024], 2, 4 << 20
    )  # fmt: skip
    assert "layout" not in facts["entries"][0]


def test_the_layout_of_one_tensor(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    (entry,) = asked("show", checkpoint, "w")["entries"]
    for i, chunk in enumerate(entry["layout"]):
        assert (chunk["offset"], chunk["shape"]) == ([512 * i, 0], [512, 1024])
        data = (checkpoint / chunk["file"]).read_bytes()[chunk["start"] :][
            : chunk["length"]
        ]
        assert (
            data
            == torch.arange(i << 19, (i + 1) << 19, dtype=torch.float32)
            .numpy()
            .tobytes()
        )
        assert len(chunk["digests"]) == 2
        assert chunk["rank"] == 0
    text = plain("show", checkpoint, "w")
    assert "[512:1024, 0:1024]" in text
    assert f"{entry['layout'][0]['digests'][0]} +1" in text


def test_patterns(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert [e["key"] for e in asked("show", checkpoint, "*s*")["entries"]] == [
        "common_state",
        "step",
    ]
    assert all(
        "layout" in e for e in asked("show", checkpoint, "*s*", "--chunks")["entries"]
    )
    assert plain("show", checkpoint, "stepp", status=3) == ""
    assert (
        "no key 'stepp'"
        in asked("show", checkpoint, "stepp", status=3)["error"]["message"]
    )


def test_the_nearest_keys_are_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(checkpoint), "stepp"]) == 3
    assert "the nearest are 'step'" in capsys.readouterr().err


def test_common_state(plain: Callable[..., str], asked: Callable[..., Any]) -> None:
    lines = plain("show", NEW, "--common").splitlines()
    assert "optimizer.param_groups[0].lr = 0.125" in lines
    assert "opt_param_scheduler.dtype = torch.bfloat16" in lines
    facts = asked("show", NEW, "--common")
    assert facts["common"]["args"] == {"tp": 2, "pp": 1, "none": None, "flag": True}
    assert "entries" not in facts


class Secret:
    """A class that must not be imported."""

    touched = False

    def __init__(self) -> None:
        self.inner = {"a b": [1, 2.5], "t": torch.arange(3)}

    def __setstate__(self, given: dict[str, Any]) -> None:
        Secret.touched = True
        self.__dict__ = given


def test_no_class_of_a_checkpoint_is_imported(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    megackpt.save({"s": Secret(), "nan": float("nan")}, tmp_path / "c")
    lines = plain("show", tmp_path / "c", "--common").splitlines()
    assert f"s['<class>'] = '{Secret.__module__}.Secret'" in lines
    assert "s.inner['a b'][1] = 2.5" in lines
    assert "s.inner.t = tensor of int64, 3: [0, 1, 2]" in lines
    common = asked("show", tmp_path / "c", "--common")["common"]
    assert common["s"]["inner"] == {
        "a b": [1, 2.5],
        "t": {"dtype": "int64", "shape": [3]},
    }
    assert common["nan"] == "nan"
    assert not Secret.touched


def test_the_shard_map(
    checkpoint: Path, tmp_path: Path, plain: Callable[..., str]
) -> None:
    page = tmp_path / "map.html"
    assert str(page) in plain("show", checkpoint, "--html", page)
    assert "<html" in page.read_text(encoding="utf-8")
    plain("show", checkpoint, "--html", tmp_path / "no" / "map.html", status=6)


# verify


def test_verify_tells_good_from_bad(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert "all good" in plain("verify", checkpoint)
    assert asked("verify", checkpoint)["ok"]
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "'w'" in plain("verify", checkpoint, status=1)
    facts = asked("verify", checkpoint, status=1)
    assert (facts["ok"], facts["checked"], len(facts["problems"])) == (False, True, 1)


# ls


def test_ls(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    for name in ("iter_0000100", "iter_0000200"):
        shutil.copytree(NEW, tmp_path / name)
    (tmp_path / "iter_0000300").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("300")
    lines = plain("ls", tmp_path).splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["iter_0000200"][1:5] == ["200", "torch_dist", "1", "9"]
    assert rows["iter_0000200"][-2:] == ["complete,", "latest"]
    assert "iter_0000300: it is empty" in lines
    assert (
        lines[-1]
        == "latest_checkpointed_iteration.txt names 300 as the latest: iter_0000300 is not complete"
    )
    facts = asked("ls", tmp_path)
    assert (facts["latest"], facts["checkpoint"], len(facts["steps"])) == (
        "iter_0000200",
        None,
        3,
    )


def test_ls_of_a_checkpoint_and_of_nothing(
    checkpoint: Path, tmp_path: Path, plain: Callable[..., str]
) -> None:
    assert "is a checkpoint: torch_dist 1" in plain("ls", checkpoint)
    (tmp_path / "empty").mkdir()
    plain("ls", tmp_path / "empty", status=3)
    plain("ls", tmp_path / "no", status=3)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": 5}')
    plain("ls", checkpoint, status=4)


# diff


def test_diff(
    checkpoint: Path,
    tmp_path: Path,
    plain: Callable[..., str],
    asked: Callable[..., Any],
) -> None:
    other = state()
    other["halves"][1].data[3, 7] += 0.5
    other["iteration"] = 6
    other["extra"] = ShardedTensor.from_rank_offsets("extra", torch.zeros(2, 3))
    megackpt.save(other, tmp_path / "b")
    assert (
        plain("diff", checkpoint, checkpoint)
        .splitlines()[-1]
        .startswith("the same: 4 keys compared (4 the same by")
    )
    lines = [
        line.split()
        for line in plain("diff", checkpoint, tmp_path / "b", status=1).splitlines()
    ]
    assert ["B", "extra"] in lines
    assert ["w", "1", "1,048,576", "0.5", f"{0.5 / 2**20:.6g}", "0", "0"] in lines
    assert ["w", "[515,", "7]", "527367", "527367.5"] in lines
    assert ["common_state", "iteration", "5", "6"] in lines
    assert lines[-1][0] == "different:"
    facts = asked("diff", checkpoint, tmp_path / "b", status=1)
    assert facts["only_b"] == ["extra"]
    assert facts["tensors"][0]["first"] == [
        {"index": [515, 7], "a": 527367.0, "b": 527367.5}
    ]
    assert asked("diff", checkpoint, tmp_path / "b", "--select", "s*")["same"]
    assert asked("diff", checkpoint, tmp_path / "b", "--select", "w", "--atol", "1")[
        "same"
    ]
    assert plain("diff", checkpoint, tmp_path / "no", status=3) == ""


def test_a_selection_of_nothing_is_told(
    checkpoint: Path, plain: Callable[..., str]
) -> None:
    plain("diff", checkpoint, checkpoint, "--select", "common*")
    plain("diff", checkpoint, checkpoint, "--select", "nosuch", status=3)


# convert


def test_convert_there_and_back(
    checkpoint: Path,
    tmp_path: Path,
    plain: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    there, back = tmp_path / "z", tmp_path / "t"
    assert "written as zarr" in plain("convert", checkpoint, there, "--to", "zarr")
    plain("convert", there, back, "--to", "torch_dist")
    first, last = (
        megackpt.load_plain_tensors(checkpoint),
        megackpt.load_plain_tensors(back),
    )
    assert all(torch.equal(first[key], last[key]) for key in ("w", "step"))
    assert main(["convert", str(checkpoint), str(there), "--to", "zarr"]) == 1
    refused = capsys.readouterr().err
    assert "--overwrite" in refused
    assert "overwrite=True" not in refused
    plain("convert", checkpoint, there, "--to", "zarr", "--overwrite")
    assert "the same" in plain("diff", checkpoint, there)


def test_the_doors_are_one_thing(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tools/convert.py",
            checkpoint,
            tmp_path / "z",
            "--to",
            "zarr",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "written as zarr" in done.stdout
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "z")


# what goes wrong


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.NotACheckpoint, 3),
        (errors.CorruptCheckpoint, 4),
        (errors.UntrustedClass, 4),
        (errors.BackendError, 5),
        (errors.StorageError, 6),
        (PermissionError, 6),
        (errors.MismatchError, 3),
        (errors.CheckpointExists, 1),
        (errors.SaveInProgress, 1),
        (KeyboardInterrupt, 130),
    ],
)
def test_every_error_has_its_status(
    kind: type[BaseException],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(directory: str) -> None:
        raise kind(f"of {directory}")

    monkeypatch.setattr(listing, "ls", fails)
    assert main(["ls", "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "interrupted\n" if status == 130 else f"{kind.__name__}: of x\n"
    )


def test_what_is_wrong_is_told(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path / "no")]) == 3
    assert "does not exist" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), str(tmp_path / "x"), "--to", "zrr"]) == 5
    assert "did you mean 'zarr'" in capsys.readouterr().err
    (checkpoint / "megackpt.index").write_bytes(b"megackpt" + bytes(100))
    assert main(["diff", str(checkpoint), str(checkpoint)]) in (4, 5)
    with pytest.raises(SystemExit) as usage:
        main(["frobnicate"])
    assert usage.value.code == 2


def test_help_explains_every_status(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["show"], ["convert"]):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--help"])
        assert left.value.code == 0
        told = re.findall(r"^  (\d+) +\S", capsys.readouterr().out, re.MULTILINE)
        assert told == ["0", "1", "2", "3", "4", "5", "6", "130"]


def test_names_cannot_steer_a_terminal(
    tmp_path: Path, plain: Callable[..., str]
) -> None:
    """Keys, file names, directories, texts of errors: nothing of them reaches the terminal as it is."""
    evil = "k\x1b]0;owned\x07\x1b[2J\nfake\u202e.w"
    folder = tmp_path / "d\x1b[31mred"
    megackpt.save(
        {
            "w": ShardedTensor.from_rank_offsets(evil, torch.zeros(2)),
            evil: {evil: evil},
        },
        folder,
    )
    (folder / "x\x1b[5m").touch()
    for words in (
        ["show", folder],
        ["show", folder, "--common"],
        ["show", folder, evil],
        ["verify", folder],
    ):
        for printed in (plain(*words), plain(*words, "--json")):
            assert printed
            assert all(c.isprintable() or c == "\n" for c in printed)
            assert "fake" not in [line.strip() for line in printed.splitlines()]
        shown = on_terminal(*words)
        assert shown.status == 0
        assert "\x07" not in shown.raw
        assert f"{ESCAPE}[2J" not in shown.raw
        assert f"{ESCAPE}[5m" not in shown.raw
    wrong = piped("show", tmp_path / "no\x1b[31m")
    assert wrong.returncode == 3
    assert ESCAPE not in wrong.stderr


# pipes and terminals


def test_a_pipe_gets_every_key_whole(tmp_path: Path) -> None:
    key = "layers." + "long_" * 80 + "weight"
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2))}, tmp_path / "c"
    )
    done = piped("show", tmp_path / "c", COLUMNS="20", FORCE_COLOR="1")
    assert any(
        line.startswith(f"{key}  float32  2 ") for line in done.stdout.splitlines()
    )
    assert ESCAPE not in done.stdout
    assert not done.stderr


def test_a_reader_that_goes_away(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "show", checkpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_interrupted(tmp_path: Path) -> None:
    """A real SIGINT, while a command waits."""
    script = (
        "import os, signal, sys; from megackpt.cli import listing; from megackpt.__main__ import main;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # background jobs begin by ignoring it
        "listing.ls = lambda directory: os.kill(os.getpid(), signal.SIGINT) or signal.pause();"
        "sys.exit(main(['ls']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_numbers_in_keys_that_count_no_layers(
    tmp_path: Path, plain: Callable[..., str]
) -> None:
    keys = [f"layers.{'9' * 5000}.w", "layers.0.w"]
    parts = [ShardedTensor.from_rank_offsets(key, torch.zeros(4)) for key in keys]
    megackpt.save({"parts": parts}, tmp_path / "ckpt")
    assert [
        row.item for row in folded([Item(key, "float32", (4,), 1, 16) for key in keys])
    ].count(None) == 1


def test_on_a_terminal_keys_are_a_tree() -> None:
    shown = on_terminal("show", NEW, width=120)
    assert shown.status == 0
    assert ESCAPE in shown.raw
    lines = shown.text.splitlines()
    assert any(re.match(r"^    └── self_attention  +\S+ KiB$", line) for line in lines)
    assert any(
        re.match(
            r"^        └── linear_qkv\.weight  +bfloat16  +4x24x8  +8  +\S+ KiB$", line
        )
        for line in lines
    )
    assert any(
        line.startswith("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight")
        for line in lines
    )
    whole = on_terminal("show", NEW, "--all").text
    assert "decoder.layers.self_attention.linear_qkv.weight" in whole


def test_layers_that_are_alike_are_folded(tmp_path: Path) -> None:
    layers = {
        f"{i}{name}": ShardedTensor.from_rank_offsets(
            f"h.{i}.{name}", torch.zeros(2 + (i == 5 and name == "b"))
        )
        for i in range(12)
        for name in "ab"
    }
    megackpt.save(layers, tmp_path / "c")
    lines = [
        line[:20].rstrip()
        for line in on_terminal("show", tmp_path / "c").text.splitlines()
    ]
    assert lines[lines.index("h") :][:10] == [
        "h", "├── 0-4 (5 alike)", "│   ├── a", "│   └── b", "├── 5", "│   ├── a", "│   └── b",
        "└── 6-11 (6 alike)", "    ├── a", "    └── b",
    ]  # fmt: skip
    assert on_terminal("show", tmp_path / "c", "--all").text.count("h.") == 24


def test_no_color() -> None:
    shown = on_terminal(
        "verify", NEW, width=300, NO_COLOR="1"
    )  # one line, wherever this is
    assert "all good" in shown.text
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m", shown.raw)
    assert ESCAPE not in on_terminal("show", NEW, TERM="dumb").raw


def test_narrow_terminals_fold_and_cut_nothing(tmp_path: Path) -> None:
    key = "a_very_long_name_" * 6
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3))}, tmp_path / "c"
    )
    shown = on_terminal("show", tmp_path / "c", width=60)
    assert all(len(line) <= 60 for line in shown.text.splitlines())
    cells = [
        line[: line.find("  ")] if "  " in line else line
        for line in shown.text.splitlines()
    ]
    assert key in "".join(cells)
    assert "…" not in shown.text


def test_a_bar_tells_how_far_it_is(checkpoint: Path) -> None:
    shown = on_terminal("verify", checkpoint)
    assert "checking" in shown.raw
    assert "4.0/4.0 MiB" in shown.raw
    assert "all good" in shown.text
    assert piped("verify", checkpoint).stderr == ""


def test_ascii_terminals() -> None:
    shown = on_terminal(
        "show", NEW, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert shown.status == 0
    assert shown.raw.isascii()
    assert "`-- self_attention" in shown.text


def test_looking_needs_no_torch(checkpoint: Path) -> None:
    script = (
        "import sys; from megackpt.__main__ import main; main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    )
    for words in (["ls", checkpoint], ["show", checkpoint], ["show", NEW],
                  ["diff", checkpoint, checkpoint]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, words


# other formats, and the page about all this


@pytest.mark.parametrize(
    "golden", sorted(p.name for p in GOLDEN.iterdir() if (p / "metadata.json").exists())
)
def test_goldens(
    golden: str, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert plain("ls", GOLDEN / golden)
    entries = asked("show", GOLDEN / golden)["entries"]
    assert entries
    assert asked("show", GOLDEN / golden, "--common")["common"]
    assert asked("diff", GOLDEN / golden, GOLDEN / golden)["same"]
    plain("verify", GOLDEN / golden)


@pytest.mark.parametrize("to", ["zarr", "safetensors", "torch"])
def test_every_format_is_looked_at(
    checkpoint: Path, tmp_path: Path, to: str, asked: Callable[..., Any]
) -> None:
    there = tmp_path / "there"
    asked("convert", checkpoint, there, "--to", to)
    assert asked("ls", there)["checkpoint"]["format"] == to
    assert {e["key"] for e in asked("show", there)["entries"]} >= {"w", "step", "rng"}
    assert asked("diff", checkpoint, there)["same"]
    assert asked("verify", there)["ok"]


def test_stock_dcp(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    dcp.save(
        {"w": torch.arange(6.0), "n": 3},
        checkpoint_id=tmp_path / "step-1",
        no_dist=True,
    )
    assert asked("ls", tmp_path)["latest"] == "step-1"
    assert asked("show", tmp_path / "step-1", "w")["entries"][0]["layout"][0][
        "shape"
    ] == [6]
    assert "no common state" in plain("show", tmp_path / "step-1", "--common")


def fields(section: str) -> set[str]:
    """The names in the table of fields of a section of the page."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    part = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_page_lists_the_fields(
    checkpoint: Path, tmp_path: Path, asked: Callable[..., Any]
) -> None:
    assert set(asked("ls", checkpoint)) == fields("ls")
    page = str(tmp_path / "m.html")
    assert set(asked("show", checkpoint, "w", "--common", "--html", page)) == fields(
        "show"
    )
    assert set(asked("verify", checkpoint)) == fields("verify")
    assert set(asked("diff", checkpoint, checkpoint)) == fields("diff")
    assert set(asked("convert", checkpoint, tmp_path / "z", "--to", "zarr")) == fields(
        "convert"
    )


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(NEW, tmp_path / "run" / "iter_0000100")
    megackpt.convert(NEW, tmp_path / "run" / "iter_0000200", "torch_dist")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    ran = 0
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            arguments = ["convert", *words[2:]] if words[0] == "python" else words[1:]
            if "--help" in arguments:
                with pytest.raises(SystemExit):
                    main(arguments)
            else:
                assert main(arguments) == 0, line
            ran += 1
    assert ran >= 15
