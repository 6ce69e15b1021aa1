"""The collector is off while a save or a load lasts, and afterwards as it was, whatever happens."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor, gc_pause


def test_it_is_put_back_as_it_was():
    with gc_pause.paused():
        with gc_pause.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_pause.paused():
        raise KeyError
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off():
    gc.disable()
    try:
        with gc_pause.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_several_threads_puts_it_back():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with gc_pause.paused():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=hold)
    with gc_pause.paused():
        other.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_process_forked_meanwhile_collects():
    with gc_pause.paused():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.isenabled()


@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
def test_saves_and_loads_leave_it_on(tmp_path: Path, strategy: str):
    seen: list[bool] = []
    with megackpt.watching(lambda _: seen.append(gc.isenabled())):
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        megackpt.save(state, tmp_path / "ckpt", strategy)
        megackpt.load(state, tmp_path / "ckpt")
    assert seen
    assert not any(seen[:-1])
    assert gc.isenabled()
    with pytest.raises(megackpt.NotACheckpoint):
        megackpt.load(state, tmp_path / "nothing")
    assert gc.isenabled()
