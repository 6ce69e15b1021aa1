"""Hugging Face's names and shapes of a model's tensors, by a table of rules.

A table maps patterns of our keys to a name over there, or to a rule that says how our tensor
consists of theirs; None: they have no such tensor. In a pattern ``*`` is any text, as short as
possible, and ``#`` a number. ``.#`` also matches nothing: then the tensor has a leading axis for
the numbers, as Megatron-Core keeps its layers. The n-th ``*`` and the n-th ``#`` of a name over
there have the value that the n-th here matched.
"""

from megackpt.adapters.huggingface.key_tables import (
    bert,
    gemma,
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
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
from megackpt.adapters.huggingface.table_links import Table, link

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
    "gemma",
    "link",
    "llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]
