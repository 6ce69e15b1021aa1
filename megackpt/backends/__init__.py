"""Formats, one file (or folder) each. A format knows planning's values and storage; never ranks or models."""
