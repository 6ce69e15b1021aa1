"""Tensors of torchao, saved at one cut and loaded at others, as themselves and as plain tensors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megackpt
from megackpt import MismatchError, ShardedTensor, ShardingError, limits
from megackpt.testing import ThreadedGroup

pytestmark = pytest.mark.torchao

ROWS, COLUMNS = 512, 1024
CLASSES = (
    "int8 by row",
    "int8 by group",
    "int8 by tensor",
    "intx",
    "int4",
    "int4 plain",
    "int4 tiles",
    "float8 by tensor",
    "float8 by row",
    "float8 by block",
    "mxfp8",
    "mxfp8 swizzled",
    "mxfp4",
    "mxfp4 swizzled",
    "nvfp4",
    "nvfp4 swizzled",
    "int8 training",
    "int8 mixed",
    "bitnet",
)
NO_VALUES = ("int4", "int4 plain", "int4 tiles", "int8 mixed", "bitnet")
"""Classes without a ``dequantize`` of their own."""
CUTS = [((1, 0), (2, 0)), ((2, 0), (4, 0)), ((4, 1), (2, 1))]
"""Numbers of parts and the axis that is cut: in the save, and in the load."""

Cut = tuple[int, int]


def parts(tensors: ModuleType, whole: Any, cut: Cut) -> list[Any]:
    count, axis = cut
    step = (ROWS, COLUMNS)[axis] // count
    held = []
    for first in range(0, step * count, step):
        box = [slice(0, ROWS), slice(0, COLUMNS)]
        box[axis] = slice(first, first + step)
        held.append(tensors.cut(whole, *box))
    return held


def declared(tensor: torch.Tensor, rank: int, cut: Cut) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, (cut[1], rank, cut[0]))}


def save(held: list[Any], cut: Cut, folder: Path, **options: Any) -> None:
    ThreadedGroup.run(
        len(held),
        lambda group: megackpt.save(
            declared(held[group.rank], group.rank, cut),
            folder,
            process_group=group,
            **options,
        ),
    )


def load(held: list[Any], cut: Cut, folder: Path) -> list[Any]:
    return ThreadedGroup.run(
        len(held),
        lambda group: megackpt.load(
            declared(held[group.rank], group.rank, cut),
            folder,
            process_group=group,
            strict="raise_all",
        )["w"],
    )


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_tensor_is_loaded_at_another_cut(
    tensors: ModuleType, name: str, cuts: tuple[Cut, Cut], tmp_path: Path
) -> None:
    saved, wanted = cuts
    whole = tensors.WHOLE[name]()
    save(parts(tensors, whole, saved), saved, tmp_path / "ck")
    expected = parts(tensors, whole, wanted)
    targets = [tensors.emptied(part) for part in expected]
    for target, found, part in zip(
        targets, load(targets, wanted, tmp_path / "ck"), expected, strict=True
    ):
        assert found is target
        tensors.assert_equal(found, part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NO_VALUES])
def test_a_plain_tensor_gets_the_values_of_torchaos_dequantize(
    tensors: ModuleType,
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where parts begin between the blocks, and in several bands."""
    monkeypatch.setattr(limits, "DEQUANTISED_BYTES", 1 << 19)
    whole = tensors.WHOLE[name]()
    save(parts(tensors, whole, (2, 0)), (2, 0), tmp_path / "ck")
    expected = tensors.dequantised(whole, dtype)
    for cut in ((1, 0), (8, 0), (16, 1)):
        size = expected.shape[cut[1]] // cut[0]
        held = [
            torch.full_like(part, torch.nan) for part in expected.split(size, cut[1])
        ]
        load(held, cut, tmp_path / "ck")
        assert torch.equal(torch.cat(held, cut[1]), expected)


def test_tensors_of_experts_are_cut_along_the_experts(
    tensors: ModuleType, tmp_path: Path
) -> None:
    for number, whole in enumerate(tensors.experts()):
        folder = tmp_path / str(number)
        halves = tensors.cut_experts(whole, 2)
        shape = tuple(whole.shape)
        save(halves, (2, 0), folder)
        target = tensors.emptied(whole)
        state = {"w": ShardedTensor.from_rank_offsets("w", target)}
        megackpt.load(state, folder)
        tensors.assert_equal(target, whole)
        if type(whole).dequantize is not torch.Tensor.dequantize:
            plain = torch.full(shape, torch.nan, dtype=torch.bfloat16)
            megackpt.load({"w": ShardedTensor.from_rank_offsets("w", plain)}, folder)
            assert torch.equal(plain, whole.dequantize())


def test_a_cut_between_tiles_is_refused_and_the_border_is_named(
    tensors: ModuleType, tmp_path: Path
) -> None:
    whole = tensors.WHOLE["nvfp4 swizzled"]()
    held = parts(tensors, whole, (8, 0))
    with pytest.raises(
        ShardingError, match=r"cut at 0 and 64, .* multiples of 128 only"
    ):
        save(held, (8, 0), tmp_path / "ck")
    shuffled = tensors.WHOLE["int4 shuffled"]()
    save([shuffled], (1, 0), tmp_path / "whole")
    with pytest.raises(ShardingError, match="axis 0 is cut at 0 and 256"):
        save(parts(tensors, shuffled, (2, 0)), (2, 0), tmp_path / "cut")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_parts_that_ranks_have_quantised_apart_are_refused(
    tensors: ModuleType, tmp_path: Path
) -> None:
    held = parts(tensors, tensors.WHOLE["float8 by tensor"](), (2, 0))
    held[1].scale.mul_(2)
    with pytest.raises(ShardingError, match="what they share must be equal"):
        save(held, (2, 0), tmp_path / "ck")
    assert not list(tmp_path.iterdir())


def test_another_context_is_refused_and_both_are_named(
    tensors: ModuleType, tmp_path: Path
) -> None:
    whole = tensors.WHOLE["int8 by group"]()
    save([whole], (1, 0), tmp_path / "ck")
    other = tensors.emptied(tensors.WHOLE["int8 by row"]())
    with pytest.raises(
        MismatchError, match=r"block_size': \[1, 64\].*block_size': \[1, 1024\]"
    ):
        load([other], (1, 0), tmp_path / "ck")
    other = tensors.emptied(tensors.WHOLE["mxfp8"]())
    with pytest.raises(MismatchError, match=r"Int8Tensor.*MXTensor"):
        load([other], (1, 0), tmp_path / "ck")
    assert not other.qdata.view(torch.uint8).any()
    with pytest.raises(MismatchError, match="Int8Tensor of shape"):
        load([torch.zeros(ROWS, COLUMNS, dtype=torch.int64)], (1, 0), tmp_path / "ck")


def test_a_class_without_values_is_refused_by_name(
    tensors: ModuleType, tmp_path: Path
) -> None:
    save([tensors.WHOLE["int4"]()], (1, 0), tmp_path / "ck")
    with pytest.raises(MismatchError, match=r"Int4Tensor .* `dequantize`"):
        load([torch.zeros(ROWS, COLUMNS)], (1, 0), tmp_path / "ck")
    # Its tensors are ordinary ones.
    part = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8)
    state = megackpt.sharded({"w": {"qdata": part}})
    megackpt.load(state, tmp_path / "ck", strict="raise_unexpected")
    assert torch.equal(part, tensors.WHOLE["int4"]().qdata)
