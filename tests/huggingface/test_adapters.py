"""Adapters of PEFT: the directory that PEFT opens, resumed at any layout, and what must be refused.

The functions of this file run in processes that have PEFT.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from tests.conftest import Parent, Ranks

pytestmark = [pytest.mark.peft, pytest.mark.transformers, pytest.mark.accelerate]
KINDS = (
    "lora",
    "dora",
    "patterns",
    "modules_to_save",
    "tokens",
    "embedding",
    "bias",
    "parameters",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    parent = Parent(Path(__file__).with_name("launch_with_peft.py"))
    runner = Ranks(tmp_path_factory.mktemp("ranks"), parent)
    yield runner
    runner.stop()
    parent.close()


def alone(ranks: Ranks, function: Callable[..., None], *arguments: object) -> None:
    ranks(function, 1, *arguments, init=False, timeout=120)


def fails(kind: type[Exception], *texts: str) -> Any:
    return pytest.raises(kind, match="(?s)" + ".*".join(texts))


# ---- PEFT opens what is saved


def saves_as_peft(kind: str, folder: str) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    from megackpt.huggingface.peft import save_adapter
    from tests.huggingface.adapted_models import adapted, logits, opened

    model = adapted(kind)
    save_adapter(model, f"{folder}/ours")
    model.save_pretrained(f"{folder}/stock")
    expected = get_peft_model_state_dict(model)
    found = load_file(f"{folder}/ours/adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    ours, stock = (
        json.loads(Path(folder, which, "adapter_config.json").read_bytes())
        for which in ("ours", "stock")
    )
    # PEFT writes sets in any order.
    for config in (ours, stock):
        for name in ("target_modules", "target_parameters"):
            config[name] = sorted(config[name] or [])
    assert ours == stock
    assert torch.equal(logits(opened(f"{folder}/ours", kind)), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_the_directory(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    alone(ranks, saves_as_peft, kind, tmp_path)


def saves_several(folder: str) -> None:
    from peft import LoraConfig

    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adapted, logits, opened

    def two(seed: int) -> Any:
        model = adapted("lora", seed)
        settings = LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
        model.add_adapter("second", settings)
        return model

    model = two(1)
    save_adapter(model, folder)
    stock = opened(folder)
    stock.load_adapter(f"{folder}/second", "second")
    other = two(2)
    load_adapter(other, folder)
    for name in ("default", "second"):
        for each in (model, stock, other):
            each.set_adapter(name)
        assert torch.equal(logits(stock), logits(model))
        assert torch.equal(logits(other), logits(model))
    assert torch.equal(logits(opened(f"{folder}/second", name="second")), logits(model))


def test_other_adapters_are_in_folders_of_their_names(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, saves_several, tmp_path)


def saves_little(folder: str) -> None:
    from megackpt.huggingface.peft import save_adapter
    from tests.huggingface.adapted_models import adam, adapted, step, trained

    model = adapted(r=256)
    optimizer = adam(model)
    step(model, optimizer)
    save_adapter(model, folder, optimizer)
    written = sum(path.stat().st_size for path in Path(folder).rglob("*.*"))
    # The adapter, and two moments of each parameter.
    assert written <= 1.05 * 3 * sum(param.nbytes for param in trained(model))


def test_little_more_than_the_trained_bytes_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, saves_little, tmp_path)


def refuses_hostile_notes(folder: str) -> None:
    import shutil

    from peft import get_peft_model_state_dict

    from megackpt.huggingface.peft import AdapterFiles, load_adapter, save_adapter
    from megackpt.huggingface.peft_merge import merge_adapter
    from tests.huggingface.adapted_models import adapted, base

    model = adapted()
    save_adapter(model, f"{folder}/intact")
    base().save_pretrained(f"{folder}/base")
    tensors = get_peft_model_state_dict(model)
    for number, notes in enumerate((3, {"base": 7}, {"base": [1]}, {"directory": ""})):
        directory = f"{folder}/{number}"
        state = megackpt.sharded({**tensors}) | {"adapters": notes}
        megackpt.save(state, directory, AdapterFiles(configs={}))
        shutil.copy(f"{folder}/intact/adapter_config.json", directory)
        with fails(megackpt.CorruptCheckpoint, "notes on adapters"):
            load_adapter(model, directory)
        if "directory" not in str(notes):
            with fails(megackpt.CorruptCheckpoint, "notes on adapters"):
                merge_adapter(f"{folder}/base", directory, f"{folder}/merged")


def test_notes_of_wrong_types_are_damage(ranks: Ranks, tmp_path: Path) -> None:
    alone(ranks, refuses_hostile_notes, tmp_path)


# ---- Training goes on


def resumes(kind: str, folder: str) -> None:
    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adam, adapted, step

    model = adapted(kind)
    optimizer = adam(model)
    for number in range(3):
        step(model, optimizer, number)
    request = save_adapter(
        model, folder, optimizer, extra={"step": 3}, async_sharded_save=True
    )
    assert request is not None
    queue = megackpt.AsyncCallsQueue()
    queue.schedule_async_request(request)
    step(model, optimizer, 3)
    queue.close()
    other = adapted(kind, seed=2)
    resumed = adam(other, rate=5.0)
    frozen = {
        name: param.clone()
        for name, param in other.named_parameters()
        if not param.requires_grad
    }
    assert load_adapter(other, folder, resumed) == {"step": 3}
    step(other, resumed, 3)
    for (name, param), found in zip(
        model.named_parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(param, found), name
        if name in frozen:
            assert torch.equal(found, frozen[name]), name


@pytest.mark.parametrize("kind", ["dora", "tokens", "bias", "parameters"])
def test_a_resumed_training_equals_an_undisturbed_one(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, resumes, kind, tmp_path)


WORLDS = range(1, 7)


def resumes_at_world_sizes(folder: str) -> None:
    """Each sub-mesh saves what the one before has loaded, and compares with the first values."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import DeviceMesh

    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adam, adapted, full, shard, step

    groups = {size: dist.new_group(range(size)) for size in WORLDS}
    meshes = {
        size: DeviceMesh.from_group(groups[size], "cpu")
        for size in WORLDS
        if dist.get_rank() < size
    }
    plain = adapted("dora")
    optimizer = adam(plain)
    step(plain, optimizer)
    if dist.get_rank() == 0:
        expected = get_peft_model_state_dict(plain)
        solo = dist.new_group([0], use_local_synchronization=True)
        save_adapter(plain, f"{folder}/0", optimizer, process_group=solo)
    moments = {
        name: optimizer.state[param]
        for name, param in plain.named_parameters()
        if param.requires_grad
    }
    dist.barrier()
    before = f"{folder}/0"
    for size in reversed(WORLDS):
        here = f"{folder}/{size}"
        if dist.get_rank() < size:
            model = shard(adapted("dora", seed=size), meshes[size])
            resumed = adam(model)
            load_adapter(model, before, resumed, process_group=groups[size])
            for name, param in model.named_parameters():
                if param.requires_grad:
                    for key, value in moments[name].items():
                        assert torch.equal(full(resumed.state[param][key]), value)
            save_adapter(model, here, resumed, process_group=groups[size])
        dist.barrier()
        before = here
        if dist.get_rank() == 0:
            found = load_file(f"{here}/adapter_model.safetensors")
            assert found.keys() == expected.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, expected[key]), (size, key)


