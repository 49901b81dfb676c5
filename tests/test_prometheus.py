"""The metrics, as Prometheus would read them."""

import re
import time
import uuid

import pytest
from django.apps import apps
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_fencedlock import LeaseLost, LockNotAcquired, force_release, lock, signals
from django_fencedlock.backends.interface import Renewal
from django_fencedlock.celery import single_instance
from django_fencedlock.contrib.prometheus import OTHER, Patterns, install, pattern_of, uninstall
from django_fencedlock.core import runtime
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable, StaleFence, StaleObject
from django_fencedlock.models import Fence
from django_fencedlock.test import hold_lock, lose_lease
from tests.backends import ETCD, REDIS
from tests.models import Account, Invoice, LedgerLine, Stock
from tests.scripts import run_python
from tests.test_docs import REFERENCE, _table
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    install(registry=registry)
    yield registry
    uninstall()


def read(registry, name, **labels):
    return registry.get_sample_value(name, {"alias": "default", **labels})


def test_acquired_locks_and_conflicts(registry):
    with lock("invoice:42"), lock("invoice:42"):
        assert read(registry, "fencedlock_hold_seconds_count", pattern="invoice:*") is None
    with lock("invoice:43"):
        pass
    assert read(registry, "fencedlock_acquisitions_total", pattern="invoice:*") == 2
    assert read(registry, "fencedlock_hold_seconds_count", pattern="invoice:*") == 2
    waits = {"pattern": "invoice:*", "outcome": "acquired"}
    assert read(registry, "fencedlock_wait_seconds_count", **waits) == 2
    assert 0 < read(registry, "fencedlock_wait_seconds_sum", **waits) < 10
    assert read(registry, "fencedlock_conflicts_total", pattern="invoice:*") is None
    with hold_lock("invoice:42", let_wait=True):
        with pytest.raises(LockNotAcquired), lock("invoice:42", blocking_timeout=0.2):
            pass
        assert lock("invoice:42").acquire(blocking=False) is None
    assert read(registry, "fencedlock_conflicts_total", pattern="invoice:*") == 2
    waits = {"pattern": "invoice:*", "outcome": "conflict"}
    assert read(registry, "fencedlock_wait_seconds_sum", **waits) > 0.2


def test_all_permits_count_for_their_lock(registry):
    """As refusals do, which no permit has."""
    with pytest.raises(LeaseLost), lock("gpu:7", limit=1) as lease:
        elsewhere(lock("gpu:7", limit=1).acquire, blocking=False)
        force_release(lease.name, by="a test")
    for name in ("acquisitions", "conflicts", "forced_releases"):
        assert read(registry, f"fencedlock_{name}_total", pattern="gpu:*")
    assert "permit" not in generate_latest(registry).decode()


def test_the_alias_of_a_service_with_queues_is_a_label(registry, settings, shared_etcd):
    shared_etcd.empty()
    settings.FENCEDLOCK = {"default": {}, "queues": {"BACKEND": ETCD, "LOCATION": shared_etcd.url}}
    with lock("invoice:42", backend="queues") as lease:
        elsewhere(lock("invoice:42", backend="queues").acquire, blocking=False)
        lease.renew()
    labels = {"alias": "queues", "pattern": "invoice:*"}
    for name in ("acquisitions_total", "conflicts_total", "hold_seconds_count"):
        assert registry.get_sample_value(f"fencedlock_{name}", labels) == 1
    for outcome in ("acquired", "conflict"):
        waits = {**labels, "outcome": outcome}
        assert registry.get_sample_value("fencedlock_wait_seconds_count", waits) == 1


def test_templates_are_the_patterns(registry):
    @lock("report:{user}")
    def report(user):
        """Does nothing."""

    report("ann")
    report("bob")
    with Stock.fencing.lock(sku="A"), Invoice.fencing.lock(pk=7):
        pass
    for pattern, times in (("report:{user}", 2), ("stock:{sku}", 1), ("tests.invoice:{pk}", 1)):
        assert read(registry, "fencedlock_acquisitions_total", pattern=pattern) == times
    with hold_lock("report:eve"), pytest.raises(LockNotAcquired):
        lock("report:{user}", blocking_timeout=0)(lambda user: None)("eve")
    assert read(registry, "fencedlock_conflicts_total", pattern="report:{user}") == 1


