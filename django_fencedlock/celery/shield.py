"""
Celery's soft time limit, kept from striking where nobody could clean up after it.

It is a signal whose handler raises wherever the main thread is, as between a grant and the note of
it. So it is put off, for moments, while a run is at its lock; the body, and a wait for the lock, it
ends as ever.
"""

from __future__ import annotations

import importlib
import threading
from types import FrameType, TracebackType
from typing import Any

from billiard import pool

from ..backends.base import Cancel
from ..core import runtime

# The one of Python takes ten times as long, for the enums that it makes of the numbers.
_signal: Any = importlib.import_module("_signal")
_LIMIT: Any = getattr(pool, "SIG_SOFT_TIMEOUT", None)


class Shield:
    """``with``: puts the limit off until the end of the block, where it strikes at last."""

    def __init__(self) -> None:
        #: What a limit ends that comes while the shield is up: a wait for the lock.
        self.cancel = Cancel()
        self._struck: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Shield:
        self._raise()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lower()

    def lifted(self) -> _Lifted:
        """``with``: lets the limit strike in this block again."""
        return _Lifted(self)

    def _raise(self) -> None:
        # Nobody else's handler, and no pool but prefork's: the others have no soft limit.
        if (
            _LIMIT is not None
            and _signal.getsignal(_LIMIT) is pool.soft_timeout_sighandler
            and threading.current_thread() is threading.main_thread()
        ):
            _signal.signal(_LIMIT, self._note)

    def _lower(self) -> None:
        # The handler itself tells whether the shield is up: an abort, which isn't put off, may
        # come between any two lines, and a note of ours could be wrong then.
        if _LIMIT is None or _signal.getsignal(_LIMIT) != self._note:
            return
        _signal.signal(_LIMIT, pool.soft_timeout_sighandler)
        if self._struck is not None:
            struck, self._struck = self._struck, None
            pool.soft_timeout_sighandler(*struck)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._struck = number, frame
        # In a thread of its own: this one may be inside of what is to be cancelled.
        runtime.start(self.cancel.cancel)


class _Lifted:
    def __init__(self, shield: Shield) -> None:
        self._shield = shield

    def __enter__(self) -> None:
        self._shield._lower()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shield._raise()
