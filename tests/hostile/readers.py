"""Everything that reads a checkpoint, tried on one directory in a process of its own, and what came of it.

``python -m tests.hostile.readers`` takes lines of JSON (a Trial) and answers each with one (an Outcome). It imports
everything once and then forks for each trial, so that a crash, a hang or a hoard ends the fork alone. In the fork:
memory is limited; an audit hook tells of processes, connections and names that lead out; inotify tells of whatever
is opened in the folder beside the checkpoint, by whomever.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOM = 3 << 30
"""Bytes of address space that a trial may take beyond what it begins with."""
PATIENCE = 60
"""Seconds after which a trial is taken for one that hangs."""

FORBIDDEN = frozenset((
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "code.__new__", "function.__new__",
    "webbrowser.open", "shutil.rmtree", "shutil.move", "os.chmod", "os.chown", "os.putenv", "ctypes.dlopen",
))  # fmt: skip
"""What no reading of a checkpoint does. (marshal.loads is missing, for that is what a late import does.)"""


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Told:
    """What was done that should not be."""

    def __init__(self, trial: Mapping[str, Any]) -> None:
        self.outside = trial["outside"]
        self.home = str(Path(trial["checkpoint"]).parent.parent)
        self.events: list[str] = []
        self.on = False
        libc = ctypes.CDLL(None, use_errno=True)
        self.watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        opened_or_read = 0x20 | 0x1
        if (
            self.watch < 0
            or libc.inotify_add_watch(self.watch, self.outside.encode(), opened_or_read)
            < 0
        ):
            raise OSError(ctypes.get_errno(), "inotify")
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        own = event == "ctypes.dlopen" and arguments == (
            None,
        )  # libc, which is loaded already
        # The process in which zarr-python decodes chunks.
        own |= event == "subprocess.Popen" and "decoding_process" in str(arguments[1])
        # The endpoint from which tensorstore reads orbax.
        own |= event == "socket.bind" and arguments[1] == ("127.0.0.1", 0)
        if event in FORBIDDEN and not own:
            self.events.append(f"{event} {str(arguments)[:200]}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            astray = ".." in path.split("/") or path.startswith(("/etc", self.outside))
            if astray:
                self.events.append(f"open {path[:200]}")

    def all(self) -> list[str]:
        self.on = False
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.watch, 1 << 16)
            while data:
                _, _, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                if name:  # the folder itself may be listed
                    self.events.append(f"opened outside: {name}")
                data = data[16 + length :]
        return sorted(set(self.events))


def print_of(value: Any) -> str:
    """A digest of nested state: equal for equal values, of whatever tensors and plain data."""
    import numpy as np
    import torch

    seen = hashlib.sha256()

    def walk(part: Any) -> None:
        if isinstance(part, Mapping):
            for key in sorted(part, key=repr):
                seen.update(repr(key).encode())
                walk(part[key])
        elif isinstance(part, list | tuple):
            seen.update(b"[%d" % len(part))
            for item in part:
                walk(item)
        elif isinstance(part, torch.Tensor):
            seen.update(f"{part.dtype}{tuple(part.shape)}".encode())
            seen.update(
                part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(part, np.ndarray):
            seen.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, int):
            seen.update(
                hex(part).encode()
            )  # Python writes no decimal numbers of more than 4,300 digits
        else:
            seen.update(repr(part).encode(errors="backslashreplace"))

    walk(value)
    return seen.hexdigest()[:16]


def described(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: (str(getattr(held, "dtype", "object")), tuple(held.global_shape))
        for key, held in found.items()
    }


def asked(trial: Mapping[str, Any], rank: int = 0, size: int = 1) -> dict[str, Any]:
    """A state that asks for all that the healthy checkpoint holds."""
    import torch

    from megackpt import ShardedObject, ShardedTensor

    state: dict[str, Any] = {}
    for key, (dtype, shape) in trial["tensors"].items():
        cut = [(0, rank, size)] if shape and shape[0] and not shape[0] % size else []
        local = [shape[0] // size, *shape[1:]] if cut else shape
        replica = 0 if cut or not rank else 1
        empty = torch.zeros(local, dtype=getattr(torch, dtype))
        state[key] = ShardedTensor.from_rank_offsets(
            key, empty, *cut, replica_id=replica
        )
    for number, name in enumerate(trial["objects"]):
        if number % size == rank:
            if "/shard_" in name:
                state[name] = ShardedObject.empty_from_unique_key(name)
            else:
                state[name] = ShardedObject(name, None, (), ())
    return state


def read_by() -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Name -> reader: of a trial, something whose print is that of the healthy checkpoint's, or an error."""
    import megackpt
    from megackpt.__main__ import main
    from megackpt.errors import CheckpointingException
    from megackpt.testing import ThreadedGroup

    def load(trial: Mapping[str, Any]) -> Any:
        return values(megackpt.load(asked(trial), trial["checkpoint"]))

    def values(state: Mapping[Any, Any]) -> Any:
        return {key: getattr(value, "data", value) for key, value in state.items()}

    def load_on_two_ranks(trial: Mapping[str, Any]) -> Any:
        outcomes = ThreadedGroup.outcomes(
            2,
            lambda group: values(
                megackpt.load(
                    asked(trial, group.rank, 2),
                    trial["checkpoint"],
                    process_group=group,
                )
            ),
            timeout=20,
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors and len(errors) < 2:
            raise RuntimeError(f"one rank failed alone: {errors[0]!r}")
        if len({(type(error), str(error)) for error in errors}) > 1:
            raise RuntimeError(f"the ranks tell different stories: {errors}")
        if errors:
            raise errors[0]
        return outcomes

    def verify(trial: Mapping[str, Any]) -> Any:
        report = megackpt.verify(trial["checkpoint"])
        if not report.ok:
            raise CheckpointingException("verify: " + "\n".join(report.problems))
        return None

    def convert(trial: Mapping[str, Any]) -> Any:
        target = str(Path(trial["checkpoint"]).parent.parent / "converted")
        to = "zarr" if trial["format"] == "torch_dist" else "torch_dist"
        try:
            megackpt.convert(
                trial["checkpoint"], target, to, workers=1, max_memory=64 << 20
            )
        except BaseException:
            if os.path.exists(target):
                raise RuntimeError(
                    "a failed conversion has left something behind"
                ) from None
            raise
        return megackpt.load_plain_tensors(target)

    def command(*words: str, same: bool = True) -> Callable[[Mapping[str, Any]], Any]:
        def run(trial: Mapping[str, Any]) -> Any:
            filled = [
                word.format(**trial, run=str(Path(trial["checkpoint"]).parent))
                for word in words
            ]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(filled)
            if code not in range(7):
                raise RuntimeError(f"exit status {code}")
            if code:
                raise CheckpointingException(
                    f"status {code}: {err.getvalue()}{out.getvalue()}"
                )
            return None

        return run

    return {
        "load": load,
        "load on two ranks": load_on_two_ranks,
        "load_plain_tensors": lambda t: megackpt.load_plain_tensors(t["checkpoint"]),
        "load_common_state_dict": lambda t: megackpt.load_common_state_dict(
            t["checkpoint"]
        ),
        "load_sharded_metadata": lambda t: described(
            megackpt.load_sharded_metadata(t["checkpoint"])
        ),
        "load_tensors_metadata": lambda t: described(
            megackpt.load_tensors_metadata(t["checkpoint"])
        ),
        "verify": verify,
        "convert": convert,
        "megackpt show": command("show", "{checkpoint}", "--chunks", "--json"),
        "megackpt show --common": command("show", "{checkpoint}", "--common"),
        "megackpt verify": command("verify", "{checkpoint}", "--allow-unchecked"),
        "megackpt diff": command("diff", "{checkpoint}", "{healthy}", "--json"),
        "megackpt ls": command("ls", "{run}"),
    }


def tried(
    trial: Mapping[str, Any], readers: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """In a fork: what each reader gave or raised."""
    from megackpt.errors import CheckpointingException

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = status("VmSize") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    told, before = Told(trial), status("VmRSS")
    outcomes: dict[str, Any] = {}
    for name, read in readers.items():
        begin = time.monotonic()
        told.on = True
        try:
            outcomes[name] = {"value": print_of(read(trial))}
        except CheckpointingException as error:
            outcomes[name] = {"error": type(error).__name__, "message": str(error)}
        except BaseException as error:  # noqa: BLE001 - just this is looked for
            import traceback

            story = "".join(traceback.format_exception(error))[-3000:]
            outcomes[name] = {
                "foreign": f"{type(error).__name__}: {error}"[:1000],
                "message": story,
            }
        told.on = False
        outcomes[name]["seconds"] = round(time.monotonic() - begin, 3)
    return {
        "readers": outcomes,
        "events": told.all(),
        "memory": status("VmHWM") - before,
    }


def forked(
    trial: Mapping[str, Any], readers: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read_end)
            answer = json.dumps(tried(trial, readers)).encode()
            with open(write_end, "wb") as file:
                file.write(answer)
        finally:
            os._exit(0)
    os.close(write_end)
    parts, deadline = [], time.monotonic() + PATIENCE
    while select.select([read_end], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(read_end, 1 << 16)
        if not part:
            break
        parts.append(part)
    else:
        os.kill(child, signal.SIGKILL)
    os.close(read_end)
    _, code = os.waitpid(child, 0)
    if code or not parts:
        return {
            "readers": {},
            "events": [f"the process ended by signal {code & 127}, or hung"],
            "memory": 0,
        }
    return dict(json.loads(b"".join(parts)))


def main() -> None:
    import megackpt.backends.safetensors
    import megackpt.backends.torch_file
    import megackpt.backends.zarr

    readers = read_by()
    # What readers import late is imported now, once. The first trial is of a healthy checkpoint that does without
    # tensorstore, whose threads no fork would have.
    first = json.loads(sys.stdin.readline())
    for name, read in readers.items():
        if name != "convert":
            read(first)
    import megackpt.converter.conversion_workers  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line), readers)), flush=True)


if __name__ == "__main__":
    main()
