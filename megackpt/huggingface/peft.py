"""Adapters of PEFT, saved and loaded by all ranks at any layout, in the directory that PEFT opens.

    adapter_model.safetensors, adapter_config.json    the adapter "default"
    NAME/ with the same files                         each other adapter
    optimizer.safetensors                             the state of the optimizer, by parameter
    common.pt                                         its hyperparameters; digests of the base
    megackpt.index                                    names all of these

The directory is one checkpoint, so one commit completes it.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from megackpt.adapters.dtensor import sharded
from megackpt.adapters.megatron import from_megatron
from megackpt.async_save import AsyncRequest
from megackpt.backends.base import Finished, Layout
from megackpt.backends.safetensors import INDEX, WHOLE, Safetensors
from megackpt.backends.safetensors.headers import TensorFile, refuse_unfit, tensor_file
from megackpt.distributed import DEFAULT_TIMEOUT, Group, GroupLike, attempt, group_over
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    MismatchError,
    NonfiniteValues,
    ReplicaMismatch,
    ShardingError,
    join_truncated,
)
from megackpt.loader.comparison import StateOfStored
from megackpt.loader.load_operation import load
from megackpt.manager.optimizer_state import (
    NamedOptimizer,
    local_tensor,
    stored_values,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
)
from megackpt.planning.tensor_digest import MODULUS, digest_of, word_dtype
from megackpt.saver.save_operation import save
from megackpt.staging.source import pieces
from megackpt.state import ShardedStateDict, declare, extract
from megackpt.storage import Storage
from megackpt.strategies import CheckValues, as_strategy

logger = logging.getLogger("megackpt.huggingface")

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_OPTIMIZER = "optimizer"
_TENSORS = "tensors of the optimizer"
NOTES = "adapters"
"""Key of the common state: the base, the settings of adapters, and what the caller adds."""
_SETTINGS = (
    "peft_type",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
)
"""Settings that change the effect of equal tensors."""
_NAMED = 6
"""Tensors that a message names."""

_bases: WeakKeyDictionary[Module, tuple[Any, dict[str, str]]] = WeakKeyDictionary()
"""Model -> addresses and versions of the tensors of its base, and their digests."""


def save_adapter(
    model: Module,
    directory: str | Path,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    check_base: bool = True,
    check_values: CheckValues = "raise",
    process_group: GroupLike = None,
    **options: Any,
) -> AsyncRequest | None:
    """Save the adapters of a PeftModel, and the state of their optimizer; collective.

    No tensor is gathered, and nothing of the base is stored but digests. All files are committed
    together, atomically.

        save_adapter(model, "run/adapter", optimizer, extra={"step": step})

    Args:
        model: a PeftModel, on each rank; plain, in DistributedDataParallel, or with DTensors
            (FSDP2, tensor parallelism).
        directory: ``PeftModel.from_pretrained`` opens it, and ``directory/NAME`` for an adapter
            with another name than "default".
        optimizer: of parameters of the adapters.
        extra: small values that ``load_adapter`` returns, such as the state of a scheduler.
        check_base: store digests of the base. They are computed once, as long as the base does
            not change. False: no load can recognise another base.
        check_values: see ``Strategy``.
        options: of ``megackpt.save``, such as ``async_sharded_save=True``.

    Raises:
        ShardingError: a parameter is trained that no adapter contains, or PEFT computes stored
            tensors from several tensors.
        ReplicaMismatch, NonfiniteValues: ranks have different values of one shard or different
            bases, or values are NaN or infinite. The former checkpoint stays.
        BackendError: PEFT is not installed.
        Exception: see ``megackpt.save``.
    """
    adapted = _adapted(model, optimizer, check_base, process_group, options, True)
    notes = {"base": adapted.base, "settings": adapted.settings, "extra": extra}
    state = adapted.declared() | {NOTES: notes}
    state |= sharded(adapted.saved, among=adapted.among)
    strategy = as_strategy(AdapterFiles(configs=adapted.configs))
    strategy = replace(strategy, audit="full", check_values=check_values)
    return save(state, directory, strategy, process_group=process_group, **options)


def load_adapter(
    model: Module,
    directory: str | Path,
    optimizer: Optimizer | None = None,
    *,
    check_base: bool = True,
    process_group: GroupLike = None,
    **options: Any,
) -> Any:
    """Load the adapters of a PeftModel in place, at any layout; collective.

    Names, shapes, settings, the base and the optimizer are compared with the stored ones before a
    tensor changes. The base is not changed.

        step = load_adapter(model, "run/adapter", optimizer)["step"]

    Args:
        model: see ``save_adapter``. It has the same adapters as the directory.
        directory: of ``save_adapter``, or of PEFT's ``save_pretrained``, which names no base.
        optimizer: gets its state back. None: its stored state is left out, with a WARNING.
        check_base: compare the base with the stored digests.
        options: of ``megackpt.load``.

    Returns:
        The ``extra`` that was saved.

    Raises:
        MismatchError: the base, an adapter, a setting or the optimizer differs. The message names
            tensors. Nothing is changed.
        NonfiniteValues: a loaded adapter has NaN or infinite values.
        Exception: see ``megackpt.load``, and ``save_adapter``.
    """
    adapted = _adapted(model, optimizer, check_base, process_group, options)
    compare = partial(adapted.compare, str(directory))
    stored = StateOfStored((f"{_OPTIMIZER}.",), compare)
    loaded = load(stored, directory, process_group=process_group, **options)
    with _group(process_group, options) as group:
        found = group.reduce_broadcast(
            "adapters", partial(adapted.load, loaded), _union
        )
    if found:
        raise NonfiniteValues(
            f"{directory}: loaded tensors have NaN or infinite values: {listed(found)}. Load an "
            "earlier checkpoint"
        )
    return loaded.get(NOTES, {}).get("extra")


@dataclass(frozen=True)
class AdapterFiles(Safetensors):
    """Writes tensors of adapters into PEFT's files. The index has their places for any reader.

    ``configs``: file -> content. A key ``NAME/KEY`` is of the adapter with ``NAME/{_CONFIG}``.
    """

    configs: Mapping[str, bytes] = field(default_factory=dict)

    def layout(self, ranks: int, manifest: Manifest) -> Layout:
        layout = super().layout(ranks, manifest)
        names = {name.partition("/")[0] for name in (*layout.files, *self.configs)}
        return replace(layout, files=sorted(names - {WHOLE, INDEX}))

    def arranged(self, contents: Manifest | SavePlan) -> list[TensorFile]:
        refuse_unfit(contents.tensors)
        parts: defaultdict[str, list[tuple[str, TensorEntry]]] = defaultdict(list)
        for entry in contents.tensors:
            name, key = _WEIGHTS, entry.key
            adapter, _, inner = key.partition("/")
            if key.startswith(f"{_OPTIMIZER}."):
                name = f"{_OPTIMIZER}.safetensors"
            elif f"{adapter}/{_CONFIG}" in self.configs:
                name, key = f"{adapter}/{_WEIGHTS}", inner
            if not entry.meta.is_object:
                parts[name].append((entry.key, TensorEntry(key, entry.meta)))
        files = []
        for name, part in parts.items():
            file = tensor_file(name, [entry for _, entry in part])
            places = {outer: file.places[entry.key] for outer, entry in part}
            files.append(replace(file, places=places))
        return files

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        finished = super().finish(root, manifest)
        files = {**finished.files, **self.configs}
        files.pop(INDEX, None)  # a directory of adapters has no such index
        return replace(finished, files=files)


class _Adapted:
    """A model with adapters on this rank.

    Attributes:
        tensors: key in the checkpoint -> tensor of an adapter.
        configs: file -> content.
        settings: file -> those of _SETTINGS.
        frozen: name of a tensor of the base, without PEFT's parts -> tensor.
        live: the tensors of the base that the model has, whose versions count changes.
        base: digests of these tensors, if they are known.
        saved: the state of the optimizer, for a save.
    """

    base: dict[str, str] | None = None
    optimizer: NamedOptimizer | None = None

    def __init__(
        self, model: Module, optimizer: Optimizer | None, among: Any, saving: bool
    ) -> None:
        peft = import_peft()
        self.among = among
        self.model = _unwrapped(model, peft)
        self.tensors: dict[str, torch.Tensor] = {}
        self.configs: dict[str, bytes] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        held = self.model.state_dict(keep_vars=True)
        for adapter, config in self.model.peft_config.items():
            folder = f"{adapter}/"
            if "/" in adapter:
                raise ShardingError(
                    f"the adapter {adapter!r} needs the name of a folder"
                )
            if adapter == "default":
                folder = ""
            fields = _config(self.model, config)
            text = json.dumps(fields, indent=2, sort_keys=True, default=sorted)
            self.configs[folder + _CONFIG] = text.encode()
            settings = {name: fields[name] for name in _SETTINGS if name in fields}
            self.settings[folder + _CONFIG] = json.loads(json.dumps(settings))
            for key, name in names_of(self.model, adapter, held).items():
                self.tensors[folder + key] = held[name]
        saved = set(map(_address, self.tensors.values()))
        trained = [
            name
            for name, param in self.model.named_parameters()
            if param.requires_grad and _address(param) not in {0, *saved}
        ]
        if trained:
            raise ShardingError(
                f"parameters are trained that no adapter contains: {listed(trained)}. Name their "
                "modules in modules_to_save, or freeze them"
            )
        self.frozen = {
            name: value
            for name, value in peft.get_base_model_state_dict(self.model).items()
            if isinstance(value, torch.Tensor) and _address(value) not in saved
        }
        self.live = [
            value
            for value in held.values()
            if isinstance(value, torch.Tensor) and _address(value) not in saved
        ]
        addresses, base = _bases.get(self.model, (None, None))
        if addresses == self.stamps():
            self.base = base
        if optimizer is not None:
            names = {id(value): name for name, value in held.items()}
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if not names.keys() >= set(map(id, params)):
                raise ShardingError("the optimizer has parameters of another model")
            self.optimizer = NamedOptimizer(_OPTIMIZER, optimizer, "model", names)
        self.saved: dict[str, Any] = {}
        if saving and self.optimizer is not None:
            self.saved = {_OPTIMIZER: self.optimizer.saved()}

    def declared(self) -> ShardedStateDict:
        return sharded({**self.tensors}, among=self.among)

    def stamps(self) -> list[Any]:
        """What differs after each change to the base: addresses and versions of its tensors."""
        return [stamp for tensor in self.live for stamp in _stamps(tensor)]

    def digests(self) -> dict[ShardId, int]:
        """The parts that this rank's shards of the base have in its digests."""
        state = sharded(self.frozen, among=self.among)
        shards: Any = extract(state, from_megatron).shards
        found = {}
        rows = declare(shards, rank=0, saving=True).rows()
        for shard, row in zip(shards, rows, strict=True):
            entry = TensorEntry(shard.key, row.meta)
            found[row.shard] = part_of_digest(entry, row.shard.box, shard.data)
        return found

    def compare(
        self, directory: str, manifest: Manifest, values: Mapping[str, Any]
    ) -> tuple[ShardedStateDict, list[str]]:
        """Declare what to load. Raises MismatchError for what differs."""
        prefix = f"{_OPTIMIZER}."
        metas = {key: meta for key, meta in manifest.tensors if not meta.is_object}
        stored = {key for key in metas if not key.startswith(prefix)}
        problems = [
            *lacking("the checkpoint", self.tensors.keys() - stored),
            *lacking("the model", stored - self.tensors.keys()),
        ]
        common = values.get(COMMON_KEY, {})
        try:
            problems += self._differing(directory, **common.get(NOTES, {}))
        except (AttributeError, TypeError) as error:
            raise CorruptCheckpoint(
                f"{directory}: notes on adapters: {error}"
            ) from error
        if problems:
            raise MismatchError(f"{directory} does not fit: {'; '.join(problems)}")
        state = self.declared()
        if self.optimizer is None:
            return state, []
        moments = {
            key.removeprefix(prefix): meta
            for key, meta in metas.items()
            if key not in stored
        }
        groups = stored_values(common.get(_OPTIMIZER), {})
        wanted = self.optimizer.compare(groups, moments, None)
        state[_TENSORS] = sharded(dict(wanted), prefix, among=self.among)
        return state, [prefix + key for key in self.optimizer.settled]

    def _differing(
        self, directory: str, settings: Any = None, base: Any = None, **_: Any
    ) -> list[str]:
        problems = []
        for file, own in self.settings.items():
            before = (settings or {}).get(file, own)
            if before != own:
                problems.append(
                    f"{file} was saved with {before}, and the model has {own}"
                )
        if self.base is not None:
            problems += differing(self.base, base, directory)
        return problems

    def load(self, loaded: Mapping[str, Any]) -> list[str]:
        """Give the optimizer its state. Returns the adapters' tensors that are not finite."""
        if self.optimizer is not None:
            self.optimizer.load(loaded.get(_TENSORS, {}))
            if self.optimizer.match.changes:
                logger.warning(
                    "the optimizer was saved otherwise: %s",
                    self.optimizer.match.changes,
                )
        return [
            key
            for key, tensor in self.tensors.items()
            if not local_tensor(tensor).isfinite().all()
        ]


