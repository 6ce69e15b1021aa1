"""The files of a step: which step is meant, and which file is of which rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.storage import Storage, unsafe_names

_RANK = "(?:(?P<kind>{kind}zero_pp_rank_)(?P<rank>0|[1-9][0-9]{{0,5}})_){optional}"
_MODEL = re.compile(
    _RANK.format(kind="", optional="?")
    + r"mp_rank_(?P<mp>[0-9_]{2,9})_model_states\.pt"
)
_OPTIMIZER = re.compile(
    _RANK.format(kind="(?:bf16_|fp16_)?", optional="")
    + r"mp_rank_(?P<mp>[0-9_]{2,9})_optim_states\.pt"
)
_POINTERS = ("latest", "latest_universal")
_POINTER_BYTES = 1 << 10
_SCRIPT = "zero_to_fp32.py"
_WEIGHTS = (".safetensors", ".bin", "model.pt")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint with a folder for each parameter."""


@dataclass(frozen=True)
class StepFiles:
    """The names of a step's files, relative to the root.

    Attributes:
        folder: the step's folder and a slash; empty if the root is the step.
        model: the files of the module's state.
        partitioned: ZeRO-3 wrote them, one for each rank.
        optimizer: the files of the optimizer's partitions, by rank.
        parameters: the folder of a universal checkpoint; empty without one.
        parallel: several model-parallel ranks wrote the files of the module's state.
    """

    folder: str
    model: Sequence[str]
    partitioned: bool
    optimizer: Sequence[str]
    parameters: str
    parallel: bool


def recognises(root: Storage) -> bool:
    """By names: a step, or a run's folder without weights in a format of their own.

    Hugging Face's Trainer keeps such weights beside the folder of the step.
    """
    names = root.list()
    if any(map(_MODEL.fullmatch, names)):
        return True
    points = _SCRIPT in names and any(name in names for name in _POINTERS)
    return points and not any(name.endswith(_WEIGHTS) for name in names)


def step_files(root: Storage) -> StepFiles:
    """The files of the step, or of the last step of the run.

    Raises CorruptCheckpoint for missing files, BackendError for files of pipelines, experts and,
    without parameters' folders, of several model-parallel ranks.
    """
    names = root.list()
    folder = ""
    if not any(map(_MODEL.fullmatch, names)):
        folder = _last_step(root, names)
        names = root.list(folder.rstrip("/"))
    where = f"{root.location}/{folder}".rstrip("/")
    model = list(filter(None, map(_MODEL.fullmatch, names)))
    optimizer = list(filter(None, map(_OPTIMIZER.fullmatch, names)))
    if not model:
        raise NotACheckpoint(
            f"{where} has no file mp_rank_00_model_states.pt or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt"
        )
    is_universal = UNIVERSAL in names
    known = {match.string for match in (*model, *optimizer)}
    unknown = [n for n in names if n.endswith("_states.pt") and n not in known]
    parallel = sorted({match["mp"] for match in model} | {m["mp"] for m in optimizer})
    if (parallel != ["00"] or unknown) and not is_universal:
        problem = f"of the model-parallel ranks {', '.join(parallel)}"
        if unknown:
            problem = f"{unknown[0]!r}, of a pipeline or of experts"
        raise BackendError(
            f"{where} has files {problem}, which do not say how they form the whole parameters: "
            "convert the step with DeepSpeed's ds_to_universal.py, and open the result"
        )
    if parallel == ["00"]:
        model = _by_rank(where, model)
        optimizer = _by_rank(where, optimizer)
    return StepFiles(
        folder,
        [folder + match.string for match in model],
        model[0]["kind"] is not None,
        [folder + match.string for match in optimizer],
        f"{folder}{UNIVERSAL}" if is_universal else "",
        len(parallel) > 1 or bool(unknown),
    )


def _last_step(root: Storage, names: Sequence[str]) -> str:
    """The folder that ``latest`` names, and a slash."""
    for pointer in _POINTERS:
        if pointer not in names:
            continue
        where = f"{root.location}/{pointer}"
        try:
            step = root.get(pointer, _POINTER_BYTES).decode().strip()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{where} is not text: {error}") from error
        if unsafe_names([step]) or "/" in step:
            raise CorruptCheckpoint(f"{where} names {step!r}, which is no folder in it")
        return f"{step}/"
    raise NotACheckpoint(f"{root.location} has no file {' or '.join(_POINTERS)}")


def _by_rank(where: str, found: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """The files in the order of ranks, each rank once."""
    kinds = {match["kind"]: match.string for match in found}
    if len(kinds) > 1:
        raise CorruptCheckpoint(
            f"{where} holds files of several saves: {' and '.join(kinds.values())}. "
            "Move away the files of one"
        )
    ranks = {int(match["rank"] or 0): match for match in found}
    for rank in range(len(ranks)):
        if rank not in ranks:
            other = found[0].string
            name = re.sub("rank_[0-9]+", f"rank_{rank}", other, count=1)
            raise CorruptCheckpoint(f"{where}/{name} is missing: {other} is there")
    return [ranks[rank] for rank in range(len(ranks))]
