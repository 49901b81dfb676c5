"""The metrics, and the signals that they are counted by."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal

from ... import signals
from ...backends.base import Renewal
from ...lease import Lease
from ..patterns import MOST, Patterns, Rule

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
except ImportError as exc:
    raise ImproperlyConfigured(
        "django_fencedlock.contrib.prometheus needs prometheus_client, which isn't installed. "
        "Run: pip install 'django-fencedlock[prometheus]'"
    ) from exc

LABELS = ("alias", "pattern")
#: Upper bounds in seconds: a free lock takes a millisecond, and work under a lock takes hours.
WAITS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
HOLDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)

_OUTCOMES = {Renewal.KEPT: "ok", Renewal.UNKNOWN: "failed", Renewal.LOST: "refused"}


class Metrics:
    """The metrics in one registry."""

    def __init__(self, registry: CollectorRegistry, patterns: Patterns) -> None:
        self._registry = registry
        self._patterns = patterns
        self._made: list[Counter | Histogram] = []
        self._acquisitions = self._counter("fencedlock_acquisitions", "Locks that were taken.")
        self._conflicts = self._counter(
            "fencedlock_conflicts",
            "Locks that somebody else had for as long as they were waited for.",
        )
        self._waits = self._histogram(
            "fencedlock_wait_seconds", "From asking for a lock to the answer.", WAITS, "outcome"
        )
        self._holds = self._histogram(
            "fencedlock_hold_seconds",
            "From the grant of a lock to its release, or its loss.",
            HOLDS,
        )
        self._losses = self._counter("fencedlock_losses", "Leases that were lost.")
        self._refused_writes = self._counter(
            "fencedlock_refused_writes",
            "Writes and transactions that were refused, a newer grant having been recorded.",
        )
        self._forced_releases = self._counter(
            "fencedlock_forced_releases",
            "Locks that this process took from their holders by force.",
        )
        self._bypasses = self._counter(
            "fencedlock_bypasses",
            "Runs of tasks that went on without their lock, as its service failed.",
        )
        self._renewals = self._counter("fencedlock_renewals", "Tries to renew a lease.", "outcome")

    def _counter(self, name: str, what: str, *more: str) -> Counter:
        made = Counter(name, what, (*LABELS, *more), registry=self._registry)
        self._made.append(made)
        return made

    def _histogram(self, name: str, what: str, bounds: Sequence[float], *more: str) -> Histogram:
        made = Histogram(
            name,
            what,
            (*LABELS, *more),
            registry=self._registry,
            buckets=bounds,
        )
        self._made.append(made)
        return made

    def connect(self) -> None:
        """Count from now on."""
        for signal, receiver in self._receivers():
            signal.connect(receiver, weak=False, dispatch_uid=_uid(receiver))

    def disconnect(self) -> None:
        """Count no more, and leave the registry."""
        for signal, receiver in self._receivers():
            signal.disconnect(dispatch_uid=_uid(receiver))
        for metric in self._made:
            self._registry.unregister(metric)

    def _receivers(self) -> Iterator[tuple[Signal, Any]]:
        yield signals.lock_acquired, self._acquired
        yield signals.lock_not_acquired, self._not_acquired
        yield signals.lock_released, self._released
        yield signals.lock_lost, self._lost
        yield signals.lock_force_released, self._force_released
        yield signals.lock_bypassed, self._bypassed
        yield signals.leases_renewed, self._renewed
        yield signals.stale_write_rejected, self._write_refused
        yield signals.stale_transaction_rejected, self._transaction_refused

    def _acquired(self, lease: Lease, waited: float, **kwargs: Any) -> None:
        labels = self._labels(lease)
        self._acquisitions.labels(*labels).inc()
        self._waits.labels(*labels, "acquired").observe(waited)

    def _not_acquired(
        self, alias: str, name: str, pattern: str, waited: float, **kwargs: Any
    ) -> None:
        labels = (alias, self._patterns.of(name, pattern))
        self._conflicts.labels(*labels).inc()
        self._waits.labels(*labels, "conflict").observe(waited)

    def _released(self, lease: Lease, **kwargs: Any) -> None:
        self._holds.labels(*self._labels(lease)).observe(lease.held_for())

    def _lost(self, lease: Lease, **kwargs: Any) -> None:
        labels = self._labels(lease)
        self._losses.labels(*labels).inc()
        self._holds.labels(*labels).observe(lease.held_for())

    def _force_released(self, alias: str, name: str, **kwargs: Any) -> None:
        self._forced_releases.labels(alias, self._patterns.of(name)).inc()

    def _bypassed(self, alias: str, name: str, pattern: str, **kwargs: Any) -> None:
        self._bypasses.labels(alias, self._patterns.of(name, pattern)).inc()

    def _renewed(self, leases: Sequence[Lease], answers: Sequence[Renewal], **kwargs: Any) -> None:
        tally = Tally(
            (*self._labels(lease), _OUTCOMES[answer])
            for lease, answer in zip(leases, answers, strict=True)
        )
        for labels, times in tally.items():
            self._renewals.labels(*labels).inc(times)

    def _write_refused(self, sender: Any, name: str, alias: str, **kwargs: Any) -> None:
        self._refused_writes.labels(alias, self._patterns.of(name, sender.fencing.pattern)).inc()

    def _transaction_refused(self, lease: Lease, **kwargs: Any) -> None:
        self._refused_writes.labels(*self._labels(lease)).inc()

    def _labels(self, lease: Lease) -> tuple[str, str]:
        return lease.alias, self._patterns.of(lease.name, lease.pattern)


def _uid(receiver: Any) -> str:
    return f"django_fencedlock.contrib.prometheus.{receiver.__name__}"


_installed: Metrics | None = None


def install(
    *,
    registry: CollectorRegistry = REGISTRY,
    pattern: Rule | None = None,
    most_patterns: int = MOST,
) -> None:
    """
    Count from now on. Called again, it begins anew, with other arguments.

    Args:
        registry: Where the metrics are registered.
        pattern: Makes a pattern of a lock's name and of the template that the code wrote (empty
            if it wrote none). None goes by the rule.
        most_patterns: So many patterns are told apart; the rest is counted as ``other``.
    """
    global _installed
    uninstall()
    _installed = Metrics(registry, Patterns(pattern, most_patterns))
    _installed.connect()


def uninstall() -> None:
    """Count no more, and take the metrics out of their registry."""
    global _installed
    if _installed is not None:
        _installed.disconnect()
        _installed = None
