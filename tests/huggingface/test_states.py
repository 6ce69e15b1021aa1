"""as_huggingface: loads and saves of sharded states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import ShardedTensor, ShardedTensorFactory, limits
from megackpt.converter import export_huggingface
from megackpt.errors import (
    CheckpointingException,
    MismatchError,
)
from megackpt.huggingface import (
    Fuse,
    Padded,
    Part,
    Rule,
    Table,
    Transpose,
    as_huggingface,
    llama,
)
from megackpt.storage.files import LocalReader
from megackpt.testing import ThreadedGroup
from tests.huggingface.models import (
    CONFIG,
    D,
    H,
    Own,
    equal,
    numbered,
    ours,
    shard,
    tensors_in,
    theirs,
)


def test_a_factory_of_the_users_own_is_kept(tmp_path: Path) -> None:
    """SwiGLU as Megatron declares it: each rank has its rows of gate and of up, fused in memory."""
    gate, up = numbered(4, 3), -numbered(4, 3)
    save_file({"h.0.gate": gate, "h.0.up": up}, tmp_path / "model.safetensors")
    table = {"layers.#.fc1": Fuse(("h.#.gate", "h.#.up"))}

    def rank(group: ThreadedGroup) -> torch.Tensor:
        def build(
            key: str, data: torch.Tensor, replica_id: Any, _: Any
        ) -> list[ShardedTensor]:
            return [
                shard(key, half, (0, group.rank + 2 * n, 4))
                for n, half in enumerate(data.chunk(2))
            ]

        state = {
            "fc1": ShardedTensorFactory(
                "layers.0.fc1", torch.zeros(4, 3), build, torch.cat
            )
        }
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )["fc1"]

    for r, loaded in enumerate(ThreadedGroup.run(2, rank)):
        rows = slice(2 * r, 2 * r + 2)
        assert torch.equal(loaded, torch.cat([gate[rows], up[rows]]))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of tensors."""
    counts: list[int] = []
    read_into = LocalReader.read_into

    def counted(self: LocalReader, start: int, buffers: Sequence[memoryview]) -> None:
        counts.append(sum(buffer.nbytes for buffer in buffers))
        read_into(self, start, buffers)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    return counts


