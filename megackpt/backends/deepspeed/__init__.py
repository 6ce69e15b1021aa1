"""DeepSpeed's checkpoints: ZeRO-1, 2 and 3 (version 1), and universal ones (version 2).

    latest                                                 the name of the run's last step
    <step>/mp_rank_00_model_states.pt                      the module and Python state; of ZeRO-3:
    <step>/zero_pp_rank_<N>_mp_rank_00_model_states.pt     the same of each rank
    <step>/[bf16_]zero_pp_rank_<N>_mp_rank_00_optim_states.pt    flat partitions of each rank
    <step>/zero/<parameter>/fp32.pt, exp_avg.pt, ...       universal: whole tensors

The keys are ``module.<name>`` for the weights of the module, ``fp32.<name>`` for the master
weights, and ``<state>.<name>`` for the state of the optimizer, such as ``exp_avg.<name>``.

Source: deepspeed 0.19.8, runtime/engine.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py,
runtime/bf16_optimizer.py, utils/zero_to_fp32.py and checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from typing import ClassVar

from megackpt.backends import torch_reader
from megackpt.backends.base import Properties, ReadOnlyBackend
from megackpt.backends.deepspeed import step_files
from megackpt.backends.deepspeed.partitions import read_zero
from megackpt.backends.deepspeed.universal import read_universal
from megackpt.planning.manifest import Manifest
from megackpt.storage import Storage


class DeepSpeed(torch_reader.TorchReader, ReadOnlyBackend):
    """No options."""

    properties: ClassVar[Properties] = Properties(
        "deepspeed", 2, frozenset({1, 2}), read_only=True
    )

    def recognises(self, root: Storage) -> bool:
        return step_files.recognises(root)

    def read_manifest(self, root: Storage) -> Manifest:
        """Raises CorruptCheckpoint for files that are missing or disagree.

        Raises BackendError for what the files do not describe: the axes of model parallelism.
        """
        step = step_files.step_files(root)
        if step.parameters:
            shards = read_universal(root, step)
            version = 2
        else:
            shards = read_zero(root, step)
            version = 1
        return torch_reader.manifest_of(root, shards, (self.properties.name, version))
