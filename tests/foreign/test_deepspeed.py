"""DeepSpeed's checkpoints: its engine's files at other layouts and in other formats, and what is refused."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import megackpt
from megackpt import ShardedObject
from megackpt.__main__ import main
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
)
from megackpt.serialization import StandIn
from tests.bits import assert_same
from tests.conftest import PEERS, ROOT
from tests.converter.test_memory import peak
from tests.foreign import deepspeed_files as files
from tests.foreign.bars import TARGETS, check_conversions, check_layouts, check_resuming

GOLDEN = ROOT / "tests" / "golden"
FACTORS = {"exp_avg": 2, "exp_avg_sq": 4, "momentum_buffer": 8}
STEP = "global_step3"
ENGINES = ("zero1", "zero1-accumulated", "zero1-elastic", "zero2", "zero2-fp32", "zero3", "zero3-fp32")  # fmt: skip
SOURCES = [
    GOLDEN / f"deepspeed-0.19.8-{stage}" / f"{STEP}{suffix}"
    for stage in ("zero2", "zero3")
    for suffix in ("", "_universal")
]


def whole(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a step of write_deepspeed.py, by what zero_to_fp32 made of it, and by the module in its file."""
    run = step.parent
    gathered = torch.load(f"{run}.expected.pt")
    (model_file, *_) = sorted(step.glob("*_model_states.pt"))
    model = torch.load(model_file, weights_only=True)
    trained = {name for group in model["param_shapes"] for name in group}
    aliases = model["shared_params"]
    is_universal = (step / "zero").is_dir()
    is_partitioned = model_file.name.startswith("zero")
    found = {}
    if not is_partitioned:
        found = {f"module.{name}": t for name, t in model["module"].items()}
    for name, tensor in gathered.items():
        if name in trained:
            found[f"fp32.{name}"] = tensor
            states = ("momentum_buffer",)
            if run.name != "zero3-fp32":
                states = ("exp_avg", "exp_avg_sq")
                if not (is_universal and is_partitioned):
                    found[f"step.{name}"] = torch.tensor(3.0)
            for state in states:
                found[f"{state}.{name}"] = tensor * FACTORS[state]
        elif aliases.get(name) in trained:
            found[f"fp32.{name}"] = tensor
        elif is_partitioned:
            found[f"module.{name}"] = tensor
    for alias, name in aliases.items():
        if name in trained:
            found[f"fp32.{alias}"] = found[f"fp32.{name}"]
    if is_universal and not is_partitioned:
        # ds_to_universal makes these of the module, in the module's precision.
        for name in model["module"].keys() - trained:
            found[f"fp32.{name}"] = found[f"module.{name}"].float()
    return found


# ---- Bars


@pytest.mark.parametrize(
    "step", SOURCES, ids=lambda step: f"{step.parent.name}/{step.name}"
)
def test_a_golden_step_is_read_at_other_layouts_and_converted(tmp_path, step) -> None:
    expected = whole(step)
    assert megackpt.load_plain_tensors(step).keys() == expected.keys()
    check_layouts(step, expected)
    check_conversions(step, expected, tmp_path)


@pytest.fixture(scope="module", params=(2, 4))
def runs(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """Runs of DeepSpeed's engine on 2 and on 4 ranks."""
    folder = Path(tmp_path_factory.mktemp("deepspeed"))
    command = [
        sys.executable,
        "tests/foreign/write_deepspeed.py",
        str(folder),
        str(request.param),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PEERS / "deepspeed")}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=600)
    return folder


@pytest.mark.deepspeed
def test_the_engines_steps_are_read_and_converted(tmp_path, runs) -> None:
    """ZeRO-1, 2 and 3, bf16 and fp32, round robin, elastic, BF16_Optimizer, other optimizers; universal ones."""
    for name in ENGINES:
        for step in sorted((runs / name).glob(f"{STEP}*")):
            expected = whole(step)
            assert megackpt.load_plain_tensors(step).keys() == expected.keys(), step
            check_layouts(step, expected)
            check_conversions(step, expected, tmp_path / name / step.name)


@pytest.mark.deepspeed
def test_a_step_without_zero_has_the_module_and_the_optimizer_by_number(runs) -> None:
    found = megackpt.load_plain_tensors(runs / "zero0" / STEP)
    assert found["module.scale"].shape == (1,)
    assert found["optimizer.state.0.exp_avg"].shape == (13, 7)


