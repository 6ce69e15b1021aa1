"""The conformance tests, passed by each built-in backend."""

from __future__ import annotations

from megackpt.backends.safetensors import Safetensors
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_file import TorchFile
from megackpt.backends.zarr import Zarr
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.testing import BackendSuite

TENSORS = [dtype for dtype in ITEMSIZE if dtype != OBJECT]


class TestTorchDist(BackendSuite):
    backend = TorchDist()


class TestTorchDistWithOptions(BackendSuite):
    backend = TorchDist(files_per_rank=1, separation_hint="l")


class TestZarr(BackendSuite):
    backend = Zarr()
    dtypes = tuple(dtype for dtype in TENSORS if dtype != "complex32")


class TestSafetensors(BackendSuite):
    backend = Safetensors()
    dtypes = tuple(
        dtype for dtype in TENSORS if dtype not in ("complex32", "complex128")
    )
    unfit_keys = ("__metadata__", "\ud800")


class TestSeveralSafetensors(BackendSuite):
    backend = Safetensors(shards=3)
    dtypes = TestSafetensors.dtypes
    unfit_keys = TestSafetensors.unfit_keys


class TestTorchFile(BackendSuite):
    backend = TorchFile()
