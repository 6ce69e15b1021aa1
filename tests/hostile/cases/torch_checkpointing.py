"""Cases of the corpus: checkpoints of torch_checkpointing, their metadata and the files of their ranks."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

from tests.hostile import pickles
from tests.hostile.cases.place import Place, add

KIND = "torch_checkpointing"
METADATA = "metadata.pkl"
FILE = "model_1.pt"


def metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    """Change what the metadata say; what ``change`` returns, if anything, takes its place."""

    def spoil(place: Place) -> None:
        described = pickle.loads(place.get(METADATA))
        changed = change(described)
        place.put(METADATA, pickle.dumps(described if changed is None else changed))

    return spoil


def sharding(
    change: Callable[[dict[str, Any]], Any], path: str = '["layers.0.weight"]'
) -> Callable[[Place], None]:
    """Change the sharding of one tensor."""

    def edit(described: dict[str, Any]) -> None:
        (group,) = described["metadata"]["model"]["nested_path_to_metadata"][path]
        change(group["sharding_metadata"]["data"])

    return metadata(edit)


def group(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    def edit(described: dict[str, Any]) -> None:
        paths = described["metadata"]["model"]["nested_path_to_metadata"]
        change(paths['["layers.0.weight"]'][0])

    return metadata(edit)


def path(text: str, *groups: Any) -> Callable[[Place], None]:
    """One more path of a tensor."""
    return item(lambda i: i["nested_path_to_metadata"].update({text: list(groups)}))


def axis(dim: int) -> Callable[[Place], None]:
    return placements({"type": "Shard", "dim": dim}, SAME)


def item(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    return metadata(lambda d: change(d["metadata"]["model"]))


def layout(file: str, kind: str = "TorchSerialization") -> Callable[[Place], None]:
    told = {"file_path": file, "serialization_format": {"type": kind}}
    return item(lambda i: i["rank_to_layout_info"].update({1: told}))


def mesh(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    return sharding(lambda d: change(d["mesh_spec"]))


def placements(*found: Any) -> Callable[[Place], None]:
    return sharding(lambda d: d.update(placements=list(found)))


def default(**more: Any) -> Callable[[Place], None]:
    """The other kind of sharding."""
    data = {
        "global_shape": [7, 6],
        "global_offsets": [[0, 0]],
        "local_offsets": [[0, 0]],
        "local_sizes": [[7, 6]],
        "dtype": "torch.float32",
    }
    told = {"type": "default_tensor_v1", "data": data | more}
    return group(lambda g: g.update(sharding_metadata=told))


def cut_at(share: float, name: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = place.get(name)
        place.put(name, data[: int(len(data) * share)])

    return spoil


def pickled(data: bytes, name: str = FILE) -> Callable[[Place], None]:
    """An archive with this pickle."""

    def spoil(place: Place) -> None:
        path = place.folder / name
        with zipfile.ZipFile(path) as old:
            members = {one: old.read(one) for one in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for one, content in members.items():
                new.writestr(one, data if one.endswith("/data.pkl") else content)

    return spoil


def folder(place: Place) -> None:
    (place.folder / METADATA).unlink()
    (place.folder / METADATA).mkdir()


def named(name: Any) -> Callable[[Place], None]:
    """One more item of this name."""
    return metadata(lambda d: d["metadata"].update({name: d["metadata"]["model"]}))


def link_to(name: str, target: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        (place.folder / name).unlink()
        (place.folder / name).symlink_to(place.outside / target)

    return spoil


SHARD = {"type": "Shard", "dim": 0}
SAME = {"type": "Replicate"}
STRIDED = {"type": "StridedShard", "dim": 0, "split_factor": 7}
_DATA = {
    "global_shape": [3, 2],
    "dtype": "torch.float32",
    "mesh_spec": {"mesh_shape": (1,), "mesh_data": (0,)},
    "placements": [SAME],
}
ELSEWHERE = {
    "ranks": (0,),
    "sharding_metadata": {"type": "DTensorShardingMetadata", "data": _DATA},
}
DEEP = b"\x80\x02" + b"](" * 20_000 + b"t" * 20_000 + b"."
MODEL = r"model|layers\.0\.weight"
for _name, _spoil, _tells in (
    # The document.
    ("no metadata", lambda p: (p.folder / METADATA).unlink(), "recognised"),
    ("empty metadata", lambda p: p.put(METADATA, b""), "recognised"),
    ("metadata of a TiB that is a hole", lambda p: os.truncate(p.folder / METADATA, 1 << 40), METADATA),
    ("metadata cut at half", cut_at(0.5, METADATA), METADATA),
    ("metadata cut at all but one", lambda p: p.put(METADATA, p.get(METADATA)[:-1]), METADATA),
    ("metadata that are a link", link_to(METADATA, "secret"), "recognised|metadata"),
    ("metadata that are a folder", folder, "recognised"),
    ("metadata that are a list", metadata(lambda d: [d]), METADATA),
    ("metadata of version 1.0", metadata(lambda d: d.update(version="1.0")), "1.0"),
    ("metadata of version 9", metadata(lambda d: d.update(version=9)), "9"),
    ("metadata without a version", metadata(lambda d: d.pop("version") and None), "version"),
    ("metadata without a world size", metadata(lambda d: d.pop("world_size") and None), "world_size"),
    ("a world of -1", metadata(lambda d: d.update(world_size=-1)), METADATA),
    ("a world of 2^62", metadata(lambda d: d.update(world_size=1 << 62)), METADATA),
    ("a world of 2^200", metadata(lambda d: d.update(world_size=1 << 200)), METADATA),
    ("a world of text", metadata(lambda d: d.update(world_size="4")), METADATA),
    ("items that are a list", metadata(lambda d: d.update(metadata=["nested_path_to_metadata"])), METADATA),
    ("an item that is None", metadata(lambda d: d["metadata"].update(extra=None)), METADATA),
    ("an item that leads out", named("../../outside/secret"), "secret_0"),
    ("an item with a number as a name", named(7), METADATA),
    ("paths that are no JSON", path("{"), METADATA),
    ("a path that is nested deeply", path("[" * 100_000), METADATA),
    ("a path that is a number", path("7"), METADATA),
    ("a tensor that no file has", path('["x"]', ELSEWHERE), "x"),
    ("a tensor that is not described", item(lambda i: i["nested_path_to_metadata"].pop('["same"]') and None), "same"),
    ("a tensor without groups", path('["same"]'), METADATA),
    # Files of ranks, by their layouts.
    ("a file that leads out", layout("../../outside/secret"), "secret"),
    ("an absolute file", layout("/etc/passwd"), "passwd"),
    ("a file without a name", layout(""), "''"),
    ("a file of two ranks", layout("model_0.pt"), "several ranks"),
    ("a file of another form", layout("model_1.pt", "JsonSerialization"), "JsonSerialization"),
    ("a file that is the metadata", layout(METADATA), METADATA),
    ("a layout that is a text", item(lambda i: i["rank_to_layout_info"].update({1: "x"})), METADATA),
    ("layouts that are missing", item(lambda i: i.pop("rank_to_layout_info") and None), METADATA),
    ("a rank of text", item(lambda i: i["rank_to_layout_info"].update({"../x": None})), METADATA),
    # Shardings.
    ("a sharding of no kind", group(lambda g: g["sharding_metadata"].pop("type") and None), METADATA),
    ("a sharding of another kind", group(lambda g: g["sharding_metadata"].update(type="Mine")), "Mine"),
    ("a shape of 2^62 rows", sharding(lambda d: d.update(global_shape=[1 << 62, 6])), MODEL),
    ("a shape of 2^300 rows", sharding(lambda d: d.update(global_shape=[1 << 300, 6])), MODEL),
    ("a negative shape", sharding(lambda d: d.update(global_shape=[-7, 6])), MODEL),
    ("a shape of floats", sharding(lambda d: d.update(global_shape=[7.0, 6.0])), MODEL),
    ("a shape of texts", sharding(lambda d: d.update(global_shape=["7", "6"])), METADATA),
    ("another shape", sharding(lambda d: d.update(global_shape=[9, 6])), MODEL),
    ("a shape of no dimension", sharding(lambda d: d.update(global_shape=[])), METADATA),
    ("a shape of 10,000 dimensions", sharding(lambda d: d.update(global_shape=[1] * 10_000)), METADATA),
    ("another dtype", sharding(lambda d: d.update(dtype="torch.int8")), MODEL),
    ("a dtype of no kind", sharding(lambda d: d.update(dtype=7)), METADATA),
    ("a mesh of 2^40 ranks", mesh(lambda m: m.update(mesh_shape=(1 << 40,))), METADATA),
    ("a mesh of no rank", mesh(lambda m: m.update(mesh_shape=(0, 2))), METADATA),
    ("a mesh of -2 ranks", mesh(lambda m: m.update(mesh_shape=(-2, -2))), METADATA),
    ("a mesh of other ranks", mesh(lambda m: m.update(mesh_data=(5, 6, 7, 8))), MODEL),
    ("a mesh of one rank, four times", mesh(lambda m: m.update(mesh_data=(0, 0, 0, 0))), MODEL),
    ("a mesh in another order", mesh(lambda m: m.update(mesh_data=(3, 2, 1, 0))), MODEL),
    ("a shard of axis 9", axis(9), METADATA),
    ("a shard of axis -9", axis(-9), METADATA),
    ("a partial sum", placements({"type": "Partial"}, SAME), "one box"),
    ("a strided shard of another factor", placements(STRIDED, SHARD), "one box"),
    ("replicas instead of shards", placements(SAME, SAME), MODEL),
    ("more placements than dimensions", placements(SHARD, SHARD, SHARD), METADATA),
    ("ranks that are a number", group(lambda g: g.update(ranks=7)), ""),
    ("a box of the whole that no rank has", default(), MODEL),
    ("a box beyond the tensor", default(global_offsets=[[1 << 62, 0]]), MODEL),
    ("a negative box", default(global_offsets=[[-1, -1]]), MODEL),
    ("boxes of other dimensions", default(local_sizes=[[7]]), METADATA),
    ("no box", default(global_offsets=[], local_offsets=[], local_sizes=[]), MODEL),
    ("two boxes of a rank", default(local_offsets=[[0, 0], [1, 0]]), MODEL),
    # What a rank has written.
    ("a rank's file is missing", lambda p: (p.folder / FILE).unlink(), r"rank 1|model_1"),
    ("a rank's file is empty", lambda p: p.put(FILE, b""), "model_1"),
    ("a rank's file cut at half", cut_at(0.5, FILE), "model_1"),
    ("a rank's file is a link", link_to(FILE, "secret"), "model_1|rank 1"),
    ("a rank's file is another rank's", lambda p: p.put(FILE, p.get("optimizer_0.pt")), "rank 1|optimizer"),
    ("a rank's file of a TiB that is a hole", lambda p: os.truncate(p.folder / FILE, 1 << 40), "model_1"),
    ("a rank's pickle is nested deeply", pickled(DEEP), "model_1"),
    ("a rank's pickle is empty", pickled(b""), "model_1"),
    ("an item that is not described is a link", link_to("step_1.pt", "secret"), "step_1"),
    ("an item that is not described is empty", lambda p: p.put("step_1.pt", b""), "step_1"),
    ("a file that is not described", lambda p: p.put("other.bin", b"x"), ""),
):  # fmt: skip
    add(_name, KIND, _spoil, _tells)

RECOGNISED = pickles.text("nested_path_to_metadata") + b"0"
for _name, _make in pickles.RUNNING.items():
    add(
        f"metadata that run {_name}",
        KIND,
        lambda p, make=_make: p.put(
            METADATA, pickles.whole(RECOGNISED + make(f"touch {p.witness}"))
        ),
        METADATA,
    )
    add(
        f"a rank's file that runs {_name}",
        KIND,
        lambda p, make=_make: pickled(pickles.whole(make(f"touch {p.witness}")))(p),
        "model_1",
    )
