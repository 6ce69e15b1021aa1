"""Checkpoints in node-local memory: shards on the rank's host, with copies on further hosts."""

from __future__ import annotations

from megackpt.manager.local.tier import LocalTier as LocalTier
