"""In a notebook: one line for each object, tables and frames where they help, and bars."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PEERS, ROOT

pytestmark = pytest.mark.notebooks

WIDGET = "application/vnd.jupyter.widget"

CELLS = {
    "setup": """
import sys
import torch
import megackpt
from megackpt.checkpoint import open_checkpoint
from megackpt.cli.report import shard_map

model = torch.nn.Linear(256, 256)
checkpoints = megackpt.CheckpointManager("run")
for step in (1, 2):
    checkpoints.save(step, model=model, metric=1 / step)
""",
    "manager": "checkpoints",
    "step": "checkpoints.steps()[-1]",
    "restored": "checkpoints.restore(model=model)",
    "request": "checkpoints.save(3, model=model, asynchronous=True)",
    "close": "checkpoints.close()",
    "map": "shard_map(open_checkpoint('run/iter_0000001'))",
    # nbclient may drop what a thread sends, so the bars are only drawn at the end.
    "bars": """
from megackpt import progress_line
progress_line._REDRAW_SECONDS = 600
model.weight.data.add_(1)  # a step with equal weights is a warning
with megackpt.progress():
    checkpoints.save(4, model=model)
    megackpt.verify('run/iter_0000004')
""",
    "without tqdm": """
sys.modules['tqdm'] = None
model.weight.data.add_(1)
with megackpt.progress():
    checkpoints.save(5, model=model)
model.weight.data.add_(1)
with megackpt.progress(force=True):
    checkpoints.save(6, model=model)
""",
}


class Notebook:
    """A notebook after its cells were executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = ":".join(map(str, (ROOT, PEERS / "notebooks")))
        script = ROOT / "tests" / "integrations" / "notebook.py"
        done = subprocess.run(
            [sys.executable, script, json.dumps(list(CELLS.values()))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "HOME": str(folder)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        notebook = json.loads(done.stdout)
        self.widgets = notebook["metadata"]["widgets"][f"{WIDGET}-state+json"]["state"]
        self._cells = dict(zip(CELLS, notebook["cells"], strict=True))

    def outputs(self, cell: str) -> list[dict[str, Any]]:
        """What a cell has printed and shown."""
        return self._cells[cell]["outputs"]

    def shown(self, cell: str, kind: str) -> str:
        """What a cell shows of its last value."""
        (result,) = self.outputs(cell)
        assert result["output_type"] == "execute_result"
        return "".join(result["data"][kind])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    return Notebook(tmp_path_factory.mktemp("notebook"))


def test_each_object_is_one_line(notebook: Notebook) -> None:
    lines = {
        name: notebook.shown(name, "text/plain")
        for name in ("manager", "step", "restored", "request")
    }
    where = notebook.folder / "run"
    assert lines["manager"] == f"<CheckpointManager of {where}: 0 saves in flight>"
    step = r"<Step iter_0000002: complete, 2\d\d\.\d KiB, metric 0\.5>"
    assert re.fullmatch(step, lines["step"])
    assert lines["restored"] == ("<Restored: step 2 from storage, 0 newer skipped>")
    request = r"<AsyncRequest iter_0000003: not finalized, \d+ of 263168 bytes>"
    assert re.fullmatch(request, lines["request"])


def test_a_manager_is_a_table_of_its_steps(notebook: Notebook) -> None:
    table = notebook.shown("manager", "text/html")
    head = ["step", "state", "bytes", "saved (UTC)", "metrics"]
    assert re.findall(r"<th>([^<]*)", table) == head
    cells = re.findall(r"<td>([^<]*)", table)
    assert cells[0::5] == ["iter_0000001", "iter_0000002"]
    assert cells[1::5] == ["complete", "complete"]
    assert cells[4::5] == ["metric 1.0", "metric 0.5"]


def test_the_shard_map_is_a_frame(notebook: Notebook) -> None:
    frame = notebook.shown("map", "text/html")
    pattern = r'<iframe sandbox="allow-scripts" [^>]* srcdoc="([^"]*)"></iframe>'
    found = re.fullmatch(pattern, frame)
    assert found is not None
    assert html.unescape(found[1]).startswith("<!doctype html>")


def test_progress_is_a_bar_of_each_operation(notebook: Notebook) -> None:
    texts = []
    for output in notebook.outputs("bars"):
        view = notebook.widgets[output["data"][f"{WIDGET}-view+json"]["model_id"]]
        left, bar, right = [
            notebook.widgets[child.removeprefix("IPY_MODEL_")]["state"]
            for child in view["state"]["children"]
        ]
        assert bar["value"] == bar["max"] > 256 * 256 * 4
        texts.append(f"{left['value']}{right['value']}".replace("\u2007", " "))
    assert len(texts) == 2
    assert re.fullmatch(r"save: done: 100% 258k/258k .*B/s]", texts[0])
    assert texts[1].startswith("verify: done: 100% ")


def test_without_tqdm_forced_progress_is_a_line(notebook: Notebook) -> None:
    (output,) = notebook.outputs("without tqdm")
    assert output["name"] == "stderr"
    assert re.fullmatch(r"save: done, 2\d\d\.\d KiB in \d+\.\d+ s\n", output["text"])
