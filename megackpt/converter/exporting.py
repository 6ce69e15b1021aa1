"""A training checkpoint as a directory that Hugging Face's libraries open: weights by a table, and the files beside."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megackpt.backends.safetensors import Safetensors
from megackpt.converter.asking import convert
from megackpt.converter.budget import parse_size
from megackpt.converter.order import Converted
from megackpt.errors import StorageError
from megackpt.runtime.storage import root_at

if TYPE_CHECKING:
    from megackpt.adapters.huggingface import Table

_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
_WEIGHTS = (".safetensors.index.json", ".bin.index.json")


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
        table: which of theirs our tensors are: ``llama(config)``, say, or a dict of one's own.
        config: what ``config.json`` is to hold; or a directory of Hugging Face's, whose small files (configuration,
            tokenizer) are copied.
        max_shard_size: bytes that a file of weights may have ("5GB", "500MiB", or a number).
        options: those of ``convert``, as ``cast="bf16"``, ``overwrite=True``, ``max_memory``, ``workers``; ``select``,
            ``exclude`` and ``rename`` are about their names.

    The weights are committed atomically, as by ``convert``, and the small files follow, one by one: where the process
    dies between the two, they are missing.

    Raises MismatchError where tensors fit no rule, or several, rules fit no tensor, or theirs would have holes or
    overlaps: with all of these, before anything is written. Else what ``convert`` raises.
    """
    files = _beside(config)
    to = Safetensors(max_shard_bytes=parse_size(max_shard_size))
    done = convert(source, target, to, table=table, **options)
    root = root_at(done.target)
    for name, content in files.items():
        root.put(name, content)
    return done


def _beside(config: Mapping[str, Any] | str | Path) -> dict[str, bytes]:
    if isinstance(config, Mapping):
        return {"config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}
    folder = Path(config)
    try:
        names = [name for name in sorted(os.listdir(folder)) if name.endswith(_COPIED)]
        found = {name: (folder / name).read_bytes() for name in names if not name.endswith(_WEIGHTS)}
    except OSError as error:
        raise StorageError(f"{folder}: the files beside the weights cannot be read: {error}") from error
    if "config.json" not in found:
        raise StorageError(
            f"{folder} has no config.json: give a directory that has one, or what it is to hold"
        )
    return found
