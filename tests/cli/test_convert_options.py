"""The options of a conversion on a command line."""

from __future__ import annotations

import argparse
import inspect
from datetime import timedelta
from typing import Any

import pytest

import megackpt
from megackpt.__main__ import main
from megackpt.cli.convert_options import add_arguments, convert_arguments
from megackpt.converter.budget import parse_size
from megackpt.strategies import Strategy


def given(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return convert_arguments(parser.parse_args(["a", "b", "--to", "zarr", *words]))


def test_without_options_the_defaults_of_the_function_hold() -> None:
    parameters = inspect.signature(megackpt.convert).parameters
    arguments = given()
    assert (arguments.pop("source"), arguments.pop("target"), arguments.pop("to")) == (
        "a",
        "b",
        "zarr",
    )
    assert set(arguments) == set(parameters) - {
        "source",
        "target",
        "to",
        "progress",
        "table",
        "beside",
    }
    for name, value in arguments.items():
        default = parameters[name].default
        if name == "max_memory":
            assert parse_size(value) == default
        else:
            expected = list(default) if isinstance(default, tuple) else default
            assert value == expected, name


def test_every_option() -> None:
    arguments = given(
        "--overwrite", "--verify", "--trust-source", "--no-resume", "--no-state", "--select", "x*", "--select", "y",
        "--exclude", "z", "--rename", "a.*=b.*", "--cast", "bf16", "--max-memory", "64MiB", "--workers", "3",
        "--shards", "4", "--option", "compression=zstd:3", "--option", "level=5", "--option", "checksum=False",
        "--timeout", "2.5",
    )  # fmt: skip
    assert arguments == {
        "source": "a", "target": "b",
        "to": Strategy("zarr", options={"compression": "zstd:3", "level": 5, "checksum": False}),
        "overwrite": True, "verify": False, "verify_target": True, "max_memory": "64MiB", "workers": 3,
        "select": ["x*", "y"], "exclude": ["z"], "rename": ["a.*=b.*"], "cast": "bf16", "state": False,
        "shards": 4, "resume": False, "timeout": timedelta(seconds=2.5),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--rename", "a"), "OLD=NEW"),
        (("--rename", "a*=b"), "same number"),
        (("--cast", "int8"), "can be cast to"),
        (("--max-memory", "much"), "not a size in bytes"),
        (("--workers", "0"), "at least 1"),
        (("--workers", "x"), "invalid int value: 'x'"),
        (("--shards", "-1"), "at least 1"),
        (("--option", "fast"), "NAME=VALUE"),
        (("--timeout", "0"), "no number of seconds"),
        (("--timeout", "nan"), "no number of seconds"),
    ],
)
def test_wrong_usage_is_explained(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "a", "b", "--to", "zarr", *words])
    assert expected in capsys.readouterr().err