def test_a_loss_ends_the_holding(registry):
    with pytest.raises(LeaseLost), lock("invoice:42") as lease:
        lose_lease(lease)
    assert read(registry, "fencedlock_losses_total", pattern="invoice:*") == 1
    assert read(registry, "fencedlock_hold_seconds_count", pattern="invoice:*") == 2


def test_rejected_writes_and_transactions(registry):
    line = LedgerLine(account_id=7)
    with pytest.raises(LeaseLost), LedgerLine.fencing.lock(account_id=7) as lease:
        lose_lease(lease)
        with hold_lock("account:7"), pytest.raises(StaleFence):
            line.save()
        with pytest.raises(LeaseLost), lease.atomic():
            pass
    stale = {"reason": "stale"}
    refused = {"pattern": "account:{account_id}"}
    assert read(registry, "fencedlock_rejected_writes_total", **refused, **stale) == 1
    with lock("close") as lease:
        # A grant that this process hasn't noticed yet.
        Fence.objects.filter(name="close").update(token=99, owner="else")
        with pytest.raises(StaleFence), lease.atomic():
            pass
    assert read(registry, "fencedlock_rejected_writes_total", pattern="close", **stale) == 1


@pytest.mark.django_db(transaction=True)
def test_an_object_that_was_read_before_its_lock_has_another_reason(registry):
    with LedgerLine.fencing.lock(account_id=7):
        line = LedgerLine.objects.create(account=Account.objects.create(pk=7))
    with LedgerLine.fencing.lock(account_id=7):
        LedgerLine.objects.update(amount=1)
    with LedgerLine.fencing.lock(account_id=7), pytest.raises(StaleObject):
        line.save()
    found = {"pattern": "account:{account_id}", "reason": "read_before_lock"}
    assert read(registry, "fencedlock_rejected_writes_total", **found) == 1


def test_forced_releases(registry):
    assert not force_release("invoice:42", by="the boss").done
    lease = lock("invoice:42").acquire()
    for _ in range(2):
        force_release("invoice:42", by="the boss", owner_id=lease.owner_id)
    assert read(registry, "fencedlock_forced_releases_total", pattern="invoice:*") == 1


def test_runs_without_their_lock(registry, celery_app, settings, make_redis):
    server = make_redis()
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}

    @celery_app.task
    @single_instance("report:{user}", fenced=False, on_backend_error="run")
    def report(user):
        return user

    bypasses = {"pattern": "report:{user}"}
    assert report("ann") == "ann"
    assert read(registry, "fencedlock_bypasses_total", **bypasses) is None
    server.kill()
    assert [report("ann"), report("bob")] == ["ann", "bob"]
    assert read(registry, "fencedlock_bypasses_total", **bypasses) == 2


def test_renewals_by_hand_and_by_the_keeper(registry, monkeypatch):
    keeper = service("default").keeper
    # Driven from here alone: its thread may only now begin with what is due.
    monkeypatch.setattr(keeper._thread, "start", lambda: True)
    with lock("invoice:1", ttl=60) as one, lock("invoice:2", ttl=60) as two:
        one.renew()
        for lease in (one, two):
            keeper._due[lease] = 0.0
        keeper.tick()
        runtime.worker.finish(60)
        renewals = {"pattern": "invoice:*"}
        assert read(registry, "fencedlock_renewals_total", outcome="ok", **renewals) == 3
        unknown = lambda grants: [Renewal.UNKNOWN] * len(grants)  # noqa: E731
        monkeypatch.setattr(service("default").backend, "renew", unknown)
        with pytest.raises(BackendUnavailable):
            one.renew()
        assert read(registry, "fencedlock_renewals_total", outcome="failed", **renewals) == 1


def test_patterns_are_limited_and_a_function_may_return_them(registry):
    install(registry=registry, pattern=lambda name, template: name.upper(), most_patterns=1)
    for name in "abc":
        with lock(name):
            pass
    assert read(registry, "fencedlock_acquisitions_total", pattern="A") == 1
    assert read(registry, "fencedlock_acquisitions_total", pattern="other") == 2


def test_hostile_patterns_stay_one_label(registry):
    names = ['a"} x\nevil x', "b\\", 'c"', "{d}", "e\r\n# TYPE x gauge", "\u2028", "{alias}", "é🔒"]
    for name in names:
        with lock(name):
            pass
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    found = [each.labels["pattern"] for each in samples if each.name.endswith("hold_seconds_count")]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize(
    "hard", ["a" * 200, "a1" * 100, "1" * 199 + "g", "abcdef0-" * 25, "a-" * 100]
)
def test_no_name_slows_the_pattern_down(hard):
    began = time.process_time()
    for _ in range(1000):
        pattern_of(hard)
    assert time.process_time() - began < 5


