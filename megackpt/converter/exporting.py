"""A training checkpoint as a directory that Hugging Face's libraries open: weights by a table, and the files beside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megackpt.backends.safetensors import Safetensors
from megackpt.converter.asking import convert
from megackpt.converter.budget import parse_size
from megackpt.converter.order import Converted
from megackpt.converter.selecting import Choice
from megackpt.errors import MismatchError, StorageError, join_truncated
from megackpt.planning.manifest import Manifest, TensorEntry

if TYPE_CHECKING:
    from megackpt.adapters.huggingface import Table

_LEFT = (  # weights, and what a training or an earlier export keeps for itself
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx*", "*.ot", "*.tflite",
    "*.npz", "*.distcp", "*.index.json", "*.index.*.json", "trainer_state.json", "metadata.json", "megackpt.*",
    "*.old", "*.old[0-9]*", ".*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # in a folder of their own, as transformers 5 keeps them
_LARGEST = 1 << 30
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NESTED = ("text_config", "llm_config", "language_config")
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
        config: what ``config.json`` is to hold; or a directory of Hugging Face's, of which everything is copied but
            weights and the state of a training: its ``dtype`` becomes what is exported.
        max_shard_size: bytes that a file of weights may have ("5GB", "500MiB", or a number).
        options: those of ``convert``, as ``cast="bf16"``, ``overwrite=True``, ``max_memory``, ``workers``; ``select``,
            ``exclude`` and ``rename`` are about their names.

    Weights and files are committed atomically, as by ``convert``. Where the target has a file with the name of one that
    is copied and other bytes, as of an earlier export, the export is refused (StorageError): move that file away.

    Raises MismatchError where tensors fit no rule, or several, rules fit no tensor, layers or experts are missing
    between others, or theirs would have holes or overlaps, or fewer layers than the configuration tells: with all of
    these, before anything is written. Else what ``convert`` raises.
    """
    to = Safetensors(max_shard_bytes=parse_size(max_shard_size))
    files, told = _beside(config)

    def fitted(manifest: Manifest) -> dict[str, bytes]:
        _refuse_missing_layers((entry.key for entry in manifest.tensors), told)
        dtypes = _dtypes(manifest.tensors, options.get("cast"))
        noted = {"dtype", "torch_dtype"}.intersection(told)
        if noted and len(dtypes) == 1 and not isinstance(config, Mapping):
            files["config.json"] = _json({**told, **dict.fromkeys(noted, *dtypes)})
        return files

    return convert(source, target, to, table=table, beside=fitted, **options)


def _beside(
    config: Mapping[str, Any] | str | Path,
) -> tuple[dict[str, bytes], Mapping[str, Any]]:
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
        found = {
            str(path.relative_to(folder)): path.read_bytes() for path in _copied(folder)
        }
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"{folder}: the files beside the weights cannot be read: {error}. Give a directory that has a "
            "config.json, or what it is to hold"
        ) from error
    return found, told if isinstance(told, Mapping) else {}


def _copied(folder: Path) -> Iterator[Path]:
    """What is no weights of the model; with the weights of what sentence-transformers puts after it (modules.json)."""
    modules = folder / "modules.json"
    named = (
        {entry["path"] for entry in json.loads(modules.read_bytes())}
        if modules.is_file()
        else {""}
    )
    if "" not in named:
        raise ValueError(
            f"by its modules.json the model is in a folder of its own, one of {sorted(named)}"
        )
    for path in sorted(folder.iterdir()):
        inside = (
            sorted(path.iterdir())
            if path.is_dir() and path.name in {*named, _TEMPLATES}
            else [path]
        )
        for file in filter(Path.is_file, inside):
            if file is path and any(
                fnmatchcase(file.name, pattern) for pattern in _LEFT
            ):
                continue
            if file.stat().st_size > _LARGEST:
                raise ValueError(
                    f"{file.name} is too large to be copied: move it out of the way"
                )
            yield file


def _refuse_missing_layers(keys: Iterable[str], told: Mapping[str, Any]) -> None:
    """MismatchError where the configuration tells of more layers than any stack of them has, among these tensors."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.match, keys)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    inner = [part for name in _NESTED if isinstance(part := told.get(name), Mapping)]
    counts = {
        n: name
        for part in (*inner, told)
        for name in _COUNTS
        if type(n := part.get(name)) is int
    }
    for count, name in counts.items() if numbers else ():
        most = max(
            numbers, key=lambda stack: len(numbers[stack].intersection(range(count)))
        )
        if missing := [
            f"{most}{n}" for n in range(min(count, 10**6)) if n not in numbers[most]
        ]:
            raise MismatchError(
                f"the configuration's {name} is {count}, and the checkpoint has nothing for "
                + join_truncated(missing, separator=", ")
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
