"""Writes ``torch-2.13.0-python-3.11.2`` and its ``.expected.pt``: torch DCP under Python 3.11.0 to 3.11.3.

There a member of an enum is pickled as ``getattr(EnumClass, "MEMBER")``, in ``.metadata`` (which has one in each
tensor's properties) and in objects. Debian 12 has such a Python. Run it in this directory, with one of these.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from http import HTTPMethod, HTTPStatus
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

if not (3, 11, 0) <= sys.version_info[:3] <= (3, 11, 3):
    sys.exit("Python 3.11.0 to 3.11.3 pickle enums so; this is another")
release = torch.__version__.split("+")[0]
folder = Path(f"torch-{release}-python-{'.'.join(map(str, sys.version_info[:3]))}")
shutil.rmtree(folder, ignore_errors=True)

tensors = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.linspace(-1, 1, 5).to(torch.bfloat16),
    "small": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 4),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
}
asked = {
    "method": HTTPMethod.PATCH,
    "allowed": [HTTPStatus.OK, HTTPStatus.GONE],
    "retries": 3,
}
warnings.simplefilter("ignore")
dcp.save(
    {"model": tensors, "asked": asked, "step": 100}, checkpoint_id=folder, no_dist=True
)
torch.save(
    {f"model.{name}": tensor for name, tensor in tensors.items()},
    f"{folder}.expected.pt",
)
