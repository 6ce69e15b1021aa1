"""Makes deepspeed-0.19.8-zero2 and -zero3, each with its universal checkpoint: ``PYTHONPATH=.peers/deepspeed``.

Of the scripts that DeepSpeed copies into a run, the golden runs have an empty one: only the name counts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WRITER = HERE.parent / "foreign" / "write_deepspeed.py"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(WRITER), folder, "2", "zero2", "zero3"]
        subprocess.run(command, check=True, env=dict(os.environ))
        for name in ("zero2", "zero3"):
            run = HERE / f"deepspeed-0.19.8-{name}"
            shutil.copytree(Path(folder, name), run)
            shutil.copy(Path(folder, f"{name}.expected.pt"), f"{run}.expected.pt")
            (run / "zero_to_fp32.py").write_text("")
            (run / "zero_to_torch.py").unlink()
