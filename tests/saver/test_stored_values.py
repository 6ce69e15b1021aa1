"""What a save accepts, a load gives back: at most some classes have to be trusted. All else is refused at the save."""

from __future__ import annotations

import argparse
import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import importlib
import io
import ipaddress
import itertools
import logging
import math
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import megackpt
from megackpt import CheckpointManager, ShardedObject, ShardedTensor, serialization
from tests.serialization.pickles import archive, named, text


class Plain(enum.Enum):
    ONE = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclass
class Fields:
    x: int = 1


class Listed(list[int]):
    pass


class Named(dict[str, int]):
    pass


Pair = collections.namedtuple("Pair", "a b")


class Outer:
    class Schedule:
        def __init__(self) -> None:
            self.warmup = 10

        def __repr__(self) -> str:
            return f"Schedule({self.warmup})"

    class Mode(enum.Enum):
        TRAIN = 1

    class Middle:
        class Kind(enum.Enum):
            FLAT = "flat"


def nested(levels: int, kind: Any) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind([value])
    return value


LONG = "x" * 120
MANY = list(range(300))
VALUES: Mapping[str, Any] = {
    **{
        f"defaultdict of {kind.__name__}": collections.defaultdict(kind, {"a": kind()})
        for kind in (
            collections.Counter, collections.deque, collections.OrderedDict, collections.defaultdict, bytes,
            complex, frozenset, list, int, Fields,
        )
    },
    "tuples, 400 deep": nested(400, tuple),
    "tuples, 520 deep": nested(520, tuple),
    "lists, 700 deep": nested(700, list),
    "a key of 1500": {tuple(range(1500)): 1},
    "a set of 1500": {tuple(range(1500))},
    "a frozen key": {frozenset(range(1500)): 1},
    "streams of one content": [io.BytesIO(bytes(range(256)) * 400) for _ in range(20)],
    "paths of shared parts": [pathlib.Path("/", LONG, LONG + "b", LONG + "c", str(i)) for i in range(3000)],
    "one list, many times": [MANY] * 200,
    "one key, many dicts": [{(1, "layer"): i} for i in range(500)],
    "keys of one hash": {(2**61 - 1) * i: i for i in range(1, 400)},
    "long numbers as keys": {10**30 + i: i for i in range(500)},
    "odd singletons": [..., NotImplemented, type(None), torch.per_tensor_affine],
    "slices": [slice(1, None, 2), slice(1.0, "a")],
    "a moment in a zone": dt.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "zones": [zoneinfo.ZoneInfo("UTC"), dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=2), "X"))],
    "numbers": [10**6000, -(2**70000), math.inf, -0.0, decimal.Decimal("1e-500"), fractions.Fraction(1, 3)],
    "an id": uuid.UUID(int=5),
    "enums": [Plain.ONE, Flags.A | Flags.B],
    "a dataclass": Fields(3),
    "a named tuple": Pair(1, 2),
    "a list of a class": Listed([1, 2]),
    "a dict of a class": Named(a=1),
    "nested": (Outer.Schedule(), Outer.Mode.TRAIN, Outer.Middle.Kind.FLAT, Outer.Schedule),
    "outer and inner": [Outer.Schedule, Outer, Outer.Mode],
    "partial": functools.partial(max, 1),
    "getattr": getattr,
    "a function": math.sqrt,
    "an exception": ValueError,
    "a pattern": re.compile("a"),
    "an address": ipaddress.ip_address("1.2.3.4"),
    "an array": array.array("d", [1.0]),
    "an iterator": itertools.count(3),
    "a chained map": collections.ChainMap({1: 2}),
    "numpy in numpy": np.zeros(2, [("a", [("b", "f4")])]),
    "numpy's times": np.array(["2020-01-01"], "M8[D]"),
    "numpy's objects": np.array([1, "a", None, Fields(2)], object),
    "numpy's states": np.random.RandomState(3).get_state()[1],
    "a masked array": np.ma.array([1, 2], mask=[0, 1]),
    "a generator": np.random.default_rng(3).bit_generator.state,
    "random": random.getstate(),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "strided": torch.arange(6.0).view(2, 3).t(),
    "meta": torch.ones(2, device="meta"),
    "a namespace": argparse.Namespace(a=[1], b=types.SimpleNamespace(c=2)),
    "surrogates": "a\udcff\0",
    "odd keys": {1: "a", "1": "b", (1, "a"): 2, None: 3, 1.5: 4, frozenset([1]): 5},
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and (
            a.is_meta or torch.equal(a.to_dense(), b.to_dense())
        )
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype) and a.tolist() == b.tolist()
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if isinstance(a, np.ma.MaskedArray):
        return a.tolist() == b.tolist()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if (
        isinstance(a, collections.defaultdict)
        and a.default_factory is not b.default_factory
    ):
        return False
    return bool(a == b) or repr(a) == repr(b)


