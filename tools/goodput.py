"""Goodput: how much of the time that is paid ends up in the run, by checkpoint library.

    python tools/goodput.py --json build/goodput.json --chart docs/goodput.svg

as root: a small training on two hosts (namespaces) of two ranks, under a schedule of faults that is the
same for all contestants. docs/goodput.md explains what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from goodput_runs import storage
from goodput_runs.contestants import CONTESTANTS, FOLDERS
from goodput_runs.counting import Figures, count
from goodput_runs.report import draw, table
from goodput_runs.schedule import KINDS, schedule
from goodput_runs.supervisor import ROOT, run, undisturbed


def main() -> None:
    options = parse()
    if os.geteuid() != 0:
        raise SystemExit("root is needed: for namespaces, mounts and limits of devices")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was mounted is undone
    for file in filter(None, (options.json, options.chart)):
        file.parent.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in options.kinds if storage.missing(kind) is None]
    for kind in set(options.kinds) - set(kinds):
        print(f"left out: {KINDS[kind]}: {storage.missing(kind)}")
    plan = schedule(options.seed, options.every, options.faults, kinds)
    found: dict[str, Figures] = {}
    report: dict[str, Any] = {
        "where": machine(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "faults": [asdict(fault) for fault in plan.faults],
        "contestants": {},
        "struck": {},
    }
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        path = Path(options.keep or folder)
        right = undisturbed(plan.steps, options.seed, path / "undisturbed")
        for name in options.only:
            if absent := [
                at for at in FOLDERS.get(name, ()) if not (ROOT / at).is_dir()
            ]:
                print(f"left out: {name}: {absent[0]} is missing (make peers)")
                continue
            print(f"{name}: {plan.steps} steps, {len(plan.faults)} faults", flush=True)
            done = run(name, plan, options.seed, path / name.replace(" ", "-"))
            found[name] = count(
                done.entries,
                right,
                plan.steps,
                done.seconds,
                done.restarts,
                done.actions,
            )
            print(table({name: found[name]}), flush=True)
            report["contestants"][name] = asdict(found[name])
            report["struck"][name] = done.struck
            report["where"]["load_at_end"] = round(os.getloadavg()[0], 1)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))
    if options.chart:
        options.chart.write_text(draw(found, report))
    print(table(found))


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [name for name in CONTESTANTS if name != "undisturbed"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--every", type=int, default=50, help="steps for each fault")
    parser.add_argument("--faults", type=int, default=len(KINDS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--chart", type=Path, help="draw them there, as SVG")
    parser.add_argument("--keep", type=Path, help="keep logs in this new folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
