"""The corpus: named ways to spoil a healthy checkpoint, and what a reader should then say.

Each maker gets a Place with a fresh copy of a healthy checkpoint (see healthy.py) and breaks it. Nothing of this is
kept in the repository: ``cases.place.build`` makes the directories again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

from tests.hostile.cases.place import CASES, Place, add

# In this order, of which ``in_every_run`` takes every fourth case.
for _part in (
    "objects",
    "paths",
    "records",
    "files",
    "zarr_arrays",
    "zarr_foreign",
    "safetensors_headers",
    "deepspeed",
    "orbax",
    "torch_checkpointing",
    "fsdp_dtensor",
):
    import_module(f"tests.hostile.cases.{_part}")

# Holes --------------------------------------------------------------------------------------------------------------


def hole(name: str, size: int = 1 << 40) -> Callable[[Place], None]:
    return lambda p: os.truncate(p.folder / name, size)


for _kind, _name, _tells in (
    ("dcp", ".metadata", r"\.metadata"),
    ("dcp", "common.pt", r"common\.pt"),
    ("dcp", "metadata.json", ""),  # so large a one is another program's
    ("dcp", "__0_0.distcp", ""),  # what is behind the records nobody asks for
    ("ours", "megackpt.index", r"megackpt\.index"),
    ("ours", "common.pt", ""),  # the index says how much of it counts
    ("zarr", "w/zarr.json", r"w/zarr\.json"),
    ("zarr", "zarr.json", r"zarr\.json"),
    ("zarr", "w/c.0.0", r"w/c.0.0"),
    ("zarr", "rng.objects/shard_0_2.pt", r"rng"),
    ("zarr shards", "w/c.0.0", r"w/c.0.0"),
    ("zarr zstd", "w/c.0.0", r"w/c.0.0"),
    ("zarr blosc", "w/c.0.0", r"w/c.0.0"),
    ("one safetensors", "model.safetensors", r"model\.safetensors"),
    ("safetensors", "model.safetensors.index.json", r"index\.json"),
    ("torch", "model.pt", r"model\.pt|recognised"),
    ("zero2", "mp_rank_00_model_states.pt", r"model_states\.pt"),
    (
        "zero2",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        r"rank_0_.*optim_states\.pt",
    ),
    ("universal", "zero/w/exp_avg.pt", r"exp_avg\.pt"),
    ("deepspeed run", "latest", "latest"),
):
    add(f"{_name} of a TiB that is a hole", _kind, hole(_name), _tells)


def in_every_run() -> list[str]:
    """A part of the corpus: every fourth of the short ones, and those that once went wrong."""
    short = [name for name, case in CASES.items() if not case.long]
    return sorted({*short[::4], *(name for name in short if name in WENT_WRONG)})


WENT_WRONG = frozenset((
    "dcp: no chunks",  # the tensor was left out
    "dcp: zarr's metadata.json",  # taken for an empty zarr group
    "megatron zarr: misc.uint8/.zarray is a link",  # the tensor was left out
    "megatron zarr: the folder misc.uint8 is a link",  # likewise
    "megatron zarr: rng_state/shard_0.0_1.2.pt cut at all but one",  # told without any file's name
    "zarr blosc: w/c.0.0 of a TiB that is a hole",  # tensorstore ended the process
    "zarr zstd: w/c.0.0 of a TiB that is a hole",
    "zarr: common.pt is a link",  # the common state was left out
))  # fmt: skip