def test_a_conversion_is_resumed(tmp_path, monkeypatch) -> None:
    groups = [{"w": torch.randn(64, 1024), "b": torch.randn(77)}]
    files.write_zero3(tmp_path / "step", groups, 3)
    expected = files.expected(groups)
    check_resuming(tmp_path / "step", expected, tmp_path / "out", monkeypatch)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("zero3", 256 << 20, marks=pytest.mark.slow),
        *(
            pytest.param(kind, 4 << 30, marks=pytest.mark.campaign)
            for kind in ("zero2", "zero3", "universal")
        ),
    ],
)
def test_memory_is_bounded(tmp_path, kind, size) -> None:
    """Master weights and two moments of four bytes, and the module's two bytes."""
    columns = 4096
    rows = size // 14 // columns // 4
    groups = [{f"w{i}": torch.randn(rows, columns) for i in range(4)}]
    if kind == "universal":
        files.write_universal(tmp_path / "step", groups)
    else:
        {"zero2": files.write_zero2, "zero3": files.write_zero3}[kind](
            tmp_path / "step", groups, 3
        )
    for to in TARGETS:
        taken = peak(tmp_path / "step", tmp_path / "out", to, 512 << 20)
        shutil.rmtree(tmp_path / "out")
        print(f"{kind} of {size >> 20} MiB to {to}: {taken >> 20} MiB")
        assert taken <= 512 << 20


SIZES = st.lists(
    st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_any_parameters_on_any_ranks_are_read(
    tmp_path_factory, sizes, ranks, partitioned
) -> None:
    """Scalars, tensors without elements, ranks without any part of a parameter."""
    folder = tmp_path_factory.mktemp("any") / "step"
    groups = []
    values = 1.0
    for number, shapes in enumerate(sizes):
        groups.append({})
        for i, shape in enumerate(shapes):
            count = math.prod(shape)
            groups[-1][f"p{number}.{i}"] = torch.arange(count).reshape(shape) + values
            values += count
    write = files.write_zero2
    if partitioned:
        write = files.write_zero3
    write(folder, groups, ranks)
    found = megackpt.load_plain_tensors(folder)
    for key, tensor in files.expected(groups).items():
        assert_same(found[key], tensor, key)
    shutil.rmtree(folder.parent)


# ---- Python state, runs, names


def test_python_state_is_common_state_and_objects(capsys) -> None:
    """No class of DeepSpeed is imported: its objects are stand-ins."""
    run = GOLDEN / "deepspeed-0.19.8-zero2"
    common = megackpt.load_common_state_dict(run)
    assert (common["epoch"], common["note"], common["global_steps"]) == (2, "told", 3)
    state = {
        f"optimizer_states/{i}": ShardedObject("optimizer_states", None, (2,), (i,))
        for i in range(2)
    }
    found = megackpt.load(state, run)
    for rank in range(2):
        optimizer = found[f"optimizer_states/{rank}"]["optimizer_state_dict"]
        groups = optimizer["base_optimizer_state"]["param_groups"]
        assert groups[0]["weight_decay"] == 0.1
        assert isinstance(optimizer["zero_stage"], StandIn)
        assert optimizer["zero_stage"].value == 2
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(
    ("step", "version"), [*zip(SOURCES, (1, 2, 1, 2), strict=True)]
)
def test_show_names_format_and_version(capsys, step, version) -> None:
    assert main(["show", str(step)]) == 0
    assert f"format: deepspeed\nversion: {version}\n" in capsys.readouterr().out


def test_a_run_is_opened_at_the_step_that_latest_names(tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "deepspeed-0.19.8-zero2", run)
    assert megackpt.load_plain_tensors(run).keys() == whole(SOURCES[0]).keys()
    (run / "latest").unlink()
    found = megackpt.load_plain_tensors(run)
    assert found.keys() == whole(SOURCES[1]).keys()
    (run / "latest_universal").write_text("../elsewhere")
    with pytest.raises(
        CorruptCheckpoint, match=r"latest_universal names '\.\./elsewhere'"
    ):
        megackpt.load_plain_tensors(run)


def test_weights_beside_a_step_are_not_taken_for_the_step(tmp_path) -> None:
    """As Hugging Face's Trainer has them."""
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "deepspeed-0.19.8-zero2", run)
    torch.save({"w": torch.ones(2)}, run / "pytorch_model.bin")
    assert list(megackpt.load_plain_tensors(run)) == ["w"]


