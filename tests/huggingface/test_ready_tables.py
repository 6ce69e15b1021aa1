"""Ready tables: a model of Hugging Face's over TP2 and EP2 and back has the same bits, and computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megackpt.converter import export_huggingface
from megackpt.errors import MismatchError
from megackpt.huggingface import gemma, link, qwen3_moe
from tests.conftest import PEERS, ROOT
from tests.huggingface.models import equal, files_in
from tests.huggingface.ready_models import FAMILIES, config_of, theirs, train

# Makes each model, or notes what it computes after the way there and back.
SCRIPT = """
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

folder, configs = Path(sys.argv[1]), eval(sys.argv[2])
found = {}
for name, config in configs.items():
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    torch.manual_seed(len(name))
    made = folder / "made" / name
    if made.is_dir():
        model, info = auto.from_pretrained(folder / "back" / name, output_loading_info=True)
        assert not any(info.values()), (name, info)
    else:
        kind = config.pop("model_type")
        model = auto.from_config(AutoConfig.for_model(kind, **config))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(made)
    with torch.no_grad():
        found[name] = model.eval()(torch.tensor([[1, 7, 3, 42, 9, 9, 0, 31, 49, 12]])).logits
torch.save(found, sys.argv[3])
"""


def back(name: str, pretrained: Path, folder: Path) -> Path:
    """Over 4 ranks to an export, which has the same tensors."""
    training, exported = folder / "training" / name, folder / "back" / name
    train(name, pretrained, training)
    table = FAMILIES[name].table(config_of(name))
    config: object = config_of(name)
    if (pretrained / "config.json").is_file():
        config = pretrained
    export_huggingface(training, exported, table, config)  # type: ignore[arg-type]
    equal(
        load_file(exported / "model.safetensors"),
        load_file(pretrained / "model.safetensors"),
    )
    return exported


FAST = "mixtral", "qwen2", "qwen3_moe-mixed"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in FAMILIES
        if name != "bert"
    ],
)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(theirs(name), tmp_path / "hf/model.safetensors", {"format": "pt"})
    exported = back(name, tmp_path / "hf", tmp_path)
    assert files_in(exported) == {"config.json", "model.safetensors"}


def test_another_generation_is_refused() -> None:
    with pytest.raises(MismatchError, match="not 'gemma2'"):
        gemma({**config_of("gemma"), "model_type": "gemma2"})


def test_experts_of_all_layers_in_one_tensor() -> None:
    table = qwen3_moe(config_of("qwen3_moe"))
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    pieces = link(table, [(key, (3, 4, 48, 32))])[key, (3, 4, 48, 32)]
    assert len(pieces) == 3 * 4 * 2
    assert pieces[-1].key == "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.transformers
@pytest.mark.slow
def test_transformers_computes_the_same(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(PEERS / "huggingface"),
        "HF_HUB_OFFLINE": "1",
    }
    configs = {name: config_of(name) for name in FAMILIES}

    def logits(name: str) -> dict[str, torch.Tensor]:
        path = tmp_path / name
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), repr(configs), path]
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return found

    before = logits("before")
    for name in FAMILIES:
        made = tmp_path / "made" / name
        back(name, made, tmp_path)
        if name != "bert":
            written = load_file(made / "model.safetensors")
            shapes = {key: value.shape for key, value in theirs(name).items()}
            assert shapes == {key: value.shape for key, value in written.items()}
    equal(logits("after"), before)
