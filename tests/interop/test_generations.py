"""Megatron's torch_dist through its generations: flattened optimizer state (<= 0.15), no common.pt (>= 0.19)."""

from __future__ import annotations

import json
import math
import pickle
import runpy
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.planner import SavePlan

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.loader.load_session import LoadSession
from megackpt.state import declare
from megackpt.storage.files import LocalReader
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same

GOLDEN = Path(__file__).parent.parent / "golden"
LAYOUT_C = GOLDEN / "synthetic-layout-c"
MAKER = runpy.run_path(str(GOLDEN / "make_layout_c.py"))
Piece = MAKER["Piece"]
COMMON = "common_state/shard_0_1"
OLD = "megatron.core.dist_checkpointing.strategies.torch"

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch_dist`", "ignore:torch.distributed is disabled"
)


def change(folder: Path, edit: Callable[[Any], Any]) -> Path:
    with old_classes():
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@contextmanager
def old_classes() -> Iterator[type]:
    """``MCoreSavePlan`` of Megatron-Core <= 0.15, as far as a pickle needs it."""
    names = [OLD.rsplit(".", cut)[0] for cut in range(OLD.count("."), 0, -1)] + [OLD]
    modules = {name: types.ModuleType(name) for name in names}
    plan = type(
        "MCoreSavePlan",
        (SavePlan,),
        {"__module__": OLD, "__qualname__": "MCoreSavePlan"},
    )
    modules[OLD].MCoreSavePlan = plan  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield plan


# ---- flattened


@dataclass(frozen=True)
class Flat:
    """A tensor, the cells that it is cut into, and where the data-parallel ranks' runs of each cell begin and end."""

    tensor: torch.Tensor
    counts: tuple[int, ...]
    cuts: dict[tuple[int, ...], list[int]]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(
            n // c for n, c in zip(self.tensor.shape, self.counts, strict=True)
        )

    def pieces(self, key: str) -> list[Any]:
        """As Megatron-Core writes them: (1, ..., 1, n) elements at (cell, start)."""
        extents, axes = self.extents, len(self.counts)
        size = (*self.counts, math.prod(extents))
        found = []
        for cell, cuts in self.cuts.items():
            region = tuple(
                slice(i * n, i * n + n) for i, n in zip(cell, extents, strict=True)
            )
            run = self.tensor[region].reshape(-1)
            for rank, (start, stop) in enumerate(pairwise(cuts)):
                data = run[start:stop].clone().reshape(*(1,) * axes, stop - start)
                found.append(Piece(rank, key, data, size, (*cell, start)))
        return found


@st.composite
def flats(draw: st.DrawFn) -> Flat:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    extents = [draw(st.integers(1, 5)) for _ in counts]
    if draw(st.booleans()):  # an axis of layers
        counts, extents = [draw(st.integers(1, 3)), *counts], [1, *extents]
    volume = math.prod(extents)
    ranks = draw(st.integers(1, 4))
    inner = st.lists(
        st.integers(0, volume), min_size=ranks - 1, max_size=ranks - 1
    ).map(sorted)
    cuts = {cell: [0, *draw(inner), volume] for cell in product(*map(range, counts))}
    shape = tuple(c * n for c, n in zip(counts, extents, strict=True))
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
    )
    size = math.prod(shape) * dtype.itemsize
    made = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)
    return Flat(bits.view(dtype).reshape(shape), tuple(counts), cuts)


def write_flat(folder: Path, tensors: dict[str, Flat], *others: Any) -> Path:
    pieces = [piece for key, flat in tensors.items() for piece in flat.pieces(key)]
    about = {
        key: {"nd_reformulated_orig_global_shape": tuple(f.tensor.shape)}
        for key, f in tensors.items()
    }
    about |= {piece.name: {} for piece in others}
    with old_classes() as plan:
        MAKER["write"](folder, [*pieces, *others], plan, mcore_data=about)
    torch.save({"iteration": 7}, folder / "common.pt")
    return folder


def simple(rows: int = 6, columns: int = 4) -> Flat:
    """(rows, columns) in two cells by rows, each in three runs, one of them empty."""
    volume = rows * columns // 2
    cuts = {(i, 0): [0, columns + 1, columns + 1, volume] for i in range(2)}
    return Flat(
        torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns),
        (2, 1),
        cuts,
    )


def cut(
    key: str, tensor: torch.Tensor, axis: int, rank: int, size: int
) -> tuple[ShardedTensor, torch.Tensor]:
    """What a rank wants that holds a share of one axis."""
    start, stop = (tensor.shape[axis] * i // size for i in (rank, rank + 1))
    part = tensor.narrow(axis, start, stop - start)
    offset = tuple(start if i == axis else 0 for i in range(tensor.dim()))
    asked = ShardedTensor(
        key, None, part.dtype, tuple(part.shape), tuple(tensor.shape), offset, None
    )
    return asked, part


class TestFlattened:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(flats(), min_size=1, max_size=3), st.integers(1, 3), st.data())
    @pytest.mark.slow
    def test_any_is_the_tensor_that_it_was(
        self, flat: list[Flat], size: int, data: st.DataObject
    ) -> None:
        tensors = {f"optimizer.state.exp_avg.{i}": f for i, f in enumerate(flat)}
        axes = {
            key: data.draw(st.integers(0, f.tensor.dim() - 1))
            for key, f in tensors.items()
        }
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_flat(Path(temporary) / "ckpt", tensors)
            found = megackpt.load_plain_tensors(folder)
            assert found.keys() == tensors.keys()
            for key, f in tensors.items():
                assert_same(found[key], f.tensor)
            report = megackpt.verify(folder)
            assert report.ok, report
            assert report.checked

            def run(group: ThreadedGroup) -> None:
                wanted = {
                    key: cut(key, f.tensor, axes[key], group.rank, size)
                    for key, f in tensors.items()
                }
                asked = {key: one for key, (one, _) in wanted.items()}
                loaded = megackpt.load(
                    asked, folder, process_group=group, dtype_policy="error"
                )
                for key, (_, part) in wanted.items():
                    assert_same(loaded[key], part)
                assert loaded["iteration"] == 7

            ThreadedGroup.run(size, run)

    @pytest.mark.parametrize("to", ["torch_dist", "zarr"])
    @settings(max_examples=8, deadline=None)
    @given(flat=flats())
    def test_any_converts(self, to: str, flat: Flat) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_flat(Path(temporary) / "ckpt", {"m": flat})
            megackpt.convert(folder, Path(temporary) / "new", to)
            assert_same(
                megackpt.load_plain_tensors(Path(temporary) / "new")["m"], flat.tensor
            )
            assert megackpt.load_common_state_dict(Path(temporary) / "new") == {
                "iteration": 7
            }
            assert megackpt.verify(Path(temporary) / "new").ok

    def test_beside_others_of_all_kinds(self, tmp_path: Path) -> None:
        """Plain tensors, one-dimensional runs of older releases (which are what they seem), objects."""
        plain, run = torch.ones(2, 3), torch.arange(10.0)
        others = [
            Piece(0, "plain", plain, (2, 3), (0, 0)),
            *(
                Piece(i, "run", run[a:b].clone(), (10,), (a,))
                for i, (a, b) in enumerate([(0, 4), (4, 10)])
            ),
            Piece(1, "rng/shard_0.0_1", [5]),
            Piece(0, "rng/shard_0.1_1", [6]),
        ]
        folder = write_flat(tmp_path / "ckpt", {"flat": simple()}, *others)
        found = megackpt.load_plain_tensors(folder)
        for key, tensor in {
            "plain": plain,
            "run": run,
            "flat": simple().tensor,
        }.items():
            assert_same(found[key], tensor)
        # Of these names old releases left out the last extent.
        cells = {
            k
            for k, v in megackpt.load_sharded_metadata(folder).items()
            if isinstance(v, ShardedObject)
        }
        assert cells == {"rng/shard_0.0_1.2", "rng/shard_0.1_1.2"}
        asked = {cell: ShardedObject.empty_from_unique_key(cell) for cell in cells}
        loaded = megackpt.load(asked, folder)
        assert (loaded["rng/shard_0.0_1.2"], loaded["rng/shard_0.1_1.2"]) == (5, 6)

    def test_the_order_of_chunks_does_not_matter(self, tmp_path: Path) -> None:
        """Which part of its record a chunk is follows from where it lies."""
        opened = open_checkpoint(write_flat(tmp_path / "ckpt", {"m": simple()}))
        chunks = opened.manifest.chunks
        assert len(chunks) > len(
            set(zip(chunks.file.tolist(), chunks.start.tolist(), strict=True))
        )
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(len(chunks))
            shuffled = replace(opened.manifest, chunks=chunks.take(order))
            found = torch.zeros(6, 4)
            wanted = declare([ShardedTensor.from_rank_offsets("m", found)], rank=0)
            with closing(LoadSession(None)) as session:
                session.rows(replace(opened, manifest=shuffled), wanted, [found])
            assert_same(found, simple().tensor)

    def test_only_the_ranges_needed_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flat = simple(1024, 512)
        folder = write_flat(tmp_path / "ckpt", {"m": flat})
        read: list[int] = []
        into = LocalReader.read_into

        def counted(
            self: LocalReader, start: int, buffers: Sequence[memoryview]
        ) -> None:
            read.append(sum(map(len, buffers)))
            into(self, start, buffers)

        monkeypatch.setattr(LocalReader, "read_into", counted)
        asked, part = cut("m", flat.tensor, 0, 0, 64)
        assert_same(
            megackpt.load({"m": asked}, folder, validate_access_integrity=False)["m"],
            part,
        )
        needed = part.nbytes + (folder / ".metadata").stat().st_size
        assert needed < sum(read) < needed + 30_000

    @pytest.mark.parametrize("step", [1, 2])
    def test_runs_saved_as_views_of_something_larger(
        self, tmp_path: Path, step: int
    ) -> None:
        flat = simple()
        larger = torch.zeros(3 + 24 * step)
        larger[3::step] = flat.tensor.reshape(-1)
        size, views = (2, 1, 12), []
        for i, (start, stop) in product(range(2), [(0, 5), (5, 12)]):
            first, last = (3 + step * (12 * i + end) for end in (start, stop))
            view = larger[first:last:step].reshape(1, 1, -1)
            assert view.untyped_storage().nbytes() == larger.nbytes
            views.append(Piece(i, "m", view, size, (i, 0, start)))
        about = {"m": {"nd_reformulated_orig_global_shape": (6, 4)}}
        MAKER["write"](tmp_path / "ckpt", views, mcore_data=about)
        assert_same(megackpt.load_plain_tensors(tmp_path / "ckpt")["m"], flat.tensor)

    def test_a_changed_byte_is_found(self, tmp_path: Path) -> None:
        folder = write_flat(tmp_path / "ckpt", {"m": simple()})
        file = folder / "__2_0.distcp"
        whole = file.read_bytes()
        at = whole.index(simple().tensor.reshape(-1)[5:12].numpy().tobytes()) + 9
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (problem,) = megackpt.verify(
            folder
        ).problems  # once, though several boxes lie in this record
        assert "data/0 does not match its checksum" in problem

    def drop(self, metadata: Any) -> None:
        metadata.state_dict_metadata["m"].chunks.pop()

    def overlap(self, metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["m"].chunks[0]
        assert chunk.sizes == torch.Size([1, 1, 5])
        chunk.sizes = torch.Size([1, 1, 6])

    def short(self, metadata: Any) -> None:
        metadata.state_dict_metadata["m"].chunks[0].sizes = torch.Size([1, 1, 4])

    def beyond(self, metadata: Any) -> None:
        metadata.state_dict_metadata["m"].chunks[-1].sizes = torch.Size([1, 1, 8])

    def two_cells(self, metadata: Any) -> None:
        metadata.state_dict_metadata["m"].chunks[0].sizes = torch.Size([2, 1, 5])

    def twice(self, metadata: Any) -> None:
        places = list(metadata.storage_data.values())
        places[-1].relative_path, places[-1].offset = (
            places[0].relative_path,
            places[0].offset,
        )

    @pytest.mark.parametrize("lie", [drop, overlap, short, beyond, two_cells, twice])
    def test_runs_that_lie(
        self, tmp_path: Path, lie: Callable[[Any, Any], None]
    ) -> None:
        folder = change(
            write_flat(tmp_path / "ckpt", {"m": simple()}), lambda m: lie(self, m)
        )
        with pytest.raises(CorruptCheckpoint, match="'m'"):
            megackpt.load_plain_tensors(folder)

    @pytest.mark.parametrize("hole", [drop, short])
    def test_verify_finds_holes(
        self, tmp_path: Path, hole: Callable[[Any, Any], None]
    ) -> None:
        folder = change(
            write_flat(tmp_path / "ckpt", {"m": simple()}), lambda m: hole(self, m)
        )
        problems = megackpt.verify(folder).problems
        assert problems
        assert all("'m'" in problem for problem in problems)
        assert any("no stored chunk holds it" in problem for problem in problems)

    @pytest.mark.parametrize(
        "shape",
        [
            (6, 5),
            (24,),
            (5, 4),
            (3, 8),
            (),
            (6, 4, 1),
            (0, 4),
            (-6, -4),
            ("6", 4),
            24,
            (1 << 70, 4),
        ],
    )
    def test_shapes_that_lie(self, tmp_path: Path, shape: Any) -> None:
        folder = write_flat(tmp_path / "ckpt", {"m": simple()})

        def edit(metadata: Any) -> None:
            metadata.mcore_data["m"]["nd_reformulated_orig_global_shape"] = shape

        with pytest.raises(CorruptCheckpoint, match=r"'m'.* flattened"):
            megackpt.load_plain_tensors(change(folder, edit))

    def test_shapes_from_the_plans_of_ranks(self, tmp_path: Path) -> None:
        """Where Metadata has no ``mcore_data``, the ranks' plans do. They may not disagree."""
        folder = write_flat(tmp_path / "ckpt", {"m": simple()})

        def move(metadata: Any) -> None:
            for plan in metadata.all_local_plans:
                object.__setattr__(plan, "mcore_data", metadata.mcore_data)
            del metadata.mcore_data

        assert_same(
            megackpt.load_plain_tensors(change(folder, move))["m"], simple().tensor
        )

        def disagree(metadata: Any) -> None:
            about = {"m": {"nd_reformulated_orig_global_shape": (12, 2)}}
            object.__setattr__(metadata.all_local_plans[1], "mcore_data", about)

        with pytest.raises(
            CorruptCheckpoint, match=r"flattened, of shapes \(6, 4\) and \(12, 2\)"
        ):
            megackpt.load_plain_tensors(change(folder, disagree))


# ---- no common.pt


class TestLayoutC:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return shutil.copytree(LAYOUT_C, tmp_path / "ckpt")

    def test_the_common_state_is_one_of_the_objects(self) -> None:
        assert not (LAYOUT_C / "common.pt").exists()
        assert json.loads((LAYOUT_C / "metadata.json").read_text()).keys() == {
            "sharded_backend",
            "sharded_backend_version",
        }
        assert megackpt.load_common_state_dict(LAYOUT_C) == MAKER["COMMON"]
        assert (
            megackpt.load_content_metadata(LAYOUT_C)
            == MAKER["COMMON"]["content_metadata"]
        )
        assert COMMON not in megackpt.load_sharded_metadata(LAYOUT_C)

    def test_it_is_a_checkpoint_of_dcp(self) -> None:
        """What the script makes up is right at least as far as stock DCP knows."""
        expected = MAKER["tensors"]()
        state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(state, checkpoint_id=LAYOUT_C, no_dist=True)
        for key, tensor in expected.items():
            assert_same(state[key], tensor)

    def test_the_script_still_makes_it(self, tmp_path: Path) -> None:
        MAKER["write"](tmp_path / "ckpt", MAKER["pieces"]())
        found, golden = (
            megackpt.load_plain_tensors(folder)
            for folder in (tmp_path / "ckpt", LAYOUT_C)
        )
        assert found.keys() == golden.keys()
        for key, tensor in golden.items():
            assert_same(found[key], tensor)
        assert sorted(p.name for p in LAYOUT_C.iterdir()) == sorted(
            p.name for p in (tmp_path / "ckpt").iterdir()
        )

    def test_with_the_list_of_digests_that_it_may_have(self, copy: Path) -> None:
        (copy / "integrity.json").write_text(
            json.dumps({"algorithm": "sha256", "files": {}})
        )
        assert megackpt.load_common_state_dict(copy) == MAKER["COMMON"]
        report = megackpt.verify(copy)
        assert report.ok
        assert not report.foreign
        megackpt.convert(LAYOUT_C, copy, "torch_dist", overwrite=True)
        assert not (
            copy / "integrity.json"
        ).exists()  # it would tell of files that are no more

    def test_common_pt_counts_where_there_are_both(self, copy: Path) -> None:
        torch.save({"iteration": 8}, copy / "common.pt")
        assert megackpt.load_common_state_dict(copy) == {"iteration": 8}
        assert COMMON not in megackpt.load_sharded_metadata(copy)
        assert megackpt.load({}, copy, validate_access_integrity=False) == {
            "iteration": 8
        }
        assert megackpt.verify(copy).ok
        megackpt.convert(copy, copy.parent / "new", "torch_dist")
        assert megackpt.load_common_state_dict(copy.parent / "new") == {"iteration": 8}

    @pytest.mark.parametrize("to", ["torch_dist", "zarr"])
    def test_unknown_classes_survive_conversion(self, tmp_path: Path, to: str) -> None:
        recipe = types.new_class("Recipe")
        recipe.__module__, recipe.steps = "somebodys", 3  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                sys.modules, "somebodys", types.SimpleNamespace(Recipe=recipe)
            )
            pieces = [
                Piece(0, COMMON, [{"args": recipe()}]),
                Piece(0, "w", torch.ones(3), (3,), (0,)),
            ]
            MAKER["write"](tmp_path / "ckpt", pieces)
        megackpt.convert(tmp_path / "ckpt", tmp_path / "new", to)
        for folder in (tmp_path / "ckpt", tmp_path / "new"):
            with pytest.raises(
                UntrustedClass,
                match=r"the common state: the object holds somebodys\.Recipe",
            ):
                megackpt.load_common_state_dict(folder)
            (args,) = megackpt.load_common_state_dict(folder, trusted=[recipe]).values()
            assert type(args) is recipe

    @pytest.mark.parametrize("value", [{"iteration": 1}, [{}, {}], [], 5])
    def test_anything_but_a_list_of_one_is_refused(
        self, tmp_path: Path, value: Any
    ) -> None:
        MAKER["write"](tmp_path / "ckpt", [Piece(0, COMMON, value)])
        with pytest.raises(
            CorruptCheckpoint, match=r"the common state: a pickle holds no list of one"
        ):
            megackpt.load_common_state_dict(tmp_path / "ckpt")

    def test_a_list_of_one_that_is_no_dict(self, tmp_path: Path) -> None:
        MAKER["write"](tmp_path / "ckpt", [Piece(0, COMMON, [[1]])])
        with pytest.raises(
            CorruptCheckpoint, match="the common state is a list, not a dict"
        ):
            megackpt.load_common_state_dict(tmp_path / "ckpt")

    def test_a_grid_of_common_states_is_none(self, tmp_path: Path) -> None:
        """Under names that resemble it there are objects like others."""
        MAKER["write"](
            tmp_path / "ckpt",
            [Piece(0, "common_state/shard_1_2", [5]), Piece(0, COMMON, [{"a": 1}])],
        )
        assert megackpt.load_common_state_dict(tmp_path / "ckpt") == {"a": 1}
        assert set(megackpt.load_sharded_metadata(tmp_path / "ckpt")) == {
            "common_state/shard_1_2"
        }

    def test_a_changed_byte_of_it_is_found(self, copy: Path) -> None:
        file = copy / "__0_0.distcp"
        whole = file.read_bytes()
        at = whole.index(b"dp_reshardable")
        file.write_bytes(whole[:at] + b"D" + whole[at + 1 :])
        (problem,) = megackpt.verify(copy).problems
        assert problem.startswith(
            "the common state: data.pkl does not match its checksum"
        )
        with pytest.raises(
            CorruptCheckpoint,
            match=r"the common state: the bytes of data\.pkl are damaged",
        ):
            megackpt.load_common_state_dict(copy)
