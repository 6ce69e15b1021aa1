"""Models of Hugging Face: their names and shapes by a table of rules, and exports for them.

A table maps patterns of our keys to a Hugging Face name, or to a rule that composes our tensor of
Hugging Face tensors; None: Hugging Face has no such tensor. In a pattern ``*`` is any text, as
short as possible, and ``#`` a number. ``.#`` also matches the empty text: then the tensor has a
leading axis for the numbers, like the stacked layers of Megatron-Core. The n-th ``*`` of a Hugging
Face name stands for the text that the n-th ``*`` of the pattern matched, and likewise the n-th
``#``.
"""

from typing import TYPE_CHECKING

from megackpt.huggingface.export import export_huggingface
from megackpt.huggingface.fsdp_tables import (
    Stacked,
    from_fsdp_dtensor,
    to_fsdp_dtensor,
)
from megackpt.huggingface.key_tables import (
    bert,
    gemma,
    llama,
    maxtext_llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    reversed_table,
)
from megackpt.huggingface.rules import (
    Fuse,
    LayerKernel,
    Name,
    Padded,
    Part,
    Piece,
    Rule,
    Theirs,
    Tied,
    Transpose,
)
from megackpt.huggingface.table_links import Table, link
from megackpt.lazy_names import lazily

if TYPE_CHECKING:
    from megackpt.huggingface.states import as_huggingface
else:  # It needs torch. Conversions and exports do without.
    __getattr__, _ = lazily(
        globals(), {"megackpt.huggingface.states": ["as_huggingface"]}
    )

__all__ = [
    "Fuse",
    "LayerKernel",
    "Name",
    "Padded",
    "Part",
    "Piece",
    "Rule",
    "Stacked",
    "Table",
    "Theirs",
    "Tied",
    "Transpose",
    "as_huggingface",
    "bert",
    "export_huggingface",
    "from_fsdp_dtensor",
    "gemma",
    "link",
    "llama",
    "maxtext_llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "reversed_table",
    "to_fsdp_dtensor",
]
