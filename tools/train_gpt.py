"""Trains a small GPT at any tensor x pipeline x data parallelism and checkpoints it with megackpt.

    python tools/train_gpt.py --dir run
    python -m torch.distributed.run --standalone --nproc-per-node 4 tools/train_gpt.py --dir run --tp 2

In order: `Grid`, my place among the ranks; the model, whose parts say in `sharded_state_dict` which piece of
which whole tensor they hold; `Trainer`: one step, and the whole state of a run as one dictionary, the same to
save and to load. Nothing in it depends on the number of ranks, so a run resumes at any parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that everybody knows
from sharded_adam import ShardedAdam
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megackpt
from megackpt import ShardedObject, ShardedTensor, ShardedTensorFactory
from megackpt.adapters.modules import (
    ParallelLayout,
    make_sharded_tensors_for_checkpoint,
)
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megackpt.manager import CheckpointManager

Group = dist.ProcessGroup | None  # None: this rank alone
Offsets = tuple[
    tuple[int, int, int], ...
]  # (axis, number of my piece, number of pieces)
State = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a step. Text is bytes, so there are 256 tokens."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 352
    context: int = 128
    batch: int = 16  # sequences of a step, over all ranks
    microbatches: int = (
        2  # pieces in which a rank's part of the batch goes through the pipeline
    )


@dataclass(frozen=True)
class Grid(ParallelLayout):
    """My place among the ranks: tensor-parallel neighbours are counted first, then data, then pipeline."""

    rank: int = 0
    tp_group: Group = None
    dp_cp_group: Group = None
    tied_group: Group = None  # first and last stage, where these are two

    @property
    def first(self) -> bool:
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def stage(self, further: int) -> int:
        """The rank with my place in the stage ``further`` stages on."""
        return self.rank + further * self.tp_size * self.dp_size

    def cut(self, whole: Tensor, axis: int) -> nn.Parameter:
        """My tensor-parallel piece of a weight."""
        return nn.Parameter(
            whole.chunk(self.tp_size, axis)[self.tp_rank].contiguous().clone()
        )


def join(tp: int, pp: int) -> Grid:
    """Meet the ranks that torchrun has started. Without torchrun: alone, and without any process group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dp = world // (tp * pp)
    if dp * tp * pp != world:
        raise SystemExit(
            f"TP{tp} x PP{pp} needs a multiple of {tp * pp} processes, not {world}"
        )
    if world == 1:
        return Grid()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), torch.arange(world, device="cpu").view(pp, dp, tp)

    def group(rows: Tensor) -> Group:  # every rank has to make every group
        groups = [(row, dist.new_group(row)) for row in rows.tolist() if len(row) > 1]
        return next((mine for row, mine in groups if rank in row), None)

    groups = {
        "tp_group": group(ranks.view(-1, tp)),
        "dp_cp_group": group(ranks.mT.reshape(-1, dp)),
    }
    tied_group = group(ranks[[0, -1]].view(2, -1).T) if pp > 1 else None
    place = vars(ParallelLayout.of(rank, tp=tp, dp=dp, pp=pp))
    return Grid(**{**place, **groups}, rank=rank, tied_group=tied_group)


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over the ranks of a group, as a new tensor."""
    if group is None:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x, op, group)
    return x


class Reduce(torch.autograd.Function):
    """Sums x over one group on the way forward, and its gradient over another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Group, back: Group) -> Tensor:
        ctx.back = back
        return all_reduce(x, forth)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(grads[0], ctx.back), None, None


def enter(x: Tensor, grid: Grid) -> Tensor:
    """Into a tensor-parallel part: all ranks have the same x, and their gradients add up."""
    return cast(Tensor, Reduce.apply(x, None, grid.tp_group))  # type: ignore[no-untyped-call]


def leave(x: Tensor, grid: Grid) -> Tensor:
    """Out of it: the ranks' parts x add up, and each has the gradient of the sum."""
    return cast(Tensor, Reduce.apply(x, grid.tp_group, None))  # type: ignore[no-untyped-call]


def draw(name: str, *shape: int, std: float = 0.02) -> Tensor:
    """First values of a whole weight. They depend on its name and the seed, never on who asks."""
    generator = torch.Generator().manual_seed(
        torch.initial_seed() ^ zlib.crc32(name.encode())
    )
    return torch.randn(shape, generator=generator, device="cpu") * std


