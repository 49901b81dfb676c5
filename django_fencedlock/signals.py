"""
Signals of locks.

All are sent with ``send_robust()``: an error of a receiver is logged. The sender is the class of
the backend, unless noted otherwise. Each has ``alias``, and ``name`` unless it is about several
locks.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger(__name__)

#: ``lease`` and ``waited``, in seconds.
lock_acquired = Signal()
#: ``waited``, in seconds; ``pattern``, the template of the name, if it has one; and the present
#: ``holder`` if known.
lock_not_acquired = Signal()
#: ``lease``.
lock_released = Signal()
#: ``lease`` and ``reason``. Sent from the notifier's thread if the keeper noticed the loss, else
#: from the thread whose call noticed it.
lock_lost = Signal()
#: ``holder`` who lost the lock, ``by`` whose order, the fence's new ``token`` (None if unfenced),
#: and ``freed``: False if the holder has yet to release it. The holder's process sends `lock_lost`.
lock_force_released = Signal()
#: ``owner`` and ``pid`` of a holder on this machine whose process is gone.
lock_evicted = Signal()
#: ``pattern``, ``task`` and ``reason``: a task is about to run without its lock, since the lock
#: service failed and ``on_backend_error="run"``.
lock_bypassed = Signal()
#: ``leases`` and ``answers``, a `Renewal` for each: a batch of the keeper (from the notifier's
#: thread), or one lease that its holder renewed.
leases_renewed = Signal()
#: ``lease`` whose ``atomic()`` was rejected, and the present ``holder`` if known. The sender is
#: the lease's class.
stale_transaction_rejected = Signal()
#: The sender is the model. ``pk`` (None for a statement over many rows), ``name`` of the lock, the
#: writer's ``token``, the ``row_token`` if known, and the present ``holder`` if known. ``reason``:
#: ``"stale"``, or ``"read_before_lock"`` for a `StaleObject`, which is a bug of the caller.
stale_write_rejected = Signal()


def send(signal: Signal, sender: type, **facts: Any) -> None:
    """Send `signal`. An error of a receiver is logged with its traceback."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            logger.error("Receiver %r of a lock signal failed", receiver, exc_info=answer)
