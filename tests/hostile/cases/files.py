"""Cases of the corpus: files that are cut, lost, of another checkpoint, or of another format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.hostile import healthy
from tests.hostile.cases.paths import FILES
from tests.hostile.cases.place import Place, add

# Files that end too soon, or hold a bit that is another ------------------------------------------------------------


def cut(name: str, keep: float) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = place.get(name)
        place.put(
            name,
            data[
                : int(keep)
                if keep >= 1
                else max(len(data) - 1, 0)
                if keep < 0
                else int(len(data) * keep)
            ],
        )

    return spoil


_CUT = {
    **FILES,
    "zarr shards": ("w/c.0.0",),
    "zarr zstd": ("w/c.0.0",),
    "zarr blosc": ("w/c.0.0",),
}
_number = 0
for _kind, _names in _CUT.items():
    for _name in _names:
        for _keep in (0, 1, 0.5, -1):
            _number += 1
            add(
                f"{_name} cut at {'all but one' if _keep < 0 else _keep}",
                _kind,
                cut(_name, _keep),
                # The index ends with a line break. A metadata.json without a format is another
                # program's, and what has a .metadata is stock DCP's, and the same.
                ""
                if (_keep < 0 and _name.endswith(".index.json"))
                or (_kind, _name) == ("dcp", "metadata.json")
                else ".",
                long=_number % 3 != 0,
            )

# Files that disagree ------------------------------------------------------------------------------------------------


def other(kind: str, *names: str) -> Callable[[Place], None]:
    """These files of another checkpoint."""

    def spoil(place: Place) -> None:
        with_other = place.home / "other"
        healthy.TENSORS["w"].add_(1)
        try:
            healthy.MAKERS[kind][1](with_other)
        finally:
            healthy.TENSORS["w"].sub_(1)
        for name in names:
            shutil.copy(with_other / name, place.folder / name)
        shutil.rmtree(with_other)

    return spoil


def flip(name: str, at: int) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = bytearray(place.get(name))
        data[at] ^= 4
        place.put(name, bytes(data))

    return spoil


def config(**fields: Any) -> Callable[[Place], None]:
    return lambda p: p.json("metadata.json", lambda d: d.update(fields))


add(
    "the index of another",
    "ours",
    other("ours", "megackpt.index"),
    r"digest|not those that were saved|damaged",
)
add(
    "the .metadata of another",
    "ours",
    other("dcp", ".metadata"),
    r"\.metadata.*(digest|bytes instead)",
)
add("the data of another", "ours", other("ours", "__0_0.distcp"), "damaged|not those")
add("the common state of another kind", "ours", other("zarr", "common.pt"), r"")
add("a bit of data", "ours", flip("__0_0.distcp", 1000), "damaged")
add("a bit of the index", "ours", flip("megackpt.index", 100), "digest|head|column")
add(
    "an index with another version",
    "ours",
    flip("megackpt.index", 8),
    "index is damaged",
)
add(
    "the index of zarr",
    "ours",
    other("zarr with index", "megackpt.index"),
    r"missing|names it|holds",
)
add(
    "the index of torch_dist",
    "zarr with index",
    other("ours", "megackpt.index"),
    r"missing|names it|holds",
)
add(
    "torch_dist's metadata.json",
    "zarr",
    config(sharded_backend="torch_dist", sharded_backend_version=1),
    "metadata",
)
add(
    "zarr's metadata.json",
    "dcp",
    config(sharded_backend="zarr", sharded_backend_version=2),
    ".",
)
add("a group that tells of more arrays", "zarr",
    lambda p: p.json("zarr.json", lambda d: d["attributes"]["megackpt"].update(arrays=7)),
    "lists 7 arrays")  # fmt: skip
add(
    "an array that is gone",
    "zarr",
    lambda p: shutil.rmtree(p.folder / "b"),
    "lists 2 arrays",
)
add(
    "a chunk that is gone",
    "zarr",
    lambda p: (p.folder / "w/c.0.0").unlink(),
    "lacks the chunk",
)
add(
    "a file that is gone",
    "dcp",
    lambda p: (p.folder / "__1_0.distcp").unlink(),
    r"__1_0\.distcp",
)
add(
    "a file that is gone",
    "ours",
    lambda p: (p.folder / "__0_0.distcp").unlink(),
    r"__0_0\.distcp",
)
add("no .metadata", "dcp", lambda p: (p.folder / ".metadata").unlink(), r"\.metadata")
add(
    "nothing at all", "dcp", lambda p: [f.unlink() for f in p.folder.iterdir()], "empty"
)
add("a weight map of another file", "safetensors",
    lambda p: p.json("model.safetensors.index.json", lambda d: d["weight_map"].update(dict.fromkeys(
        d["weight_map"], "model-00001-of-00002.safetensors"))), "disagrees|is not in")  # fmt: skip
add("a weight map with a tensor more", "safetensors",
    lambda p: p.json("model.safetensors.index.json", lambda d: d["weight_map"].update(
        x="model-00001-of-00002.safetensors")), "'x' is not in")  # fmt: skip
add("two indexes", "safetensors",
    lambda p: (p.put("other.safetensors.index.json", p.get("model.safetensors.index.json")),
               (p.folder / "model.safetensors.index.json").rename(p.folder / "third.safetensors.index.json")),
    "recognised|several")  # fmt: skip
add("objects of two shapes", "zarr", lambda p: shutil.copy(
    p.folder / "rng.objects/shard_0_2.pt", p.folder / "rng.objects/shard_0_3.pt"), "one object's shards")  # fmt: skip
for _name, _change in {
    "an encoding that is none": lambda h: h.update(encoding="zip"),
    "columns beyond its end": lambda h: h["columns"]["start"].__setitem__(0, 1 << 40),
    "text of 2^60": lambda h: h.update(text=[1 << 60, 0]),
    "text of minus one": lambda h: h.update(text=[-1, 0]),
    "a number of axes that is huge": lambda h: h.update(axes=1 << 40),
    "dtypes that are none": lambda h: h.update(dtypes=["os.system"] * len(h["dtypes"])),
    "no columns": lambda h: h.update(columns={}),
    "a format that is none": lambda h: h.update(backend=["nothing", 1]),
    "a version of its format to come": lambda h: h.update(backend=["torch_dist", 999]),
    "a save's id that is a number": lambda h: h.update(save_id=5),
    "a small file's digest of one byte": lambda h: h["small"].update(
        {"common.pt": [5, "00"]}
    ),
}.items():
    add(f"an index with {_name}", "ours", partial(lambda change, p: p.index(change), _change),
        r"megackpt\.index|head|nothing|version")  # fmt: skip
add("an index of writers of number 2^30", "ours", lambda p: p.index(
    lambda h: h["columns"].update(writer=[h["columns"]["writer"][0], 0, 1 << 30, 1, 0])))  # fmt: skip

# Documents ----------------------------------------------------------------------------------------------------------

_DEEP = b"[" * 100_000
_TEXTS: Mapping[str, bytes] = {
    "nothing": b"",
    "an empty dict": b"{}",
    "a list": b"[1, 2]",
    "null": b"null",
    "nested deeply": _DEEP,
    "dicts nested deeply": b'{"a":' * 100_000,
    "not UTF-8": b'{"sharded_backend": "\xff\xfe"}',
    "a number of 5,000 digits": b'{"sharded_backend": "zarr", "sharded_backend_version": '
    + b"9" * 5000
    + b"}",
    "NaN": b'{"sharded_backend": "zarr", "sharded_backend_version": NaN}',
    "no JSON": b"<html>not found</html>",
    "spaces of 20 MiB": b" " * (20 << 20),
}
_DOCUMENTS = {
    "dcp": "metadata.json",
    "zarr": "w/zarr.json",
    "megatron zarr": "misc.uint8/.zarray",
    "safetensors": "model.safetensors.index.json",
    "bins": "pytorch_model.bin.index.json",
}
_number = 0
for _kind, _file in _DOCUMENTS.items():
    for _name, _text in _TEXTS.items():
        _number += 1
        # A metadata.json that names no format is another program's, and hides no .metadata.
        _tells = "" if _kind == "dcp" and _name != "NaN" else "."
        add(f"{_file} of {_name}", _kind, partial(lambda file, data, p: p.put(file, data), _file, _text), _tells,
            long=_number % 2 != 0)  # fmt: skip
for _name, _spoil in {
    "of no format": config(sharded_backend="os"),
    "whose format is a list": config(sharded_backend=["torch_dist"]),
    "of version 1e400": lambda p: p.put(
        "metadata.json", b'{"sharded_backend":"zarr","sharded_backend_version":1e400}'
    ),
    "of version true": config(sharded_backend_version=True),
    "of version -1": config(sharded_backend_version=-1),
    "of version 2^200": config(sharded_backend_version=1 << 200),
    "that says it twice": lambda p: p.put(
        "metadata.json", b'{"sharded_backend": "zarr", "sharded_backend": "torch_dist"}'
    ),
}.items():
    add(
        f"metadata.json {_name}",
        "dcp",
        _spoil,
        "" if "true" in _name or "twice" in _name else ".",
    )
