"""A training checkpoint as a directory that Hugging Face's libraries open: weights by a table, and the files beside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megackpt.backends.safetensors import Safetensors
from megackpt.checkpoint import absolute, find_storage, open_checkpoint
from megackpt.converter.asking import convert
from megackpt.converter.budget import parse_size
from megackpt.converter.landing import is_lone
from megackpt.converter.order import Converted
from megackpt.converter.selecting import Choice
from megackpt.errors import BackendError, MismatchError, NotACheckpoint, StorageError
from megackpt.planning.manifest import TensorEntry
from megackpt.runtime.storage import root_at

if TYPE_CHECKING:
    from megackpt.adapters.huggingface import Table

_COPIED = ("*.json", "*vocab*.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "*.bpe", "*.jinja")
_WEIGHTS = ("*.index.json", "*.index.*.json")
_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|h|blocks?)\.)(\d+)\.")


def export_huggingface(
    source: str | Path,
    target: str | Path,
    table: Table,
    config: Mapping[str, Any] | str | Path,
    *,
    max_shard_size: str | int = "5GB",
    **options: Any,
) -> Converted:
    """Write a training checkpoint of any format as ``model.safetensors`` (or several, and their index) and its config.

    Args:
        target: the directory to write.
        table: which of theirs our tensors are: ``llama(config)``, say, or a dict of one's own.
        config: what ``config.json`` is to hold; or a directory of Hugging Face's, whose small files (configuration,
            tokenizer; code, where the configuration names any) are copied: its ``dtype`` becomes what is exported.
        max_shard_size: bytes that a file of weights may have ("5GB", "500MiB", or a number).
        options: those of ``convert``, as ``cast="bf16"``, ``overwrite=True``, ``max_memory``, ``workers``; ``select``,
            ``exclude`` and ``rename`` are about their names.

    The weights are committed atomically, as by ``convert``. The small files are written before them; where a complete
    checkpoint is replaced, after them, one by one: the same call writes those that are missing if the process dies.

    Raises MismatchError where tensors fit no rule, or several, rules fit no tensor, or theirs would have holes or
    overlaps, or fewer layers than the configuration tells: with all of these, before anything is written. Else what
    ``convert`` raises.
    """
    from megackpt.converter.seeing import seen_through  # it needs torch, which workers start faster without

    to = Safetensors(max_shard_bytes=parse_size(max_shard_size))
    where = absolute(target)
    if is_lone(where, to.name) or os.path.isfile(where):
        raise BackendError(
            f"{where} is one file, and an export is a directory: weights, and files beside them"
        )
    files, told = _beside(config)
    tensors = seen_through(table, open_checkpoint(source)).manifest.tensors
    _refuse_missing_layers((entry.key for entry in tensors), told)
    dtypes = _dtypes(tensors, options.get("cast"))
    noted = {"dtype", "torch_dtype"}.intersection(told)
    if noted and len(dtypes) == 1 and not isinstance(config, Mapping):
        files["config.json"] = _json({**told, **dict.fromkeys(noted, *dtypes)})
    replaced = _is_checkpoint(where)
    if not replaced:
        _put(where, files)
    done = convert(source, target, to, table=table, **options)
    if replaced:
        _put(done.target, files)
    return done


def _beside(config: Mapping[str, Any] | str | Path) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """The small files, and what the configuration tells."""
    if isinstance(config, Mapping):
        return {"config.json": _json(config)}, config
    if not isinstance(config, str | Path):
        raise MismatchError(
            f"config is a dict (config.to_dict()) or a directory, not a {type(config).__name__}"
        )
    folder = Path(config)
    try:
        told = json.loads((folder / "config.json").read_bytes())
        found = {str(path.relative_to(folder)): path.read_bytes() for path in _small(folder)}
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"{folder}: the files beside the weights cannot be read: {error}. Give a directory that has a "
            "config.json, or what it is to hold"
        ) from error
    return found, told if isinstance(told, Mapping) else {}


def _small(folder: Path) -> Iterator[Path]:
    """Files that are no weights, also of the folders that sentence-transformers' modules.json names."""
    inside = [path for path in sorted(folder.iterdir()) if path.is_file()]
    code = any(path.name.endswith("config.json") and b'"auto_map"' in path.read_bytes() for path in inside)
    patterns = (*_COPIED, "*.py") if code else _COPIED
    modules = folder / "modules.json"
    named = {entry["path"] for entry in json.loads(modules.read_bytes())} if modules.is_file() else set()
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in named:
            inside += [below for below in sorted(path.iterdir()) if below.is_file()]
    for path in inside:
        fits = any(fnmatchcase(path.name, pattern) for pattern in patterns)
        if fits and not any(fnmatchcase(path.name, pattern) for pattern in _WEIGHTS):
            yield path


def _refuse_missing_layers(keys: Iterable[str], told: object) -> None:
    """MismatchError where the configuration tells of layers that are not among these tensors of theirs."""
    count = told.get("num_hidden_layers") if isinstance(told, Mapping) else None
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.match, keys)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    if not isinstance(count, int) or not numbers:
        return
    most = max(numbers, key=lambda name: len(numbers[name].intersection(range(count))))
    missing = [str(number) for number in range(min(count, 10**6)) if number not in numbers[most]]
    if missing:
        raise MismatchError(
            f"the configuration's num_hidden_layers is {count}, and the checkpoint has nothing for "
            f"{', '.join(f'{most}{number}' for number in missing[:20])}"
            + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        )


def _dtypes(tensors: Iterable[TensorEntry], cast: object) -> set[str]:
    """The floating dtypes of what is exported."""
    found = {entry.meta.dtype for entry in tensors if "float" in entry.meta.dtype}
    wanted = Choice.of(cast=cast).cast
    return {wanted} if wanted and found else found


def _json(config: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"config.json cannot hold this config: {error} (a dtype is named, as 'bfloat16')"
        ) from error


def _is_checkpoint(target: str) -> bool:
    try:
        find_storage(target)
    except NotACheckpoint:
        return False
    return True


def _put(target: str, files: Mapping[str, bytes]) -> None:
    root = root_at(target, create=True)
    for name, content in files.items():
        root.put(name, content)