def _group(process_group: GroupLike, options: Mapping[str, Any]) -> Group:
    return group_over(
        process_group, options.get("timeout", DEFAULT_TIMEOUT), "adapters"
    )


def _adapted(
    model: Module,
    optimizer: Optimizer | None,
    check_base: bool,
    process_group: GroupLike,
    options: Mapping[str, Any],
    saving: bool = False,
) -> _Adapted:
    """The model on this rank, with digests of its base; collective."""
    among = None
    if isinstance(process_group, dist.ProcessGroup):
        among = dist.get_process_group_ranks(process_group)
    with _group(process_group, options) as group:
        made = attempt(lambda: _Adapted(model, optimizer, among, saving))
        known = group.reduce_broadcast(
            "adapters", lambda: made.get().base is not None or not check_base, all
        )
        adapted = made.get()
        if not known:
            adapted.base = group.reduce_broadcast("base", adapted.digests, _summed)
            _bases[adapted.model] = adapted.stamps(), adapted.base
        if not check_base:
            adapted.base = None
        return adapted


def part_of_digest(entry: TensorEntry, box: Box, tensor: torch.Tensor) -> int:
    """The part of a tensor's digest that a box of it has, whose elements are in ``tensor``."""
    total = first = 0
    for block in pieces(tensor):
        words = np.frombuffer(block, word_dtype(entry.meta.itemsize))
        total += digest_of(entry, box, words, first=first)
        first += len(words)
    return total


