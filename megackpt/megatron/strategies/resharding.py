"""Megatron's ``strategies.resharding`` (up to 0.15): nothing of it."""

from __future__ import annotations

from megackpt.megatron.refused import refusing

__getattr__ = refusing(__name__)
