"""Python's garbage collector, held off while a save or a load makes very many small values.

Each counts towards the next full collection, which looks at every object of the process: with a trainer's heap
beside it, a load of 20,000 tensors spends a third of its time there. Nothing of it is garbage, and when it is let go
of, reference counts see to it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = [
    0,
    False,
]  # how many hold it off (ranks may be threads), and whether it was on before


@contextmanager
def held_off() -> Iterator[None]:
    """No collections in the whole process meanwhile; what others make in cycles stays until then."""
    with _lock:
        if not _holders[0]:
            _holders[1] = gc.isenabled()
            gc.disable()
        _holders[0] += 1
    try:
        yield
    finally:
        with _lock:
            _let_go(max(_holders[0] - 1, 0))


def _let_go(holders: int) -> None:
    _holders[0] = holders
    if not holders and _holders[1]:
        gc.enable()


def _forked() -> None:
    if _holders[0]:
        _let_go(0)
    _lock.release()


# A process that is forked meanwhile has its own heap to see to.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked
)
