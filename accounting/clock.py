"""The time of a question, and whether it was ever over when somebody looked."""

from __future__ import annotations

import math
import time


class Clock:
    """Runs for ``seconds`` from now, and remembers in ``ran_out`` that it was found to be over.

    An answer is cut short only where the clock is looked at. An answer after which ``ran_out`` is
    false is therefore the one that any longer time would have given, however late it comes; the
    hour at its end says nothing of the kind, because what was cut short may be done before it.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds
        self._whole: Clock | None = None
        self.ran_out = False

    def left(self) -> float:
        """The seconds left, at least 0. Whoever does less because of them has to look as well."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Whether no time is left."""
        if time.monotonic() <= self._end:
            return False
        clock: Clock | None = self
        while clock is not None:
            clock.ran_out = True
            clock = clock._whole
        return True

    def share(self, part: float) -> Clock:
        """A clock for a part of the time left; its running out is this one's as well."""
        clock = Clock(part * self.left())
        clock._whole = self
        return clock
