"""What the audits of a process have compared and found."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megackpt.planning.manifest import ShardId
from megackpt.saver.audit import AllReplicas


@dataclass
class Audits:
    """Of each save how many shards rank 0 has compared; the keys that differed; the log."""

    compared: list[int] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    text: str = ""

    @classmethod
    def watched(cls) -> Audits:
        """The audits of all later saves of this process."""
        found = cls()
        differing = AllReplicas.differing

        def compare(replicas: AllReplicas, digests: Any) -> list[ShardId]:
            shards = differing(replicas, digests)
            found.compared.append(len(replicas.shards))
            keys = {*found.differing, *(shard.key for shard in shards)}
            found.differing = sorted(keys)
            return shards

        AllReplicas.differing = compare  # type: ignore[method-assign]
        handler = logging.Handler()

        def emit(record: logging.LogRecord) -> None:
            found.text += record.getMessage() + "\n"

        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("megackpt.saver").addHandler(handler)
        return found

    def write(self, folder: str) -> None:
        """For ``read`` in the process of the test."""
        if dist.get_rank() == 0:
            (Path(folder) / "audits.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Audits:
        return cls(**json.loads((folder / "audits.json").read_text()))

    def check(self, name: str, saves: int) -> None:
        """Print the figures. All saves were compared, and nothing differed."""
        print(f"{name}: {saves} saves, {sum(self.compared)} shards, {self.differing}")
        assert len(self.compared) == saves
        assert min(self.compared) > 0
        assert self.differing == []
