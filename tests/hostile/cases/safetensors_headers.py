"""Cases of the corpus: headers of safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from tests.hostile.cases.place import Place, add

# safetensors --------------------------------------------------------------------------------------------------------


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = place.get("model.safetensors")
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        found = change(document)
        told = found if isinstance(found, bytes) else json.dumps(document).encode()
        place.put(
            "model.safetensors",
            len(told).to_bytes(8, "little") + told + data[8 + length :],
        )

    return spoil


def length_of(number: int) -> Callable[[Place], None]:
    return lambda p: p.put(
        "model.safetensors",
        number.to_bytes(8, "little") + p.get("model.safetensors")[8:],
    )


_ENTRY = b'{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}'
for _name, _spoil in {
    "of 2^63 bytes": length_of(1 << 63),
    "of 2^64 - 1 bytes": length_of((1 << 64) - 1),
    "of no bytes": length_of(0),
    "that ends too soon": length_of(20),
    "beyond the file": length_of(1 << 20),
    "of 99 MB": lambda p: (length_of(99_000_000)(p), os.truncate(p.folder / "model.safetensors", 1 << 30)),
    "not UTF-8": header(lambda _: b'{"\xff": ' + _ENTRY + b"}"),
    "with a name twice": header(lambda _: b'{"w": ' + _ENTRY + b', "w": ' + _ENTRY + b"}"),
    "with a field twice": header(lambda _: b'{"w": {"dtype":"F32",' + _ENTRY[1:] + b"}"),
    "nested deeply": header(lambda _: b'{"w": ' + b'{"a":' * 100_000),
    "with a number of 5,000 digits": header(lambda _: b'{"w": {"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
    "that is a list": header(lambda _: b"{}"),
    "with tensors on one another": header(lambda h: h["b"].update(data_offsets=[0, 12])),
    "with a hole": header(lambda h: h["b"].update(data_offsets=[200, 212])),
    "with offsets backwards": header(lambda h: h["w"].update(data_offsets=[128, 0])),
    "with negative offsets": header(lambda h: h["w"].update(data_offsets=[-128, 0])),
    "with offsets beyond": header(lambda h: h["w"].update(data_offsets=[1 << 62, (1 << 62) + 128])),
    "with offsets that are floats": header(lambda h: h["w"].update(data_offsets=[0.0, 128.0])),
    "with a shape over 2^63": header(lambda h: h["w"].update(shape=[1 << 40, 1 << 40])),
    "with a shape of zero and 2^62": header(lambda h: h["w"].update(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0])),
    "with a negative shape": header(lambda h: h["w"].update(shape=[-8, -4])),
    "with another shape": header(lambda h: h["w"].update(shape=[8, 5])),
    "with 100 dimensions": header(lambda h: h["w"].update(shape=[1] * 100)),
    "with a dtype that is none": header(lambda h: h["w"].update(dtype="OBJ")),
    "with notes that are numbers": header(lambda h: h.update(__metadata__={"a": 5})),
    "with a tensor that is a number": header(lambda h: h.update(w=5)),
    "with a lone surrogate": header(lambda _: b'{"\\ud800": ' + _ENTRY + b"}"),
}.items():  # fmt: skip
    add(
        f"a header {_name}",
        "one safetensors",
        _spoil,
        r"model\.safetensors|recognised|Unexpected keys",
    )
