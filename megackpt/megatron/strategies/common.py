"""Megatron's ``strategies.common``: the common state, which every format here keeps itself."""

from __future__ import annotations

from megackpt.backends.torch_dist.writing import COMMON_FILE
from megackpt.loader import load_common_state_dict
from megackpt.megatron.refused import refusing
from megackpt.megatron.strategies.base import LoadCommonStrategy, SaveCommonStrategy

__getattr__ = refusing(__name__)

COMMON_STATE_FNAME = COMMON_FILE
load_common = load_common_state_dict


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """To hold, not to call."""


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Loads the common state of any format."""


def register_default_common_strategies() -> None:
    """There is nothing to register."""
