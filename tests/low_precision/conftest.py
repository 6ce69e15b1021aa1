"""torchao's tensors, imported in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.conftest import PEERS


@pytest.fixture(scope="session")
def tensors() -> Iterator[ModuleType]:
    """The module ``torchao_tensors``."""
    path = str(PEERS / "torchao-0.18.0")
    sys.path.append(path)
    from tests.low_precision import torchao_tensors

    yield torchao_tensors
    sys.path.remove(path)