def test_each_rank_reads_what_it_needs_and_nothing_else(
    tmp_path: Path, read: list[int]
) -> None:
    """Of fused tensors their rows, of columns and of transposed tensors the parts of rows; to the byte."""
    q, k, v = numbered(16, 4096), numbered(8, 4096) + 0.5, numbered(8, 4096) + 0.25
    o, turned = -numbered(32, 8192), numbered(8192, 32)
    save_file(
        {"q": q, "k": k, "v": v, "o": o, "t": turned}, tmp_path / "model.safetensors"
    )
    table: Table = {
        "qkv": Fuse(("q", "k", "v"), (2, 1, 1), 4),
        "o": "o",
        "t": Transpose("t"),
    }

    def rank(group: ThreadedGroup) -> dict[str, Any]:
        r = group.rank
        state = {
            "qkv": shard("qkv", torch.zeros(8, 4096), (0, r, 4)),
            "o": shard("o", torch.zeros(32, 2048), (1, r, 4)),
            "t": shard("t", torch.zeros(32, 2048), (1, r, 4)),  # rows of theirs
        }
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )

    megackpt.load_tensors_metadata(tmp_path)
    header, read[:] = sum(read), []
    parts = ThreadedGroup.run(4, rank)
    opened = header * (
        4 + 1
    )  # the coordinator looks at all, each rank whether this is a safetensors file
    assert (
        0
        <= sum(read) - sum(t.nbytes for part in parts for t in part.values())
        <= opened
    )
    expected = torch.cat([part.unflatten(0, (4, -1)) for part in (q, k, v)], 1).flatten(
        0, 1
    )
    assert torch.equal(torch.cat([part["qkv"] for part in parts]), expected)
    assert torch.equal(torch.cat([part["o"] for part in parts], 1), o)
    assert torch.equal(torch.cat([part["t"] for part in parts], 1), turned.T)


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_a_llama_over_tensor_parallel_ranks_and_back(
    stacked: bool, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, table = theirs(), llama(CONFIG)
    names = sorted(expected)
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, file in enumerate(files):
        save_file(
            {k: expected[k] for k in names[n::2]}, tmp_path / file, {"format": "pt"}
        )
    index = {
        "metadata": {},
        "weight_map": {name: files[i % 2] for i, name in enumerate(names)},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    megackpt.load_tensors_metadata(tmp_path)
    headers = sum(read) * 2  # each of two ranks looks at them, too

    def rank(group: ThreadedGroup) -> dict[str, Any]:
        state = ours(group.rank, group.size, stacked)
        loaded = megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )
        assert loaded["rng"] == {"seed": group.rank}
        training = state | {
            "adam": shard(
                "optimizer.state.exp_avg.w", torch.ones(4), (0, group.rank, 2)
            )
        }
        megackpt.save(training, tmp_path / "training", process_group=group)
        return state

    del read[:]
    states = ThreadedGroup.run(2, rank)
    wanted = sum(shard.data.nbytes for state in states for shard in tensors_in(state))
    assert sum(read) <= wanted + headers + 2 * 4096
    q, k, v = (expected[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    second = torch.cat([q[2 * D :], k[D:], v[D:]])
    assert torch.equal(states[1]["layers"][1]["qkv"].data, second)
    assert torch.equal(states[1]["embedding"].data[-2:], torch.zeros(2, H))

    # each tensor in several cells, over several tasks
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 512)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 4096)
    done = export_huggingface(
        tmp_path / "training",
        tmp_path / "out",
        table,
        CONFIG,
        max_shard_size=8000,
        workers=1,
    )
    assert (done.tensors, done.objects, done.bytes) == (
        len(expected),
        0,
        sum(t.nbytes for t in expected.values()),
    )
    parts = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(parts) > 1
    assert all(sum(t.nbytes for t in load_file(p).values()) <= 8000 for p in parts)
    equal({k: t for p in parts for k, t in load_file(p).items()}, expected)


def test_tied_embeddings(tmp_path: Path) -> None:
    """Both of ours are read from the one over there, which is written from the first."""
    config = CONFIG | {"tie_word_embeddings": True}
    weights = theirs()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    state = ours(0, 1)
    megackpt.load(as_huggingface(state, llama(config)), tmp_path, strict=True)
    assert torch.equal(state["output"].data, state["embedding"].data)
    state["output"].data.zero_()
    megackpt.save(state, tmp_path / "training")
    export_huggingface(tmp_path / "training", tmp_path / "out", llama(config), config)
    equal(load_file(tmp_path / "out/model.safetensors"), weights)


def test_a_mismatch_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    """Stages of a pipeline hold different keys."""
    save_file({"a": numbered(4), "b": numbered(4)}, tmp_path / "model.safetensors")
    held = torch.full((4,), -1.0)

    def rank(group: ThreadedGroup) -> None:
        state = {"w": shard("ax"[group.rank], held)}
        megackpt.load(
            as_huggingface(state, {"a": "a", "b": "b"}), tmp_path, process_group=group
        )

    for error in ThreadedGroup.outcomes(2, rank):
        assert "no rule fits 'x'" in str(error)
    assert (held == -1).all()


@pytest.mark.parametrize("function", ["rule", "build"])
def test_what_fails_on_one_rank_fails_on_all(function: str, tmp_path: Path) -> None:
    save_file({"e": numbered(4)}, tmp_path / "model.safetensors")

    def rank(group: ThreadedGroup) -> None:
        def build(key: str, data: torch.Tensor, *_: Any) -> ShardedTensor:
            if group.rank == 1 and function == "build":
                raise ValueError("boom")
            return shard(key, data)

        def pieces() -> list[Any]:
            raise ValueError("boom")

        state = {"e": ShardedTensorFactory("e", torch.zeros(4), build, lambda x: x)}
        table: Table = {
            "e": Own(pieces) if group.rank == 1 and function == "rule" else "e"
        }
        megackpt.load(as_huggingface(state, table), tmp_path, process_group=group)

    for error in ThreadedGroup.outcomes(2, rank):
        assert isinstance(error, CheckpointingException)
        assert "boom" in str(error)


@pytest.mark.parametrize(
    "rule", [Padded("e", 6), Padded("e", 12), Fuse(("e", "f"))], ids=str
)
def test_theirs_in_another_shape_than_the_rule_says_is_refused(
    rule: Rule, tmp_path: Path
) -> None:
    """Also where ours may differ, as Megatron's embeddings; where there is no rule they still may."""
    save_file(
        {"e": numbered(10, 2), "f": numbered(10, 2)}, tmp_path / "model.safetensors"
    )
    held = torch.full((16, 2), 7.0)
    asked = {"e": shard("e", held, allow_shape_mismatch=True)}
    with pytest.raises(MismatchError, match=r"\(10, 2\)"):
        megackpt.load(as_huggingface(asked, {"e": rule}), tmp_path)
    assert (held == 7).all()
    megackpt.load(as_huggingface(asked, {"e": "e"}), tmp_path)
    assert torch.equal(held[:10], numbered(10, 2))


@pytest.mark.parametrize("strict", ["ignore_all", "log_all", "return_unexpected"])
def test_what_is_there_in_part_is_left_alone(strict: str, tmp_path: Path) -> None:
    save_file({"q": numbered(2, 2), "v": numbered(3)}, tmp_path / "model.safetensors")
    held, other = torch.full((4, 2), 7.0), torch.zeros(3)
    state = as_huggingface(
        {"w": shard("w", held), "v": shard("v", other)},
        {"w": Fuse(("q", "k")), "v": "v"},
    )
    found: Any = megackpt.load(state, tmp_path, strict=strict)
    assert (found[0] if strict.startswith("return") else found).keys() == {"v"}
    assert (held == 7).all()
    assert torch.equal(other, numbered(3))


def test_tensors_without_elements_are_asked_for(tmp_path: Path) -> None:
    save_file(
        {"z": torch.zeros(0, 2), "e": numbered(2)}, tmp_path / "model.safetensors"
    )
    state = as_huggingface(
        {"z": shard("z", torch.zeros(0, 2)), "e": shard("e", torch.zeros(2))},
        {"*": "*"},
    )
    assert megackpt.load(state, tmp_path, strict="raise_all")["z"].shape == (0, 2)
    megackpt.save(state, tmp_path / "saved", "safetensors")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == {"z", "e"}


def test_padding_of_eight_bit_floats(tmp_path: Path) -> None:
    weights = numbered(4, 2).to(torch.float8_e4m3fn)
    save_file({"e": weights}, tmp_path / "model.safetensors")
    asked = shard("e", torch.full((6, 2), 3.0).to(torch.float8_e4m3fn))
    megackpt.load(as_huggingface({"e": asked}, {"e": Padded("e", 4)}), tmp_path)
    assert torch.equal(
        asked.data.float(), torch.cat([numbered(4, 2), torch.zeros(2, 2)])
    )


def test_shares_that_are_padding_only(tmp_path: Path) -> None:
    """A rank whose rows all are beyond the vocabulary reads nothing, and has zeros."""
    save_file({"e": numbered(4, 2)}, tmp_path / "model.safetensors")
    held = [torch.full((3, 2), -1.0) for _ in range(3)]

    def rank(group: ThreadedGroup) -> Any:
        state = {"e": shard("e", held[group.rank], (0, group.rank, 3))}
        table = {"e": Padded("e", 4)}
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )["e"]

    expected = torch.cat([numbered(4, 2), torch.zeros(5, 2)])
    assert torch.equal(torch.cat(ThreadedGroup.run(3, rank)), expected)
    assert torch.equal(torch.cat(held), expected)


