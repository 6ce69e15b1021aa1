"""The commands: options in, an answer out."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megackpt import events
from megackpt.checkpoint import (
    Report,
    find_storage,
    in_run,
    open_checkpoint,
    remove,
    verify as verify_checkpoint,
)
from megackpt.checkpoint.opening import shared_bytes
from megackpt.cli.compare import Tolerance, compare
from megackpt.cli.output import Answer
from megackpt.errors import (
    CheckpointingException,
    MismatchError,
    NotACheckpoint,
    StorageError,
)
from megackpt.loader.regions import Regions
from megackpt.manager import NAMINGS, Run, Step, list_run
from megackpt.manager.keep_rules import KeepRules
from megackpt.manager.retention import Retention
from megackpt.planning.manifest import Manifest, TensorParts
from megackpt.progress_line import is_terminal

# int() refuses the longest numbers, and 10 digits do not number layers.
_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])", re.ASCII)
"""A part of a key, between two dots."""

_FSDP_STATE = "optimizer.state.module.module.module."
"""Keys of an optimizer's state that Megatron-FSDP saved begin so."""

Entry = dict[str, Any]


def ls(options: argparse.Namespace) -> Answer:
    """The checkpoints of a run. Raises the reason if the directory neither is nor has one."""
    run = list_run(options.directory)
    if not run.steps and run.itself is None:
        try:
            open_checkpoint(options.directory, every_table=False)
        except NotACheckpoint as error:
            raise NotACheckpoint(
                f"{error}; it contains no checkpoint either"
            ) from error
    data = {
        "location": run.location,
        "latest": run.latest and run.latest.name,
        "checkpoint": run.itself,
        "steps": run.steps,
        "trackers": run.trackers,
    }
    return Answer(data)


def verify(options: argparse.Namespace) -> Answer:
    """Read a checkpoint, or all of a run, and compare the digests. Raises like ``verify``."""
    try:
        find_storage(options.checkpoint)
    except NotACheckpoint:
        # A step that is cut off is damaged, not incomplete.
        run = list_run(options.checkpoint, has_sizes=False)
        if any(step.complete for step in run.steps):
            return _verify_run(run, options)
    report = verify_checkpoint(options.checkpoint)
    status = _verdict(report, options.allow_unchecked)
    return Answer({"ok": report.ok, **vars(report)}, status)


def _verify_run(run: Run, options: argparse.Namespace) -> Answer:
    """Verify all steps whose save is complete. The status is the worst status of a step."""
    complete = [step for step in run.steps if step.complete is not False]
    skipped = [f"{s.name}: {s.reason}" for s in run.steps if s.complete is False]

    def verified(step: Step) -> Report | CheckpointingException:
        try:
            return verify_checkpoint(f"{run.location}/{step.name}")
        except CheckpointingException as error:
            return error

    with ThreadPoolExecutor(options.jobs, "megackpt-verify") as pool:
        reports = list(pool.map(verified, complete))
    steps, problems, status = [], [], 0
    for step, report in zip(complete, reports, strict=True):
        if isinstance(report, NotACheckpoint):
            # It was removed meanwhile, or is of a format that megackpt does not read.
            skipped.append(f"{step.name}: {report}")
            continue
        if isinstance(report, CheckpointingException):
            report = Report(step.name, 0, 0, 0, False, (), unread=(str(report),))
        found = [*report.problems, *report.unread]
        problems += [f"{step.name}: {text}" for text in found]
        row = {"name": step.name, "ok": report.ok, "checked": report.checked}
        steps.append({**row, "bytes": report.bytes, "problems": len(found)})
        verdict = _verdict(report, options.allow_unchecked)
        status = max(status, verdict, key=_WORST.index)
    data = {
        "location": run.location,
        "ok": all(step["ok"] for step in steps),
        "steps": steps,
        "problems": problems,
        "skipped": skipped,
    }
    return Answer(data, status)


_WORST = (0, 7, 6, 1)
"""Exit statuses of verify."""


def _verdict(report: Report, is_unchecked_fine: bool) -> int:
    if report.problems:
        return 1
    if report.unread:
        return 6
    if report.checked or is_unchecked_fine:
        return 0
    return 7