def shown(digest: int) -> str:
    return f"{digest % MODULUS:032x}"


def lacking(holder: str, keys: Collection[str]) -> list[str]:
    """A text for a message, if there are keys."""
    return [f"{holder} lacks {listed(sorted(keys))}"] if keys else []


def differing(
    own: Mapping[str, str], stored: Mapping[str, str] | None, where: str
) -> list[str]:
    """A text for a message, if digests of a base differ from the stored ones."""
    if stored is None:
        logger.warning("%s names no base: the base is not compared", where)
        return []
    names = [n for n in sorted({*own, *stored}) if own.get(n) != stored.get(n)]
    if not names:
        return []
    text = f"{where} was trained on another base: {len(names)} of {len(own)} tensors differ"
    return [f"{text}: {listed(names)} (check_base=False does not compare it)"]


def _summed(parts: list[dict[ShardId, int]]) -> dict[str, str]:
    """The digests of all tensors. Raises ReplicaMismatch if ranks have different bases."""
    shards: dict[ShardId, int] = {}
    differing = [
        shard.key
        for part in parts
        for shard, digest in part.items()
        if shards.setdefault(shard, digest) != digest
    ]
    if differing:
        raise ReplicaMismatch(
            f"ranks have different bases: their values differ in {listed(_union([differing]))}"
        )
    total: defaultdict[str, int] = defaultdict(int)
    for shard, digest in shards.items():
        total[shard.key] += digest
    return {key: shown(digest) for key, digest in total.items()}