def test_ranks_agree_on_what_is_not_there(tmp_path: Path) -> None:
    """Where the halves of a fused tensor are on different ranks, and where a rank has padding only."""
    save_file(
        {"q": numbered(2, 2), "e": numbered(4, 2)}, tmp_path / "model.safetensors"
    )

    def rank(group: ThreadedGroup) -> tuple[set[str], set[str], float]:
        state = {
            key: shard(key, torch.full((2, 2), 7.0), (0, group.rank, 2))
            for key in ("qk", "padded")
        }
        stacked = ShardedTensor.from_rank_offsets(
            "l.w", torch.full((2,), 7.0), (0, group.rank, 2), prepend_axis_num=1
        )
        table = {"qk": Fuse(("q", "k")), "padded": Padded("none", 2), "l.#.w": "l.#"}
        asked = as_huggingface({**state, "stacked": stacked}, table)
        found, _, absent = megackpt.load(
            asked, tmp_path, strict="return_all", process_group=group
        )
        return (
            {*found},
            absent,
            min(float(one.data.min()) for one in (*state.values(), stacked)),
        )

    first, second = ThreadedGroup.run(2, rank)
    assert first[0] == second[0] == set()
    assert first[2] == second[2] == 7.0, "all is left alone"
    assert {"k", "none"} <= first[1] & second[1]


