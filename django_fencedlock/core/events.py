"""What happens to locks: one event, and the parts of the package that want to know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from django.dispatch import Signal

from .. import logs, signals
from ..backends.interface import Backend

logger = logging.getLogger(__name__)


class Kind(Enum):
    """What happened; the value is the signal that is sent."""

    ACQUIRED = signals.lock_acquired
    REFUSED = signals.lock_not_acquired
    RENEWED = signals.leases_renewed
    RELEASED = signals.lock_released
    LOST = signals.lock_lost
    EVICTED = signals.lock_evicted
    FORCED = signals.lock_force_released

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.subscribers: list[Subscriber] = []


class LockEvent(NamedTuple):
    """Something that happened to a lock of this process, or that this process did to one."""

    kind: Kind
    #: The class of the backend.
    sender: type
    alias: str
    name: str
    lease: Any
    #: What receivers of the signal get besides.
    facts: Mapping[str, Any]


Subscriber = Callable[[LockEvent], object]


def subscribe(subscriber: Subscriber, *kinds: Kind) -> None:
    """Call `subscriber` with each event of these kinds, in the thread that emits it."""
    for kind in kinds:
        if subscriber not in kind.subscribers:
            kind.subscribers.append(subscriber)


def emit(kind: Kind, backend: Backend, name: str, lease: Any = None, **facts: Any) -> None:
    """Tell all subscribers of an event; code of the project is called last, by the signal."""
    receivers = kind.signal.receivers
    if not kind.subscribers and not receivers:
        return
    sender, alias = type(backend), backend.config.alias
    event = LockEvent(kind, sender, alias, name, lease, facts)
    for subscriber in kind.subscribers:
        subscriber(event)
    if receivers:
        known = {"name": name, "lease": lease}
        given = {key: value for key, value in known.items() if value}
        signals.send(kind.signal, sender, alias=alias, **given, **facts)


def _log(event: LockEvent) -> None:
    name, alias, facts = event.name, event.alias, event.facts
    if event.kind is Kind.REFUSED:
        waited, holder = facts["waited"], facts["holder"]
        within = f" in {waited:.1f} s" if waited >= 0.05 else ""
        message = "Lock %r (alias %r) wasn't acquired%s: it is held by %s"
        known = logs.facts(name=name, alias=alias, waited=waited, holder=holder and str(holder))
        logger.info(message, name, alias, within, holder or "another holder", extra=known)
    elif event.kind is Kind.EVICTED:
        message = "Freed lock %r (alias %r): its holder, process %d of this machine, is gone"
        known = logs.facts(name=name, alias=alias, owner=facts["owner"])
        logger.warning(message, name, alias, facts["pid"], extra=known)
    else:
        reason = facts["reason"]
        known = logs.about(event.lease, reason=reason, held_for=event.lease.held_for())
        logger.warning("Lost lock %r (alias %r): %s", name, alias, reason, extra=known)


subscribe(_log, Kind.REFUSED, Kind.EVICTED, Kind.LOST)
