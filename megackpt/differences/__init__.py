"""What differs between two checkpoints: ``comparing`` is the order of it, ``digests`` tells what need not be read,
``elements`` is the arithmetic on values.
"""

from megackpt.differences.comparing import Comparison, ObjectDifference, TensorDifference, compare
from megackpt.differences.elements import Element, Tolerance

__all__ = ["Comparison", "Element", "ObjectDifference", "TensorDifference", "Tolerance", "compare"]
