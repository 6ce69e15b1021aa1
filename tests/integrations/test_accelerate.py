"""accelerate's Accelerator with our manager: killed, and resumed on other ranks, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt import CheckpointManager
from tests import conftest
from tests.conftest import ROOT, Ranks
from tests.integrations.programs import FSDP_ON_CPU, Program

pytestmark = [pytest.mark.accelerate, pytest.mark.torchdata, pytest.mark.transformers]
PEERS = ("accelerate", "huggingface", "torchdata", "")
PLAIN = "    cpu=True,\n"
CALLS = """
import os
import types
from pathlib import Path

for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)  # one process, without a group
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration

import megackpt
from megackpt.integrations.accelerate import Accelerator
from megackpt.integrations.transformers import Trainer


def begin(run, limit=None, automatic=True):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    configuration = ProjectConfiguration(run, automatic_checkpoint_naming=automatic, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    return accelerator, accelerator.prepare(torch.nn.Linear(1, 1, bias=False))


def save(accelerator, model, *values):
    for value in values:
        torch.nn.init.constant_(model.weight, value)
        path = accelerator.save_state()
    return path


def loaded(accelerator, model, *given):
    torch.nn.init.constant_(model.weight, -1)
    assert accelerator.load_state(*given)
    return model.weight.item()


def numbers(run):
    steps = megackpt.CheckpointManager(f"{run}/checkpoints").steps()
    return [step.step for step in steps if step.complete]


def fails(kind, text, call, *values):
    try:
        call(*values)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind}")


# A save that is running is loaded; with another checkpoint loaded, automatic saves stay.
accelerator, model = begin("kept")
assert accelerator.load_state() is False
path = save(accelerator, model, 0, 1, 2, 3)
assert loaded(accelerator, model) == 3
assert loaded(accelerator, model, path) == 3
accelerator.end_training()
accelerator, model = begin("kept")
assert loaded(accelerator, model, "kept/checkpoints/checkpoint-1/") == 1
assert save(accelerator, model, 40).endswith("checkpoint-4")
assert loaded(accelerator, model) == 40
assert numbers("kept") == [0, 1, 2, 3, 4]

# Back in one process: the next save is the newest.
assert loaded(accelerator, model, "kept/checkpoints/checkpoint-2") == 2
assert save(accelerator, model, 50).endswith("checkpoint-5")
accelerator.end_training()
accelerator, model = begin("kept")
assert loaded(accelerator, model) == 50

# Damage that only reading finds: one step back, and the next save is the newest.
for file in Path("kept/checkpoints/checkpoint-5").glob("*.distcp"):
    file.write_bytes(bytes(byte ^ 255 for byte in file.read_bytes()))
assert loaded(accelerator, model) == 40
assert save(accelerator, model, 60).endswith("checkpoint-6")
assert loaded(accelerator, model) == 60

# A directory of the name of a checkpoint, with a checkpoint in it.
accelerator.save_state("out/checkpoint-500")
assert loaded(accelerator, model, "out/checkpoint-500") == 60
for missing in ("out/checkpoint-501", "nothing"):
    fails(megackpt.NotACheckpoint, "", accelerator.load_state, missing)
accelerator.end_training()
fails(ValueError, "give a directory", begin("kept", automatic=False)[0].load_state)

# Of several ranks, and hostile: what is no state of generators, or a name of another directory.
victim = os.path.abspath("victim")
for rng in ([b"", b""], {victim: b""}, [{victim: b""}]):
    accelerator, model = begin("rng")
    accelerator._declared = lambda _, rng=rng: {"rng": megackpt.ShardedObject("rng", rng, (1,), (0,))}
    save(accelerator, model, 7)
    accelerator.end_training()
    accelerator, model = begin("rng")
    if rng == [b"", b""]:
        assert loaded(accelerator, model) == 7
    else:
        fails(megackpt.CorruptCheckpoint, "'rng'", accelerator.load_state)
