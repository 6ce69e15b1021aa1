"""Communication between ranks: the control group, votes, and errors that all ranks raise."""

from __future__ import annotations

from megackpt.distributed.failures import (
    Attempt as Attempt,
    attempt as attempt,
    name_here as name_here,
)
from megackpt.distributed.group import (
    Busy as Busy,
    Group as Group,
    RankGroup as RankGroup,
    SingleGroup as SingleGroup,
    Streams as Streams,
)
from megackpt.distributed.process_group import (
    DEFAULT_TIMEOUT as DEFAULT_TIMEOUT,
    GroupLike as GroupLike,
    coordinates as coordinates,
    domain_of as domain_of,
    group_over as group_over,
    rank_and_size as rank_and_size,
)
from megackpt.distributed.streams import Stream as Stream
