"""What all mistakes share: a small model on eight ranks, its checkpoint, and what must hold when a call goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.testing import ThreadedGroup
from megackpt.tree import nested_values

piece = ShardedTensor.from_rank_offsets


@dataclass(frozen=True)
class Rank:
    """One rank of TP2 x DP2 x PP2 (dp counts experts too), and what a script calls on it."""

    group: ThreadedGroup
    run: Path

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def tp(self) -> int:
        return self.rank % 2

    @property
    def dp(self) -> int:
        return self.rank // 2 % 2

    @property
    def pp(self) -> int:
        return self.rank // 4

    def model(
        self,
        hidden: int = 8,
        layers: int = 4,
        experts: int = 4,
        vocabulary: int = 32,
        prefix: str = "",
    ) -> dict[str, Any]:
        """The sharded state of a small GPT, declared as it should be."""
        copy, everywhere = (0, 0, self.dp), (0, self.tp, self.dp)
        rows = torch.zeros(vocabulary // 2, hidden)
        name = f"{prefix}embedding.word_embeddings.weight"
        state: dict[str, Any] = {"iteration": 100}
        state["embedding"] = piece(
            name, rows, (0, self.tp, 2), replica_id=(self.pp, 0, self.dp)
        )
        for local in range(layers // 2):
            number = layers // 2 * self.pp + local
            layer, at = (0, number, layers), f"{prefix}decoder.layers"
            norm, fc1, fc2 = (
                torch.zeros(hidden),
                torch.zeros(2 * hidden, hidden),
                torch.zeros(hidden, 2 * hidden),
            )
            state[f"{local}.norm"] = piece(
                f"{at}.{number}.norm.weight", norm, replica_id=everywhere
            )
            state[f"{local}.fc1"] = piece(
                f"{at}.mlp.fc1.weight",
                fc1,
                layer,
                (1, self.tp, 2),
                replica_id=copy,
                prepend_axis_num=1,
            )
            state[f"{local}.fc2"] = piece(
                f"{at}.mlp.fc2.weight",
                fc2,
                layer,
                (2, self.tp, 2),
                replica_id=copy,
                prepend_axis_num=1,
            )
            state[f"{local}.experts"] = piece(
                f"{at}.experts.weight",
                torch.zeros(experts // 2, hidden),
                layer,
                (1, self.dp, 2),
                replica_id=(0, self.tp, 0),
                prepend_axis_num=1,
            )
        state["rng"] = ShardedObject(
            "rng_state", [self.dp], (2,), (self.dp,), (self.pp, self.tp, 0)
        )
        return state

    def save(
        self, state: Any, strategy: Any = None, step: str = "iter_0000100", **more: Any
    ) -> None:
        megackpt.save(
            state, self.run / step, strategy, process_group=self.group, **more
        )

    def load(self, state: Any, step: str = "iter_0000100", **more: Any) -> Any:
        shards = [s for s in nested_values([state]) if isinstance(s, ShardedTensor)]
        tensors = [s.data for s in shards if s.data is not None]
        before = [tensor.clone() for tensor in tensors]
        try:
            return megackpt.load(
                state, self.run / step, process_group=self.group, **more
            )
        except Exception:
            assert all(map(torch.equal, tensors, before)), (
                "a load that does not fit changes nothing"
            )
            raise


@dataclass(frozen=True)
class Stranger:
    """Somebody who makes a mistake and has nothing but the message."""

    run: Path
    stands: dict[str, bytes]

    def reads(self, mistake: Callable[[Rank], Any], error: type[Exception]) -> str:
        """The one message of all ranks, after the mistake has been made; nothing else has come of it."""
        outcomes = ThreadedGroup.outcomes(
            8, lambda group: mistake(Rank(group, self.run))
        )
        for outcome in outcomes:
            assert type(outcome) is error, outcome
        messages = {str(outcome) for outcome in outcomes}
        assert len(messages) == 1, "all ranks tell one story"
        assert files(self.run) == self.stands, (
            "nothing is written, and what stood there stands"
        )
        (message,) = messages
        title = mistake.__name__.replace("_", " ")
        print(f"\n\n=== {title}\n{error.__name__}: {message}")  # shown by pytest -s
        return message


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        if path.is_file()
        else b""
        for path in sorted(folder.rglob("*"))
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``made``: each mistake of the test's module."""
    if "made" in metafunc.fixturenames:
        found = [
            each for each in vars(metafunc.module).values() if hasattr(each, "told")
        ]
        metafunc.parametrize("made", found, ids=lambda made: made.__name__)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    run = tmp_path_factory.mktemp("run")
    ThreadedGroup.run(8, lambda group: Rank(group, run).save(Rank(group, run).model()))
    yield Stranger(run, files(run))
    loaded = ThreadedGroup.run(
        8, lambda group: Rank(group, run).load(Rank(group, run).model())
    )
    assert [state["iteration"] for state in loaded] == [100] * 8, (
        "the old checkpoint still loads"
    )