def diff(options: argparse.Namespace) -> Answer:
    """Compare two checkpoints. Raises MismatchError if no key of either matches."""
    tolerance = None
    if options.rtol is not None or options.atol is not None:
        tolerance = Tolerance(options.rtol or 0.0, options.atol or 0.0)
    a_path, a = in_run(options.a, open_checkpoint)
    b_path, b = in_run(options.b, open_checkpoint)
    found = compare(a, b, options.select, tolerance, options.read)
    is_empty = not (found.compared or found.only_a or found.only_b)
    if is_empty and options.select != "*":
        raise MismatchError(
            f"neither {options.a} nor {options.b} has a key that matches {options.select!r}"
        )
    data = {"a": a_path, "b": b_path, "same": found.same, **vars(found)}
    if options.html:
        from megackpt.cli.report import comparison_map

        _write(options.html, comparison_map(a, b, options.select, vars(found)))
        data["html"] = options.html
    return Answer(data, int(not found.same))


def prune(options: argparse.Namespace) -> Answer:
    """Remove old checkpoints of a run. Raises NotACheckpoint if it has none that is complete."""
    run = list_run(options.directory)
    newest = run.latest
    for tracker in run.trackers:
        for step in run.steps:
            # A run that was set back: later steps neither count nor go.
            if step.complete and step.step is not None and step.name == tracker.step:
                newest = step
    if newest is None or newest.step is None:
        raise NotACheckpoint(f"{options.directory} has no complete checkpoint")
    named = {naming.style: naming for naming in NAMINGS if naming.template}
    if newest.style not in named:
        raise NotACheckpoint(
            f"{newest.name} is not a name of a manager's checkpoint: megackpt rm removes it"
        )
    keep_for = None
    try:
        if options.keep_days is not None:
            keep_for = timedelta(days=options.keep_days)
        rules = KeepRules(
            options.keep_last,
            options.keep_every,
            options.keep_best,
            options.best_metric,
            options.best_mode,
            keep_for,
        )
    except (ValueError, OverflowError) as error:
        options.usage_error(str(error))
        raise
    retention = Retention(
        run.location, named[newest.style], rules, is_rehearsal=options.dry_run
    )
    removed = retention.prune(newest.step, lambda _: None)
    data = {
        "location": run.location,
        "newest": newest.name,
        "removed": removed,
        "dry_run": options.dry_run,
    }
    return Answer(data)


def rm(options: argparse.Namespace) -> Answer:
    """Remove checkpoints of this library. Raises like ``megackpt.checkpoint.remove``.

    The command refuses links before it removes a checkpoint.
    """
    for checkpoint in options.checkpoints:
        if os.path.islink(link := checkpoint.rstrip("/")):
            raise NotACheckpoint(
                f"{link} is a link: remove its target {os.path.realpath(link)}, and the link by rm"
            )
    removed: list[str] = []
    for checkpoint in options.checkpoints:
        remove(checkpoint)
        removed.append(checkpoint)
    return Answer({"removed": removed})


def convert(options: argparse.Namespace) -> Answer:
    """Rewrite a checkpoint in another format. Raises like ``megackpt.convert``."""
    # Imports torch.
    from megackpt.cli.convert_options import convert_arguments
    from megackpt.converter import convert as convert_checkpoint

    try:
        done = convert_checkpoint(**convert_arguments(options))
    except ValueError as error:
        # An option has a wrong value, or options contradict each other.
        options.usage_error(str(error))
        raise
    return Answer(vars(done))


def export_hf(options: argparse.Namespace) -> Answer:
    """Write a checkpoint for ``from_pretrained``. Raises like ``export_huggingface``."""
    # Imports torch.
    from megackpt.huggingface import export_huggingface

    with events.operation("export-hf", options.target):
        try:
            done = export_huggingface(
                options.source,
                options.target,
                config=options.config,
                prefix=options.prefix,
                max_shard_size=options.max_shard_size,
                cast=options.cast,
            )
        except ValueError as error:
            # An option has a wrong value.
            options.usage_error(str(error))
            raise
    return Answer(vars(done))


