"""Names, shapes and dtypes that differ, and what the caller wants about it."""

from __future__ import annotations

import numpy as np
import pytest

from megackpt.errors import MismatchError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    COMMON_KEY,
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
    unique_key,
)
from megackpt.planning.strict import (
    StrictHandling,
    check_shapes,
    describe_missing,
    describe_unexpected,
    keys,
    name_of,
    parse_strict_flag,
    requested,
    stored,
)

Piece = tuple[str, tuple[int, ...], str, Box]


def piece(
    key: str,
    shape: tuple[int, ...] = (4,),
    dtype: str = "float32",
    box: Box | None = None,
) -> Piece:
    return key, shape, dtype, Box.whole(shape) if box is None else box


def manifest_of(*pieces: Piece) -> Manifest:
    table: dict[TensorEntry, int] = {}
    number = [
        table.setdefault(TensorEntry(k, TensorMeta(s, d)), len(table))
        for k, s, d, _ in pieces
    ]
    zeros = np.zeros(len(pieces), np.int64)
    small = zeros.astype(np.int32)
    boxes = Boxes.of(box for *_, box in pieces)
    chunks = Chunks(
        np.array(number, np.int32),
        boxes,
        small,
        small,
        zeros,
        zeros,
        np.zeros((0, 16), np.uint8),
    )
    return Manifest(tuple(table), (None,) * len(table), chunks)


def wanted_of(*pieces: Piece, flexible: bool = False) -> Declarations:
    return Declarations.of(
        [
            Declaration(ShardId(k, b), TensorMeta(s, d), 0, flexible, 0, 0)
            for k, s, d, b in pieces
        ]
    )


STORED = manifest_of(
    piece("decoder.layers.0.weight"),
    piece("decoder.layers.1.weight"),
    piece("rng", (1, 2), "object", Box((0, 0), (1, 1))),
    piece("rng", (1, 2), "object", Box((0, 1), (1, 1))),
    piece("extra", (), "object"),
    piece(COMMON_KEY, (), "object"),
)


@pytest.mark.parametrize("flag", list(StrictHandling))
def test_flags_by_value_and_by_themselves(flag: StrictHandling) -> None:
    assert parse_strict_flag(flag.value) is flag
    assert parse_strict_flag(flag) is flag


def test_booleans_and_nonsense() -> None:
    assert parse_strict_flag(True) is StrictHandling.RAISE_ALL
    assert parse_strict_flag(False) is StrictHandling.LOG_ALL
    for wrong in ("raise", "", None, 1):
        with pytest.raises(ValueError, match="Invalid strict flag"):
            parse_strict_flag(wrong)  # type: ignore[arg-type]


def test_what_the_flags_mean() -> None:
    told = {
        f.value: (
            StrictHandling.requires_explicit_ckpt_mismatch_check(f),
            StrictHandling.requires_global_app_metadata(f),
            StrictHandling.requires_raising(f),
            StrictHandling.requires_logging(f),
            StrictHandling.requires_returning_mismatch_keys(f),
        )
        for f in StrictHandling
    }
    assert told == {
        "assume_ok_unexpected": (False, False, False, False, False),
        "log_unexpected": (True, False, False, True, False),
        "log_all": (True, True, False, True, False),
        "raise_unexpected": (True, False, True, False, False),
        "raise_all": (True, True, True, False, False),
        "return_unexpected": (True, False, False, False, True),
        "return_all": (True, True, False, False, True),
        "ignore_all": (True, True, False, False, False),
    }


def test_unique_keys() -> None:
    assert unique_key("rng", (0, 1), (1, 2)) == "rng/shard_0.1_1.2"
    assert unique_key("rng", (), ()) == "rng"
    box = Box((1,), (1,))
    assert name_of(ShardId("rng", box), TensorMeta((2,), "object")) == "rng/shard_1_2"
    assert name_of(ShardId("w", box), TensorMeta((2,), "float32")) == "w"


def test_names_of_tensors_and_objects_without_the_common_state() -> None:
    assert stored(STORED) == {
        "decoder.layers.0.weight",
        "decoder.layers.1.weight",
        "rng/shard_0.0_1.2",
        "rng/shard_0.1_1.2",
        "extra",
    }
    assert stored(manifest_of()) == requested(wanted_of()) == set()


