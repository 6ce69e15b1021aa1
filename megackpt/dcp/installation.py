"""megackpt's storage classes in place of torch DCP's, for calls that name only a checkpoint_id."""

from __future__ import annotations

import copyreg
import logging
from concurrent.futures import wait
from contextlib import ExitStack
from functools import wraps
from types import FunctionType
from typing import Any

from torch.distributed import checkpoint, is_available, is_initialized
from torch.distributed.checkpoint import (
    _fsspec_filesystem,
    _storage_utils,
    filesystem,
    format_utils,
    hf_storage,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import (
    _ThreadBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from megackpt.dcp import sessions
from megackpt.dcp.storage_reader import FileSystemReader
from megackpt.dcp.storage_writer import FileSystemWriter

_CLASSES: dict[Any, Any] = {
    filesystem.FileSystemReader: FileSystemReader,
    filesystem.FileSystemWriter: FileSystemWriter,
}
_FUNCTIONS: dict[Any, Any] = {
    sessions.stock_save: sessions.save_state_dict,
    sessions.stock_load: sessions.load_state_dict,
}
# Modules that bind these names. The import here gives classes that derive from torch's classes
# their bases, before ``install`` replaces names.
_MODULES = (
    checkpoint,
    filesystem,
    format_utils,
    hf_storage,
    _fsspec_filesystem,
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
_EXECUTORS = (
    _ProcessBasedAsyncCheckpointExecutor,
    _ThreadBasedAsyncCheckpointExecutor,
)

_log = logging.getLogger(__name__)

_replaced: list[tuple[Any, str, Any]] = []
"""Owner, name and former value of each replaced attribute."""


def install() -> ExitStack:
    """Make torch DCP use our FileSystemWriter and FileSystemReader, in the whole process.

    All of torch's modules that have torch's classes under these names then have megackpt's classes.
    So ``dcp.save``, ``async_save``, ``load`` and ``dcp_to_torch_save`` use our engine without
    another change. With torch's or megackpt's planner, megackpt sends the messages between ranks,
    too: a call is bounded by the ``timeout`` of the writer or reader, and names a rank that is
    lost. The process of an ``async_save`` sends torch's messages, and so do calls with a custom
    planner. Classes derived from torch's, such as ``FsspecWriter``, stay as they are. So does a
    module that imported the class itself before, not its module. A second call has no effect::

        import torch
        import torch.distributed.checkpoint as dcp
        import megackpt.dcp

        megackpt.dcp.install()
        dcp.save({"w": torch.ones(4)}, checkpoint_id="checkpoints/4")

    Returns:
        A context manager that calls ``uninstall`` at the end, if this call has installed.
    """
    undo = ExitStack()
    if not _replaced:
        undo.callback(uninstall)
        for module in _MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in _CLASSES:
                    _replace(module, name, _CLASSES[value])
                elif isinstance(value, FunctionType) and value in _FUNCTIONS:
                    setattr(module, name, _FUNCTIONS[value])
        for stock in _CLASSES:
            copyreg.pickle(stock, _pickle_stock)
        for executor in _EXECUTORS:
            _replace(executor, "execute_save", _naming_writers(executor.execute_save))
        _replace(StateDictStager, "_offload_tensor", _offload_tensor)
    return undo


def uninstall() -> None:
    """Undo ``install``. A save that has begun is not affected: the functions stay until its end."""
    for stock in _CLASSES:
        copyreg.dispatch_table.pop(stock, None)
    while _replaced:
        owner, name, former = _replaced.pop()
        setattr(owner, name, former)
    for future in [*sessions.in_flight]:
        future.add_done_callback(_restore_functions)
    _restore_functions()


def _restore_functions(_: object = None) -> None:
    if _replaced or sessions.in_flight:
        return
    former = {ours: stock for stock, ours in _FUNCTIONS.items()}
    for module in _MODULES:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in former:
                setattr(module, name, former[value])


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _pickle_stock(made: Any) -> Any:
    """Pickle an object of torch's class, made before ``install``.

    pickle would find megackpt's class under its name. The process of an ``async_save`` needs such
    writers.
    """
    return _restore_stock, (type(made).__name__, vars(made))


def _restore_stock(name: str, state: dict[str, Any]) -> Any:
    for kind in _CLASSES:
        if kind.__name__ == name:
            made = object.__new__(kind)
            vars(made).update(state)
            return made
    raise AttributeError(f"no class of torch's is named {name!r} here")


_stock_offload: Any = StateDictStager._offload_tensor


def _offload_tensor(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
    """In the place of the method of torch's stager: copy the local tensor of a DTensor alone.

    torch also copies the mesh and the placements, one attribute at a time. They do not change.
    """
    if type(x) is not DTensor or vars(x):
        return _stock_offload(self, x, memo, non_blocking)
    copied = self.deepcopy_with_tensor_offload(
        x._local_tensor, memo, non_blocking=non_blocking
    )
    return DTensor(copied, x._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _naming_writers(execute_save: Any) -> Any:
    """``execute_save`` of an ``async_save``, with the writer that its checkpoint_id implies now.

    torch chooses it in the thread or process that writes: later, or where ``install`` was not
    called. The threads of two saves would mix their messages over one process group, and wait for
    ever.
    """

    @wraps(execute_save)
    def execute(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("storage_writer") is None:
            writer = _storage_utils._storage_setup(None, kwargs.get("checkpoint_id"))
            kwargs["storage_writer"] = writer
        several_ranks = is_available() and is_initialized()
        running = [*sessions.in_flight]
        if several_ranks and running:
            _log.warning(
                "async_save waits for the save before it, whose messages use the same ranks: "
                "wait for its result before the next one"
            )
            wait(running)
        future = execute_save(*args, **kwargs)
        writer = kwargs["storage_writer"]
        if isinstance(args[0], _ProcessBasedAsyncCheckpointExecutor):
            writer = None
        sessions.in_flight[future] = writer
        future.add_done_callback(sessions.in_flight.pop)
        return future

    return execute
