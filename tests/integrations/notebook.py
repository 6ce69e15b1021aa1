"""Runs cells of Python in a kernel, and prints the notebook with its outputs as JSON.

``python notebook.py CELLS``, a JSON list of sources, with nbclient and ipykernel on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(source) for source in json.loads(sys.argv[1])]
)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(json.dumps(notebook))
