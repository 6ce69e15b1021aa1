"""A base and an adapter of PEFT become a model, one module after the other.

PEFT builds the model on the meta device and merges a module when one of its tensors is read, so
all values are PEFT's. The converter reads the result like a checkpoint.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch.nn import Module

from megackpt.backends.base import Properties, ReadOnlyBackend, Target
from megackpt.checkpoint import Opened, absolute, as_read_by, open_checkpoint
from megackpt.converter.conversion import Conversion, ConversionOptions, Converted
from megackpt.converter.selection import Selection
from megackpt.errors import CorruptCheckpoint, MismatchError
from megackpt.huggingface.export import read_config
from megackpt.huggingface.peft import (
    NOTES,
    differing,
    import_peft,
    lacking,
    names_of,
    part_of_digest,
    shown,
)
from megackpt.loader.metadata import load_common_state_dict
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import LoadPlan
from megackpt.staging.source import host_array
from megackpt.state.storable import dtype_named
from megackpt.storage import Storage
from megackpt.strategies import StrategyLike, resolve

# Other initial values of LoRA change the base, too.
_KEEP_BASE = ("true", "false", "gaussian", "eva", "orthogonal")


def merge_adapter(
    base_directory: str | Path,
    adapter_directory: str | Path,
    target: str | Path,
    model: Module | None = None,
    *,
    to: StrategyLike = "safetensors",
    check_base: bool = True,
    overwrite: bool = False,
) -> Converted:
    """Write the model that PEFT's ``merge_and_unload`` makes; on one process.

    Memory: a few times the largest module that has an adapter. The small files of the base are
    copied. All is committed together, atomically.

        merge_adapter("models/llama", "run/adapter", "merged")

    Args:
        base_directory: a model of transformers, with its ``config.json``.
        adapter_directory: of ``save_adapter``, or of PEFT.
        target: the directory to write.
        model: the base, on the meta device. None: the class that ``config.json`` names makes it.
        to, overwrite: see ``megackpt.convert``.
        check_base: first read all of the base, and compare it with the digests of the adapter.

    Raises:
        MismatchError: the adapter belongs to another base; tensors are missing, or would be left
            out; or PEFT cannot merge. The message names tensors or a module. The target is
            untouched.
        Exception: see ``megackpt.convert``, and ``save_adapter``.
    """
    peft = import_peft()
    base, adapter = open_checkpoint(base_directory), open_checkpoint(adapter_directory)
    entries = Selection(state=False).entries(base.manifest)
    if check_base:
        _check_base(base, str(adapter_directory))
    files, settings = read_config(str(base_directory))
    config = peft.PeftConfig.from_pretrained(str(adapter_directory))
    start = getattr(config, "init_lora_weights", True)
    if str(start).lower() not in _KEEP_BASE:
        raise MismatchError(
            f"{adapter_directory}: the base changes, too, with init_lora_weights={start!r}. Save "
            "it by PEFT, with path_initial_model_for_weight_conversion"
        )
    if model is None:
        model = _skeleton(settings, str(base_directory))
    tuned = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    manifest = replace(base.manifest, encoding="native")
    opened = replace(base, backend=_Merging(base, adapter, tuned), manifest=manifest)
    options = ConversionOptions(max_memory=sys.maxsize, workers=1, resume=False)
    source, backend = base.storage.location, resolve(to).make_writer()
    conversion = Conversion(opened, source, entries, backend, None, options, files)
    return conversion.run(absolute(target), overwrite)


def _skeleton(settings: Mapping[str, Any], where: str) -> Any:
    """The model of a configuration of transformers, on the meta device."""
    try:
        transformers = importlib.import_module("transformers")
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(**settings)
            return getattr(transformers, settings["architectures"][0])(config)
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise MismatchError(
            f"{where}: no class of transformers for its config.json: {error!r}. Give the model, on "
            "the meta device, as model="
        ) from error


def _check_base(base: Opened, adapter: str) -> None:
    """Read the tensors of a base that the adapter names, one at a time, and compare them."""
    digests = {}
    problems = []
    try:
        stored = load_common_state_dict(adapter).get(NOTES, {}).get("base")
        for entry in base.manifest.tensors:
            if entry.key in (stored or ()):
                whole = Box.whole(entry.meta.shape)
                digest = part_of_digest(entry, whole, _tensor(base, entry.key))
                digests[entry.key] = shown(digest)
        if digests:  # files lack tied tensors
            stored = {key: stored[key] for key in digests}
        problems = differing(digests, stored, adapter)
    except (AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{adapter}: notes on adapters: {error}") from error
    if problems:
        raise MismatchError(f"{base.storage.called}: {problems[0]}")


class _Merging(ReadOnlyBackend):
    """Reads the tensors of ``base``, merged with those of ``adapter``.

    ``tuned``: the PeftModel, on the meta device.
    """

    properties: ClassVar[Properties] = Properties("merged", 1, (), read_only=True)

    def __init__(self, base: Opened, adapter: Opened, tuned: Any) -> None:
        self.base = base
        self.adapter = adapter
        self.pieces = {"adapter": adapter.manifest.save_id}  # in the id of the save
        self.merged: dict[str, torch.Tensor] = {}
        self.modules: dict[str, Any] = {}
        for name, module in tuned.get_base_model().named_modules():
            # PEFT replaces these. What is in such a module belongs to it.
            is_tuned = hasattr(module, "base_layer") or hasattr(module, _UNLOAD)
            if is_tuned and not self.owner(name):
                self.modules[name] = module
        self.names = {
            key: name.removeprefix("base_model.model.")
            for key, name in names_of(tuned, "default", tuned.state_dict()).items()
        }
        originals = import_peft().get_base_model_state_dict(tuned)
        self.changed = {name for name in originals if self.owner(name)}
        self.changed.update(n for n in self.names.values() if not self.owner(n))
        keys = adapter.manifest.numbers()
        stored = {key for key in keys if key.startswith("base_model.")}
        problems = [
            *lacking("the base", self.changed - base.manifest.numbers().keys()),
            *lacking("the adapter", self.names.keys() - stored),
            *lacking("the model", stored - self.names.keys()),
        ]
        if problems:
            raise MismatchError(f"nothing is merged: {'; '.join(problems)}")

    def owner(self, name: str) -> str:
        """The module with an adapter that has this tensor or module, or ""."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        reader = self.base.backend
        for row, item in enumerate(plan.rows()):
            key = item.entry.key
            if key not in self.changed:
                part = plan.take([row])
                reader.read(as_read_by(reader, root), part, into, verify)
                continue
            if key not in self.merged:
                self.merged = self._merge(key)
            inside: Any = (*item.box.slices(), ...)
            tensor = self.merged[key].to(dtype_named(item.entry.meta.dtype))
            array = into.open(item.target, item.box)
            array[...] = host_array(tensor.contiguous())[inside]
            into.close(item.target, item.box, array)

    def read_manifest(self, root: Storage) -> NoReturn:  # noqa: ARG002
        self._refuse()

    def _merge(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of the module that has this one, merged by PEFT."""
        owner = self.owner(key)
        prefix = f"{owner}."
        added = {
            name: _tensor(self.adapter, stored)
            for stored, name in self.names.items()
            if name == key or name.startswith(prefix)
        }
        if not owner:
            return added
        names = [name for name in self.changed if name.startswith(prefix)]
        tensors = {
            name.removeprefix(prefix): _tensor(self.base, name) for name in names
        }
        try:
            module = copy.deepcopy(self.modules[owner])
            inner = getattr(module, "original_module", None) or module.get_base_layer()
            inner.load_state_dict(tensors, assign=True)
            merged = _unloaded(
                module, {n.removeprefix(prefix): t for n, t in added.items()}
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise MismatchError(f"PEFT cannot merge {owner!r}: {error}") from error
        return {prefix + name: tensor for name, tensor in merged.items()}


_UNLOAD = "unload_and_optionally_merge_module"


def _unloaded(
    module: Any, added: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of the plain module that PEFT makes of this one and its adapter."""
    tensors = {}
    for name, tensor in added.items():
        tensors[name] = tensor
        # PEFT computes with adapters of low precision in float32.
        if tensor.dtype in (torch.float16, torch.bfloat16) and "base_layer" not in name:
            tensors[name] = tensor.float()
    module.load_state_dict(tensors, strict=False, assign=True)
    with torch.no_grad():
        if hasattr(module, _UNLOAD):
            return dict(getattr(module, _UNLOAD)(True, False, None).state_dict())
        module.merge()
        return dict(module.get_base_layer().state_dict())


def _tensor(opened: Opened, key: str) -> torch.Tensor:
    """A whole tensor of a checkpoint."""
    number = opened.manifest.numbers()[key]
    shape, dtype = opened.manifest.tensors[number].meta
    [array] = Regions(opened).arrays([(number, Box.whole(shape))])
    octets = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return octets.view(dtype_named(dtype)).reshape(shape)