def test_ranks_without_a_share_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of padding, or of rows that are fewer than the ranks."""

    def rank(group: ThreadedGroup) -> None:
        rows, offset = ((2, 2, 1, 0)[group.rank], (0, 2, 4, 5)[group.rank])
        uneven = ShardedTensor(
            "u",
            torch.ones(rows, 2),
            torch.float32,
            (rows, 2),
            (5, 2),
            (offset, 0),
            None,
        )
        state = {"u": uneven, "e": shard("e", torch.ones(2, 2), (0, 3 - group.rank, 4))}
        table = {"u": Transpose("u"), "e": Padded("e", 3)}
        megackpt.save(
            as_huggingface(state, table),
            tmp_path / "out",
            "safetensors",
            process_group=group,
        )
        megackpt.load(
            as_huggingface(state, table),
            tmp_path / "out",
            strict=True,
            process_group=group,
        )

    ThreadedGroup.run(4, rank)
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {"u": torch.ones(2, 5), "e": torch.ones(3, 2)},
    )
    assert not [record for record in caplog.records if "common" in record.getMessage()]


@pytest.mark.parametrize(
    ("table", "axis", "size"),
    [
        (
            {
                "w": Fuse(
                    (Transpose("q"), Transpose("k"), Transpose("v")),
                    (2, 1, 1),
                    groups=2,
                )
            },
            0,
            16,
        ),
        ({"w": Fuse(("a", "b"), groups=2, axis=1)}, 1, 8),
        (
            {
                key: Part(Transpose("c_attn"), number, (1, 1, 1))
                for number, key in enumerate("qkv")
            },
            0,
            3,
        ),
    ],
    ids=[
        "transposed, by groups",
        "by groups of columns",
        "rows of which some ranks have none",
    ],
)
def test_ranks_that_do_not_meet_all_of_theirs(
    table: dict[str, Any], axis: int, size: int, tmp_path: Path
) -> None:
    whole = numbered(*((size, 4) if axis == 0 else (2, size)))

    def rank(group: ThreadedGroup) -> None:
        parts = [
            *whole.split(-(-size // group.size), axis),
            whole.narrow(axis, size, 0),
        ]
        part = parts[min(group.rank, len(parts) - 1)]
        place = [0, 0]
        place[axis] = sum(one.shape[axis] for one in parts[: group.rank])

        def state(data: torch.Tensor) -> dict[str, ShardedTensor]:
            shape = tuple(data.shape)
            return {
                key: ShardedTensor(
                    key,
                    data.clone(),
                    data.dtype,
                    shape,
                    tuple(whole.shape),
                    tuple(place),
                    None,
                )
                for key in table
            }

        megackpt.save(
            as_huggingface(state(part), table),
            tmp_path / "out",
            "safetensors",
            process_group=group,
        )
        asked = as_huggingface(state(part - 1), table)
        found = megackpt.load(
            asked, tmp_path / "out", strict="raise_all", process_group=group
        )
        equal(found, dict.fromkeys(table, part))

    ThreadedGroup.run(4, rank)


def test_tensors_without_data_or_place(tmp_path: Path) -> None:
    """data=None and meta tensors get new ones; what they do not have stays; dtypes are converted."""
    save_file(
        {"w": numbered(4, 2)}, tmp_path / "model.safetensors", {"author": "somebody"}
    )
    meta = shard("w", torch.empty(2, 4, dtype=torch.bfloat16, device="meta"))
    none = meta.without_data()
    mine = shard("mine", torch.ones(3))
    for asked in (meta, none):
        table: Table = {"w": Transpose("w"), "mine": None}
        state = as_huggingface(
            {"w": asked, "mine": mine, "step": 3, "empty": {}}, table
        )
        loaded = megackpt.load(state, tmp_path)
        assert loaded.keys() == {"w", "mine", "step", "empty"}
        assert torch.equal(loaded["w"], numbered(4, 2).T.to(torch.bfloat16))
        assert loaded["mine"] is mine.data
        assert loaded["step"] == 3
