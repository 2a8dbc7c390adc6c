"""What is rounded, and which way: the numbers and helpers that every bound shares."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Final

U: Final = 2.0**-53  # what one operation may be off by, relatively
SLACK: Final = 64.0 * U  # relative: of fewer than 64 roundings in a row


def float_above(value: Fraction | Decimal) -> float:
    """The least double that is at least the value."""
    near = float(value)
    return near if Fraction(near) >= Fraction(value) else math.nextafter(near, math.inf)
