"""Where we stand: megackpt beside stock torch DCP and the plain-I/O limit, on the same bytes, in one run.

    python tools/benchmark.py [--gib 1] [--rounds 3] [--dir DIR] [--formats torch_dist zarr safetensors torch]

Every figure is a ratio to the limit: the same bytes written (read) by the same processes with plain
pwrite + fsync (preadv). Four gloo ranks, TP2 x DP2. Reads are warm (from the page cache).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.spawn import spawn

import megackpt

RANKS = 4
TENSOR_BYTES = 32 << 20
BATCH = 8 << 20
FORMATS = ("torch_dist", "zarr")
State = dict[str, megackpt.ShardedTensor]
Figures = dict[str, dict[str, float]]
Step = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """One rank's view of the run: where, how much, and how a step is timed."""

    root: Path
    tensors: int
    rounds: int
    rank: int
    formats: tuple[str, ...]

    def race(self, steps: Mapping[str, Step], before: Mapping[str, Step] | None = None) -> dict[str, float]:
        """Each step's seconds over those of the step "limit": the median of so many rounds, taken in turns.

        A step lasts from the moment all ranks start to the moment all are done. The first round is not counted.
        """
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.rounds + 1):
            for name, step in steps.items():
                if before:
                    before[name]()
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
        ratios = {
            name: [t / u for t, u in zip(ts, seconds["limit"], strict=True)][1:]
            for name, ts in seconds.items()
        }
        return {name: statistics.median(taken) for name, taken in ratios.items()}

    def fresh(self, name: str) -> Step:
        """Remove a directory on rank 0, so that every save is a new one."""

        def remove() -> None:
            if self.rank == 0:
                shutil.rmtree(self.root / name, ignore_errors=True)
                os.sync()

        return remove


