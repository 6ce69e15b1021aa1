"""Megatron's ``state_dict_utils``: nothing of it."""

from __future__ import annotations

from megackpt.megatron.refused import refusing

__getattr__ = refusing(__name__)
