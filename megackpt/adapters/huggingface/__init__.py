"""Hugging Face's names and shapes of a model's tensors, by a table of rules that its users write or extend.

A table maps patterns of our keys to what a tensor is over there: a name, or a rule that says how ours is made of
theirs. In a pattern ``*`` is any text, as short as possible, and ``#`` a number; or ``.#`` nothing: then the tensor has
a leading axis of these, as Megatron-Core keeps its layers. The n-th ``*`` and the n-th ``#`` of a name over there are
what the n-th here was. None: they have no such tensor.
"""

from megackpt.adapters.huggingface.linking import Table, link
from megackpt.adapters.huggingface.rules import (
    Fuse,
    Name,
    Padded,
    Part,
    Piece,
    Rule,
    Theirs,
    Tied,
    Transpose,
)
from megackpt.adapters.huggingface.states import as_huggingface
from megackpt.adapters.huggingface.tables import bert, llama

__all__ = [
    "Fuse",
    "Name",
    "Padded",
    "Part",
    "Piece",
    "Rule",
    "Table",
    "Theirs",
    "Tied",
    "Transpose",
    "as_huggingface",
    "bert",
    "link",
    "llama",
]
