"""Owners of the entries of queues, and former owners whose entry may still be made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..core.runtime import clock

#: Seconds for which a request without an answer, or a copy of one, may still arrive.
LATE = 60.0
#: Owners that are released again for so long, and the seconds that one beat takes for them.
MOST, TIDYING = 1000, 0.5
#: Seconds between two looks whether a release has ended.
PAUSE = 0.01


class Doubts:
    """
    The owners of entries in this process, and former owners whose entry may still be made.

    These are released at each beat, by their ids. One that was sent twice isn't before its lease
    has ended: that would release a live lease.
    """

    def __init__(self) -> None:
        #: By owner id: the session of each acquire that began and each grant.
        self.owners: dict[str, Any] = {}
        #: Those of them that are readers.
        self.readers: set[str] = set()
        #: Owners whose entry may be made again by a late copy of their request.
        self.repeated: set[str] = set()
        #: By owner id: former owners to be released again, with the name, and until when.
        self.late: dict[str, tuple[str, float]] = {}
        #: Those that are released at this moment.
        self.leaving: set[str] = set()

    def begin(self, owner: str, shared: bool) -> None:
        """Note an owner before its first request is sent."""
        if shared:
            self.readers.add(owner)
        self.owners.setdefault(owner)
        # In this order: tidy() looks for the owner once it has noted that it releases it.
        while owner in self.leaving:
            time.sleep(PAUSE)
        if owner in self.late:
            # The core repeats a claim. A copy of the first request may still arrive.
            self.repeated.add(owner)

    def end(self, name: str, owner: str, *, is_sure: bool) -> None:
        """Note that an owner is none any more; unless it `is_sure`, its entry may be there."""
        if (owner in self.repeated or not is_sure) and len(self.late) < MOST:
            self.late[owner] = name, clock() + LATE
        self.repeated.discard(owner)
        self.owners.pop(owner, None)
        self.readers.discard(owner)

    def find_strays(self, found: Mapping[str, str], before: set[str]) -> set[str]:
        """Return owners of entries that nothing here owns; those seen `before` are released."""
        strays = {owner for owner in found if owner not in self.owners}
        # Seen once, its release may be under way.
        for owner in strays & before:
            self.late.setdefault(owner, (found[owner], clock()))
        return strays

    def tidy(self, leave: Callable[[str, str], object]) -> None:
        """Release former owners, as many as there is time for."""
        end = clock() + TIDYING
        for owner, (name, until) in list(self.late.items()):
            if clock() > end:
                return
            if owner in self.leaving:
                # Another thread releases it.
                continue
            self.leaving.add(owner)
            try:
                # Its claim may have been tried again.
                if owner not in self.owners:
                    self._leave(owner, name, until, leave)
            finally:
                self.leaving.discard(owner)

    def _leave(
        self, owner: str, name: str, until: float, leave: Callable[[str, str], object]
    ) -> None:
        is_over = False
        try:
            leave(name, owner)
            is_over = clock() >= until
        finally:
            # The last one of the next beat, also if it fails: others may be possible.
            self.late.pop(owner, None)
            if not is_over:
                self.late[owner] = name, until
