"""Cases of the corpus: DeepSpeed's files with forged counts, shapes, partitions and names of steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tests.hostile.cases.objects import state
from tests.hostile.cases.place import Place, add
from tests.hostile.cases.records import Raw
from tests.hostile.pickles import RUNNING

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
PARTITION = "single_partition_of_fp32_groups"


def change(name: str, by: Callable[[Any], object]) -> Callable[[Place], None]:
    """Change the value of a file."""

    def spoil(place: Place) -> None:
        value = torch.load(place.folder / name, weights_only=True)
        by(value)
        torch.save(value, place.folder / name)

    return spoil


def model(by: Callable[[Any], object]) -> Callable[[Place], None]:
    return change(MODEL, by)


def shape(*numbers: Any) -> Callable[[Place], None]:
    return model(lambda v: v["param_shapes"][0].update(w=Raw(*numbers)))


def optimizer(by: Callable[[Any], object]) -> Callable[[Place], None]:
    return change(OPTIMIZER, lambda v: by(v["optimizer_state_dict"]))


def fields(**given: Any) -> Callable[[Place], None]:
    return optimizer(lambda state: state.update(given))


def flat(tensor: torch.Tensor) -> Callable[[Place], None]:
    return optimizer(lambda state: state[PARTITION].__setitem__(0, tensor))


def moments(**given: Any) -> Callable[[Place], None]:
    return optimizer(lambda s: s["base_optimizer_state"]["state"][0].update(given))


_MODEL = r"(model|optim)_states\.pt|'w'"
for _name, _spoil in {
    "a shape over 2^63": shape(1 << 40, 1 << 40),
    "a shape over 2^63 with a zero": shape(0, 1 << 62, 1 << 62),
    "a shape of 4 TiB": shape(1 << 38, 4),
    "a negative shape": shape(-8, -4),
    "a shape of 100 dimensions": shape(*[1] * 100),
    "a shape of a hundred thousand dimensions": shape(*[1] * 100_000),
    "another shape": shape(8, 5),
    "shapes that are a text": model(lambda v: v.update(param_shapes="w")),
    "shapes that are a number": model(lambda v: v.update(param_shapes=5)),
    "shapes in a tuple": model(lambda v: v.update(param_shapes=tuple(v["param_shapes"]))),
    "a group that is a list": model(lambda v: v.update(param_shapes=[["w", "b"]])),
    "a group more": model(lambda v: v["param_shapes"].append({"x": torch.Size([4])})),
    "no group": model(lambda v: v["param_shapes"].clear()),
    "a name that is a number": model(lambda v: v["param_shapes"][0].update({5: torch.Size([4])})),
    "a name that is twice": model(lambda v: v.update(frozen_param_shapes={"w": torch.Size([8, 4])})),
    "a shape that is a text": model(lambda v: v["param_shapes"][0].update(w="8")),
    "a shape that is true": model(lambda v: v["param_shapes"][0].update(w=(True, 8))),
    "aliases that are lists": model(lambda v: v.update(shared_params={"w": ["b"]})),
    "aliases that are a list": model(lambda v: v.update(shared_params=[1])),
    "a parameter less": model(lambda v: v["param_shapes"][0].pop("b")),
    "a list": lambda p: torch.save([1, 2], p.folder / MODEL),
    "a tensor": lambda p: torch.save(torch.ones(3), p.folder / MODEL),
}.items():  # fmt: skip
    add(f"a model with {_name}", "zero2", _spoil, _MODEL + "|Unexpected keys")

_FILE = r"rank_[01]_mp_rank_00_optim_states\.pt|'w'"
for _name, _spoil in {
    "no count of ranks": optimizer(lambda s: s.pop("partition_count")),
    "0 ranks": fields(partition_count=[0]),
    "-1 ranks": fields(partition_count=-1),
    "2^60 ranks": fields(partition_count=[1 << 60]),
    "3 ranks": fields(partition_count=[3]),
    "ranks that are a text": fields(partition_count="2"),
    "ranks that are true": fields(partition_count=[True]),
    "partitions of experts": fields(ds_zero_partition_groups=[]),
    "a matrix": flat(torch.ones(10, 2)),
    "a number alone": flat(torch.tensor(3.0)),
    "no elements": flat(torch.ones(0)),
    "integers": flat(torch.ones(18, dtype=torch.int32)),
    "an element less": flat(torch.ones(17)),
    "too many elements": flat(torch.ones(1000)),
    "a view": flat(torch.ones(36)[::2]),
    "one element many times": flat(torch.ones(1).expand(18)),
    "2^40 elements by no stride": flat(torch.ones(1).expand(1 << 40)),
    "a sparse tensor": flat(torch.ones(18).to_sparse()),
    "no tensor": optimizer(lambda s: s.update({PARTITION: [None]})),
    "no partition": optimizer(lambda s: s.update({PARTITION: []})),
    "two partitions": optimizer(lambda s: s[PARTITION].append(torch.ones(18))),
    "partition 999999": optimizer(lambda s: s.update({PARTITION: {999999: torch.ones(18)}})),
    "partition 01": optimizer(lambda s: s[PARTITION] and s.update({PARTITION: {"01": torch.ones(18)}})),
    "the partitions of ZeRO-3": optimizer(lambda s: s.update(fp32_flat_groups=s.pop(PARTITION))),
    "no state": optimizer(lambda s: s["base_optimizer_state"].pop("state")),
    "a state named fp32": moments(fp32=torch.ones(18)),
    "a state of another size": moments(exp_avg=torch.ones(3)),
    "a state of another kind": moments(exp_avg=torch.tensor(3.0)),
    "a state more": moments(more=torch.ones(18)),
    "a state of another dtype": moments(exp_avg=torch.ones(18, dtype=torch.float64)),
    "a negative padding, and a state that ends before it": optimizer(
        lambda s: (s.update(group_paddings=[-8]), s["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(10)))
    ),
    "parameters of another run": fields(param_slice_mappings=[{"other": 1}]),
    "parameters that are numbers": fields(param_slice_mappings=[{5: 1}]),
    "no dict": lambda p: torch.save({"optimizer_state_dict": 5}, p.folder / OPTIMIZER),
}.items():  # fmt: skip
    add(f"an optimizer with {_name}", "zero2", _spoil, _FILE)
for _name, _value in {"negative": [-1], "2^62": [1 << 62], "a text": "18"}.items():
    padded = fields(group_paddings=_value)
    longer = moments(exp_avg=torch.ones(20), exp_avg_sq=torch.ones(20))
    both = partial(lambda a, b, p: (a(p), b(p)), padded, longer)
    add(f"paddings that are {_name}", "zero2", both, _FILE)


def another(name: str) -> Callable[[Place], None]:
    return lambda p: shutil.copy(p.folder / OPTIMIZER, p.folder / name)


for _name, _tells in {
    "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt": "3 have files here",
    "bf16_zero_pp_rank_999999_mp_rank_00_optim_states.pt": "rank_2.* is missing",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": "several saves",
    "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt": "ds_to_universal",
    "layer_0_expert_0_mp_rank_00_model_states.pt": "ds_to_universal",
    "zero_pp_rank_0_mp_rank_00_model_states.pt": "several saves",
}.items():
    add(f"another file {_name}", "zero2", another(_name), _tells)


def parameter(name: str, value: Any) -> Callable[[Place], None]:
    return lambda p: torch.save(value, p.folder / "zero" / name)


for _name in ("os.system", "eval"):
    add(
        f"{_name} beside a tensor",
        "universal",
        lambda p, name=_name: state("zero/w/fp32.pt")(
            p, RUNNING[name](f"touch {p.witness}")
        ),
    )  # what is beside the tensor is not read

_STATE = r"zero/w|'fp32.w'"
for _name, _spoil in {
    "two tensors": parameter("w/fp32.pt", {"param": torch.ones(8, 4), "x": torch.ones(3)}),
    "another name": parameter("w/fp32.pt", {"weight": torch.ones(8, 4)}),
    "a list of tensors": parameter("w/fp32.pt", [torch.ones(8, 4)]),
    "elements of another count": parameter("w/fp32.pt", torch.ones(31)),
    "a view": parameter("w/fp32.pt", {"param": torch.ones(4, 8).T}),
    "an object": parameter("w/fp32.pt", {"param": [1, 2]}),
}.items():  # fmt: skip
    add(f"a parameter with {_name}", "universal", _spoil, _STATE)
for _name in ("zero/w", "zero/b/step.pt", "zero"):
    add(
        f"without {_name}",
        "universal",
        lambda p, name=_name: (p.folder / name).rename(p.home / "moved"),
        rf"{_name}|mp_rank_00",
    )
add(
    "a folder that is a link",
    "universal",
    lambda p: (
        (p.folder / "zero/w").rename(p.outside / "w"),
        (p.folder / "zero/w").symlink_to(p.outside / "w"),
    ),
    "zero/w",
)


def latest(text: bytes) -> Callable[[Place], None]:
    return lambda p: p.put("latest", text)


_STEPS: Mapping[str, bytes] = {
    "leads out": b"../../outside",
    "is absolute": b"/etc",
    "is empty": b"",
    "is a dot": b".",
    "is two dots": b"..",
    "has a slash": b"global_step3/.",
    "has a NUL": b"global_step3\0",
    "is no text": b"\xff\xfe\x80",
    "is missing": b"global_step4",
    "is long": b"x" * 5000,
    "is as long as can be": b"x" * 1000,
}
for _name, _text in _STEPS.items():
    add(
        f"a latest step that {_name}",
        "deepspeed run",
        latest(_text),
        "latest|not a name",
    )
add(
    "a step that is a link",
    "deepspeed run",
    lambda p: (
        (p.folder / "global_step3").rename(p.outside / "step"),
        os.symlink(p.outside / "step", p.folder / "global_step3"),
    ),
    "global_step3",
)
