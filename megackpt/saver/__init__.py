"""Saving: ``order`` is save itself, ``asking`` what a rank asks for, ``notices`` what it is told besides."""

from megackpt.saver.order import save as save
