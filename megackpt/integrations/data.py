"""torchdata: the position of a StatefulDataLoader, saved and restored with the model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DistributedSampler

from megackpt import MismatchError, ShardedObject
from megackpt.distributed import DEFAULT_TIMEOUT, group_over

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["LoaderState"]


class LoaderState:
    """The state of each rank's loader, as an object for ``CheckpointManager``.

    ``manager.save(step, model=model, data=LoaderState(loader))``, and the same arguments for
    ``restore``. Its methods are collective.

    At another number of ranks, or of workers, the samples that are left are divided among the
    ranks, if the loader has a ``DistributedSampler`` or torchdata's ``StatefulDistributedSampler``
    over all ranks, and its dataset has no state. Otherwise ``load_state_dict`` raises
    MismatchError with the reason, on all ranks.

    Args:
        loader: a StatefulDataLoader.
        name: a different key for each loader of a checkpoint.
        process_group: the ranks that divide the data (None: all).
    """

    def __init__(
        self,
        loader: StatefulDataLoader,
        *,
        name: str = "data",
        process_group: Any = None,
    ) -> None:
        self.loader = loader
        self._name = name
        self._process_group = process_group

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Collective."""
        with group_over(self._process_group, DEFAULT_TIMEOUT) as group:
            states = group.reduce_broadcast("data", self._own_state, list)
        replica = dist.get_rank() if dist.is_initialized() else 0
        return {"states": ShardedObject(self._name, states, (1,), (0,), replica)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the run was. Collective."""
        states = state["states"]
        with group_over(self._process_group, DEFAULT_TIMEOUT) as group:
            rank, ranks = group.rank, group.size
            group.reduce_broadcast("data", lambda: self._load(states, rank, ranks), len)

    def _own_state(self) -> dict[str, Any]:
        # Before its first batch, a loader with a loaded state does not count the samples.
        state = self.loader.next_iter_state or self.loader.state_dict()
        own = {
            "loader": state,
            "finished": state["_iterator_finished"],
            "workers": self.loader.num_workers,
            "epoch": self._epoch(),
        }
        order = self._order()
        if order is not None:
            steps = state.get("_steps_since_snapshot", 0)
            own["samples"] = self._samples(_main(state), steps)
            own["order"] = order
        return own

    def _order(self) -> dict[str, Any] | None:
        """What decides which samples come first; None if a position among them says too little."""
        sampler = self.loader.sampler
        if (
            not isinstance(sampler, DistributedSampler)
            or isinstance(self.loader.dataset, Stateful)
            or self.loader.batch_size is None
        ):
            return None
        return {
            "samples": len(self.loader.dataset),
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
            "replicas": sampler.num_replicas,
        }

    def _epoch(self) -> int:
        return int(getattr(self.loader.sampler, "epoch", 0))

    def _set_epoch(self, epoch: int) -> None:
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)

    def _samples(self, main: dict[str, Any], steps: int) -> int:
        """The number of samples that this rank has read, ``steps`` batches of them since."""
        samples: int = main["_sampler_iter_state"]["samples_yielded"]
        samples += steps * self.loader.batch_size
        return samples

    def _move(self, main: dict[str, Any], samples: int) -> None:
        main["_sampler_iter_state"]["samples_yielded"] = samples
        if isinstance(self.loader.sampler, Stateful):
            main["_sampler_iter_state"]["sampler_state"] = {"yielded": samples}

    def _load(self, states: list[dict[str, Any]], rank: int, ranks: int) -> None:
        is_same = len(states) == ranks
        own = states[rank if is_same else 0]
        is_finished = "order" in own and own["finished"]
        if is_same and own["workers"] == self.loader.num_workers and not is_finished:
            position = own["loader"]
        else:
            samples = 0  # of the next epoch, which torchdata would skip
            if not is_finished or not all(state["finished"] for state in states):
                samples = self._divided(states, ranks)
            position = self._fresh()
            self._move(_main(position), samples)
        self.loader.load_state_dict(position)
        self._set_epoch(own["epoch"])

    def _fresh(self) -> dict[str, Any]:
        """The state of the loader at the beginning of an epoch."""
        self.loader.load_state_dict({})
        return copy.deepcopy(self.loader.state_dict())

    def _divided(self, states: list[dict[str, Any]], ranks: int) -> int:
        """The number of samples that each of these ranks has behind it."""
        order = self._order()
        reason = ""
        if order is None:
            reason = "this loader has no DistributedSampler in batches, or a dataset with a state"
        elif any("order" not in state for state in states):
            reason = (
                "the saved loader had no DistributedSampler, or a dataset with a state"
            )
        elif any(
            state["order"] != order | {"replicas": len(states)} for state in states
        ):
            reason = (
                f"its order of samples was {states[0]['order']}, here it is {order}"
            )
        elif order["replicas"] != ranks:
            reason = f"the sampler divides the data among {order['replicas']} ranks"
        elif len({(state["samples"], state["finished"]) for state in states}) > 1:
            reason = "its ranks were at different positions"
        elif states[0]["samples"] * len(states) % ranks:
            whole = states[0]["samples"] * len(states)
            reason = f"the {whole} samples that it has behind it are not divisible by {ranks}"
        if reason:
            raise MismatchError(
                f"{self._name}: saved on {len(states)} ranks with {states[0]['workers']} workers, "
                f"restored on {ranks} with {self.loader.num_workers}: {reason}. Restore it as "
                f"saved, or restore without it"
            )
        return int(states[0]["samples"]) * len(states) // ranks


def _main(state: dict[str, Any]) -> dict[str, Any]:
    """The part that the loader's main process keeps; with workers it is a snapshot."""
    main: dict[str, Any] = state.get("_snapshot", {}).get("_main_snapshot", state)
    return main
