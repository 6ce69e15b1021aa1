"""Keys as a tree: ``a.b.c`` below ``a.b`` below ``a``, with repeated layers folded into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_DEEPEST = 40
"""Levels of the tree; what a key has beyond stays in one name."""


class Item(NamedTuple):
    """One entry of a checkpoint."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    bytes: int


class Row(NamedTuple):
    """One line of the drawn tree: how deep, its label, the entry that it is (if it is one), and bytes of all below."""

    depth: int
    label: str
    item: Item | None
    bytes: int


@dataclass
class _Node:
    label: str
    item: Item | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    alike: int = 1  # how many nodes this one stands for

    @property
    def bytes(self) -> int:
        own = self.item.bytes if self.item else 0
        return self.alike * (own + sum(child.bytes for child in self.children.values()))

    def likeness(self) -> tuple[object, ...]:
        """Equal for nodes that differ in label only."""
        below = tuple((name, child.likeness()) for name, child in self.children.items())
        return self.alike, self.item and self.item[1:], below


def folded(items: Sequence[Item]) -> Iterator[Row]:
    """The rows of the tree, depth first; numbered siblings that are alike (layers) stand in one row."""
    root = _Node("")
    for item in items:
        node = root
        for part in item.key.split(".", _DEEPEST):
            node = node.children.setdefault(part, _Node(part))
        node.item = item
    for child in root.children.values():
        yield from _rows(_joined(child), 0)


def _rows(node: _Node, depth: int) -> Iterator[Row]:
    label = node.label if node.alike == 1 else f"{node.label} ({node.alike} alike)"
    yield Row(depth, label, node.item, node.bytes)
    for child in _merged(list(node.children.values())):
        yield from _rows(_joined(child), depth + 1)


def _joined(node: _Node) -> _Node:
    """A node with one child, and nothing else to it, is shown with that child: ``self_attention.linear_proj``."""
    while node.item is None and len(node.children) == 1 and node.alike == 1:
        (child,) = node.children.values()
        if child.alike > 1:
            break
        node = replace(child, label=f"{node.label}.{child.label}")
    return node


def _merged(siblings: Sequence[_Node]) -> list[_Node]:
    """Runs of numbered siblings that are alike as one node each: ``0-31``."""
    numbered = sorted(
        (n for n in siblings if _is_number(n.label)), key=lambda n: int(n.label)
    )
    found = [node for node in siblings if not _is_number(node.label)]
    likeness = None
    for node in numbered:
        own = node.likeness()
        if likeness == own:
            first = found[-1].label.partition("-")[0]
            found[-1] = replace(
                found[-1], label=f"{first}-{node.label}", alike=found[-1].alike + 1
            )
        else:
            found.append(node)
        likeness = own
    return found


def _is_number(label: str) -> bool:
    return (
        label.isdecimal() and len(label) < 10
    )  # longer ones count no layers, and int() refuses the longest