def import_peft() -> Any:
    """PEFT. Raises BackendError if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise BackendError("adapters need PEFT: pip install peft") from error


def _unwrapped(model: Any, peft: Any) -> Any:
    """The PeftModel in DistributedDataParallel or a compiled module."""
    inner = model
    while not isinstance(inner, peft.PeftModel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise ShardingError(f"a PeftModel is expected, not {type(model).__name__}")
    return inner


def names_of(model: Any, adapter: str, held: Mapping[str, Any]) -> dict[str, str]:
    """PEFT's keys of an adapter -> names in ``held``. No tensor is touched or gathered."""
    try:
        # PEFT selects and renames the entries. Here an entry is its name.
        entries = {name: name for name in held}
        names = import_peft().get_peft_model_state_dict(model, entries, adapter)
        computed = [key for key, name in names.items() if not isinstance(name, str)]
        if computed:
            raise TypeError(f"it computes {listed(computed)}")
    except (AttributeError, KeyError, TypeError) as error:
        kind = model.peft_config[adapter].peft_type
        raise ShardingError(
            f"the adapter {adapter!r} of the type {kind} cannot be saved, as PEFT does not store "
            f"its tensors as they are: {error!r}"
        ) from error
    return dict(names)


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor of this rank is; 0 without elements."""
    return local_tensor(tensor).data_ptr()


def _stamps(tensor: torch.Tensor) -> list[Any]:
    """The address and the version of a tensor, and of the tensors that it wraps."""
    version = None if tensor.is_inference() else tensor._version
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.data_ptr(), version]
    names, _ = tensor.__tensor_flatten__()
    # A DTensor names its mesh, too.
    inner = [getattr(tensor, name) for name in names]
    tensors = [part for part in inner if isinstance(part, torch.Tensor)]
    return [version, *(stamp for part in tensors for stamp in _stamps(part))]


def _config(model: Any, config: Any) -> dict[str, Any]:
    """The content of adapter_config.json, as ``PeftModel.save_pretrained`` writes it."""
    base = model.get_base_model()
    fields = {**config.to_dict(), "inference_mode": True}
    if fields["base_model_name_or_path"] is None:
        fields["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    if config.task_type is None:
        fields["auto_mapping"] = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    return fields


def listed(names: list[str]) -> str:
    return join_truncated(list(map(repr, names)), _NAMED, ", ")


def _union(parts: list[list[str]]) -> list[str]:
    return sorted({name for part in parts for name in part})
