"""The conformance tests of a backend, as one pytest class."""

from __future__ import annotations

from megackpt.testing.conformance.damage_tests import DamageTests
from megackpt.testing.conformance.load_tests import LoadTests
from megackpt.testing.conformance.save_tests import SaveTests


class BackendSuite(SaveTests, LoadTests, DamageTests):
    """The conformance tests of a backend, for the authors of plug-ins.

    ::

        class TestMine(BackendSuite):
            backend = MyBackend()

    Class attributes:
        dtypes: the dtypes that the format can hold.
        unfit_keys: odd keys (see ``conformance.save_tests.KEYS``) that it cannot hold.
        objects: False for formats of tensors only.
        irregular: False for formats that refuse shards which form no grid.

    A backend refuses what its format cannot hold with BackendError, naming the key, before it
    writes: in ``layout``. The tests use real files below ``tmp_path``.
    """
