"""Export of a training checkpoint to a directory that Hugging Face's libraries open."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, TypedDict, Unpack

from megackpt import limits, serialization
from megackpt.backends.safetensors import Safetensors
from megackpt.checkpoint import open_checkpoint
from megackpt.converter.budget import parse_size
from megackpt.converter.conversion import Converted, Progress
from megackpt.converter.conversion_request import convert
from megackpt.converter.selection import Renames, Selection
from megackpt.errors import (
    CorruptCheckpoint,
    MismatchError,
    StorageError,
    join_truncated,
)
from megackpt.huggingface.table_links import Table
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import Manifest, TensorEntry

# Weights, and files of a training or of an earlier export.
_NOT_COPIED = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf",
    "*.onnx*", "*.ot", "*.tflite", "*.npz", "*.distcp", "*.index.json", "*.index.*.json",
    "trainer_state.json", "metadata.json", "megackpt.*", "*.old", "*.old[0-9]*", ".*",
)  # fmt: skip
# transformers 5 keeps chat templates in this folder.
_TEMPLATES = "additional_chat_templates"
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NESTED_CONFIGS = ("text_config", "llm_config", "language_config")
_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|h|blocks?)\.)(\d{1,9})\.")


class ExportOptions(TypedDict, total=False):
    """The options of ``convert`` that an export takes."""

    overwrite: bool
    verify: bool
    verify_target: bool
    max_memory: str | int
    workers: int | None
    select: str | Iterable[str]
    exclude: str | Iterable[str]
    rename: Renames
    cast: object
    state: bool
    shards: int | None
    progress: Progress | None
    resume: bool


def export_huggingface(
    source: str | Path,
    target: str | Path,
    table: Table | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    prefix: str = "model.",
    max_shard_size: str | int = "5GB",
    index: bool = False,
    **options: Unpack[ExportOptions],
) -> Converted:
    """Write a training checkpoint as ``model.safetensors`` (or several files) and its config.

    Weights and files are committed together, atomically. The export is refused if the target has a
    file with the name of a copied file and other bytes, or weights of an earlier export without
    ``index``. Move these files away first.

    Args:
        source: a checkpoint of any format.
        target: the directory to write.
        table: maps our tensors to Hugging Face's: for example ``llama(config)``, or a custom dict.
            None: the checkpoint is of a model of transformers, and its tensors have the names of
            the model behind ``prefix``. All other tensors are left out.
        config: the content of ``config.json``; that file; or a directory of a Hugging Face model.
            All files of a directory are copied except weights and the state of a training, and the
            ``dtype`` of its config becomes the exported one. None: the files that our Trainer and
            Accelerator have stored in the checkpoint.
        prefix: used without a ``table``. A CheckpointManager gives it to the object ``model``.
        max_shard_size: the most bytes of a file of weights ("5GB", "500MiB", or a number).
        index: write ``megackpt.index``, too. With it ``verify`` checks the contents, and
            ``overwrite=True`` replaces the export.
        options: of ``convert``, such as ``cast="bf16"`` or ``overwrite=True``; ``select``,
            ``exclude`` and ``rename`` work on Hugging Face's names.

    Raises:
        MismatchError: tensors match no rule or several, rules match no tensor, Hugging Face's
            tensors would have holes or overlaps, or layers are missing. It lists all problems. The
            target is untouched.
        StorageError: a file in the way, or the directory of ``config`` cannot be read.
        Exception: see ``convert``.
    """
    to = Safetensors(max_shard_bytes=parse_size(max_shard_size), index=index)
    if config is None:
        files, settings = _stored_files(source)
    else:
        files, settings = read_config(config)
    if table is None:
        # An option that is given twice is a TypeError.
        chosen = ExportOptions(
            select=f"{prefix}*", rename={f"{prefix}*": "*"}, state=False
        )
        options = ExportOptions(**chosen, **options)
    else:
        prefix = ""

    def files_for(manifest: Manifest) -> dict[str, bytes]:
        tensors = [e for e in manifest.tensors if e.key.startswith(prefix)]
        _check_layers(tensors, settings)
        named = {"dtype", "torch_dtype"}.intersection(settings)
        dtypes = {e.meta.dtype for e in tensors if "float" in e.meta.dtype}
        cast = Selection(cast=options.get("cast")).cast
        if dtypes and cast:
            dtypes = {cast}
        if named and len(dtypes) == 1 and not isinstance(config, Mapping):
            exported = {**settings, **dict.fromkeys(named, *dtypes)}
            files["config.json"] = _encode_config(exported)
        return files

    return convert(source, target, to, table=table, beside=files_for, **options)


def _stored_files(
    source: str | Path,
) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """Return the small files that a Trainer has stored in its checkpoint, and its settings."""
    opened = open_checkpoint(source)
    number = opened.manifest.numbers().get("files")
    stored: Any = {}
    if number is not None and opened.manifest.tensors[number].meta.shape == (1,):
        blob = Regions(opened).blobs([(number, Box((0,), (1,)))])[0]
        stored = serialization.load(blob, where=f"{source}: 'files'")
        if type(stored) is list and len(stored) == 1:
            stored = stored[0]  # of several objects of this key on a rank
    if type(stored) is not dict or "config.json" not in stored:
        raise MismatchError(
            f"{source} holds no config.json. Give the directory of the model, or its config.json, "
            "as config (--config)"
        )
    files: dict[str, bytes] = {}
    for name, data in stored.items():
        base = str(name).removeprefix(f"{_TEMPLATES}/")
        if (
            type(name) is not str
            or base != os.path.basename(base)
            or base in ("", ".", "..")
            or type(data) is not bytes
        ):
            raise CorruptCheckpoint(
                f"{source}: the entry {name!r} of {type(data).__name__} is not a small file of a "
                "model, which has bytes, and a name without a directory"
            )
        if not any(fnmatchcase(name, pattern) for pattern in _NOT_COPIED):
            files[name] = data
    try:
        return files, dict(json.loads(files["config.json"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{source}: its config.json: {error}") from error


def read_config(
    config: object,
) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """Return the small files to export, and the settings in ``config.json``."""
    if isinstance(config, Mapping):
        return {"config.json": _encode_config(config)}, config
    if not isinstance(config, str | Path):
        kind = type(config).__name__
        raise MismatchError(
            f"config is a dict (config.to_dict()) or a directory, not a {kind}"
        )
    folder = Path(config)
    files: dict[str, bytes] = {}
    try:
        if folder.is_file():
            files["config.json"] = folder.read_bytes()
            settings = json.loads(files["config.json"])
        else:
            settings = json.loads((folder / "config.json").read_bytes())
            for path in _files_to_copy(folder):
                files[str(path.relative_to(folder))] = path.read_bytes()
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{folder}: the files of the model cannot be read: {error}. Give a directory that has "
            "a config.json, or the content of config.json as a dict"
        ) from error
    return files, settings if isinstance(settings, Mapping) else {}


def _files_to_copy(folder: Path) -> Iterator[Path]:
    """Yield all files but weights; of modules of sentence-transformers also the weights."""
    # modules.json lists the model itself (path "") and what follows it, in folders.
    modules = {""}
    if (folder / "modules.json").is_file():
        listed = json.loads((folder / "modules.json").read_bytes())
        modules = {entry["path"] for entry in listed}
    if "" not in modules:
        raise ValueError(
            f"its modules.json says that the model is in one of the folders {sorted(modules)}"
        )
    files: list[Path] = []
    for path in folder.iterdir():
        if path.name in {*modules, _TEMPLATES} and path.is_dir():
            files += path.iterdir()
        elif not any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED):
            files.append(path)
    for file in sorted(files):
        if not file.is_file():
            continue
        if file.stat().st_size > limits.EXPORT_FILE_BYTES:
            raise ValueError(f"{file.name} is too large to be copied: move it away")
        yield file


def _check_layers(tensors: Iterable[TensorEntry], settings: Mapping[str, Any]) -> None:
    """Raise MismatchError if the config counts more layers than any stack of layers has."""
    layers: defaultdict[str, set[int]] = defaultdict(set)
    for entry in tensors:
        if match := _LAYER.match(entry.key):
            layers[match[1]].add(int(match[2]))
    if not layers:
        return
    nested = [settings.get(name) for name in _NESTED_CONFIGS]
    for part, name in product([*nested, settings], _LAYER_COUNTS):
        if isinstance(part, Mapping) and type(part.get(name)) is int:
            count = part[name]
            # A model may have several stacks, as encoder and decoder: one must be complete.
            wanted = range(min(count, 10**6))
            stack = max(layers, key=lambda s: len(layers[s].intersection(wanted)))
            missing = [f"{stack}{n}" for n in wanted if n not in layers[stack]]
            if missing:
                raise MismatchError(
                    f"the configuration's {name} is {count}, and the checkpoint has nothing for "
                    + join_truncated(missing, separator=", ")
                )


def _encode_config(config: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(dict(config), indent=2, ensure_ascii=False)
        return f"{text}\n".encode()
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"config.json cannot hold this config: {error} (name a dtype as 'bfloat16')"
        ) from error
