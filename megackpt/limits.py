"""Thresholds that an operator may meet: the value, its unit, the reason, and the override.

docs/limits.md is the table of them. Environment variables are read when megackpt is imported.
"""

from __future__ import annotations

import os


def _from_environment(name: str, default: int, least: int = 1) -> int:
    """Return the number in the variable ``MEGACKPT_<name>``, or the default.

    Raises ValueError if the variable is not a whole number, or less than ``least``.
    """
    text = os.environ.get(f"MEGACKPT_{name}", "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"MEGACKPT_{name} is {text!r}: give a whole number from {least} on"
        )
    return int(text)


# Waiting for other ranks.

RANK_TIMEOUT_SECONDS = 1800
"""Seconds. A rank that does not answer so long fails the save or load. Override: ``timeout``."""
WAIT_WARNING_SECONDS = 30.0
"""Seconds. A longer wait for other ranks is logged. Override: ``MEGACKPT_WAIT_WARNING_SECONDS``."""
HOST_SILENT_SECONDS = 120
"""Seconds. A host that answers nothing for so long is lost, even before the ``timeout``."""
CONNECT_SECONDS = 10.0
"""Seconds. Retry period for connections that a published address refuses."""
GREETING_SECONDS = 5.0
"""Seconds. A connection must show by then that it is of the job, and bring its first message."""
GREETINGS = 64
"""Connections. So many may be open at a time that have not shown that they are of this job."""
CONTROL_MESSAGE_BYTES = 1 << 34
"""Bytes. A larger message between ranks is refused."""
WORKER_STOP_SECONDS = 5.0
"""Seconds. A cancelled asynchronous save or load may take this time to stop."""
EXIT_SECONDS = 60.0
"""Seconds. At the end of a process, disks and ranks without an answer for this time are left."""

# Saving.

COMMON_STATE_WARNING_BYTES = 1 << 20
"""Bytes. A common state with more tensor data is a warning: rank 0 alone writes it."""
COMMON_STATE_BYTES = 2 << 30
"""Bytes. A larger common state is refused. Override: ``allow_large_common_state``."""
STAGING_BYTES_MIN = 256 << 20
"""Bytes. Staging buffers may have so much even if memory is short. Override: ``staging_memory``."""
NESTED_FACTORIES = 100
"""Levels. Deeper factories of factories never end."""
STATE_DEPTH = 600
"""Levels. A deeper state contains itself, and Python cannot pickle it."""
LATE_FILE_SECONDS = 5.0
"""Seconds. Before a commit, a file of another rank may appear, or get its size, so late."""
COPY_SECONDS = 300.0
"""Seconds. A copy within Azure that is not complete by then is given up: the file is written."""
LEASE_SECONDS = 60.0
"""Seconds. If a host that drains a local step is silent so long, holders of copies take over."""

# File systems.

DIRECT_BYTES = _from_environment("DIRECT_BYTES", 16 << 20, least=0)
"""Bytes. From here on, a ``torch_dist`` file of an asynchronous save bypasses the page cache; a
file of a synchronous save where that is faster. 0: no file does. Override:
``MEGACKPT_DIRECT_BYTES``."""
RETRY_SECONDS = 0.5
"""Seconds. A read, stat or list that fails for a moment (ESTALE, EIO) is repeated for so long."""
RETRY_MINUTE_SECONDS = 10.0
"""Seconds. All threads of a process pause for no longer than that in a minute, to repeat calls."""

# Reading. A file that claims more is refused: it is damaged or hostile.

CONFIG_BYTES = 1 << 20
"""Bytes. A larger ``metadata.json`` belongs to another program."""
VERSION_BYTES = 1 << 30
"""Bytes. The largest ``version.json`` of a version of weights that is read."""
INTEGRITY_BYTES = 1 << 28
"""Bytes. The largest ``integrity.json`` of Megatron that is read."""
DCP_METADATA_BYTES = _from_environment("DCP_METADATA_BYTES", 1 << 32)
"""Bytes. The largest ``.metadata`` of torch DCP. Override: ``MEGACKPT_DCP_METADATA_BYTES``."""
TORCH_PICKLE_BYTES = _from_environment("TORCH_PICKLE_BYTES", 1 << 30)
"""Bytes. The largest pickle in a torch file. Override: ``MEGACKPT_TORCH_PICKLE_BYTES``."""
SAFETENSORS_HEADER_BYTES = 100_000_000
"""Bytes. The largest header of a safetensors file, as the reference reader has it."""
WEIGHT_MAP_BYTES = 100_000_000
"""Bytes. The largest ``*.index.json`` of a directory of weights."""
ZARR_DESCRIPTION_BYTES = 1 << 24
"""Bytes. The largest description of a zarr array or group."""
PICKLE_DEPTH = 500
"""Levels. Python cannot write pickles that are nested much deeper."""
PICKLE_LEAVES = _from_environment("PICKLE_LEAVES", 1 << 27)
"""Values. A small pickle can repeat its parts often. Override: ``MEGACKPT_PICKLE_LEAVES``."""
HOLE_BYTES = 16 << 20
"""Bytes. Holes of a file that is read whole; they take no disk space."""
HOLE_RATIO = 16
"""Bytes a stored byte. Of the bytes above HOLE_BYTES at least 1/16 must be stored."""

# Loading.

DEQUANTISED_BYTES = 64 << 20
"""Bytes. Values, as float32, that a load computes from quantised ones at once."""

# Converting.

CONVERT_MAX_MEMORY = 512 << 20
"""Bytes. Memory of a conversion and its workers above idle. Override: ``max_memory``."""
CONVERT_CELL_BYTES = 8 << 20
"""Bytes. What a conversion reads and writes at once. It decides the chunks of the target."""
CONVERT_TASK_BYTES_MIN = 64 << 20
"""Bytes. The least that a task of a conversion writes, so that its file is worth opening."""
CONVERT_TASK_BYTES_MAX = 1 << 30
"""Bytes. The most that a task writes, because an interrupted task is repeated as a whole."""
CONVERT_TASKS = 64
"""Tasks. Aimed at between the two sizes above, so that progress is kept often enough."""
CONVERT_SINGLE_PROCESS_BYTES = 512 << 20
"""Bytes. Up to here starting workers costs more than it saves. Override: ``workers``."""
CONVERT_READ_ROWS = 4096
"""Rows. Small tensors that a conversion reads with one request, up to a cell's bytes."""
EXPORT_FILE_BYTES = _from_environment("EXPORT_FILE_BYTES", 1 << 30)
"""Bytes. An export copies no larger file of a model. Override: ``MEGACKPT_EXPORT_FILE_BYTES``."""

# The command line.

PROGRESS_SECONDS = 5.0
"""Seconds. Time between two lines of progress where stderr is not a terminal."""