def test_other_folders_with_a_file_latest_are_not_taken(tmp_path) -> None:
    (tmp_path / "latest").write_text("step_3")
    (tmp_path / "step_3").mkdir()
    with pytest.raises(NotACheckpoint):
        megackpt.load_plain_tensors(tmp_path)


def test_the_format_is_not_written(tmp_path) -> None:
    with pytest.raises(CheckpointingException, match="deepspeed"):
        megackpt.convert(SOURCES[0], tmp_path / "out", "deepspeed")
    assert not (tmp_path / "out").exists()


def test_a_tied_parameter_is_there_under_both_names() -> None:
    for step in (SOURCES[0], SOURCES[2], SOURCES[3]):
        found = megackpt.load_plain_tensors(step)
        assert_same(
            found["fp32.head.weight"], found["fp32.embedding.weight"], str(step)
        )
        assert "exp_avg.head.weight" not in found


# ---- Files that do not fit


def changed(file: Path, change: Callable[[Any], object]) -> None:
    value = torch.load(file, weights_only=True)
    change(value)
    torch.save(value, file)


def optimizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], object]:
    return lambda value: change(value["optimizer_state_dict"])


def _shorten(state: dict[str, Any]) -> None:
    name = "fp32_flat_groups"
    if name not in state:
        name = "single_partition_of_fp32_groups"
    state[name][0] = state[name][0][:-3].clone()


def _lengthen(state: dict[str, Any]) -> None:
    state["base_optimizer_state"]["state"][0]["exp_avg"] = torch.ones(11)


