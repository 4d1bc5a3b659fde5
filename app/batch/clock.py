"""When a run has to end."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

from imgscale.app import checks
from imgscale.errors import UserError


class Clock:
    """A deadline, and what is known of how long a search takes.

    Args:
        ends: Unix time, or None for no deadline.

    Attributes:
        rung: Whether the deadline ended a search.
    """

    def __init__(self, ends: float | None = None) -> None:
        self.ends = ends
        self.rung = False
        self._longest = 0.0

    @classmethod
    def of(cls, until: str | None, hours: str | None, now: float | None = None) -> Clock:
        """A clock by what the command line says; the earlier of two deadlines.

        Args:
            until: A time of day, such as 06:00: the next one.
            hours: From now on.
            now: Unix time.

        Raises:
            UserError: One is none.
        """
        now = time.time() if now is None else now
        ends = []
        if until is not None:
            match = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*", until)
            if match is None or int(match[1]) > 23 or int(match[2]) > 59:
                raise UserError(f"--until can't be {until!r}; give a time of day from 00:00 to 23:59, such as 06:00.")
            today = datetime.fromtimestamp(now)
            then = today.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
            ends.append((then if then > today else then + timedelta(days=1)).timestamp())
        if (given := checks.positive(hours, "--hours")) is not None:
            ends.append(now + 3600 * given)
        return cls(min(ends, default=None))

    def took(self, seconds: float) -> None:
        """A search took so long."""
        self._longest = max(seconds, 0.9 * self._longest)  # the longest of late counts, not one of hours ago

    def room(self) -> bool:
        """Whether a further search would end in time, as far as one can know."""
        return self.ends is None or time.time() + self._longest < self.ends

    def over(self) -> bool:
        return self.ends is not None and time.time() >= self.ends
