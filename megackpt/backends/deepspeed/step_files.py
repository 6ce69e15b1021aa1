"""The files of a step: which step is meant, and which file is of which rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.storage import Storage, unsafe_names

ADVICE = "convert the step with DeepSpeed's ds_to_universal.py, and open the result"

_FILE = re.compile(
    r"(?:(?P<kind>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>0|[1-9][0-9]{0,5})_)?"
    r"mp_rank_(?P<parallel>[0-9_]{2,9})_(?P<content>model|optim)_states\.pt"
)
_POINTERS = ("latest", "latest_universal")
_POINTER_BYTES = 1 << 10
_SCRIPT = "zero_to_fp32.py"
_WEIGHTS = (".safetensors", ".bin", "model.pt")
_UNIVERSAL = "zero"


class StepFiles(NamedTuple):
    """The names of a step's files, relative to the root.

    Attributes:
        model: the files of the module's state, by rank.
        partitioned: ZeRO-3 wrote them, one for each rank.
        optimizer: the files of the optimizer's partitions, by rank.
        parameters: the folder of a universal checkpoint; empty without one.
        parallel: the files are of several model-parallel ranks, pipeline stages or experts.
    """

    model: list[str]
    partitioned: bool
    optimizer: list[str]
    parameters: str
    parallel: bool


def recognises(root: Storage) -> bool:
    """By names: a step, or a run's folder without weights in a format of their own.

    Hugging Face's Trainer keeps such weights beside the folder of the step.
    """
    names = root.list()
    if any(map(_FILE.fullmatch, names)):
        return True
    points = _SCRIPT in names and any(name in names for name in _POINTERS)
    return points and not any(name.endswith(_WEIGHTS) for name in names)


def step_files(root: Storage) -> StepFiles:
    """The files of the step, or of the last step of the run.

    Raises CorruptCheckpoint for missing files; BackendError for files of several model-parallel
    ranks, pipeline stages or experts, unless they are of a universal checkpoint.
    """
    names = root.list()
    folder = ""
    if not any(map(_FILE.fullmatch, names)):
        step = _last_step(root, names)
        names = root.list(step)
        folder = f"{step}/"
    where = f"{root.location}/{folder}"
    found: dict[str, list[re.Match[str]]] = {"model": [], "optim": []}
    unknown = []
    for name in names:
        if match := _FILE.fullmatch(name):
            found[match["content"]].append(match)
        elif name.endswith("_states.pt"):
            unknown.append(name)
    model, optimizer = found.values()
    if not model:
        raise NotACheckpoint(f"{where} has no mp_rank_00_model_states.pt of DeepSpeed")
    unknown += [
        match.string for match in (*model, *optimizer) if match["parallel"] != "00"
    ]
    is_universal = _UNIVERSAL in names
    if unknown and not is_universal:
        raise BackendError(
            f"{where}{unknown[0]} is of model parallelism, a pipeline or experts, and does not say "
            f"how whole parameters are cut: {ADVICE}"
        )
    if not unknown:
        ranks = 0
        if model[0]["kind"]:
            ranks = max(len(model), len(optimizer))
        model = _by_rank(where, model, ranks)
        optimizer = _by_rank(where, optimizer, ranks)
    return StepFiles(
        [folder + match.string for match in model],
        model[0]["kind"] is not None,
        [folder + match.string for match in optimizer],
        f"{folder}{_UNIVERSAL}" if is_universal else "",
        bool(unknown),
    )


def _last_step(root: Storage, names: Sequence[str]) -> str:
    """The folder that ``latest`` names."""
    for pointer in _POINTERS:
        if pointer in names:
            step = root.get(pointer, _POINTER_BYTES).decode(errors="replace").strip()
            if unsafe_names([step]) or "/" in step or not root.list(step):
                raise CorruptCheckpoint(
                    f"{root.location}/{pointer} names {step!r}, which is no folder of files there"
                )
            return step
    raise NotACheckpoint(f"{root.location} has no file {' or '.join(_POINTERS)}")


def _by_rank(
    where: str, found: Sequence[re.Match[str]], count: int
) -> list[re.Match[str]]:
    """The files in the order of ranks, of ``count`` ranks or more."""
    kinds = {match["kind"]: match.string for match in found}
    if len(kinds) > 1:
        raise CorruptCheckpoint(
            f"{where} holds files of several saves: {' and '.join(kinds.values())}. "
            "Move away the files of one"
        )
    ranks = {int(match["rank"] or 0): match for match in found}
    for rank in range(max(len(ranks), count)):
        if ranks and rank not in ranks:
            other = found[0].string
            name = re.sub("rank_[0-9]+", f"rank_{rank}", other, count=1)
            raise CorruptCheckpoint(f"{where}{name} is missing: {other} is there")
    return [ranks[rank] for rank in range(len(ranks))]
