"""Cases of the corpus: what is special about the metadata of Megatron-FSDP, its chunks of plain tuples."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.hostile import pickles
from tests.hostile.cases.place import Place, add

KIND = "fsdp_dtensor"
KEYS = {
    "a layer": "model.module.decoder.layers.0.mlp.linear_fc2.weight",
    "half of a layer": "model.module.decoder.layers.0.mlp.linear_fc1.weight_w",
    "an expert": "model.module.decoder.layers.1.mlp.experts.linear_fc2.weight1",
    "a state": "optimizer.state.module.module.module.decoder.final_layernorm.weight.exp_avg",
}


def chunks(key: str, change: Callable[[list[Any]], Any]) -> Callable[[Place], None]:
    """Change the chunks of a tensor, which have frozen offsets and sizes."""

    def spoil(place: Place) -> None:
        change_chunks = place.table

        def edit(table: Any) -> None:
            meta = table.state_dict_metadata[key]
            changed = change(meta.chunks)
            if changed is not None:
                meta.chunks = changed

        change_chunks(edit)

    return spoil


def each(**changed: Callable[[tuple[int, ...]], Any]) -> Callable[[list[Any]], Any]:
    """The chunks with other offsets or sizes."""

    def change(found: list[Any]) -> list[Any]:
        return [
            replace(chunk, **{name: f(getattr(chunk, name)) for name, f in changed.items()})
            for chunk in found
        ]  # fmt: skip

    return change


WRONG: dict[str, Callable[[list[Any]], Any]] = {
    "offsets of 2^62": each(offsets=lambda o: tuple(1 << 62 for _ in o)),
    "offsets of 2^200": each(offsets=lambda o: tuple(1 << 200 for _ in o)),
    "negative offsets": each(offsets=lambda o: tuple(-1 for _ in o)),
    "offsets of floats": each(offsets=lambda o: tuple(float(n) for n in o)),
    "offsets of texts": each(offsets=lambda o: tuple(str(n) for n in o)),
    "offsets of booleans": each(offsets=lambda o: tuple(True for _ in o)),
    "offsets in a list": each(offsets=list),
    "offsets of None": each(offsets=lambda _: None),
    "offsets of more dimensions": each(offsets=lambda o: (*o, 0)),
    "offsets of no dimension": each(offsets=lambda _: ()),
    "offsets of 10,000 dimensions": each(offsets=lambda _: (0,) * 10_000),
    "sizes of 2^62": each(sizes=lambda s: tuple(1 << 62 for _ in s)),
    "negative sizes": each(sizes=lambda s: tuple(-n for n in s)),
    "sizes of tuples": each(sizes=lambda s: (s, s)),
    "sizes of a text": each(sizes=lambda _: "44"),
    "larger sizes": each(sizes=lambda s: tuple(n + 1 for n in s)),
    "smaller sizes": each(sizes=lambda s: tuple(max(n - 1, 0) for n in s)),
    "one chunk less": lambda found: found[:1] if len(found) > 1 else [],
    "no chunks": lambda _: [],
    "the same offsets": each(offsets=lambda o: (0,) * len(o)),
}
for _what, _key in KEYS.items():
    for _name, _change in WRONG.items():
        add(
            f"{_what}: {_name}",
            KIND,
            chunks(_key, _change),
            r"\.metadata|layers|layernorm",
        )


def renamed(old: str, new: str) -> Callable[[Place], None]:
    def edit(table: Any) -> None:
        table.state_dict_metadata[new] = table.state_dict_metadata.pop(old)

    return lambda place: place.table(edit)


for _name, _new in (
    ("a name that leads out", "../../outside/secret"),
    ("a name of no text", ""),
    ("the name of another tensor", KEYS["a state"]),
):
    add(_name, KIND, renamed(KEYS["a layer"], _new), ".")
for _name, _make in pickles.RUNNING.items():
    add(
        f"metadata that run {_name}",
        KIND,
        lambda p, make=_make: p.put(
            ".metadata", pickles.whole(make(f"touch {p.witness}"))
        ),
        ".",
    )
add(
    "metadata of plain values",
    KIND,
    lambda p: p.put(".metadata", pickle.dumps({"state_dict_metadata": {}})),
    ".",
)
