"""The laws of a format as one pytest class, for whoever writes one."""

from __future__ import annotations

from megackpt.testing.laws.faults import FaultLaws
from megackpt.testing.laws.reading import ReadingLaws
from megackpt.testing.laws.writing import WritingLaws


class BackendSuite(WritingLaws, ReadingLaws, FaultLaws):
    """The laws of a format as a pytest class, for the authors of backends.

    ::

        class TestMine(BackendSuite):
            backend = MyBackend()

    ``dtypes`` are those that the format can hold, ``unfit_keys`` the odd keys (see ``laws.writing.KEYS``) that it
    cannot. ``objects``: False for formats of tensors only. ``irregular``: False for those that refuse shards which
    form no grid. What a format does not hold it refuses with BackendError, naming the key, before it writes:
    ``layout`` and ``files`` are asked first. The files are real, below ``tmp_path``.
    """