def loaded(directory: Path) -> Any:
    """The object in this checkpoint, with all the trust that the errors ask for."""
    trusted: list[Any] = []
    for _ in range(10):
        try:
            return megackpt.load(
                {"o": ShardedObject("o", None, (1,), (0,))}, directory, trusted=trusted
            )["o"]
        except megackpt.UntrustedClass as error:
            text = str(error)
        found = re.search(r"the object holds (\S+), which is not trusted", text)
        assert found, text
        trusted.append((resolved(found[1]), found[1]))
    raise AssertionError(trusted)


def resolved(full: str) -> Any:
    module, names = full, list[str]()
    while True:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
        try:
            return functools.reduce(getattr, names, importlib.import_module(module))
        except ModuleNotFoundError:
            continue


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_or_is_refused_at_the_save(
    name: str, tmp_path: Path
) -> None:
    state = {"o": ShardedObject("o", {"deep": [VALUES[name]]}, (1,), (0,))}
    refused = ""
    try:
        megackpt.save(state, tmp_path / "c")
    except megackpt.ShardingError as error:
        refused = str(error)
    if refused:
        assert "the object 'o/shard_0_1'" in refused
        assert "['deep'][0]" in refused
        assert not any((tmp_path / "c").glob("*"))
        return
    assert same(loaded(tmp_path / "c")["deep"][0], VALUES[name])


@pytest.mark.parametrize(
    "function", [torch.relu, torch.tanh, torch.Tensor.relu, torch.nn.functional.gelu]
)
@pytest.mark.parametrize("for_the_process", [False, True])
def test_methods_of_c_come_back_where_they_are_trusted(
    function: Any, for_the_process: bool, tmp_path: Path
) -> None:
    megackpt.save({"activation": function, "w": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(megackpt.UntrustedClass, match=function.__name__):
        megackpt.load({}, tmp_path / "c")
    with torch.serialization.safe_globals([function] if for_the_process else []):
        trusted = () if for_the_process else (function,)
        assert (
            megackpt.load({}, tmp_path / "c", trusted=trusted)["activation"] is function
        )


MUST_COME_BACK = [
    name for name in VALUES if name.startswith(("defaultdict", "a key", "a set", "nested", "a moment", "slices",
    "streams", "paths", "one ", "enums", "outer", "a list of", "a dict of"))
]  # fmt: skip


@pytest.mark.parametrize("name", MUST_COME_BACK)
def test_these_are_not_refused(name: str, tmp_path: Path) -> None:
    megackpt.save({"o": ShardedObject("o", VALUES[name], (1,), (0,))}, tmp_path / "c")


def state_of(value: Any) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(4)),
        "seen": {"a": [1, value]},
    }


BAD = (
    {(2**61 - 1) * i: 1 for i in range(1, 400)},
    functools.partial(max, 1),
    nested(495, tuple),
)


