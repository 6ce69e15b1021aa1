"""Bytes between devices and the host: copies of a save, sources of a save, targets of a load.

``buffers`` and ``progress`` import no torch, because the worker process of asynchronous saves uses
them.
"""
