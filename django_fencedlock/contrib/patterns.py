"""What lock names have in common: few enough patterns to count by, whatever names there are."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

#: Makes a pattern of a name and the template that the code wrote, if any; None to go by the rule.
Rule = Callable[[str, str], str | None]

#: So many patterns are told apart in one process, and the rest is one of its own.
MOST = 100
OTHER = "other"

# A part of a name that tells one row from another: a uuid; a hexadecimal word of 8 letters or
# more, and any word of 20 or more, if a digit is in it; else the digits alone.
_IDS = re.compile(
    r"""
    [0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}
    | (?<![0-9a-z])(?=[a-f]*\d)[0-9a-f]{8,}(?![0-9a-z])
    | (?<![0-9a-z])(?=[a-z]*\d)[0-9a-z]{20,}(?![0-9a-z])
    | \d+
    """,
    re.IGNORECASE | re.VERBOSE | re.ASCII,
)


def pattern_of(name: str) -> str:
    """Make a pattern of a name alone: ``invoice:42`` is one of ``invoice:*``."""
    return _IDS.sub("*", name)


class Patterns:
    """Gives each name its pattern, and never more than `most` of them."""

    def __init__(self, rule: Rule | None = None, most: int = MOST) -> None:
        self._rule = rule
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, name: str, template: str = "") -> str:
        """The pattern of a name that the code may have written as a template."""
        found = self._rule(name, template) if self._rule else None
        pattern = found or template or pattern_of(name)
        if pattern in self._known:
            return pattern
        with self._lock:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(pattern)
        return pattern
