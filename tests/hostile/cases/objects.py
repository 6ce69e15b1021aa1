"""Cases of the corpus: pickles that would run code, or exhaust memory or time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.hostile import healthy
from tests.hostile.cases.place import Place, add
from tests.hostile.pickles import (
    BOMBS,
    GADGETS,
    QUIET,
    RUNNING,
    archive,
    slipped,
    whole,
)

# Pickles ------------------------------------------------------------------------------------------------------------


def metadata(place: Place, body: bytes) -> None:
    place.put(".metadata", whole(body))


def state(name: str) -> Callable[[Place, bytes], None]:
    return lambda place, body: place.put(name, slipped(place.get(name), body))


def one(name: str) -> Callable[[Place, bytes], None]:
    return lambda place, body: place.put(name, archive(whole(b"]" + body + b"a")))


def recorded(
    key: MetadataIndex, data: Callable[[bytes], bytes]
) -> Callable[[Place, bytes], None]:
    def spoil(place: Place, body: bytes) -> None:
        place.put("__9_0.distcp", data(body))
        info = _StorageInfo("__9_0.distcp", 0, len(data(body)))
        place.table(lambda table: table.storage_data.update({key: info}))

    return spoil


def legacy(body: bytes) -> bytes:
    """What torch wrote before it wrote archives: pickles one after the other."""
    start = healthy.record(torch.ones(4, 4), _use_new_zipfile_serialization=False)
    return start[: start.index(b"\x80\x02ctorch._utils")] + whole(body) + bytes(64)


FIRST = MetadataIndex("w", torch.Size([0, 0]))
SLOTS: Mapping[str, tuple[str, Callable[[Place, bytes], None]]] = {
    ".metadata": ("dcp", metadata),
    "common.pt": ("dcp", state("common.pt")),
    "object": (
        "dcp",
        recorded(
            MetadataIndex("rng/shard_0_2"), lambda b: archive(whole(b"]" + b + b"a"))
        ),
    ),
    "tensor": ("dcp", recorded(FIRST, lambda b: archive(whole(b)))),
    "tensor of old": ("dcp", recorded(FIRST, legacy)),
    "layout C's .metadata": ("layout C", metadata),
    "layout C's common state": (
        "layout C",
        recorded(
            MetadataIndex("common_state/shard_0_1"),
            lambda b: archive(whole(b"]" + b + b"a")),
        ),
    ),
    "flattened .metadata": ("flattened", metadata),
    "zarr common.pt": ("zarr", state("common.pt")),
    "zarr object": ("zarr", one("rng.objects/shard_0_2.pt")),
    "old zarr common.pt": ("megatron zarr", state("common.pt")),
    "old zarr object": ("megatron zarr", one("rng_state/shard_0.0_1.2.pt")),
    "safetensors common.pt": ("safetensors", state("common.pt")),
    "safetensors object": ("safetensors", one("rng.objects/shard_0_2.pt")),
    "torch file": ("torch", state("model.pt")),
    "bin": ("bins", state("pytorch_model-00002-of-00002.bin")),
    "DeepSpeed's module": ("zero2", state("mp_rank_00_model_states.pt")),
    "DeepSpeed's optimizer": (
        "zero3",
        state("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ),
    "universal object": ("universal", state("zero/optimizer_state.pt")),
}
"""Every place where a pickle stands: kind of checkpoint, and how to put one there. (Ours with an index: see below.)"""
UNTRUSTED = (
    r"not trusted|was not run|may not be called|which no checkpoint's table|[Uu]nsupported|unknown pickle opcode"
    r"|cannot read the record|sets the state of|not a dict of attributes|damaged|no persistent|a persistent id"
    r"|of a class of its own|of another class"
)


def code(slot: str, name: str, **more: Any) -> None:
    kind, put = SLOTS[slot]

    def spoil(place: Place) -> None:
        body = (
            RUNNING[name](f"touch {place.witness}") if name in RUNNING else QUIET[name]
        )
        put(place, body)

    # A record of what torch wrote before archives is not unpickled.
    tells = "or is something else" if slot == "tensor of old" else UNTRUSTED
    add(f"{name} in the {slot}", kind, spoil, tells, **more)


for _slot in SLOTS:
    for _number, _name in enumerate((*RUNNING, *QUIET)):
        in_turn = _slot in (".metadata", "common.pt") and (
            _slot == ".metadata"
        ) == bool(_number % 2)
        code(_slot, _name, long=not (in_turn or _name == "os.system"))
    for _number, (_name, _body) in enumerate(BOMBS.items()):
        in_turn = _slot == (".metadata", "common.pt", "torch file")[_number % 3]
        add(
            f"{_name} in the {_slot}",
            SLOTS[_slot][0],
            partial(lambda put, body, place: put(place, body), SLOTS[_slot][1], _body),
            ".",
            long=not in_turn,
        )
for _name, _body in GADGETS.items():
    add(_name, "dcp", partial(lambda body, p: metadata(p, body), _body), ".")
add(
    "code in a common state that the index holds to account",
    "ours",
    lambda p: state("common.pt")(p, RUNNING["os.system"](f"touch {p.witness}")),
    r"common\.pt",
)
for _value in (None, 5, [1, 2], "text"):
    add(
        f"a common state that is {_value!r}",
        "dcp",
        lambda p, v=_value: torch.save(v, p.folder / "common.pt"),
        "not a dict",
    )