def test_returned_keys() -> None:
    names = stored(STORED)
    told = keys(names | {"no/shard_0_1"}, STORED.tensors)
    assert told == {
        "decoder.layers.0.weight",
        "decoder.layers.1.weight",
        "rng",
        "extra",
        "no/shard_0_1",
    }
    assert keys((), STORED.tensors) == set()


def test_unexpected_and_missing() -> None:
    first = wanted_of(
        piece("decoder.layers.0.weight"), piece("bias"), piece(COMMON_KEY, (), "object")
    )
    second = wanted_of(
        piece("rng", (1, 2), "object", Box((0, 1), (1, 1))),
        piece("rng", (1, 3), "object", Box((0, 1), (1, 1))),
    )
    assert requested(first) - stored(STORED) == {"bias"}
    assert requested(second) - stored(STORED) == {"rng/shard_0.1_1.3"}
    assert stored(STORED) - requested(first) - requested(second) == {
        "decoder.layers.1.weight",
        "rng/shard_0.0_1.2",
        "extra",
    }


def test_messages_name_the_keys_and_similar_stored_ones() -> None:
    text = describe_unexpected({"module.decoder.layers.1.weight", "optimizer"}, STORED)
    assert text.startswith("Unexpected keys")
    assert (
        "'module.decoder.layers.1.weight' (did you mean 'decoder.layers.1.weight'?)"
        in text
    )
    assert "\n  'optimizer'" in text
    assert "Missing keys" not in text
    text = describe_missing({"extra"})
    assert text.startswith("Missing keys")
    assert "'extra'" in text
    assert "Unexpected" not in text


def test_messages_stay_bounded() -> None:
    pieces = [piece(f"layers.{i}.weight") for i in range(20_000)]
    held = manifest_of(*pieces)
    asked = {f"layers.{i}.wieght" for i in range(20_000)}
    text = describe_unexpected(asked, held) + describe_missing(stored(held))
    assert "(20000)" in text
    assert "'layers.0.wieght' (did you mean 'layers.0.weight'?)" in text
    assert text.count("and 19950 more") == 2


def test_shapes_that_differ_are_listed_together() -> None:
    wanted = wanted_of(
        piece("decoder.layers.0.weight", (5,)),
        piece("decoder.layers.1.weight", (2, 2)),
        piece("elsewhere", (9,)),
    )
    with pytest.raises(MismatchError) as caught:
        check_shapes(wanted, STORED)
    lines = str(caught.value).splitlines()
    assert (
        "Global shape mismatch for loaded (4,) and expected (5,) tensor for key decoder.layers.0.weight"
        in lines[0]
    )
    assert lines[1].endswith(
        "loaded (4,) and expected (2, 2) tensor for key decoder.layers.1.weight"
    )
    assert "'loaded' is the shape in the checkpoint" in lines[2]
    assert len(lines) == 3


def test_flexible_tensors_keep_their_number_of_dimensions() -> None:
    check_shapes(
        wanted_of(piece("decoder.layers.0.weight", (5,)), flexible=True), STORED
    )
    with pytest.raises(MismatchError, match=r"expected \(2, 2\)"):
        check_shapes(
            wanted_of(piece("decoder.layers.0.weight", (2, 2)), flexible=True), STORED
        )


def test_dtypes_matter_only_when_asked() -> None:
    wanted = wanted_of(piece("decoder.layers.0.weight", dtype="int64"))
    check_shapes(wanted, STORED)
    with pytest.raises(
        MismatchError, match="dtype mismatch for loaded float32 and expected int64"
    ):
        check_shapes(wanted, STORED, "error")


def test_tensors_are_not_objects() -> None:
    with pytest.raises(MismatchError, match="'extra' is stored as an object"):
        check_shapes(wanted_of(piece("extra", ())), STORED)
    wanted = wanted_of(piece("decoder.layers.0.weight", (1,), "object"))
    assert requested(wanted) == {"decoder.layers.0.weight/shard_0_1"}
    check_shapes(wanted_of(piece("rng", (1, 3), "object", Box((0, 0), (1, 1)))), STORED)