@pytest.mark.parametrize("bad", BAD, ids=["hashes", "partial", "deep"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_by_a_plan_of_before_refuse_as_well(
    bad: Any, asynchronous: bool, tmp_path: Path
) -> None:
    megackpt.save(state_of(0), tmp_path / "c")
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    with pytest.raises(
        megackpt.ShardingError, match=r"the common state .*\['seen'\]\['a'\]\[1\]"
    ):
        megackpt.save(state_of(bad), tmp_path / "c", async_sharded_save=asynchronous)
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before


def test_the_bad_one_is_named_on_all_ranks(tmp_path: Path) -> None:
    from megackpt.testing import ThreadedGroup

    def save(group: Any) -> str:
        value = functools.partial(max, 1) if group.rank == 1 else 1
        mine = ShardedObject(f"o{group.rank}", {"f": value}, (1,), (0,))
        with pytest.raises(megackpt.CheckpointingException) as caught:
            megackpt.save({"o": mine}, tmp_path / "c", process_group=group)
        return str(caught.value)

    for message in ThreadedGroup.run(2, save):
        assert "the object 'o1/shard_0_1'" in message
        assert "functools.partial" in message
        assert "['f']" in message


class TestTrust:
    @pytest.mark.parametrize(
        "function",
        [getattr, eval, exec, __import__, functools.partial, open, compile, type, map],
    )
    def test_no_hint_advises_to_trust_what_runs_code(
        self, function: Any, tmp_path: Path
    ) -> None:
        for trusted in ((), (function,)):
            blob = pickled_call(function, "1")
            with pytest.raises(megackpt.CorruptCheckpoint) as caught:
                serialization.load(blob, trusted=trusted)
            assert "hint" not in str(caught.value)
            assert "add_safe_globals" not in str(caught.value)

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_getattr_reaches_classes_that_are_named_and_nothing_else(
        self, protocol: int
    ) -> None:
        reached = (
            named("builtins.getattr") * 2
            + named("argparse.Namespace")
            + text("__init__")
            + b"\x86R"
        )
        reached += text("__globals__") + b"\x86R"
        with (
            torch.serialization.safe_globals([getattr]),
            pytest.raises(megackpt.UntrustedClass) as caught,
        ):
            serialization.load(
                archive(reached, protocol), trusted=(getattr, argparse.Namespace)
            )
        assert "hint" not in str(caught.value)
        member = (
            named("builtins.getattr")
            + named(f"{__name__}.Plain")
            + text("ONE")
            + b"\x86R"
        )
        assert (
            serialization.load(archive(member, protocol), trusted=(Plain,)) is Plain.ONE
        )
        with pytest.raises(megackpt.UntrustedClass, match=r"Plain\.ONE"):
            serialization.load(archive(member, protocol))

    def test_trust_in_the_inner_class_is_none_in_the_outer(
        self, tmp_path: Path
    ) -> None:
        megackpt.save({"c": (Outer.Schedule(), Outer.Mode.TRAIN)}, tmp_path / "inner")
        inner = (Outer.Schedule, Outer.Mode)
        schedule, mode = megackpt.load({}, tmp_path / "inner", trusted=inner)["c"]
        assert (schedule.warmup, mode) == (10, Outer.Mode.TRAIN)
        with pytest.raises(
            megackpt.UntrustedClass, match=r"trusted=\(Outer\.Schedule,\)"
        ):
            megackpt.load({}, tmp_path / "inner", trusted=(Outer, Outer.Mode))
        megackpt.save({"c": [Outer.Schedule, Outer]}, tmp_path / "both")
        with pytest.raises(megackpt.UntrustedClass, match=r"\.Outer, which"):
            megackpt.load({}, tmp_path / "both", trusted=inner)

    def test_no_code_of_a_class_runs_in_a_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with torch.serialization.safe_globals([Loud]), caplog.at_level(logging.WARNING):
            megackpt.save({"o": Loud()}, tmp_path / "c")
        assert Loud.told == []
        assert not caplog.records

    def test_the_warning_of_classes_that_need_trust_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            for value in (
                1,
                Late(),
                Late(),
            ):  # the second save goes by the plan of the first
                megackpt.save({"o": value}, tmp_path / "c")
        assert caplog.text.count("need the argument trusted") == 1
        assert "Late" in caplog.text


class Late:
    pass


class Loud:
    told: list[str] = []  # noqa: RUF012 - seen by the test

    def __setstate__(self, state: Any) -> None:
        self.told.append("made")

    def __getstate__(self) -> Any:
        return {"a": 1}


def pickled_call(function: Any, argument: str) -> bytes:
    return archive(
        named(f"{function.__module__}.{function.__qualname__}")
        + text(argument)
        + b"\x85R"
    )


def test_a_step_whose_values_are_refused_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As checkpoints may hold them that older releases wrote."""
    with CheckpointManager(tmp_path, strategy="zarr") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    buffer = io.BytesIO()
    torch.save({"seen": BAD[0]}, buffer)
    step = tmp_path / "iter_0000002"
    (step / "common.pt").write_bytes(buffer.getvalue())
    for extra in ("megackpt.index", "integrity.json"):
        (step / extra).unlink(missing_ok=True)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    with (
        CheckpointManager(tmp_path) as manager,
        caplog.at_level(logging.WARNING),
        pytest.raises(megackpt.RefusedObject, match="as they were written"),
    ):
        manager.restore(wanted)
    assert "damaged" not in caplog.text


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8),
    st.complex_numbers(allow_nan=False), st.timedeltas(), st.datetimes(), st.decimals(allow_nan=False), st.uuids(),
    st.sampled_from([torch.float32, Plain.ONE, Outer.Mode.TRAIN, pathlib.PurePosixPath("a/b"), Fields(7)]),
)  # fmt: skip
KEYS = st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=4), st.none(), st.floats(allow_nan=False)
    ),
    lambda keys: st.one_of(st.tuples(keys, keys), st.frozensets(keys, max_size=3)),
    max_leaves=4,
)
TREES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.tuples(parts, parts),
        st.dictionaries(KEYS, parts, max_size=4),
        st.dictionaries(KEYS, parts, max_size=4).map(
            lambda d: collections.defaultdict(collections.deque, d)
        ),
        st.dictionaries(KEYS, parts, max_size=4).map(collections.OrderedDict),
        st.lists(parts, max_size=3).map(collections.deque),
        st.sets(KEYS, max_size=4),
        parts.map(lambda part: [part, part]),
        parts.map(lambda part: argparse.Namespace(part=part)),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_nesting_is_accepted_and_comes_back(value: Any) -> None:
    blob = serialization.dump(value)
    serialization.check(blob)
    assert (
        serialization.load(blob, trusted=(Plain, Outer.Mode, Fields, uuid.UUID))
        == value
    )


@settings(max_examples=150, deadline=None)
@given(TREES, st.randoms(use_true_random=False))
def test_changed_opcodes_are_errors_of_ours_or_values(
    value: Any, rng: random.Random
) -> None:
    import pickle

    data = bytearray(pickle.dumps([value, (1, "a"), {"k": (2, 3)}], 2)[2:-1])
    opcodes = b"(0122NKMJ\x8aGXUB])}ltd\x85\x86\x87aesuhjqrcR\x81\x92bQ"
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.choice(opcodes)
    try:
        serialization.load(archive(bytes(data)))
    except megackpt.CorruptCheckpoint:
        return
