"""Fixtures for tests of asynchronous saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.async_save.saves import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made._open.set()
