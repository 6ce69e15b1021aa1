"""zarr-python and the data types that it does not know by itself, also where nobody has imported them yet."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.dtype import data_type_registry

from megackpt import zarr_dtypes
from megackpt.backends.zarr import Zarr
from megackpt.backends.zarr.array_metadata import EXOTIC
from megackpt.testing import BackendSuite, Whole, World


class _Suite(BackendSuite):
    """its helpers; its tests run in test_conformance.py."""

    __test__ = False
    backend = Zarr()


KINDS = {
    kind._zarr_v3_name: kind
    for kind in vars(zarr_dtypes).values()
    if getattr(kind, "_zarr_v3_name", None)
}


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def random(name: str, *shape: int) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, name))
    return (
        np.random.default_rng(0)
        .integers(0, 256, (*shape, kind.itemsize), np.uint8)
        .view(kind)
        .reshape(shape)
    )


@pytest.mark.parametrize("name", sorted(EXOTIC))
@pytest.mark.parametrize("version", [2, 3])
def test_both_libraries_read_what_the_other_wrote(
    tmp_path: Path, name: str, version: int
) -> None:
    values = random(name, 20, 6)
    spec = {
        "driver": "zarr3" if version == 3 else "zarr",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/ours/"},
    }
    ts.open(spec, dtype=name, shape=(20, 6), create=True).result().write(
        values
    ).result()
    found = zarr.open_array(tmp_path / "ours", mode="r")
    assert found.dtype == values.dtype
    assert found[:].tobytes() == values.tobytes()
    assert found.nbytes == values.nbytes
    # Writing version 2 compressed fails in numcodecs, which asks numpy for a buffer of these types.
    theirs = zarr.create_array(
        tmp_path / "theirs",
        shape=(20, 6),
        chunks=(8, 6),
        dtype=values.dtype,
        zarr_format=version,
        compressors=None if version == 2 else "auto",
        fill_value=1,
    )
    theirs[:16] = values[:16]
    spec["kvstore"]["path"] = f"{tmp_path}/theirs/"
    read = ts.open(spec, open=True).result().read().result()
    assert read[:16].tobytes() == values[:16].tobytes()
    assert zarr.open_array(tmp_path / "theirs")[16, 0] == 1


@pytest.mark.parametrize(
    "value",
    [0.5, 1, float("nan"), float("inf"), float("-inf"), "NaN", "-Infinity", "0x7f"],
)
def test_fill_values(value: float | str) -> None:
    kind = KINDS["float8_e5m2"]()
    scalar = kind.from_json_scalar(value, zarr_format=3)
    again = kind.from_json_scalar(
        kind.to_json_scalar(scalar, zarr_format=3), zarr_format=3
    )
    assert repr(scalar) == repr(again)
    with pytest.raises(TypeError):
        kind.from_json_scalar("seven", zarr_format=3)


def test_other_data_types_are_not_ours() -> None:
    for kind in KINDS.values():
        for other in ("float32", "float16", None, 5):
            with pytest.raises(zarr_dtypes.DataTypeValidationError):
                kind.from_json(other, zarr_format=3)
        with pytest.raises(zarr_dtypes.DataTypeValidationError):
            kind.from_native_dtype(np.dtype("float32"))
    with pytest.raises(zarr_dtypes.DataTypeValidationError, match="little-endian"):
        KINDS["bfloat16"](endianness="big")


def test_it_is_light() -> None:
    code = "import megackpt.zarr_dtypes, sys; print([m for m in ('torch', 'tensorstore') if m in sys.modules])"
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("dtype", sorted(EXOTIC))
def test_plain_zarr_python_reads_every_array_after_one_line(
    tmp_path: Path, dtype: str
) -> None:
    """It opens the group before, reads what it knows, and finds the line in the attributes."""
    tensors = {
        "odd": Whole.random(dtype, (7, 5), (3, 2), 1),
        "odd.shards": Whole.random(dtype, (5 << 10, 1 << 10), (5 << 10, 1 << 10), 2),
        "known": Whole.random("float32", (4,), (2,), 3),
    }
    world = World(tensors, {"object": {(0,): b"blob"}}, b"common")
    _Suite().save(tmp_path / "c", world, ranks=2)
    for key, whole in tensors.items():
        (tmp_path / key).write_bytes(whole.values.tobytes())
    told = run(
        f"""
        import zarr, json, pathlib, warnings
        here = pathlib.Path({str(tmp_path)!r})
        group = zarr.open_group(here / "c", mode="r")
        assert group["known"][:].tobytes() == (here / "known").read_bytes()
        try:
            group["odd"]
        except ValueError as error:
            print(error)
        line = json.loads((here / "c/odd/zarr.json").read_text())["attributes"]["megackpt"]
        assert group.attrs["megackpt"]["zarr-python"] == line
        assert "megackpt" not in group["known"].attrs
        exec(line)
        warnings.simplefilter("ignore")  # our files that are no arrays
        group = zarr.open_group(here / "c", mode="r")
        members = dict(group.members())
        print(sorted(members))
        for name, array in members.items():
            assert array[:].tobytes() == (here / array.attrs["key"]).read_bytes(), name
        assert members["odd.shards"].shards is not None
        """
    )
    *refused, members = told.splitlines()
    # zarr 3.1 only collects entry points; 3.4 loads them.
    assert refused in ([f"No Zarr data type found that matches '{dtype}'"], [])
    assert members == "['known', 'odd', 'odd.shards']"


def test_the_entry_points_name_every_kind() -> None:
    points = entry_points(group="zarr.data_type")
    assert {point.name for point in points} == EXOTIC == set(KINDS) - {""}
    for point in points:
        assert point.load() is KINDS[point.name]
    assert set(data_type_registry.contents) >= EXOTIC


def test_zarr_python_does_not_load_entry_points_by_itself_yet() -> None:
    """When this fails, the line is needed no more for that release of zarr-python: tell it in docs/zarr.md."""
    code = "import zarr.dtype as d; print('bfloat16' in d.data_type_registry.contents)"
    assert run(code).strip() == "False"
    loaded = "import zarr, zarr.dtype as d; d.data_type_registry._lazy_load(); print(d.data_type_registry.contents)"
    assert "'bfloat16'" in run(loaded)
