"""
Signals of the lock's life.

All are sent with ``send_robust()``: a receiver that raises is logged and breaks nothing.
The sender is the backend's class, unless it says otherwise. Each carries ``alias``, and ``name``
unless it is about several locks.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger(__name__)

#: Carries ``lease`` and ``waited``, in seconds.
lock_acquired = Signal()
#: Carries ``waited``, in seconds, and ``pattern``, the template of the name if it has one.
lock_not_acquired = Signal()
#: Carries ``lease``.
lock_released = Signal()
#: Carries ``lease`` and ``reason``. Sent from the notifier's thread if the keeper noticed the loss,
#: else from the thread whose call noticed it.
lock_lost = Signal()
#: Carries ``holder``, from whom the lock was taken away, ``by`` whom, ``token``, the fence's from
#: then on (None if the lock isn't fenced), and ``freed``: False if the holder has yet to give it
#: back. Sent where it was done; the holder's process sends `lock_lost`.
lock_force_released = Signal()
#: Carries ``owner`` and ``pid`` of the holder, whose process on this machine was found gone. Sent
#: by whoever freed the lock.
lock_evicted = Signal()
#: Carries ``pattern``, the ``task`` and the ``reason``: a run of a task that is about to begin
#: without its lock, since ``on_backend_error="run"`` says so and the lock service failed.
lock_bypassed = Signal()
#: Carries ``leases`` and ``answers``, a `Renewal` for each: a batch of the keeper, from the
#: notifier's thread, or one lease that its holder renewed.
leases_renewed = Signal()
#: Carries ``lease``, whose ``atomic()`` was refused, and the present ``holder`` if known. The
#: sender is the lease's class.
stale_transaction_rejected = Signal()
#: The sender is the model. Carries ``pk`` (None for a statement over many rows), ``name`` of the
#: lock, the writer's ``token``, the ``row_token`` if known, and the present ``holder`` if known.
stale_write_rejected = Signal()


def send(signal: Signal, sender: type, **facts: Any) -> None:
    """Send `signal`; a receiver that fails is logged with its traceback."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            logger.error("Receiver %r of a lock signal failed", receiver, exc_info=answer)
