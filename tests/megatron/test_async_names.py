"""Names of Megatron-Core 0.17 to 0.19 beside its asynchronous saves, and what its training does with them."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.megatron.serialization import _legacy_common_state_exists
from megackpt.megatron.strategies.async_utils import _disable_gc, _set_process_qos
from megackpt.megatron.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megackpt.megatron.strategies.nvrx import (
    has_nvrx_async_support,
    make_nvrx_async_request,
)
from megackpt.megatron.strategies.state_dict_saver import save_state_dict_async_plan
from megackpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    _get_filesystem_reader,
    get_async_strategy,
)


@pytest.mark.parametrize("asked", ["nvrx", "mcore"])
def test_a_persistent_worker_and_a_request_as_training_makes_them(
    asked: str, tmp_path: Path
) -> None:
    assert has_nvrx_async_support()
    name, modules = get_async_strategy(asked)
    assert name == "mcore"
    queue = modules["AsyncCallsQueue"](persistent=False)
    modules["AsyncCallsQueue"].warmup_persistent_caller(
        0, cpu_priority=10, io_priority=None, mp_mode="spawn"
    )
    modules["get_write_results_queue"](mp_mode="fork")
    writer = modules["FileSystemWriterAsync"](tmp_path / "a", thread_count=1)
    state = {"w": torch.arange(4.0)}
    planned, *_ = save_state_dict_async_plan(state, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    request = make_nvrx_async_request(
        modules["AsyncRequest"],
        function,
        arguments,
        [lambda: modules["save_state_dict_async_finalize"](*planned)],
        async_fn_kwargs={},
        preload_fn=preload,
    )
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    queue.close()
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "a")["w"], state["w"])
    reader = CachedMetadataFileSystemReader(tmp_path / "a", cache_metadata=True)
    for each in (reader, _get_filesystem_reader(tmp_path / "a")):
        assert each.read_metadata().state_dict_metadata.keys() == {"w"}
    get_async_strategy(asked, "CachedMetadataFileSystemReader")[
        1
    ].clear_metadata_cache()


def test_another_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match="'nvrx' or 'mcore', not 'ours'"):
        get_async_strategy("ours")


def test_a_load_with_the_arguments_of_0_19(tmp_path: Path) -> None:
    given = {
        "w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(2)),
        "n": 3,
    }
    megackpt.save(given, tmp_path / "a")
    strategy = TorchDistLoadShardedStrategy(
        cache_metadata=True, stream_ckpt_dequant=True
    )
    assert megackpt.load(given, tmp_path / "a", strategy)["n"] == 3
    assert _legacy_common_state_exists(tmp_path / "a")
    assert not _legacy_common_state_exists(str(tmp_path))
    assert not _legacy_common_state_exists(tmp_path / "nothing")


def test_no_garbage_collection_in_a_function_or_a_block() -> None:
    @_disable_gc()
    def enabled(*values: Any) -> tuple[bool, Any]:
        return gc.isenabled(), values

    assert enabled(1) == (False, (1,))
    assert gc.isenabled()
    with _disable_gc():
        assert enabled() == (False, ())
        assert not gc.isenabled()
    with pytest.raises(ZeroDivisionError), _disable_gc():
        _ = 1 // 0
    assert gc.isenabled()


def test_a_process_gives_way() -> None:
    program = (
        "import os\n"
        "from megackpt.megatron.strategies.async_utils import _set_process_qos as give_way\n"
        "before = os.nice(0)\n"
        "give_way(cpu_priority=None, io_priority=3)\n"
        "assert os.nice(0) == before\n"
        "give_way(cpu_priority=19, io_priority=None)\n"
        "assert os.nice(0) == 19\n"
        "give_way(cpu_priority=1, io_priority=None)\n"
        "assert os.nice(0) == 19\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert _set_process_qos.__module__ == "megackpt.megatron.async_names"


KEPT = """
from dataclasses import replace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

def retarget(state):
    def rename(one):
        assert isinstance(one, ShardedTensor)
        one.key = one.key.replace("layers.3.", "layers.")
        return one
    dict_list_map_inplace(rename, state)
"""


def test_a_module_that_rewrites_declarations_stays_megatrons(tmp_path: Path) -> None:
    """In place of the real one, which releases before 0.19 lack."""
    core = tmp_path / "megatron" / "core"
    folder = core / "dist_checkpointing"
    folder.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("__version__ = '0.16.1'")
    (folder / "__init__.py").write_text("")
    (folder / "mapping.py").write_text("class ShardedTensor: pass")
    (folder / "dict_utils.py").write_text("def dict_list_map_inplace(*_): pass")
    (folder / "gpt_checkpoint_interop.py").write_text(KEPT)
    (core / "training.py").write_text(
        "from megatron.core.dist_checkpointing.gpt_checkpoint_interop import retarget"
    )
    program = (
        "import sys\n"
        "import megackpt, megackpt.megatron, torch\n"
        "if sys.argv[1] == 'later':\n"
        "    import megatron.core.training\n"
        "with megackpt.megatron.install():\n"
        "    from megatron.core import training\n"
        "    w = megackpt.ShardedTensor.from_rank_offsets('layers.3.w', torch.ones(2))\n"
        "    state = {'w': w}\n"
        "    training.retarget(state)\n"
        "    assert state['w'].key == 'layers.w'\n"
        "theirs = sys.modules['megatron.core.dist_checkpointing.mapping'].ShardedTensor\n"
        "assert training.retarget.__globals__['ShardedTensor'] is theirs\n"
        "assert theirs is not megackpt.ShardedTensor\n"
    )
    for order in ("first", "later"):
        subprocess.run(
            [sys.executable, "-c", program, order],
            check=True,
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{Path(megackpt.__file__).parents[1]}"},
        )