def declare_swiglu(
    key: str, x: Tensor, grid: Grid, offsets: Offsets
) -> ShardedTensorFactory:
    """x is my rows of W over my rows of V; the checkpoint has all rows of W over all rows of V.

    So x is two distant pieces of one tensor, which a factory parts and joins. The same holds for its moments.
    """

    def build(key: str, x: Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        n, (w, v) = len(offsets), x.chunk(2)
        mine, pieces, same = (
            grid.tp_rank,
            2 * grid.tp_size,
            {"replica_id": replica_id, "prepend_axis_num": n},
        )
        w_piece = ShardedTensor.from_rank_offsets(
            key, w, *offsets, (n, mine, pieces), **same
        )
        v_piece = ShardedTensor.from_rank_offsets(
            key, v, *offsets, (n, grid.tp_size + mine, pieces), **same
        )
        return [w_piece, v_piece]

    return ShardedTensorFactory(
        key, x, build, torch.cat, replica_id=(0, 0, grid.dp_rank)
    )


class Layer(nn.Module):
    """Causal attention and a SwiGLU, each cut over the tensor-parallel ranks."""

    def __init__(self, number: int, config: Config, grid: Grid) -> None:
        super().__init__()
        width, ffn, std = config.width, config.ffn, 0.02 / (2 * config.layers) ** 0.5
        self.grid, self.head = grid, config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # The rows of qkv go head by head (q, k, v of head 0, then of head 1, ...): any cut takes whole heads.
        self.qkv = grid.cut(draw(f"{number}.qkv", 3 * width, width), 0)
        self.out = grid.cut(draw(f"{number}.out", width, width, std=std), 1)
        w, v = (grid.cut(draw(f"{number}.{half}", ffn, width), 0) for half in "wv")
        self.fc1 = nn.Parameter(torch.cat([w, v]))
        self.fc2 = grid.cut(draw(f"{number}.fc2", width, ffn, std=std), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        qkv = F.linear(enter(x, self.grid), self.qkv).view(
            *x.shape[:2], -1, 3, self.head
        )
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (batch, my heads, context, head)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return leave(F.linear(y.transpose(1, 2).flatten(2), self.out), self.grid)

    def mlp(self, x: Tensor) -> Tensor:
        w, v = F.linear(enter(x, self.grid), self.fc1).chunk(2, -1)
        return leave(F.linear(F.silu(w) * v, self.fc2), self.grid)

    def sharded_state_dict(self, prefix: str, offsets: Offsets) -> State:
        axes = {
            "qkv": 0,
            "out": 1,
            "fc2": 1,
        }  # along which each weight is cut; the norms are not
        weights = self.state_dict(
            keep_vars=True
        )  # the parameters themselves: the optimizer looks for them
        state = make_sharded_tensors_for_checkpoint(
            weights, prefix, axes, offsets, tp_group=self.grid
        )
        state[f"{prefix}fc1"] = declare_swiglu(
            f"{prefix}fc1", self.fc1, self.grid, offsets
        )
        return state


class Stage(nn.Module):
    """My pipeline stage: some consecutive layers, and the ends of the model.

    The embedding is cut by vocabulary, and tied: the first and the last stage, where these are two, have a copy each.
    """

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__()
        if (
            any(n % grid.tp_size for n in (256, config.heads, config.ffn))
            or config.batch % grid.dp_size
        ):
            raise SystemExit(
                f"{config} cannot be cut for TP{grid.tp_size} x DP{grid.dp_size}"
            )
        self.config, self.grid = config, grid
        begin, end = (
            n * config.layers // grid.pp_size for n in (grid.pp_rank, grid.pp_rank + 1)
        )
        self.span = range(begin, end)
        if grid.first or grid.last:
            self.embedding = grid.cut(draw("embedding", 256, config.width), 0)
        if grid.first:
            self.positions = nn.Parameter(
                draw("positions", config.context, config.width)
            )
        self.layers = nn.ModuleList(Layer(number, config, grid) for number in self.span)
        if grid.last:
            self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor, x: Tensor | None = None) -> Tensor:
        """tokens (batch, context + 1), x (batch, context, width) of the stage before -> my x, or the loss."""
        if x is None:
            rows, mine = self.own(tokens[:, :-1])
            x = (
                leave(F.embedding(rows, self.embedding) * mine[..., None], self.grid)
                + self.positions
            )
        for layer in self.layers:
            x = cast(Tensor, layer(x))
        return self.loss(self.norm(x), tokens[:, 1:]) if self.grid.last else x

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The index of each token in my part of the vocabulary, and whether it has one."""
        rows = len(self.embedding)
        local = tokens - self.grid.tp_rank * rows
        return local.clamp(0, rows - 1), (local >= 0) & (local < rows)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy. No rank ever holds the logits of the whole vocabulary."""
        logits = F.linear(enter(x, self.grid), self.embedding)
        logits = logits - all_reduce(
            logits.detach().amax(-1, True), self.grid.tp_group, dist.ReduceOp.MAX
        )
        rows, mine = self.own(targets)
        right = leave(logits.gather(-1, rows[..., None])[..., 0] * mine, self.grid)
        return (leave(logits.exp().sum(-1), self.grid).log() - right).mean()

    def sharded_state_dict(self) -> State:
        """Name of a parameter -> which piece it is of the whole model. A layer is one along a new axis 0."""
        own = {
            k: p
            for k, p in self.state_dict(keep_vars=True).items()
            if not k.startswith("layers.")
        }
        state = make_sharded_tensors_for_checkpoint(
            own, "", {"embedding": 0}, tp_group=self.grid
        )
        if (
            self.grid.last and not self.grid.first
        ):  # a copy: the first stage's is written
            state["embedding"].replica_id = (1, 0, self.grid.dp_rank)
        for local, (number, layer) in enumerate(
            zip(self.span, self.layers, strict=True)
        ):
            pieces = cast(Layer, layer).sharded_state_dict(
                "layers.", ((0, number, self.config.layers),)
            )
            state |= {
                name.replace("layers", f"layers.{local}", 1): piece
                for name, piece in pieces.items()
            }
        return state


def read_text() -> Tensor:
    """The source of Python's standard library, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray().join(map(Path.read_bytes, files)), dtype=torch.uint8
    )


def batch_of(text: Tensor, position: int, config: Config) -> Tensor:
    """The run's sequences from number ``position`` on, (batch, context + 1); on all ranks, so that their random
    generators stay equal: one saved state serves them all.
    """
    length = config.context + 1
    windows = [
        (position + i) * 7919 % (len(text) // length - 1) for i in range(config.batch)
    ]
    starts = [window * length + random.randrange(length) for window in windows]
    return torch.stack([text[start : start + length] for start in starts]).long()


class Trainer:
    """Everything that a run consists of, and how it goes into a checkpoint and comes out again."""

    def __init__(self, config: Config, grid: Grid, lr: float, warmup: int = 20) -> None:
        self.config, self.grid, self.text = config, grid, read_text()
        self.step = self.position = 0  # steps done, sequences read
        self.stage = Stage(config, grid)
        share = (
            grid.dp_rank,
            grid.dp_size,
            grid.dp_cp_group,
        )  # what these ranks have in common, they deal out
        self.optimizer = ShardedAdam(self.stage.parameters(), lr, *share)
        self.scheduler = LambdaLR(
            self.optimizer, lambda n: min((n + 1) / warmup, (warmup / (n + 1)) ** 0.5)
        )

    def train_step(self) -> float:
        """One step of the optimizer on the next batch. Returns its loss (0 but on the last stage)."""
        batch = batch_of(self.text, self.position, self.config)
        self.optimizer.zero_grad()
        loss = self.forward_backward(batch.chunk(self.grid.dp_size)[self.grid.dp_rank])
        self.reduce_gradients()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.position += len(batch)
        return float(all_reduce(loss, self.grid.dp_cp_group)) / self.grid.dp_size

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """All microbatches forward through the pipeline, then all backward. Returns the mean loss."""
        grid, total, walks = self.grid, torch.zeros((), device="cpu"), []
        for piece in tokens.chunk(self.config.microbatches):
            x = None
            if not grid.first:
                x = torch.empty(
                    len(piece), self.config.context, self.config.width, device="cpu"
                )
                dist.recv(x, grid.stage(-1))
                x.requires_grad_()
            y = self.stage(piece, x)
            if grid.last:
                y = y / self.config.microbatches
                total += y.detach()
            else:
                dist.send(y.detach(), grid.stage(+1))
            walks.append((x, y))
        for x, y in walks:
            grad = torch.ones_like(y)
            if not grid.last:
                dist.recv(grad, grid.stage(+1))
            y.backward(grad)
            if x is not None:
                dist.send(cast(Tensor, x.grad), grid.stage(-1))
        return total

    def reduce_gradients(self) -> None:
        """The mean over the data-parallel ranks; then the sum over the two copies of the embedding."""
        for name, p in self.stage.named_parameters():
            p.grad = (
                all_reduce(cast(Tensor, p.grad), self.grid.dp_cp_group)
                / self.grid.dp_size
            )
            if name == "embedding":
                p.grad = all_reduce(p.grad, self.grid.tied_group)

    def state(self) -> State:
        """The whole run, for saving and for loading. Values that are not sharded are common to all ranks."""
        model, optimizer = self.stage.sharded_state_dict(), self.optimizer.state_dict()
        # Adam numbers its parameters, on each stage from 0: its state of each gets that parameter's name.
        names = get_param_id_to_sharded_param_map(model, self.stage.parameters())
        optim_state_to_sharding_state(
            optimizer, names, flat_ranges=self.optimizer.ranges
        )
        rng = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "rng": ShardedObject("rng", rng, (1,), (0,), replica_id=self.grid.rank),
            "step": self.step,
            "position": self.position,
        }

    def restore(self, state: State) -> None:
        """Resume from the loaded state, of any format and parallelism."""
        self.step, self.position = state["step"], state["position"]
        self.stage.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])
        torch.set_rng_state(state["rng"]["torch"])


def train(
    trainer: Trainer, checkpoints: CheckpointManager, options: argparse.Namespace
) -> None:
    """To the end, or until a signal says that the processes will be ended: then save, whatever step it is."""
    ended, grid = False, trainer.grid
    while trainer.step < options.steps and not ended:
        loss = trainer.train_step()
        if grid.last and grid.tp_rank == grid.dp_rank == 0:
            with options.losses.open("a") as log:
                print(json.dumps({"step": trainer.step, "loss": loss}), file=log)
        ended = checkpoints.preempted()  # any rank
        if ended or trainer.step % options.save_every == 0:
            layout = {"tp": grid.tp_size, "pp": grid.pp_size, "dp": grid.dp_size}
            checkpoints.save(trainer.step, trainer.state(), content_metadata=layout)


def main() -> None:
    options = parse()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(options.seed)
    grid = join(options.tp, options.pp)
    print(f"rank {grid.rank} is process {os.getpid()}", flush=True)
    trainer = Trainer(Config(), grid, options.lr)
    strategy = megackpt.Strategy(options.format, audit=options.audit)
    with CheckpointManager(
        options.dir, strategy, keep_last=options.keep_last
    ) as checkpoints:
        checkpoints.on_signal(signal.SIGTERM)
        if options.load:
            trainer.restore(megackpt.load(trainer.state(), options.load))
        elif found := checkpoints.restore(trainer.state()):  # the run's newest good one
            trainer.restore(found.state)
        if options.resave:
            megackpt.save(trainer.state(), options.resave, "torch_dist")
        train(trainer, checkpoints, options)
    if dist.is_initialized():
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, required=True, help="the run; an existing one is resumed"
    )
    parser.add_argument("--steps", type=int, default=100, help="train until this step")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument(
        "--pp",
        type=int,
        default=1,
        help="pipeline stages; what remains is data-parallel",
    )
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    parser.add_argument(
        "--keep-last", type=int, metavar="N", help="keep this many checkpoints, not all"
    )
    parser.add_argument(
        "--format", default="torch_dist", help="of the checkpoints that are written"
    )
    parser.add_argument(
        "--audit",
        choices=("off", "sample", "full"),
        default="off",
        help="compare what several ranks hold, before each save is complete",
    )
    parser.add_argument(
        "--load",
        type=Path,
        help="a checkpoint to start from, instead of the run's newest",
    )
    parser.add_argument(
        "--resave", type=Path, help="save the loaded state there, before the first step"
    )
    parser.add_argument(
        "--losses",
        type=Path,
        default="/dev/stdout",
        help="log: a line of JSON per step",
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
