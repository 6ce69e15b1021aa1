"""The small files that ``from_pretrained`` of transformers needs together with the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TEMPLATES = "additional_chat_templates/"
"""The folder in which a tokenizer of transformers keeps named chat templates."""


def pretrained_files(model: Any, processing_class: Any = None) -> dict[str, bytes]:
    """The configuration of a model of transformers, and the files of its tokenizer, by name.

    There are none of another model.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return {}
    config = copy.deepcopy(model.config)
    # torch's fully_shard makes the class FSDPNAME of the class NAME.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(model.dtype).removeprefix("torch.")
    sources = config, getattr(model, "generation_config", None), processing_class
    with TemporaryDirectory() as name:
        folder = Path(name)
        for source in sources:
            if source is not None:
                source.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
