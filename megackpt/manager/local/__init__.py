"""Checkpoints in node-local memory: each rank's shards on its own host, with copies on others."""

from __future__ import annotations

from megackpt.manager.local.tier import LocalTier as LocalTier