def test_six_world_sizes_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    """miles #2669: at another world size half of the ranks began with a fresh adapter.

    accelerate #4206, axolotl #3772 and #3977, peft #3251: under FSDP2 rank 0's slice was saved.
    """
    ranks(resumes_at_world_sizes, max(WORLDS), tmp_path, timeout=300)


def saves_other_layouts(folder: str) -> None:
    """Tensor parallel with FSDP2 on a mesh of 2 x 2, and DistributedDataParallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel

    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adam, adapted, full, shard, step

    def cut(seed: int) -> Any:
        """lora_B is cut along its rows, lora_A along its columns, then both by FSDP2."""
        model = adapted("lora", seed)
        for name, module in model.named_modules():
            if name.endswith(("lora_A.default", "lora_B.default")):
                axis = 1 if "lora_A" in name else 0
                whole = distribute_tensor(module.weight, mesh["tp"], [Shard(axis)])
                module.weight = Parameter(whole)
        return shard(model, mesh["dp"])

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicated = DistributedDataParallel(adapted("lora"))
    optimizer = adam(replicated)
    step(replicated, optimizer)
    save_adapter(replicated, f"{folder}/ddp", optimizer)
    model = cut(2)
    load_adapter(model, f"{folder}/ddp")
    save_adapter(model, f"{folder}/tp")
    other = DistributedDataParallel(adapted("lora", seed=3))
    load_adapter(other, f"{folder}/tp")
    for mine, param, expected in zip(
        model.parameters(), other.parameters(), replicated.parameters(), strict=True
    ):
        assert torch.equal(full(mine), expected)
        assert torch.equal(param, expected)

    # Ranks with different values of one adapter: that one of them began afresh is no secret.
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(p for p in other.parameters() if p.requires_grad).add_(1)
    with fails(megackpt.ReplicaMismatch, "lora_A"):
        save_adapter(other, f"{folder}/tp")
    load_adapter(other, f"{folder}/tp")  # the former one is there

    # One rank has another base.
    if dist.get_rank() == 3:
        with torch.no_grad():
            other.module.get_base_model().lm_head.weight[1, 1] += 1
    with fails(megackpt.ReplicaMismatch, "different bases", "lm_head.weight"):
        load_adapter(other, f"{folder}/tp")


def test_tensor_parallel_and_replicated_models(ranks: Ranks, tmp_path: Path) -> None:
    ranks(saves_other_layouts, 4, tmp_path, timeout=200)


# ---- What is refused


def refuses_other_bases(folder: str) -> None:
    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adapted

    model = adapted("lora")
    intact = dict(adapted("lora").named_parameters())
    save_adapter(model, folder)
    names = [n for n, param in model.named_parameters() if not param.requires_grad]
    chooser = torch.Generator().manual_seed(4)
    params = dict(model.named_parameters())
    refused = 0
    for _ in range(50):
        name = names[int(torch.randint(len(names), (), generator=chooser))]
        flat = params[name].detach().view(-1).view(torch.int32)
        place = int(torch.randint(len(flat), (), generator=chooser))
        flat[place] ^= 1 << int(torch.randint(31, (), generator=chooser))
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        with fails(megackpt.MismatchError, "1 of 21 tensors differ", plain):
            load_adapter(model, folder)
        refused += 1
        with torch.no_grad():
            params[name].copy_(intact[name])
    assert refused == 50
    load_adapter(model, folder)


def test_another_base_is_refused_50_of_50(ranks: Ranks, tmp_path: Path) -> None:
    alone(ranks, refuses_other_bases, tmp_path)


def refuses_a_base_that_changes(folder: str) -> None:
    """Versions of DTensors count changes, those of their detached copies do not."""
    from torch.distributed.device_mesh import init_device_mesh

    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adapted, shard

    mesh = init_device_mesh("cpu", (2,))
    model = shard(adapted("lora"), mesh)
    save_adapter(model, folder)
    base = [param for param in model.parameters() if not param.requires_grad]
    with torch.no_grad():
        base[0].mul_(2)
    with fails(megackpt.MismatchError, "1 of 21 tensors differ"):
        load_adapter(model, folder)


def test_a_sharded_base_that_changes_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(refuses_a_base_that_changes, 2, tmp_path, timeout=120)


def refuses_what_differs(folder: str) -> None:
    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adam, adapted, step

    model = adapted("lora")
    save_adapter(model, folder)
    before = [param.clone() for param in model.parameters()]
    for other, texts in (
        (adapted("modules_to_save"), ("checkpoint lacks", "lm_head", "model lacks", "q_proj")),
        (adapted("lora", lora_alpha=10), ("adapter_config.json was saved with", "lora_alpha': 10")),
        (adapted("lora", r=8), ("lora_A",)),
        (adapted("lora", use_dora=True), ("lora_magnitude_vector",)),
    ):  # fmt: skip
        values = [param.clone() for param in other.parameters()]
        with fails(megackpt.MismatchError, *texts):
            load_adapter(other, folder)
        assert all(map(torch.equal, values, other.parameters()))
    # A base with one layer more, which the adapter does not touch.
    larger = adapted("lora", layers_to_transform=[0, 1])
    save_adapter(larger, f"{folder}/layers")
    layers = larger.get_base_model().model.layers
    layers.append(adapted("modules_to_save").get_base_model().model.layers[0])
    for param in layers[2].parameters():
        param.requires_grad_(False)
    with fails(megackpt.MismatchError, "another base", "layers.2"):
        load_adapter(larger, f"{folder}/layers")
    # miles #2516: moments were lost.
    with fails(megackpt.MismatchError, "optimizer", "no list of parameter groups"):
        load_adapter(model, folder, adam(model))
    assert all(map(torch.equal, before, model.parameters()))
    # PEFT's own directory has no base and no settings of ours.
    stock = adapted("lora", seed=2)
    stock.save_pretrained(f"{folder}/stock")
    load_adapter(model, f"{folder}/stock")
    for param, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(param, expected)
    with fails(megackpt.MismatchError, "optimizer"):
        load_adapter(model, f"{folder}/stock", adam(model))
    # A parameter that is trained and would be lost.
    model.get_base_model().model.norm.weight.requires_grad_()
    with fails(megackpt.ShardingError, "no adapter contains", "model.norm.weight"):
        save_adapter(model, folder)
    model.get_base_model().model.norm.weight.requires_grad_(False)
    optimizer = adam(adapted("lora"))
    with fails(megackpt.ShardingError, "another model"):
        save_adapter(model, folder, optimizer)
    with fails(megackpt.ShardingError, "a PeftModel", "LlamaForCausalLM"):
        save_adapter(model.get_base_model(), folder)

    # miles #2733: a shard of NaN was accepted.
    optimizer = adam(model)
    step(model, optimizer)
    save_adapter(model, folder, optimizer)
    param = next(p for p in model.parameters() if p.requires_grad)
    optimizer.state[param]["exp_avg"].fill_(torch.nan)
    with fails(megackpt.NonfiniteValues, "exp_avg"):
        save_adapter(model, folder, optimizer)
    save_adapter(model, f"{folder}/noted", optimizer, check_values="note")
    load_adapter(model, folder, optimizer)
    assert optimizer.state[param]["exp_avg"].isfinite().all()
    with torch.no_grad():
        param.fill_(torch.nan)
    with fails(megackpt.NonfiniteValues, "lora_A"):
        save_adapter(model, folder, optimizer)
    model.save_pretrained(f"{folder}/stock")
    with fails(megackpt.NonfiniteValues, "lora_A"):
        load_adapter(adapted("lora"), f"{folder}/stock")


def test_what_differs_is_refused_and_changes_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, refuses_what_differs, tmp_path)


def saves_until_killed(folder: str) -> None:
    from megackpt.huggingface.peft import load_adapter, save_adapter
    from tests.huggingface.adapted_models import adam, adapted, step, trained

    model = adapted("lora")
    optimizer = adam(model)
    step(model, optimizer)
    directory = f"{folder}/run"
    save_adapter(model, directory, optimizer, extra=0)
    chooser = torch.Generator().manual_seed(1)
    for _ in range(6):
        saved, saving = os.pipe()
        child = os.fork()
        if not child:
            while True:
                for number in range(1, 100):
                    with torch.no_grad():
                        for param in trained(model):
                            param.fill_(number)
                            optimizer.state[param]["exp_avg"].fill_(number)
                    save_adapter(model, directory, optimizer, extra=number)
                    os.write(saving, b".")
        os.read(saved, 1)
        time.sleep(float(torch.rand((), generator=chooser)) / 4)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = load_adapter(model, directory, optimizer)
        for param in trained(model):
            for tensor in (param, optimizer.state[param]["exp_avg"]):
                assert found
                assert (tensor == found).all()


def test_a_killed_save_leaves_the_old_or_the_new(ranks: Ranks, tmp_path: Path) -> None:
    alone(ranks, saves_until_killed, tmp_path)


def runs_the_page(folder: str, number: int, first: int) -> None:
    from tests.test_docs import ROOT, blocks

    os.chdir(folder)
    program = blocks(ROOT / "docs" / "adapters.md", "python")[number].text
    values: dict[str, Any] = {}
    exec(program, values)  # noqa: S102 - the code of our own page
    assert values.get("first", first) == first


def test_the_page_runs(ranks: Ranks, tmp_path: Path) -> None:
    for count, first in ((2, 0), (1, 4), (2, 8)):
        ranks(runs_the_page, count, tmp_path, 0, first, init=False, timeout=120)
    alone(ranks, runs_the_page, tmp_path, 1, 0)
    assert (tmp_path / "merged" / "config.json").exists()


def test_peft_is_imported_when_it_is_used() -> None:
    program = (
        "import sys, torch, megackpt.huggingface.peft as adapters\n"
        "assert not {'peft', 'transformers'} & sys.modules.keys()\n"
        "try:\n    adapters.save_adapter(torch.nn.Linear(1, 1), 'x')\n"
        "except adapters.BackendError as error:\n    assert 'pip install peft' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
