"""Tensors of the classes of torchao, whole, and the parts of them that ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    QuantizeTensorToNVFP4Kwargs,
)
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked
from torchao.prototype.quantized_training import bitnet
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
)
from torchao.quantization import (
    Float8Tensor,
    Int4PlainInt32Tensor,
    Int4Tensor,
    Int4TilePackedTo4dTensor,
    Int8Tensor,
    IntxUnpackedToInt8Tensor,
    MappingType,
)
from torchao.quantization.granularity import PerBlock, PerGroup, PerRow, PerTensor
from torchao.quantization.quantize_.workflows import (
    Int4PreshuffledTensor,
    QuantizeTensorToFloat8Kwargs,
)

ROWS, COLUMNS = 512, 1024


def values(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(torch.bfloat16)


def packed(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Any bits, as GPU kernels would pack them."""
    return torch.arange(torch.Size(shape).numel()).mul_(37).to(dtype).reshape(shape)


def int4() -> Int4Tensor:
    scales = values(COLUMNS // 128, ROWS, 1)
    return Int4Tensor(
        packed(ROWS, COLUMNS // 2),
        scales,
        -scales,
        [1, 128],
        torch.Size((ROWS, COLUMNS)),
        values(1, COLUMNS, 2)[0],
    )


def int4_plain() -> Int4PlainInt32Tensor:
    scales = values(COLUMNS // 128, ROWS, 1)
    data = packed(ROWS, COLUMNS // 8, dtype=torch.int32)
    return Int4PlainInt32Tensor(
        data, scales, scales.to(torch.int8), [1, 128], torch.Size((ROWS, COLUMNS))
    )


def int4_tiles() -> Int4TilePackedTo4dTensor:
    data = packed(ROWS // 8, COLUMNS // 128, 32, 4, dtype=torch.int32)
    scales = torch.stack(
        [values(COLUMNS // 128, ROWS, 1), values(COLUMNS // 128, ROWS, 2)], -1
    )
    return Int4TilePackedTo4dTensor(data, scales, [1, 128], torch.Size((ROWS, COLUMNS)))


def int4_shuffled() -> Int4PreshuffledTensor:
    scales = values(COLUMNS // 128, ROWS, 1)
    return Int4PreshuffledTensor(
        packed(ROWS, COLUMNS // 2).view(torch.int8),
        scales,
        [1, 128],
        [ROWS, COLUMNS],
        group_zero=-scales,
    )


def float8(granularity: Any) -> Float8Tensor:
    kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
    return Float8Tensor.from_hp(
        values(),
        granularity=granularity,
        mm_config=Float8MMConfig(),
        act_quant_kwargs=kwargs,
    )


def nvfp4(is_swizzled: bool) -> NVFP4Tensor:
    data = values()
    scale = data.abs().max().float() / (6.0 * 448.0)
    kwargs = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=is_swizzled)
    return NVFP4Tensor.to_nvfp4(
        data,
        per_tensor_scale=scale,
        is_swizzled_scales=is_swizzled,
        act_quant_kwargs=kwargs,
    )


def mixed() -> Int8MixedPrecisionTrainingLinearWeight:
    return Int8MixedPrecisionTrainingLinearWeight(
        values(), Int8MixedPrecisionTrainingConfig()
    )


WHOLE: dict[str, Callable[[], Any]] = {
    "int8 by row": lambda: Int8Tensor.from_hp(values(), PerRow()),
    "int8 by group": lambda: Int8Tensor.from_hp(
        values(), PerGroup(64), MappingType.ASYMMETRIC
    ),
    "int8 by tensor": lambda: Int8Tensor.from_hp(values(), PerTensor()),
    "intx": lambda: IntxUnpackedToInt8Tensor.from_hp(values(), [1, 64], torch.int4),
    "int4": int4,
    "int4 plain": int4_plain,
    "int4 tiles": int4_tiles,
    "int4 shuffled": int4_shuffled,
    "float8 by tensor": lambda: float8(PerTensor()),
    "float8 by row": lambda: float8(PerRow()),
    "float8 by block": lambda: float8(PerBlock([128, 128])),
    "mxfp8": lambda: MXTensor.to_mx(values(), torch.float8_e4m3fn),
    "mxfp8 swizzled": lambda: MXTensor.to_mx(
        values(), torch.float8_e4m3fn, is_swizzled_scales=True
    ),
    "mxfp4": lambda: MXTensor.to_mx(values(), torch.float4_e2m1fn_x2),
    "mxfp4 swizzled": lambda: MXTensor.to_mx(
        values(), torch.float4_e2m1fn_x2, is_swizzled_scales=True
    ),
    "nvfp4": lambda: nvfp4(False),
    "nvfp4 swizzled": lambda: nvfp4(True),
    "int8 training": lambda: Int8QuantizedTrainingLinearWeight.from_float(values()),
    "int8 mixed": mixed,
    "bitnet": lambda: bitnet.BitNetTrainingLinearWeight(values()),
}


def inner(tensor: Any) -> dict[str, torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def rebuilt(tensor: Any, parts: dict[str, torch.Tensor], **changes: Any) -> Any:
    """A tensor of the class of another one, with other inner tensors."""
    _, context = tensor.__tensor_flatten__()
    if isinstance(context, dict):
        context = {**context, **changes}
    return type(tensor).__tensor_unflatten__(parts, context, None, None)


AXES: dict[str, tuple[int | None, int | None]] = {
    "qdata": (0, 1),
    "_data": (0, 1),
    "int_data": (0, 1),
    "scale": (0, 1),
    "zero_point": (0, 1),
    "act_pre_scale": (None, 0),
    "per_tensor_scale": (None, None),
}
"""Axes of inner tensors that follow the rows and the columns, if not another is in TRANSPOSED."""
TRANSPOSED = {
    "scale": (1, 0),
    "zero_point": (1, 0),
    "scale_and_zero": (1, 0),
    "group_scale": (1, 0),
    "group_zero": (1, 0),
}


def cut(tensor: Any, rows: slice, columns: slice) -> Any:
    """The part of a tensor that a rank holds, cut by hand: axes of one element are not cut."""
    parts = {}
    axes_of = AXES | (TRANSPOSED if type(tensor).__name__.startswith("Int4") else {})
    is_swizzled = getattr(tensor, "is_swizzled_scales", False)
    for name, part in inner(tensor).items():
        if name == "scale" and is_swizzled:
            part = from_blocked(part, ROWS, COLUMNS // tensor.block_size)
        for axis, held, size in zip(
            axes_of[name], (rows, columns), (ROWS, COLUMNS), strict=True
        ):
            if axis is None or axis >= part.dim() or part.shape[axis] == 1:
                continue
            extent = part.shape[axis]
            first, stop = held.start * extent // size, held.stop * extent // size
            part = part.narrow(axis, first, stop - first)
        if name == "scale" and is_swizzled:
            height, width = rows.stop - rows.start, columns.stop - columns.start
            part = to_blocked(part).view(
                -(-height // 128) * 32, -(-width // tensor.block_size // 4) * 16
            )
        parts[name] = part.clone(memory_format=torch.contiguous_format)
    changes: dict[str, Any] = {}
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    if not hasattr(tensor, "elem_dtype") and isinstance(
        getattr(tensor, "block_size", None), list
    ):
        changes["block_size"] = [
            min(pair) for pair in zip(tensor.block_size, shape, strict=True)
        ]
    if "shape" in getattr(tensor, "tensor_attribute_names", ()):
        changes["shape"] = torch.Size(shape)
    return rebuilt(tensor, parts, **changes)


def emptied(tensor: Any) -> Any:
    """A tensor like this one whose inner tensors are zeros."""
    return rebuilt(
        tensor, {name: torch.zeros_like(part) for name, part in inner(tensor).items()}
    )


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.__tensor_flatten__()[1] == expected.__tensor_flatten__()[1]
    for name, part in inner(expected).items():
        held = getattr(found, name)
        assert (held.shape, held.dtype) == (part.shape, part.dtype), name
        assert torch.equal(
            held.contiguous().flatten().view(torch.uint8),
            part.flatten().view(torch.uint8),
        ), name


def dequantised(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """The values that the class gives, in one step where it can."""
    if isinstance(tensor, IntxUnpackedToInt8Tensor):
        return rebuilt(tensor, inner(tensor), dtype=dtype).dequantize()
    if isinstance(tensor, Int8QuantizedTrainingLinearWeight):
        return tensor.dequantize().to(dtype)
    return tensor.dequantize(output_dtype=dtype)


def experts() -> list[Any]:
    """Tensors of four experts."""
    data = torch.stack([values(256, 512, seed) for seed in range(4)])
    scales = torch.stack([values(4, 256, seed) for seed in range(4)])
    return [
        Int8Tensor.from_hp(data, PerRow()),
        MXTensor.to_mx(data, torch.float4_e2m1fn_x2, is_swizzled_scales=True),
        NVFP4Tensor.to_nvfp4(
            data, per_tensor_scale=torch.rand(4, 1, 1) + 0.5, is_swizzled_scales=True
        ),
        Int4PreshuffledTensor(
            packed(4, 256, 256).view(torch.int8),
            scales,
            [1, 1, 128],
            [4, 256, 512],
            group_zero=-scales,
        ),
    ]


def cut_experts(tensor: Any, count: int) -> list[Any]:
    """Equal parts along the first axis."""
    cut_parts = {name: part.chunk(count) for name, part in inner(tensor).items()}
    changes: dict[str, Any] = {}
    if isinstance(tensor, Int4PreshuffledTensor):
        changes["shape"] = [tensor.shape[0] // count, *tensor.shape[1:]]
    return [
        rebuilt(
            tensor,
            {name: chunks[number].clone() for name, chunks in cut_parts.items()},
            **changes,
        )
        for number in range(count)
    ]
