"""Tables between the names of Megatron-FSDP's ``fsdp_dtensor`` and Megatron-Core's ``torch_dist``.

Both are checkpoints of torch DCP. ``--ckpt-format fsdp_dtensor`` stores the parameters of each
layer and each expert under the names of the wrapped model, and the halves of gated layers apart:

==================================================  ==========================================
``fsdp_dtensor``                                    ``torch_dist``
==================================================  ==========================================
``model.module.KEY``                                ``KEY``
``optimizer.state.module.module.module.KEY.STATE``  ``optimizer.state.STATE.KEY``
``mlp.linear_fc1.weight_w``, ``..._v``              the halves of ``mlp.linear_fc1.weight``
``layers.3.KEY``                                    ``layers.3.KEY``, or [3] of ``layers.KEY``
``experts.linear_fc1.weight5``                      [5] of ``experts.experts.linear_fc1.weight``
==================================================  ==========================================

Source: Megatron-LM d98e8a6, ``tools/checkpoint/checkpoint_inspector.py`` (convert_checkpoint), and
``megatron/core/transformer/fsdp_dtensor_checkpoint.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megackpt.errors import MismatchError, join_truncated
from megackpt.huggingface.rules import (
    Fuse,
    Naming,
    OfOne,
    Part,
    Piece,
    Shape,
    Theirs,
    as_rule,
)
from megackpt.planning.box import Box

_MODEL = "model.module."
_STATE = "optimizer.state."
_WRAPPED = f"{_STATE}module.module.module."
_EXPERTS = ".experts."
_NUMBER = re.compile(
    r"(?<=\.layers\.)\d+(?=\.)|(?<=\.local_experts\.)\d+(?=\.)"
    r"|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
)
_STACKABLE = re.compile(r"(\.layers|\.experts\.experts)(?:\.\d+)?\.")
_GATED = re.compile(r"\.mlp\.(?:.+\.)?linear_fc1\.(?:weight|bias)$")
_HALF = re.compile(r"(?<=\.linear_fc1\.)((?:weight|bias)\d*)_([wv])$")


@dataclass(frozen=True)
class Stacked(OfOne):
    """A tensor of one layer or expert, at its number in a tensor of all layers or experts.

    ``extents``: for each ``.#`` of the name the extent of the leading axis that replaces it, or
    None if the number stays in the name.
    """

    extents: tuple[int | None, ...]

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        numbers = naming(" ".join("#" * len(self.extents))).split()

        def stacked_name(pattern: str) -> str:
            for number, extent in zip(numbers, self.extents, strict=True):
                kept = ""
                if extent is None:
                    kept = f".{number}"
                pattern = pattern.replace(".#", kept, 1)
            return pattern

        index: Shape = ()
        extents: Shape = ()
        for number, extent in zip(numbers, self.extents, strict=True):
            if extent is not None:
                index += (int(number),)
                extents += (extent,)
        ones = (1,) * len(index)
        none = (None,) * len(index)
        return [
            replace(
                piece,
                shape=extents + piece.shape,
                there=Box(index + piece.there.offset, ones + piece.there.shape),
                axes=none + piece.axes,
            )
            for piece in as_rule(self.whole).pieces(shape, stacked_name)
        ]


def from_fsdp_dtensor(keys: Iterable[str], *, stack_layers: bool) -> dict[str, Theirs]:
    """The table that gives the tensors of an ``fsdp_dtensor`` checkpoint Megatron-Core's names.

    Args:
        keys: all of its keys of tensors (``load_tensors_metadata``).
        stack_layers: whether the target has one tensor for all layers. Megatron-Core does so unless
            its layers differ (``non_homogeneous_layers``). Experts have one tensor in any case.

    Raises MismatchError naming the keys that are not of an ``fsdp_dtensor`` checkpoint.
    """
    found: dict[str, tuple[Theirs, list[str]]] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    wrong = []
    for key in keys:
        beginning = _MODEL
        name = key.removeprefix(_MODEL)
        place = end = suffix = ""
        if key.startswith(_WRAPPED):
            beginning = _WRAPPED
            name, dot, state = key.removeprefix(_WRAPPED).rpartition(".")
            place = f"{_STATE}{state}."
            end = dot + state
        elif name == key:
            wrong.append(repr(key))
        half = _HALF.search(name)
        if half is not None:
            suffix = f"_{half[2]}"
            name = name.removesuffix(suffix)
        # What a number counts: the layers below a name, or experts.
        counted = []
        for number in _NUMBER.finditer(name):
            kind = name[: number.start()]
            if _EXPERTS in kind:
                kind = _EXPERTS
            counted.append(kind)
            counts[kind] = max(counts[kind], int(number[0]) + 1)
        pattern = _NUMBER.sub("#", name)
        theirs = pattern.replace(".local_experts.#.", ".experts.#.")
        theirs = re.sub(r"\.experts\.(linear_fc.*)#$", r".experts.experts.#.\1", theirs)
        if ".mtp." in f".{theirs}":
            theirs = theirs.replace(".mtp_model_layer.", ".transformer_layer.")
        rule: Theirs = place + theirs
        if half is not None:
            rule = Part(rule, "wv".index(half[2]), (1, 1))
        found[f"{beginning}{pattern}{suffix}{end}"] = rule, counted
    if wrong:
        raise MismatchError(
            f"not of a checkpoint in fsdp_dtensor: {join_truncated(wrong, 8, ', ')} (its keys "
            f"begin with {_MODEL!r} and {_WRAPPED!r})"
        )
    table: dict[str, Theirs] = {}
    for pattern, (rule, counted) in found.items():
        extents = tuple(
            counts[kind] if stack_layers or kind == _EXPERTS else None
            for kind in counted
        )
        table[pattern] = Stacked(rule, extents)
    return table


def to_fsdp_dtensor(keys: Iterable[str], *, swiglu: bool) -> dict[str, Theirs]:
    """The table that gives the tensors of a ``torch_dist`` checkpoint the names of Megatron-FSDP.

    Args:
        keys: all of its keys of tensors (``load_tensors_metadata``).
        swiglu: whether the model has gated layers (``--swiglu``). The tensors do not tell.

    Raises MismatchError naming optimizer states that do not belong to a parameter.
    """
    table: dict[str, Theirs] = {}
    wrong = []
    for key in keys:
        name = key
        place = end = ""
        beginning = _MODEL
        if key.startswith("optimizer."):
            state, dot, name = key.removeprefix(_STATE).partition(".")
            place = f"{_STATE}{state}."
            end = f".{state}"
            beginning = _WRAPPED
            if not (dot and key.startswith(_STATE)):
                wrong.append(repr(key))
        pattern = _STACKABLE.sub(r"\1.#.", name)
        theirs = re.sub(r"\.experts\.experts\.#\.(.*)$", r".experts.\1#", pattern)
        if ".mtp." in f".{theirs}":
            theirs = theirs.replace(".transformer_layer.", ".mtp_model_layer.")
        theirs = beginning + theirs
        rule: Theirs = theirs + end
        if swiglu and _GATED.search(pattern):
            rule = Fuse((f"{theirs}_w{end}", f"{theirs}_v{end}"))
        table[place + pattern] = rule
    if wrong:
        raise MismatchError(
            f"no state of a parameter by its name: {join_truncated(wrong, 8, ', ')}. Leave the "
            "keys out first (convert(exclude=...))"
        )
    return table
