"""
Prometheus metrics of locks, by alias and by the pattern of their names.

Add ``django_fencedlock.contrib.prometheus`` to ``INSTALLED_APPS``, or call `install()`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal

from ... import signals
from ...backends.interface import Renewal
from ...core.names import read_permit
from ...lease import Lease

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
except ImportError as exc:
    raise ImproperlyConfigured(
        "django_fencedlock.contrib.prometheus requires prometheus_client, which isn't installed. "
        "Run: pip install 'django-fencedlock[prometheus]'"
    ) from exc

__all__ = ["install", "uninstall"]

#: Returns the pattern of a name and its template, or None for the default.
Rule = Callable[[str, str], str | None]

#: The number of patterns in one process; locks of all others are counted as `OTHER`.
MAX_PATTERNS = 100
OTHER = "other"
LABELS = ("alias", "pattern")
#: Upper bounds in seconds: a free lock takes a millisecond, and work under a lock takes hours.
WAITS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
HOLDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)

_OUTCOMES = {Renewal.KEPT: "ok", Renewal.UNKNOWN: "failed", Renewal.LOST: "refused"}
# The parts of names that differ from row to row: a UUID; with a digit in it, a hexadecimal word of
# at least 8 or any word of at least 20 characters; other digits.
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
    """Return the default pattern of a name: ``invoice:*`` for ``invoice:42``."""
    return _IDS.sub("*", _without_permit(name))


def _without_permit(name: str) -> str:
    """Return a lock's name: all of its permits are counted as one."""
    permit = read_permit(name)
    return permit[0] if permit else name


class Patterns:
    """Returns the patterns of names: at most `most` different ones."""

    def __init__(self, rule: Rule | None = None, most: int = MAX_PATTERNS) -> None:
        self._rule = rule
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, name: str, template: str = "") -> str:
        found = self._rule(_without_permit(name), template) if self._rule else None
        pattern = found or template or pattern_of(name)
        if pattern in self._known:
            return pattern
        with self._lock:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(pattern)
        return pattern


class Metrics:
    """The metrics in one registry, updated by Django signals."""

    def __init__(self, registry: CollectorRegistry, patterns: Patterns) -> None:
        self._registry = registry
        self._patterns = patterns
        self._all: list[Counter | Histogram] = []
        self._acquisitions = self._counter("acquisitions", "Acquired locks.")
        self._conflicts = self._counter("conflicts", "Failed acquires of held locks.")
        self._waits = self._histogram("wait", "Seconds from request to answer.", WAITS, "outcome")
        self._holds = self._histogram("hold", "Seconds from grant to release or loss.", HOLDS)
        self._losses = self._counter("losses", "Lost leases.")
        self._rejected = self._counter(
            "rejected_writes", "Rejected stale writes and transactions of fenced models.", "reason"
        )
        self._forced = self._counter("forced_releases", "Locks released by force.")
        self._bypasses = self._counter(
            "bypasses", "Task runs without their lock because the lock service was unavailable."
        )
        self._renewals = self._counter("renewals", "Attempts to renew a lease.", "outcome")

    def _counter(self, name: str, what: str, *more: str) -> Counter:
        made = Counter(f"fencedlock_{name}", what, (*LABELS, *more), registry=self._registry)
        self._all.append(made)
        return made

    def _histogram(self, name: str, what: str, bounds: Sequence[float], *more: str) -> Histogram:
        name, labels = f"fencedlock_{name}_seconds", (*LABELS, *more)
        made = Histogram(name, what, labels, registry=self._registry, buckets=bounds)
        self._all.append(made)
        return made

    def connect(self) -> None:
        for signal, receiver in self._receivers():
            signal.connect(receiver, weak=False, dispatch_uid=_uid(receiver))

    def disconnect(self) -> None:
        """Stop counting, and unregister the metrics."""
        for signal, receiver in self._receivers():
            signal.disconnect(dispatch_uid=_uid(receiver))
        for metric in self._all:
            self._registry.unregister(metric)

    def _receivers(self) -> Iterator[tuple[Signal, Any]]:
        yield signals.lock_acquired, self._on_acquired
        yield signals.lock_not_acquired, self._on_not_acquired
        yield signals.lock_released, self._on_released
        yield signals.lock_lost, self._on_lost
        yield signals.lock_force_released, self._on_force_released
        yield signals.lock_bypassed, self._on_bypassed
        yield signals.leases_renewed, self._on_renewed
        yield signals.stale_write_rejected, self._on_stale_write
        yield signals.stale_transaction_rejected, self._on_stale_transaction

    def _on_acquired(self, lease: Lease, waited: float, **kwargs: Any) -> None:
        labels = self._labels(lease)
        self._acquisitions.labels(*labels).inc()
        self._waits.labels(*labels, "acquired").observe(waited)

    def _on_not_acquired(
        self, alias: str, name: str, pattern: str, waited: float, **kwargs: Any
    ) -> None:
        labels = (alias, self._patterns.of(name, pattern))
        self._conflicts.labels(*labels).inc()
        self._waits.labels(*labels, "conflict").observe(waited)

    def _on_released(self, lease: Lease, **kwargs: Any) -> None:
        self._holds.labels(*self._labels(lease)).observe(lease.held_for())

    def _on_lost(self, lease: Lease, **kwargs: Any) -> None:
        labels = self._labels(lease)
        self._losses.labels(*labels).inc()
        self._holds.labels(*labels).observe(lease.held_for())

    def _on_force_released(self, alias: str, name: str, **kwargs: Any) -> None:
        self._forced.labels(alias, self._patterns.of(name)).inc()

    def _on_bypassed(self, alias: str, name: str, pattern: str, **kwargs: Any) -> None:
        self._bypasses.labels(alias, self._patterns.of(name, pattern)).inc()

    def _on_renewed(
        self, leases: Sequence[Lease], answers: Sequence[Renewal], **kwargs: Any
    ) -> None:
        tally = Tally(
            (*self._labels(lease), _OUTCOMES[answer])
            for lease, answer in zip(leases, answers, strict=True)
        )
        for labels, times in tally.items():
            self._renewals.labels(*labels).inc(times)

    def _on_stale_write(
        self, sender: Any, name: str, alias: str, reason: str, **kwargs: Any
    ) -> None:
        pattern = self._patterns.of(name, sender.fencing.pattern)
        self._rejected.labels(alias, pattern, reason).inc()

    def _on_stale_transaction(self, lease: Lease, **kwargs: Any) -> None:
        self._rejected.labels(*self._labels(lease), "stale").inc()

    def _labels(self, lease: Lease) -> tuple[str, str]:
        return lease.alias, self._patterns.of(lease.name, lease.pattern)


def _uid(receiver: Any) -> str:
    return f"django_fencedlock.contrib.prometheus.{receiver.__name__}"


_installed: Metrics | None = None


def install(
    *,
    registry: CollectorRegistry = REGISTRY,
    pattern: Rule | None = None,
    most_patterns: int = MAX_PATTERNS,
) -> None:
    """
    Count from now on. A further call replaces the former metrics.

    Args:
        registry: The registry of the metrics.
        pattern: Returns the pattern of a lock name and its template (empty if it has none), or
            None for the default.
        most_patterns: The maximum number of patterns; locks of all others count as ``other``.
    """
    global _installed
    uninstall()
    _installed = Metrics(registry, Patterns(pattern, most_patterns))
    _installed.connect()


def uninstall() -> None:
    """Stop counting, and unregister the metrics."""
    global _installed
    if _installed is not None:
        _installed.disconnect()
        _installed = None
