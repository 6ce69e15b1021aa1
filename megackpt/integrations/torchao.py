"""Rules for the tensor classes of torchao 0.18. It is not imported here.

The shapes of inner tensors are in the docstrings of the classes, the tiles of swizzled scales in
``prototype/mx_formats/utils.py``.
"""

from __future__ import annotations

from megackpt.state import register_tensor_subclass

_RULES = """
torchao.quantization.Int8Tensor
torchao.quantization.Float8Tensor
torchao.quantization.IntxUnpackedToInt8Tensor
    qdata: ... -2 -1
    scale zero_point: .../block_size -2/block_size -1/block_size
    act_pre_scale: -1
    act_quant_scale act_quant_zero_point: -

torchao.quantization.Int4Tensor
    qdata: ... -2 -1/2
    scale zero_point: ... -1/block_size -2
    act_pre_scale: -1

torchao.quantization.Int4PlainInt32Tensor
    qdata: ... -2 -1/8
    scale zero_point: ... -1/block_size -2
    act_pre_scale: -1

torchao.quantization.Int4TilePackedTo4dTensor
    qdata: ... -2/8 -1/128 - -
    scale_and_zero: ... -1/block_size -2 -
    act_pre_scale: -1

torchao.quantization.Int4PreshuffledTensor
    qdata: ... -2/0 -1/0
    group_scale group_zero: ... -1/0 -2/0
    row_scale: ... -2/0

torchao.prototype.mx_formats.mx_tensor.MXTensor
    qdata: ... -2 -1
    qdata if elem_dtype=torch.float4_e2m1fn_x2: ... -2 -1/2
    scale: ... -2 -1/block_size
    scale if is_swizzled_scales: ... -2/128 -1/128 =32 =16

torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor
    qdata: ... -2 -1/2
    scale: ... -2 -1/block_size
    scale if is_swizzled_scales: ... -2/128 -1/64 =32 =16
    per_tensor_scale act_per_tensor_scale: ... - -

torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight
    int_data: -2 -1
    scale: -2

torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight
torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight
    _data: ... -2 -1
    _precomputed_scale: -
"""
"""Classes, and below them the rule of ``register_tensor_subclass`` for their inner tensors."""


def register() -> None:
    """Register the rule of each class."""
    for block in _RULES.strip().split("\n\n"):
        rule = {}
        classes = []
        for line in map(str.strip, block.splitlines()):
            names, found, axes = line.partition(": ")
            if found:
                rule[names] = axes
            else:
                classes.append(names)
        for name in classes:
            register_tensor_subclass(name, rule)
