"""One laboratory for a real device and for the fake one: the tests of this folder run on both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megackpt.staging import copy, devices, source
from megackpt.staging.buffers import BufferPool
from tests.cuda.fake import ORDERS, Device, tensor_on

MIB = 1 << 20


@dataclass
class Laboratory:
    fake: Device | None
    """None: a real device, or the simulated one of PyTorch."""
    kind: str = "cuda"

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """These values on the device, with the same strides."""
        if self.fake is None:
            strided = torch.empty_strided(
                values.shape, values.stride(), dtype=values.dtype, device=self.kind
            )
            return strided.copy_(values)
        return tensor_on(self.fake, values)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Training changes a tensor: a kernel on the current stream."""
        if self.fake is None:
            tensor.fill_(value)
        else:
            plain = tensor.as_subclass(torch.Tensor)
            self.fake.current().todo.append(lambda: plain.fill_(value))

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is in a tensor when all work is done."""
        if self.fake is None:
            torch.accelerator.synchronize()
            return tensor.cpu()
        self.fake.synchronize()
        return tensor.as_subclass(torch.Tensor).clone()


PLACES = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("openreg", marks=pytest.mark.openreg),
    "training first",
    *[pytest.param(order, marks=pytest.mark.slow) for order in ORDERS],
]


@pytest.fixture(params=PLACES)
def lab(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laboratory]:
    """Several blocks, pieces and waits, with little memory."""
    monkeypatch.setattr(copy, "POOL", BufferPool())
    for module in (devices, source):
        monkeypatch.setattr(module, "COPIED_AT_ONCE", MIB)
    monkeypatch.setattr(devices, "_IN_FLIGHT", 2 * MIB)
    fake = None
    if request.param == "openreg":
        import torch_openreg  # noqa: F401
    if request.param not in ("cuda", "openreg"):
        fake = Device(request.param)
        fake.install(monkeypatch)
    yield Laboratory(fake, request.param)
    devices._side_stream.cache_clear()
