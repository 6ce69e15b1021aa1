"""Versions of weights, of which each is stored as what changed since the version before."""

from megackpt.deltas.publisher import WeightPublisher

__all__ = ["WeightPublisher"]