def state_of(bench: Bench, tp: int, fill: bool = True) -> State:
    """This rank's shards, cut over ``tp`` ranks along the first axis; the rest is data-parallel."""
    rows = TENSOR_BYTES // 4 // 1024
    tp_rank, dp_rank = bench.rank % tp, bench.rank // tp
    make = torch.rand if fill else torch.zeros
    return {
        key: megackpt.ShardedTensor.from_rank_offsets(
            key, make(rows // tp, 1024), (0, tp_rank, tp), replica_id=(0, 0, dp_rank)
        )
        for key in (f"layers.{i}.weight" for i in range(bench.tensors))
    }


def data_of(shard: megackpt.ShardedTensor) -> torch.Tensor:
    return cast(torch.Tensor, shard.data)


def pieces(state: State) -> Iterator[memoryview]:
    for shard in state.values():
        octets = data_of(shard).view(torch.uint8).reshape(-1).numpy().data
        for start in range(0, len(octets), BATCH):
            yield octets[start : start + BATCH]


def limit_write(bench: Bench, state: State) -> None:
    """This rank's share of the unique bytes, as plainly as it goes."""
    bench.root.joinpath("limit").mkdir(exist_ok=True)
    file = os.open(bench.root / "limit" / f"{bench.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    share = [p for i, p in enumerate(pieces(state)) if i % 2 == bench.rank // 2]
    offset = 0
    for piece in share:
        offset += os.pwrite(file, piece, offset)
    os.fsync(file)
    os.close(file)


def limit_read(bench: Bench, state: State) -> None:
    """As many bytes as this rank's shards have, into their memory, from the files that limit_write left."""
    wanted = list(pieces(state))
    name = 0
    while wanted:
        file = os.open(bench.root / "limit" / f"{(bench.rank + name) % RANKS}", os.O_RDONLY)
        offset, size = 0, os.fstat(file).st_size
        while wanted and offset < size:
            offset += os.preadv(file, [wanted.pop()], offset)
        os.close(file)
        name += 1


def dtensors(state: State) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        key: DTensor.from_local(data_of(shard), mesh, [Replicate(), Shard(0)]) for key, shard in state.items()
    }


def read_bytes() -> int:
    """Bytes that this process has asked the kernel for so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def slice_ratio(bench: Bench, name: str, verify: bool) -> float:
    """P4: bytes read for rows [1/8, 2/8) of each tensor, over the bytes of that slice."""
    state = {
        key: megackpt.ShardedTensor.from_rank_offsets(
            key, torch.zeros(TENSOR_BYTES // 4096 // 8, 1024), (0, 1, 8)
        )
        for key in (f"layers.{i}.weight" for i in range(bench.tensors))
    }
    before = read_bytes()
    megackpt.load(
        state, bench.root / name, validate_access_integrity=False, verify=verify, process_group=None
    )
    return (read_bytes() - before) / (bench.tensors * TENSOR_BYTES / 8)


def measure(bench: Bench) -> Figures:
    """Every figure by name, and in it every contestant's ratio to the limit of the same bytes."""
    tp2, tp1, tp4 = (state_of(bench, tp) for tp in (2, 1, 4))
    sharded = dtensors(tp2)
    stock = bench.root / "dcp"
    saves: dict[str, Step] = {
        "limit": partial(limit_write, bench, tp2),
        **{name: partial(megackpt.save, tp2, bench.root / name, name) for name in bench.formats},
        "torch DCP": partial(dcp_save, sharded, checkpoint_id=stock),
    }
    folders = {"limit": "limit", "torch DCP": "dcp"}
    figures = {"P1 save": bench.race(saves, {name: bench.fresh(folders.get(name, name)) for name in saves})}
    for label, state in (
        ("P2 load, same layout", tp2),
        ("P3 load TP2 -> TP1", tp1),
        ("P3 load TP2 -> TP4", tp4),
    ):
        for verify, how in ((False, "unverified"), (True, "verified")):
            loads: dict[str, Step] = {
                "limit": partial(limit_read, bench, state),
                **{
                    name: partial(megackpt.load, state, bench.root / name, verify=verify)
                    for name in bench.formats
                },
            }
            if state is tp2 and not verify:
                loads["torch DCP"] = partial(dcp_load, sharded, checkpoint_id=stock)
            figures[f"{label}, {how}"] = bench.race(loads)
    return figures


def run(rank: int, root: Path, tensors: int, rounds: int, formats: tuple[str, ...], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    bench = Bench(root, tensors, rounds, rank, formats)
    figures = measure(bench)
    if rank == 0:
        report(figures, tensors, formats)
    dist.barrier()
    dist.destroy_process_group()


def report(figures: Figures, tensors: int, formats: tuple[str, ...]) -> None:
    names = [*formats, "torch DCP"]
    gib = tensors * TENSOR_BYTES / 2**30
    print(
        f"\n{gib:.2f} GiB unique, {RANKS} ranks TP2 x DP2, torch {torch.__version__}; ratios to the plain-I/O limit"
    )
    print(f"{'figure':38}" + "".join(f"{n:>12}" for n in names))
    for figure, row in figures.items():
        print(f"{figure:38}" + "".join(f"{row[n]:12.2f}" if n in row else f"{'-':>12}" for n in names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=1.0, help="unique bytes, in GiB")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is printed")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (a disk, not a RAM disk)")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="the formats to compare")
    options = parser.parse_args()
    formats = tuple(options.formats)
    tensors = max(1, round(options.gib * 2**30 / TENSOR_BYTES))
    root = Path(tempfile.mkdtemp(prefix="megackpt-bench-", dir=options.dir))
    try:
        arguments = (root, tensors, options.rounds, formats, f"file://{root}/rendezvous")
        spawn(run, arguments, nprocs=RANKS)  # type: ignore[no-untyped-call]
        bench = Bench(root, tensors, 1, 0, formats)
        for verify in (False, True):
            row = {name: slice_ratio(bench, name, verify) for name in formats}
            label = f"P4 bytes read / needed, {'verified' if verify else 'unverified'}"
            print(f"{label:38}" + "".join(f"{row[n]:12.2f}" for n in formats) + f"{'-':>12}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
