"""Writers and readers of hf-xor of other projects, run by test_hf_xor.py in their own processes.

Arguments: what to do, and its arguments as JSON. Directories are Hugging Face directories, a chain is the list of
those of its versions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file


def tensors(folder: str, part: int = 0, parts: int = 1) -> list[tuple[str, Any]]:
    """Every tensor of a directory, or those that one of several ranks has."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return [found_one for i, found_one in enumerate(found.items()) if i % parts == part]


def slime_writes(chain: list[str], places: dict[str, str]) -> None:
    """On each rank of a job: slime's class for disks, fed with the tensors instead of a model's.

    ``places``: checksum algorithm -> where to publish.
    """
    dist.init_process_group("gloo")
    from slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta import (
        UpdateWeightFromDiskDelta,
    )
    from slime.utils.disk_delta import make_tensor_reader
    from slime.utils.distributed_utils import init_gloo_group

    init_gloo_group()
    rank = dist.get_rank(), dist.get_world_size()
    for checksum, place in places.items():
        args = Namespace(
            update_weight_disk_dir=place,
            update_weight_delta_encoding="xor",
            update_weight_delta_checksum=checksum,
            custom_update_weight_post_write_path=None,
            hf_checkpoint=chain[0],
        )
        writer = UpdateWeightFromDiskDelta(
            args, [], dict, model_name="", quantization_config=None
        )
        writer._is_pp_src_rank = True
        read = make_tensor_reader(chain[0])
        writer._snapshot = {name: read(name) for name, _ in tensors(chain[0], *rank)}
        for folder in chain[1:]:
            writer._iter_hf_tensors = lambda folder=folder: iter(tensors(folder, *rank))
            writer.weight_version += 1
            writer._publish()
    dist.destroy_process_group()


def sglang_reads(patch: str, base: str, place: str, target: int, local: str) -> None:
    """The module of SGLang that slime ships as a patch: pull versions, one more each time."""
    name = "python/sglang/srt/weight_sync/local_checkpoint.py"
    where = Path(local).with_name("sglang")
    where.mkdir()
    subprocess.run(
        ["git", "apply", f"--include={name}", patch],
        cwd=where,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(where.parent)},
        check=True,
    )
    spec = importlib.util.spec_from_file_location("local_checkpoint", where / name)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for version in range(target + 1):
        module.pull(local, base, place, version)


def _uri(place: str, version: int) -> str:
    return f"{place}/weight_v{version:06d}/model.safetensors.index.json"


def modelexpress_writes(chain: list[str], place: str, full: list[int]) -> None:
    """The class that publishes, with a stand-in for the server that knows all versions.

    The versions of ``full`` are full ones, the others deltas.
    """
    dist.init_process_group("gloo")
    from modelexpress_rl import refit_pb2
    from modelexpress_rl.s3 import S3Client
    from modelexpress_rl.train.methods.canonical_delta import (
        CanonicalDeltaPublicationMethod,
    )
    from modelexpress_rl.utils import make_tensor_reader
    from modelexpress_rl.version import WeightVersionRef

    def version(request: Any, timeout: float) -> Any:
        number = int(request.uid)
        found = refit_pb2.WeightVersion(
            uid=request.uid,
            model_name="model",
            payload_format=refit_pb2.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT,
            object_storage=refit_pb2.ObjectStorageSource(
                storage_type=refit_pb2.OBJECT_STORAGE_TYPE_S3, uri=_uri(place, number)
            ),
        )
        if number not in full:
            found.payload_format = refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
            found.base_version_id = f"{number - 1:06d}"
        return refit_pb2.GetWeightVersionResponse(version=found)

    method = CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(initial_base_version_id="000000", uri_prefix=place),
        model_name="model",
        service=lambda: SimpleNamespace(GetWeightVersion=version),
        rpc_timeout_seconds=1.0,
        process_group=None,
        read_seed_tensor=make_tensor_reader(chain[0])[0],
        s3=S3Client(),
    )
    rank = dist.get_rank(), dist.get_world_size()
    method.prepare_base(hf_tensor_iter=[tensors(chain[0], *rank)])
    for number, folder in enumerate(chain[1:], start=1):
        ref = WeightVersionRef(version_id=f"{number:06d}")
        buckets = [[item] for item in tensors(folder, *rank)]
        staged = method.stage(version=ref, hf_tensor_iter=buckets)
        method.publish(version=ref, staged=staged)
    method.close()
    dist.destroy_process_group()


def modelexpress_reads(
    base: str, place: str, target: int, full: list[int], cache: str
) -> None:
    """The local checkpoint of a receiver: one version more each time. Prints the last one's path."""
    from modelexpress_rl.inference.receiver import (
        ObjectStorageGeneratorConfig,
        _LocalCheckpoint,
        _S3Version,
    )
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.s3 import S3Client
    from modelexpress_rl.train import WeightPayloadFormat

    config = ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3,
        initial_base_version_id="000000",
        seed_checkpoint_path=base,
        refit_checkpoint_dir=cache,
        refit_checkpoint_max_size_gb=None,
    )
    local = _LocalCheckpoint(model_name="model", config=config, s3=S3Client())
    local.initialize()
    path = local.local_checkpoint
    for number in range(1, target + 1):
        format = WeightPayloadFormat.XOR_DELTA
        before: str | None = f"{number - 1:06d}"
        if number in full:
            format, before = WeightPayloadFormat.FULL_HF_CHECKPOINT, None
        version = _S3Version(f"{number:06d}", before, format, _uri(place, number))
        prepared = local.prepare(version)
        with local.installation_context(prepared):
            path = prepared.path
    print("checkpoint:", path)


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
