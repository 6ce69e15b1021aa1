"""The selection: patterns, names, dtypes, and values that do not fit."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.converter.conversion_workers import cast
from megackpt.converter.selection import CASTS, Selection
from megackpt.errors import MismatchError
from megackpt.planning.manifest import Chunks, Manifest, TensorEntry, TensorMeta

KEYS = [
    "decoder.layers.0.mlp.fc1.weight",
    "decoder.layers.11.mlp.fc2.weight",
    "embedding",
    "optim.step",
]


def manifest(*keys: str, dtype: str = "float32") -> Manifest:
    entries = [TensorEntry(key, TensorMeta((2,), dtype)) for key in keys]
    entries += [
        TensorEntry("rng", TensorMeta((1,), "object")),
        TensorEntry("common_state", TensorMeta((), "object")),
    ]
    none = np.zeros(0, np.int64)
    chunks = Chunks(*[none] * 6, np.zeros((0, 16), np.uint8))  # type: ignore[arg-type]
    return Manifest(tuple(entries), (None,) * len(entries), chunks)


def names(choice: Selection, *keys: str) -> list[str]:
    return [entry.key for entry in choice.entries(manifest(*(keys or KEYS))).values()]


def test_everything_by_default() -> None:
    assert names(Selection()) == [*KEYS, "rng", "common_state"]


def test_select_and_exclude() -> None:
    assert names(Selection("decoder.*")) == [*KEYS[:2], "common_state"]
    assert names(Selection(["*.fc?.weight", "rng"], "*.11.*")) == [
        KEYS[0],
        "rng",
        "common_state",
    ]
    assert names(Selection(exclude=["optim.*", "common_state"])) == [*KEYS[:3], "rng"]
    assert names(Selection("*.layers.[0-5].*", state=False)) == [KEYS[0]]


def test_nothing_selected_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        MismatchError, match=r"nothing is selected by decodr\.\* .*'embedding'"
    ):
        names(Selection("decodr.*"))
    names(Selection(exclude="absent*", rename="absent=present"))
    assert "'absent*' fits no key" in caplog.text
    assert "nothing to rename by absent=present" in caplog.text


@pytest.mark.parametrize(
    ("rules", "renamed"),
    [
        ("embedding=emb", {"embedding": "emb"}),
        (
            "decoder.layers.*.mlp.*=h.*.ff.*",
            {KEYS[0]: "h.0.ff.fc1.weight", KEYS[1]: "h.11.ff.fc2.weight"},
        ),
        ("*=model.*", {key: f"model.{key}" for key in [*KEYS, "rng"]}),
        (
            ["optim.*=*", "*=model.*"],
            {
                **{key: f"model.{key}" for key in [*KEYS[:3], "rng"]},
                "optim.step": "step",
            },
        ),
        ({"embedding": "a=b", "rng": "r"}, {"embedding": "a=b", "rng": "r"}),
        (
            [("decoder.*", "*.decoder")],
            {key: key.removeprefix("decoder.") + ".decoder" for key in KEYS[:2]},
        ),
        ("dec=x", {}),
    ],
)
def test_renaming(rules, renamed) -> None:
    assert names(Selection(rename=rules)) == [
        renamed.get(key, key) for key in [*KEYS, "rng"]
    ] + ["common_state"]


def test_a_star_is_as_short_as_possible_and_nothing_else_is_special() -> None:
    assert names(Selection(rename="a.*.b.*=*|*"), "a.1.b.2.b.3", "a.x+y(.b.z")[:2] == [
        "1|2.b.3",
        "x+y(|z",
    ]
    assert names(Selection(rename="a.b=c"), "a.b", "axb")[:2] == ["c", "axb"]
    assert names(Selection(rename="a\n*=*"), "a\nb\nc")[0] == "b\nc"


@pytest.mark.parametrize("rule", ["nothing", "=b", "a=", "a.*=b", "a=b.*", "a.*=*.*"])
def test_rules_that_cannot_be_understood(rule: str) -> None:
    with pytest.raises(ValueError, match=r"rename|OLD=NEW"):
        Selection(rename=rule)


def test_collisions_name_both() -> None:
    with pytest.raises(MismatchError, match=r"'a' and 'b' would both be called 'c'"):
        names(Selection(rename=["a=c", "b=c"]), "a", "b")
    with pytest.raises(MismatchError, match=r"'a' and 'b' would both be called 'b'"):
        names(Selection(rename="a=b"), "a", "b")
    assert names(Selection(rename=["a=b", "b=a"]), "a", "b")[:2] == ["b", "a"]
    with pytest.raises(MismatchError, match="the common state's name"):
        names(Selection(exclude="common_state", rename="a=common_state"), "a")
    with pytest.raises(MismatchError, match="'p' would have an empty name"):
        names(Selection(rename="p*=*"), "p")


def test_which_dtypes_are_cast() -> None:
    def dtype(stored: str, wanted: object) -> str:
        return next(
            iter(Selection(cast=wanted).entries(manifest("a", dtype=stored)).values())
        ).meta.dtype

    assert dtype("float32", "bf16") == "bfloat16"
    assert dtype("bfloat16", torch.float32) == "float32"
    assert dtype("float8_e5m2", "fp16") == "float16"
    for stored in ("int64", "bool", "complex64", "uint8", "float8_e8m0fnu"):
        assert dtype(stored, "bf16") == stored
    with pytest.raises(ValueError, match="can be cast to"):
        Selection(cast="int8")


@pytest.mark.parametrize(
    "wanted", sorted({Selection(cast=name).cast for name in CASTS})
)
@pytest.mark.parametrize(
    "stored", ["float32", "bfloat16", "float64", "float16", "float8_e4m3fn"]
)
def test_casting_follows_torch(stored: str, wanted: str) -> None:
    values = torch.tensor(
        [0.0, -1.5, 448.0, 1e5, -3e38, float("inf"), float("nan"), 1e-9] * 9,
        dtype=torch.float64,
    )
    given = values.to(getattr(torch, stored)).reshape(8, 9)
    bits, lost = cast(
        given.view(torch.uint8).numpy().view(f"u{given.itemsize}"), stored, wanted
    )
    right = given.to(getattr(torch, wanted))
    assert bits.shape == (8, 9)
    assert bits.tobytes() == right.view(torch.uint8).numpy().tobytes()
    finite = given.double()[given.double().isfinite()]
    assert lost == int((finite.abs() > torch.finfo(right.dtype).max).sum())


def test_overflows_are_reported(tmp_path, caplog) -> None:
    state = {
        "a": ShardedTensor.from_rank_offsets(
            "a", torch.tensor([1.0, 1e6, -1e7, float("inf")])
        ),
        "b": ShardedTensor.from_rank_offsets("b", torch.tensor([1, 1 << 40])),
    }
    megackpt.save(state, tmp_path / "a")
    caplog.set_level(logging.WARNING)
    done = megackpt.convert(tmp_path / "a", tmp_path / "b", "torch_dist", cast="fp16")
    assert done.overflows == {"a": 2}
    assert "2 values are beyond the range" in caplog.text
    found = megackpt.load_plain_tensors(tmp_path / "b")
    assert found["a"].tolist() == [1.0, float("inf"), float("-inf"), float("inf")]
    assert found["b"].tolist() == [1, 1 << 40]
