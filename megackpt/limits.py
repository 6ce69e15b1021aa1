"""Thresholds that an operator may meet: the value, its unit, and the reason for it.

docs/limits.md lists them with the argument or environment variable that overrides each.
"""

from __future__ import annotations

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
EXPORT_FILE_BYTES = 1 << 30
"""Bytes. The largest file that an export to Hugging Face copies; larger ones are refused."""
