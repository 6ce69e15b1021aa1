"""The other ranks: every message between them passes here, and one rank's error becomes everybody's."""

from __future__ import annotations

from megackpt.distributed.failures import Attempt as Attempt, attempt as attempt
from megackpt.distributed.gloo import (
    DEFAULT_TIMEOUT as DEFAULT_TIMEOUT,
    domain_of as domain_of,
    group_over as group_over,
)
from megackpt.distributed.group import (
    Busy as Busy,
    Group as Group,
    Mark as Mark,
    RankGroup as RankGroup,
    SingleGroup as SingleGroup,
    Streams as Streams,
)
from megackpt.distributed.streams import Stream as Stream