def show(options: argparse.Namespace) -> Answer:
    """Raises MismatchError if no key matches, NotACheckpoint, CorruptCheckpoint, StorageError."""
    path, opened = in_run(
        options.checkpoint, partial(open_checkpoint, every_table=False)
    )
    manifest = opened.manifest
    numbers = _select(manifest, options.checkpoint, options.key)
    name, version = manifest.backend
    data: dict[str, Any] = {
        "location": path,
        "format": name,
        "version": version,
        "save_id": manifest.save_id,
        "digests": len(manifest.chunks.digests) > 0,
        "files": len(manifest.files) + len(opened.small),
        "chunks": len(manifest.chunks),
        "bytes": int(manifest.chunks.length.sum()),
        "shared": shared_bytes(opened.storage, manifest),
    }
    # Weights alone do not tell: DistributedDataParallel gives them the same names.
    if any(entry.key.startswith(_FSDP_STATE) for entry in manifest.tensors):
        data["names"] = "fsdp_dtensor (Megatron-FSDP)"
    if manifest.values is not None:
        data["nonfinite"] = sum(manifest.values.nonfinite.clip(0).tolist())
    if manifest.differing:
        data["differing"] = list(manifest.differing)
    if manifest.subclasses:
        data["wrapping"] = {
            key: json.loads(record)["class"] for key, record in manifest.subclasses
        }
    text = data
    has_report = options.common or options.html
    if options.key is not None or not has_report:
        has_layout = options.chunks or (options.key is not None and len(numbers) == 1)
        data["entries"] = _entries(manifest, numbers, has_layout, options.stats)
        is_whole = options.all or has_layout or options.stats
        if is_terminal(sys.stdout) and not is_whole:
            text = {**data, "entries": _folded(data["entries"])}
    if options.common:
        # Imports torch.
        from megackpt.serialization.inspection import look

        blob = Regions(opened).common()
        common = None
        if blob is not None:
            common = look(blob, f"{opened.storage.location}: the common state")
        data["common"] = text["common"] = common
    if options.html:
        from megackpt.cli.report import shard_map

        _write(options.html, shard_map(opened, title=options.checkpoint))
        data["html"] = text["html"] = options.html
    return Answer(data, text=text)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _select(manifest: Manifest, checkpoint: str, pattern: str | None) -> list[int]:
    """The number of the entry with the key ``pattern``, or else of all keys that match it."""
    numbers = manifest.numbers()
    if pattern is None:
        keys = sorted(numbers)
    elif pattern in numbers:
        keys = [pattern]
    else:
        keys = sorted(fnmatch.filter(numbers, pattern))
        if not keys:
            text = f"{checkpoint} holds no key {pattern!r}"
            if near := difflib.get_close_matches(pattern, numbers, n=3, cutoff=0.4):
                text += f"; the nearest are {', '.join(map(repr, near))}"
            raise MismatchError(text)
    return [numbers[key] for key in keys]


def _entries(
    manifest: Manifest, numbers: Sequence[int], has_layout: bool, has_stats: bool
) -> list[Entry]:
    values = manifest.values
    parts = TensorParts(manifest)
    entries = []
    for number in numbers:
        key, meta = manifest.tensors[number]
        rows = parts.rows(number)
        entry: Entry = {
            "key": key,
            "dtype": meta.dtype,
            "shape": meta.shape,
            "chunks": len(rows),
            "bytes": int(manifest.chunks.length[rows].sum()),
            "grid": manifest.grids[number],
        }
        entries.append(entry)
        if has_stats:
            entry["nonfinite"] = entry["largest"] = None
            if values is not None and values.nonfinite[number] >= 0:
                entry["nonfinite"] = int(values.nonfinite[number])
                entry["largest"] = float(values.largest[number])
        if not has_layout:
            continue
        entry["layout"] = []
        for row in rows.tolist():
            chunk = manifest.chunk(row)
            rank = None
            if chunk.writer >= 0:
                rank = chunk.writer
            layout = {
                "offset": chunk.box.offset,
                "shape": chunk.box.shape,
                **asdict(chunk.location),
                "rank": rank,
                "digests": [digest.tobytes().hex() for digest in chunk.digests],
            }
            entry["layout"].append(layout)
    return entries


def _folded(entries: Sequence[Entry]) -> list[Entry]:
    """Entries that differ only in numbers of their keys, as layers do, are one."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        pattern = _NUMBER.sub("#", entry["key"])
        alike = {**entry, "key": pattern, "grid": None}
        groups.setdefault(repr(alike), []).append(entry)
    folded = []
    for group in groups.values():
        label = group[0]["key"]
        if len(group) > 1:
            numbers = [map(int, _NUMBER.findall(entry["key"])) for entry in group]
            label, *rest = _NUMBER.split(label)
            for column, text in zip(zip(*numbers, strict=True), rest, strict=True):
                label += str(min(column))
                if min(column) < max(column):
                    label += f"-{max(column)}"
                label += text
            label += f" ({len(group)} alike)"
        folded.append({**group[0], "key": label})
    return folded
