"""What differs between two checkpoints: ``comparing`` is the order of it, ``digests`` tells what need not be read,
``elements`` is the arithmetic on values.
"""

from megackpt.cli.differences.comparing import (
    Comparison as Comparison,
    ObjectDifference as ObjectDifference,
    TensorDifference as TensorDifference,
    compare as compare,
)
from megackpt.cli.differences.elements import Element as Element, Tolerance as Tolerance
