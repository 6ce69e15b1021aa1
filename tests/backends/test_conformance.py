"""The laws of a format, held by each of ours."""

from __future__ import annotations

from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.zarr import Zarr
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.testing import BackendSuite


class TestTorchDist(BackendSuite):
    backend = TorchDist()


class TestZarr(BackendSuite):
    backend = Zarr()
    dtypes = tuple(d for d in ITEMSIZE if d not in (OBJECT, "complex32"))
