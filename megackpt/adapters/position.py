"""The former place of ``DataPosition``, which is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.lazy_names import lazily

if TYPE_CHECKING:
    from megackpt.integrations.data_position import (
        DataPosition as DataPosition,  # noqa: PLC0414 - exported
    )
else:
    _HOME = "megackpt.integrations.data_position"
    __getattr__, _ = lazily(globals(), {_HOME: ["DataPosition"]})
