"""Hugging Face's names and shapes of a model's tensors, by a table of rules.

A table maps patterns of our keys to a Hugging Face name, or to a rule that composes our tensor of
Hugging Face tensors; None: Hugging Face has no such tensor. In a pattern ``*`` is any text, as
short as possible, and ``#`` a number. ``.#`` also matches the empty text: then the tensor has a
leading axis for the numbers, like the stacked layers of Megatron-Core. The n-th ``*`` and the n-th
``#`` of a Hugging Face name have the value that the n-th ones of the pattern matched.
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