MODEL = {
    "zero2": "mp_rank_00_model_states.pt",
    "zero3": "zero_pp_rank_1_mp_rank_00_model_states.pt",
}
WRONG: list[tuple[str, str, Callable[[Any], object], str]] = [
    ("zero2", "o", optimizer(lambda s: s.update(partition_count=[2, 2])), r"rank_1_.* one of \[2, 2\] ranks"),
    ("zero3", "o", optimizer(lambda s: s.update(partition_count=1 << 60)), r"rank_1_.* one of \[11529215\d+\] ranks"),
    ("zero3", "o", optimizer(lambda s: s.pop("partition_count")), r"rank_1_.* one of \[None\] ranks"),
    ("zero2", "o", optimizer(_lengthen), r"rank_1_.*group 0 has the shapes"),
    ("zero2", "o", optimizer(_shorten), r"rank_1_.*group 0|elements of group 0, 'w'"),
    ("zero3", "o", optimizer(_shorten), r"rank_1_.*group 0"),
    ("zero2", "o", optimizer(lambda s: s["single_partition_of_fp32_groups"].pop()), r"rank_1_.* group 1 has the shape"),
    ("zero3", "o", optimizer(lambda s: s["fp32_flat_groups"].pop()), r"rank_1_.* group 1 has the shape"),
    ("zero2", "o", optimizer(lambda s: s["base_optimizer_state"]["state"][0].pop("exp_avg")), r"rank_1_.*'exp_avg'"),
    ("zero2", "o", optimizer(lambda s: s.update(param_slice_mappings=[{"x": 1}])), r"rank_1_.* has the parameter 'x'"),
    ("zero2", "o", lambda v: v.clear(), r"rank_1_.* has no optimizer_state_dict"),
    ("zero2", "m", lambda v: v["param_shapes"][0].update(more=torch.Size((50, 50))), r"rank_0_.*'w'.* take"),
    ("zero2", "m", lambda v: v["param_shapes"][1].update(w=torch.Size((1,))), r"'w' twice"),
    ("zero2", "m", lambda v: v["param_shapes"].pop(), r"rank_0_.*state\.1\.step', and .* lists 1 groups"),
    ("zero2", "m", lambda v: v.update(param_shapes=5), r"param_shapes is not a list"),
    ("zero2", "m", lambda v: v["param_shapes"][0].update(w=torch.Size((1 << 40, 1 << 40))), r"'w' .*impossible shape"),
    ("zero2", "m", lambda v: v.update(shared_params=5), r"shared_params"),
    ("zero3", "m", lambda v: v["param_shapes"][0].update(w=torch.Size((4, 5))), r"rank_1_.*'w'.*rank 0 lists"),
    ("zero3", "m", lambda v: v["param_shapes"][0].pop("w"), r"rank_1_.*rank 0 lists \(0, 'w'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "which", "change", "tells"), WRONG)
def test_files_that_disagree_are_named(tmp_path, kind, which, change, tells) -> None:
    groups = [{"w": torch.randn(5, 4), "b": torch.randn(7)}, {"s": torch.randn(3)}]
    write = {"zero2": files.write_zero2, "zero3": files.write_zero3}[kind]
    write(tmp_path / "step", groups, 3)
    name = MODEL[kind] if which == "m" else files.optimizer_file(1)
    changed(tmp_path / "step" / name, change)
    with pytest.raises(CorruptCheckpoint, match=tells):
        megackpt.load_plain_tensors(tmp_path / "step")


def test_files_of_swapped_ranks_are_noticed(tmp_path) -> None:
    """The last rank has the padding, and so the shortest part."""
    groups = [{"w": torch.randn(5, 4), "b": torch.randn(7)}]
    files.write_zero2(tmp_path / "step", groups, 3)
    last = tmp_path / "step" / files.optimizer_file(2)
    other = tmp_path / "step" / files.optimizer_file(1)
    last.rename(tmp_path / "aside")
    other.rename(last)
    (tmp_path / "aside").rename(other)
    with pytest.raises(CorruptCheckpoint, match="partitions of the ranks have"):
        megackpt.load_plain_tensors(tmp_path / "step")


MISSING = (
    ("zero2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("zero2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("zero3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("universal", "zero/w"),
    ("universal", "zero/b/exp_avg.pt"),
)


@pytest.mark.parametrize(("kind", "name"), MISSING)
def test_a_missing_file_is_named(tmp_path, kind, name) -> None:
    groups = [{"w": torch.randn(5, 4), "b": torch.randn(7)}]
    step = tmp_path / "step"
    if kind == "universal":
        files.write_universal(step, groups)
    else:
        {"zero2": files.write_zero2, "zero3": files.write_zero3}[kind](step, groups, 3)
    place = step / name
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(CorruptCheckpoint, match=re.escape(name)):
        megackpt.load_plain_tensors(step)


def test_the_last_rank_that_is_missing_is_noticed(tmp_path) -> None:
    groups = [{"w": torch.randn(5, 4)}]
    files.write_zero3(tmp_path / "step", groups, 3)
    (tmp_path / "step" / files.optimizer_file(2)).unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"rank_2_mp_rank_00_optim_states\.pt is missing"
    ):
        megackpt.load_plain_tensors(tmp_path / "step")
    (tmp_path / "step/zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"is one of \[3\] ranks, and 2 have files here"
    ):
        megackpt.load_plain_tensors(tmp_path / "step")


@pytest.mark.parametrize(
    ("name", "tells"),
    [
        (
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
            r"mp_rank_01_optim_states\.pt is of.*ds_to_universal",
        ),
        ("layer_00-model_00-model_states.pt", r"/layer_00-model_00-.*ds_to_universal"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", r"/expp_rank_0_.*ds_to_universal"),
    ],
)
def test_axes_that_are_not_known_are_not_guessed(tmp_path, name, tells) -> None:
    files.write_zero2(tmp_path / "step", [{"w": torch.randn(5, 4)}], 2)
    torch.save({}, tmp_path / "step" / name)
    with pytest.raises(BackendError, match=tells):
        megackpt.load_plain_tensors(tmp_path / "step")


def test_files_of_two_saves_are_refused(tmp_path) -> None:
    files.write_zero2(tmp_path / "step", [{"w": torch.randn(5, 4)}], 2)
    step = tmp_path / "step"
    shutil.copy(
        step / files.optimizer_file(0),
        step / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(CorruptCheckpoint, match="files of several saves"):
        megackpt.load_plain_tensors(step)


def test_universal_checkpoints_of_model_parallel_ranks_have_whole_tensors(
    tmp_path, caplog
) -> None:
    """The weights of the module, which ranks hold parts of, are left out, and a message says so."""
    groups: list[Mapping[str, torch.Tensor]] = [
        {"w": torch.randn(6, 4), "b": torch.randn(7)}
    ]
    step = tmp_path / "step"
    files.write_universal(step, groups)
    for rank in range(2):
        part = [{"w": groups[0]["w"][3 * rank :][:3], "b": groups[0]["b"]}]
        state = files.model_states(part, part[0])
        torch.save(state, step / f"mp_rank_{rank:02}_model_states.pt")
    with caplog.at_level(logging.INFO, "megackpt"):
        found = megackpt.load_plain_tensors(step)
    assert found.keys() == files.expected(groups).keys()
    for key, tensor in files.expected(groups).items():
        assert_same(found[key], tensor, key)
    assert "the weights of the module (module.*) are left out" in caplog.text
