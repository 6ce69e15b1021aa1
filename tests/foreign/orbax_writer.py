"""Writes checkpoints with orbax, which is in .peers: ``python -m tests.foreign.orbax_writer FOLDER KIND...``.

Each goes to FOLDER/KIND, and its expected tensors, by key, to FOLDER/KIND.expected.pt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

Tree = Any


def sharded(array: np.ndarray, *axes: str | None) -> jax.Array:
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2), ("x", "y"))
    return jax.make_array_from_callback(
        array.shape,
        NamedSharding(mesh, PartitionSpec(*axes)),
        lambda index: array[index],
    )


def arrays(scale: int = 1) -> Tree:
    """Sharded and whole arrays of all dtypes, nested in dicts, lists and tuples."""
    random = np.random.default_rng(scale)

    def some(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    dtypes = {
        name: random.integers(0, 100, (7, 5)).astype(name)
        for name in (
            *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64"),
            *("int64", "float16", "float32", "float64", "complex64"),
            *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
        )
    }
    return {
        "params": {
            "layers": [
                {"kernel": sharded(some(64, 24), "x", "y"), "bias": jnp.zeros(24)},
                {"kernel": sharded(some(64, 24), None, "y"), "bias": jnp.ones(24)},
            ],
            # scanned: the layers of one kernel along axis 1
            "scan": sharded(some(16, 3, 8), "x"),
            "pair": (some(3, 5).astype(ml_dtypes.bfloat16), some(9)),
        },
        "dtypes": dtypes,
        "step": np.array(7, np.int32),
        "mlp/~/linear_0": {"w": some(4, 4)},
    }


def leaves() -> Tree:
    """Leaves that are no arrays, too."""
    return {
        **arrays(),
        "rate": 0.5,
        "count": 12,
        "name": "tall",
        "deep": {"a/b": "short"},
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }


def expected(tree: Tree, prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, str):
            continue
        key = prefix + ".".join(
            str(getattr(k, "key", getattr(k, "idx", None))) for k in path
        )
        value = np.ascontiguousarray(jax.device_get(leaf)).reshape(np.shape(leaf))
        dtype = getattr(torch, value.dtype.name)
        bits = torch.frombuffer(
            bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8
        )
        found[key] = bits[: value.nbytes].view(dtype).reshape(value.shape).clone()
    return found


def tree_save(folder: Path, tree: Tree, **options: Any) -> None:
    args = options.pop("save_args", None)
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=args))


def small_chunks(folder: Path, tree: Tree, **options: Any) -> None:
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=512), tree)
    tree_save(folder, tree, save_args=args, **options)


def managed(folder: Path, tree: Tree) -> None:
    with ocp.CheckpointManager(folder.parent / f"{folder.name} run") as manager:
        manager.save(3, args=ocp.args.PyTreeSave(tree))
        manager.wait_until_finished()
    (folder.parent / f"{folder.name} run" / "3").rename(folder)


def composite(folder: Path, tree: Tree) -> None:
    with ocp.CheckpointManager(folder.parent / f"{folder.name} run") as manager:
        items = {name: ocp.args.PyTreeSave(tree[name]) for name in tree}
        args = ocp.args.Composite(**items, about=ocp.args.JsonSave({"a": 1}))
        manager.save(3, args=args)
        manager.wait_until_finished()
    (folder.parent / f"{folder.name} run" / "3").rename(folder)


def standard(folder: Path, tree: Tree) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def without_metadata(folder: Path, tree: Tree, **options: Any) -> None:
    tree_save(folder, tree, **options)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding"):
        (folder / name).unlink(missing_ok=True)


def aggregated(folder: Path, tree: Tree) -> None:
    """As orbax wrote before ``_METADATA``: the file "checkpoint" has the tree, and small arrays."""
    without_metadata(folder, tree["placed"], use_ocdbt=False)
    names = ocp.tree.to_flat_dict(tree["placed"])
    placed = {path: f"PLACEHOLDER://{'.'.join(path)}" for path in names}
    document = ocp.tree.from_flat_dict(placed) | tree["inline"]
    document |= {"step": 3, "rate": 0.25, "name": "x", "none": None}
    pack = sys.modules["orbax.checkpoint.msgpack_utils"].msgpack_serialize
    (folder / "checkpoint").write_bytes(pack(document))


def only_msgpack(folder: Path, tree: Tree) -> None:
    utils = sys.modules["orbax.checkpoint.msgpack_utils"]
    utils.MAX_CHUNK_SIZE = 100  # arrays of more bytes are written in flat pieces
    folder.mkdir()
    (folder / "checkpoint").write_bytes(utils.msgpack_serialize(tree))


def first(folder: Path, tree: Tree, **options: Any) -> None:
    with v1.Context(
        array_options=v1.options.ArrayOptions(
            saving=v1.options.ArrayOptions.Saving(**options)
        )
    ):
        v1.save(folder, tree)


def checkpointables(folder: Path, tree: Tree) -> None:
    v1.save_checkpointables(folder, tree)


def prefixed(tree: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
    found = {}
    for name, part in tree.items():
        found |= expected(part, f"{name}.")
    return found


def parts() -> Tree:
    return {"params": arrays(1), "opt": {"mu": arrays(2)["params"]}}


def one() -> Tree:
    return np.arange(4.0)


def one_expected(tree: Tree) -> dict[str, torch.Tensor]:
    return {"value": torch.from_numpy(tree)}


def small() -> Tree:
    wide = np.arange(221, dtype=np.float32).reshape(17, 13)
    return {"a": {"w": wide, "b": np.ones(4, ml_dtypes.bfloat16)}}


def old() -> Tree:
    inline = {
        "small": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(2),
    }
    placed = {
        "w": np.arange(12, dtype=np.int32).reshape(3, 4),
        "n": {"b": np.ones(3), "c": np.ones(2, np.complex128)},
    }
    return {"placed": placed, "inline": inline}


Write = Callable[[Path, Tree], None]
KINDS: Mapping[str, tuple[Write, Callable[[], Tree], Callable[[Tree], Any]]] = {
    "v0": (tree_save, leaves, expected),
    "v0 standard": (standard, arrays, expected),
    "v0 manager": (managed, leaves, expected),
    "v0 composite": (composite, parts, prefixed),
    "v0 plain": (lambda f, t: tree_save(f, t, use_ocdbt=False), leaves, expected),
    "v0 zarr3": (lambda f, t: tree_save(f, t, use_zarr3=True), leaves, expected),
    "v0 plain zarr3": (
        lambda f, t: tree_save(f, t, use_zarr3=True, use_ocdbt=False),
        leaves,
        expected,
    ),
    "v0 chunks": (small_chunks, arrays, expected),
    "v0 zarr3 chunks": (lambda f, t: small_chunks(f, t, use_zarr3=True), arrays, expected),
    "v0 without metadata": (without_metadata, arrays, expected),
    "v0 one array": (tree_save, one, one_expected),
    "v0 plain one array": (lambda f, t: tree_save(f, t, use_ocdbt=False), one, one_expected),
    "v0 aggregated": (aggregated, old, lambda t: expected(t["placed"]) | expected(t["inline"])),
    "v0 msgpack": (only_msgpack, small, expected),
    "v1": (first, leaves, expected),
    "v1 zarr": (lambda f, t: first(f, t, use_zarr3=False), leaves, expected),
    "v1 plain": (lambda f, t: first(f, t, use_ocdbt=False), leaves, expected),
    "v1 checkpointables": (checkpointables, parts, prefixed),
}  # fmt: skip


def processes(folder: Path, rank: int, port: int) -> None:
    """One of two processes, which save one tree together."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    tree = {
        "layers": arrays()["params"]["layers"][0],
        "scan": arrays()["params"]["scan"],
    }
    tree["layers"]["bias"] = sharded(np.ones(24, np.float32), "y")
    for name, save in {
        "v0": lambda f: tree_save(f, tree),
        "v1": lambda f: v1.save(f, tree),
    }.items():
        save(folder / f"{name} processes")
        if rank == 0:
            whole = jax.tree.map(_whole, tree)
            torch.save(expected(whole), folder / f"{name} processes.expected.pt")
        else:
            jax.tree.map(_whole, tree)