manager = megackpt.CheckpointManager("trainer")
arguments = types.SimpleNamespace(world_size=1, process_index=0, save_only_model=False)
trainer = types.SimpleNamespace(args=arguments, checkpoints=manager)
trainer._declared = lambda *given: Trainer._declared(trainer, *given)
Path("folder/below").mkdir(parents=True)
for step, name in enumerate((victim, "../victim", "below/victim", "..", "trainer_state.json")):
    manager.save(step, trainer._declared({name: b"1"}, 1), extra={"ranks": 1})
    if step < 4:
        fails(megackpt.CorruptCheckpoint, repr(name), Trainer._write_files, trainer, Path("folder"), step)
Trainer._write_files(trainer, Path("folder"), 4)
assert sorted(map(str, Path("folder").rglob("*"))) == ["folder/below", "folder/trainer_state.json"]
assert not os.path.exists(victim)

# A model of transformers: its configuration and the tokenizer go into the checkpoint.
import tokenizers
from megackpt.converter import export_huggingface
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

AcceleratorState._reset_state(True)
GradientState._reset_state()
words = tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="?")
accelerator = Accelerator(cpu=True, processing_class=tokenizer)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))
model = accelerator.prepare(model)
path = accelerator.save_state("llama")
assert accelerator.load_state(path)
accelerator.end_training()
for step, config in ((path, None), (path, "exported/config.json")):
    folder = "exported" if config is None else "again"
    export_huggingface(step, folder, config=config)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(8)[None]
    assert torch.equal(exported(tokens).logits, model(tokens).logits)
assert AutoTokenizer.from_pretrained("exported")("a").input_ids == [0]
assert sorted(os.listdir("again")) == ["config.json", "model.safetensors"]

# Names of files that leave the directory are refused.
manager = megackpt.CheckpointManager("hostile")
for step, name in enumerate((victim, "../victim", "..", "a/victim", "additional_chat_templates/../victim", 5)):
    hostile = {"config.json": b"{}", name: b"1"}
    files = {"files": megackpt.ShardedObject("files", hostile, (1,), (0,))}
    manager.save(step, files, model=model)
    fails(megackpt.CorruptCheckpoint, "is not a small file", export_huggingface, manager.path(step), "x")
assert not os.path.exists(victim) and not os.path.exists("x")
print("done")
"""
FSDP = """    cpu=True,
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
"""


@pytest.mark.parametrize(
    "first", ["ddp", pytest.param("fsdp2", marks=pytest.mark.campaign)]
)
def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path, first: str) -> None:
    program = Program("accelerate.md", tmp_path, ranks, *PEERS)
    if first == "ddp":
        program.survives(2, 1, killed_at=9, saved=2)
    else:
        sharded = Program("accelerate.md", tmp_path, ranks, *PEERS)
        assert PLAIN in sharded.source
        sharded.source = FSDP_ON_CPU + sharded.source.replace(PLAIN, FSDP)
        sharded.survives(2, 1, killed_at=9, saved=2, by=program)
    steps = CheckpointManager(tmp_path / "killed/run/accelerate/checkpoints").steps()
    assert [step.step for step in steps] == [5, 6]
    assert all(step.complete for step in steps)


def test_a_clean_resume_logs_no_warning(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("accelerate.md", tmp_path, ranks, *PEERS)
    program.resumes_without_a_warning("STEPS = 15", "STEPS = 8")


def test_calls_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    program = tmp_path / "calls.py"
    program.write_text(CALLS)
    paths = ":".join(
        [
            str(ROOT),
            *(str(conftest.PEERS / peer) for peer in PEERS if peer != "torchdata"),
        ]
    )
    done = ranks(program, 1, timeout=240, env={"PYTHONPATH": paths}, cwd=tmp_path)[0]
    assert "done" in done.stdout, done.stderr[-3000:]
    assert "asked for by no rank" not in done.stderr
    assert "the random generators of 2 ranks are not restored on 1" in done.stderr
