"""Megatron's ``tensor_aware_state_dict``: nothing of it."""

from __future__ import annotations

from megackpt.megatron.refused import refusing

__getattr__ = refusing(__name__)
