"""Likely causes of a load that does not fit: similar stored names, and other global shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from megackpt.planning.coverage_report import key_pattern
from megackpt.planning.manifest import Manifest

_COMPARED = 5000  # kinds of stored names to compare with a name


class StoredNames:
    """The names that a checkpoint holds."""

    def __init__(self, names: Collection[str], manifest: Manifest) -> None:
        self._names = set(names)
        self._metas = {e.key: e.meta for e in manifest.tensors if not e.is_common}
        self._patterns: dict[str, str] = {}  # pattern -> first name
        for name in sorted(names):
            self._patterns.setdefault(key_pattern(name), name)

    def note(self, name: str) -> str:
        """A remark on a name that is not stored; "" if nothing stored is similar."""
        meta = self._metas.get(name) or self._metas.get(name.rpartition("/shard_")[0])
        if meta is not None:
            if meta.is_object:
                return f" (stored as objects of the grid {meta.shape})"
            return f" (stored as a tensor {meta.shape} {meta.dtype}, asked for as an object)"
        # Names that differ in numbers only are of other layers.
        pattern = key_pattern(name)
        if pattern in self._patterns:
            return ""
        known = list(self._patterns)[:_COMPARED]
        for near in get_close_matches(pattern, known, 1, 0.75):
            meant = near
            for number in re.findall(r"\b[0-9]+\b", name):
                meant = meant.replace("*", number, 1)
            if meant not in self._names:
                meant = self._patterns[near]
            return f" (did you mean {meant!r}?)"
        return ""


def shape_hint(key: str, asked: Sequence[int], stored: Sequence[int]) -> str:
    """The likely cause of a global shape that is not stored; "" if unknown."""
    if re.search("embed|vocab|output_layer|lm_head", key) and asked[1:] == stored[1:]:
        return (
            "\n  hint: if this is a vocabulary padded for another parallelism, "
            "allow_shape_mismatch=True on the shard loads what both have, and zeros behind it"
        )
    return ""
