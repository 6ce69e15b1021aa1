"""The action of a recovery for each directory that a save has left beside its target: a table."""

from __future__ import annotations

import enum


class Holds(enum.Enum):
    MARKER = "the marker of its save"
    CHECKPOINT = "no such marker"


class Suffix(enum.Enum):
    NONE = "none"
    OLD = "`old`"
    TAKEN = "of the save that took it"


class Owner(enum.Enum):
    """The save that took the directory, or else the save that made it."""

    ALIVE = "alive"
    DEAD = "dead"


class Fit(enum.Enum):
    """Whether the directory belongs in NAME."""

    SPARE = "no"
    CHANGED = "exchanged with NAME, and not the base of that save"
    NEEDED = "NAME has no checkpoint"


class Action(enum.Enum):
    LEAVE = "leave it"
    REMOVE = "remove it; files of other programs move to NAME"
    EXCHANGE = "exchange it with NAME, and remove the replaced one"
    RENAME = "rename it to NAME"


ACTIONS = {
    (Holds.MARKER, Suffix.NONE, Owner.ALIVE, Fit.SPARE): Action.LEAVE,
    (Holds.MARKER, Suffix.NONE, Owner.DEAD, Fit.SPARE): Action.REMOVE,
    (Holds.MARKER, Suffix.OLD, Owner.DEAD, Fit.SPARE): Action.REMOVE,
    (Holds.MARKER, Suffix.TAKEN, Owner.ALIVE, Fit.SPARE): Action.REMOVE,
    (Holds.MARKER, Suffix.TAKEN, Owner.DEAD, Fit.SPARE): Action.REMOVE,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.ALIVE, Fit.SPARE): Action.LEAVE,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.ALIVE, Fit.CHANGED): Action.EXCHANGE,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.ALIVE, Fit.NEEDED): Action.RENAME,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.DEAD, Fit.SPARE): Action.REMOVE,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.DEAD, Fit.CHANGED): Action.EXCHANGE,
    (Holds.CHECKPOINT, Suffix.NONE, Owner.DEAD, Fit.NEEDED): Action.RENAME,
    (Holds.CHECKPOINT, Suffix.OLD, Owner.DEAD, Fit.SPARE): Action.REMOVE,
    (Holds.CHECKPOINT, Suffix.OLD, Owner.DEAD, Fit.NEEDED): Action.RENAME,
    (Holds.CHECKPOINT, Suffix.TAKEN, Owner.ALIVE, Fit.SPARE): Action.LEAVE,
    (Holds.CHECKPOINT, Suffix.TAKEN, Owner.DEAD, Fit.SPARE): Action.REMOVE,
}
"""A directory with a marker does not belong in NAME. The suffix ``old`` names no save, so the owner
of such a directory is DEAD."""
