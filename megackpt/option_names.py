"""Options that a call does not have: names of other libraries, and misspelled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import NoReturn

# The names are of orbax, Lightning, the Trainer, accelerate, torch.load and torch DCP.
_NAMES_OF_PEERS = {
    "keep_last={}": "keep max_to_keep save_total_limit total_limit",
    "keep_every={}": "keep_period",
    "keep_last=1, keep_best={}": "save_top_k",
    "keep_last=1, keep_best=3, and save(step, ..., metric=loss)": "best_fn",
    "keep_last=1, keep_best=3, best_metric={}, and save(step, ..., metrics=...)": (
        "monitor metric_for_best_model"
    ),
    'best_mode="max" or best_mode="min"': "mode best greater_is_better",
    "save_interval={}, and call save_if_due at each step": (
        "save_steps save_interval_steps every_n_train_steps"
    ),
    "asynchronous={}": "async_save is_async async_sharded_save enable_async_checkpointing",
    "CheckpointManager(directory, {}), or megackpt.save(state, directory, {})": (
        "format backend sharded_strategy"
    ),
    "CheckpointManager({}, ...)": "checkpoint_dir dirpath output_dir save_dir",
    "it once, to CheckpointManager: all steps have the same": "process_group timeout",
    "overwrite={}": "force",
    "partial={} to restore": "allow_partial_load",
    "no device: values go into the tensors that ask for them, where these are": (
        "map_location device"
    ),
    "nothing: a load runs no code of a file, and trusted=(Config,) allows a class": (
        "weights_only"
    ),
}
"""What to give, with {} for the value -> the options of other libraries that mean it."""


def meant_by(name: str, value: object, options: Iterable[str]) -> str:
    """The advice on an option that a call with these ``options`` does not have; "" if unknown."""
    for ours, theirs in _NAMES_OF_PEERS.items():
        if name in theirs.split():
            return f": give {ours.replace('{}', f'{value!r:.60}')}"
    for near in get_close_matches(name, options, 1):
        return f": did you mean {near}={value!r:.60}?"
    return ""


def refuse_options(
    call: Callable[..., object], unknown: Mapping[str, object]
) -> NoReturn:
    """Raise TypeError for an option that a call does not have, and name the right option."""
    name, value = next(iter(unknown.items()))
    advice = meant_by(name, value, signature(call).parameters)
    raise TypeError(f"{call.__name__} has no option {name}={value!r:.60}{advice}")