def test_receivers_are_connected_only_while_installed():
    uninstall()  # The docs' own code may have run before.
    heard = [signals.lock_acquired, signals.lock_released, signals.leases_renewed]
    before = [len(signal.receivers) for signal in heard]
    install(registry=CollectorRegistry())
    assert [len(signal.receivers) for signal in heard] == [count + 1 for count in before]
    uninstall()
    assert [len(signal.receivers) for signal in heard] == before


def test_the_app_installs_them_in_the_default_registry(settings):
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "django_fencedlock.contrib.prometheus"]
    try:
        assert apps.get_app_config("fencedlock_prometheus").label
        with lock("x"):
            pass
        sample = b'fencedlock_acquisitions_total{alias="default",pattern="x"} 1.0'
        assert sample in generate_latest(REGISTRY)
    finally:
        uninstall()
    assert b"fencedlock" not in generate_latest(REGISTRY)


@pytest.mark.slow
def test_the_error_for_a_missing_client_names_the_remedy():
    script = """
import sys
sys.modules["prometheus_client"] = None
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_fencedlock", "django_fencedlock.contrib.prometheus"])
django.setup()
"""
    done = run_python(code=script, check=False)
    assert "ImproperlyConfigured" in done.stderr
    assert "pip install 'django-fencedlock[prometheus]'" in done.stderr


PAGE = REFERENCE / "monitoring.md"


def exported(registry):
    with lock("x"):
        pass
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    samples = {sample.name for family in families for sample in family.samples}
    metrics = {}
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        collector = registry._names_to_collectors[metric.name]
        metrics[name] = [metric.type, ", ".join(collector._labelnames)]
    for name, (kind, _) in metrics.items():
        ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        samples |= {f"{name}{end}" for end in ends}
    return metrics, samples


def test_the_table_is_what_is_exported(registry):
    table = _table(PAGE, "| metric | kind | labels | meaning |")
    metrics, _ = exported(registry)
    assert {row[0]: row[1:3] for row in table} == metrics


def test_the_alert_rules_ask_for_what_is_exported(registry):
    rules = PAGE.read_text().split("```yaml")[1].split("```")[0]
    asked = set(re.findall(r"\bfencedlock_\w+", rules))
    metrics, samples = exported(registry)
    assert asked <= samples
    assert len(asked) >= len(metrics) - 1
    for outcome in re.findall(r'outcome="(\w+)"', rules):
        assert f"`{outcome}`" in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("nightly-close", "nightly-close"),
        ("invoice:42", "invoice:*"),
        ("report:2026-11-18", "report:*-*-*"),
        ("shard12:row7", "shard*:row*"),
        (f"order:{uuid.UUID(int=7)}", "order:*"),
        (f"order:{uuid.UUID(int=7).hex}", "order:*"),
        ("order_8f14e45fceea167a", "order_*"),
        ("commit:DEADBEE1", "commit:*"),
        ("cafebabe", "cafebabe"),
        ("backup2026", "backup*"),
        ("upload:01ARZ3NDEKTSV4RRFFQ69G5FAV", "upload:*"),
        ("konto:ärger٣", "konto:ärger٣"),
        ("gpu [permit 2]", "gpu"),
        ("account:7 [permit 1000]", "account:*"),
    ],
)
def test_the_parts_that_differ_by_row_become_a_star(name, pattern):
    assert pattern_of(name) == pattern


def test_a_function_decides_before_the_template_and_the_template_before_the_rule():
    assert Patterns().of("stock:A-1", "stock:{sku}") == "stock:{sku}"
    patterns = Patterns(lambda name, template: template.upper() or None)
    assert patterns.of("stock:A-1", "stock:{sku}") == "STOCK:{SKU}"
    assert patterns.of("stock:1") == "stock:*"
    assert Patterns(lambda name, template: name).of("stock:1 [permit 3]") == "stock:1"
    patterns = Patterns(most=2)
    assert {patterns.of(f"{letter}:1") for letter in "abcdefg"} == {"a:*", "b:*", OTHER}
    assert patterns.of("a:2") == "a:*"
