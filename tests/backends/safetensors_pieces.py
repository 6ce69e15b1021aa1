"""safetensors files with one rank's pieces of tensors each, as torch DCP writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS = torch.arange(20.0).reshape(5, 4)
STATE = {
    "rows": ROWS,
    "columns": ROWS + 100,
    "whole": torch.ones(3),
    "s": torch.tensor(4),
}


def piece(
    folder: Path, number: int, tensors: dict[str, torch.Tensor], **offsets: Any
) -> Path:
    info = {key: {"saved_offsets": [0] * value.ndim} for key, value in tensors.items()}
    for key, offset in offsets.items():
        info[key] = {"saved_offsets": offset}
    folder.mkdir(exist_ok=True)
    path = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
    noted = {
        "DCP_SHARDING_INFO": json.dumps(info),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, path, metadata=noted)
    return path


def write_pieces(folder: Path) -> Path:
    """Of two ranks."""
    first = {"rows": ROWS[:3], "columns": ROWS[:, :2] + 100, "whole": torch.ones(3)}
    piece(folder, 1, first)
    second = {"rows": ROWS[3:], "columns": ROWS[:, 2:] + 100, "s": STATE["s"]}
    piece(folder, 2, second, rows=[3, 0], columns=[0, 2])
    return folder
