"""Bounded calls to a storage: what hangs is given up, and ends on its own thread."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest

from megackpt.errors import CheckpointingException, StorageError
from megackpt.storage import Executor, Progress

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Calls that wait for this event hang until the test has ended, at the latest."""
    event = threading.Event()
    yield event
    event.set()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "megackpt-disk"]


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_thread_makes_all_calls_in_the_context_of_the_caller() -> None:
    name = contextvars.ContextVar[str]("name")
    seen = []

    def work() -> int:
        seen.append((threading.get_ident(), name.get()))
        return len(seen)

    with closing(Executor(LONG)) as executor:
        for text in ("a", "b"):
            name.set(text)
            executor.call("a call", work)
        assert executor.call("a call", work) == 3
    assert len({thread for thread, _ in seen}) == 1
    assert [text for _, text in seen] == ["a", "b", "b"]
    assert seen[0][0] != threading.get_ident()
    wait_until(lambda: not threads())


def test_without_a_bound_the_calling_thread_makes_the_calls() -> None:
    with closing(Executor(None)) as executor:
        assert executor.call("", threading.get_ident) == threading.get_ident()


def test_without_threads_the_calling_thread_makes_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with closing(Executor(LONG)) as executor:
        assert executor.call("", threading.get_ident) == threading.get_ident()


def test_errors_are_raised_and_the_next_call_works() -> None:
    with closing(Executor(LONG)) as executor:
        with pytest.raises(ZeroDivisionError):
            executor.call("", lambda: 1 // 0)
        with pytest.raises(SystemExit):
            executor.call("", lambda: exit(3))
        assert executor.call("", lambda: 5) == 5
        assert executor.gave_up is None
    with pytest.raises(RuntimeError, match="the last call: this executor is closed"):
        executor.call("the last call", int)


def test_a_call_that_hangs_is_given_up_and_closes_the_executor(
    released: threading.Event,
) -> None:
    executor, done = Executor(SHORT), []
    text = (
        r"open x: the storage has not answered for 0\.18 s, and is given up: check the"
    )
    with pytest.raises(StorageError, match=text):
        executor.call("open x", released.wait)
    assert executor.gave_up is not None
    for late in (lambda: executor.call("close x", done.append, ""), executor.alive):
        with pytest.raises(StorageError, match="open x: the storage has not answered"):
            late()
    executor.afterwards(lambda: done.append(threading.current_thread().name))
    executor.close()
    assert not done
    released.set()
    wait_until(lambda: not threads())
    assert done == ["megackpt-disk"]


def test_what_was_given_up_stops_at_its_next_progress(
    released: threading.Event,
) -> None:
    errors = []

    progress = Progress(todo=10)
    executor = Executor(SHORT, progress)

    def work() -> None:
        progress.advance(3)
        released.wait()
        try:
            progress.advance(4)
        except StorageError as error:
            errors.append(str(error))

    with pytest.raises(StorageError, match="given up after 3 of 10 bytes"):
        executor.call("write x", work)
    executor.close()
    released.set()
    wait_until(lambda: not threads())
    assert len(errors) == 1
    assert progress.done == 3


@pytest.mark.parametrize("how", ["advance", "alive", "processor", "ranks"])
def test_what_moves_is_not_given_up(how: str) -> None:
    executor = Executor(SHORT)

    def work() -> str:
        if how == "ranks":
            with executor.waiting_for_ranks():
                time.sleep(0.6)
            return how
        ends = time.monotonic() + 0.6
        while time.monotonic() < ends:
            if how == "processor":
                continue
            if how == "advance":
                executor.progress.advance(1)
            else:
                executor.alive()
            time.sleep(0.01)
        return how

    with closing(executor):
        assert executor.call("", work) == how


def test_a_call_within_a_call_is_part_of_it() -> None:
    with closing(Executor(SHORT)) as executor:

        def outer() -> tuple[int, int]:
            inner = executor.call("inner", threading.get_ident)
            ends = time.monotonic() + 0.6
            while time.monotonic() < ends:
                executor.alive()
                time.sleep(0.01)
            return inner, threading.get_ident()

        inner, own = executor.call("outer", outer)
    assert inner == own


def test_a_signal_handler_that_raises_ends_the_call(released: threading.Event) -> None:
    def work(executor: Executor) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not released.wait(0.01):
            executor.alive()

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with closing(Executor(LONG)) as executor:
            with pytest.raises(KeyboardInterrupt):
                executor.call("", work, executor)
            assert executor.gave_up is None  # it has stopped at its next progress
            assert executor.call("", lambda: 5) == 5
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_idle_thread_ends_and_the_next_call_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megackpt.storage.executor._IDLE_SECONDS", 0.02)
    with closing(Executor(LONG)) as executor:
        for number in range(100):
            assert executor.call("", lambda: number) == number  # noqa: B023
            time.sleep(number / 2500)
        wait_until(lambda: not threads())
        assert executor.call("", int) == 0


def test_an_executor_that_is_dropped_ends_its_thread() -> None:
    executor = Executor(LONG)
    with pytest.raises(CheckpointingException):
        executor.call("", fail)
    assert threads()
    del executor
    gc.collect()
    wait_until(lambda: not threads())


def fail() -> None:
    raise CheckpointingException("refused")


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    with closing(Executor(LONG)) as executor:
        executor.call("", lambda: None)
        child = os.fork()
        if not child:
            os._exit(executor.call("", lambda: 7))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert executor.call("", lambda: 5) == 5