def large(folder: Path, version: str, size: int, chunk: int) -> None:
    """Arrays of 64 MiB, ``size`` MiB together, in chunks of ``chunk`` MiB."""
    rows = np.random.default_rng(1).standard_normal((4096, 4096)).astype(np.float32)
    # Rows of few bits, which compress.
    rows[::2] = rows[::2].round(1)
    # One array under many names: the writer needs little memory.
    names = [f"w{number}" for number in range(size // 64)]
    tree = dict.fromkeys(names, sharded(rows, "x"))
    if version == "v0":
        args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk << 20), tree)
        tree_save(folder, tree, save_args=args)
        return
    saving = v1.options.ArrayOptions.Saving
    storage = saving.StorageOptions(chunk_byte_size=chunk << 20)
    options = v1.options.ArrayOptions(saving=saving(storage_options=storage))
    with v1.Context(array_options=options):
        v1.save(folder, tree)


def state(folder: Path, file: Path) -> None:
    """A state of MaxText: tensors of a torch file, by keys with dots, and a little more."""
    tensors = torch.load(file)
    flat = {
        tuple(key.split(".")): sharded(tensor.numpy(), "x")
        if tensor.ndim > 2
        else tensor.numpy()
        for key, tensor in tensors.items()
    }
    tree = ocp.tree.from_flat_dict(flat)
    tree |= {"opt_state": {"mu": jnp.ones(3), "nu": None}, "step": np.array(5)}
    with ocp.CheckpointManager(folder.parent / "run", item_names=("items",)) as manager:
        items = ocp.args.Composite(items=ocp.args.PyTreeSave(tree))
        manager.save(5, args=items)
        manager.wait_until_finished()
    (folder.parent / "run" / "5").rename(folder)


def _whole(leaf: Any) -> Any:
    from jax.experimental import multihost_utils

    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return leaf


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2] == "--rank":
        processes(folder, int(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[2] == "--large":
        large(folder, sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    if sys.argv[2] == "--state":
        state(folder, Path(sys.argv[3]))
        return
    for kind in sys.argv[2:]:
        save, make, expect = KINDS[kind]
        tree = make()
        save(folder / kind, tree)
        torch.save(expect(tree), folder / f"{kind}.expected.pt")


if __name__ == "__main__":
    main()
