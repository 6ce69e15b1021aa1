"""The proof of the format: megackpt's conformance tests, and a test of this format alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megackpt_npz import Npz

import megackpt
from megackpt.testing import BackendSuite


class TestNpz(BackendSuite):
    backend = Npz(
        prefix="part"
    )  # what an instance with options wrote, a plain one must read


def test_numpy_opens_it(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"w": megackpt.ShardedTensor.from_rank_offsets("fc1.weight", weight)}
    megackpt.save(state, tmp_path / "step", Npz())
    with np.load(tmp_path / "step" / "rank_0.npz") as archive:
        assert np.array_equal(archive["fc1.weight[0:2, 0:3]"], weight.numpy())


def test_a_prefix_that_is_no_name_is_refused():
    with pytest.raises(megackpt.BackendError, match="'no name' cannot"):
        Npz(prefix="no name")
